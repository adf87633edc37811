"""Memory that a captured step reads, and the transfer of batches to it."""

import contextlib
import weakref

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, plans, step
from chainer_bspmm.cuda.launch import run
from chainer_bspmm.dataset import batch_form
from chainer_bspmm.training.session import Session
from chainer_bspmm.training.snapshot import Copies

N_SLOTS = 4  # slots of a group; there are two groups, each with one event
# Up to so many bytes, a kernel that reads over the bus is faster than the GPU's copy engine, which
# takes time to start.
FEW_BYTES = 2**14
_STORAGE = 'f'  # any dtype will do, because the kernel copies bytes


class Staging:
    """Send named arrays, name -> (shape, dtype), to fixed places on a device, in one copy.

    The host writes to pinned memory. This has several slots, which are used in turn, so that the
    next batches can be written before the last one was copied. The slots form two groups. A group
    is written again once all of its slots were copied, so that one event per group is enough,
    instead of one for each batch.

    If there are few bytes, a kernel copies them, which counts the slots. Captured in a CUDA graph,
    it copies the next slot at every launch. The arrays arrive in `device`, name -> CuPy array.
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
                # The kernel is compiled now, because its first launch may be during a capture.
                device_id = cupy.cuda.runtime.getDevice()
                kernels.load(device_id, 'staged_copy', _STORAGE, self._plan.defines)
            self._device.synchronize()  # the first batch may be sent on another stream
        # The device is synchronised before the pinned memory is freed. Otherwise it could get a new
        # owner while a copy still has to read it.
        error = cupy.cuda.runtime.CUDARuntimeError
        weakref.finalize(self, _synchronize, self._device, error).atexit = False
        slots = numpy.frombuffer(self._memory, numpy.uint8, 2 * N_SLOTS * self._n_bytes)
        self._slots = [_views(slot, places) for slot in slots.reshape(2 * N_SLOTS, self._n_bytes)]
        self.device = _views(self._buffer, places)
        self._next = 0
        # Whether the next slot was filled. After an error it may also have been copied already.
        self._is_filled = False

    def fill(self):
        """Return name -> host array of the next slot; write all of them before :meth:`copy`."""
        if self._is_filled:
            self._look()
        group, slot = divmod(self._next, N_SLOTS)
        if not slot:
            self._events[group].synchronize()  # wait for the last copy from this group
        self._is_filled = True
        return self._slots[self._next]

    def copy(self):
        """Copy the filled slot to the device, on the current stream."""
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
        """Move to the next slot, after the copy of this one was launched here or by a graph."""
        group, slot = divmod(self._next, N_SLOTS)
        if slot == N_SLOTS - 1:
            self._events[group].record(stream)
        self._next = (self._next + 1) % (2 * N_SLOTS)
        self._is_filled = False

    def send(self, stream):
        """Copy the filled slot to the device, and move to the next; `stream` is the current one."""
        self.copy()
        self.copied(stream)

    def again(self):
        """Fill the next slot with the contents of the last one."""
        views = self.fill()
        last = self._slots[self._next - 1]
        for name, view in views.items():
            view[...] = last[name]

    def _look(self):
        """Find out which slot is next, after an error or an interrupt (synchronises)."""
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

    `batch` is the first one; all others have the same form.
    """

    def __init__(self, session: Session, batch, capacity, n_numbers=None):
        device = session.device
        self._capturer = session.capturer
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
                # Every batch is the same, so it is copied once. Gathering a large graph at every
                # step, by one warp, would take longer than the step itself.
                with self._capturer.ordered():
                    batch.fill(self._buffers)
                self._gather = None
        # The `Step` that is current while the captured step runs.
        self.step = step.Step(session.blas, session.seed, sent['counter'])
        self.row_address = sent['row_address']  # (1,) uint64, address for `Reports`
        self.numbers = sent.get('numbers')  # (n_numbers,) float64 or None

    def send(self, batch, counter, numbers=None, row_address=0, by_graph=False):
        """Send a batch and numbers to the device.

        `by_graph`: the next launch is a graph that captured :meth:`fetch`, so it may copy them.
        """
        views = self._staging.fill()
        views['counter'][0] = counter
        views['row_address'][0] = row_address
        if numbers is not None:
            views['numbers'][...] = numbers
        batch.write(views)
        if not (by_graph and self._staging.is_kernel):
            # The last step may still be reading the memory, on another stream.
            self._staging.send(self._capturer.join())

    def fetch(self):
        """Launch the copy during a capture, if it is done by a kernel, which a graph can repeat."""
        if self._staging.is_kernel:
            self._staging.copy()

    def fetched(self, stream):
        """Note that a graph with a captured :meth:`fetch` was launched on a stream."""
        if self._staging.is_kernel:
            self._staging.copied(stream)

    def sent(self):
        """Return copies of the arrays that were sent last, for :meth:`send_again`."""
        return Copies(self._staging.device)

    def send_again(self, sent):
        """Write copies of :meth:`sent` to the device."""
        sent.put_back(self._staging.device)

    def arrays(self, are_separate=False):
        """Return the batch (atoms, BatchedCSR, label...); gather it if only indices were sent.

        The arrays are new views, so that an attribute that keeps one is seen to be assigned. With
        `are_separate` they are copies, which no later batch overwrites.
        """
        if self._gather is not None:
            self._gather(self._staging.device, self._buffers)

        def new(array):
            return array.copy() if are_separate else array.view()

        tables = self._buffers._asdict()
        labels = [new(array) for array in tables.pop('labels')]
        others = {name: None if array is None else new(array) for name, array in tables.items()}
        buffers = batch_form.Buffers(labels=labels, **others)
        return batch_form.batch_over(buffers, self._form, self._capacity)
