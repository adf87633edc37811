"""segment_softmax: values, exact sums, huge values, gradients against the dense softmax."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO
from chainer_bspmm.functions import segment_softmax
from chainer_bspmm.ops.segment_softmax import segment_softmax_backward
from chainer_bspmm.ops.segment_softmax import segment_softmax_forward
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support import reference
from tests.support import relative_error
from tests.support.gradients import check_gradients

EPSILON = {'float16': 2**-11, 'float32': 2**-24, 'float64': 2**-53}


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
def test_values(xp, name, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    x = features(rng, xp, adj.nnz, 64, dtype) * 4
    expected = reference.segment_softmax(x, adj.indptr)  # columns do not depend on each other
    for n in (1, 2, 3, 33, 64):
        assert_close(segment_softmax(adj, x[:, :n].copy()).array, expected[:, :n], dtype)
    assert (segment_softmax(adj, x[:, 0]).array == segment_softmax(adj, x[:, :1]).array[:, 0]).all()


@pytest.mark.parametrize('dtype', DTYPES)
def test_rows_sum_to_one(xp, dtype):
    adj = batch_on('many', xp, dtype)
    y = cuda.to_cpu(
        segment_softmax(
            adj, 10 * features(numpy.random.RandomState(0), xp, adj.nnz, 3, dtype)
        ).array
    ).astype('d')
    indptr = cuda.to_cpu(adj.indptr)
    used = numpy.diff(indptr) > 0
    assert not used.all()
    sums = reference.segment_sum(y, indptr)
    # Every value is rounded by half a unit of its last place, and they are no more than ten.
    assert abs(sums[used] - 1).max() < 10 * EPSILON[dtype]
    assert (sums[~used] == 0).all()


@pytest.mark.parametrize('dtype', DTYPES)
def test_huge_values(xp, dtype):
    """Nothing overflows, and large values close to each other keep their difference."""
    largest = numpy.finfo(dtype).max
    x = xp.array([largest, -largest, 1024, 1025, -1024, -1025, largest], dtype)
    e = numpy.exp(1)
    expected = numpy.array([1, 0, 1 / (1 + e), e / (1 + e), e / (1 + e), 1 / (1 + e), 1])
    y = segment_softmax_forward(x[:, None], xp.array([0, 2, 2, 4, 6, 7], 'i'))
    assert_close(y[:, 0], expected, dtype)


def test_nan_and_infinity_stay_in_their_row(xp):
    nan, inf = numpy.nan, numpy.inf
    offsets = xp.array([0, 2, 4, 6, 8], 'i')
    x = xp.array([[nan, 1], [1, 1], [inf, 1], [1, 1], [-inf, -inf], [-inf, 1], [0, 0], [0, 0]], 'f')
    y = cuda.to_cpu(segment_softmax_forward(x, offsets))
    numpy.testing.assert_array_equal(
        y,
        numpy.array(
            [
                [nan, 0.5],
                [nan, 0.5],
                [nan, 0.5],
                [nan, 0.5],
                [nan, 0],
                [nan, 1],
                [0.5, 0.5],
                [0.5, 0.5],
            ],
            'f',
        ),
    )


def test_long_segments(xp):
    rng = numpy.random.RandomState(0)
    offsets = xp.array([0, 1000, 1000, 1003], 'i')
    x = features(rng, xp, 1003, 5, 'float32') * 10
    assert_close(
        segment_softmax_forward(x, offsets), reference.segment_softmax(x, offsets), 'float32'
    )


@pytest.mark.parametrize('is_weighted', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
def test_weights_and_rows_of_no_segment(xp, dtype, is_weighted):
    """Rows that do not count hold NaN and get 0."""
    rng = numpy.random.RandomState(0)
    sizes = 3, 0, 24, 1, 1000, 2
    offsets = xp.asarray(numpy.cumsum((0,) + sizes), numpy.int32)
    n_rows, spare = sum(sizes), 300
    weights = rng.choice([0, 1, 50], n_rows + spare).astype('f')
    weights[n_rows - sizes[-1] : n_rows] = 0
    weights = xp.asarray(weights) if is_weighted else None
    for n_channels in (1, 3, 64):
        x = features(rng, xp, n_rows + spare, n_channels, dtype) * 4
        x[n_rows:] = numpy.nan
        if is_weighted:
            x[weights == 0] = numpy.nan
        y = segment_softmax_forward(x, offsets, weights)
        assert_close(y, reference.segment_softmax(x, offsets, weights), dtype)
        gy = features(rng, xp, n_rows + spare, n_channels, dtype)
        gx = segment_softmax_backward(y, gy, offsets, weights)
        assert_close(gx, reference.segment_softmax_grad(y, gy, offsets, weights), dtype)
        assert not gx[n_rows:].any() and not y[n_rows:].any()


def test_input_that_is_not_contiguous(xp):
    adj = batch_on('many', xp, 'float32')
    x = features(numpy.random.RandomState(0), xp, 3, adj.nnz, 'float32').T
    assert_close(segment_softmax(adj, x).array, reference.segment_softmax(x, adj.indptr), 'float32')


@pytest.mark.parametrize('columns', [(), (3,)])
@pytest.mark.parametrize(
    'name',
    [
        'empty graphs first, between, last',
        'no entries',
        'one graph',
        'duplicates, unsorted',
        'rectangular',
    ],
)
def test_gradients(xp, name, columns):
    adj = batch_on(name, xp, 'float64')
    x = xp.asarray(numpy.random.RandomState(0).uniform(-2, 2, (adj.nnz,) + columns))
    check_gradients(lambda x: segment_softmax(adj, x) ** 2, x)


@pytest.mark.parametrize('dtype', DTYPES)
def test_gradient_is_that_of_the_dense_softmax(xp, dtype):
    """Rows of one length: the same values as a dense array."""
    rng = numpy.random.RandomState(0)
    adj = batch_on('dense blocks', xp, dtype)
    n = cuda.to_cpu(adj.row_offsets)
    x = chainer.Variable(features(rng, xp, adj.nnz, 1, dtype))
    gy = features(rng, xp, adj.nnz, 1, dtype)
    y = segment_softmax(adj, x)
    y.grad = gy
    y.backward()
    stop = 0
    for size in numpy.diff(n).tolist():
        start, stop = stop, stop + size * size
        dense = chainer.Variable(cuda.to_cpu(x.array[start:stop]).reshape(size, size).astype('d'))
        z = chainer.functions.softmax(dense, axis=1)
        gz = z.grad = cuda.to_cpu(gy[start:stop]).reshape(size, size).astype('d')
        z.backward()
        bound = 8 * EPSILON[dtype] * 2**0.5  # y has been rounded, then their difference
        assert relative_error(y.array[start:stop, 0], z.array.ravel()) < bound
        # Where a row is one entry the gradient is 0: the bound is against what is subtracted.
        error = cuda.to_cpu(x.grad[start:stop, 0]).astype('d') - dense.grad.ravel()
        assert numpy.linalg.norm(error) < bound * numpy.linalg.norm((z.array * gz).ravel())
    assert stop == adj.nnz


@pytest.mark.parametrize(
    'adj, x, error, message',
    [
        (
            BATCHES['one graph'],
            numpy.ones((4, 2), 'f'),
            ValueError,
            r'x: expected shape \(\d+,\) or \(\d+, n_B\).* \(4, 2\)',
        ),
        (
            BATCHES['one graph'],
            numpy.ones((BATCHES['one graph'].nnz, 1, 1), 'f'),
            ValueError,
            r'x: expected shape .* got \(\d+, 1, 1\)',
        ),
        (
            BATCHES['one graph'],
            numpy.ones(BATCHES['one graph'].nnz, 'i'),
            TypeError,
            'x: expected float16, .* got int32',
        ),
        (
            BatchedCOO.from_csr(BATCHES['one graph']),
            numpy.ones(3, 'f'),
            TypeError,
            'adj: expected a BatchedCSR, got BatchedCOO',
        ),
        (
            numpy.ones((2, 2)),
            numpy.ones(3, 'f'),
            TypeError,
            'adj: expected a BatchedCSR, got ndarray',
        ),
    ],
)
def test_bad_input(adj, x, error, message):
    with pytest.raises(error, match=message):
        segment_softmax(adj, x)
