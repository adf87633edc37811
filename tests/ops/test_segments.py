"""Segmented sum, maximum and broadcast."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.functions import segment_broadcast
from chainer_bspmm.functions import segment_max
from chainer_bspmm.functions import segment_sum
from chainer_bspmm.ops import segments
from chainer_bspmm.ops.segments import segment_broadcast_forward
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support import reference
from tests.support import widths_on
from tests.support.gradients import check_gradients
from tests.support.weights import assert_counts_copies
from tests.support.weights import copies_of
from tests.support.weights import poison
from tests.support.weights import SPARE_ROWS
from tests.support.weights import sum_of_copies
from tests.support.weights import WEIGHTED
from tests.support.weights import weighted_on

from chainer_bspmm.ops.segment_softmax import node_softmax


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
def test_values(xp, name, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    offsets = adj.row_offsets
    x = features(rng, xp, adj.n_rows, max(widths_on(xp)), dtype)
    y = features(rng, xp, adj.n_graphs, max(widths_on(xp)), dtype)
    # Columns do not depend on each other.
    sums, maxima = reference.segment_sum(x, offsets), reference.segment_max(x, offsets)
    broadcast = reference.segment_broadcast(y, offsets)
    for n in widths_on(xp):
        rows, top = x[:, :n].copy(), y[:, :n].copy()
        assert_close(segment_sum(adj, rows).array, sums[:, :n], dtype)
        assert_close(segment_max(adj, rows).array, maxima[:, :n], dtype)
        assert_close(segment_broadcast(adj, top).array, broadcast[:, :n], dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('sizes', [(1000,), (3, 700, 0, 300, 2, 256, 257), (20000, 5)], ids=str)
def test_long_segments(xp, sizes, dtype):
    """More rows than one block of a GPU handles; sizes are not known on the host."""
    rng = numpy.random.RandomState(0)
    offsets = xp.asarray(numpy.cumsum((0,) + sizes), numpy.int32)
    n_rows = sum(sizes)
    for n_channels in (1, 3, 24, 64)[: 2 if n_rows > 10000 else None]:
        # Positive values: otherwise a sum could be small compared with the rounding of its terms.
        x = features(rng, xp, n_rows, n_channels, dtype) + 2
        x[-1, 0] = numpy.nan
        y = features(rng, xp, len(sizes), n_channels, dtype)
        for name in ('segment_sum', 'segment_max'):
            calculated = [getattr(segments, name + '_forward')(x, offsets) for _ in range(2)]
            assert_close(calculated[0], getattr(reference, name)(x, offsets), dtype)
            assert calculated[0].tobytes() == calculated[1].tobytes()
        assert_close(
            segment_broadcast_forward(y, offsets, n_rows),
            reference.segment_broadcast(y, offsets),
            dtype,
        )


# --- weights ---


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('n_spare', SPARE_ROWS)
@pytest.mark.parametrize('name', WEIGHTED)
def test_a_row_counts_as_often_as_its_weight(xp, name, n_spare, dtype):
    """Rows of weight 0 hold NaN and infinity; what would be added to them is infinite."""
    rng = numpy.random.RandomState(0)
    adj = weighted_on(name, xp, dtype, n_spare)
    weights, n_rows = adj.row_weights, adj.n_rows
    rows, starts = copies_of(weights, adj.row_offsets)
    x = poison(features(rng, xp, n_rows, max(widths_on(xp)), dtype), weights)
    y = features(rng, xp, adj.n_graphs, max(widths_on(xp)), dtype)
    y[xp.asarray(numpy.diff(starts) == 0)] = numpy.inf
    copies = cuda.to_cpu(x)[rows]
    sums, maxima = reference.segment_sum(copies, starts), reference.segment_max(copies, starts)
    broadcast = sum_of_copies(reference.segment_broadcast(y, starts), rows, n_rows)
    for n in widths_on(xp):
        part, top = x[:, :n].copy(), y[:, :n].copy()
        assert_close(segment_sum(adj, part).array, sums[:, :n], dtype)
        assert_close(segment_max(adj, part).array, maxima[:, :n], dtype)
        actual = segment_broadcast_forward(top, adj.row_offsets, n_rows, adj.max_rows, weights)
        assert_close(actual, broadcast[:, :n], dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'sizes', [(3, 0, 24, 9, 1), (3, 700, 0, 300, 2, 256, 257), (20000, 5)], ids=str
)
def test_long_segments_with_weights(xp, sizes, dtype):
    """Rows that do not count hold NaN: some of every segment, all of the last and of none."""
    rng = numpy.random.RandomState(0)
    offsets = xp.asarray(numpy.cumsum((0,) + sizes), numpy.int32)
    n_rows, spare = sum(sizes), 7
    weights = rng.choice([0, 1, 3], n_rows + spare).astype('f')
    weights[n_rows - sizes[-1] :] = 0
    weights = xp.asarray(weights)
    for n_channels in (1, 3, 24, 64)[: 2 if n_rows > 10000 else None]:
        # Of one sign: otherwise a sum could be small compared with the rounding of its terms.
        x = features(rng, xp, n_rows + spare, n_channels, dtype) - 2
        x[weights == 0] = numpy.nan
        for name in ('segment_sum', 'segment_max'):
            calculated = [
                getattr(segments, name + '_forward')(x, offsets, None, weights) for _ in range(2)
            ]
            assert_close(calculated[0], getattr(reference, name)(x, offsets, weights), dtype)
            assert calculated[0].tobytes() == calculated[1].tobytes()
        y = features(rng, xp, len(sizes), n_channels, dtype)
        expected = reference.segment_broadcast(y, offsets, weights)
        assert_close(
            segment_broadcast_forward(y, offsets, n_rows + spare, None, weights),
            numpy.pad(expected, ((0, spare), (0, 0))),
            dtype,
        )


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
@pytest.mark.parametrize('name', WEIGHTED)
@pytest.mark.parametrize('function', [segment_sum, segment_max])
def test_gradients_are_sums_over_copies(xp, name, n_spare, function):
    adj = weighted_on(name, xp, 'float64', n_spare)
    x = xp.asarray(numpy.random.RandomState(0).permutation(adj.n_rows * 3).reshape(-1, 3) * 0.01)
    assert_counts_copies(lambda adj, x: function(adj, x) ** 2, adj, x)


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
def test_broadcast_does_not_look_at_weights(xp, n_spare):
    """So that a row of a graph is given to a row once, and the gradient has the copies already."""
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


@pytest.mark.parametrize('change', ['shape', 'length', 'dtype'])
def test_bad_weights(xp, change):
    adj = batch_on('one graph', xp, 'float64').replace()
    n = adj.n_rows
    adj.row_weights = {
        'shape': xp.ones((n, 1), 'f'),
        'length': xp.ones(n - 1, 'f'),
        'dtype': xp.ones(n, 'd'),
    }[change]
    x = xp.ones((n, 2))
    for call in (segment_sum, segment_max, node_softmax):
        with pytest.raises(ValueError, match=r'row_weights: expected float32 of shape \(%d,\)' % n):
            call(adj, x)


# --- edges ---


@pytest.mark.parametrize('function', [segment_sum, segment_max, segment_broadcast])
def test_no_channels(xp, function):
    adj = batch_on('many', xp, 'float32')
    n_in, n_out = adj.n_rows, adj.n_graphs
    if function is segment_broadcast:
        n_in, n_out = n_out, n_in
    assert function(adj, xp.empty((n_in, 0), 'f')).shape == (n_out, 0)


def test_nan(xp):
    adj = batch_on('one graph', xp, 'float32')
    for row in range(5):  # first, last and in between
        x = numpy.arange(10, dtype='f').reshape(5, 2)
        x[row, 0] = numpy.nan
        for function in (segment_sum, segment_max):
            y = cuda.to_cpu(function(adj, xp.asarray(x)).array)
            assert numpy.isnan(y[0, 0]) and not numpy.isnan(y[0, 1])


def test_maximum_of_negative_values(xp):
    adj = batch_on('empty graphs first, between, last', xp, 'float32')
    x = -1 - xp.arange(7, dtype='f')[:, None]
    numpy.testing.assert_array_equal(
        cuda.to_cpu(segment_max(adj, x).array)[:, 0], [0, -1, 0, 0, -5, 0]
    )


def test_input_that_is_not_contiguous(xp):
    rng = numpy.random.RandomState(0)
    adj = batch_on('many', xp, 'float32')
    x = features(rng, xp, 5, adj.n_rows, 'float32').T
    y = features(rng, xp, adj.n_graphs, 10, 'float32')[:, ::2]
    offsets = adj.row_offsets
    assert_close(segment_sum(adj, x).array, reference.segment_sum(x, offsets), 'float32')
    assert_close(segment_max(adj, x).array, reference.segment_max(x, offsets), 'float32')
    assert_close(
        segment_broadcast(adj, y).array, reference.segment_broadcast(y, offsets), 'float32'
    )


@pytest.mark.parametrize('name', ['empty graphs first, between, last', 'only empty graphs', 'many'])
@pytest.mark.parametrize('function', [segment_sum, segment_max, segment_broadcast])
def test_gradients(xp, name, function):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float64')
    n = adj.n_graphs if function is segment_broadcast else adj.n_rows
    # Distinct values, for a maximum has no derivative where two rows meet; not so large that their
    # squares would drown the differences.
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


@pytest.mark.parametrize(
    'function, x, error, message',
    [
        (
            segment_sum,
            numpy.ones((4, 2), 'f'),
            ValueError,
            r'x: expected shape \(5, n_B\).* \(4, 2\)',
        ),
        (segment_max, numpy.ones(5, 'f'), ValueError, r'x: expected shape \(5, n_B\).* got \(5,\)'),
        (segment_sum, numpy.ones((5, 2), 'i'), TypeError, 'x: expected float16, .* got int32'),
        (segment_broadcast, numpy.ones((5, 2), 'f'), ValueError, r'y: expected shape \(1, n_B\)'),
        (
            segment_broadcast,
            numpy.ones((1, 2), 'i'),
            TypeError,
            'y: expected float16, .* got int32',
        ),
    ],
)
def test_bad_input(function, x, error, message):
    with pytest.raises(error, match=message):
        function(BATCHES['one graph'], x)
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR, got ndarray'):
        function(x, x)
