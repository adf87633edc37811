"""A step of a gated recurrent unit as one node."""

from collections.abc import Sequence

import numpy

from chainer import functions, Variable
from chainer.backends import cuda
from chainer.types import NdArray

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.cuda.partial_sums import shared
from chainer_bspmm.ops.elementwise import concat, SIGMOID, sigmoid
from chainer_bspmm.ops.gates.launches import gated_step_backward, gated_step_forward
from chainer_bspmm.ops.layer_end import column_sums
from chainer_bspmm.ops.node import AccumulateInPlace, FusedNode
from chainer_bspmm.sparse import check


class GRUStep(AccumulateInPlace, FusedNode):
    """Node of :func:`gru_step`; inputs are x, message, the state, then W and b of each layer.

    On a GPU it is one kernel, or a few GEMMs where the weights do not fit or cuBLAS is faster.
    `state` is ``'x'`` if the state is x and thus not an input, ``'given'`` if it is an input, or
    None.
    """

    def __init__(self, state):
        self._state = state

    def _output(self, inputs):
        x, message, state, pairs = self._split(
            [array.astype(inputs[0].dtype, copy=False) for array in inputs]
        )
        whole = gated_step_forward(x, message, state, pairs, True)
        self._is_whole = whole is not None
        if self._is_whole:
            y, self._saved = whole
            return y
        # One GEMM applies the layers of the input, one the layers of the state. Blocks of columns
        # of `sums` belong to the candidate h, the update gate z and the reset gate r.
        W, U = self._joined(pairs)
        both = concat((x, message), axis=1)
        sums = dot(both, W.T)
        if state is None:
            h, z, y = _first_step(sums, pairs[0][1], pairs[1][1])
            self._saved = both, h, z
            return y
        by_state = None if U is None else dot(state, U.T)
        b_h, b_z, b_r, c_h, c_z, c_r = [b for _, b in pairs]
        z, r, reset_state = _gates(sums, by_state, b_z, b_r, c_z, c_r, state)
        U_h = pairs[3][0]
        h, y = _candidate(sums, dot(reset_state, U_h.T), b_h, c_h, z, state)
        self._saved = both, h, z, r, reset_state
        return y

    def _joined(self, pairs):
        """Return the weights of the input and of the state, each joined; None if there are none.

        If the state is x, W_z and U_z have the same input, and so have W_r and U_r, so their sums
        are weights of the input. Float16 is left out, because it may not hold such a sum.
        """
        W_h, W_z, *rest = [weight for weight, _ in pairs]
        if not rest:
            return concat([W_h, W_z]), None
        W_r, _, U_z, U_r = rest
        if self._state == 'x' and W_h.dtype != numpy.float16:
            return _with_state(W_h, W_z, W_r, U_z, U_r), None
        return concat([W_h, W_z, W_r]), concat([U_z, U_r])

    def _split(self, inputs):
        """Return x, message, state or None, and the (W, b) pairs."""
        x, message, *rest = inputs
        state = None
        if self._state == 'x':
            state = x
        elif self._state == 'given':
            state = rest.pop(0)
            if state is x:  # another variable of the same array has a separate gradient
                state = state.view()
        return x, message, state, list(zip(rest[::2], rest[1::2]))

    def _gradients(self, inputs, gy, indexes):
        # Weights are joined anew, because Chainer's own nodes, too, use their values of now.
        x, message, state, pairs = self._split(
            [array.astype(gy.dtype, copy=False) for array in inputs]
        )
        if self._is_whole:
            first = 2 + (self._state == 'given')
            dtypes = [inputs[i].dtype if i in indexes else None for i in range(first, len(inputs))]
            gx, g_message, g_state, parameters = gated_step_backward(
                x, message, state, pairs, self._saved, gy, is_tanh=True, dtypes=dtypes
            )
            return [gx, g_message, *([g_state] if first == 3 else []), *parameters]
        both, h, z = self._saved[:3]
        W, U = self._joined(pairs)
        n = gy.shape[1]
        if state is None:
            g = _first_step_gradient(gy, h, z)
            g_state = None
            gW = shared(dot(g.T, both), 2)
        else:
            r, reset_state = self._saved[3:]
            g = _candidate_gradient(gy, h, z, state)
            g_h, g_zr = g[:, :n], g[:, n:]
            g_state = _gates_gradient(dot(g_h, pairs[3][0]), gy, z, r, state, g)
            if U is not None:
                g_state = dot(g_zr, U, to=g_state)
            gW = dot(g.T, both)
            gU = gW[n:, :n].copy() if self._state == 'x' else dot(g_zr.T, state)
            gW = [*shared(gW, 3), *shared(dot(g_h.T, reset_state)), *shared(gU, 2)]
        # Equal gradients of W and U, and of their biases, are separate arrays, because optimizer
        # hooks write to them.
        n_copies = 1 if state is None else 2
        gb = column_sums(g, len(gW) // n_copies, n_copies)
        parameters = [array for pair in zip(gW, gb, strict=True) for array in pair]
        n_in = x.shape[1]
        gx = dot(g, W[:, :n_in], to=g_state if self._state == 'x' else None)
        g_message = dot(g, W[:, n_in:])
        return [gx, g_message, *([g_state] if self._state == 'given' else []), *parameters]

    def _composed(self, *inputs):
        x, message, state, pairs = self._split(inputs)
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


# The steps between the GEMMs; on a GPU each is one launch instead of about ten. `sums` are the
# results of the layers of x and message without biases, (n_nodes, 2 or 3 times H).


def _kernel(name, inputs, outputs, operation):
    return cuda.elementwise(inputs, outputs, operation, 'bspmm_' + name, preamble=SIGMOID)


def _with_state(W_h, W_z, W_r, U_z, U_r):
    """Return W_h, W_z and W_r joined, with U_z and U_r added to their first columns."""
    n, width = W_h.shape
    if not launch.on_gpu(W_h):
        W = concat([W_h, W_z, W_r])
        W[n : 2 * n, :n] += U_z
        W[2 * n :, :n] += U_r
        return W
    W = cuda.cupy.empty((3 * n, width), W_h.dtype)
    return _kernel(
        'gru_weights',
        'raw T W_h, raw T W_z, raw T W_r, raw T U_z, raw T U_r, int32 n, int32 width',
        'T W',
        """
        ptrdiff_t block = i / width / n, at = i - block * n * width, column = i % width;
        if (block == 0) {
          W = W_h[at];
        } else {
          W = block == 1 ? W_z[at] : W_r[at];
          if (column < n) {
            ptrdiff_t of_state = at / width * n + column;
            W += block == 1 ? U_z[of_state] : U_r[of_state];
          }
        }""",
    )(W_h, W_z, W_r, U_z, U_r, n, width, W)


def _first_step(sums, b_h, b_z):
    """Return h, z and the result ``z * h`` of a step without a state."""
    n = b_h.size
    if not launch.on_gpu(b_h):
        h = numpy.tanh(sums[:, :n] + b_h)
        z = sigmoid(sums[:, n:], b_z)
        return h, z, z * h
    h, z, y = (cuda.cupy.empty((len(sums), n), sums.dtype) for _ in range(3))
    return _kernel(
        'gru_first_step',
        'raw T sums, raw T b_h, raw T b_z, int32 n',
        'T h, T z, T y',
        """
        ptrdiff_t row = i / n, at = i % n, start = row * 2 * n + at;
        h = tanh(sums[start] + b_h[at]);
        z = SIGMOID(sums[start + n] + b_z[at]);
        y = z * h""",
    )(sums, b_h, b_z, n, h, z, y)


def _gates(sums, by_state, b_z, b_r, c_z, c_r, state):
    """Return z, r and ``r * state``.

    `by_state`: results of the state's layers for z and r; None if they are part of `sums`.
    """
    n = state.shape[1]
    if not launch.on_gpu(b_z):
        of_gates = sums[:, n:]
        if by_state is not None:
            by_state += of_gates
            of_gates = by_state
        z = sigmoid(of_gates[:, :n], b_z + c_z)
        r = sigmoid(of_gates[:, n:], b_r + c_r)
        return z, r, r * state
    inputs = 'T state, raw T sums, raw T b_z, raw T b_r, raw T c_z, raw T c_r, int32 n'
    operands = state, sums, b_z, b_r, c_z, c_r, n
    name, second, of_z, of_r = 'gru_gates', '', '', ''
    if by_state is not None:
        inputs += ', raw T by_state'
        operands = *operands, by_state
        name += '_by_state'
        second = 'ptrdiff_t second = row * 2 * n + at;'
        of_z, of_r = '+ by_state[second]', '+ by_state[second + n]'
    return _kernel(
        name,
        inputs,
        'T z, T r, T reset_state',
        """
        ptrdiff_t row = i / n, at = i %% n, start = row * 3 * n + at; %s
        z = SIGMOID(sums[start + n] + b_z[at] %s + c_z[at]);
        r = SIGMOID(sums[start + 2 * n] + b_r[at] %s + c_r[at]);
        reset_state = r * state"""
        % (second, of_z, of_r),
    )(*operands)


def _candidate(sums, by_reset_state, b_h, c_h, z, state):
    """Return h and the result ``state + z * (h - state)``."""
    n = state.shape[1]
    if not launch.on_gpu(b_h):
        h = by_reset_state
        h += sums[:, :n]
        h += b_h + c_h
        numpy.tanh(h, out=h)
        return h, state + z * (h - state)
    return _kernel(
        'gru_candidate',
        'T by_reset_state, T z, T state, raw T sums, raw T b_h, raw T c_h, int32 n',
        'T h, T y',
        """
        ptrdiff_t row = i / n, at = i % n;
        h = tanh(sums[row * 3 * n + at] + b_h[at] + by_reset_state + c_h[at]);
        y = state + z * (h - state)""",
    )(by_reset_state, z, state, sums, b_h, c_h, n)


def _first_step_gradient(gy, h, z):
    """Return the gradient with respect to `sums` of :func:`_first_step`."""
    n_rows, n = gy.shape
    if not launch.on_gpu(gy):
        g = numpy.empty((n_rows, 2 * n), gy.dtype)
        g[:, :n] = gy * z * (1 - h * h)
        g[:, n:] = gy * h * z * (1 - z)
        return g
    g = cuda.cupy.empty((n_rows, 2 * n), gy.dtype)
    _kernel(
        'gru_first_step_gradient',
        'T gy, T h, T z, int32 n',
        'raw T g',
        """
        ptrdiff_t start = i / n * 2 * n + i % n;
        g[start] = gy * z * ((T)1 - h * h);
        g[start + n] = gy * h * z * ((T)1 - z)""",
    )(gy, h, z, n, g)
    return g


def _candidate_gradient(gy, h, z, state):
    """Return the gradient with respect to `sums`; :func:`_gates_gradient` writes r's part."""
    n_rows, n = gy.shape
    if not launch.on_gpu(gy):
        g = numpy.empty((n_rows, 3 * n), gy.dtype)
        g[:, :n] = gy * z * (1 - h * h)
        g[:, n : 2 * n] = gy * (h - state) * z * (1 - z)
        return g
    g = cuda.cupy.empty((n_rows, 3 * n), gy.dtype)
    _kernel(
        'gru_candidate_gradient',
        'T gy, T h, T z, T state, int32 n',
        'raw T g',
        """
        ptrdiff_t start = i / n * 3 * n + i % n;
        g[start] = gy * z * ((T)1 - h * h);
        g[start + n] = gy * (h - state) * z * ((T)1 - z)""",
    )(gy, h, z, state, n, g)
    return g


def _gates_gradient(g_reset_state, gy, z, r, state, g):
    """Write r's part of g; return a part of the state's gradient.

    The state's gradient still lacks the part that comes through the layers of z and r.
    """
    n = gy.shape[1]
    if not launch.on_gpu(gy):
        g[:, 2 * n :] = g_reset_state * state * r * (1 - r)
        return gy - gy * z + g_reset_state * r
    g_state = cuda.cupy.empty(gy.shape, gy.dtype)
    _kernel(
        'gru_gates_gradient',
        'T g_reset_state, T gy, T z, T r, T state, int32 n',
        'T g_state, raw T g',
        """
        ptrdiff_t start = i / n * 3 * n + i % n;
        g[start + 2 * n] = g_reset_state * state * r * ((T)1 - r);
        g_state = gy - gy * z + g_reset_state * r""",
    )(g_reset_state, gy, z, r, state, n, g_state, g)
    return g_state


def gru_step(
    x: Variable | NdArray,
    message: Variable | NdArray,
    state: Variable | NdArray | None,
    parameters: Sequence,
) -> Variable:
    """Take a step of a gated recurrent unit whose input is the rows of ``x`` and ``message``.

    ``z = sigmoid(W_z [x; m] + b_z + U_z s + c_z)``, ``r = sigmoid(W_r [x; m] + b_r + U_r s +
    c_r)``, ``h = tanh(W [x; m] + b + U (r * s) + c)``; the result is ``(1 - z) * s + z * h``, or
    ``z * h`` without a state, where U and r are not used. One node of the computational graph,
    differentiable to any order.

    Args:
        x (Variable or array): (n_nodes, C) float16, float32 or float64.
        message (Variable or array): (n_nodes, M) of x's dtype.
        state (Variable, array or None): (n_nodes, H) s, of x's dtype.
        parameters (sequence): (weight, bias) of W, W_z, and with a state of W_r, U, U_z, U_r.
            W are (H, C + M), U are (H, H), biases are (H,). All are converted to x's dtype.

    Returns:
        Variable: (n_nodes, H), of x's dtype.

    Raises:
        TypeError: x is not an array of floats.
        ValueError: a shape or the number of parameters does not fit.

    Source:
        Cho et al. 2014 (arXiv:1409.1259), in the form of ``chainer.links.StatefulGRU``.
    """
    check.floating('x', x)
    n_pairs = 2 if state is None else 6
    if len(parameters) != n_pairs:
        text = 'parameters: expected %d pairs %s a state, got %d'
        raise ValueError(text % (n_pairs, 'without' if state is None else 'with', len(parameters)))
    n_out = parameters[0][0].shape[0]
    n_in = x.shape[-1] + message.shape[-1]
    if x.ndim != 2 or message.shape[:-1] != x.shape[:1]:
        text = 'message: expected a row for each row of x, got shapes %s and %s'
        raise ValueError(text % (message.shape, x.shape))
    if state is not None and state.shape != (len(x), n_out):
        text = 'state: expected shape %s, got %s; reset_state() clears the state of another batch'
        raise ValueError(text % ((len(x), n_out), state.shape))
    for i, (W, b) in enumerate(parameters):
        name = 'parameters[%d]' % i
        shape = (n_out, n_in if i < 3 else n_out)
        expected = {name + '[0]': (W, shape), name + '[1]': (b, shape[:1])}
        check.shapes('x, message and parameters[0][0]', expected)
    inputs = [x, message]
    kind = None
    if state is x:
        kind = 'x'  # x and the state are one input, with one gradient
    elif state is not None:
        kind = 'given'
        inputs.append(state)
    for pair in parameters:
        inputs += pair
    return GRUStep(kind).apply(inputs)[0]
