"""The update links and readouts that can be swapped."""

from chainer_bspmm import links

# Swapped anywhere in a tree of links.
UPDATES = (
    links.RSGCNUpdate,
    links.GINUpdate,
    links.NFPUpdate,
    links.RelGCNUpdate,
    links.GGNNUpdate,
    links.RelGATUpdate,
    links.GNNFiLMUpdate,
)

# The same, but upstream's take a list of edges, and no wrapper such as GWM calls them.
EDGE_LIST_UPDATES = (links.GINSparseUpdate, links.RelGCNSparseUpdate)

# Swapped as parts of a model only: elsewhere they are called without an adjacency.
READOUTS = (links.GGNNReadout, links.NFPReadout, links.GeneralReadout)
