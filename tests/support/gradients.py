"""Gradients and second derivatives, compared with numerical differences."""

import numpy

import chainer
from chainer import gradient_check
from chainer.backends import cuda

from tests.support import relative_error

# Batches of tests.support that are difficult in a backward pass.
GRADIENT_BATCHES = [
    'empty graphs first, between, last',
    'symmetric',
    'symmetric ones',
    'four relations',
    'duplicates, unsorted',
    'rectangular',
    'no entries',
]


def gradient_of(y):
    """Return the gradient that `outcome` gives an output, on the host.

    It is not y, which a rectifier makes 0. Its elements have one sign, so that sums do not cancel.
    """
    return (0.5 + numpy.arange(y.size) * 7 % 17 / 16).reshape(y.shape).astype(y.dtype)


def outcome(function, arrays, wanted=None, higher=False, between=None):
    """Return a function's output and its gradients, with None for inputs that are not `wanted`.

    ``between(variables)``, if it is given, is called after the forward pass.
    """
    variables = [
        chainer.Variable(array.copy(), requires_grad=wanted is None or i in wanted)
        for i, array in enumerate(arrays)
    ]
    y = function(*variables)
    if between is not None:
        between(variables)
    y.grad = y.xp.asarray(gradient_of(y))
    y.backward(enable_double_backprop=higher)
    return [y.array, *(variable.grad for variable in variables)]


def assert_same_outcome(found, expected, dtype, bound):
    """Check the relative error of each array of two lists, and that both have None in one place."""
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            assert actual.dtype == dtype and actual.shape == wanted.shape
            assert relative_error(actual, wanted) < bound


def assert_same_gradients_alone(function, arrays, choices):
    """Check that gradients of some inputs equal the same gradients, computed with all others."""
    for higher in (False, True):
        y, *full = outcome(function, arrays, None, higher)
        for wanted in choices:
            expected = [y, *(gradient if i in wanted else None for i, gradient in enumerate(full))]
            assert_same_outcome(outcome(function, arrays, wanted, higher), expected, 'd', 1e-14)


def check_gradients(function, *inputs):
    """Compare first and second derivatives with differences, whose steps suit exponentials.

    Differentiable gradients may come from other nodes, and are compared with gradients that cannot
    be differentiated again. The second derivatives of the function should not vanish.
    """
    rng = numpy.random.RandomState(9)
    xp = chainer.backend.get_array_module(inputs[0])
    gy, *ggx = (
        xp.asarray(rng.uniform(-1, 1, array.shape)) for array in (function(*inputs).array, *inputs)
    )
    options = {'dtype': 'd', 'eps': 1e-5, 'atol': 1e-6, 'rtol': 1e-6}
    numpy.random.seed(9)  # gradient_check draws the direction of its differences
    gradient_check.check_backward(function, inputs, gy, **options)
    gradient_check.check_double_backward(function, inputs, gy, tuple(ggx), **options)
    single, double = [], []
    for gradients, again in ((single, False), (double, True)):
        variables = [chainer.Variable(array) for array in inputs]
        gradients += chainer.grad(
            [function(*variables)], variables, [chainer.Variable(gy)], enable_double_backprop=again
        )
    for a, b in zip(single, double):
        numpy.testing.assert_allclose(cuda.to_cpu(a.array), cuda.to_cpu(b.array), 1e-9, 1e-9)


def assert_gradients_of_changed_inputs(function, reference, arrays, indexes):
    """Change inputs in place between the passes; compare the gradients with the reference's."""
    for index in indexes:

        def change(variables, index=index):
            variables[index].array[...] *= 1.5

        expected = outcome(reference, arrays, between=change)
        found = outcome(function, arrays, between=change)
        assert_same_outcome(found, expected, arrays[0].dtype, 1e-13)


class Calls(chainer.FunctionHook):
    """Hook that records the labels of the functions that are called."""

    name = 'Calls'

    def __init__(self):
        self.labels = []

    def forward_preprocess(self, function, in_data):
        self.labels.append(function.label)
