import numpy
import pytest

from chainer_bspmm import reference
from chainer_bspmm.backend import gpu
from chainer_bspmm.cuda import policy

from tests.emulation.kernel_cases import CHANNELS, DTYPES
from tests.emulation.kernel_cases import integers

# Relative error of an element: its rounding to the dtype, and a few of what it is calculated in.
BOUND = {'e': 2**-10, 'f': 2**-20, 'd': 2**-48}


def check(device, dtype, n_channels, sizes, spare=0, shift=0):
    rng = numpy.random.RandomState(0)
    offsets = numpy.cumsum((0,) + sizes).astype(numpy.int32)
    n_rows = int(offsets[-1])
    x, gy = (rng.uniform(-3, 3, (n_rows + spare, n_channels)).astype(dtype) for _ in range(2))
    y = gpu.segment_softmax(device.put(x, shift), offsets)
    assert y.dtype == dtype and y.shape == x.shape
    expected = reference.segment_softmax(x[:n_rows], offsets)
    numpy.testing.assert_allclose(y[:n_rows], expected, rtol=BOUND[dtype])
    given = numpy.ascontiguousarray(y, dtype)
    gx = gpu.segment_softmax_grad(device.put(given, shift), device.put(gy, shift), offsets)
    a, g = given[:n_rows].astype('d'), gy[:n_rows].astype('d')
    inner = reference.segment_sum(a * g, offsets) if sizes else numpy.zeros((0, n_channels))
    expected = a * (g - numpy.repeat(inner, sizes, axis=0))
    numpy.testing.assert_allclose(gx[:n_rows], expected, rtol=BOUND[dtype], atol=6 * BOUND[dtype])
    assert not y[n_rows:].any() and not gx[n_rows:].any()
    return device.launched[-1]


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, dtype, n_channels, (0, 3, 0, 0, 24, 1, 5, 0) if n_channels <= 64 else (0, 3, 1))


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
        ((300,), 0),
    ],
    ids=str,
)
def test_segments_and_rows_beyond_them(device, sizes, spare):
    check(device, 'f', 3, sizes, spare)


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    assert check(device, dtype, 16, (2, 0, 3), shift=shift)['VECTOR'] == width


def test_blocks_that_stride_over_the_channels(device, monkeypatch):
    plan = policy.softmax_launch
    monkeypatch.setattr(
        policy,
        'softmax_launch',
        lambda *sizes: plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 2, 1)),
    )
    check(device, 'f', 33 * 4 * 3, (2, 0, 3))


def test_largest_values_and_nan(device):
    largest, nan = numpy.finfo('f').max, numpy.nan
    x = [[largest, nan], [-largest, 1], [5, -largest], [5, 0], [1, 2], [nan, 2]]
    y = gpu.segment_softmax(device.put(numpy.array(x, 'f')), numpy.array([0, 2, 4, 6], 'i'))
    expected = [[1, nan], [0, nan], [0.5, 0], [0.5, 1], [nan, 0.5], [nan, 0.5]]
    numpy.testing.assert_array_equal(y, expected)


def test_gradient_that_is_not_aligned(device):
    """Where the softmax is."""
    a, g = (integers((6, 4), 'f', seed=seed) for seed in (2, 3))
    offsets = numpy.array([0, 2, 6], 'i')
    inner = reference.segment_sum(a.astype('d') * g, offsets)
    gx = gpu.segment_softmax_grad(device.put(a), device.put(g, 4), offsets)
    numpy.testing.assert_array_equal(gx, (a * (g - inner.repeat([2, 4], axis=0))).astype('f'))
    assert device.launched[-1]['VECTOR'] == 1


@pytest.mark.parametrize('dtype', ['e', 'f'])
def test_arithmetic_is_double(device, dtype):
    """Sums of narrower storage, too: gradients that nearly cancel show it."""
    rng = numpy.random.RandomState(0)
    offsets = numpy.array([0, 300], 'i')
    a = (rng.uniform(0.5, 1.5, (300, 4)) / 300).astype(dtype)
    g = (1000 + rng.uniform(-1, 1, (300, 4))).astype(dtype)
    inner = (a.astype('d') * g).sum(axis=0)
    gx = gpu.segment_softmax_grad(device.put(a), device.put(g), offsets)
    numpy.testing.assert_array_equal(gx, (a * (g - inner)).astype(dtype))
    y = gpu.segment_softmax(device.put(g), offsets)
    numpy.testing.assert_array_equal(y, reference.segment_softmax(g, offsets).astype(dtype))


@pytest.mark.parametrize('n_rows, n_channels, n_segments', [(0, 3, 2), (3, 0, 1), (0, 2, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels, n_segments):
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    offsets = numpy.linspace(0, n_rows, n_segments + 1).astype(numpy.int32)
    assert gpu.segment_softmax(x, offsets).shape == (n_rows, n_channels)
    assert not device.launched
