"""Adjacency values divided by degrees."""

import numpy

from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm.sparse.relations import with_values


def scale_adj(adj, dtype):
    """Divide every entry by the degree of its source: ``A_r[i, j] / sum_{r, k} A_r[k, j]``.

    A degree of 0 counts as 1. As in Chainer Chemistry it is the column's degree, over all
    relations; the paper divides by the receiver's, relation by relation.

    Args:
        adj (BatchedCSR): the matrices.
        dtype (numpy.dtype): of the result's values; that of adj's, if it has any.

    Returns:
        BatchedCSR: the scaled matrices, kept with ``adj``: a second call returns the same.
    """
    key = 'scaled by source degree', dtype
    if key not in adj._cache:
        adj._cache[key] = with_values(
            adj, _reciprocals(adj, dtype) if adj.data is None else _quotients(adj)
        )
    return adj._cache[key]


# On a GPU one launch each where CuPy's own operations would be six.


def _reciprocals(adj, dtype):
    """Return 1 over the number of its source's entries for every entry."""
    starts = adj.T.indptr
    if adj.xp is not numpy:
        return cuda.elementwise(
            'I index, raw I starts, int32 n_relations',
            'T value',
            """
            ptrdiff_t source = index / n_relations;
            value = (T)1 / (T)(starts[(source + 1) * n_relations] - starts[source * n_relations])
            """,
            'bspmm_reciprocals',
        )(adj.indices, starts, adj.n_relations, cuda.cupy.empty(adj.nnz, dtype))
    degree = numpy.diff(starts[:: adj.n_relations]).astype(dtype)
    return 1 / degree[adj.indices // adj.n_relations]


def _quotients(adj):
    """Return each entry's value over the degree of its source; a degree of 0 counts as 1."""
    starts = adj.xp.ascontiguousarray(adj.T.indptr[:: adj.n_relations])
    degree = backend.segment_sum(adj.T.data[:, None], starts)[:, 0]
    if adj.xp is not numpy:
        return cuda.elementwise(
            'T data, I index, raw T degree, int32 n_relations',
            'T value',
            """
            T d = degree[index / n_relations];
            value = data / (d == (T)0 ? (T)1 : d)""",
            'bspmm_quotients',
        )(adj.data, adj.indices, degree, adj.n_relations)
    degree = numpy.where(degree == 0, degree.dtype.type(1), degree)
    return adj.data / degree[adj.indices // adj.n_relations]
