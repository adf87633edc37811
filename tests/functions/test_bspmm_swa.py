"""The papers' Sub-Warp-Assigned kernels by name: values, gradients, and what they refuse."""
import numpy
import pytest

import chainer

from chainer_bspmm import backend
from chainer_bspmm import reference
from chainer_bspmm.backend import gpu
from chainer_bspmm.functions import bspmm
from tests.functions.test_bspmm import check_gradients
from tests.functions.test_bspmm import GRADIENT_BATCHES
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support import WIDTHS

NAMES = ('swa', 'swa_rows', 'swa_blocked')

# The fixture `xp` without its NumPy half: these algorithms are kernels.
on_gpu = pytest.mark.parametrize(
    'xp', [pytest.param('cupy', marks=pytest.mark.gpu)], indirect=True)


@on_gpu
@pytest.mark.parametrize('algorithm', NAMES)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', BATCHES)
@pytest.mark.parametrize('trans', [False, True])
def test_product(xp, name, dtype, trans, algorithm):
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
                assert_close(backend.bspmm(adj, x, values, added, trans, algorithm),
                             reference.bspmm(adj, x, values, added, trans), dtype)


@on_gpu
@pytest.mark.parametrize('algorithm', ['swa', 'swa_blocked'])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('n_channels', [1025, 2048, 2049, 4097])
def test_product_about_the_budget_of_shared_memory(xp, n_channels, dtype, algorithm):
    rng = numpy.random.RandomState(0)
    adj = batch_on('empty graphs first, between, last', xp, dtype)
    x = features(rng, xp, adj.n_cols, n_channels, dtype)
    assert_close(backend.bspmm(adj, x, algorithm=algorithm), reference.bspmm(adj, x), dtype)


@on_gpu
@pytest.mark.parametrize('algorithm', NAMES)
def test_no_channels_and_padded_shape(xp, algorithm):
    rng = numpy.random.RandomState(0)
    adj = batch_on('padded', xp, 'float32')
    assert bspmm(adj, xp.empty((adj.n_cols, 0), 'f'), algorithm=algorithm).shape[1] == 0
    x = features(rng, xp, adj.n_cols, 5, 'float32').reshape(adj.n_graphs, -1, 5)
    assert_close(bspmm(adj, x, residual=x, algorithm=algorithm).array,
                 reference.bspmm(adj, x, residual=x), 'float32')


@on_gpu
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
        return bspmm(adj, **dict(zip(given.split(), arguments)), algorithm='swa') ** 2

    check_gradients(product, *inputs)


@on_gpu
@pytest.mark.parametrize('dtype', DTYPES)
def test_gradient_values_and_dtype(xp, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on('four relations', xp, dtype)
    x = chainer.Variable(features(rng, xp, adj.n_cols, 33, dtype))
    y = bspmm(adj, x, algorithm='swa')
    y.grad = gy = features(rng, xp, adj.n_rows, 33, dtype)
    y.backward()
    assert_close(x.grad, reference.bspmm(adj, gy, trans=True), dtype)


# --- what is refused ---

@on_gpu
def test_unknown_algorithm(xp):
    adj = batch_on('one graph', xp, 'float32')
    with pytest.raises(ValueError, match="^algorithm: expected .*'swa'.*, got 'swb'"):
        bspmm(adj, xp.ones((adj.n_cols, 2), 'f'), algorithm='swb')


@on_gpu
def test_rows_that_do_not_fit(xp):
    adj = batch_on('one graph', xp, 'float32')
    x = xp.ones((adj.n_cols, 2049), 'f')
    with pytest.raises(ValueError, match='^algorithm: swa_rows .* 32768 .* n_B = 2049'):
        bspmm(adj, x, algorithm='swa_rows')


@pytest.mark.parametrize('algorithm', NAMES + ('vector', 'swb'))
def test_kernel_on_arrays_of_the_cpu(algorithm):
    adj = BATCHES['one graph']
    with pytest.raises(ValueError, match="^algorithm on a CPU: .*'auto'.*%s" % algorithm):
        bspmm(adj, numpy.ones((adj.n_cols, 2)), algorithm=algorithm)


def test_every_name_is_tested():
    assert {name for name in gpu.ALGORITHMS if name.startswith('swa')} == set(NAMES)
