"""Rows in the block of their degree, against the same by NumPy."""

import functools

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.ops import degree_linear

from tests.emulation.emulator.elementwise_on_cpu import elementwise


@pytest.mark.parametrize('shape', [(5, 3, 7), (1, 6, 1), (0, 2, 3), (9, 1, 4)], ids=str)
@pytest.mark.parametrize('dtype', 'fd')
def test_expand(device, monkeypatch, dtype, shape):
    monkeypatch.setattr(cuda, 'elementwise', functools.partial(elementwise, device.put))
    rng = numpy.random.RandomState(0)
    n_nodes, n_types, n_in = shape
    is_type = numpy.arange(n_types) == rng.randint(0, n_types + 1, (n_nodes, 1))
    x = rng.uniform(1, 2, (n_nodes, n_in)).astype(dtype)
    blocks = degree_linear._expand(device.put(x), device.put(is_type))
    numpy.testing.assert_array_equal(
        blocks, (is_type[:, :, None] * x[:, None, :]).reshape(n_nodes, n_types * n_in)
    )
