"""One training step over buffers of a fixed layout: run eagerly, captured, replayed, checked."""

import collections
import contextlib
import warnings

import chainer

from chainer_bspmm.cuda import step
from chainer_bspmm.training import state
from chainer_bspmm.training.inputs import Inputs

CHECK_EVERY = 2000  # replays
# Where a kernel adds with atomics two runs differ by rounding. Those that do not say so, such as
# that of chainer.functions.get_item, are found out by running the step eagerly so often.
NONDETERMINISTIC = 1e-3
REPEATS = 8
# Between a batch and the same batch with spare rows: products of other shapes round differently.
SPARE_TOLERANCE = {'float16': 3e-2, 'float32': 1e-3, 'float64': 1e-6}

# Where an error is no fault of the user's.
LIBRARIES = 'chainer', 'chainer_chemistry', 'chainer_bspmm', 'cupy', 'cupy_backends', 'contextlib'

# What all programs of an updater share. fused: FusedUpdate or None.
Context = collections.namedtuple(
    'Context', 'capturer blas seed optimizer loss_func fused frozen device'
)


class CannotCapture(Exception):
    """The step cannot be replayed; the message says why, and what of it is to blame."""


class StepDiffers(RuntimeError):
    """A replayed step and the same step run eagerly gave different results."""


class StepProgram:
    """The step of one layout of a batch.

    Args:
        context (Context): of the updater.
        batch (HostBatch or DeviceBatch): the first of this layout.
        capacity (Capacity): of the buffers.
    """

    def __init__(self, context, batch, capacity):
        self._context = context
        self._inputs = Inputs(
            context.capturer,
            context.blas,
            context.seed,
            context.device,
            batch,
            capacity,
            None if context.fused is None else context.fused.n_numbers,
        )
        self._deterministic = True
        self._replay = None  # a callable, once captured
        self._reported = {}  # what the graph writes: name -> array
        self._gradients = []  # (path, parameter, array that the graph writes)
        self._kept = []  # (attributes of a link, those that the step set), such as a loss
        self._n_replays = 0
        self.held = None  # what must not go while the graph may run

    @property
    def is_captured(self):
        return self._replay is not None

    def stage(self, batch, counter, numbers):
        """Send a batch, the number of the step and the optimizer's numbers to the device."""
        self._inputs.send(batch, counter, numbers)

    def run(self):
        """Run the step that was staged eagerly.

        Returns:
            dict: what it reported, name -> value.
        """
        with self._context.capturer.ordered(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            with chainer.using_config('warn_nondeterministic', True):
                reported, _ = self._compute()
        for warning in caught:
            if 'non-deterministic' in str(warning.message):
                self._deterministic = False
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return reported

    def check_spare_rows(self, in_arrays):
        """Compare the losses of the staged batch with and without spare rows; change nothing.

        Args:
            in_arrays (tuple): the same batch as an ordinary one, on the device.

        Raises:
            CannotCapture: they differ, or an error comes up; if it is the user's own, the eager
                step shows it.
        """
        context = self._context
        arrays = state.state_arrays(context.optimizer, context.frozen.links)
        before = state.copies(arrays)
        results = []
        with context.capturer.ordered(), state.attributes_kept(context.frozen.links):
            for given in (in_arrays, in_arrays, None):
                try:
                    with step.under_way(self._inputs.step), _observed() as reported:
                        loss = context.loss_func(*(given or self._inputs.arrays()))
                    results.append(dict(_arrays_of(reported), loss=loss.array))
                except Exception as error:
                    raise CannotCapture(blame(error, context.loss_func)) from error
                finally:
                    state.put_back(arrays, before)
                del loss
        params = context.optimizer.target.params(include_uninit=False)
        tolerance = max(
            SPARE_TOLERANCE[dtype.name]
            for dtype in (results[0]['loss'].dtype, *(param.dtype for param in params))
        )
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
                'another %s: a link or the loss looks at all rows alike' % differs
            )

    def capture(self):
        """Capture the step; nothing runs.

        Raises:
            CannotCapture: with what was to blame.
        """
        links = [vars(link) for link in self._context.frozen.links]
        before = [dict(attributes) for attributes in links]
        try:
            self._replay, (reported, self._gradients) = self._context.capturer.capture(
                lambda: self._compute(unchain=True)
            )
        except BaseException as error:
            self._context.optimizer.target.cleargrads()  # they were never computed
            if isinstance(error, Exception):
                raise CannotCapture(blame(error, self._context.loss_func)) from error
            raise
        on_host = [
            name
            for name, value in reported.items()
            if not isinstance(_bare(value), self._context.device.xp.ndarray)
        ]
        if on_host:
            self._replay = None
            raise CannotCapture(
                '%s is reported as a value on the host, which a replay would repeat' % on_host[0]
            )
        self._reported = _arrays_of(reported)
        # What links keep is what the graph writes: no other graph may take its memory.
        for attributes, values in zip(links, before):
            kept = {
                name: value
                for name, value in attributes.items()
                if name not in values or value is not values[name]
            }
            if kept:
                self._kept.append((attributes, kept))

    def replay(self):
        """Run the captured step that was staged.

        Returns:
            dict: what it reported, name -> array of its own.

        Raises:
            StepDiffers: this was a replay to be checked, and it did not pass.
        """
        if not self._n_replays % CHECK_EVERY:
            reported = self._checked_replay()
        else:
            self._replay()
            reported = state.copies(self._reported)
        self._n_replays += 1
        self._give_gradients()
        for attributes, kept in self._kept:
            attributes.update(kept)
        return reported

    def _checked_replay(self):
        changing = state.state_arrays(self._context.optimizer, self._context.frozen.links)
        before = state.copies(changing)
        self._replay()
        reported = state.copies(self._reported)
        replayed = dict(state.copies(dict(changing, **self._named_gradients())), **reported)
        eager = self._run_again(changing, before)
        differs = state.difference(replayed, eager, 0)
        if differs:
            self._deterministic = self._deterministic and not any(
                state.difference(self._run_again(changing, before), eager, 0)
                for _ in range(REPEATS)
            )
            if not self._deterministic:
                differs = state.difference(replayed, eager, NONDETERMINISTIC)
        if differs:
            raise StepDiffers(
                'a replay of the captured training step gave another %s than the step run '
                'eagerly: something that the step reads was frozen when it was captured. Train '
                'with chainer.training.updaters.StandardUpdater' % differs
            )
        return reported

    def _run_again(self, changing, before):
        """Run the step that was staged eagerly, from the state `before`; return what it gave."""
        state.put_back(changing, before)
        gave = _arrays_of(self.run())
        ours, self._gradients = self._gradients, self._gradients_now()
        gave.update(state.copies(dict(changing, **self._named_gradients())))
        self._gradients = ours
        self._give_gradients()
        return gave

    def _give_gradients(self):
        # Hooks, other updaters and users give parameters other arrays.
        for _, parameter, gradient in self._gradients:
            if parameter._grad is not gradient:
                parameter._set_grad_without_check(gradient)  # there may be dozens

    def _compute(self, unchain=False):
        """Launch the step; return what was reported, and the parameters' gradients."""
        context = self._context
        target = context.optimizer.target
        with step.under_way(self._inputs.step), _observed() as reported:
            loss = context.loss_func(*self._inputs.arrays())
            target.cleargrads()
            with _gradients_kept(context.frozen.other_params):
                loss.backward()
            if unchain:
                loss.unchain_backward()  # links may keep the loss, and all arrays with it
            del loss
            context.optimizer.reallocate_cleared_grads()
            if context.fused is not None:
                context.fused.launch(self._inputs.numbers)
        return reported, self._gradients_now()

    def _gradients_now(self):
        return [
            (path, parameter, parameter.grad)
            for path, parameter in self._context.optimizer.target.namedparams(include_uninit=False)
        ]

    def _named_gradients(self):
        return {'gradient of ' + path: gradient for path, _, gradient in self._gradients}


@contextlib.contextmanager
def _gradients_kept(params):
    """Keep gradients out of parameters, which have the ones that they had afterwards.

    Those that are not the optimizer's: nobody clears them. A graph would go on adding to what they
    were when it was captured, in memory that may be somebody else's by then.
    """
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
    if not reporters:  # outside of a Trainer reports go nowhere
        yield reported
        return
    with reporters[-1].scope(reported):
        yield reported


def _bare(value):
    return value.array if isinstance(value, chainer.Variable) else value


def _arrays_of(reported):
    return {name: _bare(value) for name, value in reported.items()}


def blame(error, loss_func):
    """Return a sentence that says where an exception came from: place, link, message."""
    place, link = None, None
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        owner = frame.tb_frame.f_locals.get('self')
        if isinstance(owner, chainer.Link):
            link = owner
        module = frame.tb_frame.f_globals.get('__name__', '')
        if place is None or module.split('.')[0] not in LIBRARIES:
            place = '%s, line %d, in %s' % (code.co_filename, frame.tb_lineno, code.co_name)
        frame = frame.tb_next
    names = {}
    if isinstance(loss_func, chainer.Link):
        names = {id(found): path for path, found in loss_func.namedlinks()}
    where = ''
    if link is not None:
        where = '%s (%s) ' % (names.get(id(link), ''), type(link).__name__)
    return '%scannot be captured: %s: %s (%s)' % (
        where.lstrip() or 'the step ',
        type(error).__name__,
        error,
        place,
    )
