"""Rows of a table against Chainer's embed_id, gradients to second order, the same bits again."""

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.ops.embed_rows import embed_rows
from tests.support import DTYPES
from tests.support import features
from tests.support import relative_error
from tests.support import TOLERANCE
from tests.support.gradients import check_gradients


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('ids_dtype', ['int32', 'int64'])
@pytest.mark.parametrize('n_rows, n_types, n_channels', [(300, 7, 5), (1, 1, 1), (0, 4, 2)])
def test_same_as_chainers_own(xp, dtype, ids_dtype, n_rows, n_types, n_channels):
    rng = numpy.random.RandomState(0)
    ids = rng.randint(0, max(n_types - 1, 1), n_rows).astype(ids_dtype)  # the last one is unused
    W = rng.uniform(-1, 1, (n_types, n_channels)).astype(dtype)
    gy = rng.uniform(-1, 1, (n_rows, n_channels)).astype(dtype)
    table = chainer.Variable(xp.asarray(W))
    y = embed_rows(xp.asarray(ids), table)
    numpy.testing.assert_array_equal(cuda.to_cpu(y.array), W[ids])
    y.grad = xp.asarray(gy)
    y.backward()
    expected = numpy.zeros(W.shape)
    numpy.add.at(expected, ids, gy.astype('f8'))
    assert table.grad.dtype == dtype
    assert relative_error(table.grad, expected) < TOLERANCE[dtype]


def test_gradients(xp):
    rng = numpy.random.RandomState(0)
    ids = xp.asarray(rng.randint(0, 4, 30).astype('i'))
    check_gradients(lambda W: embed_rows(ids, W) ** 2, features(rng, xp, 5, 3, 'float64'))


def test_ids_that_are_not_contiguous(xp):
    ids = xp.arange(12, dtype='i')[::2]
    W = chainer.Variable(xp.arange(24, dtype='f').reshape(12, 2))
    functions.sum(embed_rows(ids, W)).backward()
    assert cuda.to_cpu(W.grad).tolist() == [[1.0, 1.0], [0.0, 0.0]] * 6


def test_the_same_bits_again(xp):
    rng = numpy.random.RandomState(0)
    ids, W = xp.asarray(rng.randint(0, 3, 5000).astype('i')), features(rng, xp, 3, 33, 'float32')
    gy = features(rng, xp, 5000, 33, 'float32')

    def gradient():
        table = chainer.Variable(W)
        y = embed_rows(ids, table)
        y.grad = gy
        y.backward()
        return cuda.to_cpu(table.grad).tobytes()

    assert len({gradient() for _ in range(5)}) == 1


def test_rows_of_no_type_have_no_gradient(xp):
    """Ids are not checked; those outside of the table must not write outside of its gradient."""
    W = chainer.Variable(xp.ones((3, 2), 'f'))
    ids = xp.array([-1, 0, 2, -3, 0], 'i')
    chainer.functions.sum(embed_rows(ids, W)).backward()
    numpy.testing.assert_array_equal(cuda.to_cpu(W.grad), [[2, 2], [0, 0], [1, 1]])
