"""Predict batches: the first of a layout eagerly, the others by a captured CUDA graph."""

import warnings

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset import convert

from chainer_bspmm.cuda import step
from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.training import chainer_nodes
from chainer_bspmm.training import batches
from chainer_bspmm.training import state
from chainer_bspmm.training import step_program
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.guards import Frozen
from chainer_bspmm.training.inputs import blas_for
from chainer_bspmm.training.inputs import Inputs
from chainer_bspmm.training.programs import Programs
from chainer_bspmm.training.step_program import CannotCapture
from chainer_bspmm.training.step_program import StepDiffers

# Frames from a warning here to the loop over captured_predict's generator: _launched, predict, and
# the two generators between them.
CALLER = 5


class _Host:
    """Values that are on the host already: a copy, for a model may write where they are."""

    def __init__(self, array):
        self._array = array.copy()

    def wait(self):
        return self._array


class _Outgoing:
    """Values on their way to the host: copied on the current stream into pinned memory."""

    def __init__(self, array):
        cupy = cuda.cupy
        self._array = array  # until it was copied
        self._memory = cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1))
        stream = cupy.cuda.get_current_stream()
        if array.nbytes:
            array.data.copy_to_host_async(self._memory.ptr, array.nbytes, stream)
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    def wait(self):
        """Return a NumPy array of its own (synchronises with this copy)."""
        if self._memory is not None:
            array = self._array
            self._event.synchronize()
            self._array = (
                numpy.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape).copy()
            )
            self._memory = None
        return self._array


class _Program:
    """The prediction of one layout of a batch, to be captured; `held` must not go until then."""

    def __init__(self, owner, batch, capacity, held):
        self.held = held
        self._owner = owner
        self._inputs = Inputs(owner.capturer, owner.blas, 0, owner.device, batch, capacity)
        self._replay, self._values = None, None
        self._n_replays = 0

    @property
    def is_captured(self):
        return self._replay is not None

    def capture(self, batch, examples):
        """Capture the prediction, once batches in the buffers give what they give eagerly.

        Raises:
            CannotCapture: with what was to blame.
        """
        expected = self._owner.eager(examples)
        again = self._owner.eager(examples)
        differs = _difference(again, expected, self._owner.model)
        if differs:
            raise CannotCapture(
                'one batch gives another prediction when it is run twice: %s' % differs
            )
        self._inputs.send(batch, 0)
        try:
            differs = _difference(self._run(), expected, self._owner.model)
            if not differs:
                self._replay, self._values = self._owner.capturer.capture(self._run)
        except Exception as error:
            raise CannotCapture(step_program.blame(error, self._owner.model)) from error
        if differs:
            raise CannotCapture(
                'with rows that belong to no molecule at the end of a batch the model gives '
                'another prediction: a link looks at all rows alike: %s' % differs
            )

    def replay(self, batch, examples):
        """Return the predictions of a batch, in the array that the next replay writes.

        The first two replays, and one in every 2,000, are compared with eager predictions.

        Raises:
            CannotCapture: one of the first two differs. StepDiffers: a later one.
        """
        self._inputs.send(batch, 0)
        self._replay()
        if self._n_replays == 1 or not self._n_replays % step_program.CHECK_EVERY:
            differs = _difference(self._values, self._owner.eager(examples), self._owner.model)
            if differs:
                text = (
                    'a replay gave another prediction than the model run eagerly: something '
                    'that it reads was frozen when it was captured: %s' % differs
                )
                raise (StepDiffers if self._n_replays > 1 else CannotCapture)(text)
        self._n_replays += 1
        return self._values

    def _run(self):
        with step.under_way(self._inputs.step):
            return self._owner.values(self._inputs.arrays())


def _difference(found, expected, model):
    """Return how (str or None) two predictions differ; NaN and infinite values may be in both."""
    found, expected = cuda.to_cpu(found), cuda.to_cpu(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return '%s of shape %s in place of %s of shape %s' % (
            found.dtype,
            found.shape,
            expected.dtype,
            expected.shape,
        )
    if found.dtype.kind != 'f':  # classes, where rounding may decide a tie
        n_wrong = numpy.count_nonzero(found != expected)
        return None if n_wrong <= found.size * 0.01 else '%d of %d values' % (n_wrong, found.size)
    dtypes = found.dtype, *(param.dtype for param in model.params(include_uninit=False))
    return state.difference(
        {'values': found},
        {'values': expected},
        max(step_program.SPARE_TOLERANCE[dtype.name] for dtype in dtypes),
    )


def _roomy(need):
    """Return a `Capacity` that lets molecules grow a while: where the largest is not known yet."""
    return need._replace(
        max_rows=1 << need.max_rows.bit_length(), max_entries=1 << need.max_entries.bit_length()
    )


class Predictor:
    """Predict batch after batch: the first of a layout eagerly, the others by replays.

    Args:
        model (chainer.Link): on its device.
        function (callable): what is predicted of the first columns of a batch.
        converter (callable): makes the batches.
        n_inputs (int or None): so many columns go to ``function``; None means all.
        dataset: what the batches are from; a `SparseDataset` tells their sizes beforehand.
    """

    def __init__(self, model, function, converter, n_inputs, dataset):
        self.model = model
        self.device = model.device
        self._function = function
        self._converter = converter
        self._n_inputs = n_inputs
        self._dataset = dataset
        self._frozen = Frozen(model, function)
        self._reason = None  # why nothing can be captured
        self._warned = set()
        self._programs = Programs('prediction')
        self._capacities = {}
        self._outgoing = None  # of the last batch
        self.capturer = self.blas = None

    def predict(self, examples):
        """Launch the prediction of a batch.

        Args:
            examples (list or SparseDataset): the batch.

        Returns:
            object: its method ``wait`` returns the values, a NumPy array of its own.
        """
        if not isinstance(self._converter, CSRConverter):
            examples = [examples[i] for i in range(len(examples))]
        with chainer.using_device(self.device):  # its current stream is meant throughout
            self._outgoing = self._launched(examples)
        return self._outgoing

    def close(self):
        """Give the graphs up, and their memory, once the GPU is done with the last batch.

        Its values go to pinned memory that would be somebody else's by then.
        """
        if self._outgoing is not None:
            self._outgoing.wait()
        self._programs.clear()  # they know this object
        if self.capturer is not None:
            capturer, self.capturer, self.blas = self.capturer, None, None
            capturer.free_unused()

    def eager(self, examples):
        """Return the values of a batch, as the model gives them without anything of this file."""
        arrays = convert._call_converter(self._converter, examples, self.device)
        return self.values(arrays if isinstance(arrays, tuple) else (arrays,), len(examples))

    def values(self, arrays, n_graphs=None):
        """Return what the function makes of a batch, an array with a row for each molecule."""
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            values = self._function(*arrays[: self._n_inputs])
        values = values.array if isinstance(values, chainer.Variable) else values
        xp = self.device.xp
        if not isinstance(values, xp.ndarray):
            raise TypeError(
                'predict: expected an array on %s, got %s'
                % (self.device.name, type(values).__name__)
            )
        n_graphs = arrays[1].n_graphs if n_graphs is None else n_graphs
        if not values.ndim or len(values) != n_graphs:
            raise ValueError(
                'predict: expected a row for each of %d molecules, got shape %s'
                % (n_graphs, values.shape)
            )
        return xp.ascontiguousarray(values)

    def _launched(self, examples):
        if self.device.xp is not cuda.cupy:
            return _Host(self.eager(examples))
        reason = self._reason or self._frozen.onlooker()
        if reason is None:
            try:
                return self._captured(examples)
            except (batches.NoSparseBatch, CannotCapture) as error:
                reason = self._reason = str(error)
                self._programs.clear()
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn('captured_predict predicts eagerly: ' + reason, stacklevel=CALLER)
        return _Outgoing(self.eager(examples))

    def _captured(self, examples):
        if self.capturer is None:
            self._prepare()
        batch = batches.batch_of(examples, self._converter, self.device)
        n_graphs = batch.form.n_graphs
        if n_graphs not in self._capacities:
            self._capacities[n_graphs] = batches.capacities(self._dataset, n_graphs)
        need = batch.need if isinstance(self._dataset, SparseDataset) else _roomy(batch.need)
        capacity = self._capacities[n_graphs].of(need)
        layout = batch.form, batch.source, capacity, self._frozen_key()
        with self.capturer.ordered():
            program = self._programs.find(layout)
            if program is None:
                self._programs.expect(layout, self._frozen)
                self._programs.add(layout, _Program(self, batch, capacity, self._frozen.held()))
                return _Outgoing(self.eager(examples))
            if not program.is_captured:
                program.capture(batch, examples)
            return _Outgoing(program.replay(batch, examples))

    def _frozen_key(self):
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            return self._frozen.key()

    def _prepare(self):
        chainer_nodes.install()
        self.capturer = Capturer(self.device)
        self.blas = blas_for(self.capturer, self.device)
