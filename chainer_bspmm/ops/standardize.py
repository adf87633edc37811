"""Chainer Chemistry's StandardScaler as one node, with one launch forward and one backward."""

from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.ops.node import FusedNode


class Standardize(FusedNode):
    """Node of :func:`standardize`; input x, all else is constant."""

    def __init__(self, mean, std, inverse):
        self._mean, self._std, self._inverse = mean, std, inverse

    def _output(self, inputs):
        return _scaled(inputs[0], self._mean, self._std, self._inverse)

    def _gradients(self, inputs, gy, indexes):
        return (_scaled(gy, gy.dtype.type(0), self._std, self._inverse),)

    def _composed(self, x):
        return _scaled(x, self._mean, self._std, self._inverse)


def _scaled(x, mean, std, inverse):
    """Scale an array or a Variable."""
    if not launch.on_gpu(x):
        std = backend.get_array_module(std).where(std == 0, std.dtype.type(1), std)
        return x * std + mean if inverse else (x - mean) / std
    # The first result is rounded before the second operation, as if they were two kernels.
    formula = 'const T p = x * s; y = p + mean;' if inverse else 'const T d = x - mean; y = d / s;'
    return cuda.elementwise(
        'T x, T mean, T std',
        'T y',
        'const T s = std == 0 ? (T)1 : std; ' + formula,
        'bspmm_unstandardize' if inverse else 'bspmm_standardize',
        options=('--fmad=false',),
    )(x, mean, std)


def standardize(x, mean, std, inverse=False):
    """Compute ``(x - mean) / std`` of columns, or ``x * std + mean``; a `std` of 0 stands for 1."""
    mean, std = (array.astype(x.dtype, copy=False) for array in (mean, std))
    return Standardize(mean, std, inverse).apply((x,))[0]
