"""Softmax over the entries of every row of a sparse matrix, or over the nodes of every graph."""

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer import Variable
from chainer.types import NdArray

from chainer_bspmm import backend
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.functions.segment import check_rows
from chainer_bspmm.functions.segment import segments_of
from chainer_bspmm.functions.segment import SegmentBroadcast
from chainer_bspmm.functions.segment import SegmentSum
from chainer_bspmm.papers import BatchedCOO
from chainer_bspmm.sparse import BatchedCSR


class SegmentSoftmax(FusedNode):
    """y of :func:`segment_softmax`; `offsets` (n_segments + 1,) delimit the segments."""

    def __init__(self, offsets):
        self._offsets = offsets

    def _output(self, inputs):
        (x,) = inputs
        self._y = backend.segment_softmax(_columns(x), self._offsets)
        return self._y.reshape(x.shape)

    def _gradients(self, inputs, gy, wanted):
        gx = backend.segment_softmax_grad(self._y, _columns(gy), self._offsets)
        return (gx.reshape(gy.shape),)

    def _composed(self, x):
        columns, segments = functions.reshape(x, _columns(x).shape), (self._offsets, len(x))
        largest = backend.segment_max(columns.array, self._offsets)
        e = functions.exp(columns - backend.segment_broadcast(largest, *segments))
        (total,) = SegmentBroadcast(*segments).apply(SegmentSum(*segments).apply((e,)))
        return functions.reshape(e / total, x.shape)


def _columns(x):
    return x if x.ndim == 2 else x[:, None]


class NodeSoftmax(SegmentSoftmax):
    def __init__(self, offsets, n_rows, max_rows):
        super().__init__(offsets)
        self._n_rows = n_rows
        self._max_rows = max_rows

    def _gradients(self, inputs, gy, wanted):
        # Subtract the mean over each graph first: it cancels exactly, but its rounding error would
        # not, and attention over many similar nodes, such as phantom atoms, has little else.
        offsets = self._offsets
        wide = gy.astype(numpy.promote_types(gy.dtype, numpy.float32), copy=False)
        mean = backend.segment_sum(wide, offsets, self._max_rows)  # too large for float16
        counts = offsets[1:] - offsets[:-1]
        mean /= chainer_backend.get_array_module(gy).maximum(counts, 1)[:, None].astype(mean.dtype)
        centre = backend.segment_broadcast(
            mean.astype(gy.dtype, copy=False), offsets, self._n_rows, self._max_rows
        )
        return super()._gradients(inputs, gy - centre, wanted)


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
    adj.refuse_spare()
    if x.ndim not in (1, 2) or len(x) != adj.nnz:
        raise ValueError(
            'x: expected shape (%d,) or (%d, n_B), a row for each entry of adj, '
            'got %s' % (adj.nnz, adj.nnz, x.shape)
        )
    return SegmentSoftmax(adj.indptr).apply((x,))[0]


def node_softmax(adj: BatchedCSR | BatchedCOO, x: Variable | NdArray) -> Variable:
    """Compute ``y[i, c] = exp(x[i, c]) / sum_j exp(x[j, c])`` over the nodes j of i's graph.

    Differentiable to any order.

    Args:
        adj (BatchedCSR or BatchedCOO): its ``row_offsets`` delimit the graphs.
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of x's dtype; over every graph that has nodes it sums to 1.

    Raises:
        TypeError, ValueError: ``adj`` is no such container; shape, dtype or device of ``x`` do not
        fit.

    Note:
        Deterministic; does not synchronise.
    """
    segments = segments_of(adj)
    if adj.has_spare:
        adj.refuse_spare()
    check_rows(adj, x)
    return NodeSoftmax(*segments).apply((x,))[0]
