"""Ranks, that is processes under mpirun: their devices, data, optimizers and evaluators."""

import os
import sys
import typing

from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer_bspmm.multi_node import PartIterator
from chainer_bspmm.multi_node.communicators import n_started
from common.data import DataError

COMMUNICATORS = ('naive', 'pure_nccl')


def ranks_of(communicator):
    """Return the ranks of a run; without ``--communicator`` there is one."""
    if communicator is not None:
        return SeveralRanks(communicator)
    if n_started()[0] > 1:
        raise DataError(
            'expected --communicator in each of %d processes (%s): otherwise all would do the same'
            % n_started()
        )
    return OneRank()


class OneRank:
    """A process without MPI: values, data, optimizers and evaluators are returned as they are."""

    are_several = False
    is_first = True  # it reads, reports and writes
    rank, size = 0, 1

    def _same(self, value):
        return value

    device = share = scatter = optimizer = evaluator = common = _same

    def iterator(self, part, batchsize):
        """Return an iterator for training."""
        # A larger batch would hold molecules more than once.
        return SerialIterator(part, min(batchsize, len(part)))


class SeveralRanks:
    """The ranks of ChainerMN. Only the first prints."""

    are_several = True

    def __init__(self, communicator):
        import chainermn

        self._chainermn: typing.Any = chainermn
        try:
            self.comm = chainermn.create_communicator(communicator)
        except (ImportError, RuntimeError) as error:
            raise DataError('--communicator %s: %s' % (communicator, error)) from error
        self._is_on_gpus = communicator == 'pure_nccl'
        self.rank, self.size = self.comm.rank, self.comm.size
        self.is_first = self.rank == 0
        if not self.is_first:
            sys.stdout = open(os.devnull, 'w')

    def device(self, specifier):
        """Return the device of this rank, for an option ``--device``."""
        if not self._is_on_gpus:
            return specifier
        # The number is among the GPUs that this rank sees, which may be only one.
        return str(self.comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount())

    def share(self, value):
        """Return the first rank's value on every rank."""
        return self.comm.bcast_obj(value if self.is_first else None)

    def scatter(self, dataset):
        """Return this rank's part of the first rank's data set; no example is in two parts."""
        return self._chainermn.scatter_dataset(dataset, self.comm, force_equal_length=False)

    def iterator(self, part, batchsize):
        """Return an iterator for training; epochs of all ranks end together."""
        return PartIterator(part, batchsize, self.comm)

    def optimizer(self, optimizer):
        """Return an optimizer that updates all ranks alike."""
        return self._chainermn.create_multi_node_optimizer(optimizer, self.comm)

    def evaluator(self, evaluator):
        """Return an evaluator whose results cover the parts of all ranks."""
        return self._chainermn.create_multi_node_evaluator(evaluator, self.comm)

    def common(self, items):
        """Return the set of the items that every rank has."""
        return set.intersection(*map(set, self.comm.mpi_comm.allgather(items)))
