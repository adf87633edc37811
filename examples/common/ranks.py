"""Several processes under mpirun (ranks): which of them does what."""

import os
import sys
import typing

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer_bspmm.multi_node import PartIterator
from chainer_bspmm.multi_node.communicators import n_started
from common.data import DataError

COMMUNICATORS = ('naive', 'pure_nccl')


class Alone:
    """What stands for a communicator where there is one process, without MPI."""

    rank, size, intra_rank = 0, 1, 0


class Ranks:
    """The ranks of a run; without ``--communicator`` there is one. Only the first prints."""

    def __init__(self, communicator):
        self.are_several = communicator is not None
        if not self.are_several and n_started()[0] > 1:
            raise DataError(
                'expected --communicator in each of %d processes (%s): otherwise all would do the '
                'same' % n_started()
            )
        self._is_on_gpus = communicator == 'pure_nccl'
        self.comm: typing.Any = Alone  # as ChainerMN's functions take it
        if self.are_several:
            import chainermn

            self._chainermn = chainermn
            try:
                self.comm = chainermn.create_communicator(communicator)
            except (ImportError, RuntimeError) as error:
                raise DataError('--communicator %s: %s' % (communicator, error)) from error
        self.is_first = self.comm.rank == 0  # it reads, reports and writes
        if not self.is_first:
            sys.stdout = open(os.devnull, 'w')

    def device(self, specifier):
        """Return the device of this rank, for an option ``--device``."""
        if not self._is_on_gpus:
            return specifier
        # Of those that this rank sees, which may be one.
        return str(self.comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount())

    def share(self, value):
        """Return what the first rank has, on every rank."""
        if not self.are_several:
            return value
        return self.comm.bcast_obj(value if self.is_first else None)

    def scatter(self, dataset):
        """Return the part of this rank of the first one's data set, without duplicates."""
        if not self.are_several:
            return dataset
        return self._chainermn.scatter_dataset(dataset, self.comm, force_equal_length=False)

    def iterator(self, part, batchsize):
        """Return an iterator for training; epochs of all ranks end together."""
        if not self.are_several:
            # A larger batch would hold molecules more than once.
            return SerialIterator(part, min(batchsize, len(part)))
        return PartIterator(part, batchsize, self.comm)

    def optimizer(self, optimizer):
        """Return an optimizer that updates all ranks alike."""
        if not self.are_several:
            return optimizer
        return self._chainermn.create_multi_node_optimizer(optimizer, self.comm)

    def evaluator(self, evaluator):
        """Return an evaluator whose results are those of all parts."""
        if not self.are_several:
            return evaluator
        return self._chainermn.create_multi_node_evaluator(evaluator, self.comm)

    def in_turn(self, function):
        """Call a function; the first rank does when all others are done."""
        if self.is_first and self.are_several:
            self.comm.mpi_comm.Barrier()
        function()
        if not self.is_first:
            self.comm.mpi_comm.Barrier()
