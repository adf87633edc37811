"""Update step of the relational graph convolution."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import relation_linear
from chainer_bspmm.links.lazy_linear import parameters_of
from chainer_bspmm.links.relations import relation_parameters
from chainer_bspmm.links.twin import twin_of


class RelGCNUpdate(chainer.Chain):
    """Compute ``h'[i] = W_s h[i] + b_s + sum_r sum_j A_r[i, j] (W_r h[j] + b_r)`` for every node.

    Takes the place of ``chainer_chemistry.links.RelGCNUpdate``; parameters
    ``graph_linear_self/{W,b}`` and ``graph_linear_edge/{W,b}``, whose rows have the relation as
    their minor index. Both linear maps and the product are one node of the computational graph:
    hooks on these two child links are refused.

    Args:
        in_channels (int or None): width of ``h``; None means what the first call brings.
        out_channels (int): width of the result.
        n_edge_types (int): R, the number of relations.

    Source:
        Schlichtkrull et al. 2017 (arXiv:1703.06103), equation 2, with a bias and without its
        normalisation and activation.
    """

    def __init__(self, in_channels, out_channels, n_edge_types=4, **kwargs):
        super().__init__()
        self._assemble(
            GraphLinear(in_channels, out_channels),
            GraphLinear(in_channels, out_channels * n_edge_types),
            in_channels,
            out_channels,
            n_edge_types,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        return twin_of(
            link,
            cls,
            link.graph_linear_self,
            link.graph_linear_edge,
            link.in_channels,
            link.out_channels,
            link.n_edge_types,
        )

    def _assemble(
        self, graph_linear_self, graph_linear_edge, in_channels, out_channels, n_edge_types
    ):
        with self.init_scope():
            self.graph_linear_self = graph_linear_self
            self.graph_linear_edge = graph_linear_edge
        self.n_edge_types = n_edge_types
        self.in_channels = in_channels
        self.out_channels = out_channels

    def forward(self, h, adj, activation=functions.identity, **kwargs):
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) where
                ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations, of h's dtype.
            activation (callable): of the result: ``chainer.functions.identity``, or ``tanh``, which
                is part of the same node.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).

        Raises:
            TypeError, ValueError: as :func:`chainer_bspmm.functions.relation_linear`, or ``adj``
            has another number of relations.
        """
        W, b = relation_parameters(self.graph_linear_edge, h, adj, self.n_edge_types)
        return relation_linear(
            adj, h, W, b, *parameters_of(self.graph_linear_self, h.shape[-1]), activation
        )
