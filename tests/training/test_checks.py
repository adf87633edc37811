"""Checks of replays against the eager step: what they find, and how training continues after it."""

import types
import warnings

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions
from chainer import optimizers
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.training import captured_predict
from chainer_bspmm.training import cuda_graphs
from chainer_bspmm.training import state
from chainer_bspmm.training import StepDiffers
from chainer_bspmm.training.graph_updater import GraphUpdater
from chainer_bspmm.training.step_program import StepProgram
from tests.support import relative_error
from tests.support.training import assert_same_bits
from tests.support.training import BATCH
from tests.support.training import make_updater
from tests.support.training import molecules
from tests.support.training import parameters
from tests.support.training import run
from tests.support.training import same_molecules
from tests.support.training import small_model
from tests.support.training import three_columns
from tests.support.training import without_dropout
from tests.training import host_graphs
from tests.training.host_graphs import causes
from tests.training.host_graphs import read_at_capture

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


class Slotted:
    __slots__ = ('value',)
    value: float


class Weighing:
    """Where a loss may read its weight from; `updater` and `trainer` are set later."""

    updater: StandardUpdater
    trainer: types.SimpleNamespace

    def __init__(self):
        self.values = {'weight': 0.0}
        self.listed = [0.0]
        self.nested = types.SimpleNamespace(inner=types.SimpleNamespace(weight=0.0))
        self.slotted = Slotted()

    def weight(self):
        return self.updater.iteration

    def next(self):
        """Before every step."""
        n = self.updater.iteration
        self.values['weight'] = self.nested.inner.weight = self.slotted.value = n
        self.listed = [n]
        optimizer = self.updater.get_optimizer('main')
        optimizer.lr = 0.01 + 0.001 * n


READINGS = {
    'updater.iteration': lambda place: place.updater.iteration,
    'trainer.updater.iteration': lambda place: place.trainer.updater.iteration,
    'iterator.epoch': lambda place: place.updater.get_iterator('main').epoch,
    'optimizer.t': lambda place: place.updater.get_optimizer('main').t,
    'optimizer.lr': lambda place: 100 * place.updater.get_optimizer('main').lr,
    'a value in a dict': lambda place: place.values['weight'],
    'a list that is replaced': lambda place: place.listed[0],
    'a nested namespace': lambda place: place.nested.inner.weight,
    "an object's method": lambda place: place.weight(),
    '__slots__': lambda place: place.slotted.value,
}


def annealed(kind, device, read, examples, **kwargs):
    """Return an updater whose loss is weighted by ``1 + 0.1 * read(place)``, and the place."""
    place = Weighing()
    if kind is GraphUpdater:
        kwargs.setdefault('on_difference', 'warn')
    weight = read_at_capture(lambda: read(place))
    model = without_dropout(small_model())

    def loss_func(*args):
        return model(*args) * (1.0 + 0.1 * weight())

    updater = make_updater(
        kind, device, model, examples, optimizers.SGD(0.01), loss_func=loss_func, **kwargs
    )
    place.updater, place.trainer = updater, types.SimpleNamespace(updater=updater)
    return updater, place


def train(updater, place, n_steps):
    """Return the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(n_steps):
            place.next()
            run(updater, 1)
    return causes(caught)


def test_a_check_waits_for_the_last_step(device, graphs, monkeypatch):
    """Which may have been launched on another stream; then all that is checked is copied."""
    capturer = host_graphs.HostCapturer if graphs is not None else cuda_graphs.Capturer
    calls, join, checked_replay = [], capturer.join, StepProgram._checked_replay
    copy = state.Copies.__init__

    def joined(self, *args):
        calls.append('join')
        return join(self, *args)

    def copied(self, arrays):
        calls.append('copies')
        copy(self, arrays)

    def checked(self):
        calls.append('check')
        return checked_replay(self)

    updater = make_updater(GraphUpdater, device, small_model(), molecules(BATCH))
    run(updater, 2)
    monkeypatch.setattr(capturer, 'join', joined)
    monkeypatch.setattr(state.Copies, '__init__', copied)
    monkeypatch.setattr(StepProgram, '_checked_replay', checked)
    run(updater, 2)
    first = calls.index('check')
    assert calls[first : first + 3] == ['check', 'join', 'copies']


def test_an_eager_step_between_captured_ones_waits_too(device, graphs, monkeypatch):
    capturer = host_graphs.HostCapturer if graphs is not None else cuda_graphs.Capturer
    calls, join = [], capturer.join
    updater = make_updater(GraphUpdater, device, small_model(), molecules(BATCH))
    run(updater, 2)
    monkeypatch.setattr(capturer, 'join', lambda self, *args: calls.append(1) or join(self, *args))
    with pytest.warns(UserWarning, match='hook'), chainer.function_hooks.TimerHook():
        run(updater, 1)
    assert len(calls) == 1


@pytest.mark.parametrize('is_fused', (False, True))
@pytest.mark.parametrize('name', READINGS)
def test_a_weight_that_changes_with_every_step(device, graphs, monkeypatch, name, is_fused):
    """Found at the second replay at the latest: no step is trained with an old weight."""
    if graphs is None and not is_fused:
        pytest.skip('on a GPU updates of SGD are fused')
    if graphs is not None and is_fused:
        host_graphs.fuse(monkeypatch)
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater, place = annealed(kind, device, READINGS[name], same_molecules())
        texts = train(updater, place, 8)
        results.append(parameters(updater))
    assert len(texts) == 1 and 'a replay of the captured step gave another' in texts[0]
    assert updater._driver.capturer is None and updater.graph_nbytes == 0
    assert updater.iteration == updater.get_optimizer('main').t == 8
    for key, expected in results[0].items():
        assert relative_error(results[1][key], expected) < 1e-5, key


@pytest.mark.parametrize('period, phase', [(3, 0), (7, 0), (10, 3), (10, 9)])
def test_a_weight_that_changes_and_changes_back(device, graphs, period, phase):
    def read(place):
        return 50.0 if place.updater.iteration % period == phase else 0.0

    updater, place = annealed(GraphUpdater, device, read, same_molecules())
    (cause,) = train(updater, place, 20)
    assert 'than the step run eagerly' in cause


class Counting:
    """A loss that keeps arrays: one is changed in place, one replaced."""

    def __init__(self, model, xp):
        self.model, self.n_calls, self.total = model, xp.zeros(1, 'f'), xp.zeros(1, 'f')

    def __call__(self, *args):
        self.n_calls += 1
        self.total = self.total + 1
        return self.model(*args)


def test_arrays_of_the_loss_move_once_a_step(device, graphs):
    model = small_model()
    model.to_device(device)
    loss = Counting(model, device.xp)
    updater = make_updater(
        GraphUpdater, device, model, same_molecules(), optimizers.SGD(0.01), loss_func=loss
    )
    run(updater, 20)
    assert loss.n_calls[0] == 20


def test_a_weight_that_changes_later_with_layouts_that_alternate(device, graphs):
    """Every layout counts its own replays; the change is found at its fourth or eighth."""
    updater, place = annealed(
        GraphUpdater, device, lambda place: place.updater.iteration // 10, same_molecules(16)
    )
    iterators = [
        chainer.iterators.SerialIterator(same_molecules(16), n, shuffle=False) for n in (8, 6)
    ]
    n_eager = None
    for i in range(40):
        updater._iterators['main'] = iterators[i % 2]
        texts = train(updater, place, 1)
        if texts:
            assert n_eager is None
            n_eager = updater.iteration
    assert n_eager is not None and 10 < n_eager <= 18


def fallen_back(device, monkeypatch, is_eager, **kwargs):
    """Train with a weight that changes at step 5; return the updater, and the warnings.

    is_eager: the steps before are run eagerly over the same buffers, and from the step of the
    check on as without captures.
    """
    updater, place = annealed(
        GraphUpdater, device, lambda place: place.updater.iteration >= 5, same_molecules(), **kwargs
    )
    if is_eager:
        with monkeypatch.context() as patch:
            patch.setattr('chainer_bspmm.training.step_program.StepProgram.capture', lambda _: None)
            train(updater, place, 5)
        return updater, place
    assert not train(updater, place, 5)  # replays 1 to 4, of which 3 is not checked
    return updater, place


@pytest.mark.parametrize('is_fused', (False, True))
def test_it_goes_on_from_the_eager_result(device, graphs, monkeypatch, is_fused):
    """To the bit, reported values and gradients included."""
    if is_fused and graphs is not None:
        host_graphs.fuse(monkeypatch)
    results = []
    for is_eager in (False, True):
        updater, place = fallen_back(device, monkeypatch, is_eager, check_every=5)
        program = list(updater._driver.programs.values())[0]
        place.next()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            with monkeypatch.context() as patch:
                if is_eager:
                    patch.setattr(type(program), 'capture', lambda _: None)
                reported = run(updater, 1)
        assert bool(causes(caught)) != is_eager
        if is_eager:
            updater._driver.reason = 'from here on'
            updater._driver.forget()
        optimizer = updater.get_optimizer('main')
        gradients = {
            path: chainer.backends.cuda.to_cpu(param.grad).copy()
            for path, param in optimizer.target.namedparams(include_uninit=False)
        }
        after = parameters(updater)
        train(updater, place, 3)
        assert optimizer.t == updater.iteration == 9
        results.append((reported, gradients, after, parameters(updater)))
    assert results[0][0] == results[1][0]
    for found, expected in zip(results[0][1:], results[1][1:]):
        assert_same_bits(found, expected)


def test_raise(device, graphs):
    updater, place = annealed(
        GraphUpdater, device, READINGS['updater.iteration'], same_molecules(), on_difference='raise'
    )
    assert not train(updater, place, 2)
    with pytest.raises(StepDiffers, match='gave another .* than the step run eagerly'):
        train(updater, place, 1)


@pytest.mark.parametrize(
    'argument, value, error',
    [
        ('on_difference', 'ignore', ValueError),
        ('check_every', 0, ValueError),
        ('check_every', 2.5, TypeError),
    ],
)
def test_arguments(argument, value, error):
    with pytest.raises(error, match=argument + ': expected'):
        make_updater(
            GraphUpdater,
            chainer.get_device('@numpy'),
            small_model(),
            same_molecules(),
            **{argument: value},
        )


def test_warnings_point_to_the_user_s_code(device, graphs):
    updater, place = annealed(GraphUpdater, device, READINGS['updater.iteration'], same_molecules())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(4):
            updater.update()
    found = [w for w in caught if 'GraphUpdater' in str(w.message)]
    assert found and all(w.filename == __file__ for w in found)


# Kernels that add with atomics.


def test_a_step_that_is_not_deterministic_and_does_not_say_so(device, graphs):
    n = 1 << 14
    rng = numpy.random.RandomState(0)
    rows, weights = rng.randint(BATCH, size=n), rng.normal(size=(n, 1)).astype('f') / n

    def function(link, atoms, adj):
        y = three_columns(link, atoms, adj)
        if link.xp is numpy:
            return y * (1 + 1e-5 * numpy.random.rand())
        return y + 1e-2 * functions.sum(  # backward adds to some rows in any order
            functions.get_item(y, (link.rows,)) * link.weights, axis=0, keepdims=True
        )

    model = without_dropout(
        small_model(function, rows=device.send(rows), weights=device.send(weights))
    )
    updater = make_updater(
        GraphUpdater, device, model, same_molecules(), optimizers.SGD(1e-3), check_every=1
    )
    run(updater, 6)
    if graphs:
        (program,) = updater._driver.programs.values()
        assert not program._deterministic


def test_a_difference_beyond_rounding(monkeypatch):
    """Steps that differ from each other do not make up for it."""
    host_graphs.stand_in(monkeypatch)

    def function(link, atoms, adj):
        link.shared[0] += 1
        factor = 2 if link.shared[0] == 6 else 1  # in the replay
        return three_columns(link, atoms, adj) * (factor + 1e-5 * numpy.random.rand())

    model = without_dropout(small_model(function, shared=[0]))
    updater = make_updater(
        GraphUpdater, chainer.get_device('@numpy'), model, same_molecules(), on_difference='raise'
    )
    run(updater, 1)
    with pytest.raises(StepDiffers):
        run(updater, 6)


# Predictions.


@pytest.mark.parametrize('changes_at', (1, 5))
def test_a_prediction_that_changes(device, monkeypatch, changes_at):
    """Found before anything wrong was given out, it continues eagerly; later it stops."""
    if device.xp is numpy:
        host_graphs.stand_in_for_prediction(monkeypatch)
    model, data = without_dropout(small_model()), molecules(4) * 24  # equal batches of 8
    with chainer.using_config('train', False):
        model.predictor(*chainer_bspmm.concat_mols(data[:2])[:2])
    model.to_device(device)
    given = []
    factor = read_at_capture(lambda: 2.0 if len(given) >= changes_at else 1.0)

    def predict(atoms, adj):
        return model.predictor(atoms, adj) * factor()

    def collect():
        for part in captured_predict(model, data, batch_size=8, predict=predict):
            given.append(part.values)

    # One batch is launched ahead. The first is eager; replays 1, 2, 4 and 8 are checked.
    if changes_at == 1:
        with pytest.warns(UserWarning, match='predicts eagerly: a replay gave another'):
            collect()
        assert len(given) == 12 and relative_error(given[-1], 2 * given[0]) < 1e-5
    else:
        with pytest.raises(StepDiffers, match='changed since it was captured'):
            collect()


def test_states_of_an_optimizer_are_compared_and_put_back():
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(numpy.ones(3, 'f'))
    optimizer = optimizers.MomentumSGD(0.1, 0.8).setup(link)
    link.w.grad = numpy.ones(3, 'f')
    optimizer.update()
    velocity, weight = link.w.update_rule.state['v'], link.w.array
    arrays = state.state_arrays(optimizer)
    before = state.Copies(arrays)
    velocity += 1
    assert state.difference(arrays, before, 0).startswith('/w/v ')
    optimizer.update()
    before.put_back(arrays)
    numpy.testing.assert_array_equal(velocity, numpy.full(3, -0.1, 'f'))
    numpy.testing.assert_array_equal(weight, numpy.full(3, 0.9, 'f'))
    assert state.difference(arrays, before, 0) is None


def test_nan_in_one_of_two_arrays_is_a_difference():
    nan, one = ({'a': numpy.array([value, 2.0])} for value in (numpy.nan, 1.0))
    for arrays in ((nan, one), (one, nan)):
        found, expected = map(state.Copies, arrays)
        assert state.difference(found, expected, 0.1).startswith('a ')
    more = {'a': numpy.array([numpy.nan, 2.0 + 1e-9])}
    assert state.difference(state.Copies(nan), state.Copies(more), 1e-6) is None


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
    assert {name: array.tobytes() for name, array in copies.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    assert state.difference(copies, same, 0) is None
    for name, array in arrays.items():
        if array.size:
            array.flat[0] = -0.0 if name == 'a' else array.flat[0] + 1 if name != 'flag' else False
            assert state.difference(copies, state.Copies(arrays), 0).startswith(name)
            copies.put_back(arrays)
            assert state.difference(copies, state.Copies(arrays), 0) is None
    other = state.Copies(dict(arrays, more=numpy.ones(1)))
    assert state.difference(copies, other, 0) == 'more (only one of them has it)'
