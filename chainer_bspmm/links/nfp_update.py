"""Update step of neural fingerprints."""

from typing import Any

from chainer import Variable
from chainer_chemistry.links.update import nfp_update

from chainer_bspmm.ops.degree_linear import degree_linear_sigmoid
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.links.rows import as_given
from chainer_bspmm.links.rows import node_rows
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR


class NFPUpdate(Sparse, nfp_update.NFPUpdate):
    """Compute ``h'[i] = sigmoid(W_d sum_j A[i, j] h[j] + b_1 + b_2 + ...)``, d the degree of i.

    Arguments and parameters are upstream's, and so are these quirks, which trained parameters
    depend on: the degree of a node is the sum of its column of ``A``, self-loop included, and W_1
    is ``graph_linears/0``; the biases of all degrees are added to every node; a node of degree 0 or
    above max_degree + 1 gets no message, only the biases.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292), algorithm 2, lines 6 to 8.
    """

    @staticmethod
    def check(link):
        if link.max_degree < 0:
            raise ValueError('max_degree: expected at least 0, got %d' % link.max_degree)

    def forward(self, h: Any, adj: BatchedCSR) -> Variable:
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) if ``adj``
                is padded.
            adj (BatchedCSR): adjacency matrices with self-loops, of h's dtype. They give the
                degrees, once a batch, instead of upstream's argument ``deg_conds``.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).
        """
        h, lead = node_rows(h, adj)
        weights, biases = zip(*[parameters_of(layer, h.shape[1]) for layer in self.graph_linears])
        return as_given(degree_linear_sigmoid(adj, h, weights, biases), lead)
