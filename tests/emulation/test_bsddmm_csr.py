import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.bspmm import bsddmm_forward
from tests.emulation.kernel_cases import assert_exact, batch, integers, with_room
from tests.emulation.kernel_cases import BATCHES, CHANNELS, DTYPES
from tests.support import reference


def check(device, adj, dtype, n_channels, shifts=(0, 0)):
    u = device.put(integers((adj.n_rows, n_channels), dtype, seed=2), shifts[0])
    v = device.put(integers((adj.n_cols, n_channels), dtype, seed=3), shifts[1])
    assert_exact(bsddmm_forward(adj, u, v), reference.bsddmm(adj, u, v), dtype)
    return device.launched[-1] if device.launched else None


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, batch('small' if n_channels > 64 else 'mixed', dtype), dtype, n_channels)


@pytest.mark.parametrize(
    'n_channels, lanes, tile',
    [
        (4, 1, 1),
        (8, 1, 2),
        (12, 2, 2),
        (20, 4, 2),
        (36, 8, 2),
        (68, 16, 2),
        (132, 32, 2),
        (400, 32, 2),
    ],
)
def test_lanes(device, n_channels, lanes, tile):
    defines = check(device, batch('mixed', 'f'), 'f', n_channels)
    assert (defines['LANES'], defines['TILE']) == (lanes, tile)


@pytest.mark.parametrize('longest', [3, 4, 5, 8, 9])
def test_rows_about_as_long_as_what_is_loaded_ahead(device, longest):
    indices = numpy.concatenate([numpy.arange(longest) % 7, [3]])
    adj = BatchedCSR(
        numpy.array([0, longest, longest, longest + 1] + [longest + 1] * 4),
        indices,
        numpy.array([0, 7]),
    )
    check(device, adj, 'f', 5)


@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name):
    adj = batch(name, 'f')
    check(device, adj, 'f', 7)
    assert len(device.launched) == (adj.nnz > 0)


@pytest.mark.parametrize(
    'dtype, shifts, width', [('e', (2, 0), 1), ('e', (0, 2), 1), ('f', (8, 0), 2), ('d', (0, 8), 1)]
)
def test_unaligned_input(device, dtype, shifts, width):
    assert check(device, batch('small', dtype), dtype, 16, shifts)['VECTOR'] == width


def test_three_dimensional_input_that_is_not_contiguous(device):
    adj = batch('padded', 'f')
    u = device.put(integers((adj.n_graphs, adj.max_rows, 8), 'f'))[:, :, ::2]
    v = device.put(integers((4, adj.max_rows, adj.n_graphs), 'f', seed=1)).T
    assert_exact(bsddmm_forward(adj, u, v), reference.bsddmm(adj, u, v), 'f')


def test_capacity_beyond_the_batch(device):
    adj = batch('small', 'f')
    spare = 5
    larger = with_room(adj, spare)
    u = device.put(integers((larger.n_rows, 40), 'f', seed=2))
    v = device.put(integers((adj.n_cols, 40), 'f', seed=3))
    w = bsddmm_forward(larger, u, v)
    expected = reference.bsddmm(adj, u[: adj.n_rows], v)
    assert_exact(w, numpy.pad(expected, (0, spare)), 'f')  # entries that no row owns: 0, not NaN


@pytest.mark.parametrize('dtype', DTYPES)
def test_nan_reaches_its_entries_only(device, dtype):
    adj = batch('mixed', dtype)
    u = device.put(integers((adj.n_rows, 33), dtype, seed=2))
    v = device.put(integers((adj.n_cols, 33), dtype, seed=3))
    u[10, 32] = v[12, 0] = numpy.nan
    w = bsddmm_forward(adj, u, v)
    assert 0 < numpy.isnan(w).sum() < w.size // 2
    assert_exact(w, reference.bsddmm(adj, u, v), dtype)


def test_no_channels_launch_nothing(device):
    adj = batch('small', 'f')
    empty = device.put(numpy.zeros((adj.n_rows, 0), 'f'))
    assert_exact(bsddmm_forward(adj, empty, empty), numpy.zeros(adj.nnz), 'f')
    assert not device.launched
