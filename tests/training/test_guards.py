"""`Guards`: the objects that they watch, the names of the objects, and changes of the key.

Changes during a training are in test_watched.py.
"""

import collections
import datetime
import decimal
import enum
import fractions
import functools
import random
import types
from typing import Any

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions, link_hooks, links, optimizers
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.training.guards import Guards, References
from chainer_bspmm.training.reach import Reach
from tests.support.training import hidden, small_model, without_dropout

FACTOR = 1.0

loss = 0.0  # has the name of an attribute that functions below read


def names_a_global(*args):
    return sum([FACTOR * i for i in range(len(args))])  # an inner function reads the global


class Loss:
    """A loss with a weight, as a callable object and as a method."""

    def __init__(self, model):
        self.model = model
        self.weight = 1.0

    def __call__(self, *args):
        return self.model(*args) * self.weight

    def method(self, *args):
        return self.model(*args) * self.weight


class Named(chainer.Chain):
    """A chain whose forward names a global."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = links.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) * FACTOR


class Calling(chainer.Chain):
    def __call__(self, x):
        return x * FACTOR


def rule_of(model):
    return model.predictor.inner.embed.W.update_rule


HOW = {'forward': Named, '__call__': Calling, 'function': lambda: links.Linear(2, 2)}


def changing_model():
    return without_dropout(small_model(removed=1))


def guarded():
    """Return a model, its optimizer, and guards of both."""
    model = changing_model()
    optimizer = optimizers.MomentumSGD().setup(model)
    for param in model.params(include_uninit=False):
        param.update_rule._init_states(param)
    return model, optimizer, Guards(model, model, optimizer)


def test_what_changes_back_is_the_same():
    model, _, guards = guarded()
    with chainer.using_config('noise', 0.0):
        before = guards.key()
        model.predictor.counter = 1
        changed = guards.key()
        assert changed.change(before) == 'the attribute counter of predictor'
        model.predictor.counter = 0
        assert guards.key() == before != changed and hash(guards.key()) == hash(before)
        with chainer.using_config('noise', 0.5):
            assert guards.key().change(before) == 'the attribute noise of chainer.config'
        assert guards.key() == before


class Printing(float):
    """A number whose text is that of all others."""

    def __repr__(self):
        return 'a number'


@pytest.mark.parametrize(
    'before, after',
    [
        (None, ...),
        (slice(0, 1), slice(1, 2)),
        (range(1), range(2)),
        (frozenset([1]), frozenset([2])),
        ((1, {2: 3}), (1, [2])),
        (fractions.Fraction(1, 2), fractions.Fraction(1, 4)),
        (decimal.Decimal('0.5'), decimal.Decimal('0.25')),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (numpy.float32(0.5), numpy.float32(0.25)),
        (10**4299, 10**5000),
        (Printing(0.5), Printing(0.25)),
        (type('Setting', (), {}), type('Setting', (), {})),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_all_types_are_watched(before, after):
    model, _, guards = guarded()
    model.predictor.value = before
    last = guards.key()
    model.predictor.value = after
    assert guards.key() != last
    model.predictor.value = before
    assert guards.key() == last


def test_states_in_a_new_dict():
    """Arrays of the new dict are watched instead of the old arrays."""
    model, _, guards = guarded()
    before = guards.key()
    rule = rule_of(model)
    rule._state = dict(rule._state)
    assert guards.key() is before
    rule._state['v'] = rule._state['v'].copy()
    assert guards.key() != before


def test_hyperparameters_in_a_new_object():
    """Hyperparameters are not in the key, because the update reads them at every step."""
    model, optimizer, guards = guarded()
    before = guards.key()
    rule = rule_of(model)
    rule.hyperparam = chainer.optimizer.Hyperparameter(optimizer.hyperparam)
    after = guards.key()
    assert after == before and after is not before
    rule.hyperparam.lr = 0.5
    assert guards.key() is after


def test_closures():
    """The closures of a loss, of a function in a partial, and of a link's function are watched."""
    factor = 1.0
    model = small_model()
    around = small_model(lossfun=lambda x, t: factor)

    def loss_func(*args):
        return factor * model(*args)

    for function in (loss_func, functools.partial(loss_func, 1)):
        guards = Guards(chainer.Chain(), function)
        of_link = Guards(around, around)
        assert [type(link).__name__ for link in list(guards.reach.links.values())[1:3]] == [
            'Regressor',
            'Row',
        ]
        before = guards.key(), of_link.key()
        factor = factor + 1.0
        text = 'the variable factor that loss_func reads'
        assert guards.key().change(before[0]) == text
        assert of_link.key() != before[1]
    own = Loss(model)
    for function in (own, own.method, functools.partial(own)):
        guards = Guards(model, function)
        before = guards.key()
        own.weight += 1.0
        assert guards.key().change(before) == 'the attribute weight of Loss'


def weighted(*args, by):
    return by.weight * sum(args)


def test_keywords_of_a_partial():
    own = Loss(None)
    guards = Guards(chainer.Chain(), functools.partial(weighted, by=own))
    before = guards.key()
    own.weight += 1.0
    assert guards.key().change(before) == 'the attribute weight of Loss'


@pytest.mark.parametrize('make', HOW.values(), ids=HOW)
def test_globals(monkeypatch, make):
    model = make()
    guards = Guards(model, names_a_global if type(model) is links.Linear else model)
    before = guards.key()
    monkeypatch.setitem(globals(), 'FACTOR', 2.0)
    assert guards.key().change(before) == 'FACTOR of module ' + __name__


def test_links_around_a_function():
    """Parameters of a link are watched, whichever way a function refers to the link."""
    teacher = links.Linear(2, 2)
    holder = links.Linear(2, 2)
    holder.teacher = teacher

    class Distilled:
        def __init__(self):
            self.teacher = teacher

        def __call__(self, x):
            return self.teacher(x)

    one, other = links.Linear(2, 2), links.Linear(2, 2)
    for target, function in ((one, lambda x: teacher(x)), (other, Distilled()), (holder, holder)):
        guards = Guards(target, function)
        before = guards.key()
        assert list(guards.reach.links.values()) == [target, teacher]
        assert set(map(id, guards.other_params)) == {id(teacher.W), id(teacher.b)}
        teacher.W.array = teacher.W.array.copy()
        assert guards.key() != before


class Weight:
    """A class with a weight, which an object may override."""

    factor = 1.0

    def of(self, loss):
        return loss * FACTOR


SETTINGS: dict[str, Any] = {'factor': 1.0, 'steps': [1, 2]}
SEEN: set = set()
RECENT = collections.deque([1.0], 3)
WEIGHT = Weight()
OPTIONS = types.SimpleNamespace(factor=1.0)


def reads_all(*args):
    loss = SETTINGS['factor'] * RECENT[0] * Weight.factor * WEIGHT.factor * OPTIONS.factor
    return WEIGHT.of(loss) if SEEN else sum(SETTINGS['steps']) * loss


@pytest.mark.parametrize(
    'change, expected',
    [
        (lambda: SETTINGS.update(factor=2.0), "'factor' in SETTINGS of module %s"),
        (lambda: SETTINGS.update(more=1.0), 'SETTINGS of module %s'),
        (lambda: SETTINGS['steps'].append(3), 'SETTINGS of module %s'),
        (lambda: SEEN.add(1), 'SEEN of module %s'),
        (lambda: RECENT.append(2.0), 'RECENT of module %s'),
        (lambda: setattr(Weight, 'factor', 2.0), 'factor of class Weight'),
        (lambda: setattr(WEIGHT, 'factor', 2.0), 'the attribute factor of Weight'),
        (lambda: setattr(OPTIONS, 'factor', 2.0), 'the attribute factor of SimpleNamespace'),
        (lambda: globals().update(FACTOR=2.0), 'FACTOR of module %s'),
    ],
    ids=(
        'an entry',
        'a new entry',
        'a list in a dict',
        'a set',
        'a deque',
        'an attribute of a class',
        'a new attribute',
        'an attribute of an object',
        'a global that a method names',
    ),
)
def test_what_is_inside_of_globals(change, expected):
    reach = Reach(reads_all)
    before = reach.save()
    try:
        guards = Guards(chainer.Chain(), reads_all)
        key = guards.key()
        change()
        text = guards.key().change(key)
    finally:
        reach.restore(before)
    assert text == (expected % __name__ if '%s' in expected else expected)
    assert guards.key() == key  # after the change was undone


def test_what_is_not_watched(monkeypatch):
    """Variables that a step assigns, names that no code reads, and memory outside of Python."""
    model, _, guards = guarded()
    row = model.predictor
    outside = hidden(1.0)
    own = Guards(model, lambda x: model(x) * outside.value * model.loss)
    model.loss = chainer.Variable(numpy.zeros(1))
    row.cache = {}
    row.seen = []
    before = guards.key(), own.key()
    outside.value = 2.0
    monkeypatch.setitem(globals(), 'loss', 1.0)  # functions read only the attribute of this name
    model.loss = chainer.Variable(numpy.ones(1))
    row.cache = {1: 2}
    row.seen = [3]
    assert guards.key() is before[0] and own.key() is before[1]


def test_dicts_and_lists_of_a_link_whose_code_a_library_calls():
    """A library's code may name any attribute, so all attributes are watched."""
    model, _, guards = guarded()
    for name, value in (('cache', {}), ('seen', [])):
        setattr(model, name, value)
        before = guards.key()
        setattr(model, name, type(value)([(1, 2)]))
        assert guards.key().change(before) == 'the attribute %s of Regressor' % name


class Kind(enum.Enum):
    ONE = 1
    OTHER = 2


@pytest.mark.parametrize('one, other', ((Kind.ONE, Kind.OTHER), (object(), object())))
def test_objects_that_code_tells_apart_by_identity(one, other):
    link = chainer.Link()
    link.kind = one
    guards = Guards(link, link)
    before = guards.key()
    link.kind = other
    key = guards.key()
    assert key != before and key.change(before) == 'the attribute kind of Link'
    link.kind = one
    assert guards.key() == before


def test_an_output_is_watched_no_longer():
    """An array that every run assigns is an output; an assigned number is still watched."""
    model = chainer.Chain()

    def function():
        model.sums = numpy.ones(2)
        model.number = 1

    function()
    guards = Guards(model, function)
    key = guards.key()
    moments = []
    for _ in range(2):
        function()
        moments.append(guards.moment())
    assert moments[1].change(moments[0]) is None
    outputs, others = moments[1].outputs(moments[0])
    assert outputs == {('the attribute sums of Chain', 0)} and not outputs & others
    assert guards.key() != key
    guards.ignore(outputs, set())
    key = guards.key()
    function()
    assert guards.key() is key
    model.number = 2
    assert guards.key().change(key) == 'the attribute number of Chain'


def of_an_output():
    """Return a link, and guards that know its attribute y as an array that every run replaces."""
    model = chainer.Link()
    model.y = numpy.ones(2)
    guards = Guards(model, model)
    before = guards.moment()
    model.y = numpy.ones(2)
    guards.ignore(*guards.moment().outputs(before))
    return model, guards


def test_outputs_that_are_replaced_make_a_look_no_longer(monkeypatch):
    """Guards do not refer to them either, so that somebody who does is noticed."""
    model, guards = of_an_output()
    key = guards.key()
    monkeypatch.setattr(guards, '_differ', None)
    model.y = numpy.zeros(2)
    assert guards.key() is key and guards.references(model.y) == 0


def test_the_type_of_an_output_is_watched():
    """A run that leaves None makes no change after another such run, but one after an array."""
    model, guards = of_an_output()
    key = guards.key()
    model.y = None
    without = guards.key()
    assert without.change(key) == 'the attribute y of Link'
    model.y = numpy.zeros(2)
    assert guards.key() == key != without


def of_two_lists():
    """Return guards of a function that replaces the second of two arrays, and both owners."""
    given, last = (types.SimpleNamespace(weight=numpy.ones(2)) for _ in range(2))

    def function():
        last.weight = numpy.zeros(2)
        return given.weight

    return Guards(chainer.Link(), function), given, last


def test_an_array_with_the_words_of_an_output_is_watched():
    guards, given, last = of_two_lists()
    before = guards.moment()
    last.weight = numpy.zeros(2)
    replaced, left = guards.moment().outputs(before)
    assert len(replaced) == 1 and replaced.isdisjoint(left)
    words = 'the attribute weight of SimpleNamespace'
    assert {name for name, _ in replaced} == {words} and words in {name for name, _ in left}
    guards.ignore(replaced, left)
    key = guards.key()
    last.weight = numpy.zeros(2)
    assert guards.key() is key
    given.weight = numpy.zeros(2)
    assert guards.key() != key


def test_an_output_that_a_run_leaves_in_its_place_is_watched_again():
    guards, _, last = of_two_lists()
    before = guards.moment()
    last.weight = numpy.zeros(2)
    replaced, _ = guards.moment().outputs(before)
    guards.ignore(replaced, set())
    guards.ignore(set(), replaced)
    key = guards.key()
    last.weight = numpy.zeros(2)
    assert guards.key() != key


class OnGPU(chainer.Link):
    """A link that claims to be on a GPU, and reads an array on the host."""

    xp: Any = 'a GPU'

    def __call__(self):
        return float(self.table[3])


@pytest.mark.parametrize('size', [5000, 10000])
def test_the_contents_of_an_array_of_the_host(size):
    model = OnGPU()
    model.table = numpy.ones(size)
    guards = Guards(model, model)
    before = guards.key()
    model.table[3] = 0.25
    assert guards.key().change(before) == 'the contents of an array on the host'


def changes_array(model, optimizer):
    model.W.array = model.W.array.copy()


def freezes(model, optimizer):
    model.W.update_rule.enabled = False


def lowers_rate_of_rule(model, optimizer):
    model.W.update_rule.hyperparam.lr = 0.01


def lowers_rate(model, optimizer):
    optimizer.hyperparam.lr = 0.01


def lowers_decay(model, optimizer):
    model.hook.rate = 0.01


def adds_to_a_gradient(model, optimizer):
    model.scale.grad = model.scale.grad + 1


@pytest.mark.parametrize(
    'change, expected',
    [
        (changes_array, 'the attribute W of Linear'),
        (freezes, 'enabled of the update rule of the attribute W of Linear'),
        (lowers_rate_of_rule, 'lr of the update rule of the attribute W of Linear'),
        (lowers_rate, 'lr of the optimizer'),
        (lowers_decay, 'the attribute rate of WeightDecay'),
        (adds_to_a_gradient, 'the gradient of the attribute scale of Linear'),
    ],
)
def test_what_a_run_changes_of_an_update_is_named(change, expected):
    model = links.Linear(2, 3)
    optimizer = optimizers.SGD(0.1).setup(model)
    model.hook = chainer.optimizer_hooks.WeightDecay(0.1)
    model.scale = chainer.Variable(numpy.ones(3, 'f'), grad=numpy.zeros(3, 'f'))
    optimizer.add_hook(model.hook)

    def function():
        return model.W, model.hook.rate, model.scale

    guards = Guards(model, function, optimizer)
    before = guards.moment()
    assert guards.moment().change(before) is None
    change(model, optimizer)
    assert guards.moment().change(before) == expected


@pytest.mark.parametrize(
    'change, expected',
    [
        (lambda model: setattr(model, 'number', 2), 'the attribute number of Chain'),
        (lambda model: model.numbers.append(2), 'the attribute numbers of Chain'),
        (lambda model: setattr(model, 'sums', numpy.ones(2)), 'the attribute sums of Chain'),
        (lambda model: next(model.batches), 'the attribute batches of Chain'),
        (lambda model: numpy.random.rand(), 'the state of numpy.random'),
        (lambda model: random.random(), 'the state of random'),
        (lambda model: model.generator.rand(), 'the attribute generator of Chain'),
    ],
    ids=('a number', 'a list', 'an array', 'an iterator', 'NumPy', 'random', 'a generator'),
)
def test_what_a_run_changes_is_named(change, expected):
    model = chainer.Chain()
    model.number = 1
    model.numbers = [1]
    model.sums = numpy.zeros(2)
    model.batches = iter([1, 2])
    model.generator = numpy.random.RandomState(0)

    def function():
        return model.number, model.numbers, model.sums, model.batches, model.generator

    guards = Guards(model, function)
    before = guards.moment()
    assert guards.moment().change(before) is None
    change(model)
    assert guards.moment().change(before) == expected


def test_hooks_that_have_to_see_every_call():
    model, _, guards = guarded()

    def named():
        guards.key()
        return guards.blocking_hook()

    assert named() is None
    with chainer.using_config('debug', True):
        assert named() == 'Chainer is in debug mode'
    for hook in (chainer.function_hooks.TimerHook(), link_hooks.TimerHook()):
        with hook:
            assert named() == 'the hook TimerHook has to see every call'
    embed = model.predictor.inner.embed
    for _ in range(2):
        embed.add_hook(link_hooks.TimerHook(), 'mine')
        assert named() == 'the hook mine has to see every call'
        embed.delete_hook('mine')
        assert named() is None


KNOWN = Regressor(links.Linear(3, 2), functions.mean_squared_error, {'mae': functions.sum})


@pytest.mark.parametrize(
    'model, loss_func, expected',
    [
        (KNOWN, None, False),
        (KNOWN, KNOWN.__call__, False),
        (Regressor(links.Linear(3, 2), names_a_global), None, True),
        (Regressor(links.Linear(3, 2), functools.partial(functions.sum)), None, True),
        (Regressor(links.Linear(3, 2), functions.sum, {'own': names_a_global}), None, True),
        (Regressor(Named(), functions.sum), None, True),
        (KNOWN, lambda *args: KNOWN(*args), True),
        (KNOWN, functools.partial(KNOWN), True),
        (KNOWN, Loss(KNOWN), True),
        (KNOWN, Loss(KNOWN).method, True),
    ],
)
def test_code_of_a_user(model, loss_func, expected):
    assert Guards(model, loss_func or model).has_user_code is expected


class Holder:
    """Stand-in for guards, with a number of references to every value."""

    def __init__(self, n):
        self.n = n
        self.n_asked = 0

    def references(self, value):
        self.n_asked += 1
        return self.n


@pytest.mark.parametrize('n, expected', [(0, True), (2, True), (3, True), (4, False)])
def test_references_of_all_guards(n, expected):
    references = References()
    holders = Holder(1), Holder(2)
    for each in holders:
        references.note(each)
    assert references.are_at_least(n, None) is expected


def test_guards_that_looked_last_are_asked_first():
    references = References()
    holders = [Holder(2) for _ in range(3)]
    for each in (*holders, holders[0]):
        references.note(each)
    assert references.are_at_least(2, None)
    assert [each.n_asked for each in holders] == [1, 0, 0]


def test_guards_that_have_ended_refer_to_nothing():
    references = References()
    ended, other = Holder(1), Holder(1)
    references.note(ended)
    references.note(other)
    n_changes = references.n_changes
    del ended
    assert references.n_changes != n_changes
    assert references.are_at_least(1, None) and not references.are_at_least(2, None)


def test_references_of_guards_to_what_they_watch():
    """They hold an attribute's value among the last values, and what is in it."""
    model = chainer.Chain()
    model.y = chainer.Variable(numpy.ones(2))
    guards = Guards(model, lambda: model.y.array.sum())
    assert guards.references(model.y) >= 1
    assert guards.references(chainer.Variable(numpy.ones(2))) == 0
