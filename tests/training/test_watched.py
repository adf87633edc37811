"""Changes between the steps of a script, and their effects on its captured step.

The tables list changes: some lead to a new capture (`CHANGES`), are read at every step or found by
the check of a replay (`READINGS`), or make steps run eagerly (`EAGER`), and others are harmless
(`HARMLESS`). Every training is compared with that of a StandardUpdater.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import copy
import functools
import gc
import itertools
import os
import re
import sys
import types
from typing import Any
from unittest import mock
import warnings
import weakref

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions, links, optimizer_hooks, optimizers
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.training import GraphUpdater, StepDiffers
from chainer_bspmm.training.program import Program
from chainer_bspmm.training.programs import MAX_NEW
from tests.support import assert_close_arrays
from tests.support.training import assert_same_bits, assert_same_training, BATCH, counting, HOST
from tests.support.training import is_captured, make_updater, mean_of_rows, n_keys, of_variables
from tests.support.training import parameters, Row, run, same_molecules, small_model, three_columns
from tests.support.training import hidden, reading_the_last, without_dropout
from tests.training import host_graphs
from tests.training.host_graphs import eager_causes, read_at_capture

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


def on_host(array):
    return chainer.backends.cuda.to_cpu(getattr(array, 'array', array))


def put(path, value):
    """Return a function that changes an attribute of a model to ``value(old value)``."""

    def change(model, optimizer):
        *parts, name = path.split('.')
        owner = functools.reduce(getattr, parts, model)
        setattr(owner, name, value(getattr(owner, name, None)))

    return change


def of_embedding(change):
    return lambda model, optimizer: change(model.predictor.inner.embed.W)


DECAY = optimizer_hooks.WeightDecay(0.1)
W = 'predictor.inner.embed.W.'
NUMBER = type('Number', (int,), {})


class Scale:
    factor = 1.0


OFFSET = 0.0


class Scaled(chainer.Chain):
    """A model whose weights are in many places of a script."""

    def __init__(self, inner):
        super().__init__()
        self.settings: dict[str, Any] = {'factor': 1.0, 'parts': [1.0]}
        self.names = {'a'}
        self.scale = Scale()
        with self.init_scope():
            self.inner = inner

    def forward(self, atoms, adj):
        return self.scaled(self.inner(atoms, adj)[:, :3])

    def scaled(self, y):
        factor = self.settings['factor'] * sum(self.settings['parts']) * len(self.names)
        return y * (factor * self.scale.factor) + OFFSET


# Functions of (model, optimizer), called one after the other in one training.
CHANGES: dict[str, Callable] = {
    'a number': put('predictor.counter', lambda before: 1),
    'a flag for a number': put('predictor.counter', bool),
    'a number of another type': put('predictor.counter', NUMBER),
    'a string': put('mode', lambda before: 'fast'),
    'a tuple': put('sizes', lambda before: (1, (2, 3))),
    'an array': put('weights', lambda before: numpy.ones(3)),
    'a function': put('lossfun', lambda before: lambda x, t: before(x, t)),
    'an attribute that is removed': lambda model, _: delattr(model.predictor, 'removed'),
    "a parameter's array": put(W + 'array', lambda before: before * 0.5),
    'requires_grad': put(W + '_requires_grad', lambda before: False),
    'an update rule that is disabled': lambda model, _: model.predictor.inner.disable_update(),
    'an update rule that is enabled': lambda model, _: model.predictor.inner.enable_update(),
    'a state': of_embedding(lambda W: W.update_rule.state.update(v=W.xp.zeros_like(W.array))),
    'a hook': lambda _, optimizer: optimizer.add_hook(DECAY),
    'a hook after the update': lambda _, optimizer: optimizer.add_hook(DECAY, 'post', 'post'),
    'a hook of an update rule': of_embedding(lambda W: W.update_rule.add_hook(DECAY)),
    'configuration': lambda *_: setattr(chainer.global_config, 'guarded', 0.5),
    'another update rule': put(W + 'update_rule', lambda _: optimizers.SGD().create_update_rule()),
    'a link': put('predictor', lambda before: Row(three_columns, before.inner)),
    'a link of a user': put('predictor', lambda before: Scaled(before.inner)),
    'an entry of a dict': lambda model, _: model.predictor.settings.update(factor=0.9),
    'an item of a list in a dict': lambda model, _: model.predictor.settings['parts'].append(0.1),
    'an item of a set': lambda model, _: model.predictor.names.add('b'),
    'an attribute of a class': lambda *_: setattr(Scale, 'factor', 0.9),
    'an attribute of an object': put('predictor.scale.factor', lambda _: 0.8),
    'a global that a method names': lambda *_: globals().update(OFFSET=0.1),
}


def reset():
    """Undo the changes that are not in a model."""
    global OFFSET
    vars(chainer.global_config).pop('guarded', None)
    Scale.factor = 1.0
    OFFSET = 0.0


@pytest.fixture
def configured():
    yield
    reset()


def changing_model():
    return without_dropout(small_model(removed=1))


def test_a_training_with_every_change(device, graphs, no_causes, configured):
    """After each change the step is captured again, and trains as a StandardUpdater does."""
    changes = [*CHANGES.values()]
    keys = []

    def make(kind):
        reset()
        momentum = optimizers.MomentumSGD(0.001)
        return make_updater(kind, device, changing_model(), same_molecules(), momentum)

    def change(updater):
        number, step = divmod(updater.iteration, 3)
        if isinstance(updater, GraphUpdater) and not step:
            keys.append(updater._driver.session.guards.key())
            assert updater._driver.programs and is_captured(updater), [*CHANGES][number - 2]
        if not step and number <= len(changes):
            optimizer = updater.get_optimizer('main')
            changes[number - 1](optimizer.target, optimizer)

    assert_same_training(make, 3 * (len(changes) + 1), change)
    assert len(keys) == len(changes) + 1
    for name, before, after in zip(CHANGES, keys, keys[1:]):
        assert after != before and isinstance(after.change(before), str), name


def test_a_program_keeps_what_its_key_names_by_id(device, graphs):
    """A program keeps these objects alive, because otherwise a new object could get the same id."""
    model = small_model(factor=device.xp.ones(3, 'f'))
    model.lossfun = lambda x, t: functions.mean_squared_error(x, t)
    updater = make_updater(GraphUpdater, device, model, same_molecules())
    row = model.predictor
    things = row, row.inner.embed.W.array, row.factor, model.lossfun
    references = [weakref.ref(thing) for thing in things]
    run(updater, 3)
    model.predictor = Row(three_columns, row.inner)
    row.inner.embed.W.array = row.inner.embed.W.array.copy()
    row.factor = row.factor.copy()
    model.lossfun = functions.mean_squared_error
    del row, things
    run(updater, 3)
    assert len(updater._driver.programs) == 2
    assert all(reference() is not None for reference in references)
    updater._driver.programs.popitem(last=False)
    gc.collect()
    assert all(reference() is None for reference in references)


# name -> function that reads the value from the updater
READINGS: dict[str, Callable] = {
    'updater.iteration': lambda updater: updater.iteration,
    'optimizer.t': lambda updater: updater.get_optimizer('main').t,
    'optimizer.lr': lambda updater: 100 * updater.get_optimizer('main').lr,
}


DIFFERS = (
    r'GraphUpdater trains eagerly: a replay of the captured step differs from an eager one in '
    r'(gradient of )?/predictor/inner/embed/W \(relative difference \d.\de[-+]\d\d\): it reads '
    r'something from Python that has changed since it was captured, and that is not watched '
    r'\(docs/captured_training.md\)'
)


def annealed(kind, device, read, examples, **kwargs):
    """Return an updater whose loss is weighted by ``1 + 0.1 * read(updater)``.

    The loss gets the updater through a library's module, which the guards do not follow.
    """
    if kind is GraphUpdater:
        kwargs.setdefault('on_difference', 'warn')
    holder = hidden(None)
    weight = read_at_capture(lambda: read(holder.value))
    model = without_dropout(small_model())

    def loss_func(*args):
        return model(*args) * (1.0 + 0.1 * weight())

    kwargs.setdefault('loss_func', loss_func)
    updater = make_updater(kind, device, model, examples, optimizers.SGD(0.01), **kwargs)
    holder.value = updater
    return updater


def train(updater, n_steps):
    """Train with a changing learning rate; return the texts of the warnings."""
    with eager_causes() as texts:
        for _ in range(n_steps):
            updater.get_optimizer('main').lr = 0.01 + 0.001 * updater.iteration
            run(updater, 1)
    return texts


# A fused update is part of the graph; Chainer's own follows each replay.
every_reading = pytest.mark.parametrize(
    'name, is_fused',
    [('updater.iteration', False), ('optimizer.t', True), ('optimizer.lr', True)],
    indirect=['is_fused'],
)


@every_reading
def test_a_weight_that_changes_with_every_step(device, graphs, name, is_fused):
    """The second replay finds the change at the latest, so no step uses an old weight."""
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater = annealed(kind, device, READINGS[name], same_molecules())
        texts = train(updater, 8)
        results.append(parameters(updater))
    (cause,) = texts
    assert re.fullmatch(DIFFERS, cause)
    assert updater._driver.session is None and updater.graph_nbytes == 0
    assert updater.iteration == updater.get_optimizer('main').t == 8
    assert_close_arrays(results[1], results[0])


def test_a_replay_that_differs_names_what_is_not_watched(device, graphs):
    """The hint names a list that is too long to be watched; the loss reads another value, too."""
    many = list(range(10**5))

    def read(updater):
        return many[0] + updater.iteration

    updater = annealed(GraphUpdater, device, read, same_molecules())
    with eager_causes() as causes:
        run(updater, 8)
    (cause,) = causes
    hint = re.escape(', maybe the variable many that read reads (docs/captured_training.md)')
    assert re.fullmatch(DIFFERS.replace(r' \(docs/captured_training.md\)', hint), cause)


OWNERS = {
    'updater.iteration': 'iteration of GraphUpdater',
    'optimizer.t': 't of SGD',
    'optimizer.lr': 'lr of SGD',
}


@every_reading
def test_a_weight_that_is_an_attribute_of_chainers(device, graphs, name, is_fused):
    """The attribute is watched, so its change at every step leads to a new capture."""

    read = READINGS[name]

    def make(kind):
        model = without_dropout(small_model())
        updater = None

        def loss_func(*args):
            return model(*args) * (1.0 + 0.1 * read(updater))

        updater = make_updater(
            kind, device, model, same_molecules(), optimizers.SGD(0.01), loss_func=loss_func
        )
        return updater

    expected, updater = make(StandardUpdater), make(GraphUpdater)
    assert train(expected, 8) == train(updater, 8) == []
    assert_close_arrays(parameters(updater), parameters(expected))
    assert train(updater, 2 * MAX_NEW) == [
        'GraphUpdater trains eagerly: no step can be replayed, because the attribute %s changes '
        'with every one' % OWNERS[name]
    ]


@pytest.mark.parametrize('period', (4, 8))
def test_an_old_weight_at_a_checked_replay(device, graphs, period):
    """Replay n is at iteration n here, so replays 4 and 8, which are checked, find the change."""

    def read(updater):
        return 0.0 if updater.iteration % period else 50.0

    updater = annealed(GraphUpdater, device, read, same_molecules())
    assert train(updater, period) == []
    (cause,) = train(updater, 1)
    assert re.fullmatch(DIFFERS, cause)


def weighted(link, atoms, adj):
    return three_columns(link, atoms, adj) * link.settings['weight']


@pytest.mark.parametrize('period, phase', [(3, 0), (10, 9)])
def test_a_weight_that_changes_and_changes_back(device, graphs, no_causes, period, phase):
    """Each value of the weight has a captured step, which is replayed whenever it comes back."""

    def change(updater):
        settings = updater.get_optimizer('main').target.predictor.settings
        settings['weight'] = 1.5 if updater.iteration % period == phase else 1.0

    def make(kind):
        model = without_dropout(small_model(weighted, settings={'weight': 1.5}))
        return make_updater(kind, device, model, optimizer=optimizers.SGD(0.01))

    updater = assert_same_training(make, 32, change)
    assert n_keys(updater) == 2
    assert all(program.is_captured for program in updater._driver.programs.values())


def test_a_weight_that_changes_later_with_layouts_that_alternate(device, graphs):
    """Every form counts its own replays; the fourth or eighth one finds the change."""

    def later(updater):
        return updater.iteration // 10

    updater = annealed(GraphUpdater, device, later, same_molecules(16))
    iterators = [SerialIterator(same_molecules(16), n, shuffle=False) for n in (8, 6)]
    found_at = []
    for i in range(40):
        updater._iterators['main'] = iterators[i % 2]
        found_at += [updater.iteration for _ in train(updater, 1)]
    (step,) = found_at
    assert 10 < step <= 18


def test_it_goes_on_from_the_eager_result(device, graphs, monkeypatch, is_fused):
    """Results have the bits of an eager run, although a weight changes from step 5 on.

    Reported values and gradients are compared, too. The other run computes its first steps eagerly
    in the same buffers, and later ones without a program.
    """
    results = []
    for is_eager in (False, True):

        def changes(updater):
            return updater.iteration >= 5

        updater = annealed(GraphUpdater, device, changes, same_molecules(), check_every=5)
        optimizer = updater.get_optimizer('main')
        with monkeypatch.context() as patch:
            if is_eager:
                patch.setattr(Program, 'capture', lambda _: None)
            assert not train(updater, 5)  # replays 1 to 4, of which only 3 is not checked
            optimizer.lr += 0.001
            with eager_causes() as texts:
                reported = run(updater, 1)
        assert bool(texts) != is_eager
        if is_eager:
            updater._driver.reason = 'from here on'
            updater._driver.forget()
        params = optimizer.target.namedparams(include_uninit=False)
        gradients = {path: on_host(param.grad).copy() for path, param in params}
        after = parameters(updater)
        train(updater, 3)
        assert optimizer.t == updater.iteration == 9
        results.append((reported, gradients, after, parameters(updater)))
    assert results[0][0] == results[1][0]
    for actual, expected in zip(results[0][1:], results[1][1:]):
        assert_same_bits(actual, expected)


def test_warnings_point_to_the_user_s_code(device, graphs):
    updater = annealed(GraphUpdater, device, READINGS['updater.iteration'], same_molecules())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(4):
            updater.update()
    actual = [w for w in caught if 'GraphUpdater trains' in str(w.message)]
    assert actual and all(w.filename == __file__ for w in actual)


def unknown_number():
    """Return a number from 0 to 1 from a generator whose state cannot be read."""
    return int.from_bytes(os.urandom(2), 'big') / 2**16


def test_a_step_that_is_not_deterministic_unnoticed(device, graphs):
    """Kernels that add with atomics differ by rounding, which a check tolerates."""
    n = 1 << 16  # so many that two runs hardly ever add in the same order
    rng = numpy.random.RandomState(0)
    rows = rng.randint(BATCH, size=n)
    weights = rng.normal(size=(n, 1)).astype('f') / n

    def function(link, atoms, adj):
        y = three_columns(link, atoms, adj)
        if link.xp is numpy:
            return y * (1 + 1e-5 * unknown_number())
        return y + 1e-2 * functions.sum(  # backward adds to some rows in any order
            functions.get_item(y, (link.rows,)) * link.weights, axis=0, keepdims=True
        )

    model = without_dropout(
        small_model(function, rows=device.send(rows), weights=device.send(weights))
    )
    sgd = optimizers.SGD(1e-3)
    updater = make_updater(GraphUpdater, device, model, optimizer=sgd, check_every=1)
    run(updater, 6)
    if graphs:
        (program,) = updater._driver.programs.values()
        assert not program._is_deterministic


def test_a_difference_beyond_rounding(monkeypatch):
    """A larger difference is reported, even if eager steps differ from each other."""
    host_graphs.stand_in(monkeypatch)

    def function(link, atoms, adj):
        link.n_calls.value += 1
        factor = 2 if link.n_calls.value == 6 else 1  # in the replay
        return three_columns(link, atoms, adj) * (factor + 1e-5 * unknown_number())

    model = without_dropout(small_model(function, n_calls=hidden(0)))
    updater = make_updater(GraphUpdater, HOST, model, same_molecules(), on_difference='raise')
    run(updater, 1)
    with pytest.raises(StepDiffers):
        run(updater, 6)


@dataclasses.dataclass
class Script:
    """Unusual parts of a script, and the cause that its only warning names, if there is one."""

    cause: str = ''  # a pattern
    function: Callable = three_columns  # the model's
    change: Callable = lambda updater: None  # called after each step
    options: dict = dataclasses.field(default_factory=dict)  # the updater's
    # Larger steps would magnify differences in rounding between kernels.
    optimizer: Callable = functools.partial(optimizers.SGD, 0.01)
    around: Callable = contextlib.nullcontext
    examples: Callable = same_molecules
    attributes: dict = dataclasses.field(default_factory=dict)
    n_steps: int = 4
    compared: tuple = ('reports', 'parameters')  # compared with a StandardUpdater

    def make(self, kind, device):
        model = without_dropout(small_model(self.function, **copy.deepcopy(self.attributes)))
        options = dict(self.options)
        if 'loss_func' in options:
            options['loss_func'] = functools.partial(options['loss_func'], model)
        return make_updater(kind, device, model, self.examples(), self.optimizer(), **options)

    def train(self, kind, device):
        """Train; return the updater, and the reported values."""
        updater = self.make(kind, device)
        reported = []
        with self.around():
            for _ in range(self.n_steps):
                reported += run(updater, 1)
                self.change(updater)
        return updater, reported


def stateful(link, atoms, adj):
    y = three_columns(link, atoms, adj)
    link.h = y if link.h is None else 0.5 * chainer.Variable(link.h.array) + y
    return link.h


def five_atoms_each(link, atoms, adj):
    h = functions.reshape(link.inner.embed(atoms), (adj.n_graphs, 5 + 1, -1))
    return functions.sum(h[:, :5], axis=1)[:, :3]


def three_dimensions(link, atoms, adj):
    n_graphs, n_atoms = atoms.shape
    return three_columns(link, atoms, adj) / n_atoms


def reports_now_and_then(link, atoms, adj):
    link.n_calls.value += 1
    y = three_columns(link, atoms, adj)
    if link.n_calls.value % 2:
        chainer.report({'extra': functions.sum(y)}, link)
    return y


def reports_numbers(link, atoms, adj):
    chainer.report({'weight': 0.5, 'n': 3, 'flag': True, 'scale': numpy.float32(2)}, link)
    return three_columns(link, atoms, adj)


def reports_rows(link, atoms, adj):
    chainer.report({'n': len(atoms)}, link)
    return three_columns(link, atoms, adj)


def reports_counts(link, atoms, adj):
    link.n_calls.value += 1
    chainer.report({'n': link.n_calls.value}, link)
    return three_columns(link, atoms, adj)


def with_a_number(batch, device=None):
    return (*chainer_bspmm.concat_mols(batch, device), numpy.full((), 2, 'f'))


def times_the_number(model, *batch):
    return model(*batch[:3]) * float(batch[3])


def noise(link):
    return link.xp.random.rand()


def of_y(change):
    return lambda link, atoms, adj: change(link, adj, three_columns(link, atoms, adj))


class Twice(optimizers.SGD):
    def update(self, lossfun=None, *args, **kwargs):
        assert lossfun is not None
        super().update(lossfun, *args, **kwargs)
        super().update(lossfun, *args, **kwargs)


def replace_update(updater):
    optimizer = updater.get_optimizer('main')
    update = type(optimizer).update
    optimizer.update = lambda *args, **kwargs: update(optimizer, *args, **kwargs)


def scale_from_step_2(updater):
    if updater.iteration == 2:
        updater.get_optimizer('main').set_loss_scale(8)


def counts(link, atoms, adj, n_steps):
    return three_columns(link, atoms, adj) * (1 - 0.5**n_steps)


N_STEPS = 0


def counts_in_a_global(link, atoms, adj):
    global N_STEPS
    N_STEPS += 1
    return counts(link, atoms, adj, N_STEPS)


class Steps:
    number = 0

    @classmethod
    def count(cls):
        cls.number += 1
        return cls.number


def counts_in_a_class(link, atoms, adj):
    return counts(link, atoms, adj, Steps.count())


def counts_in_an_object(link, atoms, adj):
    link.options.n_steps += 1
    return counts(link, atoms, adj, link.options.n_steps)


def counts_in_a_dict(link, atoms, adj):
    link.options['n_steps'] += 1
    return counts(link, atoms, adj, link.options['n_steps'])


def counts_in_a_list(link, atoms, adj):
    link.options.append(0)
    return counts(link, atoms, adj, len(link.options))


def counts_by_an_iterator(link, atoms, adj):
    return counts(link, atoms, adj, next(link.options))


def cannot(error, function):
    """Return a pattern of a cause that names an error and the function that raises it."""
    place = re.escape(__file__), function
    return r'/predictor \(Row\) cannot be captured: %s \(%s, line \d+, in %s\)' % (error, *place)


def changes(what):
    return 'the step changes %s at every run' % what


TWICE = (
    r'two runs of one batch differ in main/%s: something in Python changes that is not watched, '
    'such as a counter, or the model draws random numbers in another way than '
    'chainer.functions.dropout'
)
READS = (
    r'two runs of one batch differ in main/loss \(relative difference \d.\de[-+]\d\d\): the step '
    'reads the attribute %s, which the step before it has assigned'
)
OF_LOSS = r'loss \(relative difference \d.\de[-+]\d\d\)'
PADDED = chainer_bspmm.CSRConverter('padded')
DEBUG = functools.partial(chainer.using_config, 'debug', True)
COLUMN = {'converter': with_a_number, 'loss_func': times_the_number}
EAGER = {
    'a mean over all rows': Script(
        r'spare rows at the end of a batch, which belong to no molecule, change main/%s: a link '
        'or the loss treats every row as an atom' % OF_LOSS,
        mean_of_rows,
    ),
    'random numbers': Script(
        changes('the state of numpy.random'),
        of_y(lambda link, _, y: y * link.xp.float32(numpy.random.rand())),
        compared=(),
    ),
    'random numbers that nothing knows of': Script(
        TWICE % OF_LOSS, of_y(lambda link, _, y: y * link.xp.float32(unknown_number())), compared=()
    ),
    'a state that goes on from step to step': Script(
        changes('the attribute h of predictor'), stateful, attributes={'h': None}
    ),
    'a state that the first step makes': Script(
        READS % 'last of predictor', reading_the_last, attributes={'last': None}
    ),
    'an attribute that changes': Script(
        changes('the attribute counter of predictor'), counting, n_steps=40
    ),
    'a counter that is a global': Script(
        changes('N_STEPS of module ' + __name__),
        counts_in_a_global,
        around=lambda: mock.patch.object(sys.modules[__name__], 'N_STEPS', 0),
    ),
    'a counter of a class': Script(
        changes('number of class Steps'),
        counts_in_a_class,
        around=lambda: mock.patch.object(Steps, 'number', 0),
    ),
    'a counter in an object': Script(
        changes('the attribute n_steps of SimpleNamespace'),
        counts_in_an_object,
        attributes={'options': types.SimpleNamespace(n_steps=0)},
    ),
    'a counter in a dict': Script(
        changes("'n_steps' in the attribute options of predictor"),
        counts_in_a_dict,
        attributes={'options': {'n_steps': 0}},
    ),
    'a list that becomes longer': Script(
        changes('the attribute options of predictor'), counts_in_a_list, attributes={'options': []}
    ),
    'an iterator': Script(
        changes('the attribute options of predictor'),
        counts_by_an_iterator,
        attributes={'options': itertools.count(1)},
    ),
    'a function that fails with spare rows': Script(
        cannot('InvalidType: .*', 'five_atoms_each'), five_atoms_each
    ),
    'three dimensions': Script(
        cannot(
            r'ValueError: not enough values to unpack \(expected 2, got 1\)', 'three_dimensions'
        ),
        three_dimensions,
        options={'converter': PADDED},
    ),
    'a report at times': Script(
        TWICE % r'predictor/extra \(only one of them has it\)',
        reports_now_and_then,
        attributes={'n_calls': hidden(0)},
        compared=(),
    ),
    'a reported number of rows': Script(
        'spare rows at the end of a batch, which belong to no molecule, change main/predictor/n '
        r'\(relative difference \d.\de[-+]\d\d\): a link or the loss treats every row as an atom',
        reports_rows,
    ),
    'a reported number that counts': Script(
        'main/predictor/n is reported as a value on the host, which a replay would repeat',
        reports_counts,
        attributes={'n_calls': hidden(0)},
        compared=(),
    ),
    'variables': Script(
        'converter: expected arrays on the host for device=None, got Variable',
        options={'converter': of_variables},
    ),
    'a label of all': Script(
        r'converter: expected a row for each of 8 molecules in output 3, got shape \(\)',
        options=COLUMN,
    ),
    'a loss that is scaled from step 2 on': Script(
        'the optimizer scales the loss', change=scale_from_step_2
    ),
    'an update that is replaced from step 2 on': Script(
        'the method update of the optimizer was replaced', change=replace_update
    ),
    'an optimizer that updates twice': Script(
        'the optimizer, Twice, overrides the method update', optimizer=lambda: Twice(0.01)
    ),
    'a hook': Script(
        'the hook TimerHook has to see every call', around=chainer.function_hooks.TimerHook
    ),
    'debug mode': Script('Chainer is in debug mode', around=DEBUG),
}
EAGER_ON_A_GPU = {
    name: Script(cause, of_y(change), compared=())
    for name, cause, change in (
        (
            'a sum that is read',
            cannot('.*captur.*', '.*'),
            lambda _, adj, y: y * float(adj.data.sum()),
        ),
        (
            'an array',
            cannot('.*from the host.*', '.*'),
            lambda link, _, y: y + link.xp.asarray(numpy.ones(3, 'f')),
        ),
        ('numbers of cuRAND', cannot('.*', '.*'), lambda link, _, y: y + 0 * noise(link)),
        ('numbers of cuRAND that count', TWICE % OF_LOSS, lambda link, _, y: y * noise(link)),
    )
}


def halve(optimizer):
    """A hook that replaces gradients by new arrays."""
    for param in optimizer.target.params(False):
        param.grad = param.grad * numpy.float32(0.5)


def add_hook(updater, hook):
    if updater.iteration == 1:
        updater.get_optimizer('main').add_hook(hook, 'of a user')


def other_gradients(updater, change):
    add_hook(updater, lambda optimizer: None)  # so that updates are eager
    change(updater.get_optimizer('main').target)


def set_up_again(updater):
    optimizer = updater.get_optimizer('main')
    if updater.iteration == 3:
        optimizer.setup(optimizer.target)
    elif updater.iteration == 4 and isinstance(updater, GraphUpdater):
        rules = [param.update_rule for param in optimizer.target.params()]
        assert updater._driver.session.guards.key().update == rules


def another_loss(updater):
    if updater.iteration == 3:
        model = updater.get_optimizer('main').target
        updater.loss_func = lambda *args: 2 * model(*args)
    elif updater.iteration > 3 and isinstance(updater, GraphUpdater):
        assert updater._driver.session.function is updater.loss_func


def noisy(batch, device):
    atoms, adj, label = chainer_bspmm.concat_mols(batch, device)
    noise = chainer.backend.get_array_module(label).asarray(numpy.random.normal(size=label.shape))
    return atoms, adj, label + noise.astype('f')


def labels_that_are_nan():
    return [(atoms, adj, label * numpy.float32('nan')) for atoms, adj, label in same_molecules()]


def replace_gradients(model):
    for param in model.params(False):
        param.grad = param.array.copy()


def between(change):
    return Script(change=functools.partial(other_gradients, change=change))


def keeps_arrays(link, atoms, adj):
    y = three_columns(link, atoms, adj)
    link.kept = y.array
    link.options['kept'] = link.kept * 2
    return y


HARMLESS = {
    'arrays that a step assigns': Script(
        function=keeps_arrays, attributes={'kept': None, 'options': {'kept': None}}
    ),
    'reported numbers': Script(function=reports_numbers),
    'a hook that replaces gradients': Script(change=functools.partial(add_hook, hook=halve)),
    'gradients that are cleared between steps': between(lambda model: model.cleargrads()),
    'gradients that are replaced between steps': between(replace_gradients),
    'a converter that draws': Script(options={'converter': noisy}),
    'another loss function': Script(change=another_loss, n_steps=7),
    'an optimizer set up again': Script(change=set_up_again, optimizer=optimizers.Adam, n_steps=6),
    'labels that are NaN': Script(examples=labels_that_are_nan, compared=('reports',)),
}


SCRIPTS = {**EAGER, **HARMLESS, **EAGER_ON_A_GPU}
PARAMS = [pytest.param(n, marks=pytest.mark.gpu) if n in EAGER_ON_A_GPU else n for n in SCRIPTS]


@pytest.mark.parametrize('name', PARAMS)
def test_unusual_scripts(device, graphs, name):
    """One warning names the cause, however many steps follow, and training continues."""
    script = SCRIPTS[name]
    if name in EAGER_ON_A_GPU and device.xp is numpy:
        pytest.skip('on a host nothing of it is noticed')
    with eager_causes() as causes:
        updater, reported = script.train(GraphUpdater, device)
    assert len(causes) == bool(script.cause), causes
    for cause in causes:
        pattern = 'GraphUpdater trains eagerly: ' + script.cause
        assert re.fullmatch(pattern, cause, re.DOTALL), cause
    assert script.cause or is_captured(updater)
    assert all('main/loss' in report for report in reported)
    if script.compared:
        theirs, expected = script.train(StandardUpdater, device)
        for one, other in zip(reported, expected, strict=True):
            assert one.keys() == other.keys()
            numpy.testing.assert_allclose([one[k] for k in one], [other[k] for k in one], 1e-3)
    if 'parameters' in script.compared:
        assert_close_arrays(parameters(updater), parameters(theirs))


@pytest.mark.parametrize('value', ('a word', None, (1.0, 2)))
def test_reports_that_are_no_numbers(device, graphs, value):
    def reports(link, atoms, adj):
        chainer.report({'value': value}, link)
        return three_columns(link, atoms, adj)

    model = small_model(reports)
    updater = make_updater(GraphUpdater, device, model, same_molecules())
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    reporter.add_observer('row', model.predictor)
    message = (
        '^GraphUpdater trains eagerly: row/value is reported as a value on the host, '
        'which a replay would repeat$'
    )
    with pytest.warns(UserWarning, match=message):
        for _ in range(3):
            with reporter.scope({}):
                updater.update()


def fails(*args):
    raise LookupError('mine')


@pytest.mark.parametrize(
    'loss_func, error, cause, message',
    [
        (fails, LookupError, r'mine \(%s, line \d+, in fails\)' % re.escape(__file__), 'mine'),
        (
            lambda *args: None,
            AttributeError,
            r"'NoneType' object has no attribute '\w+' \(.*, line \d+, in \w+\)",
            "'NoneType' object has no attribute 'backward'",
        ),
    ],
)
def test_an_error_of_the_user_s(device, graphs, loss_func, error, cause, message):
    """After a warning, the user's error is raised as by StandardUpdater."""
    updater = make_updater(GraphUpdater, device, loss_func=loss_func)
    warning = '^GraphUpdater trains eagerly: the step cannot be captured: %s: %s$'
    with (
        pytest.warns(UserWarning, match=warning % (error.__name__, cause)),
        pytest.raises(error, match='^%s$' % message),
    ):
        run(updater, 1)
    assert updater.iteration == updater.get_optimizer('main').t == 0


def test_parameters_elsewhere(monkeypatch):
    host_graphs.stand_in(monkeypatch)
    updater = make_updater(GraphUpdater, HOST)
    updater._driver.device = types.SimpleNamespace(xp=numpy, name='@cupy:1')
    words = "parameter '/predictor/inner/embed/W' is on @numpy, the device is @cupy:1"
    assert updater._driver._why_not() == words


@pytest.mark.parametrize('dtype', ('float16', 'float32'))
def test_rounding_of_the_parameters_dtype(monkeypatch, dtype):
    """The parameters' dtype decides how much rounding is allowed, even if the loss is float32."""
    host_graphs.stand_in(monkeypatch)

    def function(link, atoms, adj):
        y = functions.cast(three_columns(link, atoms, adj), 'float32')
        return y * (1.003 if adj.has_spare else 1.0)

    with chainer.using_config('dtype', numpy.dtype(dtype)):
        model = without_dropout(small_model(function))
        updater = make_updater(GraphUpdater, HOST, model, same_molecules(), optimizers.SGD(1e-4))
        with eager_causes() as causes:
            run(updater, 3)
    assert bool(causes) == (dtype == 'float32')


def only_a_head(kind, device):
    numpy.random.seed(0)
    row = Row(lambda link, atoms, adj: link.head(link.inner(atoms, adj)))
    with row.init_scope():
        row.head = links.Linear(5, 3)
    without_dropout(row).to_device(device)

    def loss_func(atoms, adj, labels):
        return functions.mean_squared_error(row(atoms, adj), labels)

    updater = make_updater(
        kind, device, row.head, optimizer=optimizers.SGD(0.01), loss_func=loss_func
    )
    updater.body = row.inner
    return updater


def test_parameters_that_are_not_the_optimizer_s(device, graphs, no_causes):
    """A new array of such a parameter leads to a new capture; its gradient is left alone."""
    gradients = []

    def change(updater):
        if updater.iteration == 4:
            for param in updater.body.params(False):
                param.array = param.array * device.xp.float32(1.5)
                if isinstance(updater, GraphUpdater):
                    param.grad = device.xp.full_like(param.array, 7)
                    gradients.append((param, param.grad))

    updater = assert_same_training(lambda kind: only_a_head(kind, device), 8, change)
    assert n_keys(updater) == 2 and gradients
    for param, gradient in gradients:
        assert param.grad is gradient and bool((gradient == 7).all())


def test_averages_of_links(device, graphs):
    """Averages change once a step, also in a link without an optimizer, or without a size yet."""
    averages = []
    for kind in (StandardUpdater, GraphUpdater):
        teacher = links.BatchNormalization(3)
        teacher.to_device(device)

        def normed(link, *batch):
            return link.norm(three_columns(link, *batch))

        model = without_dropout(small_model(normed))
        with model.predictor.init_scope():
            model.predictor.norm = links.BatchNormalization(axis=0)

        def loss_func(atoms, adj, labels):
            return functions.mean_squared_error(teacher(labels), model.predictor(atoms, adj))  # NOQA: B023

        updater = make_updater(
            kind, device, model, optimizer=optimizers.SGD(0.01), loss_func=loss_func
        )
        run(updater, 5)
        averages.append([on_host(link.avg_mean) for link in (teacher, model.predictor.norm)])
    assert is_captured(updater)
    for actual, expected, bound in zip(*averages[::-1], (1e-5, 1e-4)):
        atol = bound * abs(expected).max()
        numpy.testing.assert_allclose(actual, expected, rtol=bound, atol=atol)


def test_averages_after_a_loss_that_raised_in_the_trial(device, graphs):
    """Averages equal eager ones, even if a run of the loss has raised an error."""
    averages = []
    for call in range(5):
        teacher = links.BatchNormalization(3)
        n_calls = hidden(0)
        teacher.to_device(device)

        def loss_func(atoms, adj, labels):
            normed = teacher(labels)  # NOQA: B023
            n_calls.value += 1  # NOQA: B023
            if n_calls.value == call:  # NOQA: B023
                raise RuntimeError('mine')
            return functions.mean(normed) + functions.mean(model.predictor(atoms, adj))  # NOQA: B023

        model = without_dropout(small_model())
        updater = make_updater(GraphUpdater, device, model, loss_func=loss_func)
        with eager_causes() as causes:
            run(updater, 1)
        assert len(causes) == bool(call)
        for cause in causes:
            pattern = (
                'GraphUpdater trains eagerly: the step cannot be captured: RuntimeError: mine '
                r'\(%s, line \d+, in loss_func\)'
            )
            assert re.fullmatch(pattern % re.escape(__file__), cause)
        averages.append(on_host(teacher.avg_mean))
    for average in averages[1:]:
        numpy.testing.assert_array_equal(average, averages[0])


class Counting:
    """A loss with two arrays, of which it changes one in place and replaces the other."""

    def __init__(self, model, xp):
        self.model = model
        self.n_calls = xp.zeros(1, 'f')
        self.total = xp.zeros(1, 'f')

    def __call__(self, *args):
        self.n_calls += 1
        self.total = self.total + 1
        return self.model(*args)


@pytest.mark.parametrize('are_watched', (False, True))
def test_a_check_changes_nothing(device, graphs, are_watched):
    """Counters, sums and averages advance once a step, as in StandardUpdater."""
    actual = []
    for kind in (StandardUpdater, GraphUpdater):

        def count(link, atoms, adj):
            link.total += 1
            if are_watched:
                link.counter += 1
                link.average = link.average * 0.5 + 1
            return three_columns(link, atoms, adj)

        xp = device.xp
        model = small_model(count, total=xp.zeros(2, 'f'), average=xp.zeros((), 'f'))
        own = Counting(model, xp)
        updater = make_updater(kind, device, model, loss_func=own)
        with eager_causes():
            run(updater, 6)
        row = model.predictor
        arrays = row.total, row.average, own.n_calls
        actual.append([row.counter, *(on_host(array).tolist() for array in arrays)])
    assert actual[0] == actual[1]


def test_attributes_that_a_step_sets(device, graphs, no_causes):
    """Attributes have the values of the last step, whichever graph was replayed."""

    def function(link, atoms, adj):
        link.n_graphs = adj.n_graphs
        return three_columns(link, atoms, adj)

    examples = same_molecules(14)
    seen = []
    for kind in (StandardUpdater, GraphUpdater):
        model = without_dropout(small_model(function, n_graphs=0))
        updater = make_updater(kind, device, model, examples, optimizers.SGD(0.01))
        iterators = [SerialIterator(examples, n, shuffle=False) for n in (8, 6)]
        saved = []
        for i in range(24):
            updater._iterators['main'] = iterators[i % 2]
            value = run(updater, 1)[0]['main/loss']
            assert float(on_host(model.loss)) == pytest.approx(value, rel=1e-6)
            saved.append([model.predictor.n_graphs, len(model.y), value])
            with chainer.using_config('train', False), chainer.no_backprop_mode():
                model(*chainer_bspmm.concat_mols(examples[:3], device))
        seen.append(saved)
    if graphs:
        assert graphs[0].n_launches > 12
    numpy.testing.assert_allclose(seen[1], seen[0], rtol=1e-3)


def test_forms_that_take_turns_are_captured_once(device, graphs, no_causes, noted):
    """The larger form finds two different values in the attribute, so it is captured twice."""

    def function(link, atoms, adj):
        link.n_graphs = adj.n_graphs
        return three_columns(link, atoms, adj)

    captures = noted(Program, 'capture')
    examples = same_molecules(8)
    iterators = [SerialIterator(examples, n, shuffle=False) for n in (8, 6)]
    model = without_dropout(small_model(function, n_graphs=0))
    updater = make_updater(GraphUpdater, device, model, examples)
    for i in range(24):
        updater._iterators['main'] = iterators[i % 4 == 3]
        run(updater, 1)
    assert len(captures) == 3


def test_two_updaters_of_one_model(device, graphs, no_causes):
    def make(kind):
        model = without_dropout(small_model())
        noise = [optimizer_hooks.GradientNoise(0)]
        updater = make_updater(kind, device, model, None, optimizers.SGD(0.01), noise)
        iterator = SerialIterator(same_molecules(16)[8:], BATCH)
        updater.other = kind(
            iterator,
            updater.get_optimizer('main'),
            device=device,
            converter=chainer_bspmm.concat_mols,
        )
        return updater

    assert_same_training(make, 6, lambda updater: run(updater.other, 1))
