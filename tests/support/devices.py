"""Places where tests run operations: the host, an emulated GPU, a real GPU.

Every place has `put`, which makes an array of the place's kind. GPUs also have `launched`, the
compile-time constants of every launch, and `names`, the kernels that were launched.
"""

import functools

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.sparse.batch import Batch
from tests.emulation.emulator import cuda_on_cpu
from tests.emulation.emulator.elementwise_on_cpu import elementwise
from tests.support import poisoned

GPUS = [
    'emulated',
    pytest.param('sanitized', marks=pytest.mark.slow),
    pytest.param('cupy', marks=pytest.mark.gpu),
]


# Tests that change the sizes of the GPU cannot run on a real one, where a kernel keeps the limit of
# shared memory that it was compiled for.
on_an_emulated_device = pytest.mark.parametrize('gpu', GPUS[:-1], indirect=True)


def slow_unless(is_quick, *values, id=None):
    """Return a case of a parametrized test, marked slow unless `is_quick`."""
    return pytest.param(*values, id=id, marks=() if is_quick else pytest.mark.slow)


class Host:
    """NumPy, where nothing is launched."""

    is_host = True
    launched = ()

    def put(self, array, shift=0):
        return array if isinstance(array, Batch) else numpy.array(array)


class Emulated(cuda_on_cpu.Device):
    """Emulated GPU: g++ builds all kernels, including elementwise ones (tests/emulation/README.md).

    `put` returns batches unchanged. Every new array is `reachable`: a kernel may read and write it
    through a table of addresses.
    """

    is_host = False

    def __init__(self, monkeypatch, sanitizer):
        super().__init__(monkeypatch, sanitizer)
        monkeypatch.setattr(cuda, 'elementwise', functools.partial(elementwise, self.put))

    def _empty(self, shape, dtype):
        self.reachable.append(super()._empty(shape, dtype))
        return self.reachable[-1]

    def put(self, array, shift=0):
        return array if isinstance(array, Batch) else super().put(array, shift)


class Real:
    """CuPy's current device; new arrays are filled with NaN."""

    is_host = False

    def __init__(self, monkeypatch):
        self.launched = []
        self.names = set()
        poisoned(monkeypatch, cuda.cupy)
        load = kernels.load

        def noted(device_id, name, dtype_char, defines):
            kernel = load(device_id, name, dtype_char, defines)

            def launch(*arguments, **options):
                self.launched.append(dict(defines))
                self.names.add(name)
                kernel(*arguments, **options)

            return launch

        monkeypatch.setattr(kernels, 'load', noted)

    def put(self, array, shift=0):
        """Return a copy of an array that lies `shift` bytes past a multiple of 16."""
        if isinstance(array, Batch):
            return array.to_device('@cupy:0')
        array = numpy.asarray(cuda.to_cpu(array))
        memory = cuda.cupy.zeros(array.nbytes + 32, numpy.uint8)
        start = -memory.data.ptr % 16 + shift
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = cuda.cupy.asarray(array)
        return copy


def place_of(name, monkeypatch):
    """Return the place that has the name of a parameter of the fixtures `place` and `gpu`."""
    if name == 'numpy':
        return Host()
    if name == 'cupy':
        return Real(monkeypatch)
    if not cuda_on_cpu.has_compiler():
        pytest.skip('without a GPU the kernels run by g++ -std=c++17, which fails here')
    return Emulated(monkeypatch, cuda_on_cpu.MEMORY if name == 'sanitized' else None)
