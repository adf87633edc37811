"""Rows with weights, and batches in which these rows are repeated."""

import numpy

import chainer
from chainer import functions
from chainer.backends import cuda

from tests.support import BATCHES
from tests.support.spare import with_spare

# Batches of tests.support that get weights, and numbers of spare rows.
WEIGHTED = ['one graph', 'empty graphs first, between, last', 'huge among tiny', 'many']
SPARE_ROWS = [0, 3]


def weighted_on(name, xp, dtype, n_spare):
    """Return one of BATCHES with rows of weight 0 to 7, and of weight 0 in its last graph."""
    adj = BATCHES[name].astype(dtype)
    weights = numpy.random.RandomState(3).choice([0, 1, 1, 2, 7], adj.n_rows).astype('f')
    if adj.n_graphs > 1:
        last = int(numpy.flatnonzero(numpy.diff(adj.row_offsets))[-1])
        weights[adj.row_offsets[last] : adj.row_offsets[last + 1]] = 0
    adj = adj.replace(row_weights=weights)
    if n_spare:
        return with_spare(adj, n_spare, 0, xp)
    return adj if xp is numpy else adj.to_device('@cupy:%d' % xp.cuda.Device().id)


def copies_of(weights, offsets):
    """Return the index of each row as often as it counts (n_copies,), and offsets of segments."""
    counts = cuda.to_cpu(weights).astype(int)
    starts = numpy.append(0, numpy.cumsum(counts))[cuda.to_cpu(offsets)]
    return numpy.repeat(numpy.arange(counts.size), counts), starts.astype('i')


def sum_of_copies(values, rows, n_rows):
    """Return float64 sums over the copies of each row, on the host."""
    sums = numpy.zeros((n_rows,) + values.shape[1:])
    numpy.add.at(sums, rows, values)
    return sums


def poison(x, weights):
    """Write NaN and infinity to the rows of weight 0; return x."""
    x[weights == 0] = numpy.nan
    x[::2][weights[::2] == 0] = numpy.inf
    return x


def repeated(adj):
    """Return a batch without weights in which each row is repeated, and the repeated rows.

    The batch has no entries.
    """
    rows, starts = copies_of(adj.row_weights, adj.row_offsets)
    xp, n_rows = adj.xp, rows.size
    plain = adj.replace(
        indptr=xp.zeros(n_rows + 1, 'i'),
        indices=xp.zeros(0, 'i'),
        data=None,
        row_offsets=xp.asarray(starts),
        n_rows=n_rows,
        nnz=0,
        max_rows=int(numpy.diff(starts).max()),
        row_weights=None,
        has_spare=False,
    )
    return plain, rows


def assert_counts_copies(function, adj, x):
    """Compare a function of (adj, x) for rows with weights with that for repeated rows.

    The output, the gradient, the gradient that can be differentiated again, and the gradient of
    that are compared. The gradient with respect to a row is the sum over its copies. The function
    need not be linear. Rows of weight 0 hold NaN or infinity, and have gradients of 0.
    """
    plain, rows = repeated(adj)
    rows, results = adj.xp.asarray(rows), []
    x = chainer.Variable(poison(x, adj.row_weights))
    for y in (function(adj, x), function(plain, x[rows])):
        if len(y) == adj.n_rows and not results:
            y = y[rows]
        gy = chainer.Variable(adj.xp.cos(adj.xp.arange(y.size, dtype='d')).reshape(y.shape))
        (once,) = chainer.grad([y], [x], [gy])
        (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
        (ggx,) = chainer.grad([functions.sum(gx * gx * gx)], [x])
        results.append([cuda.to_cpu(variable.array) for variable in (y, once, gx, ggx)])
    for actual, expected in zip(*results, strict=True):
        numpy.testing.assert_allclose(actual, expected, 1e-10, 1e-12)
