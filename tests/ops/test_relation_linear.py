"""`relation_linear` in both orders: values, gradients, second derivatives, sharing, refusals."""

import functools
import importlib

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR
from chainer_bspmm.functions import relation_linear
from chainer_bspmm.ops.bspmm import bspmm_forward
from tests.support import assert_close, batch_on, ones_for, random_matrix, reference, relative_error
from tests.support.gradients import assert_same_outcome, check_gradients, outcome
from tests.support.relations import NAMES, relation_batch_on, small_relation_batch_on, TOO_WIDE

module = importlib.import_module('chainer_bspmm.ops.graph_linear.products')

PARTS = [('b', 'W_self', 'b_self'), ('b',), ('W_self',), ('b_self',), ()]

# (in_channels, out_channels); if widths are equal, neighbours are summed first.
WIDTHS = {
    'transform': (5, 3),
    'aggregate': (3, 5),
    'equal': (4, 4),
    'narrow': (1, 1),
    'to one': (33, 1),
    'from one': (1, 33),
}


@pytest.fixture(params=[True, False, None], ids=['aggregate', 'transform', 'own'])
def order(request, monkeypatch):
    """Force one order for all widths, or, if the parameter is None, leave it to the device."""
    if request.param is not None:
        monkeypatch.setattr(module, '_is_on_host', lambda *_: False)
        monkeypatch.setattr(module, 'aggregates_first', lambda *_: request.param)


def parameters(adj, xp, dtype, widths, parts):
    rng = numpy.random.RandomState(0)
    n_in, n_out = widths
    shapes = {
        'x': (adj.n_rows, n_in),
        'W': (n_out * adj.n_relations, n_in),
        'b': (n_out * adj.n_relations,),
        'W_self': (n_out, n_in),
        'b_self': (n_out,),
    }
    return {
        name: xp.asarray(rng.uniform(-1, 1, shape).astype(dtype))
        for name, shape in shapes.items()
        if name in ('x', 'W', *parts)
    }


def test_one_matrix_for_several_dtypes(order, xp):
    """Cached data of a matrix of implicit ones depend on the dtype of the features."""
    adj = relation_batch_on('unsorted relations', xp, 'f')
    shared = adj.replace()
    for dtype in ('d', 'e', 'f'):
        given = parameters(adj, xp, dtype, (3, 5), ('b',))
        alone = relation_linear(adj.replace(), **given).array
        found = relation_linear(shared, **given).array
        numpy.testing.assert_array_equal(cuda.to_cpu(found), cuda.to_cpu(alone))


def truth(adj, **given):
    return reference.graph_linear(reference.matrices(adj), **given)


def layer(adj, names, *arrays, **options):
    return relation_linear(adj, **dict(zip(names, arrays)), **options)


@pytest.mark.parametrize(
    'name, dtype',
    [*((name, 'float32') for name in NAMES), *((name, 'float64') for name in NAMES[:1])],
)
def test_values(xp, order, name, dtype):
    adj = relation_batch_on(name, xp, dtype)
    combinations = [(widths, PARTS[0]) for widths in WIDTHS.values()]
    for widths, parts in combinations + [(WIDTHS['transform'], parts) for parts in PARTS[1:]]:
        given = parameters(adj, xp, dtype, widths, parts)
        y = relation_linear(adj, **given)
        assert_close(y.array, truth(adj, **given), dtype)


def test_half_precision(xp, order):
    adj = batch_on('four relations', xp, 'float16')
    given = parameters(adj, xp, 'float16', (5, 4), PARTS[0])
    y = relation_linear(adj, **given).array
    assert y.dtype == numpy.float16
    # The array between GEMM and product is rounded, and so is the term that is added last.
    assert relative_error(y, truth(adj, **given)) < 4 * 5e-4


def test_padded_features_of_three_dimensions(xp, order):
    adj = batch_on('padded', xp, 'float64')
    given = parameters(adj, xp, 'float64', (5, 4), PARTS[0])
    expected = truth(adj, **given).reshape(adj.n_graphs, adj.max_rows, 4)
    flat = given.pop('x')
    padded = flat.reshape(adj.n_graphs, adj.max_rows, 5)

    def function(x):
        return relation_linear(adj, x, **given)

    y, gx = outcome(function, [padded])
    _, gx_of_flat = outcome(function, [flat])
    assert_close(y, expected, 'float64')
    assert_same_outcome([gx], [gx_of_flat.reshape(padded.shape)], 'd', 1e-12)


def test_arrays_that_are_not_contiguous(xp, order):
    adj = batch_on('four relations', xp, 'float64')
    given = parameters(adj, xp, 'float64', (5, 4), PARTS[0])
    strided = {name: xp.stack([a.T] * 2, axis=-1)[..., 0].T for name, a in given.items()}
    assert_close(relation_linear(adj, **strided).array, truth(adj, **given), 'float64')


@pytest.mark.parametrize(
    'name, parts',
    [
        *(('unsorted values', parts) for parts in PARTS),
        *((name, PARTS[0]) for name in ('four relations', 'symmetric ones')),
    ],
)
def test_gradients(xp, order, name, parts):
    adj = small_relation_batch_on(name, xp)
    given = parameters(adj, xp, 'float64', WIDTHS['aggregate'], parts)
    check_gradients(lambda *arrays: layer(adj, given, *arrays) ** 2, *given.values())


def test_order_is_chosen_by_the_narrower_side():
    assert not module.aggregates_first(64, 63)
    assert module.aggregates_first(64, 64) and module.aggregates_first(16, 128)


@pytest.mark.parametrize('widths, between', [((8, 2), 2), ((2, 8), 2)])
def test_products_are_of_the_narrower_width(monkeypatch, widths, between):
    """There is one product forward, one backward, and one with a single column for the degrees."""
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n, 4).astype('f') for n in (5, 3)])
    monkeypatch.setattr(module, '_is_on_host', lambda *_: False)
    seen = []

    def noted(adj, x, *args, **options):
        seen.append(x.shape[-1])
        return bspmm_forward(adj, x, *args, **options)

    monkeypatch.setattr(module, 'bspmm_forward', noted)
    given = parameters(adj, numpy, 'float32', widths, PARTS[0])
    outcome(functools.partial(layer, adj, given), given.values())
    degrees_first = not module.aggregates_first(*widths)  # the product adds to them
    assert seen == ([1, between] if degrees_first else [between, 1]) + [between]
    # The matrix keeps its degrees.
    relation_linear(adj, **given)
    assert seen[3:] == [between]


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('widths', [WIDTHS['transform'], WIDTHS['from one']], ids=str)
def test_tanh(xp, order, widths, dtype):
    adj = batch_on('four relations', xp, dtype)
    given = parameters(adj, xp, dtype, widths, PARTS[0])
    fused = functools.partial(layer, adj, given, activation=chainer.functions.tanh)

    def by_two_functions(*arrays):
        return chainer.functions.tanh(layer(adj, given, *arrays))

    found = outcome(fused, given.values())
    expected = outcome(by_two_functions, given.values())
    assert_same_outcome(found, expected, dtype, 2e-3 if dtype == 'float16' else 1e-6)


def test_gradients_of_tanh(xp, order):
    adj = relation_batch_on('unsorted values', xp, 'float64')
    given = parameters(adj, xp, 'float64', WIDTHS['aggregate'], PARTS[0])
    function = functools.partial(layer, adj, given, activation=chainer.functions.tanh)
    check_gradients(function, *(0.3 * array for array in given.values()))


ADJ = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])
TWOS = BatchedCSR.from_matrices([2 * numpy.ones((2, 3, 3))])
SHAPES = {'x': (3, 4), 'W': (10, 4), 'b': (10,), 'W_self': (5, 4), 'b_self': (5,)}


@pytest.mark.parametrize(
    'change, error, message',
    [
        ({'x': (4, 4)}, ValueError, r'x: expected shape \(3, in_channels\), .*, got \(4, 4\)'),
        ({'x': (1, 3, 4)}, ValueError, r'x: expected .* got .*\(1, 3, 4\)'),
        ({'x': numpy.ones((3, 4), 'i')}, TypeError, 'x: expected float16, .*, got int32'),
        ({'x': [[1.0] * 4] * 3}, TypeError, 'x: expected a NumPy or CuPy array, got list'),
        ({'W': [[1.0] * 4] * 10}, TypeError, 'W: expected float16, .*, got list'),
        ({'W': None}, TypeError, 'W: expected float16, .*, got NoneType'),
        ({'b': 1.0}, TypeError, 'b: expected float16, .*, got float'),
        (
            {'adj': None},
            TypeError,
            'adj: expected a BatchedCSR, got NoneType; data sets become .* with '
            'BatchedCSR.from_dense',
        ),
        ({'b_self': numpy.ones(5, 'i')}, TypeError, 'b_self: expected float16, .*, got int32'),
        ({'W': (9, 4)}, ValueError, r'W: expected shape \(out_channels \* 2, 4\), .* \(9, 4\)'),
        ({'W': (10, 3)}, ValueError, r'W: expected .*, got \(10, 3\)'),
        ({'b': (5,)}, ValueError, r'b: expected shape \(10,\) .* got \(5,\)'),
        ({'W_self': (4, 5)}, ValueError, r'W_self: expected shape \(5, 4\) .* got \(4, 5\)'),
        ({'b_self': (10,)}, ValueError, r'b_self: expected shape \(5,\) .* \(10,\)'),
        (
            {'activation': chainer.functions.elu},
            ValueError,
            'activation: expected one of chainer.functions.identity, relu, tanh, got .*elu '
            'at 0x.*>',
        ),
        (
            {'adj': numpy.ones((1, 2, 3, 3))},
            TypeError,
            r'adj: expected a BatchedCSR, got ndarray of shape \(1, 2, 3, .* with '
            'BatchedCSR.from_dense',
        ),
        (
            {'adj': BatchedCOO.from_csr(ADJ)},
            TypeError,
            r'adj: expected a BatchedCSR, got BatchedCOO of shape \(3, 6\); .* takes adj itself',
        ),
        (
            {'adj': TWOS},
            TypeError,
            r'x: expected float64, like the values of adj, got float32; adj.astype\(x.dtype\) '
            'converts',
        ),
        (
            {'adj': TOO_WIDE},
            ValueError,
            'adj: expected a column for each of its 1 rows and 1 relations, got <BatchedCSR.*>',
        ),
    ],
)
def test_what_does_not_fit(change, error, message):
    arguments = ones_for({'adj': ADJ, **SHAPES, **change})
    with pytest.raises(error, match=message):
        relation_linear(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    'name, error, message',
    [
        ('x', ValueError, 'x: expected an array on .*, like adj, got one on'),
        ('W', TypeError, 'incompatible array types'),
        ('b', TypeError, 'incompatible array types'),
        ('W_self', TypeError, 'incompatible array types'),
        ('b_self', TypeError, 'incompatible array types'),
    ],
)
def test_one_array_on_another_device(name, error, message):
    arguments = ones_for(SHAPES)
    arguments[name] = cuda.to_gpu(arguments[name])
    with pytest.raises(error, match=message):
        relation_linear(ADJ, **arguments)


@pytest.mark.gpu
def test_all_arrays_on_another_device():
    arguments = {name: cuda.to_gpu(array) for name, array in ones_for(SHAPES).items()}
    with pytest.raises(ValueError, match='x: expected an array on .*, like adj, got one on'):
        relation_linear(ADJ, **arguments)


@pytest.mark.parametrize('with_bias', [False, True])
@pytest.mark.parametrize('n_in, n_out', [(0, 5), (4, 0), (0, 0)])
def test_layers_without_channels(xp, n_in, n_out, with_bias):
    adj = ADJ.to_device('@numpy' if xp is numpy else '@cupy:0')
    x = chainer.Variable(xp.ones((3, n_in), 'f'))
    W = chainer.Variable(xp.ones((2 * n_out, n_in), 'f'))
    b = chainer.Variable(xp.ones(2 * n_out, 'f')) if with_bias else None
    y = relation_linear(adj, x, W, b)
    chainer.functions.sum(y).backward()
    assert (y.array == (6 if with_bias else 0)).all() and y.shape == (3, n_out)
    assert x.grad.shape == x.shape and W.grad.shape == W.shape
    assert b is None or (b.grad == 9).all()
