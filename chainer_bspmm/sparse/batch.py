"""`Batch`, the base class of the containers of sparse matrices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
import numbers
from types import ModuleType
from typing import Any, TypeVar

import numpy

import chainer
from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.sparse import check

Container = TypeVar('Container', bound='Batch')
ENTRIES = 'indptr', 'indices', 'data'  # attributes on which symmetry depends


class Batch:
    """Hold arrays that describe one block-diagonal matrix, and move them between devices.

    A subclass names its int32 arrays in ``_integers``: all arrays but ``data``. A batch may lack
    some of them; then they are None. The subclass also has ``nnz``, `entry_rows` and
    `entry_columns`, or overrides `to_dense`.

    Reductions over the nodes of a graph (sums, maxima, softmax, statistics) count row i
    ``row_weights[i]`` times, an (n_rows,) float32 array; None counts every row once. A gradient
    with respect to a row is the sum over the copies that it stands for, so nothing else needs to
    know of weights.

    Do not change arrays and attributes: results that were derived from them are cached (`cached`)
    and would not change with them. :meth:`replace` makes a changed matrix. The only exceptions are
    the arrays of ``BatchedCSR.in_buffers``, which may be filled again.
    """

    row_offsets: Any
    col_offsets: Any
    data: Any
    n_relations: int
    layout: str
    max_atom_id: int | None
    nnz: int
    entry_rows: Callable[[], Any]
    entry_columns: Callable[[], Any]
    _cache: dict[Hashable, Any]
    _check: Callable  # checks integers on the host, of unknown origin
    _set: Callable
    _integers = ()
    has_spare = False  # whether arrays may be larger than the batch: BatchedCSR.in_buffers
    is_symmetric = False  # whether the matrix of every relation is known to equal its transpose
    row_weights = None
    padded_to = None  # N, if it is fixed; None: the size of the largest molecule of the batch
    __array_ufunc__ = None  # makes NumPy and CuPy defer to the operators below
    n_node_columns = 0  # number of arrays after this one in a batch that have a row for each node

    def _check_and_set(self, integers, data, n_relations, layout, max_atom_id):
        """Check arrays of unknown origin, and keep copies of them on their device."""
        n_relations, max_atom_id = check.options(n_relations, layout, max_atom_id)
        arrays = dict(zip(self._integers, integers))
        host, device = check.host_integers(arrays, data, n_relations)
        self._check(n_relations=n_relations, **host)
        if layout == 'padded':
            check.equal_blocks(host)
        host = {name: numpy.ascontiguousarray(array, numpy.int32) for name, array in host.items()}
        host['data'] = None if data is None else numpy.array(cuda.to_cpu(data))  # always a copy
        self._set(n_relations=n_relations, layout=layout, max_atom_id=max_atom_id, **host)
        if device.xp is not numpy:
            self._move(device)

    def __getstate__(self):
        return {**vars(self), '_cache': {}}

    def _set_fields(self, **fields):
        """Set attributes to host arrays and numbers, and derive the sizes of every container."""
        self.__dict__.update(fields)
        self.n_graphs = self.row_offsets.size - 1
        self.n_rows = int(self.row_offsets[-1])
        self.n_cols = int(self.col_offsets[-1])
        self.max_rows = int(numpy.diff(self.row_offsets).max(initial=0))
        self.max_cols = int(numpy.diff(self.col_offsets).max(initial=0))
        self._cache = {}

    def _arrays(self):
        """Return name -> array for the arrays that this batch has."""
        arrays = {name: getattr(self, name) for name in (*self._integers, 'data', 'row_weights')}
        return {name: array for name, array in arrays.items() if array is not None}

    def _move(self, device):
        """Send every array to `device` in one transfer; numbers stay as they are."""
        arrays = self._arrays()
        self.__dict__.update(zip(arrays, send(list(arrays.values()), device)))

    def replace(self: Container, **fields: Any) -> Container:
        """Return a matrix with these attributes, which shares all others; nothing is checked.

        If entries or their values are replaced, the matrix is not known to be symmetric, unless
        ``is_symmetric`` is among the attributes.
        """
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        if not fields.keys().isdisjoint(ENTRIES):
            new.is_symmetric = False
        new.__dict__.update(fields)
        new._cache = {}
        return new

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make()``, called once per key, with the batch's device current.

        The result must not refer back to the batch: such a cycle would keep the device memory of
        both until Python's garbage collector finds it.
        """
        if key not in self._cache:
            with cuda.get_device_from_array(self.row_offsets):
                self._cache[key] = make()
        return self._cache[key]

    def _no_operator(self, *args: Any) -> Any:
        raise TypeError(
            "adj: a %s has no operators and no items. With CSRConverter('padded') adj.to_dense() "
            'is the array that the dense model has, (n_graphs, N, N), or (n_graphs, R, N, N) of R '
            'relations; BatchedCSR.from_dense makes a batch of such an array' % type(self).__name__
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = __neg__ = _no_operator
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __abs__ = __pos__ = _no_operator
    __gt__ = __ge__ = __lt__ = __le__ = __getitem__ = _no_operator
    __iter__ = None  # otherwise __getitem__ would make it iterable
    __hash__ = object.__hash__

    def __array__(self, dtype=None, copy=None):
        if numpy.dtype(dtype).kind != 'O':
            self._no_operator()  # otherwise NumPy's functions would take it for a scalar
        item = numpy.empty((), object)
        item[()] = self
        return item

    def __eq__(self, other):
        if isinstance(
            other, (numbers.Number, numpy.generic, *chainer.get_array_types(), chainer.Variable)
        ):
            self._no_operator()  # such as `adj != 0`, which would be one bool
        return NotImplemented  # otherwise it equals only itself

    @property
    def xp(self) -> ModuleType:
        """Module of the arrays, numpy or cupy."""
        return backend.get_array_module(self.row_offsets)

    @property
    def dtype(self) -> numpy.dtype | None:
        """Dtype of ``data``, or None for implicit ones."""
        return None if self.data is None else self.data.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the block-diagonal matrix, (n_rows, n_cols)."""
        return self.n_rows, self.n_cols

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays (int)."""
        return sum(array.nbytes for array in self._arrays().values())

    def to_device(self: Container, device: Any) -> Container:
        """Return the batch on a device, anything that ``chainer.get_device`` takes.

        It takes one transfer.
        """
        device = chainer.get_device(device)
        if device == backend.get_device_from_array(self.row_offsets):
            return self
        new = self.replace()
        new._move(device)
        return new

    def astype(self: Container, dtype: Any) -> Container:
        """Return the batch with ``data`` in float16, float32 or float64, made once per dtype.

        If nothing changes, this batch itself is returned; implicit ones have no dtype.
        """
        dtype = check.float_dtype('dtype', dtype)
        if self.data is None or self.data.dtype == dtype:
            return self
        # The result is cached, because a model asks for it in every forward pass.
        return self.cached(
            ('astype', dtype),
            lambda: self.replace(data=self.data.astype(dtype), is_symmetric=self.is_symmetric),
        )

    def _host_values(self):
        """Return the values on the host; ones and float16, which SciPy lacks, become float32."""
        if self.data is None:
            return numpy.ones(self.nnz, 'f')
        values = cuda.to_cpu(self.data)
        return values.astype('f') if values.dtype == numpy.float16 else values

    def to_dense(self) -> Any:
        """Return the matrices as one zero-padded array, on this device, by way of the host.

        Its shape is (n_graphs, max_rows, max_cols), or (n_graphs, R, max_rows, max_cols / R) if
        R > 1. Implicit ones become float32. Entries at the same place are added.
        """
        n_graphs, n_relations, xp = self.n_graphs, self.n_relations, self.xp
        row_offsets, col_offsets = cuda.to_cpu(self.row_offsets), cuda.to_cpu(self.col_offsets)
        n_entries = self._n_true_entries()
        rows = cuda.to_cpu(self.entry_rows())[:n_entries]
        graph = numpy.searchsorted(row_offsets, rows, side='right') - 1
        column = cuda.to_cpu(self.entry_columns())[:n_entries] - col_offsets[graph]
        data = self._host_values()[:n_entries]
        dense = numpy.zeros(
            (n_graphs, n_relations, self.max_rows, self.max_cols // n_relations), data.dtype
        )
        numpy.add.at(
            dense,
            (graph, column % n_relations, rows - row_offsets[graph], column // n_relations),
            data,
        )
        dense = dense.astype('f' if self.data is None else self.data.dtype, copy=False)
        return xp.asarray(dense if n_relations > 1 else dense[:, 0])

    def _n_true_entries(self):
        """Return the number of entries that belong to a graph; the others come last."""
        return self.nnz

    def _trait(self):
        """Return the text that `repr` adds to the number of entries."""
        return ''

    def __repr__(self):
        return '<%s: %d graphs (%s), %d x %d, %d relation%s, %d entries%s, %s on %s>' % (
            type(self).__name__,
            self.n_graphs,
            self.layout,
            self.n_rows,
            self.n_cols,
            self.n_relations,
            's'[: self.n_relations != 1],
            self.nnz,
            self._trait(),
            'ones' if self.data is None else self.data.dtype.name,
            backend.get_device_from_array(self.row_offsets).name,
        )


def send(arrays, device):
    """Send host arrays to `device` as one buffer, because for so few bytes only latency matters."""
    if device.xp is numpy:
        return [cuda.to_cpu(array) for array in arrays]
    # Each array starts at a multiple of 16 bytes, which is the widest load of a kernel.
    starts = numpy.cumsum([0] + [-(-array.nbytes // 16) * 16 for array in arrays])
    buffer = numpy.zeros(int(starts[-1]), numpy.uint8)
    for start, array in zip(starts, arrays):
        buffer[start : start + array.nbytes] = numpy.frombuffer(
            numpy.ascontiguousarray(cuda.to_cpu(array)), numpy.uint8
        )
    sent = device.send(buffer)
    return [
        sent[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts.tolist(), arrays)
    ]
