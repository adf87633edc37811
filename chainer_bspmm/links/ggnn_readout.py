"""Gated readout of a batch of graphs."""

from typing import Any

import chainer
from chainer import functions, Variable
from chainer_chemistry.links.readout import ggnn_readout, scatter_ggnn_readout

from chainer_bspmm.links.embed import node_shape
from chainer_bspmm.links.inner import expect_elementwise, LINEAR
from chainer_bspmm.links.linear import linear_rows, parameters_of, with_bias
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.ops.gates.gated_linear import ACTIVATIONS, gated_linear
from chainer_bspmm.ops.link_hooks import hooked
from chainer_bspmm.ops.segments import segment_sum
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency


def pool(rows, adj, is_real_node):
    """Sum (n_rows, n_channels) over the nodes of every graph, or over its real nodes only."""
    if is_real_node is None:
        return segment_sum(adj, rows)
    if not isinstance(is_real_node, chainer.get_array_types()):
        raise TypeError('is_real_node: expected an array, got %s' % type(is_real_node).__name__)
    shapes = list(dict.fromkeys([(adj.n_rows,), node_shape(adj)]))
    if is_real_node.shape not in shapes:
        raise ValueError(
            'is_real_node: expected shape %s to go with %r, got %s; labels are not inputs of a '
            'predictor' % (' or '.join(map(str, shapes)), adj, is_real_node.shape)
        )
    factors = is_real_node.reshape(adj.n_rows, 1).astype(rows.dtype, copy=False)
    return segment_sum(adj, rows * factors)


class GatedReadout(Sparse):
    """Compute ``activation_agg(sum_i sigmoid(W_i [h[i]; h0[i]]) * activation(W_j [h[i]; h0[i]]))``.

    The sum is over the nodes of every graph.

    Source:
        Li et al. 2015 (arXiv:1511.05493), equation 7.
    """

    atoms_are_an_axis = False  # whether upstream's arrays have an axis of atoms
    inner_layers = {'i_layer': LINEAR, 'j_layer': LINEAR}

    def forward(
        self, h: Any, adj: BatchedCSR, h0: Any = None, is_real_node: Any = None
    ) -> Variable:
        """Reduce (n_rows, channels) to (n_graphs, out_dim).

        Args:
            h (Variable or array): (n_rows, channels) node features.
            adj (BatchedCSR): delimits the graphs; one without nodes gives ``activation_agg(0)``.
            h0 (Variable or array or None): (n_rows, channels0) features before the first update.
            is_real_node (array or None): (n_rows,), or (n_graphs, N) if ``adj`` is padded: 0 for
                nodes that are ignored, 1 for the others. None: all count.
        """
        check_adjacency(adj)
        check.rows('h', h, adj, adj.n_rows, 'channels')
        if h0 is not None:
            check.rows('h0', h0, adj, adj.n_rows, 'channels0')
        layers = (self.i_layer, self.j_layer)
        if self.activation in ACTIVATIONS and not hooked(*layers):
            n_inputs = h.shape[1] + (0 if h0 is None else h0.shape[1])
            gate, value = [parameters_of(layer, n_inputs) for layer in layers]
            if (gate[1] is None) != (value[1] is None):
                gate, value = [with_bias(layer, n_inputs) for layer in layers]
            g = gated_linear(h, h0, gate, value, self.activation)
        else:
            if self.atoms_are_an_axis:
                expect_elementwise(self.activation)
            if h0 is not None:
                h = functions.concat((h, h0), axis=1)
            gate, value = (linear_rows(layer, h) for layer in layers)
            g = functions.sigmoid(gate) * _apply(self.activation, value)
        return _apply(self.activation_agg, pool(g, adj, is_real_node))


class GGNNReadout(GatedReadout, ggnn_readout.GGNNReadout):
    """Reduce as :class:`GatedReadout`; arguments and parameters are upstream's.

    ``activation`` gets arrays of two dimensions. Upstream's readout calls it with three, so that
    a softmax, for example, would be taken over the nodes; such functions are refused.
    """

    atoms_are_an_axis = True


class ScatterGGNNReadout(GatedReadout, scatter_ggnn_readout.ScatterGGNNReadout):
    """Reduce as :class:`GatedReadout`; arguments and parameters are upstream's.

    Raises:
        ValueError: ``concat_n_info``, which no model of Chainer Chemistry uses.
    """

    @staticmethod
    def check(link):
        if link.concat_n_info:
            raise ValueError('concat_n_info: expected False, got True')

    def forward(
        self, h: Any, adj: BatchedCSR, h0: Any = None, is_real_node: Any = None
    ) -> Variable:
        """Reduce as :meth:`GatedReadout.forward`."""
        self.check(self)  # the option may have been set after the constructor
        return super().forward(h, adj, h0, is_real_node)


def _apply(activation, x):
    # Chainer's identity is skipped, because it would add a node to the graph.
    return x if activation is functions.identity else activation(x)
