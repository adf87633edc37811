"""Predictions for many molecules, each batch one launch of a CUDA graph.

`captured_predict` is public. `replayed` replaces the loop in ``predict`` of Chainer Chemistry's
models.
"""

import collections
import contextlib
import functools
import warnings
from typing import Any, Callable, Generator, NamedTuple

import numpy

import chainer
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction.base import BaseForwardModel

from chainer_bspmm.dataset import concat_mols, CSRConverter, sparse_form
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.progress import progress
from chainer_bspmm.dataset.smiles import parse, preprocessor_of
from chainer_bspmm.dataset.sparse_dataset import selection, SparseDataset
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.models import layout_of
from chainer_bspmm.sparse import check
from chainer_bspmm.training.driver import is_on_gpu
from chainer_bspmm.training.prediction import Predictor
from chainer_bspmm.training.program import StepDiffers

BATCH_SIZE = 1024
MIN_BATCHES = 32  # fewer batches of `predict` are not worth a capture and its checks


class Predictions(NamedTuple):
    """Predictions of a batch.

    Attributes:
        index: (n,) int64, positions in the input.
        values: (n, ...), the predictions for these positions.
        failures: list of Failure, the SMILES since the last batch that could not be used.
    """

    index: numpy.ndarray
    values: numpy.ndarray
    failures: list


# A batch to be predicted; `index` and `failures` as in `Predictions`. `examples` is None for a
# batch without molecules.
_Batch = collections.namedtuple('_Batch', 'index examples failures')


def _of_data_set(data, batch_size):
    """Yield batches of a data set: slices if it is sparse, otherwise lists of examples."""
    sparse = selection(data)
    for first in range(0, len(data), batch_size):
        last = min(first + batch_size, len(data))
        is_dense = sparse is None
        examples = [data[i] for i in range(first, last)] if is_dense else sparse[first:last]
        yield _Batch(numpy.arange(first, last, dtype=numpy.int64), examples, [])


def _until_error(items, errors):
    """Yield the items of an iterable; if it raises, add the exception to `errors` and end."""
    try:
        for item in items:  # `yield from` would close a generator that belongs to the caller
            yield item
    except Exception as error:
        errors.append(error)


def _of_smiles(smiles, preprocessor, batch_size, n_processes):
    """Yield batches of the molecules of SMILES; all batches but the last are full.

    As soon as there are `batch_size` failures, they are yielded without molecules. An error that
    `smiles` raises is raised after all molecules before it were yielded.
    """
    errors: list[Exception] = []
    smiles = _until_error(smiles, errors)
    parts = []
    kept = numpy.zeros(0, numpy.int64)
    failures = []
    with contextlib.closing(parse(smiles, preprocessor, n_processes, for_models=True)) as chunks:
        for part, _, new, failed in chunks:
            parts += [part] * bool(new.size)  # empty parts would add up if all SMILES fail
            kept = numpy.concatenate([kept, new])
            failures += failed
            n_full = kept.size // batch_size * batch_size
            if n_full:
                molecules = Molecules.concatenate(parts)
                for first in range(0, n_full, batch_size):
                    order = numpy.arange(first, first + batch_size)
                    yield _Batch(kept[order], SparseDataset(molecules, order), failures)
                    failures = []
                parts = [molecules.take(numpy.arange(n_full, kept.size))]
                kept = kept[n_full:]
            if len(failures) >= batch_size:
                yield _Batch(numpy.zeros(0, numpy.int64), None, failures)
                failures = []
    if kept.size or failures:
        examples = SparseDataset(Molecules.concatenate(parts)) if kept.size else None
        yield _Batch(kept, examples, failures)
    if errors:
        raise errors[0]


def _composed(model, predict, postprocess_fn):
    """Return a function of (atoms, adj, ...) that returns predictions, a row for each molecule."""
    if predict is None:
        predict = getattr(model, 'predictor', model)
        if postprocess_fn is None and isinstance(model, Classifier):
            postprocess_fn = chainer.functions.softmax
    if postprocess_fn is None:
        return predict
    # It is a partial object, because guards follow these.
    return functools.partial(_postprocessed, postprocess_fn, predict)


def _postprocessed(postprocess_fn, predict, *inputs):
    return postprocess_fn(predict(*inputs))


def _launched(predictor, batches):
    """Yield (batch, its values on their way to the host), once the next batch is launched.

    If the next batch fails, the last one is yielded before the error.
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
    """Yield `Predictions`; at the end warn of failures."""
    first_failure = None
    n_failures = 0
    n_seen = 0
    # Shape and dtype of the values of a batch without molecules, until a molecule was predicted.
    shape = ()
    dtype = numpy.float32
    # If the caller stops in the middle, the graphs are freed at once, not by garbage collection.
    with (
        contextlib.closing(batches),
        contextlib.closing(predictor),
        contextlib.closing(_launched(predictor, batches)) as launched,
        progress(total, 'captured_predict') as advance,
    ):
        for batch, values in launched:
            values = numpy.zeros((0, *shape), dtype) if values is None else values.wait()
            shape = values.shape[1:]
            dtype = values.dtype
            n_new = len(batch.index) + len(batch.failures)
            n_seen += n_new
            n_failures += len(batch.failures)
            first_failure = first_failure or (batch.failures or [None])[0]
            advance(n_new)
            yield Predictions(batch.index, values, batch.failures)
    if n_failures:
        warnings.warn(
            'captured_predict: %d of %d SMILES could not be used, the first, at position '
            '%d: %.100r: %s' % (n_failures, n_seen, *first_failure),
            stacklevel=2,
        )


def captured_predict(
    model: chainer.Link,
    data: Any,
    device: Any = None,
    batch_size: int = BATCH_SIZE,
    method: Any = None,
    predict: Callable | None = None,
    postprocess_fn: Callable | None = None,
    converter: Callable | None = None,
    n_inputs: int | None = None,
    n_processes: int | None = None,
) -> Generator[Predictions, None, None]:
    """Predict for many molecules with a model in test mode, and yield batches as they are ready.

    On a GPU the first batch of a form (number of molecules, and one of a few buffer sizes) is
    predicted eagerly, the second is captured in a CUDA graph, and all others replay it. While the
    GPU works on a batch, the one before it is yielded. On a CPU batches are predicted one by one.

        for index, values, failures in captured_predict(model, smiles, method='rsgcn'):
            ...  # values[i] belongs to smiles[index[i]]

    If a model cannot be captured, it predicts eagerly, with one warning that names the cause. Some
    replays are compared with eager predictions, as `GraphUpdater` compares steps.

    Args:
        model (chainer.Link): a model on its device, such as a Regressor or Classifier of Chainer
            Chemistry.
        data: a data set that the converter takes, a `SparseDataset` or a `DeviceDataset` (of which
            only the indices of the molecules are sent). With ``method`` an iterable of SMILES
            (str), which is read a little ahead of the predictions, and may be infinite.
        device (device specifier): must be the model's device; None means the same.
        batch_size (int): molecules of a batch; the last batch may be smaller.
        method (MolPreprocessor or str): preprocessor for SMILES, as in `dataset.from_smiles`. It
            must be the training data's method: molecules that were parsed for another method may
            fit the model, but the predictions are wrong.
        predict (callable): (atoms, adj, ...) -> Variable or array with a row for each molecule;
            None means ``model.predictor``, or the model if it has none. Values that it reads from
            Python and that are not watched (see `guards.Guards`) must not change.
        postprocess_fn (callable): applied to the result of ``predict``. If both are None, it is
            softmax for a Classifier of Chainer Chemistry, as in its ``predict_proba``; models of
            several labels need ``chainer.functions.sigmoid``.
        converter (callable): makes sparse batches. None means a converter for the layout that the
            model was trained with, if that is known (see `models.layout_of`), else
            ``chainer_bspmm.concat_mols``.
        n_inputs (int): number of columns of a batch that are passed to ``predict``. None means 2
            for a data set (atoms and adjacency, because the other columns are labels), and all
            columns for SMILES.
        n_processes (int): number of processes that parse SMILES; None means one per CPU, or only
            the calling process for fewer than 1000 molecules. 1: the calling process, as in
            `from_smiles`.

    Returns:
        generator of Predictions: ``index``, (n,) int64, positions in ``data``, which ascend
        through all batches; ``values``, (n, ...) array on the host; ``failures``, list of
        ``Failure(position, smiles, reason)`` for SMILES that could not be used, each once. A
        warning at the end counts them. Some Predictions have failures only, and no rows in
        ``values``: at the end, and when as many failures have come as fill a batch.

    Raises:
        ImportError, TypeError, ValueError: for ``method``, as in `dataset.from_smiles`.
        TypeError: there are SMILES without ``method``, ``data`` is one string, ``model`` is not a
            Link or was not swapped by ``chainer_bspmm.sparsify``, or ``predict`` returns no array.
        ValueError: the model is on another device, or ``predict`` returns another number of rows.
        StepDiffers (RuntimeError): a checked replay differs from the eager prediction, after
            predictions of unchecked replays were yielded.
        Exception: any error of reading ``data``, of the converter or of the model, after all
            predictions before it were yielded.

    Note:
        Results are copied to the host asynchronously. Waiting for them is the only
        synchronisation except for the checks. Between batches device, stream and configuration
        are the caller's. The caller may change parameters in place, but not move them. When the
        generator ends or is closed, it frees the graphs and their memory and ends its processes.
        Processes are started, and a molecule that crashes one is a failure, as in
        `dataset.from_smiles`.

        Molecules without atoms, or with atomic numbers for which Chainer Chemistry has no embedding
        (117 and up), are failures here; `dataset.from_smiles` keeps them.
    """
    batch_size = check.count('batch_size', batch_size, 1)
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)
    if device is not None and chainer.get_device(device) != model.device:
        names = model.device.name, chainer.get_device(device).name
        text = "device: expected the model's, %s, got %s; model.to_device(device) moves the model"
        raise ValueError(text % names)
    if n_inputs is not None:
        n_inputs = check.count('n_inputs', n_inputs, 1)
    if isinstance(data, (str, bytes)):
        raise TypeError('data: expected a data set or an iterable of SMILES, got one string')
    total = len(data) if hasattr(data, '__len__') else None
    if method is not None:
        if not hasattr(data, '__iter__') and not hasattr(data, '__getitem__'):
            raise TypeError('data: expected an iterable of SMILES, got %s' % type(data).__name__)
        if n_processes is not None:
            n_processes = check.count('n_processes', n_processes, 1)
        batches = _of_smiles(data, preprocessor_of('method', method), batch_size, n_processes)
    else:
        if total is None or isinstance(next(iter(data), None), str):
            text = 'data: expected a data set, or method= to go with SMILES, got %s'
            raise TypeError(text % type(data).__name__)
        batches = _of_data_set(data, batch_size)
        n_inputs = 2 if n_inputs is None else n_inputs
    if converter is None:
        layout = layout_of(model)  # (layout, padded_to) of its training, or None
        converter = concat_mols if layout is None else CSRConverter(*layout)
    predictor = Predictor(
        model, _composed(model, predict, postprocess_fn), converter, n_inputs, data
    )
    return _stream(predictor, batches, total)


def replayed(
    model: BaseForwardModel,
    data: Any,
    fn: Callable,
    batchsize: int,
    converter: CSRConverter,
    retain_inputs: bool = False,
    preprocess_fn: Callable | None = None,
    postprocess_fn: Callable | None = None,
) -> numpy.ndarray | None:
    """Return the result of ``BaseForwardModel._forward``, or None to let upstream's loop run.

    Upstream's loop is needed without a GPU, for few batches, for a model that is not swapped, for
    `preprocess_fn` and `retain_inputs`, and if the result does not have a row for each molecule.
    """
    if (
        not is_on_gpu(model.device)
        or chainer.config.train
        or retain_inputs
        or preprocess_fn is not None
        or len(data) < MIN_BATCHES * batchsize
        or not any(isinstance(link, Sparse) for link in model.links())
    ):
        return None
    with contextlib.suppress(sparse_form.CannotKeep, TypeError, ValueError):
        sparse_form.columns_of(sparse_form.base_of(data))
        molecules = sparse_form.converted(data)
        if sparse_form.suits(converter, molecules):  # otherwise batches would differ
            data = SparseDataset(molecules)
    predictor = Predictor(model, _composed(model, fn, postprocess_fn), converter, None, data)
    predictor.who = 'predict runs'
    batches = _of_data_set(data, batchsize)
    try:
        return numpy.concatenate([values.wait() for _, values in _launched(predictor, batches)])
    except (StepDiffers, TypeError, ValueError):  # upstream's loop raises a user's error again
        return None
    finally:
        predictor.close()
