"""A linear layer and its activation as one node."""

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda
from chainer.functions.connection.linear import LinearFunction

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.fused.dropout_draws import dropout_relu
from chainer_bspmm.functions.node import FusedNode


class ActivatedLinear(FusedNode):
    """Inputs x, W and, if any, b. A subclass defines the activation."""

    check_type_forward = LinearFunction.check_type_forward

    def _output(self, inputs):
        x, W, *b = inputs
        y = dot(x, W.T).astype(x.dtype, copy=False)
        if b:
            y += b[0]
        self._activate(chainer_backend.get_array_module(y), y)
        self._y = y
        return y

    def _gradients(self, inputs, gy, wanted):
        x, W = inputs[:2]
        gy = self._activation_gradient(self._y, gy)
        return {
            0: dot(gy, W).astype(gy.dtype, copy=False) if 0 in wanted else None,
            1: dot(gy.T, x) if 1 in wanted else None,
            2: backend.row_sum(gy) if 2 in wanted else None,
        }

    def _composed(self, *inputs):
        return self._activated(functions.linear(*inputs))


class LinearReLU(ActivatedLinear):
    """With dropout, unless its ratio is 0."""

    def __init__(self, dropout_ratio=0.0):
        self._dropout_ratio = dropout_ratio

    def _activate(self, xp, y):
        if not self._dropout_ratio:
            xp.maximum(y, 0, out=y)
        else:
            dropout_relu(y, self._dropout_ratio)

    def _activation_gradient(self, y, gy):
        # Elements that were dropped are 0 in y as well.
        if isinstance(gy, numpy.ndarray):
            gx = (y > 0) * self._scale(y)
            gx *= gy
            return gx
        return cuda.elementwise(
            'T y, T gy, T scale',
            'T gx',
            'gx = gy * scale; if (!(y > (T)0)) gx = (T)0',
            'bspmm_relu_dropout_grad',
        )(y, gy, self._scale(y))

    def _activated(self, x):
        y = self._y
        return x * ((y > 0).astype(y.dtype) * self._scale(y))

    @staticmethod
    def check_ratio(ratio):
        if not 0 <= ratio < 1:
            raise ValueError('dropout_ratio: expected at least 0 and below 1, got %r' % ratio)

    def _scale(self, y):
        return y.dtype.type(1 / (1 - self._dropout_ratio))


class LinearSoftmax(ActivatedLinear):
    def _activate(self, xp, y):
        y -= y.max(axis=1, keepdims=True)
        xp.exp(y, out=y)
        y /= y.sum(axis=1, keepdims=True)

    def _activation_gradient(self, y, gy):
        # Chainer's checks the array module of every row of y: one view per row on a GPU.
        gx = y * gy
        gx -= y * gx.sum(axis=1, keepdims=True)
        return gx

    def _activated(self, x):
        return functions.softmax(x)


def linear_relu(x, W, b=None, dropout_ratio=0.0):
    """Compute ``y[i, c] = max(0, sum_k W[c, k] x[i, k] + b[c])``. Differentiable to any order.

    Args:
        x (Variable or array): (n_rows, n_in) floats.
        W (Variable or array): (n_out, n_in).
        b (Variable or array or None): (n_out,).
        dropout_ratio (float): in [0, 1); with ``chainer.config.train`` each element of the result
            is set to 0 with this probability, the others are divided by 1 - dropout_ratio. Random
            numbers are Chainer's, inside a training step (``training/``) the step's.

    Returns:
        Variable: (n_rows, n_out), of x's dtype; NaN propagates. The same numbers as
        ``chainer.functions.relu(chainer.functions.linear(x, W, b))`` and dropout of it, in one node
        instead of two or three.

    Raises:
        ValueError: ``dropout_ratio`` is out of its range.
    """
    LinearReLU.check_ratio(dropout_ratio)
    node = LinearReLU(dropout_ratio if chainer.config.train else 0.0)
    return node.apply((x, W) if b is None else (x, W, b))[0]


def linear_softmax(x, W, b=None):
    """Compute ``y[i] = softmax(W x[i] + b)``; arguments and result as :func:`linear_relu`.

    Every row of the result sums to 1.
    """
    return LinearSoftmax().apply((x, W) if b is None else (x, W, b))[0]
