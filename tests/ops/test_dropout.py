"""Dropout: generators, their statistics, and nodes that draw from the generator of a step."""

import types

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer.functions.noise.dropout import Dropout

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda.step import current, Step, under_way
from chainer_bspmm.ops.dropout import draw_kept, dropout, dropout_forward, dropout_mask_forward
from chainer_bspmm.ops.dropout import dropout_relu, step_dropout
from chainer_bspmm.ops.relation_attention import relation_attention
from tests.emulation.kernel_cases import integers, TERM
from tests.support import assert_exact, device_of, DTYPES, features, random_matrix, reference
from tests.support.cases import pairs
from tests.support.gradients import check_gradients
from tests.support.layers import linear_relu

SEED, STEP = 2**63 + 12345, 2**33 + 6


class StepDropout(Dropout):
    """Chainer's node with the forward pass that it has in a step."""

    def forward(self, inputs):
        return step_dropout(self, current(), inputs)


def step_on(xp):
    """Return a step that multiplies by the array module."""
    blas = types.SimpleNamespace(dot=lambda a, b, to=None: a.dot(b), matmul=xp.matmul)
    return Step(blas, SEED, xp.full(1, STEP, numpy.uint64))


def factors(shape, ratio, stream, dtype, seed=SEED, number=STEP):
    kept = reference.kept(int(numpy.prod(shape)), ratio, seed, stream, number)
    return (kept * numpy.dtype(dtype).type(1 / (1 - ratio))).reshape(shape)


# --- generator ---


@pytest.mark.parametrize(
    'counter, key, words',
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, words):
    """The reference gives the test vectors of Random123, the authors' implementation."""
    assert tuple(map(int, reference.philox(counter, key))) == words


def test_layout_of_what_goes_into_the_generator():
    """Seed, stream and step are words of the generator's key and counter."""
    words = reference.random_words(11, (7 << 32) + 3, 9, (2 << 32) + 8)
    for i in range(11):
        assert words[i] == reference.philox((i // 4, 9, 8, 2), (3, 7))[i % 4]


N = 1 << 20
# Standard deviations: with five, a correct generator fails one of two million comparisons.
SIGMAS = 5


def assert_independent(a, b, share):
    """Check that both of a pair are kept as often as in independent draws."""
    pairs = (a & b).mean()
    expected = share**2
    assert abs(pairs - expected) < SIGMAS * (expected * (1 - expected) / a.size) ** 0.5


def outside_of_a_step(ratio, seed=0):
    numpy.random.seed(seed)
    return draw_kept((N // 4, 4), ratio).ravel()


@pytest.mark.parametrize('ratio', [0.001, 0.1, 0.25, 0.5, 0.9])
def test_share_that_is_kept(ratio):
    kept = outside_of_a_step(ratio)
    # All elements, and each column of a feature matrix, which comes from one word of the generator.
    for part in (kept, *(kept[phase::64] for phase in range(64))):
        bound = SIGMAS * (ratio * (1 - ratio) / part.size) ** 0.5
        assert abs(part.mean() - (1 - ratio)) < bound


@pytest.mark.parametrize('ratio', [0.5, 0.1])
def test_numpys_seed_decides_outside_of_a_step(ratio):
    first, again, other = (outside_of_a_step(ratio, seed) for seed in (0, 0, 1))
    assert (first == again).all()
    assert_independent(first, other, 1 - ratio)
    assert_independent(first, draw_kept((N,), ratio), 1 - ratio)  # the next draw is another one
    assert draw_kept((0, 3), ratio).shape == (0, 3)


@pytest.mark.parametrize('low, high', [(1, 3), (64, 65), (128, 255)])
def test_draws_for_ratios_that_a_byte_expresses_are_alike(low, high):
    """They take a quarter of the random numbers, and a larger ratio drops what a smaller one does.

    Draws for a ratio that needs more digits have nothing in common with them.
    """
    few, more, other = (outside_of_a_step(n / 256) for n in (low, high, high + 0.5))
    assert not (more & ~few).any()
    assert (other & ~few).any()


@pytest.mark.parametrize('distance', [1, 2, 3, 4, 5, 64, 256])
def test_elements_are_independent(distance):
    kept = outside_of_a_step(0.5)
    assert_independent(kept[:-distance], kept[distance:], 0.5)


@pytest.mark.parametrize('ratio', [-0.5, 1.0, float('nan')])
def test_a_ratio_that_is_no_share(ratio):
    with pytest.raises(
        ValueError, match='^ratio: expected at least 0 and below 1, got %r$' % ratio
    ):
        dropout(chainer.Variable(numpy.ones((2, 3), 'f')), ratio)


# --- operation, compared bit by bit: kept elements and their values ---

# (seed, stream, step); every word of the generator's input has high bits in one of them.
DRAWS = [(0, 0, 0), (2**64 - 3, 2**32 - 1, 2**64 - 1), (5 << 32, 7, 11 << 32), (3, 1, 4)]


def mask_of(x, ratio, draw):
    seed, stream, step = draw
    return factors(x.shape, ratio, stream, x.dtype, seed, step)


def run(function, place, x, ratio, draw, shift=0):
    """Call an operation; return its input, which it may overwrite, and its results, on the host."""
    seed, stream, step = draw
    given = place.put(x, shift)
    results = function(given, ratio, seed, stream, place.put(numpy.array([step], numpy.uint64)))
    return cuda.to_cpu(given), results and tuple(map(cuda.to_cpu, results))


SHAPES = (37, 12), (1, 1), (5,), (3, 2), (1, 7), (2, 3, 4), (), (515,)


@pytest.mark.parametrize('dtype, shape, draw', pairs('efd', SHAPES, DRAWS), ids=str)
def test_dropout(place, dtype, shape, draw):
    x = integers(shape, dtype, TERM)
    _, (mask, y) = run(dropout_forward, place, x, 0.3, draw)
    expected = mask_of(x, 0.3, draw)
    assert mask.dtype == y.dtype == dtype and mask.shape == y.shape == shape
    numpy.testing.assert_array_equal(mask, expected)
    numpy.testing.assert_array_equal(y, x * expected)


@pytest.mark.parametrize('size', [1, 4, 6, 131])
@pytest.mark.parametrize('dtype', 'efd')
def test_mask_alone(place, dtype, size):
    counter = place.put(numpy.array([9], numpy.uint64))
    mask = dropout_mask_forward(size, numpy.dtype(dtype), 0.25, 7, 8, counter)
    assert_exact(mask, mask_of(numpy.empty(size, dtype), 0.25, (7, 8, 9)).astype('d'), dtype)


@pytest.mark.parametrize(
    'dtype, shift, width',
    [('e', 0, 4), ('f', 0, 4), ('d', 0, 2), ('e', 2, 1), ('f', 8, 2), ('d', 8, 1)],
)
def test_vectors_as_wide_as_the_address_allows(gpu, dtype, shift, width):
    x = integers((9, 16), dtype)
    run(dropout_forward, gpu, x, 0.3, DRAWS[2], shift)
    assert gpu.launched == [{'VECTOR': width, 'KIND': 'DROPOUT'}]


@pytest.mark.parametrize('element', range(4))
def test_every_bit_of_the_published_vector_counts(place, element):
    """An element is kept at the ratio of its random word, and dropped at the next higher ratio."""
    word = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)[element]
    for ratio, kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
        _, (mask, _) = run(dropout_forward, place, numpy.ones(4, 'd'), ratio, DRAWS[0])
        assert (mask[element] > 0) == kept


@pytest.mark.parametrize('ratio, expected', [(0.0, 1), (1 - 2**-40, 0)])
def test_ratios_at_the_limits(place, ratio, expected):
    x = numpy.ones(1000, 'd')
    _, (mask, _) = run(dropout_forward, place, x, ratio, DRAWS[3])
    assert (mask == expected).all()


@pytest.mark.parametrize('word', [2**32 - 2, 2**32 - 1])
def test_at_the_largest_ratio_the_largest_random_number_alone_keeps_an_element(monkeypatch, word):
    words = 'chainer_bspmm.ops.dropout._random_words'
    monkeypatch.setattr(words, lambda size, *_: numpy.full(size, word))
    counter = numpy.zeros(1, numpy.uint64)
    mask = dropout_mask_forward(3, numpy.dtype('d'), 1 - 2**-40, 1, 2, counter)
    assert mask.any() == (word == 2**32 - 1)


@pytest.mark.parametrize('shape', [(0, 5), (3, 0)])
def test_nothing_to_drop_launches_nothing(place, shape):
    _, (mask, y) = run(dropout_forward, place, numpy.empty(shape, 'f'), 0.5, DRAWS[0])
    assert mask.shape == y.shape == shape and not place.launched


# --- Chainer's node ---


@pytest.mark.parametrize('shape', [(50, 6), (7, 5), (3, 2, 4), (9,), (0, 4)], ids=str)
@pytest.mark.parametrize('dtype', DTYPES)
def test_step_dropout(xp, dtype, shape):
    x = xp.asarray(numpy.random.RandomState(0).uniform(-1, 1, shape).astype(dtype))
    with under_way(step_on(xp)):
        for stream in range(3):
            node = StepDropout(0.3)
            variable = chainer.Variable(x)
            (y,) = node.apply((variable,))
            expected = factors(shape, 0.3, stream, dtype)
            assert y.dtype == node.mask.dtype == dtype
            numpy.testing.assert_array_equal(cuda.to_cpu(node.mask), expected)
            numpy.testing.assert_array_equal(cuda.to_cpu(y.array), cuda.to_cpu(x) * expected)
            y.grad = xp.ones_like(x)
            y.backward()
            numpy.testing.assert_array_equal(cuda.to_cpu(variable.grad), expected)


def test_step_dropout_of_strided_columns(xp):
    x = features(numpy.random.RandomState(0), xp, 9, 8, 'float32')[:, ::2]
    variable = chainer.Variable(x)
    with under_way(step_on(xp)):
        (y,) = StepDropout(0.5).apply((variable,))
        y.grad = xp.ones_like(x)
        y.backward()
    expected = factors(x.shape, 0.5, 0, 'f')
    numpy.testing.assert_array_equal(cuda.to_cpu(y.array), cuda.to_cpu(x) * expected)
    numpy.testing.assert_array_equal(cuda.to_cpu(variable.grad), expected)


def test_gradients_of_step_dropout(xp):
    step = step_on(xp)

    def function(x):
        with under_way(step):  # layers count from 0, so all calls have one mask
            return (StepDropout(0.4).apply((x,))[0] + 1) ** 2

    check_gradients(function, features(numpy.random.RandomState(0), xp, 5, 3, 'float64'))


def test_given_mask_is_used(xp):
    x, mask = (features(numpy.random.RandomState(i), xp, 4, 3, 'float32') for i in range(2))
    node = StepDropout(0.5, mask, True)
    with under_way(step_on(xp)):
        (y,) = node.apply((x,))
    assert node.mask is mask
    numpy.testing.assert_array_equal(cuda.to_cpu(y.array), cuda.to_cpu(x * mask))


def test_with_a_given_mask_nothing_is_drawn(xp):
    x, mask = (features(numpy.random.RandomState(i), xp, 4, 3, 'float32') for i in range(2))
    with under_way(step_on(xp)) as step:
        StepDropout(0.5, mask, True).apply((x,))
        assert step.next_stream() == 0


def linear_inputs(xp, n, dtype, n_out=6):
    rng = numpy.random.RandomState(0)
    W = features(rng, xp, n_out, 5, dtype)
    b = features(rng, xp, 1, n_out, dtype)[0]
    return features(rng, xp, n, 5, dtype), W, b


@pytest.mark.parametrize('n_out', [4, 7])
@pytest.mark.parametrize('dtype', DTYPES)
def test_linear_relu(xp, dtype, n_out):
    given = linear_inputs(xp, 30, dtype, n_out)
    plain = cuda.to_cpu(linear_relu(*given).array)
    with under_way(step_on(xp)):
        for stream in range(2):
            y = linear_relu(*given, dropout_ratio=0.25).array
            assert_exact(y, plain * factors(plain.shape, 0.25, stream, dtype), dtype)


def test_without_dropout_no_stream_is_taken(xp):
    given = linear_inputs(xp, 3, 'float32')
    with under_way(step_on(xp)) as step:
        linear_relu(*given)
        with chainer.using_config('train', False):
            linear_relu(*given, dropout_ratio=0.5)
        assert step.next_stream() == 0


def test_attention(xp):
    rng = numpy.random.RandomState(0)
    matrices = [random_matrix(rng, n, 2, density=0.6) for n in (4, 1, 3)]
    matrices[0][:, 2] = 0  # a row without edges
    adj = BatchedCSR.from_matrices(matrices).to_device(device_of(xp))
    shapes = (adj.n_rows, 2 * 2 * 3), (1, 6), (1,)
    given = [xp.asarray(rng.uniform(-2, 2, shape)) for shape in shapes]
    step = step_on(xp)

    def function(*given):
        with under_way(step):
            return relation_attention(adj, *given, n_heads=2, dropout_ratio=0.4)

    node = function(*given).creator_node
    for stream, mask in enumerate((node._edge_mask, node._slot_mask)):
        mask = cuda.to_cpu(mask)
        numpy.testing.assert_array_equal(mask, factors(mask.shape, 0.4, stream, 'd'))
        assert 0 < (mask > 0).sum() < mask.size
    check_gradients(function, *given)


@pytest.mark.parametrize('ratio', [0.25, 0.3])
def test_rectified_outside_of_a_step(ratio):
    x = numpy.linspace(-2, 2, 1001, dtype='f').reshape(143, 7)
    x[0, 0] = numpy.nan
    y = x.copy()
    dropout_relu(y, ratio)
    rectified = numpy.maximum(x, 0) * numpy.float32(1 / (1 - ratio))
    is_kept = y != 0  # also where NaN stays
    numpy.testing.assert_array_equal(y, numpy.where(is_kept, rectified, 0))
    assert 0 < is_kept[x > 0].mean() < 1


def test_what_does_not_fit():
    counter = numpy.zeros(1, numpy.uint64)
    too_many = numpy.broadcast_to(numpy.zeros(1, 'e'), (2**34 + 1,))
    with pytest.raises(
        ValueError, match=r'size: expected at most 2\*\*34 elements, .* got 17179869185'
    ):
        dropout_forward(too_many, 0.5, 1, 2, counter)
    with pytest.raises(
        ValueError,
        match=r'size: expected at most 2\*\*34 elements, the random numbers that a layer has, '
        'got 17179869185',
    ):
        dropout_mask_forward(2**34 + 1, numpy.dtype('f'), 0.5, 1, 2, counter)


@pytest.mark.gpu
def test_replayed_graph_draws_by_the_step():
    cupy = cuda.cupy
    step = step_on(cupy)
    x = features(numpy.random.RandomState(0), cupy, 200, 6, 'float32')
    stream = cupy.cuda.Stream(non_blocking=True)

    def run():
        with under_way(step):
            return [StepDropout(0.5).apply((x,))[0].array for _ in range(2)]

    cupy.cuda.Stream.null.synchronize()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        run()  # compiles all kernels
        stream.begin_capture()
        dropped = run()
        graph = stream.end_capture()
        for number in (0, 1, 2**40):
            step.counter.fill(number)
            graph.launch()
            for layer, y in enumerate(dropped):
                numpy.testing.assert_array_equal(
                    cuda.to_cpu(y),  # waits for `stream`, which is current
                    cuda.to_cpu(x) * factors(x.shape, 0.5, layer, 'f', number=number),
                )
