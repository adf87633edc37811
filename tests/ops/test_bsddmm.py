"""bsddmm: values, gradients, and what it refuses."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm import papers
from chainer_bspmm.functions import bsddmm
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import reference
from tests.support import widths_on
from tests.support.gradients import check_gradients
from tests.support.gradients import GRADIENT_BATCHES


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
def test_values(xp, name, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    for n_channels in widths_on(xp)[:-1] + (200,):
        u = features(rng, xp, adj.n_rows, n_channels, dtype)
        v = features(rng, xp, adj.n_cols, n_channels, dtype)
        assert_close(bsddmm(adj, u, v).array, reference.bsddmm(adj, u, v), dtype)


@pytest.mark.parametrize('n_channels', [4, 8, 12, 20, 36, 132, 257, 512, 1024])
def test_wide_factors_and_a_long_row(xp, n_channels):
    rng = numpy.random.RandomState(0)
    matrix = random_matrix(rng, 40)
    matrix[7] = 1
    adj = BatchedCSR.from_matrices([xp.asarray(matrix, 'f'), xp.ones((5, 5), 'f')])
    u = features(rng, xp, adj.n_rows, n_channels, 'float32')
    v = features(rng, xp, adj.n_cols, n_channels, 'float32')
    for sample, matrix in ((bsddmm, adj), (papers.bsddmm, papers.BatchedCOO.from_csr(adj))):
        w = sample(matrix, u, v).array
        assert_close(w, reference.bsddmm(matrix, u, v), 'float32')
        assert w.tobytes() == sample(matrix, u, v).array.tobytes()


def test_no_channels_gives_zeros(xp):
    adj = batch_on('many', xp, 'float32')
    w = bsddmm(adj, xp.empty((adj.n_rows, 0), 'f'), xp.empty((adj.n_cols, 0), 'f')).array
    assert w.shape == (adj.nnz,) and (w == 0).all()


def test_factors_that_are_not_contiguous(xp):
    rng = numpy.random.RandomState(0)
    adj = batch_on('many', xp, 'float32')
    u = features(rng, xp, 8, adj.n_rows, 'float32').T
    v = features(rng, xp, adj.n_cols, 16, 'float32')[:, ::2]
    assert_close(bsddmm(adj, u, v).array, reference.bsddmm(adj, u, v), 'float32')


@pytest.mark.parametrize('name', GRADIENT_BATCHES)
def test_gradients(xp, name):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float64')
    u = features(rng, xp, adj.n_rows, 3, 'float64')
    v = features(rng, xp, adj.n_cols, 3, 'float64')
    check_gradients(lambda u, v: bsddmm(adj, u, v) ** 2, u, v)


def test_padded_shape(xp):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([xp.asarray(random_matrix(rng, n)) for n in (3, 4)], 'padded')
    u = features(rng, xp, 8, 5, 'float64').reshape(2, 4, 5)
    assert_close(bsddmm(adj, u, u).array, reference.bsddmm(adj, u, u), 'float64')
    check_gradients(lambda u, v: bsddmm(adj, u, v) ** 2, u, u + 1)


@pytest.mark.parametrize(
    'u, v, error, message',
    [
        ((4, 2), (3, 2), ValueError, r'u: expected shape \(3, n_B\)'),
        ((3, 2), (4, 2), ValueError, r'v: expected shape \(3, n_B\)'),
        ((3, 2), (3, 1), ValueError, r'v: expected 2 channels as u, got shape \(3, 1\)'),
    ],
)
def test_bad_shapes(monkeypatch, u, v, error, message):
    monkeypatch.setattr(
        'chainer_bspmm.ops.bspmm.bsddmm_on_host', lambda *_: pytest.fail('launched')
    )
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2)), numpy.ones((1, 1))])
    with pytest.raises(error, match=message):
        bsddmm(adj, numpy.ones(u, 'f'), numpy.ones(v, 'f'))


def test_bad_types():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))])
    with pytest.raises(TypeError, match='v: expected float32, got float64'):
        bsddmm(adj, numpy.ones((2, 2), 'f'), numpy.ones((2, 2)))
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR, got ndarray'):
        bsddmm(numpy.ones((2, 2)), numpy.ones((2, 2)), numpy.ones((2, 2)))
