"""`Effects`: assignments that Python makes in an eager run, repeated after a launch of graphs."""

import collections
import enum
import gc
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.sparse.batch import Batch
from chainer_bspmm.training import kinds
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.guards import References
from chainer_bspmm.training.places import are_same, Items, Place

ANEW = (
    'the step makes and keeps an object of class %s, which a replay of a captured step cannot make '
    'anew'
)


# Classes of containers that can be made anew. Named tuples are among them.
MUTABLE = (
    *(list, set, dict, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
)
CONTAINERS = *MUTABLE, tuple, frozenset


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
        is_known (callable): returns whether an object existed before the run. Such an object is
            assigned as it is, too.
        gives_copies (bool): whether to assign copies of all other arrays.

    Raises:
        CannotCapture: the run has made and left an object that cannot be made anew.
    """

    def __init__(
        self,
        changes: list[tuple[Any, Any]],
        lasting: Iterable = (),
        is_known: Callable[[Any], bool] = lambda value: False,
        gives_copies: bool = False,
    ):
        self._changes = changes
        self._given = list(changes)  # with the containers and copies that were made last
        self._gives_copies = gives_copies
        self._lasting = {id(_memory(array)) for array in lasting}
        values = [value for _, new in changes for value in _items(new)]
        parts = [_parts(value, is_known) for value in values]
        self._known = {id(part) for each in parts for part in each if is_known(part)}
        values = [value for value in values if id(value) not in self._known]
        self._copied: set[int] = set()  # ids of variables and arrays in containers
        for value, *inner in parts:
            self._copied.update(id(each) for part in inner for each in self._written(part))
            for part in (value, *inner):
                if id(part) not in self._known and not self._can_be_made(part):
                    raise CannotCapture(ANEW % type(part).__name__)
        # Positions of the changes with values that are made anew or copied for every launch.
        self._remade = [
            i
            for i, (_, new) in enumerate(changes)
            if gives_copies or any(self._is_remade(value) for value in _items(new))
        ]
        # Variables, their nodes, arrays, and the memory of the arrays. Code that keeps a result
        # of the run refers to at least one of these objects.
        objects: dict[int, Any] = {}
        for value in values:
            if id(value) not in self._copied:
                for each in self._written(value):
                    objects[id(each)] = each
                    if self._is_new(each):
                        objects[id(_memory(each))] = _memory(each)
        self._objects = list(objects.values())
        # Number of references to each object while nothing outside of this package has one. None
        # until they are counted.
        self._own_counts: list[int] | None = None
        # (`n_changes` of the known references, counts of references) when nobody kept any object
        self._free: tuple[int, list[int]] | None = None
        self._are_made = False  # whether the last assignments are known to be in place

    def repeat(self, written: dict[str, Any], results: dict[str, Any]) -> None:
        """Make the assignments again, after :meth:`are_kept` or `are_untouched`, and a launch.

        `written`: name -> result that the graphs write. `results`: name -> result of this launch;
        if it is another array, no other launch writes to it.
        """
        if self._remade:
            made = {
                id(array): results[name]
                for name, array in written.items()
                if results[name] is not array
            }
            for i in self._remade:
                place, new = self._changes[i]
                self._given[i] = place, self._made_anew(new, made)
            del made, new  # their references must not be counted
        if self._own_counts is None:
            # A capture leaves garbage, which may refer to the arrays until it is collected.
            gc.collect(1)
            self._own_counts = list(map(sys.getrefcount, self._objects))
        given = [self._given[i] for i in self._remade] if self._are_made else self._given
        self._are_made = False
        for place, new in given:
            place.apply(new)

    def are_kept(self, known: References) -> bool:
        """Return whether the next launch of the graphs would write to arrays that somebody keeps.

        `known` counts the references of this package itself.
        """
        if self._gives_copies or self._own_counts is None:
            return False
        counts = list(map(sys.getrefcount, self._objects))
        pairs = [(_items(new), place.present(new)) for place, new in self._given]
        are_made = self._are_made = all(are_same(values, now) for values, now in pairs)
        state = known.n_changes, counts
        if are_made and state == self._free:  # nearly always
            return False
        expected = collections.Counter(
            id(value)
            for values, now in pairs
            for value, other in zip(values, now)
            if value is other
        )
        for each, count, own in zip(self._objects, counts, self._own_counts):
            n_others = count - own - expected[id(each)]
            if n_others > 0 and not known.are_at_least(n_others, each):
                return True
        if are_made:
            self._free = state
        return False

    def are_untouched(self) -> None:
        """Note that all assignments are in place, because no other code has run since then."""
        self._are_made = self._own_counts is not None

    def _is_remade(self, value):
        if id(value) in self._known:
            return False
        return isinstance(value, CONTAINERS) or id(value) in self._copied

    def _can_be_made(self, value):
        """Return whether a value can be made anew, or need not be, such as a number."""
        kind = type(value)
        if isinstance(value, CONTAINERS):
            return kind in CONTAINERS or _is_named_tuple(value)
        if isinstance(value, chainer.Variable):
            return kind is chainer.Variable or not self._is_new(value.array)
        # Guards compare functions and the like by identity, so a step that makes them is refused.
        is_found = callable(value) or isinstance(value, enum.Enum)
        is_of_user = kinds.is_of_user(kind.__module__)
        return is_found or not (is_of_user or isinstance(value, kinds.RECORDS))

    def _written(self, value):
        """Return what a launch writes of a value: arrays, with variables and nodes that have them.

        A user's graph that has read a variable refers to its node.
        """
        if id(value) in self._known:
            return []
        if isinstance(value, chainer.Variable):
            parts = value.array, value._grad, value._grad_var
            return [value, value.node, *(each for part in parts for each in self._written(part))]
        return [value] if self._is_new(value) else []

    def _made_anew(self, new, made):
        """Return the values of a change (dict or list) with new containers and copies."""
        if isinstance(new, dict):
            return {name: self._anew(value, made) for name, value in new.items()}
        return [self._anew(value, made) for value in new]

    def _anew(self, value, made):
        """Return a value with new containers and copies.

        An object that occurs several times stays one object: `made` has the new objects by old id.
        """
        if id(value) not in made:
            made[id(value)] = self._made(value, made)
        return made[id(value)]

    def _made(self, value, made):
        kind = type(value)
        if id(value) in self._known:
            return value
        is_copied = self._gives_copies or id(value) in self._copied
        if is_copied and self._is_new(value):
            return value.copy()
        if is_copied and kind is chainer.Variable and self._is_new(value.array):
            return chainer.Variable(
                self._anew(value.array, made),
                name=value.name,
                grad=self._anew(value.grad, made),
                requires_grad=value.requires_grad,
            )
        if kind in MUTABLE:
            # It is noted before its items, because it may be among them. The copy has the default
            # of a defaultdict and the maximal length of a deque.
            made[id(value)] = new = value.copy()
            new.clear()
            if isinstance(value, dict):
                new.update({name: self._anew(item, made) for name, item in value.items()})
            else:
                add = new.update if kind is set else new.extend
                add(self._anew(item, made) for item in value)
            return new
        if kind is frozenset:
            return kind(self._anew(item, made) for item in value)
        if isinstance(value, tuple):
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
    shaped = chainer.Variable, numpy.ndarray, cuda.ndarray
    return [part.shape for part in _parts(value) if isinstance(part, shaped)]


def _parts(value, is_known=lambda part: False, around=()):
    """Return a value and, if it is a container that is not known, everything in it.

    `around`: the ids of the containers around the value. Raises CannotCapture for an object with
    arrays of a batch that cannot be made anew.
    """
    if isinstance(value, (chainer.variable.VariableNode, Batch)):
        raise CannotCapture(ANEW % type(value).__name__)
    if not isinstance(value, CONTAINERS) or id(value) in around or is_known(value):
        return [value]
    around = (*around, id(value))
    return [value, *(part for item in _items(value) for part in _parts(item, is_known, around))]


def _is_named_tuple(value):
    """Return whether a value is a named tuple, and has no attributes but its fields."""
    is_tuple = isinstance(value, tuple) and hasattr(value, '_fields')
    return is_tuple and not getattr(value, '__dict__', None)


def _items(container):
    """Return a container's items, or a dict's values, without methods of a user's subclass."""
    if isinstance(container, dict):
        return list(dict.values(container))
    bases = list, tuple, set, frozenset, collections.deque
    kind = next(kind for kind in bases if isinstance(container, kind))
    return list(kind.__iter__(container))


def _memory(array):
    """Return the object that owns the memory of an array."""
    if isinstance(array, cuda.ndarray):
        return array.data.mem
    return array if array.base is None else array.base
