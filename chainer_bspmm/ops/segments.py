"""Reductions over the nodes of every graph of a batch, and their transpose."""

import collections
from collections.abc import Callable
import math

import numpy
import scipy.sparse

from chainer import function_node, Variable
from chainer.backends import cuda
from chainer.types import NdArray

from chainer_bspmm.cuda import launch, plans
from chainer_bspmm.ops.elementwise import compute_dtype
from chainer_bspmm.ops.node import apply_untracked
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency

SEGMENT_ROWS = 8  # rows of a mean segment per lane; also the most loads that a lane has in flight
SEGMENT_BLOCK = 64  # threads of a block, unless one segment has more lanes
MAX_SEGMENT_BLOCK = 256
MIN_CHUNK = 256  # rows; one unit of threads reduces them in a microsecond or two
MAX_CHUNKS = 512  # about four blocks for each multiprocessor of a large GPU, one wave
MAX_BLOCK_Z = 64


@plans.kept
def reduce_launches(
    n_rows, n_segments, n_channels, width, itemsize, max_rows=None
) -> tuple[plans.Launch, ...]:
    """Plan segment_reduce: one launch, or two if a segment can have more rows than a chunk.

    The first launch reduces the chunks of long segments, the second (COMBINE) their results. The
    last argument of both is the number of chunks. Without `max_rows` a segment may have n_rows.
    """
    n_vectors, tiles, block, chunk, has_long = _segments(
        n_rows, n_segments, n_channels, width, max_rows
    )
    columns, lanes, units = block
    threads = columns * lanes * units
    # Large blocks, which rows of many channels and long segments have, keep the memory busy by
    # their many warps. So their lanes have half as many loads in flight, which takes fewer
    # registers. Measured on an H200: 3.4 us instead of 4.0 for 100 segments of 50 rows of 512
    # float32, and 66 us instead of 73 for one segment of a million rows of 64.
    ahead = SEGMENT_ROWS if threads <= plans.BLOCK else SEGMENT_ROWS // 2
    n_chunks = -(-n_rows // chunk) if has_long else 0
    chunk_blocks = -(-n_chunks // units)
    return tuple(
        plans.Launch(
            (('VECTOR', width), ('AHEAD', ahead), ('COMBINE', combine)),
            (chunk_blocks + (0 if combine else -(-n_segments // units)), tiles, 1),
            block,
            threads * width * max(itemsize, 4),
            tuple(map(numpy.int32, (n_segments, n_rows, n_vectors, chunk, n_chunks))),
        )
        for combine in range(1 + has_long)
    )


@plans.kept
def broadcast_launch(n_rows, n_segments, n_channels, width, max_rows=None) -> plans.Launch:
    """Plan segment_broadcast; arguments as :func:`reduce_launches`.

    Every chunk of rows has a unit of threads even if no segment is long, because rows past the last
    segment are written, too.
    """
    n_vectors, tiles, block, chunk, has_long = _segments(
        n_rows, n_segments, n_channels, width, max_rows
    )
    n_chunks = -(-n_rows // chunk)
    return plans.Launch(
        (('VECTOR', width),),
        (-(-n_chunks // block[2]) + -(-n_segments // block[2]), tiles, 1),
        block,
        0,
        tuple(map(numpy.int32, (n_segments, n_rows, n_vectors, chunk, n_chunks, has_long))),
    )


def _segments(n_rows, n_segments, n_channels, width, max_rows):
    """Plan a unit of (vectors x lanes) threads per segment, and several units per block.

    Returns the vectors per row, the tiles of vectors, the block, the rows per chunk, and whether a
    segment can be longer than a chunk.
    """
    n_vectors = n_channels // width
    tiles = -(-n_vectors // plans.WARP)
    columns = -(-n_vectors // tiles)
    lanes = 1
    while lanes * SEGMENT_ROWS * n_segments < n_rows and 2 * lanes * columns <= MAX_SEGMENT_BLOCK:
        lanes *= 2
    units = min(max(SEGMENT_BLOCK // (columns * lanes), 1), MAX_BLOCK_Z)
    chunk = max(-(-n_rows // MAX_CHUNKS), MIN_CHUNK)
    has_long = (n_rows if max_rows is None else max_rows) > chunk
    return n_vectors, min(tiles, plans.MAX_GRID_Y), (columns, lanes, units), chunk, has_long


def _reduce_on_gpu(operation, x, offsets, max_rows, weights):
    """Launch kernels/segment_reduce.cu, twice if a segment can have more rows than a chunk."""
    n_segments = 1 if offsets is None else offsets.size - 1
    n_rows, n_channels = x.shape
    with launch.device_of(x):
        x = launch.contiguous(x)
        y = cuda.cupy.empty((n_segments, n_channels), x.dtype)
        if y.size:
            width = launch.vector_width(n_channels, x, y)
            launches = reduce_launches(n_rows, n_segments, n_channels, width, x.itemsize, max_rows)
            partial = None
            if len(launches) > 1:
                n_chunks = int(launches[0].arguments[-1])
                partial = cuda.cupy.empty((2, n_chunks, n_channels), launch.arithmetic(x.dtype))
            for plan in launches:
                launch.run(
                    'segment_reduce',
                    x,
                    plan,
                    offsets,
                    x,
                    weights,
                    y,
                    partial,
                    OPERATION=operation,
                    WEIGHTED=weights is not None,
                )
    return y


def segment_sum_forward(x, offsets, max_rows=None, weights=None):
    """Compute ``y[g] = sum of weights[i] x[i] over offsets[g] <= i < offsets[g + 1]``.

    `max_rows` is an upper bound of the number of rows in a segment; without it, one segment might
    have all rows, for which a GPU needs a second launch. `weights` are float32 for any dtype of x;
    None means ones. A row of weight 0 contributes nothing, even if it holds NaN. An empty segment
    gives 0.
    """
    if launch.on_gpu(x):
        return _reduce_on_gpu('SUM', x, offsets, max_rows, weights)
    dtype = compute_dtype(x)
    if weights is None:
        rows = numpy.arange(len(x), dtype=numpy.int32)
        values = numpy.ones(len(x), dtype)
    else:
        rows, offsets = _counted(offsets, weights)
        values = weights[rows].astype(dtype, copy=False)
    membership = scipy.sparse.csr_matrix((values, rows, offsets), shape=(offsets.size - 1, len(x)))
    return (membership @ x.astype(dtype, copy=False)).astype(x.dtype, copy=False)


def _counted(offsets, weights):
    """Return the rows whose weight is not 0, and offsets of the segments among them, as int32."""
    rows = numpy.flatnonzero(weights[: offsets[-1]]).astype(numpy.int32)
    return rows, numpy.searchsorted(rows, offsets).astype(numpy.int32)


def sum_at(index, values, n):
    """Add up the rows of a host array that have the same index; return (n, n_B)."""
    ones = numpy.ones(len(index), values.dtype)
    order = numpy.arange(len(index) + 1)
    matrix = scipy.sparse.csc_matrix((ones, index, order), shape=(n, len(index)))
    return matrix @ values


def segment_max_forward(x, offsets, max_rows=None, weights=None):
    """Compute the maximum over each segment's rows of positive weight.

    It is 0 if there are none. NaN propagates.
    """
    if launch.on_gpu(x):
        return _reduce_on_gpu('MAX', x, offsets, max_rows, weights)
    if weights is None:
        x = x[: offsets[-1]]
    else:
        rows, offsets = _counted(offsets, weights)
        x = x[rows]
    y = numpy.zeros((offsets.size - 1, x.shape[1]), x.dtype)
    # reduceat gives x[start] for an empty segment, so empty segments are left out.
    used = numpy.flatnonzero(numpy.diff(offsets))
    if used.size:
        y[used] = numpy.maximum.reduceat(x, offsets[used], axis=0)
    return y


def row_sum(x):
    """Compute ``y[c] = sum of x[:, c]`` in a tree; at the speed of a GPU's memory, unlike CuPy."""
    if launch.on_gpu(x):
        return _reduce_on_gpu('SUM', x, None, None, None)[0]
    # numpy.sum reads memory a few channels at a time. It is several times quicker to add up blocks
    # of about sqrt(n_rows) rows first, and then the rows of the resulting block.
    n_rows, n_channels = x.shape
    dtype = compute_dtype(x)
    block = max(math.isqrt(n_rows), 1)
    n_blocks = n_rows // block
    blocks = x[: n_blocks * block].reshape(n_blocks, block * n_channels)
    y = blocks.sum(axis=0, dtype=dtype).reshape(block, n_channels).sum(axis=0)
    y += x[n_blocks * block :].sum(axis=0, dtype=dtype)
    return y.astype(x.dtype, copy=False)


def segment_broadcast_forward(y, offsets, n_rows, max_rows=None, weights=None):
    """Compute ``x[i] = weights[i] y[g]`` for the rows of segment g, the transpose of the sum.

    `n_rows` is at least ``offsets[-1]``, and known on the host. Rows past the last segment and rows
    of weight 0 get 0, whatever ``y`` holds.
    """
    if not launch.on_gpu(y):
        x = numpy.repeat(y, numpy.diff(offsets), axis=0)
        if weights is not None:
            weights = weights[: len(x), None]
            x[weights[:, 0] == 0] = 0  # before the product, because 0 times infinity is NaN
            numpy.multiply(x, weights, out=x, casting='same_kind')  # in float32 if x is float16
        if len(x) == n_rows:
            return x
        return numpy.concatenate([x, numpy.zeros((n_rows - len(x), x.shape[1]), x.dtype)])
    n_segments, n_channels = y.shape
    with launch.device_of(y):
        y = launch.contiguous(y)
        x = cuda.cupy.empty((n_rows, n_channels), y.dtype)
        if x.size:
            width = launch.vector_width(n_channels, x, y)
            plan = broadcast_launch(n_rows, n_segments, n_channels, width, max_rows)
            launch.run(
                'segment_broadcast', y, plan, offsets, y, weights, x, WEIGHTED=weights is not None
            )
    return x


# Of n_rows rows, segment g has those from ``offsets[g]`` up to ``offsets[g + 1]`` (exclusive); row
# i counts ``weights[i]`` times. The other fields are as in segment_sum_forward.
Segments = collections.namedtuple(
    'Segments', 'offsets n_rows max_rows weights', defaults=(None, None)
)


class _Segmented(function_node.FunctionNode):
    _calculate: Callable

    def __init__(self, segments):
        self._segments = segments

    def forward(self, inputs):
        self.retain_inputs(())
        y = self._calculate(inputs[0])
        self._result = y.dtype, y.shape, type(y)
        return (y,)

    def _apply_other(self, kind, inputs):
        check.gradient(inputs[0].array, self._result)
        return apply_untracked(kind(self._segments), inputs)


class SegmentSum(_Segmented):
    """Node of :func:`segment_sum`; its input is x."""

    def _calculate(self, x):
        return reduce_rows(segment_sum_forward, x, self._segments)

    def backward(self, indexes, grad_outputs):
        return tuple(self._apply_other(SegmentBroadcast, grad_outputs))


class SegmentBroadcast(_Segmented):
    """Node of :func:`segment_broadcast`; its input is y."""

    def _calculate(self, y):
        return segment_broadcast_forward(y, *self._segments)

    def backward(self, indexes, grad_outputs):
        return tuple(self._apply_other(SegmentSum, grad_outputs))


class SegmentMax(_Segmented):
    """Node of :func:`segment_max`; its input is x."""

    def _calculate(self, x):
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return reduce_rows(segment_max_forward, x, self._segments)

    def backward(self, indexes, grad_outputs):
        (x,) = self.get_retained_inputs()
        (y,) = self.get_retained_outputs()
        # Every row that equals the maximum gets the whole gradient, as in chainer.functions.max.
        unweighted = self._segments._replace(weights=None)
        mask = x.array == segment_broadcast_forward(y.array, *unweighted)
        (gx,) = self._apply_other(SegmentBroadcast, grad_outputs)
        return (gx * mask.astype(x.dtype),)


def reduce_rows(reduction, x, segments):
    """Reduce an array by ``segment_sum_forward`` or ``segment_max_forward``."""
    return reduction(x, segments.offsets, segments.max_rows, segments.weights)


def segments_of(adj):
    """Return the graphs of a batch as `Segments`, after a check."""
    check_adjacency(adj)
    weights = adj.row_weights
    if weights is not None and (weights.shape != (adj.n_rows,) or weights.dtype != numpy.float32):
        raise ValueError(
            'adj.row_weights: expected float32 of shape (%d,), one for each row, got %s of shape %s'
            % (adj.n_rows, weights.dtype, weights.shape)
        )
    return Segments(adj.row_offsets, adj.n_rows, adj.max_rows, weights)


def segment_sum(adj: BatchedCSR, x: Variable | NdArray) -> Variable:
    """Sum the rows of every graph: ``y[g, c] = sum of w[i] x[i, c] over the nodes i of graph g``.

    Differentiable to any order.

    Args:
        adj (BatchedCSR): its ``row_offsets`` delimit the graphs, w is its ``row_weights`` or 1.
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_graphs, n_B), of x's dtype; 0 for a graph without nodes. float16 is summed in
        float32.

    Raises:
        TypeError, ValueError: ``adj`` is not a BatchedCSR; shape, dtype or device of ``x``
            is wrong.

    Note:
        Deterministic; does not synchronise.
    """
    segments = segments_of(adj)
    check.rows('x', x, adj, adj.n_rows)
    return SegmentSum(segments).apply((x,))[0]


def segment_max(adj: BatchedCSR, x: Variable | NdArray) -> Variable:
    """Take the maximum over the rows of every graph; arguments as :func:`segment_sum`.

    Returns:
        Variable: (n_graphs, n_B); 0 for a graph without nodes; NaN where a node has a NaN.

    Note:
        Nodes that share the maximum each get the whole gradient, as in ``chainer.functions.max``.
        A row that stands for several nodes gets it as many times; a row of weight 0 is ignored.
    """
    segments = segments_of(adj)
    check.rows('x', x, adj, adj.n_rows)
    return SegmentMax(segments).apply((x,))[0]


def segment_broadcast(adj: BatchedCSR, y: Variable | NdArray) -> Variable:
    """Give every node the row of its graph: ``x[i, c] = y[g(i), c]``. Differentiable to any order.

    Args:
        adj (BatchedCSR): its ``row_offsets`` delimit the graphs.
        y (Variable or array): (n_graphs, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of y's dtype.

    Note:
        ``adj.row_weights`` have no effect, so this is the transpose of :func:`segment_sum` only if
        every row counts once.
    """
    segments = segments_of(adj)._replace(weights=None)
    check.rows('y', y, adj, adj.n_graphs, each='graph')
    return SegmentBroadcast(segments).apply((y,))[0]
