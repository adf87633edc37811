"""Sums of vectors over the ranks of a host, inside of a step that a CUDA graph may capture."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import peer_memory

_THREADS = 256


class PeerSums:
    """The sums of a step, such as the statistics of batch normalisation over all ranks.

    They are numbered in the order of the calls, which is that of all ranks. Before the ranks share
    memory, a step adds up nothing and notes which vectors it would have.

    Args:
        comm (chainermn.CommunicatorBase): of the ranks.
        peers (PeerMemory or None): of the ranks, once they share it.

    Attributes:
        vectors (list): (n, dtype) of each.
    """

    def __init__(self, comm, peers=None):
        self._comm = comm
        self._peers = peers
        self.vectors = [] if peers is None else list(peers.vectors)
        self._alone = True
        self._next = 0

    def begin(self, alone):
        """Begin a step.

        Args:
            alone (bool): whether the other ranks do not take part: it is a trial, or the last step
                once more, with what they have sent in that.
        """
        self._alone = alone
        self._next = 0

    def sum(self, array):
        """Return the sum of an array over the ranks.

        Raises:
            RuntimeError: it is not one of the vectors of the first step.
        """
        vector = array.size, array.dtype
        number, self._next = self._next, self._next + 1
        if self._peers is None and number == len(self.vectors):
            self.vectors.append(vector)
        if self.vectors[number : number + 1] != [vector]:
            raise RuntimeError('statistics over several ranks: not the same as in the first step')
        return array if self._peers is None else self._launch(number, array)

    def load_kernels(self, peers):
        """Compile the kernels for the vectors of some memory."""
        for dtype in {of for _, of in peers.vectors}:
            self._load(peers, dtype)

    def _launch(self, number, array):
        peers = self._peers
        array = cuda.cupy.ascontiguousarray(array)
        total = cuda.cupy.empty(array.shape, array.dtype)
        sizes = map(numpy.int32, (array.size, self._comm.rank, self._alone))
        addresses = peer_memory.addresses_by_value(peers.slots[number])
        turn = peers.turns[number:]
        self._load(peers, array.dtype)(
            (1, 1, 1), (_THREADS, 1, 1), (array, total, addresses, turn, *sizes)
        )
        return total

    def _load(self, peers, dtype):
        device_id = peers.turns.data.device_id
        return kernels.load(device_id, 'peer_sum', dtype.char, defines(len(peers.data)))


def defines(n_ranks):
    """Return the compile-time constants (tuple of (str, object)) for so many ranks."""
    return ('VECTOR', 1), ('PEERS', n_ranks)
