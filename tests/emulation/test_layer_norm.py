import numpy
import pytest

from chainer_bspmm.ops.layer_norm import layer_norm_backward
from chainer_bspmm.ops.layer_norm import layer_norm_forward
from tests.emulation.kernel_cases import CHANNELS, DTYPES


# Roundings to the dtype, and a few of what it is calculated in.
BOUND = {'e': 2**-9, 'f': 2**-19, 'd': 2**-47}


def check(device, dtype, shape, shift=0):
    rng = numpy.random.RandomState(0)
    x, gy = (rng.uniform(-1, 2, shape).astype(dtype) for _ in range(2))
    x[:, ::2] += 3  # or a deviation of almost nothing would magnify roundings
    gamma, beta = (rng.uniform(0.5, 2, shape[1]).astype(dtype) for _ in range(2))
    given = [device.put(array, shift) for array in (x, gamma, beta)]
    y, statistics = layer_norm_forward(*given, eps=1e-3)
    gradients = layer_norm_backward(given[0], given[1], device.put(gy, shift), statistics)
    x, gamma, beta, gy = (array.astype('d') for array in (x, gamma, beta, gy))
    expected_y, expected = layer_norm_forward(x, gamma, beta, 1e-3)
    assert statistics.dtype == ('d' if dtype == 'd' else 'f')
    for actual, wanted in zip(
        [statistics, y, *gradients],
        [expected, expected_y, *layer_norm_backward(x, gamma, gy, expected)],
    ):
        assert actual.dtype in (dtype, statistics.dtype) and actual.shape == wanted.shape
        scale = max(1, abs(wanted).max(initial=0))
        numpy.testing.assert_allclose(actual, wanted, 0, BOUND[dtype] * scale)


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, dtype, (9, n_channels))


@pytest.mark.parametrize('n_rows', [1, 31, 32, 33, 129])
def test_rows(device, n_rows):
    check(device, 'f', (n_rows, 12))


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    check(device, dtype, (5, 16), shift)
    assert [d['VECTOR'] for d in device.launched if 'LANES' in d] == [width, width]


def test_nan_stays_in_its_row(device):
    x = numpy.random.RandomState(0).uniform(-1, 1, (7, 9)).astype('f')
    x[3, 2] = numpy.nan
    ones = device.put(numpy.ones(9, 'f'))
    y, _ = layer_norm_forward(device.put(x), ones, ones, 1e-3)
    assert (numpy.isnan(y).any(axis=1) == (numpy.arange(7) == 3)).all()


@pytest.mark.parametrize('shape', [(0, 4), (3, 0)])
def test_empty_result_launches_nothing(device, shape):
    x, ones = device.put(numpy.zeros(shape, 'f')), device.put(numpy.ones(shape[1], 'f'))
    y, statistics = layer_norm_forward(x, ones, ones, 1e-3)
    assert y.shape == shape and not device.launched
