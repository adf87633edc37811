"""Matrices made of a `BatchedCSR`: with a row for every relation, with other values.

Both are new objects that share arrays with the given one; nothing here synchronises.
"""

from chainer_bspmm.sparse import build


def relation_rows(adj):
    """Return the matrix with a row, instead of a column, for every pair of node and relation.

    Entry ``(i, j * R + r)`` of ``adj`` becomes entry ``(i * R + r, j)``, so that the product with
    (n_nodes, C) features is every relation's own sum over the neighbours, not yet added up.

    Args:
        adj (BatchedCSR): n_rows x (n_nodes * R).

    Returns:
        BatchedCSR: (n_rows * R) x n_nodes, on the same device; kept with ``adj``, and ``adj``
        itself where R = 1.
    """
    return adj if adj.n_relations == 1 else adj.cached('relation rows', lambda: _make_rows(adj))


def _make_rows(adj):
    n_relations = adj.n_relations
    indptr, indices, order = build.relation_rows(adj)
    return adj.replace(
        indptr=indptr,
        indices=indices,
        data=None if adj.data is None else adj.data[order],
        row_offsets=adj.row_offsets * n_relations,
        col_offsets=adj.col_offsets // n_relations,
        n_rows=adj.n_rows * n_relations,
        n_cols=adj.n_cols // n_relations,
        max_rows=adj.max_rows * n_relations,
        max_cols=adj.max_cols // n_relations,
        n_relations=1,
        is_symmetric=False,
        row_weights=None,
    )


def transposed_rows(adj):
    """Return the transpose of every relation's matrix, with rows ``j * R + r`` as well.

    Where each of them is symmetric this is :func:`relation_rows`.
    """
    return relation_rows(adj) if adj.is_symmetric else adj.T


def with_values(adj, data):
    """Return the matrix with other values at the same places.

    The two share their pattern, and so do their transposes.

    Args:
        adj (BatchedCSR): the pattern.
        data (array): (nnz,) floating values, in the order of its entries and on its device.

    Returns:
        BatchedCSR: the new matrix.
    """
    order = adj.transpose_order
    new = adj.replace(data=data, is_symmetric=False)  # unknown for these values
    new.keep_transpose(adj.T.replace(data=data[order], is_symmetric=False), order)
    return new
