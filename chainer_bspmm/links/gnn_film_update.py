"""Update step of the graph network with feature-wise linear modulation."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import bspmm
from chainer_bspmm.functions.fused.edge_film import edge_film
from chainer_bspmm.functions.fused.layer_norm import layer_norm
from chainer_bspmm.links.lazy_linear import parameters_of
from chainer_bspmm.links.relations import node_rows
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.sparse.edges import edges_of


class GNNFiLMUpdate(chainer.Chain):
    """Compute ``h'[i] = norm(sum_r sum_j A_r[i, j] act(gamma_r[i] * (W_r h[j]) + beta_r[i]))``.

    gamma and beta are linear in h[i], norm is a layer normalisation. Takes the place of
    ``chainer_chemistry.links.GNNFiLMUpdate``; parameters ``W_linear/W`` and ``W_g/W``, whose rows
    have the relation as their minor index, and ``norm_layer/{gamma,beta}``. An update is four nodes
    of the computational graph: both linear maps with the modulation, activation, sum, norm. Hooks
    on the linear layers are refused. A node without edges gets the norm of 0, which is its bias.

    Args:
        hidden_channels (int): width of ``h`` and of the result.
        n_edge_types (int): R, the number of relations; Chainer Chemistry's preprocessor puts every
            node's edge to itself into the last of five.
        activation (callable): of (n_edges, hidden_channels) messages, element by element.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192), equation 6.
    """

    def __init__(self, hidden_channels=16, n_edge_types=5, activation=functions.relu):
        super().__init__()
        self._assemble(
            GraphLinear(None, n_edge_types * hidden_channels, nobias=True),
            GraphLinear(None, n_edge_types * hidden_channels * 2, nobias=True),
            chainer.links.LayerNormalization(),
            n_edge_types,
            activation,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        if type(link.norm_layer) is not chainer.links.LayerNormalization:
            raise ValueError(
                'model.norm_layer: expected a chainer.links.LayerNormalization, got %r'
                % (link.norm_layer,)
            )
        return twin_of(
            link, cls, link.W_linear, link.W_g, link.norm_layer, link.n_edge_types, link.activation
        )

    def _assemble(self, W_linear, W_g, norm_layer, n_edge_types, activation):
        self.n_edge_types = n_edge_types
        self.activation = activation
        with self.init_scope():
            self.W_linear = W_linear
            self.W_g = W_g
            self.norm_layer = norm_layer

    def forward(self, h, adj):
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, hidden_channels); or (n_graphs, N, hidden_channels)
                where ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations, of h's dtype.

        Returns:
            Variable: of h's shape.

        Raises:
            TypeError: ``adj`` is no BatchedCSR, or its values have another dtype than ``h``.
            ValueError: a shape does not fit, or ``adj`` has another number of relations.
        """
        h, lead = node_rows(h, adj, self.n_edge_types)
        W, W_g = (parameters_of(layer, h.shape[1])[0] for layer in (self.W_linear, self.W_g))
        messages = self.activation(edge_film(adj, h, W, W_g))
        h = bspmm(edges_of(adj).to_node, messages)
        norm = self.norm_layer
        if norm.gamma.array is None:
            norm._initialize_params(h.shape[1])
        h = layer_norm(h, norm.gamma, norm.beta, norm.eps)
        return h if len(lead) == 1 else functions.reshape(h, lead + h.shape[1:])
