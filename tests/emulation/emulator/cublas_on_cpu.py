"""Stand-in for cuBLAS on the host: a library with the same calls, and arrays for it."""

import contextlib
import functools
import pathlib
import types

import numpy
import pytest

from chainer_bspmm.cuda import gemm
from tests.emulation.emulator import cache, cuda_on_cpu

SOURCE = pathlib.Path(__file__).resolve().parent / 'cublas_on_cpu.cpp'


class HostArray(numpy.ndarray):
    """A NumPy array with the attributes of CuPy's addresses, like its views and results."""

    device_id = 0

    def __array_finalize__(self, other):
        self.device_id = getattr(other, 'device_id', 0)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=self.device_id)


def on_host(array):
    """Return an array as a `HostArray` with the same strides."""
    return numpy.asarray(array).view(HostArray)


def empty(shape, dtype):
    array = numpy.empty(shape, dtype)
    array.fill(numpy.nan if array.dtype.kind == 'f' else 127)
    return on_host(array)


@functools.lru_cache(maxsize=None)
def path():
    """Return the path (str) of the library; skip the test if g++ cannot build it."""
    text = SOURCE.read_text()
    if not cuda_on_cpu.knows('_Float16 x = 1; int main() { return x != 1; }'):
        pytest.skip('g++ knows no _Float16')
    # With Bsymbolic its calls resolve to itself, even if CuPy has loaded the real library.
    return str(cache.library(text, '-O1', '-shared', '-fPIC', '-Wl,-Bsymbolic'))


def addresses(which, a, b, c):
    """Stand in for the kernel of ``gemm._addresses``."""
    positions = numpy.arange(len(which)), which, numpy.arange(len(which))
    return on_host(
        [
            array.data.ptr + of_array.astype(numpy.uint64) * numpy.uint64(array.strides[0])
            for array, of_array in zip((a, b, c), positions)
        ]
    )


def install(monkeypatch):
    """Make `gemm` use the library and take `HostArray`.

    Return an object with CuPy's `current` stream and CuPy's setting `compute_type`.
    """
    streams = types.SimpleNamespace(current=types.SimpleNamespace(ptr=1), compute_type=0)
    module = types.SimpleNamespace(
        empty=empty,
        zeros=lambda shape, dtype: on_host(numpy.zeros(shape, dtype)),
        ascontiguousarray=lambda array: on_host(numpy.ascontiguousarray(array)),
        broadcast_to=lambda array, shape: numpy.broadcast_to(array, shape, subok=True),
        _core=types.SimpleNamespace(get_compute_type=lambda dtype: streams.compute_type),
        cuda=types.SimpleNamespace(
            Device=contextlib.nullcontext,
            get_current_stream=lambda: streams.current,
            runtime=types.SimpleNamespace(getDevice=lambda: 0),
        ),
    )
    monkeypatch.setattr(gemm, 'cuda', types.SimpleNamespace(cupy=module))
    monkeypatch.setattr(gemm, '_addresses', addresses)
    library = gemm.Library(path())
    monkeypatch.setattr(gemm, 'cublas', lambda: library)
    return streams
