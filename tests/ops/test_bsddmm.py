"""`bsddmm`: values, launches, gradients, refusals."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.functions import bsddmm
from chainer_bspmm.ops import bspmm as module
from chainer_bspmm.ops.bspmm import bsddmm_forward
from tests import support
from tests.emulation.kernel_cases import (
    batch,
    BATCHES,
    CHANNELS_OF_DTYPES,
    integers,
    offsets_of,
    with_room,
)
from tests.support import (
    assert_close,
    assert_exact,
    batch_on,
    features,
    ones_for,
    random_matrix,
    reference,
)
from tests.support.gradients import check_gradients, GRADIENT_BATCHES
from tests.support.products import check_sampled


@pytest.mark.parametrize('dtype, n_channels', CHANNELS_OF_DTYPES)
def test_channels(place, dtype, n_channels):
    check_sampled(place, batch('small' if n_channels > 64 else 'mixed', dtype), dtype, n_channels)


@pytest.mark.parametrize(
    'n_channels, lanes, tile',
    [(4, 1, 1), (8, 1, 2), (12, 2, 2), (20, 4, 2), (36, 8, 2), (68, 16, 2), (400, 32, 2)],
)
def test_lanes(gpu, n_channels, lanes, tile):
    check_sampled(gpu, batch('mixed', 'f'), 'f', n_channels)
    defines = gpu.launched[-1]
    assert (defines['LANES'], defines['TILE']) == (lanes, tile)


@pytest.mark.parametrize('longest', [3, 4, 5, 8, 9])
def test_rows_about_as_long_as_what_is_loaded_ahead(place, longest):
    indices = numpy.append(numpy.arange(longest) % 7, 3)
    adj = BatchedCSR(offsets_of([longest, 0, 1, 0, 0, 0, 0]), indices, numpy.array([0, 7]))
    check_sampled(place, adj, 'f', 5)


@pytest.mark.parametrize('name', BATCHES)
def test_batches(place, name):
    check_sampled(place, batch(name, 'f'), 'f', 7)


@pytest.mark.parametrize('name', support.BATCHES)
def test_other_batches(xp, name):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float32')
    u, v = (features(rng, xp, n, 200, 'float32') for n in adj.shape)
    w = bsddmm(adj, u, v).array
    assert_close(w, reference.bsddmm(adj, u, v), 'float32')
    assert w.tobytes() == bsddmm(adj, u, v).array.tobytes()


def test_input_of_three_dimensions_that_is_not_contiguous(place):
    adj = batch('padded', 'f')
    u = integers((adj.n_graphs, adj.max_rows, 8), 'f')
    v = integers((4, adj.max_rows, adj.n_graphs), 'f', seed=1)
    expected = reference.bsddmm(adj, u[:, :, ::2], v.T)
    u, v = place.put(u)[:, :, ::2], place.put(v).T
    assert_exact(bsddmm_forward(place.put(adj), u, v), expected, 'f')


def test_sampled_product_of_halves_is_summed_in_float32():
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([numpy.ones((5, 5))])
    # The partial sums are exact in float32, but not in float16.
    u, v = (rng.randint(-9, 10, (5, 3000)).astype('e') for _ in range(2))
    for layout in (numpy.ascontiguousarray, numpy.asfortranarray):
        w = bsddmm_forward(adj, layout(u), layout(v))
        numpy.testing.assert_array_equal(w, reference.bsddmm(adj, u, v).astype('e'))


def test_capacity_beyond_the_batch(gpu):
    adj = batch('small', 'f')
    spare = 5
    larger = with_room(adj, spare)
    u = integers((larger.n_rows, 40), 'f', seed=2)
    v = integers((adj.n_cols, 40), 'f', seed=3)
    w = bsddmm_forward(gpu.put(larger), gpu.put(u), gpu.put(v))
    expected = reference.bsddmm(adj, u[: adj.n_rows], v)
    assert_exact(w, numpy.pad(expected, (0, spare)), 'f')  # spare entries are 0, not NaN


@pytest.mark.parametrize('dtype', 'efd')
def test_nan_reaches_its_entries_only(place, dtype):
    adj = batch('mixed', dtype)
    u = integers((adj.n_rows, 33), dtype, seed=2)
    v = integers((adj.n_cols, 33), dtype, seed=3)
    u[10, 32] = v[12, 0] = numpy.nan
    expected = reference.bsddmm(adj, u, v)
    assert 0 < numpy.isnan(expected).sum() < expected.size // 2
    assert_exact(bsddmm_forward(place.put(adj), place.put(u), place.put(v)), expected, dtype)


def test_no_channels_launch_nothing(place):
    adj = batch('small', 'f')
    empty = place.put(numpy.zeros((adj.n_rows, 0), 'f'))
    assert_exact(bsddmm(place.put(adj), empty, empty).array, numpy.zeros(adj.nnz), 'f')
    assert not place.launched


@pytest.mark.parametrize('name', GRADIENT_BATCHES)
def test_gradients(xp, name):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, 'float64')
    u = features(rng, xp, adj.n_rows, 3, 'float64')
    v = features(rng, xp, adj.n_cols, 3, 'float64')
    check_gradients(lambda u, v: bsddmm(adj, u, v) ** 2, u, v)


def test_padded_shape(xp):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([xp.asarray(random_matrix(rng, n)) for n in (3, 4)], 'padded')
    u = features(rng, xp, 8, 5, 'float64').reshape(2, 4, 5)
    assert_close(bsddmm(adj, u, u).array, reference.bsddmm(adj, u, u), 'float64')
    check_gradients(lambda u, v: bsddmm(adj, u, v) ** 2, u, u + 1)


PADDED = BatchedCSR.from_matrices([numpy.ones((2, 2)), numpy.ones((1, 1))], 'padded')


@pytest.mark.parametrize(
    'changes, error, message',
    [
        (
            {'u': (4, 2)},
            ValueError,
            r'u: expected shape \(3, n_B\) to go with <BatchedCSR.*>, got \(4, 2\)',
        ),
        (
            {'v': (4, 2)},
            ValueError,
            r'v: expected shape \(3, n_B\) to go with <BatchedCSR.*>, got \(4, 2\)',
        ),
        (
            {'v': (3, 1)},
            ValueError,
            r'v: expected 2 channels, as many as u has, got shape \(3, 1\)',
        ),
        (
            {'adj': PADDED, 'u': (4, 2), 'v': (2, 2, 2)},
            ValueError,
            r'v: expected 2 dimensions, like u, got shape \(2, 2, 2\)',
        ),
        ({'v': numpy.ones((3, 2))}, TypeError, 'v: expected float32, got float64'),
        (
            {'adj': (3, 3)},
            TypeError,
            r'adj: expected a BatchedCSR, got ndarray of shape \(3, 3\); .* with '
            'BatchedCSR.from_dense',
        ),
    ],
)
def test_bad_input(monkeypatch, changes, error, message):
    monkeypatch.setattr(module.BatchedSDDMM, 'product', lambda *_: pytest.fail('launched'))
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2)), numpy.ones((1, 1))])
    arguments = ones_for({'adj': adj, 'u': (3, 2), 'v': (3, 2), **changes})
    with pytest.raises(error, match=message):
        bsddmm(**arguments)
