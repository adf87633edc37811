"""Readout of neural fingerprints."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import segment_sum
from chainer_bspmm.links.activated import activated
from chainer_bspmm.links.real_nodes import real_nodes
from chainer_bspmm.links.twin import twin_of


class NFPReadout(chainer.Chain):
    """Compute ``y[g] = sum over the nodes i of graph g of softmax(W h[i] + b)``.

    Takes the place of ``chainer_chemistry.links.NFPReadout``; parameters ``output_weight/{W,b}``.

    Args:
        out_dim (int): width of the result.
        in_channels (int or None): width of ``h``; None means what the first call brings.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292), algorithm 2, lines 9 and 10.
    """

    def __init__(self, out_dim, in_channels):
        super().__init__()
        self._assemble(GraphLinear(in_channels, out_dim), out_dim, in_channels)

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child link."""
        return twin_of(link, cls, link.output_weight, link.out_dim, link.in_channels)

    def _assemble(self, output_weight, out_dim, in_channels):
        with self.init_scope():
            self.output_weight = output_weight
        self.out_dim = out_dim
        self.in_channels = in_channels

    def scores(self, h):
        """Return what every node writes into its graph's fingerprint, (n_rows, out_dim)."""
        return activated(self.output_weight, h, functions.softmax)

    def forward(self, h, adj, is_real_node=None, **kwargs):
        """Reduce. What other readouts take besides (h0) is not used.

        Args:
            h (Variable or array): (n_rows, in_channels) node features.
            adj (BatchedCSR): says which rows are whose.
            is_real_node (array or None): see :func:`pool`.

        Returns:
            Variable: (n_graphs, out_dim).
        """
        return pool(self.scores(h), adj, is_real_node)


def pool(scores, adj, is_real_node):
    """Sum over the nodes of every graph.

    Args:
        scores (Variable): (n_rows, n_channels).
        adj (BatchedCSR): says which rows are whose.
        is_real_node (array or None): (n_rows,), or (n_graphs, N) where ``adj`` is padded; nodes
            for which it is 0 do not count. None: all count, in padded layout the rows past a
            graph's nodes too.

    Returns:
        Variable: (n_graphs, n_channels).
    """
    if is_real_node is not None:
        scores = scores * real_nodes(is_real_node, adj, scores.dtype)
    return segment_sum(adj, scores)
