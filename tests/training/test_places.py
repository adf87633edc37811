"""Places of variables, which are all looked at, saved, and put back in the same way."""

import collections
import functools
import operator
import random
import types
from typing import Any

import numpy
import pytest

from chainer_bspmm.training import places
from chainer_bspmm.training.places import GeneratorState, Items, MISSING


class Attributes:
    pass


class Slots:
    __slots__ = ('a', 'b', 'c')


def words(name):
    return 'word ' + name


def dict_place():
    of = {'a': 1, 'b': 2}
    return places.entries(of, 'of'), of.__setitem__, of.pop


def ordered_place():
    of = collections.OrderedDict(a=1, b=2)
    return places.entries(of, 'of'), of.__setitem__, of.pop


class Refusing(dict):
    """A user's dict whose methods must not be called."""

    def __setitem__(self, key, value):
        raise NotImplementedError

    __delitem__ = __iter__ = items = values = keys = __setitem__


def refusing_place():
    of = Refusing(a=1, b=2)

    def write(key, value):
        dict.__setitem__(of, key, value)

    return places.entries(of, 'of'), write, of.pop


def whole_object_place():
    of: Any = Attributes()
    of.a, of.b = 1, 2
    return places.all_attributes(vars(of), words), of.__setattr__, of.__delattr__


def object_place():
    of: Any = Attributes()
    of.a, of.b = 1, 2
    return places.attributes(vars(of), words, ['a', 'b', 'c']), of.__setattr__, of.__delattr__


def place_of_class(make):
    class Of:
        a, b = 1, 2

    def write(name, value):
        setattr(Of, name, value)

    def delete(name):
        delattr(Of, name)

    return make(Of, words, ['a', 'b', 'c']), write, delete


def class_place():
    return place_of_class(places.class_attributes)


def module_place():
    of: Any = types.ModuleType('of')
    of.a, of.b = 1, 2
    place = places.module_variables(vars(of), words, ['a', 'b', 'c'])
    return place, vars(of).__setitem__, vars(of).pop


def slots_place():
    of: Any = Slots()
    of.a, of.b = 1, 2
    members = {name: vars(Slots)[name] for name in Slots.__slots__}
    return places.slots(of, words, members), of.__setattr__, of.__delattr__


def librarys_class_place():
    return place_of_class(functools.partial(places.of_library, written={'a', 'b', 'c'}))


def librarys_module_place():
    of: Any = types.ModuleType('of')
    of.a, of.b = 1, 2
    place = places.of_library(of, words, ['a', 'b', 'c'], written={'a', 'b', 'c'})
    return place, of.__setattr__, of.__delattr__


def training_place():
    of: Any = Attributes()
    of.a, of.b = 1, 2
    place = places.of_training(of, words, ['a', 'b', 'c'], kept={'a', 'b', 'c'})
    return place, of.__setattr__, of.__delattr__


PLACES = [
    *(dict_place, ordered_place, refusing_place, whole_object_place, object_place, class_place),
    *(module_place, slots_place, librarys_class_place, librarys_module_place, training_place),
]
every_place = pytest.mark.parametrize('make', PLACES, ids=lambda make: make.__name__)


def of_names(saved):
    return {name: saved[name] for name in 'abc' if name in saved}


@every_place
def test_all_variables_are_saved(make):
    place, _, _ = make()
    assert of_names(place.save()) == {'a': 1, 'b': 2}


@every_place
def test_what_was_saved_does_not_change(make):
    place, write, _ = make()
    saved = place.save()
    write('a', 3)
    assert of_names(saved) == {'a': 1, 'b': 2}


@every_place
def test_a_variable_that_was_assigned_is_put_back(make):
    place, write, _ = make()
    saved = place.save()
    write('a', 3)
    place.restore(saved)
    assert place.save() == saved


@every_place
def test_a_new_variable_is_deleted(make):
    place, write, _ = make()
    saved = place.save()
    write('c', 3)
    place.restore(saved)
    assert place.save() == saved


@every_place
def test_a_variable_that_was_deleted_is_put_back(make):
    place, _, delete = make()
    saved = place.save()
    delete('a')
    place.restore(saved)
    assert place.save() == saved


@every_place
def test_words_and_values_have_one_order(make):
    place, write, _ = make()
    before = list(place.look())
    write('b', 3)
    after = list(place.look())
    changed = [i for i, pair in enumerate(zip(before, after)) if operator.is_not(*pair)]
    text = place.texts()[changed[0]]
    assert len(changed) == 1 and text in ('word b', "'b' in of")
    assert len(place.texts()) == len(after)


@every_place
def test_changes_are_what_was_assigned_or_deleted(make):
    place, write, delete = make()
    saved = place.save()
    write('c', 3)
    delete('a')
    assert place.changes(saved) == {'c': 3, 'a': MISSING}


@every_place
def test_nothing_changed(make):
    place, write, _ = make()
    saved = place.save()
    write('a', 1)
    assert place.changes(saved) is None


@every_place
def test_changes_are_made_again(make):
    place, write, delete = make()
    saved = place.save()
    write('c', 3)
    delete('a')
    changes = place.changes(saved)
    place.restore(saved)
    place.apply(changes)
    assert of_names(place.save()) == {'b': 2, 'c': 3}


@every_place
def test_a_variable_that_is_gone_can_be_deleted_again(make):
    place, _, delete = make()
    delete('a')
    place.apply({'a': MISSING})
    assert of_names(place.save()) == {'b': 2}


WITH_NAMES = (
    *(object_place, class_place, module_place, slots_place, librarys_class_place),
    *(librarys_module_place, training_place),
)


@pytest.mark.parametrize('make', WITH_NAMES, ids=lambda make: make.__name__)
def test_a_watched_variable_may_be_missing(make):
    place, _, _ = make()
    assert list(place.look()) == [1, 2, MISSING]


@pytest.mark.parametrize('make', [dict_place, ordered_place])
def test_the_order_of_entries_is_put_back(make):
    place, write, delete = make()
    saved = place.save()
    delete('a')
    write('a', 1)
    place.restore(saved)
    assert list(place.save()) == ['a', 'b']


def test_another_key_with_the_same_value_is_seen():
    of = {'a': 1}
    place = places.entries(of, 'of')
    before = list(place.look())
    del of['a']
    of['b'] = 1
    assert list(place.look()) != before


def test_an_object_with_a_missing_slot():
    assert places.slots(Slots(), words, {'a': vars(Slots)['a']}).save() == {}


def test_attributes_of_a_librarys_class_that_no_code_writes_are_left_alone():
    class Of:
        a = b = c = 1

    place = places.of_library(Of, words, ['a', 'b'], written={'a'})
    saved = place.save()
    Of.a = Of.b = Of.c = 2
    assert list(place.look()) == [2, 2]
    place.restore(saved)
    assert saved == {'a': 1} and (Of.a, Of.b, Of.c) == (1, 2, 2)


class First:
    pass


class Second:
    pass


class Changing(First):
    pass


def test_base_classes_are_put_back():
    place = places.bases([Changing])
    before = list(place.look())
    saved = place.save()
    assert list(map(operator.is_, place.look(), before)) == [True]
    Changing.__bases__ = (Second,)
    assert list(place.look()) == [(Second,)]
    place.restore(saved)
    assert Changing.__bases__ == (First,)


def test_new_subclasses_are_seen_and_left_alone():
    class Base:
        pass

    class One(Base):
        pass

    place = places.subclasses([Base, One])
    saved = place.save()
    assert list(place.look()) == [One]

    class Two(Base):
        pass

    place.restore(saved)
    assert list(place.look()) == [One, Two]
    assert place.texts() == 2 * ['the subclasses of class Base']


def place_of_cache(maxsize):
    cached = functools.lru_cache(maxsize)(lambda n: {'n': n})
    return cached, places.cache(cached, 'of')


BOUNDS = pytest.mark.parametrize('maxsize', (None, 2, 1))


@BOUNDS
def test_new_results_in_a_cache_are_not_seen(maxsize):
    cached, place = place_of_cache(maxsize)
    looks = [*place.look()]
    for n in (1, 2, 1, 3):  # a bounded cache drops results
        cached(n)
        looks += place.look()
    assert len(looks) == 5 and len(set(looks)) == 1


@BOUNDS
def test_a_cache_that_is_cleared_is_seen(maxsize):
    cached, place = place_of_cache(maxsize)
    cached(1)
    cached(1)
    (before,) = place.look()
    cached.cache_clear()
    cached(1)
    (after,) = place.look()
    assert after is not before and list(place.look()) == [after]


def test_a_cache_that_is_cleared_and_used_more_than_before_is_seen():
    cached, place = place_of_cache(maxsize=4)
    cached(1)
    (before,) = place.look()
    cached.cache_clear()
    for _ in range(9):
        cached(1)
    assert list(place.look()) != [before]


@BOUNDS
def test_results_in_a_cache(maxsize):
    cached, _ = place_of_cache(maxsize)
    result = cached(1)
    assert any(each is result for each in places.results_in_cache(cached))


def test_attributes_of_training_that_are_only_watched():
    of: Any = Attributes()
    of.a, of.b = 1, 2
    place = places.of_training(of, words, ['a', 'b'], kept={'b'})
    saved = place.save()
    of.a = of.b = 3
    assert list(place.look()) == [3, 3]
    place.restore(saved)
    assert (of.a, of.b) == (3, 2)


def test_attributes_except_some():
    of: Any = Attributes()
    of.a, of.b = 1, 2
    place = places.attributes_except(vars(of), words, ['b'])
    saved = place.save()
    of.a = of.b = of.c = 3
    place.restore(saved)
    assert vars(of) == {'a': 1, 'b': 3}
    assert list(place.look()) == place.texts() == []


class Others:
    """A class that can replace `Attributes` as the class of an object."""


def test_the_class_of_an_object_is_put_back():
    of: Any = Attributes()
    place = places.classes_of_objects([Slots(), of], [])
    saved = place.save()
    of.__class__ = Others
    place.restore(saved)
    assert type(of) is Attributes


def test_the_dict_of_an_object_is_put_back():
    of: Any = Attributes()
    of.a = 1
    variables = vars(of)
    place = places.classes_of_objects([Slots(), of], [])
    saved = place.save()
    of.__dict__ = {'a': 2}
    place.restore(saved)
    assert vars(of) is variables and of.a == 1


def test_the_class_of_a_link_is_put_back_but_not_its_dict():
    """A link's attributes are put back by another place."""
    of: Any = Attributes()
    place = places.classes_of_objects([], [of])
    saved = place.save()
    variables = of.__dict__ = {'a': 1}
    of.__class__ = Others
    place.restore(saved)
    assert type(of) is Attributes and vars(of) is variables


@pytest.mark.parametrize('part, value', [('__class__', Others), ('__dict__', {})])
def test_another_class_or_dict_of_an_object_is_seen(part, value):
    of: Any = Attributes()
    place = places.classes_of_objects([Slots(), of], [])
    before = list(place.look())
    text = '%s of an object of class Attributes' % part
    position = place.texts().index(text)
    setattr(of, part, value)
    changed = [i for i, pair in enumerate(zip(before, place.look())) if operator.is_not(*pair)]
    assert changed == [position]


def closure():
    def write(value):
        nonlocal n
        n = value

    def delete():
        nonlocal n
        del n

    n = 1
    (cell,) = write.__closure__
    return places.cell(cell, 'the variable n'), write, delete


def test_a_variable_of_a_closure_is_put_back():
    place, write, _ = closure()
    saved = place.save()
    write(2)
    place.restore(saved)
    assert list(place.look()) == [1]


def test_a_variable_of_a_closure_that_was_deleted_is_put_back():
    place, _, delete = closure()
    saved = place.save()
    delete()
    place.restore(saved)
    assert list(place.look()) == [1]


def test_a_variable_of_a_closure_that_was_not_assigned_is_deleted():
    place, write, delete = closure()
    delete()
    saved = place.save()
    write(2)
    place.restore(saved)
    assert list(place.look()) == [MISSING]


def test_a_variable_of_a_closure_in_words():
    place, _, _ = closure()
    assert place.texts() == ['the variable n']


class UsersList(list):
    def clear(self):
        raise NotImplementedError

    extend = __iter__ = clear


ITEMS: dict[str, Any] = {
    'list': lambda: [1, 2, 3],
    'set': lambda: {1, 2, 3},
    'deque': lambda: collections.deque([1, 2, 3], maxlen=3),
    'of a user': lambda: UsersList([1, 2, 3]),
}
every_container = pytest.mark.parametrize('name', ITEMS)


@every_container
def test_items_that_were_taken_are_put_back(name):
    of = ITEMS[name]()
    items = Items(of, 'of')
    saved = items.save()
    of.pop()
    items.restore(saved)
    assert items.save() == [1, 2, 3] and of == ITEMS[name]()


@every_container
def test_changes_of_items_are_made_again(name):
    of = ITEMS[name]()
    items = Items(of, 'of')
    saved = items.save()
    left = of.pop()
    changes = items.changes(saved)
    items.restore(saved)
    items.apply(changes)
    assert set(items.save()) == {1, 2, 3} - {left}


@every_container
def test_items_that_did_not_change(name):
    items = Items(ITEMS[name](), 'of')
    assert items.changes(items.save()) is None


@every_container
def test_every_item_has_words(name):
    items = Items(ITEMS[name](), 'of')
    assert items.texts() == ['of'] * len(list(items.look()))


def test_that_all_items_were_taken_is_a_change():
    of = [1]
    items = Items(of, 'of')
    saved = items.save()
    of.clear()
    assert items.changes(saved) == []


GENERATORS = {
    'random': lambda: random.Random(3),
    'RandomState': lambda: numpy.random.RandomState(3),
    'MT19937': lambda: numpy.random.Generator(numpy.random.MT19937(3)),
    'PCG64': lambda: numpy.random.default_rng(3),
    'Philox': lambda: numpy.random.Generator(numpy.random.Philox(3)),
    'SFC64': lambda: numpy.random.Generator(numpy.random.SFC64(3)),
}
every_generator = pytest.mark.parametrize('name', GENERATORS)


def normal(generator):
    """Draw a normal number; some generators draw two, and keep the second one."""
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    return generator.normal()


@every_generator
def test_the_same_numbers_are_drawn_again(name):
    generator = GENERATORS[name]()
    normal(generator)
    state = GeneratorState(generator, 'of')
    saved = state.save()
    numbers = [normal(generator) for _ in range(3)]
    state.restore(saved)
    assert [normal(generator) for _ in range(3)] == numbers


@every_generator
def test_a_generator_from_which_nothing_was_drawn_is_left_alone(name, monkeypatch):
    state = GeneratorState(GENERATORS[name](), 'of')
    saved = state.save()
    monkeypatch.setattr(state, '_write', None)
    state.restore(saved)


@every_generator
def test_states_are_equal_until_something_is_drawn(name):
    generator = GENERATORS[name]()
    state = GeneratorState(generator, 'of')
    saved = state.save()
    assert state.save() == saved
    normal(generator)
    assert state.save() != saved
