import types

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.backend import gpu
from chainer_bspmm.backend import policy

from kernel_cases import BATCHES, CHANNELS, DTYPES
from kernel_cases import assert_exact, batch, integers


def check(device, adj, dtype, n_channels, values='own', with_residual=False, trans=False, shift=0):
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    x = device.put(integers((n_in, n_channels), dtype, seed=2), shift)
    residual = data = None
    if with_residual:
        residual = device.put(integers((n_out, n_channels), dtype, seed=3))
    if values == 'given':
        data = integers(adj.nnz, dtype, seed=4)
    elif values == 'ones':
        adj = adj._copy()
        adj.data = None
    y = gpu.bspmm(adj, x, data, residual, trans)
    assert_exact(y, reference.bspmm(adj, x, data, residual, trans), dtype)
    return device.launched[-1]


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, batch('small' if n_channels > 64 else 'mixed', dtype), dtype, n_channels)


@pytest.mark.parametrize('with_residual', [False, True])
@pytest.mark.parametrize('values, trans, weights', [
    ('ones', False, 0), ('ones', True, 0), ('own', True, 1), ('given', False, 1),
    ('given', True, 2)])
@pytest.mark.parametrize('dtype, n_channels', [('e', 8), ('f', 3)])
def test_values(device, dtype, n_channels, values, trans, weights, with_residual):
    defines = check(device, batch('relations', dtype), dtype, n_channels, values, with_residual,
                    trans)
    assert defines['WEIGHTS'] == weights


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name, trans):
    check(device, batch(name, 'f'), 'f', 3, 'given', True, trans)


@pytest.mark.parametrize('dtype, shift, width', [
    ('e', 0, 8), ('e', 8, 4), ('e', 4, 2), ('e', 2, 1), ('f', 8, 2), ('f', 4, 1), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    assert check(device, batch('small', dtype), dtype, 16, shift=shift)['VECTOR'] == width


def test_unaligned_residual(device):
    adj = batch('small', 'f')
    x = device.put(integers((adj.n_cols, 4), 'f'))
    residual = device.put(integers((adj.n_rows, 4), 'f', seed=1), shift=4)
    assert_exact(gpu.bspmm(adj, x, None, residual, False),
                 reference.bspmm(adj, x, residual=residual), 'f')
    assert device.launched[-1]['VECTOR'] == 1


def test_three_dimensional_input(device):
    adj = batch('padded', 'f')
    x = device.put(integers((adj.n_graphs, adj.max_rows, 4), 'f'))
    assert_exact(gpu.bspmm(adj, x, None, None, False), reference.bspmm(adj, x), 'f')


def test_input_that_is_not_contiguous(device):
    adj = batch('small', 'f')
    x = device.put(integers((6, adj.n_cols), 'f')).T
    data = device.put(integers(2 * adj.nnz, 'f', seed=1))[::2]
    residual = device.put(integers((adj.n_rows, 12), 'f', seed=2))[:, ::2]
    assert_exact(gpu.bspmm(adj, x, data, residual, False),
                 reference.bspmm(adj, x, data, residual), 'f')


def test_blocks_that_stride_over_the_channels(device, monkeypatch):
    plan = policy.row_launch
    monkeypatch.setattr(policy, 'row_launch', lambda *sizes: plan(*sizes)._replace(
        grid=(plan(*sizes).grid[0], 2, 1)))
    check(device, batch('small', 'f'), 'f', 33 * 4 * 3, with_residual=True)


def test_capacity_beyond_the_batch(device):
    adj = batch('small', 'f')
    spare = 5
    larger = types.SimpleNamespace(
        n_rows=adj.n_rows + spare, n_cols=adj.n_cols + spare, nnz=adj.nnz + spare,
        indptr=numpy.pad(adj.indptr, (0, spare), mode='edge'),
        # A column that no row has, so that reading it would be an error.
        indices=numpy.pad(adj.indices, (0, spare), constant_values=2 ** 30),
        data=numpy.pad(adj.data, (0, spare), constant_values=numpy.nan))
    x = device.put(integers((larger.n_cols, 4), 'f'))
    y = gpu.bspmm(larger, x, None, None, False)
    assert_exact(y, reference.bspmm(larger, x), 'f')
    assert not y[adj.n_rows:].any()


@pytest.mark.parametrize('dtype', DTYPES)
def test_nan_reaches_its_rows_only(device, dtype):
    adj = batch('mixed', dtype)
    x = device.put(integers((adj.n_cols, 3), dtype))
    x[10, 1] = numpy.nan
    data = adj.data.copy()
    data[2] = numpy.nan
    y = gpu.bspmm(adj, x, data, None, False)
    assert 3 < numpy.isnan(y).sum() < y.size // 2
    assert_exact(y, reference.bspmm(adj, x, data), dtype)


@pytest.mark.parametrize('n_rows, n_channels', [(0, 3), (3, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels):
    adj = BatchedCSR.from_matrices([numpy.ones((n_rows, n_rows), 'f')])
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    assert gpu.bspmm(adj, x, None, None, False).shape == (n_rows, n_channels)
    assert not device.launched
