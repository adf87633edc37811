import functools

import pytest

from tests.emulation.emulator import cuda_on_cpu
from tests.support.devices import Emulated


@pytest.fixture(scope='session')
def gxx():
    """Skip a test if no g++ can build the kernels."""
    if not cuda_on_cpu.has_compiler():
        pytest.skip('without a GPU the kernels run by g++ -std=c++17, which fails here')


@pytest.fixture
def make_device(gxx, monkeypatch):
    """Function that makes an `Emulated` with a `sanitizer`, or without one if it is None."""
    return functools.partial(Emulated, monkeypatch)


@pytest.fixture(params=['plain', pytest.param('memory', marks=pytest.mark.slow)])
def device(request, make_device):
    """Emulated GPU: the GPU backend on the CPU, without and with AddressSanitizer."""
    return make_device(cuda_on_cpu.MEMORY if request.param == 'memory' else None)
