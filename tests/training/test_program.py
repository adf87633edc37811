"""`Program`: number of calls of a user's code, replays that are checked, and errors."""

import random
import re
import types

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import links, optimizers
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.program import blame, Program
from chainer_bspmm.training.reach import Reach
from tests.support import assert_close_arrays
from tests.support.training import assert_same_training, HOST, is_captured
from tests.support.training import make_model, make_updater
from tests.support.training import molecules, parameters, run, same_molecules, small_model
from tests.support.training import three_columns
from tests.support.training import calls_of_the_first_check, hidden, without_dropout
from tests.training import host_graphs
from tests.training.host_graphs import eager_causes

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    'every, expected',
    [(2000, [*POWERS, 2000, 4000]), (1500, [*POWERS, 1500, 3000, 4500]), (1, list(range(1, 5001)))],
)
def test_which_replays_are_checked(every, expected):
    program = object.__new__(Program)
    program._session = types.SimpleNamespace(check_every=every)
    checked = []
    for number in range(1, 5001):
        program._n_replays = number - 1
        if program.is_check_due():
            checked.append(number)
    assert checked == expected


def test_checks_of_a_library_s_step_take_no_new_inventory(device, graphs, noted):
    """Making one takes as long as an eager step."""
    updater = make_updater(GraphUpdater, device, make_model())
    run(updater, 3)
    calls = noted(Reach, 'anew')
    run(updater, 6)
    assert is_captured(updater) and not calls


def counted(link, atoms, adj):
    link.n_calls.value += 1
    return three_columns(link, atoms, adj)


def calls_of_steps(updater, n_steps):
    """Return a list of the number of calls of the model in each step."""
    n_calls = updater.get_optimizer('main').target.predictor.n_calls
    found = []
    for _ in range(n_steps):
        n_before = n_calls.value
        run(updater, 1)
        found.append(n_calls.value - n_before)
    return found


def test_how_often_a_step_calls_the_model(device, graphs, no_causes):
    """The trial, the eager step and the check of rows call the model, then the capture and checks.

    The trial calls it three times, each of the others once, except for the check of rows.
    """
    model = small_model(counted, n_calls=hidden(0))  # its value is not watched
    updater = make_updater(GraphUpdater, device, model)
    launched = 0 if graphs is None else 1  # a stand-in runs the model
    first = 3 + 1 + calls_of_the_first_check(device)
    expected = [first, 2 + launched, *(n + launched for n in (1, 0, 1, 0, 0, 0, 1, 0))]
    assert calls_of_steps(updater, 10) == expected


def with_a_head(link, atoms, adj):
    link.n_calls.value += 1
    return link.head(link.inner(atoms, adj))


def model_with_a_lazy_head():
    model = without_dropout(small_model(with_a_head, n_calls=hidden(0)))
    with model.predictor.init_scope():
        model.predictor.head = links.Linear(None, 3)
    return model


def test_a_parameter_is_made_by_the_step_itself(device, graphs, no_causes):
    """The trial of the first step ends at the missing parameter, and the step is Chainer's.

    Then rows are checked. The second step is tried out and run, the third one is captured, replayed
    and checked.
    """
    updater = make_updater(GraphUpdater, device, model_with_a_lazy_head())
    launched = 0 if graphs is None else 1
    first, *others = calls_of_steps(updater, 4)
    assert first == 1 + 1 + calls_of_the_first_check(device)
    assert others == [3 + 1, 1 + 1 + launched, 1 + launched]
    assert is_captured(updater)


def test_a_parameter_gets_the_random_numbers_that_chainers_loop_draws(device, graphs, no_causes):
    found = []
    for kind in (StandardUpdater, GraphUpdater):
        model = model_with_a_lazy_head()
        updater = make_updater(kind, device, model, optimizer=optimizers.SGD(0.01))
        run(updater, 4)
        found.append((parameters(updater), numpy.random.rand()))
    assert_close_arrays(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


def test_nothing_is_taken_from_a_generator_but_by_the_step(device, graphs):
    """There is no extra run, because a value cannot be put back into a generator."""

    def drawing(link, atoms, adj):
        return three_columns(link, atoms, adj) * next(link.weights)

    def make(kind):
        weights = (1 + 0.1 * i for i in range(10))
        model = without_dropout(small_model(drawing, weights=weights))
        return make_updater(kind, device, model, optimizer=optimizers.SGD(0.01))

    with eager_causes() as causes:
        assert_same_training(make, 4)
    assert causes == [
        'GraphUpdater trains eagerly: a check would consume part of the attribute weights of '
        'predictor (generator)'
    ]


def test_a_step_that_seeds_a_generator_trains_eagerly(device, graphs):
    """Two runs of the trial have the same result, but a replay would not seed the generator."""

    def seeding(link, atoms, adj):
        numpy.random.seed(1)
        return three_columns(link, atoms, adj) * numpy.random.uniform()

    def make(kind):
        # There are two batches, so the second step draws after the first one.
        return make_updater(kind, device, without_dropout(small_model(seeding)), molecules(32))

    with eager_causes() as causes:
        assert_same_training(make, 8)
    assert causes == [
        'GraphUpdater trains eagerly: the step changes the state of numpy.random at every run'
    ]


def test_a_run_that_fails_is_undone(device, graphs):
    """After a warning the batch is run once more, so that the user sees the error."""

    def fails_once(link, atoms, adj):
        link.seen.append(len(link.seen))
        link.n_calls.value += 1
        if link.n_calls.value == 1:
            raise LookupError('mine')
        return three_columns(link, atoms, adj)

    model = small_model(fails_once, seen=[], n_calls=hidden(0))
    updater = make_updater(GraphUpdater, device, model)
    message = (
        r'^GraphUpdater trains eagerly: /predictor \(Row\) cannot be captured: LookupError: mine '
        r'\(%s, line \d+, in fails_once\)$'
    )
    with pytest.warns(UserWarning, match=message % re.escape(__file__)):
        run(updater, 1)
    assert model.predictor.seen == [0]
    # A failed run, the step, and the check of rows after it.
    assert model.predictor.n_calls.value == 1 + 1 + calls_of_the_first_check(device)


class Sealed(random.Random):
    """A user's generator that does not reveal its state."""

    def getstate(self):
        raise LookupError('mine')


def test_an_object_whose_state_cannot_be_read(device, graphs):
    def function(link, atoms, adj):
        return three_columns(link, atoms, adj) * (1 + link.drawn.random())

    updater = make_updater(GraphUpdater, device, small_model(function, drawn=Sealed(3)))
    with eager_causes() as causes:
        run(updater, 3)
    assert causes == [
        'GraphUpdater trains eagerly: the state that the step may change cannot be saved: '
        'LookupError: mine'
    ]


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError('there was no error')


class Failing(chainer.Chain):
    def __init__(self, inner=None):
        super().__init__()
        with self.init_scope():
            self.inner = inner

    def forward(self):
        if self.inner is None:
            raise ValueError('mine')
        return self.inner()


FORWARD = re.escape(__file__) + r', line \d+, in forward'


@pytest.mark.parametrize(
    'make, expected',
    [
        (lambda: (Failing(Failing()),) * 2, r'/inner \(Failing\) cannot be captured: '),
        (lambda: (Failing(), Failing()), r'\(Failing\) cannot be captured: '),
        (lambda: (Failing(), None), r'\(Failing\) cannot be captured: '),
    ],
    ids=('a link of the model', 'another link', 'no model'),
)
def test_the_link_and_the_line_that_failed_are_told(make, expected):
    model, around = make()
    pattern = r'%sValueError: mine \(%s\)' % (expected, FORWARD)
    assert re.fullmatch(pattern, blame(raised(model), around))


def fails():
    raise LookupError('mine')


def test_without_a_link_the_step_is_told():
    pattern = r'the step cannot be captured: LookupError: mine \(%s, line \d+, in fails\)'
    assert re.fullmatch(pattern % re.escape(__file__), blame(raised(fails), None))


def counts_rows(link, atoms, adj):
    link.n_rows = len(atoms)
    return three_columns(link, atoms, adj)


def test_a_number_of_rows_is_that_of_the_batch(device, graphs):
    """A captured step would count the spare rows of its buffers."""
    found = []
    with eager_causes() as causes:
        for kind in (StandardUpdater, GraphUpdater):
            model = small_model(counts_rows, n_rows=0)
            updater = make_updater(kind, device, model, molecules(40))
            found.append([])
            for _ in range(4):
                run(updater, 1)
                found[-1].append(model.predictor.n_rows)
    assert found[1] == found[0]
    assert causes == [
        'GraphUpdater trains eagerly: spare rows at the end of a batch, which belong to no '
        'molecule, change the attribute n_rows of predictor: the step keeps arrays or sizes of the '
        'batch'
    ]


def train_with_a_reported_number(device, model, between, n_steps):
    """Train step by step; return the updater, and the numbers that are reported as 'beta'."""
    updater = make_updater(GraphUpdater, device, model, same_molecules(), on_difference='warn')
    found = []
    for _ in range(n_steps):
        (reported,) = run(updater, 1)
        found.append(reported['main/predictor/beta'])
        between(updater.iteration)
    return updater, found


def test_a_replay_reports_the_number_of_the_last_capture(device, graphs, no_causes):
    def reporting(link, atoms, adj):
        chainer.report({'beta': link.beta}, link)
        return three_columns(link, atoms, adj)

    model = small_model(reporting, beta=1.0)

    def change(iteration):
        model.predictor.beta = 1.0 if iteration < 5 else 0.25

    updater, found = train_with_a_reported_number(device, model, change, 10)
    assert found == 5 * [1.0] + 5 * [0.25] and is_captured(updater)


def test_a_check_compares_reported_numbers(device, graphs):
    """The eighth replay is checked, in the ninth step."""

    def reporting(link, atoms, adj):
        chainer.report({'beta': link.beta.value}, link)
        return three_columns(link, atoms, adj)

    model = small_model(reporting, beta=hidden(1.0))  # its value is not watched

    def change(iteration):
        model.predictor.beta.value = 1.0 if iteration < 6 else 0.25

    with eager_causes() as causes:
        _, found = train_with_a_reported_number(device, model, change, 10)
    assert found == 8 * [1.0] + 2 * [0.25]
    assert causes == [
        'GraphUpdater trains eagerly: a replay of the captured step repeats a number that an eager '
        'one reports differently, main/predictor/beta (relative difference 3.0e+00): it depends on '
        'a value of Python that has changed since it was captured, and that is not watched '
        '(docs/captured_training.md)'
    ]


@pytest.mark.parametrize('part', ['_snapshot', '_again'])
def test_training_goes_on_eagerly_where_a_check_has_no_memory(monkeypatch, part):
    """The step that was to be checked is done and counted once."""
    host_graphs.stand_in(monkeypatch)
    host_graphs.fuse(monkeypatch)

    def make(kind):
        model = without_dropout(small_model())
        return make_updater(kind, HOST, model, optimizer=optimizers.SGD(1e-3))

    def exhausted(*args):
        raise MemoryError('no room')

    expected = make(StandardUpdater)
    run(expected, 8)
    updater = make(GraphUpdater)
    run(updater, 4)  # the next replay is the 4th, which is checked
    monkeypatch.setattr(Program, part, exhausted)
    with eager_causes() as texts:
        run(updater, 4)
    assert texts == [
        'GraphUpdater trains eagerly: there is no memory for the check of a replay: no room'
    ]
    assert updater.get_optimizer('main').t == 8
    assert_close_arrays(parameters(updater), parameters(expected), 1e-5)
