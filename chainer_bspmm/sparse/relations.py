"""Matrices derived from a `BatchedCSR`: with a row per relation or degree, or with other values."""

import collections

from chainer_bspmm.sparse import build

# The arrays of a CSR matrix that a layer reads.
Rows = collections.namedtuple('Rows', 'indptr indices data')


def relation_rows(adj):
    """Return the matrix with entry ``(i, j * R + r)`` of ``adj`` as ``(i * R + r, j)``.

    Its product with features is a sum over the neighbours for each relation. It is cached on
    ``adj``.
    """
    if adj.n_relations == 1:
        return adj
    return adj.cached('relation rows', lambda: _with_rows(adj, build.relation_rows(adj)))


def _with_rows(adj, made):
    n_relations = adj.n_relations
    fields = made._asdict()
    del fields['transposed_data']
    return adj.replace(
        **fields,
        n_rows=adj.n_rows * n_relations,
        n_cols=adj.n_cols // n_relations,
        max_rows=adj.max_rows * n_relations,
        max_cols=adj.max_cols // n_relations,
        longest=adj.longest if adj.is_symmetric else build.times(adj.longest, n_relations),
        n_relations=1,
        row_weights=None,
    )


def transposed_rows(adj):
    """Return the transpose of every relation's matrix, with rows ``j * R + r``."""
    if adj.is_symmetric:
        return relation_rows(adj)
    return adj.cached('transposed rows', lambda: adj.T)


def scaled_by_source(adj, data):
    """Give a symmetric matrix of ones, on a GPU, the values `data`, 1 over the source's degree.

    In a symmetric matrix a source's degree is the length of its row. So one launch makes
    :func:`relation_rows` and :func:`transposed_rows` of the result, which are cached on it.
    """
    new = adj.replace(data=data)
    made = build.relation_rows(adj, data.dtype)
    rows = _with_rows(adj, made)
    new.cached('relation rows', lambda: rows)
    new.cached('transposed rows', lambda: rows.replace(data=made.transposed_data))
    return new


def degree_rows(adj, n_types, dtype):
    """Return the `Rows` of a symmetric matrix with degrees as relations, and of its transpose.

    Entry ``(i, j)`` becomes ``(i * n_types + d - 1, j)``, where d is the degree of i, or in the
    transpose the degree of j. A degree is the sum of a row. Entries of nodes of other degrees than
    1, ..., n_types become 0. `dtype` is the dtype of the values if ``adj`` stores none. The matrix
    must be on a GPU.
    """

    def make():
        indptr, data, *transposed = build.launch_degree_rows(adj, n_types, dtype)
        return Rows(indptr, adj.indices, data), Rows(*transposed)

    return adj.cached(('degree rows', n_types, dtype), make)


def with_values(adj, data):
    """Return a matrix with other values, which shares the places of the entries."""
    order = adj.transpose_order
    new = adj.replace(data=data)
    transpose = adj.T.replace(data=data[order])
    new.cached('transpose', lambda: (transpose, order))
    return new
