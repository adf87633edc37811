"""quick_apply: a node as always where a graph is wanted, arithmetic alone where none is."""
import numpy
import pytest

import chainer
from chainer.functions.math.basic_math import Mul

from chainer_bspmm.functions.quick import quick_apply


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
        z, = quick_apply(Mul(), (x, y))
    assert z.array.tolist() == [6, 6]
    assert z.requires_grad == graph and (z.creator is not None) == graph
    assert len(calls.labels) == graph
    if graph:
        z.grad = numpy.ones(2, 'f')
        z.backward()
        assert x.grad.tolist() == [3, 3]
