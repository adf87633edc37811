"""Reductions over the nodes of every graph of a batch, and their transpose."""

import collections

from chainer import Variable
from chainer import function_node
from chainer.types import NdArray

from chainer_bspmm import backend
from chainer_bspmm.functions.node import apply_untracked
from chainer_bspmm.papers import BatchedCOO
from chainer_bspmm.sparse import BatchedCSR


# The segments of n_rows rows: segment g is rows ``offsets[g]`` to ``offsets[g + 1]``, row i counts
# ``weights[i]`` times; for the others see backend.segment_sum.
Segments = collections.namedtuple(
    'Segments', 'offsets n_rows max_rows weights', defaults=(None, None)
)


class _Segmented(function_node.FunctionNode):
    def __init__(self, segments):
        self._segments = segments

    def _apply_other(self, kind, inputs):
        return apply_untracked(kind(self._segments), inputs)


class SegmentSum(_Segmented):
    def forward(self, inputs):
        self.retain_inputs(())
        return (reduce_rows(backend.segment_sum, inputs[0], self._segments),)

    def backward(self, indexes, grad_outputs):
        return tuple(self._apply_other(SegmentBroadcast, grad_outputs))


class SegmentBroadcast(_Segmented):
    def forward(self, inputs):
        self.retain_inputs(())
        return (backend.segment_broadcast(inputs[0], *self._segments),)

    def backward(self, indexes, grad_outputs):
        return tuple(self._apply_other(SegmentSum, grad_outputs))


class SegmentMax(_Segmented):
    def forward(self, inputs):
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return (reduce_rows(backend.segment_max, inputs[0], self._segments),)

    def backward(self, indexes, grad_outputs):
        (x,) = self.get_retained_inputs()
        (y,) = self.get_retained_outputs()
        # Every row that attains the maximum gets the whole gradient, as in chainer.functions.max.
        unweighted = self._segments._replace(weights=None)
        mask = x.array == backend.segment_broadcast(y.array, *unweighted)
        (gx,) = self._apply_other(SegmentBroadcast, grad_outputs)
        return (gx * mask.astype(x.dtype),)


def reduce_rows(reduction, x, segments):
    """Return ``backend.segment_sum`` or ``segment_max`` of an array."""
    return reduction(x, segments.offsets, segments.max_rows, segments.weights)


def segments_of(adj):
    """Return the `Segments` that are the graphs of a batch, after checking it."""
    backend.check.adjacency(adj)
    return Segments(adj.row_offsets, adj.n_rows, adj.max_rows, adj.row_weights)


def check_rows(adj, x):
    if x.ndim != 2 or len(x) != adj.n_rows:
        raise ValueError(
            'x: expected shape (%d, n_B), a row for each node, got %s' % (adj.n_rows, x.shape)
        )


def segment_sum(adj: BatchedCSR | BatchedCOO, x: Variable | NdArray) -> Variable:
    """Sum the rows of every graph: ``y[g, c] = sum of w[i] x[i, c] over the nodes i of graph g``.

    Differentiable to any order.

    Args:
        adj (BatchedCSR or BatchedCOO): its ``row_offsets`` delimit the graphs; w is its
            ``row_weights``, 1 without them.
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_graphs, n_B), of x's dtype; 0 for a graph without nodes. float16 is summed in
        float32.

    Raises:
        TypeError, ValueError: ``adj`` is no such container; shape, dtype or device of ``x`` do not
        fit.

    Note:
        Deterministic; does not synchronise.
    """
    segments = segments_of(adj)
    check_rows(adj, x)
    return SegmentSum(segments).apply((x,))[0]


def segment_max(adj: BatchedCSR | BatchedCOO, x: Variable | NdArray) -> Variable:
    """Take the maximum over the rows of every graph; arguments as :func:`segment_sum`.

    Returns:
        Variable: (n_graphs, n_B); 0 for a graph without nodes; NaN where a node has a NaN.

    Note:
        Nodes that share the maximum each get the whole gradient, as in ``chainer.functions.max``.
        A row that stands for several nodes gets it as many times; one with weight 0 takes no part.
    """
    segments = segments_of(adj)
    check_rows(adj, x)
    return SegmentMax(segments).apply((x,))[0]


def segment_broadcast(adj: BatchedCSR | BatchedCOO, y: Variable | NdArray) -> Variable:
    """Give every node the row of its graph: ``x[i, c] = y[g(i), c]``. Differentiable to any order.

    Args:
        adj (BatchedCSR or BatchedCOO): its ``row_offsets`` delimit the graphs.
        y (Variable or array): (n_graphs, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of y's dtype.

    Note:
        Without weights, so that it is the transpose of :func:`segment_sum` only where every row
        counts once.
    """
    return SegmentBroadcast(segments_of(adj)._replace(weights=None)).apply((y,))[0]
