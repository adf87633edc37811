"""A graph convolution and its rectifier, product, linear map and activation, as one node."""

import chainer

from chainer_bspmm import backend
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused.activated_linear import LinearReLU


class ConvolvedReLU(LinearReLU):
    """Inputs x and W; the linear map is that of A x."""

    def __init__(self, adj, dropout_ratio):
        super().__init__(dropout_ratio)
        self._adj = adj

    def _output(self, inputs):
        x, W = inputs
        self._sums = backend.bspmm(self._adj, x)
        return super()._output((self._sums, W))

    def _gradients(self, inputs, gy, wanted):
        gradients = super()._gradients((self._sums, inputs[1]), gy, wanted)
        if 0 in wanted:
            gradients[0] = backend.bspmm(self._adj, gradients[0], trans=True)
        return gradients

    def _composed(self, x, W):
        return super()._composed(bspmm(self._adj, x), W)


def convolved_relu(adj, x, W, dropout_ratio=0.0):
    """Compute ``y[i, c] = max(0, sum_k W[c, k] sum_j A[i, j] x[j, k])``, then dropout.

    Differentiable to any order with respect to ``x`` and ``W``.

    Args:
        adj (BatchedCSR or BatchedCOO): n_rows x n_cols; its values are constants.
        x (Variable or array): (n_cols, n_in) floats of adj's dtype.
        W (Variable or array): (n_out, n_in).
        dropout_ratio (float): as in :func:`linear_relu`.

    Returns:
        Variable: (n_rows, n_out), of x's dtype: the same numbers as
        ``linear_relu(bspmm(adj, x), W, None, dropout_ratio)``.

    Raises:
        TypeError, ValueError: as :func:`chainer_bspmm.functions.bspmm` and :func:`linear_relu`.

    Source:
        Kipf, Welling 2016 (arXiv:1609.02907), equation 2.
    """
    LinearReLU.check_ratio(dropout_ratio)
    node = ConvolvedReLU(adj, dropout_ratio if chainer.config.train else 0.0)
    return node.apply((x, W))[0]
