"""Batches in buffers larger than they are."""

import numpy

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse.batched_csr import Buffers, fill_buffers

INTEGERS = ('indptr', 'indices', 'row_offsets', 'col_offsets')
OPTIONAL = ('data', 'row_weights')


def buffers_for(adj, spare_rows, spare_nnz, n_labels=0):
    """Return NumPy buffers full of what must not be read."""
    n_rows, nnz = adj.n_rows + spare_rows, adj.nnz + spare_nnz
    return Buffers(
        numpy.full(n_rows, 2**30, 'i'),
        numpy.full(n_rows + 1, 2**30, 'i'),
        numpy.full(nnz, 2**30, 'i'),
        None if adj.data is None else numpy.full(nnz, numpy.nan, adj.data.dtype),
        numpy.full(adj.n_graphs + 1, -1, 'i'),
        numpy.full(adj.n_graphs + 1, -1, 'i'),
        None if adj.row_weights is None else numpy.full(n_rows, numpy.nan, 'f'),
        [numpy.full((adj.n_graphs, 2), numpy.nan) for _ in range(n_labels)],
    )


def with_spare(adj, spare_rows, spare_nnz, xp=numpy):
    """Return a host batch in larger arrays of a device."""
    buffers = buffers_for(adj, spare_rows, spare_nnz)
    fill_buffers(buffers, numpy.zeros(adj.n_rows, 'i'), adj, [])
    arrays = {name: getattr(buffers, name) for name in (*INTEGERS, *OPTIONAL)}
    arrays = {n: None if array is None else xp.asarray(array) for n, array in arrays.items()}
    same = ['layout', 'padded_to', 'n_relations', 'is_symmetric', 'longest']
    options = {name: getattr(adj, name) for name in same}
    options.update(max_rows=adj.max_rows + 3, max_nnz=adj.max_nnz + 2, max_atom_id=9)
    return BatchedCSR.in_buffers(**options, **arrays)
