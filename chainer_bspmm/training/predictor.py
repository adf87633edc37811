"""Predict batches: the first of a layout eagerly, the others by a captured CUDA graph."""

from __future__ import annotations

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset import convert

from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.training import chainer_nodes, state
from chainer_bspmm.training.driver import Driver, is_on_gpu
from chainer_bspmm.training.programs import blame, CannotCapture, Program, spare_tolerance
from chainer_bspmm.training.programs import StepDiffers
from chainer_bspmm.training.reports import Reports


class _Outgoing:
    """Values on their way to the host: copied on the current stream into pinned memory."""

    def __init__(self, array):
        cupy = cuda.cupy
        self._memory = None
        self._array = array  # until it was copied
        if isinstance(array, numpy.ndarray):
            self._array = array.copy()  # a model may overwrite its own
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


class _Program(Program):
    """The prediction of one layout of a batch."""

    _driver: Replays
    _reports: Reports | None

    def check_spare_rows(self, batch, examples):
        """Run a batch twice eagerly, then in the buffers; raise CannotCapture if they differ."""
        driver = self._driver
        expected = self.eager(examples)
        if isinstance(expected, dict):
            self._reports = Reports(driver.device)
        differs = _difference(self.eager(examples), expected, driver.target)
        if differs:
            text = 'one batch gives another prediction when it is run twice: %s'
            raise CannotCapture(text % differs)
        self.stage(batch)
        try:
            differs = _difference(self.run(), expected, driver.target)
        except Exception as error:
            raise CannotCapture(blame(error, driver.target)) from error
        if differs:
            raise CannotCapture(
                'with rows that belong to no molecule at the end of a batch the model gives '
                'another prediction: a link treats every row as an atom: %s' % differs
            )

    def capture(self):
        """Capture the prediction; nothing runs."""
        graph, self._values = self._capture(self._run_and_report, self._driver.target)
        self._graph = graph

    def replay(self, batch, examples):
        """Return the values of a batch: numbers, and arrays that the next replay overwrites."""
        # A replay that differs is CannotCapture until an unchecked one was returned.
        self.stage(batch)
        self.launch()
        values = self._values
        if self._reports is not None:
            values = dict(values, **self._reports.numbers())
        if self.is_check_due():
            driver = self._driver
            differs = _difference(values, self.eager(examples), driver.target)
            if differs:
                text = (
                    'a replay gave another prediction than the model run eagerly: the model reads '
                    'something from Python that has changed since it was captured, and that is '
                    'not watched (docs/captured_training.md): %s' % differs
                )
                raise (StepDiffers if self._n_replays > 1 else CannotCapture)(text)
        self._n_replays += 1
        return values

    def _run_and_report(self):
        values = self.run()
        if self._reports is not None:
            self._reports.write(self._reports.among(values), self._inputs.row_address)
        return values

    def run(self, arrays=None):
        """Return the values of a batch (atoms, adj, ...); None: of the one in the buffers."""
        # What the model leaves in attributes, such as a loss, is memory of the graph.
        owners = self._driver.guards.owners
        with chainer_nodes.under_way(self._inputs.step), state.attributes_kept(owners):
            return self._driver.values(self._inputs.arrays() if arrays is None else arrays)

    def eager(self, examples):
        """Return the values of a batch without buffers, by the kernels of the graph."""
        # Those of Chainer that reduce a whole array take seconds to compile, anew for most sizes.
        driver = self._driver
        with driver.capturer.ordered(), chainer_nodes.under_way(self._inputs.step):
            try:
                return driver.eager(examples)
            except Exception as error:  # raised again without the kernels of the graph
                raise CannotCapture(blame(error, driver.target)) from error


def _difference(values, expected, model):
    """Return the difference (str or None) of two predictions; equal NaN and infinities are none."""
    if isinstance(values, dict):
        if values.keys() != expected.keys():
            return '%s instead of %s' % (sorted(values), sorted(expected))
        for name, array in values.items():
            differs = _difference(array, expected[name], model)
            if differs:
                return '%s: %s' % (name, differs)
        return None
    values, expected = cuda.to_cpu(values), cuda.to_cpu(expected)
    kinds = ['%s of shape %s' % (array.dtype, array.shape) for array in (values, expected)]
    if kinds[0] != kinds[1]:
        return ' instead of '.join(kinds)
    if values.dtype.kind != 'f':  # classes, where rounding may decide a tie
        n_wrong = numpy.count_nonzero(values != expected)
        return None if n_wrong <= values.size * 0.01 else '%d of %d values' % (n_wrong, values.size)
    tolerance = spare_tolerance(values.dtype, model)
    return state.difference({'values': values}, {'values': expected}, tolerance)


class Replays(Driver):
    """Replay a function for batch after batch; the first of a layout is run eagerly."""

    what = 'prediction'
    who = 'captured_predict predicts'
    knows_sizes = False
    raised: tuple[type[Exception], ...] = (CannotCapture,)  # by a replay: nothing more is captured

    def __init__(self, model, function, converter, dataset):
        super().__init__(model.device)
        self.target = model
        self._function = function
        self._converter = converter
        self._dataset = dataset

    def close(self):
        """Give back the graphs and their memory, once nothing reads their results any more."""
        self.forget()
        self.examples.close()
        self.resident = None
        if self.capturer is not None:
            capturer = self.capturer
            self.capturer = None
            self.blas = None
            capturer.free_unused()

    def eager(self, examples):
        """Return the values of a batch as the model gives them, without buffers and graphs."""
        arrays = convert._call_converter(self._converter, examples, self.device)
        return self.values(arrays if isinstance(arrays, tuple) else (arrays,), len(examples))

    def values(self, arrays, n_graphs=None):
        """Return the values of a batch, an array or name -> array; n_graphs None: see adj."""
        raise NotImplementedError

    def _values_of(self, examples):
        """Return the values of a batch, replayed where possible: the next may overwrite them."""
        reason, program, batch = self.program(
            examples, self._converter, self._dataset, self._function
        )
        if reason is None:
            try:
                is_captured = program.is_captured
                return program.replay(batch, examples) if is_captured else program.eager(examples)
            except self.raised as error:
                reason = self.give_up(str(error))
        self.warn(reason)
        return self.eager(examples)

    def _new(self, batch, capacity, counter):
        program = _Program(self, batch, capacity)
        if not self.programs:
            arrays = batch.arrays_on(self.device)
            program.compile_kernels(lambda: (program.run(), program.run(arrays)))
        return program

    def _capture(self, program, batch, examples):
        with self.capturer.ordered():
            program.check_spare_rows(batch, examples)
            program.capture()


class Predictor(Replays):
    """Predict batch after batch, from the first n_inputs columns (None: all)."""

    def __init__(self, model, function, converter, n_inputs, dataset):
        super().__init__(model, function, converter, dataset)
        self._n_inputs = n_inputs
        self._outgoing = None  # of the last batch

    def predict(self, examples):
        """Launch the prediction of a batch; ``wait()`` of what is returned gives a NumPy array."""
        self.watched = None
        if not isinstance(self._converter, CSRConverter):
            examples = [examples[i] for i in range(len(examples))]
        with (
            chainer.using_device(self.device),  # its current stream is used throughout
            chainer.using_config('train', False),
            chainer.no_backprop_mode(),
        ):
            run = self._values_of if is_on_gpu(self.device) else self.eager
            self._outgoing = _Outgoing(run(examples))
        return self._outgoing

    def close(self):
        """Give back the graphs and their memory, once the last batch has left its pinned memory."""
        if self._outgoing is not None:
            self._outgoing.wait()
        super().close()

    def values(self, arrays, n_graphs=None):
        """Return the function's values for a batch, an array with a row for each molecule."""
        values = chainer.as_array(self._function(*arrays[: self._n_inputs]))
        xp = self.device.xp
        if not isinstance(values, xp.ndarray):
            names = self.device.name, type(values).__name__
            raise TypeError('predict: expected an array on %s, got %s' % names)
        n_graphs = arrays[1].n_graphs if n_graphs is None else n_graphs
        if not values.ndim or len(values) != n_graphs:
            text = 'predict: expected a row for each of %d molecules, got shape %s'
            raise ValueError(text % (n_graphs, values.shape))
        return xp.ascontiguousarray(values)
