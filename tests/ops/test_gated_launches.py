"""Kernels of gates and of steps of a recurrent unit, and gradients, compared with float64."""

import numpy
import pytest

from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import gemm
from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.ops.gates import launches
from chainer_bspmm.ops.gates.gated_linear import GatedLinear
from chainer_bspmm.ops.gates.gru_step import GRUStep
from chainer_bspmm.ops.gates.launches import gated_step_backward, gated_step_forward
from tests.support.cases import pairs
from tests.support.devices import on_an_emulated_device, slow_unless


# Roundings to the dtype of results, of values that are kept for gradients, and of sums.
BOUND = {'e': 2**-8, 'f': 2**-18, 'd': 2**-46}


def arrays(n_rows, widths, has_state, has_bias=True):
    """Return gy, x, the message (None without columns), the state, and parameters in float64."""
    rng = numpy.random.RandomState(0)
    x, message, out = widths

    def draw(*shape):
        return rng.uniform(-1, 1, shape) / (1 if len(shape) == 1 else max(shape[1], 1) ** 0.5)

    rows = [draw(n_rows, width) for width in (out, x, message, out)]
    n = 2 + has_state
    pairs = [(draw(out, x + message), draw(out) if has_bias else None) for _ in range(n)]
    pairs += [(draw(out, out), draw(out)) for _ in range(3 * has_state)]
    return rows[0], rows[1], rows[2] if message else None, rows[3] if has_state else None, pairs


def expected(gy, x, message, state, pairs, is_tanh):
    """Compute the result and all gradients by the nodes on a host."""
    parameters = [array for pair in pairs for array in pair if array is not None]
    if state is None and not is_tanh or message is None or len(parameters) < 4:
        (W_value, b_value), (W_gate, b_gate) = pairs
        node = GatedLinear(1 if message is None else 2, functions.tanh if is_tanh else None)
        inputs = [x, message, W_gate, W_value, b_gate, b_value]
        inputs = [array for array in inputs if array is not None]
        y = node._output(inputs)
        gradients = node._gradients(inputs, gy, range(len(inputs)))
        gradients = [gradients[i] for i in range(len(inputs))]
        by_rows = gradients[: node._n_parts]
        gW_gate, gW_value, *biases = gradients[node._n_parts :]
        gb_gate, gb_value = biases or (None, None)
        by_rows = [*by_rows, None, None][:2] + [None]
        return [y, *by_rows, gW_value, gb_value, gW_gate, gb_gate]
    kind = None if state is None else 'x' if state is x else 'given'
    node = GRUStep(kind)
    inputs = [x, message, *([state] if kind == 'given' else []), *parameters]
    y = node._output(inputs)
    gradients = node._gradients(inputs, gy, range(len(inputs)))
    if kind != 'given':
        gradients.insert(2, None)
    return [y, *gradients]


def wide_on_host(array):
    """Return a float64 NumPy array, for which nodes launch no kernel."""
    return None if array is None else numpy.array(cuda.to_cpu(array), 'd', subok=False)


def check(gpu, dtype, n_rows, widths, state=None, is_tanh=True, shift=0, bias=True):
    """Compare a gate, or a step with a state ('given' or 'x'), with the nodes on a host."""
    gy, x, message, s, pairs = arrays(n_rows, widths, state is not None, bias)
    gy, x, message, s = (
        None if array is None else gpu.put(array.astype(dtype), shift)
        for array in (gy, x, message, x if state == 'x' else s)
    )
    s = x if state == 'x' else s
    given = [
        tuple(None if a is None else gpu.put(a.astype(dtype), shift) for a in pair)
        for pair in pairs
    ]
    y, kept = gated_step_forward(x, message, s, given, is_tanh)
    dtypes = [None if array is None else array.dtype for pair in given for array in pair]
    by_x, by_message, by_state, by_parameters = gated_step_backward(
        x, message, s, given, kept, gy, is_tanh, dtypes
    )
    actual = [y, by_x, by_message, by_state, *by_parameters]
    wide = [wide_on_host(array) for array in (gy, x, message, s)]
    wide[3] = wide[1] if state == 'x' else wide[3]
    pairs = [tuple(map(wide_on_host, pair)) for pair in given]
    reference = expected(*wide, pairs=pairs, is_tanh=is_tanh)
    assert len(actual) == len(reference)
    for i, (ours, theirs) in enumerate(zip(actual, reference)):
        assert (ours is None) == (theirs is None), i
        if ours is not None:
            assert ours.dtype == dtype and ours.shape == theirs.shape
            bound = BOUND[dtype] * max(1, abs(theirs).max(initial=0))
            numpy.testing.assert_allclose(cuda.to_cpu(ours), theirs, 0, bound, err_msg=str(i))


# Widths with and without vectors, narrower and wider than a block; every dtype and kind of state.
QUICK = (None, 'e', 33), ('given', 'f', 1), ('given', 'f', 64), ('given', 'f', 65), ('x', 'd', 33)


@pytest.mark.parametrize(
    'state, dtype, width',
    [
        *QUICK,
        *(
            slow_unless(False, *case)
            for case in pairs((None, 'given', 'x'), 'efd', (1, 3, 33, 64, 65, 80))
            if case not in QUICK
        ),
    ],
)
def test_widths(gpu, dtype, width, state):
    check(gpu, dtype, 9, (width,) * 3, state)
    assert gpu.names == {'gated_step', 'gated_weights', 'sum_partials'}


# Each of the three widths in turn does not fill a thread or a block; one part, and no bias.
@pytest.mark.parametrize(
    'widths, options',
    [
        ((5, 2, 7), {'state': 'given'}),
        slow_unless(False, (1, 40, 3), {'state': 'given'}),
        slow_unless(False, (3, 1, 70), {'state': 'given'}),
        ((64, 1, 6), {'is_tanh': False}),
        slow_unless(False, (6, 64, 2), {'bias': False}),
        ((66, 0, 6), {'is_tanh': False, 'bias': False}),
        ((16, 0, 130), {}),
    ],
    ids=str,
)
def test_unequal_widths(gpu, widths, options):
    check(gpu, 'f', 9, widths, **options)


@pytest.mark.parametrize('n_rows', [1, 15, 16, 17, 63, 64, 65, 2 * 132 * 4 + 1])
def test_rows(gpu, n_rows):
    check(gpu, 'f', n_rows, (4, 4, 4), 'given')


@pytest.mark.parametrize(
    'dtype, shift, vector',
    [slow_unless(False, 'e', 2, 1), ('f', 8, 2), slow_unless(False, 'd', 8, 1)],
)
def test_unaligned_input(gpu, dtype, shift, vector):
    check(gpu, dtype, 5, (8, 8, 8), 'given', shift=shift)
    vectors = {defines['VECTOR'] for defines in gpu.launched if 'N_TARGETS' not in defines}
    assert vectors == {vector}


# A block may have each of these numbers of rows, and gradients have several partial sums.
@on_an_emulated_device
@pytest.mark.parametrize(
    'n_rows', [slow_unless(n_rows in (23, 300), n_rows) for n_rows in (9, 23, 37, 50, 300)]
)
def test_blocks_of_more_rows(gpu, n_rows):
    gpu.sizes = Device(2, 60 << 20)
    check(gpu, 'f', n_rows, (12, 8, 20), 'given')
    rows = {9: 8, 23: 12, 37: 20, 50: 28, 300: 32}[n_rows]
    assert {d['ROWS'] for d in gpu.launched if 'ROWS' in d} == {rows}


@on_an_emulated_device
@pytest.mark.parametrize('kilobytes, stages', [(20, {(16, 2), (32, 2)}), (48, {(32, 3)})])
def test_little_shared_memory(gpu, kilobytes, stages):
    gpu.sizes = Device(132, 60 << 20, kilobytes << 10)
    check(gpu, 'f', 5, (20, 20, 20), 'given')
    found = {(d['CHUNK'], d['STAGES']) for d in gpu.launched if 'CHUNK' in d}
    assert found == stages


def test_nan_stays_in_its_row(gpu):
    _, x, message, state, pairs = arrays(9, (6, 6, 6), True)
    x[4, 2] = numpy.nan
    given = [tuple(gpu.put(array) for array in pair) for pair in pairs]
    x, message, state = map(gpu.put, (x, message, state))
    y, _ = gated_step_forward(x, message, state, given, True)
    assert (numpy.isnan(cuda.to_cpu(y)).any(axis=1) == (numpy.arange(9) == 4)).all()


def test_what_no_kernel_does(gpu):
    for n_rows, width in ((3, 200), (0, 4)):
        _, x, message, state, pairs = arrays(n_rows, (width,) * 3, True)
        given = [tuple(gpu.put(array) for array in pair) for pair in pairs]
        x, message, state = map(gpu.put, (x, message, state))
        assert gated_step_forward(x, message, state, given, True) is None
    assert not gpu.launched


@pytest.mark.parametrize('has_state, expected', [(False, 2), (True, 4)])
def test_arrays_that_are_kept_for_the_gradients(gpu, has_state, expected):
    _, x, message, state, pairs = arrays(9, (4, 4, 4), has_state)
    given = [tuple(gpu.put(array) for array in pair) for pair in pairs]
    state = gpu.put(state) if has_state else None
    _, kept = gated_step_forward(gpu.put(x), gpu.put(message), state, given, True)
    assert sum(array is not None for array in kept) == expected


def test_only_what_is_wanted(gpu, monkeypatch):
    summed = []

    def note(partials, parts):
        summed.append(parts)
        return parts

    monkeypatch.setattr('chainer_bspmm.ops.gates.launches.sum_partials', note)
    gy, x, message, _, pairs = arrays(9, (4, 4, 4), False)
    gy, x, message = map(gpu.put, (gy, x, message))
    given = [tuple(gpu.put(array) for array in pair) for pair in pairs]
    _, kept = gated_step_forward(x, message, None, given, True)
    for dtypes, launched in (
        ([None] * 4, {'gated_step'}),
        ([None, 'f', 'd', None], {'gated_weights'}),
    ):
        gpu.names.clear()
        *_, found = gated_step_backward(x, message, None, given, kept, gy, True, dtypes)
        assert [gradient is None for gradient in found] == [dtype is None for dtype in dtypes]
        assert gpu.names == {'gated_step'} | launched
    assert [[shape for _, shape, _ in parts] for parts in summed] == [[(4,), (4, 8)]]


@pytest.mark.parametrize(
    'n_in, n_out, n_rows, n_matrices, expected',
    [
        (64, 256, 8192, 2, True),  # RelGCN's readout, of 256 units
        (64, 256, 8191, 2, False),
        (63, 256, 8192, 2, False),
        (64, 255, 8192, 2, False),
        (64, 256, 8192, 6, False),  # a step of a recurrent unit
        (64, 512, 2048, 2, True),
        (64, 512, 2047, 2, False),
        (128, 64, 10**6, 2, False),  # GGNN's readout, of 64 units
        (256, 256, 1024, 6, True),  # as any layer
    ],
)
def test_wide_gates_are_products(monkeypatch, n_in, n_out, n_rows, n_matrices, expected):
    monkeypatch.setattr(gemm, 'is_tf32', lambda dtype: False)
    x = numpy.zeros((n_rows, 1), 'f')
    for widths in (n_in, 0, n_out), (n_in - 1, 1, n_out):
        assert launches._are_products(x, widths, n_matrices) is expected
        assert not launches._are_products(x.astype('d'), widths, n_matrices)


def test_in_tf32_the_number_of_rows_does_not_decide(monkeypatch):
    monkeypatch.setattr(gemm, 'is_tf32', lambda dtype: True)
    for n_rows in (1, 8192):
        x = numpy.empty((n_rows, 1), 'f')
        assert launches._are_products(x, (64, 0, 256), 2)
        assert not launches._are_products(x, (64, 0, 128), 2)


def test_a_state_in_the_array_of_the_features(gpu):
    """A state that is another variable, such as a detached one, has a separate gradient."""
    gy, x, message, _, pairs = arrays(9, (4, 2, 4), True)
    gy, x, message, copy = map(gpu.put, (gy, x, message, x))
    parameters = [gpu.put(array) for pair in pairs for array in pair]
    found = []
    for state in (x, copy):
        node = GRUStep('given')
        inputs = [x, message, state, *parameters]
        y = node._output(inputs)
        found.append([y, *node._gradients(inputs, gy, range(len(inputs)))])
    for same_array, another in zip(*found, strict=True):
        numpy.testing.assert_array_equal(cuda.to_cpu(same_array), cuda.to_cpu(another))


@pytest.mark.parametrize('dtype, of_parameters', ['fd', 'df', 'ed', 'fe', 'ef'])
def test_parameters_of_another_dtype(gpu, dtype, of_parameters):
    """They are converted, and so are their gradients."""
    gy, x, message, _, pairs = arrays(9, (4, 2, 4), False)
    gy, x, message = (gpu.put(array.astype(dtype)) for array in (gy, x, message))
    parameters = [array.astype(of_parameters) for pair in pairs for array in pair]
    found = []
    for given in (parameters, [array.astype(dtype) for array in parameters]):
        node = GRUStep(None)
        inputs = [x, message, *map(gpu.put, given)]
        node._output(inputs)
        gradients = node._gradients(inputs, gy, range(len(inputs)))
        found.append([cuda.to_cpu(gradient) for gradient in gradients])
    bound = max(BOUND[dtype], BOUND[of_parameters])
    for converted, expected in zip(*found, strict=True):
        numpy.testing.assert_allclose(converted, expected, 0, bound * abs(expected).max())
