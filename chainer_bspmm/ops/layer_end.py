"""The end of a layer whose products are done, kernels/layer_end.cu: biases, activation, dropout."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, launch, plans
from chainer_bspmm.cuda.partial_sums import sum_partials
from chainer_bspmm.ops.dropout import draw_arguments
from chainer_bspmm.ops.elementwise import activate, activation_gradient
from chainer_bspmm.ops.segments import row_sum

END_BLOCK = 256  # threads of layer_end
END_COLUMNS = 64  # of them side by side, at most
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


def end_forward(y, b_self, activation, dropout_ratio=0.0, draw=None):
    """Add biases to a layer's sums y, activate and drop, in place.

    Several `b_self`, one after the other, are all added. `draw` is of `ops.dropout.step_draw`, for
    a GPU only.
    """
    if not launch.on_gpu(y):
        if b_self is not None:
            y += b_self
        activate(numpy, activation, y)
        return
    if not y.size or (b_self is None and activation == 'identity' and not dropout_ratio):
        return
    with launch.device_of(y):
        b_self = launch.contiguous(b_self)
        seed, stream, counter = draw or (0, 0, None)
        launch.run(
            'layer_end',
            y,
            _planned_end(y, b_self),
            b_self,
            None,
            y,
            None,
            None,
            counter,
            numbers=draw_arguments(seed, stream, dropout_ratio, y.dtype),
            ACTIVATION=activation.upper(),
            DROPOUT=int(dropout_ratio > 0),
            BIASES=0 if b_self is None else b_self.size // y.shape[1],
            BACKWARD=0,
        )


def end_backward(y, gy, activation, dropout_ratio=0.0, has_bias=False):
    """Return the gradients of :func:`end_forward` with respect to the sums, and to a bias or None.

    y is the result, which an identity without dropout does not need; the bias' gradient is of
    `sum_partials`.
    """
    if not launch.on_gpu(gy):
        gy = activation_gradient(activation, y, gy, dropout_ratio)
        return gy, row_sum(gy) if has_bias else None
    if activation == 'identity' and not dropout_ratio:
        return gy, column_sums(gy, gy.shape[1])[0] if has_bias else None
    n_columns = gy.shape[1]
    with launch.device_of(gy):
        gy = launch.contiguous(gy)
        z = cuda.cupy.empty(gy.shape, gy.dtype)
        if not gy.size:
            return z, cuda.cupy.zeros(n_columns, gy.dtype) if has_bias else None
        partials = _backward(y, gy, activation, dropout_ratio, z, has_bias)
        if not has_bias:
            return z, None
        (bias,) = sum_partials(partials, [(0, (n_columns,), gy.dtype)])
    return z, bias


def _backward(y, gy, activation, dropout_ratio, z, has_bias):
    """Write z, if it is given; return the partial sums for a bias, or None."""
    plan = _planned_end(gy, y, z)
    partials = None
    if has_bias:
        shape = plan.grid[0], gy.shape[1]
        partials = cuda.cupy.empty(shape, launch.arithmetic(gy.dtype))
    launch.run(
        'layer_end',
        gy,
        plan,
        None,
        gy,
        y,
        z,
        partials,
        None,
        numbers=draw_arguments(0, 0, dropout_ratio, gy.dtype),
        ACTIVATION=activation.upper(),
        DROPOUT=int(dropout_ratio > 0),
        BIASES=int(has_bias),
        BACKWARD=1,
    )
    return partials


def _planned_end(rows, *others):
    n_rows, width = rows.shape
    vector = min(launch.vector_width(width, rows, *others), plans.QUAD)
    return end_launch(n_rows, width, vector, kernels.device(rows.data.device_id))


def column_sums(g, n, n_copies=1):
    """Return the sums over the rows of each n columns of g: gradients of biases, of `sum_partials`.

    They come `n_copies` times over, in arrays of their own: optimizer hooks write to them.
    """
    starts = range(0, g.shape[1], n)
    if not (launch.on_gpu(g) and g.size):
        total = row_sum(g)
        return [total[start : start + n].copy() for _ in range(n_copies) for start in starts]
    parts = n_copies * [(start, (n,), g.dtype) for start in starts]
    with launch.device_of(g):
        partials = _backward(None, launch.contiguous(g), 'identity', 0.0, None, has_bias=True)
        return sum_partials(partials, parts)
