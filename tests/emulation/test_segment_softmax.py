import numpy
import pytest

from chainer_bspmm.ops.segment_softmax import segment_softmax_backward
from chainer_bspmm.ops.segment_softmax import segment_softmax_forward
from chainer_bspmm.ops.segment_softmax import softmax_launch
from tests.emulation.kernel_cases import CHANNELS, DTYPES
from tests.emulation.kernel_cases import integers, weighted
from tests.support import reference


# Relative error of an element: its rounding to the dtype, and a few of what it is calculated in.
BOUND = {'e': 2**-10, 'f': 2**-20, 'd': 2**-48}


def check_gradient(device, y, gy, offsets, weights=None, shift=0):
    gx = segment_softmax_backward(device.put(y, shift), device.put(gy, shift), offsets, weights)
    assert gx.dtype == y.dtype
    expected = reference.segment_softmax_grad(y, gy, offsets, weights)
    bound = BOUND[y.dtype.char]
    numpy.testing.assert_allclose(gx, expected, rtol=bound, atol=6 * bound)
    # Of no segment, or of weight 0.
    assert not gx[offsets[-1] :].any() and (weights is None or not gx[weights == 0].any())


def check(device, dtype, n_channels, sizes, spare=0, shift=0):
    rng = numpy.random.RandomState(0)
    offsets = numpy.cumsum((0,) + sizes).astype(numpy.int32)
    n_rows = int(offsets[-1])
    x, gy = (rng.uniform(-3, 3, (n_rows + spare, n_channels)).astype(dtype) for _ in range(2))
    y = segment_softmax_forward(device.put(x, shift), offsets)
    assert y.dtype == dtype and y.shape == x.shape
    expected = reference.segment_softmax(x[:n_rows], offsets)
    numpy.testing.assert_allclose(y[:n_rows], expected, rtol=BOUND[dtype])
    assert not y[n_rows:].any()
    check_gradient(device, y, gy, offsets, shift=shift)
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
        ((), 4),
        ((2,), 300),
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
    plan = softmax_launch
    monkeypatch.setattr(
        'chainer_bspmm.ops.segment_softmax.softmax_launch',
        lambda *sizes: plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 2, 1)),
    )
    check(device, 'f', 33 * 4 * 3, (2, 0, 3))


@pytest.mark.parametrize('sizes', [(0, 3, 24, 1, 0, 9), (2, 0, 5), (1, 1, 0, 300)], ids=str)
@pytest.mark.parametrize('n_channels', [1, 2, 4, 24])
@pytest.mark.parametrize('dtype', DTYPES)
def test_weights(device, dtype, n_channels, sizes):
    rng = numpy.random.RandomState(0)
    offsets = numpy.cumsum((0,) + sizes).astype(numpy.int32)
    poison, weights = weighted(offsets, n_channels, dtype, spare=9)
    weights[1] = 2**24 - 1
    uncounted = weights == 0
    x, gy = (rng.uniform(-3, 3, poison.shape).astype(dtype) for _ in range(2))
    x[uncounted], gy[uncounted] = poison[uncounted], poison[uncounted]
    weights = device.put(weights)
    y = segment_softmax_forward(device.put(x), offsets, weights)
    assert y.dtype == dtype and not y[uncounted].any()
    expected = reference.segment_softmax(x, offsets, weights)
    last_place = float(numpy.finfo(dtype).smallest_subnormal)  # a large weight makes y that small
    numpy.testing.assert_allclose(y, expected, rtol=BOUND[dtype], atol=last_place)
    check_gradient(device, y, gy, offsets, weights)


def test_weights_of_copies(device):
    """A row of weight 3 is three rows, and its gradient the sum of theirs."""
    x, gy = numpy.array([[1], [2], [2], [2]], 'd'), numpy.array([[3], [5], [7], [11]], 'd')
    weights = device.put(numpy.array([1, 3], 'f'))
    y = segment_softmax_forward(device.put(x), numpy.array([0, 4], 'i'))
    folded = segment_softmax_forward(device.put(x[:2]), numpy.array([0, 2], 'i'), weights)
    numpy.testing.assert_allclose(folded, y[:2], rtol=BOUND['d'])
    gx = segment_softmax_backward(y, device.put(gy), numpy.array([0, 4], 'i'))
    sums = device.put(numpy.stack([gy[0], gy[1:].sum(axis=0)]))
    folded = segment_softmax_backward(folded, sums, numpy.array([0, 2], 'i'), weights)
    expected = numpy.stack([gx[0], gx[1:].sum(axis=0)])
    numpy.testing.assert_allclose(folded, expected, rtol=4 * BOUND['d'])


def test_largest_values_and_nan(device):
    largest, nan = numpy.finfo('f').max, numpy.nan
    x = [[largest, nan], [-largest, 1], [5, -largest], [5, 0], [1, 2], [nan, 2]]
    y = segment_softmax_forward(device.put(numpy.array(x, 'f')), numpy.array([0, 2, 4, 6], 'i'))
    expected = [[1, nan], [0, nan], [0.5, 0], [0.5, 1], [nan, 0.5], [nan, 0.5]]
    numpy.testing.assert_array_equal(y, expected)


def test_gradient_that_is_not_aligned(device):
    """Where the softmax is."""
    a, g = (integers((6, 4), 'f', seed=seed) for seed in (2, 3))
    offsets = numpy.array([0, 2, 6], 'i')
    inner = reference.segment_sum(a.astype('d') * g, offsets)
    gx = segment_softmax_backward(device.put(a), device.put(g, 4), offsets)
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
    gx = segment_softmax_backward(device.put(a), device.put(g), offsets)
    numpy.testing.assert_array_equal(gx, (a * (g - inner)).astype(dtype))
    y = segment_softmax_forward(device.put(g), offsets)
    numpy.testing.assert_array_equal(y, reference.segment_softmax(g, offsets).astype(dtype))


@pytest.mark.parametrize('n_rows, n_channels, n_segments', [(0, 3, 2), (3, 0, 1), (0, 2, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels, n_segments):
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    offsets = numpy.linspace(0, n_rows, n_segments + 1).astype(numpy.int32)
    assert segment_softmax_forward(x, offsets).shape == (n_rows, n_channels)
    assert not device.launched
