"""`check_rows` says where rows are taken for molecules, is silent otherwise, leaves no trace."""

import builtins
import contextlib
import copy
import functools
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import random
import statistics
import timeit
import warnings
from typing import Any

import numpy
import pytest

import chainer_bspmm  # repairs Chainer before anything imports it
import chainer
from chainer import functions as F, links as L, optimizers
from chainer.backends import cuda
from chainer.function_hooks import TimerHook
from chainer.iterators import SerialIterator
from chainer.link_hooks import TimerHook as LinkTimerHook
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.links import EmbedAtomID, GGNNUpdate
from chainer_chemistry.models.prediction import Regressor, set_up_predictor

from chainer_bspmm import CSRConverter, sparsify
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.check_rows import check_first_step, check_rows, RowsCheck
from chainer_bspmm.training.forked import cannot_fork
from chainer_bspmm.training.program import Program
from tests.support import parity
from tests.support.devices import slow_unless

PAGE = 'See docs/migration.md, "A Chain of your own"'
COUNTED = (
    'It depends on how many rows there are: len(atoms) and atoms.shape[0] count rows, and so does '
    'a mean over axis 0: use len(t) or adj.n_graphs.'
)
REDUCED = (
    'It depends on the contents of the rows: a sum, a mean or a maximum over axis 0 covers the '
    'rows of all molecules: use a readout of Chainer Chemistry or '
    'chainer_bspmm.functions.segment_sum.'
)


def examples(n=12):
    rng = numpy.random.RandomState(0)
    result = []
    for size in rng.randint(1, 12, n):
        adj = (rng.uniform(size=(4, size, size)) < 0.2).astype('f')
        label = rng.uniform(1, 2, 1).astype('f')
        result.append((rng.randint(1, 9, size).astype('i'), adj + adj.transpose(0, 2, 1), label))
    return result


EXAMPLES = examples()
N_ROWS = sum(len(atoms) for atoms, *_ in EXAMPLES)


class Own(chainer.Chain):
    """A user's Chain around a predictor; `loss` is a function of self, y, and the batch."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        with self.init_scope():
            self.predictor = made_predictor()
            self.weight = chainer.Parameter(2.0, (1,))
            self.late = L.Linear(1, 1)

    def __call__(self, atoms, adj, t):
        loss = self.loss(self, self.predictor(atoms, adj), atoms, adj, t)
        chainer.report({'loss': loss}, self)
        return loss


class Layers(chainer.Chain):
    """Layers that a user has put together; `reduce` computes the loss from the rows' features."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce
        with self.init_scope():
            self.embed = EmbedAtomID(8)
            self.update = GGNNUpdate(8, 8)
        sparsify(self)

    def __call__(self, x, adj, t):
        self.update.reset_state()
        return self.reduce(self.update(self.embed(x), adj))


def made_predictor(method='ggnn'):
    """Return a swapped predictor all of whose parameters are made."""
    with contextlib.redirect_stdout(io.StringIO()):
        predictor = sparsify(set_up_predictor(method, 8, 2, 1))
    predictor(*chainer_bspmm.concat_mols(EXAMPLES)[:2])
    return predictor


def check(model, data=EXAMPLES, converter=chainer_bspmm.concat_mols, loss_func=None):
    return check_rows(model, loss_func or model, converter(data), {})


@pytest.fixture
def in_this_process(monkeypatch):
    """Make the check run the loss in this process and undo that, as for a model on a GPU."""
    monkeypatch.setattr('chainer_bspmm.training.check_rows._is_on_host', lambda links: False)


@pytest.fixture(params=['in_forks', 'in_this_process'])
def runs(request):
    """The two ways in which the check can run a loss."""
    if request.param == 'in_this_process':
        request.getfixturevalue(request.param)
    elif cannot_fork():
        pytest.skip('processes are not forked here')


needs_forks = pytest.mark.skipif(bool(cannot_fork()), reason='processes are not forked here')


def squares(y, t):
    return F.sum((y - t) ** 2)


RIGHT = {
    'a mean over labels': lambda self, y, x, adj, t: squares(y, t) / len(t),
    'a mean of y': lambda self, y, x, adj, t: F.mean(y - t),
    'its molecules': lambda self, y, x, adj, t: squares(y, t) / adj.n_graphs,
    'the dense matrix': lambda self, y, x, adj, t: F.mean(y) * adj.to_dense().sum(),
    'a layer': lambda self, y, x, adj, t: F.mean(self.late(y) - t),
    'dropout': lambda self, y, x, adj, t: F.sum(F.dropout(y - t)),
    'a sum that cancels': lambda self, y, x, adj, t: (
        1e3 * F.sum(y - F.broadcast_to(F.mean(y, axis=0), y.shape))
    ),
    'NaN': lambda self, y, x, adj, t: F.mean(y) * numpy.float32('nan'),
    'infinite': lambda self, y, x, adj, t: F.mean(y) * numpy.float32('inf') / len(x),
    'NaN in labels': lambda self, y, x, adj, t: F.mean_squared_error(
        y, numpy.where(numpy.arange(len(t))[:, None] == 2, numpy.float32('nan'), t)
    ),
    'random': lambda self, y, *_: F.mean(y) * random.random() * numpy.random.rand(),
}
WRONG = {
    'len(atoms)': (lambda self, y, x, adj, t: squares(y, t) / len(x), COUNTED),
    'atoms.shape': (lambda self, y, x, adj, t: squares(y, t) / x.shape[0], COUNTED),
    'a penalty': (lambda self, y, x, adj, t: F.mean(y) + numpy.float32(0.01 * len(x)), COUNTED),
    'a weight that learns': (
        lambda self, y, x, adj, t: F.sum(self.weight * len(x)) + F.mean(y),
        COUNTED,
    ),
    'the deviation of ids': (
        lambda self, y, x, adj, t: F.mean(y) / numpy.float32(x.std()),
        REDUCED,
    ),
    'only the gradient': (
        lambda self, y, x, adj, t: F.mean(y) + len(x) * F.sum(y - y.array),
        COUNTED,
    ),
}


@pytest.mark.parametrize(
    'name, layout',
    [*((name, 'folded') for name in RIGHT), ('its molecules', 'packed'), ('infinite', 'padded')],
)
def test_losses_that_are_right(name, layout):
    assert check(Own(RIGHT[name]), converter=CSRConverter(layout)) == RowsCheck(True)


@pytest.mark.parametrize(
    'name, converter',
    [
        *((name, CSRConverter()) for name in WRONG),
        ('len(atoms)', CSRConverter('packed')),
        ('len(atoms)', CSRConverter(padded_to=20)),
        ('only the gradient', CSRConverter('packed')),
    ],
    ids=str,
)
def test_losses_that_take_rows_for_molecules(name, converter):
    loss, cause = WRONG[name]
    is_right, text = check(Own(loss), converter=converter)
    n_rows = N_ROWS + (12 if converter.layout == 'folded' else 0)
    begin = 'the loss of Own mistakes rows of a sparse batch for molecules: for 12 molecules in '
    assert is_right is False and text.startswith(begin + '%d rows the ' % n_rows)
    assert text.endswith(' %s %s' % (cause, PAGE))


def test_the_whole_text():
    is_right, text = check(Own(lambda self, y, x, adj, t: F.sum(0 * y) + 420.0 / len(x)))
    assert text == (
        'the loss of Own mistakes rows of a sparse batch for molecules: '
        'for 12 molecules in %d rows '
        'the loss is %.6g; with %d more rows, which belong to no molecule, it is %.6g. %s %s'
        % (N_ROWS + 12, 420 / (N_ROWS + 12), N_ROWS + 12, 210 / (N_ROWS + 12), COUNTED, PAGE)
    )


def test_a_reported_number_that_is_wrong_while_the_loss_is_right():
    def loss(self, y, x, adj, t):
        chainer.report({'mae': F.sum(abs(y - t)) / len(x)}, self)
        return F.mean_squared_error(y, t)

    is_right, text = check(Own(loss))
    assert is_right is False and ' rows main/mae, which is reported, is ' in text


@pytest.mark.parametrize('reduce', [F.mean, F.sum, lambda h: F.mean(F.normalize(h, axis=1))])
def test_reductions_over_all_rows(reduce):
    is_right, text = check(Layers(reduce))
    assert is_right is False and text.endswith('%s %s' % (REDUCED, PAGE))
    assert check(Layers(reduce), converter=CSRConverter('padded')).is_right


def test_labels_that_were_taken_for_columns_of_atoms():
    data = [(x, adj, numpy.arange(len(x), dtype='f'), t) for x, adj, t in EXAMPLES]
    model = made_predictor()

    def loss(x, adj, label, t):
        return F.mean(model(x, adj)) * label.mean()

    is_right, text = check(model, data, loss_func=loss)
    assert is_right is False
    assert text.endswith(
        ' If labels of molecules were taken for columns of atoms, give '
        'CSRConverter(n_node_columns=0). ' + PAGE
    )


def test_pairs_of_molecules_and_keywords():
    model = made_predictor()
    first, second = (chainer_bspmm.concat_mols(EXAMPLES[i : i + 5])[:2] for i in (0, 5))

    def loss(one, other, divisor):
        return F.mean(abs(model(*one) - model(*other['batch']))) / len(divisor(*one))

    batch = (first, {'batch': second})
    assert check_rows(model, loss, batch, {'divisor': lambda x, adj: adj.row_offsets}).is_right
    assert not check_rows(model, loss, batch, {'divisor': lambda x, adj: x}).is_right


@pytest.mark.parametrize(
    'case',
    [
        slow_unless(name in parity.QUICK_MODELS, case, id=name)
        for name, case in parity.DEFAULTS.items()
    ],
)
def test_every_model_is_right(case):
    data = parity.examples_of(case)
    model = sparsify(parity.initialised(case.make, data))

    def loss(atoms, adj, *columns):
        y = model(atoms, adj, *columns)
        return F.sum(y * y) / y.shape[0]

    converter = CSRConverter(n_node_columns=int(case.column == 'labels'))
    assert check(model, data, converter, loss) == RowsCheck(True)


def test_a_float64_model():
    with chainer.using_config('dtype', numpy.float64):
        model = Own(RIGHT['its molecules'])
        assert check(model).is_right
        assert check(Own(WRONG['len(atoms)'][0])).is_right is False


# Losses that the check cannot judge.

GENERATOR = (i for i in range(1000))


def of_generator(self, y, x, adj, t):
    return F.mean(y) * next(GENERATOR)


def fails(self, y, x, adj, t):
    if len(x) > 2 * N_ROWS:
        raise ValueError('too many\nrows')
    return F.mean(y) / len(x)


def fails_in_test_mode(self, y, x, adj, t):
    assert chainer.config.train
    return F.mean(y)


CANNOT_BE_TOLD = {
    'random numbers for each row': (
        lambda self, y, x, adj, t: F.mean(y) * numpy.random.normal(size=len(x)).sum(),
        'two runs of one batch differ, so it is random in test mode',
    ),
    'an error': (fails, 'with rows that belong to no molecule it fails with ValueError: too many'),
    'an error in test mode': (
        fails_in_test_mode,
        'in test mode it fails with AssertionError: assert False',
    ),
    'not finite': (
        lambda self, y, x, adj, t: F.mean(y) * numpy.float32(numpy.log(3.0 * N_ROWS / len(x) - 2)),
        'with rows that belong to no molecule the loss is not finite',
    ),
}


@pytest.mark.parametrize('name', CANNOT_BE_TOLD)
def test_what_cannot_be_told(name, runs):
    loss, reason = CANNOT_BE_TOLD[name]
    is_right, text = check(
        Own(loss), converter=CSRConverter('packed' if 'finite' in name else 'folded')
    )
    assert is_right is None and text.startswith(reason)


def of_a_new_parameter():
    model = Own(lambda self, y, *_: F.mean(self.new(y)))
    with model.init_scope():
        model.new = L.Linear(None, 1)
    return model


@needs_forks
def test_a_parameter_that_is_made_in_a_fork():
    model = of_a_new_parameter()
    before = numpy.random.get_state()[1].tolist()
    assert check(model) == RowsCheck(True)
    assert model.new.W.array is None and numpy.random.get_state()[1].tolist() == before


def test_a_parameter_that_the_first_step_has_not_made(in_this_process):
    model = of_a_new_parameter()
    expected = RowsCheck(None, 'it makes a parameter that the first step has not made')
    assert check(model) == expected
    assert model.new.W.array is None


def test_a_generator(in_this_process):
    expected = 'it would consume part of GENERATOR of module %s (generator)' % __name__
    assert check(Own(of_generator)) == RowsCheck(None, expected)


def test_an_open_file(tmp_path, in_this_process):
    path = tmp_path / 'weights'
    path.write_text('1\n' * 9)
    with open(path) as file:
        model = Own(lambda self, y, *_: F.mean(y) * float(self.file.readline()))
        model.file = file
        is_right, text = check(model)
        assert is_right is None and text == (
            'it would consume part of the attribute file of Own (TextIOWrapper)'
        )
        assert file.tell() == 0


@needs_forks
def test_an_open_file_that_a_fork_would_read(tmp_path):
    path = tmp_path / 'weights'
    path.write_text('1\n' * 9)
    with open(path) as file:
        actual = check(Own(lambda self, y, *_: F.mean(y) * float(file.readline())))
        assert actual == RowsCheck(
            None, 'in test mode it fails with OSError: [Errno 9] Bad file descriptor'
        )
        assert file.tell() == 0


@needs_forks
def test_a_file_that_the_loss_opens(tmp_path):
    def loss(self, y, *_):
        with open(tmp_path / 'log', 'a') as file:
            file.write('a step')
        return F.mean(y)

    actual = check(Own(loss))
    assert actual == RowsCheck(None, 'it would repeat what loss does outside of Python (open)')
    assert not (tmp_path / 'log').exists()


@needs_forks
def test_a_fork_that_dies():
    actual = check(Own(lambda *_: os._exit(3)))
    expected = 'a forked process ended without a result (exit status 3)'
    assert actual == RowsCheck(None, expected)


@needs_forks
def test_a_fork_that_dies_with_more_rows():
    def loss(self, y, x, adj, t):
        if len(x) > 2 * N_ROWS:
            os._exit(3)
        return F.mean(y)

    expected = 'a forked process ended without a result (exit status 3)'
    assert check(Own(loss)) == RowsCheck(None, expected)


def test_as_many_rows_as_molecules():
    data = [(x[:1], adj[:, :1, :1], t) for x, adj, t in EXAMPLES]
    actual = check(Own(RIGHT['a mean of y']), data, CSRConverter('packed'))
    assert actual == RowsCheck(None, 'the batch has as many rows as molecules')


# The check leaves no trace.

STEP = 0


class Shared:
    n = 0


class Counting(Own):
    def __init__(self):
        super().__init__(RIGHT['a layer'])
        self.n_calls = 0
        self.losses = []
        self.array = numpy.zeros(3)
        self.numbers = itertools.count()
        self.generator = numpy.random.default_rng(0)
        with self.init_scope():
            self.norm = L.BatchNormalization(1)

    def __call__(self, *batch):
        global STEP
        STEP += 1
        Shared.n += 1
        self.n_calls += 1
        self.array += next(self.numbers)
        self.generator.normal()
        random.random()
        numpy.random.uniform()
        self.norm(self.predictor(*batch[:2]))
        loss = super().__call__(*batch)
        self.losses.append(loss)
        warnings.warn('a call', stacklevel=2)
        return loss


def state_of(model):
    arrays = [param.array.copy() for param in model.params()]
    arrays += [model.array.copy(), model.norm.avg_mean.copy(), model.norm.avg_var.copy()]
    return (
        numpy.random.get_state()[1].tolist(),
        random.getstate(),
        model.generator.bit_generator.state,
        repr(model.numbers),
        (STEP, Shared.n, model.n_calls, list(model.losses), dict(vars(model))),
        [array.tolist() for array in arrays],
    )


def test_it_leaves_no_trace(runs):
    model = Counting()
    for param in model.params():
        param.grad = numpy.full_like(param.array, 7)
    before = state_of(model)
    with warnings.catch_warnings(), chainer.Reporter() as _:
        warnings.simplefilter('error')
        reporter = chainer.reporter._get_reporters()[-1]
        assert check(model) == RowsCheck(True)
    assert state_of(model) == before and not reporter.observation
    assert all((param.grad == 7).all() for param in model.params())


def test_counters_are_those_of_the_loop(runs):
    model = Counting()
    optimizer = optimizers.SGD(0.01).setup(model)
    before = STEP
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(3):
            optimizer.update(model, *chainer_bspmm.concat_mols(EXAMPLES))
    assert STEP - before == model.n_calls == len(model.losses) == next(model.numbers) == 3


def test_hooks_that_only_look_see_nothing(runs):
    model = Own(RIGHT['a layer'])
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    of_link: Any = LinkTimerHook()
    model.late.add_hook(of_link)
    with TimerHook() as of_functions:
        assert check(model).is_right
        assert not of_functions.call_history and not of_link.call_history
        model(*batch)
    assert of_functions.call_history and len(of_link.call_history) == 1
    model.late.delete_hook('TimerHook')
    of_links: Any = LinkTimerHook()
    with of_links:
        assert check(model).is_right
        assert not of_links.call_history
        model(*batch)
    assert of_links.call_history


def test_a_hook_of_a_user_is_run_and_undone(runs):
    class Scaling(chainer.FunctionHook):
        name = 'scaling'
        n_calls = 0

        def forward_preprocess(self, function, inputs):
            self.n_calls += 1

    model = Own(RIGHT['a mean of y'])
    with Scaling() as hook:
        assert check(model).is_right
        assert hook.n_calls == 0
        model(*chainer_bspmm.concat_mols(EXAMPLES))
    assert hook.n_calls


def test_a_hook_that_takes_something_for_good(in_this_process):
    class Reading(chainer.FunctionHook):
        name = 'reading'

        def forward_preprocess(self, function, inputs):
            next(GENERATOR)

    model = Own(RIGHT['a mean of y'])
    with Reading():
        is_right, text = check(model)
    assert is_right is None and text == (
        'it would consume part of GENERATOR of module %s (generator)' % __name__
    )


def test_batches_of_a_step_under_way(runs):
    is_under_way = False

    @contextlib.contextmanager
    def around():
        nonlocal is_under_way
        is_under_way = True
        yield
        is_under_way = False

    def loss(self, y, x, adj, t):
        assert is_under_way
        return F.mean(y - t)

    model = Own(loss)
    assert check_rows(model, model, chainer_bspmm.concat_mols(EXAMPLES), {}, around).is_right


# Forked processes need not know about state that cannot be found by reading code.


class Cycle(itertools.cycle):
    pass


class Timed(contextlib.ContextDecorator):
    n = 0

    def __enter__(self):
        self.n += 1

    def __exit__(self, *_):
        pass


class Counted:
    n = 0

    def __del__(self):
        Counted.n += 1


# Objects of libraries, which get a counter here.
of_python: Any = builtins
of_chainer: Any = F.relu

timed = Timed()
weights = Cycle(range(1, 10**6))
zipped = zip(itertools.count(1), itertools.count())
masked = numpy.ma.masked_array([0, 0], [False, True])
shared = multiprocessing.Value('i', 0)


class HiddenCounters(Own):
    """A Chain that advances counters in places of all kinds."""

    @timed
    def __call__(self, *batch):
        Counted()
        next(weights)
        next(zipped)
        masked[0] += 1
        shared.value += 1
        of_python.n_steps_of_a_test += 1
        of_chainer.n_steps_of_a_test += 1
        return super().__call__(*batch)


def hidden_counters():
    """Return all counters; this call advances the iterators, too."""
    return [
        *(timed.n, Counted.n, next(weights), next(zipped)[0], int(masked[0]), shared.value),
        *(of_python.n_steps_of_a_test, of_chainer.n_steps_of_a_test),
    ]


@needs_forks
@pytest.mark.parametrize('is_right', [True, False])
def test_counters_that_no_inventory_knows(is_right, monkeypatch):
    model = HiddenCounters(RIGHT['its molecules'] if is_right else WRONG['len(atoms)'][0])
    optimizer = optimizers.SGD(0.01).setup(model)
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    for place in (of_python, of_chainer):
        monkeypatch.setattr(place, 'n_steps_of_a_test', 0, raising=False)
    before = hidden_counters()
    texts = caught_by(lambda: [optimizer.update(model, *batch) for _ in range(3)])
    assert ['takes rows' in text for text in texts] == [True] * (not is_right)
    steps = [now - then for now, then in zip(hidden_counters(), before)]
    assert steps == [3, 3, 4, 4, 3, 3, 3, 3]


@needs_forks
def test_a_counter_that_no_inventory_knows_and_the_loss_reads():
    """All runs begin in the same state, so a loss that counts does not look random."""
    factors = Cycle([1.0, 0.5, 0.25])
    model = Own(lambda self, y, x, adj, t: squares(y, t) / len(x) * next(factors))
    is_right, text = check(model)
    assert is_right is False and text.endswith('%s %s' % (COUNTED, PAGE))
    assert next(factors) == 1


@needs_forks
@pytest.mark.parametrize(
    'make',
    [
        lambda: numpy.random.RandomState(0).normal,
        lambda: numpy.random.default_rng(0).normal,
        lambda: lambda size: random.Random(random.random()).random() * size,
        lambda: lambda size: random.SystemRandom().random() * size,
    ],
    ids=['RandomState', 'Generator', 'random', 'SystemRandom'],
)
def test_random_numbers_for_each_row(make):
    draw = make()
    model = Own(lambda self, y, x, adj, t: F.mean(y) * float(numpy.sum(draw(len(x)))))
    expected = 'two runs of one batch differ, so it is random in test mode'
    assert check(model) == RowsCheck(None, expected)


def test_where_processes_cannot_be_forked(monkeypatch):
    """There is no check, and no warning says so; the pages do."""
    monkeypatch.setattr('chainer_bspmm.training.check_rows.cannot_fork', lambda: 'a reason')
    optimizer = optimizers.Adam().setup(Own(WRONG['len(atoms)'][0]))
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    assert not caught_by(lambda: optimizer.update(optimizer.target, *batch))


# How scripts reach the check.


def caught_by(run):
    """Return the texts of the warnings about the loss."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        run()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if 'takes rows' in text or 'could not check' in text]


class OwnUpdater(StandardUpdater):
    def update_core(self):
        batch = self.converter(self.get_iterator('main').next(), self.device)
        optimizer = self.get_optimizer('main')
        optimizer.update(optimizer.target, *batch)


def by_keywords(batch, device=None):
    atoms, adj, t = chainer_bspmm.concat_mols(batch, device)
    return {'atoms': atoms, 'adj': adj, 't': t}


# Converters and layouts are in tests/training/test_check_rows.py.
WAYS = {
    'StandardUpdater': (StandardUpdater, CSRConverter()),
    'a subclass': (OwnUpdater, CSRConverter()),
    'a dict': (StandardUpdater, by_keywords),
    'GraphUpdater': (GraphUpdater, CSRConverter()),
}


def updater_of(model, way='StandardUpdater', data=EXAMPLES):
    kind, converter = WAYS[way]
    optimizer = optimizers.SGD(1e-4).setup(model)
    return kind(SerialIterator(data, 6), optimizer, converter=converter, device='@numpy')


@pytest.mark.parametrize('way', WAYS)
def test_ways_in(way):
    updater = updater_of(Own(WRONG['len(atoms)'][0]), way)
    assert len(caught_by(lambda: [updater.update() for _ in range(4)])) == 1
    updater = updater_of(Own(RIGHT['its molecules']), way)
    assert not caught_by(lambda: [updater.update() for _ in range(4)])


def captured(model, device):
    """Train four steps; return the GraphUpdater, and the texts of the warnings."""
    model.to_device(device)
    optimizer = optimizers.SGD(1e-4).setup(model)
    iterator = SerialIterator([EXAMPLES[0]] * 8, 4)
    updater = GraphUpdater(iterator, optimizer, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(4):
            updater.update()
    texts = [str(warning.message) for warning in caught]
    return updater, [text for text in texts if 'updates eagerly' not in text]


def test_a_captured_training_that_is_wrong(device, graphs):
    _, (reason, text) = captured(Own(WRONG['len(atoms)'][0]), device)
    assert reason.startswith('GraphUpdater trains eagerly: spare rows at the end of a batch, ')
    begin = 'the loss of Own mistakes rows of a sparse batch for molecules: '
    assert text.startswith(begin) and text.endswith(PAGE)


def test_what_the_trial_of_a_captured_step_does_not_find(device, graphs, monkeypatch):
    """A trial adds a few spare rows, the check as many rows as the batch has."""
    monkeypatch.setattr(Program, 'try_out', lambda self, batch: None)
    updater, (text,) = captured(Own(WRONG['len(atoms)'][0]), device)
    begin = (
        'GraphUpdater trains eagerly: '
        'the loss of Own mistakes rows of a sparse batch for molecules: '
    )
    assert text.startswith(begin) and text.endswith(PAGE)
    assert 'GraphUpdater trains eagerly: %s' % updater._driver.reason == text


def test_a_captured_training_that_is_right(device, graphs):
    updater, texts = captured(Own(RIGHT['its molecules']), device)
    assert not texts and updater._driver.session.capturer.nbytes


def test_a_captured_training_where_it_cannot_be_told(device, graphs):
    _, (text,) = captured(Own(fails_in_test_mode), device)
    reason = CANNOT_BE_TOLD['an error in test mode'][1]
    assert text == (
        'chainer_bspmm could not check the loss of Own: %s; compare with '
        'chainer_bspmm.check_swap(model, examples)' % reason
    )


def test_a_captured_training_without_the_check(device, graphs):
    with chainer.using_config('bspmm_check_swap', False):
        _, texts = captured(Own(WRONG['len(atoms)'][0]), device)
    assert not any('takes rows' in text for text in texts)


def test_sparse_data_sets():
    updater = updater_of(Own(WRONG['len(atoms)'][0]), data=to_sparse(EXAMPLES))
    assert len(caught_by(updater.update)) == 1


def test_a_loss_function_and_a_loop_by_hand():
    model = made_predictor()

    def loss(atoms, adj, t):
        return F.sum(model(atoms, adj)) / len(atoms)

    optimizer = optimizers.Adam().setup(model)
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    (text,) = caught_by(lambda: [optimizer.update(loss, *batch) for _ in range(3)])
    assert text.startswith('the loss of GraphConvPredictor mistakes rows of a sparse batch')
    optimizer = optimizers.Adam().setup(model)  # another training
    assert caught_by(lambda: optimizer.update(loss, *batch))


def test_a_batch_in_a_dict_with_attributes():
    class Named(dict):
        __getattr__ = dict.__getitem__

    model = made_predictor()
    inputs = Named(zip(('atoms', 'adj', 't'), chainer_bspmm.concat_mols(EXAMPLES)))
    vars(inputs)['scale'] = 3

    def loss(batch, n_rows):
        return F.sum(model(batch.atoms, batch.adj)) * batch.scale / n_rows(batch)

    for n_rows, n_warnings in (
        (lambda batch: len(batch.t), 0),
        (lambda batch: len(batch.atoms), 1),
    ):
        optimizer = optimizers.Adam().setup(model)
        texts = caught_by(functools.partial(optimizer.update, loss, inputs, n_rows))
        assert ['takes rows' in text for text in texts] == [True] * n_warnings


def test_padded_batches_need_no_run():
    model = Own(lambda self, y, x, adj, t: F.sum(y) / len(x))
    optimizer = optimizers.Adam().setup(model)
    assert not caught_by(lambda: optimizer.update(model, *CSRConverter('padded')(EXAMPLES)))


def test_off():
    optimizer = optimizers.Adam().setup(Own(WRONG['len(atoms)'][0]))
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    with chainer.using_config('bspmm_check_swap', False):
        assert not caught_by(lambda: optimizer.update(optimizer.target, *batch))
    with chainer.using_config('debug', True):
        assert not caught_by(lambda: optimizer.update(optimizer.target, *batch))
    assert caught_by(lambda: optimizer.update(optimizer.target, *batch))


def test_a_model_without_swapped_links_is_not_run():
    model = chainer.Sequential(L.Linear(1, 1))
    calls = []

    def loss(atoms, adj, t):
        calls.append(1)
        return F.sum(model(t)) / len(atoms)

    optimizer = optimizers.Adam().setup(model)
    assert not caught_by(lambda: optimizer.update(loss, *chainer_bspmm.concat_mols(EXAMPLES)))
    assert len(calls) == 1


def test_an_update_inside_of_a_check_is_not_checked():
    model = Own(RIGHT['a mean of y'])
    inner = optimizers.SGD(0.0).setup(made_predictor())

    def loss(*batch):
        result = check_first_step(inner, inner.target, batch, {})
        assert result == RowsCheck(None)
        return model(*batch)

    assert check_first_step(
        optimizers.SGD().setup(model), loss, chainer_bspmm.concat_mols(EXAMPLES), {}
    ) == RowsCheck(True)


def test_an_update_inside_of_a_loss_is_not_checked():
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    inner = optimizers.SGD(0.0).setup(Own(WRONG['len(atoms)'][0]))
    model = Own(RIGHT['a mean of y'])

    def loss(*batch):
        inner.update(inner.target, *batch)
        return model(*batch)

    optimizer = optimizers.SGD().setup(model)
    (outer,) = caught_by(lambda: optimizer.update(loss, *batch))
    assert 'Own/loss, which is reported, is' in outer  # the inner loss reports it
    assert caught_by(lambda: inner.update(inner.target, *batch))


def test_an_optimizer_with_another_model_is_checked_again():
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    optimizer = optimizers.SGD(0.0).setup(Own(RIGHT['a mean of y']))
    assert not caught_by(lambda: optimizer.update(optimizer.target, *batch))
    optimizer.setup(Own(WRONG['len(atoms)'][0]))
    assert caught_by(lambda: optimizer.update(optimizer.target, *batch))


def test_what_is_said_if_it_cannot_be_told():
    optimizer = optimizers.Adam().setup(Own(fails_in_test_mode))
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    assert caught_by(lambda: [optimizer.update(optimizer.target, *batch) for _ in range(3)]) == [
        'chainer_bspmm could not check the loss of Own: in test mode it fails with AssertionError: '
        'assert False; compare with chainer_bspmm.check_swap(model, examples)'
    ]


def test_nothing_is_said_of_chainer_chemistrys_own_models():
    def loss(y, t):
        assert chainer.config.train
        return F.mean(y - t)

    model = Regressor(made_predictor(), lossfun=loss)
    optimizer = optimizers.Adam().setup(model)
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    assert not caught_by(lambda: optimizer.update(model, *batch))


# The method that wraps `optimizer.update`.


def unwrapped():
    """Return Chainer's own method."""
    return inspect.unwrap(chainer.GradientMethod.update)


def test_optimizers_stay_what_they_are():
    optimizer = optimizers.Adam().setup(Own(RIGHT['a mean of y']))
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    unwrapped()(optimizer, optimizer.target, *batch)
    attributes = set(vars(optimizer))
    optimizer.update(optimizer.target, *batch)
    assert set(vars(optimizer)) == attributes
    assert type(optimizer).update is chainer.GradientMethod.update
    assert chainer.GradientMethod.update.__name__ == 'update'
    assert 'lossfun' in chainer.GradientMethod.update.__doc__
    copy.deepcopy(optimizer)
    pickle.dumps(optimizers.Adam())


def test_a_checked_optimizer_takes_no_time():
    link = chainer.Link()
    optimizer = optimizers.SGD().setup(link)
    zero = chainer.Variable(numpy.zeros((), 'f'))
    batch = chainer_bspmm.concat_mols(EXAMPLES)

    def loss(*_):
        return zero

    optimizer.update(loss, *batch)

    def seconds(update):
        call = functools.partial(update, optimizer, loss, *batch)
        return min(timeit.repeat(call, number=200, repeat=9))

    # It takes 1 us a call. The two are timed in turn, because other programs use the processor.
    extra = [seconds(chainer.GradientMethod.update) - seconds(unwrapped()) for _ in range(5)]
    assert statistics.median(extra) < 200 * 10e-6


# Errors in the first step.

NOTE = (
    'This batch is sparse: the atoms of 12 molecules are %d rows, and adj is a BatchedCSR. If the '
    'code runs on a dense batch, it expects padded arrays: adj.to_dense() returns the padded '
    "adjacency, CSRConverter('padded') keeps atoms padded, and parts outside of init_scope must be "
    'swapped separately.%s See docs/migration.md, "A Chain of your own".'
)


def notes_of(function, *batch):
    optimizer = optimizers.Adam().setup(made_predictor())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        with pytest.raises(Exception) as raised:
            optimizer.update(function, *batch)
    texts = [str(warning.message) for warning in caught]
    return getattr(raised.value, '__notes__', [text for text in texts if 'is sparse' in text])


FAILING = {
    'an axis of atoms': lambda atoms, adj, t: (atoms != 0).sum(axis=1),
    'a reshape': lambda atoms, adj, t: atoms.reshape(len(t), -1),
    'an attribute': lambda atoms, adj, t: adj.sum(),
}


@pytest.mark.parametrize('name', FAILING)
def test_an_error_on_a_sparse_batch_names_the_remedies(name):
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    assert notes_of(FAILING[name], *batch) == [NOTE % (N_ROWS + 12, '')]


@pytest.mark.parametrize(
    'function',
    [
        lambda atoms, adj, t: chainer.Variable(adj),
        lambda atoms, adj, t: cuda.to_cpu(adj),
        lambda atoms, adj, t: F.forget(lambda adj: adj, adj),
    ],
)
def test_an_error_of_chainer_about_the_batch_says_what_to_leave_out(function):
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    remedy = (
        ' adj is not an array, and the converter sends it to its device: leave out '
        'chainer.Variable(adj) and cuda.to_gpu(adj), and let a function that you give to F.forget '
        'close over adj.'
    )
    assert notes_of(function, *batch) == [NOTE % (N_ROWS + 12, remedy)]


def test_an_error_about_dtypes_has_no_note():
    def loss(atoms, adj, t):
        return F.mean_squared_error(numpy.zeros(2, 'f'), numpy.zeros(2, 'd'))

    assert notes_of(loss, *chainer_bspmm.concat_mols(EXAMPLES)) == []


def test_an_error_of_a_function_of_chainer_with_labels_taken_for_atoms():
    data = [(x[:3], adj[:, :3, :3], numpy.arange(3)[: len(x)], t) for x, adj, t in EXAMPLES]
    batch = chainer_bspmm.concat_mols([e for e in data if len(e[0]) == 3])
    assert batch[1].n_node_columns == 1
    model = made_predictor()

    def loss(atoms, adj, labels, weight):
        return F.sum(F.sigmoid_cross_entropy(model(atoms, adj), labels))

    (note,) = notes_of(loss, *batch)
    assert note.endswith(
        ' 1 of the labels have a row for each atom, too; if they belong to molecules, give '
        'CSRConverter(n_node_columns=0). See docs/migration.md, "A Chain of your own".'
    )


@pytest.mark.parametrize('error', [ZeroDivisionError, KeyError, MemoryError, KeyboardInterrupt])
def test_other_errors_have_no_note(error):
    def loss(*batch):
        raise error

    optimizer = optimizers.Adam().setup(made_predictor())
    with pytest.raises(error) as raised:
        optimizer.update(loss, *chainer_bspmm.concat_mols(EXAMPLES))
    assert not hasattr(raised.value, '__notes__')


def test_no_note_on_errors_that_say_themselves_what_is_expected():
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    assert not notes_of(lambda atoms, adj, t: CSRConverter(layout=[]), *batch)


def test_no_note_on_dense_batches():
    assert not notes_of(lambda x: numpy.zeros(3).sum(axis=1), numpy.zeros(3))


def test_no_note_after_the_first_step():
    optimizer = optimizers.Adam().setup(made_predictor())
    batch = chainer_bspmm.concat_mols(EXAMPLES)
    optimizer.update(lambda atoms, adj, t: F.mean(optimizer.target(atoms, adj)), *batch)
    with pytest.raises(AttributeError) as raised:
        optimizer.update(FAILING['an attribute'], *batch)
    assert not hasattr(raised.value, '__notes__')
