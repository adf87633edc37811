"""Layer normalisation whose gradient is a few array operations."""

from chainer import backend as chainer_backend
from chainer import functions

from chainer_bspmm import backend
from chainer_bspmm.functions.node import FusedNode


class LayerNorm(FusedNode):
    """Inputs x, gamma, beta of :func:`layer_norm`.

    Chainer's calculates its gradient in some twenty nodes, which take more host time than the rest
    of an update.
    """

    def __init__(self, eps):
        self._eps = eps

    def _output(self, inputs):
        xp = chainer_backend.get_array_module(*inputs)
        x, gamma, beta = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        x_hat = x - x.mean(axis=1, keepdims=True)
        variance = xp.square(x_hat).mean(axis=1, keepdims=True)
        inv_std = 1 / xp.sqrt(variance + x.dtype.type(self._eps))
        x_hat *= inv_std
        self._kept = x_hat, inv_std
        return x_hat * gamma + beta

    def _gradients(self, inputs, gy, wanted):
        x_hat, inv_std = self._kept
        g = gy * inputs[1].astype(gy.dtype, copy=False)
        gx = g - g.mean(axis=1, keepdims=True)
        gx -= x_hat * (g * x_hat).mean(axis=1, keepdims=True)
        gx *= inv_std
        return gx, backend.row_sum(gy * x_hat), backend.row_sum(gy)

    def _composed(self, x, *parameters):
        parameters = (functions.cast(parameter, x.dtype) for parameter in parameters)
        return functions.layer_normalization(x, *parameters, self._eps)


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
