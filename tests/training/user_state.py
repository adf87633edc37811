"""Python state that a script can reach, found by brute force, for stand-ins to read as captured.

A launch of a CUDA graph runs no Python, so it repeats with the values of its capture. A stand-in
on the host runs the step again, and would read the present values. `freeze_launches` restores the
state of the capture for the time of a launch. It does not rely on the package's own search for
the values that a step reads, but follows every reference, however long that takes.
"""

import argparse
import collections
import contextlib
import copy
import functools
import gc
import itertools
import logging
import optparse
import random
import threading
import types
import weakref

import numpy

import chainer
from chainer import datasets, training
from chainer.iterators import SerialIterator

from chainer_bspmm.compat import user_code

NAMESPACES = types.SimpleNamespace, argparse.Namespace, threading.local
OF_LIBRARIES = (
    *(weakref.WeakKeyDictionary, threading.Event, optparse.Values, numpy.vectorize),
    *(chainer.reporter.Summary, chainer.Distribution, training.extensions.LogReport),
    *(chainer.Reporter, chainer.FunctionNode, chainer.FunctionHook, chainer.LinkHook),
    *(chainer.initializer.Initializer, datasets.SubDataset, datasets.TupleDataset),
    *(datasets.DictDataset, datasets.ConcatenatedDataset, training.triggers.MinValueTrigger),
    *(logging.Logger, logging.Manager),
)
OF_EVERY_PARAMETER = vars(chainer.Parameter(0.0)).keys()
OF_TRAINING = training.Trainer, training.Updater, chainer.Optimizer, SerialIterator
HYPERPARAMETERS = chainer.optimizer.Hyperparameter
GENERATORS = numpy.random.RandomState, numpy.random.Generator, random.Random
COPIED = itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(1)))


def freeze_launches(monkeypatch, capturer, reached):
    """Make launches of a class of stand-ins read all state below `reached` as it was captured."""
    capture = capturer.capture

    def capture_frozen(self, function):
        launch, result = capture(self, function)
        frozen = State(list(reached))

        def launch_frozen():
            with frozen.put_for_a_while():
                return launch()

        return launch_frozen, result

    monkeypatch.setattr(capturer, 'capture', capture_frozen)


class State:
    """Values of all places that can be reached from `roots`, read when the object is made."""

    def __init__(self, roots):
        self._places = _places(roots)
        self._values = self._now()
        for place, value in zip(self._places, self._values):
            place.let_iterators_be_copies(value)
        self._generators = _states_of_generators()

    def _now(self):
        return [place.read() for place in self._places]

    @contextlib.contextmanager
    def put_for_a_while(self):
        now, generators = self._now(), _states_of_generators()
        self._put(self._values, self._generators)
        try:
            yield
        finally:
            self._put(now, generators)

    def _put(self, values, generators):
        for place, value in zip(self._places, values):
            place.write(value)
        numpy.random.set_state(generators[0])
        random.setstate(generators[1])


def _states_of_generators():
    return numpy.random.get_state(), random.getstate()


class _Place:
    def __init__(self, owner):
        self.owner = owner

    def let_iterators_be_copies(self, value):
        """Replace iterators in a read value by copies, if they can be copied."""


class _Dict(_Place):
    def read(self):
        return dict(self.owner)

    def write(self, value):
        if dict.__len__(self.owner) != len(value) or any(
            name not in self.owner or self.owner[name] is not value[name] for name in value
        ):
            dict.clear(self.owner)
            dict.update(self.owner, value)

    def let_iterators_be_copies(self, value):
        for name, each in value.items():
            if type(each) in COPIED:
                with contextlib.suppress(TypeError):
                    value[name] = copy.copy(each)


class _Items(_Place):
    """Items of a list, a deque, a set or a bytearray."""

    def let_iterators_be_copies(self, value):
        for i, each in enumerate(value):
            if type(each) in COPIED:
                with contextlib.suppress(TypeError):
                    value[i] = copy.copy(each)

    def read(self):
        return list(self.owner)

    def write(self, value):
        if isinstance(self.owner, (set, collections.deque)):
            self.owner.clear()
            add = self.owner.update if isinstance(self.owner, set) else self.owner.extend
            add(value)
        else:
            self.owner[:] = value


class _Cell(_Place):
    def read(self):
        try:
            return [self.owner.cell_contents]
        except ValueError:
            return []

    def write(self, value):
        if value:
            self.owner.cell_contents = value[0]

    def let_iterators_be_copies(self, value):
        if value and type(value[0]) in COPIED:
            with contextlib.suppress(TypeError):
                value[0] = copy.copy(value[0])


class _Attributes(_Place):
    """Attributes that are read by name, because they are in slots or of a class."""

    def __init__(self, owner, names):
        super().__init__(owner)
        self._names = names

    def read(self):
        return {name: value for name in self._names() if (value := self._get(name)) is not _NONE}

    def _get(self, name):
        if isinstance(self.owner, type):
            return vars(self.owner).get(name, _NONE)
        return getattr(self.owner, name, _NONE)

    def write(self, value):
        for name in self._names():
            if name not in value and self._get(name) is not _NONE:
                delattr(self.owner, name)
        for name, each in value.items():
            if self._get(name) is not each:
                setattr(self.owner, name, each)


_NONE = object()


class _Defaults(_Place):
    def read(self):
        return self.owner.__defaults__, self.owner.__kwdefaults__

    def write(self, value):
        self.owner.__defaults__, self.owner.__kwdefaults__ = value


class _Generator(_Place):
    def read(self):
        if isinstance(self.owner, random.Random):
            return self.owner.getstate()
        if isinstance(self.owner, numpy.random.Generator):
            return self.owner.bit_generator.state
        return self.owner.get_state()

    def write(self, value):
        if isinstance(self.owner, random.Random):
            self.owner.setstate(value)
        elif isinstance(self.owner, numpy.random.Generator):
            self.owner.bit_generator.state = value
        else:
            self.owner.set_state(value)


class _Kind(_Place):
    """Class and `__dict__` of a user's object, both of which can be replaced."""

    def read(self):
        return type(self.owner), getattr(self.owner, '__dict__', None)

    def write(self, value):
        kind, attributes = value
        if type(self.owner) is not kind:
            self.owner.__class__ = kind
        if attributes is not None and self.owner.__dict__ is not attributes:
            self.owner.__dict__ = attributes


class _Variable(_Place):
    """Array of a variable or parameter; a graph always uses the array of its capture."""

    def read(self):
        return self.owner.array

    def write(self, value):
        if value is not None and self.owner.array is not value:
            self.owner.array = value


def _is_users(kind):
    return user_code.is_user_code(kind.__module__)


def _is_own(name):
    return not (name.startswith('__') and name.endswith('__'))


def _names_of_class(kind):
    """Return a function that lists a class's attributes, except for Python's own."""
    return lambda: [name for name in vars(kind) if _is_own(name) and not _is_slot(vars(kind)[name])]


def _own_names_of(param):
    """Return a function that lists the attributes of a parameter that a user has set."""
    return lambda: [name for name in vars(param) if name not in OF_EVERY_PARAMETER]


def _is_slot(value):
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


def _places(roots):
    configuration = vars(chainer.global_config), vars(chainer.config._local)
    waiting = [*roots, *configuration]
    places: list[_Place] = []
    seen: dict[int, object] = {}  # keeps objects alive, so that no id is used twice

    def follow(*values):
        waiting.extend(values)

    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, chainer.Variable):
            places.append(_Variable(thing))
            if isinstance(thing, chainer.Parameter):
                places.append(_Attributes(thing, _own_names_of(thing)))
        elif isinstance(thing, dict):
            places.append(_Dict(thing))
            follow(*thing, *thing.values(), *_attributes_of(thing, places))
        elif isinstance(thing, (list, collections.deque, set, bytearray)):
            places.append(_Items(thing))
            follow(*thing)
        elif isinstance(thing, (tuple, frozenset, types.MappingProxyType)):
            follow(*(thing.values() if isinstance(thing, types.MappingProxyType) else thing))
        elif isinstance(thing, random.SystemRandom):
            continue  # it has no state
        elif isinstance(thing, GENERATORS):
            places.append(_Generator(thing))
        elif isinstance(thing, types.FunctionType):
            if _is_users(thing):
                places += [_Defaults(thing), *map(_Cell, thing.__closure__ or ())]
                contents = [of for cell in thing.__closure__ or () for of in _Cell(cell).read()]
                follow(vars(thing), thing.__defaults__, thing.__kwdefaults__, *contents)
                if thing.__globals__.get('__name__', '').startswith('script_of'):
                    follow(thing.__globals__)
        elif isinstance(thing, types.MethodType):
            follow(thing.__self__, thing.__func__)
        elif isinstance(thing, functools.partial):
            follow(thing.func, thing.args, thing.keywords)
        elif isinstance(thing, (property, classmethod, staticmethod)):
            follow(*(getattr(thing, name, None) for name in ('fget', 'fset', '__func__')))
        elif isinstance(thing, types.ModuleType):
            if _is_users(types.SimpleNamespace(__module__=thing.__name__)):
                follow(vars(thing))
        elif isinstance(thing, type):
            if _is_users(thing):
                places.append(_Attributes(thing, _names_of_class(thing)))
                follow(*vars(thing).values(), *thing.__mro__, type(thing))
        elif isinstance(thing, functools._lru_cache_wrapper):
            caches = [each for each in gc.get_referents(thing) if type(each) is dict]
            follow(*(result for cache in caches for result in cache.values()))
        elif isinstance(thing, (*NAMESPACES, *OF_LIBRARIES, chainer.Link)):
            follow(*_attributes_of(thing, places), type(thing))
        elif _is_users(type(thing)):
            places.append(_Kind(thing))
            follow(*_attributes_of(thing, places), type(thing))
        elif isinstance(thing, OF_TRAINING):
            places.append(_Dict(vars(thing)))
            for value in vars(thing).values():
                within = value.values() if isinstance(value, dict) else [value]
                follow(*(each for each in within if isinstance(each, OF_TRAINING)))
                if isinstance(value, HYPERPARAMETERS):
                    places.append(_Dict(vars(value)))
    return places


def _attributes_of(thing, places):
    """Add the places of an object's attributes; return the values of the attributes."""
    held = []
    attributes = getattr(thing, '__dict__', None)
    if isinstance(attributes, dict):
        places.append(_Dict(attributes))
        held += attributes.values()
    for kind in type(thing).__mro__:
        slots = [name for name, value in vars(kind).items() if _is_slot(value) and _is_own(name)]
        if slots and _is_users(kind):
            place = _Attributes(thing, functools.partial(list, slots))
            places.append(place)
            held += place.read().values()
    return held
