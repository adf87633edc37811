"""A linear layer and its activation as one node."""

import numpy

import chainer
from chainer import function_node
from chainer import functions
from chainer.backends import cuda
from chainer.functions.activation.relu import ReLUGrad2
from chainer.functions.connection.linear import LinearFunction
from chainer.functions.connection.linear import LinearGradData
from chainer.functions.connection.linear import LinearGradWeight

from chainer_bspmm.functions.fused.dropout import dropout_relu
from chainer_bspmm.functions.node import apply_untracked
from chainer_bspmm.functions.row_sum import RowSum


class ActivatedLinear(LinearFunction):
    """Chainer's own linear function, activated in place before anyone sees the result."""

    def forward_chainerx(self, inputs):
        return chainer.Fallback  # the inherited one would leave out the activation

    def forward(self, inputs):
        (y,) = super().forward(inputs)
        self._activate(chainer.backend.get_array_module(y), y)
        self.retain_outputs((0,))
        return (y,)

    def backward(self, indexes, grad_outputs):
        x, W = self.get_retained_inputs()
        (y,) = self.get_retained_outputs()
        gy = self._activation_gradient(y, grad_outputs[0])
        nodes = {
            0: (LinearGradData(), (W, gy)),
            1: (LinearGradWeight(W.dtype), (x, gy)),
            2: (RowSum(), (gy,)),
        }
        return tuple(apply_untracked(*nodes[index])[0] for index in indexes)


class LinearReLU(ActivatedLinear):
    """With dropout, unless its ratio is 0."""

    def __init__(self, dropout_ratio=0.0):
        super().__init__()
        self._dropout_ratio = dropout_ratio

    def _activate(self, xp, y):
        if not self._dropout_ratio:
            xp.maximum(y, 0, out=y)
        else:
            dropout_relu(y, self._dropout_ratio)

    def _activation_gradient(self, y, gy):
        if not self._dropout_ratio:
            return apply_untracked(ReLUGrad2(y.array), (gy,))[0]
        return apply_untracked(ReLUDropoutGrad(y.array, self._scale(y.array)), (gy,))[0]

    @staticmethod
    def check_ratio(ratio):
        if not 0 <= ratio < 1:
            raise ValueError('dropout_ratio: expected at least 0 and below 1, got %r' % ratio)

    def _scale(self, y):
        return y.dtype.type(1 / (1 - self._dropout_ratio))


class ReLUDropoutGrad(function_node.FunctionNode):
    """Compute ``gx = scale gy where y > 0, else 0``: what was dropped is 0 in y, too."""

    def __init__(self, y, scale):
        self._y = y
        self._scale = scale

    def forward(self, inputs):
        (gy,) = inputs
        if isinstance(gy, numpy.ndarray):
            gx = gy * (self._y > 0)
            gx *= self._scale
            return (gx,)
        return (
            cuda.elementwise(
                'T y, T gy, T scale',
                'T gx',
                'gx = gy * scale; if (!(y > (T)0)) gx = (T)0',
                'bspmm_relu_dropout_grad',
            )(self._y, gy, self._scale),
        )

    def backward(self, indexes, grad_outputs):
        return ReLUDropoutGrad(self._y, self._scale).apply(grad_outputs)


class LinearSoftmax(ActivatedLinear):
    def _activate(self, xp, y):
        y -= y.max(axis=1, keepdims=True)
        xp.exp(y, out=y)
        y /= y.sum(axis=1, keepdims=True)

    def _activation_gradient(self, y, gy):
        return apply_untracked(SoftmaxGrad(), (y, gy))[0]


class SoftmaxGrad(function_node.FunctionNode):
    """Compute ``gx[i, c] = y[i, c] (gy[i, c] - sum_k y[i, k] gy[i, k])``.

    Chainer's own looks at every row of y for the module that it belongs to: a view a row on a GPU.
    """

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        y, gy = inputs
        gx = y * gy
        gx -= y * gx.sum(axis=1, keepdims=True)
        return (gx,)

    def backward(self, indexes, grad_outputs):
        y, gy = self.get_retained_inputs()
        (ggx,) = grad_outputs

        def inner(a):
            return functions.broadcast_to(functions.sum(y * a, axis=1, keepdims=True), a.shape)

        return ggx * (gy - inner(gy)) - gy * inner(ggx), SoftmaxGrad().apply((y, ggx))[0]


def linear_relu(x, W, b=None, dropout_ratio=0.0):
    """Compute ``y[i, c] = max(0, sum_k W[c, k] x[i, k] + b[c])``. Differentiable to any order.

    Args:
        x (Variable or array): (n_rows, n_in) floats.
        W (Variable or array): (n_out, n_in).
        b (Variable or array or None): (n_out,).
        dropout_ratio (float): in [0, 1); with ``chainer.config.train`` each element of the result
            is set to 0 with this probability, the others are divided by 1 - dropout_ratio. Random
            numbers are Chainer's, inside a training step (``training/``) the step's own.

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
