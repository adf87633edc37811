"""Objects that a user's code can reach: their changes are seen, and undone after a run.

Each function here stands for a loss. It takes no arguments, and returns a number.
"""

import argparse
import array
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import datetime
import enum
import fractions
import functools
import io
import itertools
import logging
import multiprocessing
import operator
import optparse
import os
import pathlib
import queue
import random
import re
import socket
import sys
import threading
import types
import weakref
from typing import Any

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions, links, training
from chainer.iterators import MultithreadIterator, SerialIterator, ShuffleOrderSampler
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models import Classifier, Regressor

from chainer_bspmm.training.reach import MAX_ITEMS, MAX_PLAIN, MAX_THINGS, Reach
from tests.training import reached_module

STEP, W = 0, 1.0
CHAINER: Any = chainer  # tests add attributes to it
FUNCTIONS: Any = functions
LATE: int  # assigned by a loss or by a test
breakpoint: int  # assigned later, like LATE; the name is that of a builtin


def named_values(reach):
    """Return (words, value) for the lengths of containers and all watched values."""
    return [*reach.lengths(), *zip(reach.texts(), reach.values(), strict=True)]


def moment(reach):
    """Return counts of watched objects by text and id, states of generators, and all objects."""
    named = named_values(reach)
    identities = collections.Counter((text, id(value)) for text, value in named)
    return identities, reach.states(), named  # the ids stay valid as long as the objects are kept


def difference(reach, before):
    """Return the descriptions of objects that have changed since a moment, each once, in order."""
    identities, states, _ = moment(reach)
    changed = [text for text, _ in (identities - before[0]) + (before[0] - identities)]
    changed += [text for text, state in states.items() if state != before[1][text]]
    return list(dict.fromkeys(changed))


# Losses that count, each in another way. Each function returns the loss and a function that reads
# the count without changing it.


class Schedule:
    """A user's object: `n` is an attribute of the class until it is first counted."""

    n = 0
    _cache: dict

    def next(self):
        self.n += 1
        return 1 - 0.5**self.n


class Slotted:
    __slots__ = ('n', 'unset', '__private')

    def __init__(self):
        self.n = 0


@dataclasses.dataclass
class Config:
    weight: float = 1.0


class Counting(chainer.Chain):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self):
        self.n += 1
        return self.n


class CountingGlobally(chainer.Chain):
    def forward(self):
        return self.count()

    def count(self):
        global STEP
        STEP += 1
        return STEP


class UsersList(list):
    """A user's list, which can have attributes."""


def by_global():
    global STEP
    STEP = 0

    def loss():
        global STEP
        STEP += 1
        return STEP

    return loss, lambda: STEP


def by_global_of_a_method():
    global STEP
    STEP = 0
    return CountingGlobally(), lambda: STEP


def by_new_global():
    globals().pop('LATE', None)

    def loss():
        global LATE
        LATE = 1

    return loss, lambda: globals().get('LATE')


def by_module():
    reached_module.step = 0

    def loss():
        reached_module.step += 1
        return reached_module.step

    return loss, lambda: reached_module.step


def by_function_of_module():
    reached_module.step = 0
    return (lambda: reached_module.count()), lambda: reached_module.step


def by_import():
    reached_module.step = 0

    def loss():
        from .reached_module import count

        return count()

    return loss, lambda: reached_module.step


def by_link():
    link = Counting()
    return link, lambda: link.n


def by_method():
    s = Schedule()
    return s.next, lambda: s.n


def by_class_attribute():
    class Of:
        n = 0

        @classmethod
        def next(cls):
            cls.n += 1
            return cls.n

    return (lambda: Of.next()), lambda: Of.n


def by_new_class_attribute():
    class Of:
        n: int

    def loss():
        Of.n = 1

    return loss, lambda: hasattr(Of, 'n')


def by_property():
    class Of:
        def __init__(self):
            self._n = 0

        @property
        def n(self):
            self._n += 1
            return self._n

    of = Of()
    return (lambda: of.n), lambda: of._n


def by_call():
    class Of:
        n = 0

        def __call__(self):
            self.n += 1

    of = Of()
    return of, lambda: of.n


def by_constructor():
    class Of:
        n = 0

        def __init__(self):
            Of.n += 1

    return (lambda: Of()), lambda: Of.n


def by_itertools():
    class Of:
        n = itertools.count(1)

    return (lambda: next(Of.n)), lambda: repr(Of.n)


def by_iterator():
    given: Any = iter([3, 2, 1])
    return (lambda: next(given)), lambda: given.__length_hint__()


def by_iterator_in_a_list():
    given: Any = [iter(range(3))]
    return (lambda: next(given[0])), lambda: given[0].__length_hint__()


def by_object():
    s = Schedule()
    return (lambda: s.next()), lambda: s.n


def by_slots():
    s = Slotted()

    def loss():
        s.n += 1
        return s.n

    return loss, lambda: s.n


def by_private_slot():
    class Of:
        __slots__ = ('__n',)

        def __init__(self):
            self.__n = 0

        def next(self):
            self.__n += 1
            return self.__n

        def read(self):
            return self.__n

    of = Of()
    return (lambda: of.next()), of.read


def by_list():
    history = []
    return (lambda: history.append(1)), lambda: len(history)


def by_bound_method():
    history = []
    append = history.append
    return (lambda: append(1)), lambda: len(history)


def by_long_list():
    history = [0] * (2 * MAX_ITEMS)
    return (lambda: history.append(1)), lambda: len(history)


def by_long_dict():
    history = dict.fromkeys(range(2 * MAX_ITEMS))
    return (lambda: history.setdefault(len(history), 1)), lambda: len(history)


def by_set():
    history: set = set()
    return (lambda: history.add(len(history))), lambda: len(history)


def by_ordered_dict():
    history = collections.OrderedDict(a=1, b=2)
    return (lambda: history.move_to_end('a')), lambda: list(history)


def by_default_dict():
    history: dict = collections.defaultdict(int)

    def loss():
        history['n'] += 1

    return loss, lambda: history.get('n')


def by_counter():
    history: dict = collections.Counter()
    return (lambda: history.update('n')), lambda: history['n']


def by_user_dict():
    history = collections.UserDict(n=0)

    def loss():
        history['n'] += 1

    return loss, lambda: history['n']


def by_attribute_of_a_list():
    of: Any = UsersList()
    of.n = 0

    def loss():
        of.n += 1

    return loss, lambda: of.n


def by_default():
    def loss(calls=[0]):  # NOQA: B006
        calls[0] += 1
        return calls[0]

    return loss, lambda: loss.__defaults__[0][0]


def by_attribute_of_function():
    def loss():
        own.n += 1
        return own.n

    own: Any = loss
    own.n = 0
    return loss, lambda: own.n


def by_new_attribute_of_function():
    def loss():
        own.n = 1

    own: Any = loss
    return loss, lambda: hasattr(own, 'n')


def by_nonlocal():
    n = 0

    def loss():
        nonlocal n
        n += 1
        return n

    return loss, lambda: n


def by_late_nonlocal():
    def loss():
        nonlocal n
        n = 1

    def read():
        try:
            return n
        except NameError:
            return None

    if loss is None:
        n = 0
    return loss, read


def by_partial():
    calls = [0]

    def of(calls):
        calls[0] += 1

    return functools.partial(of, calls), lambda: calls[0]


def by_decorated():
    calls = []

    @contextlib.contextmanager
    def counted():
        calls.append(1)
        yield

    def loss():
        with counted():
            return 1

    return loss, lambda: len(calls)


def by_cached_function():
    calls = []

    @functools.lru_cache
    def of(x):
        calls.append(x)

    return (lambda: of(len(calls))), lambda: len(calls)


def by_thread():
    of = threading.local()
    of.n = 0

    def loss():
        of.n += 1
        return of.n

    return loss, lambda: of.n


def by_dict_in_object():
    settings = types.SimpleNamespace(deep={'deque': collections.deque([0], maxlen=3)})

    def loss():
        settings.deep['deque'].append(settings.deep['deque'][-1] + 1)

    return loss, lambda: settings.deep['deque'][-1]


def by_context_variable():
    n: Any = contextvars.ContextVar('n', default=0)
    return (lambda: n.set(n.get() + 1)), lambda: n.get()


def by_python_array():
    counts = array.array('l', [0])

    def loss():
        counts[0] += 1

    return loss, lambda: list(counts)


def by_bytes():
    counts = bytearray()
    return (lambda: counts.append(1)), lambda: len(counts)


def by_defaults():
    def loss(n=0):
        own.__defaults__ = (n + 1,)

    own: Any = loss
    return loss, lambda: own.__defaults__


def by_handler():
    class Handler(logging.Handler):
        n = 0

        def emit(self, record):
            Handler.n += 1

    logger = logging.Logger('of a user')
    logger.addHandler(Handler())
    child = logging.Logger('of a child')
    child.parent = logger
    return (lambda: child.error('a text')), lambda: Handler.n


def by_environment():
    os.environ['CHAINER_BSPMM_TEST'] = '0'

    def loss():
        os.environ['CHAINER_BSPMM_TEST'] += '1'

    return loss, lambda: os.environ['CHAINER_BSPMM_TEST']


def by_random_state():
    drawn = random.Random(3)
    return (lambda: drawn.random()), drawn.getstate


def by_numpy_random_state():
    drawn = numpy.random.RandomState(3)
    return (lambda: drawn.rand()), lambda: repr(drawn.get_state())


def by_generator():
    drawn = numpy.random.default_rng(3)
    return (lambda: drawn.random()), lambda: drawn.bit_generator.state


def by_numpy():
    return (lambda: numpy.random.rand()), lambda: repr(numpy.random.get_state())


def by_random():
    return (lambda: random.random()), random.getstate


def by_summary():
    summary = chainer.reporter.Summary()
    return (lambda: summary.add(numpy.float32(1))), lambda: summary._n


def by_event():
    event = threading.Event()
    return (lambda: event.set()), event.is_set


def by_options():
    options: Any = optparse.Values({'step': 0})

    def loss():
        options.step += 1

    return loss, lambda: options.step


def by_dataset():
    seen = []
    examples = chainer.datasets.TransformDataset([1, 2], lambda x: seen.append(x))
    return (lambda: examples[0]), lambda: len(seen)


def by_reporter():
    reporter = chainer.Reporter()
    return (lambda: reporter.report({'n': 1})), lambda: len(reporter.observation)


def by_function_hook():
    timer = chainer.function_hooks.TimerHook()
    x = numpy.ones(1, 'f')

    def loss():
        with timer:
            functions.relu(x)

    return loss, lambda: len(timer.call_history)


def by_vectorized():
    seen: list[float] = []
    of = numpy.vectorize(lambda x: seen.append(x), otypes=[object])
    of(1.0)  # which makes a function of NumPy
    return (lambda: of(1.0)), lambda: len(seen)


def by_single_dispatch():
    calls = []

    @functools.singledispatch
    def of(x):
        return x

    @of.register(int)
    def of_int(x):
        calls.append(x)

    return (lambda: of(1)), lambda: len(calls)


def by_methodcaller():
    s = Schedule()
    advance = operator.methodcaller('next')
    return (lambda: advance(s)), lambda: s.n


class Phase(enum.IntEnum):
    WARM = 0

    def next(self):
        return reached_module.count()


def by_number_of_an_enum():
    reached_module.step = 0
    phase = Phase.WARM
    return (lambda: phase.next()), lambda: reached_module.step


def by_key():
    schedules = {Slotted(): 'main'}

    def loss():
        for s in schedules:
            s.n += 1

    return loss, lambda: [s.n for s in schedules]


def by_result_of(cache):
    @cache
    def settings():
        return types.SimpleNamespace(n=0)

    settings()

    def loss():
        settings().n += 1

    return loss, lambda: settings().n


def by_result_of_a_cached_function():
    return by_result_of(functools.cache)


def by_result_of_a_bounded_cache():
    return by_result_of(functools.lru_cache(maxsize=4))


def by_argument_of_a_methodcaller():
    class Of:
        def add(self, to):
            to.append(1)

    of = Of()
    history = []
    add = operator.methodcaller('add', history)
    return (lambda: add(of)), lambda: len(history)


def by_class_of_an_object():
    class Started:
        pass

    s: Any = Schedule()

    def loss():
        s.__class__ = Started

    return loss, lambda: type(s).__name__


def by_dict_of_an_object():
    of: Any = Cfg()
    of.n = 0

    def loss():
        of.__dict__ = {'n': of.n + 1}

    return loss, lambda: of.n


def by_attribute_of_a_librarys_class():
    Regressor.n_of_a_test = 0

    def loss():
        Regressor.n_of_a_test += 1

    return loss, lambda: Regressor.n_of_a_test


def by_new_attribute_of_a_librarys_class():
    vars(Regressor).get('is_of_a_test') and delattr(Regressor, 'is_of_a_test')

    def loss():
        Regressor.is_of_a_test = True

    return loss, lambda: hasattr(Regressor, 'is_of_a_test')


def by_text_for_a_librarys_class():
    Regressor.of_a_text = 0

    def loss():
        setattr(Regressor, 'of_a_text', Regressor.of_a_text + 1)  # NOQA: B010

    return loss, lambda: Regressor.of_a_text


def by_class_of_a_librarys_link():
    link = links.Linear(2, 2)
    links.Linear.n_of_an_object = 0

    def loss():
        type(link).n_of_an_object += 1

    return loss, lambda: links.Linear.n_of_an_object


class Penalty:
    n = 0


class Square(Penalty):
    pass


def by_class_found_by_its_base():
    Square.n = 0

    def loss():
        for kind in Penalty.__subclasses__():
            kind.n += 1

    return loss, lambda: Square.n


class Phases:
    phase = 'main'

    def loss_main(self):
        global STEP
        STEP += 1
        return STEP


def by_method_whose_name_is_made(beginning='loss_'):
    global STEP
    STEP = 0
    phases = Phases()
    return (lambda: getattr(phases, 'loss_' + phases.phase)()), lambda: STEP


def by_attribute_of_a_parameter():
    link: Any = links.Linear(1, 1)
    link.W.n = 0

    def loss():
        link.W.n += 1

    return loss, lambda: link.W.n


def by_array_of_a_parameter():
    link = links.Linear(1, 1)

    def loss():
        link.W.array = link.W.array * 2

    return loss, lambda: id(link.W.array)


def by_array_of_a_variable():
    variable = chainer.Variable(numpy.zeros(1, 'f'))

    def loss():
        variable.array = variable.array + 1

    return loss, lambda: id(variable.array)


def by_array_of_a_variable_of_a_link():
    link = chainer.Link()
    link.mean = chainer.Variable(numpy.zeros(1, 'f'))

    def loss():
        link.mean.array = link.mean.array + 1

    return loss, lambda: id(link.mean.array)


def by_gradient_of_a_variable():
    variable = chainer.Variable(numpy.zeros(1, 'f'), grad=numpy.zeros(1, 'f'))

    def loss():
        functions.sum(variable * 2).backward()

    return loss, lambda: (id(variable.grad), id(variable.grad_var))


def with_optimizer():
    link = links.Linear(1, 1)
    return link, chainer.optimizers.SGD(0.5).setup(link)


def by_rate():
    _, optimizer = with_optimizer()

    def loss():
        optimizer.lr *= 0.5

    return loss, lambda: optimizer.lr


def by_rate_of_a_parameter():
    link, _ = with_optimizer()

    def loss():
        link.W.update_rule.hyperparam.lr *= 0.5

    return loss, lambda: link.W.update_rule.hyperparam.lr


def by_freezing():
    link, _ = with_optimizer()

    def loss():
        link.W.update_rule.enabled = not link.W.update_rule.enabled

    return loss, lambda: link.W.update_rule.enabled


def by_hook():
    _, optimizer = with_optimizer()
    hook = chainer.optimizer_hooks.WeightDecay(0.5)
    optimizer.add_hook(hook)

    def loss():
        for each in optimizer._hookable._pre_update_hooks.values():
            each.rate *= 0.5

    return loss, lambda: hook.rate


HERE = 'tests.training.test_reach'
COUNTERS = {
    by_global: 'STEP of module ' + HERE,
    by_global_of_a_method: 'STEP of module ' + HERE,
    by_new_global: 'LATE of module ' + HERE,
    by_module: 'step of module tests.training.reached_module',
    by_function_of_module: 'step of module tests.training.reached_module',
    by_import: 'step of module tests.training.reached_module',
    by_link: 'the attribute n of Counting',
    by_method: None,  # a new attribute: see `NEW`
    by_class_attribute: 'n of class Of',
    by_new_class_attribute: None,
    by_property: 'the attribute _n of Of',
    by_call: None,
    by_constructor: 'n of class Of',
    by_itertools: 'n of class Of',
    by_iterator: 'the variable given that <lambda> reads',
    by_iterator_in_a_list: 'the variable given that <lambda> reads',
    by_object: None,
    by_slots: 'the attribute n of Slotted',
    by_private_slot: 'the attribute _Of__n of Of',
    by_list: 'the variable history that <lambda> reads',
    by_bound_method: 'the variable append that <lambda> reads',
    by_long_list: 'the variable history that <lambda> reads',
    by_long_dict: 'the variable history that <lambda> reads',
    by_set: 'the variable history that <lambda> reads',
    by_ordered_dict: None,  # the order is put back, but not looked at
    by_default_dict: 'the variable history that loss reads',
    by_counter: 'the variable history that <lambda> reads',
    by_user_dict: "'n' in the attribute data of UserDict",
    by_attribute_of_a_list: 'the attribute n of UsersList',
    by_default: 'a default of loss',
    by_attribute_of_function: 'the attribute n of loss',
    by_new_attribute_of_function: None,
    by_nonlocal: 'the variable n that loss reads',
    by_late_nonlocal: 'the variable n that loss reads',
    by_partial: 'the loss',
    by_decorated: 'the variable calls that counted reads',
    by_cached_function: 'the variable calls that <lambda> reads',
    by_thread: 'the attribute n of _local',
    by_dict_in_object: 'the attribute deep of SimpleNamespace',
    by_context_variable: 'the context variable n',
    by_python_array: 'the variable counts that loss reads',
    by_bytes: 'the variable counts that <lambda> reads',
    by_defaults: '__defaults__ of loss',
    by_handler: 'n of class Handler',
    by_environment: "b'CHAINER_BSPMM_TEST' in os.environ",
    by_random_state: 'the variable drawn that <lambda> reads',
    by_numpy_random_state: 'the variable drawn that <lambda> reads',
    by_generator: 'the variable drawn that <lambda> reads',
    by_numpy: 'the state of numpy.random',
    by_random: 'the state of random',
    by_summary: 'the attribute _n of Summary',
    by_event: 'the attribute _flag of Event',
    by_options: 'the attribute step of Values',
    by_dataset: 'the variable seen that <lambda> reads',
    by_reporter: 'the attribute observation of Reporter',
    by_function_hook: 'the attribute call_history of TimerHook',
    by_vectorized: 'the variable seen that <lambda> reads',
    by_single_dispatch: 'the variable calls that of_int reads',
    by_methodcaller: None,  # a new attribute
    by_number_of_an_enum: 'step of module tests.training.reached_module',
    by_key: 'the attribute n of Slotted',
    by_result_of_a_cached_function: 'the attribute n of SimpleNamespace',
    by_result_of_a_bounded_cache: 'the attribute n of SimpleNamespace',
    by_argument_of_a_methodcaller: 'the variable add that <lambda> reads',
    by_class_of_an_object: '__class__ of an object of class Started',
    by_dict_of_an_object: '__dict__ of an object of class Cfg',
    by_attribute_of_a_librarys_class: 'n_of_a_test of class Regressor',
    by_new_attribute_of_a_librarys_class: 'is_of_a_test of class Regressor',
    by_text_for_a_librarys_class: 'of_a_text of class Regressor',
    by_class_of_a_librarys_link: 'n_of_an_object of class Linear',
    by_class_found_by_its_base: 'n of class Square',
    by_method_whose_name_is_made: 'STEP of module ' + HERE,
    by_attribute_of_a_parameter: 'the attribute n of the attribute W of Linear',
    by_array_of_a_parameter: None,  # a `Moment` names it: see test_guards.py
    by_array_of_a_variable: 'the variable variable that loss reads',
    by_array_of_a_variable_of_a_link: 'the attribute mean of Link',
    by_gradient_of_a_variable: None,  # a `Moment` names it
    by_rate: 'the attribute lr of SGD',
    by_rate_of_a_parameter: None,
    by_freezing: None,
    by_hook: 'the attribute rate of WeightDecay',
}
every_counter = pytest.mark.parametrize('make', COUNTERS, ids=lambda make: make.__name__)


@contextlib.contextmanager
def undone(reach):
    """Undo changes made inside the context; yield the saved state."""
    saved = reach.save()
    try:
        reach.copy_iterators(saved)
        yield saved
    finally:
        reach.restore(saved)


@every_counter
def test_a_run_that_is_undone_leaves_the_count(make):
    loss, count = make()
    before = count()
    reach = Reach(loss)
    with undone(reach):
        loss()
    assert count() == before


@every_counter
def test_a_run_that_raises_leaves_the_count(make):
    loss, count = make()
    before = count()
    reach = Reach(loss)
    with contextlib.suppress(InterruptedError), undone(reach):
        loss()
        raise InterruptedError
    assert count() == before


@every_counter
def test_nothing_prevents_an_extra_run(make):
    loss, _ = make()
    assert Reach(loss).cannot == []


@pytest.mark.parametrize('make', [make for make in COUNTERS if COUNTERS[make]])
def test_what_counts_is_named_first(make):
    loss, _ = make()
    reach = Reach(loss)
    before = moment(reach)
    loss()
    assert difference(reach, before)[0] == COUNTERS[make]


NEW = by_method, by_new_class_attribute, by_call, by_object, by_new_attribute_of_function


@pytest.mark.parametrize('make', NEW, ids=lambda make: make.__name__)
def test_an_attribute_that_is_new_changes_the_sizes(make):
    loss, _ = make()
    reach = Reach(loss)
    before = reach.sizes()
    loss()
    assert reach.sizes() != before


@pytest.mark.parametrize('make', (by_iterator, by_itertools, by_iterator_in_a_list))
def test_a_run_reads_from_a_copy_of_an_iterator(make):
    loss, _ = make()
    with undone(Reach(loss)):
        numbers = [loss(), loss()]
    assert [loss(), loss()] == numbers and numbers[0] != numbers[1]


def test_a_run_finds_nothing_in_a_cache_and_leaves_nothing():
    @functools.lru_cache(maxsize=5)
    def square(n):
        return object()

    first = square(1)
    same = square
    with undone(Reach(lambda: square)):
        assert square(1) is not first and square.cache_parameters()['maxsize'] == 5
    assert square is same and square(1) is first and square.cache_info().misses == 1


def test_a_run_may_find_what_is_in_a_cache():
    @functools.cache
    def square(n):
        return object()

    first = square(1)
    reach = Reach(lambda: square)
    saved = reach.save()
    assert reach.copy_iterators(saved, with_caches=False) == [] and square(1) is first


def test_an_iterator_is_the_same_object_after_a_run():
    given = iter([1, 2])
    same = given

    def loss():
        return next(given)

    with undone(Reach(loss)):
        loss()
    assert given is same


# Losses with a weight that is changed from outside. Each function returns the loss and a function
# that sets the weight.


def of_dict():
    opts = {'w': 1.0}
    return (lambda: opts['w']), lambda w: opts.update(w=w)


def of_nested():
    opts = {'loss': [{'w': 1.0}]}
    return (lambda: opts['loss'][0]['w']), lambda w: opts['loss'][0].update(w=w)


def of_list():
    ws = [1.0, 1.0]
    return (lambda: ws[0]), lambda w: ws.__setitem__(0, w)


def of_tuple_of_lists():
    ws = ([1.0],)
    return (lambda: ws[0][0]), lambda w: ws[0].__setitem__(0, w)


def of_shown_dict():
    opts = {'w': 1.0}
    shown = types.MappingProxyType(opts)
    return (lambda: shown['w']), lambda w: opts.update(w=w)


def of_view():
    opts = {'w': 1.0}
    shown = opts.values()
    return (lambda: sum(shown)), lambda w: opts.update(w=w)


class Cfg:
    w = 1.0


def of_object():
    cfg = Cfg()
    cfg.w = 1.0
    return (lambda: cfg.w), lambda w: setattr(cfg, 'w', w)


def of_class():
    class Of:
        w = 1.0

    return (lambda: Of.w), lambda w: setattr(Of, 'w', w)


def of_base_class():
    class Base:
        w = 1.0

    class Of(Base):
        pass

    of = Of()
    return (lambda: of.w), lambda w: setattr(Base, 'w', w)


def of_method():
    class Of:
        def w(self):
            return 1.0

    of = Of()
    return (lambda: of.w()), lambda w: setattr(Of, 'w', lambda self: w)


def of_record(kind):
    cfg = kind(weight=1.0)
    return (lambda: cfg.weight), lambda w: setattr(cfg, 'weight', w)


def helper():
    return W


def change_global(w):
    global W
    W = w


def of_global_of_a_helper():
    return (lambda: helper()), change_global


class WithMethod(chainer.Chain):
    def forward(self):
        return self.loss()

    def loss(self):
        return W


class Inherited(WithMethod):
    def forward(self):
        return super().forward()


def of_global_of_a_method():
    return WithMethod(), change_global


def of_global_of_an_inherited_method():
    return Inherited(), change_global


def of_module():
    return (lambda: reached_module.weight), lambda w: setattr(reached_module, 'weight', w)


def of_slots():
    s = Slotted()
    return (lambda: s.n), lambda w: setattr(s, 'n', w)


def of_dynamic_name():
    s = types.SimpleNamespace(w_0=1.0)
    return (lambda: getattr(s, 'w_%d' % 0)), lambda w: setattr(s, 'w_0', w)


def of_matched_attribute():
    cfg = Cfg()
    cfg.w = 1.0
    variables = {'cfg': cfg, 'Cfg': Cfg, '__name__': HERE}
    exec('def loss():\n match cfg:\n  case Cfg(w=w): return w', variables)
    return variables['loss'], lambda w: setattr(cfg, 'w', w)


def of_attribute_of_link():
    link = chainer.Chain()
    link.w = 1.0
    return link, lambda w: setattr(link, 'w', w)


def of_function_of_a_sequence():
    ws = [1.0]
    return chainer.Sequential(lambda: ws[0]), lambda w: ws.__setitem__(0, w)


def of_metric():
    ws = [1.0]
    metrics = {'metric': lambda y, t: ws[0]}
    return Regressor(links.Linear(2, 1), metrics_fun=metrics), lambda w: ws.__setitem__(0, w)


def of_function_that_a_library_calls():
    link = chainer.Chain()
    link.lossfun = helper
    return link, change_global


class Mode(enum.Enum):
    ON = 1.0


def of_member_of_an_enum():
    return (lambda: Mode.ON.value), lambda w: setattr(Mode.ON, '_value_', w)


class ByText:
    """An object whose attributes are the entries of a dict."""

    def __init__(self, entries):
        self._entries = entries

    def __getattr__(self, name):
        return object.__getattribute__(self, '_entries')[name]


def of_getattr():
    entries = {'weight': 1.0}
    opts = ByText(entries)
    return (lambda: opts.weight), lambda w: entries.update(weight=w)


def of_long_list():
    ws = [1.0] * MAX_PLAIN
    return (lambda: ws[700]), lambda w: ws.__setitem__(700, w)


def of_defaults():
    def loss(w=1.0):
        return w

    return loss, lambda w: setattr(loss, '__defaults__', (w,))


def of_defaults_by_name():
    def loss(*, w=None):
        return w

    return loss, lambda w: setattr(loss, '__kwdefaults__', {'w': None})


def of_code():
    def loss():
        return 1.0

    def other():
        return 2.0

    return loss, lambda w: setattr(loss, '__code__', other.__code__.replace(co_consts=(w,)))


def of_environment():
    os.environ['CHAINER_BSPMM_TEST'] = '1'
    return (
        lambda: os.getenv('CHAINER_BSPMM_TEST'),
        lambda w: os.environ.update(CHAINER_BSPMM_TEST=str(w)),
    )


class Scaled(chainer.Parameter):
    scale = 1.0


def of_class_of_a_parameter():
    link = chainer.Link()
    with link.init_scope():
        link.w = Scaled(numpy.ones(1, 'f'))
    return (lambda: link.w.scale), lambda w: setattr(Scaled, 'scale', w)


def of_environment_in_bytes():
    os.environ['CHAINER_BSPMM_TEST'] = '1'
    return (
        lambda: os.environb[b'CHAINER_BSPMM_TEST'],
        lambda w: os.environ.update(CHAINER_BSPMM_TEST=str(w)),
    )


def of_environment_in_a_path():
    os.environ['CHAINER_BSPMM_TEST'] = '1'
    return (
        lambda: os.path.expandvars('$CHAINER_BSPMM_TEST'),
        lambda w: os.environ.update(CHAINER_BSPMM_TEST=str(w)),
    )


def of_attrgetter():
    opts = types.SimpleNamespace(loss=types.SimpleNamespace(w=1.0))
    weight_of = operator.attrgetter('loss.w')
    return (lambda: weight_of(opts)), lambda w: setattr(opts.loss, 'w', w)


def of_format():
    opts = types.SimpleNamespace(w=1.0)
    return (lambda: float('{0.w}'.format(opts))), lambda w: setattr(opts, 'w', w)  # NOQA: UP032


@dataclasses.dataclass(eq=False, repr=False)
class Fields:
    """A dataclass of which no code names a field."""

    coefficient: float = 1.0


def of_fields():
    cfg = Fields()
    return (lambda: dataclasses.asdict(cfg)), lambda w: setattr(cfg, 'coefficient', w)


class Named:
    kind = 1.0

    def __str__(self):
        return str(self.kind)


def of_string():
    named = Named()
    named.kind = 1.0
    return (lambda: float(str(named))), lambda w: setattr(named, 'kind', w)


def of_configuration():
    own = types.SimpleNamespace(w=1.0)
    chainer.config.of_a_test = own
    return (lambda: chainer.config.of_a_test.w), lambda w: setattr(own, 'w', w)


class Term:
    weight = 1.0


class Smooth(Term):
    pass


class Smoothest(Smooth):
    pass


def of_class_found_by_its_base():
    def loss():
        (kind,) = Term.__subclasses__()
        return [each.weight for each in kind.__subclasses__()]

    return loss, lambda w: setattr(Smoothest, 'weight', w)


class Plugin:
    pass


PLUGINS = []


def of_class_that_is_defined_later():
    def change(w):
        PLUGINS.append(type('Later', (Plugin,), {}))

    return (lambda: Plugin.__subclasses__()), change


class First:
    pass


class Second:
    pass


class Changing(First):
    pass


def of_base_classes():
    def change(w):
        Changing.__bases__ = (First,) if w == 2 else (Second,)

    return Changing, change


def of_librarys_module():
    return (lambda: FUNCTIONS.of_a_test), lambda w: setattr(functions, 'of_a_test', w)


def of_librarys_submodule():
    return (lambda: CHAINER.functions.of_a_test), lambda w: setattr(functions, 'of_a_test', w)


def of_librarys_class():
    return (lambda: CHAINER.Link.of_a_test), lambda w: setattr(chainer.Link, 'of_a_test', w)


def of_base_class_of_a_librarys_class():
    return (lambda: CHAINER.Chain.of_a_test), lambda w: setattr(chainer.Link, 'of_a_test', w)


class OfBase(chainer.Chain):
    def forward(self):
        return self.of_a_test


def of_base_class_of_a_link():
    return OfBase(), lambda w: setattr(chainer.Link, 'of_a_test', w)


def of_users_function_in_a_library():
    FUNCTIONS.of_a_test = helper
    return (lambda: FUNCTIONS.of_a_test()), change_global


def of_cache(maxsize):
    @functools.lru_cache(maxsize)
    def made():
        return object()

    def change(w):
        made.cache_clear()
        made()

    return (lambda: made()), change


def of_enclosing_function():
    weight = 1.0

    def change(w):
        nonlocal weight
        weight = w

    return (lambda: weight), change


def of_initializer():
    constant = chainer.initializers.Constant(1.0)
    return (lambda: constant.fill_value), functools.partial(setattr, constant, 'fill_value')


def of_node():
    node = functions.activation.leaky_relu.LeakyReLU()
    return (lambda: node.slope), functools.partial(setattr, node, 'slope')


def of_trigger():
    trigger: Any = training.triggers.MinValueTrigger('main/loss')
    return (lambda: trigger._best_value), functools.partial(setattr, trigger, '_best_value')


def of_dataset(make):
    weights = [1.0]
    examples = make(weights)
    return (lambda: examples[0]), functools.partial(weights.__setitem__, 0)


of_part = functools.partial(of_dataset, lambda ws: chainer.datasets.SubDataset(ws, 0, 1))
of_fields_of_examples = functools.partial(of_dataset, chainer.datasets.TupleDataset)
of_names_of_examples = functools.partial(of_dataset, lambda ws: chainer.datasets.DictDataset(w=ws))
of_joined_parts = functools.partial(of_dataset, chainer.datasets.ConcatenatedDataset)


def of_all_loggers(make):
    given = make()

    def change(level):
        given.manager.disable = int(level)

    return (lambda: given.isEnabledFor(logging.INFO)), change


of_logger = functools.partial(of_all_loggers, lambda: logging.getLogger('reach.of.a.test'))
of_root_logger = functools.partial(of_all_loggers, lambda: logging.root)

CHANGES = {
    of_dict: "'w' in the variable opts that <lambda> reads",
    of_nested: "'w' in the variable opts that <lambda> reads",
    of_list: 'the variable ws that <lambda> reads',
    of_tuple_of_lists: 'the variable ws that <lambda> reads',
    of_shown_dict: "'w' in the variable shown that <lambda> reads",
    of_view: "'w' in the variable shown that <lambda> reads",
    of_object: 'the attribute w of Cfg',
    of_class: 'w of class Of',
    of_base_class: 'w of class Base',
    of_method: 'w of class Of',
    functools.partial(of_record, Config): 'the attribute weight of Config',
    functools.partial(of_record, types.SimpleNamespace): 'the attribute weight of SimpleNamespace',
    functools.partial(of_record, argparse.Namespace): 'the attribute weight of Namespace',
    of_global_of_a_helper: 'W of module ' + HERE,
    of_global_of_a_method: 'W of module ' + HERE,
    of_global_of_an_inherited_method: 'W of module ' + HERE,
    of_module: 'weight of module tests.training.reached_module',
    of_slots: 'the attribute n of Slotted',
    of_dynamic_name: 'the attribute w_0 of SimpleNamespace',
    of_matched_attribute: 'the attribute w of Cfg',
    of_attribute_of_link: 'the attribute w of Chain',
    of_function_of_a_sequence: 'the variable ws that <lambda> reads',
    of_metric: 'the variable ws that <lambda> reads',
    of_function_that_a_library_calls: 'W of module ' + HERE,
    of_member_of_an_enum: 'the attribute _value_ of Mode',
    of_getattr: "'weight' in the attribute _entries of ByText",
    of_long_list: 'the variable ws that <lambda> reads',
    of_defaults: '__defaults__ of loss',
    of_defaults_by_name: '__kwdefaults__ of loss',
    of_code: '__code__ of loss',
    of_environment: "b'CHAINER_BSPMM_TEST' in os.environ",
    of_environment_in_bytes: "b'CHAINER_BSPMM_TEST' in os.environ",
    of_environment_in_a_path: "b'CHAINER_BSPMM_TEST' in os.environ",
    of_class_of_a_parameter: 'scale of class Scaled',
    of_class_found_by_its_base: 'weight of class Smoothest',
    of_class_that_is_defined_later: 'the subclasses of class Plugin',
    of_base_classes: '__bases__ of class Changing',
    of_librarys_module: 'of_a_test of module chainer.functions',
    of_librarys_submodule: 'of_a_test of module chainer.functions',
    of_librarys_class: 'of_a_test of class Link',
    of_base_class_of_a_librarys_class: 'of_a_test of class Link',
    of_base_class_of_a_link: 'of_a_test of class Link',
    of_users_function_in_a_library: 'W of module ' + HERE,
    functools.partial(of_cache, None): 'the cache of the variable made that <lambda> reads',
    functools.partial(of_cache, 4): 'the cache of the variable made that <lambda> reads',
    of_enclosing_function: 'the variable weight that <lambda> reads',
    of_attrgetter: 'the attribute w of SimpleNamespace',
    of_format: 'the attribute w of SimpleNamespace',
    of_fields: 'the attribute coefficient of Fields',
    of_string: 'the attribute kind of Named',
    of_configuration: 'the attribute w of SimpleNamespace',
    of_initializer: 'the attribute fill_value of Constant',
    of_node: 'the attribute slope of LeakyReLU',
    of_trigger: 'the attribute _best_value of MinValueTrigger',
    of_part: 'the attribute _dataset of SubDataset',
    of_fields_of_examples: 'the attribute _datasets of TupleDataset',
    of_names_of_examples: 'the attribute _datasets of DictDataset',
    of_joined_parts: 'the attribute _datasets of ConcatenatedDataset',
    of_logger: 'the attribute _disable of Manager',
    of_root_logger: 'the attribute _disable of Manager',
}


@pytest.fixture(autouse=True)
def attributes_of_a_test():
    """Delete attributes that a test has left in Chainer, and enable loggers again."""
    yield
    logging.disable(logging.NOTSET)
    for owner in (chainer.config._local, functions, chainer.Link):
        if 'of_a_test' in vars(owner):
            delattr(owner, 'of_a_test')


@pytest.mark.parametrize('make', CHANGES, ids=lambda make: getattr(make, '__name__', None))
def test_what_changes_is_seen(make):
    loss, change = make()
    change(2.0)
    reach = Reach(loss)
    before = moment(reach)
    values = reach.values()
    change(3.0)
    assert difference(reach, before) == [CHANGES[make]]
    assert any(map(lambda one, other: one is not other, reach.values(), values))


class Many(chainer.Chain):
    """A user's Chain that has attributes, and a history, that its `forward` does not read."""

    def __init__(self):
        super().__init__()
        self.opts = {'w': 1.0}
        self.history = []
        self.seen = Schedule()
        with self.init_scope():
            self.linear = links.Linear(2, 2)

    def forward(self, x):
        super().namedlinks()  # calls a method of the base class other than the constructor
        return self.loss(self.linear(x))

    def loss(self, y):
        return y * self.opts['w'] * W

    def __repr__(self):
        return 'after %d' % len(self.history)

    def plot(self):
        return STEP, self.history, self.seen.next()


def add_to_history(model, monkeypatch):
    model.history.append(1)


def add_to_an_object(model, monkeypatch):
    model.seen.n = 3


def change_another_global(model, monkeypatch):
    monkeypatch.setitem(globals(), 'STEP', 7)


def change_a_method(model, monkeypatch):
    monkeypatch.setattr(Many, 'plot', None)


def draw(model, monkeypatch):
    numpy.random.rand()


def change_a_module(model, monkeypatch):
    monkeypatch.setattr(reached_module, 'unused', 3)


IRRELEVANT = (
    *(add_to_history, add_to_an_object, change_another_global, change_a_method, draw),
    change_a_module,
)


@pytest.mark.parametrize('change', IRRELEVANT)
def test_what_no_code_names_is_not_watched(monkeypatch, change):
    model = Many()
    reach = Reach(model)
    before = reach.values(), reach.sizes()
    change(model, monkeypatch)
    assert (reach.values(), reach.sizes()) == before


def test_code_that_is_replaced_is_seen(monkeypatch):
    reach = Reach(Many())
    before = moment(reach)
    monkeypatch.setattr(Many, 'loss', lambda self, y: y)
    assert difference(reach, before) == ['loss of class Many']


def test_contents_that_no_code_names_are_not_followed():
    model = Many()
    reach = Reach(model)
    assert reach.follows(model.opts) and not reach.follows(model.history)


def test_a_function_of_a_library_is_watched_but_not_followed():
    reach = Reach(lambda: functions.relu)
    texts = [text for text in reach.texts() if 'chainer' in text]
    assert texts == ['relu of module chainer.functions'] and len(reach.functions) == 1


def test_nothing_of_a_library_is_watched_for_its_own_code():
    reach = Reach(Regressor(links.Linear(2, 1), functions.mean_squared_error))
    assert not any(re.search('(?<!an object) of (module|class) ', text) for text in reach.texts())


def test_a_name_that_a_librarys_module_gets_later_changes_the_sizes():
    reach = Reach(lambda: getattr(functions, 'of_a_test', 1.0))
    before = reach.sizes()
    FUNCTIONS.of_a_test = 2.0
    assert reach.sizes() != before


def test_what_code_only_reads_in_a_library_is_not_put_back():
    FUNCTIONS.of_a_test = 1.0
    with undone(Reach(lambda: FUNCTIONS.of_a_test)):
        FUNCTIONS.of_a_test = 2.0
    assert FUNCTIONS.of_a_test == 2


class Unrelated(Penalty):
    pass


def test_subclasses_of_a_class_that_is_only_a_base_are_not_followed():
    reach = Reach(lambda: Square.__subclasses__())
    assert not any('Unrelated' in text for text in reach.texts())


@pytest.mark.parametrize('kind', (Regressor, Classifier))
def test_what_a_library_makes_in_each_step_is_not_followed(kind):
    """A Regressor's metrics are not followed, even if a user's code names `metrics` as well."""
    metrics = {'metric': lambda y, t: 1.0}
    own: Any = types.SimpleNamespace(metrics=metrics)
    lossfun = functions.mean_squared_error
    model = kind(links.Linear(2, 2), lossfun=lossfun, metrics_fun=metrics)
    x = numpy.ones((3, 2), 'f')
    model(x, x)
    reach = Reach(lambda: model(x, x) * own.metrics)
    assert model.metrics and not reach.follows(model.metrics)


class OnlySlots:
    __slots__ = ('n',)


class SlotsAndWeakReferences:
    __slots__ = ('n', '__weakref__')


class SlotsAndDict:
    __slots__ = ('n', '__dict__')


@pytest.mark.parametrize('kind', [OnlySlots, SlotsAndWeakReferences, SlotsAndDict, Schedule])
def test_attributes_of_a_librarys_object_are_watched_if_it_has_no_other_state(monkeypatch, kind):
    thing = kind()
    thing.n = 0
    monkeypatch.setattr(kind, '__module__', 'numpy.of_library')
    reach = Reach(lambda: thing.n)
    before = moment(reach)
    thing.n = 1
    assert difference(reach, before) == ['the attribute n of ' + kind.__name__]


def test_links_by_id():
    model = Many()
    assert Reach(model).links == {id(model): model, id(model.linear): model.linear}


def test_links_that_a_function_uses():
    model = Many()
    assert id(model.linear) in Reach(lambda: model).links


def test_functions_of_a_user_by_id():
    def loss():
        return helper()

    assert Reach(loss).functions == {id(loss): loss, id(helper): helper}


def test_functions_of_a_library_are_left_out():
    assert Reach(functions.relu, Regressor(links.Linear(2, 1))).functions == {}


def test_two_objects_that_refer_to_each_other():
    one, other = types.SimpleNamespace(n=1), types.SimpleNamespace(n=2)
    one.other, other.one = other, one
    reach = Reach(lambda: one.other.one.n)
    assert reach.texts().count('the attribute n of SimpleNamespace') == 2


# Arrays.


def test_arrays_in_a_dict():
    kept = {'a': numpy.ones(3)}
    reach = Reach(lambda: kept)
    assert reach.arrays == {'the variable kept that <lambda> reads': kept['a']}


def test_arrays_in_one_list_have_different_words():
    kept = [numpy.ones(2), numpy.zeros(2), numpy.ones(3)]
    arrays = Reach(lambda: kept).arrays
    assert {id(array) for array in arrays.values()} == set(map(id, kept))


def test_arrays_of_links_are_left_out():
    model = links.BatchNormalization(3)
    assert Reach(model).arrays == {}


def test_a_parameter_that_belongs_to_no_link():
    scale = chainer.Parameter(numpy.ones(3, 'f'))
    arrays = Reach(lambda: scale, Many()).arrays
    assert arrays == {'the variable scale that <lambda> reads': scale.array}


def test_a_parameter_of_a_link_that_is_also_used_elsewhere():
    model = Many()
    w = model.linear.W
    assert Reach(lambda: w, model).arrays == {}


def test_a_parameter_without_an_array():
    scale = chainer.Parameter()
    assert Reach(lambda: scale).arrays == {}


# Objects that cannot be put back, and objects that were not followed.


def opened(name, mode):
    with contextlib.suppress(OSError):
        return open(name, mode)


CANNOT = {
    'generator': lambda: (i for i in range(3)),
    'enumerate': lambda: enumerate([1, 2]),
    'map': lambda: map(abs, [1, 2]),
    'chain': lambda: itertools.chain([1, 2]),
    'dict_keyiterator': lambda: iter({'a': 1}),
    'StringIO': lambda: io.StringIO('abc'),
    'TextIOWrapper': lambda: opened(__file__, 'r'),
    'Queue': queue.Queue,
    'SimpleQueue': queue.SimpleQueue,
    'socket': socket.socket,
}


@pytest.mark.parametrize('name', CANNOT)
def test_what_a_run_takes_from_something_is_lost(name):
    given = CANNOT[name]()

    def loss():
        return given

    expected = ['consume part of the variable given that loss reads (%s)' % name]
    try:
        assert Reach(loss).cannot == expected
    finally:
        getattr(given, 'close', str)()


def test_a_global_that_is_made_later_is_seen(monkeypatch):
    def loss():
        return LATE

    monkeypatch.delitem(globals(), 'LATE', raising=False)
    reach = Reach(loss)
    before = moment(reach)
    monkeypatch.setitem(globals(), 'LATE', 1)
    assert difference(reach, before) == ['LATE of module ' + HERE]


@pytest.mark.parametrize('is_assigned', [False, True])
def test_a_global_with_the_name_of_a_builtin_is_followed(monkeypatch, is_assigned):
    """A loss reads a global that exists, or assigns one that does not exist yet."""

    def reads():
        return breakpoint

    def assigns():
        global breakpoint
        breakpoint = 2

    if is_assigned:
        monkeypatch.delitem(globals(), 'breakpoint', raising=False)
    else:
        monkeypatch.setitem(globals(), 'breakpoint', 1)
    reach = Reach(assigns if is_assigned else reads)
    before = moment(reach)
    monkeypatch.setitem(globals(), 'breakpoint', 2)
    assert difference(reach, before) == ['breakpoint of module ' + HERE]


class Subclass(numpy.ndarray):
    """A user's subclass of arrays, which may have attributes."""


LEFT = {
    'MaskedArray': lambda: numpy.ma.array([1.0, 2.0], mask=[0, 1]),
    'matrix': lambda: numpy.ones((1, 1)).view(numpy.matrix),
    'ndarray': lambda: numpy.array([None, 'a'], object),
    'Subclass': lambda: numpy.ones(2).view(Subclass),
    'flatiter': lambda: numpy.ones(2).flat,
    'c_double': lambda: ctypes.c_double(1.0),
}


@pytest.mark.parametrize('name', LEFT)
def test_what_a_run_changes_in_something_is_left(name):
    given = LEFT[name]()

    def loss():
        return given

    text = 'leave changes in the variable given that loss reads (%s)'
    assert Reach(loss).cannot == [text % name]


@pytest.mark.parametrize('name', ['MaskedArray', 'ndarray', 'Subclass'])
def test_what_a_run_changes_in_an_array_of_a_link_is_left(name):
    link = chainer.Link()
    link.table = LEFT[name]()
    assert Reach(link).cannot == ['leave changes in the attribute table of Link (%s)' % name]


def test_a_number_of_several_processes_is_left():
    shared = multiprocessing.Value('i', 0)
    assert (
        'leave changes in the attribute _obj of Synchronized (c_int)'
        in Reach(lambda: shared.value).cannot
    )


def test_children_of_a_generator_are_left():
    drawn = numpy.random.default_rng(3)
    assert Reach(lambda: drawn.spawn(1)).cannot == [
        'leave children of the variable drawn that <lambda> reads'
    ]


@pytest.mark.gpu
@pytest.mark.parametrize('kind', ['RandomState', 'Generator'])
def test_what_a_run_draws_from_a_generator_of_cupy_is_lost(kind):
    of_cupy = chainer.backends.cuda.cupy.random
    drawn = of_cupy.RandomState(3) if kind == 'RandomState' else of_cupy.default_rng(3)
    assert Reach(lambda: drawn.random(2)).cannot == [
        'leave changes in the variable drawn that <lambda> reads (%s)' % kind
    ]


def test_a_generator_without_children():
    drawn = numpy.random.default_rng(3)
    assert Reach(lambda: drawn.random()).cannot == []


MANY = {
    'list': lambda: [Schedule() for _ in range(MAX_ITEMS + 1)],
    'dict': lambda: {i: [] for i in range(MAX_ITEMS + 1)},
}


@pytest.mark.parametrize('name', MANY)
def test_what_a_run_changes_inside_of_a_long_container_is_left(name):
    many = MANY[name]()
    text = (
        'leave changes inside of the variable many that <lambda> reads, '
        'which has more than %d items' % MAX_ITEMS
    )
    assert Reach(lambda: many).cannot == [text]


def test_results_in_a_cache_behind_a_partial_are_left():
    @functools.lru_cache
    def square(n):
        return n * n

    def loss(square=functools.partial(square, 2)):  # NOQA: B008
        return square()

    assert Reach(loss).cannot == ['leave results in the cache of a default of loss']


HELD = Schedule()
WEAK = {
    'ReferenceType': lambda: weakref.ref(HELD),
    'WeakMethod': lambda: weakref.WeakMethod(HELD.next),
    'ProxyType': lambda: weakref.proxy(HELD),
    'CallableProxyType': lambda: weakref.proxy(helper),
    'WeakSet': lambda: weakref.WeakSet([HELD]),
    'WeakKeyDictionary': lambda: weakref.WeakKeyDictionary({HELD: 1.0}),
    'WeakValueDictionary': lambda: weakref.WeakValueDictionary(a=HELD),
}


@pytest.mark.parametrize('name', WEAK)
def test_objects_to_which_a_user_refers_weakly_would_be_kept_alive(name):
    given = types.SimpleNamespace(parts=[WEAK[name]()])
    text = 'keep alive what the attribute parts of SimpleNamespace refers to weakly (%s)'
    assert Reach(lambda: given.parts).cannot == [text % name]


def stack_with_a_weak_reference():
    stack = contextlib.ExitStack()
    stack.callback(weakref.ref(HELD))
    return stack


PairOfUser = collections.namedtuple('PairOfUser', 'first second')

HARMLESS = {
    'weak reference of a library': stack_with_a_weak_reference,
    'generator of the system': random.SystemRandom,
    'array of text': lambda: numpy.array(['a', 'b']),
    'pattern': lambda: re.compile('a'),
    'error': lambda: ValueError('a'),
    'path': lambda: pathlib.Path('a'),
    'time': lambda: datetime.datetime(2020, 1, 1),
    'type of numbers': lambda: numpy.dtype('f'),
    'function of numpy': lambda: numpy.mean,
    'function of arrays': lambda: numpy.add,
    'lock': threading.Lock,
    'reentrant lock': threading.RLock,
    'condition': threading.Condition,
    'closed file': lambda: [file := io.StringIO('abc'), file.close()][0],
    'file for writing': lambda: opened(os.devnull, 'w'),
    'iterator of a list': lambda: iter([1]),
    'numbers': lambda: itertools.count(0.5, -2),
    'module': lambda: sys,
    'function in a graph': lambda: functions.relu(chainer.Variable(numpy.ones(1, 'f'))).creator,
    'loggers': lambda: logging.root.manager,
    'field of a named tuple': lambda: vars(PairOfUser)['first'],
}


@pytest.mark.parametrize('name', HARMLESS)
def test_what_does_no_harm(name):
    given = HARMLESS[name]()
    assert Reach(lambda: given).cannot == []
    getattr(given, 'close', str)()


def test_an_iterator_in_a_default():
    def loss(numbers=itertools.count()):  # NOQA: B008
        return next(numbers)

    assert Reach(loss).cannot == ['consume part of a default of loss']


UNREPLACEABLE = {
    'tuple': lambda: (iter([1]),),
    'partial': lambda: functools.partial(next, iter([1])),
    'method': lambda: iter([1]).__next__,
    'fractions': lambda: itertools.count(fractions.Fraction(1, 2)),
}


@pytest.mark.parametrize('name', UNREPLACEABLE)
def test_an_iterator_that_no_copy_can_stand_for(name):
    given = UNREPLACEABLE[name]()
    assert Reach(lambda: given).cannot == ['consume part of the variable given that <lambda> reads']


def test_an_iterator_that_is_also_in_a_tuple():
    given = iter([1])
    pair = (given,)
    assert Reach(lambda: (given, pair)).cannot == [
        'consume part of the variable pair that <lambda> reads'
    ]


def test_nothing_was_cut():
    assert Reach(Many()).cut == []


def test_a_long_list_is_cut():
    many = list(range(10**5))
    reach = Reach(lambda: many)
    assert reach.cut == ['the variable many that <lambda> reads'] and len(reach.values()) < 10


def test_the_last_of_many_objects_is_watched():
    groups = [[types.SimpleNamespace(w=1.0) for _ in range(200)] for _ in range(4)]
    reach = Reach(lambda: groups[3][-1].w)
    before = moment(reach)
    groups[3][-1].w = 2.0
    assert difference(reach, before) == ['the attribute w of SimpleNamespace']


def test_a_long_list_that_grows_changes_the_sizes():
    many = list(range(10**5))
    reach = Reach(lambda: many)
    before = reach.sizes()
    many.append(1)
    assert reach.sizes() != before


def test_a_long_chain_of_objects_is_cut():
    chain: dict = {}
    for _ in range(2 * MAX_THINGS):
        chain = {'next': chain}
    reach = Reach(lambda: chain)
    assert reach.cannot == [
        'leave changes in the variable chain that <lambda> reads, which is reached only '
        'after %d other objects' % MAX_THINGS
    ]


def test_as_many_objects_are_followed_as_the_message_says():
    chain: dict = {}
    links = []
    for _ in range(2 * MAX_THINGS):
        chain = {'next': chain}
        links.append(chain)
    reach = Reach(lambda: chain)
    n_others = 2  # the function, and the cell of its variable
    assert sum(map(reach.follows, links)) + n_others == MAX_THINGS


def test_all_links_are_watched():
    model = chainer.ChainList(*(chainer.Link() for _ in range(501)))
    reach = Reach(model)
    before = reach.values()
    model[500].w = 1
    assert len(reach.values()) == len(before) + 1 and reach.cut == []


def by_name_of_a_global():
    return globals()['W']


def by_text():
    return eval('W')


def by_name_of_a_module():
    return vars(sys.modules[HERE])['W']


def by_globals_of_a_function():
    return helper.__globals__['W']


UNKNOWN = {
    by_name_of_a_global: 'leave changes that by_name_of_a_global may make through globals',
    by_text: 'leave changes that by_text may make through eval',
    by_name_of_a_module: 'leave changes that by_name_of_a_module may make through sys.modules',
    by_globals_of_a_function: (
        'leave changes that by_globals_of_a_function may make through __globals__'
    ),
}


@pytest.mark.parametrize('loss', UNKNOWN)
def test_variables_that_code_does_not_name_cannot_be_put_back(loss):
    assert Reach(loss).cannot == [UNKNOWN[loss]]


def test_a_module_that_is_not_imported_yet_is_cut():
    def loss():
        import not_imported_yet

        return not_imported_yet

    assert Reach(loss).cut == ['the module not_imported_yet that loss imports']


class Raising:
    """An object whose attributes cannot be read."""

    @property
    def __dict__(self):
        raise NotImplementedError


def test_an_object_that_cannot_be_looked_at():
    given = Raising()
    assert Reach(lambda: given).cannot == [
        'leave changes in the variable given that <lambda> reads'
    ]


def test_a_context_variable_without_a_value():
    variable: contextvars.ContextVar = contextvars.ContextVar('n')
    assert Reach(lambda: variable).cannot == [
        'leave a value in the context variable n, which has no value now'
    ]


# Objects of Chainer's.


@pytest.fixture
def updater():
    model = links.Linear(1, 1)
    optimizer = chainer.optimizers.SGD(0.5).setup(model)
    iterator = SerialIterator(numpy.arange(6, dtype='f').reshape(6, 1), 2, shuffle=False)
    return StandardUpdater(iterator, optimizer, loss_func=lambda x: functions.sum(model(x)))


POSITION = 'the attribute position of SerialIterator'
ATTRIBUTES = {
    'iteration of StandardUpdater': lambda updater: updater.iteration,
    'lr of SGD': lambda updater: updater.get_optimizer('main').lr,
    't of SGD': lambda updater: updater.get_optimizer('main').t,
    'current_position of SerialIterator': lambda updater: (
        updater.get_iterator('main').current_position
    ),
}


@pytest.mark.parametrize('name', ATTRIBUTES)
def test_attributes_of_chainers_objects_that_code_reads(updater, name):
    read = ATTRIBUTES[name]
    reach = Reach(lambda: read(updater))
    assert reach.reads_training

    before = moment(reach)
    updater.update()
    updater.get_optimizer('main').lr *= 0.5
    assert difference(reach, before) == ['the attribute ' + name, POSITION]


def test_the_iteration_by_way_of_the_trainer(updater):
    trainer = training.Trainer(updater)
    reach = Reach(lambda: trainer.updater.iteration)
    before = moment(reach)
    updater.update()
    assert difference(reach, before)[0] == 'the attribute iteration of StandardUpdater'


def test_attributes_of_chainers_objects_whose_names_are_made(updater):
    name = 'iteration'
    reach = Reach(lambda: getattr(updater, name))
    before = moment(reach)
    updater.update()
    assert 'the attribute iteration of StandardUpdater' in difference(reach, before)


def test_attributes_of_chainers_objects_that_no_code_reads(updater):
    reach = Reach(lambda: updater)
    before = moment(reach)
    updater.update()
    assert not reach.reads_training and difference(reach, before) == [POSITION]


def test_attributes_of_chainers_objects_that_code_names_are_put_back(updater):
    with undone(Reach(lambda: updater.iteration)):
        updater.iteration = 7
        updater.is_new = True
    assert updater.iteration == 0 and updater.is_new


def test_attributes_that_a_run_adds_to_chainers_objects_are_deleted(updater):
    with undone(Reach(lambda: updater.best)):
        updater.best = 1.0
    assert not hasattr(updater, 'best')


def test_an_iterator_of_the_users_is_followed():
    class Own(chainer.dataset.Iterator):
        n = 0

        def __next__(self):
            Own.n += 1

    own = Own()
    reach = Reach(lambda: own.next())
    assert reach.cannot == []
    with undone(reach):
        own.next()
    assert Own.n == 0


def test_the_graph_of_a_function_is_not_followed():
    x = chainer.Variable(numpy.ones(1, 'f'))
    node = functions.leaky_relu(x, 0.1).creator
    reach = Reach(lambda: node.slope * len(node.inputs))
    assert 'the attribute slope of LeakyReLU' in reach.texts()
    assert not reach.arrays and not reach.follows(node.inputs)


def test_an_attribute_of_a_users_that_loggers_have_too():
    holder = Schedule()
    holder._cache = {}
    with undone(Reach(lambda: holder._cache.update(a=1))):
        holder._cache['a'] = 1
    assert holder._cache == {}


def test_no_property_of_a_users_is_looked_at():
    class Own(StandardUpdater):
        @property
        def iteration(self):
            raise NotImplementedError

    own = Own.__new__(Own)
    assert not Reach(lambda: own.iteration).reads_training


def test_an_iterator_of_chainers_that_a_loss_reads_from():
    examples = SerialIterator([[1], [2], [3]], 2, shuffle=False)
    reach = Reach(lambda: examples.next())
    before = reach.states()
    with undone(reach):
        assert examples.next() == [[1], [2]]
        (changed,) = [text for text, state in reach.states().items() if state != before[text]]
    assert changed == POSITION
    assert examples.next() == [[1], [2]]


def test_the_order_of_an_iterator_of_chainers():
    generator = numpy.random.RandomState(0)
    examples = SerialIterator([1, 2, 3], 3, order_sampler=ShuffleOrderSampler(generator))
    with undone(Reach(lambda: next(examples))):
        expected = [examples.next() for _ in range(3)]
    assert [examples.next() for _ in range(3)] == expected


USES = {
    'epoch': (lambda examples: examples.epoch, False),
    'method': (lambda examples: examples.next(), True),
    'builtin': (lambda examples: next(examples), True),
}


@pytest.mark.parametrize('name', USES)
def test_an_iterator_of_several_threads(name):
    use, is_lost = USES[name]
    examples = MultithreadIterator([1, 2, 3], 2)
    text = 'consume part of the attribute dataset of MultithreadIterator'
    try:
        assert Reach(functools.partial(use, examples)).cannot == [text] * is_lost
    finally:
        examples.finalize()


# Changes are saved, put back and made again.


def test_putting_back_keeps_objects_and_their_order():
    state: dict = {'a': [1], 'b': {2}, 'c': collections.OrderedDict(x=1, y=2)}
    objects = list(state.values())
    reach = Reach(lambda: state)
    saved = reach.save()
    state['a'].append(2)
    state['b'].clear()
    state['c'].move_to_end('x')
    state['d'] = state.pop('a')
    reach.restore(saved)
    assert [(name, *value) for name, value in state.items()] == [
        ('a', 1),
        ('b', 2),
        ('c', 'x', 'y'),
    ]
    assert all(map(lambda one, other: one is other, objects, state.values()))


def test_random_numbers_may_be_left_as_they_are():
    reach = Reach(Many())
    saved = reach.save()
    expected = [numpy.random.rand(), random.random()]
    reach.restore(saved, with_numbers=False)
    assert [numpy.random.rand(), random.random()] != expected


def test_a_link_that_a_run_adds_is_removed():
    class Lazy(chainer.Chain):
        def forward(self, x):
            if not hasattr(self, 'linear'):
                with self.init_scope():
                    self.linear = links.Linear(2, 2)
            return self.linear(x)

    model = Lazy()
    with undone(Reach(model)):
        model(numpy.ones((2, 2), 'f'))
    assert not hasattr(model, 'linear') and list(model.namedparams()) == []


def test_attributes_of_links_that_no_code_names_are_put_back():
    model = Many()
    with undone(Reach(model)):
        model.history.append(1)
    assert model.history == []


def test_the_configuration_is_put_back():
    with undone(Reach(Many())):
        chainer.config.train = False
        chainer.global_config.dtype = numpy.float16
    assert chainer.config.train and chainer.config.dtype == numpy.float32


class Kept:
    y: Any = None


def keeps_in_a_link():
    model = Counting()
    return model, lambda: model.n


def keeps_in_a_dict():
    kept = {'y': 0}
    return (lambda: kept.update(y=1)), lambda: kept['y']


def keeps_in_a_class():
    Kept.y = 0

    def loss():
        Kept.y = 1

    return loss, lambda: Kept.y


def keeps_in_a_list():
    kept = [0]
    return (lambda: kept.__setitem__(0, 1)), lambda: kept[0]


def keeps_in_a_closure():
    kept = 0

    def loss():
        nonlocal kept
        kept = 1

    return loss, lambda: kept


KEEPS = keeps_in_a_link, keeps_in_a_dict, keeps_in_a_class, keeps_in_a_list, keeps_in_a_closure


@pytest.mark.parametrize('make', (*KEEPS, by_global, by_slots, by_module))
def test_what_a_run_changed_is_done_again(make):
    loss, kept = make()
    reach = Reach(loss)
    with undone(reach) as saved:
        loss()
        changes = reach.changes(saved)
    assert kept() == 0
    for place, new in changes:
        place.apply(new)
    assert kept() == 1


def test_what_was_deleted_is_deleted_again():
    kept = {'y': 0}
    reach = Reach(lambda: kept.pop('y'))
    with undone(reach) as saved:
        del kept['y']
        changes = reach.changes(saved)
    for place, new in changes:
        place.apply(new)
    assert kept == {}


def test_other_attributes_are_left_alone_when_changes_are_done_again():
    model = Counting()
    reach = Reach(model)
    with undone(reach) as saved:
        model()
        changes = reach.changes(saved)
    model.epoch = 3
    for place, new in changes:
        place.apply(new)
    assert model.n == 1 and model.epoch == 3


def test_functions_in_cython_are_constants():
    """`numpy.random.seed` is one since NumPy 2, and its class has a read-only member."""

    def loss():
        numpy.random.seed(1)

    reach = Reach(loss)
    assert not reach.cannot and not reach._objects


def test_nothing_changed():
    model = Many()
    reach = Reach(model)
    saved = reach.save()
    model.loss(1)
    numpy.random.rand()
    assert reach.changes(saved) == []


def test_a_cache_that_is_filled_once_differs_only_once():
    cache: dict = {}

    def loss():
        return cache.setdefault('factor', object())

    reach = Reach(loss)
    first = moment(reach)
    loss()
    second = moment(reach)
    assert difference(reach, first) == [
        'the variable cache that loss reads',
        "'factor' in the variable cache that loss reads",
    ]
    loss()
    assert difference(reach, second) == []


class Refusing(dict):
    """A user's dict with its entries as attributes."""

    def __getattr__(self, name):
        return self[name]

    def values(self):
        raise NotImplementedError

    __iter__ = values


def test_no_code_of_a_user_runs_to_look():
    opts = Refusing(w=[1])
    with undone(Reach(lambda: opts)):
        dict.get(opts, 'w').append(2)
    assert dict.get(opts, 'w') == [1]


def test_two_looks_at_the_same_objects_are_equal():
    model = Many()
    assert named_values(Reach(model)) == named_values(Reach(model))


def test_an_updater_that_a_loss_runs_cannot_be_put_back():
    """The step of another training changes its parameters, counters and iterator."""
    model = links.Linear(2, 2)
    optimizer = chainer.optimizers.SGD().setup(model)
    inner = StandardUpdater(SerialIterator([numpy.zeros(2, 'f')], 1), optimizer)

    def loss():
        inner.update()

    assert 'leave changes that a step of the StandardUpdater makes' in Reach(loss).cannot
