"""Launch policy of the papers' kernels, without a GPU."""

import hypothesis
from hypothesis import strategies
import pytest

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.plans import BLOCK
from chainer_bspmm.papers import policy


def test_subwarp():
    """A sub-warp is a power of two, with a lane for each column, and at most a warp."""
    widths = [policy.subwarp(n) for n in range(1, 41)]
    assert widths == [1, 2, *[4] * 2, *[8] * 4, *[16] * 8, *[32] * 24]
    assert policy.subwarp(2**31 - 1) == 32


# A block has four rows, so 32 KB hold 2,048 columns of float32 sums, or 1,024 of float64.
@pytest.mark.parametrize(
    'n_channels, itemsize, partitions, width, shared_bytes',
    [
        (2048, 4, 1, 2048, 32768),
        (2049, 4, 2, 1025, 16400),
        (4096, 4, 2, 2048, 32768),
        (4097, 4, 4, 1025, 16400),
        (2049, 2, 2, 1025, 16400),
        (1024, 8, 1, 1024, 32768),
        (1025, 8, 2, 513, 16416),
    ],
)
def test_swa_partitions_about_the_budget(n_channels, itemsize, partitions, width, shared_bytes):
    launch = policy.swa_launch(10, 50, n_channels, itemsize)
    found = launch.grid[1], launch.arguments[-1], launch.shared_bytes
    assert found == (partitions, width, shared_bytes)
    if partitions > 1:
        assert policy.swa_launch(10, 50, n_channels, itemsize, True) == launch
        with pytest.raises(
            ValueError,
            match='algorithm: swa_rows .*32768.*n_B = %d, which takes .* splits the columns'
            % n_channels,
        ):
            policy.swa_launch(10, 50, n_channels, itemsize, False)
    else:
        assert policy.swa_launch(10, 50, n_channels, itemsize, False) == launch
        forced = policy.swa_launch(10, 50, n_channels, itemsize, True)
        assert forced.grid == (launch.grid[0], 2, 1) and forced.arguments[-1] == -(-n_channels // 2)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.integers(1, 500),
    strategies.integers(1, 500),
    strategies.integers(1, 20000),
    strategies.sampled_from([2, 4, 8]),
    strategies.sampled_from([None, True]),
)
def test_swa_launch_covers_everything_once(n_graphs, max_rows, n_channels, itemsize, blocked):
    launch = policy.swa_launch(n_graphs, max_rows, n_channels, itemsize, blocked)
    blocks, partitions, _ = launch.grid
    rows = launch.block[0] // dict(launch.defines)['SUBWARP']
    assert (blocks - 1) * rows < n_graphs * max_rows <= blocks * rows
    *sizes, width = launch.arguments
    assert sizes == [n_graphs, max_rows, n_channels]
    assert partitions * width >= n_channels
    assert width == -(-n_channels // partitions)
    assert launch.shared_bytes == rows * width * max(itemsize, 4) <= 32 * 1024
    # There are as few partitions as possible: half as many would not fit.
    if partitions > (2 if blocked else 1):
        assert rows * -(-n_channels // (partitions // 2)) * max(itemsize, 4) > 32 * 1024


@pytest.mark.parametrize('n_graphs, max_rows, n_channels', [(2**16, 2**15, 8), (1, 1, 2**31 - 1)])
def test_swa_grid_that_cuda_does_not_allow(n_graphs, max_rows, n_channels):
    with pytest.raises(
        ValueError,
        match=r'algorithm: swa expects fewer than 2\*\*31 sub-warps, .*; got \d+ x \d+ and \d+',
    ):
        policy.swa_launch(n_graphs, max_rows, n_channels, 4)


def test_swa_grid_just_allowed():
    assert policy.swa_launch(2**31 - 1, 1, 64, 4).grid[0] <= 2**31 - 1


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.integers(1, 5000),
    strategies.integers(1, 1024),
    strategies.integers(1, 300),
    strategies.sampled_from([1, 2, 4, 8]),
)
def test_sell_launch_covers_everything_once(n_slices, rows, n_vectors, width):
    n_slots = policy.sell_slots(rows)
    launch = policy.sell_launch(n_slices, n_slots, n_vectors * width, width)
    defines = dict(launch.defines)
    block = launch.block[0]
    assert launch.block == (block, 1, 1) and block % 32 == 0
    assert launch.arguments == (n_slices, n_slots, n_vectors)
    assert (launch.grid[0] - 1) * block < n_slices * n_slots <= launch.grid[0] * block
    # With whole warps, all lanes of a warp belong to one slice.
    assert defines['WHOLE_WARPS'] == (rows >= 32) and (n_slots % 32 == 0) == (rows >= 32)
    tile = defines['TILE']
    assert 1 <= tile and tile * width <= policy.SELL_COLUMNS
    assert (launch.grid[1] - 1) * tile < n_vectors <= launch.grid[1] * tile
    assert defines['VECTOR'] == width


def test_sell_launch_stays_within_the_grid():
    assert policy.sell_launch(2**20, 1024, 2**31 - 1, 1).grid[1] <= 65535


def test_threads_of_a_sell_launch_are_numbered_in_32_bits():
    assert policy.sell_launch(2**27 - 4, 32, 1, 1).grid[0] * BLOCK < 2**32
    with pytest.raises(ValueError, match=r'adj: .* fewer than 2\*\*32 .* slices of 32; .*size'):
        policy.sell_launch(2**27, 32, 1, 1)


@pytest.mark.parametrize(
    'n_rows, nnz, lanes',
    [(100, 0, 1), (100, 400, 1), (100, 401, 2), (100, 800, 2), (100, 1500, 4), (1, 10**9, 32)],
)
def test_spmv_launch(n_rows, nnz, lanes):
    launch = policy.spmv_launch(n_rows, nnz)
    assert dict(launch.defines) == {'VECTOR': 1, 'LANES': lanes}
    assert launch.block[0] == lanes and lanes * launch.block[1] == BLOCK
    assert (launch.grid[0] - 1) * launch.block[1] < n_rows <= launch.grid[0] * launch.block[1]


def test_sources_load_as_many_entries_as_the_policy_assumes():
    assert '#define AHEAD %d\n' % policy.SPMV_AHEAD in kernels.source('spmv_csr')


@pytest.mark.parametrize(
    'max_rows, n_channels, itemsize, expected',
    [
        # 32 KB hold 8,192 floats
        (8192, 1, 4, 'st_shared'),
        (8192, 2, 4, 'st_blocked'),
        (8193, 1, 4, 'st_global'),
        (4096, 1, 8, 'st_shared'),
        (4096, 2, 8, 'st_blocked'),
        (4097, 1, 8, 'st_global'),
        (0, 64, 4, 'st_shared'),
        (50, 512, 4, 'st_blocked'),  # figure 6b
    ],
)
def test_st_algorithm(max_rows, n_channels, itemsize, expected):
    assert policy.st_algorithm(max_rows, n_channels, itemsize) == expected


@pytest.mark.parametrize(
    'max_rows, n_channels, itemsize, n_partitions, n_columns',
    [
        # Example of the paper: the largest matrix of the batch needs two parts, so all have two.
        (256, 64, 4, 2, 32),
        (256, 1024, 4, 32, 32),
        (8192, 5, 4, 5, 1),
        (100, 129, 4, 2, 65),
        (100, 129, 8, 4, 33),
        (1, 1, 4, 1, 1),
        (5, 7, 4, 2, 4),
    ],
)
def test_st_partition(max_rows, n_channels, itemsize, n_partitions, n_columns):
    assert policy.st_partition(max_rows, n_channels, itemsize) == n_columns
    launch = policy.st_shared_launch(100, max_rows, 3, n_channels, n_columns, itemsize)
    assert launch.grid == (100, n_partitions, 1) and launch.arguments[-1] == n_columns


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.integers(1, 8192),
    strategies.integers(1, 200000),
    strategies.integers(0, 10**6),
    strategies.sampled_from([4, 8]),
)
def test_st_shared_launch(max_rows, n_channels, max_nnz, itemsize):
    algorithm = policy.st_algorithm(max_rows, n_channels, itemsize)
    if algorithm == 'st_global':
        return
    n_columns = n_channels
    if algorithm == 'st_blocked':
        n_columns = policy.st_partition(max_rows, n_channels, itemsize)
    launch = policy.st_shared_launch(7, max_rows, max_nnz, n_channels, n_columns, itemsize)
    assert launch.shared_bytes == max_rows * n_columns * itemsize <= 32 * 1024
    # Every column has a block, and grid and block are within CUDA's limits.
    n_graphs, y, z = launch.grid
    assert n_graphs == 7 and y * z * n_columns >= n_channels and max(y, z) <= 65535
    threads = launch.block[0]
    lanes = dict(launch.defines)['SUBWARP']
    assert 32 <= threads <= 1024 and threads % 32 == 0 and lanes == policy.subwarp(n_columns)
    # Every entry of the largest matrix has a sub-warp, unless a block has fewer.
    assert threads == 1024 or threads // lanes >= max_nnz


def test_coo_dot_launch_takes_the_entries_from_the_graphs():
    launch = policy.coo_dot_launch(7, 1000, 36, 4)
    assert launch.arguments == (7, 9)
    lanes, entries, _ = launch.block
    assert launch.grid[0] * entries >= 1000 and dict(launch.defines)['TILE'] == policy.COO_TILE
