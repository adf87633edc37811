"""CUDA graphs through CuPy: the kernels of a function, recorded once and launched as one."""

import contextlib
import gc
import sys
import warnings
import weakref

import chainer
from chainer.backends import cuda

from chainer_bspmm.cuda import kernels


class CannotCapture(Exception):
    """Error: something cannot be captured or replayed; the message has the cause and its place."""


class HostCopyError(RuntimeError):
    """Error: host data was copied to the device in a capture; a replay would not see new data."""


def using(device):
    """Context like ``chainer.using_device``, faster if the device is current; None does nothing."""
    is_current = device is None or (
        device.xp is cuda.cupy and cuda.cupy.cuda.runtime.getDevice() == device.device.id
    )
    return contextlib.nullcontext() if is_current else chainer.using_device(device)


class Capturer:
    """Capture functions on one GPU, with a stream and a memory pool for their graphs.

    Graphs of one capturer share the pool's memory. So they must run one after the other, and only
    arrays that the caller still holds after a capture keep their values until the same graph is
    replayed. Arrays that outlive the capturer, such as gradients that parameters still have, stay
    valid; the rest of the memory is freed with the capturer.
    """

    def __init__(self, device):
        cupy = cuda.cupy
        self._device = device.device
        with self._device:
            # With a blocking stream, work of other threads on the null stream would end a capture.
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._pool = cupy.cuda.MemoryPool()
            self._event = cupy.cuda.Event(disable_timing=True)
            self._last_stream = None
        # Graphs refer to this object, so they are freed before the pool.
        weakref.finalize(self, _give_back, self._pool, self._device)

    @property
    def nbytes(self):
        """Size of the pool in bytes (int), including memory of arrays that have been freed."""
        with self._device:
            return self._pool.total_bytes()

    def free_unused(self):
        """Free the memory that CuPy's own pool keeps for this stream alone (synchronises)."""
        # A garbage collection could call this again, and deadlock on CuPy's lock.
        with self._device, _no_garbage_collection():
            cuda.cupy.get_default_memory_pool().free_all_blocks(self.stream)

    @contextlib.contextmanager
    def ordered(self):
        """Context in which the capturer's stream is current, in order with all work outside."""
        cupy = cuda.cupy
        with self._device:
            outside = cupy.cuda.get_current_stream()
            self.join(outside)
            self._event.record(outside)
            self.stream.wait_event(self._event)
            try:
                with self.stream:
                    yield
            finally:
                self._event.record(self.stream)
                outside.wait_event(self._event)
                self._last_stream = outside

    def join(self, stream=None):
        """Let `stream` (None: the current one) wait for the stream used last; return `stream`."""
        if stream is None:
            stream = cuda.cupy.cuda.get_current_stream()
        if self._last_stream is not None and self._last_stream.ptr != stream.ptr:
            self._event.record(self._last_stream)
            stream.wait_event(self._event)
        self._last_stream = stream
        return stream

    def capture(self, function):
        """Record a function's launches in a graph; no kernel runs.

        Returns a launcher, and the result of `function`. The launcher launches the graph on the
        current stream, and returns that stream. Errors of `function` are raised, or CuPy's error
        for a call that cannot be captured.
        """
        cupy = cuda.cupy
        with (
            self.ordered(),
            cupy.cuda.using_allocator(self._allocate),
            _no_host_copies(),
            _no_garbage_collection(),
        ):
            try:
                self.stream.begin_capture()
                result = function()
            except BaseException:
                # Ending the capture may raise the same error again.
                with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()

        def launch():  # it refers to `self`, which holds the graph's memory
            stream = self.join()
            graph.launch(stream)
            return stream

        return launch, result

    def compile_kernels(self, function):
        """Compile the kernels that `function` launches, several at a time, even if it raises."""
        with contextlib.suppress(Exception), warnings.catch_warnings(), kernels.compiled_together():
            warnings.simplefilter('ignore')
            self.capture(function)

    def _allocate(self, n_bytes):
        """Allocate from the pool. The array keeps the pool alive; CuPy's own reference is weak."""
        memory = self._pool.malloc(n_bytes)
        owner = _Block(memory, self)
        device_id = self._device.id
        unowned = cuda.cupy.cuda.UnownedMemory(memory.ptr, n_bytes, owner, device_id)
        return cuda.cupy.cuda.MemoryPointer(unowned, 0)


class _Block:
    """Memory of a capturer's pool, held by an array.

    If it outlives the capturer, it is given back to CUDA, because CuPy 14 would never free it, not
    even with the pool.
    """

    def __init__(self, memory, capturer):
        self._memory = memory
        self._pool = capturer._pool
        self._device = capturer._device
        self._capturer = weakref.ref(capturer)

    def __del__(self, is_exiting=sys.is_finalizing):
        self._memory = None
        if self._capturer() is None and not is_exiting():
            _give_back(self._pool, self._device)


def _give_back(pool, device):
    # A pool frees its memory on the current device. Garbage collection is disabled, because a block
    # that is collected here would call this again, and CuPy 14 would deadlock on a lock that this
    # thread holds.
    with device, _no_garbage_collection():
        pool.free_all_blocks()


@contextlib.contextmanager
def _no_garbage_collection():
    """Disable garbage collection inside, because destroying a CUDA handle would synchronise."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _no_host_copies():
    """Refuse copies from the host inside, noticed by the pinned memory that CuPy allocates."""
    # A replay would copy from the same memory again, which holds other data by then.
    cupy = cuda.cupy
    pool = cupy.get_default_pinned_memory_pool()
    previous = _pinned_allocator()

    def refuse(n_bytes):
        # Other threads share the allocator, but are not capturing.
        if cupy.cuda.get_current_stream().is_capturing():
            raise HostCopyError('a copy of %d bytes from the host to the device' % n_bytes)
        return (previous or pool.malloc)(n_bytes)

    cupy.cuda.set_pinned_memory_allocator(refuse)
    try:
        yield
    finally:
        cupy.cuda.set_pinned_memory_allocator(previous)


def _pinned_allocator():
    """Return the current allocator of pinned memory: a pool's, or None without a pool."""
    # CuPy has no getter, but memory from a pool refers to the pool. A function around a pool is not
    # recognised.
    cupy = cuda.cupy
    memory = cupy.cuda.alloc_pinned_memory(1).mem
    if type(memory) is cupy.cuda.PinnedMemory:
        return None
    reference = getattr(memory, 'pool', None)
    pool = reference() if isinstance(reference, weakref.ref) else None
    return (pool or cupy.get_default_pinned_memory_pool()).malloc
