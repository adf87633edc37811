"""Memory of the GPUs of one host, which every rank has mapped: it writes to that of the others."""

import contextlib
import weakref

import numpy

from chainer.backends import cuda

MOST = 8  # ranks, whose addresses are arguments of a kernel
_ALIGNMENT = 256  # bytes
# What CUDA allocates at once: it shares all of it, with whatever else is there.
_GRANULARITY = 2 << 20


class PeerMemory:
    """Places for what the ranks send each other, on the GPU of the receiver.

    It is mapped until it is closed or goes. Memory that another rank has mapped must not go.

    Args:
        n_ranks (int): of the host.
        size (int), dtype (numpy.dtype): of what a rank sends.
        n_chunks (int): in how many parts.
        vectors (list): (n, dtype) of the vectors that are added up besides.

    Attributes:
        data (array): (n_ranks,) uint64, addresses of (2, n_ranks, size) elements, as words.
        slots (list): (n_ranks,) uint64 addresses of each vector's slot (see kernels/peer_sum.cu).
        turn (cupy.ndarray): (n_chunks,) uint32, of this rank alone.
        turns (cupy.ndarray): (n_vectors,) uint32, likewise.

    Raises:
        cupy.cuda.runtime.CUDARuntimeError: there is no room.
    """

    def __init__(self, n_ranks, size, dtype, n_chunks, vectors=()):
        self.size, self.dtype, self.n_chunks, self.vectors = size, dtype, n_chunks, list(vectors)
        *self._starts, n_bytes = _starts(n_ranks, size, dtype, vectors)
        n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        # Not of a pool: a handle is a whole allocation's.
        self._memory = cuda.cupy.cuda.Memory(n_bytes)
        runtime = cuda.cupy.cuda.runtime
        runtime.memset(self._memory.ptr, 0, n_bytes)
        runtime.deviceSynchronize()
        self.turn, self.turns = (cuda.cupy.zeros(n, numpy.uint32) for n in (n_chunks, len(vectors)))
        self._opened = []
        # Not at exit, where what this rank has launched may still write to the others.
        self.close = weakref.finalize(self, _unmap, self._opened)
        self.close.atexit = False

    def fits(self, size, dtype, n_chunks):
        """Return whether it has these sizes."""
        return (self.size, self.dtype, self.n_chunks) == (size, dtype, n_chunks)

    def handle(self):
        """Return what another process can map, and the address of its GPU on the bus."""
        gpu = cuda.cupy.cuda.Device().pci_bus_id
        return cuda.cupy.cuda.runtime.ipcGetMemHandle(self._memory.ptr), gpu

    def map(self, handles, rank):
        """Map the memory of the other ranks.

        Args:
            handles (list): of all ranks.
            rank (int): the own one.
        """
        addresses = []
        for other, (handle, _) in enumerate(handles):
            if other != rank:
                self._opened.append(cuda.cupy.cuda.runtime.ipcOpenMemHandle(handle))
            addresses.append(self._memory.ptr if other == rank else self._opened[-1])
        self.data, *self.slots = (
            numpy.array(addresses, numpy.uint64) + numpy.uint64(start) for start in self._starts
        )


def connected(optimizer, comm, size, dtype, n_chunks, vectors, prepare):
    """Return the `PeerMemory` of all ranks; None if it cannot be. All of them call it.

    The optimizer keeps it for good: others have mapped it, and a graph that was captured may still
    be launched. For the same sizes the same is returned.

    Args:
        optimizer (multi_node.optimizer.Weighted): of the ranks.
        comm (chainermn.CommunicatorBase): with a GPU for each rank.
        size, dtype, n_chunks, vectors: as in `PeerMemory`.
        prepare (callable): called with it. What it compiles and loads is there before any rank
            waits for this one.
    """
    if not 1 < comm.size <= MOST or comm.intra_size != comm.size:
        return None
    kept, refused = _kept(optimizer), cuda.cupy.cuda.runtime.CUDARuntimeError
    fitting = [
        i for i, of in enumerate(kept) if of.fits(size, dtype, n_chunks) and of.vectors == vectors
    ]
    choices = comm.mpi_comm.allgather((fitting, [(n, of.char) for n, of in vectors]))
    if choices.count(choices[0]) < comm.size:
        return None
    found = handle = None
    # Where GPUs cannot reach each other, or processes may not share memory.
    with contextlib.suppress(refused):
        found = (
            kept[fitting[0]] if fitting else PeerMemory(comm.size, size, dtype, n_chunks, vectors)
        )
        handle = found.handle()
    handles = comm.mpi_comm.allgather(handle)
    is_done = False
    # Ranks that wait for each other on one GPU might wait forever.
    if all(handles) and len({gpu for _, gpu in handles}) == comm.size:
        with contextlib.suppress(refused):
            if not fitting:
                found.map(handles, comm.rank)
            prepare(found)
            is_done = True
    if not all(comm.mpi_comm.allgather(is_done)):
        if found is not None and not fitting:
            found.close()
        comm.mpi_comm.Barrier()  # nobody has mapped what is freed now
        return None
    if not fitting:
        kept.append(found)
    return found


def _kept(optimizer):
    """Return the list of what an optimizer keeps."""
    if not hasattr(optimizer, '_peer_memory'):
        object.__setattr__(optimizer, '_peer_memory', [])
    return optimizer._peer_memory


def addresses_by_value(*arrays):
    """Return arrays of addresses as a kernel takes them by value, one after the other."""
    found = numpy.concatenate(arrays)
    return found.view(numpy.dtype([('of', numpy.uint64, found.size)]))


def words_of(dtype):
    """Return how many words of 8 bytes an element takes: each has 32 bits of it, and a number."""
    return -(-dtype.itemsize // 4)


def _starts(n_ranks, size, dtype, vectors):
    """Return where data and each slot begin, and the end, in bytes."""
    sizes = [16 * n_ranks * n * words_of(of) for n, of in [(size, dtype), *vectors]]
    return numpy.cumsum([0, *(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)]).tolist()


def _unmap(opened):
    runtime = cuda.cupy.cuda.runtime
    with contextlib.suppress(runtime.CUDARuntimeError):
        runtime.deviceSynchronize()
        for address in opened:
            runtime.ipcCloseMemHandle(address)
