"""Operations of fused nodes on bare arrays. Activations are for a host: kernels have their own."""

import numpy

from chainer import functions
from chainer.backends import cuda


def compute_dtype(x):
    """Return the dtype in which a host calculates with an array: float32 for float16."""
    return numpy.dtype('f') if x.dtype == numpy.float16 else x.dtype


MAX_JOINED = 64  # arrays that one kernel joins; its arguments have room for about 75

# A macro for kernels. 0.5 is cast, because a plain literal would make the expression double.
SIGMOID = '#define SIGMOID(x) (tanh((x) * (T)0.5) * (T)0.5 + (T)0.5)\n'


def concat(arrays, axis=0):
    """Join arrays of one dtype, along axis 1 matrices only, as ``numpy.concatenate`` does.

    CuPy's ``concatenate`` launches a copy for every array, and for more than eight arrays sends a
    table from the host, which a captured step may not do.
    """
    if isinstance(arrays[0], numpy.ndarray):
        return numpy.concatenate(arrays, axis=axis)
    if len(arrays) > MAX_JOINED:
        starts = range(0, len(arrays), MAX_JOINED)
        arrays = [concat(arrays[start : start + MAX_JOINED], axis) for start in starts]
    lengths = [array.shape[axis] for array in arrays]
    shape = list(arrays[0].shape)
    shape[axis] = sum(lengths)
    y = cuda.cupy.empty(shape, arrays[0].dtype)
    # Along axis 0 the arrays are treated as one row each, so that the result is one row, too.
    widths = lengths if axis else [array.size for array in arrays]
    operands = [operand for pair in zip(arrays, widths) for operand in pair]
    return _joining_kernel(len(arrays))(*operands, sum(widths), y)


@cuda.memoize()
def _joining_kernel(n):
    cases = [
        'if (at < w%d) y = a%d[row * w%d + at]; else { at -= w%d; ' % (k, k, k, k)
        for k in range(n - 1)
    ]
    last = 'y = a%d[row * w%d + at];' % (n - 1, n - 1)
    return cuda.cupy.ElementwiseKernel(
        ', '.join('raw T a%d, int32 w%d' % (k, k) for k in range(n)) + ', int64 width',
        'T y',
        'ptrdiff_t row = i / width, at = i %% width; %s%s%s'
        % (''.join(cases), last, '}' * (n - 1)),
        'bspmm_concat',
    )


ACTIVATIONS = {functions.identity: 'identity', functions.relu: 'relu', functions.tanh: 'tanh'}


def activate(activation, y):
    """Apply an activation, one of the names in ACTIVATIONS, to an array on a host in place."""
    if activation == 'relu':
        numpy.maximum(y, 0, out=y)
    elif activation == 'tanh':
        numpy.tanh(y, out=y)
    elif activation != 'identity':
        raise NotImplementedError('activation: expected one of ACTIVATIONS, got %r' % activation)


def activation_gradient(activation, y, gy, dropout_ratio):
    """Return the gradient before an activation and its dropout, given y and gy on a host.

    After a rectifier, dropped elements are recognised by their value 0.
    """
    if activation == 'identity':
        return gy
    if activation == 'tanh':
        factor = y * y
        numpy.subtract(1, factor, out=factor)
        factor *= gy
        return factor
    if activation == 'sigmoid':
        return gy * y * (1 - y)
    if activation != 'relu':
        raise NotImplementedError(activation)
    gx = (y > 0) * y.dtype.type(1 / (1 - dropout_ratio))
    gx *= gy
    return gx


def sigmoid(x, bias=None):
    """Compute ``sigmoid(x + bias)`` on a host in place, in the form that does not overflow."""
    half = x.dtype.type(0.5)
    if bias is not None:
        x += bias
    x *= half
    numpy.tanh(x, out=x)
    x *= half
    x += half
    return x


# Chainer Chemistry's linear layers have a row for every output channel and relation, in the order
# c * R + r. Products with a matrix for each relation have them in the order r * n_out + c. Both
# functions also take Variables.


def by_relation(parameter, n_relations):
    """Return rows c * R + r of W or b in the order r * n_out + c."""
    return _swapped(parameter, len(parameter) // n_relations, n_relations)


def by_channel(parameter, n_relations):
    """Return rows r * n_out + c in the order c * R + r."""
    return _swapped(parameter, n_relations, len(parameter) // n_relations)


def _swapped(parameter, major, minor):
    blocks = parameter.reshape((major, minor) + parameter.shape[1:])
    return blocks.transpose((1, 0, 2)[: blocks.ndim]).reshape(parameter.shape)
