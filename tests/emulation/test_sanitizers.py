"""Representatives of every kernel under AddressSanitizer and ThreadSanitizer."""

import pytest

from chainer_bspmm.cuda import kernels
from tests.emulation.emulator.cuda_on_cpu import MEMORY, RACES
from tests.emulation.registry import KERNELS


# These kernels have no other tests, from which representatives could come.
ALONE = 'peer_sum', 'report', 'staged_copy'


def test_every_kernel_is_registered():
    assert set(kernels.paths()) == set(KERNELS)


@pytest.mark.parametrize(
    'name, calculate, sanitizer',
    [
        pytest.param(
            name,
            function,
            sanitizer,
            id='%s-%d-%s' % (name, i, check),
            marks=[] if i == 0 and is_quick else [pytest.mark.slow],
        )
        for name, kernel in KERNELS.items()
        for check, sanitizer, is_quick in (
            ('plain', None, name in ALONE),
            ('memory', MEMORY, kernel.reads_ahead),
            ('races', RACES, False),
        )
        if check != 'plain' or name in ALONE
        for i, function in enumerate(kernel.uses)
    ],
)
def test_representative(make_device, name, calculate, sanitizer):
    device = make_device(sanitizer)
    calculate(device)
    assert name in device.names
