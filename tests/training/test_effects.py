"""Assignments that are repeated after a launch, and arrays that somebody keeps between launches."""

import collections
import enum
from typing import Any, NamedTuple

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer.training import extensions

from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.effects import Effects, shapes
from chainer_bspmm.training.guards import References
from chainer_bspmm.training.places import all_attributes, Items

from tests.support.training import is_captured, make_model, make_updater, molecules


class Owner:
    variable: Any
    array: Any
    rows: list
    parts: dict
    y: chainer.Variable


class Mode(enum.Enum):
    WARM = 1


class Known(References):
    """Known references, given as a list of the objects that they refer to."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def are_at_least(self, n, value):
        return sum(each is value for each in self.values) >= n


nothing = Known()


@pytest.fixture
def effects():
    """An owner, and the `Effects` that assign its variable, array and list; repeated once."""
    owner = Owner()
    owner.variable = chainer.Variable(numpy.arange(3.0))
    owner.array = numpy.arange(4.0)[1:]
    owner.rows = [numpy.arange(2.0)]
    place = all_attributes(vars(owner), str)
    new = {'variable': owner.variable, 'array': owner.array}
    made = Effects([(place, new), (Items(owner.rows, ''), list(owner.rows))])
    del new
    owner.variable = owner.array = None
    del owner.rows[:]
    made.repeat({}, {})
    return owner, made


def test_assignments_are_made_again(effects):
    owner, made = effects
    variable, array, (row,) = owner.variable, owner.array, owner.rows
    owner.variable = owner.array = None
    owner.rows[0] = 0
    made.repeat({}, {})
    assert owner.variable is variable and owner.array is array and owner.rows[0] is row


@pytest.mark.parametrize('step, user', [((), [5]), ((7,), []), ((7,), [7, 7])], ids=str)
def test_a_list_that_a_user_changes_is_again_what_a_step_makes_of_it(step, user):
    """Nobody keeps an array, so only the list itself can tell that it was changed."""
    items = [1]
    place = Items(items, '')
    before = place.save()
    items[:] = step
    made = Effects([(place, place.changes(before))])
    for _ in range(2):
        made.repeat({}, {})
        assert items == list(step)
        items[:] = user
        assert not made.are_kept(nothing)


def test_nobody_keeps_anything(effects):
    owner, made = effects
    assert not made.are_kept(nothing)
    assert not made.are_kept(nothing)
    owner.array = None
    assert not made.are_kept(nothing)
    made.repeat({}, {})
    assert owner.array is not None


def test_nothing_is_assigned_again_where_no_other_code_has_run(effects):
    owner, made = effects
    owner.array = None  # as no code can have done
    made.are_untouched()
    made.repeat({}, {})
    assert owner.array is None
    made.repeat({}, {})
    assert owner.array is not None


KEEPS = {
    'a variable': lambda owner: owner.variable,
    'the array of a variable': lambda owner: owner.variable.array,
    'a graph that has read a variable': lambda owner: owner.variable * 2,
    'an array': lambda owner: owner.array,
    'a view': lambda owner: owner.array[1:],
    'an item': lambda owner: owner.rows[0],
}


@pytest.mark.parametrize('keep', KEEPS.values(), ids=KEEPS)
def test_somebody_keeps(effects, keep):
    owner, made = effects
    assert not made.are_kept(nothing)
    kept = keep(owner)
    assert made.are_kept(nothing)
    del kept
    assert not made.are_kept(nothing)


def test_somebody_keeps_what_the_owner_has_replaced(effects):
    """The number of references is the same, but another object refers to the variable."""
    owner, made = effects
    assert not made.are_kept(nothing)
    kept, owner.variable = owner.variable, None
    assert made.are_kept(nothing)
    del kept
    assert not made.are_kept(nothing)


def test_known_references_do_not_count(effects):
    owner, made = effects
    known = Known(owner.variable)
    assert not made.are_kept(known)


def test_known_references_are_counted_only_where_there_are_others(effects):
    """A process with many trained models may have hundreds of thousands of known references."""
    owner, made = effects
    known = Known(owner.variable)
    known.are_at_least = None
    del known.values
    assert not made.are_kept(known)
    owner.variable = None
    assert not made.are_kept(known)


def test_known_references_may_change(effects):
    owner, made = effects
    known = Known(owner.variable)
    assert not made.are_kept(known)
    kept, known.values = known.values, ()
    assert not made.are_kept(known)  # the change has not been announced
    known.n_changes += 1
    assert made.are_kept(known)
    del kept


class Pair(NamedTuple):
    y: Any
    n: int


CONTAINERS = {
    'list': list,
    'tuple': tuple,
    'dict': lambda items: dict(enumerate(items)),
    'OrderedDict': lambda items: collections.OrderedDict(enumerate(items)),
    'defaultdict': lambda items: collections.defaultdict(list, enumerate(items)),
    'Counter': lambda items: collections.Counter(dict(enumerate(items))),
    'deque': collections.deque,
    'named tuple': lambda items: Pair(*items),
}


def effects_of(owner, *args, **new):
    return Effects([(all_attributes(vars(owner), str), new)], *args)


@pytest.mark.parametrize('make', CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_made_anew_with_copies(make):
    owner = Owner()
    array = numpy.zeros(2)
    made = effects_of(owner, parts=make([array, 3]))
    kept = []
    for number in range(2):
        assert not made.are_kept(nothing)
        array[...] = number
        made.repeat({}, {})
        kept.append(owner.parts)
    assert type(kept[0]) is type(kept[1]) is type(make([0, 0]))
    first, second = (list(each.values() if isinstance(each, dict) else each) for each in kept)
    assert first[0].tolist() == [0, 0] and second[0].tolist() == [1, 1]
    assert first[1] == second[1] == 3


def test_a_container_is_made_anew_also_where_no_other_code_has_run():
    owner = Owner()
    made = effects_of(owner, parts=[numpy.zeros(2)])
    made.repeat({}, {})
    first = owner.parts
    made.are_untouched()
    made.repeat({}, {})
    assert owner.parts is not first


def test_only_containers_are_assigned_again_where_all_is_in_place(monkeypatch):
    first, second = Owner(), Owner()
    places = [all_attributes(vars(owner), str) for owner in (first, second)]
    made = Effects([(places[0], {'parts': {}}), (places[1], {'array': numpy.zeros(2)})])
    made.repeat({}, {})
    parts = first.parts
    assert not made.are_kept(nothing)
    monkeypatch.setattr(places[1], 'apply', None)
    made.repeat({}, {})
    assert first.parts is not parts


def test_an_array_in_a_container_and_in_an_attribute_of_another_owner_stays_one():
    first, second = Owner(), Owner()
    array = numpy.zeros(2)
    changes = [
        (all_attributes(vars(first), str), {'parts': [array]}),
        (all_attributes(vars(second), str), {'array': array}),
    ]
    made = Effects(changes)
    made.repeat({}, {})
    kept = second.array
    assert first.parts[0] is kept and kept is not array
    assert not made.are_kept(nothing)
    made.repeat({}, {})
    assert first.parts[0] is second.array is not kept


def test_what_a_user_changes_in_a_container_is_not_there_after_the_next_step():
    owner = Owner()
    made = effects_of(owner, parts={'y': numpy.zeros(2)})
    made.repeat({}, {})
    owner.parts['more'] = owner.parts.pop('y')
    assert not made.are_kept(nothing)
    made.repeat({}, {})
    assert list(owner.parts) == ['y']


def test_reported_arrays_in_a_container_are_not_copied():
    owner = Owner()
    array, reported = numpy.zeros(2), numpy.ones(2)
    made = effects_of(owner, parts={'y': array}, variable=chainer.Variable(array))
    made.repeat({'y': array}, {'y': reported})
    assert owner.parts['y'] is reported


def test_a_view_of_an_array_that_is_in_a_container_too():
    """The container has a copy, but the attribute has the memory that the next launch writes."""
    owner = Owner()
    base = numpy.zeros((4, 2))
    made = effects_of(owner, array=base[:3], parts=[base[:1]])
    made.repeat({}, {})
    assert not made.are_kept(nothing)
    made.repeat({}, {})
    kept = owner.array[1:]
    assert made.are_kept(nothing)
    del kept


def test_garbage_is_collected_once(monkeypatch):
    """Also where there is nothing to count, as in most predictions."""
    calls = []
    monkeypatch.setattr('chainer_bspmm.training.effects.gc.collect', calls.append)
    made = Effects([])
    for _ in range(3):
        assert not made.are_kept(nothing)
        made.repeat({}, {})
    assert len(calls) == 1


def test_a_container_that_is_in_itself():
    owner = Owner()
    parts: dict = {'y': numpy.zeros(2)}
    parts['self'] = parts
    effects_of(owner, parts=parts).repeat({}, {})
    assert owner.parts is not parts and owner.parts['self'] is owner.parts


def test_a_deque_keeps_its_length_and_a_defaultdict_its_default():
    owner = Owner()
    rows = collections.deque([numpy.zeros(2)], maxlen=3)
    parts = collections.defaultdict(list, y=numpy.zeros(2))
    effects_of(owner, rows=rows, parts=parts).repeat({}, {})
    new = vars(owner)['rows']
    assert new is not rows and new.maxlen == 3
    assert owner.parts is not parts and owner.parts['other'] == []


class UsersDict(dict):
    pass


class UsersTuple(Pair):
    pass


class UsersVariable(chainer.Variable):
    pass


class Result:
    def __init__(self, *values):
        self.values = values


def with_gradient():
    array, gradient = numpy.zeros(2), numpy.ones(2)
    return chainer.Variable(array, name='x', grad=gradient)


def test_a_gradient_of_a_variable_is_kept():
    owner = Owner()
    made = effects_of(owner, variable=with_gradient())
    made.repeat({}, {})
    assert not made.are_kept(nothing)
    kept = owner.variable.grad
    assert made.are_kept(nothing)
    del kept
    assert not made.are_kept(nothing)
    kept = owner.variable.grad_var
    assert made.are_kept(nothing)
    del kept


def test_copies_of_a_variable_have_its_name_and_a_copy_of_its_gradient():
    owner = Owner()
    x = with_gradient()
    effects_of(owner, parts=[x], array=x.grad).repeat({}, {})
    (copy,) = owner.parts
    assert copy.name == 'x' and copy.grad.tolist() == [1, 1]
    assert copy.grad is owner.array is not x.grad


def with_title(pair):
    pair.title = 'pair'
    return pair


CANNOT_BE_MADE = {
    'a dict of a class of mine': lambda y: UsersDict(y=y),
    'the same in a list': lambda y: [UsersDict(y=y)],
    'a node': lambda y: y.node,
    'an object': Result,
    'the same in a tuple': lambda y: (Result(y), 2),
    'an object of numbers': lambda y: Result(2),
    'a variable of a class of mine': lambda y: UsersVariable(y.array),
    'a named tuple with an attribute': lambda y: with_title(UsersTuple(y, 2)),
    'a distribution': lambda y: chainer.distributions.Normal(y, scale=y),
}


@pytest.mark.parametrize('make', CANNOT_BE_MADE.values(), ids=CANNOT_BE_MADE)
def test_an_object_that_cannot_be_made_anew(make):
    text = (
        r'the step makes and keeps an object of class \w+, which a replay of a captured step '
        'cannot make anew$'
    )
    with pytest.raises(CannotCapture, match=text):
        effects_of(Owner(), parts=make(chainer.Variable(numpy.zeros(2))))


def test_a_named_tuple_of_ones_own_class():
    owner = Owner()
    effects_of(owner, parts=UsersTuple(numpy.zeros(2), 2)).repeat({}, {})
    assert type(owner.parts) is UsersTuple and owner.parts.n == 2


KNOWN = {
    'a dict of numbers': UsersDict(y=2),
    'an object': Result(2),
    'a list': [numpy.zeros(2), 2],
    'a dict': {'y': chainer.Variable(numpy.zeros(2))},
    'a variable of a class of mine': UsersVariable(numpy.zeros(2)),
}


@pytest.mark.parametrize('known', KNOWN.values(), ids=KNOWN)
def test_what_was_there_before_is_assigned_as_it_is(known):
    owner = Owner()
    made = effects_of(owner, [], lambda value: value is known, parts=known, rows=[known])
    made.repeat({}, {})
    assert owner.parts is owner.rows[0] is known
    assert not made.are_kept(nothing)


FOUND = {
    'a function': chainer.functions.relu,
    'a class': Owner,
    'a member of an enum': Mode.WARM,
    'a number': 2,
}


@pytest.mark.parametrize('found', FOUND.values(), ids=FOUND)
def test_what_no_step_makes_is_assigned_as_it_is(found):
    owner = Owner()
    effects_of(owner, parts=found).repeat({}, {})
    assert owner.parts is found


def test_shapes():
    """Attributes of a library's link are left out: only its own code reads them."""
    place, of_library = (all_attributes({}, str) for _ in range(2))
    of_library.is_of_library = True
    y = chainer.Variable(numpy.zeros((2, 3)))
    new = {'y': y, 'parts': {'a': [y.array[:1]]}, 'n': 2}
    assert shapes([(place, new), (of_library, {'h': y})]) == {
        'y': [(2, 3)],
        'parts': [(1, 3)],
        'n': [],
    }


def test_views_of_lasting_arrays():
    """An attribute that is a view of a parameter's array must follow later updates."""
    owner = Owner()
    weights = numpy.arange(3.0)
    new = {'array': weights[1:], 'y': chainer.Variable(weights)}
    made = Effects([(all_attributes(vars(owner), str), new)], [weights], gives_copies=True)
    made.repeat({}, {})
    weights += 1
    assert owner.array.tolist() == [2, 3] and owner.y is new['y']


def test_a_lasting_array_may_be_kept():
    owner = Owner()
    weights = numpy.arange(3.0)
    made = Effects([(all_attributes(vars(owner), str), {'array': weights[1:]})], [weights])
    made.repeat({}, {})
    assert not made.are_kept(nothing)
    kept = owner.array
    assert not made.are_kept(nothing)
    del kept


def test_copies():
    owner = Owner()
    array = numpy.arange(3.0)
    new = {'y': chainer.Variable(array, requires_grad=False), 'parts': {'of y': [array], 'n': 2}}
    made = Effects([(all_attributes(vars(owner), str), new)], gives_copies=True)
    made.repeat({}, {})
    first = owner.y
    array += 1
    made.repeat({}, {})
    assert first.array.tolist() == [0, 1, 2] and owner.y.array.tolist() == [1, 2, 3]
    assert not owner.y.requires_grad
    assert owner.parts == {'of y': [owner.y.array], 'n': 2}
    assert not made.are_kept(nothing)


def test_nothing_is_copied_if_only_chainer_s_code_runs_between_steps(
    device, graphs, sessions, tmp_path
):
    """An Evaluator assigns the same attributes between two steps."""
    model = make_model()
    model.to_device(device)
    examples = molecules(24)
    updater = make_updater(GraphUpdater, device, model, examples)
    trainer = chainer.training.Trainer(updater, (6, 'epoch'), str(tmp_path))
    iterator = chainer.iterators.SerialIterator(examples, 8, repeat=False, shuffle=False)
    trainer.extend(
        extensions.Evaluator(iterator, model, chainer_bspmm.concat_mols, device),
        trigger=(2, 'iteration'),
    )
    trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
    trainer.extend(extensions.snapshot())
    trainer.run()
    assert sessions and not any(each.gives_copies for each in sessions)


def test_nothing_is_copied_in_a_loop_that_reads_results(device, graphs, sessions):
    updater = make_updater(GraphUpdater, device)
    model = updater.get_optimizer('main').target
    norms = []
    for _ in range(8):
        updater.update()
        norms.append(float(abs(model.y.array).sum()))
        norms += [float(abs(param.grad).sum()) for param in model.params()]
    assert is_captured(updater) and not any(each.gives_copies for each in sessions)


def test_steps_are_captured_once_more_for_copies(device, graphs):
    updater = make_updater(GraphUpdater, device)
    model = updater.get_optimizer('main').target
    kept = []
    for _ in range(12):
        updater.update()
        kept.append(model.y)
    assert is_captured(updater) and updater._driver.session.gives_copies
    assert len({array.array.tobytes() for array in kept}) == len(kept)
