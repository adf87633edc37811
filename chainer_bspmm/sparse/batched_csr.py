"""`BatchedCSR`: the adjacency matrices of a batch of graphs as one block-diagonal CSR matrix."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy
import scipy.sparse

from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.sparse import build, check
from chainer_bspmm.sparse.batch import Batch

# The arrays of a batch of fixed capacity; n_rows and nnz are capacities.
# atoms: (n_rows,) int32 or (n_rows, channels) floats. indptr: (n_rows + 1,) int32.
# indices: (nnz,) int32. data: (nnz,) floats or None.
# row_offsets, col_offsets: (n_graphs + 1,) int32. row_weights: (n_rows,) float32 or None.
# labels: a list of arrays (n_graphs, ...), or (n_rows, ...) for labels of nodes.
Buffers = collections.namedtuple(
    'Buffers', 'atoms indptr indices data row_offsets col_offsets row_weights labels'
)


class BatchedCSR(Batch):
    """Hold one sparse matrix per graph as a single block-diagonal CSR matrix.

    Entry ``k`` of row ``i`` (``indptr[i] <= k < indptr[i + 1]``) is in column ``indices[k]`` and
    has the value ``data[k]``, or 1 if ``data`` is None. Entries at the same place are added. With R
    relations (bond types) a graph with n nodes has n * R columns: entry ``(i, j * R + r)`` is
    ``A_r[i, j]``, so that one product sums over the relations.

    The constructor checks arrays of unknown origin. :meth:`from_matrices`, :meth:`from_dense` and
    ``chainer_bspmm.concat_mols`` take matrices, dense batches and data sets.

    Args:
        indptr (array): (n_rows + 1,) integers, start of every row's entries.
        indices (array): (nnz,) integers, column of every entry in the numbering of the whole batch.
        row_offsets (array): (n_graphs + 1,) integers, first row of every graph.
        data (array or None): (nnz,) float16, float32 or float64 values; None means all ones.
        col_offsets (array or None): (n_graphs + 1,) integers, first column of every graph;
            None means ``row_offsets * n_relations``.
        n_relations (int): R, the number of columns per node.
        layout (str): ``'packed'``, or ``'padded'`` if every graph has the same number of rows. For
            ``'folded'``, which has weights, see :meth:`from_matrices`.
        max_atom_id (int or None): largest atom id of the nodes, if known; with it a model can check
            its embedding without reading from the device.

    Raises:
        TypeError: an argument is not an array, or has a dtype other than integers (``data``:
            floats).
        ValueError: wrong lengths, decreasing offsets, an index outside its graph's block, more
            than 2**31 - 1 entries, rows or columns. The message names graph, row, value and bound.

    Attributes:
        indptr, indices, data, row_offsets, col_offsets: the arrays (int32; ``data`` floats).
        n_graphs, n_rows, n_cols, nnz, n_relations (int): sizes.
        max_rows, max_cols, max_nnz (int): the most rows, columns, entries of a graph.
        longest (int): upper bound of the number of entries in a row or column. The launches of a
            product depend on it, and with them the order in which long rows are summed.
        is_symmetric (bool): whether the matrix of every relation is known to equal its transpose.
        has_spare (bool): whether the arrays may be larger than the batch; see :meth:`in_buffers`.
        layout, max_atom_id: as given.
        row_weights (array or None): (n_rows,) float32, the number of times that each row counts in
            a reduction over the nodes of a graph; None: once.
        padded_to (int or None): the number of nodes to which folded graphs are padded; None: as
            many as the largest graph of the batch has.

    Note:
        CuPy arrays are copied to the host to be checked (synchronises, once, at construction).
    """

    indptr: Any
    indices: Any
    _integers = ('indptr', 'indices', 'row_offsets', 'col_offsets')
    _check = staticmethod(check.blocks)

    def __init__(
        self,
        indptr: Any,
        indices: Any,
        row_offsets: Any,
        data: Any = None,
        col_offsets: Any = None,
        n_relations: int = 1,
        layout: str = 'packed',
        max_atom_id: int | None = None,
    ) -> None:
        integers = indptr, indices, row_offsets, col_offsets
        self._check_and_set(integers, data, n_relations, layout, max_atom_id)

    def _set(self, is_symmetric=None, **fields):
        """Set attributes to checked host arrays and numbers; find `is_symmetric` if it is None."""
        self._set_fields(**fields)
        self.nnz = self.indices.size
        self.max_nnz = int(numpy.diff(self.indptr[self.row_offsets]).max(initial=0))
        self.is_symmetric = self._find_symmetry() if is_symmetric is None else is_symmetric
        self.longest = build.longest(self.max_nnz, self.indptr, self.indices, self.is_symmetric)

    def _find_symmetry(self):
        n_relations = self.n_relations
        if self.n_rows * n_relations != self.n_cols or not numpy.array_equal(
            self.row_offsets * n_relations, self.col_offsets
        ):
            return False
        if n_relations > 1:
            rows = build.entry_rows(numpy, self.indptr, self.nnz, False)
            return not build.asymmetric(rows, self.indices, self.data, n_relations).any()
        indptr, indices, order = build.transpose(numpy, self.indptr, self.indices, self.n_cols)
        return (
            numpy.array_equal(indptr, self.indptr)
            and numpy.array_equal(indices, self.indices)
            and (self.data is None or numpy.array_equal(self.data[order], self.data))
        )

    @classmethod
    def _trusted(cls, **fields):
        """Make an instance from host arrays that this package built; nothing is checked."""
        self = cls.__new__(cls)
        self._set(**fields)
        return self

    @classmethod
    def in_buffers(
        cls,
        indptr,
        indices,
        row_offsets,
        col_offsets,
        data,
        n_relations,
        max_rows,
        max_nnz,
        max_atom_id,
        is_symmetric,
        has_spare=True,
        layout='packed',
        row_weights=None,
        padded_to=None,
        longest=None,
    ):
        """Make a batch of arrays that may be larger than the batch, and may be filled again.

        Only the sizes of the arrays are read: nothing is checked, copied or read from a device.
        ``n_rows``, ``n_cols`` and ``nnz`` are capacities. The true sizes are the last items of
        ``row_offsets`` and ``indptr``; from the end of the last graph on, ``indptr`` repeats the
        true number of entries. Spare rows, which are past the last graph, have no entries: their
        results and gradients are 0. Spare entries, which are past the last row's, belong to no row:
        their ``indices`` are 0, their ``data`` finite, their gradients 0.

        Arrays and numbers are as in the class, but ``max_rows``, ``max_nnz``, ``max_atom_id`` and
        ``longest`` (None: ``max_nnz``) are bounds, and ``is_symmetric`` holds for every matrix that
        the arrays will hold. ``row_weights`` are for ``'folded'``, 0 for spare rows. The layout
        ``'unfolded'`` is a padded batch whose features have two dimensions.

        Returns:
            BatchedCSR: on the device of the arrays, which it shares. The entries of matrices that
            are derived from it and cached, such as :attr:`T`, do not change when the arrays are
            filled again.
        """
        self = cls.__new__(cls)
        self.indptr = indptr
        self.indices = indices
        self.data = data
        self.row_offsets = row_offsets
        self.col_offsets = col_offsets
        self.row_weights = row_weights

        self.n_graphs = row_offsets.size - 1
        self.n_rows = indptr.size - 1
        self.n_cols = self.n_rows * n_relations
        self.nnz = indices.size
        self.max_rows = max_rows
        self.max_cols = max_rows * n_relations
        self.max_nnz = max_nnz
        self.longest = max_nnz if longest is None else longest

        self.n_relations = n_relations
        self.layout = layout
        self.padded_to = padded_to
        self.max_atom_id = max_atom_id
        self.is_symmetric = is_symmetric
        self.has_spare = has_spare
        self._cache = {}
        return self

    @classmethod
    def from_matrices(
        cls,
        matrices: Sequence[Any],
        layout: str = 'packed',
        max_atom_id: int | None = None,
        padded_to: int | None = None,
    ) -> BatchedCSR:
        """Build a batch from one matrix per graph.

        Args:
            matrices (sequence): for every graph a dense (n, n) array, a dense (R, n, n) array, a
                SciPy sparse (n, n) matrix, or a list of R SciPy sparse matrices. A NaN is an entry.
                Floating dtypes stay, the widest of all. Integer and boolean matrices get the dtype
                of the others, or float32; in float16, integers above 65,504 become infinite.
            layout (str): ``'packed'``: graph g has n_g rows. ``'padded'``: every graph has as many
                rows as the largest; the rows past n_g are empty. ``'folded'``: graph g has n_g + 1
                rows. The last one is empty, and stands for the N - n_g rows by which a padded graph
                would be longer; its weight is N - n_g.
            max_atom_id (int or None): see the class.
            padded_to (int or None): N of ``'folded'``; None means the largest graph's number of
                nodes. If a graph has more than N nodes, the weight is 0.

        Returns:
            BatchedCSR: on the host, or on the device of the given CuPy arrays.

        Raises:
            TypeError: an element is neither an array nor a SciPy matrix.
            ValueError: there is no element, a matrix is not square, the numbers of relations
                differ, there are too many entries, or ``padded_to`` is given with another layout.

        Note:
            CuPy arrays are copied to the host (synchronises).
        """
        check.layout(layout, padded_to)
        if max_atom_id is not None:
            max_atom_id = check.count('max_atom_id', max_atom_id, 0)
        # Data sets of Chainer, such as a SubDataset, have items only.
        is_sequence = hasattr(matrices, '__iter__') or hasattr(matrices, '__getitem__')
        if scipy.sparse.issparse(matrices) or not is_sequence:
            text = 'matrices: expected a sequence with a matrix for each graph, got one %s'
            raise TypeError(text % type(matrices).__name__)
        matrices = list(matrices)
        device = check.same_device('matrices', matrices)
        fields = build.from_matrices(build.all_to_host(matrices), layout, padded_to)
        self = cls._trusted(layout=layout, max_atom_id=max_atom_id, **fields)
        return self if device is None else self.to_device(device)

    @classmethod
    def from_dense(
        cls,
        adj: Any,
        n_nodes: Sequence[int] | None = None,
        layout: str = 'padded',
        max_atom_id: int | None = None,
    ) -> BatchedCSR:
        """Build a batch from a padded dense adjacency array.

        Args:
            adj (array): (n_graphs, N, N), or (n_graphs, R, N, N) with R relations; NumPy or CuPy.
            n_nodes (sequence of int or None): nodes of every graph, needed by ``'packed'``;
                ``'padded'`` does not use it.
            layout (str): ``'padded'``: every graph has N rows. ``'packed'``: graph g has n_nodes[g]
                rows; entries past them are an error.
            max_atom_id (int or None): see the class.

        Returns:
            BatchedCSR: on the device that holds ``adj``.

        Raises:
            TypeError: ``adj`` is not an array.
            ValueError: a wrong shape, wrong sizes or a wrong layout.

        Note:
            A CuPy array is copied to the host (synchronises).
        """
        check.dense_batch(adj)
        host = cuda.to_cpu(adj)
        check.one_of('layout', layout, ('packed', 'padded'))
        matrices = check.crop(host, n_nodes) if layout == 'packed' else list(host)
        if not matrices:
            raise ValueError('adj: expected at least one graph, got shape %s' % (adj.shape,))
        self = cls.from_matrices(matrices, layout, max_atom_id)
        device = backend.get_device_from_array(adj)
        return self if device.xp is numpy else self.to_device(device)

    @property
    def T(self) -> BatchedCSR:
        """The transposed matrix, built once on the same device, deterministically.

        A symmetric matrix is its own transpose. For values other than ``data`` see
        :attr:`transpose_order`.
        """
        return self if self._is_own_transpose else self._transposed[0]

    @property
    def _is_own_transpose(self):
        return self.is_symmetric and self.n_relations == 1

    @property
    def transpose_order(self) -> Any:
        """Order of the transpose's entries, (nnz,) int32.

        Entry k of :attr:`T` is entry ``transpose_order[k]`` of this matrix.
        """
        if self._is_own_transpose:
            return self.cached('transpose order', lambda: build.transpose_batch(self)[2])
        return self._transposed[1]

    @property
    def _transposed(self):
        return self.cached('transpose', self._make_transpose)

    def _make_transpose(self):
        indptr, indices, order = build.transpose_batch(self)
        new = self.replace(
            indptr=indptr,
            indices=indices,
            data=None if self.data is None else self.data[order],
            row_offsets=self.col_offsets,
            col_offsets=self.row_offsets,
            n_rows=self.n_cols,
            n_cols=self.n_rows,
            max_rows=self.max_cols,
            max_cols=self.max_rows,
            n_relations=1,  # relations are in the rows, pairs of node and relation, not in columns
        )
        if self.n_relations > 1 and self.layout == 'folded':  # pairs have no weights
            new = new.replace(layout='packed', padded_to=None, row_weights=None)
        return new, order

    def entry_rows(self) -> Any:
        """Return the row of every entry, (nnz,) int32, on the matrix's device."""
        return build.entry_rows(self.xp, self.indptr, self.nnz, self.has_spare)

    def entry_columns(self) -> Any:
        """Return the column of every entry, (nnz,) int32, which is ``indices``."""
        return self.indices

    def to_scipy(self) -> scipy.sparse.csr_matrix:
        """Return the block-diagonal ``scipy.sparse.csr_matrix`` (n_rows, n_cols), on the host.

        Implicit ones and float16 become float32. Copies from a device (synchronises).
        """
        indptr, indices = cuda.to_cpu(self.indptr), cuda.to_cpu(self.indices)
        return scipy.sparse.csr_matrix(
            (self._host_values(), indices, indptr), shape=self.shape, copy=True
        )

    def _n_true_entries(self):
        return int(self.indptr[-1]) if self.has_spare else self.nnz

    def refuse_spare(self) -> None:
        """Raise ValueError for a batch with spare rows or entries, which the caller would count."""
        if self.has_spare:
            raise ValueError(
                'adj: expected a batch without spare rows and entries, as '
                'chainer_bspmm.concat_mols makes it, got %r' % self
            )

    def _trait(self):
        return ', symmetric' * self.is_symmetric + ', some spare' * self.has_spare


def fill_buffers(buffers: Buffers, atoms: Any, adj: BatchedCSR, labels: Sequence[Any]) -> None:
    """Write a packed or folded batch to arrays of its size or larger; the rest becomes spare.

    A batch of ones on a host may fill buffers that have values.
    """
    values = adj.data
    if values is None and buffers.data is not None:
        values = numpy.ones(adj.nnz, buffers.data.dtype)
    tables = adj.indptr, adj.indices, values, adj.row_offsets, adj.col_offsets, adj.row_weights
    for array, buffer in zip((atoms, *tables, *labels), (*buffers[:-1], *buffers.labels)):
        if buffer is not None:
            buffer[: len(array)] = array
            buffer[len(array) :] = 0
    buffers.indptr[len(adj.indptr) :] = adj.nnz


def check_adjacency(adj):
    """Raise TypeError unless a matrix is a BatchedCSR."""
    if type(adj) is not BatchedCSR:
        check.of_kind(adj, (BatchedCSR,))


def check_relations(adj):
    """Raise an error unless a matrix is a BatchedCSR with a column for every row and relation."""
    if type(adj) is not BatchedCSR or adj.n_cols != adj.n_rows * adj.n_relations:
        check_adjacency(adj)
        text = 'adj: expected a column for each of its %d rows and %d relations, got %r'
        raise ValueError(text % (adj.n_rows, adj.n_relations, adj))
