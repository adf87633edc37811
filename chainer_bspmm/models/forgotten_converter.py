"""Errors for a dense converter that was left where a swapped model needs sparse batches.

Updaters, evaluators and `predict` have Chainer's `concat_examples` as their default. If a swapped
model would get its batches unchanged, this converter is refused before it is called. A user's own
Chain may make sparse batches itself, so there the converter is blamed only once it fails.
"""

from collections.abc import Callable
from typing import Any

import chainer
from chainer.dataset import convert
from chainer_chemistry.dataset.converters import concat_mols
from chainer_chemistry.models.prediction import Classifier, GraphConvPredictor, Regressor

from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.links.update import Update
from chainer_bspmm.models.sparse_model import EdgeListModel, SparseModel

# Links that pass a batch on as it is -> the attribute with the link that gets it.
PASSING_ON = {
    Regressor: 'predictor',
    Classifier: 'predictor',
    chainer.links.Classifier: 'predictor',
    GraphConvPredictor: 'graph_conv',
}


def expect_sparse_batches(where: str, converter: Callable, function: Any) -> None:
    """Raise TypeError if the batches of a dense converter reach a swapped model as they are.

    `where` names the object with this converter; `function` is called with its batches.
    """
    if not _is_dense(converter):
        return
    while type(function) in PASSING_ON:
        function = getattr(function, PASSING_ON[type(function)])
    if isinstance(function, SparseModel):
        raise TypeError(_sentence(where, converter, function))


def explain(error: Exception, where: str, converter: Callable, function: Any) -> None:
    """Raise TypeError from the error of a dense converter if its batches go to a swapped model."""
    if not (_is_dense(converter) and isinstance(function, chainer.Link) and _in_converter(error)):
        return
    for link in function.links():
        if isinstance(link, (SparseModel, Update)):
            raise TypeError(_sentence(where, converter, link)) from error


def _is_dense(converter):
    converter = getattr(converter, 'func', converter)  # it may be a functools.partial
    return (
        converter is convert.concat_examples
        or converter is concat_mols
        or type(converter) is convert.ConcatWithAsyncTransfer
    )


def _in_converter(error):
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get('__name__') == convert.__name__:
            return True
        traceback = traceback.tb_next
    return False


def _sentence(where, converter, link):
    if getattr(converter, 'func', converter) is concat_mols:
        got = "Chainer Chemistry's concat_mols"
    else:
        got = "Chainer's concat_examples"
    return '%s: expected converter=%s, because %s was swapped for sparse batches, got %s' % (
        where,
        _remedy(link),
        type(link).__name__,
        got + ', which makes dense ones',
    )


def _remedy(link: Sparse) -> str:
    layout, padded_to = getattr(link, 'trained_with', None) or ('folded', None)
    if isinstance(link, EdgeListModel):
        layout = 'packed'
    if padded_to is not None:
        return 'chainer_bspmm.CSRConverter(padded_to=%d)' % padded_to
    return (
        "chainer_bspmm.CSRConverter('packed')"
        if layout == 'packed'
        else 'chainer_bspmm.concat_mols'
    )
