"""`layer_norm`: its kernel, compared with the host's formula, the function with Chainer's."""

import functools

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.ops.layer_norm import layer_norm, layer_norm_backward, layer_norm_forward
from tests.emulation.kernel_cases import CHANNELS_OF_DTYPES
from tests.support.gradients import check_gradients, outcome


# Roundings of results to their dtype, and a few in the dtype of the calculation.
BOUND = {'e': 2**-9, 'f': 2**-19, 'd': 2**-47}


def check(place, dtype, shape):
    rng = numpy.random.RandomState(0)
    x, gy = (rng.uniform(-1, 2, shape).astype(dtype) for _ in range(2))
    x[:, ::2] += 3  # a small deviation would magnify roundings
    gamma, beta = (rng.uniform(0.5, 2, shape[1]).astype(dtype) for _ in range(2))

    def results(x, gamma, beta, gy):
        y, statistics = layer_norm_forward(x, gamma, beta, 1e-3)
        return statistics, y, *layer_norm_backward(x, gamma, gy, statistics)

    found = results(place.put(x), place.put(gamma), place.put(beta), place.put(gy))
    expected = results(*(array.astype('d') for array in (x, gamma, beta, gy)))
    assert found[0].dtype == ('d' if dtype == 'd' else 'f')
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype in (dtype, found[0].dtype) and actual.shape == wanted.shape
        scale = max(1, abs(wanted).max(initial=0))
        if shape[1] == 1:  # its gradient is a difference of two large terms
            scale = max(scale, abs(gy * gamma).max() * 1e-3**-0.5)
        numpy.testing.assert_allclose(cuda.to_cpu(actual), wanted, 0, BOUND[dtype] * scale)


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels):
    check(place, dtype, (9, n_channels))


@pytest.mark.parametrize('n_rows', [1, 31, 32, 33, 129])
def test_rows(gpu, n_rows):
    check(gpu, 'f', (n_rows, 12))


def test_nan_stays_in_its_row(place):
    x = numpy.random.RandomState(0).uniform(-1, 1, (7, 9)).astype('f')
    x[3, 2] = numpy.nan
    ones = place.put(numpy.ones(9, 'f'))
    y, _ = layer_norm_forward(place.put(x), ones, ones, 1e-3)
    assert (numpy.isnan(cuda.to_cpu(y)).any(axis=1) == (numpy.arange(7) == 3)).all()


@pytest.mark.parametrize('shape', [(0, 4), (3, 0)])
def test_empty_result_launches_nothing(gpu, shape):
    x = gpu.put(numpy.zeros(shape, 'f'))
    ones = gpu.put(numpy.ones(shape[1], 'f'))
    y, statistics = layer_norm_forward(x, ones, ones, 1e-3)
    assert y.shape == shape and not gpu.launched


def arguments(xp, dtype, shape=(7, 5)):
    rng = numpy.random.RandomState(0)
    return [xp.asarray(rng.uniform(-1, 2, s).astype(dtype)) for s in (shape, shape[1:], shape[1:])]


@pytest.mark.parametrize('shape', [(7, 5), (1000, 64), (1, 1), (0, 3)])
@pytest.mark.parametrize('dtype, bound', [('float16', 4e-3), ('float32', 1e-6), ('float64', 1e-13)])
def test_outcome_is_chainers(xp, dtype, bound, shape):
    given = arguments(xp, dtype, shape)
    ours = functools.partial(layer_norm, eps=1e-3)
    theirs = functools.partial(chainer.functions.layer_normalization, eps=1e-3)
    expected = outcome(theirs, [array.astype('d') for array in given])
    for found, exact in zip(outcome(ours, given), map(cuda.to_cpu, expected), strict=True):
        assert found.dtype == dtype
        scale = max(1, abs(exact).max(initial=0))
        numpy.testing.assert_allclose(cuda.to_cpu(found).astype('d'), exact, 0, bound * scale)


def test_gradients(xp):
    given = arguments(xp, 'float64', (3, 4))
    check_gradients(lambda x, gamma, beta: layer_norm(x, gamma, beta, 1e-3) ** 2, *given)


def test_rows_of_one_value_in_half_precision(xp):
    """Rows of equal values have a variance of 0, so gradients are large, but finite."""
    x = chainer.Variable(xp.ones((2, 4), 'e'))
    y = layer_norm(x, xp.ones(4, 'f'), xp.arange(4, dtype='f'), 1e-6)
    assert (y.array == xp.arange(4)).all() and y.dtype == numpy.float16
    y.grad = xp.array([[1, 0, 0, 0], [0, 0, 0, 0]], 'e')
    y.backward()
    expected = numpy.array([[750, -250, -250, -250], [0] * 4])
    numpy.testing.assert_allclose(cuda.to_cpu(x.grad), expected, rtol=0.05)


def test_what_does_not_fit():
    x, gamma, beta = arguments(numpy, 'f')
    with pytest.raises(ValueError, match=r'gamma: expected shape \(5,\) .*, got \(4,\)'):
        layer_norm(x, gamma[:4], beta, 1e-6)
    with pytest.raises(ValueError, match=r'beta: expected shape \(5,\) .*, got \(7, 5\)'):
        layer_norm(x, gamma, x, 1e-6)
    with pytest.raises(ValueError, match=r'x: expected shape \(n_rows, n_B\), got \(5,\)'):
        layer_norm(gamma, gamma, beta, 1e-6)
