"""A step of a gated recurrent unit as one node."""
import chainer
from chainer import backend as chainer_backend
from chainer import function_node
from chainer import functions

from chainer_bspmm.functions.quick import QuickSums
from chainer_bspmm.functions.sigmoid import sigmoid


class GRUStep(QuickSums, function_node.FunctionNode):
    """Inputs x, message, state where there is one, then W and b of every linear layer."""

    def __init__(self, has_state):
        self._has_state = has_state

    def forward(self, inputs):
        self.retain_inputs(tuple(range(len(inputs))))
        xp = chainer_backend.get_array_module(*inputs)
        x, message, state, pairs = self._split(
            [array.astype(inputs[0].dtype, copy=False) for array in inputs])
        n = len(pairs[0][0])
        # One GEMM for the layers of the input, one for those of the state: the candidate h, the
        # update gate z and the reset gate r lie side by side.
        W, b = (xp.concatenate(parts) for parts in zip(*pairs[:3 if self._has_state else 2]))
        both = xp.concatenate((x, message), axis=1)
        gates = both.dot(W.T)
        gates += b
        if not self._has_state:
            h, z = xp.tanh(gates[:, :n]), sigmoid(gates[:, n:])
            self._kept = both, W, h, z
            return z * h,
        U, c = (xp.concatenate(parts) for parts in zip(*pairs[4:]))
        gates[:, n:] += state.dot(U.T)
        opened = sigmoid(gates[:, n:], c)
        z, r = opened[:, :n], opened[:, n:]
        remembered = r * state
        h = gates[:, :n] + remembered.dot(pairs[3][0].T)
        h += pairs[3][1]
        h = xp.tanh(h)
        self._kept = both, W, h, z, r, U, remembered, pairs[3][0]
        return state + z * (h - state),

    def backward(self, indexes, grad_outputs):
        inputs = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            # Gradients of gradients are rare: they come from the same formula in Chainer's nodes.
            # One variable may be given twice, as features and as state: each use is one of its own.
            inputs = [functions.identity(variable) for variable in inputs]
            return tuple(chainer.grad([_composed(*self._split(inputs))],
                                      [inputs[i] for i in indexes], grad_outputs,
                                      enable_double_backprop=True))
        arrays = self._gradients([variable.array for variable in inputs], grad_outputs[0].array)
        return tuple(
            chainer.Variable(arrays[i].astype(inputs[i].dtype, copy=False), requires_grad=False)
            for i in indexes)

    def _split(self, inputs):
        """Return x, message, state or None, and the (W, b) pairs."""
        first = 2 + self._has_state
        parameters = inputs[first:]
        return (inputs[0], inputs[1], inputs[2] if self._has_state else None,
                list(zip(parameters[::2], parameters[1::2])))

    def _gradients(self, inputs, gy):
        """Return the gradients of all inputs."""
        xp = chainer_backend.get_array_module(gy)
        n, n_in = gy.shape[1], inputs[0].shape[1]
        both, W, h, z = self._kept[:4]
        g = xp.empty((len(gy), len(W)), gy.dtype)  # of the layers' sums, side by side
        gh = gy * z
        g[:, :n] = gh * (1 - h * h)
        by_state, gU = [], []
        if self._has_state:
            r, U, remembered, U_h = self._kept[4:]
            state = inputs[2].astype(gy.dtype, copy=False)
            g_remembered = g[:, :n].dot(U_h)
            g[:, n:2 * n] = gy * (h - state) * z * (1 - z)
            g[:, 2 * n:] = g_remembered * state * r * (1 - r)
            by_state = [gy - gh + g_remembered * r + g[:, n:].dot(U)]
            gU = [g[:, :n].T.dot(remembered)] + xp.split(g[:, n:].T.dot(state), 2)
        else:
            g[:, n:] = gy * h * z * (1 - z)
        gx = g.dot(W)
        gW = xp.split(g.T.dot(both), len(W) // n)
        gb = xp.split(g.sum(axis=0), len(W) // n)
        # Biases of W and U have equal gradients, but not one array: optimizer hooks write to it.
        gc = [array.copy() for array in gb[:len(gU)]]
        parameters = [array for pair in zip(gW + gU, gb + gc) for array in pair]
        return [gx[:, :n_in], gx[:, n_in:]] + by_state + parameters


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
        raise ValueError('message: expected a row for each row of x, got shapes %s and %s'
                         % (message.shape, x.shape))
    if state is not None and state.shape != (len(x), n_out):
        raise ValueError('state: expected shape %s, got %s; reset_state() forgets that of another '
                         'batch' % ((len(x), n_out), state.shape))
    for i, (W, b) in enumerate(parameters):
        shape = n_out, n_in if i < 3 else n_out
        if W.shape != shape or b.shape != shape[:1]:
            raise ValueError('parameters[%d]: expected shapes %s and %s, got %s and %s'
                             % (i, shape, shape[:1], W.shape, b.shape))
    inputs = [x, message] + ([] if state is None else [state])
    for pair in parameters:
        inputs += pair
    return GRUStep(state is not None).apply(inputs)[0]
