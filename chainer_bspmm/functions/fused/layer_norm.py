"""Layer normalisation whose gradient is a few array operations."""

import chainer
from chainer import backend as chainer_backend
from chainer import function_node
from chainer import functions

from chainer_bspmm.functions.row_sum import RowSum


class LayerNorm(function_node.FunctionNode):
    """Inputs x, gamma, beta of :func:`layer_norm`.

    Chainer's own calculates its gradient in some twenty nodes, which cost more host time than the
    rest of an update.
    """

    def __init__(self, eps):
        self._eps = eps

    def forward(self, inputs):
        self.retain_inputs((0, 1, 2))
        xp = chainer_backend.get_array_module(*inputs)
        x, gamma, beta = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        x_hat = x - x.mean(axis=1, keepdims=True)
        variance = xp.square(x_hat).mean(axis=1, keepdims=True)
        inv_std = 1 / xp.sqrt(variance + x.dtype.type(self._eps))
        x_hat *= inv_std
        self._kept = x_hat, inv_std
        return (x_hat * gamma + beta,)

    def backward(self, indexes, grad_outputs):
        inputs = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            # Gradients of gradients are rare: they come from Chainer's nodes.
            inputs = [functions.identity(variable) for variable in inputs]
            x, *parameters = inputs
            y = functions.layer_normalization(
                x, *(functions.cast(variable, x.dtype) for variable in parameters), self._eps
            )
            return tuple(
                chainer.grad(
                    [y], [inputs[i] for i in indexes], grad_outputs, enable_double_backprop=True
                )
            )
        gy, (x_hat, inv_std) = grad_outputs[0].array, self._kept
        g = gy * inputs[1].array.astype(gy.dtype, copy=False)
        gx = g - g.mean(axis=1, keepdims=True)
        gx -= x_hat * (g * x_hat).mean(axis=1, keepdims=True)
        gx *= inv_std
        arrays = gx, RowSum().forward((gy * x_hat,))[0], RowSum().forward((gy,))[0]
        return tuple(
            chainer.Variable(arrays[i].astype(inputs[i].dtype, copy=False), requires_grad=False)
            for i in indexes
        )


def layer_norm(x, gamma, beta, eps):
    """Compute ``y[i, c] = gamma[c] (x[i, c] - mean_i) / sqrt(variance_i + eps) + beta[c]``.

    Mean and variance are those of a row. As ``chainer.functions.layer_normalization``; one node of
    the computational graph, differentiable to any order.

    Args:
        x (Variable or array): (n_rows, n_channels) floats.
        gamma, beta (Variable or array): (n_channels,).
        eps (float): above 0.

    Returns:
        Variable: (n_rows, n_channels) of x's dtype, to which parameters of another are converted.
    """
    return LayerNorm(eps).apply((x, gamma, beta))[0]
