"""Update step of the graph isomorphism network."""

from typing import Any, Callable

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
        mlp = self.graph_mlp
        return _mlp_of_sums(mlp.layers, mlp.activation, h, adj, functions.relu, self.dropout_ratio)


class GINSparseUpdate(Sparse, gin_update.GINSparseUpdate):
    """Compute ``h'[i] = activation(dropout(MLP(h[i] + sum_j A[i, j] h[j])))``.

    Arguments and parameters are upstream's. ``A[i, j]`` is the number of edges from j to i: of the
    columns ``(j, i)`` of upstream's ``edge_index``.

    Source:
        As :class:`GINUpdate`.
    """

    def forward(
        self, h: Any, adj: BatchedCSR, activation: Callable[[Any], Variable] = functions.identity
    ) -> Variable:
        """Update the nodes.

        Args:
            h, adj: as in :meth:`GINUpdate.forward`.
            activation (callable): of the result: ``chainer.functions.identity`` or ``relu``, which
                the model applies to all but the last.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).
        """
        layers = [*self.mlp.layers, self.mlp.l_out]
        return _mlp_of_sums(layers, self.mlp.activation, h, adj, activation, self.dropout_ratio)


def _mlp_of_sums(layers, activation, h, adj, last, dropout_ratio):
    """Return ``dropout(last(MLP(h + A h)))``; a rectifier may as well come after the dropout.

    Args:
        layers (sequence of chainer.links.Linear), activation (callable): the MLP.
        h (Variable or array), adj (BatchedCSR): see :meth:`GINUpdate.forward`.
        last (callable): the activation of the last layer.
        dropout_ratio (float): 0 or less means none.
    """
    check_one_relation(adj)
    h, lead = node_rows(h, adj)
    for i, linear in enumerate(layers, 1):
        of_last = (last, dropout_ratio) if i == len(layers) else (activation, 0.0)
        h = activated(linear, h, *of_last, adj=adj if i == 1 else None)
    return as_given(h, lead)
