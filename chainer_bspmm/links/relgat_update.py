"""Update step of the relational graph attention network."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.backend import check
from chainer_bspmm.functions.fused.relation_attention import relation_attention
from chainer_bspmm.links.lazy_linear import parameters_of
from chainer_bspmm.links.relations import node_rows
from chainer_bspmm.links.twin import twin_of

MODES = ('across', 'within')


class RelGATUpdate(chainer.Chain):
    """Compute ``h'[i] = mean over k of sum_r sum_j alpha[i, j, r, k] m[j, r, k]`` for every node.

    m is a linear map of h for each relation r and head k; alpha is the softmax of ``leaky(a . [m[j,
    r, k]; m[i, r, k]] + b)`` over the edges of node i. Takes the place of
    ``chainer_chemistry.links.RelGATUpdate``; parameters ``message_layer/{W,b}``, whose rows are
    sorted by relation, head, channel, and ``attention_layer/{W,b}``. The values of the adjacency
    matrices play no part, only which entries there are: an edge that is stored twice counts twice.
    An update is two nodes of the computational graph: hooks on ``attention_layer`` are refused.

    As in Chainer Chemistry, where a node has no edge to take the softmax over, all slots of its
    graph have the same weight: ``h'`` is then a mean over its nodes, and in padded layout over the
    rows past them too. With ``'across'`` that is a node without neighbours, and a slot is a node in
    any of the relations; with ``'within'`` it is each relation in which a node has no neighbour,
    which most have. (It gives absent edges the logit -10000. An edge whose own logit is below about
    -9900 would compete with them; not so here.)

    Args:
        in_channels (int or None): width of ``h``; None means what the first call brings.
        out_channels (int): width of a head.
        n_heads (int): number of heads.
        n_edge_types (int): R, the number of relations.
        dropout_ratio (float): of the weights, uniform ones included; 0 or less means none.
        negative_slope (float): of the leaky rectifier.
        softmax_mode (str): ``'across'`` relations, or ``'within'`` each.
        concat_heads (bool): the heads side by side instead of their mean.

    Raises:
        ValueError: unknown ``softmax_mode``.

    Source:
        Busbridge et al. 2019 (arXiv:1904.05811), ARGAT and WIRGAT with additive logits.
    """

    def __init__(
        self,
        in_channels,
        out_channels,
        n_heads=3,
        n_edge_types=4,
        dropout_ratio=-1.0,
        negative_slope=0.2,
        softmax_mode='across',
        concat_heads=False,
    ):
        super().__init__()
        self._assemble(
            GraphLinear(in_channels, out_channels * n_edge_types * n_heads),
            GraphLinear(out_channels * 2, 1),
            in_channels,
            out_channels,
            n_heads,
            n_edge_types,
            dropout_ratio,
            negative_slope,
            softmax_mode,
            concat_heads,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        return twin_of(
            link,
            cls,
            link.message_layer,
            link.attention_layer,
            link.in_channels,
            link.out_channels,
            link.n_heads,
            link.n_edge_types,
            link.dropout_ratio,
            link.negative_slope,
            link.softmax_mode,
            link.concat_heads,
        )

    def _assemble(
        self,
        message_layer,
        attention_layer,
        in_channels,
        out_channels,
        n_heads,
        n_edge_types,
        dropout_ratio,
        negative_slope,
        softmax_mode,
        concat_heads,
    ):
        check.one_of('softmax_mode', softmax_mode, MODES)
        with self.init_scope():
            self.message_layer = message_layer
            self.attention_layer = attention_layer
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.n_heads = n_heads
        self.n_edge_types = n_edge_types
        self.dropout_ratio = dropout_ratio
        self.softmax_mode = softmax_mode
        self.concat_heads = concat_heads
        self.negative_slope = negative_slope

    def forward(self, h, adj, **kwargs):
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) where
                ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations.

        Returns:
            Variable: (n_nodes, width), or (n_graphs, N, width); the width is out_channels, n_heads
            times that with ``concat_heads``.

        Raises:
            TypeError: ``adj`` is no BatchedCSR. ValueError: a shape does not fit, or ``adj`` has
            another number of relations.
        """
        h, lead = node_rows(h, adj, self.n_edge_types)
        # Past GraphLinear's own __call__, which insists on three dimensions and reshapes twice.
        message = chainer.links.Linear.__call__(self.message_layer, h)
        h = relation_attention(
            adj,
            message,
            *parameters_of(self.attention_layer, 2 * self.out_channels),
            self.n_heads,
            self.softmax_mode == 'within',
            self.concat_heads,
            self.negative_slope,
            self.dropout_ratio,
        )
        return h if len(lead) == 1 else functions.reshape(h, lead + h.shape[1:])
