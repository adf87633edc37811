"""`Effects`: assignments that Python makes in an eager run, repeated after a launch of graphs."""

import collections
import gc
import operator
import sys
from collections.abc import Iterable
from typing import Any

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.sparse.batch import Batch
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.guards import References
from chainer_bspmm.training.places import Items, Place

ANEW = (
    'the step keeps arrays in an object of class %s, which a replay of a captured step cannot make '
    'anew'
)


# Classes of containers that can be made anew. Named tuples are among them.
CONTAINERS = list, tuple, set, frozenset, dict, collections.OrderedDict, collections.defaultdict


class Effects:
    """Assignments of a run, to attributes, containers and gradients, among them of new arrays.

    A graph writes to the same arrays at every launch, but an eager step makes new ones. So a user
    may keep an array of one step, such as the predictions of the best epoch, and expect that the
    next step leaves it alone. :meth:`are_kept` tells that before the next launch. A container that
    a run has made, such as a dict of metrics, is made anew after every launch, with copies of its
    arrays: a user may keep it, or change what is in it.

    Args:
        changes (list): the result of `Snapshot.changes`, while the assignments are in place.
        lasting (iterable): arrays that stay from step to step, such as those of parameters. Views
            of them are assigned as they are, because Chainer's steps write to them, too.
        gives_copies (bool): whether to assign copies of all other arrays.

    Raises:
        CannotCapture: the run has left arrays in an object that cannot be made anew.
    """

    def __init__(
        self, changes: list[tuple[Any, Any]], lasting: Iterable = (), gives_copies: bool = False
    ):
        self._changes = changes
        self._given = changes  # with the containers and copies that were made last
        self._n_values = sum(len(new) for _, new in changes)
        self._gives_copies = gives_copies
        self._lasting = {id(_memory(array)) for array in lasting}
        values = [value for _, new in changes for value in _items(new)]
        self._makes_anew = gives_copies or any(isinstance(each, CONTAINERS) for each in values)
        self._copied: set[int] = set()  # ids of variables and arrays in containers
        for value in values:
            self._look_into(value)
        # Variables, arrays and their memory. Somebody who keeps one refers to one of these.
        objects: dict[int, Any] = {}
        for value in values:
            if id(value) not in self._copied:
                for each in self._written(value):
                    objects[id(each)] = each
                    if not isinstance(each, chainer.Variable):
                        objects[id(_memory(each))] = _memory(each)
        self._objects = list(objects.values())
        # References to each before anything else had one, once they were counted.
        self._own_counts: list[int] | None = None
        # (changes of the known references, counts) when nobody kept one
        self._free: tuple[int, list[int]] | None = None
        self._are_made = False  # whether :meth:`are_kept` has just found all assignments in place

    def repeat(self, written: dict[str, Any], results: dict[str, Any]) -> None:
        """Make the assignments again, after a call of :meth:`are_kept` and a launch.

        `written`: name -> result that the graphs write. `results`: name -> result of this launch;
        if it is another array, no other launch writes to it.
        """
        if self._are_made:
            self._are_made = False
            return
        if self._makes_anew:
            made = {
                id(array): results[name]
                for name, array in written.items()
                if results[name] is not array
            }
            self._given = self._made_anew(made)
            del made  # its references must not be counted
        if self._own_counts is None:
            # A capture leaves garbage, which may refer to the arrays until it is collected.
            gc.collect(1)
            self._own_counts = list(map(sys.getrefcount, self._objects))
        for place, new in self._given:
            place.apply(new)

    def are_kept(self, known: References) -> bool:
        """Return whether the next launch of the graphs would write to arrays that somebody keeps.

        `known` counts the references of this package itself.
        """
        if self._gives_copies or self._own_counts is None:
            return False
        counts = list(map(sys.getrefcount, self._objects))
        assigned = [value for place, new in self._given for value in place.assigned(new)]
        are_made = len(assigned) == self._n_values
        self._are_made = are_made and not self._makes_anew
        present = known.n_changes, counts
        if are_made and present == self._free:  # nearly always
            return False
        expected = collections.Counter(map(id, assigned))
        for each, count, own in zip(self._objects, counts, self._own_counts):
            n_others = count - own - expected[id(each)]
            if n_others > 0 and not known.are_at_least(n_others, each):
                return True
        if are_made:
            self._free = present
        return False

    def _look_into(self, value):
        """Note the variables and arrays in a container, or raise CannotCapture."""
        for part in _parts(value):
            if part is not value:
                self._copied.update(map(id, self._written(part)))
            if isinstance(part, CONTAINERS) and not _is_known(type(part)):
                if any(self._written(each) for each in _parts(part)):
                    raise CannotCapture(ANEW % type(part).__name__)

    def _written(self, value):
        """Return the variable and the array that a value is, unless the array is a lasting one."""
        if isinstance(value, chainer.Variable):
            return [value, *self._written(value.array)]
        return [value] if self._is_new(value) else []

    def _made_anew(self, made):
        """Return the assignments with new containers and copies."""
        return [
            (
                place,
                {name: self._anew(value, made) for name, value in new.items()}
                if isinstance(new, dict)
                else [self._anew(value, made) for value in new],
            )
            for place, new in self._changes
        ]

    def _anew(self, value, made):
        """Return a value with new containers and copies; one object stays one (`made`: by id)."""
        if id(value) not in made:
            made[id(value)] = self._made(value, made)
        return made[id(value)]

    def _made(self, value, made):
        kind = type(value)
        is_copied = self._gives_copies or id(value) in self._copied
        if is_copied and self._is_new(value):
            return value.copy()
        if is_copied and kind is chainer.Variable and self._is_new(value.array):
            array = self._anew(value.array, made)
            return chainer.Variable(array, requires_grad=value.requires_grad)
        if kind in (list, set, dict, collections.OrderedDict, collections.defaultdict):
            made[id(value)] = new = kind()  # before its items, because it may be among them
            if kind is collections.defaultdict:
                new.default_factory = value.default_factory
            if isinstance(value, dict):
                new.update((name, self._anew(item, made)) for name, item in value.items())
            else:
                add = new.extend if kind is list else new.update
                add(self._anew(item, made) for item in value)
            return new
        if kind is frozenset:
            return kind(self._anew(item, made) for item in value)
        if isinstance(value, tuple) and _is_known(kind):
            items = [self._anew(item, made) for item in value]
            is_same = all(map(operator.is_, items, value))
            return value if is_same else tuple.__new__(kind, items)
        return value

    def _is_new(self, value):
        is_array = isinstance(value, (numpy.ndarray, cuda.ndarray))
        return is_array and id(_memory(value)) not in self._lasting


def shapes(changes: list[tuple[Any, Any]]) -> dict[str, list]:
    """Return words for each place -> the shapes of the arrays that were assigned to it.

    Attributes of libraries' links are left out: they may have spare rows, which no library reads.

    Raises:
        CannotCapture: an object that cannot be made anew was assigned.
    """
    found: dict[str, list] = {}
    for place, new in changes:
        if isinstance(place, Place) and not place.is_of_library:
            for name, value in new.items():
                found.setdefault(place.text(name), []).extend(_shapes(value))
        elif isinstance(place, Items):
            found.setdefault(place.text, []).extend(_shapes(new))
    return found


def _shapes(value):
    kinds = chainer.Variable, numpy.ndarray, cuda.ndarray
    return [part.shape for part in _parts(value) if isinstance(part, kinds)]


def _parts(value, around=()):
    """Return a value and, if it is a container, everything in it.

    `around`: the ids of the containers around the value. Raises CannotCapture for an object with
    arrays of a batch that cannot be made anew.
    """
    if isinstance(value, (chainer.variable.VariableNode, Batch)):
        raise CannotCapture(ANEW % type(value).__name__)
    if not isinstance(value, CONTAINERS) or id(value) in around:
        return [value]
    around = (*around, id(value))
    return [value, *(part for item in _items(value) for part in _parts(item, around))]


def _is_known(kind):
    """Return whether containers of a class can be made anew from their items alone."""
    return kind in CONTAINERS or issubclass(kind, tuple) and hasattr(kind, '_fields')


def _items(container):
    """Return the items of a container, those of a dict without the keys, by no method of hers."""
    if isinstance(container, dict):
        return list(dict.values(container))
    kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(container, kind))
    return list(kind.__iter__(container))


def _memory(array):
    """Return the object that owns the memory of an array."""
    if isinstance(array, cuda.ndarray):
        return array.data.mem
    return array if array.base is None else array.base
