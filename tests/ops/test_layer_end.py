"""End of a layer after its products: bias, activation, dropout, and their gradient."""

import types

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.ops.layer_end import can_sum, column_sums, end_backward, end_forward
from chainer_bspmm.ops.layer_end import end_launch, summed_backward, summed_forward
from tests.support import reference
from tests.support.cases import pairs
from tests.support.devices import slow_unless
from tests.support.layer_kernels import ACTIVATIONS, BOUND, matrices, side

SHAPES = [(37, 12), (5, 7), (1, 1), (70, 2), (3, 300), (600, 8)]
DRAW = 2**40 + 3, 5, 2**33 + 1  # seed, layer, step


def cases(*parameters):
    """Return combinations with all dtypes; not all of float16 and float64 are quick."""
    found = pairs('efd', *parameters)
    return [slow_unless(case[0] == 'f' or case[1] == parameters[0][0], *case) for case in found]


def drawn(shape, dtype, seed=0):
    return numpy.random.RandomState(seed).uniform(-2, 2, shape).astype(dtype)


def assert_near(actual, expected, dtype, largest=1):
    """Compare with float64; `largest` is the largest value before the activation."""
    actual = cuda.to_cpu(actual)
    assert actual.dtype == dtype
    bound = BOUND[dtype] * max(abs(expected).max(), largest)
    assert abs(actual - expected).max() <= bound


every_end = pytest.mark.parametrize(
    'dtype, shape, activation, has_bias',
    cases(SHAPES, ('identity', 'relu', 'tanh', 'sigmoid'), (False, True)),
    ids=str,
)


@every_end
def test_bias_and_activation(gpu, dtype, shape, activation, has_bias):
    sums = drawn(shape, dtype)
    b = drawn(shape[1], dtype, seed=1)
    y = gpu.put(sums)
    end_forward(y, gpu.put(b) if has_bias else None, activation)
    function, _ = ACTIVATIONS[activation]
    assert_near(y, function(sums.astype('d') + (b if has_bias else 0)), dtype)


@pytest.mark.parametrize('dtype, shape, activation', cases(SHAPES, ('identity', 'relu')), ids=str)
def test_dropout_is_that_of_the_step(gpu, dtype, shape, activation):
    sums = drawn(shape, dtype)
    b = drawn(shape[1], dtype, seed=1)
    y = gpu.put(sums)
    seed, layer, step = DRAW
    draw = seed, layer, gpu.put(numpy.array([step], 'u8'))
    end_forward(y, gpu.put(b), activation, 0.3, draw)
    kept = reference.kept(sums.size, 0.3, *DRAW).reshape(shape)
    function, _ = ACTIVATIONS[activation]
    scale = float(numpy.dtype(dtype).type(1 / 0.7))
    assert_near(y, function(sums.astype('d') + b) * kept * scale, dtype)
    if activation == 'identity':  # the gradient recognises dropped elements by that
        y = cuda.to_cpu(y)
        numpy.testing.assert_array_equal((y == 0) & numpy.signbit(y), ~kept)


@every_end
def test_gradients(gpu, dtype, shape, activation, has_bias):
    function, derivative = ACTIVATIONS[activation]
    y = function(drawn(shape, dtype).astype('d')).astype(dtype)
    gy = drawn(shape, dtype, seed=1)
    z, of_biases = end_backward(gpu.put(y), gpu.put(gy), activation, n_biases=2 * has_bias)
    expected = gy.astype('d') * derivative(y.astype('d'))
    assert_near(z, expected, dtype)
    assert len(of_biases) == 2 * has_bias
    bound = BOUND[dtype] * max(abs(expected).sum(axis=0).max(), 1)
    for bias in of_biases:
        assert abs(cuda.to_cpu(bias) - expected.sum(axis=0)).max() <= bound


@pytest.mark.parametrize('activation', ['identity', 'relu'])
@pytest.mark.parametrize('dtype', 'efd')
def test_gradient_of_dropout(gpu, dtype, activation):
    """A dropped element is -0 after the identity, and 0 after a rectifier."""
    kept = numpy.arange(24).reshape(4, 6) % 3 > 0
    y = numpy.where(kept, 1.5, -0.0 if activation == 'identity' else 0.0).astype(dtype)
    y[1, 1] = 0  # the identity has kept it
    gy = drawn((4, 6), dtype)
    z, _ = end_backward(gpu.put(y), gpu.put(gy), activation, 0.5)
    is_passed = kept.copy()
    is_passed[1, 1] = activation == 'identity'
    assert_near(z, 2 * gy.astype('d') * is_passed, dtype)


def sums_of(A, rows, loop):
    """Compute the sums over neighbours in float64."""
    rows = rows.astype('d')
    return A[0].astype('d') @ rows + (rows if loop else 0)


GRAPHS = (37, 12), (5, 7), (150, 8), (9, 300)


@pytest.mark.parametrize(
    'dtype, shape, is_added, loop', cases(GRAPHS, (False, True), (False, True)), ids=str
)
def test_sums_over_neighbours(gpu, dtype, shape, is_added, loop):
    is_weighted = not loop
    A = matrices(shape[0], 1, dtype, is_weighted)
    mapped = drawn(shape, dtype)
    y = drawn(shape, dtype, seed=1)
    b = drawn(shape[1], dtype, seed=2)
    expected = sums_of(A, mapped, loop) + y.astype('d') * is_added + b
    adj, y = side(gpu, A, is_weighted), gpu.put(y) if is_added else None
    y = summed_forward(adj, gpu.put(mapped), y, gpu.put(b), 'tanh', loop=loop)
    assert_near(y, numpy.tanh(expected), dtype, largest=abs(expected).max())


def test_sums_over_neighbours_and_dropout(gpu):
    A = matrices(37, 1, 'f')
    mapped = drawn((37, 12), 'f')
    seed, layer, step = DRAW
    draw = seed, layer, gpu.put(numpy.array([step], 'u8'))
    y = summed_forward(side(gpu, A, True), gpu.put(mapped), None, None, 'relu', 0.3, draw)
    kept = reference.kept(mapped.size, 0.3, *DRAW).reshape(mapped.shape)
    assert_near(y, numpy.maximum(sums_of(A, mapped, False), 0) * kept / 0.7, 'f')


@pytest.mark.parametrize(
    'dtype, shape, needed, loop',
    cases(GRAPHS, ((), ('z',), ('bias',), ('z', 'bias')), (False, True)),
    ids=str,
)
def test_gradients_of_sums_over_neighbours(gpu, dtype, shape, needed, loop):
    is_weighted = not loop
    A = matrices(shape[0], 1, dtype, is_weighted)
    y = numpy.tanh(drawn(shape, 'd')).astype(dtype)
    gy = drawn(shape, dtype, seed=1)
    sums, z, bias = summed_backward(
        side(gpu, A, is_weighted),
        gpu.put(y),
        gpu.put(gy),
        'tanh',
        has_bias='bias' in needed,
        needs_z='z' in needed,
        loop=loop,
    )
    expected = gy * (1 - y.astype('d') ** 2)
    assert_near(sums, sums_of(A, expected, loop), dtype)
    assert [z is not None, bias is not None] == [name in needed for name in ('z', 'bias')]
    if z is not None:
        assert_near(z, expected, dtype)
    if bias is not None:
        bound = BOUND[dtype] * abs(expected).sum(axis=0).max()
        assert abs(cuda.to_cpu(bias) - expected.sum(axis=0)).max() <= bound


def test_a_row_without_neighbours_takes_no_nan(gpu):
    """The kernel loads a row's last entry again, which must not be added, not even times 0."""
    A = numpy.zeros((1, 3, 3), 'f')
    A[0, 0, 1] = 1
    mapped = gpu.put(numpy.array([[numpy.nan], [2], [numpy.nan]], 'f'))
    y = summed_forward(side(gpu, A, True), mapped, None, None, 'identity')
    numpy.testing.assert_array_equal(cuda.to_cpu(y), [[2], [0], [0]])


def test_rows_are_selected(gpu):
    """A matrix may have more columns than rows: it selects rows, where each row has one entry."""
    mapped = drawn((7, 4), 'f')
    b = drawn(4, 'f', seed=1)
    selection = side(gpu, numpy.eye(3, 7, dtype='f')[None, ::-1], is_weighted=False)
    y = summed_forward(selection, gpu.put(mapped), None, gpu.put(b), 'sigmoid')
    assert y.shape == (3, 4)
    assert_near(y, 1 / (1 + numpy.exp(-(mapped[2::-1].astype('d') + b))), 'f')


@pytest.mark.parametrize(
    'n_relations, longest, expected', [(1, 128, True), (1, 129, False), (2, 4, False)]
)
def test_matrices_whose_sums_are_taken(n_relations, longest, expected):
    adj = types.SimpleNamespace(n_relations=n_relations, longest=longest)
    assert can_sum(adj) is expected


def test_a_nan_stays(gpu):
    y = gpu.put(numpy.array([[numpy.nan, -1, 1]], 'f'))
    end_forward(y, None, 'relu')
    numpy.testing.assert_array_equal(cuda.to_cpu(y), [[numpy.nan, 0, 1]])


def test_gradients_that_lie_apart(gpu):
    gy = gpu.put(drawn((8, 12), 'f'))[:, ::2]
    z, (bias,) = end_backward(None, gy, 'identity', n_biases=1)
    numpy.testing.assert_array_equal(cuda.to_cpu(z), cuda.to_cpu(gy))
    assert_near(bias, cuda.to_cpu(gy).astype('d').sum(axis=0), 'f')


@pytest.mark.parametrize('has_bias', [False, True])
def test_no_rows(gpu, has_bias):
    y = gpu.put(numpy.empty((0, 4), 'f'))
    end_forward(y, gpu.put(numpy.ones(4, 'f')), 'relu')
    z, of_biases = end_backward(y, y, 'relu', n_biases=int(has_bias))
    assert z.shape == (0, 4)
    assert not any(cuda.to_cpu(bias).any() for bias in of_biases)


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
    found = column_sums(place.put(g), 3, n_copies)
    assert len({id(array) for array in found}) == len(found) == 3 * n_copies
    expected = g.astype('d').sum(axis=0)
    bound = BOUND[dtype] * max(abs(g.astype('d')).sum(axis=0).max(initial=1), 1)
    for i, array in enumerate(found):
        assert array.dtype == dtype and array.shape == (2,)
        start = i % 3 * 2
        assert abs(cuda.to_cpu(array) - expected[start : start + 2]).max() <= bound
