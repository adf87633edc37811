"""The CPU's products: where they are computed in a wider dtype, and their random numbers."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.backend import cpu


def relative_error(actual, expected):
    return (numpy.abs(actual - expected) / numpy.abs(expected)).max()


def test_softmax_is_computed_in_double():
    rng = numpy.random.RandomState(0)
    x, gy = (rng.uniform(-9, 9, (20000, 2)).astype('f') for _ in range(2))
    offsets = numpy.array([0, 19000, 20000], 'i')
    half_ulp = 2.0**-24
    y = cpu.segment_softmax(x, offsets)
    assert y.dtype == numpy.float32
    assert relative_error(y, reference.segment_softmax(x, offsets)) <= half_ulp * 1.001
    wide, gx = y.astype('d'), cpu.segment_softmax_grad(y, gy, offsets)
    inner = numpy.repeat(reference.segment_sum(wide * gy, offsets), [19000, 1000], axis=0)
    assert gx.dtype == numpy.float32
    assert relative_error(gx, wide * (gy - inner)) <= half_ulp * 1.001


def test_softmax_with_weights_is_computed_in_double():
    rng = numpy.random.RandomState(0)
    x, gy = (rng.uniform(-9, 9, (20000, 2)).astype('f') for _ in range(2))
    offsets = numpy.array([0, 19000, 20000], 'i')
    weights = rng.randint(1, 9, 20000).astype('f')
    copies = numpy.repeat(numpy.arange(20000), weights.astype(int))
    starts = numpy.searchsorted(copies, offsets)
    half_ulp = 2.0**-24
    y = cpu.segment_softmax(x, offsets, weights)
    assert (
        relative_error(y[copies], reference.segment_softmax(x[copies], starts)) <= half_ulp * 1.001
    )
    wide, gx = y.astype('d'), cpu.segment_softmax_grad(y, gy, offsets, weights)
    inner = numpy.repeat(reference.segment_sum(wide * gy, offsets), [19000, 1000], axis=0)
    assert gx.dtype == numpy.float32
    assert relative_error(gx, wide * (gy - weights[:, None] * inner)) <= half_ulp * 1.001


def test_halves_with_weights_are_rounded_once():
    """Not the weights as well: 2049 is 2048 in float16."""
    offsets, weights = numpy.array([0, 3], 'i'), numpy.array([2049, 2051, 1], 'f')
    x = numpy.array([[3], [-3], [1]], 'e')
    assert cpu.segment_sum(x, offsets, weights=weights).tolist() == [[-5]]
    broadcast = cpu.segment_broadcast(x[:1], offsets, 3, weights=weights)
    assert broadcast.dtype == x.dtype
    assert broadcast.ravel().tolist() == [6148, 6152, 3]  # of 6147, 6153, 3


def test_sampled_product_of_halves_is_summed_in_float32():
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([numpy.ones((5, 5))])
    # Exact in float32; partial sums are not in float16.
    u, v = (rng.randint(-9, 10, (5, 3000)).astype('e') for _ in range(2))
    for layout in (numpy.ascontiguousarray, numpy.asfortranarray):
        w = cpu.bsddmm(adj, layout(u), layout(v))
        numpy.testing.assert_array_equal(w, reference.bsddmm(adj, u, v).astype('e'))


@pytest.mark.parametrize('size', [1, 4, 6, 4099])
@pytest.mark.parametrize(
    'seed, stream, step', [(0, 0, 0), (2**64 - 3, 2**32 - 1, 2**64 - 1), (5 << 32, 7, 11 << 32)]
)
def test_random_words(size, seed, stream, step):
    words = cpu._random_words(size, seed, stream, step)
    numpy.testing.assert_array_equal(words, reference.random_words(size, seed, stream, step))


@pytest.mark.parametrize('ratio', [0.0, 2.0**-32, 0.3, 0.5, 1 - 2.0**-40])
def test_what_dropout_keeps(ratio):
    mask = cpu.dropout_mask(999, numpy.dtype('d'), ratio, 5, 6, numpy.array([7], numpy.uint64))
    kept = reference.kept(999, ratio, 5, 6, 7)
    numpy.testing.assert_array_equal(mask, numpy.where(kept, 1 / (1 - ratio), 0))
