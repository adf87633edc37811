"""Batches in buffers that are larger than necessary."""

import numpy

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse.batched_csr import Buffers, fill_buffers

INTEGERS = ('indptr', 'indices', 'row_offsets', 'col_offsets')
OPTIONAL = ('data', 'row_weights')


def buffers_for(adj, spare_rows, spare_nnz, n_labels=0):
    """Return NumPy buffers of NaN and of indices out of range, so that reading them is noticed."""
    n_rows, nnz = adj.n_rows + spare_rows, adj.nnz + spare_nnz
    return Buffers(
        atoms=numpy.full(n_rows, 2**30, 'i'),
        indptr=numpy.full(n_rows + 1, 2**30, 'i'),
        indices=numpy.full(nnz, 2**30, 'i'),
        data=None if adj.data is None else numpy.full(nnz, numpy.nan, adj.data.dtype),
        row_offsets=numpy.full(adj.n_graphs + 1, -1, 'i'),
        col_offsets=numpy.full(adj.n_graphs + 1, -1, 'i'),
        row_weights=None if adj.row_weights is None else numpy.full(n_rows, numpy.nan, 'f'),
        labels=[numpy.full((adj.n_graphs, 2), numpy.nan) for _ in range(n_labels)],
    )


def with_spare(adj, spare_rows, spare_nnz, xp=numpy):
    """Return a host batch in larger arrays on a device."""
    buffers = buffers_for(adj, spare_rows, spare_nnz)
    fill_buffers(buffers, numpy.zeros(adj.n_rows, 'i'), adj, [])
    arrays = {name: getattr(buffers, name) for name in (*INTEGERS, *OPTIONAL)}
    return BatchedCSR.in_buffers(
        layout=adj.layout,
        padded_to=adj.padded_to,
        n_relations=adj.n_relations,
        max_rows=adj.max_rows + 3,
        max_nnz=adj.max_nnz + 2,
        max_atom_id=9,
        is_symmetric=adj.is_symmetric,
        longest=adj.longest,
        **{name: None if array is None else xp.asarray(array) for name, array in arrays.items()},
    )
