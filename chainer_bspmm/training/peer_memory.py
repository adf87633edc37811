"""Memory of the GPUs of one host, which every rank has mapped: it writes to that of the others."""

import contextlib

import numpy

from chainer.backends import cuda

MOST = 8  # ranks, whose addresses are arguments of a kernel
_ALIGNMENT = 256  # bytes
# What CUDA allocates at once: it shares all of it, with whatever else is there.
_GRANULARITY = 2 << 20


# (communicator, PeerMemory), for the life of the process: memory that another rank has mapped must
# not be freed, and a graph that was captured may still be launched.
_kept = []


class PeerMemory:
    """Places for what the ranks send each other, on the GPU of the receiver.

    Args:
        n_ranks (int): of the host.
        size (int), dtype (numpy.dtype): of what a rank sends.
        chunks (tuple): (dtype's char, number of chunks) of each launch that sends it.
        vectors (list): (n, dtype) of the vectors that are added up besides.

    Attributes:
        data (array): (n_ranks,) uint64, addresses of (2, n_ranks, size) elements, as words.
        slots (list): (n_ranks,) uint64 addresses of each vector's slot (see kernels/peer_sum.cu).
        turn (cupy.ndarray): (number of chunks,) uint32, of this rank alone.
        turns (cupy.ndarray): (n_vectors,) uint32, likewise.

    Raises:
        cupy.cuda.runtime.CUDARuntimeError: there is no room.
    """

    def __init__(self, n_ranks, size, dtype, chunks, vectors=()):
        self._sizes, self.size, self.vectors = (size, dtype, chunks), size, list(vectors)
        *self._starts, n_bytes = _starts(n_ranks, size, dtype, vectors)
        n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        # Not of a pool: a handle is a whole allocation's.
        self._memory = cuda.cupy.cuda.Memory(n_bytes)
        runtime = cuda.cupy.cuda.runtime
        runtime.memset(self._memory.ptr, 0, n_bytes)
        runtime.deviceSynchronize()
        n_chunks = sum(n for _, n in chunks)
        self.turn, self.turns = (cuda.cupy.zeros(n, numpy.uint32) for n in (n_chunks, len(vectors)))
        self._opened = []

    def fits(self, *sizes):
        """Return whether it has this size, dtype and chunks."""
        return self._sizes == sizes

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

    def unmap(self):
        """Undo :meth:`map`."""
        runtime = cuda.cupy.cuda.runtime
        with contextlib.suppress(runtime.CUDARuntimeError):
            runtime.deviceSynchronize()
            while self._opened:
                runtime.ipcCloseMemHandle(self._opened.pop())


def connected(comm, size, dtype, chunks, vectors, prepare):
    """Return the `PeerMemory` of all ranks; None if it cannot be. All of them call it.

    For the same sizes the same is returned.

    Args:
        comm (chainermn.CommunicatorBase): with a GPU for each rank.
        size, dtype, chunks, vectors: as in `PeerMemory`.
        prepare (callable): called with it. What it compiles and loads is there before any rank
            waits for this one.
    """
    if not 1 < comm.size <= MOST or comm.intra_size != comm.size:
        return None
    refused, sizes = cuda.cupy.cuda.runtime.CUDARuntimeError, (size, dtype, chunks)
    fitting = [
        i
        for i, (of, known) in enumerate(_kept)
        if of is comm and known.fits(*sizes) and known.vectors == vectors
    ]
    choices = comm.mpi_comm.allgather((fitting, [(n, of.char) for n, of in vectors]))
    if choices.count(choices[0]) < comm.size:
        return None
    found = handle = None
    # Where GPUs cannot reach each other, or processes may not share memory.
    with contextlib.suppress(refused):
        found = _kept[fitting[0]][1] if fitting else PeerMemory(comm.size, *sizes, vectors)
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
            found.unmap()
        comm.mpi_comm.Barrier()  # nobody has mapped what is freed now
        return None
    if not fitting:
        _kept.append((comm, found))
    return found


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
