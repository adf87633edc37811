"""Epochs that end at the same step on all ranks: `PartIterator`, and a check of other iterators."""

from typing import Any

from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.multi_node import faults
from chainer_bspmm.sparse import check


class PartIterator(SerialIterator):
    """Iterate over the part of this rank, with the same number of batches per epoch on all ranks.

    It is Chainer's SerialIterator for parts that differ in size (``scatter_dataset(...,
    force_equal_length=False)``), so that an epoch has every molecule once. Each rank divides its
    part into as many batches as the largest part needs, as evenly as it can. No batch has more than
    ``batch_size`` molecules, and none is empty.

    Args:
        dataset (sequence): the part of this rank.
        batch_size (int): the most molecules of a batch.
        comm (chainermn.CommunicatorBase): the ranks, which must all make the iterator together.
        repeat, shuffle, order_sampler: as in SerialIterator.

    Raises:
        ValueError: a part has fewer molecules than there are batches.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        comm: Any,
        repeat: bool = True,
        shuffle: bool | None = None,
        order_sampler: Any = None,
    ):
        check.count('batch_size', batch_size, 1)
        sizes = comm.mpi_comm.allgather((len(dataset), batch_size))
        self.n_batches = max(-(-n // size) for n, size in sizes)
        for rank, (n, _) in enumerate(sizes):
            if n < self.n_batches:
                text = (
                    'dataset: expected at least %d molecules, one for each batch of an epoch, got '
                    '%d on rank %d' % (self.n_batches, n, rank)
                )
                faults.raise_on(comm, 0, ValueError(text))
        super().__init__(dataset, batch_size, repeat, shuffle, order_sampler)

    @property
    def batch_size(self) -> int:
        """Number of molecules of the next batch (int)."""
        n = len(self.dataset)
        done = -(-self.current_position * self.n_batches // n)
        first, last = (i * n // self.n_batches for i in (done, done + 1))
        return last - first

    @batch_size.setter
    def batch_size(self, most):
        pass  # the constructor of SerialIterator sets it


def check_updaters():
    """Patch StandardUpdater to check that the epochs of all ranks end together."""
    connect = StandardUpdater.connect_trainer

    def connect_trainer(self, trainer):
        _check_epochs(self)
        connect(self, trainer)

    StandardUpdater.connect_trainer = connect_trainer


def _check_epochs(updater):
    optimizers = updater.get_all_optimizers().values()
    comms = [getattr(optimizer, 'communicator', None) for optimizer in optimizers]
    comm = next((comm for comm in comms if comm is not None and comm.size > 1), None)
    if comm is None:
        return
    lengths = comm.mpi_comm.allgather(_length(updater._iterators.get('main')))
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            text = (
                'iterator: expected epochs of one length on all ranks, got %s on rank 0 and %s on '
                'rank %d; use scatter_dataset(..., force_equal_length=True), or a '
                'chainer_bspmm.multi_node.PartIterator' % (lengths[0], length, rank)
            )
            faults.raise_on(comm, 0, ValueError(text))


def _length(iterator):
    """Return the length of an epoch in words, or None if it is not known."""
    if isinstance(iterator, PartIterator):
        return '%d batches' % iterator.n_batches
    dataset = getattr(iterator, 'dataset', None)
    if not hasattr(dataset, '__len__') or not hasattr(iterator, 'batch_size'):
        return None
    if not len(dataset) % iterator.batch_size:
        return '%d batches' % (len(dataset) // iterator.batch_size)
    return '%d examples in batches of %d' % (len(dataset), iterator.batch_size)
