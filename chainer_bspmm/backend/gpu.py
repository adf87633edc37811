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
from chainer_bspmm.cuda.launch import NULL
from chainer_bspmm.cuda.launch import or_null
from chainer_bspmm.cuda.launch import run
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
        bits = address_bits(x, y, residual)
        weights, data, order = values_of(adj, data, trans)
        device_id, itemsize = x.data.device_id, x.itemsize
        device = kernels.device(device_id)
        width = policy.vector_width(n_channels, itemsize, bits)
        piece = 0
        if algorithm == 'auto':
            piece = policy.piece_length(
                n_rows, side.n_cols, side.nnz, side.longest, n_channels // width, device
            )
        plan = policy.bspmm_launch(
            n_rows, side.n_cols, side.nnz, n_channels, width, itemsize, device, algorithm, piece
        )
        sums = ()
        if piece:
            plan, n_pieces = policy.with_pieces(plan, side.nnz, piece)
            sums = (
                cuda.cupy.empty((n_pieces, n_channels), arithmetic(x.dtype)),
                cuda.cupy.empty(n_pieces // 2, numpy.int32),
            )
        run(
            device_id,
            'bspmm_csr',
            x.dtype.char,
            plan,
            (
                side.indptr,
                side.indices,
                data,
                order,
                x,
                or_null(residual),
                y,
                *sums,
                *plan.arguments,
            ),
            (('WEIGHTS', weights), ('RESIDUAL', int(residual is not None))),
        )
        if piece:
            plan = policy.sum_pieces_launch(n_pieces, n_channels, piece)
            arguments = side.indptr, *sums, y, *plan.arguments
            run(device_id, 'sum_pieces', x.dtype.char, plan, arguments)
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
            width = policy.vector_width(n_channels, u.itemsize, address_bits(u, v))
            plan = policy.dot_launch(adj.n_rows, n_channels, width)
            device = kernels.device(u.data.device_id)
            piece = policy.piece_length(
                adj.n_rows, adj.n_cols, adj.nnz, adj.longest, n_channels // width, device
            )
            if piece:
                plan, _ = policy.with_pieces(plan, adj.nnz, piece)
            arguments = adj.indptr, adj.indices, u, v, w, *plan.arguments
            run(u.data.device_id, 'bsddmm_csr', u.dtype.char, plan, arguments)
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
    weights, data, indptr, indices = 0, NULL, NULL, NULL
    if layer.n_relations:
        weights, data, _ = values_of(matrix)
        indptr, indices = matrix.indptr, matrix.indices
    bits = address_bits(rows, y, x, *parameters[:2], more, result)
    itemsize, device_id = rows.itemsize, rows.data.device_id
    quads = not (layer.width_in % 4 or layer.width_out % 4 or bits % (4 * itemsize))
    plan = policy.layer_launch(
        layer, len(rows), itemsize, quads, kernels.device(device_id), is_backward
    )
    partials = None
    if is_backward:
        n_columns = -(-sum(map(math.prod, shapes.values())) // 4) * 4
        partials = cuda.cupy.empty((plan.grid[0], n_columns), arithmetic(rows.dtype))
    seed, stream, counter = draw or (0, 0, None)
    run(
        device_id,
        'graph_linear',
        rows.dtype.char,
        plan,
        (
            indptr,
            indices,
            data,
            rows,
            or_null(y),
            or_null(x),
            *map(or_null, parameters),
            or_null(more),
            or_null(result),
            or_null(partials),
            or_null(counter),
            *plan.arguments,
            *_drawn(seed, stream, dropout_ratio, rows.dtype),
        ),
        (
            ('WEIGHTED', weights),
            ('DROPOUT', int(dropout_ratio > 0)),
            ('FEATURES', int(result is not None)),
        ),
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
        bits = address_bits(messages, film, y, gy)
        weights, data, _ = values_of(side)
        plan = policy.film_launch(
            n_units,
            n_channels,
            policy.vector_width(n_channels, messages.itemsize, bits),
            n_relations,
        )
        run(
            messages.data.device_id,
            'edge_film',
            messages.dtype.char,
            plan,
            (side.indptr, side.indices, data, messages, film, or_null(gy), y, *plan.arguments),
            (('RESULT', result), ('WEIGHTED', weights)),
        )
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
    bits = address_bits(x, gamma, beta, gy, y, terms)
    n_rows, n_channels = x.shape
    width = policy.vector_width(n_channels, x.itemsize, bits)
    plan = policy.dot_launch(n_rows, n_channels, width, tile=1)  # a sub-warp per row, as well
    run(
        x.data.device_id,
        'layer_norm',
        x.dtype.char,
        plan,
        (
            x,
            gamma,
            or_null(beta),
            or_null(gy),
            statistics,
            y,
            or_null(terms),
            *plan.arguments,
            arithmetic(x.dtype)(eps),
        ),
        (('GRADIENT', int(gy is not None)),),
    )


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
        arguments = ids, contiguous(gy), partials, *plan.arguments
        run(gy.data.device_id, 'embed_grad', gy.dtype.char, plan, arguments)
    return sum_partials(partials, [(0, (n_types, n_channels), gy.dtype)])[0]


def mean_loss(kind, x, t, divisor=None, ignore_nan=False):
    with device_of(x):
        y = cuda.cupy.empty((), x.dtype)
        count = cuda.cupy.empty((), numpy.int64) if divisor is None else None
        plans = policy.loss_launches(x.size)
        partial = NULL
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
        _mean_loss(kind, x, t, None, y, count, NULL, divisor, ignore_nan, plans[0], along)
    return y, count, accuracy, gx


def mean_loss_grad(kind, x, t, gy, divisor, ignore_nan=False):
    with device_of(x):
        gx = cuda.cupy.empty(x.shape, x.dtype)
        if gx.size:
            count, divisor = (None, divisor) if isinstance(divisor, int) else (divisor, None)
            plan = policy.loss_grad_launch(x.size)
            _mean_loss(kind, x, t, gy, gx, count, NULL, divisor, ignore_nan, plan)
    return gx


def _mean_loss(kind, x, t, gy, y, count, partial, divisor, ignore_nan, plan, along=()):
    """Launch kernels/mean_loss.cu; along: accuracy and gradient, if they are to be written too."""
    if t.dtype.kind == 'i':
        t = t.astype(numpy.int32, copy=False)
    run(
        x.data.device_id,
        'mean_loss',
        x.dtype.char,
        plan,
        (
            contiguous(x),
            contiguous(t),
            or_null(gy),
            y,
            or_null(count),
            partial,
            *map(or_null, along or (None, None)),
            *plan.arguments,
            numpy.float64(divisor or 0),
        ),
        (
            ('KIND', kind),
            ('IGNORE_NAN', int(ignore_nan)),
            ('COUNTED', int(count is not None)),
            ('GRADIENT', int(gy is not None)),
            ('ALONG', int(bool(along))),
        ),
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
    bits = address_bits(a, g, y)
    n_terms, n_rows, n_channels = a.shape
    width = policy.vector_width(n_channels, a.itemsize, bits)
    plan = policy.dot_launch(n_rows, n_channels, width, tile=1)  # a sub-warp per row, as well
    run(
        a.data.device_id,
        'row_softmax',
        a.dtype.char,
        plan,
        (a, or_null(g), or_null(y), numpy.int32(n_terms), *plan.arguments),
        (('GRADIENT', int(g is not None)),),
    )


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
            width = policy.vector_width(n_channels, x.itemsize, address_bits(x, y))
            plans = policy.reduce_launches(
                n_rows, n_segments, n_channels, width, x.itemsize, max_rows
            )
            partial = NULL
            if len(plans) > 1:
                n_chunks = int(plans[0].arguments[-1])
                partial = cuda.cupy.empty((2, n_chunks, n_channels), arithmetic(x.dtype))
            for plan in plans:
                run(
                    x.data.device_id,
                    'segment_reduce',
                    x.dtype.char,
                    plan,
                    (or_null(offsets), x, or_null(weights), y, partial, *plan.arguments),
                    (('OPERATION', operation), _weighted(weights)),
                )
    return y


def _weighted(weights):
    """Return the constant by which the kernels of segments know whether rows have weights."""
    return 'WEIGHTED', int(weights is not None)


def segment_broadcast(y, offsets, n_rows, max_rows=None, weights=None):
    n_segments, n_channels = y.shape
    with device_of(y):
        y = contiguous(y)
        x = cuda.cupy.empty((n_rows, n_channels), y.dtype)
        if x.size:
            width = policy.vector_width(n_channels, y.itemsize, address_bits(x, y))
            plan = policy.broadcast_launch(n_rows, n_segments, n_channels, width, max_rows)
            run(
                y.data.device_id,
                'segment_broadcast',
                y.dtype.char,
                plan,
                (offsets, y, or_null(weights), x, *plan.arguments),
                (_weighted(weights),),
            )
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
            bits = address_bits(a, y, g)
            plan = policy.softmax_launch(
                n_rows,
                offsets.size - 1,
                n_channels,
                policy.vector_width(n_channels, a.itemsize, bits),
            )
            run(
                a.data.device_id,
                'segment_softmax',
                a.dtype.char,
                plan,
                (offsets, a, or_null(g), or_null(weights), y, *plan.arguments),
                (('GRADIENT', int(g is not None)), _weighted(weights)),
            )
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
    bits = address_bits(x, mask, y)
    plan = policy.dropout_launch(size, policy.vector_width(size, dtype.itemsize, bits))
    run(
        counter.data.device_id,
        'dropout',
        dtype.char,
        plan,
        (
            *map(or_null, (x, mask, y)),
            counter,
            *plan.arguments,
            *_drawn(seed, stream, ratio, dtype),
        ),
        (('KIND', kind),),
    )


# The arrays of a data set's molecules on a device, as kernels/gather_batch.cu takes them; data may
# be None, labels is a list of arrays (M, ...), n_relations an int.
Source = collections.namedtuple(
    'Source', 'starts entry_starts atoms row_starts columns data labels n_relations'
)


def gather_batch(source, index, buffers, padded_to=None):
    """Launch kernels/gather_batch.cu, and again for every two labels after the first two."""
    pairs = [(label, out, _item_bytes(out)) for label, out in zip(source.labels, buffers.labels)]
    with device_of(index):
        device_id = index.data.device_id
        plan = policy.gather_launch(index.size, kernels.device(device_id))
        sizes = (
            buffers.indptr.size - 1,
            buffers.indices.size,
            source.n_relations,
            _item_bytes(source.atoms),
            0 if source.data is None else source.data.itemsize,
        )
        for first in range(0, max(len(pairs), 1), 2):
            labels, outs, label_bytes = zip(*(pairs[first : first + 2] + 2 * [(NULL, NULL, 0)])[:2])
            run(
                device_id,
                'gather_batch',
                'f',
                plan,
                (
                    index,
                    source.starts,
                    source.entry_starts,
                    source.atoms,
                    source.row_starts,
                    source.columns,
                    or_null(source.data),
                    *labels,
                    or_null(padded_to),
                    buffers.atoms,
                    buffers.indptr,
                    buffers.indices,
                    or_null(buffers.data),
                    buffers.row_offsets,
                    buffers.col_offsets,
                    or_null(buffers.row_weights),
                    *outs,
                    *plan.arguments,
                    *map(numpy.int32, (*sizes, *label_bytes)),
                ),
                (('LABELS_ONLY', int(first > 0)), ('FOLDED', int(padded_to is not None))),
            )


def _item_bytes(array):
    """Return the bytes of one row of an array."""
    return array.itemsize * math.prod(array.shape[1:])
