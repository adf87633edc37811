"""The arrays that a captured step reads: at fixed places on the device, written before each run."""

import collections

import numpy

from chainer.backends import cuda

from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.batched_csr import Buffers

ALIGNMENT = 16  # bytes, the widest load of a kernel
N_SLOTS = 2  # one is filled while the other is still being copied


class Form(collections.namedtuple('Form', 'n_graphs n_relations is_symmetric atoms data labels')):
    """What decides the layout of a batch's arrays, besides the capacity.

    atoms, and each of the labels: (dtype, shape of a row); data: dtype or None.
    """

    @classmethod
    def of(cls, n_graphs, n_relations, is_symmetric, atoms, data, labels):
        """Make one from arrays of a batch, or of a data set that batches are gathered from."""
        return cls(
            n_graphs,
            n_relations,
            is_symmetric,
            _row(atoms),
            None if data is None else data.dtype,
            tuple(map(_row, labels)),
        )


def _row(array):
    return array.dtype, array.shape[1:]


def batch_arrays(form, capacity):
    """Return name -> (shape, dtype) of the arrays of a batch: its buffers' layout.

    Labels are called ``label_0``, ``label_1`` and so on.
    """
    dtype, tail = form.atoms
    arrays = {
        'row_offsets': ((form.n_graphs + 1,), 'i4'),
        'col_offsets': ((form.n_graphs + 1,), 'i4'),
        'indptr': ((capacity.rows + 1,), 'i4'),
        'indices': ((capacity.entries,), 'i4'),
        'atoms': ((capacity.rows,) + tail, dtype),
    }
    if form.data is not None:
        arrays['data'] = (capacity.entries,), form.data
    for i, (dtype, tail) in enumerate(form.labels):
        arrays['label_%d' % i] = (form.n_graphs,) + tail, dtype
    return arrays


def buffers_of(arrays):
    """Return the `Buffers` of arrays that are named as :func:`batch_arrays` names them."""
    labels = [array for name, array in arrays.items() if name.startswith('label_')]
    names = [name for name in Buffers._fields if name != 'labels']
    return Buffers(labels=labels, **{name: arrays.get(name) for name in names})


def batch_over(buffers, form, capacity):
    """Return (atoms, BatchedCSR, label...) over buffers; nothing derived from them is there yet."""
    adj = BatchedCSR.in_buffers(
        indptr=buffers.indptr,
        indices=buffers.indices,
        row_offsets=buffers.row_offsets,
        col_offsets=buffers.col_offsets,
        data=buffers.data,
        n_relations=form.n_relations,
        max_rows=capacity.max_rows,
        max_nnz=capacity.max_entries,
        max_atom_id=None if capacity.max_atom_id < 0 else capacity.max_atom_id,
        is_symmetric=form.is_symmetric,
    )
    return (buffers.atoms, adj, *buffers.labels)


class Staging:
    """Send named arrays of fixed shapes to fixed places on a device, in one copy.

    The host writes into pinned memory, twice there, so that it can prepare the next batch while
    the last one is on its way.

    Args:
        arrays (dict): name -> (shape, dtype).
        device (chainer.backend.GpuDevice): where to.

    Attributes:
        device (dict): name -> CuPy array.
    """

    def __init__(self, arrays, device):
        cupy = cuda.cupy
        places, start = {}, 0
        for name, (shape, dtype) in arrays.items():
            stop = start + int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize
            places[name] = slice(start, stop), dtype, shape
            start = -(-stop // ALIGNMENT) * ALIGNMENT
        self._n_bytes = max(start, ALIGNMENT)
        with device.device:
            self._buffer = cupy.zeros(self._n_bytes, numpy.uint8)
            pinned = [cupy.cuda.alloc_pinned_memory(self._n_bytes) for _ in range(N_SLOTS)]
            self._slots = [
                (
                    _views(numpy.frombuffer(memory, numpy.uint8, self._n_bytes), places),
                    memory,
                    cupy.cuda.Event(disable_timing=True),
                )
                for memory in pinned
            ]
        self.device = _views(self._buffer, places)
        self._next = 0

    def fill(self):
        """Return name -> host array, to be written before :meth:`send`."""
        arrays, _, event = self._slots[self._next]
        event.synchronize()  # until its last copy has left
        return arrays

    def send(self):
        """Copy what was written to the device, on the current stream."""
        _, memory, event = self._slots[self._next]
        stream = cuda.cupy.cuda.get_current_stream()
        self._buffer.data.copy_from_host_async(memory.ptr, self._n_bytes, stream)
        event.record(stream)
        self._next = (self._next + 1) % N_SLOTS


def _views(buffer, places):
    return {
        name: buffer[place].view(dtype).reshape(shape)
        for name, (place, dtype, shape) in places.items()
    }
