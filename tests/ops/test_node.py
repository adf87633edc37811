"""Backward passes of fused nodes, with and without a graph of the gradients."""

import types

import numpy
import pytest

import chainer
from chainer.functions.math.basic_math import Mul

from chainer_bspmm import BatchedCSR
from chainer_bspmm import functions as public
from chainer_bspmm.cuda import step
from chainer_bspmm.ops.node import AccumulateInLaunch, AccumulateInPlace, apply_untracked, FusedNode
from tests.support.gradients import Calls


@pytest.mark.parametrize('graph', [True, False])
def test_apply_untracked(graph):
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


class InPlaceMul(AccumulateInPlace, Mul):
    pass


@pytest.mark.parametrize('graph', [True, False])
def test_accumulate_in_place(graph):
    """x is used four times, once for both inputs, and already has a gradient."""
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    z = x
    for other in (y, x, x):
        (z,) = InPlaceMul().apply((z, other))  # the last z is x^3 y
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


@pytest.mark.parametrize('graph', [True, False])
def test_gradient_that_was_there_is_left_alone(graph):
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    (z,) = InPlaceMul().apply((x, y))
    z.grad = numpy.ones(2, 'f')
    x.grad = before = numpy.full(2, 5, 'f')
    z.backward(enable_double_backprop=graph)
    assert before.tolist() == [5, 5] and x.grad.tolist() == [8, 8]


class Product(FusedNode):
    wanted = None

    def _output(self, inputs):
        return inputs[0] * inputs[1]

    def _gradients(self, inputs, gy, wanted):
        self.wanted = wanted
        return gy.astype('d') * inputs[1], gy * inputs[0]

    def _composed(self, a, b):
        return a * b


@pytest.mark.parametrize('graph', [True, False])
def test_fused_node_given_one_variable_twice(graph):
    x = chainer.Variable(numpy.full(2, 3, 'f'))
    (y,) = Product().apply((x, x))
    y.grad = numpy.ones(2, 'f')
    with Calls() as calls:
        y.backward(enable_double_backprop=graph)
    assert x.grad.tolist() == [6, 6]
    assert ('_ * _' in calls.labels) == graph
    if graph:
        (gx,) = chainer.grad([x.grad_var], [x])
        assert gx.array.tolist() == [2, 2]


@pytest.mark.parametrize('wanted', [(0,), (1,), (0, 1)], ids=str)
def test_fused_node_is_told_which_gradients_are_wanted(wanted):
    variables = [
        chainer.Variable(numpy.full(2, 3 + i, 'f'), requires_grad=i in wanted) for i in range(2)
    ]
    node = Product()
    (y,) = node.apply(variables)
    y.grad = numpy.ones(2, 'f')
    y.backward()
    assert node.wanted == wanted
    for i, variable in enumerate(variables):
        if i in wanted:
            assert variable.grad.dtype == 'f' and variable.grad.tolist() == [4 - i, 4 - i]
        else:
            assert variable.grad is None


class Launched(AccumulateInLaunch, Product):
    """Product with stand-ins for launches that may add to an existing gradient."""

    fails = False

    def __init__(self, adds_more=True):
        self._adds_more = adds_more
        self.added = []

    def _gradients(self, inputs, gy, wanted):
        if self.fails:
            raise MemoryError
        of_first, of_second = super()._gradients(inputs, gy, wanted)
        if self._more is not None:
            self.added.append(self._more)
            of_first = of_first + self._more
        return of_first, of_second


@pytest.mark.parametrize('adds_more, graph', [(True, False), (True, True), (False, False)])
def test_accumulate_in_launch(adds_more, graph):
    """x already has a gradient, and is used for both inputs."""
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    nodes = [Launched(adds_more) for _ in range(3)]
    (z,) = nodes[0].apply((x, y))
    (z,) = nodes[1].apply((z, x))
    (z,) = nodes[2].apply((x, z))  # x^3 y
    z.grad = numpy.ones(2, 'f')
    x.grad = numpy.full(2, 5, 'f')
    before = x.grad
    z.backward(enable_double_backprop=graph)
    assert x.grad.tolist() == [5 + 36] * 2 and y.grad.tolist() == [8, 8]
    assert before.tolist() == [5, 5]
    # The first input of the second node is not x.
    is_added = adds_more and not graph
    assert [len(node.added) for node in nodes] == [int(is_added), 0, int(is_added)]


class Deferred:
    """Sums of a step: the gradient `array` gets its value when it is settled."""

    def __init__(self, array, value):
        self.array, self.value = array, value

    def settle(self, array):
        if array is self.array:
            array[...] = self.value

    def chain(self, *arrays):
        return False


def test_a_launch_adds_a_sum_that_was_deferred(monkeypatch):
    """A parameter that is also the input of another layer may have a deferred gradient."""
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    (z,) = Launched().apply((x, y))
    z.grad = numpy.ones(2, 'f')
    x.grad = numpy.full(2, numpy.nan, 'f')
    under_way = types.SimpleNamespace(sums=Deferred(x.grad, 5))
    monkeypatch.setattr(step, 'current', lambda: under_way)
    z.backward()
    assert x.grad.tolist() == [8, 8]


def test_a_gradient_is_forgotten_after_an_error():
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    node = Launched()
    (z,) = node.apply((x, y))
    z.grad = numpy.ones(2, 'f')
    x.grad = numpy.full(2, 100, 'f')
    node.fails = True
    with pytest.raises(MemoryError):
        z.backward()
    node.fails = False
    for variable in (x, y):
        variable.cleargrad()
    z.grad = numpy.ones(2, 'f')
    z.backward()
    assert x.grad.tolist() == [3, 3]


def test_a_launch_adds_nothing_of_another_dtype():
    x, y = (chainer.Variable(numpy.full(2, value, 'f')) for value in (2, 3))
    node = Launched()
    (z,) = node.apply((x, y))
    with chainer.using_config('enable_backprop', False):
        old = chainer.Variable(numpy.full(2, 5, 'd'))
        gx, _ = node.backward_accumulate(
            (0, 1), (chainer.Variable(numpy.ones(2, 'f')),), (old, None)
        )
    assert gx.array.tolist() == [8, 8] and not node.added


ADJ = BatchedCSR.from_matrices([numpy.array([[0.0, 2, 1], [3, 0, 0], [0, 1, 0]], 'f')])
X = numpy.ones((3, 2), 'f')
VALUES = numpy.ones(4, 'f')
OPERATIONS = {
    'bspmm': (lambda x: public.bspmm(ADJ, x), X),
    'bspmm of values': (lambda data: public.bspmm(ADJ, X, data), VALUES),
    'bsddmm': (lambda u: public.bsddmm(ADJ, u, X), X),
    'segment_sum': (lambda x: public.segment_sum(ADJ, x), X),
    'segment_max': (lambda x: public.segment_max(ADJ, x), X),
    'segment_broadcast': (lambda y: public.segment_broadcast(ADJ, y), X[:1]),
    'segment_softmax': (lambda x: public.segment_softmax(ADJ, x), VALUES),
    'node_softmax': (lambda x: public.node_softmax(ADJ, x), X),
    'relation_linear': (lambda x: public.relation_linear(ADJ, x, numpy.ones((2, 2), 'f')), X),
}


@pytest.mark.parametrize('double', [False, True])
@pytest.mark.parametrize('name', OPERATIONS)
def test_gradients_that_do_not_fit_the_result(name, double):
    """chainer.grad passes any seed on, but kernels expect one like the result."""
    function, array = OPERATIONS[name]
    x = chainer.Variable(array)
    y = function(x)
    for seed, error, message in (
        (numpy.ones(y.shape), TypeError, 'gy: expected float32, like the result, got float64'),
        (numpy.ones(y.shape, 'i'), TypeError, 'gy: expected float32, like the result, got int32'),
        (
            numpy.ones((len(y) + 1, *y.shape[1:]), 'f'),
            ValueError,
            r'gy: expected shape .* got \(\d+,.*\)',
        ),
    ):
        with pytest.raises(error, match=message):
            chainer.grad([y], [x], [chainer.Variable(seed)], enable_double_backprop=double)
