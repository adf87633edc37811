"""`TrainingStep`: forward, backward and update of a batch, as kernels at fixed addresses."""

import contextlib
import math
from typing import Any

import numpy

import chainer

from chainer_bspmm.cuda.partial_sums import PendingSums
from chainer_bspmm.cuda.plans import VECTOR_BYTES
from chainer_bspmm.multi_node.statistics import weighted_by
from chainer_bspmm.training import chainer_nodes, snapshot
from chainer_bspmm.training.calls import run_loss
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.session import Session
from chainer_bspmm.training.work import as_arrays, spare_tolerance, Work


# Differences of losses and reported numbers are divided by at least this: smaller values may be
# differences of large terms.
FLOOR = 1e-2
OTHERS = 'the loss gives a gradient to a parameter %s of shape %s, which another optimizer trains'


class TrainingStep(Work):
    """Training step of a session, on batches of n_molecules."""

    name = 'step'
    copies_results = True

    def __init__(self, session: Session, n_molecules):
        self._session = session
        self._update = session.update
        self._n_molecules = n_molecules
        self._seed = SeedGradient(session.device)
        self._loss: Any = None  # the loss of the last run from Python, an array
        self._variables = set()  # names of reported values that are variables
        self._is_prepared = False  # whether the update is prepared
        self._defers_sums = None  # whether partial sums can be deferred; None until a trial
        self.n_numbers = self._update.n_numbers
        self.has_others = self._update.has_others

    @property
    def is_split(self):
        return self._update.is_split

    @contextlib.contextmanager
    def under_way(self, step, alone):
        step.one = self._seed
        self._step = step
        self._update.begin(step, alone)
        with chainer_nodes.under_way(step), weighted_by(self._n_molecules):
            yield

    def compute(self, arrays, mode, alone=False):
        """Compute the gradients, which stay in the parameters; return the reported values."""
        session = self._session
        target = session.target
        with self._update.uncounted(), observed() as reported:
            settings = self._update.settings() if mode == 'trial' else None
            loss = run_loss(session.function, arrays)
            if mode == 'trial' and self._update.settings() != settings:
                self.refusal = (
                    'the loss changes numbers of the optimizer, or which parameters are updated'
                )
            if mode == 'forward':
                return {}
            target.cleargrads()
            self._seed.set(loss)
            others = session.guards.other_params
            with gradients_kept(others):
                self._backward(loss, mode)
                if mode == 'trial':
                    _refuse_others_gradients(others)
            if mode == 'captured':
                loss.unchain_backward()  # links may keep the loss, which would keep all arrays
            self._loss = loss.array
            del loss
            params = list(target.params(include_uninit=False))
            self._seed.detach(params)
            zero_missing(params)
            self._update.send(self._n_molecules, self._loss, alone)
        self._variables |= {
            name for name, value in reported.items() if isinstance(value, chainer.Variable)
        }
        return as_arrays(reported)

    def as_reported(self, results):
        """Return name -> value, with variables where the loss has reported variables."""
        variables = self._variables
        if not variables:  # Chainer Chemistry's models report arrays
            return results
        return {
            name: chainer.Variable(value) if name in variables else value
            for name, value in results.items()
        }

    def load_kernels(self):
        self._update.load_kernels()

    def complete(self, numbers):
        if not self._is_prepared:  # it is done late, because the first batch may make parameters
            self._update.prepare()
            self._is_prepared = True
        self._update.launch(numbers)
        self.is_done = True

    def exchange(self):
        self._update.exchange()

    def outcome(self, results):
        if self.has_others:
            return dict(results, gradient=self._update.sent)
        return {**results, **self._gradients()}

    def summary(self, results):
        gradients = [g for g in self._gradients().values() if g.dtype.kind == 'f']
        squares = sum((gradient.astype('d') ** 2).sum() for gradient in gradients)
        return dict(results, loss=self._loss, **{'norm of the gradient': squares**0.5})

    def difference(self, actual, expected):
        tolerance = spare_tolerance(self._loss.dtype, self._session.target)
        return snapshot.difference(actual, expected, tolerance, FLOOR)

    def _gradients(self):
        return {
            'gradient of ' + path: param.grad
            for path, param in self._session.target.namedparams(include_uninit=False)
            if param.grad is not None
        }

    def _backward(self, loss, mode):
        if mode == 'trial' and self._defers_sums is None:
            # Deferral is tested in a separate backward pass, because deferred gradients are
            # uninitialised: results would be wrong if something reads them.
            given = loss.grad
            with self._update.repeated(), gradients_kept(leaves(loss)):
                sums, is_safe = self._backward_deferring(loss, shows_reads=True)
                self._defers_sums = is_safe and not sums.are_read_by(self._own_gradients())
            self._session.target.cleargrads()
            loss.grad = given
        if not self._defers_sums:
            loss.backward()
            return
        sums, is_safe = self._backward_deferring(loss)
        if not is_safe:
            raise CannotCapture(
                'gradients of parameters are read before the update, added up, or shared'
            )
        sums.launch()

    def _backward_deferring(self, loss, shows_reads=False):
        """Run backward and defer sums; return them, and whether each belongs to one parameter."""
        step = self._step
        sums = step.sums = PendingSums(shows_reads)
        try:
            with _NotedSums(sums) as noted:
                loss.backward()
        finally:
            step.sums = None
        return sums, not (noted.was_given or sums.others_than(self._own_gradients()))

    def _own_gradients(self):
        """Return the gradients of all parameters that have one."""
        params = *self._session.target.params(), *self._session.guards.other_params
        found = [param.grad for param in params if param.is_initialized]
        return [gradient for gradient in found if gradient is not None]


class _NotedSums(chainer.FunctionHook):
    """Hook that notes whether a node is given a deferred sum as the gradient of its output.

    The node may read it, or pass it on: Chainer's ``W + D`` gives W and D the same array, to which
    other gradients of W would be added. A gradient that no node gets is that of one parameter.
    """

    name = 'bspmm_deferred_sums'

    def __init__(self, sums):
        self._sums = sums
        self.was_given = False

    def backward_preprocess(self, function, in_data, out_grad):
        self.was_given = self.was_given or any(map(self._sums.defers, out_grad))


def _refuse_others_gradients(params):
    """Raise CannotCapture if parameters of other optimizers have got gradients.

    In Chainer's own loop they add up until the other optimizer updates. Parameters of no optimizer
    have gradients that nobody needs.
    """
    for param in params:
        if param.update_rule is not None and param.grad is not None:
            raise CannotCapture(OTHERS % (param.name, param.shape))


@contextlib.contextmanager
def gradients_kept(variables):
    """Clear the gradients of variables, such as other optimizers' parameters; put them back."""
    # No optimizer clears these gradients. So a graph would keep adding to the arrays of its
    # capture, whose memory may have been reused.
    before = [(variable, variable.grad) for variable in variables if variable.array is not None]
    for variable, _ in before:
        variable.cleargrad()
    try:
        yield
    finally:
        for variable, gradient in before:
            variable.grad = gradient


def leaves(loss):
    """Return the variables (list) from which a loss was computed, and that still exist."""
    nodes = [loss.node]
    seen = {loss.node}
    variables = []
    while nodes:
        node = nodes.pop()
        if node.creator_node is None:
            variables.append(node.get_variable_or_none())
        else:
            inputs = set(node.creator_node.inputs) - seen
            seen |= inputs
            nodes += inputs
    return [variable for variable in variables if variable is not None]


@contextlib.contextmanager
def observed():
    """Context that catches reported values, as name -> value."""
    reporters = chainer.reporter._get_reporters()
    reported = {}
    if not reporters:  # without a reporter, reports are dropped
        yield reported
        return
    with reporters[-1].scope(reported):
        yield reported


class SeedGradient:
    """The gradient of a loss with respect to itself, 1, in an array that is filled once."""

    def __init__(self, device):
        self._may_share = device.xp.may_share_memory
        with chainer.using_device(device):
            self._ones = {numpy.dtype(char): device.xp.ones((), char) for char in 'efd'}

    def set(self, loss):
        """Set the gradient of a scalar loss, unless it has one."""
        if loss.array.ndim == 0 and loss.grad is None:
            loss.grad = self._ones.get(loss.dtype)

    def is_seed(self, gradient):
        """Return whether a gradient is this array."""
        return gradient is self._ones.get(gradient.dtype)

    def detach(self, params):
        """Copy gradients of parameters that share this memory, because hooks write to them."""
        for param in params:
            grad = param.grad
            one = None if grad is None else self._ones.get(grad.dtype)
            if one is not None and self._may_share(grad, one):
                param.grad = grad.copy()


def zero_missing(params):
    """Give zeros as gradients to parameters without one, in one array for each dtype.

    All parameters are on one device.
    """
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
