import types

import numpy
import pytest

from chainer_bspmm.ops import linear_softmax
from chainer_bspmm.ops.linear_softmax import LinearSoftmax
from chainer_bspmm.ops.linear_softmax import row_softmax_backward
from chainer_bspmm.ops.linear_softmax import row_softmax_forward
from tests.emulation.gated_cases import summed
from tests.emulation.kernel_cases import CHANNELS, DTYPES


# Roundings to the dtype, three where terms are added, and a few of what is calculated in.
BOUND = {'e': 2**-9, 'f': 2**-20, 'd': 2**-48}


def check(device, dtype, shape, shift=0):
    rng = numpy.random.RandomState(0)
    x, g = (rng.uniform(-3, 3, of).astype(dtype) for of in (shape, shape[1:]))
    a = device.put(x, shift)
    y = row_softmax_forward(a)
    gradients = row_softmax_backward(a, device.put(g, shift))
    wide = x.astype('d')
    expected = row_softmax_forward(wide)
    wanted = row_softmax_backward(a.view(numpy.ndarray).astype('d'), g.astype('d'))
    for actual, of in ((a, wide), (y, expected), (gradients, wanted)):
        assert actual.dtype == dtype and actual.shape == of.shape
        numpy.testing.assert_allclose(actual, of, BOUND[dtype], 3 * BOUND[dtype])
    assert (y is a or y.base is a) if shape[0] == 1 else not numpy.shares_memory(y, a)


@pytest.mark.parametrize('n_terms', [1, 3])
@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_channels(device, dtype, n_channels, n_terms):
    check(device, dtype, (n_terms, 9, n_channels))


@pytest.mark.parametrize('n_rows', [1, 31, 32, 33, 129])
def test_rows(device, n_rows):
    check(device, 'f', (2, n_rows, 12))


@pytest.mark.parametrize('dtype, shift, width', [('e', 2, 1), ('f', 8, 2), ('d', 8, 1)])
def test_unaligned_input(device, dtype, shift, width):
    check(device, dtype, (2, 5, 16), shift)
    assert [constants['VECTOR'] for constants in device.launched] == [width, width]


def test_largest_values_and_nan(device):
    largest, inf, nan = numpy.finfo('f').max, numpy.inf, numpy.nan
    rows = [[largest, -largest], [-largest, -largest], [-inf, 3], [inf, 3], [nan, 3], [5, 5]]
    y = row_softmax_forward(device.put(numpy.array([rows], 'f')))
    nans = [nan, nan]
    expected = [[1, 0], [0.5, 0.5], [0, 1], nans, nans, [0.5, 0.5]]
    numpy.testing.assert_array_equal(y[[0, 1, 2, 4, 5]], numpy.take(expected, [0, 1, 2, 4, 5], 0))
    assert numpy.isnan(y[3, 0])


def test_node(device, monkeypatch):
    """Two layers of other widths, the second without a bias: as on a host."""
    rng = numpy.random.RandomState(1)
    shapes = [(9, 5), (4, 5), (4,), (9, 3), (4, 3), (9, 4)]
    given = [rng.uniform(-1, 1, shape).astype('f') for shape in shapes]

    def outcome(given):
        node, (*inputs, gy) = LinearSoftmax([3, 2]), given
        return [node._output(inputs), *node._gradients(inputs, gy, range(5))]

    wanted = outcome(given)
    memory = types.SimpleNamespace(empty=device._empty)
    room = types.SimpleNamespace(get_array_module=lambda array: memory)
    monkeypatch.setattr(linear_softmax, 'chainer_backend', room)
    monkeypatch.setattr('chainer_bspmm.ops.graph_linear.launches.sum_partials', summed)
    found = outcome([device.put(array) for array in given])
    assert device.names == {'row_softmax', 'graph_linear'} and len(device.launched) == 6
    for actual, of in zip(found, wanted):
        assert actual.shape == of.shape and actual.dtype == 'f'
        numpy.testing.assert_allclose(actual, of, 1e-5, 1e-5)


@pytest.mark.parametrize('shape', [(2, 0, 4), (2, 3, 0), (1, 0, 4)])
def test_empty_result_launches_nothing(device, shape):
    a = device.put(numpy.zeros(shape, 'f'))
    assert row_softmax_forward(a).shape == shape[1:] and not device.launched
    assert row_softmax_backward(a, device.put(numpy.zeros(shape[1:], 'f'))).shape == shape
