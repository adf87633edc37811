"""Memory of the GPUs of one host, which every rank has mapped, and sums by it inside of a step.

A rank writes to the memory of the others.
"""

import contextlib

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, plans
from chainer_bspmm.cuda.launch import run

MOST = 8  # ranks, whose addresses are arguments of a kernel
_ALIGNMENT = 256  # bytes
_THREADS = 256  # of the block of kernels/peer_sum.cu
# What CUDA allocates at once: it shares all of it, with whatever else is there.
_GRANULARITY = 2 << 20

# (communicator, PeerMemory), for the life of the process: memory that another rank has mapped must
# not be freed, and a graph that was captured may still be launched.
_kept = []


class PeerMemory:
    """Places for what the ranks of a host send each other, on the GPU of the receiver.

    A rank sends `size` elements of a dtype, by launches whose `chunks` are (dtype's char, number),
    and `vectors`, (n, dtype) each. Addresses are (n_ranks,) uint64: `data`, of (2, n_ranks, size)
    elements as words, and `slots`, of each vector's (see kernels/peer_sum.cu). This rank alone
    counts the turns of every chunk and vector, in `turn` and `turns`. Without room a
    CUDARuntimeError is raised.
    """

    def __init__(self, n_ranks, size, dtype, chunks, vectors=()):
        self._sizes = (size, dtype, chunks)
        self.size = size
        self.vectors = list(vectors)
        *self._starts, n_bytes = _starts(n_ranks, size, dtype, vectors)
        n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        # Not of a pool: a handle is a whole allocation's.
        self._memory = cuda.cupy.cuda.Memory(n_bytes)
        runtime = cuda.cupy.cuda.runtime
        runtime.memset(self._memory.ptr, 0, n_bytes)
        runtime.deviceSynchronize()
        n_chunks = sum(n for _, n in chunks)
        self.turn = cuda.cupy.zeros(n_chunks, numpy.uint32)
        self.turns = cuda.cupy.zeros(len(vectors), numpy.uint32)
        self._opened = []

    def fits(self, *sizes):
        """Return whether it has this size, dtype and chunks."""
        return self._sizes == sizes

    def handle(self):
        """Return a handle that another process can map, and the address of the GPU on the bus."""
        gpu = cuda.cupy.cuda.Device().pci_bus_id
        return cuda.cupy.cuda.runtime.ipcGetMemHandle(self._memory.ptr), gpu

    def map(self, handles, rank):
        """Map the memory of the other ranks, given the handles of all."""
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
    """Return the `PeerMemory` of all ranks, the same for the same sizes; None if it cannot be."""
    # ``prepare(memory)`` compiles and loads what must be there before any rank waits for this one.
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
    # Where GPUs cannot reach each other, or processes may not share memory.
    with contextlib.suppress(refused):
        memory = _kept[fitting[0]][1] if fitting else PeerMemory(comm.size, *sizes, vectors)
        handle = memory.handle()
    handles = comm.mpi_comm.allgather(handle)
    is_done = False
    # Ranks that wait for each other on one GPU might wait forever.
    if all(handles) and len({gpu for _, gpu in handles}) == comm.size:
        with contextlib.suppress(refused):
            if not fitting:
                memory.map(handles, comm.rank)
            prepare(memory)
            is_done = True
    if not all(comm.mpi_comm.allgather(is_done)):
        if memory is not None and not fitting:
            memory.unmap()
        comm.mpi_comm.Barrier()  # no rank has mapped what is freed now
        return None
    if not fitting:
        _kept.append((comm, memory))
    return memory


def addresses_by_value(*arrays):
    """Return arrays of addresses as a kernel takes them by value, one after the other."""
    joined = numpy.concatenate(arrays)
    return joined.view(numpy.dtype([('of', numpy.uint64, joined.size)]))


def words_of(dtype):
    """Return the number of 8-byte words of an element: each has 32 bits of it, and the turn."""
    return -(-dtype.itemsize // 4)


def _starts(n_ranks, size, dtype, vectors):
    """Return where data and each slot begin, and the end, in bytes."""
    sizes = [16 * n_ranks * n * words_of(of) for n, of in [(size, dtype), *vectors]]
    return numpy.cumsum([0, *(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)]).tolist()


class PeerSums:
    """The sums of a step, such as the statistics of batch normalisation over all ranks.

    They are numbered in the order of the calls, which is that of all ranks. Before the ranks share
    memory, `peers`, a step adds up nothing and notes which `vectors`, (n, dtype), it would have.
    """

    def __init__(self, comm, peers=None):
        self._comm = comm
        self._peers = peers
        self.vectors = [] if peers is None else list(peers.vectors)
        self._alone = True
        self._next = 0

    def begin(self, alone):
        """Begin a step; alone: a trial, or the last step again, with what others sent in that."""
        self._alone = alone
        self._next = 0

    @contextlib.contextmanager
    def repeated(self):
        """Let the sums inside be done once more after it, by the same numbers."""
        first = self._next
        yield
        self._next = first

    def sum(self, array):
        """Return the sum of an array over the ranks; RuntimeError: the first step had another."""
        vector = array.size, array.dtype
        number = self._next
        self._next += 1
        if self._peers is None and number == len(self.vectors):
            self.vectors.append(vector)
        if self.vectors[number : number + 1] != [vector]:
            raise RuntimeError('statistics over several ranks: not the same as in the first step')
        return array if self._peers is None else self._launch(number, array)

    def load_kernels(self, peers):
        """Compile the kernels for the vectors of some memory."""
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
