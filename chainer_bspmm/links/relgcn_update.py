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
    their minor index. Call the link as ``update(h, adj, activation)``, with ``functions.identity``
    (the default) or ``tanh``. Both linear maps, the product and the activation are one node, so
    hooks of the child links are refused.

    Source:
        Schlichtkrull et al. 2017 (arXiv:1703.06103), equation 2, with a bias and without its
        normalisation and activation.
    """

    inner_layers = {'graph_linear_self': LINEAR, 'graph_linear_edge': LINEAR}

    def _update(self, h, adj, activation=functions.identity, **kwargs):
        # Parameters are made in upstream's order, so that a seed gives the same ones.
        own = parameters_of(self.graph_linear_self, h.shape[1])
        edge = parameters_of(self.graph_linear_edge, h.shape[1])
        return graph_linear(adj, h, *edge, *own, activation=activation)


class RelGCNSparseUpdate(Update, relgcn_update.RelGCNSparseUpdate):
    """Compute as :class:`RelGCNUpdate`; ``A_r[i, j]`` is the number of edges of type r from j to i.

    Arguments and parameters are upstream's. Rows of ``edge_weight/W`` have the relation as their
    major index; every forward pass puts them into the other order.
    """

    inner_layers = {'root_weight': LINEAR, 'edge_weight': LINEAR}

    def _update(self, h, adj, activation=functions.identity):
        own = parameters_of(self.root_weight, h.shape[1])
        edge = parameters_of(self.edge_weight, h.shape[1])
        edge = (None if array is None else by_channel(array, self.n_edge_types) for array in edge)
        return graph_linear(adj, h, *edge, *own, activation=activation)
