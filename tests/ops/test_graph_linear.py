"""What only some layers use: rows as their own neighbours, dropout without a rectifier."""

import numpy
import pytest

import chainer
from chainer import functions

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda import step
from chainer_bspmm.functions import bspmm
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.ops.graph_linear import node
from chainer_bspmm.ops.graph_linear import products
from tests.support import features
from tests.support import random_matrix
from tests.support import reference
from tests.support import relative_error
from tests.support.gradients import check_gradients


@pytest.fixture(params=[True, False], ids=['own', 'products'])
def order(request, monkeypatch):
    """What the device does by itself, and products, neighbours summed first."""
    if not request.param:
        monkeypatch.setattr(products, '_is_on_host', lambda x: False)
        monkeypatch.setattr(products, 'aggregates_first', lambda *_: True)
        monkeypatch.setattr(node, 'layer_of', lambda *_, **__: None)


def given(xp):
    """Return matrices that are not symmetric, x, W, b and b_self."""
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n).astype('d') for n in (5, 1, 7)])
    if xp is not numpy:
        adj = adj.to_device('@cupy:0')
    x, W = features(rng, xp, 13, 6, 'd'), features(rng, xp, 4, 6, 'd')
    return adj, x, W, *features(rng, xp, 2, 4, 'd')


def test_rows_as_their_own_neighbours(xp, order):
    """The same matrix without them first, and then with them."""
    adj, *arrays = given(xp)
    for loop in (False, True):
        ours, theirs = _ours_and_theirs(adj, loop)
        found = []
        for function in (ours, theirs):
            variables = [chainer.Variable(array.copy()) for array in arrays]
            y = function(*variables)
            functions.sum(y * y).backward()
            found.append([y.array, *(variable.grad for variable in variables)])
        for actual, expected in zip(*found):
            assert relative_error(actual, expected) < 1e-12
        check_gradients(ours, *arrays)


def _ours_and_theirs(adj, loop):
    degrees = bspmm(adj, adj.xp.ones((13, 1), 'd')) + int(loop)

    def ours(x, W, b, b_self):
        return graph_linear(adj, x, W, b, None, b_self, functions.tanh, loop=loop)

    def theirs(x, W, b, b_self):
        y = functions.linear(bspmm(adj, x, residual=x if loop else None), W, b_self)
        return functions.tanh(y + functions.matmul(degrees, b[None]))

    return ours, theirs


@pytest.mark.parametrize('other_first', [False, True])
def test_features_with_another_use(xp, other_first):
    """Their gradients are added, by the launch of the layer if the other one is there first."""
    adj, x, W, b, b_self = given(xp)
    found = []
    for function in _ours_and_theirs(adj, False):
        h = chainer.Variable(x.copy())
        shared = functions.identity(h)
        # Nodes of higher rank are differentiated first.
        if other_first:
            y = functions.sum(function(shared, W, b, b_self) ** 2)
            y += functions.sum(functions.tanh(functions.sin(shared)))
        else:
            y = functions.sum(functions.sin(shared))
            y += functions.sum(function(functions.identity(shared), W, b, b_self) ** 2)
        y.backward()
        found.append(h.grad)
    assert relative_error(*found) < 1e-12


@pytest.mark.parametrize('activation', [functions.identity, functions.tanh])
def test_dropout_after_other_activations(xp, activation):
    adj, x, W, *_ = given(xp)
    y, plain = (graph_linear(adj, x, W, None, None, None, activation, r).array for r in (0.5, 0.0))
    is_kept = y != 0
    assert 10 < is_kept.sum() < 42
    assert relative_error(y, 2 * plain * is_kept) < 1e-12


def test_dropout_of_a_step_without_a_kernel_of_the_layer(monkeypatch):
    monkeypatch.setattr(node, 'step_for', lambda array: step.current())
    adj, x, W, *_ = given(numpy)
    x, weights = chainer.Variable(x), numpy.arange(52.0).reshape(13, 4)
    with step.under_way(step.Step(None, 3, numpy.array([5], 'u8'))):
        y = graph_linear(adj, x, W, dropout_ratio=0.5)
        functions.sum(y * weights).backward()
    factors = 2 * reference.kept(52, 0.5, 3, 0, 5).reshape(13, 4)
    assert relative_error(y.array, factors * graph_linear(adj, x, W).array) < 1e-12
    expected = bspmm_forward(adj, (factors * weights) @ W, trans=True)
    assert relative_error(x.grad, expected) < 1e-12


def test_a_loop_is_of_one_relation():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])
    x, W = numpy.ones((3, 2), 'f'), numpy.ones((8, 2), 'f')
    with pytest.raises(ValueError, match='adj: expected one relation to go with loop=True, got'):
        graph_linear(adj, x, W, loop=True)


def test_zeros_that_dropout_keeps():
    """What a kernel has dropped is -0."""
    layer = node.GraphLinear(None, ('x', 'W_self'), functions.identity, 0.5, False)
    layer._y = numpy.array([0.0, -0.0, 3.0], 'f')
    numpy.testing.assert_array_equal(layer._factors(), [2, 0, 2])
