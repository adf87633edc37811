"""Softmax over the nodes of every graph, the attention of a readout."""

import numpy

import chainer

from chainer_bspmm import backend
from chainer_bspmm.functions.segment_softmax import SegmentSoftmax


class NodeSoftmax(SegmentSoftmax):
    def __init__(self, adj):
        super().__init__(adj.row_offsets)
        self._adj = adj

    def backward(self, indexes, grad_outputs):
        # What is the same for all nodes of a graph cancels in the gradient, but leaves its rounding
        # behind: attention over many similar nodes, as phantom atoms are, has little else. It goes
        # before, by the mean. A constant: higher derivatives do not depend on it either.
        (gy,) = grad_outputs
        offsets = self._adj.row_offsets
        wide = gy.array.astype(numpy.promote_types(gy.dtype, numpy.float32), copy=False)
        mean = backend.segment_sum(wide, offsets, self._adj.max_rows)  # too large for float16
        mean /= gy.xp.maximum(offsets[1:] - offsets[:-1], 1)[:, None].astype(mean.dtype)
        centre = backend.segment_broadcast(
            mean.astype(gy.dtype, copy=False), offsets, self._adj.n_rows, self._adj.max_rows
        )
        return super().backward(indexes, (gy - chainer.Variable(centre, requires_grad=False),))


def node_softmax(adj, x):
    """Compute ``y[i, c] = exp(x[i, c]) / sum_j exp(x[j, c])`` over the nodes j of i's graph.

    Differentiable to any order.

    Args:
        adj (BatchedCSR): says which rows are whose (``adj.row_offsets``).
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of x's dtype; over every graph that has nodes it sums to 1.

    Raises:
        TypeError, ValueError: ``adj`` is no BatchedCSR; shape, dtype or device of ``x`` do not fit.

    Note:
        Deterministic; does not synchronise.
    """
    backend.check.adjacency(adj)
    if x.ndim != 2 or len(x) != adj.n_rows:
        raise ValueError(
            'x: expected shape (%d, n_B), a row for each node, got %s' % (adj.n_rows, x.shape)
        )
    return NodeSoftmax(adj).apply((x,))[0]
