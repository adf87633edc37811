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
        inside: dict[int, Any] = {}  # variables and arrays in containers
        self._makes_anew = gives_copies or any(isinstance(each, CONTAINERS) for each in values)
        for value in values:
            self._look_into(value, inside, set())
        self._copied = set(inside)
        # Variables, arrays and their memory. Somebody who keeps one refers to one of these.
        objects: dict[int, Any] = {}
        for value in values:
            self._add(value, objects)
        self._objects = [each for key, each in objects.items() if key not in self._copied]
        self._own_counts: list[int] = []  # references before anything else had one
        # (changes of the known references, counts) when nobody kept one
        self._free: tuple[int, list[int]] | None = None
        self._are_made = False  # whether :meth:`are_kept` has just found all assignments in place

    def repeat(self, reported: dict[int, Any] | None = None) -> None:
        """Make the assignments again, after a call of :meth:`are_kept` and a launch.

        `reported`: arrays of this launch that no other launch writes to, by the id of the array
        that the graphs write.
        """
        if self._are_made:
            self._are_made = False
            return
        if self._makes_anew:
            self._given = self._made_anew(dict(reported or {}))
        if not self._own_counts:
            # A capture leaves garbage, which may refer to the arrays until it is collected.
            gc.collect(1)
            self._own_counts = list(map(sys.getrefcount, self._objects))
        for place, new in self._given:
            place.apply(new)

    def are_kept(self, known: References) -> bool:
        """Return whether the next launch of the graphs would write to arrays that somebody keeps.

        `known` counts the references of this package itself.
        """
        if self._gives_copies or not self._own_counts:
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

    def _look_into(self, value, inside, around):
        """Add the variables and arrays in a container to `inside` (id -> object).

        `around`: the ids of the containers around the value. Returns whether there are any.
        """
        _refuse_unknown(value)
        if not isinstance(value, CONTAINERS) or id(value) in around:
            return bool(around) and self._add(value, inside)
        around = {*around, id(value)}
        has_arrays = [self._look_into(item, inside, around) for item in _items(value)]
        if any(has_arrays) and not _is_known(type(value)):
            raise CannotCapture(ANEW % type(value).__name__)
        return any(has_arrays)

    def _add(self, value, found):
        """Add a variable or an array, and its memory, to `found`; return whether it is one."""
        if isinstance(value, chainer.Variable):
            found[id(value)] = value
            self._add(value.array, found)
            return True
        if not self._is_new(value):
            return False
        found[id(value)] = value
        found[id(_memory(value))] = _memory(value)
        return True

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
                found.setdefault(place.text(name), []).extend(_shapes(value, set()))
        elif isinstance(place, Items):
            found.setdefault(place.text, []).extend(_shapes(new, set()))
    return found


def _shapes(value, around):
    if isinstance(value, (chainer.Variable, numpy.ndarray, cuda.ndarray)):
        return [value.shape]
    _refuse_unknown(value)
    if not isinstance(value, CONTAINERS) or id(value) in around:
        return []
    return [shape for item in _items(value) for shape in _shapes(item, {*around, id(value)})]


def _refuse_unknown(value):
    """Raise CannotCapture for an object with arrays of a batch that cannot be made anew."""
    if isinstance(value, (chainer.variable.VariableNode, Batch)):
        raise CannotCapture(ANEW % type(value).__name__)


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
