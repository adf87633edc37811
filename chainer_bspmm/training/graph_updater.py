"""`GraphUpdater`: Chainer's StandardUpdater, each training step one launch of a CUDA graph."""

import numbers
import weakref
from typing import Any, Callable

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset import convert
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.dataset.sparse_example import Selection
from chainer_bspmm.sparse import validate
from chainer_bspmm.training import batches
from chainer_bspmm.training.between_steps import BetweenSteps
from chainer_bspmm.training.captured_evaluators import capture_evaluators
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.cuda_graphs import using
from chainer_bspmm.training.examples import Examples
from chainer_bspmm.training.flat_gradients import FlatGradients
from chainer_bspmm.training.flat_gradients import raise_if_not_finite
from chainer_bspmm.training.fused_update import FusedUpdate
from chainer_bspmm.training.guards import Guards
from chainer_bspmm.training.programs import blas_for
from chainer_bspmm.training.programs import CannotCapture
from chainer_bspmm.training.programs import CHECK_EVERY
from chainer_bspmm.training.programs import Programs
from chainer_bspmm.training.programs import StepDiffers
from chainer_bspmm.training.resident import Resident
from chainer_bspmm.training.step_program import Context
from chainer_bspmm.training.step_program import StepProgram
from chainer_bspmm.training.supported import why_unsupported
from chainer_bspmm.user_code import warn


class GraphUpdater(StandardUpdater):
    """Train on a GPU with forward, backward and update as one launch.

    Replaces ``chainer.training.updaters.StandardUpdater``: same arguments; Trainer,
    extensions, optimizers and snapshots work unchanged. The first batch of a layout (number
    of molecules, and one of a few buffer sizes) trains eagerly, the second is captured in a CUDA
    graph, all others replay it. Buffers are a little larger than the batch: the rows past the last
    molecule belong to none and affect nothing.

    A step is captured again when something watched that it reads from Python changes (see
    `guards.Guards`): attributes of links and of the loss, parameters, the optimizer,
    configuration. Learning rates and other numbers of the optimizer may change at every step.
    Nothing is looked at where nothing can have changed (see `between_steps.BetweenSteps`).

    Replays 1, 2, 4, ..., 1,024 of a layout, those that are a multiple of `check_every`, and the
    first 16 of the first layout are compared with the same step run eagerly, bit for bit. This
    finds most of what changes and is not watched; a value that changes and changes back in between
    is missed.

    What cannot be captured trains eagerly, with one warning that names the cause: a model that
    asks the device for values, copies host data or reports host values, hooks of functions or
    links, converters that make no sparse batch, a CPU. Optimizers and optimizer hooks other than
    those of `fused_update.FusedUpdate` update eagerly after the replay.

    With the optimizer of ``chainermn.create_multi_node_optimizer`` over a communicator of NCCL, the
    sum of gradients over all ranks is part of the launch on one host, and lies between two launches
    elsewhere. They agree in the first step whether all train so; what cannot be captured later is
    an error (docs/several_gpus.md).

    Dropout draws from a generator of the step (see `cuda.step`): `seed` and the number of
    the step decide the numbers, not CuPy's or Chainer's seeds.

    Args:
        iterator (Iterator or dict): of the training set.
        optimizer (Optimizer or dict): set up with the model.
        converter (callable): makes sparse batches. Those of a ``SparseDataset`` that fits are
            gathered on the GPU, unless padded (see `resident.Resident`).
        device (device specifier): the GPU.
        loss_func (callable or None): None means the optimizer's target.
        seed (int or None): of the random numbers, at least 0, below 2**63; None draws it from
            NumPy's generator. Kept in snapshots.
        check_every (int): replays from one regular check to the next.
        on_difference (str): what to do if a checked replay differs. ``'warn'``: keep the result of
            the eager step, and train eagerly from then on. ``'raise'``: raise StepDiffers.
        *args, **kwargs: as StandardUpdater has them.

    Raises:
        TypeError, ValueError: `seed`, `check_every` or `on_difference` is not one of these; no
            optimizer is named 'main'.
        StepDiffers (RuntimeError): a checked replay differs, and `on_difference` is ``'raise'``.
        RuntimeError (by `update`): this rank cannot go on with captured steps, as the others do.
        FloatingPointError (by `update`): the loss of a rank was not finite in an earlier step.

    Note:
        A snapshot of a StandardUpdater can be resumed with this updater, and the other way round.
        Parameters' ``grad`` arrays are overwritten by the next step. Captured steps copy nothing
        to the host: reported values are device arrays until they are read.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        converter: Callable = concat_mols,
        device: Any = None,
        loss_func: Callable | None = None,
        *args: Any,
        seed: int | None = None,
        check_every: int = CHECK_EVERY,
        on_difference: str = 'warn',
        **kwargs: Any,
    ) -> None:
        super().__init__(iterator, optimizer, converter, device, loss_func, *args, **kwargs)
        if seed is None:
            # From a copy of the state: the batches must come in StandardUpdater's order.
            generator = numpy.random.RandomState()
            generator.set_state(numpy.random.get_state())
            seed = int(generator.randint(2**63, dtype=numpy.int64))
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError('seed: expected an integer or None, got %r' % (seed,))
        if not 0 <= seed < 2**63:
            raise ValueError('seed: expected at least 0 and below 2**63, got %d' % seed)
        validate.one_of('on_difference', on_difference, ('warn', 'raise'))
        self.seed = seed
        self._check_every = validate.count('check_every', check_every, 1)
        self._on_difference = on_difference
        self._examples = Examples()
        self._warned = set()
        self._reason = None  # why no step can be captured
        self._variants_key = None  # the guards' key when the update was asked for its variants
        self._seen = None, None, None  # key, loss_func, target that fitted the context last
        self._context = None  # made at the first step: a snapshot may change the seed until then
        self._resident = None
        self._programs = Programs('step')
        self._epoch_detail = None, None  # an iterator's state, and the epoch at that
        self._trainer = None  # a weak reference, until its evaluators are captured
        self._between_steps = None
        self._watched = None  # what the layout of the next step has of the last, if known
        if 'main' not in self._optimizers:
            raise ValueError(
                "optimizer: expected one named 'main', got %s" % ', '.join(self._optimizers)
            )
        optimizer = self._optimizers['main']
        self._ranks = _of_ranks(optimizer)
        self._optimizer = optimizer if self._ranks is None else self._ranks.actual_optimizer
        self._do_all_capture = None  # whether all ranks do; None until they have agreed
        self._peers = None  # then, the memory that they share, if they do

    def connect_trainer(self, trainer: Any) -> None:
        super().connect_trainer(trainer)
        self._trainer = weakref.ref(trainer)
        self._between_steps = BetweenSteps(trainer, GraphUpdater)

    @property
    def epoch_detail(self) -> float:
        """Epochs done (float), as StandardUpdater has it."""
        iterator = self._iterators['main']
        if type(iterator) is not SerialIterator:
            return iterator.epoch_detail
        state, found = self._epoch_detail
        if state is not iterator._state:  # the trigger of every extension asks after every step
            found = iterator.epoch_detail
            self._epoch_detail = iterator._state, found
        return found

    @property
    def graph_nbytes(self) -> int:
        """Bytes on the GPU (int) that captured steps take, which CuPy's own pool does not count."""
        return 0 if self._context is None else self._context.capturer.nbytes

    def update_core(self) -> None:
        if self._trainer is not None:
            if self._is_on_gpu():
                capture_evaluators(self._trainer(), self.input_device)
            self._trainer = None
        is_known = self._between_steps is not None and self._between_steps.had_no_effect(self)
        iterator = self._iterators['main']
        examples = self._examples.next(iterator, self.converter)
        if not is_known or type(examples) is not Selection:  # a list may come from a user's code
            self._watched = None
        with using(self.input_device):  # its current stream is used throughout
            self._train(examples)
        if self.auto_new_epoch and iterator.is_new_epoch:
            self._optimizers['main'].new_epoch(auto=True)

    def _train(self, examples):
        if self._ranks is not None and self._do_all_capture is None:
            self._start(examples)
        reason = self._reason
        if reason is None:
            try:
                if self._watched is None:
                    key = self._refresh()
                    reason = self._why_not_now()
                    if reason is None:
                        self._watched = self._step_key(key)
                if reason is None:
                    batch = batches.batch_of(
                        examples, self.converter, self.input_device, self._resident
                    )
                    program = self._program(batch)
            except (batches.NoSparseBatch, CannotCapture) as error:
                reason = self._give_up(str(error))
        if self._ranks is not None:
            reason = self._agree(reason)
        if reason is not None:
            self._warn('GraphUpdater trains eagerly: ' + reason)
            self._train_eagerly(examples)
            return
        fused = self._context.fused
        if fused is None or not program.is_captured or program.is_check_due():
            self._watched = None  # what runs eagerly may change it
        difference = step_numbers = None
        n_before, program.is_done = self._optimizer.t, False
        try:
            if fused is not None:
                step_numbers = fused.advance(is_unchanged=True)
            program.stage(batch, self.iteration, step_numbers)
            reported = program.replay() if program.is_captured else program.run()
        except StepDiffers as error:  # after the eager step was done, and counted
            difference, reported = error, error.reported
        except BaseException as error:
            if fused is not None:  # a step that was done counts, whatever came after it
                fused.count(n_before + program.is_done - self._optimizer.t)
            if not isinstance(error, CannotCapture):
                raise
            self._warn('GraphUpdater trains eagerly: ' + self._give_up(str(error)))
            self._train_eagerly(examples)
            return
        reporters = chainer.reporter._get_reporters()
        if reporters:
            if program.is_captured and type(reporters[-1]) is chainer.Reporter:
                reporters[-1].observation.update(reported)  # arrays: there is no variable to copy
            else:
                chainer.report(reported)
        if fused is None:
            self._optimizer.update()
        if difference is not None:
            reason = self._give_up(str(difference))
            if self._on_difference == 'raise':
                raise difference
            self._warn('GraphUpdater trains eagerly: ' + reason)

    def _refresh(self):
        """Return the guards' key; make the context where there is none, or an outdated one."""
        if self._context is not None:
            key = self._context.guards.key()
            seen = self._seen
            if key is seen[0] and self.loss_func is seen[1] and self._optimizer.target is seen[2]:
                return key
            if self._made_for == self._parts(key):
                self._seen = key, self.loss_func, self._optimizer.target
                return key
        self._prepare()
        return self._context.guards.key()

    def _program(self, batch):
        """Return the program for a batch, captured if the layout was seen before."""
        dataset = getattr(self._iterators['main'], 'dataset', None)
        capacity = self._programs.capacity(batch.form, batch.need, dataset)
        layout = batch.form, batch.source, capacity
        program = self._programs.find((*layout, *self._watched))
        if program is None:
            program = self._new_program(batch, capacity)
            # Parameters and states may have been made.
            self._watched = self._step_key(self._context.guards.key())
            self._programs.add((*layout, *self._watched), program)
        elif not program.is_captured:
            program.capture()
        return program

    def _new_program(self, batch, capacity):
        program = StepProgram(self._context, batch, capacity)
        fused, optimizer = self._context.fused, self._optimizer
        program.stage(
            batch, self.iteration, None if fused is None else numpy.zeros(fused.n_numbers)
        )
        program.check_spare_rows(lambda: batch.arrays_on(self.input_device), not self._programs)
        # Lazy links have made their parameters now.
        for param in optimizer.target.params(include_uninit=False):
            if param.update_rule is not None and param.update_rule.enabled:
                param.update_rule._init_states(param)
        if fused is None:
            return program
        if why_unsupported(optimizer) is not None:  # because of a parameter that was just made
            self._prepare()
            return self._new_program(batch, capacity)
        fused.prepare()
        if self._ranks is not None:
            self._prepare_ranks(program)
        return program

    def _prepare_ranks(self, program):
        if self._ranks.has_new_parameters:
            raise CannotCapture('parameters were made or removed after the first step')
        self._context.ranks.load_kernels()
        if not self._do_all_capture:
            program.check_alone()
        elif self._context.ranks.peers is not self._peers:
            raise CannotCapture('parameters have other sizes or dtypes than in the first step')

    def _start(self, examples):
        """Let all ranks start alike, with all parameters made."""
        args, kwargs = self._arguments(examples)
        self._ranks.start(self.loss_func or self._optimizer.target, *args, **kwargs)

    def _agree(self, reason):
        """Return why (str or None) not to capture: the first of all ranks, in the first step."""
        if self._do_all_capture is None:
            comm = self._ranks.communicator
            reasons = comm.mpi_comm.allgather(reason)
            self._do_all_capture = not any(reasons)
            for rank, other in enumerate(reasons):
                if other is not None:
                    return self._give_up('%s (rank %d)' % (other, rank))
            self._context.ranks.connect()
            self._peers = self._context.ranks.peers
            have_others = comm.mpi_comm.allgather(bool(self._context.ranks.sums.vectors))
            if any(have_others) and self._peers is None:
                self._do_all_capture = False
                return self._give_up('ranks without common memory have statistics of all of them')
        elif self._do_all_capture:
            if reason is not None:
                self._give_up(reason)
            raise_if_not_finite(self._ranks)
        return reason

    def _step_key(self, key):
        fused, reporters = self._context.fused, chainer.reporter._get_reporters()
        name = None  # without a reporter reports are dropped, and the target needs no name
        if reporters:
            name = reporters[-1]._observer_names.get(id(self._optimizer.target), '')
        variants = None
        if fused is not None:
            variants = fused.variants(is_unchanged=key is self._variants_key)
            self._variants_key = key
        return variants, name, key

    def _is_on_gpu(self):
        return self.input_device is not None and self.input_device.xp is cuda.cupy

    def _why_not(self):
        """Return what (str or None) rules out captured steps permanently."""
        optimizer = self._optimizer
        if not self._is_on_gpu():
            return 'CUDA graphs need a GPU, the device is %s' % (
                'not given' if self.input_device is None else self.input_device.name
            )
        if not isinstance(optimizer, chainer.GradientMethod):
            return 'the optimizer, %s, is no GradientMethod' % type(optimizer).__name__
        if type(optimizer).update is not chainer.GradientMethod.update:
            return 'the optimizer, %s, overrides the method update' % type(optimizer).__name__
        for path, param in optimizer.target.namedparams(include_uninit=False):
            if param.device != self.input_device:
                return "parameter '%s' is on %s, the device is %s" % (
                    path,
                    param.device.name,
                    self.input_device.name,
                )
        return None

    def _why_not_now(self):
        """Return what (str or None) rules out a captured step at this moment."""
        if self._optimizer._loss_scale is not None:
            return 'the optimizer scales the loss'
        return self._context.guards.blocking_hook()

    def _prepare(self):
        """Make what all programs share, discarding the old one.

        Raises:
            CannotCapture: it cannot be made.
        """
        self._forget()
        reason = self._why_not()
        if reason is not None:
            raise CannotCapture(reason)
        device, optimizer = self.input_device, self._optimizer
        capturer = Capturer(device)
        blas = blas_for(capturer, device)
        reason = why_unsupported(optimizer)
        if reason is not None:
            if self._ranks is not None:
                raise CannotCapture('the update of several ranks is captured, but ' + reason)
            self._warn('GraphUpdater updates eagerly after each replay: ' + reason)
        loss_func = self.loss_func or optimizer.target
        if self._resident is None:
            dataset = getattr(self._iterators['main'], 'dataset', None)
            self._resident = Resident(dataset, device)
        context = Context(
            capturer,
            blas,
            self.seed,
            optimizer,
            loss_func,
            FusedUpdate(optimizer) if reason is None else None,
            Guards(optimizer.target, loss_func, optimizer),
            device,
            self._check_every,
            None if self._ranks is None else FlatGradients(self._ranks, self._peers),
        )
        self._made_for = self._parts(context.guards.key())
        self._seen, self._variants_key = (None, None, None), None
        self._context = context  # last: there may be an interrupt before

    def _parts(self, key):
        """Return what (list) a context is made for."""
        return [self.loss_func, self._optimizer.target, *key.update]

    def _forget(self):
        self._context = self._watched = None  # frees its memory
        self._programs.clear()

    def _give_up(self, reason):
        """Capture no more, and return the reason.

        Raises:
            RuntimeError: the other ranks do capture.
        """
        if self._do_all_capture:
            raise RuntimeError(
                'rank %d cannot go on as the other ranks do, with captured steps: %s'
                % (self._ranks.communicator.rank, reason)
            )
        self._forget()
        self._reason = reason
        return reason

    def _arguments(self, examples):
        """Return the arguments of the loss function, (tuple, dict)."""
        in_arrays = convert._call_converter(self.converter, examples, self.input_device)
        if isinstance(in_arrays, tuple):
            return in_arrays, {}
        return ((), in_arrays) if isinstance(in_arrays, dict) else ((in_arrays,), {})

    def _train_eagerly(self, examples):
        if self._context is not None:  # other steps are captured, and may be on another stream
            self._context.capturer.join()
        args, kwargs = self._arguments(examples)
        optimizer = self._optimizers['main']
        optimizer.update(self.loss_func or optimizer.target, *args, **kwargs)

    def _warn(self, text):
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    def finalize(self) -> None:
        try:
            self._raise_if_not_finite()
        finally:
            self._examples.close()
            super().finalize()

    def _raise_if_not_finite(self):
        """Raise if a loss was not finite in any of the captured steps of all ranks."""
        if self._do_all_capture:
            with using(self.input_device):
                raise_if_not_finite(self._ranks, wait=True)

    def serialize(self, serializer: Any) -> None:
        if not isinstance(serializer, chainer.Deserializer):
            self._raise_if_not_finite()
        super().serialize(serializer)
        try:
            self.seed = int(serializer('seed', numpy.int64(self.seed)))
        except KeyError:
            pass  # a snapshot of a StandardUpdater
        if isinstance(serializer, chainer.Deserializer):
            self._forget()  # captured steps have the old seed


def _of_ranks(optimizer):
    """Return ChainerMN's optimizer where it can be captured; None for any other."""
    if getattr(optimizer, 'communicator', None) is None:
        return None
    from chainer_bspmm.multi_node.optimizer import of_nccl  # not without ChainerMN

    return of_nccl(optimizer)
