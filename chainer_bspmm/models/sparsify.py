"""`sparsify`: swap the dense graph convolutions of a model for sparse ones."""

import chainer
from chainer_chemistry.links.update.ggnn_update import GGNNUpdate as DenseGGNNUpdate
from chainer_chemistry.links.update.gin_update import GINUpdate as DenseGINUpdate
from chainer_chemistry.links.update.gnn_film_update import GNNFiLMUpdate as DenseGNNFiLMUpdate
from chainer_chemistry.links.update.nfp_update import NFPUpdate as DenseNFPUpdate
from chainer_chemistry.links.update.relgat_update import RelGATUpdate as DenseRelGATUpdate
from chainer_chemistry.links.update.relgcn_update import RelGCNUpdate as DenseRelGCNUpdate
from chainer_chemistry.links.update.rsgcn_update import RSGCNUpdate as DenseRSGCNUpdate
from chainer_chemistry.models.ggnn import GGNN as DenseGGNN
from chainer_chemistry.models.gin import GIN as DenseGIN
from chainer_chemistry.models.gnn_film import GNNFiLM as DenseGNNFiLM
from chainer_chemistry.models.mpnn import MPNN as DenseMPNN
from chainer_chemistry.models.nfp import NFP as DenseNFP
from chainer_chemistry.models.relgat import RelGAT as DenseRelGAT
from chainer_chemistry.models.relgcn import RelGCN as DenseRelGCN
from chainer_chemistry.models.rsgcn import RSGCN as DenseRSGCN

from chainer_bspmm.links import GGNNUpdate
from chainer_bspmm.links import GINUpdate
from chainer_bspmm.links import GNNFiLMUpdate
from chainer_bspmm.links import NFPUpdate
from chainer_bspmm.links import RelGATUpdate
from chainer_bspmm.links import RelGCNUpdate
from chainer_bspmm.links import RSGCNUpdate
from chainer_bspmm.models import gwm
from chainer_bspmm.models import wle
from chainer_bspmm.models.ggnn import GGNN
from chainer_bspmm.models.gin import GIN
from chainer_bspmm.models.gnn_film import GNNFiLM
from chainer_bspmm.models.mpnn import MPNN
from chainer_bspmm.models.nfp import NFP
from chainer_bspmm.models.refusals import REFUSALS
from chainer_bspmm.models.relgat import RelGAT
from chainer_bspmm.models.relgcn import RelGCN
from chainer_bspmm.models.rsgcn import RSGCN

# Chainer Chemistry's class -> ours.
SWAPS = {
    DenseRSGCN: RSGCN,
    DenseRSGCNUpdate: RSGCNUpdate,
    DenseGIN: GIN,
    DenseGINUpdate: GINUpdate,
    DenseNFP: NFP,
    DenseNFPUpdate: NFPUpdate,
    DenseRelGCN: RelGCN,
    DenseRelGCNUpdate: RelGCNUpdate,
    DenseGGNN: GGNN,
    DenseGGNNUpdate: GGNNUpdate,
    DenseMPNN: MPNN,
    DenseRelGAT: RelGAT,
    DenseRelGATUpdate: RelGATUpdate,
    DenseGNNFiLM: GNNFiLM,
    DenseGNNFiLMUpdate: GNNFiLMUpdate,
    **{kind.dense: kind for kind in gwm.MODELS + wle.MODELS},
}

# Where Chainer Chemistry keeps links that multiply by an adjacency matrix, and what else is there.
GRAPH_MODULES = ('chainer_chemistry.models.', 'chainer_chemistry.links.update.')
OTHER_MODULES = ('chainer_chemistry.models.mlp', 'chainer_chemistry.models.prediction.')


def sparsify(model):
    """Swap the dense graph convolutions of a Chainer Chemistry model for batched sparse ones.

    The swapped model has the same parameters under the same paths (snapshots load both ways) and
    takes what ``chainer_bspmm.concat_mols`` gives: atoms and a BatchedCSR.

    Inside a wrapper (GraphConvPredictor, Regressor, Classifier, a Chain of your own) the swap is
    made in place: the wrapper is returned, its parameters are the very same objects, an optimizer
    that was set up before goes on, its state included. A bare model is returned new, and shares its
    child links with the old one, which stays usable: an optimizer that was set up with the old
    model goes on updating the shared parameters, but its ``target`` is the old model; set it up
    with the new one (``optimizer.setup(new)`` starts its state afresh) or sparsify first.

    Args:
        model (chainer.Link): an upstream model or update link, or anything that contains one. An
            update link in a Chain of your own, with its three-dimensional features, needs
            ``CSRConverter(layout='padded')``.

    Returns:
        chainer.Link: the model. What is sparse already is left as it is.

    Raises:
        TypeError: ``model`` is no link.
        ValueError: it contains nothing that can be swapped, or a graph convolution that cannot.
            Nothing has been changed then.
    """
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)
    twins = {}
    _prepare(model, '', twins)
    if not twins and not any(type(link) in SWAPS.values() for link in model.links()):
        raise ValueError(
            'model: expected one of the supported %s, or a link that contains one, '
            'got %s' % (_supported(), _full_name(model))
        )
    if model in twins:
        return twins[model]
    _swap(model, twins)
    return model


def _prepare(link, path, twins):
    """Make the sparse twin of every link to be swapped, without touching the model yet."""
    kind = type(link)
    if kind in SWAPS:
        if link not in twins:
            twins[link] = SWAPS[kind].from_dense(link)
    elif kind not in SWAPS.values():
        if any(
            module.startswith(GRAPH_MODULES) and not module.startswith(OTHER_MODULES)
            for module in [base.__module__ for base in kind.__mro__]
        ):
            why = [REFUSALS[base] for base in kind.__mro__ if base in REFUSALS][:1]
            raise ValueError(
                'model%s: expected one of the supported %s, got %s%s'
                % (path, _supported(), _full_name(link), ''.join(', which ' + text for text in why))
            )
        for child in link.children():
            _prepare(child, '%s.%s' % (path, child.name), twins)


def _swap(parent, twins):
    """Put the twins in place of the links, wherever an attribute or element refers to one."""
    for child in parent.children():
        if child not in twins and type(child) not in SWAPS.values():
            _swap(child, twins)
    if isinstance(parent, chainer.ChainList):
        # Not by assignment: that of a Sequential, which has an index for functions too, deletes and
        # inserts, and puts the links in another order.
        for i, child in enumerate(parent._children):
            if child in twins:
                parent._children[i] = twins[child]
                twins[child].name = str(i)
        if isinstance(parent, chainer.Sequential):
            parent._layers = [
                twins.get(layer, layer) if isinstance(layer, chainer.Link) else layer
                for layer in parent._layers
            ]
    for name, value in list(vars(parent).items()):
        if not isinstance(value, chainer.Link) or value not in twins:
            continue
        if isinstance(parent, chainer.Chain) and name in parent._children:
            # A registered child cannot be assigned over; deleted first, it keeps name and path.
            delattr(parent, name)
            with parent.init_scope():
                setattr(parent, name, twins[value])
        else:
            setattr(parent, name, twins[value])


def _supported():
    return ', '.join(kind.__name__ for kind in SWAPS)


def _full_name(link):
    return '%s.%s' % (type(link).__module__, type(link).__name__)
