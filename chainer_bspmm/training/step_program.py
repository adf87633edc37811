"""One training step over buffers of a fixed layout: run eagerly, captured, replayed, checked."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from typing import TYPE_CHECKING

import numpy

import chainer

from chainer_bspmm.cuda.partial_sums import PendingSums
from chainer_bspmm.cuda.plans import VECTOR_BYTES
from chainer_bspmm.multi_node.statistics import weighted_by
from chainer_bspmm.training import chainer_nodes, state
from chainer_bspmm.training.programs import blame, CannotCapture, Program, spare_tolerance
from chainer_bspmm.training.programs import StepDiffers
from chainer_bspmm.training.reports import Reports

if TYPE_CHECKING:
    from chainer_bspmm.training.step_driver import StepDriver

# If a kernel adds with atomics, two runs differ by rounding. Steps whose kernels do not declare it,
# such as chainer.functions.get_item's, are recognised by running them eagerly this many times.
NONDETERMINISTIC = 1e-3
REPEATS = 8


class StepProgram(Program):
    """The training step of one layout of a batch."""

    n_first_checks = 16  # an error that is not found is trained on

    _driver: StepDriver
    _reports: Reports

    def __init__(self, driver: StepDriver, batch, capacity):
        n_numbers = None if driver.fused is None else driver.fused.n_numbers
        super().__init__(driver, batch, capacity, n_numbers)
        self._n_molecules = batch.form.n_graphs
        self._deterministic = True
        self._defers_sums = False  # found by a trial
        self._one = self._inputs.step.one = SeedGradient(driver.device)
        self._reports = Reports(driver.device)
        self._names = []  # of what the step reports
        self._copied = {}  # what is reported and is not a single number: name -> array
        self._update_graph = None  # launches it: with several ranks the update has its own
        self._gradients = []  # (path, parameter, array that the graph writes)
        self._attributes = []  # pairs (attributes of a link, those that the step assigns: a loss)

    def run(self, alone=False):
        """Run the staged step eagerly; alone: up to what needs other ranks; return its reports."""
        with self._driver.capturer.ordered(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            with chainer.using_config('warn_nondeterministic', True):
                reported, _ = self._compute(alone=alone)
        for warning in caught:
            if 'non-deterministic' in str(warning.message):
                self._deterministic = False
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return reported

    def check_spare_rows(self, ordinary, is_first):
        """Compare the losses of the staged batch with and without spare rows; change nothing."""
        # `ordinary` returns it without any, on the device. Kernels are compiled for the first
        # layout. What the loss raises leads to CannotCapture; the eager step raises it again.
        driver = self._driver
        arrays = state.state_arrays(driver.optimizer, driver.guards.owners)
        before = state.Copies(arrays)
        results = []
        with driver.capturer.ordered(), state.attributes_kept(driver.guards.owners):
            if is_first:
                self.compile_kernels(self._try)
            in_arrays = ordinary()
            for arguments in (in_arrays, in_arrays, None):
                if is_first and len(results) == 1:  # and parameters that were missing are made
                    self.compile_kernels(self._try)
                try:
                    with self._under_way(alone=True), _observed() as reported:
                        loss = driver.function(*(arguments or self._inputs.arrays()))
                        if arguments is None:
                            self._defers_sums = self._can_defer_sums(loss)
                    results.append(dict(_arrays_of(reported), loss=loss.array))
                except Exception as error:
                    raise CannotCapture(blame(error, driver.function)) from error
                finally:
                    before.put_back(arrays)
                del loss
        tolerance = spare_tolerance(results[0]['loss'].dtype, driver.target)
        differs = state.difference(results[1], results[0], tolerance)
        if differs:
            raise CannotCapture(
                'one batch gives another %s when it is run twice: the model draws random numbers '
                'from another generator than that of chainer.functions.dropout, or keeps what it '
                'calculated' % differs
            )
        differs = state.difference(results[2], results[0], tolerance)
        if differs:
            raise CannotCapture(
                'with rows that belong to no molecule at the end of a batch the model gives '
                'another %s: a link or the loss treats every row as an atom' % differs
            )

    def check_alone(self):
        """Run and capture this rank's part of the step that was staged; change nothing."""
        # A capture that fails later would leave other ranks waiting for this one.
        driver = self._driver
        arrays = state.state_arrays(driver.optimizer, driver.guards.owners)
        before = state.Copies(arrays)
        try:
            with state.attributes_kept(driver.guards.owners):
                self.run(alone=True)  # compiles what a capture should not
        finally:
            before.put_back(arrays)
        try:
            with state.untouched(driver.guards.owners, driver.guards.params):
                self._capture_step(functools.partial(self._compute, unchain=True, alone=True))
        finally:
            driver.target.cleargrads()

    def _try(self):
        if self._driver.fused is not None:
            self._driver.fused.load_kernels()
        if self._driver.ranks is not None:
            self._driver.ranks.load_kernels()
        try:
            self._compute(alone=True)
        finally:
            self._driver.target.cleargrads()  # of a capture that is dropped

    def _can_defer_sums(self, loss):
        """Return whether every deferred gradient belongs to a parameter that nothing else reads."""
        with _gradients_kept(self._driver.guards.other_params):
            target = self._driver.target
            target.cleargrads()
            self._one.set(loss)
            _, is_safe = self._backward_deferring(loss)
            target.cleargrads()
        return is_safe

    def _backward_deferring(self, loss):
        """Return the `PendingSums`, and whether all are gradients of parameters."""
        step = self._inputs.step
        sums = step.sums = PendingSums()
        try:
            loss.backward()
        finally:
            step.sums = None
        params = *self._driver.target.params(), *self._driver.guards.other_params
        own = [param.grad for param in params if param.is_initialized]
        return sums, not sums.others_than(own)

    def capture(self):
        """Capture the step; nothing runs."""
        try:
            self._capture_all()
        except BaseException:
            self._driver.target.cleargrads()  # they were never computed
            raise

    def _capture_all(self):
        driver = self._driver
        links = [vars(owner) for owner in driver.guards.owners]
        before = [dict(attributes) for attributes in links]
        graph, reported, gradients = self._capture_step(self._compute_and_report)
        self._gradients = gradients
        if driver.ranks is not None and not driver.ranks.has_sum:
            self._update_graph, _ = driver.capturer.capture(self._capture_update)
        self._names = list(reported)
        numbers = self._reports.among(_arrays_of(reported))
        self._copied = {
            name: chainer.as_array(value) for name, value in reported.items() if name not in numbers
        }
        # Links keep holding what the graph writes, so that no other graph takes its memory.
        for attributes, values in zip(links, before):
            new = {
                name: value
                for name, value in attributes.items()
                if name not in values or value is not values[name]
            }
            if new:
                self._attributes.append((attributes, new))
        self._graph = graph

    def _capture_step(self, function):
        """Capture a function that is the step; return what launches it, and what it returned."""
        driver = self._driver
        graph, (reported, gradients) = self._capture(function, driver.function)
        for name, value in reported.items():
            if not isinstance(chainer.as_array(value), driver.device.xp.ndarray):
                text = '%s is reported as a value on the host, which a replay would repeat'
                raise CannotCapture(text % name)
        return graph, reported, gradients

    def launch(self):
        super().launch()
        if self._update_graph is not None:
            self.is_done = False
            self._driver.ranks.add_up()
            self._update_graph()
            self.is_done = True

    def replay(self):
        """Run the captured step that was staged; return what it reported, name -> a new array."""
        # After StepDiffers parameters, states, gradients and links' attributes are those of the
        # eager step, with several ranks those of the replay.
        if self.is_check_due():
            reported = self._checked_replay()
        else:
            self.launch()
            reported = self._reported()
        self._n_replays += 1
        # Hooks, other updaters and users give parameters other arrays.
        for _, parameter, gradient in self._gradients:
            if parameter._grad is not gradient:
                parameter._set_grad_without_check(gradient)  # there may be dozens
        for attributes, new in self._attributes:
            attributes.update(new)
        return reported

    def _reported(self):
        """Return the reports of the last replay: arrays that no other replay writes to."""
        reported = self._reports.numbers()
        if self._copied:
            reported.update(state.copies(self._copied))
            reported = {name: reported[name] for name in self._names}
        return reported

    def _checked_replay(self):
        self._driver.capturer.join()  # the last step may still write, on another stream
        changing = state.state_arrays(self._driver.optimizer, self._driver.guards.owners)
        before = state.Copies(changing)
        self.launch()
        reported = self._reported()
        gradients = {path: gradient for path, _, gradient in self._gradients}
        replayed = self._result(changing, gradients, reported)
        after = None if self._driver.ranks is None else state.Copies(changing)
        eagerly_reported, eager = self._run_again(changing, before)
        differs = state.difference(replayed, eager, 0)
        if differs:
            self._deterministic = self._deterministic and not any(
                state.difference(self._run_again(changing, before)[1], eager, 0)
                for _ in range(REPEATS)
            )
            if not self._deterministic:
                differs = state.difference(replayed, eager, NONDETERMINISTIC)
        if after is not None:
            after.put_back(changing)
            self.is_done = True
        if differs:
            raise StepDiffers(
                'a replay of the captured step gave another %s than the step run eagerly: the '
                'step reads something from Python that has changed since it was captured, and '
                'that is not watched (docs/captured_training.md)' % differs,
                eagerly_reported,
            )
        return reported

    def _run_again(self, changing, before):
        """Run the staged step, alone and eagerly, from a state; return reports and result."""
        before.put_back(changing)
        self.is_done = False
        reported = self.run(alone=True)
        gradients = {path: parameter.grad for path, parameter, _ in self._gradients}
        return reported, self._result(changing, gradients, _arrays_of(reported))

    def _result(self, changing, gradients, reported):
        """Return `Copies` of all that a step gives, with several ranks of what it sends."""
        arrays = {'gradient of ' + path: array for path, array in gradients.items()}
        arrays = {**changing, **arrays}
        if self._driver.ranks is not None:
            arrays = {'gradient': self._driver.ranks.sent}
        for name, value in reported.items():
            is_array = isinstance(value, chainer.get_array_types())
            arrays[name] = value if is_array else numpy.asarray(value)
        return state.Copies(arrays)

    def _compute_and_report(self):
        """Do what a graph does: as :meth:`_compute`, and write the reported numbers to a row."""

        def write(reported):
            numbers = self._reports.among(_arrays_of(reported))
            self._reports.write(numbers, self._inputs.row_address)

        ranks = self._driver.ranks
        is_part = ranks is not None and not ranks.has_sum
        return self._compute(unchain=True, alone=is_part, write=write)

    def _compute(self, unchain=False, alone=False, write=lambda reported: None):
        """Launch the step; return what was reported, and the parameters' gradients."""
        # `unchain`: the arrays of the graph go, even where a link keeps the loss. `alone`: see
        # `run`. `write` is called where what was reported is as `run` returns it: with several
        # ranks before the update.
        driver = self._driver
        target = driver.target
        with self._under_way(alone), _observed() as reported, _not_counted(driver.fused):
            loss = driver.function(*self._inputs.arrays())
            target.cleargrads()
            self._one.set(loss)
            with _gradients_kept(driver.guards.other_params):
                self._backward(loss)
            if unchain:
                loss.unchain_backward()  # links may keep the loss, and all arrays with it
            value = loss.array
            del loss
            params = list(target.params(include_uninit=False))
            self._one.detach(params)
            zero_missing(params)
            if driver.ranks is not None:
                driver.ranks.pack(self._n_molecules, value, alone)
                write(reported)
                if alone:
                    return reported, self._gradients_now()
                driver.ranks.add_up()
            self._update()
            self.is_done = True
            if driver.ranks is None:
                write(reported)
        return reported, self._gradients_now()

    @contextlib.contextmanager
    def _under_way(self, alone):
        """Run the step inside; alone: without other ranks."""
        ranks = self._driver.ranks
        if ranks is not None:
            self._inputs.step.peer_sums = ranks.sums
            ranks.sums.begin(alone)
        with chainer_nodes.under_way(self._inputs.step), weighted_by(self._n_molecules):
            yield

    def _capture_update(self):
        with _not_counted(self._driver.fused):
            self._update()
        return {}, []

    def _update(self):
        """Launch what is done with the gradients, of all ranks where there are several."""
        driver = self._driver
        if driver.ranks is not None:
            driver.ranks.unpack()
        if driver.fused is not None:
            driver.fused.launch(self._inputs.numbers)

    def _backward(self, loss):
        if not self._defers_sums:
            loss.backward()
            return
        sums, is_safe = self._backward_deferring(loss)
        if not is_safe:
            raise CannotCapture('gradients of parameters are read before the update, or added up')
        sums.launch()

    def _gradients_now(self):
        return [
            (path, parameter, parameter.grad)
            for path, parameter in self._driver.target.namedparams(include_uninit=False)
        ]


@contextlib.contextmanager
def _not_counted(fused):
    """Let Python read the optimizer's counters as before the step, which was counted already."""
    if fused is None:
        yield
        return
    n_before = fused.optimizer.t
    try:
        fused.count(-1)
        yield
    finally:
        fused.count(n_before - fused.optimizer.t)  # 0 if an interrupt came before it was counted


@contextlib.contextmanager
def _gradients_kept(params):
    """Restore the gradients of parameters that are not the optimizer's."""
    # They are never cleared, so a graph would keep adding to those of its capture, in memory that
    # may have been reused since.
    before = [(param, param.grad) for param in params if param.is_initialized]
    for param, _ in before:
        param.cleargrad()
    try:
        yield
    finally:
        for param, gradient in before:
            param.grad = gradient


@contextlib.contextmanager
def _observed():
    """Catch what is reported inside, as name -> value."""
    reporters = chainer.reporter._get_reporters()
    reported = {}
    if not reporters:  # outside of a Trainer reports are dropped
        yield reported
        return
    with reporters[-1].scope(reported):
        yield reported


def _arrays_of(reported):
    return {name: chainer.as_array(value) for name, value in reported.items()}


class SeedGradient:
    """The gradient of a loss by itself, filled once."""

    def __init__(self, device):
        self._may_share = device.xp.may_share_memory
        with chainer.using_device(device):
            self._ones = {numpy.dtype(char): device.xp.ones((), char) for char in 'efd'}

    def set(self, loss):
        """Set the gradient of a scalar that has none."""
        if loss.array.ndim == 0 and loss.grad is None:
            loss.grad = self._ones.get(loss.dtype)

    def is_seed(self, gradient):
        """Return whether an array is the 1."""
        return gradient is self._ones.get(gradient.dtype)

    def detach(self, params):
        """Copy the gradients of parameters that lie in the 1 itself: hooks change gradients."""
        for param in params:
            grad = param.grad
            one = None if grad is None else self._ones.get(grad.dtype)
            if one is not None and self._may_share(grad, one):
                param.grad = grad.copy()


def zero_missing(params):
    """Give parameters on one device that have no gradient zeros, in one array of each dtype."""
    missing = {}
    for param in params:
        if param.grad is None:
            missing.setdefault(param.dtype, []).append(param)
    for dtype, empty in missing.items():
        sizes = [math.prod(param.shape) for param in empty]
        step = VECTOR_BYTES // dtype.itemsize
        starts = numpy.cumsum([0, *(-(-size // step) * step for size in sizes)]).tolist()
        zeros = empty[0].xp.zeros(starts[-1], dtype)
        for param, start, size in zip(empty, starts, sizes):
            param.grad = zeros[start : start + size].reshape(param.shape)
