"""Models of Chainer Chemistry on sparse batches, and the swap of a user's model."""
from chainer_bspmm.models.ggnn import GGNN
from chainer_bspmm.models.gin import GIN
from chainer_bspmm.models.gnn_film import GNNFiLM
from chainer_bspmm.models.nfp import NFP
from chainer_bspmm.models.relgat import RelGAT
from chainer_bspmm.models.relgcn import RelGCN
from chainer_bspmm.models.rsgcn import RSGCN
from chainer_bspmm.models.sparsify import sparsify

__all__ = ['GGNN', 'GIN', 'GNNFiLM', 'NFP', 'RSGCN', 'RelGAT', 'RelGCN', 'sparsify']
