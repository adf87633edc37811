"""bspmm with a BatchedSELL: values, gradients, and what it refuses."""
import numpy
import pytest

import chainer

from chainer_bspmm import backend
from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import functions
from chainer_bspmm import reference
from chainer_bspmm.functions import bspmm
from tests.functions.test_bspmm import check_gradients
from tests.functions.test_bspmm import GRADIENT_BATCHES
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features

SIZES = (1, 2, 7, 32, 64, 1000)
WIDTHS = (1, 2, 3, 4, 7, 8, 9, 31, 64)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('sort_rows', [False, True])
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('name', BATCHES)
def test_product(xp, name, size, sort_rows, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    sell = BatchedSELL(adj, size, sort_rows)
    # Every width once, every size of slice with the narrowest.
    for n_channels in WIDTHS if size in (7, 32) else (1, 4):
        for trans in (False, True):
            n_in, n_out = adj.shape if trans else adj.shape[::-1]
            x = features(rng, xp, n_in, n_channels, dtype)
            residual = features(rng, xp, n_out, n_channels, dtype)
            assert_close(backend.bspmm(sell, x, None, residual, trans),
                         reference.bspmm(adj, x, None, residual, trans), dtype)
            assert_close(backend.bspmm(sell, x, trans=trans),
                         reference.bspmm(adj, x, trans=trans), dtype)


def test_no_channels_and_no_graphs(xp):
    sell = BatchedSELL(batch_on('many', xp, 'float32'))
    assert bspmm(sell, xp.empty((sell.n_cols, 0), 'f')).shape == (sell.n_rows, 0)
    sell = BatchedSELL(BatchedCSR(xp.array([0]), xp.array([], 'i'), xp.array([0])))
    assert bspmm(sell, xp.empty((0, 5), 'f')).shape == (0, 5)


def test_same_bits_every_time(xp):
    rng = numpy.random.RandomState(0)
    sell = BatchedSELL(batch_on('dense blocks', xp, 'float32'), 32, True)
    x = features(rng, xp, sell.n_cols, 5, 'float32')
    first = bspmm(sell, x).array
    for _ in range(3):
        assert (bspmm(sell, x).array == first).all()


def test_three_dimensional_input(xp):
    rng = numpy.random.RandomState(0)
    adj = batch_on('padded', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 3, 'float32').reshape(adj.n_graphs, -1, 3)
    y = bspmm(BatchedSELL(adj, 7), x, residual=x).array
    assert_close(y, reference.bspmm(adj, x, residual=x), 'float32')


@pytest.mark.parametrize('n_channels', [1, 3, 9])
@pytest.mark.parametrize('form', [(1, False), (7, True), (32, False)], ids=str)
@pytest.mark.parametrize('name', GRADIENT_BATCHES)
def test_gradients(xp, name, form, n_channels):
    rng = numpy.random.RandomState(0)
    sell = BatchedSELL(batch_on(name, xp, 'float64'), *form)
    x = features(rng, xp, sell.n_cols, n_channels, 'float64')
    residual = features(rng, xp, sell.n_rows, n_channels, 'float64')
    check_gradients(lambda x, r: bspmm(sell, x, residual=r) ** 2, x, residual)


@pytest.mark.parametrize('dtype', DTYPES)
def test_gradient_values_and_dtype(xp, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on('four relations', xp, dtype)
    x = chainer.Variable(features(rng, xp, adj.n_cols, 4, dtype))
    y = bspmm(BatchedSELL(adj, 7, True), x)
    y.grad = gy = features(rng, xp, adj.n_rows, 4, dtype)
    y.backward()
    assert_close(x.grad, reference.bspmm(adj, gy, trans=True), dtype)


# --- what is refused ---

@pytest.mark.parametrize('changes, error, message', [
    ({'x': numpy.ones((4, 2), 'f')}, ValueError,
     r'x: expected shape \(3, n_B\) to go with <BatchedSELL.* got \(4, 2\)'),
    ({'x': numpy.ones((3, 2))}, TypeError, 'x: expected float32 as the values of adj, got float64'),
    ({'data': numpy.ones(2, 'f')}, ValueError,
     'data: expected None, because a BatchedSELL .* got ndarray; edge values go with a BatchedCSR'),
    ({'residual': numpy.ones((3, 1), 'f')}, ValueError, r'residual: expected shape \(3, 2\)'),
    ({'algorithm': 'vector'}, ValueError,
     "algorithm with a BatchedSELL: expected one of 'auto', got 'vector'"),
])
def test_bad_input(monkeypatch, changes, error, message):
    monkeypatch.setattr(backend.cpu, 'bspmm', lambda *_: pytest.fail('launched'))
    sell = BatchedSELL(BatchedCSR.from_matrices([numpy.full((2, 2), 3, 'f'), numpy.eye(1)])).astype(
        'float32')
    with pytest.raises(error, match=message):
        bspmm(**dict({'adj': sell, 'x': numpy.ones((3, 2), 'f')}, **changes))


def test_other_functions_want_csr():
    sell, x = BatchedSELL(BATCHES['one graph']), numpy.ones((5, 2))
    for call in (lambda: functions.bsddmm(sell, x, x), lambda: functions.segment_sum(sell, x)):
        with pytest.raises(TypeError, match='adj: expected a BatchedCSR or BatchedCOO, got'):
            call()
