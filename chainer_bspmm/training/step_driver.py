"""`StepDriver`: the driver of training steps, on one GPU or several ranks."""

from __future__ import annotations

import numbers

import numpy

import chainer

from chainer_bspmm.multi_node.optimizer import of_nccl, Weighted
from chainer_bspmm.multi_node.start import make_states
from chainer_bspmm.sparse import check
from chainer_bspmm.training.cuda_graphs import using
from chainer_bspmm.training.driver import Driver, is_on_gpu
from chainer_bspmm.training.flat_gradients import FlatGradients, raise_if_not_finite
from chainer_bspmm.training.fused_update import FusedUpdate, why_unsupported
from chainer_bspmm.training.programs import CannotCapture, CHECK_EVERY
from chainer_bspmm.training.step_program import StepProgram


class StepDriver(Driver):
    """The state that GraphUpdater adds to StandardUpdater.

    `given` is the optimizer that the updater got. Over NCCL it is `together`, a wrapper of
    `optimizer`, whose sums can be captured; otherwise it is `optimizer`, and `together` is None.
    `do_all_capture` is None until all ranks have agreed.
    """

    optimizer: chainer.Optimizer
    together: Weighted | None
    fused: FusedUpdate | None = None
    ranks: FlatGradients | None = None

    def __init__(
        self, optimizer, device, seed=None, check_every=CHECK_EVERY, on_difference='warn'
    ) -> None:
        if seed is None:
            # From a copy of the state: the batches must come in StandardUpdater's order.
            generator = numpy.random.RandomState()
            generator.set_state(numpy.random.get_state())
            seed = int(generator.randint(2**63, dtype=numpy.int64))
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError('seed: expected an integer or None, got %r' % (seed,))
        if not 0 <= seed < 2**63:
            raise ValueError('seed: expected at least 0 and below 2**63, got %d' % seed)
        super().__init__(device)
        check.one_of('on_difference', on_difference, ('warn', 'raise'))
        self.on_difference = on_difference
        self.seed = seed  # a snapshot may change it
        self.check_every = check.count('check_every', check_every, 1)
        self.given = optimizer
        self.together = of_nccl(optimizer)
        self.optimizer = optimizer if self.together is None else self.together.actual_optimizer
        self.target = self.optimizer.target  # the updater looks at every step
        self.do_all_capture = None
        self.peers = None  # `PeerMemory` of the ranks once they are connected, or None

    def options(self, optimizer):
        """Return the arguments of a driver like this one, for an optimizer."""
        return optimizer, self.device, self.seed, self.check_every, self.on_difference

    def __reduce__(self):
        return StepDriver, self.options(self.given)  # a copy captures anew

    def _why_not(self):
        """Return the reason (str or None) that rules out captured steps permanently."""
        optimizer = self.optimizer
        device = self.device
        if not is_on_gpu(device):
            name = 'not given' if device is None else device.name
            return 'CUDA graphs need a GPU, the device is %s' % name
        if not isinstance(optimizer, chainer.GradientMethod):
            return 'the optimizer, %s, is no GradientMethod' % type(optimizer).__name__
        if type(optimizer).update is not chainer.GradientMethod.update:
            return 'the optimizer, %s, overrides the method update' % type(optimizer).__name__
        for path, param in optimizer.target.namedparams(include_uninit=False):
            if param.device != device:
                names = path, param.device.name, device.name
                return "parameter '%s' is on %s, the device is %s" % names
        return None

    def _prepare(self, function):
        reason = self._why_not()
        if reason is not None:
            raise CannotCapture(reason)
        super()._prepare(function)

    def _make(self):
        reason = why_unsupported(self.optimizer)
        if reason is not None:
            if self.together is not None:
                raise CannotCapture('the update of several ranks is captured, but ' + reason)
            self.warn_once('GraphUpdater updates eagerly after each replay: ' + reason)
        self.fused = FusedUpdate(self.optimizer) if reason is None else None
        self.ranks = None if self.together is None else FlatGradients(self.together, self.peers)

    def _why_not_now(self):
        if self.optimizer._loss_scale is not None:
            return 'the optimizer scales the loss'
        return self.guards.blocking_hook()

    def _watch(self, key):
        reporters = chainer.reporter._get_reporters()
        name = None  # without a reporter reports are dropped, and the target needs no name
        if reporters:
            name = reporters[-1]._observer_names.get(id(self.optimizer.target), '')
        return None if self.fused is None else self.fused.variants(), name, key

    def _new(self, batch, capacity, counter):
        program = StepProgram(self, batch, capacity)
        fused = self.fused
        program.stage(batch, counter, None if fused is None else numpy.zeros(fused.n_numbers))
        program.check_spare_rows(lambda: batch.arrays_on(self.device), not self.programs)
        make_states(self.target)  # lazy links have made their parameters now
        if fused is None:
            return program
        if why_unsupported(self.optimizer) is not None:  # because of a parameter just made
            self._prepare(self.function)
            return self._new(batch, capacity, counter)
        fused.prepare()
        if self.ranks is not None:
            if self.together.has_new_parameters:
                raise CannotCapture('parameters were made or removed after the first step')
            self.ranks.load_kernels()
            if not self.do_all_capture:
                program.check_alone()
            elif self.ranks.peers is not self.peers:
                raise CannotCapture('parameters have other sizes or dtypes than in the first step')
        return program

    def agree(self, reason):
        """Return why (str or None) not to capture: the first of all ranks, in the first step."""
        if self.do_all_capture is None:
            comm = self.together.communicator
            reasons = comm.mpi_comm.allgather(reason)
            self.do_all_capture = not any(reasons)
            for rank, other in enumerate(reasons):
                if other is not None:
                    return self.give_up('%s (rank %d)' % (other, rank))
            self.ranks.connect()
            self.peers = self.ranks.peers
            have_others = comm.mpi_comm.allgather(bool(self.ranks.sums.vectors))
            if any(have_others) and self.peers is None:
                self.do_all_capture = False
                return self.give_up('ranks without common memory have statistics of all of them')
        elif self.do_all_capture:
            if reason is not None:
                self.give_up(reason)
            raise_if_not_finite(self.together)
        return reason

    def raise_if_not_finite(self):
        """Raise if a loss was not finite in any of the captured steps of all ranks."""
        if self.do_all_capture:
            with using(self.device):
                raise_if_not_finite(self.together, wait=True)

    def forget(self):
        super().forget()
        # Frees memory: that of the capturer after what uses its stream.
        self.blas = self.guards = self.fused = self.ranks = self.capturer = None

    def give_up(self, reason):
        if self.do_all_capture:
            text = 'rank %d cannot go on as the other ranks do, with captured steps: %s'
            raise RuntimeError(text % (self.together.communicator.rank, reason))
        return super().give_up(reason)
