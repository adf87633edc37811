"""The buffers that a captured step reads: how large, where, and how they are filled.

A graph reads the same memory at every launch. A batch therefore lies in buffers of a fixed
`Capacity`, a little larger than itself; rows and entries past the batch are called spare.
"""

from __future__ import annotations

import contextlib
import math
import operator
from typing import TYPE_CHECKING
import weakref

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, plans, step
from chainer_bspmm.cuda.launch import run
from chainer_bspmm.dataset import batch_form
from chainer_bspmm.dataset.batch_form import Capacity

if TYPE_CHECKING:
    from chainer_bspmm.training.driver import Driver

STEP = 64  # rows and entries are multiples of it
SPARE = 1.1  # factor on a size that is derived from a batch rather than from a data set
DEVIATIONS = 1, 4  # standard deviations above the mean batch that the two sizes of a data set hold

N_SLOTS = 4  # of a group, which has one event; there are two groups
# Bytes that a kernel reads over the bus sooner than a GPU has waited for its copy engine.
FEW_BYTES = 2**14
_STORAGE = 'f'  # of the kernel that copies: any, it moves bytes


def bound(values, n_graphs, deviations):
    """Return a multiple of ``STEP`` that holds most sums of n_graphs of the values, (M,)."""
    # A batch without repeated molecules holds at most the n_graphs largest.
    return round_up(
        min(
            n_graphs * values.mean() + deviations * numpy.sqrt(n_graphs) * values.std(),
            numpy.sort(values)[-n_graphs:].sum() + 1,
        )
    )


def round_up(number):
    """Return the smallest positive multiple of ``STEP`` (int) that is at least `number`."""
    return max(1, -(-int(numpy.ceil(number)) // STEP)) * STEP


class Capacities:
    """Choose a capacity for each batch of n_graphs molecules.

    `sizes` and `entries`, (M,), are those of all molecules of the data set, if known, `largest` the
    bounds of a molecule. Sums over n_graphs of them drawn at random are close to normal: one size
    holds five batches in six, the next all but one in 30,000. Without a data set's sizes, or if a
    batch exceeds both, a size is derived from the batch.
    """

    def __init__(self, n_graphs, sizes=None, entries=None, largest=None):
        self._levels = []
        if sizes is None or not len(sizes):
            return
        for deviations in DEVIATIONS:
            rows = bound(sizes, n_graphs, deviations)
            total = bound(entries, n_graphs, deviations)
            self._levels.append(largest._replace(rows=rows, entries=total))

    def of(self, need):
        """Return the smallest known capacity that holds a batch, or add one."""
        # Always with a spare row and entry: the check with and without them detects their effect.
        rows, entries, *bounds = need
        needed = rows + 1, entries + 1, *bounds
        for level in self._levels:
            if all(map(operator.ge, level, needed)):
                return level
        largest = self._levels[-1] if self._levels else Capacity(0, 0, 0, 0, -1)
        max_rows, max_entries, max_atom_id = bounds
        with_spare = Capacity(
            round_up((rows + 1) * SPARE),
            round_up((entries + 1) * SPARE),
            math.ceil(max_rows * SPARE),
            math.ceil(max_entries * SPARE),
            max_atom_id,
        )
        self._levels.append(Capacity(*map(max, largest, with_spare)))
        return self._levels[-1]


class Staging:
    """Send named arrays, name -> (shape, dtype), to fixed places on a device, in one copy.

    The host writes into pinned memory. There are several slots of it, taken in turn, so that the
    next batches can be written before the last one was copied. They are in two groups: one is
    written again when all of it was copied, which takes one event instead of one for each batch.

    Few bytes are copied by a kernel, which keeps count of the slots: captured in a CUDA graph, it
    copies the next one at every launch. `device`, name -> CuPy array, is where they arrive.
    """

    def __init__(self, arrays, device):
        cupy = cuda.cupy
        places = {}
        start = 0
        for name, (shape, dtype) in arrays.items():
            stop = start + int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize
            places[name] = slice(start, stop), dtype, shape
            start = -(-stop // plans.VECTOR_BYTES) * plans.VECTOR_BYTES
        self._n_bytes = max(start, plans.VECTOR_BYTES)
        self.is_kernel = self._n_bytes <= FEW_BYTES
        self._device = device.device
        with self._device:
            self._buffer = cupy.zeros(self._n_bytes, numpy.uint8)
            self._memory = cupy.cuda.alloc_pinned_memory(2 * N_SLOTS * self._n_bytes)
            self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
            if self.is_kernel:
                self._position = cupy.zeros(1, numpy.uint32)
                self._plan = plans.one_block(self._n_bytes // plans.VECTOR_BYTES)
                # It may be launched first under capture, which should not compile anything.
                device_id = cupy.cuda.runtime.getDevice()
                kernels.load(device_id, 'staged_copy', _STORAGE, self._plan.defines)
            self._device.synchronize()  # the first batch may be sent on another stream
        # Pinned memory goes to another owner at once, although a copy may still have to read it.
        error = cupy.cuda.runtime.CUDARuntimeError
        weakref.finalize(self, _synchronize, self._device, error).atexit = False
        slots = numpy.frombuffer(self._memory, numpy.uint8, 2 * N_SLOTS * self._n_bytes)
        self._slots = [_views(slot, places) for slot in slots.reshape(2 * N_SLOTS, self._n_bytes)]
        self.device = _views(self._buffer, places)
        self._next = 0
        self._is_filled = False  # the next slot, which may have been copied if there was an error

    def fill(self):
        """Return name -> host array: all of it is to be written, then to be copied."""
        if self._is_filled:
            self._look()
        group, slot = divmod(self._next, N_SLOTS)
        if not slot:
            self._events[group].synchronize()  # wait for the last copy from this group
        self._is_filled = True
        return self._slots[self._next]

    def copy(self):
        """Copy what was written to the device, on the current stream."""
        if self.is_kernel:
            run(
                'staged_copy',
                self._buffer,
                self._plan,
                numpy.uintp(self._memory.ptr),
                self._buffer,
                numpy.int32(self._n_bytes // plans.VECTOR_BYTES),
                numpy.int32(2 * N_SLOTS),
                self._position,
                storage=_STORAGE,
            )
        else:
            address = self._memory.ptr + self._next * self._n_bytes
            self._buffer.data.copy_from_host_async(address, self._n_bytes)

    def copied(self, stream):
        """Go on to the next slot: the copy of this one was launched, here or by a graph."""
        group, slot = divmod(self._next, N_SLOTS)
        if slot == N_SLOTS - 1:
            self._events[group].record(stream)
        self._next = (self._next + 1) % (2 * N_SLOTS)
        self._is_filled = False

    def send(self, stream):
        """Copy what was written to the device, and go on; `stream` is the current one."""
        self.copy()
        self.copied(stream)

    def again(self):
        """Write to the next slot what the last one had."""
        views = self.fill()
        last = self._slots[self._next - 1]
        for name, view in views.items():
            view[...] = last[name]

    def _look(self):
        """Find the next slot after an error or an interrupt (synchronises)."""
        with self._device:
            self._device.synchronize()
            if self.is_kernel:
                self._next = int(self._position.get()[0]) % (2 * N_SLOTS)


def _synchronize(device, error):
    with device, contextlib.suppress(error):
        device.synchronize()


def _views(buffer, places):
    return {
        name: buffer[place].view(dtype).reshape(shape)
        for name, (place, dtype, shape) in places.items()
    }


class Inputs:
    """Device memory that a captured step reads: a batch, and `n_numbers` values of the optimizer.

    The batch is of the form of `batch`, which is the first.
    """

    def __init__(self, driver: Driver, batch, capacity, n_numbers=None):
        device = driver.device
        self._capturer = driver.capturer
        self._form = batch.form
        self._capacity = capacity
        self._gather = batch.gather
        arrays = {'counter': ((1,), 'u8'), 'row_address': ((1,), 'u8')}
        if n_numbers is not None:
            arrays['numbers'] = (n_numbers,), 'f8'
        arrays.update(batch.staged(capacity))
        self._staging = Staging(arrays, device)
        sent = self._staging.device
        if self._gather is None:
            self._buffers = batch_form.buffers_of(sent)
        else:
            with chainer.using_device(device):
                self._buffers = batch_form.new_buffers(device.xp.zeros, self._form, capacity)
            if batch.is_fixed:
                # One warp gathers a molecule: a large graph would take longer than its step.
                with self._capturer.ordered():
                    batch.fill(self._buffers)
                self._gather = None
        # The `Step` to be current when the captured step is run.
        self.step = step.Step(driver.blas, driver.seed, sent['counter'])
        self.row_address = sent['row_address']  # (1,) uint64, where the step reports: `reports`
        self.numbers = sent.get('numbers')  # (n_numbers,) float64 or None

    def send(self, batch, counter, numbers=None, row_address=0, by_graph=False):
        """Send all to the device; by_graph: a graph that captured :meth:`fetch` comes next."""
        views = self._staging.fill()
        views['counter'][0] = counter
        views['row_address'][0] = row_address
        if numbers is not None:
            views['numbers'][...] = numbers
        batch.write(views)
        if not (by_graph and self._staging.is_kernel):
            self._staging.send(self._capturer.join())  # the last step may read, on another stream

    def fetch(self):
        """Copy what was sent, if a graph does that; for a capture."""
        if self._staging.is_kernel:
            self._staging.copy()

    def fetched(self, stream):
        """Note that a graph that captured :meth:`fetch` was launched on a stream."""
        if self._staging.is_kernel:
            self._staging.copied(stream)

    def arrays(self):
        """Return the batch (atoms, BatchedCSR, label...); gather it if only indices were sent."""
        if self._gather is not None:
            self._gather(self._staging.device, self._buffers)
        return batch_form.batch_over(self._buffers, self._form, self._capacity)
