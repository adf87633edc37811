"""`Update`: the part of a captured step after its gradients, chosen once per session."""

import contextlib
from numbers import Real
from typing import Any

import chainer

from chainer_bspmm.multi_node.start import make_states
from chainer_bspmm.training.flat_gradients import FlatGradients
from chainer_bspmm.training.fused_update import FusedUpdate, why_unsupported
from chainer_bspmm.training.cuda_graphs import CannotCapture


class Update:
    """Update by the optimizer itself, eagerly after every replay of the gradients."""

    n_numbers: int | None = None  # count of numbers that the host sends for every step
    is_split = False  # whether `exchange` comes between two graphs
    has_others = False  # whether other ranks take part

    def __init__(self, optimizer: chainer.GradientMethod, reason: str | None = None):
        self._optimizer = optimizer
        self.reason = reason  # why the update is not part of the graphs
        self.is_over = False  # whether another kind of update must replace it

    def variants(self):
        """Return the options (hashable) on which a captured update depends."""

    def settings(self):
        """Return numbers of the optimizer, its rules and hooks, and which rules are enabled."""
        optimizer = self._optimizer
        found: list[Any] = [param.update_rule for param in optimizer.target.params()]
        rules = [rule for rule in found if rule is not None]
        hooks = optimizer._hookable._pre_update_hooks.values()
        holders = [optimizer.hyperparam, *(rule.hyperparam for rule in rules), *hooks]
        return [_numbers(holder) for holder in holders], [(rule.enabled, rule.t) for rule in rules]

    def load_kernels(self):
        """Compile the kernels for the parameters that have been made."""

    def prepare(self):
        """Make the states and kernels for the parameters that have been made."""

    def advance(self):
        """Count a step in the optimizer; return the step's numbers, (n_numbers,) float64."""

    def recount(self, n_before, is_done):
        """Set the counters to n_before steps, and one more if this one was done."""

    def uncounted(self):
        """Context in which counters are as before the step, although it has been counted."""
        return contextlib.nullcontext()

    def begin(self, step, alone):
        """Prepare for the kernels of a step; `alone`: without other ranks."""

    def repeated(self):
        """Context of a backward pass that will be run once more after it."""
        return contextlib.nullcontext()

    def send(self, n_molecules, loss, alone):
        """Launch the kernels between the gradients and the exchange with other ranks."""

    def exchange(self):
        """Exchange gradients with the other ranks, between two graphs."""

    def launch(self, numbers):
        """Launch the update; `numbers`: the result of :meth:`advance`, on the device."""

    def finish(self):
        """Finish the step after the launch of the graphs; return whether Python code updated."""
        self._optimizer.update()
        return True


def _numbers(holder):
    """Return name -> text of the numbers in the attributes of an object; as text NaN equals NaN."""
    return {
        name: repr(value)
        for name, value in getattr(holder, '__dict__', {}).items()
        if isinstance(value, Real)
    }


class OneLaunch(Update):
    """Update of all parameters in one or a few launches; see `FusedUpdate`."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._fused = FusedUpdate(optimizer)
        self.n_numbers = self._fused.n_numbers
        self._is_counted = False  # whether the counters include the current step

    def variants(self):
        return self._fused.variants()

    def load_kernels(self):
        self._fused.load_kernels()

    def prepare(self):
        self.reason = why_unsupported(self._optimizer)  # a new parameter may be unsupported
        self.is_over = self.reason is not None
        if not self.is_over:
            make_states(self._optimizer.target)
            self._fused.prepare()

    def advance(self):
        self._is_counted = True
        return self._fused.advance()

    def recount(self, n_before, is_done):
        self._is_counted = False
        self._fused.count(n_before + is_done - self._optimizer.t)

    @contextlib.contextmanager
    def uncounted(self):
        n_before = self._optimizer.t
        try:
            self._fused.count(-self._is_counted)  # trials and captures run before it is counted
            yield
        finally:
            # The difference is 0 if an interrupt came before the counters were changed.
            self._fused.count(n_before - self._optimizer.t)

    def launch(self, numbers):
        if not self.is_over:
            self._fused.launch(numbers)

    def finish(self):
        self._is_counted = False
        if self.is_over:
            self._fused.count(-1)
            self._optimizer.update()
        return self.is_over


class OfRanks(OneLaunch):
    """Update in a few launches after the gradients of all ranks were added; see `FlatGradients`."""

    has_others = True

    def __init__(self, optimizer, together, peers):
        super().__init__(optimizer)
        self._together = together
        self.gradients = FlatGradients(together, peers)
        self.is_split = not self.gradients.has_sum

    @property
    def sent(self):
        """The array that this rank sent last."""
        return self.gradients.sent

    def load_kernels(self):
        super().load_kernels()
        self.gradients.load_kernels()

    def prepare(self):
        super().prepare()
        if self._together.has_new_parameters:
            raise CannotCapture('parameters were made or removed after the first step')
        self.gradients.load_kernels()

    def connect(self):
        """Map the memory of the ranks of this host, if possible; all ranks must call it."""
        self.gradients.connect()
        self.is_split = not self.gradients.has_sum
        return self.gradients.peers

    def begin(self, step, alone):
        step.peer_sums = self.gradients.sums
        self.gradients.sums.begin(alone)

    def repeated(self):
        return self.gradients.sums.repeated()

    def send(self, n_molecules, loss, alone):
        self.gradients.pack(n_molecules, loss, alone)

    def exchange(self):
        self.gradients.add_up()

    def launch(self, numbers):
        self.gradients.unpack()
        super().launch(numbers)


def update_of(optimizer, together=None, peers=None) -> Update:
    """Return the `Update` for an optimizer; `together`: the `Weighted` one of several ranks."""
    reason = why_unsupported(optimizer)
    if reason is not None:
        if together is not None:
            raise CannotCapture('the update of several ranks is captured, but ' + reason)
        return Update(optimizer, reason)
    return OneLaunch(optimizer) if together is None else OfRanks(optimizer, together, peers)
