"""Calling a linear link and an activation as one node."""
import chainer
from chainer import functions

from chainer_bspmm.functions.activated_linear import linear_relu
from chainer_bspmm.functions.activated_linear import linear_softmax
from chainer_bspmm.links.lazy_linear import parameters_of

FUSED = {functions.relu: linear_relu, functions.softmax: linear_softmax}


def activated(linear, h, activation):
    """Return ``activation(linear(h))``, in one node where that is a rectifier or a softmax.

    Args:
        linear (chainer.links.Linear): its own hooks run, at the price of a second node.
        h (Variable or array): (n_rows, n_in).
        activation (callable): of (n_rows, n_out).
    """
    function = FUSED.get(activation)
    if function is None or linear.local_link_hooks:
        # Past GraphLinear's own __call__, which insists on three dimensions and reshapes twice.
        return activation(chainer.links.Linear.__call__(linear, h))
    return function(h, *parameters_of(linear, h.shape[1]))
