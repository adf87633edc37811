import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm import papers
from chainer_bspmm.papers.products import bspmm_forward
from chainer_bspmm.papers import policy
from tests import support
from tests.emulation import kernel_cases
from tests.emulation.kernel_cases import assert_exact, batch, integers
from tests.emulation.kernel_cases import CHANNELS, DTYPES
from tests.support import reference

NAMES = ('swa', 'swa_rows', 'swa_blocked')


def check(
    device,
    adj,
    dtype,
    n_channels,
    algorithm='swa',
    values='own',
    with_residual=False,
    trans=False,
    shift=0,
):
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    x = device.put(integers((n_in, n_channels), dtype, seed=2), shift)
    residual = data = None
    if with_residual:
        residual = device.put(integers((n_out, n_channels), dtype, seed=3))
    if values == 'given':
        data = integers(adj.nnz, dtype, seed=4)
    elif values == 'ones':
        adj = adj.replace()
        adj.data = None
    y = bspmm_forward(adj, x, data, residual, trans, algorithm)
    assert_exact(y, reference.bspmm(adj, x, data, residual, trans), dtype)
    return device.launched[-1] if device.launched else None


@pytest.mark.parametrize('algorithm', NAMES)
@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels, algorithm):
    check(device, batch('small', dtype), dtype, n_channels, algorithm)


@pytest.mark.parametrize('n_channels, lanes', [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)])
def test_subwarps(device, n_channels, lanes):
    defines = check(device, batch('mixed', 'f'), 'f', n_channels, with_residual=True)
    assert defines['SUBWARP'] == lanes


@pytest.mark.parametrize('with_residual', [False, True])
@pytest.mark.parametrize(
    'values, trans, weights',
    [
        ('ones', False, 0),
        ('ones', True, 0),
        ('own', True, 1),
        ('given', False, 1),
        ('given', True, 2),
    ],
)
@pytest.mark.parametrize('dtype, n_channels', [('e', 8), ('f', 3)])
def test_values(device, dtype, n_channels, values, trans, weights, with_residual):
    defines = check(
        device, batch('relations', dtype), dtype, n_channels, 'swa', values, with_residual, trans
    )
    assert defines['WEIGHTS'] == weights


@pytest.mark.parametrize('algorithm', NAMES)
@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', kernel_cases.BATCHES)
def test_batches(device, name, trans, algorithm):
    check(device, batch(name, 'f'), 'f', 3, algorithm, 'given', True, trans)


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', support.BATCHES)
def test_batches_of_the_package_tests(device, name, trans):
    # Width 2, because on the CPU a block takes time for each of its lanes.
    check(device, support.BATCHES[name].astype('f'), 'f', 2, 'swa_blocked', 'given', True, trans)


@pytest.mark.parametrize(
    'dtype, n_channels, partitions',
    [
        ('f', 2048, 1),
        ('f', 2049, 2),
        ('f', 4097, 4),
        ('e', 2049, 2),
        ('d', 1024, 1),
        ('d', 1025, 2),
    ],
)
def test_partitions_about_the_budget(device, dtype, n_channels, partitions):
    adj = batch('small', dtype)
    launch = policy.swa_launch(adj.n_graphs, adj.max_rows, n_channels, numpy.dtype(dtype).itemsize)
    assert launch.grid[1] == partitions
    check(device, adj, dtype, n_channels)


@pytest.mark.parametrize('dtype', DTYPES)
def test_input_that_is_aligned_to_an_element_only(device, dtype):
    check(device, batch('small', dtype), dtype, 16, shift=numpy.dtype(dtype).itemsize)


def test_three_dimensional_input(device):
    adj = batch('padded', 'f')
    x = device.put(integers((adj.n_graphs, adj.max_rows, 4), 'f'))
    assert_exact(bspmm_forward(adj, x, None, None, False, 'swa'), reference.bspmm(adj, x), 'f')


@pytest.mark.parametrize('dtype', DTYPES)
def test_nan_reaches_its_rows_only(device, dtype):
    adj = batch('mixed', dtype)
    x = device.put(integers((adj.n_cols, 3), dtype))
    x[10, 1] = numpy.nan
    data = adj.data.copy()
    data[2] = numpy.nan
    y = bspmm_forward(adj, x, data, None, False, 'swa')
    assert 3 < numpy.isnan(y).sum() < y.size // 2
    assert_exact(y, reference.bspmm(adj, x, data), dtype)


def test_rows_beyond_the_last_graph_are_not_written(device):
    adj = batch('small', 'f').replace()
    adj.n_rows += 3
    x = device.put(integers((adj.n_cols, 4), 'f'))
    y = bspmm_forward(adj, x, None, None, False, 'swa')
    assert numpy.isnan(y[-3:]).all() and not numpy.isnan(y[:-3]).any()


@pytest.mark.parametrize('algorithm', NAMES)
def test_batch_with_spare_rows_is_refused(device, algorithm):
    """They would stay as they were."""
    adj = batch('small', 'f').replace()
    adj.has_spare = True
    x = device.put(integers((adj.n_cols, 4), 'f'))
    with pytest.raises(ValueError, match='adj: expected no spare rows'):
        papers.bspmm(adj, x, algorithm=algorithm)


@pytest.mark.parametrize('n_rows, n_channels', [(0, 3), (3, 0)])
@pytest.mark.parametrize('algorithm', NAMES)
def test_empty_result_launches_nothing(device, n_rows, n_channels, algorithm):
    adj = BatchedCSR.from_matrices([numpy.ones((n_rows, n_rows), 'f')])
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    assert bspmm_forward(adj, x, None, None, False, algorithm).shape == (n_rows, n_channels)
    assert not device.launched


def test_rows_that_do_not_fit(device):
    adj = batch('small', 'd')
    x = device.put(numpy.zeros((adj.n_cols, 1025)))
    with pytest.raises(ValueError, match='^algorithm: swa_rows .* 32768 .* n_B = 1025'):
        bspmm_forward(adj, x, None, None, False, 'swa_rows')
    assert not device.launched
