"""The end of a layer whose products are done: biases, activation, dropout, and their gradient."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.ops.layer_end import column_sums, end_backward, end_forward, end_launch
from tests.ops.test_graph_linear_launches import ACTIVATIONS, BOUND
from tests.support import reference
from tests.support.devices import slow_unless

SHAPES = [(37, 12), (5, 7), (1, 1), (70, 2), (3, 300), (600, 8)]
DRAW = 2**40 + 3, 5, 2**33 + 1  # seed, layer, step


def drawn(shape, dtype, seed=0):
    return numpy.random.RandomState(seed).uniform(-2, 2, shape).astype(dtype)


def assert_near(actual, expected, dtype):
    actual = cuda.to_cpu(actual)
    assert actual.dtype == dtype
    assert abs(actual - expected).max() <= BOUND[dtype] * max(abs(expected).max(), 1)


def cases():
    for i, shape in enumerate(SHAPES):
        for j, activation in enumerate(('identity', 'relu', 'tanh')):
            for n_biases in (0, 1, 3):
                yield slow_unless(
                    (i + j + n_biases) % 3 == 0,
                    *(shape, activation, n_biases),
                    id='%s-%s-%d' % (shape, activation, n_biases),
                )


@pytest.mark.parametrize('shape, activation, n_biases', list(cases()))
@pytest.mark.parametrize('dtype', 'efd')
def test_biases_and_activation(gpu, dtype, shape, activation, n_biases):
    sums, b = drawn(shape, dtype), drawn((n_biases, shape[1]), dtype, seed=1)
    y = gpu.put(sums)
    end_forward(y, gpu.put(b.ravel()) if n_biases else None, activation)
    function, _ = ACTIVATIONS[activation]
    assert_near(y, function(sums.astype('d') + b.astype('d').sum(axis=0)), dtype)


@pytest.mark.parametrize('activation', ['identity', 'relu'])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('dtype', 'efd')
def test_dropout_is_that_of_the_step(gpu, dtype, shape, activation):
    sums, b = drawn(shape, dtype), drawn(shape[1], dtype, seed=1)
    y = gpu.put(sums)
    seed, layer, step = DRAW
    draw = seed, layer, gpu.put(numpy.array([step], 'u8'))
    end_forward(y, gpu.put(b), activation, 0.3, draw)
    kept = reference.kept(sums.size, 0.3, *DRAW).reshape(shape)
    function, _ = ACTIVATIONS[activation]
    scale = float(numpy.dtype(dtype).type(1 / 0.7))
    assert_near(y, function(sums.astype('d') + b) * kept * scale, dtype)
    if activation == 'identity':  # by which the gradient knows
        y = cuda.to_cpu(y)
        numpy.testing.assert_array_equal((y == 0) & numpy.signbit(y), ~kept)


@pytest.mark.parametrize('has_bias', [False, True])
@pytest.mark.parametrize('activation', ['identity', 'relu', 'tanh'])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('dtype', 'efd')
def test_gradients(gpu, dtype, shape, activation, has_bias):
    function, derivative = ACTIVATIONS[activation]
    y = function(drawn(shape, dtype).astype('d')).astype(dtype)
    gy = drawn(shape, dtype, seed=1)
    z, bias = end_backward(gpu.put(y), gpu.put(gy), activation, has_bias=has_bias)
    expected = gy.astype('d') * derivative(y.astype('d'))
    assert_near(z, expected, dtype)
    if has_bias:
        bound = BOUND[dtype] * max(abs(expected).sum(axis=0).max(), 1)
        assert abs(cuda.to_cpu(bias) - expected.sum(axis=0)).max() <= bound
    else:
        assert bias is None


@pytest.mark.parametrize('activation', ['identity', 'relu'])
@pytest.mark.parametrize('dtype', 'efd')
def test_gradient_of_dropout(gpu, dtype, activation):
    """What was dropped is -0 after the identity, 0 after a rectifier."""
    kept = numpy.arange(24).reshape(4, 6) % 3 > 0
    y = numpy.where(kept, 1.5, -0.0 if activation == 'identity' else 0.0).astype(dtype)
    y[1, 1] = 0  # kept by an identity
    gy = drawn((4, 6), dtype)
    z, _ = end_backward(gpu.put(y), gpu.put(gy), activation, 0.5)
    is_passed = kept.copy()
    is_passed[1, 1] = activation == 'identity'
    assert_near(z, 2 * gy.astype('d') * is_passed, dtype)


def test_a_nan_stays(gpu):
    y = gpu.put(numpy.array([[numpy.nan, -1, 1]], 'f'))
    end_forward(y, None, 'relu')
    numpy.testing.assert_array_equal(cuda.to_cpu(y), [[numpy.nan, 0, 1]])


def test_gradients_that_lie_apart(gpu):
    gy = gpu.put(drawn((8, 12), 'f'))[:, ::2]
    z, bias = end_backward(None, gy, 'identity', has_bias=True)
    numpy.testing.assert_array_equal(cuda.to_cpu(z), cuda.to_cpu(gy))
    assert_near(bias, cuda.to_cpu(gy).astype('d').sum(axis=0), 'f')


@pytest.mark.parametrize('has_bias', [False, True])
def test_no_rows(gpu, has_bias):
    y = gpu.put(numpy.empty((0, 4), 'f'))
    end_forward(y, gpu.put(numpy.ones(4, 'f')), 'relu')
    z, bias = end_backward(y, y, 'relu', has_bias=has_bias)
    assert z.shape == (0, 4)
    assert bias is None or not cuda.to_cpu(bias).any()


def test_nothing_is_launched_for_an_identity(gpu):
    y = gpu.put(numpy.ones((3, 4), 'f'))
    end_forward(y, None, 'identity')
    z, _ = end_backward(y, y, 'identity')
    assert z is y and not gpu.launched


@pytest.mark.parametrize('width, vector', [(1, 1), (256, 4), (1000, 4), (7, 1)])
@pytest.mark.parametrize('n_rows', [1, 600, 10**6])
def test_a_plan_has_rows_for_every_block(n_rows, width, vector):
    plan = end_launch(n_rows, width, vector, Device(132, 60 << 20))
    columns, lanes, _ = plan.block
    assert 0 < columns * lanes <= 256
    assert (plan.grid[0] - 1) * lanes < n_rows


@pytest.mark.parametrize('n_copies', [1, 2])
@pytest.mark.parametrize('n_rows', [0, 1, 700])
@pytest.mark.parametrize('dtype', 'efd')
def test_sums_of_columns(place, dtype, n_rows, n_copies):
    g = drawn((n_rows, 6), dtype)
    found = column_sums(place.put(g), 2, n_copies)
    assert len({id(array) for array in found}) == len(found) == 3 * n_copies
    expected = g.astype('d').sum(axis=0)
    bound = BOUND[dtype] * max(abs(g.astype('d')).sum(axis=0).max(initial=1), 1)
    for i, array in enumerate(found):
        assert array.dtype == dtype and array.shape == (2,)
        start = i % 3 * 2
        assert abs(cuda.to_cpu(array) - expected[start : start + 2]).max() <= bound
