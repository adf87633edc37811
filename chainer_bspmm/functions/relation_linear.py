"""The graph convolution with several relations as a public function."""

from collections.abc import Callable

from chainer import functions
from chainer import Variable
from chainer.types import NdArray

from chainer_bspmm.functions.fused.graph_linear import graph_linear
from chainer_bspmm.sparse import BatchedCSR


def relation_linear(
    adj: BatchedCSR,
    x: Variable | NdArray,
    W: Variable | NdArray,
    b: Variable | NdArray | None = None,
    W_self: Variable | NdArray | None = None,
    b_self: Variable | NdArray | None = None,
    activation: Callable = functions.identity,
) -> Variable:
    """Map the features of every node by a matrix per relation and sum over its neighbours.

    ``y[i, c] = sum_r sum_j A_r[i, j] (sum_k W[c * R + r, k] x[j, k] + b[c * R + r])``, and with a
    term for the node itself ``+ sum_k W_self[c, k] x[i, k] + b_self[c]``. One node of the
    computational graph, differentiable to any order with respect to all but ``adj``.

    On a GPU one launch, and one for its gradients, if the matrices fit into shared memory; else,
    and on a host, products. The results differ by rounding only.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R), entry (i, j * R + r) is ``A_r[i, j]``.
        x (Variable or array): (n_nodes, in_channels) float16, float32 or float64; if ``adj`` is
            padded to N nodes per graph, also (n_graphs, N, in_channels).
        W (Variable or array): (out_channels * R, in_channels), the relation as the minor index of
            its rows.
        b (Variable or array or None): (out_channels * R,), rows as those of W.
        W_self (Variable or array or None): (out_channels, in_channels).
        b_self (Variable or array or None): (out_channels,).
        activation (callable): of the result: ``chainer.functions.identity``, ``relu`` or ``tanh``.

    Returns:
        Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels); of x's dtype, to which
        parameters of another dtype are converted.

    Raises:
        TypeError: ``adj`` is no BatchedCSR, or its values have another dtype than ``x``.
        ValueError: a shape or a device does not fit, or another activation is given.

    Note:
        Deterministic; does not synchronise.

    Source:
        Nagasaka et al. (CCGrid 2019), the graph convolution with several channels, there a product
        per channel; Chainer Chemistry 0.7.1, links/update/relgcn_update.py and ggnn_update.py.
    """
    return graph_linear(adj, x, W, b, W_self, b_self, activation)
