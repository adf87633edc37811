"""What links do whose linear layer is part of a relation node, in place of calling that layer."""
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
    check.adjacency(adj)
    if adj.n_relations != n_edge_types:
        raise ValueError('adj: expected %d relations, the n_edge_types of the link, got %r'
                         % (n_edge_types, adj))
    return parameters_of(linear, h.shape[-1])
