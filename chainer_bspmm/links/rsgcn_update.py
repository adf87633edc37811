"""Update step of the renormalised spectral graph convolution."""

from chainer import functions
from chainer_chemistry.links.update import rsgcn_update

from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import linear_rows, parameters_of
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.bspmm import bspmm
from chainer_bspmm.ops.dropout import dropout
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.ops.link_hooks import hooked


class RSGCNUpdate(Update, rsgcn_update.RSGCNUpdate):
    """Compute ``h'[i] = W sum_j A[i, j] h[j]`` for every node of a batch of graphs.

    Arguments and parameters are upstream's. ``update(h, adj, activation, dropout_ratio)`` also
    applies an activation, if it is not None, and then dropout. With a rectifier or without an
    activation the layer is one node, which in a captured step includes dropout.

    Source:
        Kipf, Welling 2016 (arXiv:1609.02907), equation 2, without its activation.
    """

    inner_layers = {'graph_linear': LINEAR}

    def _update(self, h, adj, activation=None, dropout_ratio=0.0):
        linear = self.graph_linear
        if activation in (None, functions.relu) and not hooked(linear):
            W, b = parameters_of(linear, h.shape[1])
            return graph_linear(
                adj,
                h,
                W,
                b_self=b,
                activation=activation or functions.identity,
                dropout_ratio=max(dropout_ratio, 0.0),
            )
        h = linear_rows(linear, bspmm(adj, h))
        if activation is not None:
            h = activation(h)
        return dropout(h, dropout_ratio) if dropout_ratio > 0.0 else h
