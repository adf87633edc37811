"""Losses and metrics over all elements of a batch, each in one launch on a GPU."""

import collections
from typing import NamedTuple

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans

LOSS_CHUNK = 2**14  # elements per block; the loss of a batch of molecules usually needs one block
LOSS_ALONG = 2**12  # elements up to which a second pass of one block is faster than another launch


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


OF_LABELS = 'SIGMOID_CROSS_ENTROPY', 'BINARY_ACCURACY'  # kinds of `Loss`; others are of values


def _check(x, t, has_labels):
    """Raise ValueError if t does not fit x; Chainer checks it only with type checks turned on."""
    fits = t.dtype.kind == 'i' if has_labels else t.dtype == x.dtype
    if t.shape != x.shape or x.size >= 2**31 or not fits:
        expected = 'integers' if has_labels else x.dtype
        raise ValueError(
            't: expected %s of the shape of x, %s, of fewer than 2**31 elements, got %s of shape %s'
            % (expected, x.shape, t.dtype, t.shape)
        )


class Loss(NamedTuple):
    """Loss or metric ``y = sum of term(x[i], t[i]) / divisor`` over all elements i.

    `kernels/mean_loss.cu` has the terms of each kind. ``'SIGMOID_CROSS_ENTROPY'`` and
    ``'BINARY_ACCURACY'`` take integer labels and ignore -1. ``'SQUARED_ERROR'`` and
    ``'ABSOLUTE_ERROR'`` take values of x's dtype.

    Attributes:
        kind (str): one of these four.
        divisor (int or None): None means the number of labels other than -1, or 1 if there are
            none.
        ignore_nan (bool): whether a difference of values that is NaN counts as 0.
    """

    kind: str
    divisor: int | None = None
    ignore_nan: bool = False

    def forward(self, x, t):
        """Return y, a scalar of x's dtype that is summed in float64, and the count.

        The count of labels is an int64 array, on x's device. With a divisor it is None.
        """
        return self._forward(x, t)

    def backward(self, x, t, gy, count=None):
        """Return the gradient of :meth:`forward`, of any kind but the accuracy.

        `count` is the count that :meth:`forward` returned.
        """
        _check(x, t, self.kind in OF_LABELS)
        if not launch.on_gpu(x):
            return self._host_gradient(x, t, gy, count)
        with launch.device_of(x):
            gx = cuda.cupy.empty(x.shape, x.dtype)
            if gx.size:
                self._launch(loss_grad_launch(x.size), x, t, y=gx, gy=gy, count=count)
        return gx

    def training_forward(self, x, t, with_gradient=True):
        """Compute :meth:`forward` and, in the same launch, the binary accuracy and the gradient.

        Returns y, the count, the accuracy if labels are counted, else None, and the gradient for a
        gy of 1 if `with_gradient`. On a GPU the accuracy is None for more than LOSS_CHUNK elements,
        and the gradient for more than LOSS_ALONG.
        """
        accuracy = gx = along = None
        if launch.on_gpu(x) and x.size <= LOSS_CHUNK:
            with launch.device_of(x):
                if self.divisor is None:
                    accuracy = cuda.cupy.empty((), x.dtype)
                if with_gradient and x.size <= LOSS_ALONG:
                    gx = cuda.cupy.empty(x.shape, x.dtype)
            along = _Along(accuracy, gx)
        y, count = self._forward(x, t, along)
        if not launch.on_gpu(x):
            if count is not None:
                accuracy, _ = Loss('BINARY_ACCURACY')._forward(x, t)
            if with_gradient:
                gx = self._host_gradient(x, t, 1, count)
        return y, count, accuracy, gx

    def _forward(self, x, t, along=None):
        _check(x, t, self.kind in OF_LABELS)
        count = None
        if not launch.on_gpu(x):
            if self.divisor is None:
                count = numpy.asarray(max((t != -1).sum(), 1))
            terms, _ = self._terms(x, t)
            return numpy.asarray(terms.sum() / self._divisor(count), x.dtype), count
        with launch.device_of(x):
            y = cuda.cupy.empty((), x.dtype)
            partial = None
            if self.divisor is None:
                count = cuda.cupy.empty((), numpy.int64)
            launches = loss_launches(x.size)
            if len(launches) > 1:
                partial = cuda.cupy.empty((launches[0].grid[0], 2), numpy.float64)
            for plan in launches:
                self._launch(plan, x, t, y=y, count=count, partial=partial, along=along)
        return y, count

    def _host_gradient(self, x, t, gy, count):
        _, slopes = self._terms(x, t)
        return numpy.asarray(gy * slopes / self._divisor(count), x.dtype)

    def _divisor(self, count):
        return count if self.divisor is None else self.divisor

    def _terms(self, x, t):
        """Return every element's term, and its slope, in float64."""
        x = x.astype(numpy.float64)
        is_positive = x >= 0
        is_known = t != -1
        if self.kind == 'BINARY_ACCURACY':
            return is_positive == t, None
        if self.kind == 'SIGMOID_CROSS_ENTROPY':
            small = numpy.exp(-abs(x))  # cannot overflow
            return (
                is_known * (numpy.log1p(small) - x * (t - is_positive)),
                is_known * (numpy.where(is_positive, 1, small) / (1 + small) - t),
            )
        d = x - t
        if self.ignore_nan:
            d = numpy.where(numpy.isnan(d), 0, d)
        return (d * d, 2 * d) if self.kind == 'SQUARED_ERROR' else (abs(d), numpy.sign(d))

    def _launch(self, plan, x, t, *, y, count, gy=None, partial=None, along=None):
        """Launch kernels/mean_loss.cu: write the loss (y, `along`), or with `gy` the gradient (y).

        `count`, if labels are counted, is an array that a loss writes and a gradient reads.
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
            numbers=[numpy.float64(self.divisor or 0)],
            KIND=self.kind,
            IGNORE_NAN=self.ignore_nan,
            COUNTED=self.divisor is None,
            GRADIENT=gy is not None,
            ALONG=along is not None,
        )
