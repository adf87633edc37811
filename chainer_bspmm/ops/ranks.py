"""Sums over the ranks of ChainerMN, for nodes that look at the batches of all of them."""

import contextlib
import threading

from chainer.backends import cuda

from chainer_bspmm.cuda import step


class _Local(threading.local):
    weight = 1


_local = _Local()


@contextlib.contextmanager
def weighted_by(n_molecules):
    """Let losses of this thread count by molecules; elsewhere those of all ranks count alike."""
    previous, _local.weight = _local.weight, max(n_molecules, 1)
    try:
        yield
    finally:
        _local.weight = previous


class Ranks:
    """The ranks whose batches a node looks at; without a communicator, this one."""

    def __init__(self, comm=None):
        self._comm = None if comm is None or comm.size == 1 else comm

    def sum(self, array):
        """Return the sum of the ranks' arrays, which all call it in the same order.

        Synchronises with a GPU, but not in a step that may be captured.
        """
        if self._comm is None:
            return array
        if step.current() is not None:
            if step.current().peer_sums is None:
                raise RuntimeError('statistics over several ranks, but the update is of one')
            return step.current().peer_sums.sum(array)
        from mpi4py import MPI

        total = cuda.to_cpu(array).copy()
        self._comm.mpi_comm.Allreduce(MPI.IN_PLACE, total)
        if isinstance(array, cuda.ndarray):
            with cuda.get_device_from_array(array):
                return cuda.cupy.asarray(total)
        return total

    def sum_of_gradients(self, array):
        """Return the sum of the gradients of all ranks' losses, as a part of this one's.

        The loss of all ranks is the mean of theirs, with the weights w of :func:`weighted_by`.
        Gradients of rank i are later multiplied by ``w_i / sum(w)``; here those of rank j must be
        by ``w_j / sum(w)``.
        """
        if self._comm is None:
            return array
        return self.sum(array * array.dtype.type(_local.weight)) / _local.weight

    def refuse_derivatives(self):
        if self._comm is not None:
            raise RuntimeError('statistics over several ranks have first derivatives only')


ONE_RANK = Ranks()
