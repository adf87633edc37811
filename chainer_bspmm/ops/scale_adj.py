"""Adjacency values divided by degrees."""

import numpy
from numpy.typing import DTypeLike

from chainer.backends import cuda

from chainer_bspmm.ops.segments import segment_sum_forward
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.relations import scaled_by_source, with_values


def scale_adj(adj: BatchedCSR, dtype: DTypeLike) -> BatchedCSR:
    """Divide every entry by the degree of its source: ``A_r[i, j] / sum_{r, k} A_r[k, j]``.

    This is Chainer Chemistry's formula; the paper divides by the receiver's degree in each
    relation. The result is cached on ``adj``.
    """

    def make():
        if adj.xp is numpy:  # layers on a host need no transpose
            n_entries = adj._n_true_entries()
            sources = adj.indices // adj.n_relations
            weights = None if adj.data is None else adj.data[:n_entries]
            degree = numpy.bincount(sources[:n_entries], weights, adj.n_cols // adj.n_relations)
            degree[degree == 0] = 1
            values = numpy.ones((), dtype) if adj.data is None else adj.data
            data = values / degree.astype(values.dtype)[sources]
            return adj.replace(data=data)
        if adj.data is not None:
            return with_values(adj, _quotients(adj))
        scaled = scaled_by_source if adj.is_symmetric and adj.n_relations > 1 else with_values
        return scaled(adj, _reciprocals(adj, dtype))

    return adj.cached(('scaled by source degree', dtype), make)


# Each of these functions is one launch, instead of six of CuPy's own operations.


def _reciprocals(adj, dtype):
    """Return, for each entry, 1 over the number of entries of its source in all relations."""
    rows, n_places = (adj, 1) if adj.is_symmetric else (adj.T, adj.n_relations)
    return cuda.elementwise(
        'I index, raw I starts, int32 n_relations, int32 n_places',
        'T value',
        """
        ptrdiff_t first = (ptrdiff_t)(index / n_relations) * n_places;
        int degree = starts[first + n_places] - starts[first];
        value = (T)1 / (T)(degree ? degree : 1);  // spare entries name a source that may have none
        """,
        'bspmm_reciprocals',
    )(adj.indices, rows.indptr, adj.n_relations, n_places, cuda.cupy.empty(adj.nnz, dtype))


def _quotients(adj):
    """Return each entry's value over the degree of its source; a degree of 0 counts as 1."""
    starts = adj.xp.ascontiguousarray(adj.T.indptr[:: adj.n_relations])
    degree = segment_sum_forward(adj.T.data[:, None], starts)[:, 0]
    return cuda.elementwise(
        'T data, I index, raw T degree, int32 n_relations',
        'T value',
        """
        T d = degree[index / n_relations];
        value = data / (d == (T)0 ? (T)1 : d)""",
        'bspmm_quotients',
    )(adj.data, adj.indices, degree, adj.n_relations)
