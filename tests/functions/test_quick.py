"""Backward passes: a node as always where a graph is wanted, arithmetic alone where none is."""

import numpy
import pytest

import chainer
from chainer.functions.math.basic_math import Mul

from chainer_bspmm.functions.node import apply_untracked
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.functions.node import AccumulateInPlace


class Calls(chainer.FunctionHook):
    name = 'Calls'

    def __init__(self):
        self.labels = []

    def forward_preprocess(self, function, in_data):
        self.labels.append(function.label)


@pytest.mark.parametrize('graph', [True, False])
def test_quick_apply(graph):
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    with chainer.using_config('enable_backprop', graph), Calls() as calls:
        (z,) = apply_untracked(Mul(), (x, y))
    assert z.array.tolist() == [6, 6]
    assert z.requires_grad == graph and (z.creator is not None) == graph
    assert len(calls.labels) == graph
    if graph:
        z.grad = numpy.ones(2, 'f')
        z.backward()
        assert x.grad.tolist() == [3, 3]


class QuickMul(AccumulateInPlace, Mul):
    pass


@pytest.mark.parametrize('graph', [True, False])
def test_quick_sums(graph):
    """x is used four times, once as both inputs, and has a gradient already."""
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    z = x
    for other in (y, x, x):
        (z,) = QuickMul().apply((z, other))  # x^3 y in the end
    z.grad = numpy.ones(2, 'f')
    x.grad = numpy.full(2, 5, 'f')
    with Calls() as calls:
        z.backward(enable_double_backprop=graph)
    assert x.grad.tolist() == [5 + 36, 5 + 36]
    assert y.grad.tolist() == [8, 8]
    assert ('_ + _' in calls.labels) == graph
    if graph:
        (gx,) = chainer.grad([x.grad_var], [x])
        assert gx.array.tolist() == [36, 36]


def test_quick_sums_leaves_what_it_adds_to_alone():
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    (z,) = QuickMul().apply((x, y))
    z.grad = numpy.ones(2, 'f')
    x.grad = given = numpy.full(2, 5, 'f')
    z.backward()
    assert given.tolist() == [5, 5] and x.grad.tolist() == [8, 8]


class QuickProduct(FusedNode):
    def forward(self, inputs):
        self.retain_inputs((0, 1))
        return (inputs[0] * inputs[1],)

    def _gradients(self, inputs, gy):
        return gy * inputs[1], gy * inputs[0]

    def _composed(self, a, b):
        return a * b


@pytest.mark.parametrize('graph', [True, False])
def test_quick_gradients_of_a_variable_given_twice(graph):
    x = chainer.Variable(numpy.full(2, 3, 'f'))
    (y,) = QuickProduct().apply((x, x))
    y.grad = numpy.ones(2, 'f')
    with Calls() as calls:
        y.backward(enable_double_backprop=graph)
    assert x.grad.tolist() == [6, 6]
    assert ('_ * _' in calls.labels) == graph
    if graph:
        (gx,) = chainer.grad([x.grad_var], [x])
        assert gx.array.tolist() == [2, 2]
