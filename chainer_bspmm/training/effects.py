"""`Effects`: assignments that Python makes in an eager run, repeated after a launch of graphs."""

import collections
import sys
from collections.abc import Callable, Collection
from typing import Any

import numpy

import chainer
from chainer.backends import cuda


_ARRAYS = numpy.ndarray, cuda.ndarray


class Effects:
    """Assignments of a run, to attributes, containers and gradients, among them of new arrays.

    A graph writes to the same arrays at every launch, but an eager step makes new ones. So a user
    may keep an array of one step, such as the predictions of the best epoch, and expect that the
    next step leaves it alone. :meth:`are_kept` tells that before the next launch.

    Args:
        changes (list): the result of `Snapshot.changes`, while the assignments are in place.
        gives_copies (bool): whether to assign copies of the arrays.
    """

    def __init__(self, changes: list[tuple[Any, Any]], gives_copies: bool = False):
        self._changes = changes
        self._n_values = sum(len(new) for _, new in changes)
        self._gives_copies = gives_copies
        # Variables, arrays and their memory. Somebody who keeps one refers to one of these.
        self._objects = list(_objects_in([new for _, new in changes]))
        self._own_counts: list[int] = []  # references before anything else had one
        self._free_counts: list[int] = []  # references when nobody kept one
        self._are_made = False  # whether :meth:`are_kept` has just found all assignments in place

    def repeat(self) -> None:
        """Make the assignments again, after a call of :meth:`are_kept` and a launch."""
        if self._are_made:
            self._are_made = False
            return
        if not self._own_counts:
            self._own_counts = self._counts()
        copies: dict[int, Any] = {}
        for place, new in self._changes:
            place.apply(_copied(new, copies) if self._gives_copies else new)

    def are_kept(self, known: Callable[[], Collection]) -> bool:
        """Return whether the next launch of the graphs would write to arrays that somebody keeps.

        `known` returns objects that this package itself refers to, once for each reference.
        """
        if self._gives_copies or not self._own_counts:
            return False
        counts = self._counts()
        assigned = [value for place, new in self._changes for value in place.assigned(new)]
        self._are_made = len(assigned) == self._n_values
        if self._are_made and counts == self._free_counts:  # nearly always
            return False
        expected = collections.Counter(map(id, (*assigned, *known())))
        if any(
            count > own + expected[id(each)]
            for each, count, own in zip(self._objects, counts, self._own_counts)
        ):
            return True
        if self._are_made:
            self._free_counts = counts
        return False

    def _counts(self):
        return list(map(sys.getrefcount, self._objects))


def _objects_in(value):
    """Yield the variables and arrays in a value, and the owners of their memory, each once."""
    found: dict[int, Any] = {}
    _find(value, found)
    return found.values()


def _find(value, found):
    if isinstance(value, chainer.Variable):
        found[id(value)] = value
        _find(value.array, found)
    elif isinstance(value, cuda.ndarray):
        found[id(value)] = value
        found[id(value.data.mem)] = value.data.mem
    elif isinstance(value, numpy.ndarray):
        found[id(value)] = value
        if value.base is not None:
            found[id(value.base)] = value.base
    else:
        for each in _items(value):
            _find(each, found)


def _items(value):
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple, set) else ()


def _copied(value, copies):
    """Return a value with copies of the arrays in it; equal arrays stay one (`copies`: by id)."""
    if id(value) not in copies:
        copies[id(value)] = _new_copy(value, copies)
    return copies[id(value)]


def _new_copy(value, copies):
    if isinstance(value, _ARRAYS):
        return value.copy()
    if type(value) is chainer.Variable and value.array is not None:
        return chainer.Variable(_copied(value.array, copies), requires_grad=value.requires_grad)
    if type(value) is dict:
        return {name: _copied(each, copies) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each, copies) for each in value)
    return value
