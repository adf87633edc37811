"""`relation_attention`, compared with plain loops: values, gradients, dropout, refusals."""

import functools

import numpy
import pytest
import scipy.sparse

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR
from chainer_bspmm.ops import attention_pattern
from chainer_bspmm.ops import relation_attention as module
from chainer_bspmm.ops.attention_pattern import attention_pattern as pattern_of
from chainer_bspmm.ops.relation_attention import relation_attention
from tests.support import device_of, ones_for, random_matrix, reference, relative_error
from tests.support.cases import pairs
from tests.support.gradients import assert_same_outcome, check_gradients, outcome
from tests.support.relations import (
    NAMES,
    relation_batch_on,
    small_relation_batch_on,
    TOO_WIDE,
    UNSORTED,
)
from tests.support.spare import with_spare

OPTIONS = {
    'mean': {},
    'side by side': {'concat_heads': True},
    'within': {'within': True},
    'within, side by side': {'within': True, 'concat_heads': True},
    'other slope': {'negative_slope': 0.7},
}


def arguments(adj, xp, dtype, n_heads, n_channels=3):
    rng = numpy.random.RandomState(0)
    shapes = (adj.n_rows, adj.n_relations * n_heads * n_channels), (1, 2 * n_channels), (1,)
    return [xp.asarray(rng.uniform(-2, 2, shape).astype(dtype)) for shape in shapes]


def truth(adj, m, W, b, n_heads, within=False, concat_heads=False, negative_slope=0.2):
    """Compute the formula of relation_attention's docstring row by row, in float64."""
    m, W, b = (cuda.to_cpu(array).astype('d') for array in (m, W, b))
    n_relations = adj.n_relations
    n_channels = W.shape[1] // 2
    m = m.reshape(adj.n_rows, n_relations, n_heads, n_channels)
    edges = [[] for _ in range(adj.n_rows)]
    for _, row, column in reference.entries(adj):
        edges[row].append(divmod(column, n_relations))
    offsets = cuda.to_cpu(adj.row_offsets)
    weights = numpy.ones(adj.n_rows) if adj.row_weights is None else cuda.to_cpu(adj.row_weights)
    y = numpy.zeros((adj.n_rows, n_heads, n_channels))
    for i in range(adj.n_rows):
        graph = numpy.searchsorted(offsets, i, side='right') - 1
        slots = [
            (j, r) for j in range(offsets[graph], offsets[graph + 1]) for r in range(n_relations)
        ]
        for group in [[r] for r in range(n_relations)] if within else [range(n_relations)]:
            chosen = [(j, r) for j, r in edges[i] if r in group]
            everything = [(j, r) for j, r in slots if r in group]
            for k in range(n_heads):
                if not chosen:
                    total = sum(weights[j] * m[j, r, k] for j, r in everything)
                    y[i, k] += total / sum(weights[j] for j, _ in everything)
                    continue
                pairs = numpy.array([[*m[j, r, k], *m[i, r, k]] for j, r in chosen])
                z = pairs @ W[0] + b[0]
                z = numpy.where(z > 0, z, negative_slope * z)
                alpha = numpy.exp(z - z.max())
                for weight, (j, r) in zip(alpha / alpha.sum(), chosen):
                    y[i, k] += weight * m[j, r, k]
    return y.reshape(adj.n_rows, n_heads * n_channels) if concat_heads else y.mean(axis=1)


BOUNDS = {'float16': 4e-3, 'float32': 1e-6, 'float64': 1e-13}


@pytest.mark.parametrize(
    'name, options',
    [
        *((name, options) for name in NAMES for options in ('mean', 'within, side by side')),
        *(('unsorted values', options) for options in ('side by side', 'within', 'other slope')),
        *(('isolated nodes', options) for options in ('side by side', 'within')),
    ],
)
def test_values(xp, name, options):
    check(relation_batch_on(name, xp, 'float64'), 'float64', 3, options)


@pytest.mark.parametrize('n_heads', [1, 3])
@pytest.mark.parametrize('dtype', ['float16', 'float32'])
@pytest.mark.parametrize('name', ['four relations', 'unsorted values', 'isolated nodes'])
def test_values_of_other_dtypes(xp, name, dtype, n_heads):
    for options in ('mean', 'within, side by side'):
        check(relation_batch_on(name, xp, dtype), dtype, n_heads, options)


def check(adj, dtype, n_heads=2, options='mean'):
    given = arguments(adj, adj.xp, dtype, n_heads)
    y = relation_attention(adj, *given, n_heads=n_heads, **OPTIONS[options]).array
    expected = truth(adj, *given, n_heads=n_heads, **OPTIONS[options])
    assert y.dtype == dtype and y.shape == expected.shape
    assert relative_error(y, expected) < BOUNDS[dtype]


def test_one_batch_for_several_dtypes(xp):
    adj = BatchedCSR.from_matrices([numpy.zeros((2, 3, 3))]).to_device(device_of(xp))
    for dtype in ('float32', 'float64'):  # rows without edges get means over six slots
        check(adj, dtype)


SMALL = ['four relations', 'unsorted relations', 'no entries', 'duplicates, unsorted']


@pytest.mark.parametrize('options', OPTIONS)
@pytest.mark.parametrize('name', SMALL)
def test_gradients(xp, name, options):
    adj = small_relation_batch_on(name, xp)
    layer = functools.partial(relation_attention, adj, n_heads=2, **OPTIONS[options])
    check_gradients(layer, *arguments(adj, xp, 'float64', 2))


def folded_batch(xp, padded_to):
    """Return a folded batch with sizes below, at and above N, and a graph of phantom atoms only."""
    rng = numpy.random.RandomState(0)
    matrices = [random_matrix(rng, n, 2, density=0.4) for n in (4, 0, 1, 3)]
    adj = BatchedCSR.from_matrices(matrices, 'folded', padded_to=padded_to)
    return adj.to_device(device_of(xp))


@pytest.mark.parametrize('padded_to', [None, 3, 9])
@pytest.mark.parametrize('options', OPTIONS)
def test_folded(xp, options, padded_to):
    adj = folded_batch(xp, padded_to)
    check(adj, 'float64', 2, options)
    layer = functools.partial(relation_attention, adj, n_heads=2, **OPTIONS[options])
    check_gradients(layer, *arguments(adj, xp, 'float64', 2))


def test_no_weight_at_all(xp):
    """The phantom rows of molecules without atoms have no slots, so results are 0."""
    adj = BatchedCSR.from_matrices([numpy.zeros((2, 0, 0))] * 2, 'folded')
    adj = adj.to_device(device_of(xp))
    y = relation_attention(adj, *arguments(adj, xp, 'float32', 2), n_heads=2).array
    assert y.shape == (2, 3) and not y.any()


@pytest.mark.parametrize('options', OPTIONS)
def test_gradients_under_dropout(xp, options):
    adj = folded_batch(xp, 5)

    def function(m, W, b):
        xp.random.seed(7)  # all calls have the same mask
        return relation_attention(adj, m, W, b, 2, dropout_ratio=0.4, **OPTIONS[options])

    check_gradients(function, *arguments(adj, xp, 'float64', 2))


def test_dropout(xp):
    """Dropout does nothing outside of training, and is right on average in training."""
    adj = relation_batch_on('four relations', xp, 'float64')
    given = adj, *arguments(adj, xp, 'float64', 2), 2
    expected = relation_attention(*given).array
    with chainer.using_config('train', False):
        assert (relation_attention(*given, dropout_ratio=0.5).array == expected).all()
    assert (relation_attention(*given, dropout_ratio=0.0).array == expected).all()
    xp.random.seed(0)
    draws = xp.stack([relation_attention(*given, dropout_ratio=0.5).array for _ in range(400)])
    deviation = draws.std(axis=0) / 20
    assert (abs(draws.mean(axis=0) - expected) <= 5 * deviation + 1e-12).all()
    assert (deviation > 0).all()


@pytest.mark.parametrize('ratio', [1, 1.5, float('nan')])
def test_dropout_of_everything_is_refused(ratio):
    adj = relation_batch_on('four relations', numpy, 'float64')
    m, W, b = arguments(adj, numpy, 'float64', 2)
    with pytest.raises(ValueError, match='^dropout_ratio: expected below 1, got %r$' % ratio):
        relation_attention(adj, m, W, b, 2, dropout_ratio=ratio)
    with chainer.using_config('train', False):
        relation_attention(adj, m, W, b, 2, dropout_ratio=ratio)


@pytest.mark.parametrize('options', OPTIONS)
@pytest.mark.parametrize('name', SMALL)
def test_dropout_that_drops_nothing(xp, name, options):
    """With dropout, slots of the mean become entries, which have the same weights."""
    adj = relation_batch_on(name, xp, 'float64')
    given = arguments(adj, xp, 'float64', 2)
    layer = functools.partial(relation_attention, adj, n_heads=2, **OPTIONS[options])
    with_dropout = outcome(functools.partial(layer, dropout_ratio=1e-12), given)
    for actual, expected in zip(with_dropout, outcome(layer, given), strict=True):
        numpy.testing.assert_allclose(cuda.to_cpu(actual), cuda.to_cpu(expected), 1e-9, 1e-9)


@pytest.mark.parametrize('layout', ['packed', 'folded'])
@pytest.mark.parametrize('within', [False, True])
def test_dropout_of_uniform_weights_one_by_one(xp, within, layout):
    """The features of nodes without neighbours are chosen so that results are the weights."""
    n, n_graphs, n_relations, ratio = 4, 400, 2, 0.25
    matrices = [numpy.zeros((n_relations, n, n))] * n_graphs
    padded_to = n + 6 if layout == 'folded' else None
    adj = BatchedCSR.from_matrices(matrices, layout, padded_to=padded_to).to_device(device_of(xp))
    n_rows = adj.max_rows  # rows of each graph
    slots = numpy.eye(n_rows * n_relations).reshape(n_rows, -1)
    xp.random.seed(0)
    y = relation_attention(
        adj,
        xp.asarray(numpy.tile(slots, (n_graphs, 1))),
        xp.zeros((1, 2 * n_rows * n_relations)),
        xp.zeros(1),
        n_heads=1,
        within=within,
        dropout_ratio=ratio,
    ).array
    weights = cuda.to_cpu(y).reshape(n_graphs, n_rows, n_rows, n_relations)
    kept = weights > 0
    counts = numpy.ones((n_rows, 1))
    if layout == 'folded':
        counts[-1] = 6  # six phantom atoms, which are dropped together
    uniform = counts / counts.sum() / (1 if within else n_relations)
    expected = numpy.broadcast_to(uniform / (1 - ratio), weights.shape)
    numpy.testing.assert_allclose(weights[kept], expected[kept], rtol=1e-12)
    assert abs(kept.mean() - (1 - ratio)) < 0.03
    assert (kept == kept[:, :1]).all()  # rows of a graph share them
    slots = kept[:, 0].reshape(n_graphs, -1)
    for one, other in ((slots[:-1], slots[1:]), (slots[:, :-1], slots[:, 1:])):  # others differ
        assert abs((one & other).mean() - (1 - ratio) ** 2) < 0.03


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_gradients_are_those_of_float64(xp, dtype):
    """All gradients of a large batch are computed by the node's own formula."""
    adj = relation_batch_on('four relations', xp, 'float64')
    given = arguments(adj, xp, dtype, 3, 8)
    layer = functools.partial(relation_attention, adj, n_heads=3)
    expected = outcome(layer, [array.astype('d') for array in given])
    bound = {'float16': 1e-2, 'float32': 1e-5}[dtype]
    assert_same_outcome(outcome(layer, given), expected, dtype, bound)


def test_no_search_for_the_pattern_the_second_time(xp):
    adj = relation_batch_on('four relations', xp, 'float32')
    y = relation_attention(adj, *arguments(adj, xp, 'float32', 2), n_heads=2)
    pattern = pattern_of(adj, 2, False, False, numpy.dtype('f'))
    assert pattern is y.creator_node._pattern
    assert pattern is not pattern_of(adj, 2, True, False, numpy.dtype('f'))


@pytest.mark.parametrize('side_by_side', [False, True])
def test_matrices_pass_the_checks_of_the_constructor(side_by_side):
    adj = relation_batch_on('four relations', numpy, 'float64')
    pattern = pattern_of(adj, 3, True, side_by_side, numpy.dtype('d'))
    for matrix in (pattern.product, pattern.isolated, pattern.gathers(adj, 3)):
        checked = BatchedCSR(
            matrix.indptr, matrix.indices, matrix.row_offsets, matrix.data, matrix.col_offsets
        )
        for name in ('n_graphs', 'n_rows', 'n_cols', 'nnz'):
            assert getattr(matrix, name) == getattr(checked, name), name
        for name in ('max_rows', 'max_cols', 'max_nnz'):
            assert getattr(matrix, name) >= getattr(checked, name), name
        assert all(getattr(matrix, name).dtype == numpy.int32 for name in matrix._integers)


def test_no_mean_where_every_node_has_neighbours():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 3, 3))])
    assert pattern_of(adj, 2, True, False, numpy.dtype('f')).isolated is None
    adj = BatchedCSR.from_matrices([numpy.stack([numpy.eye(3), numpy.zeros((3, 3))])])
    assert pattern_of(adj, 2, False, False, numpy.dtype('f')).isolated is None
    assert pattern_of(adj, 2, True, False, numpy.dtype('f')).isolated is not None


# --- launches, compared with NumPy ---

VARIED = ['packed', 'folded', 'unsorted', 'no edges']
LAUNCH_BOUND = {'f': 1e-6, 'd': 1e-14}


def varied(name, spare):
    if name == 'unsorted':
        adj = UNSORTED['unsorted relations']
    else:
        rng = numpy.random.RandomState(0)
        density = 0 if name == 'no edges' else 0.3
        matrices = [random_matrix(rng, n, 3, density=density) for n in (4, 0, 1, 6, 0)]
        matrices[3][:, 2] = 0
        options = {'layout': 'folded', 'padded_to': 5} if name == 'folded' else {}
        adj = BatchedCSR.from_matrices(matrices, **options)
    return with_spare(adj, *spare) if any(spare) else adj


@pytest.mark.parametrize('spare', [(0, 0), (3, 0), (2, 5)], ids=str)
@pytest.mark.parametrize('n_heads', [1, 3])
@pytest.mark.parametrize('name', VARIED)
def test_entries(gpu, name, n_heads, spare):
    adj = varied(name, spare)
    results = []
    for put in (lambda array: array), gpu.put:
        arrays = [put(numpy.zeros(adj.nnz * n_heads, 'i')) for _ in range(2)]
        arrays.append(put(numpy.zeros(adj.n_cols * n_heads + 1, 'i')))
        attention_pattern._fill(put(adj), n_heads, *arrays)
        results.append(arrays)
    for expected, actual in zip(*results):
        numpy.testing.assert_array_equal(cuda.to_cpu(actual), expected)


@pytest.mark.parametrize(
    'name, within, rows_per_node, spare',
    pairs(list(VARIED), [False, True], [1, 3], [(0, 0), (3, 0), (2, 5)]),
    ids=str,
)
def test_rows_without_edges(gpu, name, within, rows_per_node, spare):
    adj = varied(name, spare)
    n_heads = 3
    width = adj.n_relations * n_heads
    arrays = [numpy.zeros(size, 'i') for size in (2 * [adj.nnz * n_heads])]
    by_receiver = numpy.zeros(adj.n_cols * n_heads + 1, 'i')
    attention_pattern._fill(adj, n_heads, *arrays, by_receiver=by_receiver)
    given = adj, n_heads, within, rows_per_node, by_receiver, numpy.dtype('d')
    shape = adj.n_rows * rows_per_node, adj.n_graphs * width
    expected = attention_pattern._isolated(*given)
    assert (expected is None) == (name == 'unsorted' and not within)
    expected = scipy.sparse.csr_matrix(shape if expected is None else expected, shape)
    given = gpu.put(adj), *given[1:-2], gpu.put(by_receiver), given[-1]
    arrays = attention_pattern._isolated(*given)
    data, indices, indptr = map(cuda.to_cpu, arrays)
    assert data.size == indices.size == adj.n_rows * width
    n_true = int(adj.row_offsets[-1]) * width
    assert indptr[-1] == n_true and not data[n_true:].any() and not indices[n_true:].any()
    actual = scipy.sparse.csr_matrix((data, indices, indptr), shape)
    numpy.testing.assert_array_equal(actual.toarray(), expected.toarray())


@pytest.mark.parametrize('spare', [(0, 0), (2, 5)], ids=str)
@pytest.mark.parametrize('dtype', LAUNCH_BOUND)
@pytest.mark.parametrize('name', ['packed', 'unsorted', 'no edges'])
def test_scores(gpu, name, dtype, spare):
    """Logits are computed from scores, and gradients of scores from gradients of logits."""
    adj = varied(name, spare)
    n_heads = 3
    rng = numpy.random.RandomState(0)
    scores = rng.uniform(-1, 1, (adj.n_cols * n_heads, 2)).astype(dtype)
    glogits = rng.uniform(-1, 1, adj.nnz * n_heads).astype(dtype)
    glogits[adj._n_true_entries() * n_heads :] = 0
    b = numpy.array([0.25], dtype)
    slope = numpy.dtype(dtype).type(0.2)
    results = []
    for put in (lambda array: array), gpu.put:
        pattern = attention_pattern.AttentionPattern(
            put(adj), n_heads, False, False, numpy.dtype(dtype)
        )
        gscores = put(numpy.full(scores.shape, numpy.nan, dtype))
        z, slopes = module._logits(
            put(scores), put(pattern.sources), put(pattern.receivers), put(b), slope
        )
        module._score_gradients(put(glogits), slopes, pattern, adj.n_relations, n_heads, gscores)
        results.append((z, slopes, gscores))
    bound = LAUNCH_BOUND[dtype]
    for expected, actual in zip(*results):
        assert actual.dtype == dtype
        numpy.testing.assert_allclose(cuda.to_cpu(actual), expected, bound, bound)


ADJ = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])


@pytest.mark.parametrize(
    'change, error, message',
    [
        ({'m': (4, 12)}, ValueError, r'm: expected shape \(3, 12\) .* got \(4, 12\)'),
        ({'m': (3, 6)}, ValueError, r'm: expected shape \(3, 12\) .* got \(3, 6\)'),
        ({'W': (1, 7)}, ValueError, r'W: expected shape \(1, 6\) .* got \(1, 7\)'),
        ({'b': (2,)}, ValueError, r'b: expected shape \(1,\) .* got \(2,\)'),
        (
            {'adj': (2, 3, 3)},
            TypeError,
            r'adj: expected a BatchedCSR, got ndarray of shape \(2, 3, 3\); .* with '
            'BatchedCSR.from_dense',
        ),
        (
            {'adj': BatchedCOO.from_csr(ADJ)},
            TypeError,
            r'adj: expected a BatchedCSR, got BatchedCOO of shape \(3, 6\); .* takes adj itself',
        ),
        (
            {'adj': TOO_WIDE},
            ValueError,
            'adj: expected a column for each of its 1 rows and 1 relations, got <BatchedCSR.*>',
        ),
    ],
)
def test_what_does_not_fit(change, error, message):
    arguments = ones_for({'adj': ADJ, 'm': (3, 12), 'W': (1, 6), 'b': (1,), **change})
    with pytest.raises(error, match=message):
        relation_attention(**arguments, n_heads=2)
