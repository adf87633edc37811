"""Links of Chainer Chemistry that take a `BatchedCSR`, and the graph convolution of the papers."""

from chainer_bspmm.links.general_readout import GeneralReadout
from chainer_bspmm.links.ggnn_readout import GGNNReadout, ScatterGGNNReadout
from chainer_bspmm.links.ggnn_update import GGNNUpdate
from chainer_bspmm.links.gin_update import GINSparseUpdate, GINUpdate
from chainer_bspmm.links.gnn_film_update import GNNFiLMUpdate
from chainer_bspmm.links.graph_convolution import GraphConvolution
from chainer_bspmm.links.gwm import GWM
from chainer_bspmm.links.mlp import MLP
from chainer_bspmm.links.mpnn_readout import MPNNReadout
from chainer_bspmm.links.nfp_readout import NFPReadout
from chainer_bspmm.links.nfp_update import NFPUpdate
from chainer_bspmm.links.relgat_update import RelGATUpdate
from chainer_bspmm.links.relgcn_update import RelGCNSparseUpdate, RelGCNUpdate
from chainer_bspmm.links.rsgcn_update import RSGCNUpdate

__all__ = [
    'GGNNReadout',
    'GGNNUpdate',
    'GINSparseUpdate',
    'GINUpdate',
    'GNNFiLMUpdate',
    'GWM',
    'GeneralReadout',
    'GraphConvolution',
    'MLP',
    'MPNNReadout',
    'NFPReadout',
    'NFPUpdate',
    'RSGCNUpdate',
    'RelGATUpdate',
    'RelGCNSparseUpdate',
    'RelGCNUpdate',
    'ScatterGGNNReadout',
]
