"""Readout of message passing networks (set2set): an LSTM attends to the nodes several times."""

from typing import Any

import chainer
from chainer import functions, links
from chainer_chemistry.links.readout import mpnn_readout
from chainer_chemistry.links.readout.set2set import Set2Set

from chainer_bspmm.links.inner import expect_known
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.ops.link_hooks import expect_no_hooks
from chainer_bspmm.ops.segment_softmax import node_softmax
from chainer_bspmm.ops.segments import segment_broadcast, segment_sum
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency

SET2SET = (Set2Set,)


class MPNNReadout(Sparse, mpnn_readout.MPNNReadout):
    """Compute ``linear2(relu(linear1([q; r])))`` after several steps of set2set.

    A step is ``q = LSTM([q; r])``, ``a[i] = softmax over the graph's nodes of h[i] . q``,
    ``r = sum_i a[i] h[i]``. Arguments and parameters are upstream's. The LSTM takes all graphs at
    once; its hooks are refused.

    Source:
        Vinyals, Bengio, Kudlur 2015 (arXiv:1511.06391); Gilmer et al. 2017 (arXiv:1704.01212).
    """

    inner_layers = {'set2set': SET2SET}

    def forward(self, h: Any, adj: BatchedCSR, **kwargs: Any) -> chainer.Variable:
        """Reduce (n_rows, in_channels) to (n_graphs, out_dim).

        Further arguments, which other readouts take (h0, is_real_node), are ignored.
        """
        check_adjacency(adj)
        check.rows('h', h, adj, adj.n_rows, 'in_channels')
        set2set = self.set2set
        expect_known(set2set, SET2SET)
        lstm = set2set.lstm_layer
        expect_known(lstm, (links.NStepLSTM,))
        expect_no_hooks(lstm)
        ws, bs = (
            [[getattr(layer, '%s%d' % (kind, i)) for i in range(8)] for layer in lstm]
            for kind in 'wb'
        )
        with chainer.using_device(self.device):
            hx = cx = self.xp.zeros((lstm.n_layers, adj.n_graphs, lstm.out_size), h.dtype)
            query = self.xp.zeros((adj.n_graphs, 2 * set2set.in_channels), h.dtype)
        for _ in range(self.processing_steps):
            hx, cx, (q,) = functions.n_step_lstm(
                lstm.n_layers, lstm.dropout, hx, cx, ws, bs, [chainer.as_variable(query)]
            )
            scores = functions.sum(h * segment_broadcast(adj, q), axis=1, keepdims=True)
            r = segment_sum(adj, node_softmax(adj, scores) * h)
            query = functions.concat((q, r), axis=1)
        return self.linear2(functions.relu(self.linear1(query)))
