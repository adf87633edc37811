"""Models of Chainer Chemistry on sparse batches, and the swap of a user's model."""

from chainer_bspmm.models.dense_calls import refuse_sparse_batches
from chainer_bspmm.models.ggnn import GGNN
from chainer_bspmm.models.gin import GIN, GINSparse
from chainer_bspmm.models.gnn_film import GNNFiLM
from chainer_bspmm.models.gwm import GGNN_GWM, GIN_GWM, GWMGraphConvModel, NFP_GWM, RSGCN_GWM
from chainer_bspmm.models.mpnn import MPNN
from chainer_bspmm.models.nfp import NFP
from chainer_bspmm.models.node_classifier import NodeClassifier
from chainer_bspmm.models.relgat import RelGAT
from chainer_bspmm.models.relgcn import RelGCN, RelGCNSparse
from chainer_bspmm.models.rsgcn import RSGCN
from chainer_bspmm.models.saliency import take_sparse_batches
from chainer_bspmm.models.set_up_predictor import METHODS, set_up_predictor
from chainer_bspmm.models.sparse_model import layout_of
from chainer_bspmm.models.sparsify import densify, sparsify
from chainer_bspmm.models.wle import CWLEGraphConvModel, GGNN_CWLE, GGNN_GWLE, GIN_CWLE, GIN_GWLE
from chainer_bspmm.models.wle import GWLEGraphConvModel, NFP_CWLE, NFP_GWLE, RelGAT_CWLE
from chainer_bspmm.models.wle import RelGAT_GWLE, RelGCN_CWLE, RelGCN_GWLE, RSGCN_CWLE, RSGCN_GWLE

refuse_sparse_batches()
take_sparse_batches()

__all__ = [
    'CWLEGraphConvModel',
    'GGNN',
    'GGNN_CWLE',
    'GGNN_GWLE',
    'GGNN_GWM',
    'GIN',
    'GINSparse',
    'GIN_CWLE',
    'GIN_GWLE',
    'GIN_GWM',
    'GNNFiLM',
    'GWLEGraphConvModel',
    'GWMGraphConvModel',
    'METHODS',
    'MPNN',
    'NFP',
    'NFP_CWLE',
    'NFP_GWLE',
    'NFP_GWM',
    'NodeClassifier',
    'RSGCN',
    'RSGCN_CWLE',
    'RSGCN_GWLE',
    'RSGCN_GWM',
    'RelGAT',
    'RelGAT_CWLE',
    'RelGAT_GWLE',
    'RelGCN',
    'RelGCNSparse',
    'RelGCN_CWLE',
    'RelGCN_GWLE',
    'densify',
    'layout_of',
    'set_up_predictor',
    'sparsify',
]
