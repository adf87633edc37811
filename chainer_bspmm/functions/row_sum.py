"""The sum over all rows, which is the gradient of a bias."""
import math

import numpy

from chainer import function_node
from chainer import functions


class RowSum(function_node.FunctionNode):
    """Compute ``y[c] = sum_i x[i, c]`` of (n_rows, n_channels) floats; 0 where there are no rows.

    ``numpy.sum`` adds one row after the other: its rounding grows with the batch, and it goes
    through memory a few channels at a time. Here the host adds blocks of about sqrt(n_rows) rows
    to one block, then the rows of that one: several times quicker and closer.
    """

    def forward(self, inputs):
        x, = inputs
        self._shape = n_rows, n_channels = x.shape
        if not isinstance(x, numpy.ndarray):
            return x.sum(axis=0),
        dtype = numpy.float32 if x.dtype == numpy.float16 else x.dtype
        block = max(math.isqrt(n_rows), 1)
        n_blocks = n_rows // block
        blocks = x[:n_blocks * block].reshape(n_blocks, block * n_channels)
        y = blocks.sum(axis=0, dtype=dtype).reshape(block, n_channels).sum(axis=0)
        y += x[n_blocks * block:].sum(axis=0, dtype=dtype)
        return y.astype(x.dtype, copy=False),

    def backward(self, indexes, grad_outputs):
        return functions.broadcast_to(grad_outputs[0], self._shape),
