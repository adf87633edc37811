"""The reference itself, by hand: everything else is compared with it."""

import numpy

from chainer_bspmm import BatchedCSR
from tests.support import reference


# [[2, 0], [3, 5]] and [[7]]
ADJ = BatchedCSR.from_matrices([numpy.array([[2.0, 0.0], [3.0, 5.0]]), numpy.array([[7.0]])])
X = numpy.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], 'f')


def test_bspmm():
    y = reference.bspmm(ADJ, X)
    assert y.dtype == numpy.float64
    numpy.testing.assert_array_equal(y, [[2, 20], [13, 130], [21, 210]])
    numpy.testing.assert_array_equal(
        reference.bspmm(ADJ, X, trans=True), [[8, 80], [10, 100], [21, 210]]
    )
    numpy.testing.assert_array_equal(
        reference.bspmm(ADJ, X, data=numpy.array([1, 0, 1, 2]), residual=X),
        [[2, 20], [4, 40], [9, 90]],
    )


def test_bsddmm():
    # entries (0, 0), (1, 0), (1, 1), (2, 2)
    numpy.testing.assert_array_equal(reference.bsddmm(ADJ, X, X), [101, 202, 404, 909])


def test_segments():
    offsets = numpy.array([0, 2, 2, 3])
    numpy.testing.assert_array_equal(reference.segment_sum(X, offsets), [[3, 30], [0, 0], [3, 30]])
    numpy.testing.assert_array_equal(
        reference.segment_max(-X, offsets), [[-1, -10], [0, 0], [-3, -30]]
    )
    numpy.testing.assert_array_equal(reference.segment_broadcast(X, offsets), X[[0, 0, 2]])


def test_weighted_segments():
    offsets, weights = numpy.array([0, 2, 2, 3, 4]), numpy.array([1, 3, 0, 2, 5], 'f')
    x = numpy.array([[1.0], [2.0], [numpy.nan], [-4.0], [9.0]])
    for name, expected in (('sum', [7, 0, 0, -8]), ('max', [2, 0, 0, -4])):
        y = getattr(reference, 'segment_' + name)(x, offsets, weights)
        numpy.testing.assert_array_equal(y[:, 0], expected)
    y = numpy.array([[7.0], [1.0], [numpy.nan], [4.0]])
    spread = reference.segment_broadcast(y, offsets, weights)
    numpy.testing.assert_array_equal(spread[:, 0], [7, 21, 0, 8])


def test_softmax():
    offsets, weights = numpy.array([0, 2, 2, 3]), numpy.array([1, 3, 0, 2], 'f')
    x = numpy.log([[2.0], [4.0], [8.0], [1.0]])
    y = reference.segment_softmax(x, offsets)
    numpy.testing.assert_allclose(y[:, 0], [1 / 3, 2 / 3, 1, 0])
    y = reference.segment_softmax(x, offsets, weights)
    numpy.testing.assert_allclose(y[:, 0], [1 / 7, 2 / 7, 0, 0])
    gy = numpy.array([[7.0], [14.0], [numpy.nan], [numpy.nan]])  # inner: 1 + 4
    gx = reference.segment_softmax_grad(y, gy, offsets, weights)
    numpy.testing.assert_allclose(gx[:, 0], [2 / 7, -2 / 7, 0, 0], rtol=1e-14)
