"""What bspmm has with a BatchedCOO only, and bsddmm with one: values, gradients, refusals."""

import numpy
import pytest

import chainer

from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedCSR
from chainer_bspmm.papers import bsddmm
from chainer_bspmm import papers
from chainer_bspmm.papers import bspmm
from chainer_bspmm.papers import gpu
from chainer_bspmm.papers.products import bspmm_forward
from tests.support import assert_close
from tests.support import BATCHES
from tests.support import coo_batch_on
from tests.support import DTYPES
from tests.support import features
from tests.support import reference
from tests.support import widths_on
from tests.support.gradients import check_gradients
from tests.support.gradients import GRADIENT_BATCHES


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
def test_sampled_product(xp, name, dtype):
    rng = numpy.random.RandomState(0)
    adj = coo_batch_on(name, xp, dtype)
    for n_channels in widths_on(xp)[:-1] + (200,):
        u = features(rng, xp, adj.n_rows, n_channels, dtype)
        v = features(rng, xp, adj.n_cols, n_channels, dtype)
        assert_close(bsddmm(adj, u, v).array, reference.bsddmm(adj, u, v), dtype)


def test_sampled_product_of_no_channels(xp):
    adj = coo_batch_on('many', xp, 'float32')
    w = bsddmm(adj, xp.empty((adj.n_rows, 0), 'f'), xp.empty((adj.n_cols, 0), 'f')).array
    assert w.shape == (adj.nnz,) and (w == 0).all()


@pytest.mark.parametrize('n_rows, n_channels', [(8192, 1), (8192, 3), (8193, 1), (20000, 40)])
def test_rows_beyond_shared_memory(xp, n_rows, n_channels):
    rng = numpy.random.RandomState(0)
    ids = numpy.concatenate(
        [rng.randint(0, n_rows, (500, 2)), [[n_rows - 1, 0], [0, n_rows - 1], [n_rows, n_rows]]]
    )
    adj = BatchedCOO(xp.asarray(ids), xp.array([0, n_rows, n_rows + 1]), xp.array([0, 502, 503]))
    x = features(rng, xp, n_rows + 1, n_channels, 'float32')
    for trans in (False, True):
        assert_close(
            bspmm_forward(adj, x, None, x, trans),
            reference.bspmm(adj, x, None, x, trans),
            'float32',
        )


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


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        (
            {'x': numpy.ones((4, 2))},
            ValueError,
            r'x: expected shape \(3, n_B\) to go with <BatchedCOO.* got \(4, 2\)',
        ),
        (
            {'x': numpy.ones((3, 2), 'f')},
            TypeError,
            'x: expected float64 as the values of adj, got float32; adj.astype',
        ),
        (
            {'x': numpy.ones((3, 2)), 'data': numpy.ones(3)},
            ValueError,
            r'data: expected shape \(5,\), one value for each entry, got \(3,\)',
        ),
        (
            {'x': numpy.ones((3, 2)), 'residual': numpy.ones((3, 1))},
            ValueError,
            r'residual: expected shape \(3, 2\), .* got \(3, 1\)',
        ),
        (
            {'x': numpy.ones((3, 2)), 'algorithm': 'st'},
            ValueError,
            "algorithm on a CPU: expected one of 'auto', got 'st'",
        ),
    ],
)
def test_bad_input(monkeypatch, arguments, error, message):
    monkeypatch.setattr(papers.cpu, 'bspmm', lambda *_: pytest.fail('launched'))
    adj = BatchedCOO.from_csr(BatchedCSR.from_matrices([numpy.full((2, 2), 2.0), numpy.eye(1)]))
    with pytest.raises(error, match=message):
        bspmm(adj, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize('algorithm', ('auto', *gpu.ST_ALGORITHMS))
@pytest.mark.parametrize('trans', [False, True])
def test_float16_on_a_gpu(algorithm, trans):
    import cupy

    adj = coo_batch_on('rectangular', cupy, 'float16')
    x = cupy.ones((adj.n_rows if trans else adj.n_cols, 2), 'e')
    with pytest.raises(TypeError, match='x: expected float32 or float64 .* got float16'):
        bspmm_forward(adj, x, trans=trans, algorithm=algorithm)


@pytest.mark.gpu
def test_bad_algorithms():
    import cupy

    adj = coo_batch_on('huge among tiny', cupy, 'float32')
    x = cupy.ones((adj.n_cols, 1024), 'f')
    with pytest.raises(ValueError, match="algorithm: .* 'auto', 'st', .* got 'vector'"):
        bspmm(adj, x, algorithm='vector')
    with pytest.raises(ValueError, match="'st_shared' expects the output .* 32768 bytes"):
        bspmm(adj, x, algorithm='st_shared')
