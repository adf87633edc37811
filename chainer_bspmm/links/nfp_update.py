"""Update step of neural fingerprints."""

import chainer
from chainer import functions
from chainer_chemistry.links.connection.graph_linear import GraphLinear

from chainer_bspmm.functions import bspmm
from chainer_bspmm.functions.fused.degree_linear import degree_linear_sigmoid
from chainer_bspmm.functions.fused.degree_linear import degrees_of
from chainer_bspmm.links.lazy_linear import parameters_of
from chainer_bspmm.links.twin import twin_of


class NFPUpdate(chainer.Chain):
    """Compute ``h'[i] = sigmoid(W_d sum_j A[i, j] h[j] + b_1 + b_2 + ...)``, d the degree of i.

    Takes the place of ``chainer_chemistry.links.NFPUpdate``; parameters
    ``graph_linears/0..max_degree/{W,b}``.

    Quirks of Chainer Chemistry, kept because trained parameters depend on them: the degree of a
    node is the sum of its column of ``A``, a self-loop included, and W_1 is ``graph_linears/0``;
    the biases of all degrees are added to every node; a node whose degree is none of 1 to
    max_degree + 1 gets no message, only the biases.

    Args:
        in_channels (int or None): width of ``h``; None means what the first call brings.
        out_channels (int): width of the result.
        max_degree (int): there are weights for degrees from 1 to max_degree + 1.

    Raises:
        ValueError: ``max_degree`` is negative.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292), algorithm 2, lines 6 to 8.
    """

    def __init__(self, in_channels, out_channels, max_degree=6, **kwargs):
        super().__init__()
        if max_degree < 0:
            raise ValueError('max_degree: expected at least 0, got %d' % max_degree)
        self._assemble(
            chainer.ChainList(
                *[GraphLinear(in_channels, out_channels) for _ in range(max_degree + 1)]
            ),
            in_channels,
            out_channels,
        )

    @classmethod
    def from_dense(cls, link):
        """Return the sparse twin of Chainer Chemistry's link; it owns that one's child links.

        Raises:
            ValueError: a child has hooks, which would not run: its parameters are used without
                calling it.
        """
        for linear in link.graph_linears:
            if linear.local_link_hooks:
                raise ValueError(
                    'model.graph_linears.%s: expected no link hooks, because the link '
                    'itself is not called on sparse batches, got %s'
                    % (linear.name, ', '.join(linear.local_link_hooks))
                )
        return twin_of(link, cls, link.graph_linears, link.in_channels, link.out_channels)

    def _assemble(self, graph_linears, in_channels, out_channels):
        with self.init_scope():
            self.graph_linears = graph_linears
        self.max_degree = len(graph_linears) - 1
        self.in_channels = in_channels
        self.out_channels = out_channels

    def forward(self, h, adj):
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) where
                ``adj`` is padded.
            adj (BatchedCSR): adjacency matrices with self-loops, of h's dtype. The degrees come
                from here, once a batch, in place of Chainer Chemistry's argument ``deg_conds``.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).
        """
        shape = h.shape
        h = bspmm(adj, h)
        if h.ndim == 3:
            h = functions.reshape(h, (adj.n_rows, shape[2]))
        weights, biases = zip(*[parameters_of(linear, shape[-1]) for linear in self.graph_linears])
        h = degree_linear_sigmoid(degrees_of(adj, len(self.graph_linears)), h, weights, biases)
        return h if len(shape) == 2 else functions.reshape(h, shape[:2] + h.shape[1:])
