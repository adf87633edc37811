"""`next_examples`: what an iterator gives, as numbers where a list of examples is not needed."""

import numpy

from chainer.datasets import SubDataset
from chainer.iterators import _statemachine
from chainer.iterators import SerialIterator

from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.device_dataset import DeviceDataset
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_example import Selection
from chainer_bspmm.multi_node.epochs import PartIterator


def next_examples(iterator, converter):
    """Return ``iterator.next()``, where it can be as a `Selection` instead of a list of examples.

    It can where Chainer's SerialIterator, or a `PartIterator`, reads a `SparseDataset`, or a
    SubDataset of one, for a `CSRConverter`: there the list would only be taken apart again. The
    iterator's state, order and random numbers are the same.
    """
    if (
        type(iterator) not in (SerialIterator, PartIterator)
        or type(converter) is not CSRConverter
        or 'next' in vars(iterator)
        or not _is_numbered(iterator.dataset)
    ):
        return iterator.next()
    dataset = iterator.dataset
    index = _next_index(iterator)
    selection = _selected(dataset, index)
    return [dataset[i] for i in index] if selection is None else selection


def _next_index(iterator):
    """Do what ``SerialIterator.__next__`` does up to the list; return the numbers (array)."""
    state = iterator._state
    position, epoch, _, order = state
    n_examples = len(iterator.dataset) if order is None else len(order)
    stop = position + iterator.batch_size
    if stop < n_examples and (iterator.repeat or not epoch):
        # Most batches: the state machine takes as long as all else here.
        iterator._previous_epoch_detail = epoch + position / n_examples
        iterator._state = _statemachine.IteratorState(stop, epoch, False, order)
        return numpy.arange(position, stop) if order is None else order[position:stop]
    iterator._previous_epoch_detail = iterator.epoch_detail
    iterator._state, index = _statemachine.iterator_statemachine(
        state, iterator.batch_size, iterator.repeat, iterator.order_sampler, len(iterator.dataset)
    )
    if index is None:
        raise StopIteration
    return index


def _is_numbered(dataset):
    """Return whether examples are those of a sparse data set, by an order that is an array."""
    while type(dataset) is SubDataset:
        order = dataset._order
        if order is not None and not (isinstance(order, numpy.ndarray) and order.ndim == 1):
            return False
        dataset = dataset._dataset
    return type(dataset) in (SparseDataset, DeviceDataset)


def _selected(dataset, index):
    """Return the `Selection` of these examples; None if there are none, or a number is wrong."""
    if not index.size or index.dtype.kind not in 'iu':
        return None
    while type(dataset) is SubDataset:
        if index.min() < 0 or index.max() >= len(dataset):
            return None
        index = index + dataset._start
        if dataset._order is not None:
            index = dataset._order.take(index)
            if index.dtype.kind not in 'iu':
                return None
        dataset = dataset._dataset
    return Selection(dataset.molecules, dataset.order.take(index))
