"""Layers of one relation, with a rectifier, dropout, or rows as their own neighbours; on a host."""

import numpy
import pytest

import chainer
from chainer import functions

from chainer_bspmm import BatchedCSR
from chainer_bspmm.functions import bspmm
from chainer_bspmm.ops import elementwise
from chainer_bspmm.ops.graph_linear import graph_linear, node, products
from chainer_bspmm.ops.graph_linear.host import graph_linear_grad_on_host, graph_linear_on_host
from tests.support import device_of, DTYPES, features, random_matrix, reference, relative_error
from tests.support.gradients import assert_same_outcome, check_gradients, outcome
from tests.support.layers import convolved_relu, linear_relu


@pytest.fixture(params=[True, False], ids=['own', 'products'])
def order(request, monkeypatch):
    """Two ways to compute: the device's own, and products that sum neighbours first."""
    if not request.param:
        monkeypatch.setattr(products, '_is_on_host', lambda x: False)
        monkeypatch.setattr(products, 'aggregates_first', lambda *_: True)
        monkeypatch.setattr(node, 'layer_of', lambda *_, **__: None)


def given(xp):
    """Return asymmetric matrices, x, W, b and b_self."""
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n).astype('d') for n in (5, 1, 7)])
    x, W = features(rng, xp, 13, 6, 'd'), features(rng, xp, 4, 6, 'd')
    return adj.to_device(device_of(xp)), x, W, *features(rng, xp, 2, 4, 'd')


def test_rows_as_their_own_neighbours(xp, order):
    """The same matrix is used without and then with rows as their own neighbours."""
    adj, *arrays = given(xp)
    for loop in (False, True):
        ours, theirs = _ours_and_theirs(adj, loop)
        assert_same_outcome(outcome(ours, arrays), outcome(theirs, arrays), 'd', 1e-12)
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
    """Gradients of both uses are added; the launch of the layer does so if it comes second."""
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


@pytest.mark.parametrize('sizes', [(5, 1, 0, 7), (1,), (0,)], ids=str)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('ratio', [0.0, 0.5])
def test_same_as_product_with_rectified_layer(xp, sizes, dtype, ratio):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n).astype(dtype) for n in sizes])
    adj = adj.to_device(device_of(xp))
    arrays = features(rng, xp, sum(sizes), 6, dtype), features(rng, xp, 4, 6, dtype)
    found = []
    for function in (
        lambda x, W: convolved_relu(adj, x, W, ratio),
        lambda x, W: linear_relu(bspmm(adj, x), W, None, ratio),
    ):
        numpy.random.seed(0)
        xp.random.seed(0)
        found.append(outcome(function, arrays))
    # The convolution maps before it sums, because W is wider than it is high.
    bound = {'float16': 2e-3, 'float32': 1e-6, 'float64': 1e-14}[dtype]
    assert_same_outcome(found[0], found[1], dtype, bound)


def test_gradients_of_a_rectifier(xp):
    adj, x, W, *_ = given(xp)
    assert 10 < (convolved_relu(adj, x, W).array > 0).sum() < 42  # both sides of 0
    check_gradients(lambda *a: (convolved_relu(adj, *a) + 1) ** 2, x, W)


@pytest.mark.parametrize('activation', [functions.identity, functions.tanh])
def test_dropout_after_other_activations(xp, activation):
    adj, x, W, *_ = given(xp)
    y, plain = (graph_linear(adj, x, W, None, None, None, activation, r).array for r in (0.5, 0.0))
    is_kept = y != 0
    assert 10 < is_kept.sum() < 42
    assert relative_error(y, 2 * plain * is_kept) < 1e-12


def test_gradients_of_a_linear_layer_without_outputs(xp):
    inputs = [xp.ones(shape, 'f') for shape in ((4, 3), (0, 3), (0,))]
    y, *gradients = outcome(lambda x, W, b: graph_linear(None, x, W_self=W, b_self=b), inputs)
    assert y.shape == (4, 0) and not gradients[0].any()
    assert [array.shape for array in gradients] == [array.shape for array in inputs]


def test_a_loop_is_of_one_relation():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])
    x, W = numpy.ones((3, 2), 'f'), numpy.ones((8, 2), 'f')
    with pytest.raises(
        ValueError, match='adj: expected one relation to go with loop=True, got <BatchedCSR.*>'
    ):
        graph_linear(adj, x, W, loop=True)


def test_a_linear_layer_takes_rows():
    x = numpy.ones((2, 3, 4), 'f')
    W = numpy.ones((5, 4), 'f')
    message = r'^x: expected shape \(n_rows, in_channels\), got \(2, 3, 4\)$'
    with pytest.raises(ValueError, match=message):
        graph_linear(None, x, W_self=W)


def test_zeros_that_dropout_keeps():
    """A dropped element is -0, so an element of 0 was kept."""
    layer = node.GraphLinear(None, ('x', 'W_self'), functions.identity, 0.5, False)
    layer._y = numpy.array([0.0, -0.0, 3.0], 'f')
    numpy.testing.assert_array_equal(layer._factors(), [2, 0, 2])


# --- on a host, compared with a dense matrix for each relation ---


def on_a_host(n_relations, loop, n_in, n_out, n_left_out):
    """Return a batch, its dense matrices including the loop, x and the parameters.

    A third relation has no entries, some nodes have none, and two entries are in the same place.
    Each bit of `n_left_out` leaves out a parameter.
    """
    rng = numpy.random.RandomState(0)
    n = 9
    A = rng.rand(n_relations, n, n) * (rng.rand(n_relations, n, n) < 0.3)
    A[2:3] = 0
    A[:, 4] = A[:, :, 5] = 0
    i, j, r = A.transpose(1, 2, 0).nonzero()
    order = numpy.lexsort((rng.rand(i.size), i))  # columns are not sorted
    i, j, r = (numpy.concatenate([part[order][:1], part[order]]) for part in (i, j, r))
    A[r[0], i[0], j[0]] *= 2
    values = A[r, i, j]
    values[:2] /= 2
    adj = BatchedCSR(
        indptr=numpy.searchsorted(i, numpy.arange(n + 1)),
        indices=j * n_relations + r,
        row_offsets=numpy.array([0, n]),
        data=values,
        n_relations=n_relations,
    )
    parameters = {
        'W': rng.rand(n_out * n_relations, n_in),
        'b': rng.rand(n_out * n_relations),
        'W_self': rng.rand(n_out, n_in),
        'b_self': rng.rand(n_out),
    }
    for bit, name in enumerate(('b', 'W_self', 'b_self')):
        if n_left_out >> bit & 1:
            del parameters[name]
    return adj, A + loop * numpy.eye(n), rng.rand(n, n_in), parameters


every_host_layer = pytest.mark.parametrize(
    'n_relations, loop, n_in, n_out',
    [(1, False, 5, 3), (1, True, 3, 5), (4, False, 3, 5), (4, False, 5, 3)],
)


@pytest.mark.parametrize('n_left_out', range(8))
@every_host_layer
def test_host(n_relations, loop, n_in, n_out, n_left_out):
    adj, A, x, parameters = on_a_host(n_relations, loop, n_in, n_out, n_left_out)
    y = graph_linear_on_host(adj, x, **parameters, loop=loop)
    numpy.testing.assert_allclose(y, reference.graph_linear(A, x, **parameters), rtol=1e-13)


@pytest.mark.parametrize('n_left_out', range(8))
@every_host_layer
def test_gradients_on_a_host(n_relations, loop, n_in, n_out, n_left_out):
    adj, A, x, parameters = on_a_host(n_relations, loop, n_in, n_out, n_left_out)
    rng = numpy.random.RandomState(1)
    gy = rng.rand(len(x), n_out)
    arrays = {'x': x, **parameters}
    gradients = graph_linear_grad_on_host(
        adj, x, gy, parameters['W'], parameters.get('W_self'), set(arrays), loop
    )
    y = reference.graph_linear(A, **arrays)
    for name, array in arrays.items():
        # The layer is linear in each argument, so differences are exact up to rounding.
        change = rng.rand(*array.shape)
        changed = reference.graph_linear(A, **{**arrays, name: array + change})
        rise = (gy * (changed - y)).sum()
        assert (gradients[name] * change).sum() == pytest.approx(rise, rel=1e-11), name


def test_an_activation_without_formulas():
    y = numpy.ones((2, 2))
    with pytest.raises(NotImplementedError):
        elementwise.activate('elu', y)
    with pytest.raises(NotImplementedError):
        elementwise.activation_gradient('elu', y, y, 0.0)


@pytest.mark.parametrize('shape', [(6, 2), (6,), (0, 5)], ids=str)
def test_rows_by_relation(shape):
    W = numpy.arange(numpy.prod(shape)).reshape(shape)
    order = [c * 3 + r for r in range(3) for c in range(len(W) // 3)]
    numpy.testing.assert_array_equal(elementwise.by_relation(W, 3), W[order])


@pytest.mark.parametrize('shape', [(6, 2), (6,), (0, 5)], ids=str)
def test_rows_by_channel_again(shape):
    W = numpy.arange(numpy.prod(shape)).reshape(shape)
    numpy.testing.assert_array_equal(elementwise.by_channel(elementwise.by_relation(W, 3), 3), W)
