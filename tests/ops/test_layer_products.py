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
    'loop, sums first': layer(6, 4, 1, 'tanh', loop=True, has_relation_bias=True),
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


def drawn_layer(spec, dtype):
    """Return a layer's matrices, x, gradient gy of its result, and parameters by name."""
    rng = numpy.random.RandomState(1)
    n_all = spec.n_relations * spec.width_out
    shapes = {
        'x': (N_ROWS, spec.width_in),
        'gy': (N_ROWS, spec.width_out),
        'W': (n_all, spec.width_in) if spec.n_relations else None,
        'W_self': (spec.width_out, spec.width_in) if spec.has_self else None,
        'b': (n_all,) if spec.has_relation_bias else None,
        'b_self': (spec.width_out,) if spec.n_biases else None,
    }
    given = {
        name: rng.uniform(-1, 1, shape).astype(dtype)
        for name, shape in shapes.items()
        if shape is not None
    }
    A = matrices(N_ROWS, max(spec.n_relations, 1), dtype)
    return A, given.pop('x'), given.pop('gy'), given


def batch_of(gpu, spec, A):
    """Return the matrices of a layer as a batch on the device, None if the layer has none."""
    return gpu.put(BatchedCSR.from_matrices([A]).astype(A.dtype)) if spec.n_relations else None


@pytest.mark.parametrize('dtype, name, has_more', pairs('fd', list(LAYERS), (False, True)), ids=str)
def test_gradients(gpu, dtype, name, has_more):
    spec = LAYERS[name]
    A, x, gy, given = drawn_layer(spec, dtype)
    adj = batch_of(gpu, spec, A)
    more = numpy.linspace(-1, 1, x.size).astype(dtype).reshape(x.shape) if has_more else None
    parameters = [given.get(name) for name in ('W', 'W_self', 'b', 'b_self')]
    right, largest = expected(spec, A, x, parameters, gy)
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


@pytest.mark.parametrize('name', LAYERS)
def test_a_gradient_that_is_needed_alone(gpu, name):
    """It is the one among all gradients, and no other is returned."""
    spec = LAYERS[name]
    A, x, gy, given = drawn_layer(spec, 'f')
    adj, x, gy = batch_of(gpu, spec, A), gpu.put(x), gpu.put(gy)
    given = {name: gpu.put(array) for name, array in given.items()}
    y, sums = products.forward(adj, x, given, spec.loop, spec.activation)
    options = dict(gy=gy, sums=sums, activation=spec.activation, y=y)
    every = products.backward(adj, x, given, spec.loop, needed={'x', *given}, **options)
    for one in ('x', *given):
        found = products.backward(adj, x, given, spec.loop, needed={one}, **options)
        assert [name for name, array in found.items() if array is not None] == [one]
        numpy.testing.assert_array_equal(cuda.to_cpu(found[one]), cuda.to_cpu(every[one]))


@pytest.mark.parametrize('widths, are_sums', [((4, 5), True), ((5, 5), True), ((5, 4), False)])
def test_the_array_between_the_products_is_the_narrower_one(gpu, widths, are_sums):
    spec = layer(*widths, n_relations=3)
    A, x, _, given = drawn_layer(spec, 'f')
    _, sums = products.forward(batch_of(gpu, spec, A), gpu.put(x), {'W': gpu.put(given['W'])})
    assert (sums is not None) == are_sums


@pytest.mark.parametrize('earlier', [('d', False), ('f', True)], ids=str)
def test_degrees_kept_for_another_layer_of_the_batch(gpu, earlier):
    """They have another dtype, or count the node itself."""
    spec = layer(4, 5, 1, has_relation_bias=True)
    ones = matrices(N_ROWS, 1, 'f', is_weighted=False)  # a batch without a dtype

    def result(adj, dtype, loop):
        _, x, _, given = drawn_layer(spec, dtype)
        parameters = {name: gpu.put(array) for name, array in given.items()}
        return cuda.to_cpu(products.forward(adj, gpu.put(x), parameters, loop)[0])

    adj, fresh = (batch_of(gpu, spec, ones) for _ in range(2))
    result(adj, *earlier)
    found = result(adj, 'f', False)
    assert found.dtype == numpy.float32
    numpy.testing.assert_array_equal(found, result(fresh, 'f', False))


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
