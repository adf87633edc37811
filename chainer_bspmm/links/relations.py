"""What links do whose linear layer is part of a relation node, in place of calling that layer."""

from chainer import functions

from chainer_bspmm.backend import check
from chainer_bspmm.links.lazy_linear import parameters_of


def relation_parameters(linear, h, adj, n_edge_types):
    """Return W and b of a linear layer with a row for every output channel and relation.

    Args:
        linear (chainer.links.Linear): made without the number of its inputs, it gets it now.
        h (Variable or array): (..., in_channels) its input.
        adj (BatchedCSR): what follows it.
        n_edge_types (int): the relations that the link was made for.

    Raises:
        TypeError: ``adj`` is no sparse batch. ValueError: it has another number of relations.
    """
    _check_relations(adj, n_edge_types)
    return parameters_of(linear, h.shape[-1])


def node_rows(h, adj, n_edge_types):
    """Return features as (n_nodes, channels), and the shape of the nodes that they were given in.

    Args:
        h (Variable or array): (n_nodes, channels); or (n_graphs, N, channels) where ``adj`` is
            padded.
        adj (BatchedCSR): what follows.
        n_edge_types (int): the relations that the link was made for.

    Raises:
        TypeError: ``adj`` is no sparse batch. ValueError: it has another number of relations, or
            ``h`` another number of rows.
    """
    _check_relations(adj, n_edge_types)
    lead = h.shape[:-1]
    if lead == (adj.n_rows,):
        return h, lead
    if adj.layout != 'padded' or lead != (adj.n_graphs, adj.max_rows):
        raise ValueError('h: expected a row for each node of %r, got shape %s' % (adj, h.shape))
    return functions.reshape(h, (adj.n_rows, h.shape[2])), lead


def _check_relations(adj, n_edge_types):
    check.adjacency(adj)
    if adj.n_relations != n_edge_types:
        raise ValueError(
            'adj: expected %d relations, the n_edge_types of the link, got %r' % (n_edge_types, adj)
        )
