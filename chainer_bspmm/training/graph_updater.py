"""`GraphUpdater`: Chainer's StandardUpdater, each training step one launch of a CUDA graph."""

import numbers
import warnings

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset import convert
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.training import chainer_nodes
from chainer_bspmm.training import batches
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.guards import Frozen
from chainer_bspmm.training.fused_update import FusedUpdate
from chainer_bspmm.training.fused_update import why_not
from chainer_bspmm.training.inputs import blas_for
from chainer_bspmm.training.programs import Programs
from chainer_bspmm.training.step_program import CannotCapture
from chainer_bspmm.training.step_program import Context
from chainer_bspmm.training.step_program import StepDiffers
from chainer_bspmm.training.step_program import StepProgram


class GraphUpdater(StandardUpdater):
    """Train on a GPU with forward, backward and update as one launch.

    Takes the place of ``chainer.training.updaters.StandardUpdater``: the same arguments, and
    Trainer, extensions, optimizers and snapshots as they are. The first batch of a layout (number
    of molecules, and one of a few buffer sizes) trains eagerly, the second is captured in a CUDA
    graph, all others replay it. Batches lie in buffers that are a little too large: the rows past
    the last molecule belong to none and touch nothing.

    A step is captured anew when something changes that it reads from Python: configuration,
    attributes of links, frozen parameters (see `frozen.Frozen`). Learning rates and other numbers
    of the optimizer may change at every step. The first replay of a layout and one in every 2,000
    are compared with the same step run eagerly, bit for bit, and a difference stops the run.

    What cannot be captured trains eagerly, with one warning that names the cause: a model that
    asks the device for values, copies host data or reports host values, hooks of functions or
    links, converters that make no packed batch, a CPU. Optimizers and optimizer hooks other than
    those of `fused_update.FusedUpdate` update eagerly after the replay.

    Dropout draws from a generator of its own (see `functions.dropout`): `seed` and the number of
    the step decide the numbers, not CuPy's or Chainer's seeds.

    Args:
        iterator (Iterator or dict): of the training set.
        optimizer (Optimizer or dict): set up with the model.
        converter (callable): makes packed sparse batches; examples of a
            ``chainer_bspmm.dataset.DeviceDataset`` are gathered on the GPU.
        device (device specifier): the GPU.
        loss_func (callable or None): None means the optimizer's target.
        seed (int or None): of the random numbers, at least 0, below 2**63; None draws it from
            NumPy's generator. Kept in snapshots.
        *args, **kwargs: as StandardUpdater has them.

    Raises:
        TypeError, ValueError: the seed is no integer, or out of range.
        StepDiffers (RuntimeError): a checked replay did not pass.

    Note:
        A snapshot of a StandardUpdater can be resumed with this updater, and the other way round.
        Parameters' ``grad`` arrays are overwritten by the next step. Captured steps copy nothing
        to the host: reported values are device arrays until somebody reads them.
    """

    def __init__(
        self,
        iterator,
        optimizer,
        converter=concat_mols,
        device=None,
        loss_func=None,
        *args,
        seed=None,
        **kwargs,
    ):
        super().__init__(iterator, optimizer, converter, device, loss_func, *args, **kwargs)
        if seed is None:
            # Without drawing: the order of the batches shall be StandardUpdater's.
            generator = numpy.random.RandomState()
            generator.set_state(numpy.random.get_state())
            seed = int(generator.randint(2**63, dtype=numpy.int64))
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError('seed: expected an integer or None, got %r' % (seed,))
        if not 0 <= seed < 2**63:
            raise ValueError('seed: expected at least 0 and below 2**63, got %d' % seed)
        self.seed = seed
        self._warned = set()
        self._reason = None  # why no step can be captured
        self._context = None  # made at the first step: a snapshot may change the seed until then
        self._programs = Programs('step')
        self._capacities = {}

    @property
    def graph_nbytes(self):
        """Bytes on the GPU (int) that captured steps take, which CuPy's own pool does not count."""
        return 0 if self._context is None else self._context.capturer.nbytes

    def update_core(self):
        iterator = self._iterators['main']
        examples = iterator.next()
        if self.input_device is None:
            self._train(examples)
        else:
            with chainer.using_device(self.input_device):  # its current stream is meant throughout
                self._train(examples)
        if self.auto_new_epoch and iterator.is_new_epoch:
            self._optimizers['main'].new_epoch(auto=True)

    def _train(self, examples):
        if self._context is not None and self._made_for != self._making():
            self._context = None
            self._programs.clear()
        if self._reason is None and self._context is None:
            self._reason = self._why_not() or self._prepare()
        reason = self._reason or self._why_not_now()
        if reason is None:
            try:
                batch = batches.batch_of(examples, self.converter, self.input_device)
                program = self._program(batch)
            except (batches.NoSparseBatch, CannotCapture) as error:
                reason = self._reason = str(error)
                self._context = None  # gives its memory back
                self._programs.clear()
        if reason is not None:
            self._warn('GraphUpdater trains eagerly: ' + reason)
            self._train_eagerly(examples)
            return
        fused, optimizer = self._context.fused, self._optimizers['main']
        step_numbers = None if fused is None else fused.advance()
        try:
            program.stage(batch, self.iteration, step_numbers)
            reported = program.replay() if program.is_captured else program.run()
        except StepDiffers:
            raise  # but the step was done
        except BaseException:
            if fused is not None:
                fused.take_back()
            raise
        if chainer.reporter._get_reporters():
            chainer.report(reported)
        if fused is None:
            optimizer.update()

    def _program(self, batch):
        """Return the program for a batch, captured if it was seen before."""
        capacities = self._capacities.get(batch.form.n_graphs)
        if capacities is None:
            capacities = self._capacities[batch.form.n_graphs] = batches.capacities(
                getattr(self._iterators['main'], 'dataset', None), batch.form.n_graphs
            )
        capacity = capacities.of(batch.need)
        layout, key = (batch.form, batch.source, capacity), self._frozen_key()
        program = self._programs.find((*layout, key))
        if program is None:
            self._programs.expect((*layout, key), self._frozen)
            program = StepProgram(self._context, batch, capacity)
            self._check_spare_rows(program, batch)
            fused, optimizer = self._context.fused, self._optimizers['main']
            if fused is not None:
                if why_not(optimizer) is not None:  # of a parameter that was just made
                    self._programs.clear()
                    reason = self._prepare()
                    if reason is not None:
                        raise CannotCapture(reason)
                    return self._program(batch)
                fused.prepare()
            # That made parameters and states that were not there.
            key = self._frozen_key()
            program.held = self._frozen.held()
            self._programs.add((*layout, key), program)
        elif not program.is_captured:
            program.capture()
        return program

    def _check_spare_rows(self, program, batch):
        fused = self._context.fused
        program.stage(batch, self.iteration, fused and numpy.zeros(fused.n_numbers))
        program.check_spare_rows(batch.arrays_on(self.input_device))
        # Lazy links have made their parameters now.
        for param in self._optimizers['main'].target.params(include_uninit=False):
            if param.update_rule is not None and param.update_rule.enabled:
                param.update_rule._init_states(param)

    def _frozen_key(self):
        fused, reporters = self._context.fused, chainer.reporter._get_reporters()
        # What a step reports without anybody listening is lost, and nobody's name is asked for.
        name = None
        if reporters:
            name = reporters[-1]._observer_names.get(id(self._optimizers['main'].target), '')
        return (*self._frozen.key(), None if fused is None else fused.frozen(), name)

    def _why_not(self):
        """Return what (str or None) rules captured steps out for good."""
        optimizer = self._optimizers['main']
        if self.input_device is None or self.input_device.xp is not cuda.cupy:
            return 'CUDA graphs need a GPU, the device is %s' % (
                'not given' if self.input_device is None else self.input_device.name
            )
        if not isinstance(optimizer, chainer.GradientMethod):
            return 'the optimizer, %s, is no GradientMethod' % type(optimizer).__name__
        if type(optimizer).update is not chainer.GradientMethod.update:
            return 'the optimizer, %s, has a method update of its own' % type(optimizer).__name__
        for path, param in optimizer.target.namedparams(include_uninit=False):
            if param.device != self.input_device:
                return "parameter '%s' is on %s, the device is %s" % (
                    path,
                    param.device.name,
                    self.input_device.name,
                )
        return None

    def _why_not_now(self):
        """Return what (str or None) rules a captured step out at this moment."""
        if self._optimizers['main']._loss_scale is not None:
            return 'the optimizer scales the loss'
        return self._frozen.onlooker()

    def _prepare(self):
        """Make what all programs share; return what (str or None) stands in the way."""
        device, optimizer = self.input_device, self._optimizers['main']
        chainer_nodes.install()
        capturer = Capturer(device)
        try:
            blas = blas_for(capturer, device)
        except Exception as error:
            return (
                'a cuBLAS handle of its own could not be made, for which nvmath-python, or the '
                'library that CuPy has loaded, is asked: %r' % error
            )
        reason = why_not(optimizer)
        if reason is not None:
            self._warn('GraphUpdater updates eagerly after each replay: ' + reason)
        loss_func = self.loss_func or optimizer.target
        self._frozen = Frozen(optimizer.target, loss_func)
        self._context = Context(
            capturer,
            blas,
            self.seed,
            optimizer,
            loss_func,
            FusedUpdate(optimizer) if reason is None else None,
            self._frozen,
            device,
        )
        self._made_for = self._making()
        return None

    def _making(self):
        """Return what (list) the context was made for, as it is now."""
        optimizer = self._optimizers['main']
        rules = [param.update_rule for param, _ in self._frozen.params]
        made_for = [self.loss_func, optimizer.target, *rules]
        for owner in (optimizer, *rules):
            if owner is not None:
                made_for += owner._hookable._pre_update_hooks.values()
                made_for += owner._hookable._post_update_hooks.values()
        return made_for

    def _convert(self, examples):
        return convert._call_converter(self.converter, examples, self.input_device)

    def _train_eagerly(self, examples):
        optimizer = self._optimizers['main']
        loss_func = self.loss_func or optimizer.target
        in_arrays = self._convert(examples)
        if isinstance(in_arrays, tuple):
            optimizer.update(loss_func, *in_arrays)
        elif isinstance(in_arrays, dict):
            optimizer.update(loss_func, **in_arrays)
        else:
            optimizer.update(loss_func, in_arrays)

    def _warn(self, text):
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def serialize(self, serializer):
        super().serialize(serializer)
        try:
            self.seed = int(serializer('seed', numpy.int64(self.seed)))
        except KeyError:
            pass  # a snapshot of a StandardUpdater
        if isinstance(serializer, chainer.Deserializer):
            self._context = None  # it knows the old seed
            self._programs.clear()
