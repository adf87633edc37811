"""The products on NumPy arrays, by SciPy. float16 is computed in float32, softmax in float64."""

import math

import numpy
import scipy.sparse

from chainer_bspmm import reference
from chainer_bspmm.backend import check
from chainer_bspmm.sparse import BatchedCOO
from chainer_bspmm.sparse import BatchedSELL
from chainer_bspmm.sparse import build


def bspmm(adj, x, data, residual, trans):
    compute = numpy.float32 if x.dtype == numpy.float16 else x.dtype
    matrix = _matrix(adj, data, compute, trans)
    y = matrix @ x.reshape(matrix.shape[1], x.shape[-1]).astype(compute, copy=False)
    if residual is not None:
        y += residual.reshape(y.shape)
    shape = check.result_shape(adj, len(y), x)
    return y.astype(x.dtype, copy=False).reshape(shape)


def _matrix(adj, data, dtype, trans):
    """Return SciPy's view of the matrix; kept with it, because making one costs a check."""
    if type(adj) is BatchedCOO:
        return _coo_matrix(adj, data, dtype, trans)
    if data is not None:
        values = data.astype(dtype, copy=False)
        if trans:
            values = values[adj.transpose_order]
        side = adj.T if trans else adj
        return scipy.sparse.csr_matrix((values, side.indices, side.indptr), shape=side.shape)
    side = adj.T if trans else adj
    if dtype not in side._cache and type(side) is BatchedSELL:
        side._cache[dtype] = side.to_scipy().astype(dtype, copy=False)
    if dtype not in side._cache:
        values = numpy.ones(side.nnz, dtype) if side.data is None else side.data.astype(dtype)
        side._cache[dtype] = scipy.sparse.csr_matrix(
            (values, side.indices, side.indptr), shape=side.shape
        )
    return side._cache[dtype]


def spmv(adj, x, alpha, beta, y):
    compute = numpy.float64 if x.dtype == numpy.float64 else numpy.float32
    product = _matrix(adj, None, compute, False) @ x.astype(compute, copy=False)
    alpha, beta = compute(alpha), compute(beta)
    with numpy.errstate(invalid='ignore'):  # as silent about infinities as SciPy's product
        product *= alpha
        if beta != 0:  # 0 times what y holds could be NaN
            product += beta * y.astype(compute, copy=False)
    if y is None:
        return product.astype(x.dtype, copy=False)
    y[...] = product
    return y


def _coo_matrix(adj, data, dtype, trans):
    if data is None and (dtype, trans) in adj._cache:
        return adj._cache[dtype, trans]
    indptr, columns, order, shape = _sorted_entries(adj, trans)
    values = adj._host_values() if data is None else data
    matrix = scipy.sparse.csr_matrix(
        (values.astype(dtype, copy=False)[order], columns, indptr), shape=shape
    )
    if data is None:
        adj._cache[dtype, trans] = matrix
    return matrix


def _sorted_entries(adj, trans):
    """Return what CSR says of a BatchedCOO's places, the entries' order in it, and the shape.

    SciPy multiplies entries sorted by row several times faster. Its own conversion would add up the
    values that name one place before they are multiplied; their sum may overflow.
    """
    if ('sorted', trans) not in adj._cache:
        rows, columns, shape = adj.entry_rows(), adj.entry_columns(), adj.shape
        if trans:
            rows, columns, shape = columns, rows, shape[::-1]
        indptr, order = build.group(numpy, rows, shape[0])
        adj._cache['sorted', trans] = indptr, columns[order], order, shape
    return adj._cache['sorted', trans]


def bsddmm(adj, u, v):
    u, v = u.reshape(adj.n_rows, u.shape[-1]), v.reshape(adj.n_cols, v.shape[-1])
    compute = numpy.float32 if u.dtype == numpy.float16 else u.dtype
    n_entries = adj._n_true_entries()
    w = numpy.einsum(
        'kc,kc->k',
        u[adj.entry_rows()[:n_entries]].astype(compute, copy=False),
        v[adj.entry_columns()[:n_entries]].astype(compute, copy=False),
    )
    w = w.astype(u.dtype, copy=False)
    return numpy.pad(w, (0, adj.nnz - n_entries)) if adj.has_spare else w


def segment_sum(x, offsets, max_rows=None):
    compute = numpy.float32 if x.dtype == numpy.float16 else x.dtype
    membership = scipy.sparse.csr_matrix(
        (numpy.ones(len(x), compute), numpy.arange(len(x), dtype=numpy.int32), offsets),
        shape=(offsets.size - 1, len(x)),
    )
    return (membership @ x.astype(compute, copy=False)).astype(x.dtype, copy=False)


def row_sum(x):
    # numpy.sum adds one row after the other: its rounding grows with the batch, and it goes
    # through memory a few channels at a time. Blocks of about sqrt(n_rows) rows are added to one
    # block, then the rows of that one: several times quicker and closer.
    n_rows, n_channels = x.shape
    dtype = numpy.float32 if x.dtype == numpy.float16 else x.dtype
    block = max(math.isqrt(n_rows), 1)
    n_blocks = n_rows // block
    blocks = x[: n_blocks * block].reshape(n_blocks, block * n_channels)
    y = blocks.sum(axis=0, dtype=dtype).reshape(block, n_channels).sum(axis=0)
    y += x[n_blocks * block :].sum(axis=0, dtype=dtype)
    return y.astype(x.dtype, copy=False)


def segment_max(x, offsets, max_rows=None):
    x = x[: offsets[-1]]
    y = numpy.zeros((offsets.size - 1, x.shape[1]), x.dtype)
    # reduceat gives x[start] for an empty segment, so only the others take part.
    used = numpy.flatnonzero(numpy.diff(offsets))
    if used.size:
        y[used] = numpy.maximum.reduceat(x, offsets[used], axis=0)
    return y


def segment_broadcast(y, offsets, n_rows, max_rows=None):
    x = numpy.repeat(y, numpy.diff(offsets), axis=0)
    if len(x) == n_rows:
        return x
    return numpy.concatenate([x, numpy.zeros((n_rows - len(x), x.shape[1]), x.dtype)])


def segment_softmax(x, offsets):
    # In double, as the kernel; see there.
    lengths = numpy.diff(offsets)
    # A difference may be infinite, and infinities become NaN, in silence as on a GPU.
    with numpy.errstate(over='ignore', invalid='ignore'):
        y = x - numpy.repeat(segment_max(x, offsets), lengths, axis=0).astype('d')
        numpy.exp(y, out=y)
        y /= numpy.repeat(segment_sum(y, offsets), lengths, axis=0)
    return y.astype(x.dtype, copy=False)


def segment_softmax_grad(y, gy, offsets):
    dtype = y.dtype
    y, gy = y.astype('d', copy=False), gy.astype('d', copy=False)
    inner = segment_sum(y * gy, offsets)
    gx = y * (gy - numpy.repeat(inner, numpy.diff(offsets), axis=0))
    return gx.astype(dtype, copy=False)


def dropout(x, ratio, *draw):
    mask = dropout_mask(x.size, x.dtype, ratio, *draw).reshape(x.shape)
    return mask, x * mask


def relu_dropout(x, ratio, *draw):
    numpy.maximum(x, 0, out=x)
    x *= dropout_mask(x.size, x.dtype, ratio, *draw).reshape(x.shape)


def dropout_mask(size, dtype, ratio, seed, stream, counter):
    kept = reference.kept(size, ratio, seed, stream, int(counter[0]))
    return kept * dtype.type(1 / (1 - ratio))
