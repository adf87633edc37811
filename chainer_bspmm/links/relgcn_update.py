"""Update step of the relational graph convolution."""

from chainer import functions
from chainer_chemistry.links.update import relgcn_update

from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.ops.elementwise import by_channel


class RelGCNUpdate(Update, relgcn_update.RelGCNUpdate):
    """Compute ``h'[i] = W_s h[i] + b_s + sum_r sum_j A_r[i, j] (W_r h[j] + b_r)`` for every node.

    Arguments and parameters are upstream's; rows of ``graph_linear_edge/W`` have the relation as
    their minor index. Called as ``update(h, adj, activation)``: the last, ``functions.identity``
    unless it is given, or ``tanh``, is part of the same node. Both linear maps and the product are
    that node: hooks of the child links are refused.

    Source:
        Schlichtkrull et al. 2017 (arXiv:1703.06103), equation 2, with a bias and without its
        normalisation and activation.
    """

    inner_layers = {'graph_linear_self': LINEAR, 'graph_linear_edge': LINEAR}

    def _update(self, h, adj, activation=functions.identity, **kwargs):
        # In upstream's order, so that one seed gives the same parameters.
        own = parameters_of(self.graph_linear_self, h.shape[1])
        edge = parameters_of(self.graph_linear_edge, h.shape[1])
        return graph_linear(adj, h, *edge, *own, activation=activation)


class RelGCNSparseUpdate(Update, relgcn_update.RelGCNSparseUpdate):
    """Compute as :class:`RelGCNUpdate`, with ``A_r[i, j]`` the edges of type r from j to i.

    Arguments and parameters are upstream's; rows of ``edge_weight/W`` have the relation as their
    major index, and are put into the other order in each forward pass.
    """

    inner_layers = {'root_weight': LINEAR, 'edge_weight': LINEAR}

    def _update(self, h, adj, activation=functions.identity):
        own = parameters_of(self.root_weight, h.shape[1])
        edge = parameters_of(self.edge_weight, h.shape[1])
        edge = (by_channel(array, self.n_edge_types) for array in edge)
        return graph_linear(adj, h, *edge, *own, activation=activation)
