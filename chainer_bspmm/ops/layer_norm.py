"""Layer normalisation: on a GPU one launch forward and two backward."""

import numpy

from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans
from chainer_bspmm.ops.elementwise import compute_dtype
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.sparse import check


def _launch(x, gamma, statistics, y, *, beta=None, gy=None, terms=None, eps=0):
    """Launch kernels/layer_norm.cu: forward with `beta` and `eps`, backward with `gy`, `terms`."""
    if not x.size:
        return
    n_rows, n_channels = x.shape
    width = launch.vector_width(n_channels, x, gamma, beta, gy, y, terms)
    # The plan of sampled products is used, because here, too, a row has a sub-warp.
    plan = plans.dot_launch(n_rows, n_channels, width, tile=1)
    arrays = x, gamma, beta, gy, statistics, y, terms
    numbers = [launch.arithmetic(x.dtype)(eps)]
    launch.run('layer_norm', x, plan, *arrays, numbers=numbers, GRADIENT=gy is not None)


def layer_norm_forward(x, gamma, beta, eps):
    """Return :func:`layer_norm` of x, and its rows' means and ``1 / sqrt(variance + eps)``."""
    if not launch.on_gpu(x):
        dtype = compute_dtype(x)
        mean = x.mean(axis=1, keepdims=True, dtype=dtype)
        x_hat = x - mean
        inv_std = 1 / numpy.sqrt(numpy.square(x_hat).mean(axis=1, keepdims=True) + dtype.type(eps))
        x_hat *= inv_std
        y = x_hat * gamma + beta
        return y.astype(x.dtype, copy=False), numpy.concatenate([mean, inv_std], axis=1)
    with launch.device_of(x):
        x, gamma, beta = (launch.contiguous(array) for array in (x, gamma, beta))
        statistics = cuda.cupy.empty((len(x), 2), launch.arithmetic(x.dtype))
        y = cuda.cupy.empty(x.shape, x.dtype)
        _launch(x, gamma, statistics, y, beta=beta, eps=eps)
    return y, statistics


def layer_norm_backward(x, gamma, gy, statistics):
    """Return the gradients with respect to x, gamma, beta; the forward pass made `statistics`."""
    if not launch.on_gpu(x):
        mean = statistics[:, :1]
        inv_std = statistics[:, 1:]
        x_hat = (x - mean) * inv_std
        g = gy.astype(x_hat.dtype, copy=False) * gamma
        gx = g - g.mean(axis=1, keepdims=True)
        gx -= x_hat * (g * x_hat).mean(axis=1, keepdims=True)
        gx *= inv_std
        x_hat *= gy
        return gx.astype(x.dtype, copy=False), row_sum(x_hat), row_sum(gy)
    n_channels = x.shape[1]
    with launch.device_of(x):
        x, gamma, gy = (launch.contiguous(array) for array in (x, gamma, gy))
        gx = cuda.cupy.empty(x.shape, x.dtype)
        terms = cuda.cupy.empty((len(x), 2 * n_channels), x.dtype)
        _launch(x, gamma, statistics, gx, gy=gy, terms=terms)
    sums = row_sum(terms)  # the terms of both gradients are in one array, so one sum is enough
    return gx, sums[:n_channels], sums[n_channels:]


class LayerNorm(FusedNode):
    """Node of :func:`layer_norm`; inputs are x, gamma, beta.

    Chainer's layer normalisation takes about twenty nodes for its gradient, and more time.
    """

    def __init__(self, eps):
        self._eps = eps

    def _output(self, inputs):
        x, gamma, beta = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        y, self._statistics = layer_norm_forward(x, gamma, beta, self._eps)
        return y

    def _gradients(self, inputs, gy, indexes):
        gamma = inputs[1].astype(gy.dtype, copy=False)
        return layer_norm_backward(inputs[0], gamma, gy, self._statistics)

    def _composed(self, x, *parameters):
        gamma, beta = (functions.cast(parameter, x.dtype) for parameter in parameters)
        return functions.layer_normalization(x, gamma, beta, self._eps)


def layer_norm(x, gamma, beta, eps):
    """Compute ``y[i, c] = gamma[c] (x[i, c] - mean_i) / sqrt(variance_i + eps) + beta[c]``."""
    if x.ndim != 2:
        raise ValueError('x: expected shape (n_rows, n_B), got %s' % (x.shape,))
    check.floating('x', x)
    width = (x.shape[-1],)
    check.shapes('x of shape %s' % (x.shape,), {'gamma': (gamma, width), 'beta': (beta, width)})
    return LayerNorm(eps).apply((x, gamma, beta))[0]
