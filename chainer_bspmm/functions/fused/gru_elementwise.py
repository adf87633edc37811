"""What a step of a gated recurrent unit does between its GEMMs, on bare arrays.

One launch each on a GPU, where the arithmetic of a step would else be thirty. `gates` holds the
sums of the layers side by side: those of the candidate h, of the update gate z and, where there is
a state, of the reset gate r; without their biases.
"""

import numpy

from chainer.backends import cuda

from chainer_bspmm.functions.fused.sigmoid import SIGMOID
from chainer_bspmm.functions.fused.sigmoid import sigmoid


def first(gates, b_h, b_z):
    """Return h, z and the result ``z * h`` of a step without a state."""
    n = b_h.size
    if isinstance(gates, numpy.ndarray):
        h = numpy.tanh(gates[:, :n] + b_h)
        z = sigmoid(gates[:, n:], b_z)
        return h, z, z * h
    h, z, y = (cuda.cupy.empty((len(gates), n), gates.dtype) for _ in range(3))
    return _kernel(
        'gru_first',
        'raw T gates, raw T b_h, raw T b_z, int32 n',
        'T h, T z, T y',
        """
        ptrdiff_t row = i / n, at = i % n, start = row * 2 * n + at;
        h = tanh(gates[start] + b_h[at]);
        z = SIGMOID(gates[start + n] + b_z[at]);
        y = z * h""",
    )(gates, b_h, b_z, n, h, z, y)


def opened(gates, by_state, b_z, b_r, c_z, c_r, state):
    """Return z, r and ``r * state``; by_state: the sums of the state's layers of z and r."""
    n = state.shape[1]
    if isinstance(gates, numpy.ndarray):
        by_state += gates[:, n:]
        z, r = sigmoid(by_state[:, :n], b_z + c_z), sigmoid(by_state[:, n:], b_r + c_r)
        return z, r, r * state
    return _kernel(
        'gru_opened',
        'T state, raw T gates, raw T by_state, raw T b_z, raw T b_r, raw T c_z, raw T c_r, int32 n',
        'T z, T r, T remembered',
        """
        ptrdiff_t row = i / n, at = i % n, start = row * 3 * n + at, second = row * 2 * n + at;
        z = SIGMOID(gates[start + n] + b_z[at] + by_state[second] + c_z[at]);
        r = SIGMOID(gates[start + 2 * n] + b_r[at] + by_state[second + n] + c_r[at]);
        remembered = r * state""",
    )(state, gates, by_state, b_z, b_r, c_z, c_r, n)


def closed(gates, by_remembered, b_h, c_h, z, state):
    """Return h and the result ``state + z * (h - state)``."""
    n = state.shape[1]
    if isinstance(gates, numpy.ndarray):
        h = by_remembered
        h += gates[:, :n]
        h += b_h + c_h
        numpy.tanh(h, out=h)
        return h, state + z * (h - state)
    return _kernel(
        'gru_closed',
        'T by_remembered, T z, T state, raw T gates, raw T b_h, raw T c_h, int32 n',
        'T h, T y',
        """
        ptrdiff_t row = i / n, at = i % n;
        h = tanh(gates[row * 3 * n + at] + b_h[at] + by_remembered + c_h[at]);
        y = state + z * (h - state)""",
    )(by_remembered, z, state, gates, b_h, c_h, n)


def first_gradient(gy, h, z):
    """Return the gradient of `gates` of :func:`first`."""
    n_rows, n = gy.shape
    if isinstance(gy, numpy.ndarray):
        g = numpy.empty((n_rows, 2 * n), gy.dtype)
        g[:, :n] = gy * z * (1 - h * h)
        g[:, n:] = gy * h * z * (1 - z)
        return g
    g = cuda.cupy.empty((n_rows, 2 * n), gy.dtype)
    _kernel(
        'gru_first_gradient',
        'T gy, T h, T z, int32 n',
        'raw T g',
        """
        ptrdiff_t start = i / n * 2 * n + i % n;
        g[start] = gy * z * ((T)1 - h * h);
        g[start + n] = gy * h * z * ((T)1 - z)""",
    )(gy, h, z, n, g)
    return g


def closed_gradient(gy, h, z, state):
    """Return the gradient of `gates`, that of r still to come, and its part of h once more."""
    n_rows, n = gy.shape
    if isinstance(gy, numpy.ndarray):
        g = numpy.empty((n_rows, 3 * n), gy.dtype)
        g_h = gy * z * (1 - h * h)
        g[:, :n] = g_h
        g[:, n : 2 * n] = gy * (h - state) * z * (1 - z)
        return g, g_h
    g = cuda.cupy.empty((n_rows, 3 * n), gy.dtype)
    g_h = cuda.cupy.empty((n_rows, n), gy.dtype)
    _kernel(
        'gru_closed_gradient',
        'T gy, T h, T z, T state, int32 n',
        'T g_h, raw T g',
        """
        ptrdiff_t start = i / n * 3 * n + i % n;
        g_h = gy * z * ((T)1 - h * h);
        g[start] = g_h;
        g[start + n] = gy * (h - state) * z * ((T)1 - z)""",
    )(gy, h, z, state, n, g_h, g)
    return g, g_h


def opened_gradient(g_remembered, gy, z, r, state, g):
    """Complete g, and return its parts of z and r, and the state's gradient but for its layers."""
    n_rows, n = gy.shape
    if isinstance(gy, numpy.ndarray):
        g[:, 2 * n :] = g_remembered * state * r * (1 - r)
        return g[:, n:], gy - gy * z + g_remembered * r
    g_zr = cuda.cupy.empty((n_rows, 2 * n), gy.dtype)
    g_state = cuda.cupy.empty((n_rows, n), gy.dtype)
    _kernel(
        'gru_opened_gradient',
        'T g_remembered, T gy, T z, T r, T state, int32 n',
        'T g_state, raw T g_zr, raw T g',
        """
        ptrdiff_t row = i / n, at = i % n, start = row * 3 * n + at, second = row * 2 * n + at;
        T g_r = g_remembered * state * r * ((T)1 - r);
        g[start + 2 * n] = g_r;
        g_zr[second] = g[start + n];
        g_zr[second + n] = g_r;
        g_state = gy - gy * z + g_remembered * r""",
    )(g_remembered, gy, z, r, state, n, g_state, g_zr, g)
    return g_zr, g_state


def _kernel(name, inputs, outputs, operation):
    return cuda.elementwise(inputs, outputs, operation, 'bspmm_' + name, preamble=SIGMOID)
