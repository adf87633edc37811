"""Linear layers, a softmax of each, and the sum of these as one node."""

from typing import Any

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.cuda import plans
from chainer_bspmm.ops import check
from chainer_bspmm.ops.graph_linear.launches import layer_backward
from chainer_bspmm.ops.graph_linear.launches import layer_forward
from chainer_bspmm.ops.graph_linear.launches import layer_of
from chainer_bspmm.ops.node import AccumulateInPlace
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.ops.segments import row_sum


def _row_softmax_on_gpu(a):
    n_terms, n_rows, n_channels = a.shape
    with launch.device_of(a):
        y = a[0] if n_terms == 1 else cuda.cupy.empty((n_rows, n_channels), a.dtype)
        _row_softmax(a, None, None if n_terms == 1 else y)
    return y


def _row_softmax_grad_on_gpu(a, g):
    with launch.device_of(a):
        y = cuda.cupy.empty(a.shape, a.dtype)
        _row_softmax(a, launch.contiguous(g), y)
    return y


def _row_softmax(a, g, y):
    """Launch kernels/row_softmax.cu; `g` None is the softmax itself, written to `a`."""
    if not a.size:
        return
    n_terms, n_rows, n_channels = a.shape
    width = launch.vector_width(n_channels, a, g, y)
    plan = plans.dot_launch(n_rows, n_channels, width, tile=1)  # a sub-warp per row, as well
    sizes = numpy.int32(n_terms), *plan.arguments
    launch.run('row_softmax', a, plan, a, g, y, *sizes, GRADIENT=g is not None)


def _row_softmax_on_host(a):
    a -= a.max(axis=2, keepdims=True)
    numpy.exp(a, out=a)
    a /= a.sum(axis=2, keepdims=True)
    return a[0] if len(a) == 1 else a.sum(axis=0)


def _row_softmax_grad_on_host(a, g):
    y = a * g
    y -= a * y.sum(axis=2, keepdims=True)
    return y


def row_softmax_forward(a: Any) -> Any:
    """Replace the rows of matrices by their softmax, and return the sum of the matrices.

    `a`, (n_terms, n_rows, n_B), is C-contiguous and written to; if there is one term, the result is
    ``a[0]`` itself.
    """
    calculate = _row_softmax_on_gpu if launch.on_gpu(a) else _row_softmax_on_host
    return calculate(a)


def row_softmax_backward(a: Any, g: Any) -> Any:
    """Return the gradients with respect to the matrices, given what the forward made of them."""
    calculate = _row_softmax_grad_on_gpu if launch.on_gpu(a) else _row_softmax_grad_on_host
    return calculate(a, g)


class LinearSoftmax(AccumulateInPlace, FusedNode):
    """Inputs x, W and, if any, b of the first layer, then those of the others.

    sizes: of each layer, how many inputs it has.
    """

    def __init__(self, sizes):
        self._sizes = sizes

    def _layers(self, inputs):
        """Return the inputs of each layer."""
        inputs = iter(inputs)
        return [[next(inputs) for _ in range(size)] for size in self._sizes]

    def _output(self, inputs):
        layers = self._layers(inputs)
        x, W = layers[0][:2]
        xp = chainer_backend.get_array_module(x)
        self._y = xp.empty((len(layers), len(x), len(W)), x.dtype)
        self._plans = [_linear(layer, y) for layer, y in zip(layers, self._y)]
        return row_softmax_forward(self._y)

    def _gradients(self, inputs, gy, wanted):
        gradients = []
        gy = row_softmax_backward(self._y, gy)
        for layer, plan, by_layer in zip(self._layers(inputs), self._plans, gy):
            is_wanted = [len(gradients) + i in wanted for i in range(len(layer))]
            gradients += _linear_gradients(layer, plan, by_layer, is_wanted)
        return gradients

    def _composed(self, *inputs):
        y = None
        for x, W, *b in self._layers(inputs):
            parameters = [functions.cast(parameter, x.dtype) for parameter in (W, *b)]
            scores = functions.softmax(functions.linear(x, *parameters))
            y = scores if y is None else y + scores
        return y


def _given(x, W, *b):
    """Return the parameters of a linear layer as `layer_forward` takes them, of x's dtype."""
    given = dict(zip(('W_self', 'b_self'), (W, *b)))
    return {name: array.astype(x.dtype, copy=False) for name, array in given.items()}


def _linear(layer, y):
    """Write ``x W^T + b`` to y; return the plan of a launch that did it, or None."""
    x, given = layer[0], _given(*layer)
    plan = layer_of(x, given, 0, False, 'identity')
    if plan is not None:
        layer_forward(plan, None, x, given, out=y)
        return plan
    y[...] = dot(x, given['W_self'].T)
    if 'b_self' in given:
        y += given['b_self']
    return None


def _linear_gradients(layer, plan, gy, is_wanted):
    """Return a layer's gradients with respect to x, W and, if any, b; None: not needed."""
    x, given = layer[0], _given(*layer)
    if plan is not None:
        # An identity has a gradient that needs no result.
        found = layer_backward(plan, None, x, None, gy, given, has_features=is_wanted[0])
        return [found[name] for name in ('x', *given)]
    by_x, by_W, *by_b = is_wanted
    return [
        dot(gy, given['W_self']) if by_x else None,
        dot(gy.T, x) if by_W else None,
        *[row_sum(gy) if wanted else None for wanted in by_b],
    ]


def linear_softmax(*layers):
    """Compute ``y[i] = sum over layers of softmax(W x[i] + b)``. Differentiable to any order.

    Each layer is (x, W, b), b or None. On a GPU a launch for each layer and one for all softmaxes,
    forward and backward, where the weights fit into shared memory (kernels/graph_linear.cu).
    """
    n_rows, n_out = len(layers[0][0]), len(layers[0][1])
    inputs, sizes = [], []
    for i, (x, W, b) in enumerate(layers):
        if x.ndim != 2:
            raise ValueError('x: expected shape (n_rows, n_in), got %s' % (x.shape,))
        check.shapes(
            'layer 0 and the width of x',
            {
                'x of layer %d' % i: (x, (n_rows, x.shape[1])),
                'W of layer %d' % i: (W, (n_out, x.shape[1])),
                'b of layer %d' % i: (b, (n_out,)),
            },
        )
        given = [x, W] if b is None else [x, W, b]
        inputs += given
        sizes.append(len(given))
    return LinearSoftmax(sizes).apply(tuple(inputs))[0]
