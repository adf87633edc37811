"""Links that take a `BatchedCSR`, with the parameter names of Chainer Chemistry."""
from chainer_bspmm.links.general_readout import GeneralReadout
from chainer_bspmm.links.ggnn_readout import GGNNReadout
from chainer_bspmm.links.ggnn_update import GGNNUpdate
from chainer_bspmm.links.rel_gcn_update import RelGCNUpdate
from chainer_bspmm.links.rsgcn_update import RSGCNUpdate

__all__ = ['GGNNReadout', 'GGNNUpdate', 'GeneralReadout', 'RSGCNUpdate', 'RelGCNUpdate']
