"""Degree-dependent linear layers: values by a loop, every way to compute them, gradients."""

import itertools

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops import degree_linear
from chainer_bspmm.ops.degree_linear import degree_linear_sigmoid, degrees_of
from chainer_bspmm.ops.elementwise import sigmoid
from tests.support import assert_close, device_of, DTYPES, features
from tests.support.gradients import assert_same_gradients_alone, check_gradients


# Types of nodes: 0 has no weights, 3 has no nodes, 2 has several, and 9 is beyond the last type, 4.
TYPES = numpy.array([1, 0, 4, 2, 2, 9, 1, 2, 4, 0, 2])
N_TYPES = 4


class TilesOnHost(degree_linear.Tiles):
    """Tiles whose rows are joined and ended by NumPy. On a GPU a kernel does both."""

    def ended(self, y, bias):
        return sigmoid(self.joined(y, bias.dtype), bias)


def adjacency(xp, dtype, types=TYPES, way='relations'):
    """Return a batch whose nodes have these degrees, and neighbours of other degrees.

    Args:
        way (str): ``'relations'``: symmetric, computed by one launch on a GPU; ``'grouped'``: not
        symmetric; ``'tiled'``: not symmetric, and computed on a host as on a GPU, in small tiles.
    """
    n = len(types)
    matrix = numpy.zeros((n, n))
    if way == 'relations':
        # Each node has an edge to its partner in the list, and the diagonal completes its degree.
        for i in range(0, n - 1, 2):
            matrix[i, i + 1] = matrix[i + 1, i] = min(types[i], types[i + 1]) / 2
        matrix[range(n), range(n)] = types - matrix.sum(axis=0)
    else:
        for column, degree in enumerate(types):
            matrix[column, column] = degree / 4
            matrix[(column + 3) % n, column] += degree * 3 / 4
    adj = BatchedCSR.from_matrices([matrix]).astype(dtype)
    if way == 'tiled':
        adj.is_symmetric = False
    adj = adj.to_device(device_of(xp))
    if way == 'tiled':
        degrees = degrees_of(adj, N_TYPES)
        tiles = degree_linear.tiles_of(adj, degrees.is_type, 2)
        if xp is numpy:
            tiles = TilesOnHost(*tiles)
        adj._cache['degrees', N_TYPES] = degrees._replace(groups=tiles)
    return adj


WAYS = 'relations', 'tiled', 'grouped'


def parameters(rng, xp, n_in, n_out, dtype):
    weights = [features(rng, xp, n_out, n_in, dtype) for _ in range(N_TYPES)]
    return weights, list(features(rng, xp, N_TYPES, n_out, dtype))


def layer_of(xp, way):
    """Return a layer for nodes of `TYPES` as a function of arrays, and a list of the arrays."""
    adj = adjacency(xp, 'float64', way=way)
    rng = numpy.random.RandomState(0)
    x = features(rng, xp, len(TYPES), 3, 'float64')
    weights, biases = parameters(rng, xp, 3, 2, 'float64')

    def layer(x, *parameters):
        return degree_linear_sigmoid(adj, x, parameters[:N_TYPES], parameters[N_TYPES:])

    return layer, [x, *weights, *biases]


def loop(adj, types, x, weights, biases):
    """Compute the result node by node in float64."""
    x, *parameters = (cuda.to_cpu(a).astype('d') for a in (x, *weights, *biases))
    weights = parameters[:N_TYPES]
    biases = parameters[N_TYPES:]
    rows = []
    matrix = cuda.to_cpu(adj.to_dense())[0]
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
        # In float16 sums of a few terms are rounded as well, but the sigmoid shrinks these errors.
        assert_close(y, loop(adj, types, x, weights, biases), dtype)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('n_in, n_out', [(0, 3), (3, 0)])
def test_features_without_channels(xp, way, n_in, n_out):
    adj = adjacency(xp, 'float32', way=way)
    rng = numpy.random.RandomState(0)
    x = chainer.Variable(features(rng, xp, len(TYPES), n_in, 'float32'))
    weights, biases = parameters(rng, xp, n_in, n_out, 'float32')
    weights = list(map(chainer.Variable, weights))
    y = degree_linear_sigmoid(adj, x, weights, biases)
    assert_close(y.array, loop(adj, TYPES, x.array, [W.array for W in weights], biases), 'float32')
    functions.sum(y).backward()
    assert x.grad.shape == (len(TYPES), n_in) and not cuda.to_cpu(x.grad).any()
    assert all(W.grad.shape == (n_out, n_in) for W in weights)


@pytest.mark.parametrize('way', WAYS)
def test_gradients(xp, way):
    layer, arrays = layer_of(xp, way)
    check_gradients(lambda *inputs: layer(*inputs) ** 2, *arrays)


@pytest.mark.parametrize('way', WAYS)
def test_features_with_another_use(xp, way):
    """The other use has its gradient first, and the node of the layer adds its own to it."""
    layer, (x, *parameters) = layer_of(xp, way)
    found = []
    zero = chainer.Variable(xp.zeros(()))
    for uses in ((True, False), (False, True), (True, True)):
        h = chainer.Variable(x.copy())
        y = functions.sum(functions.exp(functions.tanh(h))) if uses[0] else zero
        if uses[1]:
            y += functions.sum(layer(h, *parameters) ** 2)
        y.backward()
        found.append(h.grad)
    assert_close(found[2], cuda.to_cpu(found[0] + found[1]), 'float64')


@pytest.mark.parametrize('way', WAYS)
def test_gradients_of_some_inputs_only(xp, way):
    """A layer that is not trained, or features without an embedding, need only some gradients."""
    layer, arrays = layer_of(xp, way)
    assert_same_gradients_alone(layer, arrays, ([0], [2], [0, 4], [3, 5], [1, 2, 8], [6]))


@pytest.mark.parametrize('n_types', [3, 4])
def test_the_last_weight_may_be_the_only_one_that_is_trained(xp, n_types):
    adj = adjacency(xp, 'float64', way='grouped')
    rng = numpy.random.RandomState(0)
    shapes = [(len(TYPES), 3), *n_types * [(2, 3)], *n_types * [(2,)]]
    arrays = [xp.asarray(rng.uniform(-1, 1, shape)) for shape in shapes]

    def layer(x, *parameters):
        return degree_linear_sigmoid(adj, x, parameters[:n_types], parameters[n_types:])

    assert_same_gradients_alone(layer, arrays, ([n_types],))


def test_infinite_feature_stays_with_its_neighbours(xp):
    """The weight of another degree must not turn an infinity into NaN."""
    for way in WAYS:
        x = xp.asarray(features(numpy.random.RandomState(0), numpy, 4, 2, 'float32'))
        x[0] = numpy.inf
        weights, biases = parameters(numpy.random.RandomState(1), xp, 2, 2, 'float32')
        weights = [abs(W) for W in weights]
        adj = adjacency(xp, 'float32', numpy.array([2, 2, 1, 1]), way)
        with numpy.errstate(invalid='ignore'):  # NumPy reads past the end of arrays
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
    found = degrees_of(adj.to_device(device_of(xp)), 4)
    expected = numpy.array(COLUMN_SUMS)[:, None] == numpy.arange(1, 5)
    numpy.testing.assert_array_equal(cuda.to_cpu(found.is_type), expected)
    if xp is numpy:
        assert [rows.tolist() for rows in found.groups.of_types] == [[3, 4, 5, 9], [1], [], [0]]
    else:
        assert isinstance(found.groups, degree_linear.Tiles)


def test_degrees_of_implicit_ones(xp):
    adj = BatchedCSR.from_matrices([numpy.ones((3, 3)), numpy.eye(1)])
    assert adj.data is None
    kinds = cuda.to_cpu(degrees_of(adj.to_device(device_of(xp)), 4).is_type)

    assert kinds.argmax(axis=1).tolist() == [2, 2, 2, 0] and kinds.any(axis=1).all()


def test_phantom_nodes_have_no_degree(xp):
    adj = BatchedCSR.from_matrices([numpy.ones((3, 3)), numpy.eye(1)], 'padded')
    kinds = cuda.to_cpu(degrees_of(adj.to_device(device_of(xp)), 4).is_type)
    assert kinds.any(axis=1).tolist() == [True, True, True, True, False, False]
    assert kinds[:4].argmax(axis=1).tolist() == [2, 2, 2, 0]


def test_degrees_are_found_once(monkeypatch):
    adj = BatchedCSR.from_matrices(MATRICES)
    first = degrees_of(adj, 4)
    monkeypatch.setattr('chainer_bspmm.ops.degree_linear.bspmm_forward', None)
    assert degrees_of(adj, 4) is first
    monkeypatch.undo()
    assert degrees_of(adj, 2).is_type.shape == (10, 2)


def tiles_of_kinds(xp, kinds, n_types, n_rows):
    """Return the tiles of nodes of these kinds, where -1 is no degree that counts."""
    adj = BatchedCSR.from_matrices([numpy.eye(len(kinds))]).to_device(device_of(xp))
    is_type = kinds[:, None] == numpy.arange(n_types)
    return degree_linear.tiles_of(adj, xp.asarray(is_type), n_rows)


def rows_of(matrix):
    """Return the columns of a matrix's entries, row by row."""
    indptr, indices = map(cuda.to_cpu, (matrix.indptr, matrix.indices))
    return [indices[first:end].tolist() for first, end in zip(indptr, indptr[1:])]


@pytest.mark.parametrize(
    'n_nodes, n_types, n_rows', [(37, 5, 4), (64, 3, 64), (0, 2, 8), (5, 1, 2)]
)
def test_tiles_have_nodes_of_one_degree_each(xp, n_nodes, n_types, n_rows):
    kinds = numpy.random.RandomState(0).randint(-1, n_types, n_nodes)
    tiles = tiles_of_kinds(xp, kinds, n_types, n_rows)
    types, offsets, all_tiles = map(cuda.to_cpu, (tiles.types, tiles.offsets, tiles.all))
    assert len(types) == n_nodes // n_rows + n_types
    assert all_tiles.tolist() == list(range(len(types)))
    selected = rows_of(tiles.selection)
    assert len(selected) == len(types) * n_rows and max(map(len, selected)) <= 1
    for kind in range(n_types):
        places = range(offsets[kind] * n_rows, offsets[kind + 1] * n_rows)
        assert (types[offsets[kind] : offsets[kind + 1]] == kind).all()
        nodes = [node for place in places for node in selected[place]]
        assert nodes == numpy.flatnonzero(kinds == kind).tolist()
    assert not any(selected[offsets[-1] * n_rows :])


@pytest.mark.parametrize('n_nodes, n_types, n_rows', [(37, 5, 4), (0, 2, 8), (5, 1, 2)])
def test_nodes_are_selected_from_their_places(xp, n_nodes, n_types, n_rows):
    kinds = numpy.random.RandomState(0).randint(-1, n_types, n_nodes)
    selection = tiles_of_kinds(xp, kinds, n_types, n_rows).selection
    selected = rows_of(selection)
    expected = [
        [place for place, of in enumerate(selected) if node in of] for node in range(n_nodes)
    ]
    assert rows_of(selection.T) == expected
    assert [len(places) for places in expected] == (kinds >= 0).tolist()
    assert selection.shape == selection.T.shape[::-1]


def test_there_are_tiles_enough_for_any_degrees(xp):
    for counts in itertools.product(range(5), repeat=3):
        kinds = numpy.repeat(range(3), counts)
        selected = rows_of(tiles_of_kinds(xp, kinds, 3, 3).selection)
        assert sorted(node for of in selected for node in of) == list(range(len(kinds)))


def placed(gpu, tiles):
    """Return tiles with all arrays on a GPU."""
    selection, transpose = (
        matrix.replace(
            indptr=gpu.put(matrix.indptr),
            indices=gpu.put(matrix.indices),
            row_offsets=gpu.put(matrix.row_offsets),
        )
        for matrix in (tiles.selection, tiles.selection.T)
    )
    selection.cached('transpose', lambda: (transpose, None))
    return degree_linear.Tiles(selection, *map(gpu.put, tiles[1:]))


@pytest.mark.parametrize('dtype', 'efd')
def test_tiles_on_a_gpu(gpu, dtype):
    """Rows are moved, added and ended by kernels; only cuBLAS multiplies by the weights."""
    tiles = tiles_of_kinds(numpy, TYPES - 1, N_TYPES, 2)
    rng = numpy.random.RandomState(0)
    x = features(rng, numpy, len(TYPES), 5, dtype)
    weights, biases = parameters(rng, numpy, 5, 3, dtype)
    on_gpu = placed(gpu, tiles)
    stacked = on_gpu.stacked([gpu.put(W) for W in weights], numpy.dtype(dtype))
    numpy.testing.assert_array_equal(cuda.to_cpu(stacked), numpy.stack(weights))
    assert stacked.dtype == ('f' if dtype == 'e' else dtype)
    split = on_gpu.split(gpu.put(x))
    numpy.testing.assert_array_equal(cuda.to_cpu(split), tiles.split(x))
    assert split.dtype == ('f' if dtype == 'e' else dtype)

    rows = features(rng, numpy, tiles.selection.n_rows, 3, 'f' if dtype == 'e' else dtype)
    joined = on_gpu.joined(gpu.put(rows), numpy.dtype(dtype))
    numpy.testing.assert_array_equal(cuda.to_cpu(joined), tiles.joined(rows, numpy.dtype(dtype)))
    ended = on_gpu.ended(gpu.put(rows), gpu.put(biases[0]))
    assert_close(ended, TilesOnHost(*tiles).ended(rows, biases[0]), dtype)

    found = on_gpu.gradients(gpu.put(rows.reshape(-1, 2, 3)), split, [gpu.put(W) for W in weights])
    expected = tiles.gradients(rows.reshape(-1, 2, 3), tiles.split(x), weights)
    assert_close(found, expected, dtype)
    assert found.shape == (N_TYPES, 3, 5) and found.dtype == dtype


@pytest.mark.parametrize(
    'x, weights, biases, message',
    [
        ((3, 2), [(3, 2)] * 4, [(3,)] * 4, r'x: expected shape \(11, n_in\), .* got \(3, 2\)'),
        (
            (1, 11, 2),
            [(3, 2)] * 4,
            [(3,)] * 4,
            r'x: expected shape \(11, n_in\), .* got \(1, 11, 2\)',
        ),
        ((11, 2), [(3, 2)] * 4, [(3,)] * 5, 'biases: expected one for each of 4 weights, got 5'),
        ((11, 2), [(3, 2)] * 4, [(3,)] * 3, 'biases: expected one for each of 4 weights, got 3'),
        ((11, 2), [], [], 'weights: expected at least one, got none'),
        (
            (11, 3),
            [(3, 2)] * 4,
            [(3,)] * 4,
            r'weights\[0\]: expected shape \(n_out, 3\), got \(3, 2\)',
        ),
        (
            (11, 2),
            [(3, 2), (2, 2)],
            [(3,)] * 2,
            r'weights\[1\]: expected shape \(3, 2\) .* got \(2, 2\)',
        ),
        ((11, 2), [(3, 2)] * 2, [(3,), (2,)], r'biases\[1\]: expected shape \(3,\) .* got \(2,\)'),
    ],
)
def test_bad_input(x, weights, biases, message):
    weights = [numpy.ones(shape, 'f') for shape in weights]
    biases = [numpy.ones(shape, 'f') for shape in biases]
    with pytest.raises(ValueError, match=message):
        degree_linear_sigmoid(adjacency(numpy, 'f'), numpy.ones(x, 'f'), weights, biases)


def test_several_relations_are_refused():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 3, 3))])
    with pytest.raises(
        ValueError,
        match='adj: expected a column for each node .* 2 relations, 18 entries, symmetric, '
        'ones on @numpy>',
    ):
        degree_linear_sigmoid(adj, numpy.ones((3, 2)), [], [])
