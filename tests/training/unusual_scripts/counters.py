"""Scripts whose step changes values that it reads: counters in every place that Python has.

The usual purpose is a warm-up, here by the factor `warm(n)` of the loss.
"""

import argparse
import array
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import heapq
import itertools
import logging
import operator
import queue
import random
import sys
import threading
import types
import weakref
from typing import Any

import numpy

import chainer
from chainer import functions as F, optimizers
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction import Regressor

from tests.training.unusual_scripts.bench import (
    at,
    RATE,
    every,
    number,
    script,
    Script,
    Squares,
    warm,
    Weighted,
)

SCRIPTS: dict[str, Script] = {}


step = 0


class InGlobal(Squares):
    def __call__(self, atoms, adj, t):
        global step
        step += 1
        loss = F.mean_squared_error(self.predictor(atoms, adj), t) * warm(step)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, told=r'changes .*\bstep of\b')
def a_global(bench):
    bench.train(InGlobal(bench))
    return {'step': step}


n_calls = 0


def advanced():
    global n_calls
    n_calls += 1
    return warm(n_calls)


class ByHelper(Weighted):
    def factor(self):
        return advanced()


@script(SCRIPTS)
def a_global_that_a_function_of_a_method_advances(bench):
    bench.train(ByHelper(bench))
    return {'n_calls': n_calls}


@script(SCRIPTS)
def a_global_that_the_loss_function_advances(bench):
    predictor = bench.predictor()

    def loss_func(atoms, adj, t):
        global step
        step += 1
        return F.mean_squared_error(predictor(atoms, adj), t) * warm(step)

    bench.train(predictor, loss_func=loss_func)
    return {'step': step}


class OfClass(Weighted):
    calls = 0

    def factor(self):
        type(self).calls += 1
        return warm(self.calls)


@script(SCRIPTS, told=r'changes .*\bcalls\b')
def a_class_attribute(bench):
    bench.train(OfClass(bench))
    return {'calls': OfClass.calls}


class Clock:
    ticks = 0

    @classmethod
    def tick(cls):
        cls.ticks += 1
        return warm(cls.ticks)


class ByClassMethod(Weighted):
    def factor(self):
        return Clock.tick()


@script(SCRIPTS)
def a_class_method_of_another_class(bench):
    bench.train(ByClassMethod(bench))
    return {'ticks': Clock.ticks}


class Meter:
    reads = 0

    @staticmethod
    def read():
        Meter.reads += 1
        return warm(Meter.reads)


class ByStaticMethod(Weighted):
    factor = staticmethod(Meter.read)


@script(SCRIPTS)
def a_static_method(bench):
    bench.train(ByStaticMethod(bench))
    return {'reads': Meter.reads}


class Registry(type):
    n_used = 0

    def used(cls):
        Registry.n_used += 1
        return warm(Registry.n_used)


class Registered(metaclass=Registry):
    pass


class ByMetaclass(Weighted):
    def factor(self):
        return Registered.used()


@script(SCRIPTS)
def a_metaclass(bench):
    bench.train(ByMetaclass(bench))
    return {'n_used': Registry.n_used}


class ByProperty(Weighted):
    _n = 0

    @property
    def next_factor(self):
        self._n += 1
        return warm(self._n)

    def factor(self):
        return self.next_factor


@script(SCRIPTS)
def a_property_that_counts(bench):
    model = ByProperty(bench)
    bench.train(model)
    return {'n': model._n}


class OfLink(Weighted):
    def factor(self):
        self.n += 1
        return warm(self.n)


@script(SCRIPTS)
def an_attribute_of_the_chain(bench):
    model = OfLink(bench, n=0)
    bench.train(model)
    return {'n': model.n}


class CountingHead(chainer.Chain):
    def __init__(self):
        super().__init__()
        self.n = 0

    def __call__(self, y):
        self.n += 1
        return y * warm(self.n)


class WithHead(Squares):
    def __init__(self, bench):
        super().__init__(bench)
        with self.init_scope():
            self.head = CountingHead()

    def weighed(self, loss):
        return self.head(loss)


@script(SCRIPTS)
def an_attribute_of_a_link_within(bench):
    model = WithHead(bench)
    bench.train(model)
    return {'n': model.head.n}


class Schedule:
    def __init__(self):
        self.n = 0

    def next(self):
        self.n += 1
        return warm(self.n)


class WithSchedule(Weighted):
    def factor(self):
        return self.schedule.next()


@script(SCRIPTS, told=r'changes .*\bn\b')
def an_object_in_an_attribute(bench):
    schedule = Schedule()
    bench.train(WithSchedule(bench, schedule=schedule))
    return {'n': schedule.n}


SCHEDULE = Schedule()


class ByGlobalObject(Weighted):
    def factor(self):
        return SCHEDULE.next()


@script(SCRIPTS)
def an_object_in_a_global(bench):
    bench.train(ByGlobalObject(bench))
    return {'n': SCHEDULE.n}


def weighed_by(bench, factor):
    """Train a Regressor whose loss function multiplies by the factor of a step."""

    def lossfun(y, t):
        return F.mean_squared_error(y, t) * factor()

    model = Regressor(bench.predictor(), lossfun=lossfun)
    bench.train(model)
    return model


@script(SCRIPTS, told=r'changes .*\bhistory\b')
def a_list_in_a_closure(bench):
    history = []

    def factor():
        history.append(len(history))
        return warm(len(history))

    weighed_by(bench, factor)
    return {'history': history}


COUNT = [0]


class ByGlobalList(Weighted):
    def factor(self):
        COUNT[0] += 1
        return warm(COUNT[0])


@script(SCRIPTS)
def a_global_list_of_one_number(bench):
    bench.train(ByGlobalList(bench))
    return {'count': COUNT}


@script(SCRIPTS, told=r'changes .*\bn\b')
def a_variable_of_a_closure(bench):
    n = 0

    def factor():
        nonlocal n
        n += 1
        return warm(n)

    weighed_by(bench, factor)
    return {'n': n}


@script(SCRIPTS)
def a_default_argument(bench):
    def factor(calls=[0]):  # noqa: B006
        calls[0] += 1
        return warm(calls[0])

    weighed_by(bench, factor)
    return {'calls': factor.__defaults__}


def with_attribute():
    own: Any = with_attribute
    own.n = getattr(own, 'n', 0) + 1
    return warm(own.n)


@script(SCRIPTS)
def an_attribute_of_a_function(bench):
    weighed_by(bench, with_attribute)
    return {'n': vars(with_attribute)['n']}


@script(SCRIPTS)
def a_deque_in_a_namespace(bench):
    settings = types.SimpleNamespace(recent=collections.deque([0], maxlen=3))

    def factor():
        settings.recent.append(settings.recent[-1] + 1)
        return warm(settings.recent[-1])

    weighed_by(bench, factor)
    return {'recent': list(settings.recent)}


class Slotted:
    __slots__ = ('n',)

    def __init__(self):
        self.n = 0


@script(SCRIPTS)
def slots(bench):
    slotted = Slotted()

    def factor():
        slotted.n += 1
        return warm(slotted.n)

    weighed_by(bench, factor)
    return {'n': slotted.n}


@dataclasses.dataclass
class State:
    n: int = 0
    seen: list = dataclasses.field(default_factory=list)


@script(SCRIPTS)
def a_dataclass(bench):
    state = State()

    def factor():
        state.n += 1
        state.seen.append(state.n)
        return warm(state.n)

    weighed_by(bench, factor)
    return dataclasses.asdict(state)


args = argparse.Namespace(step=0, unit=8)


class ByArguments(Weighted):
    def factor(self):
        args.step += 1
        return warm(args.step)


@script(SCRIPTS, told=r'changes .*\bstep\b.*\bargs\b|changes .*\bstep of Namespace\b')
def a_global_namespace_of_arguments(bench):
    bench.train(ByArguments(bench))
    return vars(args)


config: Any = types.ModuleType('config_of_a_user')
config.step = 0


class ByModule(Weighted):
    def factor(self):
        config.step += 1
        return warm(config.step)


@script(SCRIPTS)
def a_module_of_settings(bench):
    sys.modules['config_of_a_user'] = config
    try:
        bench.train(ByModule(bench))
    finally:
        del sys.modules['config_of_a_user']
    return {'step': config.step}


NUMBERS = itertools.count(1)


class ByCount(Weighted):
    def factor(self):
        return warm(next(NUMBERS))


@script(SCRIPTS)
def itertools_count_in_a_global(bench):
    bench.train(ByCount(bench))
    return {'next': next(NUMBERS)}


@script(SCRIPTS)
def itertools_cycle(bench):
    weights = itertools.cycle([1.0, 0.5, 0.25])
    weighed_by(bench, lambda: next(weights))
    return {'next': next(weights)}


@script(SCRIPTS, told=r'\bweights\b')
def a_generator(bench):
    weights = (warm(n) for n in range(1, 1000))
    weighed_by(bench, lambda: next(weights))
    return {'next': next(weights)}


@script(SCRIPTS)
def an_iterator_of_a_list(bench):
    weights = iter([warm(n) for n in range(1, 1000)])
    weighed_by(bench, lambda: next(weights))
    return {'next': next(weights)}


class Halving:
    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return warm(self.n)


@script(SCRIPTS)
def an_iterator_class_of_the_users(bench):
    weights = Halving()
    weighed_by(bench, lambda: next(weights))
    return {'n': weights.n}


N_STEPS_DONE: contextvars.ContextVar = contextvars.ContextVar('n_steps_done')


class ByContext(Weighted):
    def factor(self):
        N_STEPS_DONE.set(N_STEPS_DONE.get() + 1)
        return warm(N_STEPS_DONE.get())


@script(SCRIPTS)
def a_context_variable(bench):
    N_STEPS_DONE.set(0)
    bench.train(ByContext(bench))
    return {'n': N_STEPS_DONE.get()}


@script(SCRIPTS)
def thread_local_data(bench):
    local = threading.local()
    local.n = 0

    def factor():
        local.n += 1
        return warm(local.n)

    weighed_by(bench, factor)
    return {'n': local.n}


@script(SCRIPTS)
def a_set_that_grows(bench):
    seen = set()

    def factor():
        seen.add(len(seen))
        return warm(len(seen))

    weighed_by(bench, factor)
    return {'seen': sorted(seen)}


class WithArray(Weighted):
    def factor(self):
        self.n += 1
        return warm(float(self.n[0]))


@script(SCRIPTS)
def an_array_of_the_host(bench):
    model = WithArray(bench, n=numpy.zeros(1))
    bench.train(model)
    return {'n': model.n.tolist()}


@script(SCRIPTS)
def arrays_and_bytes_of_the_standard_library(bench):
    counts = array.array('l', [0])
    flags = bytearray(1)

    def factor():
        counts[0] += 1
        flags[0] = 1 - flags[0]
        return warm(counts[0]) + flags[0]

    weighed_by(bench, factor)
    return {'counts': list(counts), 'flags': list(flags)}


@script(SCRIPTS, told=r'a check would keep alive what the variable weak that')
def behind_a_weak_reference(bench):
    schedule = Schedule()
    weak = weakref.ref(schedule)
    weighed_by(bench, lambda: weak().next())
    return {'n': schedule.n}


TOTALS: collections.Counter = collections.Counter()
BY_SIZE: collections.defaultdict = collections.defaultdict(int)


class ByCounter(Squares):
    def __call__(self, atoms, adj, t):
        TOTALS['steps'] += 1
        BY_SIZE[len(t)] += 1
        loss = F.mean_squared_error(self.predictor(atoms, adj), t) * warm(TOTALS['steps'])
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_counter_and_a_defaultdict(bench):
    bench.train(ByCounter(bench))
    return {'totals': dict(TOTALS), 'by size': dict(BY_SIZE)}


class Nested(Weighted):
    def factor(self):
        counts = self.state['train']['counts']
        counts['step'] += 1
        return warm(counts['step'])


@script(SCRIPTS)
def a_dict_in_dicts_of_an_attribute(bench):
    model = Nested(bench, state={'train': {'counts': {'step': 0}}})
    bench.train(model)
    return model.state


class Counted:
    """Mixin that counts in its own dict."""

    counts: dict[str, int] = {}

    def counted(self):
        name = type(self).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]


class WithMixin(Counted, Weighted):
    def factor(self):
        return warm(self.counted())


class Inherited(WithMixin):
    def factor(self):
        return super().factor() / 2


@script(SCRIPTS)
def a_mixin_and_an_inherited_chain(bench):
    bench.train(Inherited(bench))
    return Counted.counts


@script(SCRIPTS)
def a_partial_with_a_dict(bench):
    def lossfun(y, t, state):
        state['n'] += 1
        return F.mean_squared_error(y, t) * warm(state['n'])

    state = {'n': 0}
    bench.train(Regressor(bench.predictor(), lossfun=functools.partial(lossfun, state=state)))
    return state


class CallableLoss:
    def __init__(self):
        self.n = 0

    def __call__(self, y, t):
        self.n += 1
        return F.mean_squared_error(y, t) * warm(self.n)


@script(SCRIPTS)
def an_object_as_lossfun(bench):
    lossfun = CallableLoss()
    bench.train(Regressor(bench.predictor(), lossfun=lossfun))
    return {'n': lossfun.n}


class Trained:
    def __init__(self, predictor):
        self.predictor = predictor
        self.n = 0

    def loss(self, atoms, adj, t):
        self.n += 1
        loss = F.mean_squared_error(self.predictor(atoms, adj), t) * warm(self.n)
        chainer.report({'loss': loss}, self.predictor)
        return loss


@script(SCRIPTS)
def a_bound_method_as_loss_func(bench):
    trained = Trained(bench.predictor())
    bench.train(trained.predictor, loss_func=trained.loss)
    return {'n': trained.n}


@script(SCRIPTS, told=r'changes .*\bcalled\b')
def a_metric_that_appends_to_a_list(bench):
    called = []

    def mae(y, t):
        called.append(len(t))
        return F.mean_absolute_error(y, t)

    model = Regressor(bench.predictor(), F.mean_squared_error, metrics_fun={'mae': mae})
    bench.train(model)
    return {'called': called}


class Handler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


logger = logging.getLogger('script_of_a_user')


class Logging(Squares):
    def weighed(self, loss):
        logger.warning('a loss of shape %s', loss.shape)
        return loss


@script(SCRIPTS)
def a_logger_with_a_handler_of_the_users(bench):
    handler = Handler()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        bench.train(Logging(bench))
    finally:
        logger.removeHandler(handler)
    return {'texts': handler.texts}


class WarmsUp(Weighted):
    def factor(self):
        if self.n < 3:
            self.n += 1
        return self.n / 3


@script(SCRIPTS)
def a_counter_that_stops(bench):
    model = WarmsUp(bench, n=0)
    bench.train(model)
    return {'n': model.n}


class Alternates(Weighted):
    def factor(self):
        self.is_odd = not self.is_odd
        return 1.0 if self.is_odd else 0.5


@script(SCRIPTS)
def a_flag_that_alternates(bench):
    model = Alternates(bench, is_odd=False)
    bench.train(model)
    return {'is odd': model.is_odd}


class Largest(Squares):
    def __call__(self, atoms, adj, t):
        self.largest = max(self.largest, len(t))
        self.n_small += len(t) < 6
        loss = F.mean_squared_error(self.predictor(atoms, adj), t) * (self.largest / 6)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_count_of_some_batches_only(bench):
    model = Largest(bench, largest=0, n_small=0)
    updater = bench.updater(model, data=bench.molecules(27))

    def shrink(trainer):
        trainer.updater.get_iterator('main').batch_size = 4

    bench.run(updater, (shrink, at(20)))
    return {'largest': model.largest, 'small': model.n_small}


class ReportsAtTimes(Squares):
    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t)
        self.n += 1
        if self.n % 5 == 0:
            chainer.report({'mae': F.mean_absolute_error(y, t)}, self)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_report_at_times(bench):
    model = ReportsAtTimes(bench, n=0)
    bench.train(model)
    return {'n': model.n}


class Baseline(Squares):
    """Model that divides by the moving average of earlier losses, which is an array."""

    def weighed(self, loss):
        factor = 1 / (1 + self.baseline)
        self.baseline = 0.9 * self.baseline + 0.1 * loss.array
        return loss * factor


@script(SCRIPTS, quick=True)
def a_moving_average_that_the_loss_reads(bench):
    model = Baseline(bench, baseline=bench.xp.zeros((), 'f'))
    bench.train(model)
    return {'baseline': number(model.baseline)}


class BaselineInDict(Squares):
    def weighed(self, loss):
        factor = 1 / (1 + self.memory['baseline'])
        self.memory['baseline'] = 0.9 * self.memory['baseline'] + 0.1 * loss.array
        return loss * factor


@script(SCRIPTS)
def a_moving_average_in_a_dict(bench):
    model = BaselineInDict(bench, memory={'baseline': bench.xp.zeros((), 'f')})
    bench.train(model)
    return {'baseline': number(model.memory['baseline'])}


class InPlace(Squares):
    def weighed(self, loss):
        factor = 1 / (1 + self.baseline)
        self.baseline *= 0.9
        self.baseline += 0.1 * loss.array
        return loss * factor


@script(SCRIPTS)
def a_moving_average_written_in_place(bench):
    model = InPlace(bench, baseline=bench.xp.zeros((), 'f'))
    bench.train(model)
    return {'baseline': number(model.baseline)}


class Persistent(InPlace):
    def __init__(self, bench):
        super().__init__(bench)
        self.add_persistent('baseline', bench.xp.zeros((), 'f'))


@script(SCRIPTS)
def a_persistent_array(bench):
    model = Persistent(bench)
    bench.train(model)
    return {'baseline': number(model.baseline)}


class KeepsOutput(Squares):
    def __call__(self, atoms, adj, t):
        self.y = self.predictor(atoms, adj)
        self.h = self.y.array
        loss = F.mean_squared_error(self.y, t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, quick=True)
def attributes_that_hold_the_last_output(bench):
    model = KeepsOutput(bench)
    sums: list[float] = []

    def note(trainer):
        sums.append(number(model.h.sum()))
        sums.append(number(F.sum(model.y)))

    bench.train(model, (note, every(7)))
    return {'sums': sums}


class KeepsInDict(Squares):
    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        self.last.update(y=y.array, n=len(t))
        loss = F.mean_squared_error(y, t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_dict_that_holds_the_last_output(bench):
    model = KeepsInDict(bench, last={})
    sums: list[float] = []
    bench.train(model, (lambda trainer: sums.append(number(model.last['y'].sum())), every(5)))
    return {'sums': sums, 'n': model.last['n']}


class AppendsArrays(Squares):
    def weighed(self, loss):
        self.losses.append(loss.array)
        return loss


@script(SCRIPTS)
def a_list_of_losses_as_arrays(bench):
    model = AppendsArrays(bench, losses=[])
    bench.train(model)
    return {'losses': [float(loss) for loss in model.losses]}


class AppendsNumbers(Squares):
    def weighed(self, loss):
        self.losses.append(float(loss.array))
        return loss


@script(SCRIPTS)
def a_list_of_losses_as_numbers(bench):
    model = AppendsNumbers(bench, losses=[])
    bench.train(model)
    return {'losses': model.losses}


class WithLastOutput(Squares):
    """Model with a penalty for the difference from the last step's output."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t)
        mean = F.mean(y, axis=0)
        if self.before is not None:
            loss += 0.1 * F.sum((mean - self.before) ** 2)
        self.before = mean.array
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def the_output_of_the_step_before(bench):
    model = WithLastOutput(bench, before=None)
    bench.train(model)
    return {'before': [float(value) for value in model.before]}


class Bank(Squares):
    """Model with a memory bank, a ring of past means."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t) + 0.1 * F.mean(F.mean(y, axis=0) * self.bank.mean(axis=0))
        self.bank[self.position] = y.array.mean(axis=0)
        self.position = (self.position + 1) % len(self.bank)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_memory_bank_with_a_position(bench):
    model = Bank(bench, bank=bench.xp.zeros((4, 2), 'f'), position=0)
    bench.train(model)
    return {'position': model.position, 'bank': float(model.bank.sum())}


@script(SCRIPTS)
def a_queue(bench):
    waiting: queue.Queue = queue.Queue()
    for n in range(100):
        waiting.put(warm(n + 1))
    weighed_by(bench, waiting.get)
    return {'left': waiting.qsize()}


@script(SCRIPTS)
def a_heap(bench):
    waiting = [warm(n + 1) for n in range(100)]
    weighed_by(bench, lambda: heapq.heappop(waiting))
    return {'left': waiting}


@script(SCRIPTS)
def a_cache_filled_once(bench):
    cache: dict[int, float] = {}
    made = []

    def factor_of(n):
        if n not in cache:
            made.append(n)
            cache[n] = 1 / n
        return cache[n]

    def lossfun(y, t):
        return F.sum((y - t) ** 2) * factor_of(len(t))

    bench.train(Regressor(bench.predictor(), lossfun=lossfun))
    return {'cache': cache, 'made': made}


n_made = 0


@functools.lru_cache
def scale_of(n):
    global n_made
    n_made += 1
    return 1 / n


class Cached(Squares):
    def __call__(self, atoms, adj, t):
        loss = F.sum((self.predictor(atoms, adj) - t) ** 2) * scale_of(len(t))
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def functools_lru_cache(bench):
    bench.train(Cached(bench), data=bench.molecules(23))  # the last batch of an epoch is smaller
    return {'made': n_made, 'misses': scale_of.cache_info().misses}


@script(SCRIPTS, outside='')
def hits_of_functools_lru_cache(bench):
    """A replay calls no function, so the cache counts no hit."""
    bench.train(Cached(bench))
    return {'hits': scale_of.cache_info().hits}


class LazyConstant(Weighted):
    @functools.cached_property
    def constant(self):
        self.n_made += 1
        return 0.5

    def factor(self):
        return self.constant


@script(SCRIPTS)
def functools_cached_property(bench):
    model = LazyConstant(bench, n_made=0)
    bench.train(model)
    return {'made': model.n_made}


class SkipsBad(Squares):
    """Model that catches and counts the errors of some batches."""

    def weighed(self, loss):
        self.n += 1
        try:
            if self.n % 10 == 0:
                raise ValueError('a bad batch')
        except ValueError as error:
            self.errors.append(str(error))
            return 0 * loss
        return loss


@script(SCRIPTS)
def errors_that_the_loss_catches(bench):
    model = SkipsBad(bench, n=0, errors=[])
    bench.train(model)
    return {'n': model.n, 'errors': model.errors}


class LongHistory(Weighted):
    def factor(self):
        self.history.append(len(self.history))
        return warm(len(self.history) - 5000)


@script(SCRIPTS)
def a_long_list_that_grows(bench):
    model = LongHistory(bench, history=list(range(5000)))
    bench.train(model)
    return {'length': len(model.history), 'last': model.history[-1]}


class Deep:
    def __init__(self, depth):
        self.inner = Deep(depth - 1) if depth else Schedule()


class DeepInside(Weighted):
    def factor(self):
        inner = self.deep
        while hasattr(inner, 'inner'):
            inner = inner.inner
        return inner.next()


@script(SCRIPTS)
def an_object_deep_inside_of_others(bench):
    model = DeepInside(bench, deep=Deep(12))
    bench.train(model)
    inner: Any = model.deep
    while hasattr(inner, 'inner'):
        inner = inner.inner
    return {'n': inner.n}


class ByGlobals(Weighted):
    def factor(self):
        globals()['step'] += 1
        return warm(globals()['step'])


@script(SCRIPTS)
def a_global_by_the_function_globals(bench):
    bench.train(ByGlobals(bench))
    return {'step': step}


class ByLibrary(Weighted):
    """Model that keeps a user's attribute on an object of a library."""

    def factor(self):
        self.predictor.mlp.n_calls = getattr(self.predictor.mlp, 'n_calls', 0) + 1
        return warm(self.predictor.mlp.n_calls)


@script(SCRIPTS)
def an_attribute_of_a_links_of_a_library(bench):
    model = ByLibrary(bench)
    bench.train(model)
    return {'n': model.predictor.mlp.n_calls}


class FromQueue(Squares):
    """Model that compares its output with an earlier one, from a queue."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t) + 0.5 * F.mean_squared_error(y, self.bank[0])
        self.bank.append(y.array)
        if isinstance(self.bank, list):
            self.bank.pop(0)
        chainer.report({'loss': loss}, self)
        return loss


def with_queue(bench, kind, n):
    model = FromQueue(bench, bank=kind([bench.xp.zeros((6, 2), 'f')] * n))
    bench.train(model)
    return {'sums': [number(abs(array).sum()) for array in model.bank]}


@script(SCRIPTS, quick=True, told=r'changes the attribute bank of FromQueue')
def a_queue_of_four_arrays(bench):
    return with_queue(bench, functools.partial(collections.deque, maxlen=4), 4)


@script(SCRIPTS)
def a_queue_of_nine_arrays(bench):
    return with_queue(bench, functools.partial(collections.deque, maxlen=9), 9)


@script(SCRIPTS)
def a_list_of_four_arrays(bench):
    return with_queue(bench, list, 4)


@script(SCRIPTS)
def a_list_of_nine_arrays(bench):
    return with_queue(bench, list, 9)


class KeepsTarget(Squares):
    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        self.target = y.array
        loss = F.mean_squared_error(y, t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, n_captures=1)
def an_output_of_a_link(bench):
    """The step stays captured if every step assigns the array and none reads it."""
    model = KeepsTarget(bench, target=None)
    bench.train(model)
    return {'sum': number(abs(model.target).sum())}


class InPhases(Squares):
    """Model that keeps its output in an attribute, from which it reads in a second phase."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t)
        if self.phase == 'collect':
            self.target = y.array
        else:
            loss *= self.target[0, 0]
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, quick=True, n_captures=3)
def an_output_that_becomes_an_input(bench):
    """The step is captured again for the second phase, and for another array in that phase."""
    model = InPhases(bench, phase='collect', target=None)

    def begin(trainer):
        model.phase = 'distill'
        model.target = bench.xp.ones((6, 2), 'f')

    def change(trainer):
        model.target = bench.xp.full((6, 2), 0.25, 'f')

    bench.train(model, (begin, at(6)), (change, at(20)))


phases: list[int] = []


class Phase(enum.IntEnum):
    WARM = 0
    FULL = 1

    def factor(self):
        phases.append(int(self))
        return warm(len(phases))


class OfPhase(Weighted):
    def factor(self):
        return self.phase.factor()


@script(SCRIPTS, told=r'changes phases of')
def a_method_of_a_number_of_an_enum(bench):
    bench.train(OfPhase(bench, phase=Phase.WARM))
    return {'phases': phases}


class Logged:
    def __init__(self):
        self.log = []

    def advance(self):
        self.log.append(len(self.log))
        return warm(len(self.log))


advance = operator.methodcaller('advance')


@script(SCRIPTS, told=r'changes the attribute log of Logged')
def a_methodcaller(bench):
    logged = Logged()
    weighed_by(bench, lambda: advance(logged))
    return vars(logged)


n_dispatched = 0


@functools.singledispatch
def counted(loss):
    return loss


@counted.register(chainer.Variable)
def _(loss):
    global n_dispatched
    n_dispatched += 1
    return loss * warm(n_dispatched)


class Dispatched(Squares):
    def weighed(self, loss):
        return counted(loss)


@script(SCRIPTS, told=r'changes n_dispatched of')
def a_function_of_singledispatch(bench):
    bench.train(Dispatched(bench))
    return {'n': n_dispatched}


class Starting:
    n = 0

    def factor(self):
        self.n += 1
        if self.n == 2:
            self.__class__ = Started
        return warm(self.n)


class Started:
    def factor(self):
        return 0.25


class OfStage(Weighted):
    def factor(self):
        return self.stage.factor()


@script(SCRIPTS)
def an_object_that_changes_its_class(bench):
    model = OfStage(bench, stage=Starting())
    bench.train(model)
    return {'class': type(model.stage).__name__, 'n': model.stage.n}


class OneOfMany(Weighted):
    def factor(self):
        return self.schedules[7].next()


@script(SCRIPTS, told=r'a check would leave changes inside of the attribute schedules of OneOfMany')
def a_list_of_300_objects(bench):
    model = OneOfMany(bench, schedules=[Schedule() for _ in range(300)])
    bench.train(model)
    return {'n': model.schedules[7].n}


class OneListOfMany(Weighted):
    def factor(self):
        self.seen[7].append(1)
        return warm(len(self.seen[7]))


@script(SCRIPTS, told=r'a check would leave changes inside of the attribute seen of OneListOfMany')
def a_dict_of_300_lists(bench):
    model = OneListOfMany(bench, seen={i: [] for i in range(300)})
    bench.train(model)
    return {'n': len(model.seen[7])}


class OfKeys(Weighted):
    def factor(self):
        factor = 1.0
        for schedule in self.tasks:
            factor *= schedule.next()
        return factor


@script(SCRIPTS, quick=True, told=r'changes the attribute n of Schedule')
def objects_that_are_keys(bench):
    model = OfKeys(bench, tasks={Schedule(): 'main', Schedule(): 'other'})
    bench.train(model)
    return {'n': [schedule.n for schedule in model.tasks]}


CHOSEN = {'mse': 0}


class ByChosenMethod(Squares):
    kind = 'mse'

    def __call__(self, atoms, adj, t):
        loss = getattr(self, 'loss_' + self.kind)(self.predictor(atoms, adj), t)
        chainer.report({'loss': loss}, self)
        return loss

    def loss_mse(self, y, t):
        CHOSEN['mse'] += 1
        return F.mean_squared_error(y, t) * warm(CHOSEN['mse'])


@script(SCRIPTS, told=r"changes 'mse' in CHOSEN of\b")
def a_dict_of_a_method_that_is_chosen_by_text(bench):
    bench.train(ByChosenMethod(bench))
    return CHOSEN


class Timer(contextlib.ContextDecorator):
    n = 0

    def __enter__(self):
        self.n += 1

    def __exit__(self, *error):
        pass


TIMER = Timer()


class ByDecorator(Squares):
    @TIMER
    def weighed(self, loss):
        return loss * warm(TIMER.n)


@script(SCRIPTS, told=r'changes the attribute n of Timer')
def an_object_that_decorates_a_method(bench):
    bench.train(ByDecorator(bench))
    return {'n': TIMER.n}


class Recent(queue.Queue):
    pass


class ByOwnQueue(Weighted):
    def factor(self):
        n = RECENT.get()
        RECENT.put(n + 1)
        return warm(n)


RECENT = Recent()


@script(SCRIPTS, told=r'consume part of RECENT of\b')
def a_queue_of_a_class_of_mine(bench):
    RECENT.put(1)
    bench.train(ByOwnQueue(bench))
    return {'next': RECENT.get()}


class Steps(itertools.count):
    pass


STEPS = Steps(1)


class ByOwnCount(Weighted):
    def factor(self):
        return warm(next(STEPS))


@script(SCRIPTS, told=r'consume part of STEPS of\b')
def a_subclass_of_itertools_count(bench):
    bench.train(ByOwnCount(bench))
    return {'next': next(STEPS)}


class Noise(random.Random):
    n = 0

    def jitter(self):
        self.n += 1
        return 1 + 0.1 * (self.n % 3)


NOISE = Noise(3)


class ByOwnGenerator(Weighted):
    def factor(self):
        return NOISE.jitter()


@script(SCRIPTS, told=r'changes the attribute n of Noise')
def a_subclass_of_random(bench):
    bench.train(ByOwnGenerator(bench))
    return {'n': NOISE.n}


library: Any = chainer


class ByModuleOfLibrary(Weighted):
    def factor(self):
        library.n_of_a_script += 1
        return warm(library.n_of_a_script)


@script(SCRIPTS, told=r'changes n_of_a_script of module chainer')
def an_attribute_of_a_librarys_module(bench):
    library.n_of_a_script = 0
    bench.train(ByModuleOfLibrary(bench))
    n = library.n_of_a_script
    del library.n_of_a_script
    return {'n': n}


class ByCleargrads(Squares):
    n = 0

    def cleargrads(self):
        type(self).n += 1
        if self.n % 2:
            super().cleargrads()


@script(SCRIPTS, told=r'changes n of class ByCleargrads|gradients of parameters are .*added up')
def gradients_of_two_steps(bench):
    bench.train(ByCleargrads(bench))
    return {'n': ByCleargrads.n}


class ByVoid(Weighted):
    record = numpy.zeros(1, [('n', 'i4')])[0]

    def factor(self):
        self.record['n'] += 1
        return warm(int(self.record['n']))


@script(SCRIPTS, told=r'changes in .*\(void\)')
def a_record_of_numpy(bench):
    bench.train(ByVoid(bench))
    return {'n': int(ByVoid.record['n'])}


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class ByLoggerOfName(Squares):
    def weighed(self, loss):
        logging.getLogger('script.of.a.user').warning('a step')
        return loss


@script(SCRIPTS, told=r'changes .*\btexts of\b')
def a_handler_that_keeps_records(bench):
    logger = logging.getLogger('script.of.a.user')
    handler = Kept()
    logger.addHandler(handler)
    logger.propagate = False
    bench.train(ByLoggerOfName(bench))
    logger.removeHandler(handler)
    return {'n': len(handler.texts)}


@script(SCRIPTS, told=r'the method update of the optimizer was replaced')
def an_optimizers_update_that_counts(bench):
    optimizer = optimizers.SGD(RATE)
    updater = bench.updater(Squares(bench), optimizer=optimizer)
    update = optimizer.update
    n = 0

    def counted(*args, **kwargs):
        nonlocal n
        n += 1
        update(*args, **kwargs)

    optimizer.update = counted
    bench.run(updater)
    return {'n': n}


@script(SCRIPTS, told=r'StandardUpdater\.update_core was replaced')
def an_updaters_loop_that_is_replaced_later(bench):
    updater = bench.updater(Squares(bench))
    original = StandardUpdater.update_core
    n = 0

    def update_core(self):
        nonlocal n
        n += 1
        original(self)

    StandardUpdater.update_core = update_core
    try:
        bench.run(updater)
    finally:
        StandardUpdater.update_core = original
    return {'n': n}


class Penalty:
    n_made = 0

    def __init__(self):
        type(self).n_made += 1

    def value(self):
        return warm(type(self).n_made)


class Ridge(Penalty):
    pass


class ByPenalty(Weighted):
    def factor(self):
        (kind,) = Penalty.__subclasses__()
        return kind().value()


@script(SCRIPTS)
def objects_of_a_class_found_by_its_base(bench):
    bench.train(ByPenalty(bench))
    return {'n': Ridge.n_made}


CALLS: collections.Counter = collections.Counter()


class Phased(Squares):
    phase = 'first'

    def weighed(self, loss):
        return getattr(self, 'weighed_' + self.phase)(loss)

    def weighed_first(self, loss):
        return loss

    def weighed_then(self, loss):
        CALLS['then'] += 1
        return loss * warm(CALLS['then'])


@script(SCRIPTS)
def a_method_of_a_later_phase(bench):
    model = Phased(bench)
    bench.train(model, (lambda trainer: setattr(model, 'phase', 'then'), at(21)))
    return CALLS
