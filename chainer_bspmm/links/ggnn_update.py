"""Update step of the gated graph neural network."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import relation_linear
from chainer_bspmm.links.gated_unit import gated_step
from chainer_bspmm.links.relations import relation_parameters
from chainer_bspmm.links.twin import twin_of


class GGNNUpdate(chainer.Chain):
    """Compute ``s' = GRU([h[i]; sum_r sum_j A_r[i, j] (W_r h[j] + b_r)], s)`` for every node.

    Takes the place of ``chainer_chemistry.links.GGNNUpdate``; parameters ``graph_linear/{W,b}``,
    whose rows have the relation as their minor index, and
    ``update_layer/{W,W_r,W_z,U,U_r,U_z}/{W,b}``. As there, the state s of the GRU is kept from call
    to call until :meth:`reset_state`; the first call has none, and then takes no part of U.
    An update is two nodes of the computational graph: hooks on the child links are refused.

    Args:
        in_channels (int or None): width of ``h``; None means what the first call brings.
        hidden_channels (int): width of the sum over neighbours.
        out_channels (int or None): width of the result; None means ``hidden_channels``.
        n_edge_types (int): R, the number of relations.

    Source:
        Li et al. 2015 (arXiv:1511.05493), section 3.2; the GRU also sees ``h`` itself.
    """

    def __init__(
        self, in_channels=None, hidden_channels=16, out_channels=None, n_edge_types=4, **kwargs
    ):
        super().__init__()
        if out_channels is None:
            out_channels = hidden_channels
        self._assemble(
            GraphLinear(in_channels, n_edge_types * hidden_channels),
            chainer.links.GRU(
                None if in_channels is None else in_channels + hidden_channels, out_channels
            ),
            in_channels,
            hidden_channels,
            out_channels,
            n_edge_types,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        if type(link.update_layer) is not chainer.links.GRU:
            raise ValueError(
                'model.update_layer: expected a chainer.links.GRU, got %r' % (link.update_layer,)
            )
        return twin_of(
            link,
            cls,
            link.graph_linear,
            link.update_layer,
            link.in_channels,
            link.hidden_channels,
            link.out_channels,
            link.n_edge_types,
        )

    def _assemble(
        self, graph_linear, update_layer, in_channels, hidden_channels, out_channels, n_edge_types
    ):
        with self.init_scope():
            self.graph_linear = graph_linear
            self.update_layer = update_layer
        self.n_edge_types = n_edge_types
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels

    def forward(self, h, adj, **kwargs):
        """Update the nodes, and the state.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) where
                ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations, of h's dtype.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).

        Raises:
            TypeError, ValueError: as :func:`chainer_bspmm.functions.relation_linear`, or ``adj``
            has another number of relations.
        """
        message = relation_linear(
            adj, h, *relation_parameters(self.graph_linear, h, adj, self.n_edge_types)
        )
        lead = h.shape[:-1]
        if h.ndim == 3:
            h, message = (functions.reshape(x, (adj.n_rows, x.shape[2])) for x in (h, message))
        out = gated_step(self.update_layer, h, message)
        return out if len(lead) == 1 else functions.reshape(out, lead + out.shape[1:])

    def reset_state(self):
        """Forget the state, as before the first call."""
        self.update_layer.reset_state()
