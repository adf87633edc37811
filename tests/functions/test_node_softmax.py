"""node_softmax against NumPy, graph by graph, and its gradients to second order."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.functions import node_softmax
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import features
from tests.support.gradients import check_gradients
from tests.support.spare import with_spare

SQUARE = [name for name in BATCHES if BATCHES[name].n_rows == BATCHES[name].n_cols]


def reference(adj, x):
    x, y = x.astype(float), numpy.empty(x.shape)
    starts = cuda.to_cpu(adj.row_offsets)
    for begin, end in zip(starts, starts[1:]):
        if end > begin:
            part = numpy.exp(x[begin:end] - x[begin:end].max(axis=0))
            y[begin:end] = part / part.sum(axis=0)
    return y


@pytest.mark.parametrize(
    'name, dtype',
    [(name, 'float64') for name in SQUARE] + [('many', 'float16'), ('many', 'float32')],
)
def test_forward(xp, name, dtype):
    adj = batch_on(name, xp, dtype)
    x = features(numpy.random.RandomState(0), xp, adj.n_rows, 3, dtype) * 20
    assert_close(node_softmax(adj, x).array, reference(adj, cuda.to_cpu(x)), dtype)


@pytest.mark.parametrize('name', ['huge among tiny', 'empty graphs first, between, last', 'padded'])
def test_gradients(xp, name):
    adj = batch_on(name, xp, 'float64')
    x = features(numpy.random.RandomState(1), xp, adj.n_rows, 2, 'float64')
    check_gradients(lambda x: node_softmax(adj, x), x)


def test_spare_rows_are_refused():
    adj = with_spare(BatchedCSR.from_matrices([numpy.eye(3)]), 2, 4)
    with pytest.raises(ValueError, match='without spare rows'):
        node_softmax(adj, numpy.ones((5, 2), 'f'))


def test_gradient_of_many_nodes_that_are_alike():
    """What all nodes of a graph have in common cancels, its rounding included."""
    adj = batch_on('huge among tiny', numpy, 'float32')
    rng = numpy.random.RandomState(2)
    x = chainer.Variable(numpy.zeros((adj.n_rows, 1), 'f'))
    gy = (100 + rng.uniform(-1e-3, 1e-3, x.shape)).astype('f')
    y = node_softmax(adj, x)
    y.grad = gy
    y.backward()
    truth = reference(adj, x.array)
    starts = adj.row_offsets
    expected = numpy.concatenate(
        [
            truth[a:b] * (gy[a:b] - (truth[a:b] * gy[a:b].astype(float)).sum(axis=0))
            for a, b in zip(starts, starts[1:])
        ]
    )
    assert_close(x.grad, expected, 'float32')


def test_large_gradients_in_float16():
    adj = batch_on('huge among tiny', numpy, 'float16')
    x = chainer.Variable(numpy.zeros((adj.n_rows, 1), 'e'))
    y = node_softmax(adj, x)
    y.grad = numpy.full(x.shape, 5e4, 'e')
    y.backward()
    assert not x.grad.any()


def test_shapes_that_do_not_fit():
    adj = BATCHES['many']
    with pytest.raises(
        ValueError, match=r'x: expected shape \(%d, n_B\), .* got \(3, 2\)' % adj.n_rows
    ):
        node_softmax(adj, numpy.zeros((3, 2)))
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR'):
        node_softmax(numpy.zeros((3, 3)), numpy.zeros((3, 2)))
