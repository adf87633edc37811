"""Rows of a table and their gradient: exact sums, second derivatives, reproducible bits."""

import numpy
import pytest

import chainer

from chainer_bspmm.ops.embed_rows import embed_rows, embed_rows_backward
from tests.emulation.kernel_cases import CHANNELS_OF_DTYPES, integers
from tests.support import assert_exact, DTYPES, features
from tests.support.gradients import check_gradients


def some_ids(n_rows, n_types, dtype='i'):
    """Return ids of which half are equal, as carbon's are, and some are outside of the table."""
    rng = numpy.random.RandomState(n_rows)
    ids = rng.randint(-1, n_types + 1, n_rows)
    return numpy.where(rng.uniform(size=n_rows) < 0.5, n_types // 2, ids).astype(dtype)


def check(place, dtype, ids, n_types, n_channels, step=1):
    """Compare exactly; arrays have every `step`-th id and column of larger ones."""
    gy = integers((len(ids[::step]), n_channels * step), dtype)
    result = embed_rows_backward(place.put(ids)[::step], place.put(gy)[:, ::step], n_types)
    ids, gy = ids[::step], gy[:, ::step]
    expected = numpy.zeros((n_types, n_channels))
    is_type = (ids >= 0) & (ids < n_types)
    numpy.add.at(expected, ids[is_type], gy[is_type].astype('d'))
    assert_exact(result, expected, dtype)


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels):
    check(place, dtype, some_ids(70, 9), 9, n_channels)


@pytest.mark.parametrize('n_rows', [1, 31, 32, 33, 64, 65, 500])
def test_rows(gpu, n_rows):
    check(gpu, 'f', some_ids(n_rows, 20), 20, 5)


# Numbers of types: one, few, as many as chemical elements, and more than rows.
@pytest.mark.parametrize('dtype, n_types', [('f', 1), ('f', 3), ('f', 118), ('d', 118), ('f', 400)])
def test_types(gpu, dtype, n_types):
    check(gpu, dtype, some_ids(300, n_types), n_types, 33)


def test_all_rows_of_one_type(gpu):
    check(gpu, 'f', numpy.full(100, 3, 'i'), 4, 3)


@pytest.mark.parametrize('no_type, n_types', [(4, 4), (-(2**31), 400)])
def test_rows_of_no_type(gpu, no_type, n_types):
    check(gpu, 'f', numpy.full(100, no_type, 'i'), n_types, 3)


@pytest.mark.parametrize('ids_dtype', ['int8', 'int64', 'uint16'])
def test_ids_of_other_types(gpu, ids_dtype):
    check(gpu, 'f', abs(some_ids(40, 9, ids_dtype)), 9, 3)


def test_input_that_is_not_contiguous(place):
    check(place, 'f', some_ids(80, 9), 9, 3, step=2)


@pytest.mark.parametrize('n_rows, n_types, n_channels', [(0, 4, 3), (5, 4, 0), (5, 0, 3)])
def test_empty_result_launches_nothing(place, n_rows, n_types, n_channels):
    ids = numpy.zeros(n_rows, 'i')
    gy = numpy.zeros((n_rows, n_channels), 'f')
    result = embed_rows_backward(place.put(ids), place.put(gy), n_types)
    assert result.shape == (n_types, n_channels) and not result.any() and not place.launched


every_table = pytest.mark.parametrize(
    'n_rows, n_types, n_channels', [(300, 7, 5), (1, 1, 1), (0, 4, 2)]
)


def ids_for(n_rows, n_types, dtype):
    """Return ids that leave out the last type, unless it is the only one."""
    return numpy.random.RandomState(0).randint(0, max(n_types - 1, 1), n_rows).astype(dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('ids_dtype', ['int32', 'int64'])
@every_table
def test_values(xp, dtype, ids_dtype, n_rows, n_types, n_channels):
    ids = ids_for(n_rows, n_types, ids_dtype)
    W = integers((n_types, n_channels), numpy.dtype(dtype).char)
    y = embed_rows(xp.asarray(ids), xp.asarray(W))
    assert_exact(y.array, W[ids].astype('d'), dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('ids_dtype', ['int32', 'int64'])
@every_table
def test_gradient_of_the_table(xp, dtype, ids_dtype, n_rows, n_types, n_channels):
    ids = ids_for(n_rows, n_types, ids_dtype)
    table = chainer.Variable(xp.ones((n_types, n_channels), dtype))
    gy = integers((n_rows, n_channels), numpy.dtype(dtype).char)
    y = embed_rows(xp.asarray(ids), table)
    y.grad = xp.asarray(gy)
    y.backward()
    expected = numpy.zeros((n_types, n_channels))
    numpy.add.at(expected, ids, gy.astype('d'))
    assert_exact(table.grad, expected, dtype)


def test_gradients(xp):
    rng = numpy.random.RandomState(0)
    ids = xp.asarray(rng.randint(0, 4, 30).astype('i'))
    check_gradients(lambda W: embed_rows(ids, W) ** 2, features(rng, xp, 5, 3, 'float64'))


def test_the_same_bits_again(xp):
    rng = numpy.random.RandomState(0)
    ids = xp.asarray(rng.randint(0, 3, 5000, 'i4'))
    gy = features(rng, xp, 5000, 33, 'float32')
    assert len({embed_rows_backward(ids, gy, 3).tobytes() for _ in range(5)}) == 1
