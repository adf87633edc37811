"""`SparseForm`: the molecules of a dense data set, converted once and kept while they are read."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import sys
from typing import Any
import weakref

from chainer.datasets import ConcatenatedDataset, SubDataset
import numpy

from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.sparse_dataset import chunks, NumpyTupleDataset, to_sparse

# id of an array -> number of forms that keep it read-only.
_locks: collections.Counter[int] = collections.Counter()
# id of a locked array -> views of this array that no form locks any more. They become writeable
# after the array does.
_waiting: dict[int, list[numpy.ndarray]] = {}
# id of a data set -> its form.
_forms: weakref.WeakValueDictionary[int, SparseForm] = weakref.WeakValueDictionary()
# Bytes -> unsigned dtype.
_UNSIGNED = {size: numpy.dtype('u%d' % size) for size in (1, 2, 4, 8)}


class CannotKeep(Exception):
    """The data set has no sparse form, or may return other examples later."""


class SparseForm:
    """Molecules of a list, a NumpyTupleDataset or a ConcatenatedDataset, each converted once.

    Subclasses of these have no form, because they may run a user's code. Until :meth:`close` the
    arrays of the examples are read-only, so that a change in place is an error and cannot be
    missed. :meth:`is_current` tells whether the items of a list were replaced. The constructor
    raises CannotKeep for other data sets, and for those that may return other examples later.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._locked: dict[int, numpy.ndarray] = {}
        self._n_users = 0
        self._columns = columns_of(dataset)
        self._items = [(column, list(column)) for column in self._columns if type(column) is list]
        try:
            self._lock(_arrays_in(self._columns))
            self.molecules: Molecules = converted(dataset)
        except BaseException as error:
            self._unlock()
            if not isinstance(error, Exception):
                raise
            raise CannotKeep(str(error)) from error

    def is_current(self, index: numpy.ndarray | None) -> bool:
        """Return whether the data set still has these examples, (n,) integers; None: all."""
        if not _are_same(columns_of(self._dataset), self._columns):
            return False
        for column, items in self._items:
            if index is not None and len(column) == len(items):
                # Because of -1, itemgetter returns a tuple for a single index, too.
                at_index = operator.itemgetter(*index.tolist(), -1)
                column, items = at_index(column), at_index(items)
            if not _are_same(column, items):
                return False
        return True

    def close(self) -> None:
        """Make the arrays writeable again, once every `open_form` has been matched by a close."""
        self._n_users -= 1
        if not self._n_users:
            _forms.pop(id(self._dataset), None)
            self._unlock()

    def _lock(self, arrays):
        levels = []  # arrays, the arrays that they are views of, and so on
        while arrays:
            levels.append(dict(zip(map(id, arrays), arrays)))
            bases = list(map(operator.attrgetter('base'), levels[-1].values()))
            kinds = set(map(type, bases)) - {type(None), bytes, list}  # bytes: arrays were pickled
            if memoryview in kinds and all(map(_is_unpickled, bases)):
                kinds.remove(memoryview)
            for kind in kinds:
                if not issubclass(kind, numpy.ndarray):
                    raise CannotKeep('an array is a view of memory of a %s' % kind.__name__)
            arrays = [base for base in bases if isinstance(base, numpy.ndarray)]
        arrays = {key: array for level in reversed(levels) for key, array in level.items()}
        is_writeable = map(operator.attrgetter('flags.writeable'), arrays.values())
        self._locked = {
            key: array
            for (key, array), is_open in zip(arrays.items(), is_writeable)
            if is_open or key in _locks
        }
        _locks.update(self._locked.keys())
        for array in self._locked.values():
            array.setflags(write=False)

    def _unlock(self):
        locked, self._locked = self._locked, {}
        for key, array in locked.items():  # bases come before their views
            n_others = _locks.pop(key, 1) - 1
            if n_others:
                _locks[key] = n_others
            else:
                _make_writeable(array)

    def __del__(self):
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            self._unlock()


def _are_same(items, others):
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _make_writeable(array):
    try:
        array.setflags(write=True)
    except ValueError:
        # It is a view of an array that another form still locks, or a view of unpickled memory,
        # which NumPy does not make writeable.
        if id(array.base) in _locks:
            _waiting.setdefault(id(array.base), []).append(array)
        return
    for view in _waiting.pop(id(array), ()):
        _make_writeable(view)


def columns_of(dataset):
    """Return the arrays and lists in which a data set keeps its examples, or raise CannotKeep."""
    kind = type(dataset)
    if kind is list:
        return [dataset]
    if kind is NumpyTupleDataset:
        columns = list(dataset._datasets)
        kinds = (numpy.ndarray, list)
        text = 'a column is neither an array nor a list'
    elif kind is ConcatenatedDataset:
        parts = [columns_of(part) for part in dataset._datasets]
        columns = list(itertools.chain(*parts))
        kinds = (numpy.ndarray,)
        text = 'a column is not an array'
    else:
        raise CannotKeep('a %s has no sparse form' % kind.__name__)
    if any(type(column) not in kinds for column in columns):
        raise CannotKeep(text)
    return columns


def _arrays_in(columns):
    """Return the arrays of all examples, and array columns, so that later views are locked, too."""
    arrays = [column for column in columns if isinstance(column, numpy.ndarray)]
    for column in columns:
        if type(column) is list or column.dtype == object:
            values = column if type(column) is list else column.ravel().tolist()
            examples = [value if type(value) is tuple else (value,) for value in values]
            values = itertools.chain.from_iterable(examples)
            arrays += [value for value in values if isinstance(value, numpy.ndarray)]
    return arrays


def _is_unpickled(base):
    """Return whether no other object can write to the base of an array (pickle protocol 5)."""
    if type(base) is not memoryview:
        return True
    return type(base.obj) is bytearray and sys.getrefcount(base.obj) <= 2


def converted(dataset: Any) -> Molecules:
    """Convert a dense data set to molecules from which converters make the same batches."""
    dtypes = collections.defaultdict(set)  # column -> dtypes of its values, if batches keep them
    for _, examples in chunks(dataset):
        if set(map(type, examples)) != {tuple} or len(set(map(len, examples))) != 1:
            raise CannotKeep('examples are not tuples of one length')
        for i, column in enumerate(zip(*examples)):
            allowed = numpy.ndarray if i < 2 else (numpy.ndarray, numpy.generic)
            if not all(issubclass(kind, allowed) for kind in set(map(type, column))):
                raise CannotKeep('a value of an example is not an array')
            for dtype in set(map(operator.attrgetter('dtype'), column)):
                dtypes[i].add(None if i == 0 and dtype.kind != 'f' else dtype)
    if len(dtypes) < 2 or any(len(of_column) != 1 for of_column in dtypes.values()):
        raise CannotKeep('an example has no adjacency, or dtypes differ')
    molecules = to_sparse(dataset).molecules
    # If all molecules have one size, a converter may take labels of molecules for labels of atoms.
    sizes = set(molecules.full_sizes.tolist())
    for label in molecules.labels if molecules.has_padding else molecules.labels[:-1]:
        if len(sizes) == 1 and label.ndim == 2 and label.shape[1:] == (*sizes,):
            raise CannotKeep('labels of molecules might be taken for labels of atoms')
    return molecules


def open_form(dataset: Any) -> SparseForm | None:
    """Return a dense data set's form, which the caller closes; None if it cannot have one."""
    form = _forms.get(id(dataset))
    if form is None:
        try:
            form = SparseForm(dataset)
        except CannotKeep:
            return None
        _forms[id(dataset)] = form
    form._n_users += 1
    return form


def base_of(dataset: Any) -> Any:
    """Return the data set beneath SubDatasets; None if one's order is not an array of indices."""
    while type(dataset) is SubDataset:
        order = dataset._order
        if order is not None and not (isinstance(order, numpy.ndarray) and order.ndim == 1):
            return None
        dataset = dataset._dataset
    return dataset


def position_in_base(dataset: Any, index: numpy.ndarray) -> numpy.ndarray | None:
    """Return the indices of examples in the base; None if one is out of range or no integer."""
    while True:
        # Read as unsigned, a negative index is larger than any length.
        unsigned = index.view(_UNSIGNED[index.itemsize])
        if unsigned.size and numpy.maximum.reduce(unsigned) >= len(dataset):
            return None
        if type(dataset) is not SubDataset:
            return index
        index = index + dataset._start
        if dataset._order is not None:
            index = dataset._order.take(index)
            if index.dtype.kind not in 'iu':
                return None
        dataset = dataset._dataset


def form_of(dataset: Any) -> SparseForm | None:
    """Return the form of a data set that has been opened, or None."""
    return _forms.get(id(dataset))


def suits(converter: CSRConverter, molecules: Molecules) -> bool:
    """Return whether a converter makes the same batches from molecules as from dense examples."""
    keeps = converter.strip_padding is False and molecules.has_padding
    return not (converter.n_node_columns or keeps or converter.may_lose_atoms(molecules))
