"""The launch policy, without a GPU: every row and vector has exactly one owner."""
import itertools

import hypothesis
from hypothesis import strategies
import pytest

from chainer_bspmm.backend import kernels
from chainer_bspmm.backend import policy


@pytest.mark.parametrize('n_channels, itemsize, address, expected', [
    (64, 4, 0, 4), (64, 2, 0, 8), (64, 8, 0, 2), (6, 4, 0, 2), (33, 4, 0, 1), (1, 2, 0, 1),
    (64, 4, 8, 2), (64, 4, 4, 1), (64, 2, 2, 1), (12, 2, 0, 4),
])
def test_vector_width(n_channels, itemsize, address, expected):
    assert policy.vector_width(n_channels, itemsize, 0x7f0000000000 | address) == expected


@hypothesis.settings(deadline=None)
@hypothesis.given(strategies.integers(1, 3000), strategies.integers(1, 3000),
                  strategies.sampled_from([1, 2, 4, 8]))
def test_row_launch_covers_everything_once(n_rows, n_vectors, width):
    launch = policy.row_launch(n_rows, n_vectors * width, width)
    columns, rows, depth = launch.block
    assert depth == 1 and launch.n_vectors == n_vectors
    assert 0 < columns * rows <= 1024
    assert (launch.grid[0] - 1) * rows < n_rows <= launch.grid[0] * rows
    # The kernel strides over the vectors by all threads of the grid's second dimension.
    starts = range(launch.grid[1] * columns)
    owned = sorted(itertools.chain.from_iterable(
        range(start, n_vectors, len(starts)) for start in starts))
    assert owned == list(range(n_vectors))
    assert ('VECTOR', width) in launch.defines


def test_row_launch_wastes_little():
    for n_vectors in range(1, 300):
        columns, rows, _ = policy.row_launch(10 ** 6, n_vectors, 1).block
        tiles = policy.row_launch(10 ** 6, n_vectors, 1).grid[1]
        assert tiles * columns < n_vectors + tiles
        assert columns * rows > policy.BLOCK // 2


def test_row_launch_stays_within_the_grid():
    launch = policy.row_launch(2 ** 31 - 1, 2 ** 31 - 1, 1)
    assert launch.grid[0] <= 2 ** 31 - 1 and launch.grid[1] <= 65535


@pytest.mark.parametrize('n_vectors', [1, 2, 3, 15, 16, 17, 31, 32, 33, 1000])
def test_dot_launch(n_vectors):
    launch = policy.dot_launch(100, n_vectors * 4, 4)
    lanes, rows, _ = launch.block
    assert lanes & (lanes - 1) == 0 and lanes <= 32 and ('LANES', lanes) in launch.defines
    assert lanes >= min(n_vectors, 32)
    assert lanes * rows % 32 == 0  # the lanes of a row lie in one warp
    assert (launch.grid[0] - 1) * rows < 100 <= launch.grid[0] * rows


@pytest.mark.parametrize('rows, slots', [(1, 1), (2, 2), (7, 7), (31, 31), (32, 32), (33, 64),
                                         (64, 64), (1000, 1024)])
def test_sell_slots(rows, slots):
    assert policy.sell_slots(rows) == slots


@hypothesis.settings(deadline=None)
@hypothesis.given(strategies.integers(1, 5000), strategies.integers(1, 1024),
                  strategies.integers(1, 300), strategies.sampled_from([1, 2, 4, 8]))
def test_sell_launch_covers_everything_once(n_slices, rows, n_vectors, width):
    n_slots = policy.sell_slots(rows)
    launch = policy.sell_launch(n_slices, n_slots, n_vectors * width, width)
    defines = dict(launch.defines)
    block = launch.block[0]
    assert launch.block == (block, 1, 1) and block % 32 == 0 and launch.n_vectors == n_vectors
    assert (launch.grid[0] - 1) * block < n_slices * n_slots <= launch.grid[0] * block
    # With whole warps the lanes of one warp are all of one slice.
    assert defines['WHOLE_WARPS'] == (rows >= 32) and (n_slots % 32 == 0) == (rows >= 32)
    tile = defines['TILE']
    assert 1 <= tile and tile * width <= policy.SELL_COLUMNS
    assert (launch.grid[1] - 1) * tile < n_vectors <= launch.grid[1] * tile
    assert defines['VECTOR'] == width


@pytest.mark.parametrize('n_channels, width, tile', [
    (1, 1, 1), (2, 2, 1), (3, 1, 3), (4, 4, 1), (7, 1, 7), (8, 4, 2), (8, 2, 4), (8, 8, 1),
    (9, 1, 8), (33, 1, 8), (64, 4, 2)])
def test_sell_tile(n_channels, width, tile):
    assert dict(policy.sell_launch(3, 32, n_channels, width).defines)['TILE'] == tile


def test_sell_launch_stays_within_32_bits_and_the_grid():
    assert policy.sell_launch(2 ** 20, 1024, 2 ** 31 - 1, 1).grid[1] <= 65535
    assert policy.sell_launch(2 ** 27 - 4, 32, 1, 1).grid[0] * policy.BLOCK < 2 ** 32
    with pytest.raises(ValueError, match=r'adj: .* fewer than 2\*\*32 .* slices of 32; .*size'):
        policy.sell_launch(2 ** 27, 32, 1, 1)


@pytest.mark.parametrize('n_rows, nnz, lanes', [
    (100, 0, 1), (100, 250, 1), (100, 400, 1), (100, 401, 2), (100, 800, 2), (100, 1500, 4),
    (1, 100, 32), (1, 10 ** 9, 32)])
def test_spmv_launch(n_rows, nnz, lanes):
    launch = policy.spmv_launch(n_rows, nnz)
    assert dict(launch.defines) == {'VECTOR': 1, 'LANES': lanes}
    assert launch.block[0] == lanes and lanes * launch.block[1] == policy.BLOCK
    assert (launch.grid[0] - 1) * launch.block[1] < n_rows <= launch.grid[0] * launch.block[1]


def test_sources_load_as_many_entries_as_the_policy_assumes():
    assert '#define AHEAD %d\n' % policy.SPMV_AHEAD in kernels.source('spmv_csr')
