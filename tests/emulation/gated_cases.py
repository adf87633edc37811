"""Gates and steps of a recurrent unit for the tests of their kernels, and the same by NumPy."""

import numpy

from chainer import functions

from chainer_bspmm.ops.gates.gated_linear import GatedLinear
from chainer_bspmm.ops.gates.gru_step import GRUStep


def arrays(n_rows, widths, has_state, has_bias=True, seed=0):
    """Return gy, x, the message (None: no columns), the state, and the parameters, in float64."""
    rng = numpy.random.RandomState(seed)
    x, message, out = widths

    def draw(*shape):
        return rng.uniform(-1, 1, shape) / (1 if len(shape) == 1 else max(shape[1], 1) ** 0.5)

    rows = [draw(n_rows, width) for width in (out, x, message, out)]
    n = 2 + has_state
    pairs = [(draw(out, x + message), draw(out) if has_bias else None) for _ in range(n)]
    pairs += [(draw(out, out), draw(out)) for _ in range(3 * has_state)]
    return rows[0], rows[1], rows[2] if message else None, rows[3] if has_state else None, pairs


def expected(gy, x, message, state, pairs, is_tanh):
    """Return the result and all gradients by the nodes on a host."""
    parameters = [array for pair in pairs for array in pair if array is not None]
    if state is None and not is_tanh or message is None or len(parameters) < 4:
        (W_value, b_value), (W_gate, b_gate) = pairs
        node = GatedLinear(1 if message is None else 2, functions.tanh if is_tanh else None)
        inputs = [x, message, W_gate, W_value, b_gate, b_value]
        inputs = [array for array in inputs if array is not None]
        y = node._output(inputs)
        gradients = node._gradients(inputs, gy, range(len(inputs)))
        gradients = [gradients[i] for i in range(len(inputs))]
        by_rows = gradients[: node._n_parts]
        gW_gate, gW_value, *biases = gradients[node._n_parts :]
        gb_gate, gb_value = biases or (None, None)
        by_rows = [*by_rows, None, None][:2] + [None]
        return [y, *by_rows, gW_value, gb_value, gW_gate, gb_gate]
    kind = None if state is None else 'x' if state is x else 'given'
    node = GRUStep(kind)
    inputs = [x, message, *([state] if kind == 'given' else []), *parameters]
    y = node._output(inputs)
    gradients = node._gradients(inputs, gy, range(len(inputs)))
    if kind != 'given':
        gradients.insert(2, None)
    return [y, *gradients]


def plain(array):
    """Return a NumPy array, for which the nodes launch no kernel, in float64."""
    return None if array is None else numpy.array(array, 'd', subok=False)


def summed(partials, parts):
    """What sum_partials returns, which is tested alone."""
    return [
        partials[:, first : first + numpy.prod(shape)].sum(axis=0).reshape(shape).astype(dtype)
        for first, shape, dtype in parts
    ]
