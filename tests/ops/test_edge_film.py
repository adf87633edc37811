"""edge_film against plain loops: values, gradients, the matrices of edges, what it refuses."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.edge_film import edge_film
from chainer_bspmm.ops.edge_film import EdgeFiLM
from chainer_bspmm.sparse.edges import edges_of
from tests.support import assert_close
from tests.support import reference
from tests.support import relative_error
from tests.support.folded import check_against_padded
from tests.support.gradients import check_gradients
from tests.support.relations import NAMES
from tests.support.relations import relation_batch_on
from tests.support.relations import small_relation_batch_on


def arguments(adj, xp, dtype, n_in=4, n_channels=3):
    rng = numpy.random.RandomState(0)
    shapes = (
        (adj.n_rows, n_in),
        (n_channels * adj.n_relations, n_in),
        (2 * n_channels * adj.n_relations, n_in),
    )
    return [xp.asarray(rng.uniform(-1, 1, shape).astype(dtype)) for shape in shapes]


def truth(adj, x, W, W_g, activation=lambda z: numpy.maximum(z, 0)):
    """The docstring's formula, edge by edge, in float64."""
    x, W, W_g = (cuda.to_cpu(array).astype('d') for array in (x, W, W_g))
    values = numpy.ones(adj.nnz) if adj.data is None else cuda.to_cpu(adj.data).astype('d')
    n_relations = adj.n_relations
    n_channels = len(W) // n_relations
    y = numpy.zeros((adj.n_rows, n_channels))
    for entry, row, column in reference.entries(adj):
        source, relation = divmod(column, n_relations)
        message = W[relation::n_relations] @ x[source]
        film = W_g[relation::n_relations] @ x[row]
        y[row] += values[entry] * activation(film[:n_channels] * message + film[n_channels:])
    return y


@pytest.mark.parametrize('name', NAMES)
def test_values(xp, name):
    for dtype, bound in (('float16', 4e-3), ('float32', 1e-6), ('float64', 1e-14)):
        adj = relation_batch_on(name, xp, dtype)
        given = arguments(adj, xp, dtype)
        y = edge_film(adj, *given).array
        assert y.dtype == dtype
        assert relative_error(y, truth(adj, *given)) < bound


@pytest.mark.parametrize('n_channels', [1, 3, 33])
def test_widths(xp, n_channels):
    adj = relation_batch_on('four relations', xp, 'float32')
    given = arguments(adj, xp, 'float32', n_channels=n_channels)
    assert relative_error(edge_film(adj, *given).array, truth(adj, *given)) < 1e-6


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
    """On a host: graphs one by one, some at a time, and all at once."""
    monkeypatch.setattr('chainer_bspmm.ops.edge_film.FILM_BLOCK', limit)
    name = 'empty graphs first, between, last'
    for adj in (relation_batch_on('many', numpy, 'd'), small_relation_batch_on(name, numpy)):
        given = arguments(adj, numpy, 'float64')
        assert relative_error(edge_film(adj, *given).array, truth(adj, *given)) < 1e-14
    check_gradients(lambda *given: edge_film(adj, *given) ** 2, *given)


def test_one_node_whose_gradients_are_those_of_several(xp):
    """Of a batch in several blocks; the composed nodes are what is compared with."""
    for dtype, bound in (('float16', 1e-2), ('float32', 1e-5), ('float64', 1e-13)):
        adj = relation_batch_on('four relations', xp, dtype)
        results = []
        for kind in (dtype, 'float64'):
            batch = adj.astype(kind)
            given = [
                chainer.Variable(array.astype(kind)) for array in arguments(adj, xp, dtype, 4, 40)
            ]
            node = EdgeFiLM(batch)
            y = node.apply(given)[0] if kind == dtype else node._composed(*given)
            y.grad = xp.asarray(numpy.random.RandomState(1).uniform(-1, 1, y.shape)).astype(kind)
            y.backward()
            results.append([v.grad for v in given])
        for actual, expected in zip(*results):
            assert actual.dtype == dtype
            assert relative_error(actual, expected) < bound


def test_folded(xp):
    rng = numpy.random.RandomState(0)
    W, W_g = (xp.asarray(rng.uniform(-1, 1, (n, 4))) for n in (6, 12))
    check_against_padded(lambda adj, x: edge_film(adj, x, W, W_g), xp, 2, 4)


def test_parameters_of_another_dtype_are_converted(xp):
    adj = relation_batch_on('four relations', xp, 'float16')
    x, *weights = arguments(adj, xp, 'float32')
    variables = [chainer.Variable(array) for array in (x.astype('e'), *weights)]
    y = edge_film(adj, *variables)
    assert y.dtype == numpy.float16
    chainer.functions.sum(y).backward()
    assert [v.grad.dtype.char for v in variables] == ['e', 'f', 'f']


@pytest.mark.parametrize('name', [*NAMES, 'symmetric'])
def test_matrices_of_edges(name):
    """They pass the checks of the constructor, and gather and add up what they should."""
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
    # The product in two steps.
    y = bspmm_forward(edges.to_node, bspmm_forward(edges.from_source, x))
    assert_close(y, reference.bspmm(adj, x), 'float64')
    pair = [r * adj.n_relations + c % adj.n_relations for _, r, c in reference.entries(adj)]
    numpy.testing.assert_array_equal(bspmm_forward(edges.from_receiver, x), x[pair])


ADJ = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])
HALVES = BatchedCSR.from_matrices([numpy.full((2, 3, 3), 0.5, 'f')])


@pytest.mark.parametrize(
    'change, error, message',
    [
        ({'x': numpy.ones((4, 5), 'f')}, ValueError, r'x: expected shape \(3, in_.* got \(4, 5\)'),
        (
            {'W': numpy.ones((7, 5), 'f')},
            ValueError,
            r'W: expected a multiple of 2 relations .*got shape \(7, 5\)',
        ),
        ({'W': numpy.ones((8, 4), 'f')}, ValueError, r'W: expected shape \(8, 5\).* got \(8, 4\)'),
        ({'W_g': numpy.ones((8, 5), 'f')}, ValueError, r'W_g: expected shape \(16, 5\).* \(8, 5\)'),
        ({'adj': numpy.ones((2, 3, 3))}, TypeError, 'adj: expected a BatchedCSR, got ndarray'),
        ({'adj': HALVES.astype('d')}, TypeError, 'x: expected float64 as the values of adj, got f'),
    ],
)
def test_what_does_not_fit(change, error, message):
    good = {
        'adj': ADJ,
        'x': numpy.ones((3, 5), 'f'),
        'W': numpy.ones((8, 5), 'f'),
        'W_g': numpy.ones((16, 5), 'f'),
    }
    edge_film(**good)
    with pytest.raises(error, match=message):
        edge_film(**dict(good, **change))
