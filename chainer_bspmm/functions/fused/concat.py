"""Bare arrays side by side in one new array, and apart again: one launch each on a GPU.

CuPy's own `concatenate` launches a copy for every array, and a node that stacks the weights of
seven layers would mostly be that.
"""

import numpy

from chainer.backends import cuda


def concat(arrays, axis=0):
    """Return arrays of one dtype joined along an axis, as ``numpy.concatenate`` does.

    Args:
        arrays (sequence of array): on one device; of equal shapes but for `axis`.
        axis (int): 0, or 1 of two-dimensional arrays.
    """
    if isinstance(arrays[0], numpy.ndarray):
        return numpy.concatenate(arrays, axis=axis)
    lengths = [array.shape[axis] for array in arrays]
    shape = list(arrays[0].shape)
    shape[axis] = sum(lengths)
    y = cuda.cupy.empty(shape, arrays[0].dtype)
    # Along axis 0 the result is a single row of everything, one array after the other.
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


def split(array, width):
    """Return the first `width` columns and the others, each contiguous on a GPU.

    What follows a gradient is a product, which would copy a column block that is not.
    """
    left, right = array[:, :width], array[:, width:]
    if isinstance(array, numpy.ndarray):
        return left, right
    left, right = (cuda.cupy.empty(part.shape, part.dtype) for part in (left, right))
    cuda.elementwise(
        'T x, int32 width, int32 rest',
        'raw T left, raw T right',
        """
        ptrdiff_t row = i / (width + rest), at = i % (width + rest);
        if (at < width) left[row * width + at] = x;
        else right[row * rest + at - width] = x;""",
        'bspmm_apart',
    )(array, width, array.shape[1] - width, left, right)
    return left, right
