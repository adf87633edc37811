"""`Reach`: the Python state that a function can read or change, found by following its code.

Captured steps watch it, and an extra run of the function is undone by it.
"""

import argparse
import collections
import contextlib
import dis
import functools
import io
import itertools
import operator
import os
import pickle
import random
import sys
import threading
import types
import weakref
from typing import Any, Callable

import numpy

import chainer

from chainer_bspmm.compat.user_code import is_user_code

MAX_ITEMS = 256  # of a container that are followed and watched; longer ones are only put back
MAX_PLACES = 4000  # that are put back
MAX_WATCHED = 500  # of them

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, numpy.generic)
_OPAQUE = numpy.dtype, chainer.Variable
_ARRAYS = chainer.get_array_types()
_LISTS = list, set, collections.deque
# Objects of the standard library that are no more than attributes.
_WRAPPERS = collections.ChainMap, collections.UserDict, collections.UserList
_RECORDS = types.SimpleNamespace, argparse.Namespace, threading.local, *_WRAPPERS
# Their code calls methods of a user's subclass by name at most where the next two say so.
_QUIET = {
    *('builtins', 'abc', 'typing', 'enum', 'collections', 'argparse', 'types'),
    *('chainer.link', 'chainer.sequential', 'chainer.device_resident'),
}
_CALLED = {
    *('__call__', '__enter__', '__exit__', '__getattr__', '__getattribute__', '__setattr__'),
    *('__get__', '__set__', '__iter__', '__next__', '__len__', '__bool__', '__float__', '__int__'),
    *('__getitem__', '__setitem__', '__contains__', '__missing__', '__eq__', '__lt__', '__le__'),
    *('__%s%s__' % (r, n) for r in ('', 'r', 'i') for n in ('add', 'sub', 'mul', 'truediv', 'pow')),
    *('__gt__', '__ge__', '__neg__', '__abs__', 'forward'),
}
# Of these only the data of a user's objects would be followed, which they are not.
_FOREIGN = {
    *('torch', 'tensorflow', 'jax', 'pandas', 'sklearn', 'rdkit', 'matplotlib', 'tqdm', 'IPython'),
    *('pytest', '_pytest', 'ipykernel', 'tensorboardX', 'wandb', 'mlflow', 'mpi4py'),
}
# Reading from objects of these takes something away.
_DRAINED = {
    *('queue', '_queue', 'socket', 'mmap', 'sqlite3', 'multiprocessing.queues'),
    *('multiprocessing.connection', 'subprocess'),
}
MAX_DEPTH = 50
_MADE = {'__init__', '__new__', '__post_init__'}  # called where a class is
_ANY_NAME = {'getattr', 'setattr', 'hasattr', 'delattr', 'vars', '__dict__', 'attrgetter'}
_UNKNOWN = {'globals', 'exec', 'eval', 'locals', '__import__'}
_OF_A_LINK = {*vars(chainer.Sequential()), '_local_link_hooks'}
_OF_A_STEP = {'metrics', 'train_metrics', 'valid_metrics'}  # Chainer Chemistry's models make these
# Iterators that a copy can stand for; others share what they read from with their copies.
_COPYABLE = tuple(type(iter(of)) for of in ([], (), range(1), '')) + (itertools.count,)
_GETTERS = {'LOAD_GLOBAL', 'LOAD_NAME', 'STORE_GLOBAL', 'DELETE_GLOBAL'}
_ATTRIBUTES = {'LOAD_ATTR', 'LOAD_METHOD', 'STORE_ATTR', 'DELETE_ATTR', 'LOAD_SUPER_ATTR'}
_OF_A_CLASS = {'__dict__', '__weakref__', '__module__', '__doc__', '__qualname__', '__slots__'}
_nothing = object()


class Reach:
    """What can be reached from functions, links and objects, each of it once.

    All attributes of links belong to it. Of a user's objects, classes and modules it is what the
    code names that was reached, with what is in containers there; of globals, too.

    `links` and a user's `functions` are by id. `arrays` are those that are no attributes of links,
    by a text. `cannot` says what a run may change that cannot be put back, `cut` what was too much
    to follow.
    """

    def __init__(self, *things):
        self.links, self.functions, self.arrays = {}, {}, {}
        self.cannot, self.cut = [], []
        self._places = []
        self._iterators = {}  # id -> (text, iterator)
        self._seen = {}  # id -> object, which keeps the id
        self._holders = []
        self._globals = {}  # id of a module's dict -> (that, names)
        self._depth = 0
        self._names, self._has_any_name = set(_CALLED), False
        self._states = [_State('the state of numpy.random', numpy.random.mtrand._rand)]
        self._states.append(_State('the state of random', random._inst))
        self._params = {}  # of links, and by themselves: id -> (text, array)
        for thing in things:
            self._follow(thing, 'the loss')
        size = None
        while size != (size := (len(self._names), self._has_any_name, len(self._holders))):
            for holder in self._holders[:]:
                holder.follow()
            if {'environ', 'getenv'} & self._names:
                self._follow(vars(os.environ)['_data'], 'os.environ')
        for around, names in self._globals.values():
            text = '%%s of module %s' % around.get('__name__')
            self._places.append(_Variables(around, text, list(names)))
        for holder in self._holders:
            if holder.is_link:  # first: these are always watched
                self._places[:0] = holder.places()
            else:
                self._places += holder.places()
        for configuration in (vars(chainer.global_config), vars(chainer.config._local)):
            self._places.append(_Variables(configuration, '', is_watched=False))
        self._refuse_iterators()
        of_links = {id(param) for link in self.links.values() for param in link.params()}
        for key, (text, array) in self._params.items():
            if key not in of_links:
                self.arrays[text] = array
        watched = [place for place in self._places if place.is_watched]
        self.cut += [place.text for place in watched[MAX_WATCHED:]]
        self._watched = watched = watched[:MAX_WATCHED]
        self._whole = [view for place in watched for view in place.views()]
        self._partial = [place.part for place in watched if place.part is not None]
        self._cells = [place.cell for place in watched if place.cell is not None]
        # Attributes that are new, and contents that are too many to be watched.
        self._sized = [place.sized for place in self._places if place.sized is not None]

    def _refuse_iterators(self):
        """Note those that no copy can stand for, as they are in a tuple or a default."""
        if self._iterators:
            held = set()
            for place in self._places:
                saved = place.save()
                held.add(id(saved))  # of a variable by itself
                if not isinstance(place, _Cell):
                    held.update(map(id, saved.values() if isinstance(saved, dict) else saved))
            for key in self._iterators.keys() - held:
                self.cannot.append(self._iterators[key][0])

    def follows(self, container):
        """Return whether what is in it belongs to this."""
        return id(container) in self._seen

    # Looking.

    def sizes(self):
        """Return how many there are of what is not watched one by one, and may be."""
        return list(map(len, self._sized))

    def values(self):
        """Return what is watched (list), as it is now; in the order of `texts`."""
        values = []
        extend = values.extend
        for view in self._whole:
            extend(view)
        for get, names in self._partial:
            extend(map(get, names))
        try:
            values += [cell.cell_contents for cell in self._cells]
        except ValueError:  # one is not assigned yet
            values += [_contents(cell) for cell in self._cells]
        return values

    def named(self):
        """Return (what, value) of what is watched, and of how much is in containers."""
        sizes = [(p.text, len(p._now)) for p in self._places if p.is_container]
        return [*sizes, *zip(self.texts(), self.values(), strict=True)]

    def texts(self):
        """Return what is watched in words (list)."""
        watched = self._watched
        whole = [text for place in watched for text in place.texts()]
        parts = [place.text % name for place in watched if place.part for name in place.part[1]]
        return whole + parts + [place.text for place in watched if place.cell is not None]

    def states(self):
        """Return text -> what (any object) generators of numbers and iterators are at."""
        found = {state.text: state.token() for state in self._states}
        for text, iterator in self._iterators.values():
            found[text] = _position(iterator)
        return found

    # Putting back.

    def save(self):
        """Return what :meth:`restore` puts back."""
        return [(place, place.save()) for place in (*self._places, *self._states)]

    @staticmethod
    def restore(saved, with_numbers=True):
        """Put back what was saved, random numbers (those that will be drawn) too."""
        for place, values in saved:
            if with_numbers or not isinstance(place, _State):
                place.restore(values)

    @staticmethod
    def changes(saved):
        """Return what was done since: functions that do it again, and their argument."""
        new = ((place.apply, place.new(before)) for place, before in saved)
        return [(apply, values) for apply, values in new if values is not None]

    @contextlib.contextmanager
    def undone(self):
        """Put back what is changed inside; gives what was saved."""
        saved = self.save()
        try:
            self.copy_iterators(saved)
            yield saved
        finally:
            self.restore(saved)

    def copy_iterators(self, saved):
        """Put copies of iterators where they are: a run reads these, and the others come back."""
        if self._iterators:
            copies = {key: _copied(iterator) for key, (_, iterator) in self._iterators.items()}
            for place, values in saved:
                place.replace(values, copies)

    # Following.

    def _follow(self, thing, text):
        self._depth += 1
        try:
            self._follow_one(thing, type(thing), text)
        finally:
            self._depth -= 1

    def _follow_one(self, thing, kind, text):
        if issubclass(kind, (*_PLAIN, *_OPAQUE)):
            if issubclass(kind, chainer.Parameter) and thing.is_initialized:
                self._params.setdefault(id(thing), (text, thing.array))
            return
        if issubclass(kind, type):
            self._class(thing, is_called=True)
            return
        if id(thing) in self._seen:
            return
        if len(self._seen) > MAX_PLACES or self._depth > MAX_DEPTH:
            self.cut.append(text)
            return
        self._seen[id(thing)] = thing
        if issubclass(kind, _ARRAYS):
            self.arrays.setdefault(text, thing)
        elif issubclass(kind, chainer.Link):
            self._link(thing)
        elif issubclass(kind, functools.partial):
            for part in (thing.func, *thing.args):
                self._follow(part, text)
            self._follow(thing.keywords, text)
        elif issubclass(kind, types.FunctionType):
            self._function(thing)
        elif issubclass(kind, types.MethodType):
            self._follow(thing.__self__, text)
            self._follow(thing.__func__, text)
        elif issubclass(kind, (property, classmethod, staticmethod, functools.cached_property)):
            for name in ('fget', 'fset', '__func__', 'func'):
                self._follow(getattr(thing, name, None), text)
        elif issubclass(kind, functools.partialmethod):
            self._follow(thing.func, text)
        elif kind.__name__ == '_lru_cache_wrapper':
            self._follow(thing.__wrapped__, text)
        elif issubclass(kind, weakref.ref):
            self._follow(thing(), text)
        elif issubclass(kind, types.ModuleType):
            if is_of_user(thing.__name__):
                self._holders.append(_Holder(self, thing, '%%s of module %s' % thing.__name__))
        elif issubclass(kind, (dict, tuple, frozenset, types.MappingProxyType, *_LISTS)):
            self._container(thing, text)
            self._object(thing, kind)
        elif issubclass(kind, (numpy.random.RandomState, numpy.random.Generator, random.Random)):
            if thing not in (numpy.random.mtrand._rand, random._inst):
                self._states.append(_State(text, thing))
        elif issubclass(kind, _COPYABLE):
            self._iterators[id(thing)] = text, thing
        elif _cannot_be_put_back(thing, kind):
            self.cannot.append('%s (%s)' % (text, kind.__name__))
        else:
            self._object(thing, kind)

    def _link(self, link):
        for each in link.links():
            if id(each) not in self.links:
                self._seen[id(each)] = each
                self.links[id(each)] = each
                self._class(type(each))
                self._holders.append(_Holder(self, each, _attribute_of(each)))

    def _object(self, thing, kind):
        if is_of_user(kind.__module__) or issubclass(kind, _RECORDS):
            self._class(kind)
            if hasattr(thing, '__dict__'):
                self._holders.append(_Holder(self, thing, _attribute_of(thing)))
            names = [name for base in kind.__mro__ for name in _slots(base)]
            if names:
                self._holders.append(_Slots(self, thing, _attribute_of(thing), names))

    def _class(self, kind, is_called=False):
        for base in (*kind.__mro__, *type(kind).__mro__):
            if is_of_user(base.__module__):
                if is_called:
                    self._names |= _MADE
                if id(base) not in self._seen:
                    self._seen[id(base)] = base
                    text = '%%s of class %s' % base.__name__
                    self._holders.append(_Holder(self, base, text))

    def _function(self, function):
        if not is_of_user(function.__globals__.get('__name__')):
            return
        self.functions[id(function)] = function
        uses = _uses(function.__code__)
        self._names |= uses.attributes
        self._has_any_name |= bool(_ANY_NAME & (uses.attributes | uses.variables.keys()))
        for name in _UNKNOWN & uses.variables.keys():
            self.cut.append('what %s does with %s' % (function.__name__, name))
        around = function.__globals__
        names = [n for n, is_stored in uses.variables.items() if n in around or is_stored]
        if names:
            self._globals.setdefault(id(around), (around, {}))[1].update(dict.fromkeys(names))
        for name in names:
            text = '%s of module %s' % (name, around.get('__name__'))
            self._follow(around.get(name), text)
        for name in uses.modules:
            self._follow(_module(name), name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            text = 'the variable %s that %s reads' % (name, function.__name__)
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._places.append(_Cell(cell, text))
                self._follow(_contents(cell), text)
        text = 'a default of %s' % function.__name__
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(value, text)
        if vars(function):
            text = 'the attribute %%s of %s' % function.__name__
            self._holders.append(_Holder(self, function, text))
            self._follow(vars(function).get('__wrapped__'), text % '__wrapped__')

    def _container(self, thing, text):
        is_short = len(thing) <= MAX_ITEMS
        if isinstance(thing, dict):
            self._places.append(_Variables(thing, text, None, is_short, is_container=True))
            values = thing.values()
        else:
            if isinstance(thing, _LISTS):
                self._places.append(_Items(thing, text, is_short))
            values = thing.values() if isinstance(thing, types.MappingProxyType) else thing
        if not is_short:
            self.cut.append(text)
            return
        for value in values:
            if not isinstance(value, _PLAIN):
                self._follow(value, text)


class _Holder:
    """A link, object, class, module or function: its attributes are followed if code names them."""

    def __init__(self, reach, thing, text):
        self._reach, self.thing, self._text = reach, thing, text
        self._now = vars(thing)
        self.is_link = isinstance(thing, chainer.Link)
        kind = thing if isinstance(thing, type) else type(thing)
        # Code of a library may name any attribute that it knows.
        self._is_known_to_library = isinstance(thing, _WRAPPERS) or (
            (self.is_link or isinstance(thing, type)) and _has_library_base(kind)
        )
        self._followed = set()

    def follow(self):
        reach, now = self._reach, self._now
        names = set(now)
        if not self._is_known_to_library:
            names &= reach._names
            if reach._has_any_name and not isinstance(self.thing, types.ModuleType):
                names |= {name for name, value in now.items() if not callable(value)}
        if self.is_link:  # also what may be called: chainer_bspmm's own code names some
            names |= {name for name, value in now.items() if callable(value)}
            names -= _OF_A_LINK
            if not is_of_user(type(self.thing).__module__):
                names -= _OF_A_STEP
        if isinstance(self.thing, type):
            names -= _OF_A_CLASS
        for name in sorted(names - self._followed):
            self._followed.add(name)
            value = now[name]
            if not (self.is_link and isinstance(value, _ARRAYS)):  # these are known by path
                reach._follow(value, self._text % name)

    def places(self):
        if isinstance(self.thing, type):
            yield _Attributes(self.thing, self._text, sorted(self._followed))
        elif self.is_link:
            yield _Variables(self._now, self._text)
            for value in self._now.values():  # as of Chainer's own
                if type(value) in (dict, set, list) and not self._reach.follows(value):
                    if type(value) is dict:
                        yield _Variables(value, '', is_watched=False)
                    else:
                        yield _Items(value, '', is_watched=False)
        else:
            yield _Variables(self._now, self._text, sorted(self._followed), saves_all=True)


class _Slots:
    """An object's attributes that are not in a dict."""

    is_link = False

    def __init__(self, reach, thing, text, names):
        self._reach, self.thing, self._text, self._names = reach, thing, text, names
        self._followed = set()

    def follow(self):
        for name in self._names:
            if name not in self._followed:
                self._followed.add(name)
                self._reach._follow(getattr(self.thing, name, None), self._text % name)

    def places(self):
        yield _SlotsOf(self.thing, self._text, self._names)


# Places: where variables are.


class _Place:
    is_watched = True
    is_container = False
    part: Any = None  # what gets variables by name, and the names
    cell: Any = None
    sized: Any = None  # what is not watched one by one
    save: Callable
    restore: Callable
    apply: Callable = staticmethod(lambda new: None)  # what `new` has found

    def views(self):
        """Return iterables that give what is here at the time."""
        return ()

    def texts(self):
        """Return what these give, in words."""
        return ()


class _Variables(_Place):
    """Variables in a dict: all, or those of some names; attributes, or the entries of a dict."""

    def __init__(self, now, text, names=None, is_watched=True, is_container=False, saves_all=False):
        self._now, self.text, self._names = now, text, names
        self.is_watched, self.is_container = is_watched, is_container
        self._kind = type(now) if type(now).__module__ == 'collections' else dict
        self._saves_all = saves_all or names is None
        if names is not None:
            self.part = now.get, names
        if names is not None and saves_all or is_container and not is_watched:
            self.sized = now

    def views(self):
        if self._names is not None:
            return ()
        return (self._now.keys(), self._now.values()) if self.is_container else [self._now.values()]

    def texts(self):
        if self._names is not None:
            return []
        if self.is_container:
            values = ['%r in %s' % (name, self.text) for name in self._now]
            return [self.text] * len(values) + values
        return [self.text % name for name in self._now]

    def save(self):
        now = self._now
        if self._saves_all:
            return dict(now)
        return {name: now[name] for name in self._names if name in now}

    def restore(self, saved):
        current = self.save()
        is_in_order = not self.is_container or list(current) == list(saved)
        if is_in_order and _are_same(current, saved):
            return
        if not is_in_order:
            self._kind.clear(self._now)
            current = {}
        for name in current.keys() - saved.keys():
            self._now.pop(name, None)
        self.apply(saved)

    def new(self, before):
        """Return what was assigned since `before` was saved; None: nothing."""
        now = self.save().items()
        return {n: v for n, v in now if before.get(n, _nothing) is not v} or None

    def apply(self, new):
        self._kind.update(self._now, new)

    def replace(self, saved, copies):
        new = {name: copies[id(v)] for name, v in saved.items() if id(v) in copies}
        if new:
            self.apply(new)


class _Attributes(_Variables):
    """Attributes of a class."""

    def __init__(self, kind, text, names):
        super().__init__(vars(kind), text, names, saves_all=True)
        self._class = kind

    def restore(self, saved):
        for name in self._now.keys() - saved.keys():
            type.__delattr__(self._class, name)
        self.apply({n: v for n, v in saved.items() if self._now.get(n, _nothing) is not v})

    def apply(self, new):
        for name, value in new.items():
            type.__setattr__(self._class, name, value)


class _SlotsOf(_Variables):
    def __init__(self, thing, text, names):
        self._thing, self.text, self._names = thing, text, names
        self.part = functools.partial(_attribute, thing), names
        self.is_container, self._saves_all = False, True

    def save(self):
        found = {name: _attribute(self._thing, name) for name in self._names}
        return {name: value for name, value in found.items() if value is not _nothing}

    def restore(self, saved):
        for name in self.save().keys() - saved.keys():
            object.__delattr__(self._thing, name)
        self.apply(saved)

    def apply(self, new):
        for name, value in new.items():
            object.__setattr__(self._thing, name, value)


class _Items(_Place):
    """What is in a list, a set or a deque."""

    def __init__(self, items, text, is_watched=True):
        self._now, self.text, self.is_watched = items, text, is_watched
        self.is_container = bool(text)
        if text and not is_watched:
            self.sized = items

    def views(self):
        return (self._now,)

    def texts(self):
        return [self.text] * len(self._now)

    def save(self):
        return list(self._now)

    def restore(self, saved):
        now = self._now
        if len(now) != len(saved) or not all(map(operator.is_, now, saved)):
            now.clear()
            (now.update if isinstance(now, set) else now.extend)(saved)

    def new(self, before):
        now = self.save()
        return None if len(now) == len(before) and all(map(operator.is_, now, before)) else now

    def apply(self, new):
        self.restore(new)

    def replace(self, saved, copies):
        self.restore([copies.get(id(value), value) for value in saved])


class _Cell(_Place):
    """A variable that functions within others share."""

    def __init__(self, cell, text):
        self.cell, self.text = cell, text

    def save(self):
        return _contents(self.cell, _nothing)

    def restore(self, saved):
        if saved is _nothing:
            if self.save() is not _nothing:
                del self.cell.cell_contents
        elif self.save() is not saved:
            self.cell.cell_contents = saved

    def new(self, before):
        now = self.save()
        return None if now is before else [now]

    def apply(self, new):
        self.restore(new[0])

    def replace(self, saved, copies):
        if id(saved) in copies:
            self.cell.cell_contents = copies[id(saved)]


class _State(_Place):
    """What a generator of random numbers is at."""

    is_watched = False  # the order of batches is drawn from NumPy's

    def __init__(self, text, generator):
        self.text = text
        if isinstance(generator, random.Random):
            self.save, self.restore = generator.getstate, generator.setstate
        elif isinstance(generator, numpy.random.RandomState):
            self.save = functools.partial(generator.get_state, legacy=False)
            self.restore = generator.set_state
        else:
            bits = generator.bit_generator
            self.save = lambda: bits.state
            self.restore = lambda state: setattr(bits, 'state', state)

    def token(self):
        return pickle.dumps(self.save())

    def new(self, before):
        return None

    def replace(self, saved, copies):
        pass


def _contents(cell, default=None):
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return default


def _attribute(thing, name):
    return getattr(thing, name, _nothing)


def _are_same(one, other):
    return len(one) == len(other) and all(
        name in other and value is other[name] for name, value in one.items()
    )


def _attribute_of(owner):
    name = vars(owner).get('name') if hasattr(owner, '__dict__') else None
    name = name if isinstance(name, str) else type(owner).__name__
    return 'the attribute %%s of %s' % name.replace('%', '%%')


def _slots(kind):
    if not is_of_user(kind.__module__):
        return ()
    names = vars(kind).get('__slots__', ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return [name for name in names if not name.startswith('__')]


def _has_library_base(kind):
    """Return whether code of a library may call any method of a class, and read any attribute."""
    return any(
        not is_of_user(base.__module__) and base.__module__ not in _QUIET for base in kind.__mro__
    )


def is_of_user(module):
    """Return whether code of a module (its name or None) is followed."""
    return is_user_code(module) and (module or '').partition('.')[0] not in _FOREIGN


def _copied(iterator):
    if isinstance(iterator, itertools.count):
        # Copies by the copy module end with Python 3.14.
        numbers = repr(iterator)[len('count(') : -1].split(', ')
        return itertools.count(*(int(n) if n.lstrip('-').isdigit() else float(n) for n in numbers))
    make, arguments, *state = iterator.__reduce__()
    copy = make(*arguments)
    for position in state:
        copy.__setstate__(position)
    return copy


def _position(iterator):
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    return operator.length_hint(iterator)


def _cannot_be_put_back(thing, kind):
    """Return whether a run may take something from an object, for good."""
    if issubclass(kind, io.IOBase):
        return not thing.closed and thing.readable()
    if issubclass(kind, weakref.ProxyTypes):
        return False
    if kind.__module__ in _DRAINED:
        return True
    root = (kind.__module__ or '').partition('.')[0]
    return hasattr(kind, '__next__') and root in sys.stdlib_module_names


def _module(name):
    return sys.modules.get(name) if is_of_user(name) else None


_Uses = collections.namedtuple('_Uses', 'variables attributes modules')


@functools.lru_cache(maxsize=4096)
def _uses(code):
    """Return what code names: variables -> whether it stores them, attributes, modules."""
    variables, attributes, modules = {}, set(), set()
    for each in dis.get_instructions(code):
        if each.opname in _GETTERS:
            is_stored = not each.opname.startswith('LOAD')
            variables[each.argval] = variables.get(each.argval, False) or is_stored
        elif each.opname in _ATTRIBUTES or each.opname == 'IMPORT_FROM':
            attributes.add(each.argval)
        elif each.opname == 'IMPORT_NAME':
            modules.add(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _uses(constant)
            for name, is_stored in inner.variables.items():
                variables[name] = variables.get(name, False) or is_stored
            attributes |= inner.attributes
            modules |= inner.modules
    return _Uses(variables, frozenset(attributes), frozenset(modules))
