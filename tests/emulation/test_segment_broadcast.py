import numpy
import pytest

from chainer_bspmm.ops.segments import broadcast_launch
from chainer_bspmm.ops.segments import segment_broadcast_forward
from tests.emulation.kernel_cases import assert_exact, integers, weighted
from tests.emulation.kernel_cases import CHANNELS, DTYPES, TERM
from tests.support import reference


def check(device, dtype, n_channels, sizes, spare=0, shift=0, max_rows=None):
    offsets = numpy.cumsum((0,) + sizes).astype(numpy.int32)
    y = device.put(integers((len(sizes), n_channels), dtype, TERM), shift)
    x = segment_broadcast_forward(y, offsets, int(offsets[-1]) + spare, max_rows)
    expected = reference.segment_broadcast(y, offsets)
    assert_exact(x, numpy.pad(expected, ((0, spare), (0, 0))), dtype)
    return device.launched[-1]


def check_weighted(device, dtype, n_channels, sizes, spare=0):
    offsets = numpy.cumsum((0,) + sizes).astype(numpy.int32)
    _, weights = weighted(offsets, n_channels, dtype, spare)
    y = integers((len(sizes), n_channels), dtype)
    y[2] = numpy.nan  # of which no row counts
    y[2, ::2] = numpy.inf
    x = segment_broadcast_forward(
        device.put(y), offsets, int(offsets[-1]) + spare, None, device.put(weights)
    )
    expected = reference.segment_broadcast(y, offsets, weights)
    assert_exact(x, numpy.pad(expected, ((0, spare), (0, 0))), dtype)


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, dtype, n_channels, (0, 3, 0, 0, 24, 1, 5, 0) if n_channels <= 64 else (0, 3, 1))


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
def test_segments_and_rows_beyond_the_batch(device, sizes, spare):
    check(device, 'f', 3, sizes, spare)


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    assert check(device, dtype, 16, (2, 0, 3), shift=shift)['VECTOR'] == width


@pytest.mark.parametrize('max_rows', [None, 4])
@pytest.mark.parametrize(
    'sizes, spare',
    [
        ((5,), 0),
        ((4,), 9),
        ((8, 9), 1),
        ((3, 6, 5, 2), 0),
        ((4, 5, 0, 0, 5), 3),
        ((1, 1, 30, 2, 0), 0),
        ((7, 7, 7), 20),
        ((0, 17, 0, 1), 2),
    ],
    ids=str,
)
def test_long_segments(device, monkeypatch, sizes, spare, max_rows):
    monkeypatch.setattr('chainer_bspmm.ops.segments.MIN_CHUNK', 4)
    monkeypatch.setattr('chainer_bspmm.ops.segments.broadcast_launch', broadcast_launch.__wrapped__)
    for n_channels in (8, 1):
        check(device, 'f', n_channels, sizes, spare, max_rows=max_rows)


@pytest.mark.parametrize('n_channels', [1, 2, 4, 24])
@pytest.mark.parametrize('dtype', DTYPES)
def test_weights(device, dtype, n_channels):
    check_weighted(device, dtype, n_channels, (0, 3, 24, 1, 0, 9), 5)


@pytest.mark.parametrize(
    'sizes', [(3, 6, 5, 2), (1, 1, 30, 2, 0), (7, 7, 7), (0, 17, 0, 1)], ids=str
)
def test_weights_of_long_segments(device, monkeypatch, sizes):
    monkeypatch.setattr('chainer_bspmm.ops.segments.MIN_CHUNK', 4)
    monkeypatch.setattr('chainer_bspmm.ops.segments.broadcast_launch', broadcast_launch.__wrapped__)
    for n_channels in (8, 1):
        check_weighted(device, 'f', n_channels, sizes, 7)


@pytest.mark.parametrize('dtype', DTYPES)
def test_weights_are_as_exact_as_float32(device, dtype):
    y = device.put(numpy.array([[2**-8]], dtype))
    weights = device.put(numpy.array([2**23 + 1, 2049, 2051], 'f'))
    x = segment_broadcast_forward(y, numpy.array([0, 3], 'i'), 3, None, weights)
    assert_exact(x, weights[:, None] * 2.0**-8, dtype)


def test_blocks_that_stride_over_the_channels(device, monkeypatch):
    plan = broadcast_launch
    monkeypatch.setattr(
        'chainer_bspmm.ops.segments.broadcast_launch',
        lambda *sizes, **options: plan(*sizes, **options)._replace(
            grid=(plan(*sizes, **options).grid[0], 2, 1)
        ),
    )
    check(device, 'f', 33 * 4 * 3, (2, 0, 3))


def test_nan_stays_in_its_segment(device):
    y = device.put(numpy.array([[1, numpy.nan], [2, 3]], 'f'))
    x = segment_broadcast_forward(y, numpy.array([0, 1, 3], numpy.int32), 3)
    numpy.testing.assert_array_equal(x, [[1, numpy.nan], [2, 3], [2, 3]])


@pytest.mark.parametrize('n_rows, n_channels', [(0, 3), (3, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels):
    y = device.put(numpy.zeros((1, n_channels), 'f'))
    x = segment_broadcast_forward(y, numpy.array([0, n_rows], numpy.int32), n_rows)
    assert x.shape == (n_rows, n_channels)
    assert not device.launched
