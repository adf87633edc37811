"""Graph warp module: a super node per graph that exchanges messages with the graph's nodes."""

from typing import Any

from chainer import functions, links, Variable
from chainer_chemistry.models.gwm import gwm

from chainer_bspmm.links.inner import expect_elementwise, expect_known, refuse_patched
from chainer_bspmm.links.linear import gated_step, linear_rows
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.ops.segment_softmax import node_softmax
from chainer_bspmm.ops.segments import segment_broadcast, segment_sum
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency


class GWM(Sparse, gwm.GWM):
    """Mix the updated nodes with a super node of their graph, in both directions.

    Arguments and parameters are upstream's. With g the super node's features and i over the nodes
    of its graph, every step computes ::

        a[i, head] = softmax over i of g . (B_head h[i])
        to_super   = tanh(W concat over heads of sum_i a[i, head] V_head h[i])
        to_local   = tanh(F g)
        h'[i]      = GRU_local(gate(h_new[i], to_local))
        g'         = GRU_super(gate(to_super, relu(U g)))

    where ``gate(x, y) = (1 - z) x + z y`` with ``z = sigmoid(H x + G y)``. Hooks of the linear
    layers in its units are called, but not hooks of the units themselves, which upstream does not
    call either. Hooks of the GRUs are refused.

    Source:
        Ishiguro, Maeda, Koyama 2019 (arXiv:1902.01020); Chainer Chemistry 0.7.1, models/gwm/gwm.py.
    """

    inner_layers = {
        'super_transmitter': (gwm.SuperNodeTransmitterUnit,),
        'graph_transmitter': (gwm.GraphTransmitterUnit,),
        'wgu_local': (gwm.WarpGateUnit,),
        'wgu_super': (gwm.WarpGateUnit,),
        'GRU_local': (links.GRU,),
        'GRU_super': (links.GRU,),
    }

    def forward(
        self, h: Any, h_new: Any, g: Any, adj: BatchedCSR, step: int = 0
    ) -> tuple[Variable, Variable]:
        """Mix nodes and super nodes. Call ``reset_state`` before the first step of every batch.

        Args:
            h (Variable or array): (n_rows, hidden_dim) the nodes before the update.
            h_new (Variable or array): (n_rows, hidden_dim) the nodes after it.
            g (Variable or array): (n_graphs, hidden_dim_super) super nodes.
            adj (BatchedCSR): delimits the graphs. Its phantom atoms, if any, take part.
            step (int): index of the layer whose parameters are used.

        Returns:
            tuple of Variable: nodes and super nodes, of the shapes of h and g.
        """
        refuse_patched(self.name or 'GWM', self, self.upstream)
        check_adjacency(adj)
        for name, rows in (('h', h), ('h_new', h_new)):
            check.rows(name, rows, adj, adj.n_rows, 'hidden_dim')
        g_new = self.activation(self.update_super[step](g))
        to_super = _to_super(self.graph_transmitter[step], h, g, adj)
        transmitter = self.super_transmitter[step]
        expect_known(transmitter, self.inner_layers['super_transmitter'])
        to_local = functions.tanh(transmitter.F_super(g))
        # The message is mapped before it is broadcast, while it has only one row per graph.
        unit = self.wgu_local[step]
        expect_known(unit, self.inner_layers['wgu_local'])
        expect_elementwise(unit.activation)
        mapped = segment_broadcast(adj, linear_rows(unit.G, to_local))
        h = _gate(unit, h_new, segment_broadcast(adj, to_local), mapped)
        unit = self.wgu_super[step]
        expect_known(unit, self.inner_layers['wgu_super'])
        g = _gate(unit, to_super, g_new, linear_rows(unit.G, g_new))
        return tuple(
            gated_step(gru, x, self.xp.empty((len(x), 0), x.dtype))
            for gru, x in ((self.GRU_local, h), (self.GRU_super, g))
        )


def _to_super(unit, h, g, adj):
    """Return the nodes' message to their super node, (n_graphs, hidden_dim_super)."""
    expect_known(unit, (gwm.GraphTransmitterUnit,))
    n_rows, width = h.shape
    n_heads = unit.n_heads
    values = functions.reshape(linear_rows(unit.V_super, h), (n_rows, n_heads, width))
    keys = functions.reshape(linear_rows(unit.B, h), (n_rows, n_heads, unit.hidden_dim_super))
    query = functions.expand_dims(segment_broadcast(adj, g), 1)
    attention = node_softmax(adj, functions.sum(keys * query, axis=2))
    if unit.dropout_ratio > 0.0:
        attention = functions.dropout(attention, ratio=unit.dropout_ratio)
    messages = functions.reshape(
        functions.expand_dims(attention, 2) * values, (n_rows, n_heads * width)
    )
    return unit.activation(unit.W_super(segment_sum(adj, messages)))


def _gate(unit, x, y, mapped):
    """Return ``(1 - z) x + z y``; ``mapped`` is ``unit.G(y)``."""
    z = linear_rows(unit.H, x) + mapped
    if unit.dropout_ratio > 0.0:
        z = functions.dropout(z, ratio=unit.dropout_ratio)
    z = unit.activation(z)
    return (1 - z) * x + z * y
