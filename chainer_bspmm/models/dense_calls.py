"""Models of Chainer Chemistry that were not swapped refuse sparse batches, with advice."""

import functools

from chainer_bspmm.models.node_classifier import NodeClassifier
from chainer_bspmm.models.refusals import REFUSALS
from chainer_bspmm.models.sparsify import EDGE_LIST_MODELS, EDGE_LIST_UPDATES, SWAPS, why_not
from chainer_bspmm.sparse.batch import Batch

OF_GRAPH_DATA = {kind.upstream for kind in (*EDGE_LIST_MODELS, *EDGE_LIST_UPDATES, NodeClassifier)}


def refuse_sparse_batches():
    """Make calls of all classes that are swapped or refused raise TypeError, with advice."""
    for kind in (*SWAPS, *REFUSALS):
        for name in ('__call__', 'forward'):  # upstream overrides one of them
            if name in vars(kind):
                setattr(kind, name, _refusing(vars(kind)[name]))


def _refusing(call):
    @functools.wraps(call)
    def checked(self, *args, **kwargs):
        for value in (*args, *kwargs.values()):
            if isinstance(value, Batch):
                raise TypeError(_advice(type(self), type(value).__name__))
        return call(self, *args, **kwargs)

    return checked


def _advice(kind, given):
    if kind not in SWAPS:
        return 'got a %s, but %s' % (given, why_not(kind))
    if kind in OF_GRAPH_DATA:
        return (
            '%s of Chainer Chemistry takes its own graph data, got a %s: call '
            'chainer_bspmm.sparsify(model) first' % (kind.__name__, given)
        )
    return (
        '%s of Chainer Chemistry takes dense adjacency matrices, got a %s: call '
        'chainer_bspmm.sparsify(model) first, or use '
        'chainer_chemistry.dataset.converters.concat_mols as the converter' % (kind.__name__, given)
    )
