"""Dropout that draws from the generator of the training step under way, else from Chainer's."""

import math

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm.cuda.step import current


def step_draw():
    """Return the draw arguments of ``backend.dropout``: those of the step's next layer."""
    step = current()
    return step.seed, step.next_stream(), step.counter


def step_dropout(node, step, inputs):
    """Do the forward pass of Chainer's ``Dropout`` node inside a training step, in one launch.

    Draws unless the node was given a mask. The mask stays with the node, for its gradients and for
    ``return_mask``; ``kernels/dropout.cu`` says which elements are dropped.
    """
    (x,) = inputs
    if node.mask is not None:
        return (x * node.mask,)
    node.mask, y = backend.dropout(x, node.dropout_ratio, *step_draw())
    return (y,)


def dropout(x, ratio):
    """Apply ``chainer.functions.dropout``; on a host with elements that :func:`draw_kept` keeps."""
    if not chainer.config.train or current() is not None or x.xp is not numpy:
        return functions.dropout(x, ratio=ratio)
    scale = x.dtype.type(1 / (1 - ratio))
    return functions.dropout(x, ratio=ratio, mask=draw_kept(x.shape, ratio) * scale)


def dropout_relu(y, ratio):
    """Rectify an array in place and drop elements of it, each with probability ratio."""
    step = current()
    if step is not None:
        backend.relu_dropout(y, ratio, *step_draw())
        return
    scale = y.dtype.type(1 / (1 - ratio))
    if isinstance(y, numpy.ndarray):
        numpy.maximum(y, 0, out=y)
        y *= draw_kept(y.shape, ratio) * scale
    else:
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
    """Return an array of bool: whether each element stays, with probability 1 - ratio.

    ``numpy.random.seed`` decides the result. NumPy's old generator draws only the seed of a quicker
    one: drawing every element from it, as Chainer does, takes longer than the rest of a layer.
    """
    size = math.prod(shape)
    # Of the usual ratios, 0.5 or 0.25, a byte decides exactly.
    word = numpy.dtype(numpy.uint8 if (ratio * 2**8).is_integer() else numpy.uint32)
    drawn = numpy.random.SFC64(numpy.random.randint(2**32, dtype=numpy.uint32)).random_raw(
        -(-size * word.itemsize // 8)
    )
    least = min(math.ceil(ratio * 2 ** (8 * word.itemsize)), numpy.iinfo(word).max)
    return drawn.view(word)[:size].reshape(shape) >= word.type(least)


def dropout_mask(like, size, ratio):
    """Return (size,) elements, 0 with probability ratio, else 1 / (1 - ratio).

    Of the dtype of the array (or Variable) `like`, on its device.
    """
    step = current()
    if step is not None:
        return backend.dropout_mask(size, like.dtype, ratio, *step_draw())
    xp = chainer_backend.get_array_module(like)
    kept = draw_kept((size,), ratio) if xp is numpy else xp.random.rand(size) >= ratio
    return kept * like.dtype.type(1 / (1 - ratio))
