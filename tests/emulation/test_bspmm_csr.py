import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda.plans import widest_vector
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.bspmm import csr_launch
from tests.emulation.kernel_cases import assert_exact, batch, integers, with_room
from tests.emulation.kernel_cases import BATCHES, CHANNELS, CSR_VARIANTS, DTYPES
from tests.support import reference


def check(device, adj, dtype, n_channels, values='own', with_residual=False, trans=False, shift=0):
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
    y = bspmm_forward(adj, x, data, residual, trans)
    assert_exact(y, reference.bspmm(adj, x, data, residual, trans), dtype)
    return device.launched[-1]


@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, batch('small' if n_channels > 64 else 'mixed', dtype), dtype, n_channels)


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
        device, batch('relations', dtype), dtype, n_channels, values, with_residual, trans
    )
    assert defines['WEIGHTS'] == weights


@pytest.mark.parametrize('trans', [False, True])
def test_values_of_a_symmetric_pattern(device, trans):
    """Such a matrix is its own transpose; with outside values the two must be distinguished."""
    matrix = abs(integers((9, 9), 'f')) > 150
    adj = BatchedCSR.from_matrices([(matrix | matrix.T).astype('f')])
    assert adj.T is adj
    data = integers(adj.nnz, 'f', seed=4)
    assert (data != data[adj.transpose_order]).any()
    assert check(device, adj, 'f', 3, 'given', True, trans)['WEIGHTS'] == (2 if trans else 1)


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name, trans):
    check(device, batch(name, 'f'), 'f', 3, 'given', True, trans)


@pytest.mark.parametrize(
    'dtype, shift, width',
    [('e', 0, 8), ('e', 8, 4), ('e', 4, 2), ('e', 2, 1), ('f', 8, 2), ('f', 4, 1), ('d', 8, 1)],
)
def test_unaligned_input(device, dtype, shift, width):
    assert check(device, batch('small', dtype), dtype, 16, shift=shift)['VECTOR'] == width


def test_unaligned_residual(device):
    adj = batch('small', 'f')
    x = device.put(integers((adj.n_cols, 4), 'f'))
    residual = device.put(integers((adj.n_rows, 4), 'f', seed=1), shift=4)
    assert_exact(
        bspmm_forward(adj, x, None, residual, False),
        reference.bspmm(adj, x, residual=residual),
        'f',
    )
    assert device.launched[-1]['VECTOR'] == 1


def test_three_dimensional_input(device):
    adj = batch('padded', 'f')
    x = device.put(integers((adj.n_graphs, adj.max_rows, 4), 'f'))
    assert_exact(bspmm_forward(adj, x, None, None, False), reference.bspmm(adj, x), 'f')


def test_input_that_is_not_contiguous(device):
    adj = batch('small', 'f')
    x = device.put(integers((6, adj.n_cols), 'f')).T
    data = device.put(integers(2 * adj.nnz, 'f', seed=1))[::2]
    residual = device.put(integers((adj.n_rows, 12), 'f', seed=2))[:, ::2]
    assert_exact(
        bspmm_forward(adj, x, data, residual, False), reference.bspmm(adj, x, data, residual), 'f'
    )


@pytest.mark.parametrize('dtype, n_channels, options', CSR_VARIANTS)
@pytest.mark.parametrize('values, trans', [('ones', False), ('own', False), ('given', True)])
@pytest.mark.parametrize('name', ['mixed', 'duplicates', 'empty graphs', 'relations'])
def test_variants(device, monkeypatch, name, values, trans, dtype, n_channels, options):
    adj = batch(name, dtype)
    n_rows, n_cols = (adj.n_cols, adj.n_rows) if trans else (adj.n_rows, adj.n_cols)
    width = widest_vector(n_channels, numpy.dtype(dtype).itemsize, 0)
    plan = csr_launch(n_rows, n_cols, n_channels, width, block=32, **options)
    monkeypatch.setattr('chainer_bspmm.ops.bspmm.bspmm_launch', lambda *_: plan)
    defines = check(device, adj, dtype, n_channels, values, True, trans)
    assert defines['COLUMNS'] == options.get('columns', 1)
    assert defines['PIPELINED'] == ('rows_per_thread' in options)


@pytest.mark.parametrize('grid', [(2, 3), (3, 2)])
def test_tiles_in_two_dimensions_of_the_grid(device, monkeypatch, grid):
    plan = csr_launch
    adj = batch('small', 'f')

    def planned(*_):
        launch = plan(adj.n_rows, adj.n_cols, 8 * 5 * 4, 4, 8)
        return launch._replace(grid=(launch.grid[0], *grid))

    monkeypatch.setattr('chainer_bspmm.ops.bspmm.bspmm_launch', planned)
    check(device, adj, 'f', 8 * 5 * 4, with_residual=True)


def test_offsets_of_64_bits(device, monkeypatch):
    adj = batch('small', 'f')
    plan = csr_launch(adj.n_rows, adj.n_cols, 8, 4, 2)
    defines = tuple((name, 'size_t' if name == 'OFFSET' else value) for name, value in plan.defines)
    monkeypatch.setattr(
        'chainer_bspmm.ops.bspmm.bspmm_launch', lambda *_: plan._replace(defines=defines)
    )
    assert check(device, adj, 'f', 8)['OFFSET'] == 'size_t'


@pytest.mark.parametrize('algorithm', ['vector', 'pipelined'])
def test_capacity_beyond_the_batch(device, algorithm):
    adj = batch('small', 'f')
    larger = with_room(adj, 5)
    x = device.put(integers((larger.n_cols, 4), 'f'))
    y = bspmm_forward(larger, x, None, None, False, algorithm)
    assert_exact(y, reference.bspmm(larger, x), 'f')
    assert not y[adj.n_rows :].any()


# The last entry is loaded again instead of those that a row lacks: a value that is not finite must
# not be added because of that, not even times 0.
@pytest.mark.parametrize('algorithm', ['vector', 'pipelined'])
@pytest.mark.parametrize('dtype', DTYPES)
def test_nan_reaches_its_rows_only(device, dtype, algorithm):
    adj = batch('mixed', dtype)
    x = device.put(integers((adj.n_cols, 3), dtype))
    x[10, 1] = numpy.nan
    data = adj.data.copy()
    data[2] = numpy.nan
    y = bspmm_forward(adj, x, data, None, False, algorithm)
    assert 3 < numpy.isnan(y).sum() < y.size // 2
    assert_exact(y, reference.bspmm(adj, x, data), dtype)


@pytest.mark.parametrize('n_rows, n_channels', [(0, 3), (3, 0)])
def test_empty_result_launches_nothing(device, n_rows, n_channels):
    adj = BatchedCSR.from_matrices([numpy.ones((n_rows, n_rows), 'f')])
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    assert bspmm_forward(adj, x, None, None, False).shape == (n_rows, n_channels)
    assert not device.launched
