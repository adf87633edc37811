"""Calling a linear link and an activation as one node."""

import chainer
from chainer import functions

from chainer_bspmm.functions.fused.activated_linear import linear_relu
from chainer_bspmm.functions.fused.activated_linear import linear_softmax
from chainer_bspmm.links.lazy_linear import parameters_of

FUSED = {functions.relu: linear_relu, functions.softmax: linear_softmax}


def activated(linear, h, activation, dropout_ratio=0.0):
    """Return ``dropout(activation(linear(h)))``, in one node where that is a rectifier.

    A softmax without dropout is one node, too.

    Args:
        linear (chainer.links.Linear): its own hooks run, at the price of further nodes.
        h (Variable or array): (n_rows, n_in).
        activation (callable): of (n_rows, n_out).
        dropout_ratio (float): 0 or less means none.
    """
    function = FUSED.get(activation)
    if function is None or linear.local_link_hooks:
        # Past GraphLinear's own __call__, which insists on three dimensions and reshapes twice.
        y = activation(chainer.links.Linear.__call__(linear, h))
    else:
        parameters = parameters_of(linear, h.shape[1])
        if function is linear_relu:
            return linear_relu(h, *parameters, max(dropout_ratio, 0.0))
        y = function(h, *parameters)
    return functions.dropout(y, ratio=dropout_ratio) if dropout_ratio > 0 else y
