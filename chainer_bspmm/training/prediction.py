"""Predictions: the first batch of a form runs eagerly, others by a captured CUDA graph."""

from __future__ import annotations

import weakref

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.training import chainer_nodes, snapshot
from chainer_bspmm.training.batches import Conversion
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.driver import Driver, is_on_gpu
from chainer_bspmm.training.program import StepDiffers
from chainer_bspmm.training.work import spare_tolerance, Work


VALUES = 'values'  # name of the results of a `Predictor`


class _Outgoing:
    """Values on their way to the host: copied to pinned memory, on the current stream."""

    def __init__(self, array):
        cupy = cuda.cupy
        self._memory = None
        self._array = array  # held until it was copied
        if isinstance(array, numpy.ndarray):
            self._array = array.copy()  # because a model may overwrite its array
            return
        self._memory = cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1))
        stream = cupy.cuda.get_current_stream()
        if array.nbytes:
            array.data.copy_to_host_async(self._memory.ptr, array.nbytes, stream)
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    def wait(self):
        """Return a new NumPy array (synchronises with the copy to the host)."""
        if self._memory is not None:
            array = self._array
            self._event.synchronize()
            values = numpy.frombuffer(self._memory, array.dtype, array.size)
            self._array = values.reshape(array.shape).copy()
            self._memory = None
        return self._array


class Prediction(Work):
    """Prediction of the values of a batch; ``values(arrays)`` returns name -> array."""

    changes_parameters = False

    def __init__(self, name, model, values):
        self.name = name
        self._model = model
        # `values` is a method of the driver, which holds this program. The reference is weak, so
        # that both are freed without a garbage collection.
        self._values = weakref.WeakMethod(values)

    def under_way(self, step, alone):
        return chainer_nodes.under_way(step)

    def compute(self, arrays, mode, alone=False):
        return self._values()(arrays)

    def difference(self, actual, expected):
        if actual.keys() != expected.keys():
            return '%s instead of %s' % (sorted(actual), sorted(expected))
        for name, array in actual.items():
            differs = _difference(array, expected[name], self._model)
            if differs:
                return '%s: %s' % (name, differs)
        return None


def _difference(values, expected, model):
    """Return the difference (str or None) of two predictions, in which NaN equals NaN."""
    values, expected = cuda.to_cpu(values), cuda.to_cpu(expected)
    kinds = ['%s of shape %s' % (array.dtype, array.shape) for array in (values, expected)]
    if kinds[0] != kinds[1]:
        return ' instead of '.join(kinds)
    if values.dtype.kind != 'f':  # they may be classes, where rounding may decide a tie
        n_wrong = numpy.count_nonzero(values != expected)
        return None if n_wrong <= values.size * 0.01 else '%d of %d values' % (n_wrong, values.size)
    tolerance = spare_tolerance(values.dtype, model)
    return snapshot.difference({'values': values}, {'values': expected}, tolerance)


class PredictionDriver(Driver):
    """Driver that replays a function for one batch after another, the first of a form eagerly."""

    name = 'prediction'
    who = 'captured_predict predicts'
    knows_sizes = False
    raises_differences = True  # whether StepDiffers is raised if values were returned unchecked

    def __init__(self, model, function, converter, dataset):
        super().__init__(model.device)
        self.target = model
        self._function = function
        self._converter = converter
        self._dataset = dataset
        self._has_unchecked = False  # whether the values of a replay were returned unchecked

    def close(self):
        """Free the graphs and their memory; call it once nothing reads their results any more."""
        session = self.session
        self.drop()
        self.examples.close()
        if session is not None:
            session.capturer.free_unused()

    def conversion(self, examples):
        """Return the `Conversion` of a batch."""
        return Conversion(examples, self._converter, self.device)

    def eager(self, conversion):
        """Return name -> value for a batch, by the model itself, without buffers and graphs."""
        arrays = conversion.on_device()
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        return self.values(arrays, len(conversion.examples))

    def values(self, arrays, n_graphs=None):
        """Return name -> value for the arrays of a batch; if n_graphs is None, `adj` has it."""
        raise NotImplementedError

    def values_of(self, conversion):
        """Return name -> value, replayed if possible; the next replay may overwrite them."""
        reason, program, batch = self.program(conversion, self._dataset, self._function)
        if program is not None:
            try:
                program.stage(batch)
                if not program.is_captured:
                    values = program.run(batch)
                    self.keep(program)
                    return values
                is_checked = program.is_check_due()
                values = program.replay()
                self._has_unchecked = self._has_unchecked or not is_checked
                return values
            except CannotCapture as error:
                reason = self.give_up(str(error))
            except StepDiffers as error:
                reason = self.give_up(str(error))
                if self._has_unchecked and self.raises_differences:
                    raise
        if reason is not None:
            self.warn(reason)
        return self.eager(conversion)

    def _try_out(self, program, batch):
        """Do nothing: the capture tries a program out, because many forms come only once."""

    def _work(self, batch):
        return Prediction(self.name, self.target, self.values)


class Predictor(PredictionDriver):
    """Driver of predictions from the first n_inputs columns of batches (None: all)."""

    def __init__(self, model, function, converter, n_inputs, dataset):
        super().__init__(model, function, converter, dataset)
        self._n_inputs = n_inputs
        self._outgoing = None  # `_Outgoing` of the last batch

    def predict(self, examples):
        """Launch the prediction of a batch; ``wait()`` of the result returns a NumPy array."""
        self.watched = None
        if not isinstance(self._converter, CSRConverter):
            examples = [examples[i] for i in range(len(examples))]
        with (
            chainer.using_device(self.device),  # all work is on the device's current stream
            chainer.using_config('train', False),
            chainer.no_backprop_mode(),
        ):
            run = self.values_of if is_on_gpu(self.device) else self.eager
            self._outgoing = _Outgoing(run(self.conversion(examples))[VALUES])
        return self._outgoing

    def close(self):
        """Free the graphs and their memory, after the last batch was copied from them."""
        if self._outgoing is not None:
            self._outgoing.wait()
        super().close()

    def values(self, arrays, n_graphs=None):
        """Return the function's result for a batch, an array with a row for each molecule."""
        values = chainer.as_array(self._function(*arrays[: self._n_inputs]))
        xp = self.device.xp
        if not isinstance(values, xp.ndarray):
            names = self.device.name, type(values).__name__
            raise TypeError('predict: expected an array on %s, got %s' % names)
        n_graphs = arrays[1].n_graphs if n_graphs is None else n_graphs
        if not values.ndim or len(values) != n_graphs:
            text = 'predict: expected a row for each of %d molecules, got shape %s'
            raise ValueError(text % (n_graphs, values.shape))
        return {VALUES: xp.ascontiguousarray(values)}
