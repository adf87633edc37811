import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import papers
from chainer_bspmm.papers import gpu
from chainer_bspmm.papers import policy
from tests.emulation.kernel_cases import assert_exact, batch, integers
from tests.emulation.kernel_cases import BATCHES, DTYPES
from tests.support import reference


def tall(dtype):
    """A graph of more rows than two warps, one of exactly a warp, a small and an empty one."""
    rng = numpy.random.RandomState(0)
    return BatchedCSR.from_matrices(
        [integers((n, n), dtype, seed=n) * (rng.uniform(size=(n, n)) < 0.1) for n in (70, 0, 32, 3)]
    )


def check(
    device, adj, dtype, n_channels, size, sort_rows=False, with_residual=False, trans=False, shift=0
):
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    x = device.put(integers((n_in, n_channels), dtype, seed=2), shift)
    residual = None
    if with_residual:
        residual = device.put(integers((n_out, n_channels), dtype, seed=3))
    y = gpu.bspmm(BatchedSELL(adj, size, sort_rows), x, None, residual, trans)
    assert_exact(y, reference.bspmm(adj, x, None, residual, trans), dtype)
    return device.launched[-1]


@pytest.mark.parametrize(
    'n_channels, tile',
    [(1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (7, (1, 7)), (8, None), (9, (1, 8)), (33, (1, 8))],
)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels, tile):
    defines = check(device, batch('mixed', dtype), dtype, n_channels, 7, True, True)
    assert (defines['VECTOR'], defines['TILE']) == (
        tile or {'e': (8, 1), 'f': (4, 2), 'd': (2, 4)}[dtype]
    )
    assert defines['WHOLE_WARPS'] == 0


@pytest.mark.parametrize('sort_rows', [False, True])
@pytest.mark.parametrize(
    'size, whole', [(1, 0), (2, 0), (7, 0), (31, 0), (32, 1), (33, 1), (64, 1), (1000, 1)]
)
def test_slice_sizes(device, size, whole, sort_rows):
    assert check(device, tall('f'), 'f', 3, size, sort_rows)['WHOLE_WARPS'] == whole


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name, trans):
    adj = batch(name, 'f')
    assert check(device, adj, 'f', 3, 2, True, True, trans)['WEIGHTS'] == (adj.data is not None)


@pytest.mark.parametrize('size', [1, 7, 64])
@pytest.mark.parametrize('sort_rows', [False, True])
def test_implicit_ones(device, size, sort_rows):
    adj = batch('mixed', 'f').replace()
    adj.data = None
    assert check(device, adj, 'f', 3, size, sort_rows)['WEIGHTS'] == 0


@pytest.mark.parametrize(
    'dtype, shift, width',
    [('e', 0, 8), ('e', 8, 4), ('e', 2, 1), ('f', 8, 2), ('f', 4, 1), ('d', 8, 1)],
)
def test_unaligned_input(device, dtype, shift, width):
    assert check(device, batch('small', dtype), dtype, 8, 2, shift=shift)['VECTOR'] == width


def test_unaligned_residual(device):
    adj = batch('small', 'f')
    x = device.put(integers((adj.n_cols, 4), 'f'))
    residual = device.put(integers((adj.n_rows, 4), 'f', seed=1), shift=4)
    assert_exact(
        gpu.bspmm(BatchedSELL(adj), x, None, residual, False),
        reference.bspmm(adj, x, residual=residual),
        'f',
    )
    assert device.launched[-1]['VECTOR'] == 1


def test_three_dimensional_input(device):
    adj = batch('padded', 'f')
    x = device.put(integers((adj.n_graphs, adj.max_rows, 4), 'f'))
    assert_exact(gpu.bspmm(BatchedSELL(adj, 2), x, None, None, False), reference.bspmm(adj, x), 'f')


def test_input_that_is_not_contiguous(device):
    adj = batch('small', 'f')
    x = device.put(integers((6, adj.n_cols), 'f')).T
    residual = device.put(integers((adj.n_rows, 12), 'f', seed=2))[:, ::2]
    assert_exact(
        gpu.bspmm(BatchedSELL(adj, 2), x, None, residual, False),
        reference.bspmm(adj, x, residual=residual),
        'f',
    )


def test_blocks_that_stride_over_the_channels(device, monkeypatch):
    plan = policy.sell_launch
    monkeypatch.setattr(
        policy,
        'sell_launch',
        lambda *sizes: plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 2, 1)),
    )
    check(device, batch('small', 'f'), 'f', 33, 2, with_residual=True)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('size', [2, 64])
def test_nan_reaches_its_rows_only(device, dtype, size):
    # Padding must not meet it: row 0 of x is what a padding entry would name.
    adj = batch('mixed', dtype)
    x = device.put(integers((adj.n_cols, 3), dtype))
    x[0, 0] = numpy.inf
    x[10, 1] = numpy.nan
    y = gpu.bspmm(BatchedSELL(adj, size), x, None, None, False)
    assert 2 < (~numpy.isfinite(y)).sum() < y.size // 2
    assert_exact(y, reference.bspmm(adj, x), dtype)


def test_by_name(device):
    adj = BatchedSELL(batch('small', 'f'))
    x = device.put(integers((adj.n_cols, 2), 'f'))
    y = papers.bspmm(adj, x, algorithm='sell').array
    assert_exact(y, reference.bspmm(adj.to_csr(), x), 'f')
    with pytest.raises(ValueError, match="algorithm: expected one of 'auto', 'sell', got 'vector'"):
        papers.bspmm(adj, x, algorithm='vector')
    assert len(device.launched) == 1


@pytest.mark.parametrize('n_rows, n_channels', [(0, 3), (3, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels):
    adj = BatchedSELL(BatchedCSR.from_matrices([numpy.ones((n_rows, n_rows), 'f')]))
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    assert gpu.bspmm(adj, x, None, None, False).shape == (n_rows, n_channels)
    assert not device.launched
