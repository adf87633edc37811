"""Links of Chainer Chemistry that were not swapped refuse sparse batches, with advice."""

import functools

from chainer_chemistry.links import GraphBatchNormalization, GraphLinear

from chainer_bspmm import links
from chainer_bspmm.links.inner import CALLS, remember
from chainer_bspmm.models.node_classifier import NodeClassifier
from chainer_bspmm.models.refusals import REFUSALS
from chainer_bspmm.models.sparsify import EDGE_LIST_MODELS, EDGE_LIST_UPDATES, SWAPS, why_not
from chainer_bspmm.sparse.batch import Batch

# Classes that are swapped only as parts of a model.
PARTS = {
    kind.upstream
    for kind in (
        links.GGNNReadout,
        links.GWM,
        links.GeneralReadout,
        links.MPNNReadout,
        links.NFPReadout,
        links.ScatterGGNNReadout,
    )
}
OF_GRAPH_DATA = {kind.upstream for kind in (*EDGE_LIST_MODELS, *EDGE_LIST_UPDATES, NodeClassifier)}

OUTSIDE = 'sparsify does not find links outside of init_scope: swap those separately'


def refuse_sparse_batches():
    """Patch all classes that are swapped or refused: a call with a sparse batch raises TypeError.

    Layers for atoms are not swapped by themselves; a call with rows raises ValueError.
    """
    for kind in (*SWAPS, *PARTS, *REFUSALS):
        for name in ('__call__', 'forward'):  # upstream overrides one of them
            if name in vars(kind):
                setattr(kind, name, _refusing(vars(kind)[name]))
    for kind in (GraphLinear, GraphBatchNormalization):
        kind.__call__ = _refusing_rows(kind.__call__)
    remember(*CALLS)  # the known code now includes these patches


def _refusing(call):
    @functools.wraps(call)
    def checked(self, *args, **kwargs):
        for value in (*args, *kwargs.values()):
            if isinstance(value, Batch):
                raise TypeError(_advice(type(self), type(value).__name__))
        return call(self, *args, **kwargs)

    return checked


def _refusing_rows(call):
    @functools.wraps(call)
    def checked(self, x):
        if x.ndim == 2:
            raise ValueError(
                '%s: expected features of shape (n_graphs, N, channels), got %s. If these are the '
                "rows of a sparse batch, CSRConverter('padded') keeps the atoms of each molecule "
                'apart, as the dense model has them' % (type(self).__name__, x.shape)
            )
        return call(self, x)

    return checked


def _advice(kind, given):
    if kind not in SWAPS and kind not in PARTS:
        return 'got a %s, but %s' % (given, why_not(kind))
    if kind in PARTS:
        return (
            '%s of Chainer Chemistry takes no sparse batch, got a %s: in a link of your own, '
            'use chainer_bspmm.links.%s; in a model of Chainer Chemistry, call '
            'chainer_bspmm.sparsify(model) first' % (kind.__name__, given, kind.__name__)
        )
    if kind in OF_GRAPH_DATA:
        return (
            "%s of Chainer Chemistry takes Chainer Chemistry's graph data, got a %s: call "
            'chainer_bspmm.sparsify(model) first. %s' % (kind.__name__, given, OUTSIDE)
        )
    return (
        '%s of Chainer Chemistry takes dense adjacency matrices, got a %s: call '
        'chainer_bspmm.sparsify(model) first, or use '
        'chainer_chemistry.dataset.converters.concat_mols as the converter. %s'
        % (kind.__name__, given, OUTSIDE)
    )
