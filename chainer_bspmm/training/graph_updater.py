"""`GraphUpdater`: Chainer's StandardUpdater, each training step one launch of a CUDA graph."""
import collections
import contextlib
import warnings

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset import convert
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.backend import gemm
from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.training import chainer_nodes
from chainer_bspmm.training import feeds
from chainer_bspmm.training.capacities import Capacities
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.frozen import Frozen
from chainer_bspmm.training.fused_update import FusedUpdate
from chainer_bspmm.training.fused_update import why_not
from chainer_bspmm.training.step_program import CannotCapture
from chainer_bspmm.training.step_program import Context
from chainer_bspmm.training.step_program import StepProgram

MAX_PROGRAMS = 16  # layouts whose graphs are kept; the one unused for longest goes
MAX_UNUSED = 32  # layouts in a row that were never seen before: something changes every step


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
        **kwargs: as StandardUpdater has them.

    Raises:
        StepDiffers (RuntimeError): a checked replay did not pass.

    Note:
        A snapshot of a StandardUpdater can be resumed with this updater, and the other way round.
        Parameters' ``grad`` arrays are overwritten by the next step. Captured steps copy nothing
        to the host: reported values are device arrays until somebody reads them.
    """

    def __init__(self, iterator, optimizer, converter=concat_mols, device=None, loss_func=None,
                 seed=None, **kwargs):
        super().__init__(iterator, optimizer, converter, device, loss_func, **kwargs)
        if seed is None:
            # Without drawing: the order of the batches shall be StandardUpdater's.
            generator = numpy.random.RandomState()
            generator.set_state(numpy.random.get_state())
            seed = int(generator.randint(2 ** 63, dtype=numpy.int64))
        if not 0 <= seed < 2 ** 63:
            raise ValueError('seed: expected at least 0 and below 2**63, got %d' % seed)
        self.seed = seed
        self._warned = set()
        self._reason = None  # why no step can be captured
        self._context = None  # made at the first step: a snapshot may change the seed until then
        self._programs = collections.OrderedDict()
        self._capacities = {}
        self._current = None  # the program whose gradients the parameters have
        self._n_unused = 0
        self._last_key = None

    @property
    def graph_nbytes(self):
        """Bytes on the GPU (int) that captured steps take, which CuPy's own pool does not count."""
        return 0 if self._context is None else self._context.capturer.nbytes

    def update_core(self):
        iterator = self._iterators['main']
        examples = iterator.next()
        # Streams and events are the current device's.
        here = contextlib.nullcontext()
        if self.input_device is not None:
            here = chainer.using_device(self.input_device)
        with here:
            self._train(examples)
        if self.auto_new_epoch and iterator.is_new_epoch:
            self._optimizers['main'].new_epoch(auto=True)

    def _train(self, examples):
        if self._context is not None and self._hooks != self._optimizer_hooks():
            self._context = None
            self._programs.clear()
        if self._reason is None and self._context is None:
            self._reason = self._why_not() or self._prepare()
        reason = self._reason or self._why_not_now()
        if reason is None:
            try:
                batch = feeds.batch_of(examples, self.converter, self.input_device)
                program = self._program(batch, examples)
            except (feeds.NoSparseBatch, CannotCapture) as error:
                reason = self._reason = str(error)
                self._programs.clear()
        if reason is not None:
            self._warn('GraphUpdater trains eagerly: ' + reason)
            self._train_eagerly(examples)
            return
        fused, optimizer = self._context.fused, self._optimizers['main']
        numbers = None if fused is None else fused.advance()
        program.stage(batch, self.iteration, numbers)
        if program.is_captured:
            reported = program.replay(program is self._current)
            self._current = program
        else:
            reported = program.run()
            self._current = None
        if chainer.reporter._get_reporters():
            chainer.report(reported)
        if fused is None:
            optimizer.update()

    def _program(self, batch, examples):
        """Return the program for a batch, captured if it was seen before."""
        capacities = self._capacities.get(batch.form.n_graphs)
        if capacities is None:
            capacities = self._capacities[batch.form.n_graphs] = self._sizes(batch)
        capacity = capacities.of(batch.need)
        key = batch.form, capacity, self._frozen_key()
        program = self._programs.get(key)
        if program is None:
            self._n_unused += 1
            if self._n_unused > MAX_UNUSED:
                raise CannotCapture('no step can be replayed, for %s changes with every step'
                                    % self._frozen.changed(self._last_key, key[-1]))
            program = StepProgram(self._context, batch, capacity)
            self._check_spare_rows(program, batch, examples)
            # That made parameters and states that were not there.
            key = batch.form, capacity, self._frozen_key()
            self._programs[key] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
            self._n_unused = 0
            if not program.is_captured:
                program.capture()
                self._current = None
        self._last_key = key[-1]
        return program

    def _check_spare_rows(self, program, batch, examples):
        numbers = self._context.fused and numpy.zeros(self._context.fused.n_numbers)
        program.stage(batch, self.iteration, numbers)
        program.check_spare_rows(self._convert(examples))
        # Lazy links have made their parameters now.
        for param in self._optimizers['main'].target.params(include_uninit=False):
            if param.update_rule is not None and param.update_rule.enabled:
                param.update_rule._init_states(param)
        if self._context.fused is not None:
            self._context.fused.prepare()

    def _frozen_key(self):
        key = self._frozen.key()
        return key if self._context.fused is None else (*key, self._context.fused.frozen())

    def _sizes(self, batch):
        dataset = getattr(self._iterators['main'], 'dataset', None)
        if not isinstance(dataset, SparseDataset):
            return Capacities(batch.form.n_graphs)
        molecules, order = dataset.molecules, dataset.order
        max_atom_id = None  # features instead
        if molecules.atoms.ndim == 1:
            max_atom_id = int(molecules.atoms.max(initial=0))
        return Capacities(batch.form.n_graphs, molecules.sizes[order], molecules.nnz[order],
                          max_atom_id)

    def _why_not(self):
        """Return what (str or None) rules captured steps out for good."""
        optimizer = self._optimizers['main']
        if self.input_device is None or self.input_device.xp is not cuda.cupy:
            return 'CUDA graphs need a GPU, the device is %s' % (
                'not given' if self.input_device is None else self.input_device.name)
        if not isinstance(optimizer, chainer.GradientMethod):
            return 'the optimizer, %s, is no GradientMethod' % type(optimizer).__name__
        if optimizer._loss_scale is not None:
            return 'the optimizer scales the loss'
        return None

    def _why_not_now(self):
        """Return what (str or None) rules a captured step out at this moment."""
        if chainer.is_debug():
            return 'Chainer is in debug mode'
        hook = self._frozen.hooks()
        return hook and 'the hook %s is there, which wants to see every call' % hook

    def _prepare(self):
        device, optimizer = self.input_device, self._optimizers['main']
        chainer_nodes.install()
        reason = why_not(optimizer)
        if reason is not None:
            self._warn('GraphUpdater updates eagerly after each replay: ' + reason)
        capturer = Capturer(device)
        loss_func = self.loss_func or optimizer.target
        with chainer.using_device(device), capturer.stream:
            blas = gemm.Blas()
            blas.use(capturer.stream)
        self._context = Context(capturer, blas, self.seed, optimizer, loss_func,
                                FusedUpdate(optimizer) if reason is None else None, device)
        self._frozen = Frozen(optimizer, loss_func)
        self._hooks = self._optimizer_hooks()

    def _optimizer_hooks(self):
        hookable = self._optimizers['main']._hookable
        return [*hookable._pre_update_hooks.values(), *hookable._post_update_hooks.values()]

    def _convert(self, examples):
        return convert._call_converter(self.converter, examples, self.input_device)

    def _train_eagerly(self, examples):
        self._current = None
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
