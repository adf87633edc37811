"""`replayed`: the predictions of a data set for ``predict`` of Chainer Chemistry's models."""

from collections.abc import Callable
from typing import Any

import chainer
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer_chemistry.models.prediction.base import BaseForwardModel
import numpy

from chainer_bspmm.dataset import sparse_form
from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.training.captured_predict import composed
from chainer_bspmm.training.predictor import Predictor
from chainer_bspmm.training.programs import StepDiffers

MIN_BATCHES = 32  # fewer are not worth a capture and its checks


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
    """Return what ``BaseForwardModel._forward`` does; None: upstream's loop has to.

    That is where there is no GPU, there are few batches, the model is not swapped, functions or
    inputs are asked for on the way, or there is no row for each molecule.
    """
    if (
        model.device.xp is not cuda.cupy
        or chainer.config.train
        or retain_inputs
        or preprocess_fn is not None
        or len(data) < MIN_BATCHES * batchsize
        or not any(isinstance(link, Sparse) for link in model.links())
    ):
        return None
    data = _converted(data, converter)
    predictor = Predictor(model, composed(model, fn, postprocess_fn), converter, None, data)
    predictor.who = 'predict runs'
    iterator = SerialIterator(data, batchsize, repeat=False, shuffle=False)
    outputs, last = [], None
    try:
        while True:
            try:
                examples = predictor.examples.next(iterator, converter, may_keep=False)
            except StopIteration:
                break
            waiting = predictor.predict(examples)
            if last is not None:
                outputs.append(last.wait())
            last = waiting
        return numpy.concatenate([*outputs, last.wait()])
    except (StepDiffers, TypeError, ValueError):  # upstream's loop raises what is a user's error
        return None
    finally:
        predictor.close()


def _converted(data, converter):
    """Return a dense data set as a sparse one, which takes less time than batch after batch.

    It is returned as it is where a user's code makes the examples, or batches would be others.
    """
    try:
        sparse_form.columns_of(sparse_form.base_of(data))
        molecules = sparse_form.converted(data)
    except (sparse_form.CannotKeep, TypeError, ValueError):
        return data
    return SparseDataset(molecules) if sparse_form.suits(converter, molecules) else data
