"""Kernel of losses: values and gradients, compared with Chainer's functions in float64."""

import types

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import gemm, step
from chainer_bspmm.ops.mean_loss import Loss, LOSS_ALONG, LOSS_CHUNK, loss_launches
from chainer_bspmm.training import chainer_nodes
from tests.support.cases import pairs
from tests.support.devices import slow_unless


# Roundings of the result and of its terms.
BOUND = {'e': 2**-10, 'f': 2**-21, 'd': 2**-49}
CHAINER = {
    'SIGMOID_CROSS_ENTROPY': functions.sigmoid_cross_entropy,
    'BINARY_ACCURACY': functions.binary_accuracy,
    'SQUARED_ERROR': functions.mean_squared_error,
    'ABSOLUTE_ERROR': functions.mean_absolute_error,
}
LABELLED = 'SIGMOID_CROSS_ENTROPY'
HAS_LABELS = LABELLED, 'BINARY_ACCURACY'
DIFFERENTIABLE = sorted(set(CHAINER) - {'BINARY_ACCURACY'})


def arrays_of(kind, dtype, shape):
    rng = numpy.random.RandomState(0)
    x = (8 * rng.uniform(-1, 1, shape)).astype(dtype)
    x.ravel()[::5] = 0
    if kind in HAS_LABELS:
        return x, rng.randint(-1, 2, shape).astype('i')
    t = rng.uniform(-1, 1, shape).astype(dtype)
    t.ravel()[1::5] = x.ravel()[1::5]
    return x, t


def assert_close(actual, expected, dtype):
    """Compare with a bound relative to the largest value."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    scale = abs(numpy.nan_to_num(expected)).max(initial=1e-300)
    numpy.testing.assert_allclose(cuda.to_cpu(actual), expected, 0, BOUND[dtype] * scale)


def check(gpu, kind, dtype, x, t, divisor=None, **options):
    """Compare with Chainer's function, to which the `options` are passed."""
    divisor = divisor if kind in HAS_LABELS else x.size
    variable = chainer.Variable(x.astype('d'))
    expected = CHAINER[kind](variable, t.astype('d') if t.dtype.kind == 'f' else t, **options)
    x, t = gpu.put(x), gpu.put(t)
    of_kind = Loss(kind, divisor)
    loss, count = of_kind.forward(x, t)
    assert_close(loss, expected.array, dtype)
    assert (count is None) == (divisor is not None)
    if count is not None:
        assert count.dtype == 'int64' and count == max((t != -1).sum(), 1)
    if kind == 'BINARY_ACCURACY':
        return
    expected.grad = numpy.full((), 3.0)
    expected.backward()
    gy = gpu.put(numpy.full((), 3, dtype))
    gx = of_kind.backward(x, t, gy, count)
    assert_close(gx, variable.grad, dtype)


SHAPES = (1,), (31, 1), (3, 11), (128, 12), (205, 5)


@pytest.mark.parametrize(
    'kind, dtype, shape',
    [
        slow_unless(case[1] == 'f' or case[0] == LABELLED, *case)
        for case in pairs(list(CHAINER), 'efd', SHAPES)
    ],
    ids=str,
)
def test_shapes(gpu, kind, dtype, shape):
    check(gpu, kind, dtype, *arrays_of(kind, dtype, shape))
    assert len(gpu.launched) == (1 if kind == 'BINARY_ACCURACY' else 2)


@pytest.mark.parametrize('kind', CHAINER)
def test_more_elements_than_a_block_s(gpu, kind):
    check(gpu, kind, 'f', *arrays_of(kind, 'f', (2 * LOSS_CHUNK + 1,)))
    assert [d['COMBINE'] for d in gpu.launched] == [0, 1, 0][: len(gpu.launched)]


def test_more_blocks_than_threads_add_up(gpu, monkeypatch):
    monkeypatch.setattr('chainer_bspmm.ops.mean_loss.LOSS_CHUNK', 4)
    # 64 instead of 1,024, because the emulator runs every thread.
    monkeypatch.setattr('chainer_bspmm.cuda.plans.MAX_BLOCK', 64)
    monkeypatch.setattr('chainer_bspmm.ops.mean_loss.loss_launches', loss_launches.__wrapped__)
    check(gpu, LABELLED, 'f', *arrays_of(LABELLED, 'f', (1027,)))


@pytest.mark.parametrize('dtype', 'efd')
def test_divisor_that_is_given(gpu, dtype):
    check(gpu, LABELLED, dtype, *arrays_of(LABELLED, dtype, (9, 4)), divisor=9, normalize=False)


@pytest.mark.parametrize('kind', HAS_LABELS)
def test_no_labels(gpu, kind):
    x, t = arrays_of(kind, 'f', (9, 4))
    check(gpu, kind, 'f', x, numpy.full_like(t, -1))


@pytest.mark.parametrize('labels', ['int8', 'int64'])
def test_labels_of_other_types(gpu, labels):
    x, t = arrays_of(LABELLED, 'f', (9, 4))
    check(gpu, LABELLED, 'f', x, t.astype(labels))


@pytest.mark.parametrize('value', [numpy.nan, 100, -100, 3e38, -3e38])
@pytest.mark.parametrize('label', [-1, 0, 1])
def test_predictions_beyond_the_range_of_exp(gpu, value, label):
    """NaN stays NaN even for an ignored label, as in Chainer."""
    check(gpu, LABELLED, 'f', numpy.array([value, 1], 'f'), numpy.array([label, 1], 'i'))


@pytest.mark.parametrize('ignore_nan', [False, True])
@pytest.mark.parametrize('kind', ['SQUARED_ERROR', 'ABSOLUTE_ERROR'])
def test_values_that_are_nan(gpu, kind, ignore_nan):
    x, t = arrays_of(kind, 'f', (9, 4))
    t[::2, 1] = numpy.nan
    d = numpy.nan_to_num(x - t) if ignore_nan else x - t
    is_square = kind == 'SQUARED_ERROR'
    gy, x, t = (gpu.put(array) for array in (numpy.ones((), 'f'), x, t))
    of_kind = Loss(kind, x.size, ignore_nan)
    loss, _ = of_kind.forward(x, t)
    gx = of_kind.backward(x, t, gy)
    assert_close(loss, (d**2 if is_square else abs(d)).mean(dtype='d'), 'f')
    assert_close(gx, (2 * d if is_square else numpy.sign(d)) / d.size, 'f')


def test_no_elements(gpu):
    x, t = gpu.put(numpy.empty((0, 3), 'f')), gpu.put(numpy.empty((0, 3), 'i'))
    loss, count = Loss(LABELLED).forward(x, t)
    assert loss == 0 and count == 1 and len(gpu.launched) == 1
    gx = Loss(LABELLED).backward(x, t, loss, count)
    assert gx.shape == (0, 3) and len(gpu.launched) == 1
    loss, _ = Loss('SQUARED_ERROR', 0).forward(x, x)
    assert numpy.isnan(loss)


def test_rows_that_lie_apart(gpu):
    x, t = arrays_of('SQUARED_ERROR', 'f', (8, 6))
    loss, _ = Loss('SQUARED_ERROR', 24).forward(gpu.put(x)[::2], gpu.put(t)[:, ::-1][::2])
    d = x[::2].astype('d') - t[:, ::-1][::2]
    assert_close(loss, (d**2).mean(), 'f')


@pytest.mark.parametrize(
    'kind, dtype, shape',
    [
        slow_unless(case[1] == 'f' or case[0] == LABELLED, *case)
        for case in pairs(DIFFERENTIABLE, 'efd', [(1,), (31, 1), (128, 12), (204, 20)])
    ],
    ids=str,
)
def test_what_comes_along(gpu, kind, dtype, shape):
    """One launch gives the bits of three: for the loss, the accuracy and the gradient."""
    x, t = map(gpu.put, arrays_of(kind, dtype, shape))
    for divisor in (None, 3) if kind in HAS_LABELS else (x.size,):
        of_kind = Loss(kind, divisor)
        loss, count = of_kind.forward(x, t)
        gx = of_kind.backward(x, t, gpu.put(numpy.ones((), dtype)), count)
        del gpu.launched[:]
        found = of_kind.training_forward(x, t)
        assert len(gpu.launched) == 1
        assert found[0] == loss and found[1] == count
        assert found[3].dtype == dtype and found[3].tobytes() == gx.tobytes()
        if divisor is None:
            accuracy, _ = Loss('BINARY_ACCURACY').forward(x, t)
            assert found[2] == accuracy and found[2].dtype == dtype
        else:
            assert found[1] is None and found[2] is None
        assert of_kind.training_forward(x, t, with_gradient=False)[::3] == (loss, None)


def test_too_many_for_anything_along(gpu):
    x, t = map(gpu.put, arrays_of('SIGMOID_CROSS_ENTROPY', 'f', (LOSS_ALONG + 1,)))
    _, _, accuracy, gx = Loss(LABELLED).training_forward(x, t)
    assert gx is None and accuracy == Loss('BINARY_ACCURACY').forward(x, t)[0]
    x, t = map(gpu.put, arrays_of('SIGMOID_CROSS_ENTROPY', 'f', (LOSS_CHUNK + 1,)))
    found = Loss(LABELLED).training_forward(x, t)
    assert found == (*Loss(LABELLED).forward(x, t), None, None)


@pytest.mark.parametrize(
    'kind, t, expected, got',
    [
        ('SQUARED_ERROR', numpy.ones((2, 3)), 'float32', r'float64 of shape \(2, 3\)'),
        ('BINARY_ACCURACY', numpy.ones((2, 1), 'i'), 'integers', r'int32 of shape \(2, 1\)'),
        ('BINARY_ACCURACY', numpy.ones((2, 3), 'f'), 'integers', r'float32 of shape \(2, 3\)'),
    ],
)
def test_what_does_not_fit(kind, t, expected, got):
    message = (
        r'^t: expected %s of the shape of x, \(2, 3\), of fewer than 2\*\*31 elements, got %s$'
    )
    with pytest.raises(ValueError, match=message % (expected, got)):
        Loss(kind).forward(numpy.ones((2, 3), 'f'), t)


@pytest.mark.parametrize('n_rows, kinds', [(128, 'S'), (400, 'Sg'), (1400, 'SSBBg')])
def test_launches_of_a_classifier_s_step(gpu, monkeypatch, n_rows, kinds):
    """Chainer's functions compute loss, accuracy and gradient."""
    monkeypatch.setattr(gemm, 'step_for', lambda array: step.current())
    x, t = arrays_of('SIGMOID_CROSS_ENTROPY', 'f', (n_rows, 12))
    one = numpy.ones((), 'f')

    def results(x, t, one):
        variable = chainer.Variable(x)
        loss = functions.sigmoid_cross_entropy(variable, t)
        accuracy = functions.binary_accuracy(variable, t)
        loss.grad = one
        a_step.one = types.SimpleNamespace(is_seed=lambda gradient: gradient is one)
        loss.backward()
        return loss.array, accuracy.array, variable.grad

    a_step = step.Step(None, 0, None)
    with chainer_nodes.under_way(a_step):
        actual = results(*map(gpu.put, (x, t, one)))
    found = ''.join('g' if d['GRADIENT'] else d['KIND'][0] for d in gpu.launched)
    assert found == kinds and not a_step.losses
    for one_of, other in zip(actual, results(x, t, one)):
        assert_close(one_of, other, 'f')


def test_what_came_along_is_for_the_same_loss(gpu):
    """The gradient that comes with a loss is used once, for the same arrays, if gy is 1."""
    x, t = map(gpu.put, arrays_of('SQUARED_ERROR', 'f', (128, 12)))
    one, two = (gpu.put(numpy.full((), value, 'f')) for value in (1, 2))
    a_step = step.Step(None, 0, None)
    a_step.one = types.SimpleNamespace(is_seed=lambda gradient: gradient is one)
    squared, metric = (Loss(kind, x.size) for kind in ('SQUARED_ERROR', 'ABSOLUTE_ERROR'))
    with chainer_nodes.under_way(a_step):
        chainer_nodes._loss_forward(a_step, squared, x, t)
        chainer_nodes._loss_forward(
            a_step, squared._replace(kind='ABSOLUTE_ERROR'), x, t
        )  # this is a metric
        for n_launches, loss, *arrays in (
            (1, squared, gpu.put(x + 1), t, one),
            (1, squared, x, gpu.put(t + 1), one),
            (1, squared, x, t, two),
            (1, squared._replace(ignore_nan=True), x, t, one),
            (1, squared._replace(divisor=7), x, t, one),
            (0, squared, x, t, one),
            (1, squared, x, t, one),
        ):
            del gpu.launched[:]
            found = chainer_nodes._loss_backward(a_step, loss, *arrays)
            assert len(gpu.launched) == n_launches
            assert found.tobytes() == loss.backward(*arrays).tobytes()
