"""Products of the papers, by all containers and kernels: values, launches, gradients, refusals."""

import functools
from typing import Any
import warnings

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR, BatchedSELL, functions, papers
from chainer_bspmm.papers import gpu as launches
from chainer_bspmm.papers import policy
from chainer_bspmm.papers.products import bsddmm_forward, bspmm_forward
from tests import support
from tests.emulation.kernel_cases import batch, BATCHES, CHANNELS_OF_DTYPES, integers
from tests.emulation.kernel_cases import share_channels
from tests.support import assert_exact, ones_for, products, reference, shuffled
from tests.support.devices import GPUS
from tests.support.gradients import check_gradients
from tests.support.spare import with_spare


def coo(adj):
    return shuffled(BatchedCOO.from_csr(adj))


def sell(adj):
    return BatchedSELL(adj, 7, sort_rows=True)


# algorithm -> function that makes its container
CONTAINERS = {
    **dict.fromkeys(launches.SWA_ALGORITHMS, lambda adj: adj),
    **dict.fromkeys(launches.SELL_ALGORITHMS, sell),
    **dict.fromkeys(launches.ST_ALGORITHMS, coo),
}
SWA = 'swa', 'swa_rows', 'swa_blocked'
ST = 'st'
ST_CASES = ('st_shared', 'st_blocked', 'st_global')
every_algorithm = pytest.mark.parametrize('algorithm', CONTAINERS)
# A host has only one algorithm for each container, whatever its name.
ON_HOST = 'swa', 'sell', 'st'


def at_places(names, cases):
    """Parametrize a test over cases, whose first value is the algorithm, and over places."""
    cases = list(cases)
    params = [('numpy', *case) for case in cases if case[0] in ON_HOST]
    gpus: list[Any] = [pytest.param(place) if isinstance(place, str) else place for place in GPUS]
    params += [pytest.param(*gpu.values, *case, marks=gpu.marks) for gpu in gpus for case in cases]
    return pytest.mark.parametrize('place, ' + names, params, indirect=['place'])


every_place = at_places('algorithm', ((algorithm,) for algorithm in CONTAINERS))


def put_on(place, *arrays):
    """Put arrays on a place; None stays None."""
    return [None if array is None else place.put(array) for array in arrays]


def check(place, algorithm, adj, dtype, n_channels, values='own', with_residual=True, trans=False):
    """Check a product by an algorithm; adj is a BatchedCSR, or the algorithm's own container."""
    if type(adj) is BatchedCSR:
        if values == 'ones':
            adj = adj.replace(data=None)
        adj = CONTAINERS[algorithm](adj)
    products.check_product(
        place,
        adj,
        dtype,
        n_channels,
        values='given' if values == 'given' else 'own',
        with_residual=with_residual,
        trans=trans,
        multiply=by(algorithm),
    )


def by(algorithm):
    """Return a function like `bspmm_forward` that uses this algorithm."""
    return functools.partial(bspmm_forward, algorithm=algorithm)


@pytest.fixture
def small_blocks(monkeypatch):
    """Use small blocks, which need more rounds, because threads are expensive on a CPU."""
    monkeypatch.setattr(policy, 'ST_BLOCK', 128)
    monkeypatch.setattr(policy, 'st_shared_launch', policy.st_shared_launch.__wrapped__)


# Float32 has also widths that sub-warps do not divide.
WIDTHS = *CHANNELS_OF_DTYPES, ('f', 5), ('f', 7), ('f', 9), ('f', 17)


@pytest.mark.parametrize('place', GPUS, indirect=True)
@pytest.mark.parametrize(
    'algorithm, dtype, n_channels',
    [
        (name, dtype, n_channels)
        for name in (*SWA, *ST_CASES)
        for dtype, n_channels in WIDTHS
        if name in SWA or dtype != 'e'
    ],
)
def test_channels(place, small_blocks, algorithm, dtype, n_channels):
    name = 'small' if n_channels > 64 else 'mixed'
    check(place, algorithm, batch(name, dtype), dtype, n_channels)
    if place.launched and algorithm != 'st_blocked':  # it has fewer columns
        assert place.launched[-1]['SUBWARP'] == policy.subwarp(n_channels)


# (values, whether the matrix is transposed, whether there is a residual)
VALUES = (
    *(('ones', False, True), ('ones', True, False)),
    *(('own', False, False), ('own', True, True)),
    *(('given', False, True), ('given', True, False)),
)


@at_places(
    'algorithm, values, trans, with_residual',
    (
        (algorithm, *options)
        for algorithm in CONTAINERS
        for options in VALUES
        if (algorithm, options[0]) != ('sell', 'given')  # SELL takes no values as argument
    ),
)
def test_values(place, algorithm, values, trans, with_residual):
    adj = batch('relations', 'f')
    check(place, algorithm, adj, 'f', 3, values, with_residual, trans)
    if algorithm in ST_CASES and place.launched:
        assert place.launched[-1]['WEIGHTS'] == (values != 'ones')
        assert place.launched[-1]['TRANS'] == trans


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', BATCHES)
@every_place
def test_batches(place, algorithm, name, trans):
    dtype = 'f' if algorithm in (*SWA, 'sell') else 'd'
    values = 'own' if algorithm == 'sell' else 'given'
    check(place, algorithm, batch(name, dtype), dtype, 3, values, True, trans)


@every_place
def test_input_of_three_dimensions_that_is_not_contiguous(place, algorithm):
    adj = CONTAINERS[algorithm](batch('padded', 'f'))
    products.check_three_dimensions(place, adj, by(algorithm), algorithm != 'sell')


@every_place
def test_nan_reaches_its_rows_only(place, algorithm):
    products.check_nan(place, 'f', by(algorithm), CONTAINERS[algorithm])


@every_place
def test_duplicates_are_multiplied_before_they_are_added(place, algorithm):
    products.check_duplicates(place, by(algorithm), CONTAINERS[algorithm], algorithm != 'sell')


@products.empty_results
@every_place
def test_empty_result_launches_nothing(place, algorithm, n_nodes, n_channels):
    adj = CONTAINERS[algorithm](products.diagonal(n_nodes))
    y = by(algorithm)(place.put(adj), place.put(numpy.zeros((adj.n_cols, n_channels), 'f')))
    assert y.shape == (adj.n_rows, n_channels) and not place.launched


@pytest.mark.parametrize('dtype', 'efd')
@pytest.mark.parametrize('algorithm', [*SWA, 'sell'])
def test_input_that_is_aligned_to_an_element_only(gpu, algorithm, dtype):
    adj = CONTAINERS[algorithm](batch('small', dtype))
    x = integers((adj.n_cols, 16), dtype)
    y = bspmm_forward(gpu.put(adj), gpu.put(x, numpy.dtype(dtype).itemsize), algorithm=algorithm)
    assert_exact(y, reference.bspmm(adj, x), dtype)


@every_place
def test_gradients(place, algorithm):
    adj = CONTAINERS[algorithm](batch('relations', 'd'))
    shapes = [(adj.n_cols, 3), adj.nnz, (adj.n_rows, 3), (adj.n_rows, 3)]
    x, data, residual, gy = (integers(shape, 'd', seed=i) for i, shape in enumerate(shapes))
    data = None if algorithm == 'sell' else data
    arrays = put_on(place, x, data, residual)
    inputs = [None if array is None else chainer.Variable(array) for array in arrays]
    y = papers.bspmm(place.put(adj), *inputs, algorithm='auto' if place.is_host else algorithm)
    y.grad = place.put(gy)
    y.backward()
    assert_exact(y.array, reference.bspmm(adj, x, data, residual), 'd')
    assert_exact(inputs[0].grad, reference.bspmm(adj, gy, data, trans=True), 'd')
    assert_exact(inputs[2].grad, gy, 'd')
    if data is not None:
        assert_exact(inputs[1].grad, reference.bsddmm(adj, gy, x), 'd')
    if algorithm in ST_CASES and place.launched:
        assert [defines.get('TRANS') for defines in place.launched] == [0, 1, None]


@pytest.mark.parametrize('algorithm', ['swa', 'sell', 'st'])
def test_second_derivatives(xp, algorithm):
    """Second derivatives equal numerical ones; on a GPU the same algorithm computes them."""
    rng = numpy.random.RandomState(0)
    adj = CONTAINERS[algorithm](support.BATCHES['four relations'])
    adj = adj if xp is numpy else adj.to_device('@cupy:0')
    x = xp.asarray(rng.uniform(-1, 1, (adj.n_cols, 2)))
    residual = xp.asarray(rng.uniform(-1, 1, (adj.n_rows, 2)))
    data = xp.asarray(rng.uniform(-1, 1, adj.nnz))
    taken = 'auto' if xp is numpy else algorithm

    def product(x, residual, data=None):
        return papers.bspmm(adj, x, data, residual, algorithm=taken) ** 2

    if algorithm == 'sell':
        check_gradients(product, x, residual)
    else:
        check_gradients(product, x, residual, data)


@pytest.mark.parametrize('algorithm', [ST, *ST_CASES])
def test_second_derivatives_are_those_of_the_host(gpu, algorithm):
    adj = coo(batch('relations', 'd'))
    shapes = [(adj.n_cols, 3), adj.nnz, (adj.n_rows, 3)]
    arrays = [integers(shape, 'd', {'d': 9}, i) for i, shape in enumerate(shapes)]

    def derivatives(adj, arrays, algorithm):
        inputs = [chainer.Variable(array) for array in arrays]
        y = papers.bspmm(adj, *inputs, algorithm=algorithm)
        first = chainer.grad([chainer.functions.sum(y * y)], inputs, enable_double_backprop=True)
        total = sum(chainer.functions.sum(g * g) for g in first)
        return [g.array for g in first + chainer.grad([total], inputs)]

    expected = derivatives(adj, arrays, 'auto')  # by SciPy
    result = derivatives(gpu.put(adj), put_on(gpu, *arrays), algorithm)
    assert len(gpu.launched) > 5
    for actual, exact in zip(result, expected):
        assert_exact(actual, exact, 'd')


# --- SWA: partitions of wide matrices, only rows of graphs ---


@pytest.mark.parametrize(
    'dtype, n_channels, partitions',
    [('f', 2048, 1), ('f', 2049, 2), ('f', 4097, 4), ('e', 2049, 2), ('d', 1025, 2)],
)
def test_partitions_about_the_budget(gpu, dtype, n_channels, partitions):
    adj = batch('small', dtype)
    launch = policy.swa_launch(adj.n_graphs, adj.max_rows, n_channels, numpy.dtype(dtype).itemsize)
    assert launch.grid[1] == partitions
    check(gpu, 'swa', adj, dtype, n_channels)


@pytest.mark.parametrize('algorithm', SWA)
def test_batch_with_spare_rows_is_refused(gpu, algorithm):
    """The kernels would not write spare rows."""
    adj = batch('small', 'f').replace(has_spare=True)
    x = gpu.put(integers((adj.n_cols, 4), 'f'))
    message = 'adj: expected a batch without spare rows, which these kernels do not write, got '
    with pytest.raises(ValueError, match=message):
        papers.bspmm(gpu.put(adj), x, algorithm=algorithm)


# --- SELL: sizes of slices ---


@pytest.mark.parametrize(
    'n_channels, tile',
    [(1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (7, (1, 7)), (8, None), (9, (1, 8)), (33, (1, 8))],
)
@pytest.mark.parametrize('dtype', 'efd')
def test_tiles(gpu, dtype, n_channels, tile):
    check(gpu, 'sell', batch('mixed', dtype), dtype, n_channels)
    defines = gpu.launched[-1]
    expected = tile or {'e': (8, 1), 'f': (4, 2), 'd': (2, 4)}[dtype]
    assert (defines['VECTOR'], defines['TILE']) == expected


def tall(dtype):
    """Return graphs with more rows than two warps, as many as a warp, few rows, and none."""
    rng = numpy.random.RandomState(0)
    return BatchedCSR.from_matrices(
        [integers((n, n), dtype, seed=n) * (rng.uniform(size=(n, n)) < 0.1) for n in (70, 0, 32, 3)]
    )


@pytest.mark.parametrize('values', ['ones', 'own'])
@pytest.mark.parametrize('sort_rows', [False, True])
@pytest.mark.parametrize('size', [1, 31, 32, 33, 1000])
def test_slice_sizes(place, size, sort_rows, values):
    adj = tall('f') if values == 'own' else tall('f').replace(data=None)
    for trans in (False, True):
        check(place, 'sell', BatchedSELL(adj, size, sort_rows), 'f', 3, trans=trans)
    for defines in place.launched:
        assert (defines['WHOLE_WARPS'], defines['WEIGHTS']) == (size >= 32, values == 'own')


def test_blocks_that_stride_over_the_channels(gpu, monkeypatch):
    share_channels(monkeypatch, policy, 'sell_launch')
    check(gpu, 'sell', batch('small', 'f'), 'f', 33)


# --- ST: in shared memory, in parts in shared memory, in global memory ---


def test_partitions_of_a_wide_output(gpu, small_blocks):
    # 24 rows of 1024 floats are three times the budget, so there are four partitions.
    check(gpu, ST, batch('mixed', 'f'), 'f', 1024)


def corners(n_rows):
    """Return a batch of a tall graph with entries in its corners, and a small graph."""
    ids = [[n_rows - 1, 0], [0, n_rows - 1], [n_rows - 1, 0], [n_rows + 1, n_rows]]
    return BatchedCOO(
        ids=numpy.array(ids),
        row_offsets=numpy.array([0, n_rows, n_rows + 2]),
        entry_offsets=numpy.array([0, 3, 4]),
        data=numpy.array([1, 2, 3, 4], 'f'),
    )


@pytest.mark.parametrize(
    'n_rows, n_channels, expected',
    [(8192, 1, 'st_shared'), (8192, 2, 'st_blocked'), (8193, 1, 'st_global')],
)
def test_rule_at_the_limit_of_shared_memory(gpu, monkeypatch, n_rows, n_channels, expected):
    taken = []
    for name in ST_CASES:

        def note(*arguments, name=name, function=launches.ST_ALGORITHMS[name]):
            taken.append(name)
            return function(*arguments)

        monkeypatch.setitem(launches.ST_ALGORITHMS, name, note)
    for trans in (False, True):
        check(gpu, ST, corners(n_rows), 'f', n_channels, trans=trans)
    assert taken == [expected] * 2


def test_capacity_beyond_the_batch(gpu):
    adj = coo(batch('small', 'f'))
    # Spare entries have places out of range, so using them would be an error.
    ids = numpy.pad(adj.ids, ((0, 5), (0, 0)), constant_values=2**30)
    data = numpy.pad(adj.data, (0, 5), constant_values=numpy.nan)
    larger = gpu.put(adj.replace(ids=ids, data=data, nnz=adj.nnz + 5))
    x = integers((adj.n_cols, 4), 'f')
    for algorithm in ST_CASES:
        y = bspmm_forward(larger, gpu.put(x), algorithm=algorithm)
        assert_exact(y, reference.bspmm(adj, x), 'f')
    w = cuda.to_cpu(bsddmm_forward(larger, gpu.put(x), gpu.put(x)))
    assert_exact(w[: adj.nnz], reference.bsddmm(adj, x, x), 'f')
    assert numpy.isnan(w[adj.nnz :]).all()  # unchanged


def test_blocks_without_a_column_leave(gpu, monkeypatch):
    plan = policy.st_shared_launch

    def more(*sizes):
        return plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 1, 3))

    monkeypatch.setattr(policy, 'st_shared_launch', more)
    check(gpu, 'st_blocked', batch('mixed', 'f'), 'f', 5)


def test_atomics_are_declared(gpu):
    adj = batch('small', 'f')
    x = integers((adj.n_cols, 3), 'f')
    there = gpu.put(coo(adj))
    x_there = gpu.put(x)
    with chainer.using_config('warn_nondeterministic', True):
        with pytest.warns(
            UserWarning,
            match='Potentially non-deterministic .*atomicAdd in bspmm with a BatchedCOO',
        ):
            papers.bspmm(there, x_there)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            papers.bsddmm(there, x_there, x_there)
            papers.bspmm(coo(adj), x)  # by SciPy
            papers.bspmm(gpu.put(adj), x_there)


# --- sampled product over a BatchedCOO ---


def check_sampled(place, name, dtype, n_channels):
    products.check_sampled(place, coo(batch(name, dtype)), dtype, n_channels, bsddmm_forward)


@pytest.mark.parametrize('dtype, n_channels', [('f', 0), *CHANNELS_OF_DTYPES])
def test_sampled_product(place, dtype, n_channels):
    check_sampled(place, 'small' if n_channels > 64 else 'mixed', dtype, n_channels)


@pytest.mark.parametrize(
    'n_channels, lanes, tile',
    [(4, 1, 1), (8, 1, 2), (12, 1, 3), (20, 2, 4), (36, 4, 4), (68, 8, 4), (260, 32, 4)],
)
def test_lanes_of_the_sampled_product(gpu, n_channels, lanes, tile):
    check_sampled(gpu, 'mixed', 'f', n_channels)
    assert (gpu.launched[-1]['LANES'], gpu.launched[-1]['TILE']) == (lanes, tile)


@pytest.mark.parametrize('name', BATCHES)
def test_sampled_product_of_batches(place, name):
    check_sampled(place, name, 'f', 7)


def test_gradients_of_the_sampled_product(xp):
    rng = numpy.random.RandomState(0)
    adj = support.coo_batch_on('four relations', xp, 'float64')
    u, v = (support.features(rng, xp, n, 3, 'float64') for n in adj.shape)
    check_gradients(lambda u, v: papers.bsddmm(adj, u, v) ** 2, u, v)


@pytest.mark.parametrize(
    'make, changes, error, message',
    [
        (coo, {'x': (4, 2)}, ValueError, r'x: .* \(3, n_B\) to go with <BatchedCOO.* got \(4, 2\)'),
        (
            coo,
            {'x': numpy.ones((3, 2))},
            TypeError,
            r'x: expected float32, like the values of adj, got float64; adj.astype\(x.dtype\) '
            'converts',
        ),
        (
            coo,
            {'data': (3,)},
            ValueError,
            r'data: expected shape \(5,\), one value for each entry, got \(3,\)',
        ),
        (coo, {'residual': (3, 1)}, ValueError, r'residual: expected shape \(3, 2\), .* \(3, 1\)'),
        (sell, {'x': (4, 2)}, ValueError, r'x: .* \(3, n_B\) to go with <BatchedSELL.* \(4, 2\)'),
        (
            sell,
            {'x': numpy.ones((3, 2))},
            TypeError,
            r'x: expected float32, like the values of adj, got float64; adj.astype\(x.dtype\) '
            'converts',
        ),
        (
            sell,
            {'data': (2,)},
            ValueError,
            'data: expected None, because a BatchedSELL .*; edge values go with a BatchedCSR',
        ),
        (
            sell,
            {'residual': (3, 1)},
            ValueError,
            r'residual: expected shape \(3, 2\), like the product, got \(3, 1\)',
        ),
        *(
            (
                make,
                {'algorithm': name},
                ValueError,
                "^algorithm on a CPU: expected one of 'auto', got '%s'$" % name,
            )
            for name, make in [*CONTAINERS.items(), ('vektor', coo), ('vektor', sell)]
        ),
    ],
)
def test_bad_input(monkeypatch, make, changes, error, message):
    monkeypatch.setattr(papers.cpu, 'bspmm', lambda *_: pytest.fail('launched'))
    matrices = [numpy.full((2, 2), 2, 'f'), numpy.eye(1, dtype='f')]
    adj = make(BatchedCSR.from_matrices(matrices))
    arguments = ones_for({'adj': adj, 'x': (3, 2), **changes})
    with pytest.raises(error, match=message):
        papers.bspmm(**arguments)


@pytest.mark.parametrize(
    'make, algorithm, message',
    [
        (lambda adj: adj, 'st', "expected one of 'auto', 'swa'.* got 'st'"),
        (coo, 'vector', "expected .* 'auto', 'st', .* got 'vector'"),
        (sell, 'vector', "expected one of 'auto', 'sell', got 'vector'"),
    ],
)
def test_algorithm_of_another_container(gpu, make, algorithm, message):
    adj = make(batch('small', 'f'))
    x = gpu.put(numpy.zeros((adj.n_cols, 2), 'f'))
    with pytest.raises(ValueError, match='^algorithm: ' + message):
        papers.bspmm(gpu.put(adj), x, algorithm=algorithm)


@pytest.mark.parametrize('algorithm', [ST, *ST_CASES])
def test_float16(gpu, algorithm):
    adj = coo(batch('small', 'e'))
    x = gpu.put(numpy.ones((adj.n_cols, 2), 'e'))
    with pytest.raises(
        TypeError,
        match=r'x: expected float32 or float64 .* got float16; .*to_csr\(\) takes float16',
    ):
        bspmm_forward(gpu.put(adj), x, algorithm=algorithm)


@pytest.mark.parametrize(
    'algorithm, n_rows, n_channels, message',
    [
        ('swa_rows', 3, 4097, 'swa_rows .* 32768 .* n_B = 4097, .* swa_blocked splits the columns'),
        (
            'st_shared',
            8192,
            2,
            "'st_shared' expects the output .* 32768 bytes .* got 65536 bytes; .* fits",
        ),
        (
            'st_blocked',
            8193,
            1,
            "'st_blocked' expects one column .* 32768 .* got 32772 bytes; .* fits",
        ),
    ],
)
def test_forced_kernel_that_does_not_fit(gpu, algorithm, n_rows, n_channels, message):
    adj = batch('small', 'f') if algorithm == 'swa_rows' else corners(n_rows)
    x = gpu.put(numpy.zeros((adj.n_cols, n_channels), 'f'))
    with pytest.raises(ValueError, match='algorithm: %s' % message):
        bspmm_forward(gpu.put(adj), x, algorithm=algorithm)
    assert not gpu.launched


def test_other_functions_want_csr():
    adj = BatchedSELL(support.BATCHES['one graph'])
    x = numpy.ones((5, 2))
    for call in (lambda: functions.bsddmm(adj, x, x), lambda: functions.segment_sum(adj, x)):
        with pytest.raises(
            TypeError,
            match='adj: expected a BatchedCSR, got BatchedSELL of shape .* takes adj itself',
        ):
            call()
    with pytest.raises(
        TypeError,
        match=r'adj: expected a BatchedCOO, got BatchedCSR of shape \(5, 5\); .* with '
        'BatchedCSR.from_dense',
    ):
        papers.bsddmm(support.BATCHES['one graph'], x, x)


def test_algorithms():
    adj = batch('small', 'f')
    assert papers.algorithms(adj) == list(SWA)
    assert papers.algorithms(with_spare(adj, 0, 1)) == []  # all write only rows of graphs
    assert papers.algorithms(coo(adj)) == [ST, *ST_CASES]
    assert papers.algorithms(sell(adj)) == ['sell']
