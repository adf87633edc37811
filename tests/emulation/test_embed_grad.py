import numpy
import pytest

from chainer_bspmm.cuda import partial_sums
from chainer_bspmm.ops.embed_rows import embed_rows_backward
from tests.emulation.kernel_cases import CHANNELS, DTYPES, integers


@pytest.fixture
def made(device, monkeypatch):
    """Let sum_partials reach its arrays, whose addresses a table holds."""
    add = partial_sums.PendingSums.add

    def reachable(self, partials, *part):
        array = add(self, partials, *part)
        device.reachable += [partials, array]
        return array

    monkeypatch.setattr(partial_sums.PendingSums, 'add', reachable)


def some_ids(n_rows, n_types, dtype='i'):
    """Return ids of which a half is one, as carbon is among atoms, and some are none."""
    rng = numpy.random.RandomState(n_rows)
    ids = rng.randint(-1, n_types + 1, n_rows)
    return numpy.where(rng.uniform(size=n_rows) < 0.5, n_types // 2, ids).astype(dtype)


def check(device, dtype, ids, n_types, n_channels, gy=None):
    gy = integers((len(ids), n_channels), dtype) if gy is None else gy
    expected = numpy.zeros((n_types, n_channels))
    is_type = (ids >= 0) & (ids < n_types)
    numpy.add.at(expected, ids[is_type], gy[is_type].astype('d'))
    given = ids if isinstance(ids, type(device.put(ids))) else device.put(ids)
    result = embed_rows_backward(given, device.put(gy), n_types)
    assert result.dtype == dtype and result.shape == expected.shape
    numpy.testing.assert_array_equal(result, expected.astype(dtype))


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, made, dtype, n_channels):
    check(device, dtype, some_ids(70, 9), 9, n_channels)
    assert device.names == {'embed_grad', 'sum_partials'}


@pytest.mark.parametrize('n_rows', [1, 31, 32, 33, 64, 65, 500])
def test_rows(device, made, n_rows):
    check(device, 'f', some_ids(n_rows, 20), 20, 5)


@pytest.mark.parametrize('n_types', [1, 3, 8, 118, 376, 377, 1000])
@pytest.mark.parametrize('dtype', ['f', 'd'])
def test_types(device, made, dtype, n_types):
    check(device, dtype, some_ids(300, n_types), n_types, 33)


def test_one_type_and_rows_of_no_type(device, made):
    check(device, 'f', numpy.full(100, 3, 'i'), 4, 3)
    check(device, 'f', numpy.full(100, 4, 'i'), 4, 3)
    check(device, 'f', numpy.full(100, -(2**31), 'i'), 400, 3)


@pytest.mark.parametrize('ids_dtype', ['int8', 'int64', 'uint16'])
def test_ids_of_other_types(device, made, ids_dtype):
    check(device, 'f', abs(some_ids(40, 9, ids_dtype)), 9, 3)


def test_ids_and_rows_that_lie_apart(device, made):
    ids, gy = some_ids(80, 9), integers((40, 6), 'f')
    apart = device.put(ids)[::2]
    expected = numpy.zeros((9, 3))
    for i, row in zip(ids[::2], gy[:, ::2]):
        if 0 <= i < 9:
            expected[i] += row
    result = embed_rows_backward(apart, device.put(gy)[:, ::2], 9)
    numpy.testing.assert_array_equal(result, expected.astype('f'))


@pytest.mark.parametrize('n_rows, n_types, n_channels', [(0, 4, 3), (5, 4, 0), (5, 0, 3)])
def test_empty_result_launches_nothing(device, n_rows, n_types, n_channels):
    ids, gy = numpy.zeros(n_rows, 'i'), numpy.zeros((n_rows, n_channels), 'f')
    result = embed_rows_backward(device.put(ids), device.put(gy), n_types)
    assert result.shape == (n_types, n_channels) and not result.any() and not device.launched
