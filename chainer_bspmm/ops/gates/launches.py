"""Gates and steps of gated recurrent units on CuPy arrays: gated_step.cu and gated_weights.cu."""

import collections
import math

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import gemm, kernels, launch
from chainer_bspmm.cuda.partial_sums import sum_partials
from chainer_bspmm.cuda import plans

# (rows of a block of gated_step, threads that share the elements of a sum). A block has about 256
# threads. It copies all weights, which takes about as long as its work on 8 rows.
GATED_ROWS = ((8, 8), (12, 4), (16, 4), (20, 4), (24, 2), (28, 2), (32, 2))
GATED_COPIES = 8
# (elements of a sum whose weights are a chunk in shared memory, number of such chunks there). If a
# block has a multiprocessor to itself, only copying ahead hides the time that copies take.
GATED_CHUNKS = ((32, 3), (32, 2), (16, 2))
MAX_GATED_BLOCK = 512  # threads; each needs about a hundred registers
# Sizes of gates in float32 that are faster as products, in addition to `gemm.products_are_faster`:
# least widths of the inputs and of the result, and least number of rows. Measured on an H200 in
# steps of RelGCN, whose readout maps 64 channels to as many as the model has units.
WIDE_GATES = (64, 256, 8192), (64, 512, 2048)


@plans.kept
def gated_launch(
    n_rows, widths, has_state, is_same, vector, itemsize, device, is_gradient
) -> plans.Launch | None:
    """Plan gated_step: a block for every few rows. Return None if its weights do not fit.

    `widths` are the widths of x, of the message, which may be 0, and of the result. `is_same`: the
    state is x. `vector`: at most 4 elements. `itemsize`: bytes of the arithmetic dtype.
    """
    n_maps = 2 + has_state
    x, message, out = (-(-width // plans.QUAD) * plans.QUAD for width in widths)
    is_apart = has_state and not is_same  # the state has separate columns
    n_inputs = x + message + is_apart * out
    n_parts = 2 + is_apart  # quads of the gradient's columns that a thread has
    per_thread = 4 if itemsize == 4 else 2  # rows; more of float64 would not fit in registers
    if is_gradient:
        columns = -(-n_inputs // (plans.QUAD * n_parts))
    else:
        columns = out // plans.QUAD

    def longest(pair):
        """Return the time, in rows, of the multiprocessor that has the most blocks."""
        return -(-n_rows // (pair[0] * device.n_sms)) * (pair[0] + GATED_COPIES)

    first = GATED_ROWS.index(min(GATED_ROWS, key=longest))
    for rows, split in GATED_ROWS[first::-1]:  # fewer rows if they do not fit in shared memory
        is_alone = n_rows <= rows * device.n_sms
        threads = columns * rows // per_thread
        while split > 1 and threads * split > MAX_GATED_BLOCK:
            split //= 2
        for chunk, stages in GATED_CHUNKS if is_alone else GATED_CHUNKS[1:]:
            if is_gradient:
                wide = columns * plans.QUAD * n_parts
                row = (n_maps + has_state) * out + plans.QUAD
                weights, sums = stages * chunk * wide, split * rows * wide
                if has_state:
                    sums = max(sums, (stages - 1) * chunk * wide + split * rows * out)
            else:
                row = x + message
                if has_state:
                    row = max(row, 3 * out) if is_same else max(row, 2 * out) + out
                row += plans.QUAD
                weights = stages * n_maps * out * (chunk + plans.QUAD)
                sums = split * rows * n_maps * out
            n_shared = rows * row + has_state * out * (out + plans.QUAD) + max(weights, sums)
            # In the gradient, a row of weights has a thread for every quad.
            enough = n_inputs // plans.QUAD if is_gradient else 1
            if (
                n_shared * itemsize <= device.shared_bytes
                and enough <= threads * split <= MAX_GATED_BLOCK
            ):
                return plans.Launch(
                    (
                        ('VECTOR', vector),
                        *zip(('WIDTH_X', 'WIDTH_M', 'WIDTH_H'), widths),
                        ('STATE', int(has_state)),
                        ('SAME', int(is_same)),
                        ('GRADIENT', int(is_gradient)),
                        ('ROWS', rows),
                        ('PER', per_thread),
                        ('SPLIT', split),
                        ('CHUNK', chunk),
                        ('STAGES', stages),
                        ('THREADS', threads * split),
                    ),
                    (-(-n_rows // rows), 1, 1),
                    (threads * split, 1, 1),
                    n_shared * itemsize,
                    (numpy.int32(n_rows),),
                )
    return None


WEIGHT_BLOCK, WEIGHT_CHUNK = 256, 32  # threads, and rows in shared memory, of gated_weights
WEIGHT_BLOCKS_PER_SM = 2
MIN_WEIGHT_ROWS = 64  # least rows over which a block sums


@plans.kept
def gated_weights_launch(
    n_rows, widths, has_state, is_same, vector, itemsize, device
) -> plans.Launch:
    """Plan gated_weights: ``grid[1]`` blocks for every tile of the gradients share the rows."""
    per_thread = 8 if itemsize == 4 and max(widths) > 32 else 4  # side of its square of elements
    tile = 8 * per_thread
    x, message, out = (-(-width // tile) for width in widths)
    tiles = (2 + has_state) * out * (x + message)
    if has_state:
        tiles += (1 if is_same else 3) * out * out
    parts = max(WEIGHT_BLOCKS_PER_SM * device.n_sms // tiles, 1)
    each = max(-(-n_rows // parts), MIN_WEIGHT_ROWS)
    return plans.Launch(
        (
            ('VECTOR', vector),
            *zip(('WIDTH_X', 'WIDTH_M', 'WIDTH_H'), widths),
            ('STATE', int(has_state)),
            ('SAME', int(is_same)),
            ('PER', per_thread),
        ),
        (tiles, -(-n_rows // each), 1),
        (WEIGHT_BLOCK, 1, 1),
        4 * WEIGHT_CHUNK * tile * itemsize,
        (numpy.int32(n_rows), numpy.int32(each)),
    )


# An array, or None, for each map: the candidate, the update gate and the reset gate.
Gates = collections.namedtuple('Gates', 'h z r', defaults=(None,))
# Rows, (n_rows, H), that the gradient needs; `reset` is r times the state. Without a state, r and
# `reset` are None.
Saved = collections.namedtuple('Saved', 'h z r reset', defaults=(None, None))


def gated_step_forward(x, message, state, parameters, is_tanh):
    """Compute gated rows, or a step of a gated recurrent unit, in one launch.

    Without a state, ``y = sigmoid(W_z v + b_z) * h``, where ``v = [x; message]`` and ``h = W_h v +
    b_h``, or its tanh if `is_tanh`. With a state, which may be x, the step is
    :func:`chainer_bspmm.functions.gru_step`.

    `parameters` are (W, b) of h and z; with a state followed by (W, b) of r, then (U, c) of h, z
    and r. Biases may be None.

    Returns y, (n_rows, H), and the `Saved` for :func:`gated_step_backward`. Returns None on a CPU,
    for arrays without elements or of several dtypes, for weights that do not fit in shared memory
    (widths of about 128 and more), and where cuBLAS is faster.
    """
    if not launch.on_gpu(x):
        return None
    arrays = x, message, state, *(array for pair in parameters for array in pair)
    dtypes = {array.dtype for array in arrays if array is not None}
    if x.dtype.char not in kernels.STORAGE or len(dtypes) > 1:
        return None
    with launch.device_of(x):
        x, message, state, parameters = _contiguous(x, message, state, parameters)
        widths = _widths(x, message, parameters)
        W, U, b, c = _by_map(parameters)
        if not (len(x) and widths[0] and widths[2]):
            return None
        if _are_products(x, widths, len(parameters)):
            return None
        rows = x, message, state
        plan = _planned(gated_launch, *rows, (*W, *U, *b, *c), widths, is_gradient=False)
        if not (plan and _planned(gated_launch, *rows, (*W, *U), widths, is_gradient=True)):
            return None
        y = cuda.cupy.empty((len(x), widths[2]), x.dtype)
        saved = Saved(*cuda.cupy.empty((2 if state is None else 4, *y.shape), x.dtype))
        launch.run('gated_step', x, plan, *rows, *W, *U, *b, *c, y, *saved, TANH=is_tanh)
    return y, saved


def _are_products(x, widths, n_matrices):
    """Return whether cuBLAS computes the maps faster; `n_matrices` is 2 without a state."""
    n_in = widths[0] + widths[1]
    n_out = widths[2]
    if gemm.products_are_faster(x.dtype, len(x), n_in, n_out, n_matrices):
        return True
    if x.dtype.char != 'f' or n_matrices > 2:
        return False
    return any(
        n_in >= inputs and n_out >= outputs and len(x) >= n_rows
        for inputs, outputs, n_rows in WIDE_GATES
    )


def gated_step_backward(x, message, state, parameters, saved, gy, is_tanh, dtypes):
    """Return the gradients of :func:`gated_step_forward`, by two launches and `sum_partials`.

    Returns the gradients with respect to x, message, state, and a list for the parameters. If the
    state is x, its gradient is None, and x's is the sum of both. `dtypes` has the parameters'
    dtypes in the order W, b, W, b, ...; where one is None, the gradient is None.
    """
    with launch.device_of(x):
        x, message, state, parameters = _contiguous(x, message, state, parameters)
        gy = launch.contiguous(gy)
        widths = _widths(x, message, parameters)
        W, U, _, _ = _by_map(parameters)
        plan = _planned(gated_launch, x, message, state, (*W, *U, gy), widths, is_gradient=True)
        n_maps = 2 + (state is not None)
        g = cuda.cupy.empty((n_maps, len(x), widths[2]), x.dtype)
        gx = cuda.cupy.empty(x.shape, x.dtype)
        gm = None if message is None else cuda.cupy.empty(message.shape, x.dtype)
        gs = None if state is None or state is x else cuda.cupy.empty(state.shape, x.dtype)
        gates = saved.h, saved.z, saved.r
        launch.run('gated_step', x, plan, gy, state, *gates, *W, *U, gx, gm, gs, g, TANH=is_tanh)
        of_parameters = [None] * len(dtypes)
        if any(dtypes):
            of_parameters = _weights(g, x, message, state, saved.reset, widths, dtypes)
    return gx, gm, gs, of_parameters


def _weights(g, x, message, state, reset, widths, dtypes):
    """Return the gradients of the parameters that have a dtype, in the order W, b, W, b, ..."""
    n_maps, _, n_out = g.shape
    has_state = state is not None
    plan = _planned(gated_weights_launch, x, message, state, (g, reset), widths)
    # A row of partial sums holds, for every map, its W, its U if there is a state, and its bias.
    W = n_out, widths[0] + widths[1]
    U = n_out, n_out if has_state else 0
    first_U = math.prod(W)
    first_bias = first_U + math.prod(U)
    n_of_map = first_bias + n_out
    partials = cuda.cupy.empty((plan.grid[1], n_maps * n_of_map), launch.arithmetic(x.dtype))
    launch.run('gated_weights', x, plan, g, x, message, state, reset, partials)
    starts = range(0, n_maps * n_of_map, n_of_map)
    parts = []
    for start in starts:
        parts += [(start, W), (start + first_bias, (n_out,))]
    if has_state:  # the two biases of a map have the same gradient
        for start in starts:
            parts += [(start + first_U, U), (start + first_bias, (n_out,))]
    needed = [i for i, dtype in enumerate(dtypes) if dtype is not None]
    # Sums are written in the dtype of their parameter if the kernel calculates in that of the
    # partial sums. The node converts others, such as those of float64 parameters if x is float32.
    arithmetic = launch.arithmetic(x.dtype)
    written = [dtypes[i] if launch.arithmetic(dtypes[i]) == arithmetic else x.dtype for i in needed]
    sums = sum_partials(partials, [(*parts[i], dtype) for i, dtype in zip(needed, written)])
    gradients = [None] * len(dtypes)
    for i, gradient in zip(needed, sums):
        gradients[i] = gradient
    return gradients


def _contiguous(x, message, state, parameters):
    """Return C-contiguous arrays; if the state is x, both are one array in the result, too."""
    rows = launch.contiguous(x)
    state = rows if state is x else launch.contiguous(state)
    return (
        rows,
        launch.contiguous(message),
        state,
        [tuple(map(launch.contiguous, pair)) for pair in parameters],
    )


def _widths(x, message, parameters):
    return x.shape[1], 0 if message is None else message.shape[1], len(parameters[0][0])


def _by_map(parameters):
    """Return `Gates` of W, U, b and c, given the parameters of :func:`gated_step_forward`."""
    n_maps = 2 if len(parameters) == 2 else 3
    W, b = (Gates(*arrays) for arrays in zip(*parameters[:n_maps]))
    if n_maps == 2:
        U = c = Gates(None, None)
    else:
        U, c = (Gates(*arrays) for arrays in zip(*parameters[n_maps:]))
    return W, U, b, c


def _planned(plan, x, message, state, others, widths, **options):
    """Return a plan for these arrays; their alignment limits the width of a copy."""
    vector = launch.vector_width(math.gcd(*widths), x, message, state, *others)
    return plan(
        len(x),
        widths,
        has_state=state is not None,
        is_same=x is state,
        vector=min(vector, plans.QUAD),
        itemsize=numpy.dtype(launch.arithmetic(x.dtype)).itemsize,
        device=kernels.device(x.data.device_id),
        **options,
    )
