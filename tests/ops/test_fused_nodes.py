"""Rules for fused nodes: an operation is one node, and gradients share no memory.

Other tests run the kernels on bare arrays; here the nodes launch them.
"""

import functools
import typing

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.functions import relation_linear
from chainer_bspmm.ops.degree_linear import degree_linear_sigmoid
from chainer_bspmm.ops.edge_film import edge_film
from chainer_bspmm.ops.gates.gated_linear import gated_linear
from chainer_bspmm.ops.gates.gru_step import gru_step
from chainer_bspmm.ops.graph_linear import products
from chainer_bspmm.ops.layer_norm import layer_norm
from chainer_bspmm.ops.linear_softmax import linear_softmax
from chainer_bspmm.ops.relation_attention import relation_attention
from tests.support import random_matrix, relative_error
from tests.support.gradients import assert_same_gradients_alone


class Node(typing.NamedTuple):
    function: typing.Callable  # function of a batch and the arrays
    n_features: int  # so many of the arrays are features, the others are parameters
    shapes: list
    n_relations: int = 2  # relations of the batch
    aggregates_first: object = None  # order of the products, if not the host's


def pairs(arrays):
    return list(zip(arrays[::2], arrays[1::2]))


N = 7  # rows
LINEAR = Node(relation_linear, 1, [(N, 3), (8, 3), (8,), (4, 3), (4,)])
GRU = [(5, 5), (5,)] * 3 + [(5, 5), (5,)] * 3
GRU_OF_STATE = [(5, 7), (5,)] * 3 + [(5, 5), (5,)] * 3
NODES = {
    'relation_linear': LINEAR,
    'relation_linear, summed first': LINEAR._replace(aggregates_first=True),
    'relation_linear, mapped first': LINEAR._replace(aggregates_first=False),
    'edge_film': Node(edge_film, 1, [(N, 4), (6, 4), (12, 4)]),
    'relation_attention': Node(
        functools.partial(relation_attention, n_heads=2), 1, [(N, 12), (1, 6), (1,)]
    ),
    'layer_norm': Node(
        lambda adj, x, gamma, beta: layer_norm(x, gamma, beta, 1e-3), 1, [(N, 5), (5,), (5,)]
    ),
    'gru_step': Node(
        lambda adj, x, message, state, *parameters: gru_step(x, message, state, pairs(parameters)),
        3,
        [(N, 3), (N, 2), (N, 5), *GRU],
    ),
    'gru_step without a state': Node(
        lambda adj, x, message, *parameters: gru_step(x, message, None, pairs(parameters)),
        2,
        [(N, 3), (N, 2), *GRU[:4]],
    ),
    'gru_step whose input is the state': Node(
        lambda adj, x, message, *parameters: gru_step(x, message, x, pairs(parameters)),
        2,
        [(N, 5), (N, 2), *GRU_OF_STATE],
    ),
    'gated_linear': Node(
        lambda adj, x, m, W, b, V, c: gated_linear(x, m, (W, b), (V, c), functions.tanh),
        2,
        [(N, 3), (N, 2), (4, 5), (4,), (4, 5), (4,)],
    ),
    'gated_linear of one array, without activation and biases': Node(
        lambda adj, x, W, V: gated_linear(x, None, (W, None), (V, None)),
        1,
        [(N, 3), (4, 3), (4, 3)],
    ),
    'linear_softmax': Node(
        lambda adj, x, x2, W, b, W2: linear_softmax((x, W, b), (x2, W2, None)),
        2,
        [(N, 3), (N, 2), (4, 3), (4,), (4, 2)],
    ),
    'degree_linear': Node(
        lambda adj, x, *parameters: degree_linear_sigmoid(adj, x, parameters[:4], parameters[4:]),
        1,
        [(N, 3), *[(2, 3)] * 4, *[(2,)] * 4],
        n_relations=1,
    ),
}


def batch_and_arrays(node):
    """Return a batch of seven nodes, and arrays in float64."""
    rng = numpy.random.RandomState(0)
    matrices = [random_matrix(rng, n, node.n_relations) for n in (4, 1, 2)]
    if node.n_relations == 1:  # degrees are integers
        matrices = [numpy.ceil(matrix) for matrix in matrices]
    adj = BatchedCSR.from_matrices(matrices)
    return adj, [rng.uniform(-1, 1, shape) for shape in node.shapes]


@pytest.fixture(params=NODES)
def node(request, xp, monkeypatch):
    """Function of arrays, the arrays in float64, and the `Node`."""
    node = NODES[request.param]
    if node.aggregates_first is not None:
        monkeypatch.setattr(products, '_is_on_host', lambda *_: False)
        monkeypatch.setattr(products, 'aggregates_first', lambda *_: node.aggregates_first)
    adj, arrays = batch_and_arrays(node)

    def function(*arrays):
        values = adj.astype(arrays[0].dtype)
        values = values if xp is numpy else values.to_device('@cupy:0')
        return node.function(values, *arrays)

    return function, [xp.asarray(array) for array in arrays], node


# linear_softmax is in test_activated_linear.py. A GPU itself chooses the order of the products.
WITH_KERNELS = [
    name
    for name, node in NODES.items()
    if name != 'linear_softmax' and node.aggregates_first is None
]


@pytest.mark.parametrize('name', WITH_KERNELS)
def test_kernels_give_what_a_host_gives(gpu, name):
    node = NODES[name]
    adj, arrays = batch_and_arrays(node)
    adj = adj.astype('f')
    results = []
    for batch, put in ((adj, numpy.array), (gpu.put(adj), gpu.put)):
        variables = [chainer.Variable(put(array.astype('f'))) for array in arrays]
        y = node.function(batch, *variables)
        y.grad = put(numpy.linspace(0.5, 1.5, y.size, dtype='f').reshape(y.shape))
        y.backward()
        results.append([y.array, *(variable.grad for variable in variables)])
    assert gpu.names
    for on_host, found in zip(*results, strict=True):
        assert relative_error(found, on_host) < 1e-5


def test_one_node(node):
    function, arrays, _ = node
    variables = [chainer.Variable(array) for array in arrays]
    inputs = function(*variables).creator_node.inputs
    assert {id(each) for each in inputs} == {id(variable.node) for variable in variables}


def test_gradients_of_some_inputs_alone(node):
    """A layer that is not trained, or features without an embedding, need only some gradients."""
    function, arrays, _ = node
    n = len(arrays)
    choices = *([i] for i in range(n)), range(1, n), range(0, n, 2)
    assert_same_gradients_alone(function, arrays, choices)


@pytest.mark.parametrize('higher', [False, True])
def test_gradients_share_no_memory(node, higher):
    """Hooks such as WeightDecay write to a parameter's gradient, which must change no other."""
    function, arrays, node = node
    variables = [chainer.Variable(array) for array in arrays]
    functions.sum(function(*variables) ** 2).backward(enable_double_backprop=higher)
    parameters = variables[node.n_features :]
    before = [cuda.to_cpu(variable.grad).copy() for variable in parameters]
    for variable in parameters:
        variable.grad *= 2
    for variable, gradient in zip(parameters, before):
        numpy.testing.assert_array_equal(cuda.to_cpu(variable.grad), 2 * gradient)


@pytest.mark.parametrize('higher', [False, True])
def test_parameters_of_another_dtype_are_converted(node, higher):
    function, arrays, node = node
    n = node.n_features
    halves = [array.astype('e' if i < n else 'f') for i, array in enumerate(arrays)]
    variables = [chainer.Variable(array) for array in halves]
    y = function(*variables)
    assert y.dtype == numpy.float16
    expected = function(*(array.astype('d') for array in halves)).array
    assert relative_error(y.array, expected) < 5e-3  # a few roundings of 2**-11
    functions.sum(y).backward(enable_double_backprop=higher)
    assert all(variable.grad.dtype == variable.dtype for variable in variables)
