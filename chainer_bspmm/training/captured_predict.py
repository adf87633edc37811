"""`captured_predict`: predictions for many molecules, each batch one launch of a CUDA graph."""
import collections
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import warnings

import numpy
from tqdm import tqdm

import chainer
from chainer.backends import cuda
from chainer.dataset import convert
from chainer_chemistry.models.prediction import Classifier

from chainer_bspmm.backend import step
from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.dataset import smiles as parsing
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.sparse import validate
from chainer_bspmm.training import chainer_nodes
from chainer_bspmm.training import feeds
from chainer_bspmm.training import state
from chainer_bspmm.training import step_program
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.frozen import Frozen
from chainer_bspmm.training.graph_updater import MAX_PROGRAMS
from chainer_bspmm.training.graph_updater import MAX_UNUSED
from chainer_bspmm.training.inputs import blas_for
from chainer_bspmm.training.inputs import Inputs
from chainer_bspmm.training.step_program import CannotCapture
from chainer_bspmm.training.step_program import StepDiffers

BATCH_SIZE = 1024
CHUNKS_AHEAD = 4  # chunks of SMILES that every process may be ahead of the predictions

# index: (n,) int64, positions in the input; values: (n, ...), their predictions; failures: list of
# Failure, the SMILES that could not be used and were found since the last one.
Predictions = collections.namedtuple('Predictions', 'index values failures')

# Batches: what is predicted at a time; index and failures as above, examples None where there is
# none.
_Batch = collections.namedtuple('_Batch', 'index examples failures')


class _Host:
    """Values that are on the host already."""

    def __init__(self, array):
        self._array = array

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
        array = self._array
        self._event.synchronize()
        return numpy.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape).copy()


class _Program:
    """The prediction of one layout of a batch, to be captured; `held` must not go until then."""

    def __init__(self, predictor, batch, capacity, held):
        self.held = held
        self._predictor = predictor
        self._inputs = Inputs(predictor.capturer, predictor.blas, 0, predictor.device, batch,
                              capacity)
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
        expected = self._predictor.eager(examples)
        again = self._predictor.eager(examples)
        differs = _difference(again, expected)
        if differs:
            raise CannotCapture('one batch gives another prediction when it is run twice: %s'
                                % differs)
        self._inputs.send(batch, 0)
        differs = _difference(self._run(), expected)
        if differs:
            raise CannotCapture(
                'with rows that belong to no molecule at the end of a batch the model gives '
                'another prediction: a link looks at all rows alike: %s' % differs)
        try:
            self._replay, self._values = self._predictor.capturer.capture(self._run)
        except Exception as error:
            raise CannotCapture(step_program.blame(error, self._predictor.model)) from error

    def replay(self, batch, examples):
        """Return the predictions of a batch, in the array that the next replay writes.

        The first two replays, and one in every 2,000, are compared with eager predictions.

        Raises:
            CannotCapture: one of the first two differs. StepDiffers: a later one.
        """
        self._inputs.send(batch, 0)
        self._replay()
        if self._n_replays == 1 or not self._n_replays % step_program.CHECK_EVERY:
            differs = _difference(self._values, self._predictor.eager(examples))
            if differs:
                text = ('a replay gave another prediction than the model run eagerly: something '
                        'that it reads was frozen when it was captured: %s' % differs)
                raise (StepDiffers if self._n_replays > 1 else CannotCapture)(text)
        self._n_replays += 1
        return self._values

    def _run(self):
        with step.under_way(self._inputs.step):
            return self._predictor.values(self._inputs.arrays())


def _difference(found, expected):
    """Return how much (str or None) two arrays differ; NaN and infinite values may be in both."""
    found, expected = cuda.to_cpu(found), cuda.to_cpu(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return '%s of shape %s in place of %s of shape %s' % (
            found.dtype, found.shape, expected.dtype, expected.shape)
    if found.dtype.kind != 'f':  # classes, where rounding may decide a tie
        return None if (found == expected).mean() > 0.99 else 'most values'
    same = ~numpy.isfinite(expected) & (
        (found == expected) | (numpy.isnan(found) & numpy.isnan(expected)))
    arrays = ({'values': numpy.where(same, found.dtype.type(0), array)}
              for array in (found, expected))
    return state.difference(*arrays, step_program.SPARE_TOLERANCE[found.dtype.name])


class _Predictor:
    """Predict batch after batch: the first of a layout eagerly, the others by replays."""

    def __init__(self, model, function, device, converter, n_inputs, dataset):
        self.model = model
        self.device = device
        self._function = function
        self._converter = converter
        self._n_inputs = n_inputs
        self._dataset = dataset
        self._frozen = Frozen(model, function)
        self._reason = None  # why nothing can be captured
        self._warned = set()
        self._programs = collections.OrderedDict()
        self._capacities = {}
        self._n_unused = 0
        self._last_key = None
        self.capturer = None

    def predict(self, examples):
        """Launch the prediction of a batch; return what gives its values when they are there."""
        if not isinstance(self._converter, CSRConverter):
            examples = [examples[i] for i in range(len(examples))]
        if self.device.xp is not cuda.cupy:
            return _Host(self.eager(examples))
        reason = self._reason or self._why_not_now()
        if reason is None:
            try:
                return self._captured(examples)
            except (feeds.NoSparseBatch, CannotCapture) as error:
                reason = self._reason = str(error)
                self._programs.clear()
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn('captured_predict predicts eagerly: ' + reason, stacklevel=3)
        with chainer.using_device(self.device):
            return _Outgoing(self.eager(examples))

    def close(self):
        """Give up the graphs, which know this object."""
        self._programs.clear()

    def eager(self, examples):
        """Return the values of a batch, as the model gives them without anything of this file."""
        with chainer.using_device(self.device):
            arrays = convert._call_converter(self._converter, examples, self.device)
            return self.values(arrays if isinstance(arrays, tuple) else (arrays,), len(examples))

    def values(self, arrays, n_graphs=None):
        """Return what the function makes of a batch, an array with a row for each molecule."""
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            values = self._function(*arrays[:self._n_inputs])
        values = values.array if isinstance(values, chainer.Variable) else values
        xp = self.device.xp
        if not isinstance(values, xp.ndarray):
            raise TypeError('predict: expected an array on %s, got %s'
                            % (self.device.name, type(values).__name__))
        n_graphs = arrays[1].n_graphs if n_graphs is None else n_graphs
        if not values.ndim or len(values) != n_graphs:
            raise ValueError('predict: expected a row for each of %d molecules, got shape %s'
                             % (n_graphs, values.shape))
        return xp.ascontiguousarray(values)

    def _captured(self, examples):
        if self.capturer is None:
            self._prepare()
        batch = feeds.batch_of(examples, self._converter, self.device)
        n_graphs = batch.form.n_graphs
        if n_graphs not in self._capacities:
            self._capacities[n_graphs] = feeds.capacities(self._dataset, n_graphs)
        need = batch.need if isinstance(self._dataset, SparseDataset) else _roomy(batch.need)
        capacity = self._capacities[n_graphs].of(need)
        key = batch.form, batch.source, capacity, self._frozen_key()
        with self.capturer.ordered():
            program = self._programs.get(key)
            if program is None:
                self._remember(key, _Program(self, batch, capacity, self._frozen.held()))
                return _Outgoing(self.eager(examples))
            self._n_unused = 0
            self._programs.move_to_end(key)
            if not program.is_captured:
                program.capture(batch, examples)
            return _Outgoing(program.replay(batch, examples))

    def _remember(self, key, program):
        """Note a layout: its next batch is captured, if there is one."""
        self._n_unused += 1
        if self._n_unused > MAX_UNUSED:
            raise CannotCapture('no prediction can be replayed, for %s changes with every batch'
                                % self._frozen.changed(self._last_key, key[-1]))
        self._last_key = key[-1]
        self._programs[key] = program
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)

    def _frozen_key(self):
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            return self._frozen.key()

    def _prepare(self):
        chainer_nodes.install()
        self.capturer = Capturer(self.device)
        self.blas = blas_for(self.capturer, self.device)

    def _why_not_now(self):
        if chainer.is_debug():
            return 'Chainer is in debug mode'
        hook = self._frozen.hooks()
        return hook and 'the hook %s is there, which wants to see every call' % hook


def _roomy(need):
    """Return a `Capacity` that lets molecules grow a while: where the largest is not known yet."""
    return need._replace(max_rows=1 << need.max_rows.bit_length(),
                         max_entries=1 << need.max_entries.bit_length())


def _of_data_set(data, batch_size):
    """Yield batches of a data set: slices of a sparse one, lists of examples of any other."""
    for first in range(0, len(data), batch_size):
        last = min(first + batch_size, len(data))
        examples = (data[first:last] if isinstance(data, SparseDataset) else
                    [data[i] for i in range(first, last)])
        yield _Batch(numpy.arange(first, last), examples, [])


def _of_smiles(smiles, preprocessor, batch_size, n_processes):
    """Yield batches of the molecules of SMILES, full ones but for the last."""
    parts, kept, failures = [], [], []
    for part, _, new, failed in _parsed(smiles, preprocessor, n_processes):
        parts.append(part)
        kept += new
        failures += failed
        n_full = len(kept) // batch_size * batch_size
        if n_full:
            molecules = Molecules.concatenate(parts)
            for first in range(0, n_full, batch_size):
                order = numpy.arange(first, first + batch_size)
                yield _Batch(numpy.array(kept[first:first + batch_size]),
                             SparseDataset(molecules, order), failures)
                failures = []
            parts = [molecules.take(numpy.arange(n_full, len(kept)))]
            kept = kept[n_full:]
    if kept:
        yield _Batch(numpy.array(kept), SparseDataset(Molecules.concatenate(parts)), failures)
    elif failures:
        yield _Batch(numpy.zeros(0, int), None, failures)


def _parsed(smiles, preprocessor, n_processes):
    """Yield what `from_smiles` makes of every chunk, in order, a few chunks ahead at most."""
    smiles = iter(smiles)
    head = list(itertools.islice(smiles, parsing.LEAST_PARALLEL))
    if n_processes is None:
        n_processes = parsing._n_cpus() if len(head) == parsing.LEAST_PARALLEL else 1
    task = functools.partial(parsing._chunk, preprocessor)
    chunks = _chunks(itertools.chain(head, smiles))
    if n_processes == 1:
        yield from map(task, chunks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        n_processes, initializer=gc.freeze)  # forked, they leave this process's CUDA objects alone
    try:
        waiting = collections.deque()
        for chunk in chunks:
            waiting.append(pool.submit(task, chunk))
            if len(waiting) >= CHUNKS_AHEAD * n_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(smiles):
    first = 0
    while True:
        chunk = list(itertools.islice(smiles, parsing.CHUNK))
        if not chunk:
            return
        yield first, chunk
        first += len(chunk)


def _preprocessor(method):
    try:
        from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
    except ImportError as error:
        raise ImportError('method: SMILES need RDKit: pip install rdkit (%s)' % error) from error
    if isinstance(method, str):
        validate.one_of('method', method, preprocess_method_dict)
        method = preprocess_method_dict[method]()
    parsing._kind(method)
    return method


def _composed(model, predict, postprocess_fn):
    if predict is None:
        predict = getattr(model, 'predictor', model)
        if postprocess_fn is None and isinstance(model, Classifier):
            postprocess_fn = chainer.functions.softmax
    if postprocess_fn is None:
        return predict
    return functools.partial(_postprocessed, postprocess_fn, predict)


def _postprocessed(postprocess_fn, predict, *inputs):
    return postprocess_fn(predict(*inputs))


def _stream(predictor, batches, total):
    """Yield `Predictions`; the next batch is launched before one is waited for."""
    first_failure, n_failures, n_seen = None, 0, 0
    shape, dtype, waiting = (), numpy.float32, None
    # The graphs go even where the caller stops in the middle, and do not wait for the collector.
    with contextlib.closing(batches), contextlib.closing(predictor), tqdm(
            total=total, desc='captured_predict', leave=False, disable=None) as bar:
        for batch in itertools.chain(batches, [None]):
            launched = None
            if batch is not None and batch.examples is not None:
                launched = predictor.predict(batch.examples)
            if waiting is not None:
                last, values = waiting
                values = numpy.zeros((0, *shape), dtype) if values is None else values.wait()
                shape, dtype = values.shape[1:], values.dtype
                n_new = len(last.index) + len(last.failures)
                n_seen += n_new
                n_failures += len(last.failures)
                first_failure = first_failure or (last.failures or [None])[0]
                bar.update(n_new)
                yield Predictions(last.index, values, last.failures)
            waiting = batch and (batch, launched)
    if n_failures:
        warnings.warn('captured_predict: %d of %d SMILES could not be used, the first, at position '
                      '%d: %r: %s' % (n_failures, n_seen, *first_failure), stacklevel=2)


def captured_predict(model, data, device=None, batch_size=BATCH_SIZE, method=None, predict=None,
                     postprocess_fn=None, converter=concat_mols, n_inputs=None, n_processes=None):
    """Predict for many molecules with a model in test mode, batch by batch as they are ready.

    On a GPU the first batch of a layout (number of molecules, and one of a few buffer sizes) is
    predicted eagerly, the second is captured in a CUDA graph, all others replay it. While the GPU
    works on a batch the one before it is given out. On the CPU batches are predicted one by one.

        for index, values, failures in captured_predict(model, smiles, method='rsgcn'):
            ...  # values[i] belongs to smiles[index[i]]

    What cannot be captured is predicted eagerly, with one warning that names the cause: a model
    that asks the device for values or copies host data, hooks, converters that make no packed
    batch, dense models among them. When a graph is captured, at its second replay, and at one in
    every 2,000, its predictions are compared with the eager ones.

    Args:
        model (chainer.Link): on its device, such as a Regressor or Classifier of Chainer Chemistry.
        data: a data set that the converter takes, a `SparseDataset` or a `DeviceDataset` (of which
            nothing is sent but the numbers of the molecules); with ``method`` an iterable of SMILES
            (str), which is read a little ahead of the predictions, and may be endless.
        device (device specifier): None means the model's, and no other is taken.
        batch_size (int): molecules of a batch; the last one is smaller.
        method (MolPreprocessor or str): how to parse SMILES, as in `dataset.from_smiles`.
        predict (callable): (atoms, adj, ...) -> Variable or array with a row for each molecule;
            None means ``model.predictor``, or the model where it has none. What it reads from
            Python besides attributes of the model must stay as it is.
        postprocess_fn (callable): of what ``predict`` returns. Where both are None, it is softmax
            for a Classifier, as in its ``predict_proba``; models of several labels want
            ``chainer.functions.sigmoid``.
        converter (callable): makes packed sparse batches.
        n_inputs (int): so many columns of a batch go to ``predict``. None means 2, atoms and
            adjacency, of a data set, whose other columns are labels; of SMILES all.
        n_processes (int): that parse SMILES; None means one for each CPU, but only this one below
            1000 molecules.

    Returns:
        generator of Predictions: ``index``, (n,) int64, positions in ``data``, ascending over all;
        ``values``, (n, ...) array on the host; ``failures``, list of ``Failure(position, smiles,
        reason)``: SMILES that could not be used, each once, after which a warning at the end counts
        them. The last one may have no rows.

    Raises:
        ImportError, TypeError, ValueError: of ``method``, as `dataset.from_smiles`.
        TypeError: SMILES without ``method``, ``data`` is one string, ``model`` no Link, or
        ``predict`` returns no array.
        ValueError: the model is on another device, or ``predict`` returns another number of rows.
        StepDiffers (RuntimeError): a checked replay did not pass after others had been given out.

    Note:
        Results are copied to the host asynchronously; waiting for them is the only synchronisation
        but for the checks. Parameters may be changed in place between batches; do not move them.
    """
    batch_size = validate.count('batch_size', batch_size, 1)
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)
    if device is not None and chainer.get_device(device) != model.device:
        raise ValueError('device: expected that of the model, %s, got %s; '
                         'model.to_device(device) moves it' % (
                             model.device.name, chainer.get_device(device).name))
    if n_inputs is not None:
        n_inputs = validate.count('n_inputs', n_inputs, 1)
    if isinstance(data, (str, bytes)):
        raise TypeError('data: expected a data set or an iterable of SMILES, got one string')
    total = len(data) if hasattr(data, '__len__') else None
    if method is not None:
        if n_processes is not None:
            n_processes = validate.count('n_processes', n_processes, 1)
        batches = _of_smiles(data, _preprocessor(method), batch_size, n_processes)
    else:
        if total is None or (total and isinstance(data[0], str)):
            raise TypeError('data: expected a data set, or method= to go with SMILES, got %s'
                            % type(data).__name__)
        batches = _of_data_set(data, batch_size)
        n_inputs = 2 if n_inputs is None else n_inputs
    predictor = _Predictor(model, _composed(model, predict, postprocess_fn), model.device,
                           converter, n_inputs, data)
    return _stream(predictor, batches, total)
