"""The self-test's call of every kernel, on the emulated device."""

import contextlib
import types

import numpy
import pytest

import chainer
from chainer.backend import CpuDevice
from chainer.backends import cuda

from chainer_bspmm import self_test

from tests.support.launches import DeviceArray

# Their sums depend on the order of the threads, which the emulator refuses.
ATOMIC = 'bspmm_st_shared', 'bspmm_st_global'
PINNED = 'staged_copy', 'flat_gradients', 'peer_sum'  # of memory that the emulator lacks


class CuPy(types.SimpleNamespace):
    """The emulator's stand-in, and NumPy's functions for what that lacks."""

    def __getattr__(self, name):
        function = getattr(numpy, name)
        return lambda *args, **kwargs: self.put(function(*args, **kwargs))


class Emulated(CpuDevice):
    """What Chainer sees of the emulated device; `xp` stands for CuPy."""

    xp = None
    device = types.SimpleNamespace(id=0)

    def __init__(self, xp, put):
        self.xp, self.send = xp, put

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


@pytest.fixture
def gpu(device, monkeypatch):
    def memory(array):
        device.reachable.append(array)  # its address may come to stand in a table
        return types.SimpleNamespace(ptr=array.ctypes.data, device_id=0)

    cupy = CuPy(**vars(cuda.cupy), put=device.put, ndarray=DeviceArray)
    emulated, host = Emulated(cupy, device.put), CpuDevice()

    def if_emulated(yes, no):
        return lambda array: yes if isinstance(array, DeviceArray) else no

    monkeypatch.setattr(DeviceArray, 'data', property(memory))
    monkeypatch.setattr(cuda, 'cupy', cupy)
    monkeypatch.setattr(cuda, 'ndarray', DeviceArray)
    monkeypatch.setattr(cuda, 'get_device_from_array', lambda array: contextlib.nullcontext())
    monkeypatch.setattr(cuda, 'to_cpu', lambda array: numpy.array(array, subok=False))
    monkeypatch.setattr(chainer.backend, 'get_array_module', if_emulated(cupy, numpy))
    monkeypatch.setattr(chainer.backend, 'get_device_from_array', if_emulated(emulated, host))
    return emulated


@pytest.mark.parametrize(
    'name, dtype',
    [
        (name, dtype)
        for name in self_test.GPU_CHECKS
        for dtype in 'efd'
        if name not in ATOMIC + PINNED and (dtype != 'e' or name not in self_test.WITHOUT_HALVES)
    ],
)
def test_check_passes(device, gpu, name, dtype):
    outcome = self_test._outcome(name, dtype, gpu, *self_test.GPU_CHECKS[name])
    assert outcome.reason is None and name in device.names
