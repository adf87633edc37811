"""Gated readout, of GGNN and of the models that borrow it."""
import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import segment_sum
from chainer_bspmm.links.real_nodes import real_nodes
from chainer_bspmm.links.twin import take_over


class GGNNReadout(chainer.Chain):
    """Compute ``y[g] = f(sum over the nodes i of graph g of sigmoid(I x[i]) f'(J x[i]))``.

    x is h and h0 side by side. Takes the place of ``chainer_chemistry.links.GGNNReadout``;
    parameters ``i_layer/{W,b}``, ``j_layer/{W,b}``.

    Args:
        out_dim (int): width of the result.
        in_channels (int or None): width of ``h`` and ``h0`` together; None means what the first
            call brings.
        nobias (bool): leave out the biases.
        activation (callable): f', applied to the nodes.
        activation_agg (callable): f, applied to the sums.

    Source:
        Li, Tarlow, Brockschmidt, Zemel 2016 (arXiv:1511.05493), equation 7.
    """

    def __init__(self, out_dim, in_channels=None, nobias=False, activation=functions.identity,
                 activation_agg=functions.identity):
        super().__init__()
        self._assemble(GraphLinear(in_channels, out_dim, nobias=nobias),
                       GraphLinear(in_channels, out_dim, nobias=nobias),
                       out_dim, in_channels, nobias, activation, activation_agg)

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        self = cls.__new__(cls)
        chainer.Chain.__init__(self)
        self._assemble(link.i_layer, link.j_layer, link.out_dim, link.in_channels, link.nobias,
                       link.activation, link.activation_agg)
        return take_over(self, link)

    def _assemble(self, i_layer, j_layer, out_dim, in_channels, nobias, activation,
                  activation_agg):
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
            adj (BatchedCSR): says which rows are whose.
            h0 (Variable or array or None): (n_rows, channels) features of the same nodes to take
                in as well.
            is_real_node (array or None): (n_rows,), or (n_graphs, N) where ``adj`` is padded; nodes
                for which it is 0 do not count. None: all count, in padded layout the rows past a
                graph's nodes too.

        Returns:
            Variable: (n_graphs, out_dim).
        """
        x = h if h0 is None else functions.concat((h, h0), axis=1)
        # Past GraphLinear's own __call__, which insists on three dimensions and reshapes twice.
        linear = chainer.links.Linear.__call__
        gate = functions.sigmoid(linear(self.i_layer, x))
        g = gate * self.activation(linear(self.j_layer, x))
        if is_real_node is not None:
            g = g * real_nodes(is_real_node, adj, g.dtype)
        return self.activation_agg(segment_sum(adj, g))
