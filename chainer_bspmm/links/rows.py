"""Node features and masks as one row for each node of a batch."""

import chainer

from chainer_bspmm.functions import segment_sum


def node_shape(adj):
    """Return the shape of an array of one item for each node: (n_rows,), padded (n_graphs, N)."""
    return (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)


def pool(rows, adj, is_real_node):
    """Sum (n_rows, n_channels) over the nodes of every graph, or over those that are real."""
    if is_real_node is None:
        return segment_sum(adj, rows)
    if not isinstance(is_real_node, chainer.get_array_types()):
        raise TypeError('is_real_node: expected an array, got %s' % type(is_real_node).__name__)
    shapes = list(dict.fromkeys([(adj.n_rows,), node_shape(adj)]))
    if is_real_node.shape not in shapes:
        raise ValueError(
            'is_real_node: expected shape %s to go with %r, got %s; labels are not inputs of a '
            'predictor' % (' or '.join(map(str, shapes)), adj, is_real_node.shape)
        )
    factors = is_real_node.reshape(adj.n_rows, 1).astype(rows.dtype, copy=False)
    return segment_sum(adj, rows * factors)
