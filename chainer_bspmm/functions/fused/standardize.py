"""Chainer Chemistry's StandardScaler as one node, one launch in each direction."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.functions.node import FusedNode


class Standardize(FusedNode):
    """Input x; the others are constants."""

    def __init__(self, mean, std, inverse):
        self._mean, self._std, self._inverse = mean, std, inverse

    def _output(self, inputs):
        return self._scaled(inputs[0], self._mean)

    def _gradients(self, inputs, gy, wanted):
        return (self._scaled(gy, gy.dtype.type(0)),)

    def _composed(self, x):
        std = self._std
        std = x.xp.where(std == 0, std.dtype.type(1), std)
        return x * std + self._mean if self._inverse else (x - self._mean) / std

    def _scaled(self, x, mean):
        std = self._std
        if isinstance(x, numpy.ndarray):
            std = numpy.where(std == 0, std.dtype.type(1), std)
            return x * std + mean if self._inverse else (x - mean) / std
        # The product is rounded before the sum, as it is where they are two kernels.
        return cuda.elementwise(
            'T x, T mean, T std',
            'T y',
            'const T s = std == 0 ? (T)1 : std; y = '
            + ('(T)((double)x * s) + mean' if self._inverse else '(x - mean) / s'),
            'bspmm_standardize_inverse' if self._inverse else 'bspmm_standardize',
        )(x, mean, std)


def standardize(x, mean, std, inverse=False):
    """Compute ``(x - mean) / std`` of every column, or the inverse of that.

    Args:
        x (Variable): (n_rows, n_columns) floats.
        mean (array): (n_columns,) floats.
        std (array): (n_columns,) float32; 0 stands for 1.
        inverse (bool): compute ``x * std + mean``.

    Returns:
        Variable: (n_rows, n_columns), of the dtype that NumPy gives to the formula.
    """
    node = Standardize(mean, std, inverse)
    if x.dtype == mean.dtype == std.dtype:
        return node.apply((x,))[0]
    return node._composed(x)
