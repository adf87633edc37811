"""The kernel of dropout bit for bit: which elements it keeps, and their values."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.ops.dropout import dropout_forward
from chainer_bspmm.ops.dropout import dropout_mask_forward
from chainer_bspmm.ops.dropout import relu_dropout_forward
from tests.emulation.kernel_cases import DTYPES, TERM, integers
from tests.support import reference


# seed, stream, step: every word that goes into the generator is more than its low bits.
DRAWS = [(0, 0, 0), (2**64 - 3, 2**32 - 1, 2**64 - 1), (5 << 32, 7, 11 << 32), (3, 1, 4)]


def factors(x, ratio, draw):
    scale = x.dtype.type(1 / (1 - ratio))
    return (scale * reference.kept(x.size, ratio, *draw)).reshape(x.shape)


def run(function, device, x, ratio, draw, shift=0):
    seed, stream, step = draw
    counter = device.put(numpy.array([step], numpy.uint64))
    given = device.put(x, shift)
    return given, function(given, ratio, seed, stream, counter)


@pytest.mark.parametrize('draw', DRAWS, ids=str)
@pytest.mark.parametrize(
    'shape', [(37, 12), (1, 1), (5,), (3, 2), (1, 7), (2, 3, 4), (), (515,)], ids=str
)
@pytest.mark.parametrize('dtype', DTYPES)
def test_dropout(device, dtype, shape, draw):
    x = integers(shape, dtype, TERM)
    _, (mask, y) = run(dropout_forward, device, x, 0.3, draw)
    expected = factors(x, 0.3, draw)
    assert mask.dtype == y.dtype == dtype and mask.shape == y.shape == shape
    numpy.testing.assert_array_equal(mask, expected)
    numpy.testing.assert_array_equal(y, x * expected)


@pytest.mark.parametrize('shape', [(37, 12), (1, 1), (3, 2), (1, 7)], ids=str)
@pytest.mark.parametrize('dtype', DTYPES)
def test_rectified_in_place(device, dtype, shape):
    x = integers(shape, dtype, TERM)
    x[0, 0] = numpy.nan
    given, result = run(relu_dropout_forward, device, x, 0.5, DRAWS[1])
    assert result is None
    numpy.testing.assert_array_equal(given, numpy.maximum(x, 0) * factors(x, 0.5, DRAWS[1]))


def test_rectified_in_place_where_rows_lie_apart(device):
    x = integers((6, 8), 'f')
    given = device.put(x)
    relu_dropout_forward(given[:, ::2], 0.5, 1, 2, device.put(numpy.array([3], numpy.uint64)))
    part = numpy.ascontiguousarray(x[:, ::2])
    x[:, ::2] = numpy.maximum(part, 0) * factors(part, 0.5, (1, 2, 3))
    numpy.testing.assert_array_equal(given, x)


@pytest.mark.parametrize('size', [1, 4, 6, 131])
@pytest.mark.parametrize('dtype', DTYPES)
def test_mask_alone(device, dtype, size):
    counter = device.put(numpy.array([9], numpy.uint64))
    mask = dropout_mask_forward(size, numpy.dtype(dtype), 0.25, 7, 8, counter)
    assert mask.dtype == dtype
    numpy.testing.assert_array_equal(mask, factors(numpy.empty(size, dtype), 0.25, (7, 8, 9)))


@pytest.mark.parametrize(
    'dtype, shift, width',
    [('e', 0, 4), ('f', 0, 4), ('d', 0, 2), ('e', 2, 1), ('f', 8, 2), ('d', 8, 1)],
)
def test_vectors_as_wide_as_the_address_allows(device, dtype, shift, width):
    x = integers((9, 16), dtype)
    run(relu_dropout_forward, device, x, 0.3, DRAWS[2], shift)
    assert device.launched == [{'VECTOR': width, 'KIND': 'RELU'}]


def test_vectors_no_wider_than_the_address_of_any_array_allows(device, monkeypatch):
    """The arrays that dropout makes lie where the device puts them."""
    x = integers((9, 16), 'f')
    monkeypatch.setattr(cuda.cupy, 'empty', lambda *array: device.put(numpy.empty(*array), 4))
    _, (mask, y) = run(dropout_forward, device, x, 0.3, DRAWS[2])
    expected = factors(x, 0.3, DRAWS[2])
    numpy.testing.assert_array_equal(mask, expected)
    numpy.testing.assert_array_equal(y, x * expected)


@pytest.mark.parametrize('shift', [4, 8])
def test_vectors_no_wider_than_the_address_of_the_input_allows(device, shift):
    x = integers((9, 16), 'f')
    _, (mask, y) = run(dropout_forward, device, x, 0.3, DRAWS[2], shift)
    numpy.testing.assert_array_equal(y, x * factors(x, 0.3, DRAWS[2]))
    assert device.launched[-1]['VECTOR'] == shift // 4


@pytest.mark.parametrize('element', range(4))
def test_every_bit_of_the_published_vector_counts(device, element):
    """An element is kept up to the ratio that its word is, and not beyond."""
    word = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)[element]
    for ratio, kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
        _, (mask, _) = run(dropout_forward, device, numpy.ones(4, 'd'), ratio, DRAWS[0])
        assert (mask[element] > 0) == kept


@pytest.mark.parametrize('ratio', [0.0, 1 - 2**-40])
def test_least_and_greatest_ratio(device, ratio):
    x = numpy.ones(1000, 'd')
    _, (mask, _) = run(dropout_forward, device, x, ratio, DRAWS[3])
    assert (mask == (0 if ratio else 1)).all()


@pytest.mark.parametrize('shape', [(0, 5), (3, 0)])
def test_nothing_to_drop_launches_nothing(device, shape):
    _, (mask, y) = run(dropout_forward, device, numpy.empty(shape, 'f'), 0.5, DRAWS[0])
    assert mask.shape == y.shape == shape and not device.launched
