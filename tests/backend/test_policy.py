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
