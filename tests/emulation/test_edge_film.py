import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.edge_film import edge_film_backward
from chainer_bspmm.ops.edge_film import edge_film_forward
from chainer_bspmm.ops.edge_film import film_launch
from tests.emulation.kernel_cases import assert_exact, batch, film_arrays, film_truth
from tests.emulation.kernel_cases import BATCHES, CHANNELS, DTYPES
from tests.support.spare import with_spare


def check(device, adj, dtype, n_channels, shift=0):
    arrays = film_arrays(adj, n_channels, dtype)
    messages, film, gy = (device.put(array, shift) for array in arrays)
    results = edge_film_forward(adj, messages, film), *edge_film_backward(adj, messages, film, gy)
    for result, expected in zip(results, film_truth(adj, *arrays)):
        assert_exact(result, expected, dtype)


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, batch('small' if n_channels > 64 else 'relations', dtype), dtype, n_channels)


@pytest.mark.parametrize('has_values', [True, False])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name, has_values):
    adj = batch(name, 'f')
    adj = adj if has_values else adj.replace(data=None)
    check(device, adj, 'f', 7)
    assert {defines['WEIGHTED'] for defines in device.launched} == {int(adj.data is not None)}
    assert [d['RESULT'] for d in device.launched] == ['OUTPUT', 'BY_MESSAGES', 'BY_FILM']


@pytest.mark.parametrize('longest', [3, 4, 5, 8, 9])
def test_rows_about_as_long_as_what_is_loaded_ahead(device, longest):
    indices = numpy.append(numpy.arange(longest) * 5 % 14, 3)
    indptr = numpy.array([0, longest, longest, longest + 1] + [longest + 1] * 4)
    adj = BatchedCSR(indptr, indices, numpy.array([0, 7]), n_relations=2)
    check(device, adj, 'f', 5)


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    check(device, batch('relations', dtype), dtype, 16, shift)
    assert {defines['VECTOR'] for defines in device.launched} == {width}


def test_blocks_that_stride_over_the_channels(device, monkeypatch):
    plan = film_launch

    def few(*sizes):
        return plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 2, 1))

    monkeypatch.setattr('chainer_bspmm.ops.edge_film.film_launch', few)
    check(device, batch('relations', 'f'), 'f', 33 * 4 * 3)


def test_capacity_beyond_the_batch(device):
    adj = batch('relations', 'f')
    spare = with_spare(adj, 5, 7)
    for matrix in (spare, spare.T):  # a row that does not exist: reading it would be an error
        matrix.indices[adj.nnz :] = 2**30
        matrix.data[adj.nnz :] = numpy.nan
    arrays = film_arrays(adj, 12, 'f')
    given = []
    for array in arrays:
        larger = numpy.full((len(array) * spare.n_rows // adj.n_rows, array.shape[1]), numpy.nan)
        larger[: len(array)] = array
        given.append(device.put(larger.astype('f')))
    messages, film, gy = given
    results = edge_film_forward(spare, messages, film), *edge_film_backward(spare, *given)
    for result, expected in zip(results, film_truth(adj, *arrays)):
        assert_exact(result[: len(expected)], expected, 'f')
        assert not result[len(expected) :].any()


def test_nan_reaches_its_rows_only(device):
    adj = batch('relations', 'f')
    messages, film, gy = (device.put(array) for array in film_arrays(adj, 9, 'f'))
    messages[2, 3] = film[5, 8] = numpy.nan
    y = edge_film_forward(adj, messages, film)
    assert 0 < numpy.isnan(y).sum() < y.size // 2
    assert_exact(y, film_truth(adj, messages, film, gy)[0], 'f')


@pytest.mark.parametrize('n_rows, n_channels', [(0, 4), (3, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels):
    adj = BatchedCSR.from_matrices([numpy.zeros((2, n_rows, n_rows))])
    messages, film, gy = (device.put(array) for array in film_arrays(adj, n_channels, 'f'))
    assert edge_film_forward(adj, messages, film).shape == (n_rows, n_channels)
    gmessages, gfilm = edge_film_backward(adj, messages, film, gy)
    assert (gmessages.shape, gfilm.shape) == (messages.shape, film.shape)
    assert not device.launched
