"""Readout of neural fingerprints."""

from typing import Any

from chainer import functions, Variable
from chainer_chemistry.links.readout import nfp_readout

from chainer_bspmm.links.ggnn_readout import pool
from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import activated, parameters_of
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.ops.linear_softmax import linear_softmax
from chainer_bspmm.ops.link_hooks import hooked
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency


class NFPReadout(Sparse, nfp_readout.NFPReadout):
    """Compute ``y[g] = sum over the nodes i of graph g of softmax(W h[i] + b)``.

    Arguments and parameters are upstream's.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292), algorithm 2, lines 9 and 10.
    """

    inner_layers = {'output_weight': LINEAR}

    def scores(self, h: Any) -> Variable:
        """Return every node's term of its graph's fingerprint, (n_rows, out_dim)."""
        return activated(self.output_weight, h, functions.softmax)

    def forward(self, h: Any, adj: BatchedCSR, is_real_node: Any = None, **kwargs: Any) -> Variable:
        """Reduce (n_rows, in_channels) to (n_graphs, out_dim).

        Nodes for which ``is_real_node`` (see :class:`GGNNReadout`) is 0 do not count. Further
        arguments, which other readouts take (h0), are ignored.
        """
        check_adjacency(adj)
        check.rows('h', h, adj, adj.n_rows, 'in_channels')
        return pool(self.scores(h), adj, is_real_node)


def summed_scores(readouts, features):
    """Return the sum of several readouts' scores, (n_rows, out_dim), each of its own features."""
    layers = [readout.output_weight for readout in readouts]
    if hooked(*layers):
        scores = [readout.scores(h) for readout, h in zip(readouts, features)]
        return functions.add(*scores) if len(scores) > 1 else scores[0]
    return linear_softmax(
        *[(h, *parameters_of(layer, h.shape[1])) for layer, h in zip(layers, features)]
    )
