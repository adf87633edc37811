"""Places where a program keeps values: they are looked at, saved, and put back.

`Place` holds variables with names, `Items` values without. The state of a generator of random
numbers is a `GeneratorState`.
"""

import array
import contextvars
import functools
import itertools
import operator
import pickle
import random
import types
from collections import deque, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy

MISSING: Any = object()  # in place of a variable that is not assigned, or was deleted


class Place:
    """Variables by name: those of a dict, an object, a class, a module, or in a closure.

    Args:
        text (callable): returns words for the variable of a name.
        read (callable): returns a new dict of all variables that are assigned.
        write (callable): takes a name and a value.
        delete (callable): takes a name that is assigned.
        look (callable): returns an iterable of the values that are watched, as they are now; it
            takes much less time than `read`.
        looked_at (callable): returns the names of these.
        keeps_order: the order of the names is put back, too.
    """

    def __init__(
        self,
        text: Callable[[Any], str],
        read: Callable[[], dict],
        write: Callable[[Any, Any], None],
        delete: Callable[[Any], None],
        look: Callable[[], Iterable],
        looked_at: Callable[[], Iterable],
        keeps_order: bool = False,
    ):
        self.save, self.look = read, look
        self._text, self._write, self._delete, self._looked_at = text, write, delete, looked_at
        self._keeps_order = keeps_order

    def texts(self) -> list[str]:
        """Return words for each of the values that `look` gives."""
        return list(map(self._text, self._looked_at()))

    def restore(self, saved: dict) -> None:
        """Assign what `save` returned, and delete other variables."""
        now = self.save()
        if self._keeps_order and not _is_same(now, saved):
            for name in now:
                self._delete(name)
            now = {}
        self.apply(_difference(now, saved))

    def changes(self, saved: dict) -> dict | None:
        """Return the variables that differ from saved ones (name -> value or MISSING), if any."""
        return _difference(saved, self.save()) or None

    def apply(self, changes: dict) -> None:
        """Make changes again."""
        for name, value in changes.items():
            if value is not MISSING:
                self._write(name, value)
            elif name in self.save():
                self._delete(name)


def entries(of: dict, text: str) -> Place:
    """Place of the entries of a dict, all of which are watched."""
    # Methods of a user's subclass may do more than is asked for here.
    kind = OrderedDict if isinstance(of, OrderedDict) else dict
    return Place(
        lambda key: '%r in %s' % (key, text),
        read=lambda: dict(kind.items(of)),
        write=functools.partial(kind.__setitem__, of),
        delete=functools.partial(kind.__delitem__, of),
        look=lambda: (*kind.keys(of), *kind.values(of)),
        looked_at=lambda: 2 * list(kind.keys(of)),
        keeps_order=True,
    )


def all_attributes(of: dict[str, Any], text: Callable[[str], str]) -> Place:
    """Place of the variables in the `__dict__` of an object, all of which are watched."""
    return Place(text, of.copy, of.__setitem__, of.__delitem__, look=of.values, looked_at=of.keys)


def attributes(of: dict[str, Any], text: Callable[[str], str], names: Collection[str]) -> Place:
    """Place of the variables in the `__dict__` of an object; those of some names are watched."""
    return Place(
        text,
        read=of.copy,
        write=of.__setitem__,
        delete=of.__delitem__,
        look=_looking(of.get, names),
        looked_at=lambda: names,
    )


def class_attributes(of: type, text: Callable[[str], str], names: Collection[str]) -> Place:
    """Place of the attributes of a class; those of some names are watched."""
    return Place(
        text,
        read=vars(of).copy,
        write=functools.partial(type.__setattr__, of),
        delete=functools.partial(type.__delattr__, of),
        look=_looking(vars(of).get, names),
        looked_at=lambda: names,
    )


def module_variables(
    of: dict[str, Any], text: Callable[[str], str], names: Collection[str]
) -> Place:
    """Place of the variables of a module that have certain names; others are left alone."""
    return _named(text, of.get, of.__setitem__, of.__delitem__, names)


def slots(of: object, text: Callable[[str], str], members: Mapping[str, Any]) -> Place:
    """Place of the attributes that are not in a dict. `members` are the class's descriptors."""

    def get(name, default):
        try:
            return members[name].__get__(of)
        except AttributeError:  # not assigned
            return default

    def write(name, value):
        members[name].__set__(of, value)

    def delete(name):
        members[name].__delete__(of)

    return _named(text, get, write, delete, members)


def cell(of: types.CellType, text: str) -> Place:
    """Place of a variable that a function shares with those inside of it."""

    def get(name, default):
        try:
            return of.cell_contents
        except ValueError:  # not assigned
            return default

    def write(name, value):
        of.cell_contents = value

    def delete(name):
        del of.cell_contents

    return _named(lambda name: text, get, write, delete, ['contents'])


def context_variable(of: contextvars.ContextVar, text: str) -> Place:
    """Place of a context variable. It cannot be made to have no value again."""

    def write(name, value):
        of.set(value)

    def delete(name):
        raise LookupError(text)

    def get(name, default):
        try:
            return of.get()  # that of the variable itself, if it was never set
        except LookupError:
            return default

    return _named(lambda name: text, get, write, delete, ['contents'])


def buffer(of: Any, text: str) -> Place:
    """Place of the numbers in a bytearray or an array of Python's, watched as one value."""
    last = b''

    def get(name, default):
        nonlocal last
        now = bytes(of)
        if now != last:  # otherwise the same object is returned, for a look to compare
            last = now
        return last

    def write(name, value):
        del of[:]
        add = of.frombytes if isinstance(of, array.array) else of.extend
        add(value)

    def delete(name):
        raise NotImplementedError  # it is always there

    return _named(lambda name: text, get, write, delete, ['contents'])


def parts_of_functions(of: Collection[types.FunctionType]) -> Place:
    """Place of code and defaults of functions, all of which can be replaced."""
    names = '__code__', '__defaults__', '__kwdefaults__'
    parts = [(function, name) for function in of for name in names]
    look = operator.attrgetter(*names)
    return Place(
        lambda part: '%s of %s' % (part[1], part[0].__name__),
        read=lambda: {part: getattr(*part) for part in parts},
        write=lambda part, value: setattr(part[0], part[1], value),
        delete=lambda part: None,
        look=lambda: itertools.chain.from_iterable(map(look, of)),
        looked_at=lambda: parts,
    )


def read_only(of: object, text: Callable[[str], str], names: Collection[str]) -> Place:
    """Place of attributes that are watched, and neither saved nor put back."""
    saved: dict = {}
    return Place(
        text,
        read=saved.copy,
        write=saved.__setitem__,
        delete=saved.__delitem__,
        look=functools.partial(map, functools.partial(read, of), names),
        looked_at=lambda: names,
    )


def read(of: object, name: str) -> Any:
    """Return an attribute; MISSING for a method, which is another object every time."""
    try:
        value = getattr(of, name)
    except Exception:  # of a Trainer that does not run, for example
        return MISSING
    return MISSING if callable(value) else value


def _named(text, get, write, delete, names):
    """Return a place of the variables of certain names, all of which are watched."""

    def read():
        return {name: value for name in names if (value := get(name, MISSING)) is not MISSING}

    return Place(text, read, write, delete, look=_looking(get, names), looked_at=lambda: names)


def _looking(get, names):
    """Return a function that gives the values of some names, MISSING where there is none."""
    return functools.partial(map, get, names, itertools.repeat(MISSING))


class Items:
    """Place of what is in a list, a set or a deque, all of which is watched."""

    def __init__(self, of: Collection, text: str):
        kind: Any = list if isinstance(of, list) else set if isinstance(of, set) else deque
        # As in `entries`: methods of a user's subclass may do more.
        self.look = functools.partial(kind.__iter__, of)
        self._of, self._kind, self._text = of, kind, text

    def texts(self) -> list[str]:
        """Return words for each of the items that `look` gives."""
        return [self._text for _ in self.look()]

    def save(self) -> list:
        """Return the items."""
        return list(self.look())

    def restore(self, saved: list) -> None:
        """Make these the items, if they are not."""
        if not _is_same(self.save(), saved):
            self._kind.clear(self._of)
            add = set.update if self._kind is set else self._kind.extend
            add(self._of, saved)

    def changes(self, saved: list) -> list | None:
        """Return the items if they are not those that were saved."""
        now = self.save()
        return None if _is_same(now, saved) else now

    def apply(self, changes: list) -> None:
        """Make a change again."""
        self.restore(changes)


class GeneratorState:
    """Position of a generator of random numbers, NumPy's or Python's: what it will draw next."""

    def __init__(self, generator: Any, text: str):
        self.text = text
        self.save: Callable[[], Any]  # equal if the position is
        self._write: Callable[[Any], Any]
        if isinstance(generator, random.Random):
            self.save, self._write = generator.getstate, generator.setstate
        elif isinstance(generator, numpy.random.RandomState):
            # Dicts with arrays do not compare.
            self.save = lambda: pickle.dumps(generator.get_state(legacy=False))
            self._write = lambda saved: generator.set_state(pickle.loads(saved))
        else:
            bits = generator.bit_generator
            self.save = lambda: pickle.dumps(bits.state)
            self._write = lambda saved: setattr(bits, 'state', pickle.loads(saved))

    def restore(self, saved: Any) -> None:
        """Go to the position that was saved, if it is another one."""
        if self.save() != saved:
            self._write(saved)


def _difference(before, after):
    """Return name -> new value, MISSING for a name that is gone."""
    if _is_same(before, after) and all(map(operator.is_, before.values(), after.values())):
        return {}
    new = {name: value for name, value in after.items() if before.get(name, MISSING) is not value}
    return new | dict.fromkeys(before.keys() - after.keys(), MISSING)


def _is_same(before, after):
    """Return whether two collections have the same objects in the same order."""
    return len(before) == len(after) and all(map(operator.is_, before, after))
