"""Chainer's linear layers and GRUs, applied to rows, some of them as part of another node."""

import chainer
from chainer import functions

from chainer_bspmm.links.inner import CALLS, calls_of, expect_known, LINEAR, refuse
from chainer_bspmm.ops.bspmm import bspmm
from chainer_bspmm.ops.dropout import dropout
from chainer_bspmm.ops.elementwise import ACTIVATIONS
from chainer_bspmm.ops.gates.gru_step import gru_step
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.ops.link_hooks import hooked, expect_no_hooks
from chainer_bspmm.ops.linear_softmax import linear_softmax


def linear_rows(linear, h):
    """Return ``linear(h)`` for rows (..., n_in); GraphLinear's own call insists on three axes."""
    expect_known(linear, LINEAR)
    return chainer.links.Linear.__call__(linear, h, n_batch_axes=h.ndim - 1)


def activated(linear, h, activation, dropout_ratio=0.0, adj=None):
    """Return ``dropout(activation(linear(h)))``, or with ``h + A h`` for h if `adj` is given.

    It is one node, unless the link has hooks or the activation is not one of ACTIVATIONS.
    """
    ratio = max(dropout_ratio, 0.0)
    if not hooked(linear) and activation in ACTIVATIONS:
        W, b = parameters_of(linear, h.shape[1])
        if adj is not None:
            return graph_linear(
                adj, h, W, b_self=b, activation=activation, dropout_ratio=ratio, loop=True
            )
        return graph_linear(None, h, W_self=W, b_self=b, activation=activation, dropout_ratio=ratio)
    if adj is not None:
        h = bspmm(adj, h, residual=h)
    if activation is functions.softmax and not hooked(linear):
        y = linear_softmax((h, *parameters_of(linear, h.shape[1])))
    else:
        y = activation(linear_rows(linear, h))
    return dropout(y, ratio) if ratio else y


def gated_step(gru, x, message):
    """Take a step of a GRU with input ``[x, message]``, as one node, and keep the state.

    A message may have no columns. Hooks of the GRU and of its layers are refused.
    """
    expect_known(gru, (chainer.links.GRU,))
    expect_no_hooks(gru)
    n_inputs = x.shape[1] + message.shape[1]
    # Parameters are made in the order of the GRU's own call, so that a seed gives the same ones.
    update, candidate = (with_bias(layer, n_inputs) for layer in (gru.W_z, gru.W))
    parameters = [candidate, update]
    if gru.h is not None:
        parameters.append(with_bias(gru.W_r, n_inputs))
        parameters += [with_bias(layer, gru.h.shape[1]) for layer in (gru.U, gru.U_z, gru.U_r)]
    gru.h = gru_step(x, message, gru.h, parameters)
    return gru.h


def parameters_of(linear, n_inputs):
    """Return W and b of a layer that is part of another node, initialised if necessary."""
    # This is `expect_known`, inlined, because a model asks for up to a hundred layers.
    kind = type(linear)
    if kind not in LINEAR or CALLS[kind] != calls_of(kind) or 'forward' in vars(linear):
        refuse(getattr(linear, 'name', None) or 'a layer', linear, LINEAR)
    if linear._local_link_hooks or chainer._get_link_hooks():
        # Hooks, such as spectral normalisation, would not run.
        expect_no_hooks(linear)
    if linear.W.array is None:
        linear.W.initialize((linear.out_size, n_inputs))
    return linear.W, linear.b


def with_bias(linear, n_inputs):
    """Return :func:`parameters_of` a layer, with zeros if it has no bias."""
    W, b = parameters_of(linear, n_inputs)
    return W, linear.xp.zeros(len(W), W.dtype) if b is None else b
