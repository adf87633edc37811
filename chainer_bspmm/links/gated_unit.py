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
    of_input, of_state = [gru.W, gru.W_z], []
    if gru.h is not None:
        of_input.append(gru.W_r)
        of_state = [gru.U, gru.U_z, gru.U_r]
    n_inputs = x.shape[1] + message.shape[1]
    gru.h = gru_step(x, message, gru.h, [
        *(parameters_of(layer, n_inputs) for layer in of_input),
        *(parameters_of(layer, gru.h.shape[1]) for layer in of_state)])
    return gru.h
