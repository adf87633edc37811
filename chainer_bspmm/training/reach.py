"""`Reach`: the Python state that a function can read or change, found by following its code.

Captured steps watch this state, and it is put back after an extra run of the function.
"""

import ast
import builtins
import collections
import contextvars
import functools
import gc
import importlib.util
import io
import itertools
import logging
import operator
import os
import random
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy

import chainer
from chainer.iterators import SerialIterator

from chainer_bspmm.training import kinds, places
from chainer_bspmm.training.calls import called
from chainer_bspmm.training.code_names import code_names
from chainer_bspmm.training.snapshot import can_be_kept
from chainer_bspmm.compat.user_code import LIBRARIES

MAX_ITEMS = 256  # most items of a container that is followed
MAX_PLAIN = 10000  # the same if they are plain values; longer containers are only put back
MAX_THINGS = 4000  # most objects that are followed


class Saved(NamedTuple):
    """Saved values of places and positions of generators of random numbers."""

    places: list[tuple[Any, Any]]
    generators: list[tuple[places.GeneratorState, Any]]


class Reach:
    """Links, functions and values that can be reached from functions, links and objects.

    Links belong to it with all attributes. A user's other objects, classes and modules belong to it
    with the attributes that the reached code names, and with the items of containers; functions
    with the globals that they name, closures, defaults and attributes. Names of a library's classes
    and modules are watched, but lead only to a user's objects, and to other modules and classes.

    - `links`, `functions`: dicts by id; functions are a user's.
    - `arrays`: words -> array, for arrays that are not attributes of links, and for parameters that
      do not belong to a link.
    - `cannot`: clauses that complete "a check would ...", about effects that cannot be undone.
    - `cut`: words for state that is not watched: long containers, modules not yet imported.
    - `reads_training`: whether watched values change from step to step although only Chainer's code
      runs between steps.
    """

    def __init__(self, *things: Any):
        self.links: dict[int, chainer.Link] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.arrays: dict[str, Any] = {}
        self.cannot: list[str] = []
        self.cut: list[str] = []
        self.reads_training = False
        self._found: collections.deque = collections.deque()  # objects that are yet to be followed
        self._seen: dict[int, Any] = {}  # objects by id, held so that no other gets the same id
        self._names: set[str] = set()  # names of attributes in the code that was reached
        self._written: set[str] = set()  # the names among these that the code assigns or deletes
        # Beginnings of names, in code that makes names of attributes at run time.
        self._prefixes: set[str] = set()
        self._of_libraries: dict[int, _OfLibrary] = {}  # by the id of a module or a class
        # Whether a library's code made what is found now, so that it is none of the user's.
        self._is_of_library = False
        self._objects: list[Any] = []  # objects whose attributes are followed, other than links
        self._uses_any_attribute = False
        self._modules_by_text: set[str] = set()  # modules of which code may use any variable
        self._link_kinds: dict[type, Callable] = {}
        self._link_owners: list[_OfLink] = []
        self._owners: list[_Owner] = []  # owners other than links, globals and training objects
        self._of_training: list[_OfTraining] = []
        self._trainers: list[chainer.training.Trainer] = []  # whose extensions are not followed
        self._classes: dict[int, _OfClass] = {}
        self._globals: dict[int, _Globals] = {}  # by the id of a module's `__dict__`
        self._params: dict[int, tuple[str, chainer.Parameter]] = {}
        self._hyperparameters: dict[int, chainer.optimizer.Hyperparameter] = {}
        # `__dict__` of update rules and hyperparameters, with words for an attribute.
        self._numbers_of_updates: list[tuple[dict, Callable]] = []
        self._iterators: dict[int, tuple[str, Iterator]] = {}
        self._caches: dict[int, Callable] = {}
        self._containers: list[tuple[str, Collection]] = []
        self._places: list[Any] = []  # watched places of containers, slots and closures
        self._only_saved: list[Any] = []
        # Words for a variable, and its `__dict__`: a reference to the variable itself would count
        # as one by which somebody keeps it.
        self._variables_found: list[tuple[str, dict]] = []
        self._arrays_of_params: list[places.Items] = []
        self._own_generators: list[str] = []  # words
        self._things = things
        self._generators = [
            places.GeneratorState(numpy.random.mtrand._rand, 'the state of numpy.random'),
            places.GeneratorState(random._inst, 'the state of random'),
        ]
        for thing in things:
            self._find(thing, 'the loss')
        for configuration in _configurations():
            for name, value in configuration.items():
                self._find(value, 'the attribute %s of chainer.config' % name)
        self._follow_all()
        for thing in things:  # last, because what is found earlier gets better words
            if isinstance(thing, chainer.Link):
                for each in called(thing):
                    self._find(each, 'an object of class %s' % type(each).__name__)
        self._follow_all()
        self._make_places()

    def follows(self, thing: Any) -> bool:
        """Return whether an object was found, so that its items and attributes are followed."""
        return id(thing) in self._seen

    def references(self, value: Any) -> int:
        """Return the number of references from here to a variable or an array."""
        return (id(value) in self._seen) + sum(value is array for array in self.arrays.values())

    def values(self) -> list:
        """Return the values that :meth:`add_values` adds."""
        values: list = []
        self.add_values(values)
        return values

    def add_values(self, values: list) -> None:
        """Add the present watched values to a list, in the order of `texts`."""
        values += itertools.chain.from_iterable(self._of_links)
        for look in self._looks:
            values += look()

    def sizes(self) -> list[int]:
        """Return the sizes of objects and containers of which `values` may leave out items."""
        return list(map(len, self._sized))

    def texts(self) -> list[str]:
        """Return words for each watched value."""
        return [text for place in self._watched for text in place.texts()]

    def lengths(self) -> list[tuple[str, int]]:
        """Return (words, length) for all containers."""
        return [(text, len(container)) for text, container in self._containers]

    def anew(self) -> 'Reach':
        """Return the `Reach` of the same things at this moment."""
        return Reach(*self._things)

    def unwatched(self) -> list[tuple[str, Any]]:
        """Return (words, value) for all values that are put back but are not among `values`.

        The array of a parameter is inside of a tuple, because it must be the same object.
        """
        found = []
        for place in self._only_saved:
            saved = place.save()
            if isinstance(saved, dict):
                found += [(place.text(name), value) for name, value in saved.items()]
            else:
                found += zip(place.texts(), saved)
        for place in self._arrays_of_params:
            found += [(text, (value,)) for text, value in zip(place.texts(), place.save())]
        # Gradients are put back with the other attributes of variables.
        for text, attributes in self._variables_found:
            found.append(('the gradient of ' + text, attributes['_grad']))
        return found

    def states(self) -> dict[str, Any]:
        """Return words -> position, for generators of random numbers and iterators."""
        found: dict[str, Any] = {state.text: state.save() for state in self._generators}
        for text, iterator in self._iterators.values():
            found[text] = _position(iterator)
        for owner in self._of_training:
            if isinstance(owner.thing, SerialIterator):
                state = vars(owner.thing).get('_state', ())
                found[owner.text('position')] = state[:-1]  # the last item is the order, an array
        return found

    def save(self) -> Saved:
        """Save the values of all places and the positions of generators, for :meth:`restore`."""
        unfollowed = [place for owner in self._link_owners for place in owner.unfollowed(self)]
        return Saved(
            [
                (place, place.save())
                for place in (
                    *self._watched,
                    *self._only_saved,
                    *self._arrays_of_params,
                    *unfollowed,
                )
            ],
            [(state, state.save()) for state in self._generators],
        )

    @staticmethod
    def restore(saved: Saved, with_numbers: bool = True) -> None:
        """Put back saved values; `with_numbers`: also positions of generators of random numbers."""
        for place, values in saved.places:
            place.restore(values)
        if with_numbers:
            for state, position in saved.generators:
                state.restore(position)

    @staticmethod
    def changes(saved: Saved, copied: Collection[tuple] = ()) -> list[tuple[Any, Any]]:
        """Return the changes since `saved`: (place, what its method `apply` repeats).

        `copied`: the result of :meth:`copy_iterators`. These iterators are put back first, so that
        a copy in the place of one does not count as a change.
        """
        originals = {id(copy): iterator for copy, iterator in copied}
        if originals:
            for place, _ in saved.places:
                place.restore(_replaced(place.save(), originals))
        found = [(place, place.changes(values)) for place, values in saved.places]
        return [(place, changes) for place, changes in found if changes is not None]

    def copy_iterators(self, saved: Saved, with_caches: bool = True) -> list[tuple]:
        """Replace iterators by copies from which a run reads; :meth:`restore` undoes that.

        `with_caches`: also replace functions with a cache of functools by ones with an empty cache.
        Returns [(copy, original)].
        """
        copied = [(_copied(iterator), iterator) for _, iterator in self._iterators.values()]
        if with_caches:
            copied += [(_emptied(cached), cached) for cached in self._caches.values()]
        if copied:
            copies = {id(iterator): copy for copy, iterator in copied}
            for place, values in saved.places:
                place.restore(_replaced(values, copies))
        return copied

    # Following code and objects.

    def _find(self, thing, text, is_held=True):
        """Note an object to be followed. `is_held`: a copy can be put in its place."""
        if type(thing) not in kinds.PLAIN_TYPES:
            self._found.append((thing, text, is_held, self._is_of_library))

    def _follow_all(self):
        """Follow until nothing new is found: attributes that code names lead to more code."""
        environment = vars(os.environ)['_data']
        while self._found:
            while self._found:
                thing, text, is_held, is_of_library = self._found.popleft()
                self._is_of_library = is_of_library
                try:
                    self._follow(thing, text, is_held)
                except Exception:  # a user's object may raise anything when it is read
                    self.cannot.append('leave changes in ' + text)
            self._is_of_library = False
            if self._prefixes:
                self._add_names_by_prefix()
            if '__subclasses__' in self._names:
                for of_class in self._classes.values():
                    for subclass in of_class.open_subclasses():
                        self._find(subclass, 'a subclass')
            if {'type', '__class__'} & self._names:  # code may reach the classes of its objects
                for kind in {*self._link_kinds, *map(type, self._objects)}:
                    if not kinds.is_of_user(kind.__module__):
                        self._library_class(kind)
            owners = *self._link_owners, *self._globals.values(), *self._owners
            for owner in (*owners, *self._of_libraries.values(), *self._of_training):
                self._is_of_library = owner.is_of_library
                for name in owner.open(self._names, self._uses_any_attribute):
                    self._find(owner.value(name), owner.text(name))
            self._is_of_library = False
            if {'get_extension', '_extensions'} & self._names:
                for trainer in self._trainers:
                    for entry in trainer._extensions.values():
                        self._find(entry.extension, 'an extension of the trainer')
                self._trainers.clear()
            if kinds.ENVIRONMENT & self._names and not self.follows(environment):
                self._find(environment, 'os.environ')

    def _add_names_by_prefix(self):
        """Add the names of attributes that begin as names in code do, such as 'loss_' + phase."""
        prefixes = tuple(self._prefixes)
        owners = [*self._link_owners, *self._classes.values()]
        owners += [owner for owner in self._owners if not owner.is_of_library]
        for owner in owners:
            self._names |= {
                name
                for name in owner.variables
                if isinstance(name, str) and name.startswith(prefixes)
            }

    def _follow(self, thing, text, is_held):
        kind = type(thing)
        if issubclass(kind, type):
            self._class(thing, is_called=True)
            if not kinds.is_of_user(thing.__module__):
                self._library_class(thing)
        elif issubclass(kind, chainer.Parameter):
            self._params.setdefault(id(thing), (text, thing))
        elif kind in kinds.COPYABLE:
            if is_held and _copied(thing) is not None:
                self._iterators.setdefault(id(thing), (text, thing))
            else:
                self._note_drained(text)
        elif issubclass(kind, kinds.ALIASES):
            self._find(thing.__origin__, text)
        elif id(thing) in self._seen or _is_ignored(thing, kind):
            return
        elif len(self._seen) >= MAX_THINGS:
            text += ', which is reached only after %d other objects' % MAX_THINGS
            self.cannot.append('leave changes in ' + text)
        else:
            self._seen[id(thing)] = thing
            if kind is kinds.CACHED and kinds.is_of_user(thing.__wrapped__.__module__):
                self._cached(thing, text, is_held)
            self._follow_new(thing, kind, text)

    def _cached(self, function, text, is_held):
        """Follow the results in the cache of a function of functools."""
        if is_held:
            self._caches[id(function)] = function
        else:
            self.cannot.append('leave results in the cache of ' + text)
        self._places.append(places.cache(function, 'the cache of ' + text))
        words = 'a result in the cache of ' + text
        for result in places.results_in_cache(function)[: 2 * MAX_ITEMS]:
            self._find(result, words, is_held=False)

    def _follow_new(self, thing, kind, text):
        if issubclass(kind, kinds.ARRAYS):
            self._array(thing, text)
        elif issubclass(kind, chainer.Link):
            for link in thing.links():
                self._link(link)
        elif issubclass(kind, types.FunctionType):
            self._function(thing)
        elif issubclass(kind, kinds.WEAK) and not self._is_of_library:
            # What is watched is also kept alive.
            words = 'keep alive what %s refers to weakly (%s)'
            self.cannot.append(words % (text, kind.__name__))
        elif issubclass(kind, kinds.OF_TRAINING):
            self._training_object(thing, kind)
        elif _is_drained(thing, kind):
            self._note_drained('%s (%s)' % (text, kind.__name__))
        elif issubclass(kind, numpy.void):  # a view of an array, although it is called a scalar
            self._note_changed(text, kind)
        elif self._follow_parts(thing, kind, text):
            self._attributes(thing, kind, text)
        else:
            self._object(thing, kind, text)

    def _follow_parts(self, thing, kind, text):
        """Follow the parts of an object other than attributes; return whether it has any."""
        if issubclass(kind, chainer.Variable):
            self._variable(thing, text)
        elif hasattr(kind, '__self__'):  # a method, in Python or C
            self._find(thing.__self__, text, is_held=False)
            self._find(getattr(thing, '__func__', None), text)
        elif issubclass(kind, functools.partial):
            for part in (thing.func, *thing.args):
                self._find(part, text, is_held=False)
            self._find(thing.keywords, text)
        elif issubclass(kind, kinds.WITH_FUNCTIONS):
            for name in kinds.FUNCTIONS:
                self._find(getattr(thing, name, None), text)
        elif issubclass(kind, weakref.ref):
            self._find(thing(), text, is_held=False)
        elif issubclass(kind, types.ModuleType):
            self._module(thing)
        elif issubclass(kind, (types.MappingProxyType, *kinds.VIEWS)):
            (shown,) = gc.get_referents(thing)
            self._find(shown, text)
        elif issubclass(kind, (operator.attrgetter, operator.methodcaller)):
            maker, arguments, *_ = thing.__reduce__()
            self._find(maker, text, is_held=False)  # a partial, if there are keywords
            for argument in arguments:
                self._find(argument, text, is_held=False)
                if isinstance(argument, str):
                    self._names |= set(argument.split('.'))
        elif issubclass(kind, (dict, *kinds.FROZEN, *kinds.LISTS)):
            self._container(thing, kind, text)
        elif issubclass(kind, kinds.BUFFERS):
            self._keep(places.buffer(thing, text), text, len(thing) <= MAX_PLAIN)
        elif issubclass(kind, contextvars.ContextVar):
            self._context_variable(thing)
        elif issubclass(kind, kinds.GENERATORS):
            if thing is not numpy.random.mtrand._rand and thing is not random._inst:
                self._generators.append(places.GeneratorState(thing, text))
                self._own_generators.append(text)
        else:
            return False
        return True

    def _attributes(self, thing, kind, text):
        """Follow attributes of an object of another kind: of a user's subclass, or set on it."""
        is_module = issubclass(kind, types.ModuleType)
        if is_module and not kinds.is_of_user(thing.__name__):
            return
        if kinds.is_of_user(kind.__module__):
            self._object(thing, kind, text)
        elif not is_module:
            variables = _variables_of(thing)
            if variables:
                owner = _Owner(variables, _attribute_of(thing))
                owner.never = kinds.OF_EVERY_PARAMETER | kinds.OF_EVERY_CACHE
                self._owners.append(owner)

    def _note_drained(self, text):
        self.cannot.append('consume part of %s' % text)

    def _note_changed(self, text, kind):
        self.cannot.append('leave changes in %s (%s)' % (text, kind.__name__))

    def _array(self, array, text):
        if not can_be_kept(array):
            self._note_changed(text, type(array))
            return
        # All arrays in a list have the same words, so a number tells them apart.
        key = '%s (%d)' % (text, len(self.arrays)) if text in self.arrays else text
        self.arrays[key] = array

    def _link(self, link):
        if id(link) not in self.links:
            self._seen[id(link)] = self.links[id(link)] = link
            kind = type(link)
            if kind not in self._link_kinds:
                self._class(kind)
                never = kinds.OF_EVERY_LINK | _outputs(kind)
                self._link_kinds[kind] = functools.partial(
                    _OfLink, never=never, is_open=_has_library_base(kind)
                )
            owner = self._link_kinds[kind](link)
            self._link_owners.append(owner)
            if isinstance(link, chainer.ChainList):  # children can be replaced
                self._seen[id(link._children)] = link._children
                self._places.append(places.Items(link._children, owner.text('_children')))
            for name, value in vars(link).items():
                if isinstance(value, kinds.ARRAYS) and not can_be_kept(value):
                    self._note_changed(owner.text(name), type(value))
                elif isinstance(value, chainer.Parameter):
                    self._parameter(value, owner.text(name))

    def _parameter(self, param, text):
        """Note what no extra run may change: the array, and numbers of the update rule."""
        if param.is_initialized:
            self._arrays_of_params.append(places.Items(param._data, text))
        if vars(param).keys() - kinds.OF_EVERY_PARAMETER:
            owner = _Owner(vars(param), _words('the attribute ', ' of ' + text))
            owner.never = kinds.OF_EVERY_PARAMETER
            self._owners.append(owner)
        if kinds.is_of_user(type(param).__module__):
            self._class(type(param))
        rule = param.update_rule
        if rule is not None:
            words = _words('', ' of the update rule of ' + text)
            self._only_saved.append(places.attributes_except(vars(rule), words, kinds.UPDATED))
            self._numbers_of_updates.append((vars(rule), words))
            self._hyperparameter(rule.hyperparam, words)

    def _hyperparameter(self, hyperparam, words):
        if hyperparam is not None and id(hyperparam) not in self._hyperparameters:
            self._hyperparameters[id(hyperparam)] = hyperparam
            self._only_saved.append(places.all_attributes(vars(hyperparam), words))
            self._numbers_of_updates.append((vars(hyperparam), words))
            optimizers = _words('', ' of the optimizer')
            self._hyperparameter(vars(hyperparam).get('_parent'), optimizers)

    def _variable(self, variable, text):
        if variable.array is not None and not variable.xp.__name__ == 'chainerx':
            self._array(variable.array, text)
            self._places.append(places.Items(variable._data, text))
            self._variables_found.append((text, vars(variable)))

    def _object(self, thing, kind, text):
        is_of_library = not (kinds.is_of_user(kind.__module__) or issubclass(kind, kinds.RECORDS))
        if is_of_library and not _is_only_python(kind):
            self._note_changed(text, kind)
            return
        if is_of_library or kinds.is_of_user(kind.__module__):
            self._is_of_library = is_of_library
        self._class(kind)
        self._objects.append(thing)
        text, now = _attribute_of(thing), _variables_of(thing)
        if now is not None:
            self._seen[id(now)] = now  # so that another dict in its place is noticed
            owner = _Owner(now, text)
            owner.is_of_library = self._is_of_library
            owner.is_open = (
                is_of_library
                or issubclass(kind, kinds.OPEN)
                or _has_library_base(kind, kinds.STATELESS)
            )
            owner.never = _unread(kind, now)
            self._owners.append(owner)
            if issubclass(kind, logging.Logger):
                self._find(thing.manager, 'the manager of loggers')  # for `logging.disable`
        members = {
            name: member
            for base in kind.__mro__
            if is_of_library or kinds.is_of_user(base.__module__)
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        if members:
            self._variables(places.slots(thing, text, members))

    def _class(self, kind, is_called=False):
        is_of_user = kinds.is_of_user(kind.__module__)
        for base in (*kind.__mro__, *type(kind).__mro__):
            if kinds.is_of_user(base.__module__):
                if id(base) not in self._classes:
                    self._seen[id(base)] = base
                    self._classes[id(base)] = _OfClass(base)
                    self._owners.append(self._classes[id(base)])
                if is_called:
                    self._classes[id(base)].never -= kinds.MAKERS
            elif is_of_user:
                self._library_class(base)
        if id(kind) in self._classes:
            self._classes[id(kind)].is_only_base = False

    def _library_class(self, kind):
        for base in kind.__mro__:
            is_assignable = bool(base.__flags__ & 1 << 9)
            if is_assignable and not kinds.is_of_user(base.__module__):
                words = _words('', ' of class %s' % base.__name__)
                self._of_libraries.setdefault(id(base), _OfLibrary(base, words))

    def _module(self, module):
        if kinds.is_of_user(module.__name__):
            text = _words('', ' of module %s' % module.__name__)
            self._owners.append(_OfModule(vars(module), text, self._modules_by_text))
        else:
            words = _words('', ' of module %s' % module.__name__)
            self._of_libraries.setdefault(id(module), _OfLibrary(module, words))
            if module is logging:
                self._find(logging.root, 'the root logger')

    def _training_object(self, thing, kind):
        if kinds.is_of_user(kind.__module__):
            self._object(thing, kind, '')
        if isinstance(thing, chainer.Optimizer):
            self._hyperparameter(
                getattr(thing, 'hyperparam', None), _words('', ' of the optimizer')
            )
            hookable = thing._hookable
            for hooks in (hookable._pre_update_hooks, hookable._post_update_hooks):
                self._find(hooks, 'a hook of the optimizer')
        owner = _OfTraining(thing)
        self._of_training.append(owner)
        for name in ('_iterators', '_optimizers'):  # an updater has dicts of them
            for each in vars(thing).get(name, {}).values():
                self._find(each, owner.text(name))
        if isinstance(thing, chainer.training.Trainer):
            self._trainers.append(thing)
        if isinstance(thing, SerialIterator):
            self._only_saved.append(places.all_attributes(vars(thing), owner.text))

    def _context_variable(self, variable):
        text = 'the context variable ' + variable.name
        place = places.context_variable(variable, text)
        if not place.save():
            self.cannot.append('leave a value in %s, which has no value now' % text)
        self._variables(place)

    def _function(self, function):
        self._is_of_library = not kinds.is_of_user(function.__globals__.get('__name__'))
        self._find(vars(function).get('__wrapped__'), function.__name__)
        if self._is_of_library:
            for implementation in vars(function).get('registry', {}).values():  # singledispatch
                self._find(implementation, function.__name__)
            if vars(function):
                self._owners.append(_Owner(vars(function), _attribute_of_function(function)))
            self._closure(function)
            return
        self.functions[id(function)] = function
        self._owners.append(_Owner(vars(function), _attribute_of_function(function)))
        names = code_names(function.__code__)
        self._names |= names.attributes.keys()
        self._written |= {name for name, is_written in names.attributes.items() if is_written}
        used = names.globals.keys() | names.attributes.keys()
        self._prefixes |= names.prefixes
        self._uses_any_attribute |= names.uses_any_attribute or not kinds.READERS.isdisjoint(used)
        self._names |= {'next', 'type'} & names.globals.keys()
        for name in sorted(names.unknown):
            text = 'leave changes that %s may make through %s'
            self.cannot.append(text % (function.__name__, name))
        for name in sorted(names.modules):
            modules = _imported(name, function)
            for module in modules:
                self._find(module, name)
            if not modules and kinds.is_of_user(name):
                self.cut.append('the module %s that %s imports' % (name, function.__name__))
        around = function.__globals__
        for name in names.by_text:
            if isinstance(around.get(name), types.ModuleType):
                self._modules_by_text.add(around[name].__name__)
        self._globals.setdefault(id(around), _Globals(around)).add(names.globals)
        added = vars(builtins).keys() - kinds.BUILTINS - around.keys()
        if not added.isdisjoint(names.globals):  # a user's code has made them builtins
            of_all = self._globals.setdefault(id(vars(builtins)), _Globals(vars(builtins)))
            of_all.add(dict.fromkeys(added & names.globals.keys(), True))
        self._closure(function)

    def _closure(self, function):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if id(cell) not in self._seen and name != '__class__':
                self._seen[id(cell)] = cell
                text = 'the variable %s that %s reads' % (name, function.__name__)
                self._variables(places.cell(cell, text))
        text = 'a default of %s' % function.__name__
        for value in function.__defaults__ or ():
            self._find(value, text, is_held=False)
        self._find(function.__kwdefaults__, text)

    def _container(self, thing, kind, text):
        is_dict = issubclass(kind, dict)
        values = dict.values(thing) if is_dict else thing
        is_short = len(thing) <= MAX_ITEMS
        is_watched = is_short or (
            len(thing) <= MAX_PLAIN
            and all(issubclass(of, kinds.PLAIN) for of in set(map(type, values)))
        )
        if not issubclass(kind, kinds.FROZEN):
            place = (places.entries if is_dict else places.Items)(thing, text)
            self._keep(place, text, is_watched)
            self._containers.append((text, thing))
        elif not is_watched:
            self.cut.append(text)
        for value in values if is_short else ():
            self._find(value, text, is_held=not issubclass(kind, kinds.FROZEN))
        for key in dict.keys(thing) if is_dict and is_short else ():
            self._find(key, text, is_held=False)
        if not is_short and not all(issubclass(of, kinds.PLAIN) for of in set(map(type, values))):
            words = 'leave changes inside of %s, which has more than %d items'
            self.cannot.append(words % (text, MAX_ITEMS))
        if issubclass(kind, collections.defaultdict):
            self._find(thing.default_factory, text)

    def _keep(self, place, text, is_watched):
        (self._places if is_watched else self._only_saved).append(place)
        if not is_watched:
            self.cut.append(text)

    def _variables(self, place):
        self._places.append(place)
        for text, value in zip(place.texts(), place.look(), strict=True):
            self._find(value, text)

    # Places, once everything is found.

    def _make_places(self):
        if self._params:
            params = {id(param) for link in self.links.values() for param in link.params()}
            for key, (text, param) in self._params.items():
                if key not in params and param.is_initialized:
                    self._array(param.array, text)
        of_libraries = []
        if self._names:  # a step without code of a user's has nothing to look at there
            of_libraries = list(self._of_libraries.values())
        for of_library in of_libraries:
            if of_library.names(self._written):
                self._places.append(of_library.place_of(self._written))
        self._places.append(places.classes_of_objects(self._objects, self.links.values()))
        if self._classes:
            classes = self._classes.values()
            self._places.append(places.bases([of_class.kind for of_class in classes]))
            if '__subclasses__' in self._names:
                used = [of_class.kind for of_class in classes if not of_class.is_only_base]
                self._places.append(places.subclasses(used))
        for owner in self._of_training:
            if owner.gives_examples and isinstance(owner.thing, kinds.PREFETCHING):
                self._note_drained(owner.text('dataset'))
            if owner.opened & kinds.STEPS and isinstance(owner.thing, kinds.OF_STEPS):
                text = 'leave changes that a step of the %s makes'
                self.cannot.append(text % type(owner.thing).__name__)
            owner.kept = self._names - kinds.COUNTED
        if 'spawn' in self._names:
            self.cannot += ['leave children of ' + text for text in self._own_generators]
        self.reads_training = any(owner.opened for owner in self._of_training)
        if 'update_rule' in self._names:
            self.reads_training = True
            for variables, words in self._numbers_of_updates:
                names = sorted(self._names & variables.keys())
                self._places.append(places.only_watched(variables, words, names))
        owners = *self._globals.values(), *self._owners, *self._of_training
        watched = [owner.place() for owner in owners] + self._places
        if self.functions:
            watched.append(places.parts_of_functions(self.functions.values()))
        for configuration in _configurations():
            self._only_saved.append(places.all_attributes(configuration, str))
        self._watched = [owner.place() for owner in self._link_owners] + watched
        # A look at a link costs no call: these views show its present attributes.
        self._of_links = [owner.variables.values() for owner in self._link_owners]
        self._looks = [place.look for place in watched]
        self._sized = [owner.variables for owner in (*self._owners, *of_libraries)]
        self._sized += [container for _, container in self._containers]


class _Owner:
    """Variables of an object, a function or a module, which are followed once code names them.

    With `is_open` all are followed. Those in `always` are followed at once, those in `never` not at
    all. Code that may use any attribute opens every variable that is not callable.
    """

    is_open = False
    is_of_library = False  # whether it belongs to an object that is not the user's
    always: Collection[str] = frozenset()
    never: Collection[str] = frozenset()

    def __init__(self, variables, text):
        self.variables, self.text = variables, text
        self.opened: set[str] = set()

    def open(self, names, uses_any_attribute):
        """Return the names of the variables that are to be followed from now on."""
        now = self.variables
        chosen = set(now) if self.is_open else now.keys() & names
        if uses_any_attribute:
            chosen |= {name for name, value in now.items() if not callable(value)}
        chosen = (chosen | self.always) - self.never - self.opened
        self.opened |= chosen
        return sorted(chosen)

    def value(self, name):
        """Return the value of a variable that is to be followed."""
        return self.variables[name]

    def place(self):
        return places.attributes(self.variables, self.text, sorted(self.opened))


class _Globals(_Owner):
    """Global variables of a module that its functions name."""

    def __init__(self, around):
        super().__init__(around, _words('', ' of module %s' % around.get('__name__')))
        self._found: set[str] = set()

    def add(self, names):
        """Note the names in code (name -> whether it is assigned), except names of builtins.

        A variable that does not exist yet may be made later.
        """
        self._found |= {
            name
            for name in names
            if names[name] or name in self.variables or not hasattr(builtins, name)
        }

    def open(self, names, uses_any_attribute):
        chosen = self._found - self.opened
        self.opened |= chosen
        return sorted(chosen & self.variables.keys())

    def place(self):
        return places.module_variables(self.variables, self.text, sorted(self.opened))


class _OfModule(_Owner):
    """Variables of a module that code names, or all data if the module's name is in `by_text`."""

    def __init__(self, variables, text, by_text):
        super().__init__(variables, text)
        self._by_text = by_text

    def open(self, names, uses_any_attribute):
        return super().open(names, self.variables.get('__name__') in self._by_text)


class _OfClass(_Owner):
    def __init__(self, kind):
        super().__init__(vars(kind), _words('', ' of class %s' % kind.__name__))
        self.kind = kind
        self.is_only_base = True  # whether only subclasses of it were found, not the class itself
        self._has_opened_subclasses = False
        # Methods of an updater or an iterator are called by a Trainer, not by a loss.
        self.is_open = _has_library_base(kind) and not issubclass(kind, kinds.OF_TRAINING)
        # These are called without being named: special methods by Python, others by Chainer.
        called = {name for name, value in self.variables.items() if callable(value)}
        self.always = {n for n in called if n[:2] == '__' or n in kinds.CALLED} - kinds.UNCALLED
        self.never = kinds.OF_EVERY_CLASS | kinds.MAKERS
        # In these attributes Pydantic keeps objects written in Rust, which no run changes.
        self.never |= {name for name in self.variables if name.startswith('__pydantic')}

    def open_subclasses(self):
        """Return the subclasses that are to be followed from now on; none in later calls.

        Code can ask for subclasses only of a class that it names, or of which it has an object.
        """
        if self.is_only_base or self._has_opened_subclasses:
            return []
        self._has_opened_subclasses = True
        return type.__subclasses__(self.kind)

    def place(self):
        return places.class_attributes(self.kind, self.text, sorted(self.opened))


class _OfLibrary(_Owner):
    """Variables of a module or a class of a library. Variables that code names are watched.

    If their values are modules, classes, or a user's functions or objects, these are followed.
    Variables that code assigns are put back.
    """

    def __init__(self, of, text):
        super().__init__(vars(of), text)
        self._of = of

    def open(self, names, uses_any_attribute):
        return super().open(names, uses_any_attribute=False)

    def value(self, name):
        value = self.variables[name]
        kind = type(value)
        if issubclass(kind, (type, types.ModuleType)):
            return value
        is_function = issubclass(kind, types.FunctionType)
        module = value.__globals__.get('__name__') if is_function else kind.__module__
        return value if kinds.is_of_user(module) else None

    def names(self, written):
        """Return the watched names (set); `written`: names that code assigns to some object."""
        # A step may add an attribute to a class, for example a counter of all its objects.
        return self.opened | written if isinstance(self._of, type) else self.opened

    def place_of(self, written):
        return places.of_library(self._of, self.text, sorted(self.names(written)), written)


class _OfLink(_Owner):
    def __init__(self, link, never, is_open):
        super().__init__(vars(link), _attribute_of(link))
        self.is_open = is_open
        self._is_of_library = not kinds.is_of_user(type(link).__module__)
        now = self.variables.items()
        # A library's code, including this package's, may call any callable that a link has.
        self.always = {name for name, value in now if callable(value)}
        # Arrays in attributes of links are left out, because `snapshot.arrays_of` finds them.
        self.never = never | {name for name, value in now if isinstance(value, kinds.ARRAYS)}

    def place(self):
        place = places.all_attributes(self.variables, self.text)
        place.is_of_library = self._is_of_library
        return place

    def unfollowed(self, reach):
        """Yield places of containers that no code names, such as Chainer's set of children."""
        for value in self.variables.values():
            if type(value) in (dict, list, set) and not reach.follows(value):
                yield (places.entries if type(value) is dict else places.Items)(value, '')


class _OfTraining(_Owner):
    """Attributes of an object in `kinds.OF_TRAINING` that code reads.

    Attributes in its `__dict__` whose names are in `kept` are put back.
    """

    kept: Collection[str] = frozenset()

    def __init__(self, thing):
        super().__init__({}, _attribute_of(thing))
        self.thing = thing
        self.gives_examples = False  # whether code may ask an iterator for examples

    def open(self, names, uses_any_attribute):
        # A user's properties are not read, because they may do anything.
        bases = [base for base in type(self.thing).__mro__ if kinds.is_of_user(base.__module__)]
        there = set(object.__dir__(self.thing)).difference(*map(vars, bases))
        chosen = there & names
        if uses_any_attribute:
            chosen |= {name for name in there if not name.startswith('_')}
        chosen -= self.opened
        if {'next', '__next__'} & names & there and not self.gives_examples:
            self.gives_examples = True
            chosen |= {'dataset', 'order_sampler'} & there
        self.opened |= chosen
        return sorted(chosen)

    def value(self, name):
        value = vars(self.thing).get(name)
        is_of_user = name not in _written_by_libraries(type(self.thing))
        kept = *kinds.OF_TRAINING, chainer.Link
        is_followed = is_of_user or self.gives_examples or isinstance(value, kept)
        return value if is_followed else None

    def place(self):
        return places.of_training(self.thing, self.text, sorted(self.opened), self.kept)


def _has_library_base(kind, quiet=kinds.QUIET):
    """Return whether a library's base class may call any method and read any attribute.

    `quiet`: names of modules whose base classes do not.
    """
    return any(
        not kinds.is_of_user(m) and m not in quiet for m in (b.__module__ for b in kind.__mro__)
    )


def _outputs(kind):
    """Return the attributes that a library's link assigns in a call, as Classifier does.

    The call makes these values anew, so it does not read them.
    """
    found = set()
    for base in kind.__mro__:
        for name in ('__call__', 'forward'):
            function = vars(base).get(name)
            if isinstance(function, types.FunctionType) and not kinds.is_of_user(base.__module__):
                attributes = code_names(function.__code__).attributes
                found |= {name for name, is_written in attributes.items() if is_written}
    return found


def _unread(kind, variables):
    """Return the names of an object's variables that are not followed, whatever code names."""
    if issubclass(kind, logging.Logger):
        return {'_cache'}  # a cache of levels, to which every call may add
    if issubclass(kind, logging.Manager):
        return variables.keys() - {'_disable'}  # the others are all loggers, and their classes
    if issubclass(kind, chainer.FunctionNode):
        return kinds.OF_EVERY_NODE
    return frozenset()


def _configurations():
    """Return the variables of Chainer's configuration, for all threads and for this one."""
    return vars(chainer.global_config), vars(chainer.config._local)


@functools.lru_cache(maxsize=None)
def _written_by_libraries(kind):
    """Return the names of attributes that code of a class's library bases assigns."""
    found: set[str] = set()
    for base in kind.__mro__:
        for function in vars(base).values() if not kinds.is_of_user(base.__module__) else ():
            if isinstance(function, types.FunctionType):
                attributes = code_names(function.__code__).attributes
                found |= {name for name, is_written in attributes.items() if is_written}
    return found


def _is_ignored(thing, kind):
    """Return whether an object is not followed, because no run can change it."""
    if issubclass(kind, io.IOBase) and not kinds.is_of_user(kind.__module__):
        return not _is_drained(thing, kind)
    return _has_constants(kind)


@functools.lru_cache(maxsize=1024)
def _has_constants(kind):
    """Return whether no run can change an object of a class."""
    if kinds.is_of_user(kind.__module__):  # such as a subclass of int, which may have attributes
        return False
    if issubclass(kind, kinds.IGNORED):
        return not issubclass(kind, numpy.void)
    if kind.__name__ in kinds.NATIVE_FUNCTIONS:  # Boost's class has the same name as Python's
        return not issubclass(kind, types.FunctionType)
    if issubclass(kind, (*kinds.RECORDS, *kinds.OF_TRAINING, chainer.Link, chainer.Variable)):
        return False
    package = (kind.__module__ or '').partition('.')[0]
    if package in LIBRARIES:
        return not (issubclass(kind, kinds.ARRAYS) or _is_generator_of_cupy(kind))
    return kind.__module__ in kinds.CONSTANT


def _is_generator_of_cupy(kind):
    return kind.__name__ in ('RandomState', 'Generator') and 'random' in kind.__module__


def _is_only_python(kind):
    """Return whether all state of a library's objects is in their `__dict__` and slots."""
    if _is_generator_of_cupy(kind) and kind.__module__.startswith('cupy'):
        return False
    members = [vars(base).values() for base in kind.__mro__]
    n_slots = sum(isinstance(m, types.MemberDescriptorType) for of in members for m in of)
    # A `__dict__` and a list of weak references take a word each, or lie before the object.
    n_words = n_slots + bool(kind.__dictoffset__) + bool(kind.__weakrefoffset__)
    return kind.__basicsize__ <= object.__basicsize__ + n_words * struct.calcsize('P')


def _is_drained(thing, kind):
    """Return whether reading from an object may remove something from it, for good."""
    if issubclass(kind, io.IOBase):
        return not thing.closed and thing.readable()
    if issubclass(kind, weakref.ProxyTypes):
        return False
    return any(
        base.__module__ in kinds.DRAINED or _is_iterator_of_python(base) for base in kind.__mro__
    )


def _is_iterator_of_python(kind):
    """Return whether a class is an iterator of Python's that is not written in Python."""
    is_native = isinstance(vars(kind).get('__next__'), types.WrapperDescriptorType)
    return is_native and (kind.__module__ or '').partition('.')[0] in sys.stdlib_module_names


def _emptied(cached):
    """Return a copy of a function of functools.lru_cache, with an empty cache."""
    empty = functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)
    empty.__dict__ = vars(cached)  # shared, so that attributes are put back with the original's
    return empty


def _copied(iterator):
    """Return a copy of an iterator, or None if it cannot be copied."""
    if not isinstance(iterator, itertools.count):
        make, arguments, *state = iterator.__reduce__()
        copy = make(*arguments)
        for position in state:
            if position is not None:  # None if `arguments` have it: a range from Python 3.13 on
                copy.__setstate__(position)
        return copy
    # Python 3.14 cannot copy itertools.count, so it is made from its text.
    try:
        return itertools.count(*ast.literal_eval('[%s]' % repr(iterator)[len('count(') : -1]))
    except ValueError:  # it counts with objects other than plain numbers
        return None


def _replaced(values, copies):
    """Return values (dict or list) in which objects are replaced; `copies`: id -> replacement."""
    if isinstance(values, dict):
        return {name: copies.get(id(value), value) for name, value in values.items()}
    return [copies.get(id(value), value) for value in values]


def _position(iterator):
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    return operator.length_hint(iterator)


def _imported(name, function):
    """Return the module that a function imports, and its packages; [] before the import."""
    if name.startswith('.'):
        name = importlib.util.resolve_name(name, function.__globals__['__package__'])
    parts = name.split('.')
    names = ['.'.join(parts[: n + 1]) for n in range(len(parts))]
    return (
        [sys.modules[each] for each in names if each in sys.modules] if name in sys.modules else []
    )


def _variables_of(thing):
    """Return the `__dict__` of an object, or None, without a call of its `__getattr__`."""
    kind = type(thing)
    has_dict = any('__dict__' in vars(base) for base in kind.__mro__)
    return vars(thing) if has_dict or issubclass(kind, threading.local) else None


def _attribute_of(owner):
    """Return a function that returns words for an attribute, given its name."""
    name = (_variables_of(owner) or {}).get('name')
    called = name if isinstance(name, str) else type(owner).__name__
    return _words('the attribute ', ' of %s' % called)


def _attribute_of_function(function):
    return _words('the attribute ', ' of %s' % function.__name__)


def _words(before, after):
    """Return a function that puts a name between `before` and `after`."""
    return lambda name: '%s%s%s' % (before, name, after)
