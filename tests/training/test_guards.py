"""`Guards`: a key changes with everything that is promised to be watched."""

import functools
import gc
import types
import weakref

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions
from chainer import link_hooks
from chainer import links
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.training.graph_updater import GraphUpdater
from chainer_bspmm.training.guards import Guards
from tests.support import relative_error
from tests.support.training import make_updater
from tests.support.training import n_keys
from tests.support.training import parameters
from tests.support.training import Row
from tests.support.training import run
from tests.support.training import same_molecules
from tests.support.training import small_model
from tests.support.training import without_dropout

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')

FACTOR = 1.0


def names_a_global(*args):
    return sum([FACTOR * i for i in range(len(args))])  # in a function within


class Loss:
    """A loss with a weight, in the ways in which it can be written."""

    def __init__(self, model):
        self.model, self.weight = model, 1.0

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


def guarded():
    """Return a model, its optimizer, and guards of both."""
    model = small_model()
    optimizer = optimizers.Adam().setup(model)
    for param in model.params(include_uninit=False):
        param.update_rule._init_states(param)
    return model, optimizer, Guards(model, model, optimizer)


CHANGES = {
    'a number': lambda model, _: setattr(model.predictor, 'counter', 1),
    'a flag for a number': lambda model, _: setattr(model.predictor, 'counter', False),
    'a string': lambda model, _: setattr(model, 'mode', 'fast'),
    'a tuple': lambda model, _: setattr(model, 'sizes', (1, (2, 3))),
    'an array': lambda model, _: setattr(model, 'weights', numpy.ones(3)),
    'a function': lambda model, _: setattr(model, 'lossfun', lambda x, t: x),
    'an attribute that is removed': lambda model, _: delattr(model.predictor, 'counter'),
    'a link': lambda model, _: setattr(model, 'predictor', Row(None)),
    "a parameter's array": lambda model, _: setattr(
        model.predictor.inner.embed.W, 'array', model.predictor.inner.embed.W.array.copy()
    ),
    'requires_grad': lambda model, _: setattr(
        model.predictor.inner.embed.W, '_requires_grad', False
    ),
    'an update rule that is disabled': lambda model, _: model.predictor.inner.disable_update(),
    'a state': lambda model, _: model.predictor.inner.embed.W.update_rule.state.update(
        m=numpy.zeros_like(model.predictor.inner.embed.W.array)
    ),
    'another update rule': lambda model, _: setattr(
        model.predictor.inner.embed.W, 'update_rule', optimizers.SGD().create_update_rule()
    ),
    'a hook': lambda _, optimizer: optimizer.add_hook(optimizer_hooks.WeightDecay(0.1)),
    'a hook after the update': lambda _, optimizer: optimizer.add_hook(
        optimizer_hooks.WeightDecay(0.1), timing='post'
    ),
    'a hook of an update rule': lambda model, _: model.predictor.inner.embed.W.update_rule.add_hook(
        optimizer_hooks.WeightDecay(0.1)
    ),
    'configuration': lambda *_: setattr(chainer.global_config, 'guarded', 0.5),
}


@pytest.mark.parametrize('name', CHANGES)
def test_a_change_is_noticed(name):
    model, optimizer, guards = guarded()
    before = guards.key()
    assert guards.key() is before
    try:
        CHANGES[name](model, optimizer)
        after = guards.key()
    finally:
        vars(chainer.global_config).pop('guarded', None)
    assert after != before and isinstance(after.change(before), str)
    if 'configuration' not in name:
        assert guards.key() is after


def test_what_changes_back_is_the_same():
    model, _, guards = guarded()
    before = guards.key()
    model.predictor.counter = 1
    changed = guards.key()
    assert changed.change(before) == 'the attribute counter of predictor'
    model.predictor.counter = 0
    assert guards.key() == before != changed and hash(guards.key()) == hash(before)


def test_states_in_a_new_dict():
    """Their arrays are watched, not those of the dict that was there when the guards were made."""
    model, _, guards = guarded()
    before = guards.key()
    rule = model.predictor.inner.embed.W.update_rule
    rule._state = dict(rule._state)
    assert guards.key() is before
    rule._state['m'] = rule._state['m'].copy()
    assert guards.key() != before


def test_other_hyperparameters():
    """Their numbers may change at every step, so the key is equal; but the update looks again."""
    model, optimizer, guards = guarded()
    before = guards.key()
    rule = model.predictor.inner.embed.W.update_rule
    rule.hyperparam = chainer.optimizer.Hyperparameter(optimizer.hyperparam)
    after = guards.key()
    assert after == before and after is not before
    rule.hyperparam.alpha = 0.5
    assert guards.key() is after


def test_what_every_step_replaces_is_no_change():
    model, _, guards = guarded()
    model.loss, model.cache, model.seen = chainer.Variable(numpy.zeros(1)), {}, []
    before = guards.key()
    model.loss, model.cache, model.seen = chainer.Variable(numpy.ones(1)), {1: 2}, [3]
    assert guards.key() is before


def test_configuration_of_the_user():
    model, _, guards = guarded()
    with chainer.using_config('noise', 0.0):
        before = guards.key()
        with chainer.using_config('noise', 0.5):
            assert guards.key() != before
            assert guards.key().change(before) == 'the attribute noise of chainer.config'
        assert guards.key() == before


def test_a_closure():
    factor, model = 1.0, small_model()

    def loss_func(*args):
        return factor * model(*args)

    for function in (loss_func, functools.partial(loss_func, 1)):
        guards = Guards(chainer.Chain(), function)
        assert [type(link).__name__ for link in guards.links[1:3]] == ['Regressor', 'Row']
        before = guards.key()
        factor = factor + 1.0
        assert 'factor that loss_func reads' in guards.key().change(before)


def test_a_closure_of_a_link_s_function():
    factor = 1.0
    model = small_model(lossfun=lambda x, t: factor)
    guards = Guards(model, model)
    before = guards.key()
    factor = 2.0
    assert guards.key() != before


@pytest.mark.parametrize('function', (None, names_a_global))
def test_globals(monkeypatch, function):
    model = Named() if function is None else links.Linear(2, 2)
    guards = Guards(model, function or model)
    before = guards.key()
    monkeypatch.setitem(globals(), 'FACTOR', 2.0)
    after = guards.key()
    assert after != before and 'FACTOR' in after.change(before)


def test_links_around_a_function():
    """However the function refers to them: their parameters are watched."""
    teacher = links.Linear(2, 2)
    holder = links.Linear(2, 2)
    holder.teacher = teacher

    class Distilled:
        def __init__(self):
            self.teacher = teacher

        def __call__(self, x):
            return self.teacher(x)

    for target, function in (
        (links.Linear(2, 2), lambda x: teacher(x)),
        (links.Linear(2, 2), Distilled()),
        (holder, holder),
    ):
        guards = Guards(target, function)
        before = guards.key()
        assert guards.links == [target, teacher]
        assert set(map(id, guards.other_params)) == {id(teacher.W), id(teacher.b)}
        teacher.W.array = teacher.W.array.copy()
        assert guards.key() != before


def test_numbers_of_another_type():
    model, _, guards = guarded()
    kind = type('Number', (int,), {})
    model.number = 1
    before = guards.key()
    model.number = kind(1)
    assert guards.key() != before


def test_hooks_that_have_to_see_every_call():
    model, _, guards = guarded()

    def named():
        guards.key()
        return guards.blocking_hook() or ''

    assert not named()
    with chainer.using_config('debug', True):
        assert 'debug mode' in named()
    for hook in (chainer.function_hooks.TimerHook(), link_hooks.TimerHook()):
        with hook:
            assert 'TimerHook' in named()
    embed = model.predictor.inner.embed
    for _ in range(2):
        embed.add_hook(link_hooks.TimerHook(), 'mine')
        assert 'the hook mine has to see every call' == named()
        embed.delete_hook('mine')
        assert not named()


@pytest.mark.parametrize(
    'pick', (lambda loss: loss, lambda loss: loss.method, lambda loss: functools.partial(loss))
)
def test_weight_of_a_loss(device, graphs, no_causes, pick):
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        model = without_dropout(small_model())
        loss = Loss(model)
        updater = make_updater(
            kind, device, model, same_molecules(), optimizers.SGD(0.01), loss_func=pick(loss)
        )
        for weight in (1.0, 2.0, 1.0):
            loss.weight = weight
            run(updater, 3)
        results.append(parameters(updater))
    assert n_keys(updater) == 2
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-5, name


def test_attributes_and_configuration_of_a_step(device, graphs, no_causes):
    def scaled(link, atoms, adj):
        return link.inner(atoms, adj)[:, :3] * (1.0 + link.counter)

    model = small_model(scaled)
    updater = make_updater(GraphUpdater, device, model, same_molecules())

    def n_seen():
        run(updater, 3)
        return n_keys(updater)

    assert n_seen() == 1
    model.predictor.counter = 1
    assert n_seen() == 2
    model.predictor.counter = 0
    assert n_seen() == 2
    model.predictor.inner.embed.disable_update()
    assert n_seen() == 3
    with chainer.using_config('train', False):
        assert n_seen() == 4


def test_a_program_keeps_what_its_key_names_by_id(device, graphs):
    """Another object could get the same id."""
    model = small_model(factor=device.xp.ones(3, 'f'))
    model.lossfun = lambda x, t: chainer.functions.mean_squared_error(x, t)
    updater = make_updater(GraphUpdater, device, model, same_molecules())
    row = model.predictor
    references = [
        weakref.ref(thing) for thing in (row.inner.embed.W.array, row.factor, model.lossfun)
    ]
    run(updater, 3)
    row.inner.embed.W.array = row.inner.embed.W.array.copy()
    row.factor = row.factor.copy()
    model.lossfun = chainer.functions.mean_squared_error
    run(updater, 3)
    assert len(updater._driver.programs) == 2
    assert all(reference() is not None for reference in references)
    updater._driver.programs.popitem(last=False)
    gc.collect()
    assert all(reference() is None for reference in references)


def test_what_is_not_watched():
    """They are left to the checks of replays, which keeps the list of what is watched short."""
    settings = types.SimpleNamespace(factor=1.0)
    numbers = {'factor': 1.0}
    model = links.Linear(2, 2)
    guards = Guards(model, lambda x: model(x) * settings.factor * numbers['factor'])
    before = guards.key()
    settings.factor = numbers['factor'] = 2.0
    assert guards.key() is before


loss = 0.0  # a global of the same name as an attribute that the functions below read


def test_attributes_are_not_taken_for_globals():
    model = small_model()
    guards = Guards(model, lambda *args: model(*args) and model.loss)
    before = guards.key()
    globals()['loss'] = 1.0
    assert guards.key() == before


class Calling(chainer.Chain):
    def __call__(self, x):
        return x * loss


def test_globals_of_a_call_are_watched():
    link = Calling()
    guards = Guards(link, link)
    before = guards.key()
    globals()['loss'] = 2.0
    assert guards.key() != before


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
