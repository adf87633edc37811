"""Update step of the graph isomorphism network."""

from chainer import functions
from chainer_chemistry.links import GraphMLP
from chainer_chemistry.links.update import gin_update

from chainer_bspmm.links.inner import expect_elementwise, expect_known
from chainer_bspmm.links.linear import activated
from chainer_bspmm.links.mlp import MLP
from chainer_bspmm.links.update import Update

MLPS = (MLP.upstream, MLP)


class GINUpdate(Update, gin_update.GINUpdate):
    """Compute ``h'[i] = dropout(relu(MLP(h[i] + sum_j A[i, j] h[j])))``.

    Arguments and parameters are upstream's. Upstream's preprocessor adds a self-loop to A, so that
    a node counts twice in its own update.

    Source:
        Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826), equation 4.1 with epsilon = 0.
    """

    inner_layers = {'graph_mlp': (GraphMLP,)}

    def _update(self, h, adj):
        expect_known(self.graph_mlp, (GraphMLP,))
        mlp = self.graph_mlp
        expect_elementwise(mlp.activation)
        return _mlp_of_sums(mlp.layers, mlp.activation, h, adj, functions.relu, self.dropout_ratio)


class GINSparseUpdate(Update, gin_update.GINSparseUpdate):
    """Compute ``h'[i] = activation(dropout(MLP(h[i] + sum_j A[i, j] h[j])))``.

    Arguments and parameters are upstream's. ``A[i, j]`` is the number of edges from j to i, which
    are the columns ``(j, i)`` of upstream's ``edge_index``. Call the link as ``update(h, adj,
    activation)``. The activation is ``functions.identity`` by default; the model passes ``relu``
    to all updates except the last.
    """

    inner_layers = {'mlp': MLPS}

    def _update(self, h, adj, activation=functions.identity):
        expect_known(self.mlp, MLPS)
        layers = [*self.mlp.layers, self.mlp.l_out]
        return _mlp_of_sums(layers, self.mlp.activation, h, adj, activation, self.dropout_ratio)


def _mlp_of_sums(layers, activation, h, adj, last, dropout_ratio):
    """Return ``dropout(last(MLP(h + A h)))``; a rectifier and dropout can change places."""
    for i, linear in enumerate(layers):
        is_last = i == len(layers) - 1
        h = activated(
            linear,
            h,
            last if is_last else activation,
            dropout_ratio if is_last else 0.0,
            adj=adj if i == 0 else None,
        )
    return h
