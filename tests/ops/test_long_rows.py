"""Matrices with rows far longer than the mean: products in pieces, and bounds of batches."""

import numpy
import pytest
import scipy.sparse

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda.plans import Device, LONG_ROW, WARP
from chainer_bspmm.dataset import device_dataset, to_sparse
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.functions import bsddmm, bspmm
from chainer_bspmm.ops import bspmm as module
from chainer_bspmm.ops.attention_pattern import AttentionPattern
from chainer_bspmm.ops.bspmm import AHEAD_LONG, bsddmm_forward, bspmm_forward, csr_launch
from chainer_bspmm.ops.bspmm import piece_length
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.ops.graph_linear.launches import layer_of
from chainer_bspmm.sparse.edges import edges_of
from chainer_bspmm.sparse.relations import relation_rows, transposed_rows
from chainer_bspmm.training.batches import DeviceBatch, HostBatch
from chainer_bspmm.dataset.batch_form import batch_arrays, batch_over, buffers_of
from tests.emulation.kernel_cases import batch, integers, with_room
from tests.support import assert_close, assert_exact, features, random_matrix, reference
from tests.support.products import check_product
from tests.support.gradients import check_gradients


# --- rows in pieces, by kernels/bspmm_csr.cu, bsddmm_csr.cu and sum_pieces.cu ---

PIECE = 4
FACTOR = {'e': 7, 'f': 63, 'd': 2**20}
# Lengths of rows. Some long rows begin or end with a chunk, are followed by long or by empty rows,
# come first or last, or have one entry or many more than a piece.
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
    """Return a graph with rows of these lengths; several entries may be in one place."""
    n_rows = max(len(lengths), n_cols or 0)
    lengths = numpy.pad(lengths, (0, n_rows - len(lengths)))
    nnz = int(lengths.sum())
    indptr = numpy.append(0, numpy.cumsum(lengths))
    rng = numpy.random.RandomState(0)
    values = integers(nnz, dtype, FACTOR, seed=1)
    return BatchedCSR(indptr, rng.randint(0, n_rows, nnz), numpy.array([0, n_rows]), values)


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(module, 'piece_length', lambda n_rows, n_cols, nnz, *_: PIECE if nnz else 0)


def check(gpu, adj, dtype, n_channels, values='own', with_residual=False, trans=False):
    check_product(gpu, adj, dtype, n_channels, values, with_residual, trans, largest=FACTOR)
    defines = [launched for launched in gpu.launched if 'WEIGHTS' in launched]
    assert defines[-1].get('PIECES', 0) == (adj.nnz > 0)
    assert (gpu.launched[-1] is defines[-1]) == (adj.nnz == 0)


def check_sampled(gpu, adj, n_channels, spare=0):
    u, v = (integers((adj.n_rows + spare, n_channels), 'f', FACTOR, seed=seed) for seed in (2, 3))
    larger = with_room(adj, spare) if spare else adj
    w = bsddmm_forward(gpu.put(larger), gpu.put(u), gpu.put(v))
    expected = reference.bsddmm(adj, u[: adj.n_rows], v[: adj.n_cols])
    assert_exact(w, numpy.pad(expected, (0, spare)), 'f')
    assert not adj.nnz or gpu.launched[-1]['PIECES'] == 1


@pytest.mark.parametrize(
    'name, dtype', [*((name, 'f') for name in ROWS), ('side by side', 'e'), ('side by side', 'd')]
)
def test_rows(gpu, short_pieces, name, dtype):
    adj = rows_of(ROWS[name], dtype)
    check(gpu, adj, dtype, 5, with_residual=True)
    check(gpu, adj, dtype, 8)
    check(gpu, adj, dtype, 3, trans=True)


@pytest.mark.parametrize(
    'dtype, n_channels',
    [*(('f', n) for n in (1, 31, 33, 64, 200)), ('e', 33), ('e', 64), ('d', 33), ('d', 64)],
)
def test_channels(gpu, short_pieces, dtype, n_channels):
    check(gpu, rows_of(ROWS['side by side'], dtype), dtype, n_channels, with_residual=True)


@pytest.mark.parametrize('trans', [False, True])
def test_given_values(gpu, short_pieces, trans):
    adj = rows_of(ROWS['side by side'], 'f', 12)
    check(gpu, adj, 'f', 4, 'given', True, trans)
    check(gpu, adj, 'f', 4, 'ones', trans=trans)


@pytest.mark.parametrize(
    'lanes, stream, constants',
    [(WARP, True, {}), (2, False, {}), (WARP, False, {'OFFSET': 'size_t'})],
)
def test_variants(gpu, short_pieces, monkeypatch, lanes, stream, constants):
    """Results bypass the cache, several blocks share columns, or offsets have 64 bits."""
    adj = rows_of(ROWS['many pieces'], 'f')
    plan = csr_launch(adj.n_rows, adj.n_cols, 32, 4, lanes=lanes, ahead=AHEAD_LONG, stream=stream)
    plan = plan._replace(defines=tuple(dict(plan.defines, **constants).items()))
    monkeypatch.setattr(module, 'bspmm_launch', lambda *_: plan)
    check(gpu, adj, 'f', 32, with_residual=True)


@pytest.mark.parametrize('name', ['mixed', 'relations', 'padded', 'duplicates'])
def test_batches(gpu, short_pieces, name):
    check(gpu, batch(name, 'f'), 'f', 3, with_residual=True)


@pytest.mark.parametrize('name', ['last', 'one', 'none', 'whole chunks'])
def test_capacity_beyond_the_batch(gpu, short_pieces, name):
    adj = rows_of(ROWS[name], 'f')
    check(gpu, with_room(adj, 3 * PIECE + 1), 'f', 4)


def test_nan_reaches_its_rows_only(gpu, short_pieces):
    adj = rows_of(ROWS['side by side'], 'f')
    x = integers((adj.n_cols, 3), 'f')
    x[adj.indices[3], 1] = numpy.nan
    expected = reference.bspmm(adj, x)
    assert numpy.isnan(expected).any() and not numpy.isnan(expected[:, [0, 2]]).any()
    assert_exact(bspmm_forward(gpu.put(adj), gpu.put(x)), expected, 'f')


@pytest.mark.parametrize(
    'name, n_channels',
    [*((name, 7) for name in ROWS), *(('side by side', n_channels) for n_channels in (4, 40, 132))],
)
def test_sampled_products(gpu, short_pieces, name, n_channels):
    check_sampled(gpu, rows_of(ROWS[name], 'f'), n_channels)


def test_sampled_products_beyond_the_batch(gpu, short_pieces):
    check_sampled(gpu, rows_of(ROWS['side by side'], 'f'), 40, spare=9)


@pytest.mark.parametrize('n_entries, n_launched', [(129, 2), (128, 1), (0, 1)])
def test_what_the_policy_launches(gpu, n_entries, n_launched):
    """A bound that allows long rows adds a second launch only if entries suffice for such a row."""
    adj = rows_of([0, n_entries], 'f').replace(longest=1000)
    x = integers((adj.n_cols, 4), 'f', FACTOR, seed=2)
    assert_exact(bspmm_forward(gpu.put(adj), gpu.put(x)), reference.bspmm(adj, x), 'f')
    assert len(gpu.launched) == n_launched


@pytest.mark.parametrize('n_channels, n_vectors', [(12, 3), (7, 7)])
def test_the_policy_counts_vectors(gpu, monkeypatch, n_channels, n_vectors):
    asked = []

    def no_pieces(n_rows, n_cols, nnz, longest, n_vectors, device):
        asked.append(n_vectors)
        return 0

    monkeypatch.setattr(module, 'piece_length', no_pieces)
    adj = gpu.put(rows_of(ROWS['one'], 'f'))
    x = gpu.put(integers((adj.n_cols, n_channels), 'f'))
    bspmm_forward(adj, x)
    bsddmm_forward(adj, x, x)
    assert asked == [n_vectors, n_vectors]


def test_pieces_longer_than_what_is_left_of_the_numbers(gpu, monkeypatch):
    """The end of a chunk may be beyond 2^31."""
    monkeypatch.setattr(module, 'piece_length', lambda *_: 2**31 - 1)
    check(gpu, rows_of(ROWS['one'], 'f'), 'f', 4)


# --- graphs with long rows ---

H200 = Device(132, 60 << 20)


def star(n_leaves, both_ways=True):
    """Return a graph with weights whose node 0 has `n_leaves` neighbours."""
    leaves = numpy.arange(1, n_leaves + 1)
    values = numpy.random.RandomState(0).uniform(0.5, 1.5, n_leaves)
    matrix = scipy.sparse.coo_matrix((values, (0 * leaves, leaves)), (n_leaves + 1,) * 2)
    return (matrix + matrix.T if both_ways else matrix).tocoo()


def power_law(rng, n_rows):
    """Return a matrix whose rows have n_rows, n_rows / 2, n_rows / 3, ... entries, some none."""
    lengths = rng.permutation(n_rows // numpy.arange(1, n_rows + 1))
    lengths[rng.choice(n_rows, n_rows // 4)] = 0
    rows = numpy.repeat(numpy.arange(n_rows), lengths)
    values = rng.uniform(-1, 1, rows.size)
    columns = rng.randint(0, n_rows, rows.size)
    return scipy.sparse.coo_matrix((values, (rows, columns)), (n_rows, n_rows))


def power_law_batch(xp, dtype):
    rng = numpy.random.RandomState(0)
    matrices = [power_law(rng, 2000), star(5), power_law(rng, 700)]
    adj = BatchedCSR.from_matrices(matrices).astype(dtype)
    assert piece_length(*adj.shape, adj.nnz, adj.longest, 1, H200)
    return rng, adj if xp is numpy else adj.to_device(0)


@pytest.mark.parametrize(
    'dtype, n_channels',
    [*(('float32', n) for n in (1, 7, 64, 300)), ('float16', 64), ('float64', 64)],
)
def test_power_law(xp, dtype, n_channels):
    rng, adj = power_law_batch(xp, dtype)
    x = features(rng, xp, adj.n_cols, n_channels, dtype)
    residual = features(rng, xp, adj.n_rows, n_channels, dtype)
    y = bspmm(adj, x, residual=residual).array
    assert_close(y, reference.bspmm(adj, x, residual=residual), dtype)
    assert y.tobytes() == bspmm(adj, x, residual=residual).array.tobytes()
    w = bsddmm(adj, residual, x).array
    assert_close(w, reference.bsddmm(adj, residual, x), dtype)
    assert w.tobytes() == bsddmm(adj, residual, x).array.tobytes()


@pytest.mark.parametrize('both_ways', [False, True])
def test_gradients(xp, both_ways):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([star(150, both_ways)])
    adj = adj if xp is numpy else adj.to_device(0)
    x = features(rng, xp, adj.n_cols, 2, 'float64')
    data = features(rng, xp, adj.nnz, 1, 'float64')[:, 0]
    check_gradients(lambda x, data: bspmm(adj, x, data) ** 2, x, data)


@pytest.mark.parametrize('both_ways', [False, True])
def test_layer_of_a_graph_with_long_rows(xp, monkeypatch, both_ways):
    """A layer with long rows is products: in one launch, the rows of a tile would wait for them."""
    given = []

    def noted(*args, **options):
        given.append((layer_of(*args, **options), options['longest']))
        return given[-1][0]

    monkeypatch.setattr('chainer_bspmm.ops.graph_linear.node.layer_of', noted)
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([star(150, both_ways)])
    adj = adj if xp is numpy else adj.to_device(0)
    x, W = features(rng, xp, 151, 6, 'float64'), features(rng, xp, 3, 6, 'float64')
    y = graph_linear(adj, x, W, activation=functions.relu).array
    assert given == [(None, 150)]
    assert_close(y, numpy.maximum(reference.bspmm(adj, x @ W.T), 0), 'float64')


def test_bounds():
    few = BatchedCSR.from_matrices([star(LONG_ROW // 2)])
    assert few.longest == few.nnz == LONG_ROW  # a bound, without a look at the rows
    one_way, both = (
        BatchedCSR.from_matrices([star(5), star(200, both_ways)]) for both_ways in (False, True)
    )
    for adj in (one_way, one_way.T, both, both.astype('float32'), both.replace(data=None)):
        assert adj.longest == 200
    assert both.T is both
    many = BatchedCSR.from_matrices([[star(200), star(200)]])
    assert many.longest == many.T.longest == relation_rows(many).longest == 400


def counted(adj):
    """Return the number of entries of the longest row or column."""
    n_true = adj._n_true_entries()
    columns = numpy.bincount(adj.indices[:n_true], minlength=1)
    return max(numpy.diff(adj.indptr).max(initial=0), columns.max())


@pytest.mark.parametrize('n_relations', [1, 3])
@pytest.mark.parametrize('long', ['row', 'column', 'row and column'])
def test_bounds_of_matrices_that_are_made_of_it(long, n_relations):
    """A bound below the longest row would leave out the launch for long rows."""
    graph = star(500, both_ways=long == 'row and column')
    if long != 'row and column':
        graph = graph + scipy.sparse.eye(501)
    if long == 'column':
        graph = graph.T
    adj = BatchedCSR.from_matrices([[graph] * n_relations, [star(3)] * n_relations])
    edges = edges_of(adj)
    made = [adj, adj.T, relation_rows(adj), transposed_rows(adj)]
    made += [edges.from_source, edges.from_receiver, edges.to_node]
    for within in (False, True):
        for side_by_side in (False, True):
            pattern = AttentionPattern(adj, 4, within, side_by_side, 'f')
            made += [pattern.product, pattern.gathers(adj, 4)]
            made += [] if pattern.isolated is None else [pattern.isolated]
    for matrix in made:
        assert matrix.longest >= counted(matrix) and matrix.T.longest >= counted(matrix.T)


def test_matrices_that_are_made_of_molecules_have_no_long_rows():
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n, 4, True, 0.02) for n in (9, 30)] * 5)
    assert adj.longest <= LONG_ROW // 8 < LONG_ROW < adj.nnz
    adj = adj.replace(longest=LONG_ROW)  # the bound of captured steps
    edges = edges_of(adj)
    pattern = AttentionPattern(adj, 8, True, False, 'f')
    for matrix in (
        relation_rows(adj),
        relation_rows(adj.replace(is_symmetric=False)),
        edges.from_source,
        edges.from_receiver,
        edges.to_node,
        pattern.product,
        pattern.gathers(adj, 8),
    ):
        assert matrix.longest <= LONG_ROW


@pytest.fixture
def stars(monkeypatch):
    """Data set of stars with longest rows of 3, 150, 20 and 300 entries."""
    monkeypatch.setattr(cuda, 'cupy', numpy, raising=False)
    monkeypatch.setattr(device_dataset, 'gather_batch', lambda *_: None)
    examples = [
        (numpy.ones(n + 1, 'i'), star(n, both_ways).toarray(), numpy.zeros(1, 'f'))
        for n, both_ways in ((3, True), (150, True), (20, True), (300, False))
    ]
    return DeviceMolecules(to_sparse(examples).molecules, chainer.get_device('@numpy'))


def test_bounds_in_data_sets(stars):
    assert stars.longest.tolist() == [3, 150, 20, 300]


def test_bounds_in_a_part_of_a_data_set(stars):
    part = DeviceMolecules(stars.host.take(numpy.array([3])), chainer.get_device('@numpy'))
    assert part.batch(numpy.array([0]), 'packed')[1].longest == 300


@pytest.mark.parametrize(
    'index, bound', [([0, 2], 20), ([0, 1], 150), ([3, 0], 300), ([1, 1], 150)]
)
def test_bounds_in_batches_of_a_data_set(stars, index, bound):
    index = numpy.array(index)
    _, on_host, _ = stars.host.batch(index, 'packed')
    # On the host the rows of a batch of few entries are not looked at.
    assert on_host.longest == (bound if bound > 20 else on_host.max_nnz)
    _, on_device, _ = stars.batch(index, 'packed')
    assert on_device.longest == bound


@pytest.mark.parametrize(
    'index, bound', [([0, 2], LONG_ROW), ([0, 1], 256), ([3, 0], 512), ([1, 1], 256)]
)
def test_bounds_in_captured_batches(stars, index, bound):
    """Bounds are rounded up, so that batches with similar longest rows share buffers."""
    index = numpy.array(index)
    from_host = HostBatch(*stars.host.batch(index, 'packed'))
    from_device = DeviceBatch(stars, index, 'packed', None)
    assert from_host.form.longest == from_device.form.longest == bound
    arrays = batch_arrays(from_host.form, from_host.need)
    arrays = {name: numpy.zeros(*array) for name, array in arrays.items()}
    _, adj, _ = batch_over(buffers_of(arrays), from_host.form, from_host.need)
    assert adj.longest == bound


def test_rows_of_molecules_stay_whole():
    """Atoms have few bonds, however many atoms a molecule has."""
    chain = scipy.sparse.diags([1.0, 1.0], [-1, 1], shape=(500, 500)).toarray()
    relations = numpy.stack([chain, chain])
    adj = BatchedCSR.from_matrices([relations] * 3)
    assert adj.longest == adj.T.longest == 4
    molecules = to_sparse([(numpy.ones(500, 'i'), relations)] * 3).molecules
    assert molecules.longest.tolist() == [4, 4, 4]
    batch = HostBatch(*molecules.batch(numpy.arange(3), 'packed'))
    assert batch.form.longest == LONG_ROW
    assert not piece_length(10**6, 10**6, 10**9, LONG_ROW, 32, H200)


def test_a_long_column_of_short_rows():
    matrix = numpy.zeros((2 * LONG_ROW,) * 2, 'f')
    matrix[:, 3] = 1
    assert BatchedCSR.from_matrices([matrix]).longest == len(matrix)
    assert to_sparse([(numpy.ones(len(matrix), 'i'), matrix)]).molecules.longest == [len(matrix)]
