"""Graph warp module: a node beside every graph that hears from all its nodes and speaks to them."""

import inspect

import chainer
from chainer import functions
from chainer_chemistry.models.gwm.gwm import GWM as DenseGWM

from chainer_bspmm.functions import node_softmax
from chainer_bspmm.functions import segment_broadcast
from chainer_bspmm.functions import segment_sum
from chainer_bspmm.links.gated_unit import gated_step
from chainer_bspmm.links.twin import twin_of


class GWM(chainer.Chain):
    """Mix what an update made of the nodes with a super node of their graph, both ways.

    Takes the place of ``chainer_chemistry.models.gwm.gwm.GWM``: the same arguments and parameters
    (``update_super/i``, ``super_transmitter/i/F_super``,
    ``graph_transmitter/i/{V_super,W_super,B}``, ``wgu_local/i/{H,G}``, ``wgu_super/i/{H,G}``,
    ``GRU_local``, ``GRU_super``). With g the super node's features and i over the nodes of its
    graph, every step computes ::

        a[i, head] = softmax over i of g . (B_head h[i])
        to_super   = tanh(W concat over heads of sum_i a[i, head] V_head h[i])
        to_local   = tanh(F g)
        h'[i]      = GRU_local(gate(h_new[i], to_local))
        g'         = GRU_super(gate(to_super, relu(U g)))

    where ``gate(x, y) = (1 - z) x + z y`` with ``z = sigmoid(H x + G y)``. Hooks on its units and
    on the GRUs are not called; those on the linear layers of the units are.

    Source:
        Ishiguro, Maeda, Koyama 2019 (arXiv:1902.01020); Chainer Chemistry 0.7.1, models/gwm/gwm.py.
    """

    __signature__ = inspect.signature(DenseGWM)

    def __init__(self, *args, **kwargs):
        super().__init__()
        self._assemble(DenseGWM(*args, **kwargs))

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        return twin_of(link, cls, link)

    def _assemble(self, dense):
        with self.init_scope():
            self.update_super = dense.update_super
            self.super_transmitter = dense.super_transmitter
            self.graph_transmitter = dense.graph_transmitter
            self.wgu_local = dense.wgu_local
            self.wgu_super = dense.wgu_super
            self.GRU_local = dense.GRU_local
            self.GRU_super = dense.GRU_super
        for name in (
            'hidden_dim',
            'hidden_dim_super',
            'n_layers',
            'n_heads',
            'dropout_ratio',
            'tying_flag',
            'activation',
            'wgu_activation',
        ):
            setattr(self, name, getattr(dense, name))

    def forward(self, h, h_new, g, adj, step=0):
        """Mix. :meth:`reset_state` comes before the first step of every batch.

        Args:
            h (Variable or array): (n_rows, hidden_dim) the nodes before the update.
            h_new (Variable or array): (n_rows, hidden_dim) the nodes after it.
            g (Variable or array): (n_graphs, hidden_dim_super) super nodes.
            adj (BatchedCSR): says which rows are whose. In padded layout the rows past a graph's
                nodes take part, as they do in Chainer Chemistry.
            step (int): which layer's parameters to use.

        Returns:
            tuple of Variable: the nodes (n_rows, hidden_dim), the super nodes (n_graphs,
            hidden_dim_super).
        """
        g_new = self.activation(self.update_super[step](g))
        to_super = _to_super(self.graph_transmitter[step], h, g, adj)
        to_local = functions.tanh(self.super_transmitter[step].F_super(g))
        # Mapped before it is spread: a row for each graph, not for each node.
        unit = self.wgu_local[step]
        mapped = segment_broadcast(adj, _linear(unit.G, to_local))
        h = _gate(unit, h_new, segment_broadcast(adj, to_local), mapped)
        unit = self.wgu_super[step]
        g = _gate(unit, to_super, g_new, unit.G(g_new))
        return tuple(
            gated_step(gru, x, self.xp.empty((len(x), 0), x.dtype))
            for gru, x in ((self.GRU_local, h), (self.GRU_super, g))
        )

    def reset_state(self):
        """Forget the state, as before the first call."""
        self.GRU_local.reset_state()
        self.GRU_super.reset_state()


def _to_super(unit, h, g, adj):
    """Return (n_graphs, hidden_dim_super): what the nodes tell their super node."""
    n_rows, n_heads = len(h), unit.n_heads
    values = functions.reshape(_linear(unit.V_super, h), (n_rows, n_heads, unit.hidden_dim))
    keys = functions.reshape(_linear(unit.B, h), (n_rows, n_heads, unit.hidden_dim_super))
    asked = functions.expand_dims(segment_broadcast(adj, g), 1)
    attention = node_softmax(adj, functions.sum(keys * asked, axis=2))
    if unit.dropout_ratio > 0.0:
        attention = functions.dropout(attention, ratio=unit.dropout_ratio)
    heard = functions.reshape(
        functions.expand_dims(attention, 2) * values, (n_rows, n_heads * unit.hidden_dim)
    )
    return unit.activation(unit.W_super(segment_sum(adj, heard)))


def _gate(unit, x, y, mapped):
    """Return ``(1 - z) x + z y``; ``mapped`` is ``unit.G(y)``."""
    z = _linear(unit.H, x) + mapped
    if unit.dropout_ratio > 0.0:
        z = functions.dropout(z, ratio=unit.dropout_ratio)
    z = unit.activation(z)
    return (1 - z) * x + z * y


def _linear(linear, x):
    # Past GraphLinear's own __call__, which insists on three dimensions.
    return chainer.links.Linear.__call__(linear, x)
