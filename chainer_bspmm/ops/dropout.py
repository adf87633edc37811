"""Dropout, by the generator of the current captured step, or else by Chainer's."""

import math

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans
from chainer_bspmm.cuda.step import current


@plans.kept
def dropout_launch(size, width) -> plans.Launch:
    """Plan dropout of 1 to 2**34 elements: a thread for every four of them."""
    last = (size - 1) // 4
    return plans.Launch(
        (('VECTOR', min(width, 4)),),
        (last // plans.BLOCK + 1, 1, 1),
        (plans.BLOCK, 1, 1),
        arguments=(numpy.uint32(last), numpy.int32(size - 4 * last)),
    )


def _drop(x, mask, y, ratio, seed, stream, counter):
    """Launch kernels/dropout.cu, for the mask alone if x and y are None."""
    if not mask.size:
        return
    plan = dropout_launch(mask.size, launch.vector_width(mask.size, mask, x, y))
    numbers = draw_arguments(seed, stream, ratio, mask.dtype)
    kind = 'MASK' if x is None else 'DROPOUT'
    launch.run('dropout', mask, plan, x, mask, y, counter, numbers=numbers, KIND=kind)


def _least_kept(ratio, bits=32):
    """Return the least random word that keeps an element; the largest word always does."""
    return min(math.ceil(ratio * 2**bits), 2**bits - 1)


def draw_arguments(seed, stream, ratio, dtype):
    """Return a kernel's arguments for dropout: generator, threshold and scale."""
    return (
        numpy.uint32(seed % 2**32),
        numpy.uint32(seed >> 32),
        numpy.uint32(stream),
        numpy.uint32(_least_kept(ratio)),
        # The scale is rounded to the array's dtype, because Chainer multiplies by it in that dtype.
        launch.arithmetic(dtype)(dtype.type(1 / (1 - ratio))),
    )


# Constants of Philox4x32-10 (Salmon et al. 2011): the factors of words 0 and 2 of a counter in each
# round, and the terms that are added to the two words of the key after it.
_MULTIPLIERS = numpy.array([[0xD2511F53], [0xCD9E8D57]], numpy.uint64)
_KEY_STEPS = numpy.array([[0x9E3779B9], [0xBB67AE85]], numpy.uint64)
_LOW = numpy.uint64(2**32 - 1)
_HALF = numpy.uint64(32)


def _random_words(size, seed, stream, step):
    """Return a random word for every element, (size,), as kernels/dropout.cu draws it."""
    quads = numpy.arange(-(-size // 4), dtype=numpy.uint64)
    even = numpy.stack([quads, numpy.full_like(quads, step % 2**32)])  # words 0 and 2
    odd = numpy.empty_like(even)  # words 1 and 3
    odd[0] = stream
    odd[1] = step >> 32
    key = numpy.array([[seed % 2**32], [seed >> 32]], numpy.uint64)
    for _ in range(10):
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _HALF) ^ odd ^ key, products & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return numpy.stack([even[0], odd[0], even[1], odd[1]], axis=1).ravel()[:size]


def _check_size(size):
    if size > 2**34:
        text = 'size: expected at most 2**34 elements, the random numbers that a layer has, got %d'
        raise ValueError(text % size)


def dropout_forward(x, ratio, seed, stream, counter):
    """Return a mask, 0 with probability ratio, else 1 / (1 - ratio), and ``y = x * mask``.

    Deterministic: the same seed (64 bits), number `stream` of the layer (32 bits) and step, the
    (1,) uint64 `counter` on x's device, give the same numbers on every device; see
    kernels/dropout.cu.
    """
    _check_size(x.size)
    if not launch.on_gpu(x):
        mask = dropout_mask_forward(x.size, x.dtype, ratio, seed, stream, counter)
        mask = mask.reshape(x.shape)
        return mask, x * mask
    with launch.device_of(x):
        x = launch.contiguous(x)
        mask, y = cuda.cupy.empty(x.shape, x.dtype), cuda.cupy.empty(x.shape, x.dtype)
        _drop(x, mask, y, ratio, seed, stream, counter)
    return mask, y


def dropout_mask_forward(size, dtype, ratio, seed, stream, counter):
    """Return the mask alone, (size,) on the device of ``counter``; see :func:`dropout_forward`."""
    _check_size(size)
    if not launch.on_gpu(counter):
        is_kept = _random_words(size, seed, stream, int(counter[0])) >= _least_kept(ratio)
        return is_kept * dtype.type(1 / (1 - ratio))
    with launch.device_of(counter):
        mask = cuda.cupy.empty(size, dtype)
        _drop(None, mask, None, ratio, seed, stream, counter)
    return mask


def step_draw():
    """Return seed, stream and counter for the next dropout layer of the captured step."""
    step = current()
    return step.seed, step.next_stream(), step.counter


def step_dropout(node, step, inputs):
    """Compute the forward pass of Chainer's ``Dropout`` in one launch; the node keeps its mask."""
    (x,) = inputs
    if node.mask is not None:
        return (x * node.mask,)
    node.mask, y = dropout_forward(x, node.dropout_ratio, *step_draw())
    return (y,)


def dropout(x, ratio):
    """Apply ``chainer.functions.dropout``; on a host :func:`draw_kept` chooses the elements."""
    if chainer.config.train and not 0 <= ratio < 1:
        raise ValueError('ratio: expected at least 0 and below 1, got %r' % ratio)
    if not chainer.config.train or current() is not None or x.xp is not numpy:
        return functions.dropout(x, ratio=ratio)
    mask = dropout_mask(x, x.size, ratio).reshape(x.shape)
    return functions.dropout(x, ratio=ratio, mask=mask)


def dropout_relu(y, ratio):
    """Rectify an array in place, and drop each of its elements with probability ratio.

    In a step on a GPU the launch of the layer does that.
    """
    if isinstance(y, numpy.ndarray):
        numpy.maximum(y, 0, out=y)
        y *= dropout_mask(y, y.size, ratio).reshape(y.shape)
    else:
        scale = y.dtype.type(1 / (1 - ratio))
        drawn = cuda.cupy.random.rand(*y.shape, dtype=numpy.float32)
        cuda.elementwise(
            'T x, R drawn, T scale, T ratio',
            'T y',
            """
            T factor = drawn >= (R)ratio ? scale : (T)0;
            T positive = x;
            if (positive <= (T)0) positive = (T)0;  // NaN stays
            y = positive * factor;""",
            'bspmm_relu_dropout',
        )(y, drawn, scale, ratio, y)


def draw_kept(shape, ratio):
    """Draw on the host whether elements stay (bool, of `shape`), with probability 1 - ratio."""
    # NumPy's old generator, which Chainer uses, is too slow. It draws only the seed of a new one.
    size = math.prod(shape)
    # For the usual ratios, 0.5 and 0.25, a byte is enough for the exact probability.
    word = numpy.dtype(numpy.uint8 if (ratio * 2**8).is_integer() else numpy.uint32)
    drawn = numpy.random.SFC64(numpy.random.randint(2**32, dtype=numpy.uint32)).random_raw(
        -(-size * word.itemsize // 8)
    )
    least = word.type(_least_kept(ratio, 8 * word.itemsize))
    return drawn.view(word)[:size].reshape(shape) >= least


def dropout_mask(like, size, ratio):
    """Return a mask, (size,): 0 with probability ratio, else 1 / (1 - ratio).

    It has the dtype and the device of `like`.
    """
    step = current()
    if step is not None:
        return dropout_mask_forward(size, like.dtype, ratio, *step_draw())
    xp = chainer_backend.get_array_module(like)
    is_kept = draw_kept((size,), ratio) if xp is numpy else xp.random.rand(size) >= ratio
    return is_kept * like.dtype.type(1 / (1 - ratio))
