"""The mask `is_real_node` of Chainer Chemistry's readouts."""

import chainer


def real_nodes(is_real_node, adj, dtype):
    """Return (n_rows, 1) factors of 1 for real and 0 for virtual nodes.

    Args:
        is_real_node (array): (n_rows,), or (n_graphs, N) where ``adj`` is padded; 1 or True for a
            real node.
        adj (BatchedCSR): says how many rows there are.
        dtype: of the result.

    Raises:
        TypeError: ``is_real_node`` is no array. ValueError: its shape does not fit.
    """
    if not isinstance(is_real_node, chainer.get_array_types()):
        raise TypeError('is_real_node: expected an array, got %s' % type(is_real_node).__name__)
    shapes = [(adj.n_rows,)]
    if adj.layout == 'padded':
        shapes.append((adj.n_graphs, adj.max_rows))
    if is_real_node.shape not in shapes:
        raise ValueError(
            'is_real_node: expected shape %s to go with %r, got %s'
            % (' or '.join(map(str, shapes)), adj, is_real_node.shape)
        )
    return is_real_node.reshape(adj.n_rows, 1).astype(dtype, copy=False)
