"""Chainer's own nodes during a step that a CUDA graph may capture.

The import of this module replaces methods of their classes. A replacement runs where a step is
current (`under_way`). In threads without one, and for arrays on the host, Chainer's own method
runs. The reason for each replacement:

* ``LinearFunction``, its two gradient nodes, ``MatMul``: CuPy refuses cuBLAS during capture, so the
  step has a separate handle. The gradients are such nodes again, except for products with a vector
  (chainer.functions.tensordot).
* ``Dropout``: CuPy refuses cuRAND, too, and a replay would repeat its numbers. The step has a
  generator that reads the number of the step on the device.
* ``Concat``, ``Stack``: CuPy sends a table from the host for more than eight arrays.
* ``Sum``: CuPy is slow at sums over rows, such as gradients of biases.
* ``SigmoidCrossEntropy``, ``BinaryAccuracy``, ``MeanSquaredError``, ``MeanAbsoluteError``, Chainer
  Chemistry's nodes of the last two names, and its ``StandardScaler``: each is one launch instead of
  up to 16; for a loss, this launch also computes its gradient and the accuracy. Chainer's nodes
  call cuBLAS as well. Chainer Chemistry's nodes, and both ``r2_score``, assign by a mask, for which
  CuPy asks the device for a count.
* ``Accuracy`` with a label to ignore, ``SoftmaxCrossEntropy`` without normalisation and its
  gradient without reduction: Chainer's nodes send a constant from the host.
"""

import collections
import functools
import importlib
import math

import numpy

import chainer
from chainer import FunctionNode, utils
from chainer_chemistry.links.array.shape_transformer_to_2d import ShapeTransformerTo2D
from chainer_chemistry.links.scaler.standard_scaler import format_x

from chainer_bspmm.cuda import gemm
from chainer_bspmm.cuda.step import Step
from chainer_bspmm.cuda.step import under_way  # noqa: F401  imported from here, with the nodes
from chainer_bspmm.ops import elementwise
from chainer_bspmm.ops.dropout import step_dropout
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from chainer_bspmm.ops.mean_loss import Loss
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.ops.standardize import standardize


def _linear(node, step: Step, inputs):
    x, W, *b = inputs
    node._config_use_ideep = chainer.config.use_ideep  # Chainer's backward method reads it
    params = dict(zip(('W_self', 'b_self'), (W, *b)))
    layer = _layer_of(x, params)
    if layer is not None:
        y = layer_forward(layer, None, x, params)
    else:
        y = step.blas.dot(x, W.T).astype(x.dtype, copy=False)
        if b:
            y += b[0]
    node.retain_inputs((0, 1))
    return (y,)


def _linear_backward(node, step: Step, indexes, grad_outputs):
    """Compute all gradients in one launch, unless they will be differentiated again."""
    if chainer.config.enable_backprop:
        return None
    x, W = (variable.array for variable in node.get_retained_inputs())
    gy = grad_outputs[0].array
    params = {'W_self': W}
    if 2 in indexes:
        params['b_self'] = W[:, 0]  # an array of the bias's size, which is not read
    layer = _layer_of(x, params)
    if layer is None:
        return None
    gradients = layer_backward(layer, None, x, None, gy, params, 0.0, 0 in indexes)
    names = ('x', 'W_self', 'b_self')
    return tuple(chainer.Variable(gradients[names[i]], requires_grad=False) for i in indexes)


def _layer_of(x, params):
    """Return the `Layer` of a linear layer, or None if cuBLAS computes it as products."""
    if any(array.dtype != x.dtype for array in params.values()):
        return None
    return layer_of(x, params, 0, False, 'identity')


def _linear_grad_data(node, step: Step, inputs):
    W, gy = inputs
    node._config_use_ideep = chainer.config.use_ideep
    node.retain_inputs((0, 1))
    return (step.blas.dot(gy, W).astype(gy.dtype, copy=False),)


def _linear_grad_weight(node, step: Step, inputs):
    x, gy = inputs
    node._config_use_ideep = chainer.config.use_ideep
    node.retain_inputs((0, 1))
    return (step.blas.dot(gy.T, x).astype(node._w_dtype, copy=False),)


def _matmul(node, step: Step, inputs):
    node.retain_inputs((0, 1))
    a, b = inputs
    trans_a = node.transa
    trans_b = node.transb
    if node.transc:  # (op(a) op(b))^T = op(b)^T op(a)^T
        a, b, trans_a, trans_b = b, a, not trans_b, not trans_a
    y = step.blas.matmul(
        *(
            array.swapaxes(-1, -2) if trans and array.ndim > 1 else array
            for array, trans in ((a, trans_a), (b, trans_b))
        )
    )
    return (y.astype(node.dtype or y.dtype, copy=False),)


def _sum(node, step: Step, inputs):
    (x,) = inputs
    if x.ndim == 2 and node.axis == (0,) and not node.keepdims and x.dtype.kind == 'f':
        return (row_sum(x),)  # this is how Chainer computes the gradient of a bias
    return (utils.force_array(x.sum(axis=node.axis, keepdims=node.keepdims)),)


def _concat(node, step: Step, inputs):
    return (_joined(inputs, node.axis % inputs[0].ndim),)


def _stack(node, step: Step, inputs):
    axis = node.axis % (inputs[0].ndim + 1)
    shape = inputs[0].shape
    shape = shape[:axis] + (1,) + shape[axis:]
    return (_joined([x.reshape(shape) for x in inputs], axis),)


def _joined(inputs, axis):
    """Join arrays along any axis, as columns of matrices; the axes before it become rows."""
    shape = inputs[0].shape
    lead = shape[:axis]
    length = sum(x.shape[axis] for x in inputs)
    tail = shape[axis + 1 :]
    n_rows = math.prod(lead)
    rows = [x.reshape((n_rows, math.prod(x.shape[axis:]))) for x in inputs]
    return elementwise.concat(rows, axis=1).reshape(lead + (length,) + tail)


# A loss that a step has computed from the arrays `x` and `t`. The accuracy and the gradient `gx`
# are from the same launch, or None.
_Computed = collections.namedtuple('_Computed', 'loss x t accuracy gx')


def _loss_forward(step: Step, loss: Loss, x, t):
    """Compute a loss and its count; keep accuracy and gradient for calls with the same arrays."""
    y, count, accuracy, gx = loss.training_forward(x, t, chainer.config.enable_backprop)
    step.losses.append(_Computed(loss, x, t, accuracy, gx))
    return y, count


def _loss_backward(step: Step, loss: Loss, x, t, gy, count=None):
    """Return the gradient of a loss, if possible the one that :func:`_loss_forward` has kept."""
    if step.one is not None and step.one.is_seed(gy):
        for place, computed in enumerate(step.losses):
            if computed.loss == loss and computed.x is x and computed.t is t:
                if computed.gx is not None:
                    del step.losses[place]  # used only once, because the caller may write to it
                    return computed.gx
    return loss.backward(x, t, gy, count)


def _mean_error_of(kind, node, x):
    return Loss(kind, divisor=x.size, ignore_nan=getattr(node, 'ignore_nan', False))


def _mean_error(kind, node, step: Step, inputs):
    node.retain_inputs((0, 1))
    x, t = inputs
    y, _ = _loss_forward(step, _mean_error_of(kind, node, x), x, t)
    return (y,)


def _mean_error_backward(kind, node, step: Step, indexes, grad_outputs):
    x, t = (variable.array for variable in node.get_retained_inputs())
    if chainer.config.enable_backprop:
        node.diff = x - t  # backward of Chainer's MeanAbsoluteError reads it
        return None
    gx = _loss_backward(step, _mean_error_of(kind, node, x), x, t, grad_outputs[0].array)
    return tuple(chainer.Variable(-gx if i else gx, requires_grad=False) for i in indexes)


def _sigmoid_cross_entropy(node, step: Step, inputs):
    if node.reduce != 'mean' or node.ignore_label != -1:
        return None
    node.retain_inputs((0, 1))
    x, t = inputs
    divisor = None if node.normalize else max(1, len(x))
    y, count = _loss_forward(step, Loss('SIGMOID_CROSS_ENTROPY', divisor), x, t)
    node.count = count if divisor is None else divisor
    node.ignore_mask = None
    return (y,)


def _sigmoid_cross_entropy_grad(node, step: Step, inputs):
    if node.ignore_mask is not None:  # the loss was computed by Chainer's own method
        return None
    node.retain_inputs((0, 1))
    if chainer.config.enable_backprop:
        node.ignore_mask = node.t != -1  # the gradient of this gradient reads it
    x, gy = inputs
    is_counted = not isinstance(node.count, int)  # a count is an array
    loss = Loss('SIGMOID_CROSS_ENTROPY', divisor=None if is_counted else node.count)
    count = node.count if is_counted else None
    return (_loss_backward(step, loss, x, node.t, gy, count),)


def _binary_accuracy(node, step: Step, inputs):
    if node.ignore_label != -1:
        return None
    x, t = inputs
    for place, computed in enumerate(step.losses):
        if computed.x is x and computed.t is t and computed.accuracy is not None:
            step.losses[place] = computed._replace(accuracy=None)
            return (computed.accuracy,)
    accuracy, _ = Loss('BINARY_ACCURACY').forward(x, t)
    return (accuracy,)


def _without_nan(node, x):
    if not getattr(node, 'ignore_nan', False):
        return x
    xp = chainer.backend.get_array_module(x)
    return xp.where(xp.isnan(x), x.dtype.type(0), x)


def _r2_score(node, step: Step, inputs):
    true = inputs[1]
    xp = chainer.backend.get_array_module(true)
    residuals, total = (
        (_without_nan(node, x) ** 2).sum(axis=0)
        for x in (inputs[0] - true, true - true.mean(axis=0))
    )
    is_constant = total == 0
    zero, one = total.dtype.type(0), total.dtype.type(1)
    scores = 1 - residuals / xp.where(is_constant, one, total)
    scores = xp.where(is_constant, zero, scores)
    return (utils.force_array(scores.mean() if node.multioutput == 'uniform_average' else scores),)


def _accuracy(node, step: Step, inputs):
    y, t = inputs
    is_right = y.argmax(axis=1).reshape(t.shape) == t
    if node.ignore_label is None:
        return (utils.force_array(is_right.mean(dtype=y.dtype)),)
    xp = chainer.backend.get_array_module(t)
    counts = t != node.ignore_label
    share = (is_right & counts).sum() / xp.maximum(counts.sum(), 1)
    return (utils.force_array(share, y.dtype),)


def _softmax_cross_entropy(node, step: Step, inputs):
    x, t = inputs
    # If the shapes are equal, targets are soft.
    if node.normalize or node.reduce != 'mean' or x.shape == t.shape:
        return None
    node.reduce = 'no'
    try:
        (losses,) = FunctionNode.forward(node, inputs)
    finally:
        node.reduce = 'mean'
    dtype = numpy.promote_types(x.dtype, numpy.float32)
    # The coefficient must be an array, as in Chainer, because the gradient's kernel uses its dtype.
    node._coeff = chainer.backend.get_array_module(x).full((), 1 / max(1, len(x)), dtype)
    return (utils.force_array(losses.sum(dtype=dtype) * node._coeff, x.dtype),)


def _softmax_cross_entropy_grad(node, step: Step, inputs):
    x, t, gy = inputs
    if node.coeff is None and x.size:
        node.coeff = chainer.backend.get_array_module(gy).ones((), gy.dtype)
        gy = gy[:, None]
    return FunctionNode.forward(node, (x, t, gy))


def _standardize(inverse, scaler, step: Step, x, axis=1):
    if scaler.mean is None:
        return None  # Chainer Chemistry's own method raises its error
    is_array = not isinstance(x, chainer.Variable)
    to_2d = ShapeTransformerTo2D(axis=axis)
    x = to_2d.transform(format_x(x))
    x = standardize(x, *_mean_and_deviation(scaler, x.shape[1]), inverse=inverse)
    x = to_2d.inverse_transform(x)
    return x.array if is_array else x


def _mean_and_deviation(scaler, n_features):
    """Return means and deviations for all features: 0 and 1 for features that are not scaled."""
    if scaler.indices is None:
        return scaler.mean, scaler.std
    xp = scaler.xp
    means, deviations = xp.zeros(n_features, xp.float32), xp.ones(n_features, xp.float32)
    means[scaler.indices] = scaler.mean
    deviations[scaler.indices] = scaler.std
    return means, deviations


# Method -> its replacement in a step: a function of the same arguments, with the step as the second
# one. It returns None to let Chainer's own method run, where that can be captured.
IN_STEP = {
    'chainer.functions.connection.linear.LinearFunction.forward': _linear,
    'chainer.functions.connection.linear.LinearFunction.backward': _linear_backward,
    'chainer.functions.connection.linear.LinearGradData.forward': _linear_grad_data,
    'chainer.functions.connection.linear.LinearGradWeight.forward': _linear_grad_weight,
    'chainer.functions.math.matmul.MatMul.forward': _matmul,
    'chainer.functions.math.sum.Sum.forward': _sum,
    'chainer.functions.array.concat.Concat.forward': _concat,
    'chainer.functions.array.stack.Stack.forward': _stack,
    'chainer.functions.noise.dropout.Dropout.forward': step_dropout,
    'chainer.functions.loss.sigmoid_cross_entropy.SigmoidCrossEntropy.forward': (
        _sigmoid_cross_entropy
    ),
    'chainer.functions.loss.sigmoid_cross_entropy.SigmoidCrossEntropyGrad.forward': (
        _sigmoid_cross_entropy_grad
    ),
    'chainer.functions.loss.softmax_cross_entropy.SoftmaxCrossEntropy.forward': (
        _softmax_cross_entropy
    ),
    'chainer.functions.loss.softmax_cross_entropy'
    '._SoftmaxCrossEntropyGrad_NoDoubleBackprop.forward': _softmax_cross_entropy_grad,
    'chainer.functions.evaluation.binary_accuracy.BinaryAccuracy.forward': _binary_accuracy,
    'chainer.functions.evaluation.accuracy.Accuracy.forward': _accuracy,
    'chainer.functions.evaluation.r2_score.R2_score.forward': _r2_score,
    'chainer_chemistry.functions.evaluation.r2_score.R2Score.forward': _r2_score,
    'chainer_chemistry.links.scaler.standard_scaler.StandardScaler.transform': (
        functools.partial(_standardize, False)
    ),
    'chainer_chemistry.links.scaler.standard_scaler.StandardScaler.inverse_transform': (
        functools.partial(_standardize, True)
    ),
}
for _class, _error in {
    'chainer.functions.loss.mean_squared_error.MeanSquaredError': 'SQUARED_ERROR',
    'chainer.functions.loss.mean_absolute_error.MeanAbsoluteError': 'ABSOLUTE_ERROR',
    'chainer_chemistry.functions.loss.mean_squared_error.MeanSquaredError': 'SQUARED_ERROR',
    'chainer_chemistry.functions.loss.mean_absolute_error.MeanAbsoluteError': 'ABSOLUTE_ERROR',
}.items():
    IN_STEP[_class + '.forward'] = functools.partial(_mean_error, _error)
    IN_STEP[_class + '.backward'] = functools.partial(_mean_error_backward, _error)

# Name of a method -> function of the same arguments that returns the array whose device shows
# whether the call is part of the step.
_ARRAY = {
    'forward': lambda node, inputs: inputs[0],
    'backward': lambda node, indexes, grad_outputs: grad_outputs[0].array,
    'transform': lambda scaler, *_, **__: scaler.std,
    'inverse_transform': lambda scaler, *_, **__: scaler.std,
}


def _asking_for_a_step(original, array_of, in_step):
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        step = gemm.step_for(array_of(self, *args, **kwargs))
        result = None if step is None else in_step(self, step, *args, **kwargs)
        return original(self, *args, **kwargs) if result is None else result

    return method


for _path, _in_step in IN_STEP.items():
    _module, _class, _name = _path.rsplit('.', 2)
    _kind = getattr(importlib.import_module(_module), _class)
    setattr(_kind, _name, _asking_for_a_step(getattr(_kind, _name), _ARRAY[_name], _in_step))
