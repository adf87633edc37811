"""`BatchedSELL`: the matrices of a batch of graphs in slices of rows, for narrow products."""

from __future__ import annotations

from typing import Any

import numpy
import scipy.sparse

from chainer import backend

from chainer_bspmm.sparse import build, check
from chainer_bspmm.papers.batched_coo import csr_of, fields_of
from chainer_bspmm.sparse.batch import Batch
from chainer_bspmm.sparse.batched_csr import BatchedCSR

PADDING = -1  # the mark of padding in `column`


class BatchedSELL(Batch):
    """Hold one sparse matrix per graph as sliced ELLPACK (SELL).

    The rows of every graph are cut into slices of ``slice_size`` rows. The last slice of a graph
    has its remaining rows, so no slice spans two graphs. A slice of h rows is stored column-major,
    with each row padded to the longest of the slice: entry k of its row j is element
    ``slice_starts[s] + k * h + j`` of ``column`` and ``data``. With ``slice_size`` 1 that is CSR.
    With a ``slice_size`` of at least the largest graph it is ELL, graph by graph.

    Padding has the column -1 and 0 as ``data``. Values alone could not mark it. Padding would look
    like a stored 0 and be multiplied by some row of x, where a NaN or an infinity would show. And a
    matrix of implicit ones has no values to mark.

    Args:
        adj (BatchedCSR): the matrices; its implicit ones stay implicit.
        slice_size (int): S, rows per slice, at least 1. With 32 a slice is a warp.
        sort_rows (bool): sort the rows of every graph by decreasing number of entries before
            cutting, which saves padding. Products still take and return rows in the order of
            ``adj``.

    Raises:
        TypeError: ``adj`` is not a BatchedCSR, ``slice_size`` not an int or ``sort_rows`` not
            a bool.
        ValueError: ``slice_size`` below 1, or more than 2**31 - 1 entries with padding.

    Attributes:
        slice_starts (array): (n_slices + 1,) int32, first element of every slice.
        slice_rows (array): (n_slices + 1,) int32, first row of every slice, in the sorted numbering
            if rows are sorted; slice s has ``slice_rows[s + 1] - slice_rows[s]`` rows.
        column (array): (n_stored,) int32, columns in the numbering of the whole batch, or -1.
        data (array or None): (n_stored,) floats; None means all ones.
        row_order (array or None): (n_rows,) int32, the row of ``adj`` at every sorted place; None
            if rows are not sorted.
        row_offsets, col_offsets, n_graphs, n_rows, n_cols, nnz, n_relations, max_rows, max_cols,
            layout, max_atom_id, is_symmetric, row_weights, padded_to: as in ``adj``.
        slice_size, n_slices (int): S and the number of slices.
        max_slice_rows (int): rows of the largest slice.

    Note:
        It is built on the host: CuPy arrays are copied there and back (synchronises, at
        construction, and once for :attr:`T` of a matrix that is not symmetric).

    Source:
        IPSJ report 2018-HPC-164 No. 3, sections 4 and 4.1, for the SELL format and the sorting of
        rows. Deviations: slices end with their graph, rows are sorted inside a graph only, and the
        last slice of a graph has no rows beyond the graph's.
    """

    _integers = ('slice_starts', 'slice_rows', 'column', 'row_order', 'row_offsets', 'col_offsets')

    def __init__(self, adj: BatchedCSR, slice_size: int = 32, sort_rows: bool = False) -> None:
        if type(adj) is not BatchedCSR:
            raise TypeError('adj: expected a BatchedCSR, got %s' % type(adj).__name__)
        adj.refuse_spare()
        self.slice_size = check.count('slice_size', slice_size, 1)
        if not isinstance(sort_rows, (bool, numpy.bool_)):
            raise TypeError('sort_rows: expected a bool, got %r' % (sort_rows,))
        device = backend.get_device_from_array(adj.indices)
        adj = adj.to_device('@numpy')
        self.__dict__.update(fields_of(adj), data=None)
        self.is_symmetric = adj.is_symmetric and adj.n_relations == 1
        self._set_slices()
        self._set_entries(adj, sort_rows)
        if device.xp is not numpy:
            self._move(device)

    def _set_slices(self):
        """Cut the rows of every graph into slices."""
        sizes = numpy.diff(self.row_offsets).astype(numpy.int64)
        size = min(self.slice_size, max(self.max_rows, 1))
        n_slices = -(-sizes // size)
        number = numpy.arange(n_slices.sum()) - numpy.repeat(
            numpy.cumsum(n_slices) - n_slices, n_slices
        )
        first = numpy.repeat(self.row_offsets[:-1], n_slices) + size * number
        self.slice_rows = numpy.append(first, self.n_rows).astype(numpy.int32)
        self.n_slices = first.size
        self.max_slice_rows = min(size, self.max_rows)

    def _set_entries(self, adj, sort_rows):
        counts = numpy.diff(adj.indptr)
        self.row_order = None
        if sort_rows:
            graph = numpy.repeat(numpy.arange(self.n_graphs), numpy.diff(self.row_offsets))
            # lexsort is stable, so rows of equal length keep their order.
            self.row_order = numpy.lexsort((-counts, graph)).astype(numpy.int32)
            counts = counts[self.row_order]
        heights = numpy.diff(self.slice_rows).astype(numpy.int64)
        widths = numpy.maximum.reduceat(counts, self.slice_rows[:-1]) if self.n_slices else heights
        starts = build.starts_of(heights * widths)
        check.fits_int32('non-zeros with padding', int(starts[-1]))
        self.slice_starts = starts.astype(numpy.int32)
        stored, entry = _places(self, counts, adj.indptr)
        self.column = numpy.full(starts[-1], PADDING, numpy.int32)
        self.column[stored] = adj.indices[entry]
        if adj.data is not None:
            self.data = numpy.zeros(starts[-1], adj.data.dtype)
            self.data[stored] = adj.data[entry]

    @property
    def padding_ratio(self) -> float:
        """Ratio of stored entries, padding included, to non-zeros (float); 1 if there are none."""
        return self.column.size / self.nnz if self.nnz else 1.0

    @property
    def T(self) -> BatchedSELL:
        """The transposed matrix, of the same ``slice_size`` and sorting, built once.

        A symmetric matrix is its own transpose.
        """
        return self if self.is_symmetric else self.cached('transpose', self._make_transpose)

    def _make_transpose(self):
        adj = self.to_device('@numpy').to_csr().T
        transpose = BatchedSELL(adj, self.slice_size, self.row_order is not None)
        return transpose.to_device(backend.get_device_from_array(self.column))

    def to_csr(self) -> BatchedCSR:
        """Return the ``BatchedCSR`` from which this was made, with entries in their old order.

        The result is on the same device. It is made on the host (synchronises).
        """
        host = self.to_device('@numpy')
        heights = numpy.diff(host.slice_rows)
        size = numpy.diff(host.slice_starts)
        inside = numpy.arange(host.column.size) - numpy.repeat(host.slice_starts[:-1], size)
        place = numpy.repeat(host.slice_rows[:-1], size) + inside % numpy.repeat(heights, size)
        counts = numpy.bincount(place[host.column != PADDING], minlength=self.n_rows)
        row_counts = counts
        if host.row_order is not None:
            row_counts = numpy.empty_like(counts)
            row_counts[host.row_order] = counts
        indptr = build.starts_of(row_counts).astype(numpy.int32)
        stored, entry = _places(host, counts, indptr)
        indices = numpy.empty(self.nnz, numpy.int32)
        indices[entry] = host.column[stored]
        data = None
        if host.data is not None:
            data = numpy.empty(self.nnz, host.data.dtype)
            data[entry] = host.data[stored]
        adj = csr_of(host, indptr, indices, data, self.is_symmetric)
        return adj.to_device(backend.get_device_from_array(self.column))

    def to_scipy(self) -> scipy.sparse.csr_matrix:
        """Return the block-diagonal ``scipy.sparse.csr_matrix`` (n_rows, n_cols), on the host.

        Implicit ones and float16 become float32. Copies from a device (synchronises).
        """
        return self.to_device('@numpy').to_csr().to_scipy()

    def to_dense(self) -> Any:
        """Return the matrices as one zero-padded array, as :meth:`BatchedCSR.to_dense` does."""
        return self.to_csr().to_dense()

    def _trait(self):
        return '%s, %d slice%s of up to %d rows%s, padding ratio %.3g' % (
            ', symmetric' if self.is_symmetric else '',
            self.n_slices,
            '' if self.n_slices == 1 else 's',
            self.slice_size,
            '' if self.row_order is None else ', sorted',
            self.padding_ratio,
        )


def _places(sell, counts, indptr):
    """Return the places of the entries in SELL and in CSR, two (nnz,) arrays in the same order.

    `counts`: (n_rows,), number of entries of each row, in the sorted numbering. All arrays are on
    the host.
    """
    heights = numpy.diff(sell.slice_rows)
    place = numpy.repeat(numpy.arange(sell.n_rows), counts)
    k = numpy.arange(place.size) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    slice_ = numpy.repeat(numpy.arange(sell.n_slices), heights)[place]
    stored = sell.slice_starts[slice_] + k * heights[slice_] + place - sell.slice_rows[slice_]
    row = place if sell.row_order is None else sell.row_order[place]
    return stored, indptr[row] + k
