"""Layer normalisation, on a GPU a launch forward and two backward."""

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
        x, gamma, beta = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        y, self._statistics = backend.layer_norm(x, gamma, beta, self._eps)
        return y

    def _gradients(self, inputs, gy, wanted):
        gamma = inputs[1].astype(gy.dtype, copy=False)
        return backend.layer_norm_grad(inputs[0], gamma, gy, self._statistics)

    def _composed(self, x, *parameters):
        gamma, beta = (functions.cast(parameter, x.dtype) for parameter in parameters)
        return functions.layer_normalization(x, gamma, beta, self._eps)


def layer_norm(x, gamma, beta, eps):
    """Compute ``y[i, c] = gamma[c] (x[i, c] - mean_i) / sqrt(variance_i + eps) + beta[c]``.

    Mean and variance are those of a row. As ``chainer.functions.layer_normalization``; one node of
    the computational graph, differentiable to any order.
    """
    return LayerNorm(eps).apply((x, gamma, beta))[0]
