"""Representatives of every kernel under AddressSanitizer and ThreadSanitizer."""

import numpy
import pytest

from chainer_bspmm.cuda import kernels
from tests.emulation.emulator.cuda_on_cpu import MEMORY, RACES
from tests.emulation.representatives import KERNELS


def test_every_kernel_has_a_representative():
    assert set(kernels.paths()) == set(KERNELS)


@pytest.mark.parametrize('sanitizer', [None, MEMORY, RACES], ids=['plain', 'memory', 'races'])
@pytest.mark.parametrize(
    'name, calculate',
    [
        pytest.param(name, function, id=function.__name__, marks=[pytest.mark.slow] if i else [])
        for name, functions in KERNELS.items()
        for i, function in enumerate(functions)
    ],
)
def test_representative(make_device, name, calculate, sanitizer):
    device = make_device(sanitizer)
    result, expected = calculate(device)
    assert name in device.names
    numpy.testing.assert_array_equal(result, expected.astype(result.dtype))
