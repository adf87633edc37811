"""Softmax over the entries of every row of a sparse matrix, or over the nodes of every graph."""

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer import Variable
from chainer.types import NdArray

from chainer_bspmm import backend
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.functions.segment import check_rows
from chainer_bspmm.functions.segment import reduce_rows
from chainer_bspmm.functions.segment import Segments
from chainer_bspmm.functions.segment import segments_of
from chainer_bspmm.functions.segment import SegmentBroadcast
from chainer_bspmm.functions.segment import SegmentSum
from chainer_bspmm.papers import BatchedCOO
from chainer_bspmm.sparse import BatchedCSR


class SegmentSoftmax(FusedNode):
    """y of :func:`segment_softmax` over `Segments`."""

    def __init__(self, segments):
        self._segments = segments

    def _output(self, inputs):
        (x,) = inputs
        offsets, _, _, weights = self._segments
        self._y = backend.segment_softmax(_columns(x), offsets, weights)
        return self._y.reshape(x.shape)

    def _gradients(self, inputs, gy, wanted):
        offsets, _, _, weights = self._segments
        gx = backend.segment_softmax_grad(self._y, _columns(gy), offsets, weights)
        return (gx.reshape(gy.shape),)

    def _composed(self, x):
        columns, segments = functions.reshape(x, _columns(x).shape), self._segments
        unweighted = segments._replace(weights=None)
        largest = reduce_rows(backend.segment_max, columns.array, segments)
        shifted = columns - backend.segment_broadcast(largest, *unweighted)
        # Rows that do not count may be above the maximum, NaN, or without anything to divide by.
        is_counted, zero = _counted_rows(segments), columns.xp.zeros((), x.dtype)
        e = functions.exp(functions.where(is_counted, shifted, zero))
        (total,) = SegmentBroadcast(unweighted).apply(SegmentSum(segments).apply((e,)))
        total = functions.where(is_counted, total, columns.xp.ones((), x.dtype))
        return functions.reshape(functions.where(is_counted, e / total, zero), x.shape)


def _columns(x):
    return x if x.ndim == 2 else x[:, None]


def _counted_rows(segments):
    """Return which rows count, (n_rows, 1) bool: those of a segment whose weight is not 0."""
    offsets, n_rows, _, weights = segments
    if weights is not None:
        return weights[:, None] != 0
    xp = chainer_backend.get_array_module(offsets)
    return xp.arange(n_rows, dtype=offsets.dtype)[:, None] < offsets[-1:]


class NodeSoftmax(SegmentSoftmax):
    def _gradients(self, inputs, gy, wanted):
        # Subtract the mean over each graph first: it cancels exactly, but its rounding error would
        # not, and attention over many similar nodes, such as phantom atoms, has little else.
        xp, segments = chainer_backend.get_array_module(gy), self._segments
        dtype = numpy.promote_types(gy.dtype, numpy.float32)  # sums are too large for float16
        y, gy = self._y.astype(dtype, copy=False), gy.astype(dtype, copy=False)
        # gy is a sum over copies already; only rows that do not count are left out.
        whether = None if segments.weights is None else xp.sign(segments.weights)
        mean = reduce_rows(backend.segment_sum, gy, segments._replace(weights=whether))
        ones = xp.ones((segments.n_rows, 1), dtype)
        mean /= xp.maximum(reduce_rows(backend.segment_sum, ones, segments), 1)
        gy = gy - backend.segment_broadcast(mean, *segments)
        return (backend.segment_softmax_grad(y, gy, segments.offsets, segments.weights),)


def segment_softmax(adj: BatchedCSR, x: Variable | NdArray) -> Variable:
    """Normalise values of the entries over every row: ``y[k] = exp(x[k]) / sum_l exp(x[l])``.

    l runs over the entries of the row of k. Differentiable to any order.

    Args:
        adj (BatchedCSR): the pattern; its values are not used.
        x (Variable or array): (nnz,) or (nnz, n_B) float16, float32 or float64, in the order of
            adj's entries; columns are normalised independently.

    Returns:
        Variable: of x's shape and dtype. The values of a row sum to 1 up to their own rounding,
        however large x is: the row's maximum is subtracted first. Computed in float64.
        A NaN or +inf, or a row that is all -inf, makes only its row and column NaN.

    Raises:
        TypeError, ValueError: ``adj`` is no BatchedCSR; shape, dtype or device of ``x`` do not fit.

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
    backend.check.compressed(adj)
    if x.ndim not in (1, 2) or len(x) != adj.nnz:
        raise ValueError(
            'x: expected shape (%d,) or (%d, n_B), a row for each entry of adj, '
            'got %s' % (adj.nnz, adj.nnz, x.shape)
        )
    return SegmentSoftmax(Segments(adj.indptr, adj.nnz)).apply((x,))[0]


def node_softmax(adj: BatchedCSR | BatchedCOO, x: Variable | NdArray) -> Variable:
    """Compute ``y[i, c] = exp(x[i, c]) / sum_j w[j] exp(x[j, c])`` over the nodes j of i's graph.

    Differentiable to any order.

    Args:
        adj (BatchedCSR or BatchedCOO): its ``row_offsets`` delimit the graphs; w is its
            ``row_weights``, 1 without them.
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of x's dtype; over every graph that has nodes, the sum of
        ``w[i] y[i]`` is 1. 0 for rows of weight 0 and of no graph.

    Raises:
        TypeError, ValueError: ``adj`` is no such container; shape, dtype or device of ``x`` do not
        fit.

    Note:
        Deterministic; does not synchronise.
    """
    segments = segments_of(adj)
    check_rows(adj, x)
    return NodeSoftmax(segments).apply((x,))[0]
