"""`gated_linear`, compared with Chainer's nodes; second derivatives, refusals."""

import functools

import numpy
import pytest

from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.ops.gates import gated_linear as module
from chainer_bspmm.ops.gates.gated_linear import gated_linear
from tests.support import DTYPES, relative_error
from tests.support.gradients import assert_gradients_of_changed_inputs, assert_same_outcome
from tests.support.gradients import check_gradients, outcome

N, OUT = 9, 4
ACTIVATIONS = [functions.identity, functions.tanh]
WIDTHS = [(5,), (3, 2)]


def arrays(widths, with_bias, dtype='float64', n_rows=N):
    rng = numpy.random.RandomState(0)
    shapes = [(n_rows, width) for width in widths]
    shapes += [(OUT, sum(widths))] * 2 + [(OUT,)] * 2 * with_bias
    return [rng.uniform(-1, 1, shape).astype(dtype) for shape in shapes]


def apply(n_parts, activation, *inputs):
    h, h0 = inputs[:2] if n_parts == 2 else (inputs[0], None)
    W_gate, W_value, *biases = inputs[n_parts:]
    b_gate, b_value = biases or (None, None)
    return gated_linear(h, h0, (W_gate, b_gate), (W_value, b_value), activation)


def in_chainers_nodes(n_parts, activation, *inputs):
    x = functions.concat(inputs[:n_parts], axis=1)
    W_gate, W_value, *biases = inputs[n_parts:]
    b_gate, b_value = biases or (None, None)
    gate = functions.linear(x, W_gate, b_gate)
    value = functions.linear(x, W_value, b_value)
    return functions.sigmoid(gate) * activation(value)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('activation', ACTIVATIONS)
@pytest.mark.parametrize('with_bias', [False, True])
@pytest.mark.parametrize('widths', WIDTHS, ids=str)
def test_same_as_chainers_nodes(xp, dtype, activation, with_bias, widths):
    inputs = [xp.asarray(array) for array in arrays(widths, with_bias, dtype)]
    ours = functools.partial(apply, len(widths), activation)
    theirs = functools.partial(in_chainers_nodes, len(widths), activation)
    expected = outcome(theirs, [array.astype('d') for array in inputs])
    # In float16 an element has about twenty roundings of 2**-11.
    bound = {'float16': 5e-3, 'float32': 1e-6, 'float64': 1e-14}[dtype]
    assert_same_outcome(outcome(ours, inputs), expected, dtype, bound)


@pytest.mark.parametrize('widths', [(128,), (64, 64)], ids=str)
def test_as_wide_as_models_are(xp, widths):
    """A GPU loads 16 bytes at a time."""
    inputs = [array / 4 for array in arrays(widths, True, n_rows=2300)]
    ours = functools.partial(apply, len(widths), functions.tanh)
    theirs = functools.partial(in_chainers_nodes, len(widths), functions.tanh)
    found = outcome(ours, [xp.asarray(array.astype('f')) for array in inputs])
    assert_same_outcome(found, outcome(theirs, inputs), 'f', 2e-6)


@pytest.mark.parametrize('activation', ACTIVATIONS)
@pytest.mark.parametrize('with_bias', [False, True])
@pytest.mark.parametrize('widths', WIDTHS, ids=str)
def test_gradients(xp, activation, with_bias, widths):
    inputs = map(xp.asarray, arrays(widths, with_bias))
    check_gradients(lambda *inputs: apply(len(widths), activation, *inputs), *inputs)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('is_tanh', [False, True])
def test_kernels_between_products(gpu, is_tanh, dtype):
    """They run where the weights do not fit into one kernel."""
    rng = numpy.random.RandomState(0)
    both, gy = (rng.uniform(-2, 2, (N, width)).astype(dtype) for width in (2 * OUT, OUT))
    found, expected = (gates(put(both), put(gy), is_tanh) for put in (gpu.put, in_float64))
    bound = {'float16': 5e-3, 'float32': 1e-6, 'float64': 1e-14}[dtype]
    assert_same_outcome([cuda.to_cpu(array) for array in found], expected, dtype, bound)


def in_float64(array):
    return array.astype('d')


def gates(both, gy, is_tanh):
    """Return the gated rows, and the gradient of both maps."""
    *maps, y = module._gated(both, is_tanh)
    return y, module._gated_gradient(gy, *maps, is_tanh=is_tanh)


@pytest.mark.parametrize('widths', WIDTHS, ids=str)
def test_parameters_that_change_before_the_backward_pass(widths):
    ours = functools.partial(apply, len(widths), functions.tanh)
    theirs = functools.partial(in_chainers_nodes, len(widths), functions.tanh)
    indexes = range(len(widths), len(widths) + 4)
    assert_gradients_of_changed_inputs(ours, theirs, arrays(widths, True), indexes)


def test_one_variable_as_both_parts():
    x, _, *parameters = arrays((3, 3), True)
    y, first, second, *_ = outcome(lambda a, b: apply(2, functions.tanh, a, b, *parameters), [x, x])
    for higher in (False, True):
        same = outcome(lambda a: apply(2, functions.tanh, a, a, *parameters), [x], None, higher)
        assert_same_outcome(same, [y, first + second], 'd', 1e-14)


def test_no_rows(xp):
    x, *parameters = [xp.asarray(array) for array in arrays((5,), True, 'float32')]
    assert apply(1, functions.identity, x[:0], *parameters).shape == (0, OUT)


def test_gradients_without_outputs(xp):
    x, *parameters = [xp.asarray(array) for array in arrays((5,), True, 'float32')]
    inputs = [x, *(array[:0] for array in parameters)]
    y, *gradients = outcome(functools.partial(apply, 1, functions.tanh), inputs)
    assert y.shape == (N, 0) and not gradients[0].any()
    assert [array.shape for array in gradients] == [array.shape for array in inputs]


def test_large_numbers_do_not_overflow(xp):
    x, *parameters = [xp.asarray(array) for array in arrays((5,), True, 'float32')]
    with numpy.errstate(all='raise', under='ignore'):
        y = cuda.to_cpu(apply(1, functions.tanh, 1e4 * x, *parameters).array)
    assert numpy.isfinite(y).all()


@pytest.mark.parametrize(
    'change, message',
    [
        (
            {'activation': functions.relu},
            'activation: expected .*identity or tanh, got <function relu at 0x.*>',
        ),
        (
            {'gate': (numpy.ones((4, 6)), numpy.ones(4))},
            r'gate\[0\]: expected shape \(4, 5\) to go with h and h0 of 5 columns .* got \(4, 6\)',
        ),
        (
            {'value': (numpy.ones((4, 5)), numpy.ones(3))},
            r'value\[1\]: expected shape \(4,\) to go with h and h0 of 5 columns .* got \(3,\)',
        ),
        ({'value': (numpy.ones((4, 5)), None)}, 'gate, value: expected a bias in both or in none'),
    ],
)
def test_what_does_not_fit(change, message):
    pair = numpy.ones((4, 5)), numpy.ones(4)
    with pytest.raises(ValueError, match=message):
        gated_linear(**{'h': numpy.ones((9, 5)), 'h0': None, 'gate': pair, 'value': pair, **change})


@pytest.mark.parametrize('is_tanh', [False, True])
@pytest.mark.parametrize('dtype, bound', [('e', 5e-3), ('f', 1e-6), ('d', 1e-14)])
def test_gates_of_products(gpu, dtype, bound, is_tanh):
    """A GPU keeps the maps and calculates the gate again, a host keeps the gate and the value."""
    rng = numpy.random.RandomState(0)
    both = rng.uniform(-3, 3, (5, 14)).astype(dtype)
    gy = rng.uniform(-1, 1, (5, 7)).astype(dtype)
    *kept, y = module._gated(gpu.put(both), is_tanh)
    assert len(kept) == 1
    g = module._gated_gradient(gpu.put(gy), *kept, is_tanh=is_tanh)
    *on_host, expected = module._gated(both.astype('d'), is_tanh)
    assert y.dtype == dtype and relative_error(y, expected) < bound
    expected = module._gated_gradient(gy.astype('d'), *on_host, is_tanh=is_tanh)
    assert g.dtype == dtype and relative_error(g, expected) < bound


@pytest.mark.parametrize('n_rows', [N - 1, N + 1])
def test_parts_of_unequal_length(n_rows):
    first, second, *parameters = arrays((3, 2), True)
    part = numpy.ones((n_rows, 2))
    message = r'h0: expected a row for each row of h, got shapes \(%d, 2\)' % n_rows
    with pytest.raises(ValueError, match=message):
        apply(2, functions.tanh, first, part, *parameters)
