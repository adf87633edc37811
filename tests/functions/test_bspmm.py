"""bspmm: values, gradients to second order, edge values, residual, and what it refuses."""
import weakref

import hypothesis
from hypothesis import strategies
import numpy
import pytest

import chainer
from chainer import gradient_check
from chainer.backends import cuda
from chainer_chemistry.functions import matmul

from chainer_bspmm import backend
from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.functions import bspmm
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import WIDTHS


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
@pytest.mark.parametrize('trans', [False, True])
def test_product(xp, name, dtype, trans):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    for n_channels in WIDTHS:
        if n_channels == 1024 and name not in ('many', 'huge among tiny', 'lone nodes'):
            continue
        x = features(rng, xp, n_in, n_channels, dtype)
        residual = features(rng, xp, n_out, n_channels, dtype)
        data = features(rng, xp, adj.nnz, 1, dtype)[:, 0]
        for values in (None, data):
            for added in (None, residual):
                assert_close(backend.bspmm(adj, x, values, added, trans),
                             reference.bspmm(adj, x, values, added, trans), dtype)


def test_no_channels(xp):
    adj = batch_on('many', xp, 'float32')
    y = bspmm(adj, xp.empty((adj.n_cols, 0), 'f'))
    assert y.shape == (adj.n_rows, 0) and y.dtype == numpy.float32


def test_no_graphs(xp):
    adj = BatchedCSR(xp.array([0]), xp.array([], 'i'), xp.array([0]))
    x = chainer.Variable(xp.empty((0, 5), 'f'))
    y = bspmm(adj, x)
    assert y.shape == (0, 5)
    y.grad = xp.empty((0, 5), 'f')
    y.backward()
    assert x.grad.shape == (0, 5)


def test_result_is_a_matmul_of_every_block(xp):
    rng = numpy.random.RandomState(0)
    dense = numpy.stack([random_matrix(rng, 6) for _ in range(4)]).astype('f')
    x = features(rng, xp, 24, 5, 'float32').reshape(4, 6, 5)
    adj = BatchedCSR.from_dense(xp.asarray(dense))
    expected = matmul(xp.asarray(dense), x).array
    assert bspmm(adj, x).shape == (4, 6, 5)
    assert_close(bspmm(adj, x).array, cuda.to_cpu(expected).astype(float), 'float32')
    assert_close(bspmm(adj, x, residual=x).array, cuda.to_cpu(expected + x).astype(float),
                 'float32')


def test_sum_over_relations(xp):
    rng = numpy.random.RandomState(0)
    dense = [random_matrix(rng, n, 3).astype('f') for n in (4, 1, 7)]
    adj = BatchedCSR.from_matrices([xp.asarray(m) for m in dense])
    x = features(rng, xp, 12 * 3, 8, 'float32')
    blocks = numpy.split(cuda.to_cpu(x).astype(float).reshape(12, 3, 8), [4, 5])
    expected = numpy.concatenate(
        [numpy.einsum('rij,jrc->ic', m, block) for m, block in zip(dense, blocks)])
    assert_close(bspmm(adj, x).array, expected, 'float32')


@pytest.mark.parametrize('layout', ['transposed', 'strided columns', 'strided rows', 'offset'])
def test_input_that_is_not_contiguous(xp, layout):
    rng = numpy.random.RandomState(0)
    adj = batch_on('many', xp, 'float32')
    n = adj.n_cols
    x = {'transposed': features(rng, xp, 8, n, 'float32').T,
         'strided columns': features(rng, xp, n, 16, 'float32')[:, ::2],
         'strided rows': features(rng, xp, 2 * n, 8, 'float32')[::-2],
         # contiguous, but not aligned to a vector
         'offset': features(rng, xp, 1, n * 8 + 1, 'float32')[0, 1:].reshape(n, 8)}[layout]
    data = features(rng, xp, 2, adj.nnz, 'float32').T[:, 1]
    for values in (None, data):
        for trans in (False, True):
            assert_close(backend.bspmm(adj, x, values, x, trans),
                         reference.bspmm(adj, x, values, x, trans), 'float32')


def test_subclass_of_ndarray(tmp_path):
    adj = BATCHES['one graph'].astype('f')
    x = numpy.memmap(tmp_path / 'x', 'f', 'w+', shape=(5, 2))
    x[...] = numpy.arange(10).reshape(5, 2)
    assert_close(bspmm(adj, x).array, reference.bspmm(adj, x), 'float32')


def test_inputs_are_left_alone(xp):
    rng = numpy.random.RandomState(0)
    adj = batch_on('many', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 8, 'float32')
    before = x.copy()
    backend.bspmm(adj, x, None, x, False)
    backend.bspmm(adj, x, None, x, True)
    assert (x == before).all()


def test_nan_and_infinity_propagate_as_in_dense(xp):
    dense = numpy.array([[1., numpy.nan, 0.], [0., 1., 0.], [0., 2., numpy.inf]], 'f')
    adj = BatchedCSR.from_matrices([xp.asarray(dense)])
    x = xp.asarray(numpy.array([[1., 2.], [3., 4.], [5., numpy.nan]], 'f'))
    y = cuda.to_cpu(bspmm(adj, x).array)
    numpy.testing.assert_array_equal(
        y, [[numpy.nan, numpy.nan], [3., 4.], [numpy.inf, numpy.nan]])
    data = xp.asarray(numpy.array([numpy.nan] * adj.nnz, 'f'))
    assert xp.isnan(bspmm(adj, x, data).array).all()


def test_same_bits_every_time(xp):
    rng = numpy.random.RandomState(0)
    adj = batch_on('dense blocks', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 33, 'float32')
    first = bspmm(adj, x).array
    for _ in range(3):
        assert (bspmm(adj, x).array == first).all()


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(sizes=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=6),
                  n_channels=strategies.integers(0, 9), n_relations=strategies.integers(1, 3),
                  symmetric=strategies.booleans(), seed=strategies.integers(0, 2 ** 31 - 1),
                  dtype=strategies.sampled_from(DTYPES), trans=strategies.booleans())
def test_random_batches(sizes, n_channels, n_relations, symmetric, seed, dtype, trans):
    rng = numpy.random.RandomState(seed)
    adj = BatchedCSR.from_matrices(
        [random_matrix(rng, n, n_relations, symmetric) for n in sizes]).astype(dtype)
    x = features(rng, numpy, adj.n_rows if trans else adj.n_cols, n_channels, dtype)
    assert_close(backend.bspmm(adj, x, trans=trans), reference.bspmm(adj, x, trans=trans), dtype)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_runs_on_the_device_of_its_arrays():
    rng = numpy.random.RandomState(0)
    adj = BATCHES['many'].astype('f').to_device('@cupy:1')
    with cuda.get_device_from_id(1):
        x = features(rng, cuda.cupy, adj.n_cols, 8, 'float32')
    with cuda.get_device_from_id(0):  # another one is current
        y = backend.bspmm(adj, x)
        assert cuda.Device().id == 0
    assert y.device.id == 1
    assert_close(y, reference.bspmm(adj, x), 'float32')


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """The last rows lie past element 2**31 of x and y."""
    n, n_channels = 2 ** 21 + 7, 1024
    cupy = cuda.cupy
    if cupy.cuda.runtime.memGetInfo()[0] < 20 * 2 ** 30:
        pytest.skip('needs 20 GB of GPU memory')
    offsets = cupy.array([0, n], 'i')
    # Row i holds column n - 1 - i: every product crosses from one end to the other.
    adj = BatchedCSR(cupy.arange(n + 1, dtype='i'), cupy.arange(n - 1, -1, -1, dtype='i'), offsets)
    x = cupy.broadcast_to(cupy.arange(n, dtype='i')[:, None] % 1000, (n, n_channels)).astype('e')
    y = backend.bspmm(adj, x)
    assert y.size > 2 ** 31
    for rows in (slice(0, 5), slice(n - 5, n)):
        assert (y[rows] == x[::-1][rows]).all()
    w = backend.bsddmm(adj, y[:, :1024], x)
    expected = 1024. * (x[::-1, 0].astype('d') ** 2)
    assert cupy.allclose(w[expected < 6e4].astype('d'), expected[expected < 6e4], rtol=1e-3)
    top = backend.segment_max(y, offsets)
    assert (top == 999).all()
    assert (backend.segment_broadcast(top, offsets, n)[-3:] == 999).all()


# --- gradients ---

GRADIENT_BATCHES = ['empty graphs first, between, last', 'symmetric', 'symmetric ones',
                    'four relations', 'duplicates, unsorted', 'rectangular', 'no entries']


def check_gradients(function, *inputs, order=2):
    rng = numpy.random.RandomState(9)
    xp = chainer.backend.get_array_module(inputs[0])

    def random_like(array):
        return xp.asarray(rng.uniform(-1, 1, array.shape).astype(array.dtype))

    gy = random_like(function(*inputs).array)
    gradient_check.check_backward(function, inputs, gy, dtype='d', atol=1e-6, rtol=1e-6)
    gradient_check.check_double_backward(
        function, inputs, gy, tuple(random_like(x) for x in inputs), dtype='d', atol=1e-6,
        rtol=1e-6)


@pytest.mark.parametrize('name', GRADIENT_BATCHES)
@pytest.mark.parametrize('given', ['x', 'x data', 'x residual', 'x data residual'])
def test_gradients(xp, name, given):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float64')
    inputs = [features(rng, xp, adj.n_cols, 3, 'float64')]
    if 'data' in given:
        inputs.append(features(rng, xp, adj.nnz, 1, 'float64')[:, 0])
    if 'residual' in given:
        inputs.append(features(rng, xp, adj.n_rows, 3, 'float64'))

    def product(*arguments):
        # squared, so that the second derivatives do not vanish
        return bspmm(adj, **dict(zip(given.split(), arguments))) ** 2

    check_gradients(product, *inputs)


def test_gradients_in_padded_shape(xp):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([xp.asarray(random_matrix(rng, n, 2)) for n in (3, 4)], 'padded')
    x = features(rng, xp, 16, 3, 'float64').reshape(2, 8, 3)
    data = features(rng, xp, adj.nnz, 1, 'float64')[:, 0]
    residual = features(rng, xp, 8, 3, 'float64').reshape(2, 4, 3)
    check_gradients(lambda x, d, r: bspmm(adj, x, d, r) ** 2, x, data, residual)


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


@pytest.mark.parametrize('dtype', DTYPES)
def test_gradient_values_and_dtype(xp, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on('four relations', xp, dtype)
    x = chainer.Variable(features(rng, xp, adj.n_cols, 33, dtype))
    data = chainer.Variable(features(rng, xp, adj.nnz, 1, dtype)[:, 0])
    residual = chainer.Variable(features(rng, xp, adj.n_rows, 33, dtype))
    y = bspmm(adj, x, data, residual)
    gy = features(rng, xp, adj.n_rows, 33, dtype)
    y.grad = gy
    y.backward()
    assert_close(x.grad, reference.bspmm(adj, gy, data.array, trans=True), dtype)
    assert_close(data.grad, reference.bsddmm(adj, gy, x.array), dtype)
    assert (residual.grad == gy).all()


def test_product_without_edge_values_keeps_no_input():
    adj = BATCHES['many']
    x = chainer.Variable(numpy.ones((adj.n_cols, 2)))
    freed = weakref.ref(x.array)
    y = bspmm(adj, x)
    del x
    assert y.creator_node is not None and freed() is None


# --- what is refused, before anything is launched ---

def small():
    return BatchedCSR.from_matrices([numpy.array([[2., 1.], [0., 1.]], 'f'), ones(1, 1)])


def ones(*shape, dtype='f'):
    return numpy.ones(shape, dtype)


@pytest.mark.parametrize('arguments, error, message', [
    ((numpy.ones((1, 2, 2)), ones(3, 2)), TypeError,
     r'adj: expected a BatchedCSR or BatchedCOO or BatchedSELL, got ndarray of shape '
     r'\(1, 2, 2\); .*concat_mols'),
    ((None, ones(3, 2)), TypeError, 'adj: expected a BatchedCSR or .* BatchedSELL, got NoneType'),
    ((small(), ones(4, 2)), ValueError, r'x: expected shape \(3, n_B\) .* got \(4, 2\)'),
    ((small(), ones(3)), ValueError, r'x: expected shape \(3, n_B\) .* got \(3,\)'),
    ((small(), ones(1, 3, 2)), ValueError, r'x: expected shape .* got \(1, 3, 2\)'),
    ((small(), ones(3, 2, dtype='i')), TypeError, 'x: expected float16, .* got int32'),
    ((small(), ones(3, 2, dtype='d')), TypeError,
     r'x: expected float32 as the values of adj, got float64; adj.astype'),
    ((small(), ones(3, 2), ones(3)), ValueError, r'data: expected shape \(4,\), .* got \(3,\)'),
    ((small(), ones(3, 2), ones(4, 1)), ValueError,
     r'data: expected shape \(4,\), .* got \(4, 1\)'),
    ((small(), ones(3, 2), ones(4, dtype='d')), TypeError, 'data: expected float32, got float64'),
    ((small(), ones(3, 2), None, ones(3, 3)), ValueError,
     r'residual: expected shape \(3, 2\), .* got \(3, 3\)'),
    ((small(), ones(3, 2), None, ones(3, 2, dtype='d')), TypeError,
     'residual: expected float32, got float64'),
])
def test_bad_input(monkeypatch, arguments, error, message):
    monkeypatch.setattr(backend.cpu, 'bspmm', lambda *_: pytest.fail('launched'))
    with pytest.raises(error, match=message):
        bspmm(*arguments)


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
        backend.bspmm(adj, **arguments)
    with pytest.raises(ValueError, match='x: expected on .*numpy.* got on .*cupy:0'):
        bspmm(small(), cuda.to_gpu(ones(3, 2)))
