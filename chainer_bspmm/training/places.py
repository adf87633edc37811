"""Places where a program keeps values, to be watched, saved and put back.

A `Place` has variables with names, `Items` are values without names. The state of a generator of
random numbers is a `GeneratorState`.
"""

import array
import contextvars
import functools
import gc
import itertools
import operator
import pickle
import random
import types
import weakref
from collections import deque, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy

MAX_RESULTS = 256  # most results that are watched in a cache without a bound
MISSING: Any = object()  # value of a variable that is not assigned, or was deleted


class Place:
    """Variables by name: of a dict, an object, a class or a module, or in a closure.

    Args:
        text (callable): returns words for the variable of a name.
        read (callable): returns a new dict of all variables that are assigned.
        write (callable): takes a name and a value.
        delete (callable): takes a name that is assigned.
        look (callable): returns an iterable of the present values of the watched variables; it
            takes much less time than `read`.
        looked_at (callable): returns the names of the watched variables.
        keeps_order (bool): whether the order of the names is put back, too.
    """

    is_of_library = False  # whether the variables are attributes of a library's link

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
        self.save, self.look, self.text = read, look, text
        self._write, self._delete, self._looked_at = write, delete, looked_at
        self._keeps_order = keeps_order

    def texts(self) -> list[str]:
        """Return words for each of the values that `look` returns."""
        return list(map(self.text, self._looked_at()))

    def restore(self, saved: dict) -> None:
        """Assign the values that `save` returned, and delete other variables."""
        now = self.save()
        if self._keeps_order and not are_same(now, saved):
            for name in now:
                self._delete(name)
            now = {}
        self.apply(_difference(now, saved))

    def changes(self, saved: dict) -> dict | None:
        """Return the variables that differ from saved ones (name -> value or MISSING), or None."""
        return _difference(saved, self.save()) or None

    def apply(self, changes: dict) -> None:
        """Repeat changes that :meth:`changes` returned."""
        for name, value in changes.items():
            if value is not MISSING:
                self._write(name, value)
            elif name in self.save():
                self._delete(name)

    def present(self, changes: dict) -> list:
        """Return the present values of the variables among changes, in their order."""
        return list(map(self.save().get, changes, itertools.repeat(MISSING)))


def entries(of: dict, text: str) -> Place:
    """Place of the entries of a dict, all of which are watched."""
    # The base class's methods are used, because methods of a user's subclass may do more.
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
    """Place of the variables in the `__dict__` of an object; only `names` are watched."""
    return Place(
        text,
        read=of.copy,
        write=of.__setitem__,
        delete=of.__delitem__,
        look=_looking(of.get, names),
        looked_at=lambda: names,
    )


def class_attributes(of: type, text: Callable[[str], str], names: Collection[str]) -> Place:
    """Place of the attributes of a class; only `names` are watched."""
    return Place(
        text,
        read=vars(of).copy,
        write=functools.partial(type.__setattr__, of),
        delete=functools.partial(type.__delattr__, of),
        look=_looking(vars(of).get, names),
        looked_at=lambda: names,
    )


def attributes_except(
    of: dict[str, Any], text: Callable[[str], str], names: Collection[str]
) -> Place:
    """Place of the variables in an object's `__dict__`, except `names`; none is watched."""
    return Place(
        text,
        read=lambda: {name: value for name, value in of.items() if name not in names},
        write=of.__setitem__,
        delete=of.__delitem__,
        look=tuple,
        looked_at=tuple,
    )


def only_watched(of: dict[str, Any], text: Callable[[str], str], names: Collection[str]) -> Place:
    """Place of variables that are watched, but neither saved nor put back."""
    return _never_saved(text, _looking(of.get, names), lambda: names)


def of_library(
    of: type | types.ModuleType,
    text: Callable[[str], str],
    names: Collection[str],
    written: Collection[str],
) -> Place:
    """Place of variables of a library's class or module: those in `names` are watched.

    Those among them that are in `written` are saved and put back.
    """
    kind = type if isinstance(of, type) else types.ModuleType
    kept = [name for name in names if name in written]
    variables = vars(of)
    return Place(
        text,
        read=lambda: {name: variables[name] for name in kept if name in variables},
        write=functools.partial(kind.__setattr__, of),
        delete=functools.partial(kind.__delattr__, of),
        look=_looking(variables.get, names),
        looked_at=lambda: names,
    )


def bases(of: Collection[type]) -> Place:
    """Place of the base classes of classes, which can be replaced."""
    get = vars(type)['__bases__'].__get__
    return Place(
        lambda kind: '__bases__ of class %s' % kind.__name__,
        read=lambda: {kind: get(kind) for kind in of},
        write=lambda kind, value: type.__setattr__(kind, '__bases__', value),
        delete=lambda kind: None,
        look=lambda: map(get, of),
        looked_at=lambda: of,
    )


def subclasses(of: Collection[type]) -> Place:
    """Place of the subclasses that classes have at present. They are only watched."""

    def pairs():
        return [(kind, subclass) for kind in of for subclass in type.__subclasses__(kind)]

    return _never_saved(
        lambda kind: 'the subclasses of class %s' % kind.__name__,
        look=lambda: [subclass for _, subclass in pairs()],
        looked_at=lambda: [kind for kind, _ in pairs()],
    )


def classes_of_objects(of: Collection, links: Collection) -> Place:
    """Place of the class of each object and link, and the `__dict__` of each object.

    Both can be replaced.
    """
    everything = *of, *links
    parts = [(thing, '__class__') for thing in everything]
    parts += [(thing, '__dict__') for thing in of]

    def look():
        return itertools.chain(map(type, everything), map(_dict_of, of))

    def read():
        values = zip(range(len(parts)), look())
        return {i: value for i, value in values if value is not MISSING}

    def text(i):
        thing, name = parts[i]
        return '%s of an object of class %s' % (name, type(thing).__name__)

    def write(i, value):
        thing, name = parts[i]
        object.__setattr__(thing, name, value)

    return Place(
        text,
        read=read,
        write=write,
        delete=lambda i: None,
        look=look,
        looked_at=lambda: range(len(parts)),
    )


def _dict_of(thing):
    try:
        return object.__getattribute__(thing, '__dict__')
    except AttributeError:
        return MISSING


def module_variables(
    of: dict[str, Any], text: Callable[[str], str], names: Collection[str]
) -> Place:
    """Place of the variables of a module whose names are in `names`; others are left alone."""
    return _named(text, of.get, of.__setitem__, of.__delitem__, names)


def slots(of: object, text: Callable[[str], str], members: Mapping[str, Any]) -> Place:
    """Place of attributes in slots, which are not in a dict; `members`: their descriptors."""

    def get(name, default):
        try:
            return members[name].__get__(of)
        except AttributeError:  # the attribute is not assigned
            return default

    def write(name, value):
        members[name].__set__(of, value)

    def delete(name):
        members[name].__delete__(of)

    return _named(text, get, write, delete, members)


def cell(of: types.CellType, text: str) -> Place:
    """Place of a variable that a function shares with functions inside of it."""

    def get(name, default):
        try:
            return of.cell_contents
        except ValueError:  # the variable is not assigned
            return default

    def write(name, value):
        of.cell_contents = value

    def delete(name):
        del of.cell_contents

    return _named(lambda name: text, get, write, delete, ['contents'])


def context_variable(of: contextvars.ContextVar, text: str) -> Place:
    """Place of a context variable. A value that was set cannot be unset."""

    def write(name, value):
        of.set(value)

    def delete(name):
        raise LookupError(text)

    def get(name, default):
        try:
            return of.get()  # the variable's default, if it was never set
        except LookupError:
            return default

    return _named(lambda name: text, get, write, delete, ['contents'])


# Function of functools -> an object, which a look replaces if it finds that the cache was cleared.
_generations: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def cache(of: Any, text: str) -> Place:
    """Place of the results in the cache of a function of functools, watched as one value.

    The value is another one if results were removed. It is the same if results were added, or
    dropped because the cache is full.
    """
    _generations.setdefault(of, object())
    last = results_in_cache(of)  # held, so that no other results get the same ids
    last_info = of.cache_info()

    def look():
        nonlocal last, last_info
        results = results_in_cache(of)
        info = of.cache_info()
        is_less = info.hits + info.misses < last_info.hits + last_info.misses
        are_gone = not set(map(id, last)).issubset(map(id, results))
        if is_less or (are_gone and info.currsize != info.maxsize):
            _generations[of] = object()
        last, last_info = results, info
        return (_generations[of],)

    return _never_saved(lambda name: text, look, lambda: ['contents'])


def results_in_cache(of: Any) -> list:
    """Return the results in the cache of a function of functools, and a few other objects."""
    kept = [each for each in gc.get_referents(of) if each is not vars(of)]
    if of.cache_parameters()['maxsize'] is None:
        (results,) = [each for each in kept if type(each) is dict]
        return list(itertools.islice(results.values(), MAX_RESULTS))
    # A bounded cache refers to each result itself, apart from a dict of objects of its own.
    return [
        each
        for each in kept
        if each is not of.__wrapped__
        and not (type(each) is dict and all(map(_is_of_cache, each.values())))
    ]


def _is_of_cache(thing):
    return type(thing).__name__ == '_lru_list_elem'


def buffer(of: Any, text: str) -> Place:
    """Place of the numbers in a bytearray or Python's array.array, watched as one value."""
    last = b''

    def get(name, default):
        nonlocal last
        now = bytes(of)
        if now != last:  # equal contents are returned as the same object, because guards use `is`
            last = now
        return last

    def write(name, value):
        del of[:]
        add = of.frombytes if isinstance(of, array.array) else of.extend
        add(value)

    def delete(name):
        raise NotImplementedError  # the contents cannot be missing

    return _named(lambda name: text, get, write, delete, ['contents'])


def parts_of_functions(of: Collection[types.FunctionType]) -> Place:
    """Place of the code and defaults of functions, all of which can be replaced."""
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


def of_training(
    of: object, text: Callable[[str], str], names: Collection[str], kept: Collection[str]
) -> Place:
    """Place of attributes of an object that every step changes: only `names` are watched.

    Variables of its `__dict__` whose names are in `kept` are saved and put back.
    """
    variables = vars(of)
    return Place(
        text,
        read=lambda: {name: variables[name] for name in variables.keys() & kept},
        write=variables.__setitem__,
        delete=variables.__delitem__,
        look=functools.partial(map, functools.partial(read, of), names),
        looked_at=lambda: names,
    )


def read(of: object, name: str) -> Any:
    """Return an attribute; MISSING for a method, which is a new object every time."""
    try:
        value = getattr(of, name)
    except Exception:  # such as an attribute of a Trainer that does not run
        return MISSING
    return MISSING if callable(value) else value


def _never_saved(text, look, looked_at):
    """Return a place whose values are watched, but neither saved nor put back."""

    def change(*_):
        raise NotImplementedError  # where nothing is saved, nothing has to be written

    return Place(text, dict, write=change, delete=change, look=look, looked_at=looked_at)


def _named(text, get, write, delete, names):
    """Return a place of the variables in `names`, all of which are watched."""

    def read():
        return {name: value for name in names if (value := get(name, MISSING)) is not MISSING}

    return Place(text, read, write, delete, look=_looking(get, names), looked_at=lambda: names)


def _looking(get, names):
    """Return a function that looks up `names`; MISSING stands for a name without a value."""
    return functools.partial(map, get, names, itertools.repeat(MISSING))


class Items:
    """Place of the items of a list, a set or a deque, all of which are watched."""

    def __init__(self, of: Collection, text: str):
        kind: Any = list if isinstance(of, list) else set if isinstance(of, set) else deque
        # As in `entries`, the base class's methods are used: a user's subclass may do more.
        self.look = functools.partial(kind.__iter__, of)
        self._of, self._kind, self.text = of, kind, text

    def texts(self) -> list[str]:
        """Return words for each of the items that `look` returns."""
        return [self.text for _ in self.look()]

    def save(self) -> list:
        """Return the items."""
        return list(self.look())

    def restore(self, saved: list) -> None:
        """Put the saved items back, if the present ones differ."""
        if not are_same(self.save(), saved):
            self._kind.clear(self._of)
            add = set.update if self._kind is set else self._kind.extend
            add(self._of, saved)

    def changes(self, saved: list) -> list | None:
        """Return the items if they differ from the saved ones, else None."""
        now = self.save()
        return None if are_same(now, saved) else now

    def apply(self, changes: list) -> None:
        """Repeat a change that :meth:`changes` returned."""
        self.restore(changes)

    def present(self, changes: list) -> list:
        """Return the present items, whatever the changes are."""
        return self.save()


class GeneratorState:
    """Position of a generator of random numbers, NumPy's or Python's, in its sequence."""

    def __init__(self, generator: Any, text: str):
        self.text = text
        self.save: Callable[[], Any]  # returns the position; results are equal if positions are
        self._write: Callable[[Any], Any]
        if isinstance(generator, random.Random):
            self.save, self._write = generator.getstate, generator.setstate
        elif isinstance(generator, numpy.random.RandomState):
            # The state is pickled, because dicts with arrays cannot be compared.
            self.save = lambda: pickle.dumps(generator.get_state(legacy=False))
            self._write = lambda saved: generator.set_state(pickle.loads(saved))
        else:
            bits = generator.bit_generator
            self.save = lambda: pickle.dumps(bits.state)
            self._write = lambda saved: setattr(bits, 'state', pickle.loads(saved))

    def restore(self, saved: Any) -> None:
        """Move the generator to the saved position, if it is at another one."""
        if self.save() != saved:
            self._write(saved)


def _difference(before, after):
    """Return name -> new value for all that changed; MISSING for a name that is gone."""
    if are_same(before, after) and all(map(operator.is_, before.values(), after.values())):
        return {}
    new = {name: value for name, value in after.items() if before.get(name, MISSING) is not value}
    return new | dict.fromkeys(before.keys() - after.keys(), MISSING)


def are_same(before, after):
    """Return whether two collections have the same objects in the same order."""
    return len(before) == len(after) and all(map(operator.is_, before, after))
