"""What a check keeps, puts back and compares, and what is undone after a dropped capture."""

import numpy
import pytest

from chainer_bspmm.training import state  # first: it repairs Chainer
import chainer
from chainer import optimizers


def test_states_of_an_optimizer_that_changed_are_put_back():
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(numpy.ones(3, 'f'))
    optimizer = optimizers.MomentumSGD(0.1, 0.8).setup(link)
    link.w.grad = numpy.ones(3, 'f')
    optimizer.update()
    velocity = link.w.update_rule.state['v']
    weight = link.w.array
    arrays = state.state_arrays(optimizer)
    before = state.Copies(arrays)
    velocity += 1
    assert state.difference(arrays, before, 0).startswith('/w/v ')
    optimizer.update()
    before.put_back(arrays)
    numpy.testing.assert_array_equal(velocity, numpy.full(3, -0.1, 'f'))
    numpy.testing.assert_array_equal(weight, numpy.full(3, 0.9, 'f'))
    assert state.difference(arrays, before, 0) is None


def test_arrays_that_cannot_be_written_are_no_state():
    link = chainer.Link()
    link.table, link.counts = numpy.arange(3), numpy.arange(3)
    link.table.flags.writeable = False
    assert list(state.state_arrays(optimizers.SGD().setup(link))) == ['/counts']


def test_copies_of_arrays_of_several_kinds():
    arrays = {
        'a': numpy.array([[0.0, numpy.nan]], 'f'),
        'strided': numpy.arange(12.0).reshape(3, 4).T,
        'integers': numpy.arange(3),
        'number': numpy.array(2, 'f'),
        'none': numpy.zeros((0, 4), 'f'),
        'flag': numpy.array([True]),
    }
    copies, same = state.Copies(arrays), state.Copies(arrays)

    def bits(found):
        return {name: array.tobytes() for name, array in found.items()}

    assert bits(copies) == bits(arrays)
    assert state.difference(copies, same, 0) is None
    for name, array in arrays.items():
        if array.size:
            array.flat[0] = -0.0 if name == 'a' else array.flat[0] + 1 if name != 'flag' else False
            assert state.difference(copies, state.Copies(arrays), 0).startswith(name)
            copies.put_back(arrays)
            assert state.difference(copies, state.Copies(arrays), 0) is None
    other = state.Copies(dict(arrays, more=numpy.ones(1)))
    assert state.difference(copies, other, 0) == 'more (only one of them has it)'


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
    assert bool(state.difference(actual, expected, tolerance)) == differs


class Owner(chainer.Link):
    def __init__(self):
        super().__init__()
        self.number = 1
        self.calls = [1]
        self.table = {'a': 1}
        with self.init_scope():
            self.W = chainer.Parameter(0, (2,))
            self.lazy = chainer.Parameter(0)


def test_nothing_is_left_of_a_dropped_capture():
    owner = Owner()
    before = dict(vars(owner))
    with pytest.raises(RuntimeError, match='^a parameter would be made in a capture$'):
        with state.untouched([owner], list(owner.params())):
            owner.number, owner.calls = 2, owner.calls
            owner.calls.append(2)
            owner.table['b'] = 2
            owner.new = owner.W.array
            with owner.init_scope():
                owner.another = chainer.Parameter(0, (3,))
            assert len(list(owner.params())) == 3
            owner.lazy.initialize((4,))
    assert vars(owner) == before and owner.number == 1
    assert owner.calls == [1] and owner.table == {'a': 1} and len(list(owner.params())) == 2
    assert not owner.lazy.is_initialized
    owner.lazy.initialize((4,))
    assert owner.lazy.shape == (4,)
