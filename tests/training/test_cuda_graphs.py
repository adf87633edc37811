"""Memory of a `Capturer`, with a stand-in for CuPy's pool that counts blocks."""

import collections
import gc
import types

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.training.cuda_graphs import Capturer


class Device:
    current = 0

    def __init__(self, number):
        self.id = number

    def __enter__(self):
        self._previous, Device.current = Device.current, self.id

    def __exit__(self, *_):
        Device.current = self._previous


class Pool:
    """Counts the blocks of each device; gives back those of the current one, when it is asked."""

    made = []

    def __init__(self):
        self.in_use, self.free = collections.Counter(), collections.Counter()
        Pool.made.append(self)

    def malloc(self, n_bytes):
        return Memory(self, Device.current)

    def free_all_blocks(self):
        self.free[Device.current] = 0


class Memory:
    ptr = 512

    def __init__(self, pool, device):
        self._pool, self._device = pool, device
        pool.in_use[device] += 1

    def __del__(self):
        self._pool.in_use[self._device] -= 1
        self._pool.free[self._device] += 1


@pytest.fixture
def make(monkeypatch):
    """Return what makes a capturer for GPU 1, where 0 is current, and its pool."""
    fake = types.SimpleNamespace(
        Stream=lambda non_blocking: None,
        Event=lambda disable_timing: None,
        MemoryPool=Pool,
        UnownedMemory=lambda ptr, n_bytes, owner, device: owner,
        MemoryPointer=lambda memory, offset: [memory],
    )
    monkeypatch.setattr(cuda, 'cupy', types.SimpleNamespace(cuda=fake), raising=False)

    def made():
        capturer = Capturer(types.SimpleNamespace(device=Device(1)))
        return capturer, Pool.made.pop()

    return made


def allocate(capturer, n_bytes):
    with Device(1):
        return capturer._allocate(n_bytes)


def test_memory_stays_in_the_pool_while_graphs_may_use_it(make):
    capturer, pool = make()
    kept, gone = (allocate(capturer, 100) for _ in range(2))
    del gone
    assert (pool.in_use[1], pool.free[1]) == (1, 1)
    del kept
    assert (pool.in_use[1], pool.free[1]) == (0, 2)


def test_memory_goes_with_the_capturer(make):
    capturer, pool = make()
    allocate(capturer, 100)
    assert pool.free[1] == 1
    del capturer
    assert pool.free[1] == 0 and Device.current == 0


def test_arrays_that_outlive_the_capturer_give_their_memory_back(make):
    capturer, pool = make()
    arrays = [allocate(capturer, 100) for _ in range(3)]
    arrays.pop()
    del capturer
    assert (pool.in_use[1], pool.free[1]) == (2, 0)
    for n_left in (1, 0):
        arrays.pop()
        assert (pool.in_use[1], pool.free[1]) == (n_left, 0)


def test_a_cycle_with_capturer_and_arrays_gives_all_memory_back(make):
    capturer, pool = make()
    cycle = [capturer, *(allocate(capturer, 100) for _ in range(3))]
    cycle.append(cycle)
    del capturer, cycle
    gc.collect()
    assert (pool.in_use[1], pool.free[1]) == (0, 0)


@pytest.mark.gpu
def test_an_array_that_outlives_the_capturer_on_a_gpu():
    gpu = types.SimpleNamespace(device=cuda.cupy.cuda.Device(0))
    capturer = Capturer(gpu)
    pool = capturer._pool
    with capturer.ordered(), cuda.cupy.cuda.using_allocator(capturer._allocate):
        kept, gone = cuda.cupy.arange(1000), cuda.cupy.zeros(2000)
    del gone
    assert pool.total_bytes() > pool.used_bytes() > 0
    del capturer
    assert pool.total_bytes() == pool.used_bytes() > 0
    numpy.testing.assert_array_equal(kept.get(), numpy.arange(1000))
    del kept
    assert pool.total_bytes() == 0
