"""The launches of batch_norm with spare rows, against its formulas on the host."""

import functools
import types

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.functions.fused import batch_norm

from tests.emulation.emulator.elementwise_on_cpu import elementwise

BOUND = {'f': 1e-5, 'd': 1e-13}


@pytest.fixture
def device(device, monkeypatch):
    monkeypatch.setattr(cuda, 'elementwise', functools.partial(elementwise, device.put))
    return device


@pytest.mark.parametrize('n_channels', [1, 5, 33])
@pytest.mark.parametrize(
    'sizes, n_spare',
    [((3, 0, 20, 1), 6), ((3, 0, 20, 1), 0), ((1,), 3), ((0, 0), 4), ((2, 2), 70)],
    ids=str,
)
@pytest.mark.parametrize('dtype', BOUND)
@pytest.mark.parametrize('recomputing', [False, True])
def test_same_as_on_the_host(device, dtype, sizes, n_spare, n_channels, recomputing):
    rng = numpy.random.RandomState(0)
    offsets = numpy.cumsum((0,) + sizes).astype(numpy.int32)
    n = int(offsets[-1])
    x, gy = (rng.uniform(-1, 2, (n + n_spare, n_channels)).astype(dtype) for _ in range(2))
    x[n:], gy[n:] = numpy.nan, numpy.nan
    gamma, beta, *averages = (rng.uniform(0.5, 2, n_channels).astype(dtype) for _ in range(4))

    def results(put, forward, gradients):
        adj = types.SimpleNamespace(row_offsets=put(offsets), max_rows=32)
        running = None if recomputing else [put(array.copy()) for array in averages]
        y, statistics = forward(adj, put(x), put(gamma), put(beta), 1e-3, 0.8, running)
        return [
            y,
            *statistics,
            *gradients(adj, put(x), put(gy), put(gamma), *statistics),
            *(running or ()),
        ]

    actual = results(device.put, batch_norm._device_forward, batch_norm._device_gradients)
    expected = results(lambda array: array, batch_norm._host_forward, batch_norm._host_gradients)
    assert len(actual) == (6 if recomputing else 8)
    for one, other in zip(actual, expected):
        assert one.dtype == dtype and one.shape == other.shape
        numpy.testing.assert_allclose(one, other, BOUND[dtype], BOUND[dtype] * 40)
