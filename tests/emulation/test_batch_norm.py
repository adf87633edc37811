"""The launches of batch_norm with weights of rows, against its formulas on the host."""

import functools

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.ops import batch_norm

from tests.emulation.emulator.elementwise_on_cpu import elementwise

BOUND = {'f': 1e-5, 'd': 1e-13}


class AsManyRanks:
    """So many ranks with the same batch."""

    def __init__(self, n, put):
        self._n, self._put = n, put

    def sum(self, array):
        return self._put(numpy.asarray(array) * array.dtype.type(self._n))

    sum_of_gradients = sum


@pytest.fixture
def device(device, monkeypatch):
    monkeypatch.setattr(cuda, 'elementwise', functools.partial(elementwise, device.put))
    return device


@pytest.mark.parametrize('n_channels', [1, 5, 33])
@pytest.mark.parametrize(
    'weights',
    [
        (1,) * 24 + (0,) * 6,
        (1, 1, 7, 1, 0, 1, 120),
        (1, 0, 0, 0),
        (0,) * 4,
        (3,),
        (1,) * 4 + (0,) * 70,
    ],
    ids=str,
)
@pytest.mark.parametrize('dtype', BOUND)
@pytest.mark.parametrize('recomputing, n_ranks', [(False, 1), (True, 1), (False, 3)])
def test_same_as_on_the_host(device, dtype, weights, n_channels, recomputing, n_ranks):
    rng = numpy.random.RandomState(0)
    weights = numpy.array(weights, dtype)[:, None]
    x, gy = (rng.uniform(-1, 2, (len(weights), n_channels)).astype(dtype) for _ in range(2))
    for array in (x, gy):
        array[weights[:, 0] == 0] = numpy.nan
    gamma, beta, *averages = (rng.uniform(0.5, 2, n_channels).astype(dtype) for _ in range(4))

    def results(put, forward, gradients):
        running = None if recomputing else [put(array.copy()) for array in averages]
        ranks = AsManyRanks(n_ranks, put)
        counts = put(weights), ranks.sum(weights.sum(axis=0))
        y, statistics = forward(put(x), put(gamma), put(beta), *counts, 1e-3, 0.8, running, ranks)
        return [
            y,
            *statistics,
            *gradients(put(x), put(gy), put(gamma), *counts, *statistics, ranks),
            *(running or ()),
        ]

    actual = results(device.put, batch_norm._device_forward, batch_norm._device_gradients)
    expected = results(lambda array: array, batch_norm._host_forward, batch_norm._host_gradients)
    assert len(actual) == (6 if recomputing else 8)
    if n_ranks > 1 and weights.sum() > 1:  # the running variance alone knows how many rows count
        alone = batch_norm._host_forward(
            x, gamma, beta, weights, weights.sum(axis=0), 1e-3, 0, None
        )
        numpy.testing.assert_allclose(expected[0], alone[0], BOUND[dtype], BOUND[dtype] * 40)
    for one, other in zip(actual, expected):
        assert one.dtype == dtype and one.shape == other.shape
        numpy.testing.assert_allclose(one, other, BOUND[dtype], BOUND[dtype] * 40)
