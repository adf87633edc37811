"""Layers as products on a GPU: a launch for the end, sums in place, earlier gradients."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.graph_linear import products
from tests.support import reference
from tests.support.cases import pairs
from tests.support.layer_kernels import BOUND, expected, layer, matrices

N_ROWS = 23
DRAW = 2**40 + 3, 5, 2**33 + 1
LAYERS = {
    'linear': layer(6, 5, n_biases=1, activation='relu'),
    'linear, identity': layer(6, 5, n_biases=1),
    'convolution': layer(5, 6, 1, 'relu'),
    'convolution, itself': layer(6, 4, 1, 'tanh', has_self=True, n_biases=1),
    'mapped first': layer(6, 4, 1, 'tanh', has_relation_bias=True),
    'loop': layer(6, 4, 1, 'relu', loop=True, n_biases=1),
    'relations': layer(4, 6, 3, 'tanh', has_self=True, has_relation_bias=True, n_biases=1),
    'relations, mapped first': layer(
        6, 4, 3, 'tanh', has_self=True, has_relation_bias=True, n_biases=1
    ),
}


@pytest.fixture(autouse=True)
def on_device(monkeypatch, gpu):
    """Make arrays of ones the device's: the emulated device has NumPy arrays of its own class."""
    degrees = products._degrees
    monkeypatch.setattr(products, '_is_on_host', lambda x: False)
    monkeypatch.setattr(products, '_degrees', lambda *arguments: gpu.put(degrees(*arguments)))


@pytest.mark.parametrize('dtype, name, has_more', pairs('fd', list(LAYERS), (False, True)), ids=str)
def test_gradients(gpu, dtype, name, has_more):
    spec = LAYERS[name]
    rng = numpy.random.RandomState(1)

    def drawn(*shape):
        return rng.uniform(-1, 1, shape).astype(dtype)

    n_all = spec.n_relations * spec.width_out
    x, gy = drawn(N_ROWS, spec.width_in), drawn(N_ROWS, spec.width_out)
    W = drawn(n_all, spec.width_in) if spec.n_relations else None
    W_self = drawn(spec.width_out, spec.width_in) if spec.has_self else None
    b = drawn(n_all) if spec.has_relation_bias else None
    b_self = drawn(spec.width_out) if spec.n_biases else None
    given = {'W': W, 'W_self': W_self, 'b': b, 'b_self': b_self}
    given = {name: array for name, array in given.items() if array is not None}
    A = matrices(N_ROWS, max(spec.n_relations, 1), dtype)
    adj = BatchedCSR.from_matrices([A]).astype(dtype) if spec.n_relations else None
    adj = gpu.put(adj) if adj is not None else None
    more = drawn(N_ROWS, spec.width_in) if has_more else None
    right, largest = expected(spec, A, x, (W, W_self, b, b_self), gy)
    on_gpu = {name: gpu.put(array) for name, array in given.items()}
    x = gpu.put(x)
    y, sums = products.forward(adj, x, on_gpu, spec.loop, spec.activation)
    found = products.backward(
        adj,
        x,
        on_gpu,
        spec.loop,
        gy=gpu.put(gy),
        needed={'x', *given},
        sums=sums,
        activation=spec.activation,
        y=y,
        more=gpu.put(more) if has_more else None,
    )
    if has_more:
        right['x'] = right['x'] + more
    found = {name: cuda.to_cpu(array) for name, array in found.items() if array is not None}
    found['y'] = cuda.to_cpu(y)
    assert found.keys() == right.keys()
    for name, array in found.items():
        assert array.dtype == dtype, name
        bound = 8 * BOUND[dtype] * max(abs(right[name]).max(), largest)
        assert abs(array - right[name]).max() <= bound, name


@pytest.mark.parametrize('activation', ['identity', 'relu'])
@pytest.mark.parametrize('n_relations, loop', [(0, False), (1, True), (3, False)])
def test_gradients_of_a_steps_dropout(gpu, n_relations, loop, activation):
    """With one relation, the gradient of a neighbour is dropped when it is read."""
    rng = numpy.random.RandomState(1)
    spec = layer(6, 5, n_relations, activation, has_self=True, loop=loop, n_biases=1)
    shapes = {'W': (n_relations * 5, 6), 'W_self': (5, 6), 'b_self': (5,)}
    given = {name: rng.uniform(-1, 1, shape).astype('f') for name, shape in shapes.items()}
    W = given['W'] if n_relations else given.pop('W')
    x, gy = (rng.uniform(-1, 1, (N_ROWS, width)).astype('f') for width in (6, 5))
    A = matrices(N_ROWS, max(n_relations, 1), 'f')
    adj = gpu.put(BatchedCSR.from_matrices([A]).astype('f')) if n_relations else None
    kept = reference.kept(gy.size, 0.25, *DRAW).reshape(gy.shape) / 0.75
    right, largest = expected(spec, A, x, (W, given['W_self'], None, given['b_self']), gy, kept)
    on_gpu = {name: gpu.put(array) for name, array in given.items()}
    x = gpu.put(x)
    seed, layer_number, counter = DRAW
    y, sums = products.forward(
        adj,
        x,
        on_gpu,
        loop,
        activation=activation,
        dropout_ratio=0.25,
        draw=(seed, layer_number, gpu.put(numpy.array([counter], 'u8'))),
    )
    found = products.backward(
        adj,
        x,
        on_gpu,
        loop,
        gy=gpu.put(gy),
        needed={'x', *given},
        sums=sums,
        activation=activation,
        y=y,
        dropout_ratio=0.25,
    )
    for name, array in {**found, 'y': y}.items():
        bound = 8 * BOUND['f'] * max(abs(right[name]).max(), largest)
        assert abs(cuda.to_cpu(array) - right[name]).max() <= bound, name


def test_what_was_accumulated_is_not_written_to(gpu):
    """The array may belong to another variable, too."""
    more = gpu.put(numpy.ones((N_ROWS, 6), 'f'))
    W = gpu.put(numpy.ones((5, 6), 'f'))
    x, gy = gpu.put(numpy.ones((N_ROWS, 6), 'f')), gpu.put(numpy.ones((N_ROWS, 5), 'f'))
    found = products.backward(None, x, {'W_self': W}, gy=gy, needed={'x'}, more=more)
    assert (cuda.to_cpu(found['x']) == 6).all() and (cuda.to_cpu(more) == 1).all()
