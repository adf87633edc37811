"""`sparsify` and `densify`: swap the models of Chainer Chemistry for sparse ones, and back."""

from typing import TypeVar

import chainer

from chainer_bspmm.links import GeneralReadout, GINSparseUpdate, RelGCNSparseUpdate
from chainer_bspmm.links.mlp import MLP
from chainer_bspmm.links.sparse import Sparse, swaps_at
from chainer_bspmm.models import gwm, wle
from chainer_bspmm.models.ggnn import GGNN
from chainer_bspmm.models.gin import GIN, GINSparse
from chainer_bspmm.models.gnn_film import GNNFiLM
from chainer_bspmm.models.graph_conv_model import UPDATES
from chainer_bspmm.models.mpnn import MPNN
from chainer_bspmm.models.nfp import NFP
from chainer_bspmm.models.node_classifier import NodeClassifier
from chainer_bspmm.models.refusals import LISTED, REFUSALS, UNSWAPPED
from chainer_bspmm.models.relgat import RelGAT
from chainer_bspmm.models.relgcn import RelGCN, RelGCNSparse
from chainer_bspmm.models.rsgcn import RSGCN
from chainer_bspmm.models.sparse_model import leave_note, remember_dense_training, SparseModel

MODELS = (RSGCN, GIN, NFP, RelGCN, GGNN, MPNN, RelGAT, GNNFiLM) + gwm.MODELS + wle.MODELS
EDGE_LIST_MODELS = (GINSparse, RelGCNSparse)
# Update links that are swapped like UPDATES. But upstream's take a list of edges, and no wrapper
# such as GWM calls them.
EDGE_LIST_UPDATES = (GINSparseUpdate, RelGCNSparseUpdate)

# Chainer Chemistry's class -> ours, for all classes that are swapped anywhere in a tree of links.
SWAPS = {
    kind.upstream: kind
    for kind in (*MODELS, *UPDATES, *EDGE_LIST_MODELS, *EDGE_LIST_UPDATES, MLP, NodeClassifier)
}

# Modules whose links multiply by an adjacency matrix, and modules among them whose links do not.
GRAPH_MODULES = ('chainer_chemistry.models.', 'chainer_chemistry.links.update.')
OTHER_MODULES = ('chainer_chemistry.models.mlp', 'chainer_chemistry.models.prediction.')

Link = TypeVar('Link', bound=chainer.Link)


def sparsify(model: Link) -> Link:
    """Swap the dense graph convolutions of a Chainer Chemistry model for batched sparse ones.

    The model then takes the batches of ``chainer_bspmm.concat_mols``: atoms and a BatchedCSR. It
    stays the same object with the same parameters, attributes, hooks and optimizer, because links
    are swapped in place, by their ``__class__``. Snapshots can be loaded by either form.
    :func:`densify` goes back. To keep a dense model as well, ``copy.deepcopy`` it first.

    Args:
        model (chainer.Link): a model or update link of Chainer Chemistry, or a link that contains
            some (GraphConvPredictor, Regressor, Classifier, a Chain of your own). An update link in
            a Chain of your own, with its three-dimensional features, needs
            ``CSRConverter('padded')``.

    Returns:
        chainer.Link: the model. Links that are sparse already are left as they are. A model that an
        optimizer has updated before was trained on upstream's padded batches: its ``trained_with``
        (:func:`~chainer_bspmm.models.layout_of`) becomes ``('folded', None)``.

    Raises:
        TypeError: ``model`` is not a link.
        ValueError: it contains nothing that can be swapped, or a graph convolution that cannot be
            swapped. In that case nothing has been changed.
    """
    _expect_link(model)
    swaps = []
    if not _collect(model, 'model', swaps):
        raise ValueError(
            'model: expected a graph convolution of Chainer Chemistry, or a link that contains '
            'one, got %s. %s' % (_full_name(type(model)), LISTED)
        )
    for link, kind in swaps:
        link.__class__ = kind
        if isinstance(link, SparseModel):
            remember_dense_training(link)
    return model


def densify(model: Link) -> Link:
    """Undo :func:`sparsify`, in place: the model is Chainer Chemistry's again.

    Args:
        model (chainer.Link): a swapped model, or a link that contains some.

    Returns:
        chainer.Link: the model. Links that are dense already are left as they are.

    Raises:
        TypeError: ``model`` is not a link.
        ValueError: it contains a subclass of a sparse link, or a readout of your own, which have no
            dense form. In that case nothing has been changed.
    """
    _expect_link(model)
    swaps = []
    for path, link in model.namedlinks():
        if isinstance(link, Sparse):
            kind, path = type(link), 'model' + path.rstrip('/').replace('/', '.')
            if 'upstream' not in vars(kind):
                text = '%s: got %s, a subclass of a sparse link, which has no dense form'
                raise ValueError(text % (path, _full_name(kind)))
            if kind is RSGCN and not isinstance(link.readout, GeneralReadout.upstream):
                raise ValueError(
                    '%s.readout: expected a GeneralReadout to go back, got %r, which is called '
                    'with a sparse batch' % (path, link.readout)
                )
            swaps.append((link, kind.upstream))
    for link, kind in swaps:
        if isinstance(link, SparseModel):
            leave_note(link)
        link.__class__ = kind
    return model


def _expect_link(model):
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)


def _collect(link, path, swaps):
    """Append the links to swap; return whether a link other than a head is or becomes sparse."""
    kind = type(link)
    if isinstance(link, NodeClassifier.upstream):  # or our subclass, whose predictor may be dense
        if kind is NodeClassifier.upstream:
            swaps.append((link, NodeClassifier))
        return _collect(link.predictor, path + '.predictor', swaps)
    if kind in SWAPS:
        swaps += swaps_at(path, link, (SWAPS[kind],))
        return kind is not MLP.upstream
    if isinstance(link, MLP):
        return False
    if isinstance(link, Sparse):
        try:
            swaps += kind.swaps(link)[1:]  # its parts may be dense: a part can be densified alone
        except ValueError as error:
            raise ValueError('%s.%s' % (path, error)) from None
        return True
    if any(
        base.__module__.startswith(GRAPH_MODULES) and not base.__module__.startswith(OTHER_MODULES)
        for base in kind.__mro__
    ):
        text = '%s: %s. %s' % (path, why_not(kind), LISTED)
        if '.' in path:
            text += (
                '. A graph network beside it can be swapped alone: sparsify(model.part), with '
                "CSRConverter('padded')"
            )
        raise ValueError(text)
    # A list, because all children must be visited, not only up to the first that is sparse.
    return any([_collect(child, '%s.%s' % (path, child.name), swaps) for child in link.children()])


def why_not(kind: type) -> str:
    """Explain why a class of Chainer Chemistry, or a subclass of one, is not swapped."""
    for base in kind.__mro__:
        if base in REFUSALS:
            return '%s %s.\n%s' % (_full_name(kind), REFUSALS[base], UNSWAPPED)
        if base in SWAPS:
            package = '.'.join(SWAPS[base].__module__.split('.')[:2])
            return (
                '%s is a subclass of %s, and a swap would lose what it adds: derive it '
                "from %s.%s, or run it unswapped, with upstream's converter"
                % (_full_name(kind), _full_name(base), package, base.__name__)
            )
    return '%s has no sparse form by itself' % _full_name(kind)


def _full_name(kind):
    return '%s.%s' % (kind.__module__, kind.__name__)
