"""`Snapshot` undoes or repeats the changes of a run, and compares the arrays of two runs."""

import numpy
import pytest

from chainer_bspmm.training import snapshot  # repairs Chainer before anything imports it
import chainer
from chainer import optimizers

from chainer_bspmm.training.reach import Reach
from chainer_bspmm.training.snapshot import ParameterMissing, Snapshot


def test_states_of_an_optimizer_that_changed_are_put_back():
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(numpy.ones(3, 'f'))
    optimizer = optimizers.MomentumSGD(0.1, 0.8).setup(link)
    link.w.grad = numpy.ones(3, 'f')
    optimizer.update()
    velocity = link.w.update_rule.state['v']
    weight = link.w.array
    arrays = snapshot.arrays_of(link, Reach(link))
    before = snapshot.Copies(arrays)
    velocity += 1
    assert snapshot.difference(arrays, before, 0).startswith('/w/v ')
    optimizer.update()
    before.put_back(arrays)
    numpy.testing.assert_array_equal(velocity, numpy.full(3, -0.1, 'f'))
    numpy.testing.assert_array_equal(weight, numpy.full(3, 0.9, 'f'))
    assert snapshot.difference(arrays, before, 0) is None


def test_arrays_that_cannot_be_written_are_left_out():
    link = chainer.Link()
    link.table, link.counts = numpy.arange(3), numpy.arange(3)
    link.table.flags.writeable = False
    assert list(snapshot.arrays_of(link, Reach(link))) == ['/counts']


class OfUser(numpy.ndarray):
    """A user's subclass of arrays, which may have attributes."""


def read_only(array):
    array.flags.writeable = False
    return array


KEPT = {
    'numbers': (lambda: numpy.ones(3), True),
    'text': (lambda: numpy.array(['a', 'b']), True),
    'records': (lambda: numpy.zeros(2, [('a', 'i4')]), True),
    'objects': (lambda: numpy.array([None, 'a'], object), False),
    'records with objects': (lambda: numpy.zeros(2, [('a', 'i4'), ('b', 'O')]), False),
    'masked': (lambda: numpy.ma.array([1.0, 2.0], mask=[0, 1]), False),
    'of a user': (lambda: numpy.ones(3).view(OfUser), False),
    'of a user, read-only': (lambda: read_only(numpy.ones(3).view(OfUser)), True),
    'objects, read-only': (lambda: read_only(numpy.array([None, 'a'], object)), False),
}


@pytest.mark.parametrize('name', KEPT)
def test_arrays_that_can_be_kept(name):
    make, expected = KEPT[name]
    assert snapshot.can_be_kept(make()) is expected


def test_arrays_of_text_are_put_back():
    arrays = {
        'words': numpy.array(['a', 'bc']),
        'records': numpy.zeros(2, [('n', 'i4'), ('x', 'f8')]),
    }
    before = snapshot.Copies(arrays)
    arrays['words'][1] = 'd'
    arrays['records']['n'] = 3
    assert snapshot.difference(snapshot.Copies(arrays), before, 0.1) == 'words'
    before.put_back(arrays)
    assert arrays['words'].tolist() == ['a', 'bc']
    assert arrays['records'].tolist() == [(0, 0.0)] * 2
    assert snapshot.difference(snapshot.Copies(arrays), before, 0) is None


def test_arrays_of_the_host_that_did_not_change_are_not_written():
    arrays = {'of a user': numpy.ones(3)}
    before = snapshot.Copies(arrays)
    arrays['of a user'].flags.writeable = False
    before.put_back(arrays)  # writing would raise an error
    assert arrays['of a user'].tolist() == [1, 1, 1]


def test_arrays_that_have_taken_the_places_of_others():
    link = chainer.Link()
    link.sums = numpy.zeros(2)
    link.counts = numpy.zeros(3)
    before = Snapshot(link, Reach(link))
    link.sums = numpy.ones(2)
    now = before.arrays_now()
    assert now.keys() == before.arrays.keys()
    assert now['/sums'] is link.sums and now['/counts'] is link.counts
    assert before.arrays['/sums'] is not link.sums


def test_copies_of_arrays_of_several_kinds():
    arrays = {
        'a': numpy.array([[0.0, numpy.nan]], 'f'),
        'strided': numpy.arange(12.0).reshape(3, 4).T,
        'integers': numpy.arange(3),
        'number': numpy.array(2, 'f'),
        'none': numpy.zeros((0, 4), 'f'),
        'flag': numpy.array([True]),
    }
    copies, same = snapshot.Copies(arrays), snapshot.Copies(arrays)

    def bits(found):
        return {name: array.tobytes() for name, array in found.items()}

    assert bits(copies) == bits(arrays)
    assert snapshot.difference(copies, same, 0) is None
    for name, array in arrays.items():
        if array.size:
            array.flat[0] = -0.0 if name == 'a' else array.flat[0] + 1 if name != 'flag' else False
            assert snapshot.difference(copies, snapshot.Copies(arrays), 0).startswith(name)
            copies.put_back(arrays)
            assert snapshot.difference(copies, snapshot.Copies(arrays), 0) is None
    other = snapshot.Copies(dict(arrays, more=numpy.ones(1)))
    assert snapshot.difference(copies, other, 0) == 'more (only one of them has it)'


@pytest.mark.parametrize(
    'actual, expected, tolerance, differs',
    [
        ([1.0, numpy.nan], [1.0, numpy.nan], 1e-3, False),
        ([1.0, numpy.nan], [1.0, 2.0], 1e-3, True),
        ([1.0, 2.0], [1.0, numpy.nan], 1e-3, True),
        ([numpy.nan, 2.0], [numpy.nan, 2 + 1e-9], 1e-6, False),
        ([1.0, numpy.inf], [1.0001, numpy.inf], 1e-3, False),
        ([1.0, numpy.inf], [1.0, -numpy.inf], 1e-3, True),
        ([1.0, -numpy.nan], [1.0, numpy.nan], 1e-3, False),
        ([1.0, 2.0], [1.0, 2.01], 1e-3, True),
        ([True, False], [True, True], 1e-3, True),
        ([1.5e-4], [1e-4], 1e-3, True),  # the bound is relative
        ([1.0, 2.0], [1.0, numpy.nextafter(2, 3)], 0, True),
    ],
)
def test_difference(actual, expected, tolerance, differs):
    actual, expected = {'x': numpy.array(actual)}, {'x': numpy.array(expected)}
    assert bool(snapshot.difference(actual, expected, tolerance)) == differs


def test_how_an_array_differs():
    """There is no relative difference if a number is not finite."""
    for actual, how in (
        (2.02, 'relative difference 1.0e-02'),
        (numpy.nan, 'one of them is not finite'),
    ):
        difference = snapshot.difference({'x': numpy.array(actual)}, {'x': numpy.array(2.0)}, 1e-3)
        assert difference == 'x (%s)' % how


class Table:
    def __init__(self):
        self.rows = {'a': 1}


class Owner(chainer.Chain):
    """A link whose call changes everything that it holds."""

    def __init__(self):
        super().__init__()
        self.number = 1
        self.calls = [1]
        self.table = Table()
        self.sums = numpy.zeros(2, 'f')
        self.batches = iter([10, 20, 30])
        with self.init_scope():
            self.W = chainer.Parameter(0, (2,))
            self.lazy = chainer.Parameter(chainer.initializers.Normal())

    def forward(self):
        self.number = next(self.batches)
        self.calls.append(2)
        self.table.rows['b'] = 2
        self.sums += 1
        self.new = self.W.array
        self.W.grad = numpy.ones(2, 'f')
        self.W.array += 1
        return numpy.random.rand()


def contents(owner):
    """Return copies of everything that the owner holds."""
    table = dict(owner.table.rows)
    arrays = [array.copy() for array in (owner.sums, owner.W.array)]
    gradient = owner.W.grad
    return dict(vars(owner)), list(owner.calls), table, gradient, *(a.tolist() for a in arrays)


@pytest.fixture
def taken():
    """An owner and a `Snapshot` of it."""
    owner = Owner()
    owner.W.grad = None
    return owner, Snapshot(owner, Reach(owner, owner))


def test_a_run_is_put_back(taken):
    owner, before = taken
    expected = contents(owner)
    state = numpy.random.get_state()[1].tolist()
    with before.undone():
        owner()
    assert contents(owner) == expected
    assert numpy.random.get_state()[1].tolist() == state
    assert next(owner.batches) == 10


def test_a_run_that_fails_is_put_back(taken):
    owner, before = taken
    expected = contents(owner)
    with pytest.raises(LookupError, match='^mine$'), before.undone():
        owner()
        raise LookupError('mine')
    assert contents(owner) == expected


def test_what_a_run_assigned_can_be_assigned_again(taken):
    """Attributes, contents and gradients of the run come back, but not the numbers in arrays."""
    owner, before = taken
    with before.undone():
        owner()
        gradient = owner.W.grad
        changes = before.changes()
    for place, new in changes:
        place.apply(new)
    assert next(owner.batches) == 10 and owner.number == 10
    assert owner.calls == [1, 2] and owner.table.rows == {'a': 1, 'b': 2}
    assert owner.new is owner.W.array and owner.W.grad is gradient
    assert not owner.sums.any() and not owner.W.array.any()


def test_no_parameter_is_made_by_a_run_that_is_undone(taken):
    owner, before = taken
    state = numpy.random.get_state()[1].tolist()
    assert before.has_lazy_parameters
    with pytest.raises(ParameterMissing), before.undone():
        owner.lazy.initialize((4,))
    assert not owner.lazy.is_initialized
    assert numpy.random.get_state()[1].tolist() == state
    owner.lazy.initialize((4,))
    assert owner.lazy.shape == (4,)


def test_no_parameter_is_left_that_a_run_has_added(taken):
    owner, before = taken
    with before.undone():
        with owner.init_scope():
            owner.another = chainer.Parameter(0, (3,))
        assert len(list(owner.params())) == 3
    assert len(list(owner.params())) == 2 and not hasattr(owner, 'another')


def test_numbers_drawn_for_a_parameter_stay_drawn(taken):
    """If a failed run has made a parameter, the next run draws other numbers, as in Chainer."""
    owner, before = taken
    owner.lazy.initialize((4,))
    state = numpy.random.get_state()[1:3]
    owner.number = 2
    before.restore()
    numpy.testing.assert_equal(numpy.random.get_state()[1:3], state)
    assert owner.number == 1 and owner.lazy.is_initialized


def test_a_second_run_may_draw_other_numbers(taken):
    owner, before = taken
    expected = contents(owner)
    first = owner()
    before.restore(with_numbers=False)
    assert contents(owner) == expected
    assert owner() != first


SIX = numpy.arange(6.0)


@pytest.mark.parametrize(
    'actual, expected, are_same',
    [
        (SIX, SIX.copy(), True),
        (SIX.reshape(2, 3).T, numpy.array([[0.0, 3], [1, 4], [2, 5]]), True),
        (numpy.array(numpy.nan), numpy.array(numpy.nan), True),
        (numpy.array(['a', 'bc']), numpy.array(['a', 'bc']), True),
        (numpy.array([1 + 2j]), numpy.array([1 + 2j]), True),
        (SIX, SIX[:5], False),
        (SIX.reshape(2, 3), SIX.reshape(3, 2), False),
        (SIX.reshape(3, 2), SIX.reshape(2, 3), False),
        (SIX, SIX.astype('f'), False),
        (SIX, SIX.tolist(), False),
        (numpy.array([0.0]), numpy.array([-0.0]), False),
        (numpy.array(['a', 'bc']), numpy.array(['a', 'bd']), False),
        (numpy.array([1 + 2j]), numpy.array([1 - 2j]), False),
    ],
)
def test_arrays_with_the_same_bits(actual, expected, are_same):
    assert snapshot.has_same_bits(actual, expected) is are_same
