"""Launch policy: which kernel variant and grid to use. Pure functions of a few integers.

Nothing here needs a GPU. Kernels take their tile sizes from the constants decided here, so that
grid and tile cannot disagree.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import functools
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy

Parameters = ParamSpec('Parameters')
Plan = TypeVar('Plan', covariant=True)


class Launch(NamedTuple):
    """How a kernel is compiled and launched."""

    defines: tuple  # compile-time constants, pairs of name and value
    grid: tuple[int, int, int]  # in CUDA's order (x, y, z), as block
    block: tuple[int, int, int]
    shared_bytes: int  # dynamic shared memory of a block
    arguments: tuple  # the sizes among the kernel's arguments, which follow its arrays


class Kept(Protocol[Parameters, Plan]):
    """What :func:`functools.lru_cache` returns; its own annotation takes any arguments."""

    __wrapped__: Callable[Parameters, Plan]

    def cache_clear(self) -> None: ...

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Plan: ...


def kept(function: Callable[Parameters, Plan]) -> Kept[Parameters, Plan]:
    """Keep up to 4,096 plans."""
    return functools.lru_cache(maxsize=4096)(function)


BLOCK = 128  # threads; large enough for full occupancy, small enough for batches of few rows
WARP = 32
VECTOR_BYTES = 16  # the widest load of one thread
MAX_GRID_Y = 65535


def vector_width(n_channels, itemsize, address_bits) -> int:
    """Return how many elements one thread moves at a time, `address_bits` being addresses or-ed.

    The widest of 16, 8, 4, ... bytes that divides a row and that all addresses are aligned to.
    """
    width = VECTOR_BYTES // itemsize
    while width > 1 and (n_channels % width or address_bits % (width * itemsize)):
        width //= 2
    return width


# A GPU: its multiprocessors, the bytes of its L2 cache, and of shared memory that a block may have.
Device = collections.namedtuple('Device', 'n_sms l2_bytes shared_bytes', defaults=(227 << 10,))

AHEAD = 3  # entries of a row whose loads are issued together; molecules have two to four
AHEAD_LONG = 5  # the same for longer rows, where that leaves enough threads


def csr_launch(
    n_rows,
    n_cols,
    n_channels,
    width,
    lanes,
    columns=1,
    rows_per_thread=1,
    block=BLOCK,
    ahead=AHEAD,
    stream=False,
) -> Launch:
    """Plan a thread per (row, `columns` vectors) of the product: the grid of bspmm_csr.

    At most `lanes` threads are side by side in a row, fewer if that splits it more evenly. Where a
    thread has several rows, a row's entries are loaded while the previous row is summed. `ahead` is
    how many entries a thread loads at once; `stream` writes the result past the L2 cache.
    """
    n_vectors = n_channels // width
    wanted = -(-n_vectors // columns)
    tiles = -(-wanted // lanes)
    lanes = -(-wanted // tiles)
    rows = max(block // lanes, 1)
    y = min(tiles, MAX_GRID_Y)
    few = max(n_rows, n_cols) * n_vectors < 2**32
    return Launch(
        (
            ('VECTOR', width),
            ('AHEAD', ahead),
            ('COLUMNS', columns),
            ('PIPELINED', int(rows_per_thread > 1)),
            ('STREAM', int(stream)),
            ('OFFSET', 'unsigned' if few else 'size_t'),
        ),
        (-(-n_rows // (rows * rows_per_thread)), y, -(-tiles // y)),
        (lanes, rows, 1),
        0,
        (numpy.uint32(n_rows), numpy.uint32(n_vectors), numpy.uint32(rows_per_thread)),
    )


# The model of bspmm_launch, fitted to 177 random shapes on an H200; policy_2.json of it tells how
# far it is from the best on others. `work`: vectors of the result per multiprocessor, that is
# threads if each had one vector of one row; `length`: mean entries per row.
SMALL = 1800  # work, up to about what is resident at once
PIPELINED = 3400  # work from which a thread is given several rows
LARGE = 6800  # work from which it is also given two vectors of 16 bytes
HUGE = 10000  # work from which it is given eight rows of narrower vectors
SHORT, MEDIUM, LONG, VERY_LONG = 1.5, 3, 4, 10  # length
NARROW = 8  # vectors per row; below, two vectors per thread would leave warps half empty


@kept
def bspmm_launch(
    n_rows, n_cols, nnz, n_channels, width, itemsize, device, algorithm='auto', piece=0
) -> Launch:
    """Plan a product on a GPU: a small model of what was measured, not a table of it.

    ``'vector'`` and ``'pipelined'`` force one row per thread, or several. Unless `piece`, of
    :func:`piece_length`, is 0, the plan is for :func:`with_pieces`.
    """
    n_vectors = n_channels // width
    work = n_rows * n_vectors / device.n_sms
    length = nnz / n_rows
    plan = functools.partial(
        csr_launch,
        n_rows,
        n_cols,
        n_channels,
        width,
        # A result that does not fit in L2 together with x would push x out of it.
        stream=(n_rows + n_cols) * n_channels * itemsize > device.l2_bytes // 2,
    )
    if piece:  # a warp with rows of different lengths waits for the longest
        return plan(WARP, ahead=AHEAD_LONG)
    lanes, columns, rows, options = _csr_settings(
        work, length, n_vectors, width * itemsize, itemsize
    )
    if algorithm == 'vector':
        rows = 1
    elif algorithm == 'pipelined':
        rows = max(rows, 2)
    return plan(lanes, columns, rows, **options)


def _csr_settings(work, length, n_vectors, vector_bytes, itemsize):
    """Return lanes, columns and rows_per_thread of :func:`csr_launch`, and its further options."""
    half = itemsize == 2
    long = length > (SHORT if work < SMALL else LONG)
    options = {'ahead': AHEAD_LONG if long and work < LARGE else AHEAD}
    if work < PIPELINED:
        return WARP, 1, 1, options
    if n_vectors < NARROW:
        # Halves are widened to be added: several rows per thread would need too many registers.
        return WARP, 1, 1 if half or length > VERY_LONG else 4, options
    two_warps = n_vectors > 2 * WARP
    if half and vector_bytes < VECTOR_BYTES or vector_bytes == 4 and (two_warps or long):
        # A thread that reads a few bytes at a time has too little in flight with two vectors.
        return WARP if two_warps else 16, 4, 1 if half or length > MEDIUM else 4, {}
    if length > VERY_LONG:
        return 16, 1, 1, {'block': 2 * BLOCK}
    wide = vector_bytes == VECTOR_BYTES
    if wide and work < LARGE:
        return 16, 1, 1 if long else 4, options
    if long:
        return WARP, 1, 4, {}
    # A row in one tile where a warp can hold it; else tiles of 512 bytes.
    lanes = 16 if two_warps and wide else WARP
    return lanes, 2, 8 if not wide and work > HUGE and length < MEDIUM else 4, {}


# Vectors of a row that a lane of bsddmm_csr has in flight, of each entry that it takes together.
CSR_TILE = 2


@kept
def dot_launch(n_rows, n_channels, width, tile=CSR_TILE) -> Launch:
    """Plan a sub-warp per row, at most `tile` vectors per lane at once: the grid of bsddmm_csr."""
    n_vectors = n_channels // width
    tile = min(n_vectors, tile)
    lanes = 1
    while lanes * tile < n_vectors and lanes < WARP:  # a power of two: lanes reduce by halving
        lanes *= 2
    rows = BLOCK // lanes
    return Launch(
        (('VECTOR', width), ('LANES', lanes), ('TILE', tile)),
        (-(-n_rows // rows), 1, 1),
        (lanes, rows, 1),
        0,
        (numpy.int32(n_rows), numpy.int32(n_vectors)),
    )


LONG_ROW = 128  # entries that a row of a molecule never has: no policy of theirs depends on these
PIECE = 128  # entries of a piece, at least; half of it where each thread has few
FEW_ENTRIES = 22  # for each thread of a full GPU, counted for every vector of a row
RESIDENT = 1024  # threads of a multiprocessor


def piece_length(n_rows, n_cols, nnz, longest, n_vectors, device) -> int:
    """Return the most entries of a row that a thread walks, or 0 where it walks rows of any length.

    Pieces are no shorter than a row has of them: a thread walks their sums, too. Nor are there so
    many that their sums take more than twice the memory of both features. `longest` is a bound. The
    rest was measured on an H200, for bspmm in float32: benchmarks/products/bench_large.py.
    """
    longest = min(longest, nnz)
    if longest <= LONG_ROW:
        return 0
    few = nnz * n_vectors < FEW_ENTRIES * RESIDENT * device.n_sms
    piece = PIECE // 2 if few else PIECE
    while piece * piece < longest or piece * (n_rows + n_cols) < nnz:
        piece *= 2
    return piece if 2 * piece < longest else 0


def with_pieces(launch: Launch, nnz, piece) -> tuple[Launch, int]:
    """Return a plan of bspmm_csr or bsddmm_csr with rows in pieces, and the number of pieces."""
    n_pieces = 2 * -(-nnz // piece)
    rows = launch.block[1]
    launch = launch._replace(
        defines=launch.defines + (('PIECES', 1),),
        grid=(launch.grid[0] + -(-n_pieces // rows), *launch.grid[1:]),
        arguments=(*launch.arguments, numpy.int32(piece), numpy.uint32(n_pieces)),
    )
    return launch, n_pieces


def sum_pieces_launch(n_pieces, n_channels, piece) -> Launch:
    """Plan a thread per chunk and channel of sum_pieces."""
    n_chunks, n_at_once, tiles = n_pieces // 2, 8, -(-n_channels // WARP)
    y = min(tiles, MAX_GRID_Y)
    return Launch(
        (('VECTOR', 1), ('AHEAD', 8)),
        (-(-n_chunks // n_at_once), y, -(-tiles // y)),
        (WARP, n_at_once, 1),
        0,
        tuple(map(numpy.int32, (n_channels, piece, n_chunks))),
    )


SEGMENT_ROWS = 8  # rows of the mean segment that a lane gets, and the most it has in flight at once
SEGMENT_BLOCK = 64  # threads; more only where the lanes of one segment are more
MAX_SEGMENT_BLOCK = 256
MIN_CHUNK = 256  # rows that one unit of threads reduces in a microsecond or two
MAX_CHUNKS = 512  # about four blocks for each multiprocessor of a large GPU, one wave
MAX_BLOCK_Z = 64


@kept
def reduce_launches(
    n_rows, n_segments, n_channels, width, itemsize, max_rows=None
) -> tuple[Launch, ...]:
    """Plan segment_reduce: one launch, or two where a segment can have more rows than a chunk.

    The last of their arguments is the number of chunks. Chunks of long segments are reduced first;
    the second launch (COMBINE) adds up their results. Without `max_rows` a segment may have n_rows.
    """
    n_vectors, tiles, block, chunk, has_long = _segments(
        n_rows, n_segments, n_channels, width, max_rows
    )
    columns, lanes, units = block
    threads = columns * lanes * units
    # Large blocks, of long rows or long segments, keep the memory busy with their many warps. Their
    # lanes have half as many loads in flight, in fewer registers. Measured on an H200: 3.4 us
    # instead of 4.0 for 100 segments of 50 rows of 512 float32, 66 instead of 73 for one of a
    # million rows of 64.
    ahead = SEGMENT_ROWS if threads <= BLOCK else SEGMENT_ROWS // 2
    n_chunks = -(-n_rows // chunk) if has_long else 0
    chunk_blocks = -(-n_chunks // units)
    return tuple(
        Launch(
            (('VECTOR', width), ('AHEAD', ahead), ('COMBINE', combine)),
            (chunk_blocks + (0 if combine else -(-n_segments // units)), tiles, 1),
            block,
            threads * width * max(itemsize, 4),
            tuple(map(numpy.int32, (n_segments, n_rows, n_vectors, chunk, n_chunks))),
        )
        for combine in range(1 + has_long)
    )


@kept
def broadcast_launch(n_rows, n_segments, n_channels, width, max_rows=None) -> Launch:
    """Plan segment_broadcast; arguments as :func:`reduce_launches`.

    Every chunk of rows has a unit of threads even if no segment is long: rows past the last segment
    are written, too.
    """
    n_vectors, tiles, block, chunk, has_long = _segments(
        n_rows, n_segments, n_channels, width, max_rows
    )
    n_chunks = -(-n_rows // chunk)
    return Launch(
        (('VECTOR', width),),
        (-(-n_chunks // block[2]) + -(-n_segments // block[2]), tiles, 1),
        block,
        0,
        tuple(map(numpy.int32, (n_segments, n_rows, n_vectors, chunk, n_chunks, has_long))),
    )


def _segments(n_rows, n_segments, n_channels, width, max_rows):
    """Plan a unit of (vectors x lanes) threads per segment, in blocks of several.

    There are enough lanes to have all rows of a mean segment in flight at once. Returns vectors per
    row, their tiles in the grid, the block, rows per chunk, and whether a segment can be longer.
    """
    n_vectors = n_channels // width
    tiles = -(-n_vectors // WARP)
    columns = -(-n_vectors // tiles)
    lanes = 1
    while lanes * SEGMENT_ROWS * n_segments < n_rows and 2 * lanes * columns <= MAX_SEGMENT_BLOCK:
        lanes *= 2
    units = min(max(SEGMENT_BLOCK // (columns * lanes), 1), MAX_BLOCK_Z)
    chunk = max(-(-n_rows // MAX_CHUNKS), MIN_CHUNK)
    has_long = (n_rows if max_rows is None else max_rows) > chunk
    return n_vectors, min(tiles, MAX_GRID_Y), (columns, lanes, units), chunk, has_long


@kept
def softmax_launch(n_rows, n_segments, n_channels, width) -> Launch:
    """Plan a thread per (segment, vector): the grid of segment_softmax."""
    n_vectors = n_channels // width
    # A block at least: there may be rows of no segment.
    n_units = max(n_segments, 1)
    return _vector_threads(n_units, n_vectors, width, (n_segments, n_rows, n_vectors))


def _vector_threads(n_units, n_vectors, width, arguments) -> Launch:
    """Plan a thread per (unit, vector), in blocks of as many columns as leave few threads idle."""
    tiles = -(-n_vectors // WARP)
    columns = -(-n_vectors // tiles)
    units = BLOCK // columns
    return Launch(
        (('VECTOR', width),),
        (-(-n_units // units), min(tiles, MAX_GRID_Y), 1),
        (columns, units, 1),
        0,
        tuple(map(numpy.int32, arguments)),
    )


@kept
def dropout_launch(size, width) -> Launch:
    """Plan a thread for every four elements of dropout, of which there are from 1 to 2**34."""
    last = (size - 1) // 4
    return Launch(
        (('VECTOR', min(width, 4)),),
        (last // BLOCK + 1, 1, 1),
        (BLOCK, 1, 1),
        0,
        (numpy.uint32(last), numpy.int32(size - 4 * last)),
    )


@kept
def film_launch(n_units, n_channels, width, n_relations) -> Launch:
    """Plan a thread per (row of the result, vector) of edge_film."""
    n_vectors = n_channels // width
    return _vector_threads(n_units, n_vectors, width, (n_units, n_vectors, n_relations))


# The default limit of a block on every GPU, 48 KB, minus the kernel's static shared memory.
TRANSPOSE_SHARED_BYTES = 47 * 1024
TRANSPOSE_ENTRIES = 128  # entries of the largest graph for each warp of a block


@kept
def transpose_launch(n_graphs, max_cols, max_nnz) -> Launch:
    """Plan a block per graph of transpose_csr, or return None where the largest does not fit."""
    warps = 1
    while warps < WARP and warps * TRANSPOSE_ENTRIES < max_nnz:
        warps *= 2
    while warps > 1 and _transpose_bytes(max_cols, max_nnz, warps) > TRANSPOSE_SHARED_BYTES:
        warps //= 2
    shared_bytes = _transpose_bytes(max_cols, max_nnz, warps)
    if not n_graphs or shared_bytes > TRANSPOSE_SHARED_BYTES:
        return None
    return Launch((('VECTOR', 1),), (n_graphs, 1, 1), (warps * WARP, 1, 1), shared_bytes, ())


def _transpose_bytes(max_cols, max_nnz, warps):
    return (max_nnz + warps * max_cols) * 4


# Rows of a block of gated_step, and threads that share the elements of a sum so that the block has
# about 256. A block copies all weights, which takes about as long as what it does for 8 rows.
GATED_ROWS = ((8, 8), (12, 4), (16, 4), (20, 4), (24, 2), (28, 2), (32, 2))
GATED_COPIES = 8
# Elements of a sum whose weights are in shared memory, and how many such chunks there are. Where a
# block has a multiprocessor to itself, only copies ahead of their use hide how long they take.
GATED_CHUNKS = ((32, 3), (32, 2), (16, 2))
MAX_GATED_BLOCK = 512  # threads have about a hundred registers
QUAD = 4  # elements that the kernel loads from shared memory at once, and what it pads with


@kept
def gated_launch(
    n_rows, widths, has_state, is_same, is_gradient, vector, itemsize, device
) -> Launch | None:
    """Plan gated_step: a block for every few rows. Return None where its weights do not fit.

    `widths` are of x, of the message, which may be 0, and of the result; `is_same`: x is the state;
    `vector` is at most 4 elements; `itemsize` is of the dtype that is calculated in.
    """
    n_maps = 2 + has_state
    x, message, out = (-(-width // QUAD) * QUAD for width in widths)
    is_apart = has_state and not is_same  # the state has columns of its own
    n_inputs = x + message + is_apart * out
    n_parts = 2 + is_apart  # of the gradient, of a thread
    per_thread = 4 if itemsize == 4 else 2  # rows; of doubles more would not fit in registers
    if is_gradient:
        columns = -(-n_inputs // (QUAD * n_parts))
    else:
        columns = out // QUAD

    def longest(pair):
        """Return what the multiprocessor with most blocks has to do."""
        return -(-n_rows // (pair[0] * device.n_sms)) * (pair[0] + GATED_COPIES)

    first = GATED_ROWS.index(min(GATED_ROWS, key=longest))
    for rows, split in GATED_ROWS[first::-1]:  # fewer where memory is short
        is_alone = n_rows <= rows * device.n_sms
        threads = columns * rows // per_thread
        while split > 1 and threads * split > MAX_GATED_BLOCK:
            split //= 2
        for chunk, stages in GATED_CHUNKS if is_alone else GATED_CHUNKS[1:]:
            if is_gradient:
                wide = columns * QUAD * n_parts
                row = (n_maps + has_state) * out + QUAD
                weights, sums = stages * chunk * wide, split * rows * wide
                if has_state:
                    sums = max(sums, (stages - 1) * chunk * wide + split * rows * out)
            else:
                row = x + message
                if has_state:
                    row = max(row, 3 * out) if is_same else max(row, 2 * out) + out
                row += QUAD
                weights = stages * n_maps * out * (chunk + QUAD)
                sums = split * rows * n_maps * out
            n_shared = rows * row + has_state * out * (out + QUAD) + max(weights, sums)
            # A row of the gradient's weights has a thread for every quad.
            enough = n_inputs // QUAD if is_gradient else 1
            if (
                n_shared * itemsize <= device.shared_bytes
                and enough <= threads * split <= MAX_GATED_BLOCK
            ):
                return Launch(
                    (
                        ('VECTOR', vector),
                        *zip(('WIDTH_X', 'WIDTH_M', 'WIDTH_H'), widths),
                        ('STATE', int(has_state)),
                        ('SAME', int(is_same)),
                        ('GRADIENT', int(is_gradient)),
                        ('ROWS', rows),
                        ('PER', per_thread),
                        ('SPLIT', split),
                        ('CHUNK', chunk),
                        ('STAGES', stages),
                        ('THREADS', threads * split),
                    ),
                    (-(-n_rows // rows), 1, 1),
                    (threads * split, 1, 1),
                    n_shared * itemsize,
                    (numpy.int32(n_rows),),
                )
    return None


WEIGHT_BLOCK, WEIGHT_CHUNK = 256, 32  # threads, and rows in shared memory, of gated_weights
WEIGHT_BLOCKS_PER_SM = 2
MIN_WEIGHT_ROWS = 64  # that a block adds up


@kept
def gated_weights_launch(n_rows, widths, has_state, is_same, vector, itemsize, device) -> Launch:
    """Plan gated_weights: blocks for every tile of the gradients, each with a part of the rows.

    Arguments as :func:`gated_launch`. ``grid[1]`` is the number of parts.
    """
    per_thread = 8 if itemsize == 4 and max(widths) > 32 else 4  # elements, along each side
    tile = 8 * per_thread
    x, message, out = (-(-width // tile) for width in widths)
    tiles = (2 + has_state) * out * (x + message)
    if has_state:
        tiles += (1 if is_same else 3) * out * out
    parts = max(WEIGHT_BLOCKS_PER_SM * device.n_sms // tiles, 1)
    each = max(-(-n_rows // parts), MIN_WEIGHT_ROWS)
    return Launch(
        (
            ('VECTOR', vector),
            *zip(('WIDTH_X', 'WIDTH_M', 'WIDTH_H'), widths),
            ('STATE', int(has_state)),
            ('SAME', int(is_same)),
            ('PER', per_thread),
        ),
        (tiles, -(-n_rows // each), 1),
        (WEIGHT_BLOCK, 1, 1),
        4 * WEIGHT_CHUNK * tile * itemsize,
        (numpy.int32(n_rows), numpy.int32(each)),
    )


GATHER_WARPS, MAX_GATHER_WARPS = 8, 16  # of a block
GATHER_BLOCKS_PER_SM = 2  # each adds up the sizes of the whole batch


@kept
def gather_launch(n_graphs, device) -> Launch:
    """Plan a warp per graph of gather_batch, or per several graphs if that made too many blocks."""
    most = GATHER_BLOCKS_PER_SM * device.n_sms
    graphs_per_block = max(GATHER_WARPS, -(-n_graphs // most))
    warps = min(graphs_per_block, MAX_GATHER_WARPS)
    return Launch(
        (('VECTOR', 1),),
        (-(-n_graphs // graphs_per_block), 1, 1),
        (warps * WARP, 1, 1),
        0,
        (numpy.int32(n_graphs), numpy.int32(graphs_per_block)),
    )


def one_block(n) -> Launch:
    """Plan one block, with a thread for each of n elements if there are at most 1,024."""
    n_threads = min(-(-n // WARP) * WARP, 1024)
    return Launch((('VECTOR', 1),), (1, 1, 1), (n_threads, 1, 1), 0, ())


def row_threads(n_rows) -> Launch:
    """Plan a thread for each row."""
    return Launch((('VECTOR', 1),), (-(-n_rows // BLOCK), 1, 1), (BLOCK, 1, 1), 0, ())


# A layer as kernels/graph_linear.cu does it. n_relations 0: none; n_biases: rows of b_self;
# activation: the name of one; loop, by_relation: as in the kernel's header.
Layer = collections.namedtuple(
    'Layer',
    'width_in width_out n_relations has_self loop has_relation_bias n_biases by_relation '
    'activation',
)

LAYER_THREADS = 256
LAYER_ROWS = 16, 20, 24, 32  # of a tile: the fewest that give every multiprocessor at most one
LAYER_SLICES = 1, 2, 4  # of the columns of a result, where it is too wide for one block
# Blocks of 4 x 4 of the gradients of weights that a thread holds in registers, by their bytes; half
# as many where there are twice the threads.
LAYER_BLOCKS = {4: 6, 8: 2}
LAYER_RESIDENT = 2  # blocks of threads on a multiprocessor
SM_SHARED_BYTES = 228 << 10  # of a multiprocessor; a block takes another 1 KB


@kept
def layer_launch(layer, n_rows, itemsize, quads, device, is_backward) -> Launch | None:
    """Plan a layer, or its gradient, as one launch; None where it does not fit.

    That is where shared memory or registers are too small.

    `quads`: whether rows of all arrays are aligned to four elements.
    """
    produced = layer.width_in if is_backward else layer.width_out
    for slices in LAYER_SLICES:
        if slices == 1 or produced % (4 * slices) == 0:
            plan = _layer_launch(layer, n_rows, itemsize, quads, device, is_backward, slices)
            if plan is not None:
                return plan
    return None


def _layer_launch(layer, n_rows, itemsize, quads, device, is_backward, slices) -> Launch | None:
    real = max(itemsize, 4)
    n_in, n_out = -(-layer.width_in // 4), -(-layer.width_out // 4)  # in quads
    if is_backward:
        n_in = -(-n_in // slices)
    else:
        n_out = -(-n_out // slices)
    gathered, produced = (n_out, n_in) if is_backward else (n_in, n_out)
    mapped = layer.n_relations + layer.has_self
    terms = mapped + (is_backward and layer.n_biases > 0 and not layer.has_self)
    if is_backward and mapped * n_in * n_out > LAYER_THREADS * LAYER_BLOCKS[real]:
        return None
    # Twice the threads hide more of the latency of several matrices, if they are not of doubles,
    # which need too many registers, and of a multiprocessor's only tile. The gradient has no use
    # for them there: each thread would have fewer weights to add up the tile's rows for.
    has_one_tile = n_rows <= max(LAYER_ROWS) * device.n_sms
    has_several_matrices = mapped > 2 and real == 4
    if is_backward:
        is_double = has_several_matrices and not has_one_tile
    else:
        is_double = has_several_matrices or has_one_tile
    threads = LAYER_THREADS << is_double

    def shared_bytes(rows, splits):
        of_row = splits * produced * 4 + terms * gathered * 4 + 4
        if is_backward:
            of_row += produced * 4 + 4
        elif layer.has_relation_bias:
            of_row += layer.n_relations
        return real * (mapped * n_out * 4 * (n_in * 4 + 4) + rows * of_row)

    fitting = {}  # rows -> splits
    for rows in LAYER_ROWS:
        # Beside what is dynamic rows have patterns, and an order for each of the most warps.
        limit = device.shared_bytes - rows * (4 + 2 * LAYER_THREADS // WARP)
        splits = max(1, min(threads // (produced * rows // 4), gathered))
        while splits > 1 and shared_bytes(rows, splits) > limit:
            splits //= 2
        if shared_bytes(rows, splits) <= limit:
            fitting[rows] = splits
    if not fitting:
        return None
    # Of many tiles, small ones leave room for two blocks with the gradients of one matrix.
    most = min(fitting) if is_backward and mapped == 1 else max(fitting)
    rows = next((rows for rows in fitting if n_rows * slices <= rows * device.n_sms), most)
    n_bytes = shared_bytes(rows, fitting[rows])
    resident = max(1, min(LAYER_RESIDENT, SM_SHARED_BYTES // (n_bytes + 2048)))
    return Launch(
        (
            ('VECTOR', 1),
            ('QUADS', int(quads)),
            ('ROWS', rows),
            ('THREADS', threads),
            ('SPLITS', fitting[rows]),
            ('SLICES', slices),
            ('WIDTH_IN', layer.width_in),
            ('WIDTH_OUT', layer.width_out),
            ('RELATIONS', layer.n_relations),
            ('SELF', int(layer.has_self)),
            ('LOOP', int(layer.loop)),
            ('RELATION_BIAS', int(layer.has_relation_bias)),
            ('BIASES', layer.n_biases),
            ('BY_RELATION', int(layer.by_relation)),
            ('ACTIVATION', layer.activation.upper()),
            ('BACKWARD', int(is_backward)),
        ),
        (min(-(-n_rows // rows), max(1, resident * device.n_sms // slices)), slices, 1),
        (threads, 1, 1),
        n_bytes,
        (numpy.int32(n_rows),),
    )


EMBED_WARPS = 8
EMBED_CHUNK = 160  # rows of a block in shared memory: of float64 they take 42 KB, the limit is 48
EMBED_ROWS = 64  # of a run at least, because every run writes sums for all types
EMBED_RUNS = 128  # at most, about one for each multiprocessor
EMBED_SUMS = 2**21  # elements of all runs together, at most


@kept
def embed_launch(n_rows, n_types, n_channels) -> Launch:
    """Plan a block per run of rows and 32 channels of embed_grad."""
    runs = min(-(-n_rows // EMBED_ROWS), EMBED_RUNS, max(EMBED_SUMS // (n_types * n_channels), 1))
    run = -(-n_rows // (runs * WARP)) * WARP
    return Launch(
        (('VECTOR', 1), ('WARPS', EMBED_WARPS), ('ROWS', EMBED_CHUNK)),
        (-(-n_rows // run), -(-n_channels // WARP), 1),
        (WARP, EMBED_WARPS, 1),
        0,
        tuple(map(numpy.int32, (n_rows, n_channels, n_types, run))),
    )


LOSS_CHUNK = 2**14  # elements of a block: losses of a batch of molecules have one block
LOSS_ALONG = 2**12  # elements up to which that block's second pass takes less than another launch
MAX_BLOCK = 1024


@kept
def loss_launches(size) -> tuple[Launch, ...]:
    """Plan mean_loss: one launch, or two where the elements are more than a block's."""
    n_blocks = max(-(-size // LOSS_CHUNK), 1)
    sizes = (size,) if n_blocks == 1 else (size, n_blocks)
    return tuple(
        Launch(
            (('VECTOR', 1), ('CHUNK', LOSS_CHUNK), ('COMBINE', combine)),
            (1 if combine else n_blocks, 1, 1),
            (min(-(-max(n, 1) // WARP) * WARP, MAX_BLOCK), 1, 1),
            0,
            (numpy.uint32(n),),
        )
        for combine, n in enumerate(sizes)
    )


@kept
def loss_grad_launch(size) -> Launch:
    """Plan a thread for every element of the gradient of mean_loss; size as there, positive."""
    return Launch(
        (('VECTOR', 1), ('CHUNK', LOSS_CHUNK), ('COMBINE', 0)),
        (-(-size // BLOCK), 1, 1),
        (BLOCK, 1, 1),
        0,
        (numpy.uint32(size),),
    )
