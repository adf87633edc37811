"""Update step of the graph network with feature-wise linear modulation."""

from typing import Any

import chainer
from chainer_chemistry.links.update import gnn_film_update

from chainer_bspmm.ops.edge_film import edge_film
from chainer_bspmm.ops.layer_norm import layer_norm
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.links.rows import as_given
from chainer_bspmm.links.rows import check_relations
from chainer_bspmm.links.rows import node_rows
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR


class GNNFiLMUpdate(Sparse, gnn_film_update.GNNFiLMUpdate):
    """Compute ``h'[i] = norm(sum_r sum_j A_r[i, j] act(gamma_r[i] * (W_r h[j]) + beta_r[i]))``.

    gamma and beta are linear in h[i], norm is a layer normalisation. Arguments and parameters are
    upstream's; rows of ``W_linear/W`` and ``W_g/W`` have the relation as their minor index. The
    last relation of upstream's preprocessor holds the self-loops. An update is two nodes of the
    computational graph (more with another ``activation`` than a rectifier): hooks of the linear
    layers are refused. A node without edges gets the norm of 0, which is its bias.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192), equation 6.
    """

    @staticmethod
    def check(link):
        if type(link.norm_layer) is not chainer.links.LayerNormalization:
            raise ValueError(
                'norm_layer: expected a chainer.links.LayerNormalization, got %r'
                % (link.norm_layer,)
            )

    def forward(self, h: Any, adj: BatchedCSR) -> chainer.Variable:
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, hidden_channels); or (n_graphs, N, hidden_channels) if
                ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations, of h's dtype.

        Returns:
            Variable: of h's shape.

        Raises:
            TypeError: ``adj`` is no BatchedCSR, or its values have another dtype than ``h``.
            ValueError: a shape does not fit, or ``adj`` has another number of relations.
        """
        check_relations(adj, self.n_edge_types)
        h, lead = node_rows(h, adj)
        W, W_g = (parameters_of(layer, h.shape[1])[0] for layer in (self.W_linear, self.W_g))
        h = edge_film(adj, h, W, W_g, self.activation)
        norm = self.norm_layer
        if norm.gamma.array is None:
            norm._initialize_params(h.shape[1])
        return as_given(layer_norm(h, norm.gamma, norm.beta, norm.eps), lead)
