"""Softmax over the entries of rows, or over the rows of graphs: values, gradients, extremes."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO
from chainer_bspmm.functions import node_softmax, segment_softmax
from chainer_bspmm.ops import segment_softmax as module
from chainer_bspmm.ops.segment_softmax import segment_softmax_backward, segment_softmax_forward
from tests.emulation.kernel_cases import CHANNELS_OF_DTYPES, offsets_of, share_channels, weighted
from tests.support import assert_close, batch_on, BATCHES, DTYPES, features, reference
from tests.support.cases import pairs
from tests.support.gradients import check_gradients
from tests.support.weights import assert_counts_copies, SPARE_ROWS, WEIGHTED, weighted_on

# Relative error of an element: one rounding to its dtype, and a few in the calculation.
BOUND = {'e': 2**-10, 'f': 2**-20, 'd': 2**-48}


# --- values and gradients of arrays ---


def check_gradient(place, y, gy, offsets, *weights):
    gx = cuda.to_cpu(segment_softmax_backward(*map(place.put, (y, gy, offsets, *weights))))
    assert gx.dtype == y.dtype
    expected = reference.segment_softmax_grad(y, gy, offsets, *weights)
    bound = BOUND[y.dtype.char]
    numpy.testing.assert_allclose(gx, expected, rtol=bound, atol=6 * bound)
    # Rows that belong to no segment, or have weight 0, get no gradient.
    assert not gx[offsets[-1] :].any() and not any(gx[w == 0].any() for w in weights)


def check(place, dtype, n_channels, sizes, spare=0):
    rng = numpy.random.RandomState(0)
    offsets, n_rows = offsets_of(sizes), sum(sizes)
    x, gy = (rng.uniform(-3, 3, (n_rows + spare, n_channels)).astype(dtype) for _ in range(2))
    y = cuda.to_cpu(segment_softmax_forward(place.put(x), place.put(offsets)))
    assert y.dtype == dtype and y.shape == x.shape
    expected = reference.segment_softmax(x[:n_rows], offsets)
    numpy.testing.assert_allclose(y[:n_rows], expected, rtol=BOUND[dtype])
    assert not y[n_rows:].any()
    check_gradient(place, y, gy, offsets)


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels):
    check(place, dtype, n_channels, (0, 3, 0, 0, 24, 1, 5, 0) if n_channels <= 64 else (0, 3, 1))


@pytest.mark.parametrize(
    'sizes, spare',
    [
        ((1,), 0),
        ((5,), 0),
        ((1,) * 200, 0),
        ((0, 0, 0, 2), 0),
        ((2, 0, 0, 0), 0),
        ((3, 2), 4),
        ((0, 0), 4),
        ((), 4),
        ((2,), 300),
        ((300,), 0),
    ],
    ids=str,
)
def test_segments_with_spare_rows(place, sizes, spare):
    check(place, 'f', 3, sizes, spare)


def test_blocks_that_stride_over_the_channels(gpu, monkeypatch):
    share_channels(monkeypatch, module, 'softmax_launch')
    check(gpu, 'f', 33 * 4 * 3, (2, 0, 3))


@pytest.mark.parametrize(
    'dtype, n_channels, sizes',
    pairs('efd', [1, 2, 4, 24], [(0, 3, 24, 1, 0, 9), (2, 0, 5), (1, 1, 0, 300)]),
    ids=str,
)
def test_weights(place, dtype, n_channels, sizes):
    rng = numpy.random.RandomState(0)
    offsets = offsets_of(sizes)
    poison, weights = weighted(offsets, n_channels, dtype, spare=9)
    weights[1] = 2**24 - 1
    uncounted = weights == 0
    x, gy = (rng.uniform(-3, 3, poison.shape).astype(dtype) for _ in range(2))
    x[uncounted], gy[uncounted] = poison[uncounted], poison[uncounted]
    y = cuda.to_cpu(segment_softmax_forward(*map(place.put, (x, offsets, weights))))
    assert y.dtype == dtype and not y[uncounted].any()
    expected = reference.segment_softmax(x, offsets, weights)
    last_place = float(numpy.finfo(dtype).smallest_subnormal)  # y, if weights are large
    numpy.testing.assert_allclose(y, expected, rtol=BOUND[dtype], atol=last_place)
    check_gradient(place, y, gy, offsets, weights)


@pytest.mark.parametrize('is_weighted', [False, True])
@pytest.mark.parametrize('dtype', ['e', 'f'])
def test_arithmetic_is_double(place, dtype, is_weighted):
    """Narrower dtypes are summed in double precision, which gradients show that nearly cancel."""
    rng = numpy.random.RandomState(0)
    offsets = numpy.array([0, 300], 'i')
    a = (rng.uniform(0.5, 1.5, (300, 4)) / 300).astype(dtype)
    g = (1000 + rng.uniform(-1, 1, (300, 4))).astype(dtype)
    weights = [rng.randint(1, 9, 300).astype('f')] if is_weighted else []
    more = [place.put(offsets), *map(place.put, weights)]
    gx = segment_softmax_backward(place.put(a), place.put(g), *more)
    expected = reference.segment_softmax_grad(a, g, offsets, *weights).astype(dtype)
    numpy.testing.assert_array_equal(cuda.to_cpu(gx), expected)
    y = segment_softmax_forward(place.put(g), *more)
    expected = reference.segment_softmax(g, offsets, *weights).astype(dtype)
    numpy.testing.assert_array_equal(cuda.to_cpu(y), expected)


@pytest.mark.parametrize('dtype', DTYPES)
def test_huge_values(place, dtype):
    """There is no overflow, and the differences of large values are not lost."""
    largest = numpy.finfo(dtype).max
    x = numpy.array([largest, -largest, 1024, 1025, -1024, -1025, largest], dtype)
    e = numpy.exp(1)
    expected = numpy.array([1, 0, 1 / (1 + e), e / (1 + e), e / (1 + e), 1 / (1 + e), 1])
    y = segment_softmax_forward(place.put(x[:, None]), place.put(offsets_of((2, 0, 2, 2, 1))))
    assert_close(y[:, 0], expected, dtype)


def test_what_is_not_finite_stays_in_its_segment(place):
    nan, inf, largest = numpy.nan, numpy.inf, numpy.finfo('f').max
    segments = [
        ([[nan, 1], [1, 1]], [[nan, 0.5], [nan, 0.5]]),
        ([[inf, 1], [1, 1]], [[nan, 0.5], [nan, 0.5]]),
        ([[-inf, -inf], [-inf, 1]], [[nan, 0], [nan, 1]]),
        ([[largest, nan], [-largest, 1]], [[1, nan], [0, nan]]),
        ([[5, -largest], [5, 0]], [[0.5, 0], [0.5, 1]]),
    ]
    x, expected = (numpy.array(rows, 'f').reshape(-1, 2) for rows in zip(*segments))
    y = segment_softmax_forward(place.put(x), place.put(offsets_of([2] * len(segments))))
    numpy.testing.assert_array_equal(cuda.to_cpu(y), expected)


@pytest.mark.parametrize('n_rows, n_channels, n_segments', [(0, 3, 2), (3, 0, 1), (0, 2, 0)])
def test_empty_result_launches_nothing(place, n_rows, n_channels, n_segments):
    x = place.put(numpy.zeros((n_rows, n_channels), 'f'))
    offsets = place.put(numpy.linspace(0, n_rows, n_segments + 1).astype(numpy.int32))
    assert segment_softmax_forward(x, offsets).shape == (n_rows, n_channels)
    assert not place.launched


# --- softmax over the entries of rows ---


@pytest.mark.parametrize('name', ['empty graphs first, between, last', 'many', 'rectangular'])
def test_values(xp, name):
    adj = batch_on(name, xp, 'float32')
    x = features(numpy.random.RandomState(0), xp, 3, adj.nnz, 'float32').T * 4  # not contiguous
    y = segment_softmax(adj, x).array
    assert_close(y, reference.segment_softmax(x, adj.indptr), 'float32')
    assert (segment_softmax(adj, x[:, 0]).array == y[:, 0]).all()


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


ADJ = BATCHES['one graph']
X = numpy.ones(ADJ.nnz, 'f')


@pytest.mark.parametrize(
    'adj, x, error, message',
    [
        (ADJ, X[:4, None], ValueError, r'x: expected shape \(\d+,\) or \(\d+, n_B\).* \(4, 1\)'),
        (ADJ, X[:, None, None], ValueError, r'x: expected shape .* got \(\d+, 1, 1\)'),
        (ADJ, X.astype('i'), TypeError, 'x: expected float16, .* got int32'),
        (ADJ, X.tolist(), TypeError, 'x: expected a NumPy or CuPy array, got list'),
        (
            BatchedCOO.from_csr(ADJ),
            X,
            TypeError,
            r'adj: expected a BatchedCSR, got BatchedCOO of shape \(5, 5\); .* takes adj itself',
        ),
        (
            numpy.ones((2, 2)),
            X,
            TypeError,
            r'adj: expected a BatchedCSR, got ndarray of shape \(2, 2\); .* with '
            'BatchedCSR.from_dense',
        ),
    ],
)
def test_bad_input(adj, x, error, message):
    with pytest.raises(error, match=message):
        segment_softmax(adj, x)


# --- softmax over the rows of graphs ---


every_size = pytest.mark.parametrize(
    'name', ['huge among tiny', 'empty graphs first, between, last', 'padded']
)


@every_size
def test_values_of_nodes(xp, name):
    adj = batch_on(name, xp, 'float64')
    x = features(numpy.random.RandomState(1), xp, adj.n_rows, 2, 'float64')
    y = node_softmax(adj, x).array
    assert_close(y, reference.segment_softmax(x, adj.row_offsets), 'float64')


@every_size
def test_gradients_of_nodes(xp, name):
    adj = batch_on(name, xp, 'float64')
    x = features(numpy.random.RandomState(1), xp, adj.n_rows, 2, 'float64')
    check_gradients(lambda x: node_softmax(adj, x), x)


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
@pytest.mark.parametrize('name', WEIGHTED)
def test_gradients_are_sums_over_copies(xp, name, n_spare):
    adj = weighted_on(name, xp, 'float64', n_spare)
    x = features(numpy.random.RandomState(1), xp, adj.n_rows, 3, 'float64')
    assert_counts_copies(node_softmax, adj, x)


def test_values_that_underflow_count_in_higher_derivatives(xp):
    """Some y are 0 although their rows count; Chainer's softmax has the right derivatives."""
    adj = batch_on('one graph', xp, 'float32')
    x = xp.array([[0], [-200], [1], [-300], [-1e4]], 'f')
    results = []
    gy = chainer.Variable(xp.arange(5, dtype='f')[:, None])
    for function in (
        lambda x: node_softmax(adj, x),
        lambda x: chainer.functions.softmax(x, axis=0),
    ):
        variable = chainer.Variable(x)
        y = function(variable)
        (gx,) = chainer.grad([y], [variable], [gy], enable_double_backprop=True)
        (ggx,) = chainer.grad([chainer.functions.sum(gx**2)], [variable])
        results.append([y.array, gx.array, ggx.array])
    for actual, expected in zip(*results):
        numpy.testing.assert_allclose(cuda.to_cpu(actual), cuda.to_cpu(expected), 1e-6, 1e-7)


@pytest.mark.parametrize('weight', [1, 0, 100])
def test_large_gradients_in_float16(weight):
    """The gradient of the last row is the sum over its copies, and may be smaller than others."""
    adj = batch_on('huge among tiny', numpy, 'float16')
    weights = numpy.ones(adj.n_rows, 'f')
    weights[2] = weight  # a graph of one row
    weights[302] = weight  # the last row of a graph of 300
    adj = adj.replace(row_weights=weights)
    gy = numpy.full((adj.n_rows, 1), 5e4, 'e')
    x = chainer.Variable(numpy.zeros(gy.shape, 'e'))
    y = node_softmax(adj, x)
    y.grad = gy
    y.backward()
    n = 299 + weight
    total = 5e4 * (299 + (weight > 0))
    expected = numpy.zeros(gy.shape)
    expected[3:303] = (5e4 - weights[3:303, None] * total / n) / n
    expected[weights == 0] = 0
    assert numpy.isfinite(x.grad).all()
    numpy.testing.assert_allclose(x.grad, expected, 2e-3, 2e-1)


def test_shapes_that_do_not_fit():
    adj = BATCHES['many']
    message = r'x: expected shape \(%d, n_B\), .* got \(3, 2\)' % adj.n_rows
    with pytest.raises(ValueError, match=message):
        node_softmax(adj, numpy.zeros((3, 2)))


def test_matrix_that_is_no_batch():
    with pytest.raises(
        TypeError,
        match='adj: expected a BatchedCSR, got ndarray of shape .* with BatchedCSR.from_dense',
    ):
        node_softmax(numpy.zeros((3, 3)), numpy.zeros((3, 2)))
