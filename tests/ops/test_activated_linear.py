"""Linear layers with an activation, compared with Chainer's two functions; second derivatives."""

import types

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.ops import linear_softmax as module
from chainer_bspmm.ops.linear_softmax import linear_softmax, LinearSoftmax, row_softmax_backward
from chainer_bspmm.ops.linear_softmax import row_softmax_forward
from tests.emulation.kernel_cases import CHANNELS_OF_DTYPES
from tests.support import draw_as_chainer, DTYPES, features
from tests.support.gradients import assert_same_outcome, check_gradients, outcome
from tests.support.layers import linear_relu


def softmax_of_one(x, W, b=None):
    return linear_softmax((x, W, b))


PAIRS = [(linear_relu, functions.relu), (softmax_of_one, functions.softmax)]
# On the host Chainer sums the gradient of a float16 bias in float16: 50 roundings of 5e-4.
BOUNDS = {'float16': 5e-3, 'float32': 1e-5, 'float64': 1e-5}


def inputs(xp, n, n_in, n_out, dtype):
    rng = numpy.random.RandomState(0)
    x, W = features(rng, xp, n, n_in, dtype), features(rng, xp, n_out, n_in, dtype)
    return x, W, features(rng, xp, 1, n_out, dtype)[0]


SHAPES = [(50, 7, 3), (1, 1, 1), (0, 4, 2)]
CASES = [(dtype, shape, (0, 1, 2)) for dtype in DTYPES for shape in SHAPES]
CASES += [('float32', SHAPES[0], wanted) for wanted in ((0, 1), (0, 2))]


@pytest.mark.parametrize('dtype, shape, wanted', CASES, ids=str)
@pytest.mark.parametrize('fused, activation', PAIRS)
def test_same_as_two_functions(xp, fused, activation, shape, dtype, wanted):
    given = inputs(xp, *shape, dtype=dtype)[: 3 if 2 in wanted else 2]
    theirs = outcome(lambda *a: activation(functions.linear(*a)), given, wanted)
    assert_same_outcome(outcome(fused, given, wanted), theirs, dtype, BOUNDS[dtype])


@pytest.mark.parametrize('fused, activation', PAIRS)
def test_gradients(xp, fused, activation):
    given = inputs(xp, 20, 5, 4, 'float64')
    if fused is linear_relu:
        assert 20 < (linear_relu(*given).array > 0).sum() < 60  # both sides of 0
    check_gradients(lambda *a: (fused(*a) + 1) ** 2, *given)


def dropped_relu(x, W, b):
    return linear_relu(x, W, b, 0.5)


@pytest.mark.parametrize('function', [linear_relu, softmax_of_one, dropped_relu])
def test_nan_stays_in_its_row(xp, function):
    x, W, b = inputs(xp, 3, 2, 4, 'float32')
    x[1, 0] = numpy.nan
    y = cuda.to_cpu(function(x, W, b).array)
    assert numpy.isnan(y[1]).all() and numpy.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize('function', [linear_relu, softmax_of_one, dropped_relu])
def test_large_values_do_not_overflow(xp, function):
    x, W, b = inputs(xp, 3, 2, 4, 'float32')
    x[2] *= 1e4
    assert numpy.isfinite(cuda.to_cpu(function(x, W, b).array)).all()


# --- sum of the softmaxes of several layers ---


def several(xp, dtype, n_rows=20):
    """Return the inputs of three layers, of which the second has no bias."""
    (x, W, b), (x2, W2, _), third = (inputs(xp, n_rows, n_in, 6, dtype) for n_in in (5, 2, 5))
    return [x, W, b, x2 * 2, W2 * 3, *(array / 2 for array in third)]


def summed(x, W, b, x2, W2, x3, W3, b3):
    return linear_softmax((x, W, b), (x2, W2, None), (x3, W3, b3))


@pytest.mark.parametrize('n_rows', [20, 1, 0])
@pytest.mark.parametrize('dtype', DTYPES)
def test_sum_of_layers(xp, dtype, n_rows):
    given = several(xp, dtype, n_rows)

    def separately(x, W, b, x2, W2, x3, W3, b3):
        layers = (x, W, b), (x2, W2), (x3, W3, b3)
        return sum(functions.softmax(functions.linear(*layer)) for layer in layers)

    for wanted in (range(8), (1, 3, 7)):
        # Chainer computes in float64, because it would round every layer's result to float16.
        theirs = outcome(separately, [array.astype('d') for array in given], wanted)
        assert_same_outcome(outcome(summed, given, wanted), theirs, dtype, BOUNDS[dtype])


def test_gradients_of_the_sum(xp):
    check_gradients(lambda *a: (summed(*a) + 1) ** 2, *several(xp, 'float64'))


def test_layers_that_share_everything(xp):
    """Gradients of parameters are sums over all uses."""
    given = inputs(xp, 9, 3, 4, 'float64')
    twice = outcome(lambda *a: linear_softmax(a, a), given)
    assert_same_outcome(twice, outcome(lambda *a: 2 * softmax_of_one(*a), given), 'd', 1e-12)


FITS = (2, 3), (4, 3), (4,)


@pytest.mark.parametrize(
    'layers, message',
    [
        ([((2, 3, 1), (4, 1), (4,))], r'x: expected shape \(n_rows, n_in\), got \(2, 3, 1\)'),
        ([((2, 3), (4, 2), (4,))], r'W of layer 0: expected shape \(4, 3\) .* got \(4, 2\)'),
        ([((2, 3), (4, 3), (3,))], r'b of layer 0: expected shape \(4,\) .* got \(3,\)'),
        ([FITS, ((3, 3), (4, 3), (4,))], r'x of layer 1: expected shape \(2, 3\) .* got \(3, 3\)'),
        ([FITS, ((2, 3), (5, 3), (4,))], r'W of layer 1: expected shape \(4, 3\) .* got \(5, 3\)'),
    ],
)
def test_layers_that_do_not_fit(layers, message):
    with pytest.raises(ValueError, match=message):
        linear_softmax(*([numpy.ones(shape, 'f') for shape in layer] for layer in layers))


# --- softmaxes and their sum in one launch ---

# One rounding to the dtype, up to three if terms are added, and a few in the calculation.
BOUND = {'e': 2**-9, 'f': 2**-20, 'd': 2**-48}


def check(place, dtype, shape):
    rng = numpy.random.RandomState(0)
    x, g = (rng.uniform(-3, 3, of).astype(dtype) for of in (shape, shape[1:]))
    a = place.put(x)
    y = row_softmax_forward(a)
    gradients = row_softmax_backward(a, place.put(g))
    wide = x.astype('d')
    expected = row_softmax_forward(wide)
    wanted = row_softmax_backward(numpy.array(cuda.to_cpu(a), 'd', subok=False), g.astype('d'))
    for found, exact in ((a, wide), (y, expected), (gradients, wanted)):
        assert found.dtype == dtype and found.shape == exact.shape
        numpy.testing.assert_allclose(cuda.to_cpu(found), exact, BOUND[dtype], 3 * BOUND[dtype])
    y[...] = 7  # the result of a single term is in place
    assert (cuda.to_cpu(a) == 7).all() == (shape[0] == 1)


@pytest.mark.parametrize(
    'dtype, n_channels, n_terms',
    [*((*of, 3) for of in CHANNELS_OF_DTYPES), ('f', 2, 1), ('f', 33, 1), ('f', 1024, 1)],
)
def test_channels(place, dtype, n_channels, n_terms):
    check(place, dtype, (n_terms, 9, n_channels))


@pytest.mark.parametrize('n_rows', [1, 31, 32, 33, 129])
def test_rows(gpu, n_rows):
    check(gpu, 'f', (2, n_rows, 12))


def test_softmax_of_the_largest_values(gpu):
    largest, inf = numpy.finfo('f').max, numpy.inf
    rows = [[largest, -largest], [-largest, -largest], [-inf, 3], [5, 5]]
    y = cuda.to_cpu(row_softmax_forward(gpu.put(numpy.array([rows], 'f'))))
    numpy.testing.assert_array_equal(y, [[1, 0], [0.5, 0.5], [0, 1], [0.5, 0.5]])


def test_softmax_that_is_not_defined_is_nan(gpu):
    rows = [[numpy.nan, 3], [numpy.inf, 3], [5, 5]]
    y = cuda.to_cpu(row_softmax_forward(gpu.put(numpy.array([rows], 'f'))))
    assert numpy.isnan(y[0]).all() and numpy.isnan(y[1, 0])
    assert y[2].tolist() == [0.5, 0.5]


def test_node(gpu, monkeypatch):
    """The node of two layers, of which the second has no bias, gives the host's results."""
    rng = numpy.random.RandomState(1)
    shapes = [(9, 5), (4, 5), (4,), (9, 3), (4, 3)]
    inputs = [rng.uniform(-1, 1, shape).astype('f') for shape in shapes]
    gy = rng.uniform(-1, 1, (9, 4)).astype('f')

    def output_and_gradients(inputs, gy):
        node = LinearSoftmax([3, 2])
        return [node._output(inputs), *node._gradients(inputs, gy, range(5))]

    on_host = output_and_gradients(inputs, gy)
    room = types.SimpleNamespace(get_array_module=lambda array: cuda.cupy)
    monkeypatch.setattr(module, 'chainer_backend', room)
    on_gpu = output_and_gradients([gpu.put(array) for array in inputs], gpu.put(gy))
    assert gpu.names == {'row_softmax', 'graph_linear', 'sum_partials'}
    for actual, expected in zip(on_gpu, on_host, strict=True):
        assert actual.shape == expected.shape and actual.dtype == 'f'
        numpy.testing.assert_allclose(cuda.to_cpu(actual), expected, 1e-5, 1e-5)


@pytest.mark.parametrize('shape', [(2, 0, 4), (2, 3, 0), (1, 0, 4)])
def test_empty_result_launches_nothing(gpu, shape):
    a = gpu.put(numpy.zeros(shape, 'f'))
    assert row_softmax_forward(a).shape == shape[1:] and not gpu.launched
    assert row_softmax_backward(a, gpu.put(numpy.zeros(shape[1:], 'f'))).shape == shape


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('ratio', [0.5, 0.1])
def test_dropout_is_chainers(xp, monkeypatch, dtype, ratio):
    """The same elements are dropped, so results are equal in either order of relu and dropout."""
    draw_as_chainer(monkeypatch)
    given = inputs(xp, 50, 7, 6, dtype)
    results = []
    for function in (
        lambda *a: linear_relu(*a, dropout_ratio=ratio),
        lambda *a: functions.dropout(functions.relu(functions.linear(*a)), ratio),
        lambda *a: functions.relu(functions.dropout(functions.linear(*a), ratio)),
    ):
        xp.random.seed(0)
        results.append(outcome(function, given))
    y = cuda.to_cpu(results[0][0])
    assert 0.5 * (1 - ratio) * 0.7 < (y > 0).mean() < 0.5 * (1 - ratio) * 1.3
    for other in results[1:]:
        assert_same_outcome(results[0], other, dtype, BOUNDS[dtype])


def test_no_dropout_outside_of_training(xp):
    given = inputs(xp, 20, 5, 4, 'float32')
    with chainer.using_config('train', False):
        y = linear_relu(*given, dropout_ratio=0.5).array
    numpy.testing.assert_array_equal(cuda.to_cpu(y), cuda.to_cpu(linear_relu(*given).array))


def test_gradients_with_dropout(xp):
    def function(*given):
        xp.random.seed(1)
        return (linear_relu(*given, dropout_ratio=0.3) + 1) ** 2

    check_gradients(function, *inputs(xp, 20, 5, 4, 'float64'))


@pytest.mark.parametrize('ratio', [1.0, 1.5, -0.1, numpy.nan])
def test_dropout_ratio_out_of_range(ratio):
    with pytest.raises(
        ValueError, match='dropout_ratio: expected at least 0 and below 1, got %s' % ratio
    ):
        linear_relu(*inputs(numpy, 3, 2, 4, 'float32'), dropout_ratio=ratio)
