"""The SpMV of both containers: kernels/papers/spmv_csr.cu, and bspmm_sell.cu with one column."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm.papers import gpu
from chainer_bspmm.papers import policy
from tests.emulation.kernel_cases import assert_exact, batch, integers
from tests.emulation.kernel_cases import BATCHES, DTYPES
from tests.support import reference


# Exact in every dtype: powers of two and small integers.
FACTORS = [(1, 0), (1, 1), (2, 0), (-0.5, 2), (0, 1), (0, 0), (1, -1)]
FORMS = {
    'csr': lambda adj: adj,
    'sell 1': lambda adj: BatchedSELL(adj, 1),
    'sell 7 sorted': lambda adj: BatchedSELL(adj, 7, True),
    'sell 32': lambda adj: BatchedSELL(adj, 32),
}


def check(device, adj, dtype, form='csr', alpha=2, beta=-3):
    x = device.put(integers(adj.n_cols, dtype, seed=2))
    y = device.put(integers(adj.n_rows, dtype, seed=3))
    expected = reference.spmv(adj, x, alpha, beta, y)
    if beta == 0:
        y.fill(numpy.nan)  # which must not be read
    assert gpu.spmv(FORMS[form](adj), x, alpha, beta, y) is y
    assert_exact(y, expected, dtype)
    return device.launched[-1]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('alpha, beta', FACTORS)
def test_factors(device, form, dtype, alpha, beta):
    check(device, batch('mixed', dtype), dtype, form, alpha, beta)


@pytest.mark.parametrize('form', ['csr', 'sell 7 sorted'])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name, form):
    check(device, batch(name, 'f'), 'f', form)


@pytest.mark.parametrize('lanes', [1, 2, 4, 8, 16, 32])
def test_lanes(device, monkeypatch, lanes):
    plan = policy.spmv_launch
    monkeypatch.setattr(policy, 'spmv_launch', lambda n_rows, nnz: plan(n_rows, 4 * n_rows * lanes))
    assert check(device, batch('mixed', 'f'), 'f')['LANES'] == lanes


def test_rows_as_long_as_the_policy_asks_for(device):
    adj = BatchedCSR.from_matrices([integers((40, 40), 'd', seed=1)])
    assert check(device, adj, 'd')['LANES'] == 16


@pytest.mark.parametrize('form', FORMS)
def test_implicit_ones(device, form):
    adj = batch('mixed', 'f').replace()
    adj.data = None
    assert check(device, adj, 'f', form)['WEIGHTS'] == 0


@pytest.mark.parametrize('form', FORMS)
def test_new_result(device, form):
    adj = batch('mixed', 'f')
    x = device.put(integers((adj.n_cols, 2), 'f'))[:, 0]  # not contiguous
    y = gpu.spmv(FORMS[form](adj), x, 1, 0, None)
    assert_exact(y, reference.spmv(adj, x), 'f')


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('beta', [numpy.nan, numpy.inf])
def test_beta_that_is_not_finite(device, form, beta):
    adj = batch('small', 'f')
    x, y = device.put(integers(adj.n_cols, 'f')), device.put(numpy.ones(adj.n_rows, 'f'))
    gpu.spmv(FORMS[form](adj), x, 1, beta, y)
    numpy.testing.assert_array_equal(y, numpy.full(adj.n_rows, beta))


@pytest.mark.parametrize('form', FORMS)
def test_nan_and_infinity_reach_their_rows_only(device, form):
    adj = batch('mixed', 'f')
    x, y = (device.put(integers(adj.n_cols, 'f', seed=seed)) for seed in (2, 3))
    x[0], x[10], y[1] = numpy.inf, numpy.nan, numpy.nan
    expected = reference.spmv(adj, x, 2, -3, y)
    assert 3 < (~numpy.isfinite(expected)).sum() < expected.size // 2
    assert_exact(gpu.spmv(FORMS[form](adj), x, 2, -3, y), expected, 'f')


@pytest.mark.parametrize('form', FORMS)
def test_no_rows_launch_nothing(device, form):
    adj = BatchedCSR.from_matrices([numpy.ones((0, 0), 'f')])
    assert gpu.spmv(FORMS[form](adj), device.put(numpy.zeros(0, 'f')), 1, 0, None).shape == (0,)
    assert not device.launched
