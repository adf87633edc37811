"""A linear layer and a softmax as one node."""

from chainer import backend as chainer_backend
from chainer import functions
from chainer.functions.connection.linear import LinearFunction

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.node import FusedNode


class LinearSoftmax(FusedNode):
    """Inputs x, W and, if any, b."""

    check_type_forward = LinearFunction.check_type_forward

    def _output(self, inputs):
        x, W, *b = inputs
        y = dot(x, W.T).astype(x.dtype, copy=False)
        if b:
            y += b[0]
        y -= y.max(axis=1, keepdims=True)
        chainer_backend.get_array_module(y).exp(y, out=y)
        y /= y.sum(axis=1, keepdims=True)
        self._y = y
        return y

    def _gradients(self, inputs, gy, wanted):
        x, W = inputs[:2]
        # Chainer's checks the array module of every row of y: one view per row on a GPU.
        gy = self._y * gy
        gy -= self._y * gy.sum(axis=1, keepdims=True)
        return {
            0: dot(gy, W).astype(gy.dtype, copy=False) if 0 in wanted else None,
            1: dot(gy.T, x) if 1 in wanted else None,
            2: backend.row_sum(gy) if 2 in wanted else None,
        }

    def _composed(self, *inputs):
        return functions.softmax(functions.linear(*inputs))


def linear_softmax(x, W, b=None):
    """Compute ``y[i] = softmax(W x[i] + b)``. Differentiable to any order.

    Args:
        x (Variable or array): (n_rows, n_in) floats.
        W (Variable or array): (n_out, n_in).
        b (Variable or array or None): (n_out,).

    Returns:
        Variable: (n_rows, n_out), of x's dtype; every row sums to 1. NaN propagates.
    """
    return LinearSoftmax().apply((x, W) if b is None else (x, W, b))[0]
