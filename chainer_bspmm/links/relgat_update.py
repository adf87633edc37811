"""Update step of the relational graph attention network."""

from chainer_chemistry.links.update import relgat_update

from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import linear_rows, with_bias
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.relation_attention import relation_attention
from chainer_bspmm.sparse.check import one_of

MODES = ('across', 'within')


class RelGATUpdate(Update, relgat_update.RelGATUpdate):
    """Compute ``h'[i] = mean over k of sum_r sum_j alpha[i, j, r, k] m[j, r, k]`` for every node.

    m is a linear map of h for each relation r and head k; alpha is the softmax of ``leaky(a . [m[j,
    r, k]; m[i, r, k]] + b)`` over the edges of node i. Arguments and parameters are upstream's; the
    rows of ``message_layer/W`` are sorted by relation, head, channel. Values of the adjacency
    matrices are ignored: an entry is an edge, and an entry stored twice counts twice. An update is
    two nodes of the computational graph, so hooks of ``attention_layer`` are refused. The result
    has out_channels columns, with ``concat_heads`` n_heads times as many.

    As in upstream, a node without an edge to take the softmax over gets the mean over its graph,
    which in padded and folded layout includes phantom atoms. With ``'across'`` this concerns nodes
    without neighbours, and the mean is over all relations. With ``'within'`` it concerns every
    relation in which a node has no neighbour, and most nodes have such relations. Dropout draws
    once for all such nodes of a graph. (Upstream gives absent edges the logit -10000, so they
    compete with edges whose logit is below about -9900. Here they do not.)

    Source:
        Busbridge et al. 2019 (arXiv:1904.05811), ARGAT and WIRGAT with additive logits.
    """

    inner_layers = {'message_layer': LINEAR, 'attention_layer': LINEAR}

    @staticmethod
    def check(link):
        one_of('softmax_mode', link.softmax_mode, MODES)

    def _update(self, h, adj, **kwargs):
        self.check(self)  # the mode may have been assigned since
        messages = linear_rows(self.message_layer, h)
        W, b = with_bias(self.attention_layer, 2 * self.out_channels)
        return relation_attention(
            adj,
            messages,
            W,
            b,
            n_heads=self.n_heads,
            within=self.softmax_mode == 'within',
            concat_heads=self.concat_heads,
            negative_slope=self.negative_slope,
            dropout_ratio=self.dropout_ratio,
        )
