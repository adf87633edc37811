"""Links that take a `BatchedCSR`, with the parameter names of Chainer Chemistry."""
from chainer_bspmm.links.general_readout import GeneralReadout
from chainer_bspmm.links.rsgcn_update import RSGCNUpdate

__all__ = ['GeneralReadout', 'RSGCNUpdate']
