"""Gradients that are constants: a launch for each, in every step, where Chainer makes them."""

import math

import numpy

import chainer

ALIGNMENT = 16  # bytes, the widest load of a kernel


class One:
    """The gradient of a loss by itself, filled once."""

    def __init__(self, device):
        self._may_share = device.xp.may_share_memory
        with chainer.using_device(device):
            self._ones = {numpy.dtype(char): device.xp.ones((), char) for char in 'efd'}

    def give(self, loss):
        """Set the gradient of a scalar that has none."""
        if loss.array.ndim == 0 and loss.grad is None:
            loss.grad = self._ones.get(loss.dtype)

    def gave(self, gradient):
        """Return whether an array is the 1."""
        return gradient is self._ones.get(gradient.dtype)

    def take_back(self, params):
        """Copy the gradients of parameters that lie in the 1 itself: hooks change gradients."""
        for param in params:
            grad = param.grad
            one = None if grad is None else self._ones.get(grad.dtype)
            if one is not None and self._may_share(grad, one):
                param.grad = grad.copy()


def zero_missing(params):
    """Give parameters on one device that have no gradient zeros, in one array of each dtype."""
    missing = {}
    for param in params:
        if param.grad is None:
            missing.setdefault(param.dtype, []).append(param)
    for dtype, some in missing.items():
        sizes = [math.prod(param.shape) for param in some]
        step = ALIGNMENT // dtype.itemsize
        starts = numpy.cumsum([0, *(-(-size // step) * step for size in sizes)]).tolist()
        zeros = some[0].xp.zeros(starts[-1], dtype)
        for param, start, size in zip(some, starts, sizes):
            param.grad = zeros[start : start + size].reshape(param.shape)
