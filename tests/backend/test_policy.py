"""The launch policy, without a GPU: every row and vector has exactly one owner."""
import itertools

import hypothesis
from hypothesis import strategies
import pytest

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


# --- the paper's rules for ST ---

@pytest.mark.parametrize('n_channels, expected', [
    (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 32),
    (1024, 32)])
def test_subwarp(n_channels, expected):
    assert policy.subwarp(n_channels) == expected


@pytest.mark.parametrize('max_rows, n_channels, itemsize, expected', [
    # 32 KB hold 8192 floats
    (128, 64, 4, 'st_shared'), (128, 65, 4, 'st_blocked'), (8192, 1, 4, 'st_shared'),
    (8192, 2, 4, 'st_blocked'), (8193, 1, 4, 'st_global'), (4096, 1, 8, 'st_shared'),
    (4096, 2, 8, 'st_blocked'), (4097, 1, 8, 'st_global'), (0, 64, 4, 'st_shared'),
    # figure 6b, n_B = 512; figure 8, n_B = 1024
    (50, 512, 4, 'st_blocked'), (256, 1024, 4, 'st_blocked')])
def test_st_algorithm(max_rows, n_channels, itemsize, expected):
    assert policy.st_algorithm(max_rows, n_channels, itemsize) == expected


@pytest.mark.parametrize('max_rows, n_channels, itemsize, n_partitions, n_columns', [
    # The paper's example: the largest matrix of the batch needs two parts, so all have two.
    (256, 64, 4, 2, 32), (50, 512, 4, 4, 128), (256, 1024, 4, 32, 32), (8192, 8, 4, 8, 1),
    (8192, 5, 4, 5, 1), (100, 129, 4, 2, 65), (100, 129, 8, 4, 33), (1, 1, 4, 1, 1),
    (5, 7, 4, 2, 4)])
def test_st_partition(max_rows, n_channels, itemsize, n_partitions, n_columns):
    assert policy.st_partition(max_rows, n_channels, itemsize) == n_columns
    launch = policy.st_shared_launch(100, max_rows, 3, n_channels, n_columns, itemsize)
    assert launch.grid == (100, n_partitions, 1) and launch.n_columns == n_columns


@hypothesis.settings(deadline=None)
@hypothesis.given(strategies.integers(1, 8192), strategies.integers(1, 200000),
                  strategies.integers(0, 10 ** 6), strategies.sampled_from([4, 8]))
def test_st_shared_launch(max_rows, n_channels, max_nnz, itemsize):
    algorithm = policy.st_algorithm(max_rows, n_channels, itemsize)
    if algorithm == 'st_global':
        return
    n_columns = n_channels
    if algorithm == 'st_blocked':
        n_columns = policy.st_partition(max_rows, n_channels, itemsize)
    launch = policy.st_shared_launch(7, max_rows, max_nnz, n_channels, n_columns, itemsize)
    assert launch.shared_bytes == max_rows * n_columns * itemsize <= 32 * 1024
    # Every column has a block; grid and block are within what CUDA allows.
    n_graphs, y, z = launch.grid
    assert n_graphs == 7 and y * z * n_columns >= n_channels and max(y, z) <= 65535
    threads, lanes = launch.block[0], dict(launch.defines)['SUBWARP']
    assert 32 <= threads <= 1024 and threads % 32 == 0 and lanes == policy.subwarp(n_columns)
    # A sub-warp for every entry of the largest matrix, or as many as a block has.
    assert threads == 1024 or threads // lanes >= max_nnz


@pytest.mark.parametrize('nnz, n_channels', [
    (1, 1), (255, 1), (257, 1), (9, 33), (2 ** 31 - 1, 64)])
def test_st_global_launch(nnz, n_channels):
    launch = policy.st_global_launch(nnz, n_channels)
    lanes = policy.subwarp(n_channels)
    assert launch.grid[1:] == (1, 1) and launch.grid[0] < 2 ** 31 and launch.shared_bytes == 0
    assert (launch.grid[0] - 1) * launch.block[0] < nnz * lanes <= launch.grid[0] * launch.block[0]
