"""Two linear maps of the same rows, one of which gates the other, as one node."""
import chainer
from chainer import backend as chainer_backend
from chainer import function_node
from chainer import functions

from chainer_bspmm.functions.beside import beside
from chainer_bspmm.functions.quick import quick_apply
from chainer_bspmm.functions.row_sum import RowSum
from chainer_bspmm.functions.sigmoid import sigmoid

ACTIVATIONS = (functions.identity, functions.tanh)


class GatedLinear(function_node.FunctionNode):
    """Inputs: the parts of x side by side, then W_gate, W_value and, if any, b_gate, b_value."""

    def __init__(self, n_parts, activation):
        self._n_parts = n_parts
        self._activation = activation

    def forward(self, inputs):
        xp = chainer_backend.get_array_module(*inputs)
        dtype = inputs[0].dtype
        parts, parameters = inputs[:self._n_parts], inputs[self._n_parts:]
        self.retain_inputs(tuple(range(len(inputs))))
        x = parts[0] if len(parts) == 1 else beside(parts, axis=1)
        n = len(parameters[0])
        W = beside(parameters[:2]).astype(dtype, copy=False)
        both = x.dot(W.T)
        if len(parameters) == 4:
            both += beside(parameters[2:]).astype(dtype, copy=False)
        gate, value = sigmoid(both[:, :n]), both[:, n:]
        if self._activation is functions.tanh:
            xp.tanh(value, out=value)
        self._kept = x, W, gate, value
        return gate * value,

    def backward(self, indexes, grad_outputs):
        inputs = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            # As in GRUStep: gradients of gradients from the same formula in Chainer's nodes.
            inputs = [functions.identity(variable) for variable in inputs]
            y = _composed(inputs[:self._n_parts], inputs[self._n_parts:], self._activation)
            return tuple(chainer.grad([y], [inputs[i] for i in indexes], grad_outputs,
                                      enable_double_backprop=True))
        gradients = self._gradients(grad_outputs[0].array, indexes)
        return tuple(
            chainer.Variable(gradients[i].astype(inputs[i].dtype, copy=False), requires_grad=False)
            for i in indexes)

    def _gradients(self, gy, indexes):
        """Return {index of an input: its gradient}, at least for those of `indexes`."""
        xp = chainer_backend.get_array_module(gy)
        x, W, gate, value = self._kept
        n, first = gy.shape[1], self._n_parts
        g = xp.empty((len(gy), 2 * n), gy.dtype)  # of the two maps, side by side
        g_gate, g_value = g[:, :n], g[:, n:]
        xp.multiply(gy, gate, out=g_value)
        xp.subtract(1, gate, out=g_gate)
        g_gate *= value
        g_gate *= g_value
        if self._activation is functions.tanh:
            g_value *= 1 - value * value
        gradients = {}
        if indexes[0] < first:
            gx, start = g.dot(W), 0
            for i in range(first):
                width = self.inputs[i].shape[1]
                gradients[i] = gx[:, start:start + width]
                start += width
        if {first, first + 1} & set(indexes):
            gW = g.T.dot(x)
            gradients[first], gradients[first + 1] = gW[:n], gW[n:]
        if indexes[-1] >= first + 2:
            gb, = quick_apply(RowSum(), (chainer.Variable(g, requires_grad=False),))
            gradients[first + 2], gradients[first + 3] = gb.array[:n], gb.array[n:]
        return gradients


def _composed(parts, parameters, activation):
    """The same in nodes of Chainer's own."""
    x = functions.concat(parts, axis=1)
    parameters = [functions.cast(parameter, x.dtype) for parameter in parameters]
    biases = parameters[2:] or (None, None)
    gate, value = (functions.linear(x, W, b) for W, b in zip(parameters[:2], biases))
    return functions.sigmoid(gate) * activation(value)


def gated_linear(parts, gate, value, activation=functions.identity):
    """Compute ``y[i] = sigmoid(W_g x[i] + b_g) * activation(W_v x[i] + b_v)`` in one node.

    Both maps are one GEMM. Differentiable to any order.

    Args:
        parts (sequence of Variable or array): (n_rows, n) each, x's columns side by side.
        gate, value (sequence): W, (n_out, n_in), and b, (n_out,), or None in both.
        activation (callable): one of `ACTIVATIONS`, ``chainer.functions.identity`` or ``tanh``.

    Returns:
        Variable: (n_rows, n_out), of x's dtype.

    Raises:
        ValueError: another activation, one bias without the other, or shapes that do not fit.

    Note:
        Deterministic; does not synchronise.

    Source:
        Li et al. 2015 (arXiv:1511.05493), equation 7, before the sum.
    """
    if activation not in ACTIVATIONS:
        raise ValueError('activation: expected chainer.functions.identity or tanh, got %r'
                         % (activation,))
    if (gate[1] is None) != (value[1] is None):
        raise ValueError('gate, value: expected a bias in both or in none')
    n_out, n_in = len(gate[0]), sum(part.shape[1] for part in parts)
    for name, (W, b) in (('gate', gate), ('value', value)):
        if W.shape != (n_out, n_in) or b is not None and b.shape != (n_out,):
            raise ValueError('%s: expected shapes %s and %s, got %s and %s' % (
                name, (n_out, n_in), (n_out,), W.shape, None if b is None else b.shape))
    inputs = list(parts) + [gate[0], value[0]]
    if gate[1] is not None:
        inputs += [gate[1], value[1]]
    return GatedLinear(len(parts), activation).apply(inputs)[0]
