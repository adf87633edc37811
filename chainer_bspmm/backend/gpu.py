"""The products on CuPy arrays: one kernel launch each, two where rows are long.

A call launches on the current stream, does not synchronise and copies nothing to the device. Inputs
that are not C-contiguous are copied first.
"""

from __future__ import annotations

import collections
import functools
import math
from typing import TYPE_CHECKING

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import policy
from chainer_bspmm.cuda import step
from chainer_bspmm.cuda.launch import address_bits
from chainer_bspmm.cuda.launch import arithmetic
from chainer_bspmm.cuda.launch import contiguous
from chainer_bspmm.cuda.launch import device_of
from chainer_bspmm.cuda.launch import run
from chainer_bspmm.cuda.launch import vector_width
from chainer_bspmm.cuda.partial_sums import PendingSums
from chainer_bspmm.papers.gpu import SWA_ALGORITHMS
from chainer_bspmm.sparse import operands
from chainer_bspmm.sparse.device import values_of

if TYPE_CHECKING:
    from chainer_bspmm.sparse import BatchedCSR


def bspmm(adj: BatchedCSR, x, data, residual, trans, algorithm='auto'):
    product = _csr if algorithm == 'auto' else algorithms(adj)[algorithm]
    with device_of(x):
        y = product(adj, contiguous(x), contiguous(data), contiguous(residual), trans)
    return y if x.ndim == 2 else y.reshape(operands.result_shape(adj, len(y), x))


def _csr(adj: BatchedCSR, x, data, residual, trans, algorithm='auto'):
    """A thread per vector of a row, of several rows, or of a piece, kernels/bspmm_csr.cu."""
    side = adj.T if trans else adj
    n_rows, n_channels = side.n_rows, x.shape[-1]
    y = cuda.cupy.empty((n_rows, n_channels), x.dtype)
    if y.size:
        weights, data, order = values_of(adj, data, trans)
        device = kernels.device(x.data.device_id)
        width = vector_width(n_channels, x, y, residual)
        piece = 0
        if algorithm == 'auto':
            piece = policy.piece_length(
                n_rows, side.n_cols, side.nnz, side.longest, n_channels // width, device
            )
        plan = policy.bspmm_launch(
            n_rows, side.n_cols, side.nnz, n_channels, width, x.itemsize, device, algorithm, piece
        )
        sums = ()
        if piece:
            plan, n_pieces = policy.with_pieces(plan, side.nnz, piece)
            sums = (
                cuda.cupy.empty((n_pieces, n_channels), arithmetic(x.dtype)),
                cuda.cupy.empty(n_pieces // 2, numpy.int32),
            )
        matrix, has_residual = (side.indptr, side.indices, data, order), residual is not None
        arrays = *matrix, x, residual, y, *sums
        run('bspmm_csr', x, plan, *arrays, *plan.arguments, WEIGHTS=weights, RESIDUAL=has_residual)
        if piece:
            plan = policy.sum_pieces_launch(n_pieces, n_channels, piece)
            run('sum_pieces', x, plan, side.indptr, *sums, y, *plan.arguments)
    return y


# name -> function(adj, x, data, residual, trans) that returns (n_rows, n_B); arrays C-contiguous.
ALGORITHMS = {
    'vector': functools.partial(_csr, algorithm='vector'),
    'pipelined': functools.partial(_csr, algorithm='pipelined'),
    **SWA_ALGORITHMS,
}


def algorithms(adj):
    """Return those of ALGORITHMS that a matrix can be multiplied by."""
    if not adj.has_spare:
        return ALGORITHMS
    return {name: ALGORITHMS[name] for name in ALGORITHMS if name not in SWA_ALGORITHMS}


def bsddmm(adj: BatchedCSR, u, v):
    n_channels = u.shape[-1]
    with device_of(u):
        u, v = contiguous(u), contiguous(v)
        w = cuda.cupy.empty(adj.nnz, u.dtype)
        if not n_channels or adj.has_spare:  # the kernel writes the entries of rows only
            w.fill(0)
        if n_channels and w.size:
            width = vector_width(n_channels, u, v)
            plan = policy.dot_launch(adj.n_rows, n_channels, width)
            device = kernels.device(u.data.device_id)
            piece = policy.piece_length(
                adj.n_rows, adj.n_cols, adj.nnz, adj.longest, n_channels // width, device
            )
            if piece:
                plan, _ = policy.with_pieces(plan, adj.nnz, piece)
            run('bsddmm_csr', u, plan, adj.indptr, adj.indices, u, v, w, *plan.arguments)
    return w


def layer_of(x, given, n_relations, loop, activation, by_relation=False, longest=0):
    if longest > policy.LONG_ROW:
        return None
    n_all, width_in = given['W' if n_relations else 'W_self'].shape
    width_out = n_all // max(n_relations, 1)
    layer = policy.Layer(
        width_in=width_in,
        width_out=width_out,
        n_relations=n_relations,
        has_self='W_self' in given,
        loop=loop,
        has_relation_bias='b' in given,
        n_biases=given['b_self'].size // width_out if 'b_self' in given else 0,
        by_relation=by_relation,
        activation=activation,
    )
    device = kernels.device(x.data.device_id)
    for is_backward in (False, True):
        if policy.layer_launch(layer, 1, x.itemsize, False, device, is_backward) is None:
            return None
    return layer


def layer(layer, rows, x, given, dropout_ratio=0.0, draw=None, out=None):
    with device_of(x):
        x = contiguous(x)
        y = cuda.cupy.empty((len(x), layer.width_out), x.dtype) if out is None else out
        _layer(layer, rows, x, None, None, given, y, None, dropout_ratio, draw)
    return y


def layer_grad(layer, rows, x, y, gy, given, dropout_ratio=0.0, has_features=True, more=None):
    shapes = {}
    if layer.n_relations:
        shapes['W'] = layer.n_relations * layer.width_out, layer.width_in
    if layer.has_self:
        shapes['W_self'] = layer.width_out, layer.width_in
    if layer.has_relation_bias:
        shapes['b'] = (layer.n_relations * layer.width_out,)
    if layer.n_biases:
        shapes['b_self'] = (layer.width_out,)
    with device_of(x):
        x, gy = contiguous(x), contiguous(gy)
        gx = cuda.cupy.empty(x.shape, x.dtype) if has_features else None
        more = contiguous(more)
        partials = _layer(layer, rows, gy, y, x, given, gx, shapes, dropout_ratio, None, more)
        parts, first = [], 0
        for name, shape in shapes.items():
            parts += _arrays_of(layer, name, first, shape, x.dtype)
            first += math.prod(shape)
        if partials is None:
            found = [cuda.cupy.zeros(*part[1:]) for part in parts]
        else:
            found = sum_partials(partials, parts)
    if layer.by_relation:
        n = layer.n_relations
        return {'W': found[:n], 'b_self': found[n:], 'x': gx}
    return dict(zip(shapes, found), x=gx)


def _arrays_of(layer, name, first, shape, dtype):
    """Return the parts, for `sum_partials`, that are the gradients by a parameter of a layer."""
    if not layer.by_relation:
        return [(first, shape, dtype)]
    if name == 'b_self':  # every bias is added to all rows: equal, but in an array for each
        return [(first, shape, dtype)] * layer.n_biases
    shape = layer.width_out, layer.width_in
    size = math.prod(shape)
    return [(first + r * size, shape, dtype) for r in range(layer.n_relations)]


def _layer(layer, matrix, rows, y, x, given, result, shapes, dropout_ratio, draw, more=None):
    """Launch kernels/graph_linear.cu; return a gradient's partial sums for `shapes`, or None."""
    if not len(rows):
        return None
    names = ('W', 'W_self') if shapes else ('W', 'W_self', 'b', 'b_self')
    parameters = [contiguous(given.get(name)) for name in names] + [None] * (4 - len(names))
    is_backward = x is not None
    weights, data, indptr, indices = 0, None, None, None
    if layer.n_relations:
        weights, data, _ = values_of(matrix)
        indptr, indices = matrix.indptr, matrix.indices
    bits = address_bits(rows, y, x, *parameters[:2], more, result)
    quads = not (layer.width_in % 4 or layer.width_out % 4 or bits % (4 * rows.itemsize))
    device = kernels.device(rows.data.device_id)
    plan = policy.layer_launch(layer, len(rows), rows.itemsize, quads, device, is_backward)
    partials = None
    if is_backward:
        n_columns = -(-sum(map(math.prod, shapes.values())) // 4) * 4
        partials = cuda.cupy.empty((plan.grid[0], n_columns), arithmetic(rows.dtype))
    seed, stream, counter = draw or (0, 0, None)
    arrays = indptr, indices, data, rows, y, x, *parameters, more, result, partials, counter
    run(
        'graph_linear',
        rows,
        plan,
        *arrays,
        *plan.arguments,
        *_drawn(seed, stream, dropout_ratio, rows.dtype),
        WEIGHTED=weights,
        DROPOUT=dropout_ratio > 0,
        FEATURES=result is not None,
    )
    return partials


def _drawn(seed, stream, ratio, dtype):
    """Return the arguments by which a kernel draws for dropout."""
    return (
        numpy.uint32(seed % 2**32),
        numpy.uint32(seed >> 32),
        numpy.uint32(stream),
        numpy.uint32(min(math.ceil(ratio * 2**32), 2**32 - 1)),
        # Rounded to the array's dtype, because that is what Chainer multiplies by.
        arithmetic(dtype)(dtype.type(1 / (1 - ratio))),
    )


def edge_film(adj: BatchedCSR, messages, film):
    with device_of(messages):
        return _film(
            'OUTPUT', adj, adj.n_relations, adj.n_rows, contiguous(messages), contiguous(film), None
        )


def edge_film_grad(adj: BatchedCSR, messages, film, gy):
    with device_of(messages):
        messages, film, gy = (contiguous(array) for array in (messages, film, gy))
        return (
            _film('BY_MESSAGES', adj.T, adj.n_relations, adj.n_cols, messages, film, gy),
            _film('BY_FILM', adj, adj.n_relations, adj.n_cols, messages, film, gy),
        )


def _film(result, side, n_relations, n_units, messages, film, gy):
    """Launch kernels/edge_film.cu for one of its results; `side`: the matrix or its transpose."""
    n_channels = messages.shape[1]
    width = film.shape[1] if result == 'BY_FILM' else n_channels
    y = cuda.cupy.empty((n_units, width), messages.dtype)
    if y.size:
        weights, data, _ = values_of(side)
        width = vector_width(n_channels, messages, film, y, gy)
        plan = policy.film_launch(n_units, n_channels, width, n_relations)
        arrays = side.indptr, side.indices, data, messages, film, gy, y
        run('edge_film', y, plan, *arrays, *plan.arguments, RESULT=result, WEIGHTED=weights)
    return y


def layer_norm(x, gamma, beta, eps):
    with device_of(x):
        x, gamma, beta = (contiguous(array) for array in (x, gamma, beta))
        statistics = cuda.cupy.empty((len(x), 2), arithmetic(x.dtype))
        y = cuda.cupy.empty(x.shape, x.dtype)
        _norm(x, gamma, beta, None, statistics, y, None, eps)
    return y, statistics


def layer_norm_grad(x, gamma, gy, statistics):
    n_channels = x.shape[1]
    with device_of(x):
        x, gamma, gy = (contiguous(array) for array in (x, gamma, gy))
        gx = cuda.cupy.empty(x.shape, x.dtype)
        terms = cuda.cupy.empty((len(x), 2 * n_channels), x.dtype)
        _norm(x, gamma, None, gy, statistics, gx, terms, 0)
    sums = row_sum(terms)  # one array: one sum does both
    return gx, sums[:n_channels], sums[n_channels:]


def _norm(x, gamma, beta, gy, statistics, y, terms, eps):
    """Launch kernels/layer_norm.cu on the arrays that the variant uses."""
    if not x.size:
        return
    n_rows, n_channels = x.shape
    width = vector_width(n_channels, x, gamma, beta, gy, y, terms)
    plan = policy.dot_launch(n_rows, n_channels, width, tile=1)  # a sub-warp per row, as well
    sizes = *plan.arguments, arithmetic(x.dtype)(eps)
    arrays = x, gamma, beta, gy, statistics, y, terms
    run('layer_norm', x, plan, *arrays, *sizes, GRADIENT=gy is not None)


def sum_partials(partials, parts):
    current = step.current()
    put_off = None if current is None else current.sums
    pending = PendingSums() if put_off is None else put_off
    with device_of(partials):
        arrays = [pending.add(partials, *part) for part in parts]
    if put_off is None:
        pending.launch()
    return arrays


def embed_grad(ids, gy, n_types):
    n_rows, n_channels = gy.shape
    with device_of(gy):
        if not gy.size or not n_types:
            return cuda.cupy.zeros((n_types, n_channels), gy.dtype)
        plan = policy.embed_launch(n_rows, n_types, n_channels)
        partials = cuda.cupy.empty((plan.grid[0], n_types * n_channels), arithmetic(gy.dtype))
        ids = contiguous(ids.astype(numpy.int32, copy=False))
        run('embed_grad', gy, plan, ids, contiguous(gy), partials, *plan.arguments)
    return sum_partials(partials, [(0, (n_types, n_channels), gy.dtype)])[0]


def mean_loss(kind, x, t, divisor=None, ignore_nan=False):
    with device_of(x):
        y = cuda.cupy.empty((), x.dtype)
        count = cuda.cupy.empty((), numpy.int64) if divisor is None else None
        plans = policy.loss_launches(x.size)
        partial = None
        if len(plans) > 1:
            partial = cuda.cupy.empty((plans[0].grid[0], 2), numpy.float64)
        for plan in plans:
            _mean_loss(kind, x, t, None, y, count, partial, divisor, ignore_nan, plan)
    return y, count


def training_loss(kind, x, t, divisor=None, ignore_nan=False, with_gradient=True):
    plans = policy.loss_launches(x.size)
    if len(plans) > 1:
        return (*mean_loss(kind, x, t, divisor, ignore_nan), None, None)
    with device_of(x):
        y, count, accuracy = cuda.cupy.empty((), x.dtype), None, None
        if divisor is None:
            count, accuracy = cuda.cupy.empty((), numpy.int64), cuda.cupy.empty((), x.dtype)
        gx = None
        if with_gradient and x.size <= policy.LOSS_ALONG:
            gx = cuda.cupy.empty(x.shape, x.dtype)
        along = accuracy, gx
        _mean_loss(kind, x, t, None, y, count, None, divisor, ignore_nan, plans[0], along)
    return y, count, accuracy, gx


def mean_loss_grad(kind, x, t, gy, divisor, ignore_nan=False):
    with device_of(x):
        gx = cuda.cupy.empty(x.shape, x.dtype)
        if gx.size:
            count, divisor = (None, divisor) if isinstance(divisor, int) else (divisor, None)
            plan = policy.loss_grad_launch(x.size)
            _mean_loss(kind, x, t, gy, gx, count, None, divisor, ignore_nan, plan)
    return gx


def _mean_loss(kind, x, t, gy, y, count, partial, divisor, ignore_nan, plan, along=()):
    """Launch kernels/mean_loss.cu; along: accuracy and gradient, if they are to be written too."""
    if t.dtype.kind == 'i':
        t = t.astype(numpy.int32, copy=False)
    arrays = contiguous(x), contiguous(t), gy, y, count, partial, *(along or (None, None))
    run(
        'mean_loss',
        x,
        plan,
        *arrays,
        *plan.arguments,
        numpy.float64(divisor or 0),
        KIND=kind,
        IGNORE_NAN=ignore_nan,
        COUNTED=count is not None,
        GRADIENT=gy is not None,
        ALONG=bool(along),
    )


def row_softmax(a):
    n_terms, n_rows, n_channels = a.shape
    with device_of(a):
        y = a[0] if n_terms == 1 else cuda.cupy.empty((n_rows, n_channels), a.dtype)
        _row_softmax(a, None, None if n_terms == 1 else y)
    return y


def row_softmax_grad(a, g):
    with device_of(a):
        y = cuda.cupy.empty(a.shape, a.dtype)
        _row_softmax(a, contiguous(g), y)
    return y


def _row_softmax(a, g, y):
    """Launch kernels/row_softmax.cu; `g` None is the softmax itself, written to `a`."""
    if not a.size:
        return
    n_terms, n_rows, n_channels = a.shape
    width = vector_width(n_channels, a, g, y)
    plan = policy.dot_launch(n_rows, n_channels, width, tile=1)  # a sub-warp per row, as well
    sizes = numpy.int32(n_terms), *plan.arguments
    run('row_softmax', a, plan, a, g, y, *sizes, GRADIENT=g is not None)


def segment_sum(x, offsets, max_rows=None, weights=None):
    return _reduce(x, offsets, max_rows, weights, 'SUM')


def segment_max(x, offsets, max_rows=None, weights=None):
    return _reduce(x, offsets, max_rows, weights, 'MAX')


def row_sum(x):
    return _reduce(x, None, None, None, 'SUM')[0]


def _reduce(x, offsets, max_rows, weights, operation):
    """Launch kernels/segment_reduce.cu, twice if a segment can have more rows than a chunk."""
    n_segments = 1 if offsets is None else offsets.size - 1
    n_rows, n_channels = x.shape
    with device_of(x):
        x = contiguous(x)
        y = cuda.cupy.empty((n_segments, n_channels), x.dtype)
        if y.size:
            width = vector_width(n_channels, x, y)
            plans = policy.reduce_launches(
                n_rows, n_segments, n_channels, width, x.itemsize, max_rows
            )
            partial = None
            if len(plans) > 1:
                n_chunks = int(plans[0].arguments[-1])
                partial = cuda.cupy.empty((2, n_chunks, n_channels), arithmetic(x.dtype))
            for plan in plans:
                defines = {'OPERATION': operation, 'WEIGHTED': weights is not None}
                arguments = offsets, x, weights, y, partial, *plan.arguments
                run('segment_reduce', x, plan, *arguments, **defines)
    return y


def segment_broadcast(y, offsets, n_rows, max_rows=None, weights=None):
    n_segments, n_channels = y.shape
    with device_of(y):
        y = contiguous(y)
        x = cuda.cupy.empty((n_rows, n_channels), y.dtype)
        if x.size:
            width = vector_width(n_channels, x, y)
            plan = policy.broadcast_launch(n_rows, n_segments, n_channels, width, max_rows)
            arguments = offsets, y, weights, x, *plan.arguments
            run('segment_broadcast', y, plan, *arguments, WEIGHTED=weights is not None)
    return x


def segment_softmax(x, offsets, weights=None):
    return _softmax(offsets, x, None, weights)


def segment_softmax_grad(y, gy, offsets, weights=None):
    return _softmax(offsets, y, gy, weights)


def _softmax(offsets, a, g, weights):
    """Launch kernels/segment_softmax.cu; `g` None is the softmax itself."""
    n_rows, n_channels = a.shape
    with device_of(a):
        a, g = contiguous(a), contiguous(g)
        y = cuda.cupy.empty(a.shape, a.dtype)
        if y.size:
            width = vector_width(n_channels, a, y, g)
            plan = policy.softmax_launch(n_rows, offsets.size - 1, n_channels, width)
            defines = {'GRADIENT': g is not None, 'WEIGHTED': weights is not None}
            run('segment_softmax', a, plan, offsets, a, g, weights, y, *plan.arguments, **defines)
    return y


def dropout(x, ratio, *draw):
    with device_of(x):
        x = contiguous(x)
        mask, y = cuda.cupy.empty(x.shape, x.dtype), cuda.cupy.empty(x.shape, x.dtype)
        _drop('DROPOUT', x, mask, y, ratio, *draw)
    return mask, y


def relu_dropout(x, ratio, *draw):
    with device_of(x):
        y = contiguous(x)
        _drop('RELU', y, None, y, ratio, *draw)
        if y is not x:
            x[...] = y


def dropout_mask(size, dtype, ratio, seed, stream, counter):
    with device_of(counter):
        mask = cuda.cupy.empty(size, dtype)
        _drop('MASK', None, mask, None, ratio, seed, stream, counter)
    return mask


def _drop(kind, x, mask, y, ratio, seed, stream, counter):
    """Launch kernels/dropout.cu on the arrays that `kind` uses."""
    given = mask if x is None else x
    size, dtype = given.size, given.dtype
    if not size:
        return
    plan = policy.dropout_launch(size, vector_width(size, given, x, mask, y))
    sizes = *plan.arguments, *_drawn(seed, stream, ratio, dtype)
    run('dropout', given, plan, x, mask, y, counter, *sizes, KIND=kind)


# The arrays of a data set's molecules on a device, as kernels/gather_batch.cu takes them; data may
# be None, labels is a list of arrays (M, ...), n_relations an int.
Source = collections.namedtuple(
    'Source', 'starts entry_starts atoms row_starts columns data labels n_relations'
)


def gather_batch(source, index, buffers, padded_to=None):
    """Launch kernels/gather_batch.cu, and again for every two labels after the first two."""
    pairs = [(label, out, _item_bytes(out)) for label, out in zip(source.labels, buffers.labels)]
    with device_of(index):
        plan = policy.gather_launch(index.size, kernels.device(index.data.device_id))
        sizes = (
            buffers.indptr.size - 1,
            buffers.indices.size,
            source.n_relations,
            _item_bytes(source.atoms),
            0 if source.data is None else source.data.itemsize,
        )
        for first in range(0, max(len(pairs), 1), 2):
            labels, outs, label_bytes = zip(*(pairs[first : first + 2] + 2 * [(None, None, 0)])[:2])
            run(
                'gather_batch',
                index,
                plan,
                index,
                *source[:-2],
                *labels,
                padded_to,
                *buffers[:-1],
                *outs,
                *plan.arguments,
                *map(numpy.int32, (*sizes, *label_bytes)),
                storage='f',
                LABELS_ONLY=first > 0,
                FOLDED=padded_to is not None,
            )


def _item_bytes(array):
    """Return the bytes of one row of an array."""
    return array.itemsize * math.prod(array.shape[1:])
