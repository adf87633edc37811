"""`batch_norm` with weights or spare rows, compared with Chainer's link on repeated rows."""

import types

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry.links import GraphBatchNormalization

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops import batch_norm as module
from chainer_bspmm.ops.batch_norm import batch_norm
from tests.support import BATCHES, device_of, relative_error
from tests.support.cases import pairs
from tests.support.devices import slow_unless
from tests.support.gradients import check_gradients
from tests.support.spare import with_spare
from tests.support.weights import assert_counts_copies, copies_of, SPARE_ROWS, sum_of_copies
from tests.support.weights import WEIGHTED, weighted_on


# The float16 bound is the size of the errors of Chainer's own float16 sums.
BOUNDS = {'float16': 2e-2, 'float32': 2e-5, 'float64': 1e-12}


def batch(xp, name, n_spare=7):
    return BATCHES[name].to_device(device_of(xp)), with_spare(BATCHES[name], n_spare, 0, xp)


def new_link(xp, n_channels, dtype, **options):
    """Return a link with parameters and averages other than the initial ones."""
    rng = numpy.random.RandomState(1)
    with chainer.using_config('dtype', numpy.dtype(dtype)):
        link = GraphBatchNormalization(n_channels, **options)
    for parameter in link.params():
        parameter.array[...] = rng.uniform(0.5, 2, n_channels)
    link.avg_mean[...] = rng.uniform(-1, 1, n_channels)
    link.avg_var[...] = rng.uniform(0.5, 2, n_channels)
    return link.to_device(device_of(xp))


def features_of(xp, adj, n_channels, dtype, offset=0.0):
    rng = numpy.random.RandomState(0)
    return xp.asarray((rng.uniform(-1, 2, (adj.n_rows, n_channels)) + offset).astype(dtype))


def outcome(function, link, x, weights):
    """Return output, gradients and averages after one training step."""
    x = chainer.Variable(x.copy())
    link.cleargrads()
    y = function(x)
    functions.sum(y * y * weights).backward()
    return {
        'y': y.array,
        'x': x.grad,
        'mean': link.avg_mean,
        'variance': link.avg_var,
        **{name: parameter.grad for name, parameter in link.namedparams()},
    }


CASES = (
    *((name, 'float32', {}) for name in WEIGHTED),
    *((WEIGHTED[1], dtype, {}) for dtype in ('float16', 'float64')),
    *(
        (WEIGHTED[2], 'float32', options)
        for options in ({'use_gamma': False}, {'use_beta': False}, {'decay': 0.3, 'eps': 1e-2})
    ),
)


@pytest.mark.parametrize('is_weighted, n_spare', [(False, 7), (True, 0), (True, 3)])
@pytest.mark.parametrize('name, dtype, options', CASES, ids=str)
def test_a_row_counts_as_often_as_its_weight(xp, name, dtype, options, is_weighted, n_spare):
    """Rows of weight 0 and spare rows hold NaN."""
    if is_weighted:
        adj = weighted_on(name, xp, dtype, n_spare)
        rows, _ = copies_of(adj.row_weights, adj.row_offsets)
    else:
        ordinary, adj = batch(xp, name, n_spare)
        rows = numpy.arange(ordinary.n_rows)
    n_rows = adj.n_rows
    n_channels = 6
    is_ignored = xp.asarray(numpy.bincount(rows, minlength=n_rows) == 0)
    x = features_of(xp, adj, n_channels, dtype)
    x[is_ignored] = numpy.nan
    weights = xp.arange(1, x.size + 1).reshape(x.shape).astype(dtype) / x.dtype.type(x.size)
    link, oracle = (new_link(xp, n_channels, kind, **options) for kind in (dtype, 'float64'))
    for parameter, given in zip(oracle.params(), link.params()):
        parameter.array[...] = given.array
    oracle.avg_mean[...], oracle.avg_var[...] = link.avg_mean, link.avg_var

    def copies(y):
        return y[xp.asarray(rows)]

    actual = outcome(lambda x: copies(batch_norm(adj, link, x)), link, x, copies(weights))
    dense = chainer.links.BatchNormalization
    wide = copies(x).astype('d')
    expected = outcome(lambda x: dense.__call__(oracle, x), oracle, wide, copies(weights))
    expected['x'] = sum_of_copies(cuda.to_cpu(expected['x']), rows, n_rows)
    assert actual.keys() == expected.keys()
    assert not actual['x'][is_ignored].any()
    assert not batch_norm(adj, new_link(xp, n_channels, dtype), x).array[is_ignored].any()
    for key in expected:
        assert actual[key].dtype == dtype, key
        assert relative_error(actual[key], expected[key]) < BOUNDS[dtype], key


@pytest.mark.parametrize('n_spare', SPARE_ROWS)
def test_higher_derivatives_count_copies(xp, n_spare):
    adj = weighted_on('many', xp, 'float64', n_spare)
    x = features_of(xp, adj, 3, 'float64')
    assert_counts_copies(lambda adj, x: batch_norm(adj, new_link(xp, 3, 'd'), x) ** 2, adj, x)


@pytest.mark.parametrize('n_spare', [0, 4])
def test_gradients(xp, n_spare):
    adj = BatchedCSR.from_matrices([numpy.eye(n) for n in (3, 0, 2)])
    adj = with_spare(adj, n_spare, 0, xp)
    rng = numpy.random.RandomState(0)
    given = [xp.asarray(rng.uniform(-1, 2, shape)) for shape in ((5 + n_spare, 2), 2, 2)]

    def function(x, gamma, beta):
        link = GraphBatchNormalization(2, eps=1e-1, dtype=numpy.float64).to_device(device_of(xp))
        del link.gamma, link.beta  # replaced by variables
        link.gamma, link.beta = gamma, beta
        return batch_norm(adj, link, x) ** 2

    check_gradients(function, *given)


LARGE_MEANS = pytest.mark.parametrize('dtype, mean', [('float32', 1000.0), ('float16', 500.0)])


@LARGE_MEANS
def test_variance_is_no_difference_of_large_numbers(xp, dtype, mean):
    ordinary, adj = batch(xp, 'many')
    x = features_of(xp, adj, 4, dtype, offset=mean)
    y = batch_norm(adj, new_link(xp, 4, 'float32'), x).array
    expected = chainer.links.BatchNormalization.__call__(
        new_link(xp, 4, 'float64'), x[: ordinary.n_rows].astype('d')
    ).array
    assert relative_error(y[: ordinary.n_rows], expected) < 1e-3  # rounding: 1000 / 1.5 * 6e-8


@LARGE_MEANS
def test_large_values_do_not_overflow(xp, dtype, mean):
    _, adj = batch(xp, 'many')
    x = features_of(xp, adj, 4, dtype, offset=mean)
    y = batch_norm(adj, new_link(xp, 4, 'float32'), x).array
    assert y.dtype == dtype and xp.isfinite(y).all()


@pytest.mark.parametrize('layout', ['packed', 'folded'])
@pytest.mark.parametrize('sizes', [[0, 0], [0, 1]])
def test_results_of_one_row_at_most_are_finite(xp, sizes, layout):
    adj = BatchedCSR.from_matrices([numpy.zeros((n, n)) for n in sizes], layout)
    adj = with_spare(adj, 3, 0, xp)
    link = new_link(xp, 2, 'float32')
    link.cleargrads()
    x = chainer.Variable(features_of(xp, adj, 2, 'float32'))
    y = batch_norm(adj, link, x)
    functions.sum(y).backward()
    for array in (y.array, x.grad, link.gamma.grad, link.avg_mean, link.avg_var):
        assert xp.isfinite(array).all()


@pytest.mark.parametrize('n', [2, 3])
def test_the_average_of_variances_is_unbiased(xp, n):
    adj = with_spare(BatchedCSR.from_matrices([numpy.zeros((n, n))], 'packed'), 3, 0, xp)
    link, oracle = new_link(xp, 2, 'float32'), new_link(xp, 2, 'float32')
    x = features_of(xp, adj, 2, 'float32')
    batch_norm(adj, link, x)
    chainer.links.BatchNormalization.__call__(oracle, x[:n])
    assert relative_error(link.avg_var, oracle.avg_var) < BOUNDS['float32']


def test_averages_are_updated_in_place_unless_recomputing(xp):
    _, adj = batch(xp, 'many')
    link = new_link(xp, 3, 'float32')
    x = features_of(xp, adj, 3, 'float32')
    mean, variance = link.avg_mean, link.avg_var
    before = mean.copy(), variance.copy()
    with chainer.using_config('in_recomputing', True):
        y = batch_norm(adj, link, x).array
    assert (mean == before[0]).all() and (variance == before[1]).all()
    assert (batch_norm(adj, link, x).array == y).all()
    assert link.avg_mean is mean and link.avg_var is variance
    assert (mean != before[0]).all() and (variance != before[1]).all() and link.N == 0


def test_link_without_a_size_yet(xp):
    _, adj = batch(xp, 'many')
    link = chainer.links.BatchNormalization(axis=0).to_device(device_of(xp))
    x = features_of(xp, adj, 3, 'float32')
    assert batch_norm(adj, link, x).shape == x.shape and link.avg_mean.shape == (3,)


@pytest.mark.parametrize('train, spare', [(False, True), (True, False), (False, False)])
def test_everything_else_is_the_links(xp, train, spare):
    """The link itself normalises such rows, so results have the same bits."""
    adj = batch(xp, 'many')[spare]
    x = features_of(xp, adj, 3, 'float32')
    results = []
    for function in (
        lambda link: batch_norm(adj, link, x),
        lambda link: chainer.links.BatchNormalization.__call__(link, x),
    ):
        link = new_link(xp, 3, 'float32')
        with chainer.using_config('train', train):
            results.append([function(link).array, link.avg_mean, link.avg_var])
    for actual, expected in zip(*results):
        numpy.testing.assert_array_equal(cuda.to_cpu(actual), cuda.to_cpu(expected))


# --- launches, compared with the formulas on a host ---

BOUND = {'f': 1e-5, 'd': 1e-13}


WEIGHTS = (1,) * 24 + (0,) * 6, (1, 1, 7, 1, 0, 1, 120), (0,) * 4, (3,), (1,) * 4 + (0,) * 70
WAYS = (False, 1), (True, 1), (False, 3)  # (whether statistics are recomputed, number of ranks)


@pytest.mark.parametrize(
    'dtype, weights, n_channels, way',
    [slow_unless(case[0] == 'f', *case) for case in pairs('fd', WEIGHTS, [1, 5, 33], WAYS)],
    ids=str,
)
def test_same_as_on_the_host(gpu, dtype, weights, n_channels, way):
    recomputing, n_ranks = way
    rng = numpy.random.RandomState(0)
    weights = numpy.array(weights, dtype)[:, None]
    x, gy = (rng.uniform(-1, 2, (len(weights), n_channels)).astype(dtype) for _ in range(2))
    for array in (x, gy):
        array[weights[:, 0] == 0] = numpy.nan
    gamma, beta, *averages = (rng.uniform(0.5, 2, n_channels).astype(dtype) for _ in range(4))

    def results(put):
        running = None if recomputing else [put(array.copy()) for array in averages]

        def add_up(array):
            return put(cuda.to_cpu(array) * array.dtype.type(n_ranks))

        ranks = types.SimpleNamespace(sum=add_up, sum_of_gradients=add_up)  # equal batches
        row_weights = put(weights)
        n_rows = add_up(weights.sum(axis=0))
        y, statistics = module._forward(
            put(x), put(gamma), put(beta), row_weights, n_rows, 1e-3, 0.8, running, ranks
        )
        gradients = module._gradients(
            put(x), put(gy), put(gamma), row_weights, n_rows, *statistics, ranks=ranks
        )
        return [y, *statistics, *gradients, *(running or ())]

    actual = results(gpu.put)
    expected = results(lambda array: array)
    assert len(actual) == (6 if recomputing else 8)
    if n_ranks > 1 and weights.sum() > 1:  # only the running variance depends on the number of rows
        alone = module._forward(x, gamma, beta, weights, weights.sum(axis=0), 1e-3, 0, None)
        numpy.testing.assert_allclose(expected[0], alone[0], BOUND[dtype], BOUND[dtype] * 40)
    for one, other in zip(actual, expected):
        assert one.dtype == dtype and one.shape == other.shape
        numpy.testing.assert_allclose(cuda.to_cpu(one), other, BOUND[dtype], BOUND[dtype] * 40)


class OwnForward(chainer.links.BatchNormalization):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    'link, shape, message',
    [
        (GraphBatchNormalization(3), (12, 4), r'h: expected shape \(12, 3\) .* got \(12, 4\)'),
        (GraphBatchNormalization(3), (10, 3), r'h: expected shape \(12, 3\) .* got \(10, 3\)'),
        (GraphBatchNormalization(3, decay=None), (12, 3), 'link.decay: .* a number, got None'),
        (chainer.links.BatchNormalization(12, axis=1), (12, 3), r'link.axis: .* got \(1,\)'),
        (
            OwnForward(3),
            (12, 3),
            'link: expected the forward pass of .* got <.*OwnForward object at 0x.*>',
        ),
    ],
)
def test_what_does_not_fit(link, shape, message):
    adj = with_spare(BATCHES['one graph'], 7, 0)
    with pytest.raises(ValueError, match=message):
        batch_norm(adj, link, numpy.zeros(shape, 'f'))


class TwoAlike(module.OneRank):
    """Two ranks that have the same batch."""

    def sum(self, array):
        return 2 * array

    sum_of_gradients = sum


class OfTwo(GraphBatchNormalization):
    bspmm_ranks = TwoAlike()


@pytest.mark.parametrize('name', ['one graph', 'many'])
def test_statistics_are_those_of_the_ranks_of_a_link(name):
    adj = with_spare(BATCHES[name], 7, 0)
    x = features_of(numpy, adj, 3, 'd')
    weights = (numpy.arange(adj.n_rows) < adj.row_offsets[-1]).astype('d')[:, None]
    of_two, of_one = (kind(3, dtype='d') for kind in (OfTwo, GraphBatchNormalization))
    twice = outcome(lambda h: batch_norm(adj, of_two, h), of_two, x, weights)
    once = outcome(lambda h: batch_norm(adj, of_one, h), of_one, x, weights)
    variance = twice.pop('variance'), once.pop('variance')
    assert (variance[0] != variance[1]).all()  # there are twice as many rows
    for key, expected in once.items():
        assert relative_error(twice[key], expected) < BOUNDS['float64'], key
