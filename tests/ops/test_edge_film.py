"""`edge_film`: its kernel in exact numbers, the layer by plain loops, the matrices of edges."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops import edge_film as module
from chainer_bspmm.ops.edge_film import edge_film, edge_film_backward, edge_film_forward
from chainer_bspmm.sparse.edges import edges_of
from tests.emulation.kernel_cases import (
    batch,
    BATCHES,
    CHANNELS_OF_DTYPES,
    film_arrays,
    share_channels,
)
from tests.support import assert_close, assert_exact, ones_for, reference, relative_error
from tests.support.gradients import check_gradients
from tests.support.relations import NAMES, relation_batch_on, small_relation_batch_on
from tests.support.spare import with_spare


# --- modulated messages and their gradients ---


def launches(place):
    """Return the constants of edge_film's own launches; on a GPU a batch needs others as well."""
    return [defines for defines in place.launched if 'RESULT' in defines]


def results(adj, messages, film, gy):
    """Return the output and the gradients with respect to messages and film."""
    return edge_film_forward(adj, messages, film), *edge_film_backward(adj, messages, film, gy)


def check(place, adj, dtype, n_channels, shift=0, step=1):
    """Compare exactly; arrays have every `step`-th column of larger ones."""
    arrays = film_arrays(adj, n_channels * step, dtype)
    expected = reference.edge_film(adj, *(array[:, ::step] for array in arrays))
    messages, film, gy = (place.put(array, shift)[:, ::step] for array in arrays)
    for actual, wanted in zip(results(place.put(adj), messages, film, gy), expected):
        assert_exact(actual, wanted, dtype)


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels):
    check(place, batch('small' if n_channels > 64 else 'relations', dtype), dtype, n_channels)


@pytest.mark.parametrize('has_values', [True, False])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(place, name, has_values):
    adj = batch(name, 'f')
    check(place, adj if has_values else adj.replace(data=None), 'f', 7)


def test_launches(gpu):
    check(gpu, batch('relations', 'f').replace(data=None), 'f', 7)
    launched = launches(gpu)
    assert {defines['WEIGHTED'] for defines in launched} == {0}
    assert [d['RESULT'] for d in launched] == ['OUTPUT', 'BY_MESSAGES', 'BY_FILM']


@pytest.mark.parametrize('longest', [3, 4, 5, 8, 9])
def test_rows_about_as_long_as_what_is_loaded_ahead(place, longest):
    indices = numpy.append(numpy.arange(longest) * 5 % 14, 3)
    indptr = numpy.array([0, longest, longest, longest + 1] + [longest + 1] * 4)
    adj = BatchedCSR(indptr, indices, numpy.array([0, 7]), n_relations=2)
    check(place, adj, 'f', 5)


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(gpu, dtype, shift, width):
    check(gpu, batch('relations', dtype), dtype, 16, shift)
    assert {defines['VECTOR'] for defines in launches(gpu)} == {width}


def test_blocks_that_stride_over_the_channels(gpu, monkeypatch):
    share_channels(monkeypatch, module, 'film_launch')
    check(gpu, batch('relations', 'f'), 'f', 33 * 4 * 3)


def test_capacity_beyond_the_batch(gpu):
    adj = batch('relations', 'f')
    spare = with_spare(adj, 5, 7)
    for matrix in (spare, spare.T):  # reading these rows would be an error
        matrix.indices[adj.nnz :] = 2**30
        matrix.data[adj.nnz :] = numpy.nan
    arrays = film_arrays(adj, 12, 'f')
    with_room = []
    for array in arrays:
        larger = numpy.full((len(array) * spare.n_rows // adj.n_rows, array.shape[1]), numpy.nan)
        larger[: len(array)] = array
        with_room.append(gpu.put(larger.astype('f')))
    expected = reference.edge_film(adj, *arrays)
    for actual, wanted in zip(results(gpu.put(spare), *with_room), expected):
        assert_exact(actual[: len(wanted)], wanted, 'f')
        assert not actual[len(wanted) :].any()


def test_input_that_is_not_contiguous(place):
    check(place, batch('relations', 'f'), 'f', 7, step=2)


def test_nan_reaches_its_rows_only(place):
    adj = batch('relations', 'f')
    arrays = film_arrays(adj, 9, 'f')
    arrays[0][2, 3] = arrays[1][5, 8] = numpy.nan
    expected, _, _ = reference.edge_film(adj, *arrays)
    assert 0 < numpy.isnan(expected).sum() < expected.size // 2
    messages, film, _ = map(place.put, arrays)
    assert_exact(edge_film_forward(place.put(adj), messages, film), expected, 'f')


@pytest.mark.parametrize('n_rows, n_channels', [(0, 4), (3, 0)])
def test_empty_result_launches_nothing(place, n_rows, n_channels):
    adj = BatchedCSR.from_matrices([numpy.zeros((2, n_rows, n_rows))])
    messages, film, gy = map(place.put, film_arrays(adj, n_channels, 'f'))
    shapes = [array.shape for array in results(place.put(adj), messages, film, gy)]
    assert shapes == [(n_rows, n_channels), messages.shape, film.shape]
    assert not launches(place)


# --- layer ---


def arguments(adj, xp, dtype, n_in=4, n_channels=3):
    rng = numpy.random.RandomState(0)
    width = n_channels * adj.n_relations
    shapes = [(n, n_in) for n in (adj.n_rows, width, 2 * width)]
    return [xp.asarray(rng.uniform(-1, 1, shape).astype(dtype)) for shape in shapes]


def truth(adj, x, W, W_g, **activation):
    """Compute the formula of edge_film's docstring edge by edge, in float64."""
    x, W, W_g = (cuda.to_cpu(array).astype('d') for array in (x, W, W_g))
    n_relations = adj.n_relations

    def mapped(W):
        """Return x[i] W_r^T as row i * R + r."""
        by_relation = [x @ W[r::n_relations].T for r in range(n_relations)]
        return numpy.stack(by_relation, axis=1).reshape(-1, len(W) // n_relations)

    return reference.edge_film(adj, mapped(W), mapped(W_g), **activation)


@pytest.mark.parametrize('name', NAMES)
def test_values(xp, name):
    for dtype, bound in (('float16', 4e-3), ('float32', 1e-6), ('float64', 1e-14)):
        adj = relation_batch_on(name, xp, dtype)
        given = arguments(adj, xp, dtype)
        y = edge_film(adj, *given).array
        assert y.dtype == dtype
        assert relative_error(y, truth(adj, *given)) < bound


SMALL = ['four relations', 'unsorted relations', 'unsorted values', 'no entries']


@pytest.mark.parametrize('name', [*SMALL, 'duplicates, unsorted'])
def test_gradients(xp, name):
    adj = small_relation_batch_on(name, xp)
    check_gradients(lambda *given: edge_film(adj, *given) ** 2, *arguments(adj, xp, 'float64'))


@pytest.mark.parametrize('name', SMALL)
def test_another_activation(xp, name):
    adj = small_relation_batch_on(name, xp)
    given = arguments(adj, xp, 'float64')

    def function(*given):
        return edge_film(adj, *given, activation=chainer.functions.tanh)

    assert relative_error(function(*given).array, truth(adj, *given, activation=numpy.tanh)) < 1e-14
    check_gradients(function, *given)


@pytest.mark.parametrize('limit', [1, 40, 10**6])
def test_blocks_of_graphs(monkeypatch, limit):
    """A host computes graphs in blocks of one, some or all, with equal results."""
    monkeypatch.setattr('chainer_bspmm.ops.edge_film.FILM_BLOCK', limit)
    name = 'empty graphs first, between, last'
    for adj in (relation_batch_on('many', numpy, 'd'), small_relation_batch_on(name, numpy)):
        given = arguments(adj, numpy, 'float64')
        assert relative_error(edge_film(adj, *given).array, truth(adj, *given)) < 1e-14
    check_gradients(lambda *given: edge_film(adj, *given) ** 2, *given)


@pytest.mark.parametrize(
    'limit, n_graphs', [(1, [1, 1, 1, 1]), (12, [2, 1, 1]), (16, [2, 2]), (28, [4])]
)
def test_blocks_have_as_many_graphs_as_fit(monkeypatch, limit, n_graphs):
    """The graphs have 2, 4, 6 and 2 edges, and there are two channels."""
    monkeypatch.setattr('chainer_bspmm.ops.edge_film.FILM_BLOCK', limit)
    adj = BatchedCSR.from_matrices([numpy.eye(n)[None] for n in (2, 4, 6, 2)])
    messages, film = numpy.zeros((adj.n_cols, 2)), numpy.zeros((adj.n_rows, 4))
    blocks = module._film_blocks(adj, messages, film)
    ends = adj.row_offsets.searchsorted([block.rows.stop for block in blocks])
    assert numpy.diff(ends, prepend=0).tolist() == n_graphs


@pytest.mark.parametrize('name', [*NAMES, 'symmetric'])
def test_matrices_of_edges(name):
    """Matrices of edges pass the checks of the constructor, and gather and sum the right rows."""
    adj = relation_batch_on(name, numpy, 'float64')
    edges = edges_of(adj)
    for matrix in (edges.from_source, edges.from_receiver, edges.to_node):
        checked = BatchedCSR(
            matrix.indptr, matrix.indices, matrix.row_offsets, matrix.data, matrix.col_offsets
        )
        for size in ('n_graphs', 'n_rows', 'n_cols', 'nnz', 'max_rows', 'max_cols', 'max_nnz'):
            assert getattr(matrix, size) == getattr(checked, size), size
        assert all(getattr(matrix, name).dtype == numpy.int32 for name in matrix._integers)
    x = numpy.random.RandomState(0).uniform(-1, 1, (adj.n_cols, 2))
    # Gathering and summing is the product with the adjacency.
    y = bspmm_forward(edges.to_node, bspmm_forward(edges.from_source, x))
    assert_close(y, reference.bspmm(adj, x), 'float64')
    pair = [r * adj.n_relations + c % adj.n_relations for _, r, c in reference.entries(adj)]
    numpy.testing.assert_array_equal(bspmm_forward(edges.from_receiver, x), x[pair])


ADJ = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])
HALVES = BatchedCSR.from_matrices([numpy.full((2, 3, 3), 0.5, 'f')])


@pytest.mark.parametrize(
    'change, error, message',
    [
        ({'x': (4, 5)}, ValueError, r'x: expected shape \(3, in_channels\), .* got \(4, 5\)'),
        ({'W': (7, 5)}, ValueError, r'W: expected a multiple of 2 relations .*got shape \(7, 5\)'),
        ({'W': (8, 4)}, ValueError, r'W: expected shape \(8, 5\).* got \(8, 4\)'),
        ({'W_g': (8, 5)}, ValueError, r'W_g: expected shape \(16, 5\).* got \(8, 5\)'),
        (
            {'adj': numpy.ones(3)},
            TypeError,
            r'adj: expected a BatchedCSR, got ndarray of shape \(3,\); data .* with '
            'BatchedCSR.from_dense',
        ),
        (
            {'adj': HALVES.astype('d')},
            TypeError,
            r'x: expected float64, like the values of adj, got float32; adj.astype\(x.dtype\) '
            'converts',
        ),
    ],
)
def test_what_does_not_fit(change, error, message):
    arguments = ones_for({'adj': ADJ, 'x': (3, 5), 'W': (8, 5), 'W_g': (16, 5), **change})
    with pytest.raises(error, match=message):
        edge_film(**arguments)
