"""node_softmax against NumPy, graph by graph, and its gradients to second order."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.functions import node_softmax
from chainer_bspmm.ops.segment_softmax import segment_softmax_backward
from chainer_bspmm.ops.segment_softmax import segment_softmax_forward
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support.gradients import check_gradients
from tests.support.spare import with_spare
from tests.support.weights import assert_counts_copies
from tests.support.weights import copies_of
from tests.support.weights import poison
from tests.support.weights import SPARE_ROWS
from tests.support.weights import sum_of_copies
from tests.support.weights import WEIGHTED
from tests.support.weights import weighted_on

SQUARE = [name for name in BATCHES if BATCHES[name].n_rows == BATCHES[name].n_cols]


def reference(starts, x):
    x, y, starts = x.astype(float), numpy.zeros(x.shape), cuda.to_cpu(starts)
    for begin, end in zip(starts, starts[1:]):
        if end > begin:
            part = numpy.exp(x[begin:end] - x[begin:end].max(axis=0))
            y[begin:end] = part / part.sum(axis=0)
    return y


@pytest.mark.parametrize(
    'name, dtype',
    [(name, 'float64') for name in SQUARE] + [('many', 'float16'), ('many', 'float32')],
)
def test_forward(xp, name, dtype):
    adj = batch_on(name, xp, dtype)
    x = features(numpy.random.RandomState(0), xp, adj.n_rows, 3, dtype) * 20
    assert_close(node_softmax(adj, x).array, reference(adj.row_offsets, cuda.to_cpu(x)), dtype)


@pytest.mark.parametrize('name', ['huge among tiny', 'empty graphs first, between, last', 'padded'])
def test_gradients(xp, name):
    adj = batch_on(name, xp, 'float64')
    x = features(numpy.random.RandomState(1), xp, adj.n_rows, 2, 'float64')
    check_gradients(lambda x: node_softmax(adj, x), x)


@pytest.mark.parametrize('name', ['one graph', 'many', 'only empty graphs'])
def test_spare_rows(xp, name):
    """They may hold anything, and get 0; so do their gradients, of both orders."""
    ordinary, adj = batch_on(name, xp, 'float64'), with_spare(BATCHES[name], 4, 0, xp)
    n = ordinary.n_rows
    x = features(numpy.random.RandomState(1), xp, n + 4, 3, 'float64')
    x[n:] = numpy.nan
    results = []
    for matrix, size in ((adj, n + 4), (ordinary, n)):
        given = chainer.Variable(x[:size])
        y = node_softmax(matrix, given)
        gy = chainer.Variable(xp.cos(xp.arange(y.size, dtype='d')).reshape(y.shape))
        (once,) = chainer.grad([y], [given], [gy])
        (gx,) = chainer.grad([y], [given], [gy], enable_double_backprop=True)
        (ggx,) = chainer.grad([chainer.functions.sum(gx**3)], [given])
        results.append([variable.array for variable in (y, once, gx, ggx)])
    for actual, expected in zip(*results):
        assert not actual[n:].any()
        numpy.testing.assert_allclose(cuda.to_cpu(actual[:n]), cuda.to_cpu(expected), 1e-10, 1e-15)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('n_spare', SPARE_ROWS)
@pytest.mark.parametrize('name', WEIGHTED)
def test_a_row_counts_as_often_as_its_weight(xp, name, n_spare, dtype):
    """Rows of weight 0 hold NaN and infinity, and so do their gradients."""
    rng = numpy.random.RandomState(1)
    adj = weighted_on(name, xp, dtype, n_spare)
    weights, offsets, n_rows = adj.row_weights, adj.row_offsets, adj.n_rows
    rows, starts = copies_of(weights, offsets)
    x = poison(features(rng, xp, n_rows, 3, dtype) * 5, weights)
    y = segment_softmax_forward(x, offsets, weights)
    assert (node_softmax(adj, x).array == y).all()
    expected = numpy.zeros(x.shape)
    expected[rows] = reference(starts, cuda.to_cpu(x)[rows])
    assert_close(y, expected, dtype)
    gy = rng.uniform(-1, 1, (rows.size, 3))  # of every copy
    given = poison(xp.asarray(sum_of_copies(gy, rows, n_rows).astype(dtype)), weights)
    gy = (cuda.to_cpu(given).astype('d') / numpy.maximum(cuda.to_cpu(weights), 1)[:, None])[rows]
    copies = cuda.to_cpu(y).astype('d')[rows]
    inner = numpy.concatenate(
        [
            numpy.repeat((copies[a:b] * gy[a:b]).sum(axis=0)[None], b - a, axis=0)
            for a, b in zip(starts, starts[1:])
        ]
    )
    expected = sum_of_copies(copies * (gy - inner), rows, n_rows)
    assert_close(segment_softmax_backward(y, given, offsets, weights), expected, dtype)


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
@pytest.mark.parametrize('name', WEIGHTED)
def test_gradients_are_sums_over_copies(xp, name, n_spare):
    adj = weighted_on(name, xp, 'float64', n_spare)
    x = features(numpy.random.RandomState(1), xp, adj.n_rows, 3, 'float64')
    assert_counts_copies(node_softmax, adj, x)


def test_gradients_of_rows_that_do_not_count_may_be_nan(xp):
    """Such as those of a logarithm, whose argument is 0 there."""
    adj = weighted_on('many', xp, 'float64', 2)
    x = chainer.Variable(features(numpy.random.RandomState(1), xp, adj.n_rows, 3, 'float64'))
    y = node_softmax(adj, x)
    gradients = []
    for rest in (numpy.nan, 0.0):
        gy = xp.cos(xp.arange(y.size, dtype='d')).reshape(y.shape)
        gy[adj.row_weights == 0] = rest
        gradients += chainer.grad([y], [x], [chainer.Variable(gy)])
    assert (gradients[0].array == gradients[1].array).all()


def test_values_that_underflow_count_in_higher_derivatives(xp):
    """Where y is 0 although the row counts, Chainer's own softmax is the truth."""
    adj = batch_on('one graph', xp, 'float32')
    x = xp.array([[0], [-200], [1], [-300], [-1e4]], 'f')
    results = []
    for function in (
        lambda x: node_softmax(adj, x),
        lambda x: chainer.functions.softmax(x, axis=0),
    ):
        given = chainer.Variable(x)
        y = function(given)
        gy = chainer.Variable(xp.arange(5, dtype='f')[:, None])
        (gx,) = chainer.grad([y], [given], [gy], enable_double_backprop=True)
        (ggx,) = chainer.grad([chainer.functions.sum(gx**2)], [given])
        results.append([y.array, gx.array, ggx.array])
    for actual, expected in zip(*results):
        numpy.testing.assert_allclose(cuda.to_cpu(actual), cuda.to_cpu(expected), 1e-6, 1e-7)


def test_gradient_of_many_nodes_that_are_alike():
    """What all nodes of a graph have in common cancels, its rounding included."""
    adj = batch_on('huge among tiny', numpy, 'float32')
    rng = numpy.random.RandomState(2)
    x = chainer.Variable(numpy.zeros((adj.n_rows, 1), 'f'))
    gy = (100 + rng.uniform(-1e-3, 1e-3, x.shape)).astype('f')
    y = node_softmax(adj, x)
    y.grad = gy
    y.backward()
    truth = reference(adj.row_offsets, x.array)
    starts = adj.row_offsets
    expected = numpy.concatenate(
        [
            truth[a:b] * (gy[a:b] - (truth[a:b] * gy[a:b].astype(float)).sum(axis=0))
            for a, b in zip(starts, starts[1:])
        ]
    )
    assert_close(x.grad, expected, 'float32')


@pytest.mark.parametrize('weight', [1, 0, 100])
def test_large_gradients_in_float16(weight):
    """The last row's is the sum over its copies, which may be less than that of another row."""
    adj = batch_on('huge among tiny', numpy, 'float16')
    weights = numpy.ones(adj.n_rows, 'f')
    weights[2] = weight  # a graph of one row
    weights[302] = weight  # the last of 300
    adj = adj.replace(row_weights=weights)
    gy = numpy.full((adj.n_rows, 1), 5e4, 'e')
    x = chainer.Variable(numpy.zeros(gy.shape, 'e'))
    y = node_softmax(adj, x)
    y.grad = gy
    y.backward()
    n, total = 299 + weight, 5e4 * (299 + (weight > 0))
    expected = numpy.zeros(gy.shape)
    expected[3:303] = (5e4 - weights[3:303, None] * total / n) / n
    expected[weights == 0] = 0
    assert numpy.isfinite(x.grad).all()
    numpy.testing.assert_allclose(x.grad, expected, 2e-3, 2e-1)


def test_shapes_that_do_not_fit():
    adj = BATCHES['many']
    with pytest.raises(
        ValueError, match=r'x: expected shape \(%d, n_B\), .* got \(3, 2\)' % adj.n_rows
    ):
        node_softmax(adj, numpy.zeros((3, 2)))
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR'):
        node_softmax(numpy.zeros((3, 3)), numpy.zeros((3, 2)))
