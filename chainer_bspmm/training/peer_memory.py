"""Memory of the GPUs of one host, which every rank has mapped: it writes to that of the others."""

import contextlib
import weakref

import numpy

from chainer.backends import cuda

MOST = 8  # ranks, whose addresses are arguments of a kernel
SLOT_FLAGS = 64  # bytes of the flags of a vector's slot, as in the kernel
_ALIGNMENT = 256  # bytes
# What CUDA allocates at once: it shares all of it, with whatever else is there.
_GRANULARITY = 2 << 20


class PeerMemory:
    """Places for what the ranks send each other, on the GPU of the receiver.

    Args:
        memory (cupy.cuda.Memory): of this rank, which the others have mapped.
        addresses (list of int): of the memory of every rank, as this process has mapped it.
        opened (list of int): those of them that are to be unmapped.
        size (int), dtype (numpy.dtype): of what a rank sends.
        n_flags (int): how many flags it sends along.
        vectors (list): (n, dtype) of the vectors that are added up besides.

    Attributes:
        data, flags (array): (n_ranks,) uint64, addresses: of (2, n_ranks, size), (2, n_ranks,
            n_flags) uint32.
        slots (list): (n_ranks,) uint64 addresses of each vector's slot (see kernels/peer_sum.cu).
        turn (cupy.ndarray): (n_flags,) uint32, of this rank alone.
        turns (cupy.ndarray): (n_vectors,) uint32, likewise.
    """

    def __init__(self, memory, addresses, opened, size, dtype, n_flags, vectors=()):
        self._memory = memory
        self.size, self.dtype, self.n_flags, self.vectors = size, dtype, n_flags, vectors
        starts = _starts(len(addresses), size, dtype, n_flags, vectors)
        places = [numpy.array(addresses, numpy.uint64) + numpy.uint64(start) for start in starts]
        self.data, self.flags, *self.slots, _ = places
        self.turn, self.turns = (cuda.cupy.zeros(n, numpy.uint32) for n in (n_flags, len(vectors)))
        # Not at exit, where what this rank has launched may still write to the others.
        self.close = weakref.finalize(self, _unmap, opened)
        self.close.atexit = False


def connected(optimizer, comm, size, dtype, n_flags, vectors, prepare):
    """Return the `PeerMemory` of all ranks; None if it cannot be. All of them call it.

    Args:
        optimizer (multi_node.optimizer.Weighted): keeps it, for :func:`known`.
        comm (chainermn.CommunicatorBase): with a GPU for each rank.
        size, dtype, n_flags, vectors: as in `PeerMemory`.
        prepare (callable): called with it. What it compiles and loads is there before any rank
            waits for this one.
    """
    n_ranks = comm.size
    if not 1 < n_ranks <= MOST or comm.intra_size != n_ranks:
        return None
    _forget(optimizer, comm)
    runtime, opened, addresses = cuda.cupy.cuda.runtime, [], []
    handle = memory = found = None
    is_done = False
    # Where GPUs cannot reach each other, or processes may not share memory.
    with contextlib.suppress(runtime.CUDARuntimeError):
        n_bytes = _starts(n_ranks, size, dtype, n_flags, vectors)[-1]
        n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        memory = cuda.cupy.cuda.Memory(n_bytes)  # not of a pool: a handle is a whole allocation's
        runtime.memset(memory.ptr, 0, n_bytes)
        runtime.deviceSynchronize()
        handle = runtime.ipcGetMemHandle(memory.ptr), cuda.cupy.cuda.Device().pci_bus_id
    handles = comm.mpi_comm.allgather(handle)
    all_vectors = comm.mpi_comm.allgather([(n, of.char) for n, of in vectors])
    are_alike = all_vectors.count(all_vectors[0]) == n_ranks
    # Ranks that wait for each other on one GPU might wait forever.
    if are_alike and all(handles) and len({gpu for _, gpu in handles}) == n_ranks:
        with contextlib.suppress(runtime.CUDARuntimeError):
            for rank, (of_rank, _) in enumerate(handles):
                if rank != comm.rank:
                    opened.append(runtime.ipcOpenMemHandle(of_rank))
                addresses.append(memory.ptr if rank == comm.rank else opened[-1])
            found = PeerMemory(memory, addresses, opened, size, dtype, n_flags, vectors)
            prepare(found)
            is_done = True
    if not all(comm.mpi_comm.allgather(is_done)):
        _unmap(opened) if found is None else found.close()
        comm.mpi_comm.Barrier()
        return None
    object.__setattr__(optimizer, '_peer_memory', found)
    return found


def known(optimizer, size, dtype, n_flags):
    """Return the `PeerMemory` that an optimizer keeps, if there is one of these sizes."""
    found = getattr(optimizer, '_peer_memory', None)
    is_it = found is not None and (found.size, found.dtype, found.n_flags) == (size, dtype, n_flags)
    return found if is_it else None


def _forget(optimizer, comm):
    """Give back what an optimizer keeps: nobody may have mapped memory that is freed."""
    found = getattr(optimizer, '_peer_memory', None)
    if found is not None:
        found.close()
    object.__setattr__(optimizer, '_peer_memory', None)
    comm.mpi_comm.Barrier()


def addresses_by_value(*arrays):
    """Return arrays of addresses as a kernel takes them by value, one after the other."""
    found = numpy.concatenate(arrays)
    return found.view(numpy.dtype([('of', numpy.uint64, found.size)]))


def _starts(n_ranks, size, dtype, n_flags, vectors):
    """Return where data, flags and each slot begin, and the end, in bytes."""
    sizes = [2 * n_ranks * size * dtype.itemsize, 8 * n_ranks * n_flags]
    sizes += [SLOT_FLAGS + 2 * n_ranks * n * of.itemsize for n, of in vectors]
    return numpy.cumsum([0, *(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)]).tolist()


def _unmap(opened):
    runtime = cuda.cupy.cuda.runtime
    with contextlib.suppress(runtime.CUDARuntimeError):
        runtime.deviceSynchronize()
        for address in opened:
            runtime.ipcCloseMemHandle(address)
