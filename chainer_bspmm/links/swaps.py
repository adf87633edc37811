"""The update links and readouts that can be swapped."""

from chainer_bspmm.links.general_readout import GeneralReadout
from chainer_bspmm.links.ggnn_readout import GGNNReadout
from chainer_bspmm.links.ggnn_update import GGNNUpdate
from chainer_bspmm.links.gin_update import GINSparseUpdate
from chainer_bspmm.links.gin_update import GINUpdate
from chainer_bspmm.links.gnn_film_update import GNNFiLMUpdate
from chainer_bspmm.links.nfp_readout import NFPReadout
from chainer_bspmm.links.nfp_update import NFPUpdate
from chainer_bspmm.links.relgat_update import RelGATUpdate
from chainer_bspmm.links.relgcn_update import RelGCNSparseUpdate
from chainer_bspmm.links.relgcn_update import RelGCNUpdate
from chainer_bspmm.links.rsgcn_update import RSGCNUpdate

# Swapped anywhere in a tree of links.
UPDATES = (RSGCNUpdate, GINUpdate, NFPUpdate, RelGCNUpdate, GGNNUpdate, RelGATUpdate, GNNFiLMUpdate)

# The same, but upstream's take a list of edges, and no wrapper such as GWM calls them.
EDGE_LIST_UPDATES = (GINSparseUpdate, RelGCNSparseUpdate)

# Swapped as parts of a model only: elsewhere they are called without an adjacency.
READOUTS = (GGNNReadout, NFPReadout, GeneralReadout)
