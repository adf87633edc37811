"""Linear links whose parameters another node uses, in place of the link's own call."""


def parameters_of(linear, n_inputs):
    """Return W and b of a linear link; made without the number of its inputs, it gets it now.

    Args:
        linear (chainer.links.Linear): the link.
        n_inputs (int): the width of what the node multiplies by W.

    Raises:
        ValueError: the link has hooks. They would not run, and such as spectral normalisation
            would be left out of the result in silence.
    """
    if linear.local_link_hooks:
        raise ValueError(
            '%s: expected no link hooks, because the link itself is not called on '
            'sparse batches, got %s' % (linear.name, ', '.join(linear.local_link_hooks))
        )
    return initialized(linear, n_inputs)


def initialized(linear, n_inputs):
    """Return W and b as :func:`parameters_of`, of a link that is itself being called."""
    if linear.W.array is None:
        linear.W.initialize((linear.out_size, n_inputs))
    return linear.W, linear.b
