"""row_sum, the gradient of a bias: values, rounding over many rows."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.ops.segments import row_sum
from tests.support import assert_close
from tests.support import DTYPES
from tests.support import features
from tests.support import relative_error


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'shape', [(50, 7), (1, 1), (0, 4), (2, 3), (3, 1), (49, 5), (3000, 2), (5, 0)], ids=str
)
def test_values(xp, shape, dtype):
    # Positive values: otherwise a sum could be small compared with the rounding of its terms.
    x = features(numpy.random.RandomState(0), xp, *shape, dtype=dtype) + 2
    assert_close(row_sum(x), cuda.to_cpu(x).astype('d').sum(axis=0), dtype)
    assert_close(row_sum(x[::-1, ::-1]), cuda.to_cpu(x).astype('d').sum(axis=0)[::-1], dtype)


def test_rounding_over_many_rows():
    x = (numpy.random.RandomState(0).normal(size=(200000, 8)) + 0.3).astype('f')
    truth = x.astype('d').sum(axis=0)
    assert relative_error(row_sum(x), truth) < 1e-6
    assert relative_error(x.sum(axis=0), truth) > 3e-6  # which row_sum avoids
