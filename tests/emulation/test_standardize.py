"""The launch of a scaler against its formula on the host, bit for bit."""

import functools

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.ops import standardize

from tests.emulation.emulator.elementwise_on_cpu import elementwise


@pytest.mark.parametrize('inverse', [False, True])
@pytest.mark.parametrize('shape', [(9, 5), (1, 1), (300, 12)])
def test_same_as_on_the_host(device, monkeypatch, shape, inverse):
    monkeypatch.setattr(cuda, 'elementwise', functools.partial(elementwise, device.put))
    rng = numpy.random.RandomState(0)
    x, mean, std = (rng.uniform(0, 9, n).astype('f') for n in (shape, shape[1], shape[1]))
    std[1::3] = 0
    for arguments in ((x, mean, std), (x, numpy.float32(0), std)):  # value and gradient
        expected = standardize._on_host(*arguments, inverse=inverse)
        given = [numpy.asarray(array) for array in arguments]
        actual = standardize._on_device(*map(device.put, given), inverse=inverse)
        assert actual.dtype == expected.dtype == 'float32'
        numpy.testing.assert_array_equal(actual, expected)
