"""Batch normalisation whose statistics count the rows of a batch by their weights."""

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.ops.link_hooks import expect_no_hooks
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.ops.segments import row_sum


class OneRank:
    """Sums over ranks for `WeightedBatchNorm`, where this process is the only rank.

    A link with statistics over several ranks has an attribute ``bspmm_ranks`` with the same
    methods, from `multi_node.statistics`.
    """

    def sum(self, array):
        """Return the sum of the ranks' arrays."""
        return array

    def sum_of_gradients(self, array):
        """Return the weighted sum of all ranks' gradients, as a part of this rank's gradient."""
        return array

    def refuse_derivatives(self):
        """Raise RuntimeError if there are no higher derivatives."""


ONE_RANK = OneRank()


class WeightedBatchNorm(FusedNode):
    """Batch normalisation of inputs x, gamma, beta, where row i counts ``weights[i]`` times.

    `running`: the running mean and variance, updated in place, or None.
    """

    def __init__(self, weights, eps, decay, running, ranks=ONE_RANK):
        self._weights = weights
        self._eps = eps
        self._decay = decay
        self._running = running
        self._ranks = ranks

    def _output(self, inputs):
        x, gamma, beta = _cast(inputs)
        weights = self._weights.astype(x.dtype, copy=False)[:, None]
        self._count = self._ranks.sum(row_sum(weights))
        y, self._statistics = _forward(
            x,
            gamma,
            beta,
            weights,
            count=self._count,
            eps=self._eps,
            decay=self._decay,
            running=self._running,
            ranks=self._ranks,
        )
        return y.astype(inputs[0].dtype, copy=False)

    def _gradients(self, inputs, gy, indexes):
        x, gamma, _ = _cast(inputs)
        weights = self._weights.astype(x.dtype, copy=False)[:, None]
        gy = gy.astype(x.dtype, copy=False)
        mean, inv_std = self._statistics
        return _gradients(
            x, gy, gamma, weights, count=self._count, mean=mean, inv_std=inv_std, ranks=self._ranks
        )

    def _composed(self, x, gamma, beta):
        self._ranks.refuse_derivatives()
        dtype = _dtype(x, gamma)
        xp = chainer_backend.get_array_module(x)
        weights = self._weights.astype(dtype)[:, None]
        share = weights / xp.maximum(self._count, 1)  # the share of each row in a mean
        zero = xp.zeros((), dtype)

        def mean(values):
            return functions.sum(values * share, axis=0, keepdims=True)

        original = x.dtype
        x, gamma, beta = (functions.cast(variable, dtype) for variable in (x, gamma, beta))
        x = functions.where(weights > 0, x, zero)
        x = x - mean(x)
        y = gamma * (x / functions.sqrt(mean(x * x) + self._eps)) + beta
        return functions.cast(functions.where(weights > 0, y, zero), original)


def _dtype(x, gamma):
    """Return the dtype to calculate in, at least float32: sums of many rows overflow float16."""
    return numpy.result_type(x.dtype, gamma.dtype, numpy.float32)


def _cast(arrays):
    dtype = _dtype(*arrays[:2])
    return [array.astype(dtype, copy=False) for array in arrays]


# A row of weight 0 may hold NaN, so it is left out instead of being multiplied by 0. `count`, (1,),
# is the sum of the weights. On a GPU it stays on the device, because each replay of a captured step
# may change it.


def _spread(rows, counted, n_rows):
    x = numpy.zeros((n_rows, rows.shape[1]), rows.dtype)
    x[counted] = rows
    return x


def _forward(x, gamma, beta, weights, count, eps, decay, running, ranks=ONE_RANK):
    if not launch.on_gpu(x):
        counted = numpy.flatnonzero(weights)
        n_rows = len(x)
        n = max(count, 1)
        x, weights = x.take(counted, axis=0), weights[counted]  # a copy, to be overwritten
        mean = ranks.sum(row_sum(x * weights)) / n
        x -= mean
        squares = x * x
        squares *= weights
        variance = ranks.sum(row_sum(squares)) / n
        inv_std = 1 / numpy.sqrt(variance + x.dtype.type(eps))
        if running is not None:
            for average, value in zip(running, (mean, variance * (n / max(n - 1, 1)))):
                average *= decay
                average += (1 - decay) * value
        x *= inv_std * gamma
        x += beta
        return _spread(x, counted, n_rows), (mean, inv_std)
    total = cuda.elementwise(
        'T x, T weight', 'T term', 'term = weight > (T)0 ? weight * x : (T)0', 'bspmm_norm_terms'
    )(x, weights)
    total = ranks.sum(row_sum(total))
    squares = cuda.elementwise(
        'T x, T weight, T total, T count',
        'T term',
        """
        const T centred = x - total / max(count, (T)1);
        term = weight > (T)0 ? weight * centred * centred : (T)0;""",
        'bspmm_norm_squares',
    )(x, weights, total, count)
    squares = ranks.sum(row_sum(squares))
    mean, inv_std = (cuda.cupy.empty(total.shape, total.dtype) for _ in range(2))
    if running is None:
        running = [cuda.cupy.zeros(mean.shape, mean.dtype) for _ in range(2)]
    cuda.elementwise(
        'T total, T squares, T count, T eps, T decay',
        'T mean, T inv_std, U running_mean, U running_var',
        """
        const T n = max(count, (T)1);
        const T unbiased = n / max(n - (T)1, (T)1);
        const T variance = squares / n;
        mean = total / n;
        inv_std = rsqrt(variance + eps);
        running_mean = (U)((T)running_mean * decay + mean * ((T)1 - decay));
        running_var = (U)((T)running_var * decay + variance * unbiased * ((T)1 - decay));
        """,
        'bspmm_norm_statistics',
    )(total, squares, count, eps, decay, mean, inv_std, *running)
    y = cuda.elementwise(
        'T x, T weight, T mean, T inv_std, T gamma, T beta',
        'T y',
        'y = weight > (T)0 ? gamma * (x - mean) * inv_std + beta : (T)0',
        'bspmm_norm',
    )(x, weights, mean, inv_std, gamma, beta)
    return y, (mean, inv_std)


def _gradients(x, gy, gamma, weights, count, mean, inv_std, ranks=ONE_RANK):
    if not launch.on_gpu(x):
        counted = numpy.flatnonzero(weights)
        x_hat, gy = x.take(counted, axis=0), gy.take(counted, axis=0)  # copies, to be overwritten
        x_hat -= mean
        x_hat *= inv_std
        ggamma = row_sum(gy * x_hat)
        gbeta = row_sum(gy)
        ggammas, gbetas = ranks.sum_of_gradients(numpy.stack([ggamma, gbeta]))
        x_hat *= ggammas
        x_hat += gbetas
        x_hat *= weights[counted] / max(count, 1)
        gy -= x_hat
        gy *= gamma * inv_std
        return _spread(gy, counted, len(x)), ggamma, gbeta
    n_rows, n_channels = x.shape
    # The terms of both sums are in one array, so that one reduction adds up both.
    terms = cuda.cupy.empty((n_rows, 2 * n_channels), x.dtype)
    cuda.elementwise(
        'T x, T gy, T weight, T mean, T inv_std',
        'T of_gamma, T of_beta',
        """
        of_beta = weight > (T)0 ? gy : (T)0;
        of_gamma = weight > (T)0 ? gy * (x - mean) * inv_std : (T)0;""",
        'bspmm_norm_gradient_terms',
    )(x, gy, weights, mean, inv_std, terms[:, :n_channels], terms[:, n_channels:])
    sums = row_sum(terms)
    ggamma, gbeta = sums.reshape(2, n_channels)
    ggammas, gbetas = ranks.sum_of_gradients(sums).reshape(2, n_channels)
    gx = cuda.elementwise(
        'T x, T gy, T gamma, T weight, T count, T mean, T inv_std, T ggamma, T gbeta',
        'T gx',
        """
        const T x_hat = (x - mean) * inv_std;
        gx = weight > (T)0 ? gamma * inv_std * (
            gy - weight * (x_hat * ggamma + gbeta) / max(count, (T)1)) : (T)0;""",
        'bspmm_norm_gradient',
    )(x, gy, gamma, weights, count, mean, inv_std, ggammas, gbetas)
    return gx, ggamma, gbeta


def normalise(link, h, weights, decay, ranks):
    """Normalise h, (n, c), as the link does in training, but with weights of rows."""
    gamma, beta = getattr(link, 'gamma', None), getattr(link, 'beta', None)
    with chainer.using_device(link.device):  # gamma and beta that the link lacks are 1 and 0
        if gamma is None:
            gamma = link.xp.ones(link.avg_mean.shape, link._highprec_dtype)
        if beta is None:
            beta = link.xp.zeros(link.avg_mean.shape, link._highprec_dtype)
    parts = gamma, beta, link.avg_mean, link.avg_var
    gamma, beta, *running = (part.reshape(h.shape[1]) for part in parts)
    if chainer.config.in_recomputing:
        running = None
    node = WeightedBatchNorm(weights, link.eps, decay, running, ranks)
    return node.apply((h, gamma, beta))[0]


def batch_norm(adj, link, h):
    """Normalise node features, (n_rows, n_channels), over the rows of a batch, as ``link`` does.

    In training, mean, variance and running averages count every row ``adj.row_weights`` times,
    spare rows not at all. Rows that are ignored get 0 and no gradient, even if they hold NaN.
    Without weights and spare rows the link itself is called. With them the normalisation is one
    node: an overridden ``__call__`` is not called, and link hooks are refused.

    A link with ``bspmm_ranks``, such as a MultiNodeBatchNormalization of ChainerMN, counts the rows
    of all these ranks' batches in the same way, whereas ChainerMN's own forward pass gives every
    rank the same weight. Its gradients fit the weighted mean over ranks that
    `multi_node.optimizer` takes.
    """
    dense = chainer.links.BatchNormalization
    ranks = getattr(link, 'bspmm_ranks', None)
    if not chainer.config.train and ranks is not None:
        return link(h)
    if not chainer.config.train or (
        ranks is None and adj.row_weights is None and not adj.has_spare
    ):
        # GraphBatchNormalization's own __call__ is skipped: it insists on three dimensions.
        return dense.__call__(link, h)
    expect_no_hooks(link)
    if ranks is None and type(link).forward is not dense.forward:
        raise ValueError(
            'link: expected the forward pass of chainer.links.BatchNormalization, because a form '
            'with weights of rows replaces it here, got %r' % (link,)
        )
    if ranks is None and link.axis not in (None, (0,)):
        raise ValueError('link.axis: expected None or (0,), got %r' % (link.axis,))
    if link.decay is None:
        raise ValueError('link.decay: expected a number, got None')
    if link.avg_mean is None:
        link._initialize_params(h.shape[1:])
    if h.shape != (adj.n_rows,) + link.avg_mean.shape:
        text = 'h: expected shape %s to go with %r and the link, got %s'
        raise ValueError(text % ((adj.n_rows,) + link.avg_mean.shape, adj, h.shape))
    weights = adj.row_weights
    if weights is None:  # every row counts once, and spare rows do not count
        xp = adj.xp
        weights = adj.cached(
            'ones of rows',
            lambda: (xp.arange(adj.n_rows, dtype='i') < adj.row_offsets[-1:]).astype(numpy.float32),
        )
    return normalise(link, h, weights, link.decay, ranks or ONE_RANK)
