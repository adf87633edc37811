"""`Program`: a function of batches of one form, which is run, captured, replayed and checked."""

import contextlib
import traceback
from typing import Any, NamedTuple
import warnings

import numpy

import chainer

from chainer_bspmm.training import guards, snapshot
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.effects import Effects, shapes
from chainer_bspmm.training.leftovers import read_by_the_next_run
from chainer_bspmm.training.reports import host_numbers, Reports
from chainer_bspmm.training.session import Session
from chainer_bspmm.training.size_branches import branch_on_size
from chainer_bspmm.training.snapshot import NoSnapshot, ParameterMissing, Snapshot
from chainer_bspmm.training.staging import Inputs
from chainer_bspmm.training.work import Work
from chainer_bspmm.compat.user_code import is_user_code

# If a kernel adds with atomics, two runs differ by rounding, and are compared with this tolerance.
NONDETERMINISTIC = 1e-3
# Some kernels add with atomics and give no warning, such as chainer.functions.get_item's. To detect
# them, a step that differs is run eagerly so many times.
REPEATS = 8
# Parameters are changed by these multiples of their rounding errors. Only results that are nothing
# but rounding errors themselves differ after that.
FEW_ROUNDINGS = 8, 24, 56
SPARE_ROWS = 'spare rows at the end of a batch, which belong to no molecule, change %s: %s'
TAKE_BATCH = '__call__', 'forward'  # methods whose arguments are arrays of a batch
BRANCH = (
    'the %s compares a size of its batch, "%s" in %s, but when captured its buffers may be larger '
    'than the batch'
)
ON_HOST = '%s is reported as a value on the host, which a replay would repeat'


class Trial(NamedTuple):
    """Everything that is compared between the runs of :meth:`Program.try_out`."""

    summary: dict  # of the results, by `Work.summary`
    numbers: dict  # reported numbers on the host
    moment: Any  # what is watched, after the run; None if the work can change nothing
    kept: dict  # shapes of the arrays that the run has assigned, by the text for each place


class StepDiffers(RuntimeError):
    """A replayed step and the same step run eagerly gave different results.

    Attributes:
        reported (dict): the values that the eager step reported.
    """

    def __init__(self, message: str, reported: dict | None = None):
        super().__init__(message)
        self.reported = reported or {}


class Program:
    """A training step or a prediction for batches of one form.

    The first batch is tried out (:meth:`try_out`), which leaves no trace, and run eagerly
    (:meth:`run`). At the second batch it is captured (:meth:`capture`), which leaves no trace
    either. The second batch and all later ones are replayed (:meth:`replay`). Some replays are
    checked.
    """

    def __init__(self, session: Session, work: Work, batch, capacity):
        self._session = session
        self.work = work
        self._inputs = Inputs(session, batch, capacity, work.n_numbers)
        self._reports = Reports(session.device)
        self._graphs = []  # functions that launch the graphs, to be called in this order
        self._results = {}  # name -> array that the graphs write
        self._copied = []  # names of results that the next replay would overwrite
        self._effects = Effects([])
        self._is_tried = False
        self._is_deterministic = True
        self._n_replays = 0

    @property
    def is_captured(self):
        return bool(self._graphs)

    def stage(self, batch, counter=0, numbers=None):
        """Send a batch, the number of the step and the optimizer's numbers, for one launch."""
        row_address = self._reports.next_row()
        self._inputs.send(batch, counter, numbers, row_address, by_graph=self.is_captured)

    def rehearse(self, batch, counter):
        """Send a batch for runs that are undone, with an update of size 0."""
        n_numbers = self.work.n_numbers
        self.stage(batch, counter, None if n_numbers is None else numpy.zeros(n_numbers))

    def is_check_due(self):
        """Return whether the next replay is compared with the eager step."""
        number = self._n_replays + 1
        is_power = number & (number - 1) == 0
        return (is_power and number <= 1024) or not number % self._session.check_every

    # Eager runs.

    def run(self, batch):
        """Run a staged batch eagerly; return its results by name.

        It is run in the buffers, so that a replay gives the same bits. But if no trial has shown
        yet that spare rows change nothing, it is run without spare rows. CannotCapture: the run has
        failed, and was undone.
        """
        before = self._snapshot_of_run()
        arrays = None if self._is_tried else batch.arrays_on(self._session.device)
        try:
            with self._session.capturer.ordered():
                return self._eagerly(arrays)
        except Exception as error:
            before.restore()
            raise CannotCapture(blame(error, self._session.function)) from error

    def compile_kernels(self, batch):
        """Compile the kernels of a staged batch, several at a time, and make its parameters."""
        # No kernel runs here, so arrays hold no values. A user's code may keep such arrays, for
        # example as constants, so nothing is compiled in advance if there is any.
        session = self._session
        if session.guards.has_user_code:
            return

        def compute():
            self.work.load_kernels()
            # The batch in the buffers is used, because an ordinary matrix would cache matrices that
            # are derived from it, here without values.
            self._compute(None, 'captured', alone=True)

        # An error is ignored, because the run will raise it again.
        with session.capturer.ordered(), contextlib.suppress(Exception):
            before = self._snapshot()
            if before.has_lazy_parameters:
                with before.undone():  # the computation ends at the first lazy parameter
                    session.capturer.compile_kernels(compute)
                try:
                    self._compute(batch.arrays_on(session.device), 'forward', alone=True)
                finally:
                    before.restore_arrays()
            with self._snapshot().undone():
                session.capturer.compile_kernels(compute)

    def try_out(self, batch):
        """Run a staged batch twice without spare rows, then in the buffers; undo all runs.

        CannotCapture: the step changes values that it reads, is random, compares a size of its
        batch, or is changed by rows that belong to no molecule. ParameterMissing: it cannot be
        tried out, because a parameter has not been made yet.
        """
        if self._is_tried:
            return
        session, work = self._session, self.work
        reach = session.guards.reach
        if reach.cannot:
            raise CannotCapture('a check would ' + reach.cannot[0])
        for function in reach.functions.values():
            takes_batch = function is session.function or function.__name__ in TAKE_BATCH
            branch = branch_on_size(function.__code__, takes_batch)
            if branch is not None:
                raise CannotCapture(BRANCH % (work.name, branch, function.__qualname__))
        arrays = batch.arrays_on(session.device)
        before = self._snapshot_of_run()
        with session.capturer.ordered(), before.undone():
            # The second run has separate arrays, because the first may have written to its own.
            first, again, in_buffers = [
                self._observed(arguments, before)
                for arguments in (arrays, batch.arrays_on(session.device), None)
            ]
            changed = self._may_change and again.moment.change(first.moment)
            if changed:
                raise CannotCapture('the %s changes %s at every run' % (work.name, changed))
            if work.refusal is not None:
                raise CannotCapture(work.refusal)
            unlike = work.difference(again.summary, first.summary)
            if not unlike:
                self._refuse_other_numbers(again.numbers, first.numbers)
                differs = work.difference(in_buffers.summary, first.summary)
                if differs and self._is_rounding(arrays, before, first.summary):
                    differs = None
                differs = differs or snapshot.difference(in_buffers.numbers, first.numbers, 0)
                if differs:
                    raise CannotCapture(
                        SPARE_ROWS % (differs, 'a link or the loss treats every row as an atom')
                    )
                if self._may_change:
                    differs = in_buffers.moment.change_of_values(first.moment)
                kept = in_buffers.kept
                others = (text for text in first.kept if kept.get(text) != first.kept[text])
                differs = differs or next(others, None)
                if differs:
                    cause = 'the %s keeps arrays or sizes of the batch' % work.name
                    raise CannotCapture(SPARE_ROWS % (differs, cause))
        if unlike:  # the state is again the one before the first run
            cause = self._why_unlike(arrays, first.summary)
            raise CannotCapture('two runs of one batch differ in %s: %s' % (unlike, cause))
        if self._may_change:
            # The last run had other arrays, so attributes that keep some of a batch are outputs.
            session.guards.ignore(*in_buffers.moment.outputs(again.moment))
        self._is_tried = True

    def _observed(self, arrays, before):
        """Run the work as :meth:`_trial` does; return a `Trial`."""
        summary, numbers = self._trial(arrays, before)
        guards = self._session.guards
        moment = guards.moment() if self._may_change else None
        kept = shapes(before.assignments()) if guards.has_user_code else {}
        return Trial(summary, numbers, moment, kept)

    def _trial(self, arrays, before):
        """Run the work; return its summary, and the `host_numbers` reported; put arrays back."""
        try:
            results = self._compute(arrays, 'trial', alone=True)
        except (CannotCapture, ParameterMissing):
            raise
        except Exception as error:
            raise CannotCapture(blame(error, self._session.function)) from error
        self._refuse_host_values(results)
        self._refuse_host_changes(before)
        summary = snapshot.copies(self.work.summary(self._on_device(results)))
        before.restore_arrays()
        return summary, host_numbers(results)

    def _why_unlike(self, arrays, first):
        """Return a clause that says why two runs differ; `first` is the summary of the first."""

        def is_like_the_first(before):
            summary, _ = self._trial(arrays, before)
            return not self.work.difference(summary, first)

        name = None
        if self._may_change:
            with self._session.capturer.ordered():
                name = read_by_the_next_run(self._snapshot, is_like_the_first)
        if name is not None:
            names = self.work.name, name, self.work.name
            return 'the %s reads %s, which the %s before it has assigned' % names
        return (
            'something in Python changes that is not watched, such as a counter, or the model '
            'draws random numbers in another way than chainer.functions.dropout'
        )

    def _is_rounding(self, arrays, before, first):
        """Return whether rounding of the parameters alone makes trials differ: sums may cancel."""
        if not self.work.changes_parameters:
            return False
        for n_roundings in FEW_ROUNDINGS:
            for param in self._session.target.params(include_uninit=False):
                param.array *= 1 + n_roundings * numpy.finfo(param.dtype).eps
            summary, _ = self._trial(arrays, before)
            if self.work.difference(summary, first):
                return True
        return False

    @contextlib.contextmanager
    def under_way(self):
        """Context in which code runs eagerly, with the kernels of the step that was staged last."""
        with self._session.capturer.ordered(), self.work.under_way(self._inputs.step, alone=True):
            yield

    # Captured runs.

    def capture(self):
        """Capture the work; nothing runs, and nothing in Python changes."""
        halves = [self._compute_and_report]
        if self.work.is_split:
            halves.append(self._complete)
        before = self._snapshot()
        with before.undone(with_caches=False):
            before.move_generators()
            launches = [self._captured(half) for half in halves]
            graphs, (results, *_) = zip(*launches)
            self._refuse_host_values(results)
            # The effects hold the arrays that the graph writes, so that no other graph takes their
            # memory.
            self._effects = Effects(
                before.changes(),
                before.lasting_arrays(),
                before.is_known,
                self._session.gives_copies,
            )
            drawn = before.changed_generator()
            # Two trials of a step that seeds a generator are alike, but here the generator was
            # moved before.
            if drawn is not None:
                text = 'the %s changes %s at every run'
                raise CannotCapture(text % (self.work.name, drawn))
        self._results = results
        if self.work.copies_results:
            arrays = self._on_device(results)
            self._copied = list(arrays.keys() - self._reports.among(arrays).keys())
        self._graphs = list(graphs)

    def capture_alone(self):
        """Capture this rank's part and drop it: a failure later would leave other ranks waiting."""
        with self._snapshot().undone():
            self._captured(lambda: self._compute(None, 'captured', alone=True))

    def _captured(self, half):
        """Capture a part of the work; return the function that launches it, and its results."""
        try:
            return self._session.capturer.capture(half)
        except ParameterMissing:
            raise
        except Exception as error:
            raise CannotCapture(blame(error, self._session.function)) from error

    def _snapshot(self):
        guards = self._session.guards
        try:
            return Snapshot(
                self._session.target,
                guards.reach,
                self.work.changes_parameters,
                guards.has_user_code,
            )
        except MemoryError:
            raise
        except Exception as error:  # an object of a user may raise anything when it is read
            text = 'the state that the %s may change cannot be saved: %s: %s'
            words = self.work.name, type(error).__name__, error
            raise CannotCapture(text % words) from error

    def _snapshot_of_run(self):
        """Return a snapshot of everything that a run of the work may change."""
        return self._snapshot() if self._may_change else NoSnapshot()

    @property
    def _may_change(self):
        # A prediction by a library's code alone changes nothing that a prediction reads.
        return self.work.changes_parameters or self._session.guards.has_user_code

    def _on_device(self, results):
        """Select the arrays on the device among results."""
        kind = self._session.device.xp.ndarray
        return {name: value for name, value in results.items() if isinstance(value, kind)}

    def _refuse_host_values(self, results):
        """Raise CannotCapture for a result that is neither on the device nor a plain number."""
        known = self._on_device(results).keys() | host_numbers(results).keys()
        for name in results:
            if name not in known:
                raise CannotCapture(ON_HOST % name)

    def _refuse_other_numbers(self, numbers, before):
        """Raise CannotCapture if a number that is reported from the host differs from before."""
        # All that a step reads from Python is watched. So a number that two runs report alike is
        # the same in every replay, and checks compare it with the number that an eager step
        # reports.
        for name in {**before, **numbers}:
            are_both = name in before and name in numbers
            if not are_both or not snapshot.has_same_bits(numbers[name], before[name]):
                raise CannotCapture(ON_HOST % name)

    def _refuse_host_changes(self, before):
        """Raise CannotCapture if a run wrote to an array on the host, which a graph would not."""
        xp = self._session.device.xp
        for name, array in before.arrays.items():
            if not isinstance(array, xp.ndarray) and before.has_changed(name):
                text = 'the %s changes the array %s on the host at every run'
                raise CannotCapture(text % (self.work.name, name))

    def would_overwrite(self, is_untouched):
        """Return whether a replay would write to arrays of the last one that somebody keeps.

        `is_untouched`: no other code has run since that replay, so nobody does.
        """
        if is_untouched:
            self._effects.are_untouched()
            return False
        return self._effects.are_kept(guards.references)

    def replay(self):
        """Replay the staged batch; return its results by name.

        After StepDiffers the state is the eager step's; with several ranks it is the replay's.
        """
        is_due = self.is_check_due()
        self._n_replays += 1
        if is_due:
            return self._checked_replay()
        return self.launch()

    def launch(self):
        """Launch the graphs, and repeat what they leave in Python; return the results by name."""
        for i, graph in enumerate(self._graphs):
            if i:
                self.work.exchange()
            stream = graph()
            if not i:
                self._inputs.fetched(stream)
        self.work.is_done = True
        results = self._results_now()
        self._effects.repeat(self._results, results)
        return results

    def _checked_replay(self):
        self._session.capturer.join()  # the last step may still be running on another stream
        before = None
        try:
            before = self._snapshot_of_run()
            return self._compared(before)
        except MemoryError as error:  # CuPy's is a MemoryError
            self.work.is_done = False
            if before is not None:
                before.restore()
            text = 'there is no memory for the check of a replay: %s'
            raise CannotCapture(text % error) from error

    def _compared(self, before):
        """Replay the staged batch, and compare with an eager run from the same state.

        Raises StepDiffers if the results differ.
        """
        work = self.work
        results = self.launch()
        replayed = self._state(before, results)
        after = snapshot.Copies(before.arrays) if work.has_others else None
        sent = self._inputs.sent()
        eager_results, eager = self._again(before, sent)
        differs = snapshot.difference(replayed, eager, 0)
        if differs:
            self._is_deterministic = self._is_deterministic and not any(
                snapshot.difference(self._again(before, sent)[1], eager, 0) for _ in range(REPEATS)
            )
            if not self._is_deterministic:
                differs = snapshot.difference(replayed, eager, NONDETERMINISTIC)
        if after is not None:  # only the replay updated with all ranks, so its state is kept
            after.put_back(before.arrays)
            work.is_done = True
        how = 'differs from an eager one in %s: it reads something from'
        if not differs:
            numbers = host_numbers(results)
            differs = snapshot.difference(numbers, host_numbers(eager_results), 0)
            how = (
                'repeats a number that an eager one reports differently, %s: it depends on a '
                'value of'
            )
        if differs:
            cut = self._session.guards.reach.cut
            raise StepDiffers(
                'a replay of the captured %s %s Python that has changed since it was captured, and '
                'that is not watched%s (docs/captured_training.md)'
                % (work.name, how % differs, ', maybe ' + cut[0] if cut else ''),
                eager_results,
            )
        return results

    def _again(self, before, sent):
        """Run the staged batch eagerly from a state; return its results, and its :meth:`_state`.

        `sent`: copies of the batch. An attribute that keeps arrays of a batch has the memory of the
        inputs, in which the state has the batch of the step before.
        """
        self.work.is_done = False
        before.restore()
        self._inputs.send_again(sent)
        with self._session.capturer.ordered():
            results = self._eagerly(None, alone=self.work.has_others)
        return results, self._state(before, results)

    def _state(self, before, results):
        """Return `Copies` of the arrays, gradients and results after a run."""
        outcome = self.work.outcome(self._on_device(results))
        # With other ranks, only the data that this rank sends can be compared, not the update.
        if self.work.has_others:
            return snapshot.Copies(outcome)
        return snapshot.Copies({**before.arrays_now(), **outcome})

    def _results_now(self):
        """Return the results of the last replay."""
        results = {**self._results, **self._reports.numbers()}
        for name in self._copied:
            results[name] = results[name].copy()
        return results

    # Parts of both.

    def _eagerly(self, arrays, alone=False):
        """Run the work, and note whether its kernels warn that they are not deterministic."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            with chainer.using_config('warn_nondeterministic', True):
                results = self._compute(arrays, 'eager', alone)
                if not alone:
                    if self.work.is_split:
                        self.work.exchange()
                    self._complete()
        for warning in caught:
            if 'non-deterministic' in str(warning.message):
                self._is_deterministic = False
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return results

    def _compute(self, arrays, mode, alone=False):
        """Return the results for `arrays`, or for the batch in the buffers if they are None.

        `alone`: without other ranks.
        """
        # A user's code may keep arrays of an eager run's batch.
        are_separate = mode != 'captured' and self._session.guards.has_user_code
        with self.work.under_way(self._inputs.step, alone):
            arrays = arrays or self._inputs.arrays(are_separate)
            return self.work.compute(arrays, mode, alone)

    def _complete(self):
        self.work.complete(self._inputs.numbers)

    def _compute_and_report(self):
        self._inputs.fetch()
        results = self._compute(None, 'captured')
        # Reported values may be views of a parameter. So they are written after the update, as
        # `_eagerly` returns them then. With other ranks they are written before it, because only
        # results before the exchange of gradients are compared.
        if not self.work.has_others:
            self._complete()
        self._reports.write(self._reports.among(results), self._inputs.row_address)
        if self.work.has_others and not self.work.is_split:
            self._complete()
        return results


def blame(error, model):
    """Return a sentence about an exception: the link, the message, the place in the code."""
    place, link = None, None
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get('self')
        if isinstance(owner, chainer.Link):
            link = owner
        if place is None or is_user_code(frame.f_globals.get('__name__')):
            place = '%s, line %d, in %s' % (frame.f_code.co_filename, line, frame.f_code.co_name)
    where = 'the step'
    if link is not None:
        links = model.namedlinks() if isinstance(model, chainer.Link) else ()
        path = next((path for path, other in links if other is link), '')
        where = ('%s (%s)' % (path, type(link).__name__)).lstrip()
    return '%s cannot be captured: %s: %s (%s)' % (where, type(error).__name__, error, place)
