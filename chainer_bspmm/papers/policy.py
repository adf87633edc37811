"""Launch plans of the papers' kernels; see `chainer_bspmm.cuda.plans`."""

import numpy

from chainer_bspmm.cuda import plans

SHARED_BUDGET = 32 * 1024  # bytes per block
ST_BLOCK = 1024  # most threads of a block; the paper does not state how many it uses
ST_GLOBAL_BLOCK = 256


def subwarp(n_channels):
    """Return threads per row or entry: the least power of two >= n_B, at most 32 (section 4.1)."""
    return plans.WARP if n_channels > 16 else 1 << (n_channels - 1).bit_length()


def st_algorithm(max_rows, n_channels, itemsize):
    """Return the name of the ST kernel for a batch, by the rule of the paper's section 4.3."""
    if max_rows * n_channels * itemsize <= SHARED_BUDGET:
        return 'st_shared'
    return 'st_blocked' if max_rows * itemsize <= SHARED_BUDGET else 'st_global'


def st_partition(max_rows, n_channels, itemsize):
    """Return the columns per partition, for the fewest partitions (2, 4, 8, ...) that fit."""
    n_partitions = 2
    while max_rows * -(-n_channels // n_partitions) * itemsize > SHARED_BUDGET:
        n_partitions *= 2
    return -(-n_channels // n_partitions)


@plans.kept
def st_shared_launch(n_graphs, max_rows, max_nnz, n_channels, n_columns, itemsize):
    """Plan bspmm_st_shared: a block per (matrix, partition), and in it a sub-warp per entry."""
    lanes = subwarp(n_columns)
    threads = min(max(-(-max_nnz * lanes // plans.WARP), 1) * plans.WARP, ST_BLOCK)
    # There are fewer partitions than a power of two if the last ones would have no column.
    n_partitions = -(-n_channels // n_columns)
    y = min(n_partitions, plans.MAX_GRID_Y)
    return plans.Launch(
        (('VECTOR', 1), ('SUBWARP', lanes)),
        (n_graphs, y, -(-n_partitions // y)),
        (threads, 1, 1),
        max_rows * n_columns * itemsize,
        (numpy.int32(n_channels), numpy.int32(n_columns)),
    )


@plans.kept
def st_global_launch(n_graphs, nnz, n_channels):
    """Plan bspmm_st_global: a sub-warp per entry of the whole batch; all sizes are positive."""
    lanes = subwarp(n_channels)
    return plans.Launch(
        (('VECTOR', 1), ('SUBWARP', lanes)),
        (-(-nnz * lanes // ST_GLOBAL_BLOCK), 1, 1),
        (ST_GLOBAL_BLOCK, 1, 1),
        arguments=(numpy.int32(n_graphs), numpy.int32(n_channels)),
    )


@plans.kept
def swa_launch(n_graphs, max_rows, n_channels, itemsize, blocked=None):
    """Plan bspmm_swa, the papers' CSR kernels: for every graph a sub-warp per row of the largest.

    Without blocking, figure 5-(c), a block owns all columns of its rows. With blocking, 5-(d), the
    columns are split into the fewest partitions, a power of two, whose sums fit in `SHARED_BUDGET`
    (Nagasaka et al., sections 4.1 to 4.3). TB, which the paper does not state, is `BLOCK`.
    """
    lanes = subwarp(n_channels)
    partitions = 1
    width = n_channels
    row_bytes = plans.BLOCK // lanes * max(itemsize, 4)  # sums of a column in TB / subWarp rows
    shared_bytes = width * row_bytes
    if blocked is False and shared_bytes > SHARED_BUDGET:
        raise ValueError(
            'algorithm: swa_rows expects n_B whose sums take at most %d bytes of shared memory '
            'per block, got n_B = %d, which takes %d; swa_blocked splits the columns'
            % (SHARED_BUDGET, n_channels, shared_bytes)
        )
    while shared_bytes > SHARED_BUDGET or blocked and partitions == 1:
        partitions *= 2
        width = -(-n_channels // partitions)
        shared_bytes = width * row_bytes
    sub_warps = n_graphs * max_rows
    if sub_warps >= 2**31 or partitions > plans.MAX_GRID_Y:
        raise ValueError(
            'algorithm: swa expects fewer than 2**31 sub-warps, graphs times rows of the largest, '
            'and at most %d partitions; got %d x %d and %d'
            % (plans.MAX_GRID_Y, n_graphs, max_rows, partitions)
        )
    return plans.Launch(
        (('VECTOR', 1), ('SUBWARP', lanes)),
        (-(-sub_warps * lanes // plans.BLOCK), partitions, 1),
        (plans.BLOCK, 1, 1),
        shared_bytes,
        tuple(map(numpy.int32, (n_graphs, max_rows, n_channels, width))),
    )


# Columns of x whose sums one thread of bspmm_sell keeps in registers.
SELL_COLUMNS = 8


def sell_slots(max_slice_rows):
    """Return the threads per slice of SELL: one per row, from 32 on rounded up to whole warps."""
    if max_slice_rows < plans.WARP:
        return max_slice_rows
    return -(-max_slice_rows // plans.WARP) * plans.WARP


@plans.kept
def sell_launch(n_slices, n_slots, n_channels, width):
    """Plan bspmm_sell: a thread per (row of a slice, tile of vectors)."""
    n_vectors = n_channels // width
    tile = min(n_vectors, SELL_COLUMNS // width)
    blocks = -(-n_slices * n_slots // plans.BLOCK)
    if blocks * plans.BLOCK >= 2**32:
        raise ValueError(
            'adj: expected fewer than 2**32 slots, got %d slices of %d; make the '
            'BatchedSELL with a smaller slice_size' % (n_slices, n_slots)
        )
    return plans.Launch(
        (('VECTOR', width), ('TILE', tile), ('WHOLE_WARPS', int(n_slots % plans.WARP == 0))),
        (blocks, min(-(-n_vectors // tile), plans.MAX_GRID_Y), 1),
        (plans.BLOCK, 1, 1),
        arguments=tuple(map(numpy.int32, (n_slices, n_slots, n_vectors))),
    )


# Entries of a row that a lane of spmv_csr loads before it uses the first (AHEAD in the kernel).
SPMV_AHEAD = 4


@plans.kept
def spmv_launch(n_rows, nnz):
    """Plan spmv_csr: a lane for every SPMV_AHEAD entries of the mean row."""
    lanes = 1
    while lanes < plans.WARP and lanes * SPMV_AHEAD * n_rows < nnz:
        lanes *= 2
    rows = plans.BLOCK // lanes
    return plans.Launch(
        (('VECTOR', 1), ('LANES', lanes)),
        (-(-n_rows // rows), 1, 1),
        (lanes, rows, 1),
        arguments=(numpy.int32(n_rows),),
    )


# Vectors of a row that a lane of bsddmm_coo has in flight at once, for its single entry.
COO_TILE = 4


@plans.kept
def coo_dot_launch(n_graphs, nnz, n_channels, width):
    """Plan bsddmm_coo: a sub-warp per entry."""
    plan = plans.dot_launch(nnz, n_channels, width, COO_TILE)
    return plan._replace(arguments=(numpy.int32(n_graphs), plan.arguments[1]))
