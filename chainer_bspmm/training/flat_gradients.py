"""The mean gradient of all ranks, by memory that the GPUs of a host share, or by NCCL."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, plans
from chainer_bspmm.cuda.launch import run
from chainer_bspmm.multi_node import faults
from chainer_bspmm.training import peer_memory
from chainer_bspmm.training.fused_update import own_gradients
from chainer_bspmm.training.peer_memory import PeerSums

# Threads of a block, elements of a chunk, blocks that a multiprocessor runs; as in the kernel.
_THREADS = 256
_CHUNK = 1024
_RESIDENT = 2
# All arguments of a kernel may take 4 KB. The table of 160 parameters takes 3848 bytes.
_N_PARAMETERS = 160
# The kernel's Parameter: grad, offset, size, first_chunk, unused.
_PARAMETER = numpy.dtype('u8, i4, i4, i4, i4', align=True)
_TABLE = numpy.dtype(
    [('parameter', _PARAMETER, _N_PARAMETERS), ('n_parameters', 'i4'), ('unused', 'i4')], align=True
)


class FlatGradients:
    """Replace gradients by their mean over the molecules of all ranks, as `Weighted.update` does.

    :meth:`pack` writes the gradients to one array, :meth:`add_up` adds up the arrays of all ranks,
    and :meth:`unpack` writes the mean back. They work on the current stream, without a
    synchronisation.

    On one host the ranks write to each other's memory, `peers`. Then :meth:`pack` does everything,
    in a launch that a CUDA graph may capture (see `peer_memory` and the kernel). Otherwise the sum
    is one call of NCCL, which is not captured: NCCL requires that all ranks capture and launch a
    graph with such a call together, but here each rank launches the graph of its own batch's form.

    A loss that is not finite makes all gradients 0, on all ranks, so that parameters stay finite
    until the hosts notice (:func:`raise_if_not_finite`).

    `optimizer` is a `Weighted` one over a communicator of NCCL, whose parameters have been made; if
    more are made later, make another object. `sent` is the array that this rank packed last, `sums`
    are the `PeerSums` of a step.
    """

    def __init__(self, optimizer, peers=None):
        self._optimizer = optimizer
        self._comm = optimizer.communicator
        self._n = sum(param.size for param in self._params())
        size = self._n + 1 + self._comm.size
        self.sent = cuda.cupy.empty(size, self._dtype())
        self._sum = cuda.cupy.empty(size, self._dtype())
        self._is_bad = _flags_of(optimizer)
        self.peers = peers if peers is not None and peers.fits(*self._room()) else None
        self.sums = PeerSums(self._comm, self.peers)

    @property
    def has_sum(self):
        """Whether :meth:`pack` does everything, and :meth:`add_up` and :meth:`unpack` nothing."""
        return self.peers is not None

    def connect(self):
        """Map the memory of the other ranks, if possible; all ranks must call it."""
        size, dtype, chunks = self._room()
        self.peers = peer_memory.connected(
            self._comm, size, dtype, chunks, self.sums.vectors, self.load_kernels
        )
        if self.peers is not None:
            self.sums = PeerSums(self._comm, self.peers)

    def load_kernels(self, peers=None):
        """Compile the kernels, for losses of the parameters' dtypes and of float32."""
        peers = peers or self.peers
        n_peers = 0
        if peers is not None:
            n_peers = self._comm.size
            self.sums.load_kernels(peers)
        dtypes = {param.dtype for param in self._params()}
        flat = self.sent.dtype
        variants = [
            defines(True, flat, of_loss, n)
            for of_loss in {*dtypes, numpy.dtype('f')}
            for n in {0, n_peers}
        ]
        if peers is None:
            variants.append(defines(False, flat, numpy.dtype('f')))
        for dtype in dtypes:
            for variant in variants:
                kernels.load(self.sent.data.device_id, 'flat_gradients', dtype.char, variant)

    def pack(self, n_molecules, loss, alone=False):
        """Write the gradients, times the number of molecules, to the array that is sent."""
        if alone or not self.has_sum:
            self._launch(True, self.sent, loss, None, n_molecules)
        else:
            self._exchange(n_molecules, loss, numpy.uintp(self._is_bad.ctypes.data))

    def add_up(self):
        """Add up the packed arrays of all ranks; all ranks must call it equally often."""
        if self.has_sum:
            return
        from chainermn import nccl

        self._comm._init_comms()  # connects the ranks, if they are not connected yet

        kinds = {'e': nccl.NCCL_FLOAT16, 'f': nccl.NCCL_FLOAT32, 'd': nccl.NCCL_FLOAT64}
        self._comm.nccl_comm.allReduce(
            self.sent.data.ptr,
            self._sum.data.ptr,
            self.sent.size,
            kinds[self.sent.dtype.char],
            nccl.NCCL_SUM,
            cuda.cupy.cuda.get_current_stream().ptr,
        )

    def unpack(self):
        """Write the mean over all ranks to the gradients that were packed."""
        if not self.has_sum:
            self._launch(False, self._sum, None, numpy.uintp(self._is_bad.ctypes.data), 0)

    def _params(self):
        """Return the parameters in one order on all ranks; the order of child links may differ."""
        named = self._optimizer.target.namedparams(include_uninit=False)
        return [param for _, param in sorted(named)]

    def _dtype(self):
        if self._comm.allreduce_grad_dtype is not None:
            return self._comm.allreduce_grad_dtype
        return numpy.result_type('f', *(param.dtype for param in self._params()))

    def _room(self):
        """Return the sizes of the `PeerMemory`: elements, their dtype, chunks of each launch."""
        chunks = tuple(
            (dtype.char, max(sum(-(-param.size // _CHUNK) for param, _ in parts), 1))
            for dtype, parts in self._groups()
        )
        return self.sent.size, self.sent.dtype, chunks

    def _groups(self):
        """Return [(dtype, [(parameter, its offset)])], one for each launch."""
        of_dtype = {}
        n_before = 0
        for param in self._params():
            of_dtype.setdefault(param.dtype, []).append((param, n_before))
            n_before += param.size
        return [
            (dtype, parts[start : start + _N_PARAMETERS])
            for dtype, parts in of_dtype.items()
            for start in range(0, len(parts), _N_PARAMETERS)
        ]

    def _tables(self):
        """Return [(dtype, the kernel's Table, which CuPy passes by value, number of chunks)]."""
        own_gradients(self._params())
        tables = []
        for dtype, parts in self._groups():
            rows = []
            n_chunks = 0
            for param, offset in parts:
                rows.append((param.grad.data.ptr, offset, param.size, n_chunks, 0))
                n_chunks += -(-param.size // _CHUNK)
            table = numpy.zeros(1, _TABLE)
            table['parameter'][0, : len(rows)] = rows
            table['n_parameters'] = len(rows)
            tables.append((dtype, table, max(n_chunks, 1)))
        return tables

    def _launch(self, is_pack, flat, loss, is_bad, n_molecules):
        for dtype, table, n_chunks in self._tables():
            of_loss = numpy.dtype('f') if loss is None else loss.dtype
            run(
                'flat_gradients',
                flat,
                plans.Launch(
                    defines(is_pack, flat.dtype, of_loss), (n_chunks, 1, 1), (_THREADS, 1, 1)
                ),
                *self._arguments(table, flat, loss, is_bad, n_molecules),
                storage=dtype.char,
            )
            # The first launch has already written the number of molecules and the flags.
            loss = None
            is_bad = None

    def _exchange(self, n_molecules, loss, is_bad):
        peers = self.peers
        first_chunk = 0
        data = peer_memory.addresses_by_value(peers.data)
        stride = numpy.int64(peers.size * peer_memory.words_of(self.sent.dtype))
        most = _RESIDENT * kernels.device(self.sent.data.device_id).n_sms
        variant = defines(True, self.sent.dtype, loss.dtype, self._comm.size)
        for dtype, table, n_chunks in self._tables():
            run(
                'flat_gradients',
                self.sent,
                plans.Launch(variant, (min(n_chunks, most), 1, 1), (_THREADS, 1, 1)),
                *self._arguments(table, self.sent, loss, is_bad, n_molecules),
                data,
                peers.turn,
                numbers=(stride, numpy.int32(first_chunk), numpy.int32(n_chunks)),
                storage=dtype.char,
            )
            is_bad = None  # the first launch has already written the flags
            first_chunk += n_chunks

    def _arguments(self, table, flat, loss, is_bad, n_molecules):
        """Return the arguments that the kernel takes both with and without peers."""
        sizes = map(numpy.int32, (self._n, self._comm.size, self._comm.rank, n_molecules))
        return table, flat, loss, is_bad, *sizes


def raise_if_not_finite(optimizer, wait=False):
    """Raise FloatingPointError, once, if a loss was not finite.

    With `wait` it waits for all steps that were launched; otherwise some may not have run yet.
    """
    if wait:
        cuda.cupy.cuda.get_current_stream().synchronize()
    flags = _flags_of(optimizer)
    if flags.any():
        rank = int(flags.argmax())
        flags[...] = 0
        text = 'the loss of rank %d is not finite, noticed after step %d' % (rank, optimizer.t)
        faults.raise_on(optimizer.communicator, rank, FloatingPointError(text))


def _flags_of(optimizer):
    """Return flags of ranks whose loss was not finite, (n_ranks,) int32 in pinned memory.

    The optimizer keeps them for its life, because kernels may still write there.
    """
    if not hasattr(optimizer, '_is_bad'):
        n_ranks = optimizer.communicator.size
        pinned = cuda.cupy.cuda.alloc_pinned_memory(4 * n_ranks)
        flags = numpy.frombuffer(pinned, numpy.int32, n_ranks)
        flags[...] = 0
        object.__setattr__(optimizer, '_is_bad', flags)
    return optimizer._is_bad


def defines(is_pack, flat, loss, n_peers=0):
    """Return the kernel's compile-time constants (tuple of (str, object)) for these dtypes."""
    return (
        ('VECTOR', 1),
        ('PACK', int(is_pack)),
        ('PEERS', n_peers),
        ('FLAT', kernels.STORAGE[flat.char]),
        ('LOSS', kernels.STORAGE[loss.char]),
        ('N_PARAMETERS', _N_PARAMETERS),
        ('TABLE_BYTES', _TABLE.itemsize),
    )
