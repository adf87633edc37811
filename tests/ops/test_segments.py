"""Segment sum, maximum and broadcast, and the sum of all rows."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.functions import segment_broadcast, segment_max, segment_sum
from chainer_bspmm.ops import segments
from chainer_bspmm.ops.segment_softmax import node_softmax
from chainer_bspmm.ops.segments import row_sum, segment_broadcast_forward, segment_max_forward
from chainer_bspmm.ops.segments import segment_sum_forward
from tests.emulation.kernel_cases import (
    CHANNELS_OF_DTYPES,
    integers,
    offsets_of,
    share_channels,
    TERM,
    weighted,
)
from tests.support import (
    assert_close,
    assert_exact,
    batch_on,
    BATCHES,
    DTYPES,
    features,
    reference,
    relative_error,
)
from tests.support.cases import pairs
from tests.support.gradients import check_gradients
from tests.support.weights import assert_counts_copies, SPARE_ROWS, WEIGHTED, weighted_on


# Sizes of segments: 0 first, in between and last; 1; a huge one among tiny ones; one more than the
# number of rows that the kernel loads ahead, that number, and one less.
SIZES = (0, 1, 24, 0, 0, 2, 9, 8, 7, 1, 0)
# Segments with more and with fewer rows than a chunk of 4. They begin and end within a chunk, at
# its border and one row beside it, and two meet within a chunk.
LONG = (5,), (4,), (8, 9), (3, 6, 5, 2), (4, 5, 0, 0, 5), (1, 1, 30, 2, 0), (7, 7, 7), (0, 17, 0, 1)
OPERATIONS = ('sum', 'max')


@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr(segments, 'MIN_CHUNK', 4)
    for name in ('reduce_launches', 'broadcast_launch'):
        monkeypatch.setattr(segments, name, getattr(segments, name).__wrapped__)


# --- sums and maxima ---


def check(place, operation, x, sizes, weights=None):
    offsets = offsets_of(sizes)
    weights = None if weights is None else place.put(weights)
    function = getattr(segments, 'segment_%s_forward' % operation)
    y = function(place.put(x), place.put(offsets), None, weights)
    expected = getattr(reference, 'segment_' + operation)(x, offsets, weights)
    assert_exact(y, expected, x.dtype.char)
    return cuda.to_cpu(y)


def check_weighted(place, operation, n_channels, dtype, sizes):
    x, weights = weighted(offsets_of(sizes), n_channels, dtype, spare=5)
    y = check(place, operation, x, sizes, weights)
    assert numpy.isfinite(y).all()
    return y


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels, operation):
    sizes = SIZES if n_channels <= 64 else SIZES[:3]
    check(place, operation, integers((sum(sizes), n_channels), dtype, TERM), sizes)


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('sizes', [(1,), (0,), (0, 0, 5), (40,)], ids=str)
def test_segments(place, sizes, operation):
    check(place, operation, integers((sum(sizes), 3), 'f', TERM), sizes)


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('dtype', 'efd')
def test_nan_wins_wherever_it_stands(place, dtype, operation):
    x = integers((37, 3), dtype, TERM)
    # NaN is the first, a middle, the last, and the only row of a segment.
    x[0, 0] = x[12, 1] = x[23, 2] = x[36, 1] = numpy.nan
    assert numpy.isnan(check(place, operation, x, (24, 9, 3, 1))).sum() == 4


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('dtype', 'efd')
def test_rows_beyond_the_batch_are_not_read(place, dtype, operation):
    x = integers((9, 3), dtype, TERM)
    x[5:] = numpy.nan
    assert not numpy.isnan(check(place, operation, x, (2, 3))).any()


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('sizes', LONG, ids=str)
def test_long_segments(gpu, chunks_of_four, sizes, operation):
    # 8 channels are two vectors, 33 do not fill vectors, and with 1 a block has many units.
    for n_channels in (8, 33, 1):
        check(gpu, operation, -1 - abs(integers((sum(sizes), n_channels), 'f', TERM)), sizes)
    has_long = sum(sizes) > 4
    assert [launched['COMBINE'] for launched in gpu.launched] == [0, 1][: 1 + has_long] * 3


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('dtype', 'efd')
def test_long_segments_in_every_dtype(gpu, chunks_of_four, dtype, operation):
    x = integers((34, 24), dtype, TERM)
    x[29:] = numpy.nan  # rows behind the batch
    x[9, 3] = x[25, 4] = numpy.nan
    assert numpy.isnan(check(gpu, operation, x, (6, 1, 19, 3))).sum() == 2


@pytest.mark.parametrize('is_weighted', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'sizes', [(3, 0, 24, 9, 1), (3, 700, 0, 300, 2, 256, 257), (20000, 5)], ids=str
)
def test_more_rows_than_a_block_reduces(xp, sizes, dtype, is_weighted):
    """Ignored rows hold NaN: some of every segment, all of the last one, and spare rows."""
    rng = numpy.random.RandomState(0)
    offsets = xp.asarray(offsets_of(sizes))
    n_rows = sum(sizes)
    spare = 7
    weights = rng.choice([0, 1, 3], n_rows + spare).astype('f')
    weights[n_rows - sizes[-1] :] = 0
    weights = xp.asarray(weights) if is_weighted else None
    for n_channels in (1, 3, 24, 64)[: 2 if n_rows > 10000 else None]:
        # Values have one sign: otherwise sums could be small compared with the rounding of terms.
        x = features(rng, xp, n_rows + spare, n_channels, dtype) - 2
        x[weights == 0 if is_weighted else slice(n_rows, None)] = numpy.nan
        for operation in OPERATIONS:
            function = getattr(segments, 'segment_%s_forward' % operation)
            calculated = [function(x, offsets, None, weights) for _ in range(2)]
            expected = getattr(reference, 'segment_' + operation)(x, offsets, weights)
            assert_close(calculated[0], expected, dtype)
            assert calculated[0].tobytes() == calculated[1].tobytes()
        y = features(rng, xp, len(sizes), n_channels, dtype)
        expected = reference.segment_broadcast(y, offsets, weights)
        actual = segment_broadcast_forward(y, offsets, n_rows + spare, None, weights)
        assert_close(actual, numpy.pad(expected, ((0, spare), (0, 0))), dtype)


@pytest.mark.parametrize(
    'dtype, n_channels, operation', pairs('efd', [1, 2, 4, 24], OPERATIONS), ids=str
)
def test_weights(place, dtype, n_channels, operation):
    y = check_weighted(place, operation, n_channels, dtype, SIZES)
    assert y.any() and not y[2].any()


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('sizes', [*LONG, (1, 3, 19, 2)], ids=str)
def test_weights_of_long_segments(gpu, chunks_of_four, sizes, operation):
    for n_channels in (8, 1):
        check_weighted(gpu, operation, n_channels, 'f', (*sizes, 0, 0))  # at least three


@pytest.mark.parametrize('dtype', 'efd')
@pytest.mark.parametrize('sizes', [(6, 3), (2, 1)], ids=str)
def test_maximum_of_counted_rows_without_a_finite_value(place, chunks_of_four, dtype, sizes):
    """-inf and NaN are valid values of rows that count; a segment without such rows has 0."""
    x = numpy.full((sum(sizes), 3), -numpy.inf, dtype)
    x[1] = -numpy.inf, 5, numpy.nan
    weights = numpy.zeros(sum(sizes), 'f')
    weights[:2] = 1
    y = check(place, 'max', x, sizes, weights)
    numpy.testing.assert_array_equal(y, [[-numpy.inf, 5, numpy.nan], [0, 0, 0]])


@pytest.mark.parametrize('dtype', 'efd')
def test_weights_are_as_exact_as_float32(place, dtype):
    # 2049 and 2051 are no float16 numbers, and 2**24 - 1 is the largest odd number of float32.
    weights = numpy.array([2**24 - 1, 2**24 - 2, 2051, 2049], 'f')
    x = numpy.array([[1], [-1], [1], [-1]], dtype)
    assert check(place, 'sum', x, (4,), weights) == 3


def test_parts_of_a_long_segment_are_not_rounded_to_float16(place, chunks_of_four):
    # float16 cannot represent 2049, so a part that is rounded to it would lose its 1.
    x = numpy.array([[2048], [0], [0], [1]] * 2 + [[-2048], [0], [0], [0]] * 2, 'e')
    assert check(place, 'sum', x, (16,)) == 2


def test_one_launch_where_no_segment_is_long(gpu, chunks_of_four):
    x = integers((12, 3), 'f', TERM)
    offsets = offsets_of((3, 4, 0, 4, 1))
    y = segment_sum_forward(gpu.put(x), gpu.put(offsets), 4)
    assert_exact(y, reference.segment_sum(x, offsets), 'f')
    assert len(gpu.launched) == 1
    # The bound is a hint; a wrong one only costs time.
    y = segment_max_forward(gpu.put(x), gpu.put(offsets_of((12,))), 1)
    assert_exact(y, reference.segment_max(x, offsets_of((12,))), 'f')


@pytest.mark.parametrize('sizes', [(2, 0, 3), (5, 7)], ids=str)
def test_blocks_that_stride_over_the_channels(gpu, chunks_of_four, monkeypatch, sizes):
    share_channels(monkeypatch, segments, 'reduce_launches')
    check(gpu, 'sum', integers((sum(sizes), 33 * 4 * 3), 'f', TERM), sizes)


# --- broadcast ---


def check_broadcast(place, y, sizes, spare=0, max_rows=None, weights=None):
    offsets = offsets_of(sizes)
    weights = None if weights is None else place.put(weights)
    x = segment_broadcast_forward(
        place.put(y), place.put(offsets), sum(sizes) + spare, max_rows, weights
    )
    expected = reference.segment_broadcast(y, offsets, weights)
    assert_exact(x, numpy.pad(expected, ((0, spare), (0, 0))), y.dtype)


def check_weighted_broadcast(place, dtype, n_channels, sizes, spare):
    _, weights = weighted(offsets_of(sizes), n_channels, dtype, spare)
    y = integers((len(sizes), n_channels), dtype)
    y[2] = numpy.nan  # a segment without rows that count
    y[2, ::2] = numpy.inf
    check_broadcast(place, y, sizes, spare, weights=weights)


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels_of_broadcast(place, dtype, n_channels):
    sizes = (0, 3, 0, 0, 24, 1, 5, 0) if n_channels <= 64 else (0, 3, 1)
    check_broadcast(place, integers((len(sizes), n_channels), dtype, TERM), sizes)


@pytest.mark.parametrize(
    'sizes, spare',
    [
        ((1,), 0),
        ((5,), 0),
        ((1,) * 9, 0),
        ((0, 0, 0, 2), 0),
        ((2, 0, 0, 0), 0),
        ((3, 2), 4),
        ((3, 0), 1),
        ((0, 0), 4),
        ((), 4),
    ],
    ids=str,
)
def test_broadcast_to_rows_beyond_the_batch(place, sizes, spare):
    check_broadcast(place, integers((len(sizes), 3), 'f', TERM), sizes, spare)


@pytest.mark.parametrize('max_rows', [None, 4])
@pytest.mark.parametrize('sizes, spare', list(zip(LONG, (0, 9, 1, 0, 3, 0, 20, 2))), ids=str)
def test_broadcast_to_long_segments(gpu, chunks_of_four, sizes, spare, max_rows):
    for n_channels in (8, 1):
        y = integers((len(sizes), n_channels), 'f', TERM)
        check_broadcast(gpu, y, sizes, spare, max_rows=max_rows)


@pytest.mark.parametrize('n_channels', [1, 2, 4, 24])
@pytest.mark.parametrize('dtype', 'efd')
def test_weights_of_broadcast(place, dtype, n_channels):
    check_weighted_broadcast(place, dtype, n_channels, (0, 3, 24, 1, 0, 9), 5)


@pytest.mark.parametrize('sizes', [sizes for sizes in LONG if len(sizes) > 2], ids=str)
def test_weights_of_broadcast_to_long_segments(gpu, chunks_of_four, sizes):
    for n_channels in (8, 1):
        check_weighted_broadcast(gpu, 'f', n_channels, sizes, 7)


@pytest.mark.parametrize('dtype', 'efd')
def test_weights_of_broadcast_are_as_exact_as_float32(place, dtype):
    weights = numpy.array([2**23 + 1, 2049, 2051], 'f')
    check_broadcast(place, numpy.array([[2**-8]], dtype), (3,), weights=weights)


def test_broadcast_by_blocks_that_stride_over_the_channels(gpu, monkeypatch):
    share_channels(monkeypatch, segments, 'broadcast_launch')
    check_broadcast(gpu, integers((3, 33 * 4 * 3), 'f', TERM), (2, 0, 3))


def test_broadcast_to_fewer_rows_than_the_segments_have():
    """The result must not have more rows than its caller knows of."""
    y = numpy.ones((2, 3), 'f')
    with pytest.raises(ValueError, match='^negative dimensions are not allowed$'):
        segment_broadcast_forward(y, offsets_of((1, 2)), 2)


def test_nan_stays_in_its_segment(place):
    check_broadcast(place, numpy.array([[1, numpy.nan], [2, 3]], 'f'), (1, 2))


# --- sum of all rows: the gradient of a bias ---


@pytest.mark.parametrize(
    'dtype, n_channels, n_rows', pairs('efd', [0, 1, 3, 8], [0, 1, 3, 4, 5, 8, 33]), ids=str
)
def test_sum_of_all_rows(place, chunks_of_four, dtype, n_channels, n_rows):
    x = integers((n_rows, n_channels), dtype, TERM)
    assert_exact(row_sum(place.put(x)), x.astype('d').sum(axis=0), dtype)
    assert len(place.launched) in (0, 1 + (n_rows > 4))


@pytest.mark.parametrize('dtype', DTYPES)
def test_sum_of_many_rows_that_lie_apart(xp, dtype):
    # Values are positive: otherwise a sum could be small compared with the rounding of its terms.
    x = (features(numpy.random.RandomState(0), xp, 3000, 2, dtype) + 2)[::-1, ::-1]
    assert_close(row_sum(x), cuda.to_cpu(x).astype('d').sum(axis=0), dtype)


def test_rounding_over_many_rows():
    x = (numpy.random.RandomState(0).normal(size=(200000, 8)) + 0.3).astype('f')
    truth = x.astype('d').sum(axis=0)
    assert relative_error(row_sum(x), truth) < 1e-6
    assert relative_error(x.sum(axis=0), truth) > 3e-6  # unlike row_sum's


# --- functions of batches ---


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
@pytest.mark.parametrize('name', WEIGHTED)
@pytest.mark.parametrize('function', [segment_sum, segment_max])
def test_gradients_are_sums_over_copies(xp, name, n_spare, function):
    adj = weighted_on(name, xp, 'float64', n_spare)
    x = xp.asarray(numpy.random.RandomState(0).permutation(adj.n_rows * 3).reshape(-1, 3) * 0.01)
    assert_counts_copies(lambda adj, x: function(adj, x) ** 2, adj, x)


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
def test_broadcast_does_not_look_at_weights(xp, n_spare):
    """A row gets its graph's value once, and the gradient of a row already sums over its copies."""
    adj = weighted_on('many', xp, 'float64', n_spare)
    y = chainer.Variable(features(numpy.random.RandomState(0), xp, adj.n_graphs, 3, 'float64'))
    x = segment_broadcast(adj, y)
    n = int(adj.row_offsets[-1])
    offsets = cuda.to_cpu(adj.row_offsets)
    assert_close(x.array[:n], reference.segment_broadcast(y.array, offsets), 'float64')
    assert not x.array[n:].any()
    gx = features(numpy.random.RandomState(1), xp, adj.n_rows, 3, 'float64')
    (gy,) = chainer.grad([x], [y], [chainer.Variable(gx)])
    assert_close(gy.array, reference.segment_sum(gx, offsets), 'float64')


@pytest.mark.parametrize('shape, dtype', [((5, 1), 'f'), (4, 'f'), (5, 'd')])
def test_bad_weights(xp, shape, dtype):
    adj = batch_on('one graph', xp, 'float64').replace()
    n = adj.n_rows
    adj.row_weights = xp.ones(shape, dtype)
    for call in (segment_sum, segment_max, node_softmax):
        with pytest.raises(
            ValueError, match=r'adj.row_weights: expected float32 of shape \(%d,\), .* got .*\)' % n
        ):
            call(adj, xp.ones((n, 2)))


@pytest.mark.parametrize('n_nodes, n_channels', [((2, 1), 0), ((), 3)])
@pytest.mark.parametrize('function', [segment_sum, segment_max, segment_broadcast])
def test_empty_result_launches_nothing(place, function, n_nodes, n_channels):
    indptr = numpy.zeros(sum(n_nodes) + 1, 'i')
    indices = numpy.zeros(0, 'i')
    adj = place.put(BatchedCSR(indptr, indices, offsets_of(n_nodes)))
    n_in, n_out = adj.n_rows, adj.n_graphs
    if function is segment_broadcast:
        n_in, n_out = n_out, n_in
    y = function(adj, place.put(numpy.zeros((n_in, n_channels), 'f')))
    assert y.shape == (n_out, n_channels) and not place.launched


def test_input_that_is_not_contiguous(place):
    adj = place.put(BATCHES['many'].astype('f'))
    x, y = (integers((n, 10), 'f', TERM) for n in (adj.n_rows, adj.n_graphs))
    apart = [place.put(array)[:, ::2] for array in (x, y)]
    x, y, offsets = x[:, ::2], y[:, ::2], adj.row_offsets
    assert_exact(segment_sum(adj, apart[0]).array, reference.segment_sum(x, offsets), 'f')
    assert_exact(segment_max(adj, apart[0]).array, reference.segment_max(x, offsets), 'f')
    broadcast = segment_broadcast(adj, apart[1]).array
    assert_exact(broadcast, reference.segment_broadcast(y, offsets), 'f')


@pytest.mark.parametrize('name', ['empty graphs first, between, last', 'only empty graphs', 'many'])
@pytest.mark.parametrize('function', [segment_sum, segment_max, segment_broadcast])
def test_gradients(xp, name, function):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float64')
    n = adj.n_graphs if function is segment_broadcast else adj.n_rows
    # Values are distinct, because a maximum of equal rows has no derivative, and small, so that the
    # differences are not lost in their squares.
    x = xp.asarray(rng.permutation(n * 3).reshape(n, 3) * 0.01)
    check_gradients(lambda x: function(adj, x) ** 2, x)


def test_gradient_of_a_shared_maximum_is_that_of_chainer(xp):
    adj = batch_on('one graph', xp, 'float32')
    x = chainer.Variable(xp.array([[1.0], [3.0], [3.0], [2.0], [3.0]], 'f'))
    dense = chainer.Variable(x.array[None])
    for y in (segment_max(adj, x), chainer.functions.max(dense, axis=1)):
        y.grad = xp.full(y.shape, 2, 'f')
        y.backward()
    assert (x.grad == dense.grad[0]).all()
    assert (x.grad[:, 0] == xp.array([0, 2, 2, 0, 2])).all()


X = numpy.ones((5, 2), 'f')


@pytest.mark.parametrize(
    'function, x, error, message',
    [
        (segment_sum, X[1:], ValueError, r'x: expected shape \(5, n_B\).* \(4, 2\)'),
        (segment_max, X[:, 0], ValueError, r'x: expected shape \(5, n_B\).* got \(5,\)'),
        (segment_sum, X.astype('i'), TypeError, 'x: expected float16, .* got int32'),
        (
            segment_broadcast,
            X,
            ValueError,
            r'y: expected shape \(1, n_B\), a row for each graph of <BatchedCSR.*>, got '
            r'\(5, 2\)',
        ),
        (segment_broadcast, X[:1].astype('i'), TypeError, 'y: expected float16, .* got int32'),
    ],
)
def test_bad_input(function, x, error, message):
    with pytest.raises(error, match=message):
        function(BATCHES['one graph'], x)


@pytest.mark.parametrize('function', [segment_sum, segment_max, segment_broadcast])
def test_matrix_that_is_no_batch(function):
    with pytest.raises(
        TypeError,
        match=r'adj: expected a BatchedCSR, got ndarray of shape \(5, 2\); .* with '
        'BatchedCSR.from_dense',
    ):
        function(X, X)
