"""bspmm with every container and algorithm: values, gradients to second order, what it refuses."""

import functools
import weakref

import hypothesis
from hypothesis import strategies
import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.functions import matmul

from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import functions
from chainer_bspmm import papers
from chainer_bspmm.ops import bspmm as products_of_csr
from chainer_bspmm.ops import segments
from chainer_bspmm.ops.bspmm import bsddmm_forward
from chainer_bspmm.ops.bspmm import csr_launch
from chainer_bspmm.ops.segments import segment_broadcast_forward
from chainer_bspmm.ops.segments import segment_max_forward
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import coo_batch_on
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import reference
from tests.support import shuffled
from tests.support import widths_on
from tests.support.gradients import check_gradients
from tests.support.gradients import GRADIENT_BATCHES


# --- every container, with every algorithm that there is for it ---

# All tests below include a new algorithm automatically. Other forms of SELL: test_bspmm_sell.
ALGORITHMS = {
    'csr': products_of_csr.ALGORITHMS[1:],
    'swa': tuple(papers.gpu.SWA_ALGORITHMS),
    'coo': tuple(papers.gpu.ST_ALGORITHMS),
    'sell': tuple(papers.gpu.SELL_ALGORITHMS),
}


def bspmm(adj, *arguments, algorithm='auto', **options):
    is_ours = type(adj) is BatchedCSR and algorithm not in ALGORITHMS['swa']
    return (functions if is_ours else papers).bspmm(adj, *arguments, algorithm=algorithm, **options)


def bspmm_forward(adj, x, data=None, residual=None, trans=False, algorithm='auto'):
    is_ours = type(adj) is BatchedCSR and algorithm not in ALGORITHMS['swa']
    room = products_of_csr if is_ours else papers.products
    return room.bspmm_forward(adj, x, data, residual, trans, algorithm)


def _cases():
    for kind, names in ALGORITHMS.items():
        yield pytest.param('numpy', kind, 'auto')
        for algorithm in ('auto', *(names if len(names) > 1 else ())):  # one is what 'auto' means
            yield pytest.param('cupy', kind, algorithm, marks=pytest.mark.gpu)


def _with(case, *more):
    return pytest.param(*case.values, *more, marks=case.marks)


CASES = list(_cases())
# Atomics refuse float16, see test_bspmm_coo.
CASES_AND_DTYPES = [
    _with(case, dtype)
    for dtype in DTYPES
    for case in CASES
    if dtype != 'float16' or case.values[:2] != ('cupy', 'coo')
]

every_case = pytest.mark.parametrize('xp, kind, algorithm', CASES, indirect=['xp'])
every_case_and_dtype = pytest.mark.parametrize(
    'xp, kind, algorithm, dtype', CASES_AND_DTYPES, indirect=['xp']
)


def contained(adj, kind):
    """Return a BatchedCSR in another container, on its device; entries of COO are shuffled."""
    if kind in ('csr', 'swa'):
        return adj
    if kind == 'coo':
        device = chainer.backend.get_device_from_array(adj.indptr)
        return shuffled(BatchedCOO.from_csr(adj.to_device(-1))).to_device(device)
    return BatchedSELL(adj, 7, sort_rows=True)


def batch_of(kind, name, xp, dtype):
    """Return one of BATCHES in a container, in a dtype on a device."""
    return contained(batch_on(name, xp, dtype), kind)


def takes_data(kind):
    return kind != 'sell'


def fits(algorithm, adj, n_channels, dtype, trans):
    """Whether a kernel forced by name can hold the output; the others hold all of BATCHES."""
    n_rows = adj.max_cols if trans else adj.max_rows
    return algorithm != 'st_shared' or (
        n_rows * n_channels * numpy.dtype(dtype).itemsize <= papers.policy.SHARED_BUDGET
    )


def truth(adj, *arguments, **options):
    """Return the result of the reference, which does not know BatchedSELL."""
    return reference.bspmm(adj.to_csr() if type(adj) is BatchedSELL else adj, *arguments, **options)


# --- values ---


@functools.lru_cache(maxsize=4)  # the reference is slow; all cases of one dtype follow each other
def products(order, name, dtype, trans, widths):
    """Return [(x, data, residual, y)] on the host, for entries in the order of CSR or COO."""
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, numpy, dtype) if order == 'csr' else coo_batch_on(name, numpy, dtype)
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    if name not in ('many', 'huge among tiny', 'isolated nodes'):
        widths = [n for n in widths if n < 1024]
    x, residual = (features(rng, numpy, n, max(widths), dtype) for n in (n_in, n_out))
    data = features(rng, numpy, adj.nnz, 1, dtype)[:, 0]
    examples = []
    for values in (None, data):
        y = reference.bspmm(adj, x, values, None, trans)  # columns do not depend on each other
        for n in widths:
            first, added = x[:, :n].copy(), residual[:, :n].copy()
            examples += [(first, values, None, y[:, :n])]
            examples += [(first, values, added, y[:, :n] + added)]
    return examples


@every_case_and_dtype
@pytest.mark.parametrize('name', BATCHES)
def test_product(xp, kind, algorithm, name, dtype):
    adj, widths = batch_of(kind, name, xp, dtype), widths_on(xp)
    if xp is not numpy:
        widths += 4, 7, 8, 9
    for trans in (False, True):
        order = 'coo' if kind == 'coo' else 'csr'
        for x, data, residual, expected in products(order, name, dtype, trans, widths):
            if data is not None and not takes_data(kind):
                continue
            if not fits(algorithm, adj, x.shape[1], dtype, trans):
                continue
            x, data, residual = (
                None if array is None else xp.asarray(array) for array in (x, data, residual)
            )
            assert_close(bspmm_forward(adj, x, data, residual, trans, algorithm), expected, dtype)


# All settings of kernels/bspmm_csr.cu, which the policy chooses for shapes of many sizes.
PLANS = [
    {'lanes': 8, 'columns': 1, 'rows_per_thread': 1, 'ahead': 3, 'stream': False},
    {'lanes': 32, 'columns': 1, 'rows_per_thread': 1, 'ahead': 5, 'stream': True},
    {'lanes': 3, 'columns': 2, 'rows_per_thread': 4, 'ahead': 3, 'stream': False, 'wide': True},
    {'lanes': 16, 'columns': 2, 'rows_per_thread': 2, 'ahead': 3, 'stream': True},
    {'lanes': 16, 'columns': 4, 'rows_per_thread': 1, 'ahead': 3, 'stream': True, 'wide': True},
    {'lanes': 1, 'columns': 4, 'rows_per_thread': 8, 'ahead': 3, 'stream': False},
    {'lanes': 16, 'columns': 1, 'rows_per_thread': 4, 'ahead': 5, 'stream': True},
]


@pytest.mark.gpu
@pytest.mark.parametrize('options', PLANS, ids=str)
@pytest.mark.parametrize('dtype', DTYPES)
def test_every_plan_of_csr(monkeypatch, dtype, options):
    xp = cuda.cupy
    options = dict(options)
    offset = 'size_t' if options.pop('wide', False) else 'unsigned'

    def planned(n_rows, n_cols, nnz, n_channels, width, *_):
        plan = csr_launch(n_rows, n_cols, n_channels, width, block=64, **options)
        return plan._replace(
            defines=tuple(
                (key, offset if key == 'OFFSET' else value) for key, value in plan.defines
            )
        )

    monkeypatch.setattr('chainer_bspmm.ops.bspmm.bspmm_launch', planned)
    widths = widths_on(xp) + (4, 7, 8, 9)
    for name in (
        'many',
        'duplicates, unsorted',
        'rectangular',
        'empty graphs first, between, last',
        'huge among tiny',
    ):
        adj = batch_of('csr', name, xp, dtype)
        for trans in (False, True):
            for x, data, residual, expected in products('csr', name, dtype, trans, widths):
                x, data, residual = (
                    None if array is None else xp.asarray(array) for array in (x, data, residual)
                )
                assert_close(bspmm_forward(adj, x, data, residual, trans), expected, dtype)


@every_case
def test_no_channels(xp, kind, algorithm):
    adj = batch_of(kind, 'many', xp, 'float32')
    y = bspmm(adj, xp.empty((adj.n_cols, 0), 'f'), algorithm=algorithm)
    assert y.shape == (adj.n_rows, 0) and y.dtype == numpy.float32


@every_case
def test_no_graphs(xp, kind, algorithm):
    adj = contained(BatchedCSR(xp.array([0]), xp.array([], 'i'), xp.array([0])), kind)
    x = chainer.Variable(xp.empty((0, 5), 'f'))
    y = bspmm(adj, x, algorithm=algorithm)
    assert y.shape == (0, 5)
    y.grad = xp.empty((0, 5), 'f')
    y.backward()
    assert x.grad.shape == (0, 5)


@every_case
def test_result_is_a_matmul_of_every_block(xp, kind, algorithm):
    rng = numpy.random.RandomState(0)
    dense = numpy.stack([random_matrix(rng, 6) for _ in range(4)]).astype('f')
    x = features(rng, xp, 24, 5, 'float32').reshape(4, 6, 5)
    adj = contained(BatchedCSR.from_dense(xp.asarray(dense)), kind)
    expected = matmul(xp.asarray(dense), x).array
    assert bspmm(adj, x, algorithm=algorithm).shape == (4, 6, 5)
    assert_close(
        bspmm(adj, x, algorithm=algorithm).array, cuda.to_cpu(expected).astype(float), 'float32'
    )
    assert_close(
        bspmm(adj, x, residual=x, algorithm=algorithm).array,
        cuda.to_cpu(expected + x).astype(float),
        'float32',
    )


def test_sum_over_relations(xp):
    rng = numpy.random.RandomState(0)
    dense = [random_matrix(rng, n, 3).astype('f') for n in (4, 1, 7)]
    adj = BatchedCSR.from_matrices([xp.asarray(m) for m in dense])
    x = features(rng, xp, 12 * 3, 8, 'float32')
    blocks = numpy.split(cuda.to_cpu(x).astype(float).reshape(12, 3, 8), [4, 5])
    expected = numpy.concatenate(
        [numpy.einsum('rij,jrc->ic', m, block) for m, block in zip(dense, blocks)]
    )
    assert_close(bspmm(adj, x).array, expected, 'float32')


@every_case
def test_input_that_is_not_contiguous(xp, kind, algorithm):
    rng = numpy.random.RandomState(0)
    adj = batch_of(kind, 'many', xp, 'float32')
    n = adj.n_cols
    layouts = {
        'transposed': features(rng, xp, 8, n, 'float32').T,
        'strided columns': features(rng, xp, n, 16, 'float32')[:, ::2],
        'strided rows': features(rng, xp, 2 * n, 8, 'float32')[::-2],
        # contiguous, but not aligned to a vector
        'offset': features(rng, xp, 1, n * 8 + 1, 'float32')[0, 1:].reshape(n, 8),
    }
    data = features(rng, xp, 2, adj.nnz, 'float32').T[:, 1]
    for x in layouts.values():
        for values in (None, data) if takes_data(kind) else (None,):
            for trans in (False, True):
                assert_close(
                    bspmm_forward(adj, x, values, x, trans, algorithm),
                    truth(adj, x, values, x, trans),
                    'float32',
                )


def test_subclass_of_ndarray(tmp_path):
    adj = BATCHES['one graph'].astype('f')
    x = numpy.memmap(tmp_path / 'x', 'f', 'w+', shape=(5, 2))
    x[...] = numpy.arange(10).reshape(5, 2)
    assert_close(bspmm(adj, x).array, reference.bspmm(adj, x), 'float32')


@every_case
def test_inputs_are_left_alone(xp, kind, algorithm):
    rng = numpy.random.RandomState(0)
    adj = batch_of(kind, 'many', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 8, 'float32')
    before = x.copy()
    for trans in (False, True):
        bspmm_forward(adj, x, None, x, trans, algorithm)
        assert (x == before).all()


@every_case
def test_nan_and_infinity_propagate_as_in_dense(xp, kind, algorithm):
    dense = numpy.array([[1.0, numpy.nan, 0.0], [0.0, 1.0, 0.0], [0.0, 2.0, numpy.inf]], 'f')
    adj = contained(BatchedCSR.from_matrices([xp.asarray(dense)]), kind)
    x = xp.asarray(numpy.array([[1.0, 2.0], [3.0, 4.0], [5.0, numpy.nan]], 'f'))
    y = cuda.to_cpu(bspmm(adj, x, algorithm=algorithm).array)
    numpy.testing.assert_array_equal(
        y, [[numpy.nan, numpy.nan], [3.0, 4.0], [numpy.inf, numpy.nan]]
    )
    if takes_data(kind):
        data = xp.asarray(numpy.array([numpy.nan] * adj.nnz, 'f'))
        assert xp.isnan(bspmm(adj, x, data, algorithm=algorithm).array).all()


@every_case
def test_duplicates_are_multiplied_before_they_are_added(xp, kind, algorithm):
    values = xp.array([3e38, 3e38], 'f')  # whose sum is infinite
    adj = contained(BatchedCSR(xp.array([0, 2]), xp.array([0, 0]), xp.array([0, 1]), values), kind)
    x = xp.array([[1e-3, 1e-8]], 'f')
    for trans in (False, True):
        for data in (None, values) if takes_data(kind) else (None,):
            y = bspmm_forward(adj, x, data, None, trans, algorithm)
            assert_close(y, truth(adj, x, data, None, trans), 'float32')


@pytest.mark.parametrize(
    'xp, kind, algorithm',
    [case for case in CASES if case.values[:2] != ('cupy', 'coo')],
    indirect=['xp'],
)
def test_same_bits_every_time(xp, kind, algorithm):
    rng = numpy.random.RandomState(0)
    adj = batch_of(kind, 'dense blocks', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 33, 'float32')
    first = bspmm(adj, x, algorithm=algorithm).array
    for _ in range(3):
        assert (bspmm(adj, x, algorithm=algorithm).array == first).all()


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    sizes=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=6),
    n_channels=strategies.integers(0, 9),
    n_relations=strategies.integers(1, 3),
    symmetric=strategies.booleans(),
    seed=strategies.integers(0, 2**31 - 1),
    dtype=strategies.sampled_from(DTYPES),
    trans=strategies.booleans(),
    kind=strategies.sampled_from(sorted(ALGORITHMS)),
)
def test_random_batches(kind, sizes, n_channels, n_relations, symmetric, seed, dtype, trans):
    rng = numpy.random.RandomState(seed)
    adj = contained(
        BatchedCSR.from_matrices(
            [random_matrix(rng, n, n_relations, symmetric) for n in sizes]
        ).astype(dtype),
        kind,
    )
    x = features(rng, numpy, adj.n_rows if trans else adj.n_cols, n_channels, dtype)
    assert_close(bspmm_forward(adj, x, trans=trans), truth(adj, x, trans=trans), dtype)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_runs_on_the_device_of_its_arrays():
    rng = numpy.random.RandomState(0)
    adj = BATCHES['many'].astype('f').to_device('@cupy:1')
    with cuda.get_device_from_id(1):
        x = features(rng, cuda.cupy, adj.n_cols, 8, 'float32')
        top = features(rng, cuda.cupy, adj.n_graphs, 8, 'float32')
        data = features(rng, cuda.cupy, adj.nnz, 1, 'float32')[:, 0]
    calls = [
        (products_of_csr, 'bspmm', adj, x),
        (products_of_csr, 'bspmm', adj, x, data, None, True),
        (products_of_csr, 'bsddmm', adj, x, x),
        (segments, 'segment_sum', x, adj.row_offsets),
        (segments, 'segment_max', x, adj.row_offsets),
    ]
    with cuda.get_device_from_id(0):  # another one is current
        results = [getattr(room, name + '_forward')(*arguments) for room, name, *arguments in calls]
        spread = segment_broadcast_forward(top, adj.row_offsets, adj.n_rows)
        assert cuda.Device().id == 0
    for (_, name, *arguments), y in zip(calls, results):
        assert y.device.id == 1
        assert_close(y, getattr(reference, name)(*arguments), 'float32')
    assert spread.device.id == 1
    assert_close(spread, reference.segment_broadcast(top, adj.row_offsets), 'float32')


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """The last rows lie past element 2**31 of x and y."""
    n, n_channels = 2**21 + 7, 1024
    cupy = cuda.cupy
    if cupy.cuda.runtime.memGetInfo()[0] < 20 * 2**30:
        pytest.skip('needs 20 GB of GPU memory')
    offsets = cupy.array([0, n], 'i')
    # Row i holds column n - 1 - i: every product crosses from one end to the other.
    adj = BatchedCSR(cupy.arange(n + 1, dtype='i'), cupy.arange(n - 1, -1, -1, dtype='i'), offsets)
    x = cupy.broadcast_to(cupy.arange(n, dtype='i')[:, None] % 1000, (n, n_channels)).astype('e')
    y = bspmm_forward(adj, x)
    assert y.size > 2**31
    for rows in (slice(0, 5), slice(n - 5, n)):
        assert (y[rows] == x[::-1][rows]).all()
    w = bsddmm_forward(adj, y[:, :1024], x)
    expected = 1024.0 * (x[::-1, 0].astype('d') ** 2)
    assert cupy.allclose(w[expected < 6e4].astype('d'), expected[expected < 6e4], rtol=1e-3)
    top = segment_max_forward(y, offsets)
    assert (top == 999).all()
    assert (segment_broadcast_forward(top, offsets, n)[-3:] == 999).all()


# --- gradients ---


def _gradient_cases():
    for case in CASES:
        _, kind, algorithm = case.values
        every = ('x', 'x data', 'x residual', 'x data residual')
        if (kind, algorithm) == ('csr', 'auto'):
            yield from (_with(case, given, 3, name) for given in every for name in GRADIENT_BATCHES)
            continue
        # SELL has tiles of up to eight columns.
        given, n_channels = ('x data residual', 3) if takes_data(kind) else ('x residual', 9)
        for name in ('empty graphs first, between, last', 'four relations', 'rectangular'):
            yield _with(case, given, n_channels, name)


@pytest.mark.parametrize(
    'xp, kind, algorithm, given, n_channels, name', list(_gradient_cases()), indirect=['xp']
)
def test_gradients(xp, kind, algorithm, given, n_channels, name):
    rng = numpy.random.RandomState(0)
    adj = batch_of(kind, name, xp, 'float64')
    inputs = [features(rng, xp, adj.n_cols, n_channels, 'float64')]
    if 'data' in given:
        inputs.append(features(rng, xp, adj.nnz, 1, 'float64')[:, 0])
    if 'residual' in given:
        inputs.append(features(rng, xp, adj.n_rows, n_channels, 'float64'))

    def product(*arguments):
        # squared, so that the second derivatives do not vanish
        return bspmm(adj, algorithm=algorithm, **dict(zip(given.split(), arguments))) ** 2

    check_gradients(product, *inputs)


@every_case
def test_padded_shape(xp, kind, algorithm):
    rng = numpy.random.RandomState(0)
    adj = contained(
        BatchedCSR.from_matrices([xp.asarray(random_matrix(rng, n, 2)) for n in (3, 4)], 'padded'),
        kind,
    )
    inputs = {
        'x': features(rng, xp, 16, 3, 'float64').reshape(2, 8, 3),
        'residual': features(rng, xp, 8, 3, 'float64').reshape(2, 4, 3),
    }
    if takes_data(kind):
        inputs['data'] = features(rng, xp, adj.nnz, 1, 'float64')[:, 0]
    assert_close(bspmm(adj, algorithm=algorithm, **inputs).array, truth(adj, **inputs), 'float64')
    check_gradients(
        lambda *arrays: bspmm(adj, algorithm=algorithm, **dict(zip(inputs, arrays))) ** 2,
        *inputs.values(),
    )


def test_third_derivative():
    rng = numpy.random.RandomState(0)
    adj = BATCHES['symmetric']
    x = chainer.Variable(features(rng, numpy, adj.n_cols, 2, 'float64'))
    data = chainer.Variable(adj.data.copy())
    total = chainer.functions.sum(bspmm(adj, x, data) ** 3)
    for _ in range(3):
        gx, gd = chainer.grad([total], [x, data], enable_double_backprop=True)
        total = chainer.functions.sum(gx * gx) + chainer.functions.sum(gd * gd)
    assert numpy.isfinite(total.array)


def test_algorithm_by_name_runs_in_every_derivative(monkeypatch):
    taken = set()

    def note(adj, x, data, residual, trans, algorithm):
        taken.add((algorithm, trans, data is not None))
        return bspmm_forward(adj, x, data, residual, trans)

    monkeypatch.setattr(products_of_csr.BatchedSpMM, 'product', staticmethod(note))
    monkeypatch.setattr(products_of_csr.check, 'algorithm', lambda *_: None)
    rng = numpy.random.RandomState(0)
    adj = BATCHES['four relations']
    x = chainer.Variable(features(rng, numpy, adj.n_cols, 2, 'float64'))
    data = chainer.Variable(features(rng, numpy, adj.nnz, 1, 'float64')[:, 0])
    y = bspmm(adj, x, data, algorithm='vector')
    first = chainer.grad([chainer.functions.sum(y**2)], [x, data], enable_double_backprop=True)
    chainer.grad([chainer.functions.sum(g**2) for g in first], [x, data])
    assert taken == {('vector', False, True), ('vector', True, True)}


@every_case_and_dtype
def test_gradient_values_and_dtype(xp, kind, algorithm, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_of(kind, 'four relations', xp, dtype)
    edge_values = features(rng, xp, adj.nnz, 1, dtype)[:, 0]
    for data in (None, edge_values) if takes_data(kind) else (None,):
        x = chainer.Variable(features(rng, xp, adj.n_cols, 33, dtype))
        residual = chainer.Variable(features(rng, xp, adj.n_rows, 33, dtype))
        values = None if data is None else chainer.Variable(data)
        y = bspmm(adj, x, values, residual, algorithm=algorithm)
        gy = features(rng, xp, adj.n_rows, 33, dtype)
        y.grad = gy
        y.backward()
        assert_close(x.grad, truth(adj, gy, data, trans=True), dtype)
        assert (residual.grad == gy).all()
        if data is not None:
            assert_close(values.grad, reference.bsddmm(adj, gy, x.array), dtype)


def test_product_without_edge_values_keeps_no_input():
    adj = BATCHES['many']
    x = chainer.Variable(numpy.ones((adj.n_cols, 2)))
    freed = weakref.ref(x.array)
    y = bspmm(adj, x)
    del x
    assert y.creator_node is not None and freed() is None


# --- what is refused, before anything is launched ---


def small():
    return BatchedCSR.from_matrices([numpy.array([[2.0, 1.0], [0.0, 1.0]], 'f'), ones(1, 1)])


def ones(*shape, dtype='f'):
    return numpy.ones(shape, dtype)


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        (
            (numpy.ones((1, 2, 2)), ones(3, 2)),
            TypeError,
            r'adj: expected a BatchedCSR, got ndarray of shape '
            r'\(1, 2, 2\); .*concat_mols',
        ),
        ((None, ones(3, 2)), TypeError, 'adj: expected a BatchedCSR, got NoneType'),
        ((small(), ones(4, 2)), ValueError, r'x: expected shape \(3, n_B\) .* got \(4, 2\)'),
        ((small(), ones(3)), ValueError, r'x: expected shape \(3, n_B\) .* got \(3,\)'),
        ((small(), ones(1, 3, 2)), ValueError, r'x: expected shape .* got \(1, 3, 2\)'),
        ((small(), ones(3, 2, dtype='i')), TypeError, 'x: expected float16, .* got int32'),
        (
            (small(), ones(3, 2, dtype='d')),
            TypeError,
            r'x: expected float32 as the values of adj, got float64; adj.astype',
        ),
        ((small(), ones(3, 2), ones(3)), ValueError, r'data: expected shape \(4,\), .* got \(3,\)'),
        (
            (small(), ones(3, 2), ones(4, 1)),
            ValueError,
            r'data: expected shape \(4,\), .* got \(4, 1\)',
        ),
        (
            (small(), ones(3, 2), ones(4, dtype='d')),
            TypeError,
            'data: expected float32, got float64',
        ),
        (
            (small(), ones(3, 2), None, ones(3, 3)),
            ValueError,
            r'residual: expected shape \(3, 2\), .* got \(3, 3\)',
        ),
        (
            (small(), ones(3, 2), None, ones(3, 2, dtype='d')),
            TypeError,
            'residual: expected float32, got float64',
        ),
    ],
)
def test_bad_input(monkeypatch, arguments, error, message):
    monkeypatch.setattr(products_of_csr, 'matrix_on_host', lambda *_: pytest.fail('launched'))
    with pytest.raises(error, match=message):
        functions.bspmm(*arguments)


@pytest.mark.parametrize(
    'kind, algorithm',
    [(kind, algorithm) for kind, names in ALGORITHMS.items() for algorithm in (*names, 'vektor')],
)
def test_kernel_on_arrays_of_the_cpu(kind, algorithm):
    adj = contained(BATCHES['one graph'], kind)
    with pytest.raises(ValueError, match="^algorithm on a CPU: .*'auto'.*%s" % algorithm):
        bspmm(adj, numpy.ones((adj.n_cols, 2)), algorithm=algorithm)


@pytest.mark.gpu
@pytest.mark.parametrize('kind', ALGORITHMS)
def test_unknown_algorithm(kind):
    adj = batch_of(kind, 'one graph', cuda.cupy, 'float32')
    with pytest.raises(
        ValueError, match="^algorithm: expected .*%r.*, got 'vektor'" % (list(ALGORITHMS[kind])[-1])
    ):
        room = functions if kind == 'csr' else papers
        room.bspmm(adj, cuda.cupy.ones((adj.n_cols, 2), 'f'), algorithm='vektor')


def test_bad_shape_for_relations():
    adj = BatchedCSR.from_matrices([ones(3, 2, 2)])
    message = r'x: expected shape \(6, n_B\) .*3 relations.* got \(2, 4\)'
    with pytest.raises(ValueError, match=message):
        bspmm(adj, ones(2, 4))


def test_bad_shape_for_padded():
    adj = BatchedCSR.from_matrices([ones(2, 2), ones(1, 1)], 'padded')
    message = r'x: expected shape \(4, n_B\) or \(2, 2, n_B\) .* got \(4, 1, 2\)'
    with pytest.raises(ValueError, match=message):
        bspmm(adj, ones(4, 1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize('argument', ['x', 'data', 'residual'])
def test_argument_on_another_device(argument):
    adj = small().to_device('@cupy:0')
    good = {'x': ones(3, 2), 'data': ones(4), 'residual': ones(3, 2)}
    arguments = {name: cuda.to_gpu(array) for name, array in good.items()}
    arguments[argument] = good[argument]
    with pytest.raises(ValueError, match='%s: expected on .*cupy:0.* got on .*numpy' % argument):
        functions.bspmm(adj, **arguments)
    with pytest.raises(ValueError, match='x: expected on .*numpy.* got on .*cupy:0'):
        bspmm(small(), cuda.to_gpu(ones(3, 2)))
