import numpy
import pytest

from chainer_bspmm.ops import segments
from chainer_bspmm.ops.segments import reduce_launches
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.ops.segments import segment_max_forward
from chainer_bspmm.ops.segments import segment_sum_forward
from tests.emulation.kernel_cases import assert_exact, integers, weighted
from tests.emulation.kernel_cases import CHANNELS, DTYPES, TERM
from tests.support import reference


# Empty segments first, in between and last; one row; one huge among tiny ones; one row more, as
# many as, and one row fewer than the kernel loads ahead.
SIZES = (0, 1, 24, 0, 0, 2, 9, 8, 7, 1, 0)
OPERATIONS = ('sum', 'max')


# Segments that are longer than a chunk of 4 rows, and not; they begin and end within a chunk, at
# its border and one row next to it, and two meet in one chunk.
LONG = (
    (5,),
    (4,),
    (8, 9),
    (3, 6, 5, 2),
    (4, 5, 0, 0, 5),
    (1, 1, 30, 2, 0),
    (7, 7, 7),
    (0, 17, 0, 1),
)


@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr('chainer_bspmm.ops.segments.MIN_CHUNK', 4)
    monkeypatch.setattr('chainer_bspmm.ops.segments.reduce_launches', reduce_launches.__wrapped__)


def offsets_of(sizes):
    return numpy.cumsum((0,) + tuple(sizes)).astype(numpy.int32)


def check(device, operation, x, offsets, weights=None):
    y = getattr(segments, 'segment_%s_forward' % operation)(x, offsets, None, weights)
    expected = getattr(reference, 'segment_' + operation)(x, offsets, weights)
    assert_exact(y, expected, x.dtype.char)
    return y


def check_weighted(device, operation, n_channels, dtype, sizes):
    offsets = offsets_of(sizes)
    x, weights = weighted(offsets, n_channels, dtype, spare=5)
    y = check(device, operation, device.put(x), offsets, device.put(weights))
    assert numpy.isfinite(y).all()
    return y


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels, operation):
    offsets = offsets_of(SIZES if n_channels <= 64 else SIZES[:3])
    check(device, operation, device.put(integers((offsets[-1], n_channels), dtype, TERM)), offsets)


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('sizes', [(1,), (0,), (0, 0, 5), (40,)], ids=str)
def test_segments(device, sizes, operation):
    offsets = offsets_of(sizes)
    check(device, operation, device.put(integers((offsets[-1], 3), 'f', TERM)), offsets)


def test_maximum_of_negative_values(device):
    offsets = offsets_of(SIZES)
    x = device.put(-1 - abs(integers((offsets[-1], 4), 'f')))
    assert check(device, 'max', x, offsets).min() < 0


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_nan_wins_wherever_it_stands(device, dtype, operation):
    offsets = offsets_of((24, 9, 3, 1))
    x = device.put(integers((offsets[-1], 3), dtype, TERM))
    # First, middle and last of a segment, and alone in one.
    x[0, 0] = x[12, 1] = x[23, 2] = x[36, 1] = numpy.nan
    assert numpy.isnan(check(device, operation, x, offsets)).sum() == 4


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    offsets = offsets_of(SIZES)
    check(device, 'sum', device.put(integers((offsets[-1], 16), dtype, TERM), shift), offsets)
    assert device.launched[-1]['VECTOR'] == width


def test_rows_beyond_the_batch_are_not_read(device):
    offsets = offsets_of((2, 3))
    x = device.put(integers((9, 3), 'f', TERM))
    x[5:] = numpy.nan
    for operation in OPERATIONS:
        assert not numpy.isnan(check(device, operation, x, offsets)).any()


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('sizes', LONG, ids=str)
def test_long_segments(device, chunks_of_four, sizes, operation):
    offsets = offsets_of(sizes)
    # Two vectors and a part of a wider one; the first of many columns for many units a block.
    for n_channels in (8, 33, 1):
        x = device.put(-1 - abs(integers((offsets[-1], n_channels), 'f', TERM)))
        check(device, operation, x, offsets)
    has_long = offsets[-1] > 4
    assert [launched['COMBINE'] for launched in device.launched] == [0, 1][: 1 + has_long] * 3


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_long_segments_in_every_dtype(device, chunks_of_four, dtype, operation):
    offsets = offsets_of((6, 1, 19, 3))
    x = device.put(integers((offsets[-1] + 5, 24), dtype, TERM))
    x[offsets[-1] :] = numpy.nan  # rows beyond the batch
    x[9, 3] = x[25, 4] = numpy.nan
    assert numpy.isnan(check(device, operation, x, offsets)).sum() == 2


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('n_channels', [1, 2, 4, 24])
@pytest.mark.parametrize('dtype', DTYPES)
def test_weights(device, dtype, n_channels, operation):
    y = check_weighted(device, operation, n_channels, dtype, SIZES)
    assert y.any() and not y[2].any()


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('sizes', [*LONG, (1, 3, 19, 2)], ids=str)
def test_weights_of_long_segments(device, chunks_of_four, sizes, operation):
    sizes = (*sizes, 0, 0)  # there is a third
    for n_channels in (8, 1):
        check_weighted(device, operation, n_channels, 'f', sizes)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('sizes', [(6, 3), (2, 1)], ids=str)
def test_maximum_of_counted_rows_without_a_finite_value(device, chunks_of_four, dtype, sizes):
    """-inf is a value; so is NaN; neither is what a segment has where no row counts."""
    offsets = offsets_of(sizes)
    x = numpy.full((offsets[-1], 3), -numpy.inf, dtype)
    x[1] = -numpy.inf, 5, numpy.nan
    weights = numpy.zeros(offsets[-1], 'f')
    weights[:2] = 1
    y = check(device, 'max', device.put(x), offsets, device.put(weights))
    numpy.testing.assert_array_equal(y, [[-numpy.inf, 5, numpy.nan], [0, 0, 0]])


@pytest.mark.parametrize('dtype', DTYPES)
def test_weights_are_as_exact_as_float32(device, dtype):
    # Odd numbers, too large for a float16; and one, too large for an integer in float32.
    x = device.put(numpy.array([[1], [-1], [1], [-1]], dtype))
    weights = device.put(numpy.array([2**24 - 1, 2**24 - 2, 2051, 2049], 'f'))
    assert check(device, 'sum', x, offsets_of((4,)), weights) == 3


def test_parts_of_a_long_segment_are_not_rounded_to_float16(device, chunks_of_four):
    # 2049 is not a float16: a part that is one would lose its ones.
    x = device.put(numpy.array([[2048], [0], [0], [1]] * 2 + [[-2048], [0], [0], [0]] * 2, 'e'))
    assert check(device, 'sum', x, offsets_of((16,))) == 2


def test_one_launch_where_no_segment_is_long(device, chunks_of_four):
    offsets = offsets_of((3, 4, 0, 4, 1))
    x = device.put(integers((offsets[-1], 3), 'f', TERM))
    y = segment_sum_forward(x, offsets, 4)
    assert_exact(y, reference.segment_sum(x, offsets), 'f')
    assert len(device.launched) == 1
    # It is a hint: a wrong one only costs time.
    offsets = offsets_of((12,))
    assert_exact(segment_max_forward(x, offsets, 1), reference.segment_max(x, offsets), 'f')


@pytest.mark.parametrize('sizes', [(2, 0, 3), (5, 7)], ids=str)
def test_blocks_that_stride_over_the_channels(device, chunks_of_four, monkeypatch, sizes):
    plan = reduce_launches

    def narrow(*sizes):
        return [launch._replace(grid=(launch.grid[0], 2, 1)) for launch in plan(*sizes)]

    monkeypatch.setattr('chainer_bspmm.ops.segments.reduce_launches', narrow)
    offsets = offsets_of(sizes)
    check(device, 'sum', device.put(integers((offsets[-1], 33 * 4 * 3), 'f', TERM)), offsets)


@pytest.mark.parametrize('sizes, n_channels', [((), 3), ((2, 1), 0)], ids=str)
def test_empty_result_launches_nothing(device, sizes, n_channels):
    x = device.put(numpy.zeros((sum(sizes), n_channels), 'f'))
    for operation in (segment_sum_forward, segment_max_forward):
        assert operation(x, offsets_of(sizes)).shape == (len(sizes), n_channels)
    assert not device.launched


@pytest.mark.parametrize('n_rows', [0, 1, 3, 4, 5, 8, 24, 33])
@pytest.mark.parametrize('n_channels', [0, 1, 3, 8])
@pytest.mark.parametrize('dtype', DTYPES)
def test_sum_of_all_rows(device, chunks_of_four, dtype, n_channels, n_rows):
    x = device.put(integers((n_rows, n_channels), dtype, TERM))
    assert_exact(row_sum(x), x.astype('d').sum(axis=0), dtype)
    assert len(device.launched) == (n_channels and 1 + (n_rows > 4))
