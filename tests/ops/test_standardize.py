"""Scaling by mean and deviation as one node: its formula, gradients, second derivatives."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.ops import standardize as module
from chainer_bspmm.ops.standardize import standardize
from tests.support.gradients import check_gradients, outcome


def arrays(xp, dtype, mean_dtype='float32'):
    rng = numpy.random.RandomState(0)
    x, mean = rng.uniform(-1, 1, (6, 3)).astype(dtype), rng.uniform(-1, 1, 3).astype(mean_dtype)
    return xp.asarray(x), xp.asarray(mean), xp.asarray(numpy.array([0.5, 0, 3], 'f'))


@pytest.mark.parametrize('inverse', [False, True])
@pytest.mark.parametrize('dtype, mean_dtype', [('f', 'f'), ('f', 'd'), ('d', 'd'), ('e', 'f')])
def test_as_chainer_s_nodes(xp, inverse, dtype, mean_dtype):
    x, mean, std = arrays(xp, dtype, mean_dtype)
    one_for_zero = xp.where(std == 0, numpy.float32(1), std)

    def composed(x):
        return x * one_for_zero + mean if inverse else (x - mean) / one_for_zero

    found = outcome(lambda x: standardize(x, mean, std, inverse), [x])
    for one, other in zip(found, outcome(composed, [x])):
        assert one.dtype == other.dtype == dtype
        numpy.testing.assert_array_equal(cuda.to_cpu(one), cuda.to_cpu(other))


@pytest.mark.parametrize('inverse', [False, True])
def test_gradients(xp, inverse):
    x, mean, std = arrays(xp, 'd', 'd')
    check_gradients(lambda x: standardize(x, mean, std.astype('d'), inverse) ** 2, x)


@pytest.mark.parametrize('inverse', [False, True])
@pytest.mark.parametrize('shape', [(9, 5), (1, 1), (300, 12)])
def test_launches_have_the_bits_of_the_host(gpu, shape, inverse):
    rng = numpy.random.RandomState(0)
    x, mean, std = (rng.uniform(0, 9, n).astype('f') for n in (shape, shape[1], shape[1]))
    std[1::3] = 0
    for arguments in ((x, mean, std), (x, numpy.float32(0), std)):  # value and gradient
        expected = module._scaled(*arguments, inverse=inverse)
        actual = module._scaled(*map(gpu.put, arguments), inverse=inverse)
        assert actual.dtype == expected.dtype == 'float32'
        numpy.testing.assert_array_equal(cuda.to_cpu(actual), expected)
