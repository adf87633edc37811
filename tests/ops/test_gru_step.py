"""`gru_step`, compared with Chainer's StatefulGRU; second derivatives, refusals."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.ops.gates import gru_step as module
from chainer_bspmm.ops.gates.gru_step import gru_step
from tests.support import DTYPES, relative_error
from tests.support.gradients import assert_gradients_of_changed_inputs, assert_same_outcome
from tests.support.gradients import check_gradients, gradient_of, outcome

N, C, M, H = 7, 3, 2, 5


def arrays(dtype='float64', with_state=True, seed=0):
    """Return x, message, state if there is one, and every W and b, on the host."""
    rng = numpy.random.RandomState(seed)
    shapes = [(N, C), (N, M)] + [(N, H)] * with_state
    shapes += [(H, C + M), (H,)] * (3 if with_state else 2) + [(H, H), (H,)] * (3 * with_state)
    return [rng.uniform(-1, 1, shape).astype(dtype) for shape in shapes]


def step(*inputs):
    with_state = len(inputs) > 6
    parameters = inputs[2 + with_state :]
    pairs = list(zip(parameters[::2], parameters[1::2]))
    return gru_step(inputs[0], inputs[1], inputs[2] if with_state else None, pairs)


def chainers_own(*inputs):
    """Compute the result by chainer.links.StatefulGRU."""
    with_state = len(inputs) > 6
    with chainer.using_config('dtype', inputs[0].dtype):
        link = chainer.links.StatefulGRU(C + M, H)
    names = ('W', 'W_z', 'W_r', 'U', 'U_z', 'U_r') if with_state else ('W', 'W_z')
    for name, W, b in zip(names, inputs[2 + with_state :: 2], inputs[3 + with_state :: 2]):
        layer = getattr(link, name)
        del layer.W, layer.b  # replaced by variables
        layer.W, layer.b = W, b
    if with_state:
        link.set_state(inputs[2])
    return link(chainer.functions.concat(inputs[:2]))


@pytest.mark.parametrize('with_state', [False, True])
@pytest.mark.parametrize('dtype, tolerance', [('float32', 2e-6), ('float64', 1e-14)])
def test_is_chainers_own(xp, with_state, dtype, tolerance):
    inputs = arrays(dtype, with_state)
    found = outcome(step, map(xp.asarray, inputs))
    assert_same_outcome(found, outcome(chainers_own, inputs), dtype, tolerance)


@pytest.mark.parametrize('with_state', [False, True])
def test_large_numbers_do_not_overflow(with_state):
    inputs = [100 * array for array in arrays('float32', with_state)]
    with numpy.errstate(all='raise', under='ignore'):
        y = step(*inputs).array
    assert relative_error(y, outcome(chainers_own, inputs)[0]) < 1e-5


@pytest.mark.parametrize('with_state', [False, True])
def test_gradients(xp, with_state):
    check_gradients(step, *map(xp.asarray, arrays(with_state=with_state)))


def test_features_that_are_the_state():
    """A GGNN with tied weights passes its state as features in every step but the first."""
    rng = numpy.random.RandomState(0)
    shapes = [(N, H), (N, M)] + [(H, H + M), (H,)] * 3 + [(H, H), (H,)] * 3
    x, message, *parameters = [rng.uniform(-1, 1, shape) for shape in shapes]
    y, first, second = outcome(lambda x, state: step(x, message, state, *parameters), [x, x])
    for higher in (False, True):
        same = outcome(lambda x: step(x, message, x, *parameters), [x], None, higher)
        assert_same_outcome(same, [y, first + second], 'd', 1e-14)


def test_weights_whose_sum_float16_cannot_hold():
    shapes = [(H, H + M), (H,)] * 3 + [(H, H), (H,)] * 3
    parameters = [numpy.zeros(shape, 'float16') for shape in shapes]
    for W in (parameters[2], parameters[8]):  # of the update gate, for x and for the state
        W[:, :H] = 4e4
    x = numpy.full((N, H), 1e-4, 'float16')
    message = numpy.zeros((N, M), 'float16')
    with numpy.errstate(all='raise', under='ignore'):
        y = step(x, message, x, *parameters).array
    assert abs(y).max() < 1e-4  # between x and the candidate, 0


def drawn(state, widths, n_rows):
    """Return x, message, the state if it is given, and parameters, in float64."""
    rng = numpy.random.RandomState(0)
    n_in, n_message, n = widths
    shapes = [(n_rows, n_in), (n_rows, n_message)] + [(n_rows, n)] * (state == 'given')
    shapes += [(n, n_in + n_message), (n,)] * (2 if state is None else 3)
    shapes += [(n, n), (n,)] * (0 if state is None else 3)
    return [rng.uniform(-1, 1, shape) for shape in shapes]


def of_state(function, state):
    """Return the function of the inputs that `drawn` gives."""
    if state != 'x':
        return function
    return lambda x, message, *parameters: function(x, message, x, *parameters)


@pytest.mark.parametrize('state', [None, 'given', 'x'])
def test_parameters_that_change_before_the_backward_pass(state):
    inputs = drawn(state, (5, 2, 5), n_rows=N)
    first = 3 if state == 'given' else 2
    assert_gradients_of_changed_inputs(
        of_state(step, state), of_state(chainers_own, state), inputs, range(first, len(inputs))
    )


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'state, widths', [(None, (3, 2, 5)), ('given', (3, 2, 5)), ('x', (5, 2, 5)), ('x', (33, 7, 33))]
)
def test_kernels_between_products(gpu, monkeypatch, state, widths, dtype):
    """They run where the weights do not fit into one kernel."""
    monkeypatch.setattr(module, 'gated_step_forward', lambda *_: None)
    inputs = [array.astype(dtype) for array in drawn(state, widths, n_rows=9)]
    node = module.GRUStep(state)
    on_device = [gpu.put(array) for array in inputs]
    y = node._output(on_device)
    gy = gpu.put(gradient_of(y))
    found = [y, *node._gradients(on_device, gy, range(len(inputs)))]
    expected = outcome(of_state(step, state), [array.astype('d') for array in inputs])
    bound = {'float16': 5e-3, 'float32': 2e-6, 'float64': 1e-14}[dtype]
    assert_same_outcome([cuda.to_cpu(array) for array in found], expected, dtype, bound)


@pytest.mark.parametrize('n_rows, n', [(600, 64), (2300, 64), (5000, 64), (600, 256)])
@pytest.mark.parametrize('state', ['none', 'given', 'x'])
def test_as_wide_as_models_are(xp, state, n_rows, n):
    """A GPU uses another kernel for each of these numbers of rows, and loads 16 bytes at a time.

    If the weights of 256 units do not fit into a kernel, the step is computed as products.
    """
    rng = numpy.random.RandomState(0)
    with_state = state != 'none'
    shapes = [(n_rows, n)] * (3 if state == 'given' else 2)
    shapes += [(n, 2 * n), (n,)] * (2 + with_state) + [(n, n), (n,)] * (3 * with_state)
    arrays = [rng.uniform(-1, 1, shape) / (shape[-1] / 8) ** 0.5 for shape in shapes]

    function = of_state(step, state)
    found = outcome(function, [xp.asarray(array.astype('f')) for array in arrays])
    assert_same_outcome(found, outcome(function, arrays), 'f', 2e-6)


@pytest.mark.parametrize(
    'index, shape, message',
    [
        (1, (N + 1, M), r'message: .* each row of x, got shapes \(8, 2\) and \(7, 3\)'),
        (
            2,
            (N + 1, H),
            r'state: expected shape \(7, 5\), got \(8, 5\); reset_state\(\) clears the '
            'state of another batch',
        ),
        (3, (H, C), r'parameters\[0\]\[0\]: expected shape \(5, 5\) to go with x, .* got \(5, 3\)'),
        (10, (H + 1,), r'parameters\[3\]\[1\]: expected shape \(5,\) .* got \(6,\)'),
    ],
)
def test_what_does_not_fit(index, shape, message):
    inputs = arrays()
    inputs[index] = numpy.ones(shape)
    with pytest.raises(ValueError, match=message):
        step(*inputs)


@pytest.mark.parametrize(
    'with_state, n_pairs', [(False, 0), (False, 3), (False, 6), (True, 2), (True, 3)]
)
def test_number_of_parameters(with_state, n_pairs):
    x, message, *rest = arrays(with_state=with_state)
    state = rest.pop(0) if with_state else None
    message_of = 'parameters: expected %s a state, got %d' % (
        '6 pairs with' if with_state else '2 pairs without',
        n_pairs,
    )
    with pytest.raises(ValueError, match=message_of):
        gru_step(x, message, state, [rest[:2]] * n_pairs)


def test_features_that_are_integers():
    x, *others = arrays()
    with pytest.raises(TypeError, match='x: expected float16, .*, got int64'):
        step(x.astype('int64'), *others)
