"""Node features and masks as one row for each node of a batch."""

import chainer
from chainer import functions

from chainer_bspmm.ops import check


def node_shape(adj):
    """Return the shape of an array of one item for each node: (n_rows,), padded (n_graphs, N)."""
    return (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)


def node_rows(h, adj):
    """Return features as (n_nodes, channels), and the shape of their nodes as given."""
    check.adjacency(adj)
    lead = h.shape[:-1]
    if lead == (adj.n_rows,):
        return h, lead
    if lead != node_shape(adj):
        raise ValueError('h: expected a row for each node of %r, got shape %s' % (adj, h.shape))
    return functions.reshape(h, (adj.n_rows, h.shape[2])), lead


def as_given(h, lead):
    """Return (n_nodes, channels) features in the shape that :func:`node_rows` found."""
    return h if len(lead) == 1 else functions.reshape(h, lead + h.shape[1:])


def check_relations(adj, n_edge_types):
    """Raise unless ``adj`` is a sparse batch with the number of relations the link is made for."""
    check.adjacency(adj)
    if adj.n_relations != n_edge_types:
        raise ValueError(
            'adj: expected %d relations, the n_edge_types of the link, got %r' % (n_edge_types, adj)
        )


def check_one_relation(adj):
    """Raise unless ``adj`` is a sparse batch of one relation."""
    check.adjacency(adj)
    if adj.n_cols != adj.n_rows:
        raise ValueError(
            'adj: expected a matrix of one relation, with a column for each node, got %r' % adj
        )


def real_nodes(is_real_node, adj, dtype):
    """Return (n_rows, 1) factors: 1 for real nodes, 0 for virtual ones."""
    if not isinstance(is_real_node, chainer.get_array_types()):
        raise TypeError('is_real_node: expected an array, got %s' % type(is_real_node).__name__)
    shapes = list(dict.fromkeys([(adj.n_rows,), node_shape(adj)]))
    if is_real_node.shape not in shapes:
        raise ValueError(
            'is_real_node: expected shape %s to go with %r, got %s; labels are not inputs of a '
            'predictor' % (' or '.join(map(str, shapes)), adj, is_real_node.shape)
        )
    return is_real_node.reshape(adj.n_rows, 1).astype(dtype, copy=False)
