"""`Examples`: read indices from an iterator instead of examples."""

import operator

from chainer.iterators import _statemachine, SerialIterator
import numpy

from chainer_bspmm.dataset import sparse_form
from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.device_dataset import DeviceDataset
from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.multi_node.epochs import PartIterator

# Largest number of sparse forms that are made of dense data sets. If a script changes its data set
# more often, its batches are converted one by one.
MOST_FORMS = 4


class Examples:
    """Examples of an iterator for a converter, if possible as a `Selection`.

    That is possible for a `CSRConverter`, and Chainer's SerialIterator or a `PartIterator`, on a
    `SparseDataset`, on a dense data set that has a `SparseForm`, or on a SubDataset of one. The
    iterator's state, order and random numbers are the same as in Chainer's loop.
    """

    def __init__(self):
        self._parts = None, None, None, None  # iterator, its data set, converter, may_keep
        self._form = None  # `SparseForm` of a dense data set, or None
        self._was_left = True  # whether other code has run since the form was compared last
        self._is_numbered = False  # whether indices can be read instead of examples
        self._n_forms = 0  # number of forms that were made

    def __reduce__(self):
        return Examples, ()  # a copy makes its own form

    def next(self, iterator, converter, may_keep=True, is_known=False):
        """Return the next list of examples or `Selection`, or raise StopIteration.

        `may_keep`: the sparse form of a dense data set may be kept. Its arrays are read-only until
        :meth:`close`, so the caller must make sure to call that. `is_known`: no other code has run
        since the last call.
        """
        dataset = getattr(iterator, 'dataset', None)
        if not all(map(operator.is_, self._parts, (iterator, dataset, converter, may_keep))):
            self._look(iterator, dataset, converter, may_keep)
        if not self._is_numbered or 'next' in vars(iterator):
            return iterator.next()
        index = _next_index(iterator)
        # At a new epoch the iterator's order sampler was called, which may be a user's.
        selection = self._selected(dataset, index, is_known and not iterator.is_new_epoch)
        return [dataset[i] for i in index] if selection is None else selection

    def close(self):
        """Make the arrays of dense examples writable again; return whether there were any."""
        form = self._form
        self._form = None
        self._parts = (None, None, None, None)
        self._is_numbered = False
        if form is not None:
            form.close()
        return form is not None

    def _look(self, iterator, dataset, converter, may_keep):
        last = self._form  # it is closed at the end, because the new form may be the same
        self._form = None
        self._parts = (iterator, dataset, converter, may_keep)
        self._is_numbered = False
        if type(iterator) in (SerialIterator, PartIterator) and type(converter) is CSRConverter:
            base = sparse_form.base_of(dataset)
            self._is_numbered = type(base) in (SparseDataset, DeviceDataset)
            form = None
            if not self._is_numbered and may_keep and self._n_forms < MOST_FORMS:
                form = sparse_form.open_form(base)
            if form is not None:
                self._n_forms += 1
                if sparse_form.suits(converter, form.molecules):
                    self._form = form
                    self._is_numbered = True
                    self._was_left = True
                else:
                    form.close()
        if last is not None:
            last.close()

    def _selected(self, dataset, index, is_known):
        """Return the `Selection` of examples, or None if the examples must be read themselves."""
        if not index.size or index.dtype.kind not in 'iu':
            return None
        index = sparse_form.position_in_base(dataset, index)
        if index is None:
            return None
        if self._form is None:
            base = sparse_form.base_of(dataset)
            return Selection(base.molecules, base.order.take(index))
        # After user code has run, compare the whole data set once instead of every batch.
        must_look = self._was_left or not is_known
        self._was_left = not is_known
        if must_look and not self._form.is_current(None if is_known else index):
            self._form.close()
            self._form = None
            self._is_numbered = False
            return None
        return Selection(self._form.molecules, index)


def _next_index(iterator):
    """Advance the iterator as ``SerialIterator.__next__`` does; return indices, not examples."""
    state = iterator._state
    position, epoch, _, order = state
    n_examples = len(iterator.dataset) if order is None else len(order)
    stop = position + iterator.batch_size
    if stop < n_examples and (iterator.repeat or not epoch):
        # A shortcut for most batches: the state machine takes as long as all other work here.
        iterator._previous_epoch_detail = epoch + position / n_examples
        iterator._state = _statemachine.IteratorState(stop, epoch, False, order)
        return (
            numpy.arange(position, stop) if order is None else numpy.asarray(order[position:stop])
        )
    iterator._previous_epoch_detail = iterator.epoch_detail
    iterator._state, index = _statemachine.iterator_statemachine(
        state, iterator.batch_size, iterator.repeat, iterator.order_sampler, len(iterator.dataset)
    )
    if index is None:
        raise StopIteration
    return numpy.asarray(index)
