"""Update step of the renormalised spectral graph convolution."""

from typing import Any, Callable

from chainer import functions
from chainer import Variable
from chainer_chemistry.links.update import rsgcn_update

from chainer_bspmm.links.hooked import hooked
from chainer_bspmm.functions import bspmm
from chainer_bspmm.ops.dropout import dropout
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.links.linear import linear_rows
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.links.rows import check_one_relation
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR


class RSGCNUpdate(Sparse, rsgcn_update.RSGCNUpdate):
    """Compute ``h'[i] = W sum_j A[i, j] h[j]`` for every node of a batch of graphs.

    Arguments and parameters are upstream's.

    Source:
        Kipf, Welling 2016 (arXiv:1609.02907), equation 2, without its activation.
    """

    def forward(
        self,
        h: Any,
        adj: BatchedCSR,
        activation: Callable[[Any], Variable] | None = None,
        dropout_ratio: float = 0.0,
    ) -> Variable:
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) if ``adj``
                is padded.
            adj (BatchedCSR): the normalised adjacency matrices, of h's dtype.
            activation (callable or None): of the result, and then
            dropout_ratio (float): dropout of that. With a rectifier or without an activation
                the layer is one node, in a step dropout included.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).
        """
        check_one_relation(adj)
        linear = self.graph_linear
        is_fused = activation in (None, functions.relu) and not hooked(linear)
        if is_fused:
            W, b = parameters_of(linear, h.shape[-1])
            return graph_linear(
                adj, h, W, None, None, b, activation or functions.identity, max(dropout_ratio, 0.0)
            )
        h = linear_rows(linear, bspmm(adj, h))
        if activation is not None:
            h = activation(h)
        return dropout(h, dropout_ratio) if dropout_ratio > 0.0 else h
