"""`bspmm`: values, launches, gradients and second derivatives, refusals."""

import functools
import weakref

import hypothesis
from hypothesis import strategies
import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR, papers
from chainer_bspmm.cuda.plans import widest_vector
from chainer_bspmm.functions import bspmm
from chainer_bspmm.ops import bspmm as module
from chainer_bspmm.ops import segments
from chainer_bspmm.ops.bspmm import ALGORITHMS, bsddmm_forward, bspmm_forward, csr_launch
from chainer_bspmm.ops.segments import segment_broadcast_forward, segment_max_forward
from tests import support
from tests.emulation.kernel_cases import (
    batch,
    BATCHES,
    CHANNELS_OF_DTYPES,
    CSR_VARIANTS,
    integers,
    with_room,
)
from tests.support import (
    assert_close,
    assert_exact,
    batch_on,
    DTYPES,
    features,
    random_matrix,
    reference,
)
from tests.support.cases import pairs
from tests.support.gradients import check_gradients, GRADIENT_BATCHES
from tests.support.products import (
    check_duplicates,
    check_nan,
    check_product,
    check_three_dimensions,
    diagonal,
    empty_results,
)


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels):
    check_product(place, batch('small' if n_channels > 64 else 'mixed', dtype), dtype, n_channels)


# (source of the values, whether the matrix is transposed, constant of the launch)
VALUES = (
    ('ones', False, 0),
    ('ones', True, 0),
    ('own', True, 1),
    ('given', 0, 1),
    ('given', True, 2),
)


@pytest.mark.parametrize(
    'width, values, with_residual', pairs([('e', 8), ('f', 3)], VALUES, [False, True]), ids=str
)
def test_values(place, width, values, with_residual):
    dtype, n_channels = width
    values, trans, weights = values
    check_product(place, batch('relations', dtype), dtype, n_channels, values, with_residual, trans)
    assert {defines['WEIGHTS'] for defines in place.launched if 'WEIGHTS' in defines} <= {weights}


@pytest.mark.parametrize('trans', [False, True])
def test_values_of_a_symmetric_pattern(place, trans):
    """A symmetric pattern is its own transpose, but values passed with it need not be symmetric."""
    matrix = abs(integers((9, 9), 'f')) > 150
    adj = BatchedCSR.from_matrices([(matrix | matrix.T).astype('f')])
    assert adj.T is adj
    data = integers(adj.nnz, 'f', seed=4)
    assert (data != data[adj.transpose_order]).any()
    check_product(place, adj, 'f', 3, 'given', True, trans)


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', BATCHES)
def test_batches(place, name, trans):
    check_product(place, batch(name, 'f'), 'f', 3, 'given', True, trans)


@pytest.mark.parametrize(
    'name, dtype',
    [
        *((name, 'float32') for name in support.BATCHES),
        *((name, dtype) for name in ('many', 'ones') for dtype in ('float16', 'float64')),
    ],
)
def test_other_batches(xp, name, dtype):
    """Batches are symmetric, rectangular, of ones only, or have a huge graph among tiny ones."""
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    data = features(rng, xp, adj.nnz, 1, dtype)[:, 0]
    for trans in (False, True):
        x, residual = (features(rng, xp, n, 33, dtype) for n in adj.shape[:: 1 if trans else -1])
        for values in (None, data):
            expected = reference.bspmm(adj, x, values, None, trans)
            assert_close(bspmm_forward(adj, x, values, None, trans), expected, dtype)
            expected = expected + cuda.to_cpu(residual)
            y = bspmm_forward(adj, x, values, residual, trans)
            assert_close(y, expected, dtype)
            assert y.tobytes() == bspmm_forward(adj, x, values, residual, trans).tobytes()


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    sizes=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=6),
    n_channels=strategies.integers(0, 9),
    n_relations=strategies.integers(1, 3),
    symmetric=strategies.booleans(),
    seed=strategies.integers(0, 2**31 - 1),
    dtype=strategies.sampled_from(DTYPES),
    trans=strategies.booleans(),
)
def test_random_batches(sizes, n_channels, n_relations, symmetric, seed, dtype, trans):
    rng = numpy.random.RandomState(seed)
    matrices = [random_matrix(rng, n, n_relations, symmetric) for n in sizes]
    adj = BatchedCSR.from_matrices(matrices).astype(dtype)
    x = features(rng, numpy, adj.n_rows if trans else adj.n_cols, n_channels, dtype)
    assert_close(bspmm_forward(adj, x, trans=trans), reference.bspmm(adj, x, trans=trans), dtype)


def test_input_of_three_dimensions_that_is_not_contiguous(place):
    check_three_dimensions(place, batch('padded', 'f'))


def test_subclass_of_ndarray(tmp_path):
    adj = support.BATCHES['one graph'].astype('f')
    x = numpy.memmap(tmp_path / 'x', 'f', 'w+', shape=(5, 2))
    x[...] = numpy.arange(10).reshape(5, 2)
    assert_close(bspmm(adj, x).array, reference.bspmm(adj, x), 'float32')


# A row that has fewer entries than are loaded at once loads its last entry again. That must not be
# added again, not even times 0, because it may be NaN or infinite.
@pytest.mark.parametrize('algorithm', ['auto', 'vector', 'pipelined'])
@pytest.mark.parametrize('dtype', 'efd')
def test_nan_reaches_its_rows_only(place, dtype, algorithm):
    check_nan(place, dtype, functools.partial(bspmm_forward, algorithm=algorithm))


def test_duplicates_are_multiplied_before_they_are_added(place):
    check_duplicates(place)


@empty_results
def test_empty_result_launches_nothing(place, n_nodes, n_channels):
    adj = diagonal(n_nodes)
    x = chainer.Variable(place.put(numpy.zeros((adj.n_cols, n_channels), 'f')))
    y = bspmm(place.put(adj), x)
    assert y.shape == x.shape and y.dtype == 'f'
    y.grad = x.array
    y.backward()
    assert x.grad.shape == x.shape and not place.launched


@pytest.mark.parametrize(
    'variant, values, name',
    pairs(
        CSR_VARIANTS,
        [('ones', False), ('own', False), ('given', True)],
        ['mixed', 'duplicates', 'empty graphs', 'relations'],
    ),
    ids=str,
)
def test_variants(gpu, monkeypatch, variant, values, name):
    dtype, n_channels, options = variant
    values, trans = values
    adj = batch(name, dtype)
    n_rows, n_cols = (adj.n_cols, adj.n_rows) if trans else (adj.n_rows, adj.n_cols)
    width = widest_vector(n_channels, numpy.dtype(dtype).itemsize, 0)
    plan = csr_launch(n_rows, n_cols, n_channels, width, block=32, **options)
    monkeypatch.setattr(module, 'bspmm_launch', lambda *_: plan)
    check_product(gpu, adj, dtype, n_channels, values, True, trans)
    assert gpu.launched[-1]['COLUMNS'] == options.get('columns', 1)
    assert gpu.launched[-1]['PIPELINED'] == ('rows_per_thread' in options)


@pytest.mark.parametrize('grid', [(2, 3), (3, 2)])
def test_tiles_in_two_dimensions_of_the_grid(gpu, monkeypatch, grid):
    adj = batch('small', 'f')
    plan = csr_launch(adj.n_rows, adj.n_cols, 8 * 5 * 4, 4, 8)
    plan = plan._replace(grid=(plan.grid[0], *grid))
    monkeypatch.setattr(module, 'bspmm_launch', lambda *_: plan)
    check_product(gpu, adj, 'f', 8 * 5 * 4, with_residual=True)


def test_offsets_of_64_bits(gpu, monkeypatch):
    adj = batch('small', 'f')
    plan = csr_launch(adj.n_rows, adj.n_cols, 8, 4, 2)
    defines = tuple((name, 'size_t' if name == 'OFFSET' else value) for name, value in plan.defines)
    monkeypatch.setattr(module, 'bspmm_launch', lambda *_: plan._replace(defines=defines))
    check_product(gpu, adj, 'f', 8)
    assert gpu.launched[-1]['OFFSET'] == 'size_t'


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_capacity_beyond_the_batch(gpu, algorithm):
    adj = batch('small', 'f')
    larger = with_room(adj, 5)
    x = integers((larger.n_cols, 4), 'f')
    y = bspmm_forward(gpu.put(larger), gpu.put(x), algorithm=algorithm)
    assert_exact(y, reference.bspmm(larger, x), 'f')
    assert not y[adj.n_rows :].any()


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_runs_on_the_device_of_its_arrays():
    rng = numpy.random.RandomState(0)
    adj = support.BATCHES['many'].astype('f').to_device('@cupy:1')
    with cuda.get_device_from_id(1):
        x = features(rng, cuda.cupy, adj.n_cols, 8, 'float32')
        top = features(rng, cuda.cupy, adj.n_graphs, 8, 'float32')
        data = features(rng, cuda.cupy, adj.nnz, 1, 'float32')[:, 0]
    calls = [
        (module, 'bspmm', adj, x),
        (module, 'bspmm', adj, x, data, None, True),
        (module, 'bsddmm', adj, x, x),
        (segments, 'segment_sum', x, adj.row_offsets),
        (segments, 'segment_max', x, adj.row_offsets),
    ]
    with cuda.get_device_from_id(0):  # the arrays are on another GPU
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
    n = 2**21 + 7
    n_channels = 1024
    cupy = cuda.cupy
    if cupy.cuda.runtime.memGetInfo()[0] < 20 * 2**30:
        pytest.skip('needs 20 GB of GPU memory')
    offsets = cupy.array([0, n], 'i')
    # Row i has an entry in column n - 1 - i, so every product needs the opposite end of x.
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


@pytest.mark.parametrize(
    'name, given',
    [
        *((name, 'x data residual') for name in GRADIENT_BATCHES),
        *(('four relations', given) for given in ('x', 'x data', 'x residual')),
    ],
)
def test_gradients(xp, name, given):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float64')
    inputs = [features(rng, xp, adj.n_cols, 3, 'float64')]
    if 'data' in given:
        inputs.append(features(rng, xp, adj.nnz, 1, 'float64')[:, 0])
    if 'residual' in given:
        inputs.append(features(rng, xp, adj.n_rows, 3, 'float64'))
    # the square has second derivatives
    check_gradients(lambda *arrays: bspmm(adj, **dict(zip(given.split(), arrays))) ** 2, *inputs)


def test_padded_shape(xp):
    rng = numpy.random.RandomState(0)
    matrices = [xp.asarray(random_matrix(rng, n, 2)) for n in (3, 4)]
    adj = BatchedCSR.from_matrices(matrices, 'padded')
    x = features(rng, xp, 16, 3, 'float64').reshape(2, 8, 3)
    data = features(rng, xp, adj.nnz, 1, 'float64')[:, 0]
    residual = features(rng, xp, 8, 3, 'float64').reshape(2, 4, 3)
    y = bspmm(adj, x, data, residual).array
    assert_close(y, reference.bspmm(adj, x, data, residual), 'float64')
    check_gradients(lambda *given: bspmm(adj, *given) ** 2, x, data, residual)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('has_data', [False, True])
def test_gradients_in_every_dtype(xp, dtype, has_data):
    rng = numpy.random.RandomState(0)
    adj = batch_on('four relations', xp, dtype)
    x = chainer.Variable(features(rng, xp, adj.n_cols, 33, dtype))
    residual = chainer.Variable(features(rng, xp, adj.n_rows, 33, dtype))
    gy = features(rng, xp, adj.n_rows, 33, dtype)
    data = features(rng, xp, adj.nnz, 1, dtype)[:, 0] if has_data else None
    values = chainer.Variable(data) if has_data else None
    y = bspmm(adj, x, values, residual)
    y.grad = gy
    y.backward()
    assert_close(x.grad, reference.bspmm(adj, gy, data, trans=True), dtype)
    assert (residual.grad == gy).all()
    if has_data:
        assert_close(values.grad, reference.bsddmm(adj, gy, x.array), dtype)


def test_algorithm_by_name_runs_in_every_derivative(monkeypatch):
    taken = set()

    def note(adj, x, data, residual, trans, algorithm):
        taken.add((algorithm, trans, data is not None))
        return bspmm_forward(adj, x, data, residual, trans)

    monkeypatch.setattr(module.BatchedSpMM, 'product', staticmethod(note))
    monkeypatch.setattr(module.check, 'algorithm', lambda *_: None)
    rng = numpy.random.RandomState(0)
    adj = support.BATCHES['four relations']
    x = chainer.Variable(features(rng, numpy, adj.n_cols, 2, 'float64'))
    data = chainer.Variable(features(rng, numpy, adj.nnz, 1, 'float64')[:, 0])
    y = bspmm(adj, x, data, algorithm='vector')
    first = chainer.grad([chainer.functions.sum(y**2)], [x, data], enable_double_backprop=True)
    chainer.grad([chainer.functions.sum(g**2) for g in first], [x, data])
    assert taken == {('vector', False, True), ('vector', True, True)}


def test_product_without_edge_values_keeps_no_input():
    adj = support.BATCHES['many']
    x = chainer.Variable(numpy.ones((adj.n_cols, 2)))
    freed = weakref.ref(x.array)
    y = bspmm(adj, x)
    del x
    assert y.creator_node is not None and freed() is None


def ones(*shape, dtype='f'):
    return numpy.ones(shape, dtype)


SMALL = BatchedCSR.from_matrices([numpy.array([[2.0, 1.0], [0.0, 1.0]], 'f'), ones(1, 1)])


@pytest.mark.parametrize(
    'changes, error, message',
    [
        (
            {'adj': ones(1, 2, 2)},
            TypeError,
            r'adj: .* got ndarray of shape \(1, 2, 2\); .*_mols, arrays with '
            'BatchedCSR.from_dense',
        ),
        (
            {'adj': None},
            TypeError,
            'adj: expected a BatchedCSR, got NoneType; data sets become .* with '
            'BatchedCSR.from_dense',
        ),
        ({'x': ones(4, 2)}, ValueError, r'x: expected shape \(3, n_B\) .* got \(4, 2\)'),
        ({'x': ones(3)}, ValueError, r'x: expected shape \(3, n_B\) .* got \(3,\)'),
        ({'x': [[1.0], [2.0], [3.0]]}, TypeError, 'x: expected a NumPy or CuPy array, got list'),
        ({'x': ones(1, 3, 2)}, ValueError, r'x: expected shape .* got \(1, 3, 2\)'),
        ({'x': ones(3, 2, dtype='i')}, TypeError, 'x: expected float16, .* got int32'),
        (
            {'x': ones(3, 2, dtype='d')},
            TypeError,
            r'x: .* float32, like the values .* adj.astype\(x.dtype\) converts',
        ),
        ({'data': ones(3)}, ValueError, r'data: expected shape \(4,\), .* got \(3,\)'),
        ({'data': ones(4, 1)}, ValueError, r'data: expected shape \(4,\), .* got \(4, 1\)'),
        ({'data': ones(4, dtype='d')}, TypeError, 'data: expected float32, got float64'),
        ({'residual': ones(3, 3)}, ValueError, r'residual: expected shape \(3, 2\), .* \(3, 3\)'),
        ({'residual': ones(3, 2, dtype='d')}, TypeError, 'residual: expected float32, got float64'),
        (
            {'adj': BatchedCSR.from_matrices([ones(3, 2, 2)]), 'x': ones(2, 4)},
            ValueError,
            r'x: expected shape \(6, n_B\) .*3 relations.* got \(2, 4\)',
        ),
        (
            {'adj': BatchedCSR.from_matrices([ones(2, 2)] * 2, 'padded'), 'x': ones(4, 1, 2)},
            ValueError,
            r'x: expected shape \(4, n_B\) or \(2, 2, n_B\) .* got \(4, 1, 2\)',
        ),
        *(
            (
                {'algorithm': name},
                ValueError,
                "^algorithm on a CPU: expected one of 'auto', got '%s'$" % name,
            )
            for name in (ALGORITHMS[-1], 'vektor')
        ),
    ],
)
def test_bad_input(monkeypatch, changes, error, message):
    monkeypatch.setattr(module, 'matrix_on_host', lambda *_: pytest.fail('launched'))
    with pytest.raises(error, match=message):
        bspmm(**{'adj': SMALL, 'x': ones(3, 2), **changes})


@pytest.mark.parametrize('argument', ['data', 'residual'])
@pytest.mark.parametrize('function', [bspmm, papers.bspmm])
def test_a_parameter_that_is_not_initialised(function, argument):
    parameter = chainer.Parameter(chainer.initializers.Normal())
    message = '^%s: expected an array, got an uninitialised Parameter$' % argument
    with pytest.raises(ValueError, match=message):
        function(SMALL, ones(3, 2), **{argument: parameter})


def test_unknown_algorithm(gpu):
    message = "^algorithm: expected .*%r.*, got 'vektor'" % ALGORITHMS[-1]
    with pytest.raises(ValueError, match=message):
        bspmm(gpu.put(SMALL), gpu.put(ones(3, 2)), algorithm='vektor')
    assert not gpu.launched


@pytest.mark.gpu
@pytest.mark.parametrize('argument', ['x', 'data', 'residual'])
def test_argument_on_another_device(argument):
    adj = SMALL.to_device('@cupy:0')
    good = {'x': ones(3, 2), 'data': ones(4), 'residual': ones(3, 2)}
    arguments = {name: cuda.to_gpu(array) for name, array in good.items()}
    arguments[argument] = good[argument]
    with pytest.raises(
        ValueError, match='%s: expected an array on .*cupy:0.* got one on .*numpy' % argument
    ):
        bspmm(adj, **arguments)
    with pytest.raises(ValueError, match='x: expected an array on .*numpy.* got one on .*cupy:0'):
        bspmm(SMALL, cuda.to_gpu(ones(3, 2)))
