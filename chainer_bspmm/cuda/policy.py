"""Launch policy: which kernel variant and grid to use. Pure functions of a few integers.

Nothing here needs a GPU. The kernels take their tile sizes from what is decided here and nowhere
else, so that grid and tile cannot disagree.
"""

import collections
import functools

import numpy

# defines: compile-time constants of the kernel; grid, block: in CUDA's order (x, y, z);
# n_vectors: the width of the feature matrix in vectors, an argument of the kernels.
Launch = collections.namedtuple('Launch', 'defines grid block n_vectors')

BLOCK = 128  # threads; large enough for full occupancy, small enough for batches of few rows
WARP = 32
VECTOR_BYTES = 16  # the widest load of one thread
MAX_GRID_Y = 65535
SHARED_BUDGET = 32 * 1024  # bytes a block, of the papers' algorithms


def vector_width(n_channels, itemsize, address_bits):
    """Return how many elements one thread moves at a time.

    The widest of 16, 8, 4, ... bytes that divides a row and that all addresses are aligned to.

    Args:
        n_channels (int): elements a row.
        itemsize (int): bytes an element.
        address_bits (int): the addresses of all arrays involved, or-ed together.
    """
    width = VECTOR_BYTES // itemsize
    while width > 1 and (n_channels % width or address_bits % (width * itemsize)):
        width //= 2
    return width


# What a plan wants to know of a GPU: its multiprocessors, and the bytes of its L2 cache.
Device = collections.namedtuple('Device', 'n_sms l2_bytes')

# arguments: n_rows, n_vectors and rows_per_thread, as bspmm_csr takes them.
CSRLaunch = collections.namedtuple('CSRLaunch', 'defines grid block arguments')

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
):
    """Plan a thread per (row, `columns` vectors) of the product: the grid of bspmm_csr.

    Args:
        n_rows, n_cols, n_channels (int): of the product, all positive.
        width (int): elements a vector, from :func:`vector_width`.
        lanes (int): threads side by side in a row at most; evened out where they do not divide it.
        columns (int): vectors a thread.
        rows_per_thread (int): more than one: each row's entries are loaded during the one before.
        block (int): threads a block, about.
        ahead (int): entries a thread loads at once.
        stream (bool): write the result past the L2 cache.
    """
    n_vectors = n_channels // width
    wanted = -(-n_vectors // columns)
    tiles = -(-wanted // lanes)
    lanes = -(-wanted // tiles)
    rows = max(block // lanes, 1)
    tiles = -(-n_vectors // (lanes * columns))
    y = min(tiles, MAX_GRID_Y)
    few = max(n_rows, n_cols) * n_vectors < 2**32
    return CSRLaunch(
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
        (numpy.uint32(n_rows), numpy.uint32(n_vectors), numpy.uint32(rows_per_thread)),
    )


# The model of bspmm_launch, fitted to 177 random shapes on an H200 (benchmarks/bench_policy.py says
# how far it is from the best on others). `work`: vectors of the result per multiprocessor, that is
# threads if each had one vector of one row; `length`: entries a row, on average.
SMALL = 1800  # work, up to about what is resident at once
PIPELINED = 3400  # work from which a thread is given several rows
LARGE = 6800  # work from which it is given two vectors of 16 bytes besides
HUGE = 10000  # work from which it is given eight rows of narrower vectors
SHORT, MEDIUM, LONG, VERY_LONG = 1.5, 3, 4, 10  # length
NARROW = 8  # vectors a row, below which two vectors a thread would leave warps half empty


@functools.lru_cache(maxsize=4096)
def bspmm_launch(n_rows, n_cols, nnz, n_channels, width, itemsize, device, algorithm='auto'):
    """Plan a product on a GPU: a small model of what was measured, not a table of it.

    Args:
        n_rows, n_cols, nnz (int): of the matrix; n_rows and n_cols positive.
        n_channels (int): n_B, positive.
        width, itemsize (int): elements a vector, bytes an element.
        device (Device): the GPU.
        algorithm (str): ``'vector'`` and ``'pipelined'`` force one row a thread, or several.
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
        # A result that does not fit in L2 beside x would push x out of it.
        stream=(n_rows + n_cols) * n_channels * itemsize > device.l2_bytes // 2,
    )
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
        # A half is widened to be added: with several rows a thread that is too much at once.
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


# A block of an ST kernel: see kernels/bspmm_st_shared.cu.
StLaunch = collections.namedtuple('StLaunch', 'defines grid block shared_bytes n_columns')

ST_BLOCK = 1024  # threads at most; the paper does not say how many it has
ST_GLOBAL_BLOCK = 256


def subwarp(n_channels):
    """Return how many threads share a row or an entry: 32, or the least power of two >= n_B <= 16.

    Args:
        n_channels (int): n_B, positive.

    Source:
        Nagasaka et al., section 4.1: powers of two, so that dividing by them is a shift.
    """
    return WARP if n_channels > 16 else 1 << (n_channels - 1).bit_length()


def st_algorithm(max_rows, n_channels, itemsize):
    """Return the name of the ST kernel for a batch, by the rule of the paper's section 4.3.

    Args:
        max_rows (int): rows of the batch's largest output: one that does not fit decides for all.
        n_channels (int): n_B, columns of every output.
        itemsize (int): bytes an element.
    """
    if max_rows * n_channels * itemsize <= SHARED_BUDGET:
        return 'st_shared'
    return 'st_blocked' if max_rows * itemsize <= SHARED_BUDGET else 'st_global'


def st_partition(max_rows, n_channels, itemsize):
    """Return how many columns a partition has; one column must fit.

    The number of partitions is the smallest power of two, from 2 on, whose largest partition fits.
    """
    n_partitions = 2
    while max_rows * -(-n_channels // n_partitions) * itemsize > SHARED_BUDGET:
        n_partitions *= 2
    return -(-n_channels // n_partitions)


@functools.lru_cache(maxsize=4096)
def st_shared_launch(n_graphs, max_rows, max_nnz, n_channels, n_columns, itemsize):
    """Plan a block per (matrix, partition of n_columns columns).

    The sub-warp follows from the width of a partition, each being a product of its own; a block has
    as many threads as give every entry its sub-warp at once, up to `ST_BLOCK`.

    Args:
        n_graphs, n_channels, n_columns (int): all positive.
        max_rows, max_nnz (int): rows of the largest output, entries of the largest matrix.
        itemsize (int): bytes an element.
    """
    lanes = subwarp(n_columns)
    threads = min(max(-(-max_nnz * lanes // WARP), 1) * WARP, ST_BLOCK)
    # Less than a power of two where the last ones would have no column.
    n_partitions = -(-n_channels // n_columns)
    y = min(n_partitions, MAX_GRID_Y)
    return StLaunch(
        (('VECTOR', 1), ('SUBWARP', lanes)),
        (n_graphs, y, -(-n_partitions // y)),
        (threads, 1, 1),
        max_rows * n_columns * itemsize,
        n_columns,
    )


@functools.lru_cache(maxsize=4096)
def st_global_launch(nnz, n_channels):
    """Plan a sub-warp per entry of the whole batch; nnz and n_channels are positive."""
    lanes = subwarp(n_channels)
    return StLaunch(
        (('VECTOR', 1), ('SUBWARP', lanes)),
        (-(-nnz * lanes // ST_GLOBAL_BLOCK), 1, 1),
        (ST_GLOBAL_BLOCK, 1, 1),
        0,
        n_channels,
    )


# Vectors of a row that a lane has in flight at once: of bsddmm_csr, which takes several entries of
# a row together, and of bsddmm_coo, which takes one.
CSR_TILE, COO_TILE = 2, 4


@functools.lru_cache(maxsize=4096)
def dot_launch(n_rows, n_channels, width, tile):
    """Plan a sub-warp per row, whose lanes stride over the vectors: the grid of bsddmm.

    Args:
        n_rows, n_channels (int): rows, or entries where each has a sub-warp, and the width of the
            factors; both positive.
        width (int): elements a vector.
        tile (int): vectors a lane at once, at most.
    """
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
        n_vectors,
    )


# As Launch; width: columns of the result that a block owns; shared_bytes: dynamic shared memory.
SWALaunch = collections.namedtuple('SWALaunch', 'defines grid block width shared_bytes')


def swa_shared_bytes(width, lanes, itemsize):
    """Return the shared memory of a block: ``TB / subWarp`` rows of `width` sums.

    Args:
        width (int): columns of the result that a block owns.
        lanes (int): subWarp.
        itemsize (int): bytes an element of the matrices; float16 is summed in float32.
    """
    return BLOCK // lanes * width * max(itemsize, 4)


@functools.lru_cache(maxsize=4096)
def swa_launch(n_graphs, max_rows, n_channels, itemsize, blocked=None):
    """Plan a sub-warp per row of the largest graph, for every graph: the papers' CSR kernels.

    Without blocking (c) a block owns all columns of its rows. With it (d) the columns are split
    into the fewest partitions, a power of two, whose sums fit in `SHARED_BUDGET`.

    Args:
        n_graphs, max_rows, n_channels (int): batch, max(m_A) and n_B, all positive.
        itemsize (int): bytes an element.
        blocked (bool or None): force (d), with two partitions at least, or (c); None: (c) where
            it fits, else (d).

    Raises:
        ValueError: (c) is forced and does not fit, or the grid is larger than CUDA allows.

    Source:
        Nagasaka et al., sections 4.1 to 4.3; TB, which they do not state, is `BLOCK`.
    """
    lanes = subwarp(n_channels)
    partitions, width = 1, n_channels
    shared_bytes = swa_shared_bytes(width, lanes, itemsize)
    if blocked is False and shared_bytes > SHARED_BUDGET:
        raise ValueError(
            'algorithm: swa_rows expects n_B whose sums take at most %d bytes of shared memory a '
            'block, got n_B = %d, which takes %d; swa_blocked splits the columns'
            % (SHARED_BUDGET, n_channels, shared_bytes)
        )
    while shared_bytes > SHARED_BUDGET or blocked and partitions == 1:
        partitions *= 2
        width = -(-n_channels // partitions)
        shared_bytes = swa_shared_bytes(width, lanes, itemsize)
    sub_warps = n_graphs * max_rows
    if sub_warps >= 2**31 or partitions > MAX_GRID_Y:
        raise ValueError(
            'algorithm: swa expects fewer than 2**31 sub-warps, graphs times rows of the largest, '
            'and at most %d partitions; got %d x %d and %d'
            % (MAX_GRID_Y, n_graphs, max_rows, partitions)
        )
    return SWALaunch(
        (('VECTOR', 1), ('SUBWARP', lanes)),
        (-(-sub_warps * lanes // BLOCK), partitions, 1),
        (BLOCK, 1, 1),
        width,
        shared_bytes,
    )


# Columns of x whose sums one thread of bspmm_sell keeps in registers.
SELL_COLUMNS = 8


def sell_slots(max_slice_rows):
    """Return how many threads every slice of a SELL matrix gets: its rows, or whole warps of them.

    Args:
        max_slice_rows (int): rows of the largest slice, positive. Not the slice size that was asked
            for: no slice of small molecules is higher than the largest of them.
    """
    return max_slice_rows if max_slice_rows < WARP else -(-max_slice_rows // WARP) * WARP


@functools.lru_cache(maxsize=4096)
def sell_launch(n_slices, n_slots, n_channels, width):
    """Plan a thread per (row of a slice, tile of vectors): the grid of bspmm_sell.

    Args:
        n_slices (int): positive.
        n_slots (int): threads a slice, from :func:`sell_slots`.
        n_channels (int): columns of the feature matrix, positive.
        width (int): elements a vector, from :func:`vector_width`.

    Raises:
        ValueError: more threads than the kernel counts in 32 bits.
    """
    n_vectors = n_channels // width
    tile = min(n_vectors, SELL_COLUMNS // width)
    blocks = -(-n_slices * n_slots // BLOCK)
    if blocks * BLOCK >= 2**32:
        raise ValueError(
            'adj: expected fewer than 2**32 slots, got %d slices of %d; make the '
            'BatchedSELL with a smaller slice_size' % (n_slices, n_slots)
        )
    return Launch(
        (('VECTOR', width), ('TILE', tile), ('WHOLE_WARPS', int(n_slots % WARP == 0))),
        (blocks, min(-(-n_vectors // tile), MAX_GRID_Y), 1),
        (BLOCK, 1, 1),
        n_vectors,
    )


# Entries of a row that one lane of spmv_csr loads before it uses the first: AHEAD in the kernel.
SPMV_AHEAD = 4


@functools.lru_cache(maxsize=4096)
def spmv_launch(n_rows, nnz):
    """Plan a thread or, where rows are long, a sub-warp per row: the grid of spmv_csr.

    A lane for every SPMV_AHEAD entries of the mean row, so that its loads are in flight together.

    Args:
        n_rows, nnz (int): rows (positive) and entries of the matrix.
    """
    lanes = 1
    while lanes < WARP and lanes * SPMV_AHEAD * n_rows < nnz:
        lanes *= 2
    rows = BLOCK // lanes
    return Launch(
        (('VECTOR', 1), ('LANES', lanes)), (-(-n_rows // rows), 1, 1), (lanes, rows, 1), 1
    )


# As Launch; ahead: rows that a lane of the reduction loads before it uses the first; chunk,
# n_chunks: what the rows of long segments are divided into (see kernels/segment_reduce.cu);
# has_long: whether there can be any; combine_grid, shared_bytes: grid of the reduction's second
# launch, dynamic shared memory of both.
SegmentLaunch = collections.namedtuple(
    'SegmentLaunch',
    'defines grid block n_vectors ahead chunk n_chunks has_long combine_grid shared_bytes',
)

SEGMENT_ROWS = 8  # rows of the mean segment that a lane gets, and the most it has in flight at once
SEGMENT_BLOCK = 64  # threads; more only where the lanes of one segment are more
MAX_SEGMENT_BLOCK = 256
MIN_CHUNK = 256  # rows that one unit of threads reduces in a microsecond or two
MAX_CHUNKS = 512  # about four blocks for each multiprocessor of a large GPU, one wave
MAX_BLOCK_Z = 64


@functools.lru_cache(maxsize=4096)
def segment_launch(
    n_rows, n_segments, n_channels, width, itemsize, max_rows=None, always_chunks=False
):
    """Plan a unit of (vectors x lanes) threads per segment: the grid of the segment kernels.

    As many lanes as have all rows of the mean segment in flight at once. In large blocks, of long
    rows or long segments, the many warps keep the memory busy: lanes then have half as many loads
    in flight, in fewer registers. Measured on an H200: 3.4 us in place of 4.0 for 100 segments of
    50 rows of 512 float32, 66 in place of 73 for one of a million rows of 64.

    Args:
        n_rows, n_segments, n_channels (int): rows of x, rows of y, and their width; the last is
            positive.
        width (int): elements a vector.
        itemsize (int): bytes an element.
        max_rows (int or None): the most rows that a segment can have; None: n_rows.
        always_chunks (bool): give every chunk of rows a unit too, even if no segment is long.
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
    n_chunks = -(-n_rows // chunk) if has_long or always_chunks else 0
    chunk_blocks = -(-n_chunks // units)
    tiles = min(tiles, MAX_GRID_Y)
    threads = columns * lanes * units
    ahead = SEGMENT_ROWS if threads <= BLOCK else SEGMENT_ROWS // 2
    return SegmentLaunch(
        (('VECTOR', width),),
        (chunk_blocks + -(-n_segments // units), tiles, 1),
        (columns, lanes, units),
        n_vectors,
        ahead,
        chunk,
        n_chunks,
        has_long,
        (chunk_blocks, tiles, 1),
        threads * width * max(itemsize, 4),
    )


@functools.lru_cache(maxsize=4096)
def softmax_launch(n_segments, n_channels, width):
    """Plan a thread per (segment, vector): the grid of segment_softmax.

    Args:
        n_segments, n_channels (int): both positive.
        width (int): elements a vector.
    """
    n_vectors = n_channels // width
    tiles = -(-n_vectors // WARP)
    columns = -(-n_vectors // tiles)
    units = BLOCK // columns
    return Launch(
        (('VECTOR', width),),
        (-(-n_segments // units), min(tiles, MAX_GRID_Y), 1),
        (columns, units, 1),
        n_vectors,
    )


# arguments: last and n_last, as dropout takes them.
DropoutLaunch = collections.namedtuple('DropoutLaunch', 'defines grid block arguments')


@functools.lru_cache(maxsize=4096)
def dropout_launch(size, width):
    """Plan a thread for every four elements of dropout.

    Args:
        size (int): elements, from 1 to 2**34.
        width (int): elements a vector, as from :func:`vector_width`.
    """
    last = (size - 1) // 4
    return DropoutLaunch(
        (('VECTOR', min(width, 4)),),
        (last // BLOCK + 1, 1, 1),
        (BLOCK, 1, 1),
        (numpy.uint32(last), numpy.int32(size - 4 * last)),
    )


# defines, grid, block as in Launch; shared_bytes: dynamic shared memory.
TransposeLaunch = collections.namedtuple('TransposeLaunch', 'defines grid block shared_bytes')

TRANSPOSE_SHARED_BYTES = 47 * 1024  # what every GPU gives a block unasked, less the kernel's own
TRANSPOSE_ENTRIES = 128  # entries of the largest graph for each warp of a block


@functools.lru_cache(maxsize=4096)
def transpose_launch(n_graphs, max_cols, max_nnz):
    """Plan a block per graph of transpose_csr, or return None where the largest does not fit.

    Args:
        n_graphs, max_cols, max_nnz (int): graphs, columns and entries of the largest.
    """
    warps = 1
    while warps < WARP and warps * TRANSPOSE_ENTRIES < max_nnz:
        warps *= 2
    while warps > 1 and _transpose_bytes(max_cols, max_nnz, warps) > TRANSPOSE_SHARED_BYTES:
        warps //= 2
    shared_bytes = _transpose_bytes(max_cols, max_nnz, warps)
    if not n_graphs or shared_bytes > TRANSPOSE_SHARED_BYTES:
        return None
    return TransposeLaunch((('VECTOR', 1),), (n_graphs, 1, 1), (warps * WARP, 1, 1), shared_bytes)


def _transpose_bytes(max_cols, max_nnz, warps):
    return (max_nnz + warps * max_cols) * 4


GatherLaunch = collections.namedtuple('GatherLaunch', 'defines grid block graphs_per_block')

GATHER_WARPS = 8
GATHER_BLOCKS_PER_SM = 2  # each adds up the sizes of the whole batch


@functools.lru_cache(maxsize=4096)
def gather_launch(n_graphs, device):
    """Plan a warp per graph of gather_batch, or for several where that makes too many blocks.

    Args:
        n_graphs (int): at least 1.
        device (Device): where it runs.
    """
    most = GATHER_BLOCKS_PER_SM * device.n_sms
    graphs_per_block = max(GATHER_WARPS, -(-n_graphs // most))
    warps = min(graphs_per_block, WARP)
    return GatherLaunch(
        (('VECTOR', 1),),
        (-(-n_graphs // graphs_per_block), 1, 1),
        (warps * WARP, 1, 1),
        graphs_per_block,
    )
