"""The convolution node against the product and linear_relu; gradients to second order."""

import numpy
import pytest

import chainer
from chainer import functions

from chainer_bspmm import BatchedCSR
from chainer_bspmm.functions import bspmm
from tests.support.layers import linear_relu
from tests.support.layers import convolved_relu
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import relative_error
from tests.support.gradients import check_gradients

BOUND = {'float16': 2e-3, 'float32': 1e-6, 'float64': 1e-14}
SIZES = {'several': (5, 1, 0, 7), 'one node': (1,), 'empty': (0,)}


def inputs(xp, sizes, dtype):
    """Return matrices that are not symmetric, x and W."""
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n).astype(dtype) for n in sizes])
    if xp is not numpy:
        adj = adj.to_device('@cupy:0')
    return adj, features(rng, xp, sum(sizes), 6, dtype), features(rng, xp, 4, 6, dtype)


def outcome(function, x, W, wanted):
    variables = [
        chainer.Variable(array.copy(), requires_grad=i in wanted) for i, array in enumerate((x, W))
    ]
    y = function(*variables)
    # Not y * y, whose gradient is 0 where a rectifier's output is, masked or not.
    functions.sum((y + 1) * (y + 1)).backward()
    return [y.array] + [variable.grad for variable in variables]


CASES = [(dtype, sizes, (0, 1)) for dtype in DTYPES for sizes in SIZES] + [
    ('float32', 'several', wanted) for wanted in ((0,), (1,))
]


@pytest.mark.parametrize('dtype, sizes, wanted', CASES, ids=str)
@pytest.mark.parametrize('ratio', [0.0, 0.5])
def test_same_as_two_functions(xp, sizes, dtype, wanted, ratio):
    adj, x, W = inputs(xp, SIZES[sizes], dtype)
    found = []
    for function in (
        lambda x, W: convolved_relu(adj, x, W, ratio),
        lambda x, W: linear_relu(bspmm(adj, x), W, None, ratio),
    ):
        numpy.random.seed(0)
        xp.random.seed(0)
        found.append(outcome(function, x, W, wanted))
    for actual, expected in zip(*found):
        if expected is None:
            assert actual is None
        else:
            assert actual.dtype == dtype and actual.shape == expected.shape
            # The convolution maps before it sums: W is wider than it is high.
            assert relative_error(actual, expected) < BOUND[dtype]


def test_gradients(xp):
    adj, x, W = inputs(xp, SIZES['several'], 'float64')
    assert 10 < (convolved_relu(adj, x, W).array > 0).sum() < 42  # both sides of the bend
    check_gradients(lambda *a: (convolved_relu(adj, *a) + 1) ** 2, x, W)


def test_bad_input_is_refused():
    adj, x, W = inputs(numpy, (3, 2), 'float32')
    with pytest.raises(ValueError, match='dropout_ratio: .* got 1'):
        convolved_relu(adj, x, W, 1)
    with pytest.raises(TypeError, match='adj: '):
        convolved_relu(numpy.eye(5, dtype='f'), x, W)
    with pytest.raises(ValueError, match='x: '):
        convolved_relu(adj, x[1:], W)
