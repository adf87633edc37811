"""Functions of a folded batch against the same on the padded batch that it stands for."""

import numpy

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from tests.support import random_matrix


def check_against_padded(function, xp, n_relations, n_channels):
    """Compare values, gradients and second gradients in float64.

    The function is of a batch and features; equal rows have equal results.
    """
    rng = numpy.random.RandomState(0)
    matrices = [random_matrix(rng, n, n_relations, density=0.4) for n in (4, 0, 1, 6, 3)]
    folded, padded = (BatchedCSR.from_matrices(matrices, layout) for layout in ('folded', 'padded'))
    n = padded.max_rows
    # The row of the folded batch that a row of the padded one is a copy of.
    ends = zip(folded.row_offsets, folded.row_offsets[1:])
    rows = [numpy.minimum(numpy.arange(a, a + n), b - 1) for a, b in ends]
    copied = xp.asarray(numpy.concatenate(rows))
    if xp is not numpy:
        folded, padded = folded.to_device('@cupy:0'), padded.to_device('@cupy:0')
    x = xp.asarray(rng.uniform(-1, 1, (folded.n_rows, n_channels)))
    results, gy = [], None
    for is_folded in (True, False):
        h = chainer.Variable(x)
        y = function(folded, h)[copied] if is_folded else function(padded, h[copied])
        if gy is None:
            gy = xp.asarray(rng.uniform(-1, 1, y.shape))
        (single,) = chainer.grad([y], [h], [chainer.Variable(gy)])
        (first,) = chainer.grad([y], [h], [chainer.Variable(gy)], enable_double_backprop=True)
        (second,) = chainer.grad([functions.sum(first * first)], [h])
        results.append([cuda.to_cpu(v.array) for v in (y, single, first, second)])
    for actual, expected in zip(*results):
        assert abs(expected).max() > 1e-3
        numpy.testing.assert_allclose(actual, expected, 1e-10, 1e-10)
