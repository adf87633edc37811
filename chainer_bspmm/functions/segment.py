"""Reductions over the nodes of every graph of a packed batch, the readouts' arithmetic."""

from chainer import function_node

from chainer_bspmm import backend
from chainer_bspmm.functions.node import apply_untracked


class SegmentSum(function_node.FunctionNode):
    def __init__(self, adj):
        self._adj = adj

    def forward(self, inputs):
        self.retain_inputs(())
        return (
            backend.segment_sum(
                _rows(self._adj, inputs[0]), self._adj.row_offsets, self._adj.max_rows
            ),
        )

    def backward(self, indexes, grad_outputs):
        return tuple(apply_untracked(SegmentBroadcast(self._adj), grad_outputs))


class SegmentBroadcast(function_node.FunctionNode):
    def __init__(self, adj):
        self._adj = adj

    def forward(self, inputs):
        self.retain_inputs(())
        return (
            backend.segment_broadcast(
                inputs[0], self._adj.row_offsets, self._adj.n_rows, self._adj.max_rows
            ),
        )

    def backward(self, indexes, grad_outputs):
        return tuple(apply_untracked(SegmentSum(self._adj), grad_outputs))


class SegmentMax(function_node.FunctionNode):
    def __init__(self, adj):
        self._adj = adj

    def forward(self, inputs):
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return (
            backend.segment_max(
                _rows(self._adj, inputs[0]), self._adj.row_offsets, self._adj.max_rows
            ),
        )

    def backward(self, indexes, grad_outputs):
        (x,) = self.get_retained_inputs()
        (y,) = self.get_retained_outputs()
        # Every row that attains the maximum gets the whole gradient, as chainer.functions.max does.
        mask = x.array == backend.segment_broadcast(
            y.array, self._adj.row_offsets, self._adj.n_rows, self._adj.max_rows
        )
        return (SegmentBroadcast(self._adj).apply(grad_outputs)[0] * mask.astype(x.dtype),)


def _rows(adj, x):
    if x.ndim != 2 or len(x) != adj.n_rows:
        raise ValueError(
            'x: expected shape (%d, n_B), a row for each node, got %s' % (adj.n_rows, x.shape)
        )
    return x


def segment_sum(adj, x):
    """Sum the rows of every graph: ``y[g, c] = sum of x[i, c] over the nodes i of graph g``.

    Differentiable to any order.

    Args:
        adj (BatchedCSR): says which rows are whose (``adj.row_offsets``).
        x (Variable or array): (n_rows, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_graphs, n_B), of x's dtype; 0 for a graph without nodes. float16 is summed in
        float32.

    Raises:
        TypeError, ValueError: ``adj`` is no BatchedCSR; shape, dtype or device of ``x`` do not fit.

    Note:
        Deterministic; does not synchronise.
    """
    backend.check.adjacency(adj)
    return SegmentSum(adj).apply((x,))[0]


def segment_max(adj, x):
    """Take the maximum over the rows of every graph; arguments as :func:`segment_sum`.

    Returns:
        Variable: (n_graphs, n_B); 0 for a graph without nodes; NaN where a node has a NaN.

    Note:
        Nodes that share the maximum each get the whole gradient, as with ``chainer.functions.max``.
    """
    backend.check.adjacency(adj)
    return SegmentMax(adj).apply((x,))[0]


def segment_broadcast(adj, y):
    """Give every node the row of its graph: ``x[i, c] = y[g(i), c]``. Differentiable to any order.

    Args:
        adj (BatchedCSR): says which rows are whose.
        y (Variable or array): (n_graphs, n_B) float16, float32 or float64.

    Returns:
        Variable: (n_rows, n_B), of y's dtype.
    """
    backend.check.adjacency(adj)
    return SegmentBroadcast(adj).apply((y,))[0]
