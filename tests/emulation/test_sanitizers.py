"""Representatives of every kernel under AddressSanitizer and ThreadSanitizer."""

import numpy
import pytest

from chainer_bspmm.cuda import kernels
from tests.emulation.emulator.cuda_on_cpu import MEMORY, RACES
from tests.emulation.representatives import KERNELS


def test_every_kernel_has_a_representative():
    assert set(kernels.paths()) == set(KERNELS)


# Of these, AddressSanitizer alone has noticed faults that were planted.
READ_BESIDE = 'bspmm_csr', 'sum_pieces', 'bsddmm_csr', 'graph_linear'


@pytest.mark.parametrize(
    'name, calculate, sanitizer',
    [
        pytest.param(
            *(name, function, sanitizer),
            id='%s-%s' % (function.__name__, check),
            marks=[] if i == 0 and name in quick else [pytest.mark.slow],
        )
        for check, sanitizer, quick in (
            ('plain', None, KERNELS),
            ('memory', MEMORY, READ_BESIDE),
            ('races', RACES, ()),
        )
        for name, functions in KERNELS.items()
        for i, function in enumerate(functions)
    ],
)
def test_representative(make_device, name, calculate, sanitizer):
    device = make_device(sanitizer)
    result, expected = calculate(device)
    assert name in device.names
    numpy.testing.assert_array_equal(result, expected.astype(result.dtype))
