"""Batches in larger buffers: operations have the results of the ordinary batch."""

import functools

import types

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR, BatchedSELL, functions
from chainer_bspmm.cuda.step import Step, under_way
from chainer_bspmm.ops.attention_pattern import attention_pattern
from chainer_bspmm.ops.bspmm import ALGORITHMS, bspmm_forward
from chainer_bspmm.ops.degree_linear import degrees_of
from chainer_bspmm.ops.edge_film import edge_film
from chainer_bspmm.ops.relation_attention import relation_attention
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse.batched_csr import fill_buffers
from chainer_bspmm.sparse.edges import edges_of
from chainer_bspmm.sparse.relations import relation_rows, with_values
from tests.support import assert_same_arrays, batch_on, BATCHES, TOLERANCE
from tests.support.spare import buffers_for, with_spare

NAMES = [name for name in BATCHES if name not in ('padded', 'rectangular')]
SPARE = [(0, 0), (1, 0), (0, 1), (7, 50)]


# Every batch with spare rows and entries, and a few with only one kind or with none.
PAIRS = [(name, SPARE[-1]) for name in NAMES] + [
    ('four relations', (0, 0)),
    ('duplicates, unsorted', (1, 0)),
    ('only empty graphs', (1, 0)),
    ('many', (0, 1)),
]


@pytest.fixture(params=PAIRS, ids=str)
def pair(request, xp):
    """The ordinary batch, and the batch with spare rows and entries, in float64."""
    name, (spare_rows, spare_nnz) = request.param
    return batch_on(name, xp, 'd'), with_spare(BATCHES[name], spare_rows, spare_nnz, xp)


def assert_padded(actual, expected, exact=True):
    """Compare an array with that of the ordinary batch; the rest of it must be 0."""
    actual, expected = cuda.to_cpu(actual), cuda.to_cpu(expected)
    assert actual.dtype == expected.dtype
    assert not actual[len(expected) :].any()
    if exact:
        numpy.testing.assert_array_equal(actual[: len(expected)], expected)
    else:
        error = numpy.abs(actual[: len(expected)] - expected).max(initial=0)
        assert error <= TOLERANCE['float64'] * max(1, numpy.abs(expected).max(initial=0))


def assert_same_matrix(actual, expected):
    """Compare every array of two containers, of which the first has spare rows and entries."""
    assert actual.has_spare
    nnz, n_rows = expected.nnz, expected.n_rows
    indptr = cuda.to_cpu(actual.indptr)
    assert indptr.size == actual.n_rows + 1 and (indptr[n_rows:] == nnz).all()
    numpy.testing.assert_array_equal(indptr[: n_rows + 1], cuda.to_cpu(expected.indptr))
    assert_padded(actual.indices, expected.indices)
    assert actual.indices.size == actual.nnz
    assert_same_arrays(actual, expected, ('row_offsets', 'col_offsets'))
    assert (actual.data is None) == (expected.data is None)
    if expected.data is not None:
        assert_padded(actual.data, expected.data)
    for size in ('n_rows', 'n_cols', 'nnz', 'max_rows', 'max_cols', 'max_nnz'):
        assert getattr(actual, size) >= getattr(expected, size)
    assert (actual.n_graphs, actual.n_relations) == (expected.n_graphs, expected.n_relations)


def test_derived_matrices(pair):
    adj, spare = pair
    for actual, expected in (
        (spare, adj),
        (spare.T, adj.T),
        (relation_rows(spare), relation_rows(adj)),
    ):
        assert_same_matrix(actual, expected)
        assert_same_matrix(actual.T, expected.T)
    assert_same_matrix(spare.astype('f'), adj.astype('f'))
    assert_same_matrix(spare.to_device(-1), adj.to_device(-1))
    assert_padded(spare.entry_rows(), adj.entry_rows())
    assert_padded(spare.T.entry_rows(), adj.T.entry_rows())


def test_spare_entries_stay_where_they_are_with_their_values(pair):
    adj, spare = pair
    places = numpy.arange(adj.nnz, spare.nnz)
    values = adj.xp.arange(1.0, spare.nnz + 1)
    with_spare_values = with_values(spare, values)
    expected = with_values(adj, values[: adj.nnz])
    for actual, of_adj, of_spare in (
        (spare.transpose_order, adj.transpose_order, places),
        (with_spare_values.data, expected.data, places + 1),
        (with_spare_values.T.data, expected.T.data, places + 1),
    ):
        numpy.testing.assert_array_equal(cuda.to_cpu(actual), [*cuda.to_cpu(of_adj), *of_spare])


def test_dense_form(pair):
    """The dense form is padded to the bound of the number of rows, not to the actual maximum."""
    adj, spare = pair
    expected = cuda.to_cpu(adj.to_dense())
    dense = cuda.to_cpu(spare.to_dense())
    block = tuple(map(slice, expected.shape))
    numpy.testing.assert_array_equal(dense[block], expected)
    assert numpy.count_nonzero(dense) == numpy.count_nonzero(dense[block])


def test_scipy_matrix(pair):
    adj, spare = pair
    scipy_matrix = spare.to_scipy()
    assert scipy_matrix.nnz == adj.nnz
    assert (scipy_matrix[: adj.n_rows, : adj.n_cols] != adj.to_scipy()).nnz == 0


OTHER_THAN_NUMPY = types.SimpleNamespace(**vars(numpy))  # functions take CuPy's way with it


@pytest.mark.parametrize('name, spare', PAIRS, ids=str)
def test_rows_of_entries_as_a_gpu_finds_them(name, spare):
    """Each entry searches its row. NumPy repeats the number of each row, which is faster there."""
    spare_rows, spare_nnz = spare
    adj = with_spare(BATCHES[name], spare_rows, spare_nnz, numpy)
    rows = build.entry_rows(OTHER_THAN_NUMPY, adj.indptr, adj.nnz, has_spare=True)
    assert rows.dtype == numpy.int32
    numpy.testing.assert_array_equal(rows, adj.entry_rows())


@pytest.mark.parametrize('name, spare', PAIRS, ids=str)
def test_transpose_as_a_gpu_sorts_it(name, spare):
    """Keys of all entries are sorted. On a host SciPy counts them, which is faster there."""
    spare_rows, spare_nnz = spare
    adj = with_spare(BATCHES[name], spare_rows, spare_nnz, numpy)
    arrays = adj.indptr, adj.indices, adj.n_cols, True
    found = build.transpose(OTHER_THAN_NUMPY, *arrays)
    for actual, expected in zip(found, build.transpose(numpy, *arrays), strict=True):
        assert actual.dtype == numpy.int32
        numpy.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('name', NAMES)
def test_transpose_that_sorts(name, xp):
    """Graphs that are too large for a block are transposed by sorting."""
    for spare_rows, spare_nnz in SPARE:
        adj = batch_on(name, xp, 'd')
        spare = with_spare(BATCHES[name], spare_rows, spare_nnz, xp)
        indptr, indices, order = map(
            cuda.to_cpu, build.transpose(xp, spare.indptr, spare.indices, spare.n_cols, True)
        )
        expected_indptr, expected_indices, expected_order = map(
            cuda.to_cpu, build.transpose(xp, adj.indptr, adj.indices, adj.n_cols)
        )
        assert indptr.dtype == indices.dtype == order.dtype == numpy.int32
        numpy.testing.assert_array_equal(
            indptr, numpy.pad(expected_indptr, (0, spare.n_cols - adj.n_cols), 'edge')
        )
        assert_padded(indices, expected_indices)
        assert len(indices) == spare.nnz
        numpy.testing.assert_array_equal(
            order, numpy.append(expected_order, numpy.arange(adj.nnz, spare.nnz))
        )


def padded_rows(array, n_rows, fill=0.0):
    padded = numpy.full((n_rows,) + array.shape[1:], fill)
    padded[: len(array)] = array
    return padded


def check_function(pair, function, rows, n_channels, *parameters, fill=7.0):
    """Compare results, gradients and second gradients of a function with and without spare rows.

    Args:
        function (callable): function of a batch, features and parameters.
        rows (callable): function of a batch that returns the number of rows of the features.
        fill (float): value in the spare rows of the features and of the gradient.
    """
    rng = numpy.random.RandomState(0)
    adj, spare = pair
    x = rng.uniform(-1, 1, (rows(adj), n_channels))
    gy = None
    results = []
    for matrix in (adj, spare):
        inputs = [
            chainer.Variable(adj.xp.asarray(array))
            for array in (padded_rows(x, rows(matrix), fill), *parameters)
        ]
        y = function(matrix, *inputs)
        if gy is None:
            gy = rng.uniform(-1, 1, y.shape)
        of_y = [chainer.Variable(adj.xp.asarray(padded_rows(gy, len(y), fill)))]
        single = chainer.grad([y], inputs, of_y)
        double = chainer.grad([y], inputs, of_y, enable_double_backprop=True)
        again = chainer.grad([sum(chainer.functions.sum(g * g) for g in double)], inputs)
        results.append([(y,), *zip(single, double, again)])
    (expected_y, expected_gx, *of_expected_parameters), (y, gx, *of_parameters) = results
    for actual, expected in (*zip(y, expected_y), *zip(gx, expected_gx)):
        assert_padded(actual.array, expected.array, exact=False)
    for actual, expected in zip(sum(of_parameters, ()), sum(of_expected_parameters, ())):
        numpy.testing.assert_allclose(
            cuda.to_cpu(actual.array), cuda.to_cpu(expected.array), 1e-11, 1e-11
        )


def n_nodes(adj):
    return adj.n_rows


def n_entries(adj):
    return adj.nnz


@pytest.mark.parametrize('with_data', [False, True])
def test_product(pair, with_data):
    data = numpy.random.RandomState(1).uniform(-1, 1, pair[1].nnz)

    def function(adj, x, *data):
        return functions.bspmm(adj, x, *(values[: adj.nnz] for values in data)) ** 2

    check_function(pair, function, lambda adj: adj.n_cols, 3, *([data] if with_data else []))


def test_residual_of_spare_rows(pair):
    _, spare = pair
    zeros = spare.xp.zeros((spare.n_cols, 2))
    sevens = spare.xp.full((spare.n_rows, 2), 7.0)
    y = functions.bspmm(spare, zeros, None, sevens).array
    assert (y == 7).all()


def test_sampled_product(pair):
    def function(adj, x, v):
        return functions.bsddmm(adj, x, v[: adj.n_cols]) ** 2

    check_function(pair, function, n_nodes, 5, numpy.ones((pair[1].n_cols, 5)), fill=3.0)


@pytest.mark.parametrize('function', [functions.segment_sum, functions.segment_max])
def test_reductions(pair, function):
    check_function(pair, lambda adj, x: function(adj, x) ** 2, n_nodes, 3, fill=9.0)


def test_broadcast(pair):
    def function(adj, y):
        return functions.segment_broadcast(adj, y) ** 2

    check_function(pair, function, lambda adj: adj.n_graphs, 3)


@pytest.mark.parametrize(
    'function, rows', [(functions.segment_softmax, n_entries), (functions.node_softmax, n_nodes)]
)
def test_softmaxes(pair, function, rows):
    """Spare entries and rows may hold any value, and their results are 0."""
    check_function(pair, function, rows, 2, fill=numpy.nan)


def test_degrees(xp):
    adj = BatchedCSR.from_matrices([numpy.ones((n, n)) for n in (2, 3, 0, 1)])
    degrees = degrees_of(with_spare(adj, 2, 5, xp), 3)
    expected = degrees_of(adj, 3)
    assert_padded(degrees.is_type, expected.is_type)
    if xp is numpy:
        for actual, rows in zip(degrees.groups.of_types, expected.groups.of_types):
            numpy.testing.assert_array_equal(actual, rows)


@pytest.mark.gpu
@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_forced_algorithms(algorithm):
    spare = with_spare(BATCHES['many'], 3, 3, cuda.cupy)
    x = cuda.cupy.ones((spare.n_cols, 4))
    assert not bspmm_forward(spare, x, algorithm=algorithm)[-3:].any()


@pytest.mark.parametrize(
    'within, concat_heads, dropout_ratio', [(False, False, 0), (True, True, 0), (False, True, 0.4)]
)
def test_attention(pair, within, concat_heads, dropout_ratio):
    def function(adj, m, W, b):  # a step draws the same numbers for both batches
        blas = types.SimpleNamespace(dot=lambda a, b, to=None: a.dot(b))
        with under_way(Step(blas, 1, adj.xp.full(1, 2, numpy.uint64))):
            return relation_attention(
                adj,
                m,
                W,
                b,
                n_heads=2,
                within=within,
                concat_heads=concat_heads,
                dropout_ratio=dropout_ratio,
            )

    W = numpy.random.RandomState(1).uniform(-1, 1, (1, 6))
    check_function(pair, function, n_nodes, pair[0].n_relations * 2 * 3, W, numpy.ones(1))


@pytest.mark.parametrize('side_by_side', [False, True])
def test_matrices_of_attention(pair, side_by_side):
    expected, actual = (
        attention_pattern(adj, 2, True, side_by_side, numpy.dtype('d')) for adj in pair
    )
    assert_same_matrix(actual.product, expected.product)
    assert_same_matrix(actual.product.T, expected.product.T)
    assert (actual.isolated is None) == (expected.isolated is None)
    if actual.isolated is not None:
        assert_same_matrix(actual.isolated, expected.isolated)
        assert_same_matrix(actual.isolated.T, expected.isolated.T)


@pytest.mark.parametrize('activation', [chainer.functions.relu, chainer.functions.tanh])
def test_modulated_messages(pair, activation):
    rng = numpy.random.RandomState(1)
    n_relations = pair[0].n_relations
    W, W_g = (rng.uniform(-1, 1, (n * n_relations, 4)) for n in (3, 6))
    function = functools.partial(edge_film, activation=activation)
    check_function(pair, function, n_nodes, 4, W, W_g)


def test_matrices_of_edges(pair):
    expected, actual = (edges_of(adj) for adj in pair)
    for name in ('from_source', 'from_receiver', 'to_node'):
        assert_same_matrix(getattr(actual, name), getattr(expected, name))
        assert_same_matrix(getattr(actual, name).T, getattr(expected, name).T)


@pytest.mark.parametrize('make', [BatchedCOO.from_csr, BatchedSELL])
def test_what_would_count_them_refuses(make):
    with pytest.raises(
        ValueError,
        match='adj: expected a batch without spare rows and entries, .* some spare, float64 '
        'on @numpy>',
    ):
        make(with_spare(BATCHES['many'], 1, 1))


@pytest.mark.parametrize('spare_rows, spare_nnz', SPARE)
@pytest.mark.parametrize('name', ['many', 'ones', 'four relations', 'only empty graphs'])
def test_filling_writes_everything(name, spare_rows, spare_nnz):
    adj = BATCHES[name]
    buffers = buffers_for(adj, spare_rows, spare_nnz, 2)
    atoms = numpy.arange(1, adj.n_rows + 1, dtype='i')
    labels = [numpy.full((adj.n_graphs, 2), float(i)) for i in range(2)]
    fill_buffers(buffers, atoms, adj, labels)
    numpy.testing.assert_array_equal(buffers.atoms, numpy.pad(atoms, (0, spare_rows)))
    numpy.testing.assert_array_equal(buffers.indptr, numpy.pad(adj.indptr, (0, spare_rows), 'edge'))
    numpy.testing.assert_array_equal(buffers.indices, numpy.pad(adj.indices, (0, spare_nnz)))
    if adj.data is not None:
        numpy.testing.assert_array_equal(buffers.data, numpy.pad(adj.data, (0, spare_nnz)))
    for offsets in ('row_offsets', 'col_offsets'):
        numpy.testing.assert_array_equal(getattr(buffers, offsets), getattr(adj, offsets))
    for actual, expected in zip(buffers.labels, labels):
        numpy.testing.assert_array_equal(actual, expected)


def test_implicit_ones_among_values():
    adj = BATCHES['ones']
    assert adj.data is None
    buffers = buffers_for(adj, 1, 2)._replace(data=numpy.full(adj.nnz + 2, numpy.nan, 'f'))
    fill_buffers(buffers, numpy.zeros(adj.n_rows, 'i'), adj, [])
    assert buffers.data.tolist() == [1.0] * adj.nnz + [0.0] * 2
