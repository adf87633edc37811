"""Update step of the renormalised spectral graph convolution."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import bspmm
from chainer_bspmm.functions.fused.convolved_relu import convolved_relu
from chainer_bspmm.links.lazy_linear import parameters_of
from chainer_bspmm.links.twin import twin_of


class RSGCNUpdate(chainer.Chain):
    """Compute ``h'[i] = W sum_j A[i, j] h[j]`` for every node of a batch of graphs.

    Takes the place of ``chainer_chemistry.links.RSGCNUpdate``; parameter ``graph_linear/W``.

    Args:
        in_channels (int or None): width of ``h``; None means what the first call brings.
        out_channels (int): width of the result.

    Source:
        Kipf, Welling 2016 (arXiv:1609.02907), equation 2, without its activation.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self._assemble(
            GraphLinear(in_channels, out_channels, nobias=True), in_channels, out_channels
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child link."""
        return twin_of(link, cls, link.graph_linear, link.in_channels, link.out_channels)

    def _assemble(self, graph_linear, in_channels, out_channels):
        with self.init_scope():
            self.graph_linear = graph_linear
        self.in_channels = in_channels
        self.out_channels = out_channels

    def forward(self, h, adj, activation=None, dropout_ratio=0.0):
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) where
                ``adj`` is padded.
            adj (BatchedCSR): the normalised adjacency matrices, of h's dtype.
            activation (callable or None): of the result, and then
            dropout_ratio (float): dropout of that. With a rectifier and (n_nodes, in_channels)
                features all of it is one node.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).
        """
        linear = self.graph_linear
        if (
            activation is functions.relu
            and h.ndim == 2
            and linear.b is None
            and not linear.local_link_hooks
        ):
            W, _ = parameters_of(linear, h.shape[1])
            return convolved_relu(adj, h, W, max(dropout_ratio, 0.0))
        h = bspmm(adj, h)
        # Past GraphLinear's own __call__, which insists on three dimensions and reshapes twice.
        h = chainer.links.Linear.__call__(linear, h, n_batch_axes=h.ndim - 1)
        if activation is not None:
            h = activation(h)
        return functions.dropout(h, ratio=dropout_ratio) if dropout_ratio > 0.0 else h
