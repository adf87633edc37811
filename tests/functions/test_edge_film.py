"""edge_film against plain loops: values, gradients, the matrices of edges, what it refuses."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.functions.fused.edge_film import edge_film
from chainer_bspmm.sparse.edges import edges_of
from tests.support import assert_close
from tests.support import relative_error
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


def truth(adj, x, W, W_g):
    """Return values of all edges in float64, sorted as the function sorts them, and (order, row,
    entry, value) of each."""
    x, W, W_g = (cuda.to_cpu(array).astype('d') for array in (x, W, W_g))
    n_relations = adj.n_relations
    n_channels, edges = len(W) // n_relations, []
    for entry, row, column in reference.entries(adj):
        source, relation = divmod(column, n_relations)
        message = W[relation::n_relations] @ x[source]
        film = W_g[relation::n_relations] @ x[row]
        # Edges of one relation stay as they are stored; of several, they come by their source.
        order = (row, relation, source, entry) if n_relations > 1 else (row, entry)
        edges.append((order, row, entry, film[:n_channels] * message + film[n_channels:]))
    edges.sort(key=lambda edge: edge[0])
    return numpy.array([edge[3] for edge in edges]).reshape(adj.nnz, n_channels), edges


@pytest.mark.parametrize('name', NAMES)
def test_values(xp, name):
    for dtype, bound in (('float16', 4e-3), ('float32', 1e-6), ('float64', 1e-14)):
        adj = relation_batch_on(name, xp, dtype)
        given = arguments(adj, xp, dtype)
        y = edge_film(adj, *given).array
        assert y.dtype == dtype
        assert relative_error(y, truth(adj, *given)[0]) < bound


@pytest.mark.parametrize(
    'name', ['four relations', 'unsorted relations', 'no entries', 'duplicates, unsorted']
)
def test_gradients(xp, name):
    adj = small_relation_batch_on(name, xp)
    check_gradients(lambda *given: edge_film(adj, *given) ** 2, *arguments(adj, xp, 'float64'))


def test_parameters_of_another_dtype_are_converted(xp):
    adj = relation_batch_on('four relations', xp, 'float16')
    x, *weights = arguments(adj, xp, 'float32')
    variables = [chainer.Variable(array) for array in (x.astype('e'), *weights)]
    y = edge_film(adj, *variables)
    assert y.dtype == numpy.float16
    chainer.functions.sum(y).backward()
    assert [v.grad.dtype.char for v in variables] == ['e', 'f', 'f']


@pytest.mark.parametrize('name', NAMES)
def test_sums_over_the_edges_of_a_node(xp, name):
    adj = relation_batch_on(name, xp, 'float64')
    _, edges = truth(adj, *arguments(adj, xp, 'float64'))
    values = numpy.ones(adj.nnz) if adj.data is None else cuda.to_cpu(adj.data)
    x = numpy.random.RandomState(0).uniform(-1, 1, (adj.nnz, 5))
    expected = numpy.zeros((adj.n_rows, 5))
    for edge, (_, row, entry, _) in zip(x, edges):
        expected[row] += values[entry] * edge
    to_node = edges_of(adj).to_node
    assert_close(backend.bspmm(to_node, xp.asarray(x)), expected, 'float64')
    y = numpy.random.RandomState(0).uniform(-1, 1, (adj.n_rows, 5))
    assert_close(
        backend.bspmm(to_node, xp.asarray(y), trans=True),
        reference.bspmm(to_node, y, trans=True),
        'float64',
    )


@pytest.mark.parametrize('name', ['four relations', 'unsorted relations', 'padded'])
def test_matrices_pass_the_checks_of_the_constructor(name):
    edges = edges_of(relation_batch_on(name, numpy, 'float64'))
    for matrix in (edges.from_source, edges.from_receiver, edges.to_node, edges.to_node.T):
        checked = BatchedCSR(
            matrix.indptr, matrix.indices, matrix.row_offsets, matrix.data, matrix.col_offsets
        )
        for size in ('n_graphs', 'n_rows', 'n_cols', 'nnz', 'max_rows', 'max_cols', 'max_nnz'):
            assert getattr(matrix, size) == getattr(checked, size), size
        assert all(getattr(matrix, name).dtype == numpy.int32 for name in matrix._integers)


ADJ = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])


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
