"""Linear links whose parameters another node uses, in place of the link's own call."""


def parameters_of(linear, n_inputs):
    """Return W and b of a linear link; made without the number of its inputs, it gets it now.

    Args:
        linear (chainer.links.Linear): the link.
        n_inputs (int): the width of what the node multiplies by W.
    """
    if linear.W.array is None:
        linear.W.initialize((linear.out_size, n_inputs))
    return linear.W, linear.b
