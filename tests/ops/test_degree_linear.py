"""Degree-dependent linear layers: values by a loop, both ways to compute them, gradients."""

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda import launch
from chainer_bspmm.ops import degree_linear
from chainer_bspmm.ops.degree_linear import degree_linear_sigmoid, degrees_of
from tests.support import assert_close, DTYPES, features
from tests.support.gradients import check_gradients


# Types of nodes: with and without, an unused one, one with several nodes, one past the last (4).
TYPES = numpy.array([1, 0, 4, 2, 2, 9, 1, 2, 4, 0, 2])
N_TYPES = 4


@pytest.fixture(autouse=True)
def expand_anywhere(monkeypatch):
    """The kernel by NumPy, for a host that computes as a GPU does."""
    launched = degree_linear._expand

    def expand(x, is_type):
        if launch.on_gpu(x):
            return launched(x, is_type)
        return numpy.where(is_type[:, :, None], x[:, None, :], x.dtype.type(0)).reshape(
            len(x), is_type.shape[1] * x.shape[1]
        )

    monkeypatch.setattr(degree_linear, '_expand', expand)


def adjacency(xp, dtype, types=TYPES, way='relations'):
    """Return a batch whose nodes have these degrees, with neighbours of all kinds.

    Args:
        way (str): ``'relations'``: symmetric, which is one launch on a GPU; ``'expanded'``: not
            symmetric, and the host, too, computes as a GPU does without that; ``'grouped'``: not
            symmetric.
    """
    n = len(types)
    if way == 'relations':
        # Between neighbours in the list as much as leaves the diagonals what is missing.
        matrix = numpy.zeros((n, n))
        for i in range(0, n - 1, 2):
            matrix[i, i + 1] = matrix[i + 1, i] = min(types[i], types[i + 1]) / 2
        matrix[range(n), range(n)] = types - matrix.sum(axis=0)
    else:
        matrix = numpy.zeros((n, n))
        for column, degree in enumerate(types):
            matrix[column, column] = degree / 4
            matrix[(column + 3) % n, column] += degree * 3 / 4
    adj = BatchedCSR.from_matrices([matrix]).astype(dtype)
    if way == 'expanded':
        adj.is_symmetric = False
    adj = adj if xp is numpy else adj.to_device('@cupy:0')
    if way == 'expanded':
        adj._cache['degrees', N_TYPES] = degrees_of(adj, N_TYPES)._replace(rows=None)
    return adj


WAYS = 'relations', 'expanded', 'grouped'


def parameters(rng, xp, n_in, n_out, dtype):
    return (
        [features(rng, xp, n_out, n_in, dtype) for _ in range(N_TYPES)],
        [features(rng, xp, 1, n_out, dtype)[0] for _ in range(N_TYPES)],
    )


def operands(xp, dtype):
    """Return x, weights and biases for the nodes of `TYPES`."""
    rng = numpy.random.RandomState(0)
    x = features(rng, xp, len(TYPES), 3, dtype)
    return x, *parameters(rng, xp, 3, 2, dtype)


def loop(adj, types, x, weights, biases):
    """Return the float64 truth, a node at a time."""
    x, *parameters = (cuda.to_cpu(a).astype('d') for a in (x, *weights, *biases))
    weights, biases = parameters[:N_TYPES], parameters[N_TYPES:]
    rows, matrix = [], cuda.to_cpu(adj.to_dense())[0]
    numpy.testing.assert_array_equal(matrix.sum(axis=0), types)
    for kind, row in zip(types, matrix @ x):
        message = weights[kind - 1] @ row if 1 <= kind <= N_TYPES else 0
        rows.append(1 / (1 + numpy.exp(-(message + sum(biases)))))
    return numpy.array(rows).reshape(len(x), len(biases[0]))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('types', [TYPES, TYPES[:0], TYPES * 0, TYPES[:1]], ids=str)
@pytest.mark.parametrize('way', WAYS)
def test_values(xp, types, dtype, way):
    adj = adjacency(xp, dtype, types, way)
    rng = numpy.random.RandomState(0)
    for n_in, n_out in ((5, 3), (1, 1), (2, 33)):
        x = features(rng, xp, len(types), n_in, dtype)
        weights, biases = parameters(rng, xp, n_in, n_out, dtype)
        y = degree_linear_sigmoid(adj, x, weights, biases).array
        # float16: sums of a few terms are themselves rounded, which the sigmoid shrinks again.
        assert_close(y, loop(adj, types, x, weights, biases), dtype)


@pytest.mark.parametrize('way', WAYS)
def test_gradients(xp, way):
    x, weights, biases = operands(xp, 'float64')
    given = adjacency(xp, 'float64', way=way)
    layer = lambda x, *a: degree_linear_sigmoid(given, x, a[:N_TYPES], a[N_TYPES:])  # NOQA: E731
    check_gradients(lambda *inputs: layer(*inputs) ** 2, x, *weights, *biases)


@pytest.mark.parametrize('way', WAYS)
def test_features_with_another_use(xp, way):
    """Whose gradient is there first: this node's, of the lower rank, is added to it."""
    x, weights, biases = operands(xp, 'float64')
    adj = adjacency(xp, 'float64', way=way)
    found, zero = [], chainer.Variable(xp.zeros(()))
    for uses in ((True, False), (False, True), (True, True)):
        h = chainer.Variable(x.copy())
        y = functions.sum(functions.exp(functions.tanh(h))) if uses[0] else zero
        if uses[1]:
            y += functions.sum(degree_linear_sigmoid(adj, h, weights, biases) ** 2)
        y.backward()
        found.append(h.grad)
    assert_close(found[2], cuda.to_cpu(found[0] + found[1]), 'float64')


@pytest.mark.parametrize('way', WAYS)
def test_gradients_of_some_inputs_only(xp, way):
    """As with a layer that is not trained, or with features instead of an embedding."""
    x, weights, biases = operands(xp, 'float64')
    adj = adjacency(xp, 'float64', way=way)

    def gradients(wanted):
        every = [
            chainer.Variable(a, requires_grad=i in wanted)
            for i, a in enumerate((x, *weights, *biases))
        ]
        y = degree_linear_sigmoid(adj, every[0], every[1 : N_TYPES + 1], every[N_TYPES + 1 :])
        chainer.functions.sum(y * y).backward()
        return [variable.grad for variable in every]

    full = gradients(range(2 * N_TYPES + 1))
    for wanted in ([0], [2], [0, 4], [3, 5], [1, 2, 8], [6]):
        for i, gradient in enumerate(gradients(wanted)):
            if i in wanted:
                numpy.testing.assert_allclose(
                    cuda.to_cpu(gradient), cuda.to_cpu(full[i]), rtol=1e-12
                )
            else:
                assert gradient is None


def test_infinite_feature_stays_with_its_neighbours(xp):
    """The weight of another degree must not turn an infinity into NaN."""
    for way in WAYS:
        x = xp.asarray(features(numpy.random.RandomState(0), numpy, 4, 2, 'float32'))
        x[0] = numpy.inf
        weights, biases = parameters(numpy.random.RandomState(1), xp, 2, 2, 'float32')
        weights = [abs(W) for W in weights]
        adj = adjacency(xp, 'float32', numpy.array([2, 2, 1, 1]), way)
        with numpy.errstate(invalid='ignore'):  # of lanes past the end of NumPy's arrays
            y = degree_linear_sigmoid(adj, x, weights, biases)
        assert numpy.isfinite(cuda.to_cpu(y.array)).all()


MATRICES = [
    numpy.array([[1, 1, 0], [2, 1, 0], [1, 0, 0]]),
    numpy.ones((1, 1)),
    numpy.eye(2),
    numpy.zeros((2, 2)),
    numpy.array([[0.5, 0.0], [1.0, 1.0]]),
]
COLUMN_SUMS = [4, 2, 0, 1, 1, 1, 0, 0, 1.5, 1]


@pytest.mark.parametrize('dtype', DTYPES)
def test_degrees_are_sums_of_columns(xp, dtype):
    adj = BatchedCSR.from_matrices(MATRICES).astype(dtype)
    adj = adj if xp is numpy else adj.to_device('@cupy:0')
    found = degrees_of(adj, 4)
    expected = numpy.array(COLUMN_SUMS)[:, None] == numpy.arange(1, 5)
    numpy.testing.assert_array_equal(cuda.to_cpu(found.is_type), expected)
    if xp is numpy:
        assert [rows.tolist() for rows in found.rows] == [[3, 4, 5, 9], [1], [], [0]]
    else:
        assert found.rows is None


def test_degrees_of_implicit_ones_and_in_padded_layout(xp):
    adj = BatchedCSR.from_matrices([numpy.ones((3, 3)), numpy.eye(1)], 'padded')
    assert adj.data is None
    adj = adj if xp is numpy else adj.to_device('@cupy:0')
    kinds = cuda.to_cpu(degrees_of(adj, 4).is_type)
    assert kinds.argmax(axis=1).tolist() == [2, 2, 2, 0, 0, 0] and not kinds[4:].any()


def test_degrees_are_found_once(monkeypatch):
    adj = BatchedCSR.from_matrices(MATRICES)
    first = degrees_of(adj, 4)
    monkeypatch.setattr('chainer_bspmm.ops.degree_linear.bspmm_forward', None)
    assert degrees_of(adj, 4) is first
    monkeypatch.undo()
    assert degrees_of(adj, 2).is_type.shape == (10, 2)


@pytest.mark.parametrize('shape', [(5, 3, 7), (1, 6, 1), (0, 2, 3), (9, 1, 4)], ids=str)
@pytest.mark.parametrize('dtype', 'fd')
def test_expand(gpu, dtype, shape):
    rng = numpy.random.RandomState(0)
    n_nodes, n_types, n_in = shape
    is_type = numpy.arange(n_types) == rng.randint(0, n_types + 1, (n_nodes, 1))
    x = rng.uniform(1, 2, (n_nodes, n_in)).astype(dtype)
    blocks = degree_linear._expand(gpu.put(x), gpu.put(is_type))
    numpy.testing.assert_array_equal(
        cuda.to_cpu(blocks), (is_type[:, :, None] * x[:, None, :]).reshape(n_nodes, n_types * n_in)
    )


def test_weights_of_different_shapes_and_several_relations():
    with pytest.raises(ValueError, match='adj: expected a column for each node .* 2 relations'):
        adj = BatchedCSR.from_matrices([numpy.ones((2, 3, 3))])
        degree_linear_sigmoid(adj, numpy.ones((3, 2)), [], [])
    weights, biases = [numpy.ones((3, 2), 'f')] * 4, [numpy.ones(3, 'f')] * 4
    adj, x = adjacency(numpy, 'float32'), numpy.ones((11, 2), 'f')
    with pytest.raises(ValueError, match=r'weights\[3\]: expected shape \(3, 2\) .* \(2, 2\)'):
        degree_linear_sigmoid(adj, x, weights[:3] + [numpy.ones((2, 2), 'f')], biases)
    with pytest.raises(ValueError, match=r'biases\[1\]: expected shape \(3,\) .* got \(2,\)'):
        degree_linear_sigmoid(adj, x, weights, [biases[0], biases[1][:2], *biases[2:]])


@pytest.mark.parametrize(
    'x, n_weights, n_biases, message',
    [
        (numpy.ones((3, 2), 'f'), 4, 4, r'x: expected shape \(11, n_in\), .* got \(3, 2\)'),
        (numpy.ones((1, 11, 2), 'f'), 4, 4, r'x: expected shape \(11, n_in\)'),
        (numpy.ones((11, 2), 'f'), 4, 5, 'biases: expected one for each of 4 weights, got 5'),
        (numpy.ones((11, 2), 'f'), 0, 0, 'weights: expected at least one, got none'),
        (numpy.ones((11, 3), 'f'), 4, 4, r'weights\[0\]: expected shape \(n_out, 3\), got'),
    ],
)
def test_bad_input(x, n_weights, n_biases, message):
    with pytest.raises(ValueError, match=message):
        weights, biases = [numpy.ones((3, 2), 'f')] * n_weights, [numpy.ones(3, 'f')] * n_biases
        degree_linear_sigmoid(adjacency(numpy, 'float32'), x, weights, biases)
