import pytest

from chainer_bspmm import BatchedCOO
from chainer_bspmm.papers import gpu
from tests.emulation.kernel_cases import assert_exact, batch, integers
from tests.emulation.kernel_cases import BATCHES, CHANNELS, DTYPES
from tests.support import reference
from tests.support import shuffled


def check(device, name, dtype, n_channels, shift=0):
    adj = shuffled(BatchedCOO.from_csr(batch(name, dtype)))
    u = device.put(integers((adj.n_rows, n_channels), dtype, seed=2), shift)
    v = device.put(integers((adj.n_cols, n_channels), dtype, seed=3))
    assert_exact(gpu.bsddmm(adj, u, v), reference.bsddmm(adj, u, v), dtype)
    return device.launched[-1] if device.launched else None


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, 'small' if n_channels > 64 else 'mixed', dtype, n_channels)


@pytest.mark.parametrize(
    'n_channels, lanes, tile',
    [(4, 1, 1), (8, 1, 2), (12, 1, 3), (20, 2, 4), (36, 4, 4), (68, 8, 4), (260, 32, 4)],
)
def test_lanes(device, n_channels, lanes, tile):
    defines = check(device, 'mixed', 'f', n_channels)
    assert (defines['LANES'], defines['TILE']) == (lanes, tile)


@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name):
    check(device, name, 'f', 7)


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    assert check(device, 'small', dtype, 16, shift)['VECTOR'] == width
