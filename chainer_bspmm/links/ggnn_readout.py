"""Gated readout of a batch of graphs."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import segment_sum
from chainer_bspmm.functions.fused.gated_linear import ACTIVATIONS
from chainer_bspmm.functions.fused.gated_linear import gated_linear
from chainer_bspmm.links.lazy_linear import parameters_of
from chainer_bspmm.links.real_nodes import real_nodes
from chainer_bspmm.links.twin import twin_of


class GGNNReadout(chainer.Chain):
    """Compute ``activation_agg(sum_i sigmoid(W_i [h[i]; h0[i]]) * activation(W_j [h[i]; h0[i]]))``.

    The sum is over the nodes of every graph. Takes the place of
    ``chainer_chemistry.links.readout.ggnn_readout.GGNNReadout``; parameters ``i_layer/{W,b}`` and
    ``j_layer/{W,b}``.

    Args:
        out_dim (int): width of the result.
        in_channels (int or None): width of ``h`` and ``h0`` together; None means what the first
            call brings.
        nobias (bool): leave out both biases.
        activation (callable): of the nodes, element by element: their array has two dimensions
            here, three in Chainer Chemistry, where ``softmax`` would go over the nodes.
        activation_agg (callable): of the sums.

    Source:
        Li et al. 2015 (arXiv:1511.05493), equation 7.
    """

    def __init__(
        self,
        out_dim,
        in_channels=None,
        nobias=False,
        activation=functions.identity,
        activation_agg=functions.identity,
    ):
        super().__init__()
        self._assemble(
            GraphLinear(in_channels, out_dim, nobias=nobias),
            GraphLinear(in_channels, out_dim, nobias=nobias),
            out_dim,
            in_channels,
            nobias,
            activation,
            activation_agg,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        return twin_of(
            link,
            cls,
            link.i_layer,
            link.j_layer,
            link.out_dim,
            link.in_channels,
            link.nobias,
            link.activation,
            link.activation_agg,
        )

    def _assemble(self, i_layer, j_layer, out_dim, in_channels, nobias, activation, activation_agg):
        with self.init_scope():
            self.i_layer = i_layer
            self.j_layer = j_layer
        self.out_dim = out_dim
        self.in_channels = in_channels
        self.nobias = nobias
        self.activation = activation
        self.activation_agg = activation_agg

    def forward(self, h, adj, h0=None, is_real_node=None):
        """Reduce.

        Args:
            h (Variable or array): (n_rows, channels) node features.
            adj (BatchedCSR): says which rows are whose. In padded layout the rows past a graph's
                nodes take part, as they do in Chainer Chemistry, unless ``is_real_node`` is given.
            h0 (Variable or array or None): (n_rows, channels0) features of the nodes before the
                first update.
            is_real_node (array or None): 1 for nodes that take part, 0 for the others; (n_rows,),
                or (n_graphs, N) where ``adj`` is padded.

        Returns:
            Variable: (n_graphs, out_dim). A graph without nodes gives ``activation_agg(0)``.

        Raises:
            TypeError, ValueError: ``is_real_node`` is no array, or has another shape.
        """
        g = self._gated([h] if h0 is None else [h, h0])
        if is_real_node is not None:
            g = g * real_nodes(is_real_node, adj, g.dtype)
        return _apply(self.activation_agg, segment_sum(adj, g))

    def _gated(self, parts):
        layers = self.i_layer, self.j_layer
        if self.activation in ACTIVATIONS and not any(layer.local_link_hooks for layer in layers):
            n_inputs = sum(part.shape[1] for part in parts)
            return gated_linear(
                parts, *(parameters_of(layer, n_inputs) for layer in layers), self.activation
            )
        h = functions.concat(parts, axis=1)
        # Past GraphLinear's own __call__, which insists on three dimensions and reshapes twice.
        gate, value = (chainer.links.Linear.__call__(layer, h) for layer in layers)
        return functions.sigmoid(gate) * _apply(self.activation, value)


def _apply(activation, x):
    # Chainer's identity would be a node of the graph all the same.
    return x if activation is functions.identity else activation(x)
