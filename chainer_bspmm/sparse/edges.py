"""Matrices whose rows or columns are the entries of a `BatchedCSR`, the edges of its graphs.

All of them share arrays with the given one; nothing here synchronises.
"""

from chainer_bspmm.sparse.relations import relation_rows


def derived(adj, **fields):
    """Return a matrix of one relation, derived from another by replacing arrays and sizes.

    Its rows need not be nodes, and have no weights.

    Raises:
        ValueError: ``adj`` has spare rows or entries, which these arrays would count.
    """
    adj.refuse_spare()
    return adj.replace(
        **{
            'n_relations': 1,
            'layout': 'packed',
            'row_weights': None,
            'padded_to': None,
            'is_symmetric': False,
            **fields,
        }
    )


def gathering(entries, columns, row_offsets, col_offsets, max_rows, max_cols, n_cols):
    """Return the matrix whose every row is the sum of some rows of features.

    Args:
        entries (BatchedCSR): has the same graphs, on the same device.
        columns (array): (n_rows, w) int32, the columns of the w ones of every row.
        row_offsets, col_offsets (array): (n_graphs + 1,) int32.
        max_rows, max_cols, n_cols (int): as in BatchedCSR.
    """
    n_rows, width = columns.shape
    return derived(
        entries,
        data=None,
        indptr=entries.xp.arange(0, columns.size + 1, width, dtype='i'),
        indices=columns.ravel(),
        row_offsets=row_offsets,
        col_offsets=col_offsets,
        n_rows=n_rows,
        n_cols=n_cols,
        nnz=columns.size,
        max_rows=max_rows,
        max_cols=max_cols,
        max_nnz=max_rows * width,
    )


class Edges:
    """The edges of a batch, sorted by receiver and relation; see :func:`edges_of`.

    Attributes:
        sources (array): (nnz,) int32, row ``j * R + r`` of (node, relation) where an edge begins.
        receivers (array): (nnz,) int32, row ``i * R + r`` where it ends.
        by_receiver (array): (n_nodes * R + 1,) int32, where the edges of every receiver start.
        from_source, from_receiver (BatchedCSR): nnz x (n_nodes * R); their products are, for
            every edge, the features of its source or receiver.
        to_node (BatchedCSR): n_nodes x nnz; its product adds up the edges of every node, times the
            values of ``adj``.
    """

    def __init__(self, adj):
        xp, n_relations = adj.xp, adj.n_relations
        rows = relation_rows(adj)
        self.receivers = rows.entry_rows()
        self.sources = rows.indices * n_relations + self.receivers % n_relations
        self.by_receiver = rows.indptr
        starts = adj.indptr[adj.row_offsets]
        self.from_source, self.from_receiver = (
            gathering(
                adj,
                columns[:, None],
                starts,
                adj.col_offsets,
                adj.max_nnz,
                adj.max_cols,
                adj.n_cols,
            )
            for columns in (self.sources, self.receivers)
        )
        order = xp.arange(adj.nnz, dtype='i')
        self.to_node = derived(
            adj,
            data=rows.data,
            indptr=xp.ascontiguousarray(rows.indptr[::n_relations]),
            indices=order,
            col_offsets=starts,
            n_cols=adj.nnz,
            max_cols=adj.max_nnz,
        )
        self.to_node.keep_transpose(
            derived(
                self.to_node,
                indptr=xp.arange(adj.nnz + 1, dtype='i'),
                indices=self.receivers // n_relations,
                row_offsets=starts,
                n_rows=adj.nnz,
                max_rows=adj.max_nnz,
                col_offsets=adj.row_offsets,
                n_cols=adj.n_rows,
                max_cols=adj.max_rows,
            ),
            order,
        )


def edges_of(adj):
    """Return the `Edges` of a batch, (n_nodes x (n_nodes * R)), kept with it."""
    return adj.cached('edges', lambda: Edges(adj))
