"""Launch policy, without a GPU: every row and vector has exactly one owner."""

import hypothesis
from hypothesis import strategies
import pytest

from chainer_bspmm.cuda.plans import widest_vector, BLOCK, Device, dot_launch, LONG_ROW, MAX_GRID_Y
from chainer_bspmm.cuda.plans import one_block, ROW_TILE
from chainer_bspmm.dataset.gather_batch import gather_launch
from chainer_bspmm.ops.bspmm import bspmm_launch, csr_launch, piece_length, sum_pieces_launch
from chainer_bspmm.ops.bspmm import with_pieces
from chainer_bspmm.ops.dropout import dropout_launch
from chainer_bspmm.ops.edge_film import film_launch
from chainer_bspmm.ops.embed_rows import embed_launch, EMBED_RUNS, EMBED_SUMS
from chainer_bspmm.ops.gates.launches import gated_launch, gated_weights_launch, MAX_GATED_BLOCK
from chainer_bspmm.ops.graph_linear.launches import Layer, layer_launch
from chainer_bspmm.ops.layer_end import end_launch
from chainer_bspmm.ops.mean_loss import loss_grad_launch, loss_launches
from chainer_bspmm.ops.segment_softmax import softmax_launch
from chainer_bspmm.ops.segments import broadcast_launch, MAX_BLOCK_Z, MAX_CHUNKS, MAX_SEGMENT_BLOCK
from chainer_bspmm.ops.segments import MIN_CHUNK, reduce_launches
from chainer_bspmm.papers import policy
from chainer_bspmm.sparse.build import transpose_launch


def given(*drawn):
    """Decorate a test to get draws of hypothesis: integers from (least, most), or items of a list.

    Other arguments are strategies.
    """

    def strategy_of(values):
        if isinstance(values, tuple):
            return strategies.integers(*values)
        if isinstance(values, list):
            return strategies.sampled_from(values)
        return values

    def decorate(test):
        drawing = hypothesis.given(*map(strategy_of, drawn))
        return hypothesis.settings(deadline=None)(drawing(test))

    return decorate


PLANS = [
    *(bspmm_launch, dot_launch, dropout_launch, embed_launch, end_launch, film_launch),
    *(gated_launch, gated_weights_launch, gather_launch, layer_launch, loss_launches),
    *(loss_grad_launch, reduce_launches, broadcast_launch, softmax_launch, transpose_launch),
    *(policy.coo_dot_launch, policy.sell_launch, policy.spmv_launch, policy.st_global_launch),
    *(policy.st_shared_launch, policy.swa_launch),
]


@pytest.mark.parametrize('plan', PLANS, ids=lambda plan: plan.__name__)
def test_plans_of_equal_sizes_are_computed_once(plan):
    """Planning takes longer than a launch."""
    assert plan.cache_parameters()['maxsize'] >= 4096


@given((1, 200), [2, 4, 8], (0, 32))
def test_vector_width(n_channels, itemsize, element):
    """A vector is the largest power of two, up to 16 bytes, that divides channels and address."""
    address = 0x7F0000000000 + element * itemsize
    fits = [
        width
        for width in (1, 2, 4, 8)
        if width * itemsize <= 16 and n_channels % width == address % (width * itemsize) == 0
    ]
    assert widest_vector(n_channels, itemsize, address) == fits[-1]


LENGTHS = strategies.floats(0, 40)
ALGORITHMS = ['auto', 'vector', 'pipelined']
H200 = Device(132, 60 << 20)


def rows_of(launch, n_rows):
    """Return a list of the rows that the threads of the first column of bspmm_csr own."""
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


@given((1, 3000), (1, 3000), [1, 2, 8], [1, 3, 8, 32], [1, 2, 4], [1, 2, 7], [32, 128, 256])
def test_csr_launch_covers_everything_once(
    n_rows, n_vectors, width, lanes, columns, rows_per_thread, block
):
    launch = csr_launch(
        n_rows,
        n_rows,
        n_vectors * width,
        width,
        lanes,
        columns=columns,
        rows_per_thread=rows_per_thread,
        block=block,
    )
    assert_covers_everything_once(launch, n_rows, n_vectors)
    assert launch.block[0] <= lanes and dict(launch.defines)['VECTOR'] == width


@given((1, 20000), LENGTHS, (1, 1100), [2, 4, 8], [1, 20, 132], ALGORITHMS)
def test_bspmm_launch_covers_everything_once(
    n_rows, length, n_channels, itemsize, n_sms, algorithm
):
    width = widest_vector(n_channels, itemsize, 0)
    nnz = int(length * n_rows)
    device = Device(n_sms, 4 << 20)
    launch = bspmm_launch(n_rows, n_rows, nnz, n_channels, width, itemsize, device, algorithm)
    assert_covers_everything_once(launch, n_rows, n_channels // width)
    if algorithm != 'auto':
        assert dict(launch.defines)['PIPELINED'] == (algorithm == 'pipelined')


def test_csr_launch_evens_out_the_lanes():
    for n_vectors in range(1, 300):
        launch = csr_launch(10**6, 10**6, n_vectors, 1, 32)
        lanes, rows, _ = launch.block
        assert launch.grid[1] * lanes < n_vectors + launch.grid[1]
        assert lanes * rows > BLOCK // 2


def test_csr_launch_stays_within_the_grid():
    launch = csr_launch(2**31 - 1, 1, 2**31 - 1, 1, 32)
    assert launch.grid[0] <= 2**31 - 1 and max(launch.grid[1:]) <= 65535
    assert launch.grid[1] * launch.grid[2] * launch.block[0] >= 2**31 - 1


def test_offsets_are_as_wide_as_they_need_to_be():
    for sizes, offset in (((2**26, 1), 'unsigned'), ((2**27, 1), 'size_t'), ((1, 2**27), 'size_t')):
        assert dict(csr_launch(*sizes, 128, 4, 32).defines)['OFFSET'] == offset


@pytest.mark.parametrize(
    'n_rows, n_cols, stream',
    [(1000, 1000, 0), (10**6, 1, 1), (1, 10**6, 1), (61440, 61440, 0), (61440, 61441, 1)],
)
def test_result_is_streamed_where_it_does_not_fit_in_l2_beside_x(n_rows, n_cols, stream):
    launch = bspmm_launch(n_rows, n_cols, 3 * n_rows, 64, 4, 4, H200)  # L2 has 60 MB
    assert dict(launch.defines)['STREAM'] == stream


@pytest.mark.parametrize(
    'itemsize, n_rows, n_channels, length, expected',
    [
        # the launch itself takes longest
        (4, 5000, 64, 1, {'PIPELINED': 0, 'COLUMNS': 1, 'STREAM': 0, 'AHEAD': 3}),
        (4, 5000, 64, 3, {'PIPELINED': 0, 'COLUMNS': 1, 'STREAM': 0, 'AHEAD': 5}),
        (4, 5000, 512, 3, {'PIPELINED': 1, 'COLUMNS': 1, 'STREAM': 0}),  # L2 holds it twice
        (4, 5000, 512, 5, {'PIPELINED': 0, 'COLUMNS': 1, 'AHEAD': 5}),  # enough loads are in flight
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
    width = widest_vector(n_channels, itemsize, 0)
    launch = bspmm_launch(n_rows, n_rows, length * n_rows, n_channels, width, itemsize, H200)
    defines = dict(launch.defines)
    assert {name: defines[name] for name in expected} == expected


@pytest.mark.parametrize(
    'itemsize, n_rows, n_channels, nnz, expected',
    [
        # vectors of the result for a multiprocessor: up to 1,800, 3,400, 6,800, narrow ones 10,000
        (4, 14849, 64, 2 * 14849, (16, 1, 1, 5)),
        (4, 14850, 64, 2 * 14850, (16, 1, 1, 3)),
        (4, 28049, 64, 28049, (16, 1, 1, 3)),
        (4, 28050, 64, 28050, (16, 1, 4, 3)),
        (4, 56099, 64, 3 * 56099, (16, 1, 4, 3)),
        (4, 56100, 64, 3 * 56100, (8, 2, 4, 3)),
        (4, 40000, 33, 80000, (17, 2, 4, 3)),
        (4, 40004, 33, 80008, (17, 2, 8, 3)),
        # the mean length of a row: up to 1.5 entries, 3, 4 and 10
        (4, 10000, 64, 15000, (16, 1, 1, 3)),
        (4, 10000, 64, 15001, (16, 1, 1, 5)),
        (4, 90000, 33, 269999, (17, 2, 8, 3)),
        (4, 90000, 33, 270000, (17, 2, 4, 3)),
        (4, 20000, 64, 80000, (16, 1, 1, 3)),
        (4, 20000, 64, 80001, (16, 1, 1, 5)),
        (4, 40000, 64, 160000, (16, 1, 4, 3)),
        (4, 40000, 64, 160001, (16, 1, 1, 5)),
        (4, 90000, 33, 360000, (17, 2, 4, 3)),
        (4, 90000, 33, 360001, (9, 4, 1, 3)),
        (4, 40000, 64, 400000, (16, 1, 1, 5)),
        (4, 40000, 64, 400001, (16, 1, 1, 3)),
        (4, 90000, 28, 900000, (7, 1, 4, 5)),
        (4, 90000, 28, 900001, (7, 1, 1, 5)),
        # the vectors of a row: up to 7 are few, 64 are two warps
        (4, 90000, 28, 90000, (7, 1, 4, 3)),
        (4, 90000, 32, 90000, (8, 1, 4, 3)),
        (4, 90000, 256, 90000, (32, 2, 4, 3)),
        (4, 90000, 260, 90000, (11, 2, 4, 3)),
        (4, 90000, 65, 90000, (17, 4, 4, 3)),
        # float16 and float64
        (2, 90000, 56, 90000, (7, 1, 1, 3)),
        (2, 90000, 64, 90000, (8, 1, 4, 3)),
        (2, 90000, 66, 90000, (9, 4, 1, 3)),
        (2, 90000, 130, 90000, (17, 4, 1, 3)),
        (8, 90000, 63, 90000, (32, 2, 8, 3)),
    ],
)
def test_bspmm_launch_changes_where_it_was_measured_to(itemsize, n_rows, n_channels, nnz, expected):
    """Lanes and columns that share a row, rows of a thread, entries that it loads at once."""
    width = widest_vector(n_channels, itemsize, 0)
    launch = bspmm_launch(n_rows, n_rows, nnz, n_channels, width, itemsize, H200)
    defines = dict(launch.defines)
    found = launch.block[0], defines['COLUMNS'], launch.arguments[2], defines['AHEAD']
    assert found == expected


@pytest.mark.parametrize('n_vectors', [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000])
@pytest.mark.parametrize('most', [ROW_TILE, 4])
def test_dot_launch(n_vectors, most):
    launch = dot_launch(100, n_vectors * 4, 4, most)
    lanes, rows, _ = launch.block
    tile = dict(launch.defines)['TILE']
    assert tile == min(most, n_vectors) and launch.arguments == (100, n_vectors)
    assert lanes & (lanes - 1) == 0 and lanes <= 32 and ('LANES', lanes) in launch.defines
    assert lanes * tile >= min(n_vectors, 32 * tile)  # one round, or the fewest that a warp needs
    assert lanes == 1 or lanes // 2 * tile < n_vectors  # no lane is idle in all rows
    assert lanes * rows % 32 == 0  # lanes of a row are in one warp
    assert (launch.grid[0] - 1) * rows < 100 <= launch.grid[0] * rows


@given((0, 10**7), (0, 10**5), (1, 3000), [1, 2, 4, 8])
def test_segment_launches_cover_everything_once(n_rows, n_segments, n_vectors, width):
    first, *second = reduce_launches(n_rows, n_segments, n_vectors * width, width, 4)
    columns, lanes, units = first.block
    assert dict(first.defines)['VECTOR'] == width and dict(first.defines)['COMBINE'] == 0
    assert lanes & (lanes - 1) == 0  # reductions halve the number of lanes
    assert columns * lanes * units <= MAX_SEGMENT_BLOCK and units <= MAX_BLOCK_Z
    assert first.shared_bytes == columns * lanes * units * width * 4 <= 48 * 1024
    tiles = first.grid[1]
    assert (tiles - 1) * columns < n_vectors <= tiles * columns
    *sizes, chunk, n_chunks = first.arguments
    assert sizes == [n_segments, n_rows, n_vectors]
    assert n_chunks <= MAX_CHUNKS and chunk >= MIN_CHUNK
    chunk_blocks = -(-n_chunks // units)
    own = first.grid[0] - chunk_blocks
    assert own * units >= n_segments > (own - 1) * units
    if n_rows <= chunk:
        assert n_chunks == 0 and not second
        return
    assert (n_chunks - 1) * chunk < n_rows <= n_chunks * chunk
    (combining,) = second
    assert combining.grid == (chunk_blocks, tiles, 1) and dict(combining.defines)['COMBINE'] == 1
    for field in ('block', 'shared_bytes', 'arguments'):
        assert getattr(combining, field) == getattr(first, field)


@given((0, 10**7), (0, 10**5), (1, 3000), [1, 2, 4, 8], [None, 9])
def test_broadcast_launch_covers_everything_once(n_rows, n_segments, n_vectors, width, max_rows):
    launch = broadcast_launch(n_rows, n_segments, n_vectors * width, width, max_rows)
    reduction = reduce_launches(n_rows, n_segments, n_vectors * width, width, 4, max_rows)
    assert launch.block == reduction[0].block and launch.grid[1:] == reduction[0].grid[1:]
    units = launch.block[2]
    *sizes, chunk, n_chunks, has_long = launch.arguments
    assert sizes == [n_segments, n_rows, n_vectors] and has_long == (len(reduction) > 1)
    assert n_chunks == -(-n_rows // chunk)
    assert launch.grid[0] == -(-n_chunks // units) + -(-n_segments // units)
    assert launch.shared_bytes == 0 and dict(launch.defines) == {'VECTOR': width}


def test_two_steps_only_where_a_segment_may_be_long():
    most = MIN_CHUNK
    for n_rows, max_rows, has_long in (
        (most, None, False),
        (most + 1, None, True),
        (10 * most, most, False),
        (10 * most, most + 1, True),
    ):
        assert len(reduce_launches(n_rows, 9, 64, 4, 4, max_rows)) == 1 + has_long
        assert broadcast_launch(n_rows, 9, 64, 4, max_rows).arguments[-1] == has_long


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
    launch = broadcast_launch(n_rows, n_segments, n_vectors * 4, 4)
    assert launch.block[1:] == (lanes, units)


def test_segment_launches_stay_within_the_grid():
    most = 2**31 - 1
    for launch in (
        *reduce_launches(most, most - 2**16, most, 1, 4),
        broadcast_launch(most, most - 2**16, most, 1),
    ):
        assert launch.grid[0] < 2**31 and launch.grid[1] <= 65535
        # The kernel numbers and multiplies chunks in 32 bits.
        *_, chunk, n_chunks = map(int, launch.arguments[:5])
        assert (n_chunks - 1) * chunk < 2**31


@pytest.mark.parametrize(
    'n_rows, n_segments, n_channels, ahead',
    [(128 * 18, 128, 64, 8), (4096 * 20, 4096, 64, 8), (100 * 50, 100, 512, 4), (10**6, 1, 64, 4)],
)
def test_fewer_loads_in_flight_in_large_blocks(n_rows, n_segments, n_channels, ahead):
    for launch in reduce_launches(n_rows, n_segments, n_channels, 4, 4):
        assert dict(launch.defines)['AHEAD'] == ahead


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
    launch = transpose_launch(n_graphs, max_cols, max_nnz)
    if warps is None:
        assert launch is None
        return
    assert launch.grid == (n_graphs, 1, 1) and launch.block == (warps * 32, 1, 1)
    assert launch.shared_bytes == 4 * (max_nnz + warps * max_cols) <= 47 * 1024


def assert_covers_units_once(launch, n_units, n_vectors):
    """Check that each vector of each unit, which is a row or a pair, has a thread."""
    columns, units, _ = launch.block
    assert BLOCK // 2 < columns * units <= BLOCK
    assert launch.grid[0] * units >= max(n_units, 1) > (launch.grid[0] - 1) * units
    assert launch.grid[1] * columns >= n_vectors > (launch.grid[1] - 1) * columns


UNITS = [(1, 1, 1), (1000, 1, 1), (77, 3, 4), (10, 32, 4), (10, 33, 4), (5, 1000, 2)]


@pytest.mark.parametrize('n_units, n_vectors, width', [(0, 3, 4), *UNITS])
def test_softmax_launch_covers_everything_once(n_units, n_vectors, width):
    """Even without units, a launch has a block for rows that belong to no segment."""
    launch = softmax_launch(9, n_units, n_vectors * width, width)
    assert launch.arguments == (n_units, 9, n_vectors)
    assert dict(launch.defines) == {'VECTOR': width}
    assert_covers_units_once(launch, n_units, n_vectors)


@pytest.mark.parametrize('n_units, n_vectors, width', UNITS)
def test_film_launch_covers_everything_once(n_units, n_vectors, width):
    launch = film_launch(n_units, n_vectors * width, width, 5)
    assert launch.arguments == (n_units, n_vectors, 5)
    assert dict(launch.defines) == {'VECTOR': width}
    assert_covers_units_once(launch, n_units, n_vectors)


@pytest.mark.parametrize(
    'launch',
    [softmax_launch(2**31 - 1, 2**31 - 1, 2**31 - 1, 1), film_launch(2**31 - 1, 2**31 - 1, 1, 2)],
    ids=['softmax', 'film'],
)
def test_launches_of_units_stay_within_the_grid(launch):
    assert launch.grid[0] < 2**31 and launch.grid[1] <= 65535


@pytest.mark.parametrize('width', [1, 2, 4, 8])
@pytest.mark.parametrize('size', [1, 3, 4, 5, 511, 512, 513, 2**34])
def test_dropout_launch_covers_everything_once(size, width):
    launch = dropout_launch(size, width)
    last, n_last = (int(number) for number in launch.arguments)
    assert 4 * last + n_last == size and 1 <= n_last <= 4
    assert launch.grid[0] * launch.block[0] > last >= (launch.grid[0] - 1) * launch.block[0]
    assert launch.grid[0] < 2**31 and launch.grid[1:] == launch.block[1:] == (1, 1)
    assert launch.defines == (('VECTOR', min(width, 4)),)


WIDTHS = strategies.tuples(
    strategies.integers(1, 300), strategies.integers(0, 300), strategies.integers(1, 150)
)
STATES = [(False, False), (True, False), (True, True)]  # (has a state, state is x)


@given((1, 10**6), WIDTHS, STATES, [False, True], [4, 8], [64, 99, 163, 227])
def test_gated_launch(n_rows, widths, state, is_gradient, itemsize, kilobytes):
    device = Device(132, 60 << 20, kilobytes << 10)
    has_state, is_same = state
    if is_same:
        widths = widths[2], *widths[1:]
    launch = gated_launch(n_rows, widths, has_state, is_same, 1, itemsize, device, is_gradient)
    if launch is None:
        return
    d = dict(launch.defines)
    assert (launch.grid[0] - 1) * d['ROWS'] < n_rows <= launch.grid[0] * d['ROWS']
    assert launch.shared_bytes <= device.shared_bytes and launch.block == (d['THREADS'], 1, 1)
    x, message, out = (-(-width // 4) for width in widths)  # in quads
    n_inputs = x + message + (has_state and not is_same) * out
    columns = -(-n_inputs // (3 if has_state and not is_same else 2)) if is_gradient else out
    # These are the assertions of the kernel, so it compiles.
    assert d['ROWS'] % d['PER'] == 0
    assert d['THREADS'] == columns * d['ROWS'] // d['PER'] * d['SPLIT'] <= MAX_GATED_BLOCK
    assert d['THREADS'] >= (n_inputs if is_gradient else d['CHUNK'] // 4)


@given((1, 10**6), WIDTHS, STATES, [False, True], [4, 8])
def test_shared_memory_of_gates_is_what_the_kernel_lays_out(
    n_rows, widths, state, is_gradient, itemsize
):
    has_state, is_same = state
    if is_same:
        widths = widths[2], *widths[1:]
    launch = gated_launch(n_rows, widths, has_state, is_same, 1, itemsize, H200, is_gradient)
    if launch is None:
        return
    d = dict(launch.defines)
    x, message, out = (-(-width // 4) * 4 for width in widths)
    pad = 4
    n_maps = 3 if has_state else 2
    by_reset = 0
    if is_gradient:
        is_apart = has_state and not is_same
        n_parts = 3 if is_apart else 2
        sums = -(-(x + message + is_apart * out) // (4 * n_parts)) * 4 * n_parts  # for each row
        row = n_maps * out + has_state * out
        chunk = d['CHUNK'] * sums
        if has_state:
            by_reset = (d['STAGES'] - 1) * chunk + d['SPLIT'] * d['ROWS'] * out
    else:
        sums = n_maps * out
        row = {
            (False, False): x + message,
            (True, False): max(x + message, 2 * out) + out,
            (True, True): max(x + message, 3 * out),
        }[state]
        chunk = sums * (d['CHUNK'] + pad)
    rows = d['ROWS'] * (row + pad)
    candidate = has_state * out * (out + pad)
    rest = max(d['STAGES'] * chunk, by_reset, d['SPLIT'] * d['ROWS'] * sums)
    assert launch.shared_bytes == (rows + candidate + rest) * itemsize


@pytest.mark.parametrize(
    'n_rows, width, expected',
    [
        (600, 64, {'ROWS': 8, 'SPLIT': 8, 'STAGES': 3}),
        (2300, 64, {'ROWS': 20, 'SPLIT': 4, 'STAGES': 3}),
        (18400, 64, {'ROWS': 28, 'SPLIT': 2, 'STAGES': 2}),  # five blocks for each SM
        (18400, 128, {'ROWS': 28, 'CHUNK': 32}),  # the widest layer that is still fast
        (2300, 200, None),
    ],
)
@pytest.mark.parametrize('is_gradient', [False, True])
@pytest.mark.parametrize('is_same', [False, True])
def test_gated_launch_chooses(n_rows, width, expected, is_same, is_gradient):
    launch = gated_launch(n_rows, (width,) * 3, True, is_same, 4, 4, H200, is_gradient)
    if expected is None:
        assert launch is None
        return
    defines = dict(launch.defines)
    assert {name: defines[name] for name in expected} == expected


@pytest.mark.parametrize(
    'rows, split', [(8, 8), (12, 4), (16, 4), (20, 4), (24, 2), (28, 2), (32, 2)]
)
def test_blocks_of_gates_have_the_fewest_rows_that_give_no_multiprocessor_two(rows, split):
    most = rows * H200.n_sms
    launch, more = (
        gated_launch(n_rows, (64, 0, 64), True, True, 4, 4, H200, is_gradient=False)
        for n_rows in (most, most + 1)
    )
    defines = dict(launch.defines)
    assert (defines['ROWS'], defines['SPLIT'], defines['STAGES']) == (rows, split, 3)
    assert dict(more.defines)['ROWS'] == (rows + 4 if rows < 32 else 20)  # beyond 32 rows, two


def test_a_gradient_of_many_inputs_needs_no_more_threads_than_their_quads():
    launch = gated_launch(8, (600, 0, 4), False, False, 4, 4, H200, True)
    assert launch.block == (300, 1, 1) and dict(launch.defines)['SPLIT'] == 2


@given((1, 10**6), WIDTHS, STATES, [4, 8])
def test_gated_weights_launch_covers_everything_once(n_rows, widths, state, itemsize):
    has_state, is_same = state
    if is_same:
        widths = widths[2], *widths[1:]
    launch = gated_weights_launch(n_rows, widths, has_state, is_same, 1, itemsize, H200)
    tile = 8 * dict(launch.defines)['PER']
    x, message, out = (-(-width // tile) for width in widths)
    of_W = (2 + has_state) * out * (x + message)
    of_U = has_state * (1 if is_same else 3) * out**2
    assert launch.grid[0] == of_W + of_U
    _, each = launch.arguments
    assert (launch.grid[1] - 1) * each < n_rows <= launch.grid[1] * each
    # The memory of the rows is later used for sums of two groups, or of the tile and the biases.
    assert launch.shared_bytes >= (tile * tile + max(tile * tile, launch.block[0])) * itemsize


def test_blocks_of_gated_weights_fill_a_gpu():
    launch = gated_weights_launch(10**6, (64, 64, 64), True, False, 4, 4, H200)
    assert launch.grid == (9, 2 * 132 // 9, 1)


@pytest.mark.parametrize('n, threads', [(1, 32), (32, 32), (33, 64), (1000, 1024), (5000, 1024)])
def test_one_block_has_whole_warps(n, threads):
    assert one_block(n).block == (threads, 1, 1)


@given((1, 10**5), (1, 300), (1, 300), (0, 12), [False, True], (0, 2), [2, 4, 8], [48, 99, 227])
def test_a_layer_that_fits_does_so_at_any_number_of_rows(
    n_rows, n_in, n_out, n_relations, has_self, n_biases, itemsize, kilobytes
):
    layer = Layer(
        width_in=n_in,
        width_out=n_out,
        n_relations=n_relations,
        has_self=has_self or not n_relations,
        loop=False,
        has_relation_bias=False,
        n_biases=n_biases,
        by_relation=False,
        activation='relu',
    )
    device = Device(132, 60 << 20, kilobytes << 10)
    for is_backward in (False, True):
        one, plan = (
            layer_launch(layer, n, itemsize, False, device, is_backward) for n in (1, n_rows)
        )
        assert (one is None) == (plan is None)
        if plan is not None:
            defines = dict(plan.defines)
            assert plan.block[0] == defines['THREADS'] and plan.grid[1] == defines['SLICES']
            assert plan.grid[0] * defines['ROWS'] < n_rows + 2 * defines['ROWS'] * device.n_sms
            n_static = defines['ROWS'] * (4 + defines['THREADS'] // 32)
            assert plan.shared_bytes + n_static <= device.shared_bytes


def layer_without_biases(width_in, width_out, n_relations=1, has_self=True):
    return Layer(
        width_in=width_in,
        width_out=width_out,
        n_relations=n_relations,
        has_self=has_self,
        loop=False,
        has_relation_bias=False,
        n_biases=0,
        by_relation=False,
        activation='relu',
    )


@pytest.mark.parametrize('itemsize, width_in, most', [(4, 124, 196), (8, 60, 136)])
def test_a_gradient_has_no_more_weights_than_registers_hold(itemsize, width_in, most):
    def plan(width_out, is_backward):
        layer = layer_without_biases(width_in, width_out, has_self=False)
        return layer_launch(layer, 1000, itemsize, True, H200, is_backward)

    assert plan(most, is_backward=True) is not None
    assert plan(most + 4, is_backward=True) is None
    assert plan(most + 4, is_backward=False) is not None


@pytest.mark.parametrize(
    'rows, splits, after', [(16, 8, 20), (20, 6, 24), (24, 5, 32), (32, 4, 32)]
)
def test_tiles_of_a_layer_have_the_fewest_rows_that_give_no_multiprocessor_two(rows, splits, after):
    """The only tile of a multiprocessor has twice the threads."""
    most = rows * H200.n_sms
    launch, more = (
        dict(
            layer_launch(
                layer_without_biases(64, 64), n_rows, 4, True, H200, is_backward=False
            ).defines
        )
        for n_rows in (most, most + 1)
    )
    assert (launch['ROWS'], launch['THREADS'], launch['SPLITS']) == (rows, 512, splits)
    assert more['ROWS'] == after and more['THREADS'] == (512 if rows < 32 else 256)


@pytest.mark.parametrize(
    'itemsize, n_matrices, threads', [(4, 2, 256), (4, 3, 512), (2, 3, 512), (8, 3, 256)]
)
@pytest.mark.parametrize('is_backward', [False, True])
def test_several_matrices_have_twice_the_threads_if_registers_hold_their_elements(
    itemsize, n_matrices, threads, is_backward
):
    layer = layer_without_biases(16, 16, n_matrices - 1)
    launch = layer_launch(layer, 10**6, itemsize, True, H200, is_backward)
    assert launch.block == (threads, 1, 1)


@pytest.mark.parametrize('n_relations, has_self, rows', [(1, False, 16), (1, True, 32)])
def test_many_tiles_of_the_gradient_of_one_matrix_are_small(n_relations, has_self, rows):
    layer = layer_without_biases(64, 64, n_relations, has_self)
    launch = layer_launch(layer, 10**6, 4, True, H200, is_backward=True)
    assert dict(launch.defines)['ROWS'] == rows


def test_blocks_that_share_the_columns_of_a_layer_are_counted_together():
    layer = layer_without_biases(128, 128)
    launch = layer_launch(layer, 10**6, 4, True, H200, is_backward=True)
    assert launch.grid == (66, 2, 1)
    for n_rows, rows in ((16 * 66, 16), (16 * 66 + 1, 20)):
        launch = layer_launch(layer, n_rows, 4, True, H200, is_backward=True)
        assert dict(launch.defines)['ROWS'] == rows


@pytest.mark.parametrize(
    'width, n_rows, rows, splits, fewer',
    [(64, 10**6, 32, 2, (32, 1)), (128, 10**6, 32, 1, (24, 1)), (8, 1000, 16, 2, (16, 1))],
)
def test_a_layer_takes_the_last_byte_of_shared_memory(width, n_rows, rows, splits, fewer):
    layer = layer_without_biases(width, width)

    def plan(shared_bytes):
        device = Device(132, 60 << 20, shared_bytes)
        launch = layer_launch(layer, n_rows, 4, True, device, is_backward=False)
        defines = dict(launch.defines)
        return launch.shared_bytes, (defines['ROWS'], defines['SPLITS'])

    needed, chosen = plan(H200.shared_bytes)
    n_static = rows * (4 + 512 // 32)  # a pattern for each row, and its place for each warp
    assert chosen == (rows, splits)
    assert plan(needed + n_static) == (needed, chosen)
    assert plan(needed + n_static - 1)[1] == fewer


@pytest.mark.parametrize('width, n_blocks', [(8, 2), (128, 1)])
def test_two_blocks_of_a_layer_share_a_multiprocessor_if_its_memory_holds_both(width, n_blocks):
    launch = layer_launch(
        layer_without_biases(width, width), 10**6, 4, True, H200, is_backward=False
    )
    assert launch.grid[0] * launch.grid[1] == n_blocks * H200.n_sms


@pytest.mark.parametrize(
    'n_graphs, n_blocks, warps, graphs_per_block',
    [(1, 1, 8, 8), (8, 1, 8, 8), (9, 2, 8, 8), (2112, 264, 8, 8), (2113, 235, 9, 9)]
    + [(16 * 264, 264, 16, 16), (10**4, 264, 16, 38)],
)
def test_blocks_that_gather_a_batch(n_graphs, n_blocks, warps, graphs_per_block):
    """There are at most two for a multiprocessor, and at most 16 warps in each."""
    launch = gather_launch(n_graphs, H200)
    assert (launch.grid[0], launch.block[0]) == (n_blocks, 32 * warps)
    assert launch.arguments == (n_graphs, graphs_per_block)


@given((1, 2**31 - 64), (1, 10**5), (1, 3000))  # a run of rows is an int32 of whole warps
def test_embed_launch_covers_everything_once(n_rows, n_types, n_channels):
    launch = embed_launch(n_rows, n_types, n_channels)
    n_runs, n_blocks, _ = launch.grid
    *sizes, run = map(int, launch.arguments)
    assert sizes == [n_rows, n_channels, n_types]
    assert (n_runs - 1) * run < n_rows <= n_runs * run < 2**32
    assert (n_blocks - 1) * 32 < n_channels <= n_blocks * 32
    assert run % 32 == 0 and n_runs <= EMBED_RUNS
    assert n_runs == 1 or n_runs * n_types * n_channels <= EMBED_SUMS
    defines = dict(launch.defines)
    assert launch.block == (32, defines['WARPS'], 1)
    assert defines['ROWS'] * (32 * 8 + 4) <= 48 * 1024  # static shared memory for float64


def test_runs_of_a_batch_of_molecules():
    for n_rows, n_runs in ((60, 1), (2300, 36), (18400, 115)):
        launch = embed_launch(n_rows, 118, 64)
        assert launch.grid == (n_runs, 2, 1)
        assert launch.arguments[-1] <= dict(launch.defines)['ROWS']  # they are loaded at once


@pytest.mark.parametrize(
    'size, n_blocks',
    [(0, 1), (1, 1), (32, 1), (33, 1), (2**14, 1), (2**14 + 1, 2), (2**31 - 1, 2**17)],
)
def test_loss_launches(size, n_blocks):
    first, *second = loss_launches(size)
    assert first.grid == (n_blocks, 1, 1) and first.arguments == (size,)
    assert dict(first.defines) == {'VECTOR': 1, 'CHUNK': 2**14, 'COMBINE': 0}
    assert len(second) == (n_blocks > 1)
    for launch in second:
        assert launch.grid == (1, 1, 1) and launch.arguments == (n_blocks,)
        assert dict(launch.defines)['COMBINE'] == 1
    for launch in (first, *second):
        n = max(1, launch.arguments[0])
        assert launch.block[0] % 32 == 0 and launch.block[0] < n + 32  # whole warps, none idle
        assert min(n, 1024) <= launch.block[0] <= 1024


def test_loss_grad_launch():
    for size in (1, 127, 128, 129, 2**31 - 1):
        launch = loss_grad_launch(size)
        (threads, *_), (blocks, *_) = launch.block, launch.grid
        assert (blocks - 1) * threads < size <= blocks * threads < 2**32


@pytest.mark.parametrize(
    'n_nodes, nnz, longest, n_vectors, piece',
    [
        (50_000, 100_000, LONG_ROW, 16, 0),
        (50_000, 100_000, LONG_ROW + 1, 16, 64),
        (50_000, 92_927, 3000, 32, 64),
        (50_000, 92_928, 3000, 32, 128),  # a thread of a full GPU gathers 22 vectors
        (50_000, 200_000, 200, 32, 0),  # the longest row is hardly longer than a piece
        (1_000, 2_000, 2_000, 16, 64),
        (1_000, 0, 2_000, 16, 0),  # a batch without the long row
        (1_000, 1_000, 2_000, 16, 64),
        (1_000, 4_000, 1_000_000, 1, 64),
        (10**6, 10**6, 10**6, 1, 1024),  # the number of sums is that of the entries of a piece
        (232_965, 114_615_892, 37_454, 8, 256),  # Reddit
        (100_000, 79_000_000, 7_750, 64, 512),  # sums have at most twice the rows of both features
    ],
)
def test_piece_length(n_nodes, nnz, longest, n_vectors, piece):
    assert piece_length(n_nodes, n_nodes, nnz, longest, n_vectors, H200) == piece


def test_sums_of_wide_features_have_a_grid():
    sums = sum_pieces_launch(2, 32 * MAX_GRID_Y + 1, 64)
    assert sums.grid == (1, MAX_GRID_Y, 2)


@pytest.mark.parametrize('nnz', [1, 64, 65, 1000])
def test_every_piece_has_threads(nnz):
    for plan in (csr_launch(100, 100, 64, 4, 32), dot_launch(100, 64, 4)):
        launch, n_pieces = with_pieces(plan, nnz, 64)
        assert n_pieces == 2 * -(-nnz // 64) and launch.block == plan.block
        more = (launch.grid[0] - plan.grid[0]) * plan.block[1]
        assert n_pieces <= more < n_pieces + plan.block[1]
        assert launch.arguments == (*plan.arguments, 64, n_pieces)
        sums = sum_pieces_launch(n_pieces, 65, 64)
        assert sums.grid == (-(-n_pieces // 16), 3, 1) and sums.arguments == (65, 64, n_pieces // 2)
