"""Batched sampled dense-dense product, the gradient of edge values."""

from chainer import function_node

from chainer_bspmm import backend
from chainer_bspmm.functions.bspmm import BatchedSpMM


class BatchedSDDMM(function_node.FunctionNode):
    def __init__(self, adj, algorithm='auto'):
        self._adj = adj
        self._algorithm = algorithm  # of the products that its gradients are

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        u, v = inputs
        return (backend.bsddmm(self._adj, u, v),)

    def backward(self, indexes, grad_outputs):
        u, v = self.get_retained_inputs()
        (gw,) = grad_outputs
        gradients = []
        for index in indexes:
            # w is bilinear: each factor's gradient is the sparse product of gw with the other.
            node = BatchedSpMM(self._adj, True, False, index == 1, self._algorithm)
            gradients += node.apply((u if index == 1 else v, gw))
        return tuple(gradients)


def bsddmm(adj, u, v):
    """Multiply two dense matrices at the places of a sparse pattern only, in one launch.

    ``w[k] = sum_c u[row[k], c] * v[column[k], c]`` for every entry k of ``adj``. Differentiable to
    any order with respect to ``u`` and ``v``.

    Args:
        adj (BatchedCSR or BatchedCOO): the pattern, n_rows x n_cols; its values are not used.
        u (Variable or array): (n_rows, n_B) float16, float32 or float64; or (n_graphs, N, n_B)
            where ``adj`` is padded to N rows a graph.
        v (Variable or array): (n_cols, n_B), or three-dimensional likewise; of u's dtype.

    Returns:
        Variable: (nnz,) in the order of adj's entries, of u's dtype; float16 is summed in
        float32.

    Raises:
        TypeError, ValueError: as :func:`chainer_bspmm.functions.bspmm`.

    Note:
        Deterministic; does not synchronise. Its gradients are products by
        :func:`chainer_bspmm.functions.bspmm`, as deterministic as those.
    """
    backend.check.adjacency(adj)
    return BatchedSDDMM(adj).apply((u, v))[0]
