"""layer_norm against Chainer's."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.ops.layer_norm import layer_norm
from tests.support.gradients import check_gradients


def arguments(xp, dtype, shape=(7, 5)):
    rng = numpy.random.RandomState(0)
    return [xp.asarray(rng.uniform(-1, 2, s).astype(dtype)) for s in (shape, shape[1:], shape[1:])]


@pytest.mark.parametrize('shape', [(7, 5), (1000, 64), (1, 1), (0, 3)])
@pytest.mark.parametrize('dtype, bound', [('float16', 4e-3), ('float32', 1e-6), ('float64', 1e-13)])
def test_values_and_gradients_are_chainers(xp, dtype, bound, shape):
    given = arguments(xp, dtype, shape)
    gy = xp.asarray(numpy.random.RandomState(1).uniform(-1, 1, shape).astype(dtype))
    results = []
    for function, kind in ((layer_norm, dtype), (chainer.functions.layer_normalization, 'd')):
        variables = [chainer.Variable(array.astype(kind)) for array in given]
        y = function(*variables, eps=1e-3)
        y.grad = gy.astype(kind)
        y.backward()
        assert all(v.grad.dtype == kind for v in variables)
        results.append([y.array] + [v.grad for v in variables])
    for actual, expected in zip(*results):
        actual, expected = cuda.to_cpu(actual).astype('d'), cuda.to_cpu(expected)
        numpy.testing.assert_allclose(
            actual, expected, rtol=0, atol=bound * max(1, abs(expected).max(initial=0))
        )


def test_gradients(xp):
    given = arguments(xp, 'float64', (3, 4))
    check_gradients(lambda x, gamma, beta: layer_norm(x, gamma, beta, 1e-3) ** 2, *given)


def test_rows_of_one_value_in_half_precision(xp):
    """Their variance is 0: the gradient is large, but finite."""
    x = chainer.Variable(xp.ones((2, 4), 'e'))
    y = layer_norm(x, xp.ones(4, 'f'), xp.arange(4, dtype='f'), 1e-6)
    assert (y.array == xp.arange(4)).all() and y.dtype == numpy.float16
    y.grad = xp.array([[1, 0, 0, 0], [0, 0, 0, 0]], 'e')
    y.backward()
    numpy.testing.assert_allclose(
        cuda.to_cpu(x.grad), 1000 * numpy.array([[0.75, -0.25, -0.25, -0.25], [0] * 4]), rtol=0.05
    )


def test_parameters_of_another_dtype_are_converted(xp):
    variables = [chainer.Variable(array) for array in arguments(xp, 'float32')]
    y = layer_norm(variables[0].array.astype('e'), *variables[1:], eps=1e-6)
    y.grad = xp.ones((7, 5), 'e')
    y.backward()
    assert y.dtype == numpy.float16 and variables[1].grad.dtype == numpy.float32


def test_one_node():
    x, gamma, beta = (chainer.Variable(array) for array in arguments(numpy, 'f'))
    assert layer_norm(x, gamma, beta, 1e-6).creator.inputs[0] is x.node


def test_what_does_not_fit():
    x, gamma, beta = arguments(numpy, 'f')
    with pytest.raises(ValueError, match=r'gamma: expected shape \(5,\) .*, got \(4,\)'):
        layer_norm(x, gamma[:4], beta, 1e-6)
    with pytest.raises(ValueError, match=r'beta: expected shape \(5,\) .*, got \(7, 5\)'):
        layer_norm(x, gamma, x, 1e-6)
    with pytest.raises(ValueError, match=r'x: expected shape \(n_rows, n_B\), got \(5,\)'):
        layer_norm(gamma, gamma, beta, 1e-6)
