"""Gradients against numerical differences, to second order."""

import numpy

import chainer
from chainer import gradient_check
from chainer.backends import cuda

# Batches of tests.support that have something to break in a backward pass.
GRADIENT_BATCHES = [
    *('empty graphs first, between, last', 'symmetric', 'symmetric ones', 'four relations'),
    *('duplicates, unsorted', 'rectangular', 'no entries'),
]


def check_gradients(function, *inputs):
    """Compare gradients, and theirs, with differences over steps small enough for exponentials.

    Also compare the gradients that can be differentiated again, which may come from other nodes,
    with those that cannot. The second derivatives of the function should not vanish.
    """
    rng = numpy.random.RandomState(9)
    xp = chainer.backend.get_array_module(inputs[0])
    gy, *ggx = (
        xp.asarray(rng.uniform(-1, 1, array.shape)) for array in (function(*inputs).array, *inputs)
    )
    options = {'dtype': 'd', 'eps': 1e-5, 'atol': 1e-6, 'rtol': 1e-6}
    numpy.random.seed(9)  # gradient_check draws the direction of its differences from it
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
