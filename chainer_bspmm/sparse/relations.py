"""Matrices made of a `BatchedCSR`: with a row for every relation, with other values.

Both are new objects that share arrays with the given one; nothing here synchronises.
"""

import numpy

from chainer.backends import cuda


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
    # Each node's rows of the transpose, one a relation, read as one row whose columns are pairs of
    # receiver and relation: the transpose of the result. For any order of the entries this
    # needs no sort, and on a GPU two launches of one kernel.
    n_relations = adj.n_relations
    sources = adj.replace(
        indptr=adj.xp.ascontiguousarray(adj.T.indptr[::n_relations]),
        indices=_receivers(adj),
        data=adj.T.data,
        row_offsets=adj.col_offsets // n_relations,
        col_offsets=adj.row_offsets * n_relations,
        n_rows=adj.n_cols // n_relations,
        n_cols=adj.n_rows * n_relations,
        max_rows=adj.max_cols // n_relations,
        max_cols=adj.max_rows * n_relations,
        n_relations=1,
        is_symmetric=False,
    )
    return sources.T


def _receivers(adj):
    """Return ``i * R + r`` for the entries ``(i, j * R + r)``, in the order of the transpose."""
    if adj.xp is not numpy:
        return cuda.elementwise(
            'I i_node, I order, raw I columns, int32 n_relations',
            'I y',
            'y = i_node * n_relations + columns[order] % n_relations',
            'bspmm_receivers',
        )(adj.T.indices, adj.transpose_order, adj.indices, adj.n_relations)
    return adj.T.indices * adj.n_relations + adj.indices[adj.transpose_order] % adj.n_relations


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
