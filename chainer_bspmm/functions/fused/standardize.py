"""Chainer Chemistry's StandardScaler as one node, one launch in each direction."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.functions.node import FusedNode


class Standardize(FusedNode):
    """Input x; the others are constants."""

    def __init__(self, mean, std, inverse):
        self._mean, self._std, self._inverse = mean, std, inverse

    def _output(self, inputs):
        return _scaled(inputs[0], self._mean, self._std, self._inverse)

    def _gradients(self, inputs, gy, wanted):
        return (_scaled(gy, gy.dtype.type(0), self._std, self._inverse),)

    def _composed(self, x):
        std = self._std
        std = x.xp.where(std == 0, std.dtype.type(1), std)
        return x * std + self._mean if self._inverse else (x - self._mean) / std


def _scaled(x, *constants):
    return (_on_host if isinstance(x, numpy.ndarray) else _on_device)(x, *constants)


def _on_host(x, mean, std, inverse):
    std = numpy.where(std == 0, std.dtype.type(1), std)
    return x * std + mean if inverse else (x - mean) / std


def _on_device(x, mean, std, inverse):
    # The product is rounded before it is added to, as where they are two kernels.
    formula = '(T)((double)x * s) + mean' if inverse else '(x - mean) / s'
    return cuda.elementwise(
        'T x, T mean, T std',
        'T y',
        'const T s = std == 0 ? (T)1 : std; y = ' + formula,
        'bspmm_unstandardize' if inverse else 'bspmm_standardize',
    )(x, mean, std)


def standardize(x, mean, std, inverse=False):
    """Compute ``(x - mean) / std`` of every column, or the inverse of that.

    Args:
        x (Variable): (n_rows, n_columns) floats.
        mean, std (array): (n_columns,) floats, which are converted to the dtype of x; a `std` of 0
            stands for 1.
        inverse (bool): compute ``x * std + mean``.

    Returns:
        Variable: (n_rows, n_columns), of x's dtype.
    """
    mean, std = (array.astype(x.dtype, copy=False) for array in (mean, std))
    return Standardize(mean, std, inverse).apply((x,))[0]
