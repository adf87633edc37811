"""Checks that several fused functions share."""

from chainer_bspmm import backend


def relations(adj):
    """Check for a BatchedCSR with a column for every row and relation."""
    backend.check.compressed(adj)
    if adj.n_cols != adj.n_rows * adj.n_relations:
        raise ValueError(
            'adj: expected a column for each of its %d rows and %d relations, got %r'
            % (adj.n_rows, adj.n_relations, adj)
        )


def shapes(context, expected):
    """Check shapes; expected: {name: (array or None, shape)}."""
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                '%s: expected shape %s to go with %s, got %s' % (name, shape, context, array.shape)
            )
