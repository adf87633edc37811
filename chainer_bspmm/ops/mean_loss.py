"""Losses and metrics over all elements of a batch, each in one launch on a GPU."""

import collections

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans

LOSS_CHUNK = 2**14  # elements per block; the loss of a batch of molecules usually needs one block
LOSS_ALONG = 2**12  # elements up to which a second pass of that block is faster than another launch


@plans.kept
def loss_launches(size) -> tuple[plans.Launch, ...]:
    """Plan mean_loss: one launch, or two if there are more elements than one block takes."""
    n_blocks = max(-(-size // LOSS_CHUNK), 1)
    sizes = (size,) if n_blocks == 1 else (size, n_blocks)
    return tuple(
        plans.Launch(
            (('VECTOR', 1), ('CHUNK', LOSS_CHUNK), ('COMBINE', combine)),
            (1 if combine else n_blocks, 1, 1),
            (min(-(-max(n, 1) // plans.WARP) * plans.WARP, plans.MAX_BLOCK), 1, 1),
            arguments=(numpy.uint32(n),),
        )
        for combine, n in enumerate(sizes)
    )


@plans.kept
def loss_grad_launch(size) -> plans.Launch:
    """Plan the gradient of mean_loss: a thread for each of `size` elements, at least one."""
    return plans.Launch(
        (('VECTOR', 1), ('CHUNK', LOSS_CHUNK), ('COMBINE', 0)),
        (-(-size // plans.BLOCK), 1, 1),
        (plans.BLOCK, 1, 1),
        arguments=(numpy.uint32(size),),
    )


# Arrays on a GPU that the launch of a loss also writes: the accuracy, a scalar, and the gradient
# for a gy of 1. Either may be None.
_Along = collections.namedtuple('_Along', 'accuracy gx')


def _run(plan, kind, x, t, *, y, count, divisor, ignore_nan, gy=None, partial=None, along=None):
    """Launch kernels/mean_loss.cu: write a loss to y, and to `along`, or with `gy` its gradient.

    `count` is the divisor on the device, which a loss writes and a gradient reads. If it is None,
    the divisor is the number `divisor`.
    """
    if t.dtype.kind == 'i':
        t = t.astype(numpy.int32, copy=False)
    x, t = launch.contiguous(x), launch.contiguous(t)
    accuracy, gx = along or (None, None)
    launch.run(
        'mean_loss',
        x,
        plan,
        x,
        t,
        gy,
        y,
        count,
        partial,
        accuracy,
        gx,
        numbers=[numpy.float64(divisor or 0)],
        KIND=kind,
        IGNORE_NAN=ignore_nan,
        COUNTED=count is not None,
        GRADIENT=gy is not None,
        ALONG=along is not None,
    )


def _terms(kind, x, t, ignore_nan):
    """Return every element's term of a loss, and its slope, in float64."""
    x = x.astype(numpy.float64)
    is_positive = x >= 0
    is_known = t != -1
    if kind == 'BINARY_ACCURACY':
        return is_positive == t, None
    if kind == 'SIGMOID_CROSS_ENTROPY':
        small = numpy.exp(-abs(x))  # cannot overflow
        return (
            is_known * (numpy.log1p(small) - x * (t - is_positive)),
            is_known * (numpy.where(is_positive, 1, small) / (1 + small) - t),
        )
    d = x - t
    if ignore_nan:
        d = numpy.where(numpy.isnan(d), 0, d)
    return (d * d, 2 * d) if kind == 'SQUARED_ERROR' else (abs(d), numpy.sign(d))


def _check(x, t):
    """Raise ValueError if t does not fit x; Chainer checks it only with type checks turned on."""
    if t.shape != x.shape or x.size >= 2**31 or not (t.dtype.kind == 'i' or t.dtype == x.dtype):
        raise ValueError(
            't: expected integers or values of the shape of x, %s, of fewer than 2**31 elements, '
            'got %s of shape %s' % (x.shape, t.dtype, t.shape)
        )


def mean_loss_forward(kind, x, t, divisor=None, ignore_nan=False, along=None):
    """Compute a loss or metric ``y = sum of term(x[i], t[i]) / divisor`` over all elements i.

    `kernels/mean_loss.cu` has the terms of each kind. ``'SIGMOID_CROSS_ENTROPY'`` and
    ``'BINARY_ACCURACY'`` take integer labels and ignore -1. ``'SQUARED_ERROR'`` and
    ``'ABSOLUTE_ERROR'`` take values of x's dtype; with `ignore_nan`, a difference that is NaN
    counts as 0. `along` is an `_Along`, for :func:`training_loss`.

    Returns the loss, a scalar of x's dtype that is summed in float64, and a count. Without a
    `divisor` the loss is divided by the count, an int64 array: the number of labels other than -1,
    or 1 if there are none. With a `divisor` the count is None.
    """
    _check(x, t)
    count = None
    if not launch.on_gpu(x):
        if divisor is None:
            divisor = count = numpy.asarray(max((t != -1).sum(), 1))
        terms, _ = _terms(kind, x, t, ignore_nan)
        return numpy.asarray(terms.sum() / divisor, x.dtype), count
    with launch.device_of(x):
        y = cuda.cupy.empty((), x.dtype)
        partial = None
        if divisor is None:
            count = cuda.cupy.empty((), numpy.int64)
        launches = loss_launches(x.size)
        if len(launches) > 1:
            partial = cuda.cupy.empty((launches[0].grid[0], 2), numpy.float64)
        for plan in launches:
            _run(
                plan,
                kind,
                x,
                t,
                y=y,
                count=count,
                divisor=divisor,
                ignore_nan=ignore_nan,
                partial=partial,
                along=along,
            )
    return y, count


def training_loss(kind, x, t, divisor=None, ignore_nan=False, with_gradient=True):
    """Compute :func:`mean_loss_forward` and, in the same launch, its accuracy and gradient.

    Returns the loss, its divisor, the binary accuracy if labels are counted, else None, and the
    gradient for a gy of 1 if `with_gradient`. On a GPU the accuracy is None for more than
    LOSS_CHUNK elements, and the gradient for more than LOSS_ALONG.
    """
    accuracy = gx = along = None
    if launch.on_gpu(x) and x.size <= LOSS_CHUNK:
        with launch.device_of(x):
            if divisor is None:
                accuracy = cuda.cupy.empty((), x.dtype)
            if with_gradient and x.size <= LOSS_ALONG:
                gx = cuda.cupy.empty(x.shape, x.dtype)
        along = _Along(accuracy, gx)
    y, count = mean_loss_forward(kind, x, t, divisor, ignore_nan, along)
    if not launch.on_gpu(x):
        if count is not None:
            accuracy, _ = mean_loss_forward('BINARY_ACCURACY', x, t)
        if with_gradient:
            divisor = count if divisor is None else divisor
            gx = mean_loss_backward(kind, x, t, gy=1, divisor=divisor, ignore_nan=ignore_nan)
    return y, count, accuracy, gx


def mean_loss_backward(kind, x, t, gy, divisor, ignore_nan=False):
    """Return the gradient of :func:`mean_loss_forward`, of any kind but the accuracy."""
    _check(x, t)
    if not launch.on_gpu(x):
        _, slopes = _terms(kind, x, t, ignore_nan)
        return numpy.asarray(gy * slopes / divisor, x.dtype)
    with launch.device_of(x):
        gx = cuda.cupy.empty(x.shape, x.dtype)
        if gx.size:
            is_counted = not isinstance(divisor, int)  # a counted divisor is an array on the device
            _run(
                loss_grad_launch(x.size),
                kind,
                x,
                t,
                gy=gy,
                y=gx,
                count=divisor if is_counted else None,
                divisor=None if is_counted else divisor,
                ignore_nan=ignore_nan,
            )
    return gx
