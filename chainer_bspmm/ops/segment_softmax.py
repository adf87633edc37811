"""Softmax over the entries of every row of a sparse matrix, or over the nodes of every graph."""

import numpy

from chainer import backend as chainer_backend
from chainer import functions, Variable
from chainer.backends import cuda
from chainer.types import NdArray

from chainer_bspmm.cuda import launch, plans
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.ops.segments import segment_broadcast_forward, segment_max_forward
from chainer_bspmm.ops.segments import segment_sum_forward, reduce_rows, SegmentBroadcast, Segments
from chainer_bspmm.ops.segments import segments_of, SegmentSum
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency


@plans.kept
def softmax_launch(n_rows, n_segments, n_channels, width) -> plans.Launch:
    """Plan segment_softmax: a thread per (segment, vector)."""
    n_vectors = n_channels // width
    # There is at least one block, because some rows may belong to no segment.
    n_units = max(n_segments, 1)
    return plans.vector_threads(n_units, n_vectors, width, (n_segments, n_rows, n_vectors))


def _softmax_on_gpu(offsets, a, g, weights):
    """Launch kernels/segment_softmax.cu: the softmax of `a`, or its gradient if `g` is given."""
    n_rows, n_channels = a.shape
    with launch.device_of(a):
        a, g = launch.contiguous(a), launch.contiguous(g)
        y = cuda.cupy.empty(a.shape, a.dtype)
        if y.size:
            width = launch.vector_width(n_channels, a, y, g)
            plan = softmax_launch(n_rows, offsets.size - 1, n_channels, width)
            launch.run(
                'segment_softmax',
                a,
                plan,
                offsets,
                a,
                g,
                weights,
                y,
                GRADIENT=g is not None,
                WEIGHTED=weights is not None,
            )
    return y


def segment_softmax_forward(x, offsets, weights=None):
    """Compute ``y[i, c] = exp(x[i, c]) / sum of weights[k] exp(x[k, c])``, in float64.

    The sum is over the rows k of i's segment. Rows of weight 0 and rows of no segment get 0. The
    maximum is subtracted first. On a GPU one thread computes a column of a segment, because
    segments are short.
    """
    if launch.on_gpu(x):
        return _softmax_on_gpu(offsets, x, None, weights)
    # In float64, for the reason that kernels/segment_softmax.cu gives.
    largest = segment_max_forward(x, offsets, weights=weights)
    largest = segment_broadcast_forward(largest, offsets, len(x))
    # Differences may be infinite or NaN. As on a GPU, there is no warning.
    with numpy.errstate(over='ignore', divide='ignore', invalid='ignore'):
        y = x - largest.astype('d')
        numpy.exp(y, out=y)
        total = segment_sum_forward(y, offsets, weights=weights)
        y /= segment_broadcast_forward(total, offsets, len(x))
    y[offsets[-1] :] = 0
    if weights is not None:
        y[weights == 0] = 0
    return y.astype(x.dtype, copy=False)


def segment_softmax_backward(y, gy, offsets, weights=None):
    """Compute ``gx[i, c] = y[i, c] (gy[i, c] - weights[i] sum of y[k, c] gy[k, c])``.

    The sum is over the rows k of i's segment. Rows of weight 0 and rows of no segment get 0, and
    contribute nothing even if ``gy`` is NaN there.
    """
    if launch.on_gpu(y):
        return _softmax_on_gpu(offsets, y, gy, weights)
    dtype = y.dtype
    n_true = offsets[-1]
    y, gy = y.astype('d', copy=False), gy.astype('d', copy=False)
    if weights is not None or n_true < len(y):
        is_counted = numpy.arange(len(y)) < n_true
        if weights is not None:
            is_counted &= weights != 0
        y, gy = (numpy.where(is_counted[:, None], array, 0) for array in (y, gy))
    # The weights are already in gy: the gradient of a row is the sum over its copies.
    inner = segment_sum_forward(y * gy, offsets)
    gx = y * (gy - segment_broadcast_forward(inner, offsets, len(y), weights=weights))
    return gx.astype(dtype, copy=False)


class SegmentSoftmax(FusedNode):
    """Node of the softmax over `Segments`; input x."""

    def __init__(self, segments):
        self._segments = segments

    def _output(self, inputs):
        (x,) = inputs
        offsets, _, _, weights = self._segments
        self._y = segment_softmax_forward(_columns(x), offsets, weights)
        return self._y.reshape(x.shape)

    def _gradients(self, inputs, gy, indexes):
        offsets, _, _, weights = self._segments
        gx = segment_softmax_backward(self._y, _columns(gy), offsets, weights)
        return (gx.reshape(gy.shape),)

    def _composed(self, x):
        columns = functions.reshape(x, _columns(x).shape)
        segments = self._segments
        unweighted = segments._replace(weights=None)
        largest = reduce_rows(segment_max_forward, columns.array, segments)
        shifted = columns - segment_broadcast_forward(largest, *unweighted)
        # Ignored rows may be larger than the maximum or NaN, and their sum may be 0.
        xp, (offsets, n_rows, _, weights) = columns.xp, segments
        if weights is None:
            is_counted = xp.arange(n_rows, dtype=offsets.dtype)[:, None] < offsets[-1:]
        else:
            is_counted = weights[:, None] != 0
        zero = xp.zeros((), x.dtype)
        e = functions.exp(functions.where(is_counted, shifted, zero))
        (total,) = SegmentBroadcast(unweighted).apply(SegmentSum(segments).apply((e,)))
        total = functions.where(is_counted, total, xp.ones((), x.dtype))
        return functions.reshape(functions.where(is_counted, e / total, zero), x.shape)


def _columns(x):
    return x if x.ndim == 2 else x[:, None]


class NodeSoftmax(SegmentSoftmax):
    """Node of :func:`node_softmax`; its input is x."""

    def _gradients(self, inputs, gy, indexes):
        # The mean over each graph is subtracted first. Mathematically it cancels, but its rounding
        # error would not, and would dominate in attention over many similar nodes, such as phantom
        # atoms.
        xp = chainer_backend.get_array_module(gy)
        segments = self._segments
        dtype = numpy.promote_types(gy.dtype, numpy.float32)  # sums are too large for float16
        y, gy = self._y.astype(dtype, copy=False), gy.astype(dtype, copy=False)
        # gy already is a sum over the copies of a row, so weights only leave out ignored rows.
        is_counted = None if segments.weights is None else xp.sign(segments.weights)
        mean = reduce_rows(segment_sum_forward, gy, segments._replace(weights=is_counted))
        ones = xp.ones((segments.n_rows, 1), dtype)
        mean /= xp.maximum(reduce_rows(segment_sum_forward, ones, segments), 1)
        gy = gy - segment_broadcast_forward(mean, *segments)
        return (segment_softmax_backward(y, gy, segments.offsets, segments.weights),)


def segment_softmax(adj: BatchedCSR, x: Variable | NdArray) -> Variable:
    """Normalise the values of entries over every row: ``y[k] = exp(x[k]) / sum_l exp(x[l])``.

    l runs over the entries in the row of entry k. Differentiable to any order.

    Args:
        adj (BatchedCSR): the pattern; its values are not used.
        x (Variable or array): (nnz,) or (nnz, n_B) float16, float32 or float64, in the order of
            adj's entries; columns are normalised independently.

    Returns:
        Variable: of x's shape and dtype. The values of a row sum to 1 up to their own rounding,
        however large x is: the row's maximum is subtracted first. Computed in float64.
        A NaN or +inf, or a row that is all -inf, makes only its row and column NaN.

    Raises:
        TypeError, ValueError: ``adj`` is not a BatchedCSR; shape, dtype or device of ``x``
            do not fit.

    Note:
        Deterministic; does not synchronise. One launch forward and one backward.

    Source:
        Velickovic et al. 2017 (arXiv:1710.10903), equation 2; ``kernels/segment_softmax.cu``.

    Example:
        >>> import numpy
        >>> import chainer_bspmm
        >>> adj = chainer_bspmm.BatchedCSR.from_matrices([numpy.array([[1., 1.], [0., 1.]])])
        >>> chainer_bspmm.functions.segment_softmax(adj, numpy.array([5., 5., -7.])).array
        array([0.5, 0.5, 1. ])
    """
    check_adjacency(adj)
    check.floats('x', x, adj)
    if x.ndim not in (1, 2) or len(x) != adj.nnz:
        text = 'x: expected shape (%d,) or (%d, n_B), a row for each entry of adj, got %s'
        raise ValueError(text % (adj.nnz, adj.nnz, x.shape))
    return SegmentSoftmax(Segments(adj.indptr, adj.nnz)).apply((x,))[0]


def node_softmax(adj: BatchedCSR, x: Variable | NdArray) -> Variable:
    """Compute ``y[i, c] = exp(x[i, c]) / sum_j w[j] exp(x[j, c])`` over the nodes j of i's graph.

    Differentiable to any order.

    Args:
        adj (BatchedCSR): its ``row_offsets`` delimit the graphs, w is its ``row_weights`` or 1.
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of x's dtype; over every graph that has nodes, the sum of
        ``w[i] y[i]`` is 1. Rows of weight 0 and rows of no graph get 0.

    Raises:
        TypeError, ValueError: ``adj`` is not a BatchedCSR; shape, dtype or device of ``x``
            is wrong.

    Note:
        Deterministic; does not synchronise.
    """
    segments = segments_of(adj)
    check.rows('x', x, adj, adj.n_rows)
    return NodeSoftmax(segments).apply((x,))[0]
