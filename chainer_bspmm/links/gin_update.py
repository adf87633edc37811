"""Update step of the graph isomorphism network."""

import chainer
from chainer import functions
from chainer_chemistry.links import GraphMLP

from chainer_bspmm.functions import bspmm
from chainer_bspmm.links.activated import activated
from chainer_bspmm.links.twin import twin_of


class GINUpdate(chainer.Chain):
    """Compute ``h'[i] = dropout(relu(MLP(h[i] + sum_j A[i, j] h[j])))``.

    Takes the place of ``chainer_chemistry.links.GINUpdate``; parameters
    ``graph_mlp/layers/0..n_layers-1/{W,b}``. Its preprocessor puts a self-loop into A, so that the
    node counts twice; that is kept.

    Args:
        in_channels (int or None): width of ``h``; None means what the first call brings.
        hidden_channels (int): width between the layers of the MLP.
        out_channels (int or None): width of the result; None means hidden_channels.
        dropout_ratio (float): 0 or less means none.
        n_layers (int): linear layers of the MLP.

    Source:
        Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826), equation 4.1 with epsilon = 0.
    """

    def __init__(
        self,
        in_channels=None,
        hidden_channels=16,
        out_channels=None,
        dropout_ratio=0.5,
        n_layers=2,
        **kwargs,
    ):
        super().__init__()
        out_channels = hidden_channels if out_channels is None else out_channels
        self._assemble(
            GraphMLP(
                [hidden_channels] * (n_layers - 1) + [out_channels], in_channels, functions.relu
            ),
            dropout_ratio,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child link."""
        return twin_of(link, cls, link.graph_mlp, link.dropout_ratio)

    def _assemble(self, graph_mlp, dropout_ratio):
        with self.init_scope():
            self.graph_mlp = graph_mlp
        self.dropout_ratio = dropout_ratio

    def forward(self, h, adj):
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) where
                ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices, of h's dtype.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels); not negative.
        """
        shape = h.shape
        h = bspmm(adj, h, residual=h)
        if h.ndim == 3:
            h = functions.reshape(h, (adj.n_rows, shape[2]))
        *hidden, last = self.graph_mlp.layers
        for linear in hidden:
            h = activated(linear, h, self.graph_mlp.activation)
        h = activated(last, h, functions.relu, self.dropout_ratio)
        return h if len(shape) == 2 else functions.reshape(h, shape[:2] + h.shape[1:])
