"""Readout of message passing networks: attention that an LSTM asks for several times."""

import chainer
from chainer import functions
from chainer_chemistry.links.readout.mpnn_readout import MPNNReadout as DenseReadout

from chainer_bspmm.functions import node_softmax
from chainer_bspmm.functions import segment_broadcast
from chainer_bspmm.functions import segment_sum
from chainer_bspmm.links.twin import twin_of


class MPNNReadout(chainer.Chain):
    """Compute ``linear2(relu(linear1([q; r])))`` after some steps of set2set.

    A step is ``q = LSTM([q; r])``, ``a[i] = softmax over the graph's nodes of h[i] . q``,
    ``r = sum_i a[i] h[i]``. Takes the place of ``chainer_chemistry.links.readout.mpnn_readout.
    MPNNReadout``; parameters ``set2set/lstm_layer/0..n_layers-1/{w,b}0..7``, ``linear1/{W,b}``,
    ``linear2/{W,b}``. The LSTM takes all graphs at once; hooks on it are not called.

    Args:
        out_dim (int): width of the result.
        in_channels (int): width of ``h``.
        n_layers (int): layers of the LSTM.
        processing_steps (int): number of steps, at least 1.

    Source:
        Vinyals, Bengio, Kudlur 2015 (arXiv:1511.06391); Gilmer et al. 2017 (arXiv:1704.01212).
    """

    def __init__(self, out_dim, in_channels, n_layers=1, processing_steps=3):
        super().__init__()
        if processing_steps < 1:
            raise ValueError('processing_steps: expected at least 1, got %d' % processing_steps)
        self._assemble(DenseReadout(out_dim, in_channels, n_layers, processing_steps))

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links."""
        return twin_of(link, cls, link)

    def _assemble(self, dense):
        with self.init_scope():
            self.set2set = dense.set2set
            self.linear1 = dense.linear1
            self.linear2 = dense.linear2
        for name in ('out_dim', 'in_channels', 'n_layers', 'processing_steps'):
            setattr(self, name, getattr(dense, name))

    def forward(self, h, adj, **kwargs):
        """Reduce. What other readouts take besides (h0, is_real_node) is not used.

        Args:
            h (Variable or array): (n_rows, in_channels) node features.
            adj (BatchedCSR): says which rows are whose. In padded layout the rows past a graph's
                nodes take part, as they do in Chainer Chemistry.

        Returns:
            Variable: (n_graphs, out_dim).
        """
        lstm, n_graphs = self.set2set.lstm_layer, adj.n_graphs
        ws, bs = (
            [[getattr(layer, '%s%d' % (kind, i)) for i in range(8)] for layer in lstm]
            for kind in 'wb'
        )
        with chainer.using_device(self.device):
            state = [self.xp.zeros((self.n_layers, n_graphs, self.in_channels), h.dtype)] * 2
            question = self.xp.zeros((n_graphs, 2 * self.in_channels), h.dtype)
        for _ in range(self.processing_steps):
            *state, (q,) = functions.n_step_lstm(
                self.n_layers, 0.0, *state, ws, bs, [chainer.as_variable(question)]
            )
            scores = functions.sum(h * segment_broadcast(adj, q), axis=1, keepdims=True)
            r = segment_sum(adj, node_softmax(adj, scores) * h)
            question = functions.concat((q, r), axis=1)
        return self.linear2(functions.relu(self.linear1(question)))
