"""`Effects`: assignments that Python makes in an eager run, repeated after a launch of graphs."""

import collections
import sys
from collections.abc import Iterable
from typing import Any

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.training.guards import References


class Effects:
    """Assignments of a run, to attributes, containers and gradients, among them of new arrays.

    A graph writes to the same arrays at every launch, but an eager step makes new ones. So a user
    may keep an array of one step, such as the predictions of the best epoch, and expect that the
    next step leaves it alone. :meth:`are_kept` tells that before the next launch.

    Args:
        changes (list): the result of `Snapshot.changes`, while the assignments are in place.
        lasting (iterable): arrays that stay from step to step, such as those of parameters. Views
            of them are assigned as they are, because Chainer's steps write to them, too.
        gives_copies (bool): whether to assign copies of other arrays.
    """

    def __init__(
        self, changes: list[tuple[Any, Any]], lasting: Iterable = (), gives_copies: bool = False
    ):
        self._changes = changes
        self._n_values = sum(len(new) for _, new in changes)
        self._gives_copies = gives_copies
        self._lasting = {id(_memory(array)) for array in lasting}
        # Variables, arrays and their memory. Somebody who keeps one refers to one of these.
        found: dict[int, Any] = {}
        self._find([new for _, new in changes], found)
        self._objects = list(found.values())
        self._own_counts: list[int] = []  # references before anything else had one
        # (changes of the known references, counts) when nobody kept one
        self._free: tuple[int, list[int]] | None = None
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
            place.apply(self._copied(new, copies) if self._gives_copies else new)

    def are_kept(self, known: References) -> bool:
        """Return whether the next launch of the graphs would write to arrays that somebody keeps.

        `known` counts the references of this package itself.
        """
        if self._gives_copies or not self._own_counts:
            return False
        counts = self._counts()
        assigned = [value for place, new in self._changes for value in place.assigned(new)]
        self._are_made = len(assigned) == self._n_values
        present = known.n_changes, counts
        if self._are_made and present == self._free:  # nearly always
            return False
        expected = collections.Counter(map(id, assigned))
        for each, count, own in zip(self._objects, counts, self._own_counts):
            n_others = count - own - expected[id(each)]
            if n_others > 0 and n_others > known.count(each):
                return True
        if self._are_made:
            self._free = present
        return False

    def _counts(self):
        return list(map(sys.getrefcount, self._objects))

    def _find(self, value, found):
        """Add the objects in a value to `found` (id -> object)."""
        if isinstance(value, chainer.Variable):
            found[id(value)] = value
            self._find(value.array, found)
        elif self._is_new(value):
            found[id(value)] = value
            found[id(_memory(value))] = _memory(value)
        elif type(value) in (list, tuple, set, dict):
            for each in value.values() if type(value) is dict else value:
                self._find(each, found)

    def _copied(self, value, copies):
        """Return a value with copies of its arrays; one array stays one (`copies`: by id)."""
        if id(value) not in copies:
            copies[id(value)] = self._copy(value, copies)
        return copies[id(value)]

    def _copy(self, value, copies):
        kind = type(value)
        if self._is_new(value):
            return value.copy()
        if kind is chainer.Variable and self._is_new(value.array):
            array = self._copied(value.array, copies)
            return chainer.Variable(array, requires_grad=value.requires_grad)
        if kind is dict:
            return {name: self._copied(each, copies) for name, each in value.items()}
        if kind in (list, tuple):
            return kind(self._copied(each, copies) for each in value)
        return value

    def _is_new(self, value):
        is_array = isinstance(value, (numpy.ndarray, cuda.ndarray))
        return is_array and id(_memory(value)) not in self._lasting


def _memory(array):
    """Return the object that owns the memory of an array."""
    if isinstance(array, cuda.ndarray):
        return array.data.mem
    return array if array.base is None else array.base
