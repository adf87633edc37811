"""The end of a layer whose products are done: sums over neighbours, bias, activation, dropout."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, launch, plans
from chainer_bspmm.cuda.partial_sums import sum_partials
from chainer_bspmm.ops.dropout import draw_arguments
from chainer_bspmm.ops.elementwise import activate, activation_gradient
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.sparse.build import values_of

END_BLOCK = 256  # threads of layer_end
END_COLUMNS = 64  # most threads of a block that are side by side
END_BLOCKS_PER_SM = 4


@plans.kept
def end_launch(n_rows, width, vector, device) -> plans.Launch:
    """Plan layer_end, of `width` columns and at least one row; `vector` is at most 4 elements."""
    columns = min(width // vector, END_COLUMNS)
    lanes = END_BLOCK // columns
    n_blocks = min(-(-n_rows // lanes), END_BLOCKS_PER_SM * device.n_sms)
    return plans.Launch(
        (('VECTOR', vector), ('WIDTH', width)),
        (n_blocks, 1, 1),
        (columns, lanes, 1),
        arguments=(numpy.int32(n_rows),),
    )


def can_sum(adj):
    """Return whether :func:`summed_forward` takes a matrix: of one relation, without long rows.

    `longest` bounds columns, too, so the transpose has no long rows either.
    """
    return adj.n_relations == 1 and adj.longest <= plans.LONG_ROW


def end_forward(y, b_self, activation, dropout_ratio=0.0, draw=None):
    """Add a bias to a layer's sums y, and apply its activation and dropout, in place.

    Dropout is for a GPU only, and `draw` is the result of `ops.dropout.step_draw`.
    """
    if not launch.on_gpu(y):
        if b_self is not None:
            y += b_self
        activate(activation, y)
    elif b_self is not None or activation != 'identity' or dropout_ratio:
        _forward(y, b_self, activation, dropout_ratio, draw)


def summed_forward(adj, mapped, y, b_self, activation, dropout_ratio=0.0, draw=None, loop=False):
    """Add the sums of `mapped` over neighbours to y, then do as :func:`end_forward`; return y.

    For a GPU only, and for an ``adj`` that passes :func:`can_sum`. A y of None stands for zeros.
    `loop` adds the identity to ``adj``.
    """
    is_added = y is not None
    if not is_added:
        shape = adj.indptr.size - 1, mapped.shape[1]
        with launch.device_of(mapped):
            y = cuda.cupy.empty(shape, mapped.dtype)
    _forward(
        y,
        b_self,
        activation,
        dropout_ratio,
        draw,
        adj=adj,
        rows=mapped,
        loop=loop,
        is_added=is_added,
    )
    return y


def _forward(
    y, b_self, activation, dropout_ratio, draw, adj=None, rows=None, loop=False, is_added=True
):
    with launch.device_of(y):
        _launch(
            adj,
            y,
            (launch.contiguous(b_self), rows, y, None, None),
            draw,
            dropout_ratio,
            ACTIVATION=activation.upper(),
            BIAS=int(b_self is not None),
            LOOP=int(loop),
            ADDED=int(is_added),
            BACKWARD=0,
        )


def end_backward(y, gy, activation, dropout_ratio=0.0, n_biases=0):
    """Return the gradient of :func:`end_forward` with respect to the sums, and a list for biases.

    The list has the gradient of the bias `n_biases` times, in separate arrays, because optimizer
    hooks write to them. On a GPU it comes from `sum_partials`. y is the result of the layer; None
    is enough for an identity without dropout.
    """
    if not launch.on_gpu(gy):
        gy = activation_gradient(activation, y, gy, dropout_ratio)
        total = row_sum(gy) if n_biases else None
        return gy, [total.copy() for _ in range(n_biases)]
    is_passed = activation == 'identity' and not dropout_ratio
    z = gy
    if not is_passed:
        with launch.device_of(gy):
            z = cuda.cupy.empty(gy.shape, gy.dtype)
    if is_passed and not n_biases:
        return z, []
    has_bias = n_biases > 0
    partials = _backward(y, gy, activation, dropout_ratio, has_bias, z=None if is_passed else z)
    return z, sum_partials(partials, n_biases * [_bias_part(gy)]) if has_bias else []


def summed_backward(
    rows, y, gy, activation, dropout_ratio=0.0, has_bias=False, needs_z=False, loop=False
):
    """Return the gradients of :func:`summed_forward` with respect to `mapped`, y and a bias.

    `rows` is the result of `sparse.relations.transposed_rows`. The second gradient is None unless
    `needs_z`, the third unless `has_bias`.
    """
    with launch.device_of(gy):
        sums = cuda.cupy.empty(gy.shape, gy.dtype)
        z = cuda.cupy.empty(gy.shape, gy.dtype) if needs_z else None
    partials = _backward(
        y, gy, activation, dropout_ratio, has_bias, z=z, rows=rows, sums=sums, loop=loop
    )
    return sums, z, sum_partials(partials, [_bias_part(gy)])[0] if has_bias else None


def column_sums(g, n_blocks, n_copies=1):
    """Sum `n_blocks` equal blocks of g's columns over the rows: gradients of biases.

    The list has each sum `n_copies` times, in separate arrays, because optimizer hooks write to
    them. On a GPU the sums come from `sum_partials`.
    """
    n = g.shape[1] // n_blocks
    starts = [i * n for i in range(n_blocks)]
    if not launch.on_gpu(g):
        total = row_sum(g)
        return [total[start : start + n].copy() for _ in range(n_copies) for start in starts]
    partials = _backward(None, g, 'identity', 0.0, has_bias=True)
    return sum_partials(partials, n_copies * [(start, (n,), g.dtype) for start in starts])


def _bias_part(gy):
    return 0, gy.shape[1:], gy.dtype


def _backward(y, gy, activation, dropout_ratio, has_bias, z=None, rows=None, sums=None, loop=False):
    """Write z and `sums`, if they are given; return the partial sums for a bias, or None."""
    with launch.device_of(gy):
        return _launch(
            rows,
            gy,
            (None, launch.contiguous(gy), y, z, sums),
            None,
            dropout_ratio,
            ACTIVATION=activation.upper(),
            BIAS=int(has_bias),
            LOOP=int(loop),
            ADDED=0,
            BACKWARD=1,
        )


def _launch(adj, like, arrays, draw, dropout_ratio, *, BIAS, BACKWARD, **constants):
    """Launch the kernel on b, rows, y, z and sums; backward return partial sums for a bias."""
    n_rows, width = like.shape
    has_partials = BACKWARD and BIAS
    partials = None
    if not like.size:
        return cuda.cupy.zeros((1, width), launch.arithmetic(like.dtype)) if has_partials else None
    present = [array for array in arrays if array is not None]
    vector = min(launch.vector_width(width, *present), plans.QUAD)
    plan = end_launch(n_rows, width, vector, kernels.device(like.data.device_id))
    if has_partials:
        partials = cuda.cupy.empty((plan.grid[0], width), launch.arithmetic(like.dtype))
    weights, data, _ = (0, None, None) if adj is None else values_of(adj)
    indptr, indices = (None, None) if adj is None else (adj.indptr, adj.indices)
    seed, stream, counter = draw or (0, 0, None)
    graph = indptr, indices, data
    launch.run(
        'layer_end',
        like,
        plan,
        *graph,
        *arrays,
        partials,
        counter,
        numbers=draw_arguments(seed, stream, dropout_ratio, like.dtype),
        SUMMED=int(adj is not None),
        WEIGHTED=weights,
        DROPOUT=int(dropout_ratio > 0),
        BIAS=BIAS,
        BACKWARD=BACKWARD,
        **constants,
    )
    return partials
