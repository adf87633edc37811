"""Sums over the ranks of ChainerMN, for nodes that look at the batches of all of them."""

from chainer.backends import cuda

from chainer_bspmm.cuda import step


class Ranks:
    """The ranks whose batches a node looks at.

    Args:
        comm (chainermn.CommunicatorBase or None): all ranks; None means this one.
        n_molecules (int): in the batch of this rank.
    """

    def __init__(self, comm=None, n_molecules=1):
        self._comm = None if comm is None or comm.size == 1 else comm
        self._n_molecules = max(n_molecules, 1)

    def sum(self, array):
        """Return the sum of the ranks' arrays, of one shape and dtype.

        All ranks call it in the same order. Synchronises with a GPU, but in a step that may be
        captured.
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
        """Return the sum of gradients of the ranks' losses, as a part of the gradient of this one.

        The loss of all ranks is the mean of theirs, weighted by their numbers of molecules w.
        Gradients of rank i are later multiplied by ``w_i / sum(w)``; here those of rank j must be
        by ``w_j / sum(w)``.
        """
        if self._comm is None:
            return array
        return self.sum(array * array.dtype.type(self._n_molecules)) / self._n_molecules

    def refuse_derivatives(self):
        if self._comm is not None:
            raise RuntimeError('statistics over several ranks have first derivatives only')


ONE_RANK = Ranks()
