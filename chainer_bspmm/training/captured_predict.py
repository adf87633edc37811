"""`captured_predict`: predictions for many molecules, each batch one launch of a CUDA graph."""

import collections
import contextlib
import functools
import warnings

import numpy
from tqdm import tqdm

import chainer
from chainer_chemistry.models.prediction import Classifier

from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.smiles import parse
from chainer_bspmm.dataset.smiles import preprocessor_of
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.sparse import validate
from chainer_bspmm.training.predictor import Predictor

BATCH_SIZE = 1024

# index: (n,) int64, positions in the input; values: (n, ...), their predictions; failures: list of
# Failure, the SMILES that could not be used and were found since the last one.
Predictions = collections.namedtuple('Predictions', 'index values failures')

# Batches: what is predicted at a time; index and failures as above, examples None where there is
# none.
_Batch = collections.namedtuple('_Batch', 'index examples failures')


def _of_data_set(data, batch_size):
    """Yield batches of a data set: slices of a sparse one, lists of examples of any other."""
    for first in range(0, len(data), batch_size):
        last = min(first + batch_size, len(data))
        examples = (
            data[first:last]
            if isinstance(data, SparseDataset)
            else [data[i] for i in range(first, last)]
        )
        yield _Batch(numpy.arange(first, last, dtype=numpy.int64), examples, [])


class _UntilError:
    """The items of an iterable until it ends or raises; `error` is what it raised."""

    error = None

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        try:
            for item in self._items:
                yield item
        except Exception as error:
            self.error = error


def _of_smiles(smiles, preprocessor, batch_size, n_processes):
    """Yield batches of the molecules of SMILES, full ones but for the last.

    Where there are as many failures without a full batch, these alone. What `smiles` raises comes
    after the last batch of those before.
    """
    smiles = _UntilError(smiles)
    parts, kept, failures = [], [], []
    with contextlib.closing(parse(smiles, preprocessor, n_processes, for_models=True)) as chunks:
        for part, _, new, failed in chunks:
            parts += [part] * bool(new)  # of an endless stream of failures nothing piles up
            kept += new
            failures += failed
            n_full = len(kept) // batch_size * batch_size
            if n_full:
                molecules = Molecules.concatenate(parts)
                for first in range(0, n_full, batch_size):
                    last = first + batch_size
                    yield _Batch(
                        numpy.array(kept[first:last], numpy.int64),
                        SparseDataset(molecules, numpy.arange(first, last)),
                        failures,
                    )
                    failures = []
                parts = [molecules.take(numpy.arange(n_full, len(kept)))]
                kept = kept[n_full:]
            if len(failures) >= batch_size:
                yield _Batch(numpy.zeros(0, numpy.int64), None, failures)
                failures = []
    if kept or failures:
        examples = SparseDataset(Molecules.concatenate(parts)) if kept else None
        yield _Batch(numpy.array(kept, numpy.int64), examples, failures)
    if smiles.error is not None:
        raise smiles.error


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


def _launched(predictor, batches):
    """Yield (batch, what gives its values), each after the next one was launched.

    What reading, parsing or predicting raises comes after the batches before it.
    """
    last = []
    try:
        for batch in batches:
            values = None if batch.examples is None else predictor.predict(batch.examples)
            yield from last
            last = [(batch, values)]
    except Exception:
        yield from last
        raise
    yield from last


def _stream(predictor, batches, total):
    """Yield `Predictions`."""
    first_failure, n_failures, n_seen = None, 0, 0
    shape, dtype = (), numpy.float32  # of values, where there are none yet
    # The graphs go even where the caller stops in the middle, and do not wait for the collector.
    with (
        contextlib.closing(batches),
        contextlib.closing(predictor),
        contextlib.closing(_launched(predictor, batches)) as launched,
        tqdm(total=total, desc='captured_predict', leave=False, disable=None) as bar,
    ):
        for batch, values in launched:
            values = numpy.zeros((0, *shape), dtype) if values is None else values.wait()
            shape, dtype = values.shape[1:], values.dtype
            n_new = len(batch.index) + len(batch.failures)
            n_seen += n_new
            n_failures += len(batch.failures)
            first_failure = first_failure or (batch.failures or [None])[0]
            bar.update(n_new)
            yield Predictions(batch.index, values, batch.failures)
    if n_failures:
        warnings.warn(
            'captured_predict: %d of %d SMILES could not be used, the first, at position '
            '%d: %r: %s' % (n_failures, n_seen, *first_failure),
            stacklevel=2,
        )


def captured_predict(
    model,
    data,
    device=None,
    batch_size=BATCH_SIZE,
    method=None,
    predict=None,
    postprocess_fn=None,
    converter=concat_mols,
    n_inputs=None,
    n_processes=None,
):
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
        method (MolPreprocessor or str): how to parse SMILES, as in `dataset.from_smiles`: as for
            the data that the model was trained with. Another may fit, and give other numbers.
        predict (callable): (atoms, adj, ...) -> Variable or array with a row for each molecule;
            None means ``model.predictor``, or the model where it has none. What it reads from
            Python besides attributes of the model must stay as it is.
        postprocess_fn (callable): of what ``predict`` returns. Where both are None, it is softmax
            for a Classifier of Chainer Chemistry, as in its ``predict_proba``; models of several
            labels want ``chainer.functions.sigmoid``.
        converter (callable): makes packed sparse batches.
        n_inputs (int): so many columns of a batch go to ``predict``. None means 2, atoms and
            adjacency, of a data set, whose other columns are labels; of SMILES all.
        n_processes (int): that parse SMILES; None means one for each CPU, but only this one below
            1000 molecules.

    Returns:
        generator of Predictions: ``index``, (n,) int64, positions in ``data``, ascending over all;
        ``values``, (n, ...) array on the host; ``failures``, list of ``Failure(position, smiles,
        reason)``: SMILES that could not be used, each once, after which a warning at the end counts
        them. There may be failures alone, ``values`` without rows: at the end, and where there are
        as many as molecules in a batch before a batch is full.

    Raises:
        ImportError, TypeError, ValueError: of ``method``, as `dataset.from_smiles`.
        TypeError: SMILES without ``method``, ``data`` is one string, ``model`` no Link, or
        ``predict`` returns no array.
        ValueError: the model is on another device, or ``predict`` returns another number of rows.
        StepDiffers (RuntimeError): a checked replay did not pass after others had been given out.
        Exception: what reading ``data``, the converter or the model raises, after the predictions
        for what was before.

    Note:
        Results are copied to the host asynchronously; waiting for them is the only synchronisation
        but for the checks. Between batches device, stream and configuration are the caller's.
        Parameters may be changed in place there; do not move them. Graphs, their memory and the
        processes that parse are gone when the generator ends or is closed. Where these are spawned
        (Windows, macOS) the calling script needs ``if __name__ == '__main__':``.

        Of SMILES, molecules without atoms or with atomic numbers that Chainer Chemistry has no
        embedding for (117 and up) are failures, too, where `dataset.from_smiles` keeps them.
    """
    batch_size = validate.count('batch_size', batch_size, 1)
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)
    if device is not None and chainer.get_device(device) != model.device:
        raise ValueError(
            'device: expected that of the model, %s, got %s; '
            'model.to_device(device) moves it'
            % (model.device.name, chainer.get_device(device).name)
        )
    if n_inputs is not None:
        n_inputs = validate.count('n_inputs', n_inputs, 1)
    if isinstance(data, (str, bytes)):
        raise TypeError('data: expected a data set or an iterable of SMILES, got one string')
    total = len(data) if hasattr(data, '__len__') else None
    if method is not None:
        if not hasattr(data, '__iter__') and not hasattr(data, '__getitem__'):
            raise TypeError('data: expected an iterable of SMILES, got %s' % type(data).__name__)
        if n_processes is not None:
            n_processes = validate.count('n_processes', n_processes, 1)
        batches = _of_smiles(data, preprocessor_of('method', method), batch_size, n_processes)
    else:
        if total is None or isinstance(next(iter(data), None), str):
            raise TypeError(
                'data: expected a data set, or method= to go with SMILES, got %s'
                % type(data).__name__
            )
        batches = _of_data_set(data, batch_size)
        n_inputs = 2 if n_inputs is None else n_inputs
    predictor = Predictor(
        model, _composed(model, predict, postprocess_fn), converter, n_inputs, data
    )
    return _stream(predictor, batches, total)
