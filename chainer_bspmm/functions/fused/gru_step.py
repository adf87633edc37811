"""A step of a gated recurrent unit as one node."""

import chainer
from chainer import function_node
from chainer import functions

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.fused import gru_elementwise
from chainer_bspmm.functions.fused.concat import split
from chainer_bspmm.functions.fused.concat import concat
from chainer_bspmm.functions.node import AccumulateInPlace


class GRUStep(AccumulateInPlace, function_node.FunctionNode):
    """Inputs x, message, state where there is one, then W and b of every linear layer."""

    def __init__(self, has_state):
        self._has_state = has_state

    def forward(self, inputs):
        self.retain_inputs(tuple(range(len(inputs))))
        x, message, state, pairs = self._split(
            [array.astype(inputs[0].dtype, copy=False) for array in inputs]
        )
        # One GEMM for the layers of the input, one for those of the state: the candidate h, the
        # update gate z and the reset gate r lie side by side.
        W = concat([W for W, _ in pairs[:3]])
        both = concat((x, message), axis=1)
        gates = dot(both, W.T)
        if not self._has_state:
            h, z, y = gru_elementwise.first(gates, pairs[0][1], pairs[1][1])
            self._kept = both, W, h, z
            return (y,)
        U = concat([U for U, _ in pairs[4:]])
        biases = [b for _, b in pairs]
        z, r, remembered = gru_elementwise.opened(
            gates, dot(state, U.T), biases[1], biases[2], biases[4], biases[5], state
        )
        h, y = gru_elementwise.closed(
            gates, dot(remembered, pairs[3][0].T), biases[0], biases[3], z, state
        )
        self._kept = both, W, h, z, r, U, remembered, pairs[3][0]
        return (y,)

    def backward(self, indexes, grad_outputs):
        inputs = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            # Gradients of gradients are rare: they come from the same formula in Chainer's nodes.
            # One variable may be given twice, as features and as state: each use is one of its own.
            inputs = [functions.identity(variable) for variable in inputs]
            return tuple(
                chainer.grad(
                    [_composed(*self._split(inputs))],
                    [inputs[i] for i in indexes],
                    grad_outputs,
                    enable_double_backprop=True,
                )
            )
        arrays = self._gradients([variable.array for variable in inputs], grad_outputs[0].array)
        return tuple(
            chainer.Variable(arrays[i].astype(inputs[i].dtype, copy=False), requires_grad=False)
            for i in indexes
        )

    def _split(self, inputs):
        """Return x, message, state or None, and the (W, b) pairs."""
        first = 2 + self._has_state
        parameters = inputs[first:]
        return (
            inputs[0],
            inputs[1],
            inputs[2] if self._has_state else None,
            list(zip(parameters[::2], parameters[1::2])),
        )

    def _gradients(self, inputs, gy):
        """Return the gradients of all inputs."""
        both, W, h, z = self._kept[:4]
        n = gy.shape[1]
        if not self._has_state:
            g = gru_elementwise.first_gradient(gy, h, z)
            by_state, gU = [], []
        else:
            r, U, remembered, U_h = self._kept[4:]
            state = inputs[2].astype(gy.dtype, copy=False)
            # g: of the layers' sums, side by side; g_h, g_zr: its parts, each contiguous.
            g, g_h = gru_elementwise.closed_gradient(gy, h, z, state)
            g_zr, g_state = gru_elementwise.opened_gradient(dot(g_h, U_h), gy, z, r, state, g)
            g_state += dot(g_zr, U)
            by_state = [g_state]
            g_zr = dot(g_zr.T, state)
            gU = [dot(g_h.T, remembered), g_zr[:n], g_zr[n:]]
        gW, gb = dot(g.T, both), backend.row_sum(g)
        # Biases of W and U have equal gradients, but not one array: optimizer hooks write to it.
        gc = gb.copy() if gU else gb
        gradients = [_parts(array, n) for array in (gW, gb, gc)]
        parameters = [
            array for pair in zip(gradients[0] + gU, gradients[1] + gradients[2]) for array in pair
        ]
        return [*split(dot(g, W), inputs[0].shape[1]), *by_state, *parameters]


def _parts(array, n):
    return [array[i : i + n] for i in range(0, len(array), n)]


def _composed(x, message, state, pairs):
    """The step in nodes of Chainer's own."""
    both = functions.concat((x, message), axis=1)
    pairs = [[functions.cast(parameter, x.dtype) for parameter in pair] for pair in pairs]
    if state is None:
        h, z = (functions.linear(both, *pair) for pair in pairs)
        return functions.sigmoid(z) * functions.tanh(h)
    h, z, r = (functions.linear(both, *pair) for pair in pairs[:3])
    r = functions.sigmoid(r + functions.linear(state, *pairs[5]))
    z = functions.sigmoid(z + functions.linear(state, *pairs[4]))
    h = functions.tanh(h + functions.linear(r * state, *pairs[3]))
    return state + z * (h - state)


def gru_step(x, message, state, parameters):
    """Take a step of a gated recurrent unit whose input is ``x`` and ``message`` side by side.

    ``z = sigmoid(W_z [x; m] + b_z + U_z s + c_z)``, ``r = sigmoid(W_r [x; m] + b_r + U_r s +
    c_r)``, ``h = tanh(W [x; m] + b + U (r * s) + c)``; the result is ``(1 - z) * s + z * h``, or
    ``z * h`` without a state, where U and r take no part. One node of the computational graph;
    differentiable to any order.

    Args:
        x (Variable or array): (n_nodes, C) float16, float32 or float64.
        message (Variable or array): (n_nodes, M) of x's dtype.
        state (Variable, array or None): (n_nodes, H) s, of x's dtype.
        parameters (sequence): (weight, bias) of W, W_z, and with a state of W_r, U, U_z, U_r.
            Weights are (H, C + M), those of U (H, H), biases (H,); converted to x's dtype.

    Returns:
        Variable: (n_nodes, H), of x's dtype.

    Raises:
        ValueError: a shape does not fit.

    Source:
        Cho et al. 2014 (arXiv:1409.1259), in the form of ``chainer.links.StatefulGRU``.
    """
    n_out, n_in = parameters[0][0].shape[0], x.shape[-1] + message.shape[-1]
    if x.ndim != 2 or message.shape[:-1] != x.shape[:1]:
        raise ValueError(
            'message: expected a row for each row of x, got shapes %s and %s'
            % (message.shape, x.shape)
        )
    if state is not None and state.shape != (len(x), n_out):
        raise ValueError(
            'state: expected shape %s, got %s; reset_state() forgets that of another '
            'batch' % ((len(x), n_out), state.shape)
        )
    for i, (W, b) in enumerate(parameters):
        shape = n_out, n_in if i < 3 else n_out
        if W.shape != shape or b.shape != shape[:1]:
            raise ValueError(
                'parameters[%d]: expected shapes %s and %s, got %s and %s'
                % (i, shape, shape[:1], W.shape, b.shape)
            )
    inputs = [x, message] + ([] if state is None else [state])
    for pair in parameters:
        inputs += pair
    return GRUStep(state is not None).apply(inputs)[0]
