"""Memory and streams of a `Capturer`, with stand-ins for CuPy's classes that record calls."""

import collections
import gc
import types
import warnings
import weakref

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import cuda_graphs
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
    """Memory pool that counts the blocks of each device, and frees blocks of the current device."""

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
    """Function that makes a capturer for GPU 1 and its pool, while GPU 0 is current."""

    def make_stream(non_blocking):
        assert non_blocking  # other streams wait for the legacy stream, which ends a capture

    fake = types.SimpleNamespace(
        Stream=make_stream,
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


def test_arrays_that_outlive_the_capturer_give_their_memory_back(make):
    capturer, pool = make()
    arrays = [allocate(capturer, 100) for _ in range(3)]
    arrays.pop()  # its memory stays in the pool while graphs may use it
    assert (pool.in_use[1], pool.free[1]) == (2, 1)
    del capturer
    assert (pool.in_use[1], pool.free[1]) == (2, 0) and Device.current == 0
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


def test_an_error_while_kernels_are_compiled(make, monkeypatch):
    def fail():
        warnings.warn('not yet', stacklevel=2)
        assert kernels._local.together is not None
        raise RuntimeError

    capturer, _ = make()
    monkeypatch.setattr(capturer, 'capture', lambda function: function())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        capturer.compile_kernels(fail)
    assert kernels._local.together is None


@pytest.fixture
def streams(make, monkeypatch):
    """A capturer, the calls of streams and events in a list, and a function that uses a stream."""
    calls = []

    class Stream:
        def __init__(self, ptr):
            self.ptr = ptr

        def __enter__(self):
            self._previous, fake.current = fake.current, self

        def __exit__(self, *_):
            fake.current = self._previous

        def wait_event(self, event):
            calls.append((self.ptr, 'waits for', event.recorded))

    class Event:
        recorded = None

        def record(self, stream):
            self.recorded = stream.ptr

    fake = cuda.cupy.cuda
    fake.Stream = lambda non_blocking: Stream('own')
    fake.Event = lambda disable_timing: Event()
    fake.current = Stream('outside')
    fake.get_current_stream = lambda: fake.current
    capturer, _ = make()
    return capturer, calls, Stream


def test_work_on_the_capturer_s_stream_is_ordered(streams):
    capturer, calls, Stream = streams
    with pytest.raises(KeyError), capturer.ordered():
        assert cuda.cupy.cuda.current.ptr == 'own'
        assert calls == [('own', 'waits for', 'outside')]
        raise KeyError
    assert calls[1:] == [('outside', 'waits for', 'own')]
    assert cuda.cupy.cuda.current.ptr == 'outside'


def test_a_stream_waits_for_the_one_used_before(streams):
    capturer, calls, Stream = streams
    capturer.join()
    assert not calls
    with Stream('second'):
        capturer.join()
        capturer.join()
    assert calls == [('second', 'waits for', 'outside')]
    capturer.join()
    assert calls[1:] == [('outside', 'waits for', 'second')]


class PinnedMemory:
    pass


class PinnedPool:
    def malloc(self, n_bytes):
        memory = PooledMemory()
        memory.pool = weakref.ref(self)
        return types.SimpleNamespace(mem=memory)


class PooledMemory(PinnedMemory):
    pool: weakref.ref


@pytest.mark.parametrize('kind', ('default', 'own', 'none'))
def test_the_allocator_of_pinned_memory_is_put_back(monkeypatch, kind):
    default, own = PinnedPool(), PinnedPool()
    before = {'default': default.malloc, 'own': own.malloc, 'none': None}[kind]
    fake = types.SimpleNamespace(
        current=before,
        is_capturing=False,
        PinnedMemory=PinnedMemory,
        get_current_stream=lambda: types.SimpleNamespace(is_capturing=lambda: fake.is_capturing),
    )
    plain = types.SimpleNamespace(mem=PinnedMemory())
    fake.alloc_pinned_memory = lambda n_bytes: fake.current(n_bytes) if fake.current else plain
    fake.set_pinned_memory_allocator = lambda allocator: setattr(fake, 'current', allocator)
    cupy = types.SimpleNamespace(cuda=fake, get_default_pinned_memory_pool=lambda: default)
    monkeypatch.setattr(cuda, 'cupy', cupy, raising=False)
    with cuda_graphs._no_host_copies():
        pool = (fake.alloc_pinned_memory(8)).mem.pool()  # this thread captures nothing
        assert pool is (own if kind == 'own' else default)
        fake.is_capturing = True
        message = '^a copy of 8 bytes from the host to the device$'
        with pytest.raises(cuda_graphs.HostCopyError, match=message):
            fake.alloc_pinned_memory(8)
    assert fake.current == before


@pytest.mark.gpu
def test_the_allocator_of_pinned_memory_is_put_back_on_a_gpu():
    cupy = cuda.cupy
    default, own = cupy.get_default_pinned_memory_pool(), cupy.cuda.PinnedMemoryPool()
    try:
        for allocator, expected in ((default.malloc, default), (own.malloc, own), (None, None)):
            cupy.cuda.set_pinned_memory_allocator(allocator)
            capturer = Capturer(types.SimpleNamespace(device=cupy.cuda.Device(0)))
            array = cupy.zeros(3)
            array + 1  # compiles
            capturer.capture(lambda array=array: array + 1)
            memory = cupy.cuda.alloc_pinned_memory(1).mem
            if expected is None:
                assert type(memory) is cupy.cuda.PinnedMemory
            else:
                assert memory.pool() is expected
    finally:
        cupy.cuda.set_pinned_memory_allocator(default.malloc)


@pytest.mark.gpu
def test_an_array_that_outlives_the_capturer_on_a_gpu():
    gpu = types.SimpleNamespace(device=cuda.cupy.cuda.Device(0))
    capturer = Capturer(gpu)
    pool = capturer._pool
    with capturer.ordered(), cuda.cupy.cuda.using_allocator(capturer._allocate):
        saved, gone = cuda.cupy.arange(1000), cuda.cupy.zeros(2000)
    del gone
    assert pool.total_bytes() > pool.used_bytes() > 0
    del capturer
    assert pool.total_bytes() == pool.used_bytes() > 0
    numpy.testing.assert_array_equal(saved.get(), numpy.arange(1000))
    del saved
    assert pool.total_bytes() == 0
