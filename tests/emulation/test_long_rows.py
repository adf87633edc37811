"""Rows in pieces, by kernels/bspmm_csr.cu, bsddmm_csr.cu and sum_pieces.cu."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda.plans import WARP
from chainer_bspmm.ops.bspmm import AHEAD_LONG
from chainer_bspmm.ops.bspmm import bsddmm_forward
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.bspmm import csr_launch
from chainer_bspmm.ops.bspmm import piece_length
from tests.emulation.kernel_cases import assert_exact, batch, integers, with_room
from tests.emulation.kernel_cases import DTYPES
from tests.support import reference

PIECE = 4
PIECE_LENGTH = piece_length
# Lengths of rows. A long row begins with a chunk, ends with one, is followed by another or by empty
# ones, comes first or last, and has one entry more than a piece or many.
ROWS = {
    'first': [5, 0, 1],
    'last': [3, 5],
    'side by side': [1, 6, 5, 5, 2, 0, 0, 7],
    'whole chunks': [4, 8, 4, 12],
    'short ones': [3, 4, 0, 1],
    'one': [23],
    'many pieces': [3, 71, 2, 33, 0, 37, 4, 36, 41],
    'none': [0, 0],
    'empty ones around': [0, 0, 9, 0, 0, 0, 30, 0],
}


def rows_of(lengths, dtype, n_cols=None):
    """Return one graph with rows of these lengths; entries may name the same place."""
    n_rows = max(len(lengths), n_cols or 0)
    lengths = numpy.pad(lengths, (0, n_rows - len(lengths)))
    nnz = int(lengths.sum())
    return BatchedCSR(
        numpy.append(0, numpy.cumsum(lengths)),
        numpy.random.RandomState(0).randint(0, n_rows, nnz),
        numpy.array([0, n_rows]),
        integers(nnz, dtype, {'e': 7, 'f': 63, 'd': 2**20}, seed=1),
    )


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(
        'chainer_bspmm.ops.bspmm.piece_length', lambda n_rows, n_cols, nnz, *_: PIECE if nnz else 0
    )


def check(device, adj, dtype, n_channels, data=None, with_residual=False, trans=False):
    factor = {'e': 7, 'f': 63, 'd': 2**20}
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    x = device.put(integers((n_in, n_channels), dtype, factor, seed=2))
    residual = None
    if with_residual:
        residual = device.put(integers((n_out, n_channels), dtype, seed=3))
    y = bspmm_forward(adj, x, data, residual, trans)
    assert_exact(y, reference.bspmm(adj, x, data, residual, trans), dtype)
    defines = [launched for launched in device.launched if 'WEIGHTS' in launched]
    assert defines[-1].get('PIECES', 0) == (adj.nnz > 0)
    assert (device.launched[-1] is defines[-1]) == (adj.nnz == 0)


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_rows(device, name, dtype):
    adj = rows_of(ROWS[name], dtype)
    check(device, adj, dtype, 5, with_residual=True)
    check(device, adj, dtype, 8)
    check(device, adj, dtype, 3, trans=True)


@pytest.mark.parametrize('n_channels', [1, 31, 33, 64, 200])
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels):
    check(device, rows_of(ROWS['side by side'], dtype), dtype, n_channels, with_residual=True)


@pytest.mark.parametrize('trans', [False, True])
def test_given_values(device, trans):
    adj = rows_of(ROWS['side by side'], 'f', 12)
    check(device, adj, 'f', 4, integers(adj.nnz, 'f', seed=4), True, trans)
    check(device, adj.replace(data=None), 'f', 4, trans=trans)


@pytest.mark.parametrize('options', [{'stream': True}, {'lanes': 2}, {'OFFSET': 'size_t'}], ids=str)
def test_variants(device, monkeypatch, options):
    """Results written past the cache, several blocks side by side, more vectors than 2^32."""
    adj, constants = rows_of(ROWS['many pieces'], 'f'), {}
    if 'OFFSET' in options:
        options, constants = {}, options
    options = {'lanes': WARP, 'ahead': AHEAD_LONG, **options}
    plan = csr_launch(adj.n_rows, adj.n_cols, 32, 4, **options)
    plan = plan._replace(defines=tuple(dict(plan.defines, **constants).items()))
    monkeypatch.setattr('chainer_bspmm.ops.bspmm.bspmm_launch', lambda *_: plan)
    check(device, adj, 'f', 32, with_residual=True)


@pytest.mark.parametrize('name', ['mixed', 'relations', 'padded', 'duplicates'])
def test_batches(device, name):
    check(device, batch(name, 'f'), 'f', 3, with_residual=True)


@pytest.mark.parametrize('name', ['last', 'one', 'none', 'whole chunks'])
def test_capacity_beyond_the_batch(device, name):
    adj = rows_of(ROWS[name], 'f')
    check(device, with_room(adj, 3 * PIECE + 1), 'f', 4)


def test_nan_reaches_its_rows_only(device):
    adj = rows_of(ROWS['side by side'], 'f')
    x = device.put(integers((adj.n_cols, 3), 'f'))
    x[adj.indices[3], 1] = numpy.nan
    y = bspmm_forward(adj, x, None, None, False)
    assert numpy.isnan(y).any() and not numpy.isnan(y[:, [0, 2]]).any()
    assert_exact(y, reference.bspmm(adj, x), 'f')


@pytest.mark.parametrize('n_channels', [4, 7, 40, 132])
@pytest.mark.parametrize('name', ROWS)
def test_sampled_products(device, name, n_channels):
    adj = rows_of(ROWS[name], 'f')
    u, v = (
        device.put(integers((adj.n_rows, n_channels), 'f', {'f': 63}, seed=seed)) for seed in (2, 3)
    )
    assert_exact(bsddmm_forward(adj, u, v), reference.bsddmm(adj, u, v), 'f')
    if adj.nnz:
        assert device.launched[-1]['PIECES'] == 1


def test_sampled_products_beyond_the_batch(device):
    adj = rows_of(ROWS['side by side'], 'f')
    u = device.put(integers((adj.n_rows + 9, 40), 'f', {'f': 63}, seed=2))
    w = bsddmm_forward(with_room(adj, 9), u, u)
    expected = reference.bsddmm(adj, u[: adj.n_rows], u[: adj.n_rows])
    assert_exact(w, numpy.pad(expected, (0, 9)), 'f')


@pytest.mark.parametrize('n_entries, n_launched', [(129, 2), (128, 1), (0, 1)])
def test_what_the_policy_launches(device, monkeypatch, n_entries, n_launched):
    """Of a batch whose bound says that there may be long rows."""
    monkeypatch.setattr('chainer_bspmm.ops.bspmm.piece_length', PIECE_LENGTH)
    adj = rows_of([0, n_entries], 'f').replace(longest=1000)
    x = device.put(integers((adj.n_cols, 4), 'f', {'f': 63}, seed=2))
    assert_exact(bspmm_forward(adj, x, None, None, False), reference.bspmm(adj, x), 'f')
    assert len(device.launched) == n_launched


def test_pieces_longer_than_what_is_left_of_the_numbers(device, monkeypatch):
    """The end of a chunk may lie past 2^31."""
    monkeypatch.setattr('chainer_bspmm.ops.bspmm.piece_length', lambda *_: 2**31 - 1)
    check(device, rows_of(ROWS['one'], 'f'), 'f', 4)
