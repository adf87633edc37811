"""A step of a `chainer.links.GRU` in one node."""

from chainer_bspmm.functions import gru_step
from chainer_bspmm.links.lazy_linear import parameters_of


def gated_step(gru, x, message):
    """Take a step of a GRU whose input is ``x`` and ``message`` side by side, and keep the state.

    In place of the call of the link: hooks on it are not called, those on its layers refused.

    Args:
        gru (chainer.links.GRU): its state is replaced; without one U, U_r, U_z and W_r take no
            part.
        x (Variable or array): (n_rows, C).
        message (Variable or array): (n_rows, M); M may be 0.

    Returns:
        Variable: (n_rows, H), the new state.

    Raises:
        ValueError: a layer has hooks, or a shape does not fit.
    """
    n_inputs = x.shape[1] + message.shape[1]
    # In the order of the link's own call, so that one seed gives the same parameters.
    update, candidate = (parameters_of(layer, n_inputs) for layer in (gru.W_z, gru.W))
    parameters = [candidate, update]
    if gru.h is not None:
        parameters.append(parameters_of(gru.W_r, n_inputs))
        parameters += [parameters_of(layer, gru.h.shape[1]) for layer in (gru.U, gru.U_z, gru.U_r)]
    gru.h = gru_step(x, message, gru.h, parameters)
    return gru.h
