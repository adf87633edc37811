"""bspmm and bsddmm with a BatchedCOO: values, gradients to second order, what they refuse."""
import numpy
import pytest

import chainer

from chainer_bspmm import backend
from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.functions import bsddmm
from chainer_bspmm.functions import bspmm
from tests.functions.test_bspmm import check_gradients
from tests.functions.test_bspmm import GRADIENT_BATCHES
from tests.support import assert_close
from tests.support import BATCHES
from tests.support import coo_batch_on
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import WIDTHS

GPU_ALGORITHMS = ('st', 'st_shared', 'st_blocked', 'st_global')


def algorithms_on(xp):
    return ('auto',) if xp is numpy else ('auto',) + GPU_ALGORITHMS


def fits(algorithm, adj, n_channels, dtype, trans):
    """Whether a kernel forced by name can hold the output; none of BATCHES has 4096 rows."""
    n_rows = adj.max_cols if trans else adj.max_rows
    return algorithm != 'st_shared' or (
        n_rows * n_channels * numpy.dtype(dtype).itemsize <= 32 * 1024)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
@pytest.mark.parametrize('trans', [False, True])
def test_product(xp, name, dtype, trans):
    rng = numpy.random.RandomState(0)
    adj = coo_batch_on(name, xp, dtype)
    if xp is not numpy and dtype == 'float16':
        with pytest.raises(TypeError, match='x: expected float32 or float64 .* got float16'):
            backend.bspmm(adj, xp.ones((adj.n_rows if trans else adj.n_cols, 2), dtype),
                          trans=trans)
        return
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    for n_channels in WIDTHS:
        if n_channels == 1024 and name not in ('many', 'huge among tiny', 'lone nodes'):
            continue
        x = features(rng, xp, n_in, n_channels, dtype)
        residual = features(rng, xp, n_out, n_channels, dtype)
        data = features(rng, xp, adj.nnz, 1, dtype)[:, 0]
        for values in (None, data):
            for added in (None, residual):
                expected = reference.bspmm(adj, x, values, added, trans)
                for algorithm in algorithms_on(xp):
                    if fits(algorithm, adj, n_channels, dtype, trans):
                        y = backend.bspmm(adj, x, values, added, trans, algorithm)
                        assert_close(y, expected, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
def test_sampled_product(xp, name, dtype):
    rng = numpy.random.RandomState(0)
    adj = coo_batch_on(name, xp, dtype)
    for n_channels in WIDTHS[:-1] + (200,):
        u = features(rng, xp, adj.n_rows, n_channels, dtype)
        v = features(rng, xp, adj.n_cols, n_channels, dtype)
        assert_close(bsddmm(adj, u, v).array, reference.bsddmm(adj, u, v), dtype)


@pytest.mark.parametrize('n_rows, n_channels', [(8192, 1), (8192, 3), (8193, 1), (20000, 40)])
def test_rows_beyond_shared_memory(xp, n_rows, n_channels):
    rng = numpy.random.RandomState(0)
    ids = numpy.concatenate([rng.randint(0, n_rows, (500, 2)),
                             [[n_rows - 1, 0], [0, n_rows - 1], [n_rows, n_rows]]])
    adj = BatchedCOO(xp.asarray(ids), xp.array([0, n_rows, n_rows + 1]), xp.array([0, 502, 503]))
    x = features(rng, xp, n_rows + 1, n_channels, 'float32')
    for trans in (False, True):
        assert_close(backend.bspmm(adj, x, None, x, trans),
                     reference.bspmm(adj, x, None, x, trans), 'float32')


def test_no_channels(xp):
    adj = coo_batch_on('many', xp, 'float32')
    for algorithm in algorithms_on(xp):
        y = bspmm(adj, xp.empty((adj.n_cols, 0), 'f'), algorithm=algorithm)
        assert y.shape == (adj.n_rows, 0) and y.dtype == numpy.float32
    w = bsddmm(adj, xp.empty((adj.n_rows, 0), 'f'), xp.empty((adj.n_cols, 0), 'f')).array
    assert w.shape == (adj.nnz,) and (w == 0).all()


def test_no_graphs(xp):
    adj = BatchedCOO(xp.zeros((0, 2), 'i'), xp.array([0]), xp.array([0]))
    for algorithm in algorithms_on(xp):
        assert bspmm(adj, xp.empty((0, 5), 'f'), algorithm=algorithm).shape == (0, 5)


def test_padded_shape(xp):
    rng = numpy.random.RandomState(0)
    adj = BatchedCOO.from_csr(BatchedCSR.from_matrices(
        [xp.asarray(random_matrix(rng, n, 2)) for n in (3, 4)], 'padded'))
    x = features(rng, xp, 16, 3, 'float64').reshape(2, 8, 3)
    data = features(rng, xp, adj.nnz, 1, 'float64')[:, 0]
    residual = features(rng, xp, 8, 3, 'float64').reshape(2, 4, 3)
    for algorithm in algorithms_on(xp):
        assert_close(bspmm(adj, x, data, residual, algorithm).array,
                     reference.bspmm(adj, x, data, residual), 'float64')
    check_gradients(lambda x, d, r: bspmm(adj, x, d, r) ** 2, x, data, residual)


def test_inputs_are_left_alone(xp):
    rng = numpy.random.RandomState(0)
    adj = coo_batch_on('many', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 8, 'float32')
    before = x.copy()
    for algorithm in algorithms_on(xp):
        for trans in (False, True):
            backend.bspmm(adj, x, None, x, trans, algorithm)
            assert (x == before).all()


def test_nan_and_infinity_propagate_as_in_dense(xp):
    adj = BatchedCOO.from_csr(BatchedCSR.from_matrices([xp.asarray(numpy.array(
        [[1., numpy.nan, 0.], [0., 1., 0.], [0., 2., numpy.inf]], 'f'))]))
    x = xp.asarray(numpy.array([[1., 2.], [3., 4.], [5., numpy.nan]], 'f'))
    for algorithm in algorithms_on(xp):
        y = chainer.backends.cuda.to_cpu(bspmm(adj, x, algorithm=algorithm).array)
        numpy.testing.assert_array_equal(
            y, [[numpy.nan, numpy.nan], [3., 4.], [numpy.inf, numpy.nan]])


@pytest.mark.parametrize('name', GRADIENT_BATCHES)
@pytest.mark.parametrize('given', ['x', 'x data', 'x residual', 'x data residual'])
def test_gradients(xp, name, given):
    rng = numpy.random.RandomState(0)
    adj = coo_batch_on(name, xp, 'float64')
    inputs = [features(rng, xp, adj.n_cols, 3, 'float64')]
    if 'data' in given:
        inputs.append(features(rng, xp, adj.nnz, 1, 'float64')[:, 0])
    if 'residual' in given:
        inputs.append(features(rng, xp, adj.n_rows, 3, 'float64'))

    for algorithm in algorithms_on(xp):
        def product(*arguments, algorithm=algorithm):
            # squared, so that the second derivatives do not vanish
            return bspmm(adj, algorithm=algorithm, **dict(zip(given.split(), arguments))) ** 2

        check_gradients(product, *inputs)


@pytest.mark.parametrize('name', GRADIENT_BATCHES)
def test_gradients_of_the_sampled_product(xp, name):
    rng = numpy.random.RandomState(0)
    adj = coo_batch_on(name, xp, 'float64')
    u = features(rng, xp, adj.n_rows, 3, 'float64')
    v = features(rng, xp, adj.n_cols, 3, 'float64')
    check_gradients(lambda u, v: bsddmm(adj, u, v) ** 2, u, v)


@pytest.mark.gpu
def test_atomics_are_declared():
    import cupy
    adj = coo_batch_on('many', cupy, 'float32')
    x = cupy.ones((adj.n_cols, 3), 'f')
    with chainer.using_config('warn_nondeterministic', True):
        with pytest.warns(UserWarning, match='non-deterministic .*atomicAdd in bspmm'):
            bspmm(adj, x)


# --- what is refused ---

@pytest.mark.parametrize('arguments, error, message', [
    ({'x': numpy.ones((4, 2))}, ValueError,
     r'x: expected shape \(3, n_B\) to go with <BatchedCOO.* got \(4, 2\)'),
    ({'x': numpy.ones((3, 2), 'f')}, TypeError,
     'x: expected float64 as the values of adj, got float32; adj.astype'),
    ({'x': numpy.ones((3, 2)), 'data': numpy.ones(3)}, ValueError,
     r'data: expected shape \(5,\), one value for each entry, got \(3,\)'),
    ({'x': numpy.ones((3, 2)), 'residual': numpy.ones((3, 1))}, ValueError,
     r'residual: expected shape \(3, 2\), .* got \(3, 1\)'),
    ({'x': numpy.ones((3, 2)), 'algorithm': 'st'}, ValueError,
     "algorithm on a CPU: expected one of 'auto', got 'st'"),
])
def test_bad_input(monkeypatch, arguments, error, message):
    monkeypatch.setattr(backend.cpu, 'bspmm', lambda *_: pytest.fail('launched'))
    adj = BatchedCOO.from_csr(BatchedCSR.from_matrices([numpy.full((2, 2), 2.), numpy.eye(1)]))
    with pytest.raises(error, match=message):
        bspmm(adj, **arguments)


@pytest.mark.gpu
def test_bad_algorithms():
    import cupy
    adj = coo_batch_on('huge among tiny', cupy, 'float32')
    x = cupy.ones((adj.n_cols, 1024), 'f')
    with pytest.raises(ValueError, match="algorithm: expected one of 'st', .* got 'vector'"):
        bspmm(adj, x, algorithm='vector')
    with pytest.raises(ValueError, match="'st_shared' expects the output .* 32768 bytes"):
        bspmm(adj, x, algorithm='st_shared')
