"""linear_relu against Chainer's two functions; gradients to second order."""
import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.functions.linear_relu import linear_relu
from tests.functions.test_bspmm import check_gradients
from tests.support import assert_close
from tests.support import DTYPES
from tests.support import features


def inputs(xp, n, n_in, n_out, dtype):
    rng = numpy.random.RandomState(0)
    x, W = features(rng, xp, n, n_in, dtype), features(rng, xp, n_out, n_in, dtype)
    return x, W, features(rng, xp, 1, n_out, dtype)[0]


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(50, 7, 3), (1, 1, 1), (0, 4, 2)])
@pytest.mark.parametrize('has_bias', [True, False])
def test_same_as_two_functions(xp, shape, dtype, has_bias):
    given = inputs(xp, *shape, dtype)[:3 if has_bias else 2]
    results = []
    for function in (linear_relu, lambda *a: chainer.functions.relu(chainer.functions.linear(*a))):
        variables = [chainer.Variable(array.copy()) for array in given]
        y = function(*variables)
        chainer.functions.sum(y * y).backward()
        results.append([y.array] + [variable.grad for variable in variables])
    for ours, theirs in zip(*results):
        assert_close(ours, cuda.to_cpu(theirs).astype('d'), dtype)


def test_gradients(xp):
    given = inputs(xp, 20, 5, 4, 'float64')
    assert 20 < (linear_relu(*given).array > 0).sum() < 60  # both sides of the bend
    check_gradients(lambda *a: linear_relu(*a) ** 2, *given)


def test_nan_propagates(xp):
    x, W, b = inputs(xp, 3, 2, 4, 'float32')
    x[1, 0] = numpy.nan
    y = cuda.to_cpu(linear_relu(x, W, b).array)
    assert numpy.isnan(y[1]).all() and not numpy.isnan(y[[0, 2]]).any()
