"""Two frequent uses of `graph_linear`, as functions of arrays."""

from chainer import functions

from chainer_bspmm.ops.graph_linear import graph_linear


def linear_relu(x, W, b=None, dropout_ratio=0.0):
    return graph_linear(None, x, None, None, W, b, functions.relu, dropout_ratio)


def convolved_relu(adj, x, W, dropout_ratio=0.0):
    return graph_linear(adj, x, W, None, None, None, functions.relu, dropout_ratio)
