"""Matrices whose rows or columns are the entries of a `BatchedCSR`, the edges of its graphs."""


def derived(adj, **fields):
    """Return a matrix of one relation, derived from another by replacing arrays and sizes.

    If ``adj`` has spare rows or entries, the arrays must have the form of
    ``BatchedCSR.in_buffers``.
    """
    fields = {'row_weights': None, 'padded_to': None, **fields}
    return adj.replace(n_relations=1, layout='packed', nnz=len(fields['indices']), **fields)


def equal_rows(adj, n_rows, width, n_true):
    """Return the indptr of rows of `width` entries; rows past `n_true`, (1,), have none."""
    xp = adj.xp
    starts = xp.arange(0, n_rows * width + 1, width, dtype='i')
    return xp.minimum(starts, n_true * width) if adj.has_spare else starts


def gathering(entries, columns, row_offsets, col_offsets, max_rows, max_cols, n_cols):
    """Return the matrix that sums, for each of its rows, the rows of features at `columns`.

    `columns` is (n_rows, w) int32. The matrix has the graphs of `entries`, and is on its device.
    """
    n_rows, width = columns.shape
    return derived(
        entries,
        data=None,
        indptr=equal_rows(entries, n_rows, width, row_offsets[-1:]),
        indices=columns.ravel(),
        row_offsets=row_offsets,
        col_offsets=col_offsets,
        n_rows=n_rows,
        n_cols=n_cols,
        max_rows=max_rows,
        max_cols=max_cols,
        max_nnz=max_rows * width,
        longest=max(width, entries.longest),
    )


class Edges:
    """Matrices that gather features along the edges of a batch, and add them up at its nodes.

    Let entry (i, j * R + r) of ``adj`` be an edge.

    - `from_source`, nnz x (n_nodes * R), gathers row ``j * R + r`` of features for it.
    - `from_receiver`, nnz x (n_nodes * R), gathers row ``i * R + r`` of features for it.
    - `to_node`, n_nodes x nnz, adds up the edges of every node, times the values of ``adj``.
    """

    def __init__(self, adj):
        n_relations = adj.n_relations
        starts = adj.indptr[adj.row_offsets]
        receivers = adj.entry_rows() * n_relations + adj.indices % n_relations
        self.from_source, self.from_receiver = (
            gathering(
                adj,
                columns[:, None],
                row_offsets=starts,
                col_offsets=adj.col_offsets,
                max_rows=adj.max_nnz,
                max_cols=adj.max_cols,
                n_cols=adj.n_cols,
            )
            for columns in (adj.indices, receivers)
        )
        order = adj.xp.arange(adj.nnz, dtype='i')
        self.to_node = derived(
            adj,
            indices=order * (order < adj.indptr[-1:]) if adj.has_spare else order,
            col_offsets=starts,
            n_cols=adj.nnz,
            max_cols=adj.max_nnz,
        )


def edges_of(adj):
    """Return the `Edges` of a batch, n_nodes x (n_nodes * R), cached on it."""
    return adj.cached('edges', lambda: Edges(adj))
