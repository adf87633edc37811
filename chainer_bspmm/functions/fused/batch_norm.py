"""Batch normalisation whose statistics leave out the spare rows of a batch of fixed capacity."""

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm.functions.node import FusedNode


class RealRowsBatchNorm(FusedNode):
    """Inputs x, gamma, beta. The host need not know how many rows are real.

    `running`: the arrays of mean and variance that are updated, or None.
    """

    def __init__(self, adj, eps, decay, running):
        self._adj = adj
        self._eps = eps
        self._decay = decay
        self._running = running

    def _output(self, inputs):
        forward = _host_forward if isinstance(inputs[0], numpy.ndarray) else _device_forward
        y, self._statistics = forward(
            self._adj, *_cast(inputs), self._eps, self._decay, self._running
        )
        return y.astype(inputs[0].dtype, copy=False)

    def _gradients(self, inputs, gy, wanted):
        x, gamma, _ = _cast(inputs)
        gradients = _host_gradients if isinstance(x, numpy.ndarray) else _device_gradients
        return gradients(self._adj, x, gy.astype(x.dtype, copy=False), gamma, *self._statistics)

    def _composed(self, x, gamma, beta):
        dtype = _dtype(x, gamma)
        xp, n_true = chainer_backend.get_array_module(x), self._adj.row_offsets[-1:]
        is_real = xp.arange(len(x))[:, None] < n_true
        share = is_real / xp.maximum(n_true, 1).astype(dtype)  # of a row in a mean
        zero = xp.zeros((), dtype)

        def mean(values):
            return functions.sum(values * share.astype(dtype, copy=False), axis=0, keepdims=True)

        original = x.dtype
        x, gamma, beta = (functions.cast(variable, dtype) for variable in (x, gamma, beta))
        x = functions.where(is_real, x, zero)
        x = x - mean(x)
        y = gamma * (x / functions.sqrt(mean(x * x) + self._eps)) + beta
        return functions.cast(functions.where(is_real, y, zero), original)


def _dtype(x, gamma):
    """Return what to calculate in: sums of many rows overflow float16."""
    return numpy.promote_types(numpy.promote_types(x.dtype, gamma.dtype), numpy.float32)


def _cast(arrays):
    dtype = _dtype(*arrays[:2])
    return [array.astype(dtype, copy=False) for array in arrays]


def _host_forward(adj, x, gamma, beta, eps, decay, running):
    n = int(adj.row_offsets[-1])
    real = x[:n]
    mean = backend.row_sum(real) / max(n, 1)
    centred = real - mean
    variance = backend.row_sum(centred * centred) / max(n, 1)
    inv_std = 1 / numpy.sqrt(variance + x.dtype.type(eps))
    if running is not None:
        for average, value in zip(running, (mean, variance * (n / max(n - 1, 1)))):
            average *= decay
            average += (1 - decay) * value
    y = numpy.zeros_like(x)
    y[:n] = centred * inv_std * gamma + beta
    return y, (mean, inv_std)


def _host_gradients(adj, x, gy, gamma, mean, inv_std):
    n = int(adj.row_offsets[-1])
    x_hat, real = (x[:n] - mean) * inv_std, gy[:n]
    ggamma, gbeta = backend.row_sum(real * x_hat), backend.row_sum(real)
    gx = numpy.zeros_like(x)
    gx[:n] = gamma * inv_std * (real - (x_hat * ggamma + gbeta) / max(n, 1))
    return gx, ggamma, gbeta


# On a device every kernel reads the number of real rows there: it may change with each replay of a
# captured graph. Sums over graphs leave out the rows that belong to none.


def _real_sum(adj, x):
    return backend.row_sum(backend.segment_sum(x, adj.row_offsets, adj.max_rows))


def _device_forward(adj, x, gamma, beta, eps, decay, running):
    n_true, total = adj.row_offsets[-1:], _real_sum(adj, x)
    squares = cuda.elementwise(
        'T x, T total, raw int32 n_true',
        'T square',
        """
        const T centred = x - total / (T)max(n_true[0], 1);
        square = centred * centred;""",
        'bspmm_norm_squares',
    )(x, total, n_true)
    mean, inv_std = (cuda.cupy.empty(total.shape, total.dtype) for _ in range(2))
    if running is None:
        running = [cuda.cupy.zeros(mean.shape, mean.dtype) for _ in range(2)]
    cuda.elementwise(
        'T total, T squares, raw int32 n_true, T eps, T decay',
        'T mean, T inv_std, U running_mean, U running_var',
        """
        const T n = (T)max(n_true[0], 1);
        const T unbiased = n / (T)max(n_true[0] - 1, 1);
        const T variance = squares / n;
        mean = total / n;
        inv_std = rsqrt(variance + eps);
        running_mean = (U)((T)running_mean * decay + mean * ((T)1 - decay));
        running_var = (U)((T)running_var * decay + variance * unbiased * ((T)1 - decay));
        """,
        'bspmm_norm_statistics',
    )(total, _real_sum(adj, squares), n_true, eps, decay, mean, inv_std, *running)
    y = cuda.elementwise(
        'T x, T mean, T inv_std, T gamma, T beta, raw int32 n_true, int32 n_channels',
        'T y',
        """
        y = i / n_channels < n_true[0] ? gamma * (x - mean) * inv_std + beta : (T)0;""",
        'bspmm_norm',
    )(x, mean, inv_std, gamma, beta, n_true, x.shape[1])
    return y, (mean, inv_std)


def _device_gradients(adj, x, gy, gamma, mean, inv_std):
    n_rows, n_channels = x.shape
    terms = cuda.cupy.empty((n_rows, 2 * n_channels), x.dtype)  # one array: one sum does both
    cuda.elementwise(
        'T x, T gy, T mean, T inv_std',
        'T of_gamma, T of_beta',
        'of_gamma = gy * (x - mean) * inv_std; of_beta = gy;',
        'bspmm_norm_terms',
    )(x, gy, mean, inv_std, terms[:, :n_channels], terms[:, n_channels:])
    sums = _real_sum(adj, terms)
    ggamma, gbeta = sums[:n_channels], sums[n_channels:]
    gx = cuda.elementwise(
        'T x, T gy, T gamma, T mean, T inv_std, T ggamma, T gbeta, raw int32 n_true, '
        'int32 n_channels',
        'T gx',
        """
        const T x_hat = (x - mean) * inv_std;
        gx = i / n_channels < n_true[0] ? gamma * inv_std * (
            gy - (x_hat * ggamma + gbeta) / (T)max(n_true[0], 1)) : (T)0;""",
        'bspmm_norm_gradient',
    )(x, gy, gamma, mean, inv_std, ggamma, gbeta, adj.row_offsets[-1:], n_channels)
    return gx, ggamma, gbeta


def batch_norm(adj, link, h):
    """Normalise node features over the rows of a batch, as ``link`` itself does.

    In training, and where the batch has spare rows (``adj.has_spare``), mean and variance are those
    of the rows that belong to a graph, and so are the running averages; ``y[i, c] = gamma[c]
    (h[i, c] - mean[c]) / sqrt(variance[c] + eps) + beta[c]`` for these rows. Spare ones get 0 and
    no gradient, even if they hold NaN. Everything else is left to the link.

    Args:
        adj (BatchedCSR): the batch, n_rows rows.
        link (chainer.links.BatchNormalization): or of a subclass, whose ``__call__`` is bypassed.
        h (Variable or array): (n_rows, n_channels) floats.

    Returns:
        Variable: (n_rows, n_channels), of h's dtype. Differentiable to any order.

    Raises:
        ValueError: with spare rows: shapes do not fit, the link normalises over another axis than
            that of the rows, has no decay, or overrides the forward pass.

    Note:
        With spare rows: one node, deterministic, does not synchronise, and may be captured in a
        CUDA graph; float16 is calculated in float32; link hooks are not called; a batch without
        any row leaves mean and variance at 0.

    Source:
        Ioffe, Szegedy 2015 (arXiv:1502.03167); Chainer 7.8.1,
        functions/normalization/batch_normalization.py.
    """
    dense = chainer.links.BatchNormalization
    if not (chainer.config.train and getattr(adj, 'has_spare', False)):
        # Past GraphBatchNormalization's own __call__, which insists on three dimensions.
        return dense.__call__(link, h)
    if type(link).forward is not dense.forward:
        raise ValueError(
            'link: expected the forward pass of chainer.links.BatchNormalization, '
            'which does not know spare rows and is replaced, got %r' % (link,)
        )
    if link.axis not in (None, (0,)):
        raise ValueError('link.axis: expected None or (0,), got %r' % (link.axis,))
    if link.decay is None:
        raise ValueError('link.decay: expected a number, got None')
    if link.avg_mean is None:
        link._initialize_params(h.shape[1:])
    if h.shape != (adj.n_rows,) + link.avg_mean.shape:
        raise ValueError(
            'h: expected shape %s to go with %r and the link, got %s'
            % ((adj.n_rows,) + link.avg_mean.shape, adj, h.shape)
        )
    gamma = link._get_gamma()[0] if link.gamma is None else link.gamma
    beta = link._get_beta()[0] if link.beta is None else link.beta
    running = None if chainer.config.in_recomputing else (link.avg_mean, link.avg_var)
    return RealRowsBatchNorm(adj, link.eps, link.decay, running).apply((h, gamma, beta))[0]
