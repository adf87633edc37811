"""`BatchedCOO`: the adjacency matrices of a batch of graphs in the SparseTensor layout."""

from __future__ import annotations

from typing import Any

import numpy
import scipy.sparse

from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.sparse import build, check
from chainer_bspmm.sparse.batch import Batch
from chainer_bspmm.sparse.batched_csr import BatchedCSR


class BatchedCOO(Batch):
    """Hold one sparse matrix per graph as a single unsorted list of entries.

    Entry ``k`` is in row ``ids[k, 0]`` and column ``ids[k, 1]``, and has the value ``data[k]``, or
    1 if ``data`` is None. The entries of a graph are adjacent, in any order. Entries at the same
    place are added. Relations are columns, as in :class:`BatchedCSR`. There is no transposed
    container: a product with the transpose swaps the two indices.

    The constructor checks arrays of unknown origin. Matrices, dense batches and data sets are
    converted to a :class:`BatchedCSR` first, and from there by :meth:`from_csr`.

    Args:
        ids (array): (nnz, 2) integers, row and column of every entry in the numbering of the whole
            batch.
        row_offsets (array): (n_graphs + 1,) integers, first row of every graph.
        entry_offsets (array): (n_graphs + 1,) integers, first entry of every graph.
        data, col_offsets, n_relations, layout, max_atom_id: as in :class:`BatchedCSR`.

    Raises:
        TypeError, ValueError: as in :class:`BatchedCSR`; the message names graph, entry, value and
            bound.

    Attributes:
        ids, entry_offsets: the arrays (int32); all others are as in :class:`BatchedCSR`.

    Source:
        TensorFlow's SparseTensor as Nagasaka et al. describe it (section 2.2, figures 1 and 2),
        interleaved and unsorted. Rows are numbered through the batch, which replaces their tables
        of pointers.
    """

    ids: Any
    entry_offsets: Any
    _integers = ('ids', 'row_offsets', 'col_offsets', 'entry_offsets')
    _check = staticmethod(check.entries)

    def __init__(
        self,
        ids: Any,
        row_offsets: Any,
        entry_offsets: Any,
        data: Any = None,
        col_offsets: Any = None,
        n_relations: int = 1,
        layout: str = 'packed',
        max_atom_id: int | None = None,
    ) -> None:
        integers = ids, row_offsets, col_offsets, entry_offsets
        self._check_and_set(integers, data, n_relations, layout, max_atom_id)

    def _set(self, **fields):
        self._set_fields(**fields)
        self.nnz = len(self.ids)
        self.max_nnz = int(numpy.diff(self.entry_offsets).max(initial=0))

    @classmethod
    def from_csr(cls, adj: BatchedCSR) -> BatchedCOO:
        """Convert a `BatchedCSR`, with entries and ``data`` in the same order.

        The result is on the same device, and shares ``data`` and the offsets. TypeError if ``adj``
        is not a BatchedCSR, ValueError if it has spare entries.
        """
        if not isinstance(adj, BatchedCSR):
            raise TypeError('adj: expected a BatchedCSR, got %s' % type(adj).__name__)
        adj.refuse_spare()
        self = cls.__new__(cls)
        self.__dict__.update(fields_of(adj))
        self.ids = adj.xp.stack([adj.entry_rows(), adj.indices], axis=1)
        self.entry_offsets = adj.indptr[adj.row_offsets]
        return self

    def to_csr(self) -> BatchedCSR:
        """Convert the batch to a `BatchedCSR`, with entries sorted by row.

        Entries of a row keep their order, and entries at the same place stay separate. They are
        sorted on the host: arrays on a device are copied there and back (synchronises).
        """
        host = self.to_device(-1)
        indptr, order = build.group(numpy, host.entry_rows(), self.n_rows)
        data = None if host.data is None else host.data[order]
        adj = csr_of(host, indptr, host.entry_columns()[order], data)
        return adj.to_device(backend.get_device_from_array(self.ids))

    def entry_rows(self) -> Any:
        """Return the row of every entry, (nnz,) int32, a view of ``ids``."""
        return self.ids[:, 0]

    def entry_columns(self) -> Any:
        """Return the column of every entry, (nnz,) int32, a view of ``ids``."""
        return self.ids[:, 1]

    def to_scipy(self) -> scipy.sparse.coo_matrix:
        """Return the block-diagonal ``scipy.sparse.coo_matrix`` (n_rows, n_cols), on the host.

        Implicit ones and float16 become float32. Copies from a device (synchronises).
        """
        rows, columns = cuda.to_cpu(self.ids).T
        return scipy.sparse.coo_matrix((self._host_values(), (rows, columns)), shape=self.shape)


def fields_of(adj):
    """Return the attributes of a `BatchedCSR` that another container shares; the cache is empty."""
    others = 'indptr', 'indices', 'is_symmetric', 'longest'
    fields = {name: value for name, value in vars(adj).items() if name not in others}
    return dict(fields, _cache={})


def csr_of(batch, indptr, indices, data, is_symmetric=None):
    """Return the `BatchedCSR` with these host arrays and all other attributes of a container."""
    others = 'row_offsets', 'col_offsets', 'n_relations', 'layout', 'max_atom_id', 'row_weights'
    fields = {name: getattr(batch, name) for name in (*others, 'padded_to')}
    return BatchedCSR._trusted(
        indptr=indptr, indices=indices, data=data, is_symmetric=is_symmetric, **fields
    )
