"""Launches that are recorded, without a GPU, instead of run."""

import types

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, launch
from chainer_bspmm.cuda.plans import Device


class DeviceArray(numpy.ndarray):
    """A NumPy array with the attributes of CuPy's memory that launches read."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def placed(array, shift=0):
    """Return a copy of an array as a `DeviceArray` `shift` bytes past a multiple of 16."""
    memory = numpy.empty(array.nbytes + 32, numpy.uint8)
    start = -memory.ctypes.data % 16 + shift
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy.view(DeviceArray)


class Launches(list):
    """List of (compile-time constants, arguments) of launches, whose results are never written.

    `shifts`: number of bytes by which each of the next new arrays lies past a multiple of 16.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.shifts = []
        monkeypatch.setattr(kernels, 'load', self._load)
        monkeypatch.setattr(kernels, 'device', lambda device_id: Device(132, 60 << 20))
        monkeypatch.setattr(launch, 'on_gpu', lambda x: True)
        runtime = types.SimpleNamespace(getDevice=lambda: 0)
        cupy = types.SimpleNamespace(empty=self._empty, cuda=types.SimpleNamespace(runtime=runtime))
        monkeypatch.setattr(cuda, 'cupy', cupy)

    def _empty(self, shape, dtype):
        return placed(numpy.zeros(shape, dtype), self.shifts.pop(0) if self.shifts else 0)

    def _load(self, device_id, name, dtype_char, defines):
        def kernel(grid, block, arguments, shared_mem=0):
            self.append((dict(defines), arguments))

        return kernel
