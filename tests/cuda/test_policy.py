"""The launch policy, without a GPU: every row and vector has exactly one owner."""

import hypothesis
from hypothesis import strategies
import pytest

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import policy


@pytest.mark.parametrize(
    'n_channels, itemsize, address, expected',
    [
        (64, 4, 0, 4),
        (64, 2, 0, 8),
        (64, 8, 0, 2),
        (6, 4, 0, 2),
        (33, 4, 0, 1),
        (1, 2, 0, 1),
        (64, 4, 8, 2),
        (64, 4, 4, 1),
        (64, 2, 2, 1),
        (12, 2, 0, 4),
    ],
)
def test_vector_width(n_channels, itemsize, address, expected):
    assert policy.vector_width(n_channels, itemsize, 0x7F0000000000 | address) == expected


# --- the product ---

H200 = policy.Device(132, 60 << 20)


def rows_of(launch, n_rows):
    """Return the rows that the threads of the first column of bspmm_csr own, in a list."""
    _, rows, _ = launch.block
    per_thread = int(launch.arguments[2])
    return [
        (block * per_thread + i) * rows + y
        for block in range(launch.grid[0])
        for y in range(rows)
        for i in range(per_thread)
        if (block * per_thread + i) * rows + y < n_rows
    ]


def vectors_of(launch, n_vectors):
    columns = dict(launch.defines)['COLUMNS']
    lanes = launch.block[0]
    return [
        (tile * columns + j) * lanes + x
        for tile in range(launch.grid[1] * launch.grid[2])
        for x in range(lanes)
        for j in range(columns)
        if (tile * columns + j) * lanes + x < n_vectors
    ]


def assert_covers_everything_once(launch, n_rows, n_vectors):
    lanes, rows, depth = launch.block
    assert depth == 1 and 0 < lanes * rows <= 1024
    assert [int(number) for number in launch.arguments[:2]] == [n_rows, n_vectors]
    assert sorted(rows_of(launch, n_rows)) == list(range(n_rows))
    assert sorted(vectors_of(launch, n_vectors)) == list(range(n_vectors))
    assert dict(launch.defines)['PIPELINED'] == (launch.arguments[2] > 1)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.integers(1, 3000),
    strategies.integers(1, 3000),
    strategies.sampled_from([1, 2, 8]),
    strategies.sampled_from([1, 3, 8, 32]),
    strategies.sampled_from([1, 2, 4]),
    strategies.sampled_from([1, 2, 7]),
    strategies.sampled_from([32, 128, 256]),
)
def test_csr_launch_covers_everything_once(
    n_rows, n_vectors, width, lanes, columns, rows_per_thread, block
):
    launch = policy.csr_launch(
        n_rows, n_rows, n_vectors * width, width, lanes, columns, rows_per_thread, block
    )
    assert_covers_everything_once(launch, n_rows, n_vectors)
    assert launch.block[0] <= lanes and dict(launch.defines)['VECTOR'] == width


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.integers(1, 20000),
    strategies.floats(0, 40),
    strategies.integers(1, 1100),
    strategies.sampled_from([2, 4, 8]),
    strategies.sampled_from([1, 20, 132]),
    strategies.sampled_from(['auto', 'vector', 'pipelined']),
)
def test_bspmm_launch_covers_everything_once(
    n_rows, length, n_channels, itemsize, n_sms, algorithm
):
    width = policy.vector_width(n_channels, itemsize, 0)
    launch = policy.bspmm_launch(
        n_rows,
        n_rows,
        int(length * n_rows),
        n_channels,
        width,
        itemsize,
        policy.Device(n_sms, 4 << 20),
        algorithm,
    )
    assert_covers_everything_once(launch, n_rows, n_channels // width)
    if algorithm != 'auto':
        assert dict(launch.defines)['PIPELINED'] == (algorithm == 'pipelined')


def test_csr_launch_evens_out_the_lanes():
    for n_vectors in range(1, 300):
        launch = policy.csr_launch(10**6, 10**6, n_vectors, 1, 32)
        lanes, rows, _ = launch.block
        assert launch.grid[1] * lanes < n_vectors + launch.grid[1]
        assert lanes * rows > policy.BLOCK // 2


def test_csr_launch_stays_within_the_grid():
    launch = policy.csr_launch(2**31 - 1, 1, 2**31 - 1, 1, 32)
    assert launch.grid[0] <= 2**31 - 1 and max(launch.grid[1:]) <= 65535
    assert launch.grid[1] * launch.grid[2] * launch.block[0] >= 2**31 - 1


def test_offsets_are_as_wide_as_they_need_to_be():
    for n_rows, n_cols, offset in (
        (2**26, 1, 'unsigned'),
        (2**27, 1, 'size_t'),
        (1, 2**27, 'size_t'),
    ):
        launch = policy.csr_launch(n_rows, n_cols, 128, 4, 32)
        assert dict(launch.defines)['OFFSET'] == offset


@pytest.mark.parametrize(
    'n_rows, n_cols, stream',
    [(1000, 1000, 0), (10**6, 1, 1), (1, 10**6, 1), (61440, 61440, 0), (61440, 61441, 1)],
)
def test_result_is_streamed_where_it_does_not_fit_in_l2_beside_x(n_rows, n_cols, stream):
    launch = policy.bspmm_launch(n_rows, n_cols, 3 * n_rows, 64, 4, 4, H200)  # 60 MB of L2
    assert dict(launch.defines)['STREAM'] == stream


@pytest.mark.parametrize(
    'itemsize, n_rows, n_channels, length, expected',
    [
        (
            4,
            5000,
            64,
            1,
            {'PIPELINED': 0, 'COLUMNS': 1, 'STREAM': 0, 'AHEAD': 3},
        ),  # the launch's floor
        (4, 5000, 64, 3, {'PIPELINED': 0, 'COLUMNS': 1, 'STREAM': 0, 'AHEAD': 5}),
        (4, 5000, 512, 3, {'PIPELINED': 1, 'COLUMNS': 1, 'STREAM': 0}),  # fits in L2 twice
        (4, 5000, 512, 5, {'PIPELINED': 0, 'COLUMNS': 1, 'AHEAD': 5}),  # enough in flight
        (4, 50000, 64, 3, {'PIPELINED': 1, 'COLUMNS': 1, 'STREAM': 0}),
        (4, 90000, 64, 3, {'PIPELINED': 1, 'COLUMNS': 2, 'STREAM': 1, 'AHEAD': 3}),
        (4, 90000, 64, 8, {'PIPELINED': 1, 'COLUMNS': 1, 'STREAM': 1, 'AHEAD': 3}),
        (4, 10**6, 2, 3, {'PIPELINED': 1, 'COLUMNS': 1}),  # rows of one vector
        (2, 10**6, 2, 3, {'PIPELINED': 0, 'COLUMNS': 1}),
        (4, 90000, 33, 3, {'PIPELINED': 1, 'COLUMNS': 2}),  # narrow vectors
        (4, 90000, 133, 3, {'PIPELINED': 1, 'COLUMNS': 4}),
        (4, 90000, 133, 5, {'PIPELINED': 0, 'COLUMNS': 4}),
        (4, 200000, 33, 20, {'PIPELINED': 0, 'COLUMNS': 4, 'AHEAD': 3}),
        (2, 90000, 132, 3, {'PIPELINED': 0, 'COLUMNS': 4}),
    ],
)
def test_bspmm_launch_chooses(itemsize, n_rows, n_channels, length, expected):
    width = policy.vector_width(n_channels, itemsize, 0)
    launch = policy.bspmm_launch(n_rows, n_rows, length * n_rows, n_channels, width, itemsize, H200)
    defines = dict(launch.defines)
    assert {name: defines[name] for name in expected} == expected


# --- the sampled product ---


@pytest.mark.parametrize('n_vectors', [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000])
@pytest.mark.parametrize('most', [policy.CSR_TILE, policy.COO_TILE])
def test_dot_launch(n_vectors, most):
    launch = policy.dot_launch(100, n_vectors * 4, 4, most)
    lanes, rows, _ = launch.block
    tile = dict(launch.defines)['TILE']
    assert tile == min(most, n_vectors) and launch.n_vectors == n_vectors
    assert lanes & (lanes - 1) == 0 and lanes <= 32 and ('LANES', lanes) in launch.defines
    assert lanes * tile >= min(n_vectors, 32 * tile)  # one round, or as few as a warp can
    assert lanes == 1 or lanes // 2 * tile < n_vectors  # no lane that has nothing to do in all rows
    assert lanes * rows % 32 == 0  # the lanes of a row lie in one warp
    assert (launch.grid[0] - 1) * rows < 100 <= launch.grid[0] * rows


# --- the papers' CSR kernels ---


@pytest.mark.parametrize('n_channels', range(1, 41))
def test_subwarp(n_channels):
    expected = (
        32
        if n_channels > 16
        else {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}.get(n_channels, 16)
    )
    assert policy.subwarp(n_channels) == expected


def test_subwarp_of_wide_matrices():
    assert {policy.subwarp(n) for n in (64, 1024, 2**31 - 1)} == {32}


@pytest.mark.parametrize(
    'n_channels, itemsize, expected',
    [
        (1, 4, 128 * 1 * 4),
        (3, 4, 32 * 3 * 4),
        (16, 4, 8 * 16 * 4),
        (17, 4, 4 * 17 * 4),
        (64, 2, 4 * 64 * 4),
        (64, 4, 4 * 64 * 4),
        (64, 8, 4 * 64 * 8),
    ],
)
def test_swa_shared_bytes(n_channels, itemsize, expected):
    assert policy.swa_shared_bytes(n_channels, policy.subwarp(n_channels), itemsize) == expected
    assert policy.swa_launch(1, 1, n_channels, itemsize).shared_bytes == expected


# Four rows a block: 32 KB are 2,048 columns of float32 sums, 1,024 of float64.
@pytest.mark.parametrize(
    'n_channels, itemsize, partitions, width, shared_bytes',
    [
        (2047, 4, 1, 2047, 32752),
        (2048, 4, 1, 2048, 32768),
        (2049, 4, 2, 1025, 16400),
        (4096, 4, 2, 2048, 32768),
        (4097, 4, 4, 1025, 16400),
        (8193, 4, 8, 1025, 16400),
        (2048, 2, 1, 2048, 32768),
        (2049, 2, 2, 1025, 16400),
        (1024, 8, 1, 1024, 32768),
        (1025, 8, 2, 513, 16416),
    ],
)
def test_swa_partitions_about_the_budget(n_channels, itemsize, partitions, width, shared_bytes):
    launch = policy.swa_launch(10, 50, n_channels, itemsize)
    assert (launch.grid[1], launch.width, launch.shared_bytes) == (partitions, width, shared_bytes)
    if partitions > 1:
        assert policy.swa_launch(10, 50, n_channels, itemsize, True) == launch
        with pytest.raises(ValueError, match='algorithm: swa_rows .*32768.*n_B = %d' % n_channels):
            policy.swa_launch(10, 50, n_channels, itemsize, False)
    else:
        assert policy.swa_launch(10, 50, n_channels, itemsize, False) == launch
        forced = policy.swa_launch(10, 50, n_channels, itemsize, True)
        assert forced.grid == (launch.grid[0], 2, 1) and forced.width == -(-n_channels // 2)


@pytest.mark.parametrize(
    'n_graphs, max_rows, n_channels, blocks',
    [
        (50, 50, 64, 50 * 50 * 32 / 128),
        (100, 50, 512, 100 * 50 * 32 / 128),  # figures 6a, 6b
        (100, 64, 8, 100 * 64 * 8 / 128),
        (3, 7, 1, 1),
        (1, 1, 1024, 1),
        (3, 43, 1, 2),
    ],
)
def test_swa_grid(n_graphs, max_rows, n_channels, blocks):
    launch = policy.swa_launch(n_graphs, max_rows, n_channels, 4)
    assert launch.block == (128, 1, 1)
    assert launch.grid == (blocks, 1, 1)


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
    assert partitions * launch.width >= n_channels
    assert launch.width == -(-n_channels // partitions)
    assert launch.shared_bytes == rows * launch.width * max(itemsize, 4) <= 32 * 1024
    # The fewest partitions that fit: half as many would not.
    if partitions > (2 if blocked else 1):
        assert rows * -(-n_channels // (partitions // 2)) * max(itemsize, 4) > 32 * 1024


@pytest.mark.parametrize('n_graphs, max_rows, n_channels', [(2**16, 2**15, 8), (1, 1, 2**31 - 1)])
def test_swa_grid_that_cuda_does_not_allow(n_graphs, max_rows, n_channels):
    with pytest.raises(ValueError, match='algorithm: swa expects fewer than 2.*31 sub-warps'):
        policy.swa_launch(n_graphs, max_rows, n_channels, 4)


def test_swa_grid_just_allowed():
    assert policy.swa_launch(2**31 - 1, 1, 64, 4).grid[0] <= 2**31 - 1


# --- SELL ---


@pytest.mark.parametrize(
    'rows, slots', [(1, 1), (2, 2), (7, 7), (31, 31), (32, 32), (33, 64), (64, 64), (1000, 1024)]
)
def test_sell_slots(rows, slots):
    assert policy.sell_slots(rows) == slots


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
    assert launch.block == (block, 1, 1) and block % 32 == 0 and launch.n_vectors == n_vectors
    assert (launch.grid[0] - 1) * block < n_slices * n_slots <= launch.grid[0] * block
    # With whole warps the lanes of one warp are all of one slice.
    assert defines['WHOLE_WARPS'] == (rows >= 32) and (n_slots % 32 == 0) == (rows >= 32)
    tile = defines['TILE']
    assert 1 <= tile and tile * width <= policy.SELL_COLUMNS
    assert (launch.grid[1] - 1) * tile < n_vectors <= launch.grid[1] * tile
    assert defines['VECTOR'] == width


@pytest.mark.parametrize(
    'n_channels, width, tile',
    [
        (1, 1, 1),
        (2, 2, 1),
        (3, 1, 3),
        (4, 4, 1),
        (7, 1, 7),
        (8, 4, 2),
        (8, 2, 4),
        (8, 8, 1),
        (9, 1, 8),
        (33, 1, 8),
        (64, 4, 2),
    ],
)
def test_sell_tile(n_channels, width, tile):
    assert dict(policy.sell_launch(3, 32, n_channels, width).defines)['TILE'] == tile


def test_sell_launch_stays_within_32_bits_and_the_grid():
    assert policy.sell_launch(2**20, 1024, 2**31 - 1, 1).grid[1] <= 65535
    assert policy.sell_launch(2**27 - 4, 32, 1, 1).grid[0] * policy.BLOCK < 2**32
    with pytest.raises(ValueError, match=r'adj: .* fewer than 2\*\*32 .* slices of 32; .*size'):
        policy.sell_launch(2**27, 32, 1, 1)


@pytest.mark.parametrize(
    'n_rows, nnz, lanes',
    [
        (100, 0, 1),
        (100, 250, 1),
        (100, 400, 1),
        (100, 401, 2),
        (100, 800, 2),
        (100, 1500, 4),
        (1, 100, 32),
        (1, 10**9, 32),
    ],
)
def test_spmv_launch(n_rows, nnz, lanes):
    launch = policy.spmv_launch(n_rows, nnz)
    assert dict(launch.defines) == {'VECTOR': 1, 'LANES': lanes}
    assert launch.block[0] == lanes and lanes * launch.block[1] == policy.BLOCK
    assert (launch.grid[0] - 1) * launch.block[1] < n_rows <= launch.grid[0] * launch.block[1]


def test_sources_load_as_many_entries_as_the_policy_assumes():
    assert '#define AHEAD %d\n' % policy.SPMV_AHEAD in kernels.source('spmv_csr')


# --- the paper's rules for ST ---


@pytest.mark.parametrize(
    'max_rows, n_channels, itemsize, expected',
    [
        # 32 KB hold 8192 floats
        (128, 64, 4, 'st_shared'),
        (128, 65, 4, 'st_blocked'),
        (8192, 1, 4, 'st_shared'),
        (8192, 2, 4, 'st_blocked'),
        (8193, 1, 4, 'st_global'),
        (4096, 1, 8, 'st_shared'),
        (4096, 2, 8, 'st_blocked'),
        (4097, 1, 8, 'st_global'),
        (0, 64, 4, 'st_shared'),
        # figure 6b, n_B = 512; figure 8, n_B = 1024
        (50, 512, 4, 'st_blocked'),
        (256, 1024, 4, 'st_blocked'),
    ],
)
def test_st_algorithm(max_rows, n_channels, itemsize, expected):
    assert policy.st_algorithm(max_rows, n_channels, itemsize) == expected


@pytest.mark.parametrize(
    'max_rows, n_channels, itemsize, n_partitions, n_columns',
    [
        # The paper's example: the largest matrix of the batch needs two parts, so all have two.
        (256, 64, 4, 2, 32),
        (50, 512, 4, 4, 128),
        (256, 1024, 4, 32, 32),
        (8192, 8, 4, 8, 1),
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
    assert launch.grid == (100, n_partitions, 1) and launch.n_columns == n_columns


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
    # Every column has a block; grid and block are within what CUDA allows.
    n_graphs, y, z = launch.grid
    assert n_graphs == 7 and y * z * n_columns >= n_channels and max(y, z) <= 65535
    threads, lanes = launch.block[0], dict(launch.defines)['SUBWARP']
    assert 32 <= threads <= 1024 and threads % 32 == 0 and lanes == policy.subwarp(n_columns)
    # A sub-warp for every entry of the largest matrix, or as many as a block has.
    assert threads == 1024 or threads // lanes >= max_nnz


@pytest.mark.parametrize('nnz, n_channels', [(1, 1), (255, 1), (257, 1), (9, 33), (2**31 - 1, 64)])
def test_st_global_launch(nnz, n_channels):
    launch = policy.st_global_launch(nnz, n_channels)
    lanes = policy.subwarp(n_channels)
    assert launch.grid[1:] == (1, 1) and launch.grid[0] < 2**31 and launch.shared_bytes == 0
    assert (launch.grid[0] - 1) * launch.block[0] < nnz * lanes <= launch.grid[0] * launch.block[0]


# --- segments ---


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.integers(0, 10**7),
    strategies.integers(0, 10**5),
    strategies.integers(1, 3000),
    strategies.sampled_from([1, 2, 4, 8]),
    strategies.booleans(),
)
def test_segment_launch_covers_everything_once(n_rows, n_segments, n_vectors, width, always):
    launch = policy.segment_launch(n_rows, n_segments, n_vectors * width, width, 4, None, always)
    columns, lanes, units = launch.block
    assert launch.n_vectors == n_vectors and dict(launch.defines) == {'VECTOR': width}
    assert lanes & (lanes - 1) == 0  # lanes reduce by halving
    assert columns * lanes * units <= policy.MAX_SEGMENT_BLOCK and units <= policy.MAX_BLOCK_Z
    assert launch.shared_bytes == columns * lanes * units * width * 4 <= 48 * 1024
    tiles = launch.grid[1]
    assert (tiles - 1) * columns < n_vectors <= tiles * columns
    chunk_blocks = launch.combine_grid[0]
    assert chunk_blocks * units >= launch.n_chunks > (chunk_blocks - 1) * units or not chunk_blocks
    own = launch.grid[0] - chunk_blocks
    assert own * units >= n_segments > (own - 1) * units
    assert launch.has_long == (n_rows > launch.chunk)
    if launch.has_long or always:
        assert (launch.n_chunks - 1) * launch.chunk < n_rows <= launch.n_chunks * launch.chunk
    else:
        assert launch.n_chunks == 0
    assert launch.n_chunks <= policy.MAX_CHUNKS and launch.chunk >= policy.MIN_CHUNK


def test_segment_launch_in_two_steps_only_where_a_segment_may_be_long():
    most = policy.MIN_CHUNK
    for n_rows, max_rows, has_long in (
        (most, None, False),
        (most + 1, None, True),
        (10 * most, most, False),
        (10 * most, most + 1, True),
    ):
        assert policy.segment_launch(n_rows, 9, 64, 4, 4, max_rows).has_long == has_long


@pytest.mark.parametrize(
    'n_rows, n_segments, n_vectors, lanes, units',
    [
        (128 * 18, 128, 16, 4, 1),
        (100 * 50, 100, 32, 8, 1),
        (10**6, 1, 16, 16, 1),
        (10**6, 1, 1, 256, 1),
        (100, 100, 1, 1, 64),
        (100, 100, 3, 1, 21),
        (10**6, 1, 33, 8, 1),
    ],
)
def test_segment_lanes(n_rows, n_segments, n_vectors, lanes, units):
    launch = policy.segment_launch(n_rows, n_segments, n_vectors * 4, 4, 4)
    assert launch.block[1:] == (lanes, units)


def test_segment_launch_stays_within_the_grid():
    launch = policy.segment_launch(2**31 - 1, 2**31 - 1 - 2**16, 2**31 - 1, 1, 4)
    assert launch.grid[0] < 2**31 and launch.grid[1] <= 65535
    # The kernel's chunks are numbered and multiplied in 32 bits.
    assert (launch.n_chunks - 1) * launch.chunk < 2**31


def test_fewer_loads_in_flight_in_large_blocks():
    for n_rows, n_segments, n_channels, ahead in (
        (128 * 18, 128, 64, 8),
        (4096 * 20, 4096, 64, 8),
        (100 * 50, 100, 512, 4),
        (10**6, 1, 64, 4),
    ):
        assert policy.segment_launch(n_rows, n_segments, n_channels, 4, 4).ahead == ahead


# --- the transpose ---


@pytest.mark.parametrize(
    'n_graphs, max_cols, max_nnz, warps',
    [
        (128, 30, 70, 1),
        (1, 0, 0, 1),
        (3, 50, 150, 2),
        (1, 1000, 3000, 8),
        (1, 4000, 8000, 1),
        (1, 4001, 8032, None),
        (1, 0, 12033, None),
        (0, 0, 0, None),
        (1, 100, 6000, 32),
    ],
)
def test_transpose_launch(n_graphs, max_cols, max_nnz, warps):
    launch = policy.transpose_launch(n_graphs, max_cols, max_nnz)
    if warps is None:
        assert launch is None
        return
    assert launch.grid == (n_graphs, 1, 1) and launch.block == (warps * 32, 1, 1)
    assert launch.shared_bytes == 4 * (max_nnz + warps * max_cols) <= 47 * 1024


# --- softmax ---


@pytest.mark.parametrize(
    'n_segments, n_vectors, width',
    [(1, 1, 1), (1000, 1, 1), (77, 3, 4), (10, 32, 4), (10, 33, 4), (5, 1000, 2)],
)
def test_softmax_launch_covers_everything_once(n_segments, n_vectors, width):
    launch = policy.softmax_launch(n_segments, n_vectors * width, width)
    columns, units, _ = launch.block
    assert launch.n_vectors == n_vectors and dict(launch.defines) == {'VECTOR': width}
    assert policy.BLOCK // 2 < columns * units <= policy.BLOCK
    assert launch.grid[0] * units >= n_segments > (launch.grid[0] - 1) * units
    assert launch.grid[1] * columns >= n_vectors > (launch.grid[1] - 1) * columns


def test_softmax_launch_stays_within_the_grid():
    launch = policy.softmax_launch(2**31 - 1, 2**31 - 1, 1)
    assert launch.grid[0] < 2**31 and launch.grid[1] <= 65535


# --- dropout ---


@pytest.mark.parametrize('width', [1, 2, 4, 8])
@pytest.mark.parametrize('size', [1, 3, 4, 5, 511, 512, 513, 2**34])
def test_dropout_launch_covers_everything_once(size, width):
    launch = policy.dropout_launch(size, width)
    last, n_last = (int(number) for number in launch.arguments)
    assert 4 * last + n_last == size and 1 <= n_last <= 4
    assert launch.grid[0] * launch.block[0] > last >= (launch.grid[0] - 1) * launch.block[0]
    assert launch.grid[0] < 2**31 and launch.grid[1:] == launch.block[1:] == (1, 1)
    assert launch.defines == (('VECTOR', min(width, 4)),)
