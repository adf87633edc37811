"""The products on CuPy arrays: one kernel launch each, on the device that holds the matrix.

A call launches on the current stream, does not synchronise and copies nothing to the device. Inputs
that are not C-contiguous are copied first.
"""

import collections
import functools
import math
import operator

import numpy

from chainer import utils
from chainer.backends import cuda

from chainer_bspmm.backend import check
from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import policy
from chainer_bspmm.sparse import BatchedCOO
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import BatchedSELL

# How bspmm_csr finds the value of an entry; see the kernel's header.
ONES, DATA, ORDERED = 0, 1, 2
NULL = numpy.uintp(0)


def bspmm(adj, x, data, residual, trans, algorithm='auto'):
    product = DEFAULT[type(adj)] if algorithm == 'auto' else algorithms(adj)[algorithm]
    with _Device(x):
        y = product(adj, _contiguous(x), _contiguous(data), _contiguous(residual), trans)
    return y if x.ndim == 2 else y.reshape(check.result_shape(adj, len(y), x))


def _contiguous(array):
    if array is None or array.flags.c_contiguous:
        return array
    return cuda.cupy.ascontiguousarray(array)


def _or_null(array):
    return NULL if array is None else array


def _values(adj, data=None, trans=False):
    """Return WEIGHTS, data and order as the kernels take them."""
    if data is not None:
        return (ORDERED, data, adj.transpose_order) if trans else (DATA, data, NULL)
    data = (adj.T if trans else adj).data
    return (ONES, NULL, NULL) if data is None else (DATA, data, NULL)


def _csr(adj, x, data, residual, trans, algorithm='auto'):
    """A thread per vector of a row, or of several rows, kernels/bspmm_csr.cu."""
    side = adj.T if trans else adj
    n_rows, n_channels = side.n_rows, x.shape[-1]
    y = cuda.cupy.empty((n_rows, n_channels), x.dtype)
    if y.size:
        bits = x.data.ptr | y.data.ptr
        has_residual = int(residual is not None)
        if has_residual:
            bits |= residual.data.ptr
        else:
            residual = NULL
        weights, data, order = _values(adj, data, trans)
        device_id, itemsize = x.data.device_id, x.itemsize
        launch = policy.bspmm_launch(
            n_rows,
            side.n_cols,
            side.nnz,
            n_channels,
            policy.vector_width(n_channels, itemsize, bits),
            itemsize,
            kernels.device(device_id),
            algorithm,
        )
        kernel = kernels.load(
            device_id,
            'bspmm_csr',
            x.dtype.char,
            launch.defines + (('WEIGHTS', weights), ('RESIDUAL', has_residual)),
        )
        kernel(
            launch.grid,
            launch.block,
            (side.indptr, side.indices, data, order, x, residual, y, *launch.arguments),
        )
    return y


def _swa(adj, x, data, residual, trans, blocked=None):
    """A sub-warp per row, sums in shared memory, kernels/bspmm_swa.cu."""
    side = adj.T if trans else adj
    n_rows, n_channels = side.n_rows, x.shape[-1]
    y = cuda.cupy.empty((n_rows, n_channels), x.dtype)
    if y.size:
        launch = policy.swa_launch(side.n_graphs, side.max_rows, n_channels, x.itemsize, blocked)
        weights, data, order = _values(adj, data, trans)
        kernel = kernels.load(
            x.data.device_id, 'bspmm_swa', x.dtype.char, launch.defines + (('WEIGHTS', weights),)
        )
        kernel(
            launch.grid,
            launch.block,
            (
                side.row_offsets,
                side.indptr,
                side.indices,
                data,
                order,
                x,
                _or_null(residual),
                y,
                numpy.int32(side.n_graphs),
                numpy.int32(side.max_rows),
                numpy.int32(n_channels),
                numpy.int32(launch.width),
            ),
            launch.shared_bytes,
        )
    return y


# name -> function(adj, x, data, residual, trans) that returns (n_rows, n_B); arrays C-contiguous.
ALGORITHMS = {
    'vector': functools.partial(_csr, algorithm='vector'),
    'pipelined': functools.partial(_csr, algorithm='pipelined'),
    'swa': _swa,
    'swa_rows': functools.partial(_swa, blocked=False),
    'swa_blocked': functools.partial(_swa, blocked=True),
}


def _sell(adj, x, data, residual, trans):
    """A thread per row of a slice, kernels/bspmm_sell.cu; `data` is None."""
    side = adj.T if trans else adj
    y = cuda.cupy.empty((side.n_rows, x.shape[-1]), x.dtype)
    _launch_sell(side, x, 1, 0 if residual is None else 1, residual, y)
    return y


SELL_ALGORITHMS = {'sell': _sell}  # the same for a BatchedSELL


def _launch_sell(adj, x, alpha, beta, residual, y):
    """Compute y = alpha A x + beta residual, kernels/bspmm_sell.cu; `residual` may be y or None."""
    if not y.size:
        return
    bits = x.data.ptr | y.data.ptr | (0 if residual is None else residual.data.ptr)
    n_channels = y.size // adj.n_rows
    width = policy.vector_width(n_channels, x.itemsize, bits)
    n_slots = policy.sell_slots(adj.max_slice_rows)
    launch = policy.sell_launch(adj.n_slices, n_slots, n_channels, width)
    weights, data, _ = _values(adj)
    kernel = kernels.load(
        x.data.device_id, 'bspmm_sell', x.dtype.char, launch.defines + (('WEIGHTS', weights),)
    )
    real = _arithmetic(x.dtype)
    kernel(
        launch.grid,
        launch.block,
        (
            adj.slice_starts,
            adj.slice_rows,
            adj.column,
            data,
            _or_null(adj.row_order),
            x,
            _or_null(residual),
            y,
            real(alpha),
            real(beta),
            numpy.int32(adj.n_slices),
            numpy.int32(n_slots),
            numpy.int32(launch.n_vectors),
        ),
    )


def _arithmetic(dtype):
    """Return the NumPy type the kernels calculate in, `Real` of common.cuh."""
    return numpy.float64 if dtype == numpy.float64 else numpy.float32


def spmv(adj, x, alpha, beta, y):
    with _Device(x):
        if y is None:
            y = cuda.cupy.empty(adj.n_rows, x.dtype)
        x = _contiguous(x)
        if type(adj) is BatchedSELL:
            _launch_sell(adj, x, alpha, beta, y, y)
        elif y.size:
            launch = policy.spmv_launch(adj.n_rows, adj.nnz)
            weights, data, _ = _values(adj)
            kernel = kernels.load(
                x.data.device_id, 'spmv_csr', x.dtype.char, launch.defines + (('WEIGHTS', weights),)
            )
            real = _arithmetic(x.dtype)
            kernel(
                launch.grid,
                launch.block,
                (
                    adj.indptr,
                    adj.indices,
                    data,
                    x,
                    y,
                    real(alpha),
                    real(beta),
                    numpy.int32(adj.n_rows),
                ),
            )
    return y


def _st(adj, x, data, residual, trans):
    """One of the three below, by the paper's rule."""
    max_rows = adj.max_cols if trans else adj.max_rows
    algorithm = policy.st_algorithm(max_rows, x.shape[-1], x.itemsize)
    return ST_ALGORITHMS[algorithm](adj, x, data, residual, trans)


def _st_shared(adj, x, data, residual, trans):
    """A block per matrix, figure 5-(a), kernels/bspmm_st_shared.cu."""
    n_channels = x.shape[-1]
    max_rows = adj.max_cols if trans else adj.max_rows
    check.st_bytes(
        'st_shared',
        max_rows * n_channels * x.itemsize,
        'the output of the largest matrix',
        policy.SHARED_BUDGET,
    )
    return _st_blocks(adj, x, data, residual, trans, n_channels)


def _st_blocked(adj, x, data, residual, trans):
    """A block per matrix and partition of columns, figure 5-(b), kernels/bspmm_st_shared.cu."""
    n_channels = x.shape[-1]
    max_rows = adj.max_cols if trans else adj.max_rows
    check.st_bytes(
        'st_blocked',
        max_rows * x.itemsize,
        'one column of the output of the largest matrix',
        policy.SHARED_BUDGET,
    )
    n_columns = policy.st_partition(max_rows, n_channels, x.itemsize)
    return _st_blocks(adj, x, data, residual, trans, n_columns)


def _st_blocks(adj, x, data, residual, trans, n_columns):
    check.st_dtype(x)
    n_rows, max_rows, offsets = (
        (adj.n_cols, adj.max_cols, adj.col_offsets)
        if trans
        else (adj.n_rows, adj.max_rows, adj.row_offsets)
    )
    n_channels = x.shape[-1]
    y = cuda.cupy.empty((n_rows, n_channels), x.dtype)
    if y.size:
        launch = policy.st_shared_launch(
            adj.n_graphs, max_rows, adj.max_nnz, n_channels, n_columns, x.itemsize
        )
        kernel, values = _st_kernel('bspmm_st_shared', launch, adj, x, data, trans)
        kernel(
            launch.grid,
            launch.block,
            (
                adj.ids,
                values,
                adj.entry_offsets,
                offsets,
                x,
                _or_null(residual),
                y,
                numpy.int32(n_channels),
                numpy.int32(n_columns),
            ),
            launch.shared_bytes,
        )
    return y


def _st_global(adj, x, data, residual, trans):
    """A sub-warp per entry, case 3 of section 4.3, kernels/bspmm_st_global.cu."""
    check.st_dtype(x)
    shape = adj.n_cols if trans else adj.n_rows, x.shape[-1]
    # A launch of its own: nothing but the kernel's atomics writes the result.
    if residual is None:
        y = cuda.cupy.zeros(shape, x.dtype)
    else:
        y = residual.reshape(shape).copy()
    if y.size and adj.nnz:
        launch = policy.st_global_launch(adj.nnz, shape[1])
        kernel, values = _st_kernel('bspmm_st_global', launch, adj, x, data, trans)
        kernel(
            launch.grid,
            launch.block,
            (
                adj.ids,
                values,
                adj.entry_offsets,
                x,
                y,
                numpy.int32(adj.n_graphs),
                numpy.int32(shape[1]),
            ),
        )
    return y


def _st_kernel(name, launch, adj, x, data, trans):
    """Return a compiled ST kernel and the values of the entries as it takes them."""
    utils.nondeterministic('atomicAdd in bspmm with a BatchedCOO')
    weights, data, _ = _values(adj, data)  # trans swaps the indices, not the values
    kernel = kernels.load(
        x.data.device_id,
        name,
        x.dtype.char,
        launch.defines + (('WEIGHTS', weights), ('TRANS', int(trans))),
    )
    return kernel, data


# The same for a BatchedCOO; all of them add with atomics.
ST_ALGORITHMS = {
    'st': _st,
    'st_shared': _st_shared,
    'st_blocked': _st_blocked,
    'st_global': _st_global,
}


# What 'auto' means for a container.
DEFAULT = {BatchedCSR: _csr, BatchedCOO: _st, BatchedSELL: _sell}


def algorithms(adj):
    """Return the algorithms (dict) for the container of a batch."""
    if adj.has_spare:  # the others write the rows of graphs only
        return {name: ALGORITHMS[name] for name in ('vector', 'pipelined')}
    return {BatchedCOO: ST_ALGORITHMS, BatchedSELL: SELL_ALGORITHMS}.get(type(adj), ALGORITHMS)


def bsddmm(adj, u, v):
    n_channels = u.shape[-1]
    with _Device(u):
        u, v = _contiguous(u), _contiguous(v)
        w = cuda.cupy.empty(adj.nnz, u.dtype)
        if not n_channels or adj.has_spare:  # the kernel writes what entries of a row have
            w.fill(0)
        if n_channels and w.size:
            width = policy.vector_width(n_channels, u.itemsize, u.data.ptr | v.data.ptr)
            if type(adj) is BatchedCOO:
                _coo_dots(
                    adj, u, v, w, policy.dot_launch(adj.nnz, n_channels, width, policy.COO_TILE)
                )
                return w
            launch = policy.dot_launch(adj.n_rows, n_channels, width, policy.CSR_TILE)
            kernel = kernels.load(u.data.device_id, 'bsddmm_csr', u.dtype.char, launch.defines)
            kernel(
                launch.grid,
                launch.block,
                (
                    adj.indptr,
                    adj.indices,
                    u,
                    v,
                    w,
                    numpy.int32(adj.n_rows),
                    numpy.int32(launch.n_vectors),
                ),
            )
    return w


def _coo_dots(adj, u, v, w, launch):
    kernel = kernels.load(u.data.device_id, 'bsddmm_coo', u.dtype.char, launch.defines)
    kernel(
        launch.grid,
        launch.block,
        (
            adj.ids,
            adj.entry_offsets,
            u,
            v,
            w,
            numpy.int32(adj.n_graphs),
            numpy.int32(launch.n_vectors),
        ),
    )


def segment_sum(x, offsets, max_rows=None):
    return _reduce(x, offsets, max_rows, 'SUM')


def segment_max(x, offsets, max_rows=None):
    return _reduce(x, offsets, max_rows, 'MAX')


def row_sum(x):
    return _reduce(x, None, None, 'SUM')[0]


def _reduce(x, offsets, max_rows, operation):
    """Reduce in one launch, or in two where a segment can have more rows than a chunk."""
    n_segments = 1 if offsets is None else offsets.size - 1
    n_rows, n_channels = x.shape
    with _Device(x):
        x = _contiguous(x)
        y = cuda.cupy.empty((n_segments, n_channels), x.dtype)
        if y.size:
            width = policy.vector_width(n_channels, x.itemsize, x.data.ptr | y.data.ptr)
            launch = policy.segment_launch(
                n_rows, n_segments, n_channels, width, x.itemsize, max_rows
            )
            partial = NULL
            if launch.has_long:
                partial = cuda.cupy.empty((2, launch.n_chunks, n_channels), _arithmetic(x.dtype))
            arguments = (
                _or_null(offsets),
                x,
                y,
                partial,
                numpy.int32(n_segments),
                numpy.int32(n_rows),
                numpy.int32(launch.n_vectors),
                numpy.int32(launch.chunk),
                numpy.int32(launch.n_chunks),
            )
            for combine in range(1 + launch.has_long):
                kernel = kernels.load(
                    x.data.device_id,
                    'segment_reduce',
                    x.dtype.char,
                    launch.defines
                    + (('AHEAD', launch.ahead), ('OPERATION', operation), ('COMBINE', combine)),
                )
                grid = launch.combine_grid if combine else launch.grid
                kernel(grid, launch.block, arguments, launch.shared_bytes)
    return y


def segment_broadcast(y, offsets, n_rows, max_rows=None):
    n_segments, n_channels = y.shape
    with _Device(y):
        y = _contiguous(y)
        x = cuda.cupy.empty((n_rows, n_channels), y.dtype)
        if x.size:
            width = policy.vector_width(n_channels, y.itemsize, x.data.ptr | y.data.ptr)
            launch = policy.segment_launch(
                n_rows, n_segments, n_channels, width, y.itemsize, max_rows, always_chunks=True
            )
            kernel = kernels.load(
                y.data.device_id, 'segment_broadcast', y.dtype.char, launch.defines
            )
            kernel(
                launch.grid,
                launch.block,
                (
                    offsets,
                    y,
                    x,
                    numpy.int32(n_segments),
                    numpy.int32(n_rows),
                    numpy.int32(launch.n_vectors),
                    numpy.int32(launch.chunk),
                    numpy.int32(launch.n_chunks),
                    numpy.int32(launch.has_long),
                ),
            )
    return x


def segment_softmax(x, offsets):
    return _softmax(offsets, x, None)


def segment_softmax_grad(y, gy, offsets):
    return _softmax(offsets, y, gy)


def _softmax(offsets, a, g):
    """Launch kernels/segment_softmax.cu; `g` None is the softmax itself."""
    n_segments, n_channels = offsets.size - 1, a.shape[1]
    with _Device(a):
        a, g = _contiguous(a), _contiguous(g)
        y = cuda.cupy.empty(a.shape, a.dtype)
        if y.size and n_segments:
            bits = a.data.ptr | y.data.ptr | (0 if g is None else g.data.ptr)
            launch = policy.softmax_launch(
                n_segments, n_channels, policy.vector_width(n_channels, a.itemsize, bits)
            )
            kernel = kernels.load(
                a.data.device_id,
                'segment_softmax',
                a.dtype.char,
                launch.defines + (('GRADIENT', int(g is not None)),),
            )
            kernel(
                launch.grid,
                launch.block,
                (
                    offsets,
                    a,
                    _or_null(g),
                    y,
                    numpy.int32(n_segments),
                    numpy.int32(launch.n_vectors),
                ),
            )
    return y


def dropout(x, ratio, *draw):
    with _Device(x):
        x = _contiguous(x)
        mask, y = cuda.cupy.empty(x.shape, x.dtype), cuda.cupy.empty(x.shape, x.dtype)
        _drop('DROPOUT', x, mask, y, ratio, *draw)
    return mask, y


def relu_dropout(x, ratio, *draw):
    with _Device(x):
        y = _contiguous(x)
        _drop('RELU', y, None, y, ratio, *draw)
        if y is not x:
            x[...] = y


def dropout_mask(size, dtype, ratio, seed, stream, counter):
    with _Device(counter):
        mask = cuda.cupy.empty(size, dtype)
        _drop('MASK', None, mask, None, ratio, seed, stream, counter)
    return mask


def _drop(kind, x, mask, y, ratio, seed, stream, counter):
    """Launch kernels/dropout.cu on those of its arrays that `kind` has."""
    arrays = [array for array in (x, mask, y) if array is not None]
    size, dtype = arrays[0].size, arrays[0].dtype
    if not size:
        return
    bits = functools.reduce(operator.or_, (array.data.ptr for array in arrays))
    launch = policy.dropout_launch(size, policy.vector_width(size, dtype.itemsize, bits))
    kernel = kernels.load(
        counter.data.device_id, 'dropout', dtype.char, launch.defines + (('KIND', kind),)
    )
    kernel(
        launch.grid,
        launch.block,
        (
            *map(_or_null, (x, mask, y)),
            counter,
            *launch.arguments,
            numpy.uint32(seed % 2**32),
            numpy.uint32(seed >> 32),
            numpy.uint32(stream),
            numpy.uint32(min(math.ceil(ratio * 2**32), 2**32 - 1)),
            # Rounded as the array is, so that it is what Chainer multiplies by.
            _arithmetic(dtype)(dtype.type(1 / (1 - ratio))),
        ),
    )


# The arrays of a data set's molecules on a device, as kernels/gather_batch.cu takes them; data may
# be None, labels is a list of arrays (M, ...), n_relations an int.
Source = collections.namedtuple(
    'Source', 'starts entry_starts atoms row_starts columns data labels n_relations'
)


def gather_batch(source, index, buffers):
    """Fill buffers with the batch of some molecules: one launch, a further one for two more labels.

    Nothing is checked. The result has spare rows and entries where the buffers are larger.

    Args:
        source (Source): the data set.
        index (array): (n_graphs,) int32 on its device, at least one, each a molecule of it.
        buffers (Buffers): of the dtypes of the data set, on its device, C-contiguous.
    """
    pairs = [(label, out, _item_bytes(out)) for label, out in zip(source.labels, buffers.labels)]
    with _Device(index):
        device_id = index.data.device_id
        launch = policy.gather_launch(index.size, kernels.device(device_id))
        for first in range(0, max(len(pairs), 1), 2):
            labels, outs, label_bytes = zip(*(pairs[first : first + 2] + 2 * [(NULL, NULL, 0)])[:2])
            kernel = kernels.load(
                device_id, 'gather_batch', 'f', launch.defines + (('LABELS_ONLY', int(first > 0)),)
            )
            kernel(
                launch.grid,
                launch.block,
                (
                    index,
                    source.starts,
                    source.entry_starts,
                    source.atoms,
                    source.row_starts,
                    source.columns,
                    _or_null(source.data),
                    *labels,
                    buffers.atoms,
                    buffers.indptr,
                    buffers.indices,
                    _or_null(buffers.data),
                    buffers.row_offsets,
                    buffers.col_offsets,
                    *outs,
                    *map(
                        numpy.int32,
                        (
                            index.size,
                            launch.graphs_per_block,
                            buffers.indptr.size - 1,
                            buffers.indices.size,
                            source.n_relations,
                            _item_bytes(source.atoms),
                            0 if source.data is None else source.data.itemsize,
                            *label_bytes,
                        ),
                    ),
                ),
            )


def _item_bytes(array):
    """Return the bytes of one row of an array."""
    return array.itemsize * math.prod(array.shape[1:])


class _Device:
    """Make the device of an array current; costs nothing where it is already."""

    def __init__(self, x):
        self._id = x.data.device_id

    def __enter__(self):
        runtime = cuda.cupy.cuda.runtime
        self._previous = runtime.getDevice()
        if self._previous != self._id:
            runtime.setDevice(self._id)

    def __exit__(self, *_):
        if self._previous != self._id:
            cuda.cupy.cuda.runtime.setDevice(self._previous)
