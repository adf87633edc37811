"""The sum of the softmaxes of several linear layers, as one node."""

import itertools

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans
from chainer_bspmm.ops.graph_linear import products
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from chainer_bspmm.ops.node import AccumulateInPlace, FusedNode
from chainer_bspmm.sparse import check


def _launch(a, g, y):
    """Launch kernels/row_softmax.cu: the softmax, in place in `a`, or given `g` its gradient."""
    if not a.size:
        return
    n_terms, n_rows, n_channels = a.shape
    width = launch.vector_width(n_channels, a, g, y)
    # The plan of sampled products is used, because here, too, a row has a sub-warp.
    plan = plans.dot_launch(n_rows, n_channels, width, tile=1)
    launch.run('row_softmax', a, plan, a, g, y, numpy.int32(n_terms), GRADIENT=g is not None)


def row_softmax_forward(a):
    """Replace the rows of C-contiguous matrices, (n_terms, n_rows, n_B), by their softmax.

    Returns the sum of the matrices; with a single term that is ``a[0]`` itself.
    """
    n_terms, n_rows, n_channels = a.shape
    if launch.on_gpu(a):
        with launch.device_of(a):
            y = None if n_terms == 1 else cuda.cupy.empty((n_rows, n_channels), a.dtype)
            _launch(a, None, y)
        return a[0] if y is None else y
    a -= a.max(axis=2, keepdims=True)
    numpy.exp(a, out=a)
    a /= a.sum(axis=2, keepdims=True)
    return a[0] if n_terms == 1 else a.sum(axis=0)


def row_softmax_backward(a, g):
    """Return the gradients with respect to the matrices, given their softmaxes `a`."""
    if launch.on_gpu(a):
        with launch.device_of(a):
            y = cuda.cupy.empty(a.shape, a.dtype)
            _launch(a, launch.contiguous(g), y)
        return y
    y = a * g
    y -= a * y.sum(axis=2, keepdims=True)
    return y


class LinearSoftmax(AccumulateInPlace, FusedNode):
    """Node of :func:`linear_softmax`; inputs are x, W and, if there is one, b of every layer.

    `sizes`: number of inputs of each layer.
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

    def _gradients(self, inputs, gy, indexes):
        gradients = []
        gy = row_softmax_backward(self._y, gy)
        for layer, plan, by_layer in zip(self._layers(inputs), self._plans, gy):
            is_needed = [len(gradients) + i in indexes for i in range(len(layer))]
            gradients += _linear_gradients(layer, plan, by_layer, is_needed)
        return gradients

    def _composed(self, *inputs):
        y = None
        for x, W, *b in self._layers(inputs):
            parameters = [functions.cast(parameter, x.dtype) for parameter in (W, *b)]
            scores = functions.softmax(functions.linear(x, *parameters))
            y = scores if y is None else y + scores
        return y


def _split(x, W, *b):
    """Return x, and the layer's parameters in x's dtype, as `layer_forward` takes them."""
    parameters = zip(('W_self', 'b_self'), (W, *b))
    return x, {name: array.astype(x.dtype, copy=False) for name, array in parameters}


def _linear(layer, y):
    """Write ``x W^T + b`` to y; return the `Layer` if one launch did it, else None."""
    x, parameters = _split(*layer)
    plan = layer_of(x, parameters, n_relations=0, loop=False, activation='identity')
    if plan is not None:
        layer_forward(plan, None, x, parameters, out=y)
    else:
        y[...], _ = products.forward(None, x, parameters)
    return plan


def _linear_gradients(layer, plan, gy, is_needed):
    """Return a layer's gradients with respect to x, W and b (if any); None if not needed."""
    x, parameters = _split(*layer)
    names = 'x', *parameters
    if plan is not None:
        # None stands for the result, which the gradient of an identity does not need.
        gradients = layer_backward(plan, None, x, None, gy, parameters, has_features=is_needed[0])
    else:
        needed = set(itertools.compress(names, is_needed))
        gradients = products.backward(None, x, parameters, gy=gy, needed=needed)
    return [gradients.get(name) for name in names]


def linear_softmax(*layers):
    """Compute ``y[i] = sum of softmax(W x[i] + b)`` over layers (x, W, b), b or None.

    On a GPU it takes a launch for each layer, or a product by cuBLAS where the weights do not fit
    into shared memory or cuBLAS is faster, and one launch for all softmaxes.
    """
    n_rows, n_out = len(layers[0][0]), len(layers[0][1])
    inputs, sizes = [], []
    for i, (x, W, b) in enumerate(layers):
        if x.ndim != 2:
            raise ValueError('x: expected shape (n_rows, n_in), got %s' % (x.shape,))
        check.floating('x', x)
        check.same_dtype('x of layer %d' % i, x.dtype, layers[0][0].dtype)
        check.shapes(
            'layer 0 and the width of x',
            {
                'x of layer %d' % i: (x, (n_rows, x.shape[1])),
                'W of layer %d' % i: (W, (n_out, x.shape[1])),
                'b of layer %d' % i: (b, (n_out,)),
            },
        )
        inputs += [x, W] if b is None else [x, W, b]
        sizes.append(2 + (b is not None))
    return LinearSoftmax(sizes).apply(tuple(inputs))[0]
