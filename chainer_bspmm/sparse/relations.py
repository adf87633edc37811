"""Other matrices made of a `BatchedCSR` of several relations: its rows apart, its values replaced.

Both are new objects that share arrays with the given one; nothing here synchronises.
"""

import numpy

from chainer.backends import cuda


def relation_rows(adj):
    """Return the matrix with a row, in place of a column, for every pair of node and relation.

    Entry ``(i, j * R + r)`` of ``adj`` becomes entry ``(i * R + r, j)``, so that the product with
    (n_nodes, C) features is every relation's own sum over the neighbours, not yet added up.

    Args:
        adj (BatchedCSR): n_rows x (n_nodes * R).

    Returns:
        BatchedCSR: (n_rows * R) x n_nodes, on the same device; kept with ``adj``, and ``adj``
        itself where R = 1.
    """
    n_relations = adj.n_relations
    if n_relations == 1:
        return adj
    if 'relation rows' not in adj._cache:
        # Each node's rows of the transpose, one a relation, read as one row whose columns are pairs
        # of receiver and relation: the transpose of what is wanted. Whatever the order of the
        # entries this takes no sort, and on a GPU one kernel, twice.
        sources = adj._copy()
        sources.indptr = adj.xp.ascontiguousarray(adj.T.indptr[::n_relations])
        sources.indices = _receivers(adj)
        sources.data = adj.T.data
        sources.row_offsets = adj.col_offsets // n_relations
        sources.col_offsets = adj.row_offsets * n_relations
        sources.n_rows, sources.n_cols = adj.n_cols // n_relations, adj.n_rows * n_relations
        sources.max_rows = adj.max_cols // n_relations
        sources.max_cols = adj.max_rows * n_relations
        sources.n_relations = 1
        sources.is_symmetric = False
        adj._cache['relation rows'] = sources.T
    return adj._cache['relation rows']


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

    The transpose of ``adj`` is built, if it is not there, and lends the new one its pattern.

    Args:
        adj (BatchedCSR): the pattern.
        data (array): (nnz,) floating values, in the order of its entries and on its device.

    Returns:
        BatchedCSR: the new matrix.
    """
    new = adj._copy()
    new.data = data
    new.is_symmetric = False  # of values: nobody has looked
    new._transpose = adj.T._copy()
    new._transpose_order = adj.transpose_order
    new._transpose.data = data[new._transpose_order]
    new._transpose.is_symmetric = False
    return new
