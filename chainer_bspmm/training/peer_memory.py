"""Memory of the GPUs of one host that every rank has mapped, and sums through it in a step.

Each rank writes to the memory of the others.
"""

import contextlib

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, plans
from chainer_bspmm.cuda.launch import run

MOST = 8  # most ranks, because their addresses are arguments of a kernel
_ALIGNMENT = 256  # bytes
_THREADS = 256  # threads of the block of kernels/peer_sum.cu
# Unit of CUDA's allocations. Memory is shared in whole units, with anything else that is in them.
_GRANULARITY = 2 << 20

# (communicator, PeerMemory), kept for the life of the process: memory that another rank has mapped
# must not be freed, and a captured graph that uses it may still be launched.
_kept = []


class PeerMemory:
    """Memory for data that the ranks of a host send each other, on the GPU of the receiver.

    A rank sends `size` elements of a dtype and `vectors`, each (n, dtype). The elements are sent by
    launches whose `chunks` are (dtype's char, number of chunks).

    Addresses in all ranks' memory are (n_ranks,) uint64: `data`, where (2, n_ranks, size) elements
    are stored as words, and `slots`, one array for each vector (see kernels/peer_sum.cu). `turn`
    and `turns` count the turns of every chunk and vector; no other rank uses them. Without enough
    memory a CUDARuntimeError is raised.
    """

    def __init__(self, n_ranks, size, dtype, chunks, vectors=()):
        self._sizes = (size, dtype, chunks)
        self.size = size
        self.vectors = list(vectors)
        *self._starts, n_bytes = _starts(n_ranks, size, dtype, vectors)
        n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        # The memory is not from a pool, because a handle shares a whole allocation.
        self._memory = cuda.cupy.cuda.Memory(n_bytes)
        runtime = cuda.cupy.cuda.runtime
        runtime.memset(self._memory.ptr, 0, n_bytes)
        runtime.deviceSynchronize()
        n_chunks = sum(n for _, n in chunks)
        self.turn = cuda.cupy.zeros(n_chunks, numpy.uint32)
        self.turns = cuda.cupy.zeros(len(vectors), numpy.uint32)
        self._opened = []

    def fits(self, *sizes):
        """Return whether the memory was made for this size, dtype and chunks."""
        return self._sizes == sizes

    def handle(self):
        """Return a handle that another process can map, and the bus address of the GPU."""
        gpu = cuda.cupy.cuda.Device().pci_bus_id
        return cuda.cupy.cuda.runtime.ipcGetMemHandle(self._memory.ptr), gpu

    def map(self, handles, rank):
        """Map the memory of the other ranks, given the handles of all ranks."""
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
    """Return a `PeerMemory` that all ranks have mapped, or None if that is not possible.

    Later calls with the same sizes return the same object. ``prepare(memory)`` compiles and loads
    kernels before any rank has to wait for this one.
    """
    if not 1 < comm.size <= MOST or comm.intra_size != comm.size:
        return None
    refused = cuda.cupy.cuda.runtime.CUDARuntimeError
    sizes = (size, dtype, chunks)
    fitting = [
        i
        for i, (of, known) in enumerate(_kept)
        if of is comm and known.fits(*sizes) and known.vectors == vectors
    ]
    choices = comm.mpi_comm.allgather((fitting, [(n, of.char) for n, of in vectors]))
    if choices.count(choices[0]) < comm.size:
        return None
    memory = None
    handle = None
    # CUDA refuses if GPUs cannot reach each other, or if processes may not share memory.
    with contextlib.suppress(refused):
        memory = _kept[fitting[0]][1] if fitting else PeerMemory(comm.size, *sizes, vectors)
        handle = memory.handle()
    handles = comm.mpi_comm.allgather(handle)
    is_done = False
    # Every rank needs a separate GPU: kernels that wait for each other on one might wait forever.
    if all(handles) and len({gpu for _, gpu in handles}) == comm.size:
        with contextlib.suppress(refused):
            if not fitting:
                memory.map(handles, comm.rank)
            prepare(memory)
            is_done = True
    if not all(comm.mpi_comm.allgather(is_done)):
        if memory is not None and not fitting:
            memory.unmap()
        comm.mpi_comm.Barrier()  # after it no rank has this memory mapped, so it can be freed
        return None
    if not fitting:
        _kept.append((comm, memory))
    return memory


def addresses_by_value(*arrays):
    """Return arrays of addresses, concatenated, as an argument that a kernel takes by value."""
    joined = numpy.concatenate(arrays)
    return joined.view(numpy.dtype([('of', numpy.uint64, joined.size)]))


def words_of(dtype):
    """Return the number of 8-byte words of an element: each has 32 of its bits, and the turn."""
    return -(-dtype.itemsize // 4)


def _starts(n_ranks, size, dtype, vectors):
    """Return the offsets of data and of each slot, and the total size, in bytes."""
    sizes = [16 * n_ranks * n * words_of(of) for n, of in [(size, dtype), *vectors]]
    return numpy.cumsum([0, *(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)]).tolist()


class PeerSums:
    """Sums over all ranks in a step, such as the statistics of batch normalisation.

    The sums are numbered in the order of the calls, which must be the same on all ranks. Before the
    ranks share memory, `peers`, a step adds up nothing, but notes the `vectors`, each (n, dtype),
    that it would add up.
    """

    def __init__(self, comm, peers=None):
        self._comm = comm
        self._peers = peers
        self.vectors = [] if peers is None else list(peers.vectors)
        self._alone = True
        self._next = 0

    def begin(self, alone):
        """Begin a step; `alone`: it is a trial, or repeats the last step with the others' data."""
        self._alone = alone
        self._next = 0

    @contextlib.contextmanager
    def repeated(self):
        """Context whose sums are computed once more after it, under the same numbers."""
        first = self._next
        yield
        self._next = first

    def sum(self, array):
        """Return the sum of an array over the ranks.

        RuntimeError: in the first step this sum had another size or dtype, or did not exist.
        """
        vector = array.size, array.dtype
        number = self._next
        self._next += 1
        if self._peers is None and number == len(self.vectors):
            self.vectors.append(vector)
        if self.vectors[number : number + 1] != [vector]:
            text = (
                'statistics over several ranks: expected the size and dtype of sum %d as in the '
                'first step, %s, got %s'
            )
            raise RuntimeError(text % (number, self.vectors[number : number + 1], vector))
        return array if self._peers is None else self._launch(number, array)

    def load_kernels(self, peers):
        """Compile the kernels for the vectors of a `PeerMemory`."""
        for dtype in {of for _, of in peers.vectors}:
            device_id = peers.turns.data.device_id
            kernels.load(device_id, 'peer_sum', dtype.char, defines(len(peers.data)))

    def _launch(self, number, array):
        peers = self._peers
        array = cuda.cupy.ascontiguousarray(array)
        total = cuda.cupy.empty(array.shape, array.dtype)
        run(
            'peer_sum',
            array,
            plans.Launch(defines(len(peers.data)), (1, 1, 1), (_THREADS, 1, 1)),
            array,
            total,
            addresses_by_value(peers.slots[number]),
            peers.turns[number:],
            numbers=map(numpy.int32, (array.size, self._comm.rank, self._alone)),
        )
        return total


def defines(n_ranks):
    """Return the compile-time constants (pairs of name and value) of kernels/peer_sum.cu."""
    return ('VECTOR', 1), ('PEERS', n_ranks)
