"""Update step of the graph isomorphism network."""

from typing import Any

from chainer import functions
from chainer import Variable
from chainer_chemistry.links.update import gin_update

from chainer_bspmm.links.linear import activated
from chainer_bspmm.links.rows import as_given
from chainer_bspmm.links.rows import node_rows
from chainer_bspmm.links.rows import check_one_relation
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR


class GINUpdate(Sparse, gin_update.GINUpdate):
    """Compute ``h'[i] = dropout(relu(MLP(h[i] + sum_j A[i, j] h[j])))``.

    Arguments and parameters are upstream's. Upstream's preprocessor puts a self-loop into A, so
    that a node counts twice in its own update.

    Source:
        Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826), equation 4.1 with epsilon = 0.
    """

    def forward(self, h: Any, adj: BatchedCSR) -> Variable:
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) if ``adj``
                is padded.
            adj (BatchedCSR): adjacency matrices, of h's dtype.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels); not negative.
        """
        check_one_relation(adj)
        h, lead = node_rows(h, adj)
        first, *others = self.graph_mlp.layers
        activation, ratio = self.graph_mlp.activation, 0.0
        if not others:
            activation, ratio = functions.relu, self.dropout_ratio
        h = activated(first, h, activation, ratio, adj)
        for i, linear in enumerate(others, 1):
            if i == len(others):
                activation, ratio = functions.relu, self.dropout_ratio
            h = activated(linear, h, activation, ratio)
        return as_given(h, lead)
