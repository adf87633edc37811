"""Chainer's own nodes have the same results and gradients inside a step, by its products."""

import itertools
import threading

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer.functions.connection.linear import LinearGradData, LinearGradWeight
from chainer_chemistry.functions import mean_absolute_error as masked_mean_absolute_error
from chainer_chemistry.functions import mean_squared_error as masked_mean_squared_error
from chainer_chemistry.functions import r2_score as masked_r2_score
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler

from chainer_bspmm.cuda import gemm, step
from chainer_bspmm.ops.linear_softmax import linear_softmax
from chainer_bspmm.ops.mean_loss import Loss
from chainer_bspmm.training import chainer_nodes, training_step
from chainer_bspmm.training.cuda_graphs import Capturer
from tests.support import reference, relative_error
from tests.support.layers import linear_relu
from tests.training import host_graphs


class HostBlas:
    """Products by NumPy, counted."""

    def __init__(self):
        self.n_products = 0

    def dot(self, a, b, to=None):
        self.n_products += 1
        return numpy.asarray(host_graphs.dot(a, b, to))

    def matmul(self, a, b):
        self.n_products += 1
        return numpy.asarray(numpy.matmul(a, b))


class CountingBlas(gemm.Blas):
    n_products = 0

    def _matrices(self, a, b, to=None):
        self.n_products += 1
        return super()._matrices(a, b, to)


@pytest.fixture
def a_step(xp, monkeypatch):
    """A step that counts its products, and that takes NumPy arrays, too."""
    if xp is numpy:
        monkeypatch.setattr(gemm, 'step_for', lambda array: step.current())
    return step.Step(HostBlas() if xp is numpy else CountingBlas(), 0, None)


def matmul(**options):
    return lambda a, b: functions.matmul(a, b, **options)


def linear_grad_weight(given):
    return LinearGradWeight(given[0].dtype).apply(given)


# name -> (function, shapes of the inputs)
CASES: dict[str, tuple] = {
    'linear': (functions.linear, [(5, 7), (3, 7), (3,)]),
    'linear without bias': (functions.linear, [(5, 7), (3, 7)]),
    'linear of no rows': (functions.linear, [(0, 7), (3, 7), (3,)]),
    'LinearGradData': (lambda W, gy: LinearGradData().apply((W, gy))[0], [(3, 7), (5, 3)]),
    'LinearGradWeight': (lambda x, gy: linear_grad_weight((x, gy))[0], [(5, 7), (5, 3)]),
    'linear_relu': (linear_relu, [(5, 7), (3, 7), (3,)]),
    'linear_softmax': (lambda *layer: linear_softmax(layer), [(5, 7), (3, 7), (3,)]),
}
for a, b in itertools.product((False, True), repeat=2):
    shapes = [(7, 5) if a else (5, 7), (3, 7) if b else (7, 3)]
    options = {'transa': a, 'transb': b}
    CASES['matmul %s' % options] = matmul(**options), shapes
    CASES['matmul of stacks %s' % options] = matmul(**options), [(2,) + s for s in shapes]
    shapes = [(2, 1) + shapes[0], (1, 4) + shapes[1]]
    CASES['matmul, broadcast %s' % options] = matmul(**options), shapes
CASES['matmul of vectors'] = matmul(), [(7,), (7,)]
# Part of the gradients of their gradients comes from chainer.functions.tensordot.
VECTORS = {
    'matrix times vector': (matmul(), [(5, 7), (7,)]),
    'vector times stack': (matmul(), [(7,), (2, 7, 3)]),
}


def inputs_of(xp, shapes, dtype):
    rng = numpy.random.RandomState(0)
    return [xp.asarray(rng.uniform(-1, 1, shape).astype(dtype)) for shape in shapes]


BOUNDS = {'float16': 2e-3, 'float32': 1e-6, 'float64': 1e-14}


def assert_alike(actual, expected, bound):
    """Check that arrays of two lists have the same types and dtypes, and are close."""
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert type(one) is type(other)
        assert relative_error(one, other) < bound


def outputs_and_gradients(function, arrays):
    """Return as arrays the output, the gradients, and the gradients of a function of these."""
    variables = [chainer.Variable(array) for array in arrays]
    y = function(*variables)
    first = chainer.grad([y], variables, [functions.cos(y)], enable_double_backprop=True)
    total = sum(functions.sum(functions.sin(g)) for g in first)
    second = chainer.grad([total], variables)
    assert all(gradient is not None for gradient in second)
    return [variable.array for variable in (y, *first, *second)]


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', CASES)
def test_same_as_outside(xp, a_step, name, dtype):
    function, shapes = CASES[name]
    arrays = inputs_of(xp, shapes, dtype)
    expected = outputs_and_gradients(function, arrays)
    assert a_step.blas.n_products == 0
    with chainer_nodes.under_way(a_step):
        actual = outputs_and_gradients(function, arrays)
    n_products = a_step.blas.n_products
    assert n_products > 0 and actual[0].dtype == dtype
    assert_alike(actual, expected, {**BOUNDS, 'float32': 2e-6}[dtype])
    # Outside of the step, Chainer's nodes are as before.
    for one, other in zip(outputs_and_gradients(function, arrays), expected):
        assert (one == other).all()
    assert a_step.blas.n_products == n_products


@pytest.mark.parametrize('name', VECTORS)
def test_products_with_vectors(xp, a_step, name):
    function, shapes = VECTORS[name]
    arrays = inputs_of(xp, shapes, 'float64')
    with chainer_nodes.under_way(a_step):
        y = function(*arrays)
    assert a_step.blas.n_products == 1
    assert relative_error(y.array, function(*arrays).array) < 1e-14


@pytest.mark.parametrize('dtypes', [('float16', 'float32'), ('float32', 'float16')])
def test_mixed_dtypes(xp, a_step, dtypes):
    (x,) = inputs_of(xp, [(5, 7)], dtypes[0])
    (W,) = inputs_of(xp, [(3, 7)], dtypes[1])
    (gy,) = inputs_of(xp, [(5, 3)], dtypes[0])
    functions_ = (
        lambda: functions.linear(x, W).array,
        lambda: functions.matmul(x, W, transb=True).array,
        lambda: LinearGradData().apply((W, gy))[0].array,
        lambda: LinearGradWeight(W.dtype).apply((x, gy))[0].array,
    )
    for function in functions_:
        expected = function()
        with chainer_nodes.under_way(a_step):
            actual = function()
        assert actual.dtype == expected.dtype
        assert relative_error(actual, expected) < 1e-3
    assert a_step.blas.n_products == len(functions_)


@pytest.fixture
def n_losses(noted):
    """List with an item for each call for a loss, a metric or a gradient."""
    counts = []
    for name in ('forward', 'training_forward', 'backward'):
        noted(Loss, name, counts)
    return counts


def of_labels(lossfun, **options):
    """Return a loss of scores for labels of which a third is -1."""

    def loss(x):
        labels = x.xp.arange(x.size, dtype='i') % 3 - 1
        return lossfun(x, labels.reshape(x.shape), **options)

    return loss


def of_no_labels(lossfun, **options):
    return lambda x: lossfun(x, x.xp.full(x.shape, -1, 'i'), **options)


def of_some(lossfun):
    """Return a loss of predictions for targets of which a third is NaN."""

    def loss(x):
        t = functions.sin(x).array.ravel()
        t[::3] = numpy.nan
        return lossfun(x, t.reshape(x.shape), ignore_nan=True)

    return loss


# name -> (function, number of arrays)
entropy = functions.sigmoid_cross_entropy
LOSSES = {
    'sigmoid_cross_entropy': (of_labels(entropy), 1),
    'sigmoid_cross_entropy, not normalised': (of_labels(entropy, normalize=False), 1),
    'sigmoid_cross_entropy of none': (of_no_labels(entropy), 1),
    'mean_squared_error': (functions.mean_squared_error, 2),
    'mean_absolute_error': (functions.mean_absolute_error, 2),
    'masked mean_squared_error': (masked_mean_squared_error, 2),
    'masked mean_absolute_error': (masked_mean_absolute_error, 2),
    'masked mean_squared_error, of some': (of_some(masked_mean_squared_error), 1),
    'masked mean_absolute_error, of some': (of_some(masked_mean_absolute_error), 1),
}
LOSS_CASES = [
    (name, dtype, shape)
    for name, (_, n_arrays) in LOSSES.items()
    for dtype in ('float16', 'float32', 'float64')
    for shape in ((5, 7), (5,), (1, 1), (0, 3))
    if 'some' not in name or shape == (5, 7)  # upstream divides by 0 for one element or none
    if dtype == 'float32' or 'masked' not in name  # Chainer Chemistry allows no other
    if n_arrays == 1 or 0 not in shape  # Chainer divides by 0
]


@pytest.mark.parametrize('name, dtype, shape', LOSS_CASES)
def test_losses(xp, a_step, n_losses, name, dtype, shape):
    function, n_arrays = LOSSES[name]
    arrays = [4 * array for array in inputs_of(xp, [shape] * n_arrays, dtype)]
    expected = output_and_gradients(function, arrays)
    assert not n_losses
    with chainer_nodes.under_way(a_step):
        actual = output_and_gradients(function, arrays)
    assert len(n_losses) == 2 and a_step.blas.n_products == 0 and actual[0].dtype == dtype
    assert_alike(actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize('name', [name for name in LOSSES if 'masked mean_absolute' not in name])
def test_gradients_of_gradients_of_losses(xp, a_step, n_losses, name):
    function, n_arrays = LOSSES[name]
    dtype = 'float32' if 'masked' in name else 'float64'
    arrays = inputs_of(xp, [(5, 7)] * n_arrays, dtype)
    expected = outputs_and_gradients(function, arrays)
    with chainer_nodes.under_way(a_step):
        actual = outputs_and_gradients(function, arrays)
    assert n_losses
    assert_alike(actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_binary_accuracy(xp, a_step, n_losses, dtype):
    (x,) = inputs_of(xp, [(5, 7)], dtype)
    for labels in (of_labels, of_no_labels):
        function = labels(functions.binary_accuracy)
        expected = function(chainer.Variable(x)).array
        with chainer_nodes.under_way(a_step):
            actual = function(chainer.Variable(x)).array
        assert actual.shape == ()
        assert_alike([actual], [expected], {'float16': 1e-3}.get(dtype, 1e-7))
    assert len(n_losses) == 2


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('lossfun', [functions.sigmoid_cross_entropy, functions.mean_squared_error])
def test_one_launch_for_all_of_a_loss(xp, a_step, n_losses, lossfun, dtype):
    """The launch of the loss computes its gradient, because a step knows that gy is 1."""
    x, t = inputs_of(xp, [(5, 7)] * 2, dtype)
    if lossfun is functions.sigmoid_cross_entropy:
        t = (t > 0).astype('i')

    def results():
        scores = chainer.Variable(x)
        loss = lossfun(scores, t)
        actual = [loss.array]
        if t.dtype.kind == 'i':
            actual.append(functions.binary_accuracy(scores, t).array)
        a_step.one.set(loss)
        loss.backward()
        return [*actual, scores.grad]

    a_step.one = training_step.SeedGradient(chainer.backend.get_device_from_array(x))
    expected = results()
    with chainer_nodes.under_way(a_step):
        actual = results()
    assert len(n_losses) == 1 and actual[0].dtype == dtype
    assert_alike(actual, expected, {'float16': 2e-3}.get(dtype, 1e-6))


def test_an_accuracy_that_is_asked_for_twice(xp, a_step):
    x, t = inputs_of(xp, [(5, 7)] * 2, 'float32')
    t = (t > 0).astype('i')
    with chainer_nodes.under_way(a_step):
        functions.sigmoid_cross_entropy(chainer.Variable(x), t)
        first, second = (functions.binary_accuracy(x, t).array for _ in range(2))
    assert first is not second and first == second


def test_cross_entropy_of_each_is_chainer_s(xp, a_step, n_losses):
    function = of_labels(functions.sigmoid_cross_entropy, reduce='no')
    arrays = inputs_of(xp, [(5, 7)], 'float32')
    expected = output_and_gradients(function, arrays)
    with chainer_nodes.under_way(a_step):
        actual = output_and_gradients(function, arrays)
    assert not n_losses
    for one, other in zip(actual, expected, strict=True):
        assert (one == other).all()


def labelled(lossfun, **options):
    """Return a function of scores (9, 4) for classes of which some are -1."""

    def loss(x):
        t = x.xp.arange(9, dtype='i') % 4
        return lossfun(x, x.xp.where(t == 3, numpy.int32(-1), t), **options)

    return loss


def with_nan(score, **options):
    """Return a metric of predictions (9, 4) for targets with one NaN and one constant column."""

    def metric(x):
        t = functions.sin(x).array
        t[:, 1] = 5
        if options.get('ignore_nan'):
            t[2, 0] = numpy.nan
        return score(x, t, **options)

    return metric


accuracy = functions.accuracy
softmax_loss = functions.softmax_cross_entropy
scores = [(9, 4)]
# Functions for which CuPy would send a table from the host, or wait for a count from the device.
COPIES = {
    'concat of nine': (lambda *xs: functions.concat(xs, axis=1), [(5, n) for n in range(9)]),
    'concat of stacks': (lambda *xs: functions.concat(xs, -2), [(3, n + 1, 2) for n in range(9)]),
    'concat of many': (lambda *xs: functions.concat(xs, axis=0), [(2,)] * 150),
    'concat of columns': (lambda x, *xs: functions.concat((x.T, *xs)), [(7, 5)] + [(5, 1)] * 8),
    'stack of nine': (lambda *xs: functions.stack(xs, axis=1), [(5, 7)] * 9),
    'stack of nine, last axis': (lambda *xs: functions.stack(xs, axis=-1), [(5, 7)] * 9),
    'separate': (lambda x: sum(functions.separate(x, axis=1)), [(5, 9)]),
    'split_axis': (lambda x: sum(functions.split_axis(x, 9, axis=1)), [(5, 18)]),
    'accuracy': (labelled(accuracy, ignore_label=-1), scores),
    'accuracy of all': (lambda x: accuracy(x, x.xp.arange(9, dtype='i') % 4), scores),
    'accuracy without a class': (
        *(lambda x: accuracy(x, x.xp.arange(9, dtype='i') % 2, ignore_label=0), [(9, 2)]),
    ),
    'accuracy of none': (lambda x: accuracy(x, x.xp.full(9, -1, 'i'), ignore_label=-1), scores),
    'r2_score': (with_nan(functions.r2_score), scores),
    'r2_score, each': (with_nan(functions.r2_score, multioutput='raw_values'), scores),
    'masked r2_score': (with_nan(masked_r2_score, ignore_nan=True), scores),
    'softmax_cross_entropy': (labelled(softmax_loss), scores),
    'softmax_cross_entropy, not normalised': (labelled(softmax_loss, normalize=False), scores),
    'softmax_cross_entropy, each': (labelled(softmax_loss, reduce='no'), scores),
    'softmax_cross_entropy, soft targets': (
        *(lambda x: softmax_loss(x, functions.softmax(x).array, normalize=False), scores),
    ),
    'sigmoid_cross_entropy': (of_labels(entropy), scores),
}


def output_and_gradients(function, arrays):
    """Return the output and the gradients, if there are any, as arrays."""
    variables = [chainer.Variable(array) for array in arrays]
    y = function(*variables)
    gradients = chainer.grad([y], variables, [chainer.Variable(y.xp.full(y.shape, 2, y.dtype))])
    return [variable.array for variable in (y, *gradients) if variable is not None]


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('name', COPIES)
def test_what_would_copy(xp, a_step, name, dtype):
    function, shapes = COPIES[name]
    arrays = inputs_of(xp, shapes, dtype)
    expected = output_and_gradients(function, arrays)
    with chainer_nodes.under_way(a_step):
        actual = output_and_gradients(function, arrays)
        if xp is not numpy:
            gpu = Capturer(chainer.get_device('@cupy:0'))
            again = output_and_gradients
            replay, actual = gpu.capture(lambda: again(function, arrays))
            replay()
    assert_alike(actual, expected, BOUNDS[dtype])


def test_numpy_arrays_are_left_alone_in_a_step():
    x, W, b = inputs_of(numpy, [(5, 7), (3, 7), (3,)], 'float32')
    expected = outputs_and_gradients(functions.linear, (x, W, b))
    with chainer_nodes.under_way(step.Step(None, 0, None)):
        for one, other in zip(outputs_and_gradients(functions.linear, (x, W, b)), expected):
            assert (one == other).all()


def test_a_step_does_without_cudnn():
    with chainer.using_config('use_cudnn', 'auto'):
        with pytest.raises(KeyError), chainer_nodes.under_way(step.Step(None, 0, None)):
            assert chainer.config.use_cudnn == 'never'
            raise KeyError
        assert chainer.config.use_cudnn == 'auto'


def test_dropout(xp, a_step):
    """Dropout draws by the seed, the number and the layer of a step; outside it is Chainer's."""
    a_step.seed = 5
    a_step.counter = xp.full(1, 9, numpy.uint64)
    with chainer_nodes.under_way(a_step):
        for layer in range(2):
            x = chainer.Variable(xp.ones((4, 3), 'f'))
            y = functions.dropout(x, 0.25)
            y.grad = xp.ones((4, 3), 'f')
            y.backward()
            expected = (reference.kept(12, 0.25, 5, layer, 9) / numpy.float32(0.75)).reshape(4, 3)
            for array in (y.array, x.grad):
                numpy.testing.assert_allclose(cuda.to_cpu(array), expected, 1e-6)
    outside = cuda.to_cpu(functions.dropout(x, 0.25).array)
    assert set(numpy.unique(outside)) <= {0, numpy.float32(1 / 0.75)}
    assert a_step.next_stream() == 2  # dropout outside of the step has taken no stream


@pytest.mark.parametrize('indices', [None, [0, 2, 3]])
def test_standard_scaler(xp, a_step, noted, indices):
    labels = numpy.random.RandomState(0).uniform(-1, 1, (9, 4)).astype('f')
    labels[:, 2] = 5  # a deviation of 0
    scaler = StandardScaler()
    scaler.fit(labels, indices=indices)
    if xp is not numpy:
        scaler.to_device('@cupy:%d' % xp.cuda.Device().id)
    x = chainer.Variable(xp.asarray(labels + 1))
    expected = scaler.transform(x).array, scaler.inverse_transform(x).array
    asked = noted(chainer_nodes, '_mean_and_deviation')
    with chainer_nodes.under_way(a_step):
        actual = scaler.transform(x).array, scaler.inverse_transform(x).array
    assert len(asked) == 2
    for one, other in zip(actual, expected):
        assert one.dtype == other.dtype == 'float32'
        assert (one == other).all()
    scaler.transform(x)
    assert len(asked) == 2


def test_a_step_in_another_thread(monkeypatch):
    """A step that ends leaves a step of another thread its nodes; other threads have Chainer's."""
    monkeypatch.setattr(gemm, 'step_for', lambda array: step.current())
    x, W = inputs_of(numpy, [(5, 7), (3, 7)], 'float32')
    blas = HostBlas()
    is_inside, may_end = threading.Event(), threading.Event()

    def other():
        with chainer_nodes.under_way(step.Step(HostBlas(), 0, None)):
            is_inside.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    is_inside.wait()
    functions.linear(x, W)  # there is no step in this thread
    with chainer_nodes.under_way(step.Step(blas, 0, None)):
        may_end.set()
        thread.join()
        functions.linear(x, W)
        assert blas.n_products == 1
    functions.linear(x, W)  # its step has ended
    assert blas.n_products == 1
