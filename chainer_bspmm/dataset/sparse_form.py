"""`SparseForm`: the molecules of a dense data set, converted once and kept while they are read."""

from __future__ import annotations

import collections
import contextlib
import operator
from typing import Any
import weakref

from chainer.datasets import ConcatenatedDataset
from chainer.datasets import SubDataset
import numpy

from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.sparse_dataset import NumpyTupleDataset
from chainer_bspmm.dataset.sparse_dataset import to_sparse

# id of an array -> how many forms keep it from being written.
_locks: collections.Counter[int] = collections.Counter()
# id of an array that is locked -> views of it that are no longer.
_waiting: dict[int, list[numpy.ndarray]] = {}
# id of a data set -> its form.
_forms: weakref.WeakValueDictionary[int, SparseForm] = weakref.WeakValueDictionary()


class CannotKeep(Exception):
    """The data set may give other examples later, or has no sparse form."""


class SparseForm:
    """The molecules of a list, a NumpyTupleDataset, or several joined, each converted once.

    Until :meth:`close` the arrays of the examples are read-only: a change in place is an error
    rather than missed. Whether the items of a list were replaced is looked at for each batch.

    Args:
        dataset (object): exactly of one of these classes; others may run a user's code.

    Raises:
        CannotKeep: it is not, or its examples have no form that stays.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._locked: dict[int, numpy.ndarray] = {}
        self._n_users = 0
        self._columns = columns_of(dataset)
        self._items = [(column, list(column)) for column in self._columns if type(column) is list]
        try:
            for column in self._columns:
                self._lock(column)
            for i in range(len(dataset)):
                example = dataset[i]
                if type(example) is tuple:  # else it is refused below
                    for value in example:
                        if isinstance(value, numpy.ndarray):
                            self._lock(value)
            self.molecules: Molecules = converted(dataset)
        except BaseException as error:
            self._unlock()
            if not isinstance(error, Exception):
                raise
            raise CannotKeep(str(error)) from error

    def is_current(self, index: numpy.ndarray) -> bool:
        """Return whether the data set still has these examples, (n,) integers."""
        columns = columns_of(self._dataset)
        if len(columns) != len(self._columns) or not all(map(operator.is_, columns, self._columns)):
            return False
        numbers = index.tolist() if self._items else ()
        return all(
            len(column) == len(items)
            and all(
                map(operator.is_, map(column.__getitem__, numbers), map(items.__getitem__, numbers))
            )
            for column, items in self._items
        )

    def close(self) -> None:
        """Let the arrays be written again, once all who opened the form have closed it."""
        self._n_users -= 1
        if not self._n_users:
            _forms.pop(id(self._dataset), None)
            self._unlock()

    def _lock(self, array):
        chain = []
        while isinstance(array, numpy.ndarray):
            chain.append(array)
            array = array.base
        if array is not None and type(array) not in (bytes, list):  # unpickled arrays are of bytes
            raise CannotKeep('an array is in memory of something else: %s' % type(array).__name__)
        for array in reversed(chain):
            is_known = id(array) in self._locked
            if not is_known and (array.flags.writeable or id(array) in _locks):
                _locks[id(array)] += 1
                array.flags.writeable = False
                self._locked[id(array)] = array

    def _unlock(self):
        locked, self._locked = self._locked, {}
        for key, array in locked.items():  # a view after what it is of
            _locks[key] -= 1
            if not _locks[key]:
                del _locks[key]
                _make_writeable(array)

    def __del__(self):
        with contextlib.suppress(Exception):  # at the end of the interpreter
            self._unlock()


def _make_writeable(array):
    try:
        array.flags.writeable = True
    except ValueError:
        # A view of what another form still locks; or unpickled: NumPy does not let it be written.
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
    columns, allowed = [], [numpy.ndarray]
    if kind is ConcatenatedDataset:
        for part in dataset._datasets:
            columns += columns_of(part)
    elif kind is NumpyTupleDataset:
        columns += dataset._datasets
        allowed += [list]
    else:
        raise CannotKeep('it is a %s' % kind.__name__)
    if any(type(column) not in allowed for column in columns):
        raise CannotKeep('a column is no array')
    return columns


def converted(dataset: Any) -> Molecules:
    """Return the molecules of a dense data set, of which converters make the same batches.

    Raises:
        CannotKeep, TypeError, ValueError: there are none of which they do.
    """
    kinds = set()
    try:
        for i in range(len(dataset)):
            example = dataset[i]
            kinds.add((type(example), *map(type, example), *[value.dtype for value in example]))
    except (AttributeError, TypeError):
        raise CannotKeep('an example is not of arrays') from None
    if len({_dtypes(*kind) for kind in kinds}) != 1:
        raise CannotKeep('dtypes differ')
    molecules = to_sparse(dataset).molecules
    _refuse_node_columns(molecules)
    return molecules


def _dtypes(kind, *of_values):
    """Return the dtypes that a batch keeps, of an example's class, and those of its values."""
    n = len(of_values) // 2
    if kind is not tuple or n < 2:
        raise CannotKeep('an example is no tuple of atoms, adjacency and labels')
    if any(not issubclass(of, numpy.ndarray) for of in of_values[:2]) or any(
        not issubclass(of, (numpy.ndarray, numpy.generic)) for of in of_values[2:n]
    ):
        raise CannotKeep('an example is not of arrays')
    atoms, *others = of_values[n:]
    return (atoms if atoms.kind == 'f' else None, *others)


def _refuse_node_columns(molecules):
    """Raise where a converter may take labels for those of atoms, as in molecules of one size."""
    sizes = set(molecules.full_sizes.tolist())
    for label in molecules.labels if molecules.has_padding else molecules.labels[:-1]:
        if len(sizes) == 1 and label.ndim == 2 and label.shape[1:] == (*sizes,):
            raise CannotKeep('labels may be those of atoms')


def open_form(dataset: Any) -> SparseForm | None:
    """Return the form of a dense data set, to be closed; None: it is converted batch by batch."""
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
    """Return the data set that SubDatasets of it select from, by arrays; None: by other things."""
    while type(dataset) is SubDataset:
        order = dataset._order
        if order is not None and not (isinstance(order, numpy.ndarray) and order.ndim == 1):
            return None
        dataset = dataset._dataset
    return dataset


def position_in_base(dataset: Any, index: numpy.ndarray) -> numpy.ndarray | None:
    """Return the numbers of examples in the base; None where one is out of range."""
    while type(dataset) is SubDataset:
        if index.size and (index.min() < 0 or index.max() >= len(dataset)):
            return None
        index = index + dataset._start
        if dataset._order is not None:
            index = dataset._order.take(index)
            if index.dtype.kind not in 'iu':
                return None
        dataset = dataset._dataset
    return index


def form_of(dataset: Any) -> SparseForm | None:
    """Return the form of a data set that somebody has opened."""
    return _forms.get(id(dataset))


def suits(converter: CSRConverter, molecules: Molecules) -> bool:
    """Return whether a converter makes the same batches of molecules as of the dense examples."""
    if converter.n_node_columns:
        return False
    if converter.strip_padding is None:
        return not converter._loses or not molecules.has_padding or molecules.is_padding
    return converter.strip_padding or not molecules.has_padding
