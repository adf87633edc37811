"""The logistic function on bare arrays, for nodes that end in it."""

import numpy

from chainer.backends import cuda

# For kernels. (T)0.5: a plain literal would have all of it computed in double precision.
SIGMOID = '#define SIGMOID(x) (tanh((x) * (T)0.5) * (T)0.5 + (T)0.5)\n'


def sigmoid(x, bias=None):
    """Return ``sigmoid(x + bias)``, in x's memory; in the form that does not overflow.

    Args:
        x (array): floats.
        bias (array or None): of a shape that goes with x's; None means 0.
    """
    if isinstance(x, numpy.ndarray):
        half = x.dtype.type(0.5)
        if bias is not None:
            x += bias
        x *= half
        numpy.tanh(x, out=x)
        x *= half
        x += half
        return x
    kernel = cuda.elementwise(
        'T x, T bias', 'T y', 'y = SIGMOID(x + bias)', 'bspmm_biased_sigmoid', preamble=SIGMOID
    )
    return kernel(x, x.dtype.type(0) if bias is None else bias, x)
