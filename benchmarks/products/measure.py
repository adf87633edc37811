"""Timing on a GPU, by CUDA graphs and on the host, and copies for comparison."""

import time

import chainer_bspmm  # noqa: F401  first: repairs Chainer
import chainer
import cupy
import numpy

from benchmarks import harness
from benchmarks.harness import summary

CALLS = 50  # calls captured in one graph, which share a replay's own cost
ROUNDS = 30
DEVICE_TO_DEVICE = 3  # cudaMemcpyKind


def conditions(commit):
    """Return the conditions of a result on the first GPU; see `harness.conditions`."""
    return harness.conditions(commit, chainer.get_device('@cupy:0'))


def copy_of(n_bytes):
    """Return a function that copies on the device; it reads and writes `n_bytes` in all."""
    source, target = (cupy.ones(max(n_bytes // 8, 1), 'f') for _ in range(2))

    def copy():
        cupy.cuda.runtime.memcpyAsync(
            target.data.ptr,
            source.data.ptr,
            source.nbytes,
            DEVICE_TO_DEVICE,
            cupy.cuda.get_current_stream().ptr,
        )

    return copy


def capture(call, n_calls=CALLS):
    """Return a CUDA graph of n_calls calls, together with objects that keep its memory alive.

    Calls allocate from a separate pool of the graph.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        for _ in range(3):  # to compile the kernels, and to fill the pool
            call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(n_calls):
            call()
        graph = stream.end_capture()
    return graph, stream, pool


def replay_times(graphs, n_rounds):
    """Measure device microseconds a call of several CUDA graphs, interleaved, with a warm L2.

    `graphs`: name -> (graph, stream, memory to keep alive, calls in the graph). Returns name ->
    summary.
    """
    times = {name: [] for name in graphs}
    for _ in range(n_rounds):
        for name, graph in graphs.items():
            times[name].append(_replay(*graph))
    return {name: summary(values) for name, values in times.items()}


def cold_times(graphs, flushes, n_rounds):
    """Measure device microseconds a call of several CUDA graphs that empty the L2 before each call.

    Arguments and result are as for :func:`replay_times`. `flushes` is a graph of the :class:`Flush`
    alone, whose time is measured in every round and subtracted. Modified cache lines of a call are
    written back while the L2 is emptied the next time, so they count as part of the call.
    """
    times = {name: [] for name in graphs}
    for _ in range(n_rounds):
        emptying = _replay(*flushes)
        for name, graph in graphs.items():
            times[name].append(_replay(*graph) - emptying)
    return {name: summary(values) for name, values in times.items()}


def _replay(graph, stream, _, n_calls):
    """Return device microseconds a call in the second of two replays."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    graph.launch(stream)
    start.record(stream)
    graph.launch(stream)
    stop.record(stream)
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) * 1e3 / n_calls


class Flush:
    """Empty the L2 of the current device by reading twice as much other, unmodified memory."""

    _SOURCE = r"""
    extern "C" __global__ void flush(const float4 *memory, const int n, float *never)
    {
        float sum = 0;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
            const float4 read = memory[i];
            sum += read.x + read.y + read.z + read.w;
        }
        if (sum != 0) *never = sum;  // the memory is 0; without this nothing would be read
    }
    """

    def __init__(self):
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._memory = cupy.zeros(2 * properties['l2CacheSize'] // 4, 'f')
        self._never = cupy.zeros(1, 'f')
        self._grid = (8 * properties['multiProcessorCount'],)
        self._kernel = cupy.RawKernel(self._SOURCE, 'flush')

    def __call__(self):
        self._kernel(
            self._grid, (256,), (self._memory, numpy.int32(self._memory.size // 4), self._never)
        )


def wall_times(calls, n_rounds, n_calls=5):
    """Measure microseconds from the start of one call until the device is done, interleaved.

    Every contender's turn begins with a call that is not measured. Otherwise the first of several
    contenders that share much code would pay for loading it into the processor's caches. Returns
    name -> summary.
    """
    device = cupy.cuda.Device()
    times = {name: [] for name in calls}
    for _ in range(n_rounds):
        for name, call in calls.items():
            call()
            device.synchronize()
            start = time.perf_counter()
            for _ in range(n_calls):
                call()
                device.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6 / n_calls)
    return {name: summary(values) for name, values in times.items()}
