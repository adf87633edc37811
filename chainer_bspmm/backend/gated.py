"""Gates and steps of gated recurrent units on CuPy arrays: gated_step.cu and gated_weights.cu."""

import math

import numpy

from chainer.backends import cuda

from chainer_bspmm.backend import gpu
from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import policy
from chainer_bspmm.cuda.launch import address_bits
from chainer_bspmm.cuda.launch import arithmetic
from chainer_bspmm.cuda.launch import contiguous
from chainer_bspmm.cuda.launch import device_of
from chainer_bspmm.cuda.launch import run


def gated_step(x, message, state, parameters, is_tanh):
    given = [x, message, state, *(array for pair in parameters for array in pair)]
    given = [array for array in given if array is not None]
    if x.dtype.char not in kernels.STORAGE or any(array.dtype != x.dtype for array in given):
        return None
    with device_of(x):
        x, message, state, parameters = _contiguous(x, message, state, parameters)
        widths = _widths(x, message, parameters)
        matrices, biases = _by_map(parameters)
        plan = _plan(x, message, state, (*matrices, *biases), widths, False)
        if plan is None or _plan(x, message, state, matrices, widths, True) is None:
            return None
        y = cuda.cupy.empty((len(x), widths[2]), x.dtype)
        # Of the candidate, the update gate, the reset gate, and that times the state.
        kept = cuda.cupy.empty((2 if state is None else 4, *y.shape), x.dtype)
        h, z, r, reset = (*kept, None, None)[:4]
        arrays = x, message, state, *matrices, *biases, y, h, z, r, reset
        run('gated_step', x, plan, *arrays, *plan.arguments, TANH=is_tanh)
    return y, kept


def gated_step_grad(x, message, state, parameters, kept, gy, is_tanh, dtypes):
    with device_of(x):
        x, message, state, parameters = _contiguous(x, message, state, parameters)
        gy = contiguous(gy)
        widths = _widths(x, message, parameters)
        matrices, _ = _by_map(parameters)
        plan = _plan(x, message, state, (*matrices, gy), widths, True)
        n_maps = 2 + (state is not None)
        g = cuda.cupy.empty((n_maps, len(x), widths[2]), x.dtype)
        gx = cuda.cupy.empty(x.shape, x.dtype)
        gm = None if message is None else cuda.cupy.empty(message.shape, x.dtype)
        gs = None if state is None or state is x else cuda.cupy.empty(state.shape, x.dtype)
        h, z, r, reset = (*kept, None, None)[:4]
        arrays = gy, state, h, z, r, *matrices, gx, gm, gs, g
        run('gated_step', x, plan, *arrays, *plan.arguments, TANH=is_tanh)
        of_parameters = [None] * len(dtypes)
        if any(dtypes):
            of_parameters = _weights(g, x, message, state, reset, widths, dtypes)
    return gx, gm, gs, of_parameters


def _weights(g, x, message, state, reset, widths, dtypes):
    """Return the gradients of the parameters that have a dtype, in the order W, b, W, b, ..."""
    n_maps, has_state, n_out = len(g), state is not None, widths[2]
    plan = policy.gated_weights_launch(
        len(x),
        widths,
        has_state,
        x is state,
        _vector(widths, (g, x, message, state, reset)),
        numpy.dtype(arithmetic(x.dtype)).itemsize,
        kernels.device(x.data.device_id),
    )
    W, U = (n_out, widths[0] + widths[1]), (n_out, n_out)
    sizes = math.prod(W), has_state * math.prod(U), n_out
    partials = cuda.cupy.empty((plan.grid[1], n_maps * sum(sizes)), arithmetic(x.dtype))
    run('gated_weights', x, plan, g, x, message, state, reset, partials, *plan.arguments)
    parts = []
    for kind in range(1 + has_state):  # W, U
        for start in range(0, partials.shape[1], sum(sizes)):
            parts.append((start + kind * sizes[0], (W, U)[kind]))
            parts.append((start + sizes[0] + sizes[1], (n_out,)))
    wanted = [i for i, dtype in enumerate(dtypes) if dtype is not None]
    sums = gpu.sum_partials(partials, [(*parts[i], dtypes[i]) for i in wanted])
    gradients = [None] * len(dtypes)
    for i, gradient in zip(wanted, sums):
        gradients[i] = gradient
    return gradients


def _contiguous(x, message, state, parameters):
    """Return C-contiguous arrays; a state that is x stays the same array as it."""
    rows = contiguous(x)
    state = rows if state is x else contiguous(state)
    return rows, contiguous(message), state, [tuple(map(contiguous, pair)) for pair in parameters]


def _widths(x, message, parameters):
    return x.shape[1], 0 if message is None else message.shape[1], len(parameters[0][0])


def _by_map(parameters):
    """Return W and U of h, z and r, then their biases; None for what is not there."""
    n_maps = 2 if len(parameters) == 2 else 3
    missing = [(None, None)] * (3 - n_maps)
    pairs = [*parameters[:n_maps], *missing, *parameters[n_maps:], *[(None, None)] * 3][:6]
    return [W for W, _ in pairs], [b for _, b in pairs]


def _plan(x, message, state, others, widths, is_gradient):
    if not (len(x) and widths[0] and widths[2]):
        return None
    return policy.gated_launch(
        len(x),
        widths,
        state is not None,
        x is state,
        is_gradient,
        _vector(widths, (x, message, state, *others)),
        numpy.dtype(arithmetic(x.dtype)).itemsize,
        kernels.device(x.data.device_id),
    )


def _vector(widths, arrays):
    """Return how many elements the kernels can copy at once."""
    itemsize, bits = arrays[0].itemsize, address_bits(*arrays)
    return min(policy.vector_width(math.gcd(*widths), itemsize, bits), policy.QUAD)
