"""`TrainingDriver`: the driver of training steps, on one GPU or several ranks."""

from __future__ import annotations

import numbers

import numpy

import chainer

from chainer_bspmm.multi_node.optimizer import of_nccl, Weighted
from chainer_bspmm.sparse import check
from chainer_bspmm.training.calls import are_noted, is_noting
from chainer_bspmm.training.cuda_graphs import CannotCapture, using
from chainer_bspmm.training.driver import Driver, is_on_gpu
from chainer_bspmm.training.flat_gradients import raise_if_not_finite
from chainer_bspmm.training.reach import Reach
from chainer_bspmm.training.session import CHECK_EVERY
from chainer_bspmm.training.snapshot import ParameterMissing
from chainer_bspmm.training.training_step import TrainingStep
from chainer_bspmm.training.update import update_of


def seed_of(given):
    """Return a given seed, checked, or draw one if it is None."""
    if given is None:
        # It is drawn from a copy of NumPy's state, so that batches keep the order that they have
        # with StandardUpdater.
        generator = numpy.random.RandomState()
        generator.set_state(numpy.random.get_state())
        return int(generator.randint(2**63, dtype=numpy.int64))
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError('seed: expected an integer or None, got %r' % (given,))
    if not 0 <= given < 2**63:
        raise ValueError('seed: expected at least 0 and below 2**63, got %d' % given)
    return given


class TrainingDriver(Driver):
    """The state that GraphUpdater adds to StandardUpdater.

    `given` is the optimizer that the updater got. Over NCCL it is `together`, a wrapper of
    `optimizer`; otherwise it is `optimizer`. `do_all_capture` is None until all ranks have agreed.
    """

    optimizer: chainer.Optimizer
    together: Weighted | None

    def __init__(
        self, optimizer, device, seed=None, check_every=CHECK_EVERY, on_difference='warn'
    ) -> None:
        seed = seed_of(seed)
        super().__init__(device)
        check.one_of('on_difference', on_difference, ('warn', 'raise'))
        self.on_difference = on_difference
        self.seed = seed  # a snapshot may change it
        self.check_every = check.count('check_every', check_every, 1)
        self.given = optimizer
        self.together = of_nccl(optimizer)
        self.optimizer = optimizer if self.together is None else self.together.actual_optimizer
        self.target = self.optimizer.target  # the updater sets it again at every step
        self.do_all_capture: bool | None = None
        self.peers = None  # `PeerMemory` of the ranks once they are connected, or None

    def options(self, optimizer):
        """Return the arguments of a driver like this one, for an optimizer."""
        return optimizer, self.device, self.seed, self.check_every, self.on_difference

    def __reduce__(self):
        return TrainingDriver, self.options(self.given)  # a copy has no captured steps

    def _why_not(self):
        """Return the reason (str or None) that rules out captured steps permanently."""
        optimizer = self.optimizer
        device = self.device
        if not is_on_gpu(device):
            name = 'not given' if device is None else device.name
            return 'CUDA graphs need a GPU, the device is %s' % name
        if not isinstance(optimizer, chainer.GradientMethod):
            return 'the optimizer, %s, is not a GradientMethod' % type(optimizer).__name__
        if type(optimizer).update is not chainer.GradientMethod.update:
            return 'the optimizer, %s, overrides the method update' % type(optimizer).__name__
        for path, param in optimizer.target.namedparams(include_uninit=False):
            if param.device != device:
                names = path, param.device.name, device.name
                return "parameter '%s' is on %s, the device is %s" % names
        return None

    def needs_notes(self, function):
        """Return whether an eager step has to note the calls of a loss, before any capture."""
        if (
            self.reason is not None
            or self.session is not None
            or self.together is not None
            or are_noted(self.target)
            or self._why_not() is not None
        ):
            return False
        reach = Reach(self.target, function)
        return bool(reach.functions) and not reach.cannot

    def _begin(self, function):
        reason = self._why_not()
        if reason is not None:
            raise CannotCapture(reason)
        session = super()._begin(function)
        session.update = update_of(self.optimizer, self.together, self.peers)
        if session.update.reason is not None:
            text = 'GraphUpdater updates eagerly after each replay: '
            self.warn_once(text + session.update.reason)
        return session

    def _why_not_now(self):
        if self.optimizer._loss_scale is not None:
            return 'the optimizer scales the loss'
        if 'update' in vars(self.optimizer):  # it may do more, such as an average of parameters
            return 'the method update of the optimizer was replaced'
        return super()._why_not_now()

    def _watch(self, key):
        reporters = chainer.reporter._get_reporters()
        name = None  # without a reporter, reports are dropped and the target needs no name
        if reporters:
            name = reporters[-1]._observer_names.get(id(self.optimizer.target), '')
        return self.session.update.variants(), name, key

    def _work(self, batch):
        return TrainingStep(self.session, batch.form.n_graphs)

    def _make(self, batch, capacity, counter):
        program = super()._make(batch, capacity, counter)
        if self.together is not None:
            update = self.session.update
            update.prepare()
            if not self.do_all_capture:
                # This tests the capture before all ranks agree: if it failed later, it would leave
                # the other ranks waiting.
                program.capture_alone()
            elif update.gradients.peers is not self.peers:
                raise CannotCapture('parameters have other sizes or dtypes than in the first step')
        return program

    def _try_out(self, program, batch):
        if not is_noting():
            super()._try_out(program, batch)
        elif any(not param.is_initialized for param in self.target.params()):
            raise ParameterMissing

    def agree(self, reason):
        """Return the reason (str or None) not to capture; all ranks agree in the first step."""
        if self.do_all_capture is None:
            comm = self.together.communicator
            reasons = comm.mpi_comm.allgather(reason)
            self.do_all_capture = not any(reasons)
            for rank, other in enumerate(reasons):
                if other is not None:
                    return self.give_up('%s (rank %d)' % (other, rank))
            update = self.session.update
            self.peers = update.connect()
            have_others = comm.mpi_comm.allgather(bool(update.gradients.sums.vectors))
            if any(have_others) and self.peers is None:
                self.do_all_capture = False
                return self.give_up('the step has statistics over ranks that share no memory')
        elif self.do_all_capture:
            if reason is not None:
                self.give_up(reason)
            raise_if_not_finite(self.together)
        return reason

    def raise_if_not_finite(self):
        """Raise FloatingPointError if a loss was not finite in a captured step of any rank."""
        if self.do_all_capture:
            with using(self.device):
                raise_if_not_finite(self.together, wait=True)

    def give_up(self, reason):
        if self.do_all_capture:
            text = 'rank %d cannot continue with captured steps, as the other ranks do: %s'
            raise RuntimeError(text % (self.together.communicator.rank, reason))
        return super().give_up(reason)
