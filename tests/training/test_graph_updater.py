"""`GraphUpdater`, compared with StandardUpdater and with its own steps run eagerly."""

import re
import threading

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions, links, optimizer_hooks, optimizers
from chainer.backends import cuda
from chainer.dataset import convert
from chainer.datasets import TransformDataset
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import cuda_graphs, fused_update, GraphUpdater, reports, snapshot
from chainer_bspmm.training import update
from chainer_bspmm.training.staging import Inputs
from chainer_bspmm.training.guards import Guards
from chainer_bspmm.training.program import Program
from chainer_bspmm.training.training_step import TrainingStep
from tests.support.devices import slow_unless
from tests.support.training import assert_same_bits, assert_same_training, BATCH, counting, hidden
from tests.support.training import HOST, is_captured, make_model, make_updater, MODELS, molecules
from tests.support.training import parameters, RELATIONS, run, same_molecules, small_model
from tests.support.training import reading_the_last, three_columns, without_dropout
from tests.training import host_graphs

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


BIT_BY_BIT = 'RSGCN, batch norm', 'GGNN', 'GIN'  # each kind of state and of matrices


@pytest.mark.parametrize('name', [slow_unless(name in BIT_BY_BIT, name) for name in MODELS])
def test_captured_as_eager_to_the_bit(device, graphs, name, monkeypatch):
    """Steps have dropout, batch norm, weight decay, clipping and a schedule."""
    examples = molecules(40, RELATIONS.get(name, 1), classes=True)
    results = []
    # The first batch of a form is computed in the buffers, too: other sizes round differently.
    monkeypatch.setattr(Program, 'run', lambda self, batch: self._eagerly(None))
    for captured in (True, False):
        hooks = optimizer_hooks.WeightDecay(1e-3), optimizer_hooks.GradientClipping(0.5)
        model = make_model(name, classes=True)
        updater = make_updater(GraphUpdater, device, model, examples, hooks=hooks)
        if not captured:
            monkeypatch.setattr(Program, 'capture', lambda self: None)
        reported = []
        for _ in range(200 if graphs is None else 10):
            updater.get_optimizer('main').alpha *= 0.999
            reported += run(updater, 1)
        results.append((parameters(updater), reported))
        assert is_captured(updater) == captured
    (actual, own), (expected, reports) = results
    assert own == reports
    assert_same_bits(actual, expected)


@pytest.mark.parametrize('name', ('RSGCN', 'GGNN'))
def test_kernels_are_compiled_together(device, graphs, name, monkeypatch):
    """Other threads compile kernels before the first step, and once missing parameters exist."""
    compile_one = kernels._compiled
    in_threads = {}

    def noted(*key):
        in_threads.setdefault(key, threading.current_thread() is not threading.main_thread())
        return compile_one(*key)

    monkeypatch.setattr(kernels, '_compiled', noted)
    examples = molecules(40, RELATIONS.get(name, 1), classes=True)
    examples = TransformDataset(examples, lambda example: example)  # sizes are not known beforehand
    updater = make_updater(GraphUpdater, device, make_model(name, classes=True), examples)
    run(updater, 1)
    if graphs is None:
        assert sum(in_threads.values()) > len(in_threads) / 3
    run(updater, 20)
    assert len(updater._driver.programs) > 1
    if graphs is not None:
        assert graphs[0].n_compiled == 2


def test_reports_keep_their_values(device, graphs, monkeypatch):
    """Reported values stay the same for more steps than one allocation has rows."""
    monkeypatch.setattr(reports, 'N_ROWS', 8)
    model = make_model()
    updater = make_updater(GraphUpdater, device, model, molecules(40), check_every=7)

    def loss_func(*args):
        loss = model(*args)
        chainer.report({'double': loss.array.astype('d'), 'labels': 2 * args[2]}, model)
        return loss

    updater.loss_func = loss_func
    reporter = chainer.Reporter()
    saved = []
    seen = []
    reporter.add_observer('main', model)
    for _ in range(40):
        observation = {}
        with reporter.scope(observation):
            updater.update()
        saved.append({name: getattr(value, 'array', value) for name, value in observation.items()})
        seen.append({name: cuda.to_cpu(array).copy() for name, array in saved[-1].items()})
    assert sum(program.is_captured for program in updater._driver.programs.values())
    for arrays, values in zip(saved, seen):
        assert list(arrays) == ['main/loss', 'main/mae', 'main/double', 'main/labels']
        assert arrays['main/double'].dtype == 'd' and arrays['main/labels'].shape[1:] == (3,)
        for name, array in arrays.items():
            assert isinstance(array, device.xp.ndarray)
            numpy.testing.assert_array_equal(cuda.to_cpu(array), values[name])
    assert len({float(values['main/loss']) for values in seen}) == 40
    for values in seen:
        assert values['main/loss'] == values['main/double'].astype('f')


def test_numbers_of_a_fused_update(device, graphs, fused):
    """The learning rate changes with every step, and hooks are added later."""
    capturers = []

    def make(kind):
        model = without_dropout(make_model())
        sgd = optimizers.SGD(0.009)
        return make_updater(kind, device, model, optimizer=sgd)

    def change(updater):
        optimizer = updater.get_optimizer('main')
        n_steps = updater.iteration
        if isinstance(updater, GraphUpdater):
            capturers.append(updater._driver.session.capturer)
        optimizer.lr *= 0.9
        if n_steps == 4:
            optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))
        if n_steps == 7:
            optimizer.target.predictor.mlp.layers[0].W.update_rule.add_hook(lambda *_: None)

    assert_same_training(make, 9, change)
    assert len(set(map(id, capturers))) == 3  # a new capturer after each hook
    assert all(capturers)


def test_an_own_learning_rate_after_the_capture(device, graphs, fused):
    def make(kind):
        model = without_dropout(make_model())
        return make_updater(kind, device, model, optimizer=optimizers.SGD(0.002))

    def change(updater):
        if updater.iteration == 4:
            head = updater.get_optimizer('main').target.predictor.mlp
            head.layers[0].W.update_rule.hyperparam.lr = 0.009

    assert is_captured(assert_same_training(make, 8, change))


def test_another_variant_of_the_update_is_another_program(
    device, graphs, fused, no_causes, monkeypatch
):
    updater = make_updater(GraphUpdater, device, optimizer=optimizers.SGD(0.01))
    run(updater, 3)
    driver = updater._driver
    n_programs = len(driver.programs)
    monkeypatch.setattr(driver.session.update, 'variants', lambda: 'another')
    run(updater, 3)
    assert len(driver.programs) == n_programs + 1


@pytest.mark.parametrize('auto_new_epoch, n_epochs', [(True, 3), (False, 0)])
def test_epochs_of_the_optimizer(device, graphs, fused, auto_new_epoch, n_epochs):
    sgd = optimizers.SGD(0.01)
    updater = make_updater(GraphUpdater, device, optimizer=sgd, auto_new_epoch=auto_new_epoch)
    run(updater, 3)
    assert updater.epoch == 3 and sgd.epoch == n_epochs


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize('owner, name', [(Program, 'launch'), (Inputs, 'fetched')])
def test_an_interrupt_around_a_launch(device, graphs, monkeypatch, owner, name):
    """Steps after the interrupt get their own batches: host and graph agree on the slot."""

    updater = make_updater(GraphUpdater, device, make_model(), same_molecules())
    run(updater, 20)
    (program,) = updater._driver.programs.values()
    assert program.is_captured
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupt)
            run(updater, 1)
        for _ in range(3):
            run(updater, 1)
            (number,) = cuda.to_cpu(program._inputs.step.counter)
            assert number == updater.iteration - 1


def copies(model):
    return [param.array.copy() for _, param in sorted(model.namedparams(include_uninit=False))]


EAGER = 'stage', '_compute', '_complete'
REPLAY = *EAGER, 'launch', '_results_now'
CHECK = '_again', 'difference'
INTERRUPTED = [  # number of steps before, and the function that is interrupted in the next one
    *((0, name) for name in (*EAGER, 'difference')),  # tried out, then run
    *((1, name) for name in (*REPLAY, *CHECK)),  # captured, replayed, checked
    *((2, name) for name in (*REPLAY, *CHECK)),  # replayed and checked
    *((3, name) for name in REPLAY),
]


@pytest.mark.parametrize('n_steps, name', INTERRUPTED)
def test_an_interrupted_step_counts_if_it_was_done(monkeypatch, n_steps, name):
    """An update is counted if and only if it has changed the parameters."""
    owner = snapshot if name == 'difference' else Program
    graphs = host_graphs.stand_in(monkeypatch)
    host_graphs.fuse(monkeypatch)
    optimizer = optimizers.SGD(1e-3)
    model = without_dropout(make_model())
    with chainer.using_config('train', False):
        model(*chainer_bspmm.concat_mols(same_molecules()))  # makes all parameters
    updater = make_updater(GraphUpdater, HOST, model, same_molecules(), optimizer)
    run(updater, n_steps)
    before = copies(optimizer.target)
    t = optimizer.t
    actual = getattr(owner, name)

    def interrupted(*args, **kwargs):
        if name in ('launch', '_again', 'difference'):
            actual(*args, **kwargs)
        interrupt()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        run(updater, 1)
    assert updater.iteration == n_steps
    is_done = any((one != other).any() for one, other in zip(copies(model), before))
    assert optimizer.t - t == is_done
    assert all(param.update_rule.t == optimizer.t for param in model.params())
    run(updater, 5)
    assert optimizer.t == t + is_done + 5 and graphs[0].n_launches > 2


def test_an_interrupt_before_the_first_step(device, graphs, monkeypatch):
    updater = make_updater(GraphUpdater, device, make_model(), same_molecules())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Guards, 'key', interrupt)
        run(updater, 1)
    run(updater, 20)
    assert all(program.is_captured for program in updater._driver.programs.values())


class Noisy:
    """A user's converter that counts its calls, and draws numbers that it adds to the labels."""

    def __init__(self, convert=chainer_bspmm.concat_mols):
        self._convert = convert
        self.n_calls = 0

    def __call__(self, batch, device=None):
        self.n_calls += 1
        atoms, adj, label = self._convert(batch, device)
        noise = numpy.random.normal(size=label.shape).astype('f')
        return atoms, adj, label + chainer.backend.get_array_module(label).asarray(noise)


def failing(link, atoms, adj):
    if adj.has_spare:
        raise LookupError('mine')
    return three_columns(link, atoms, adj)


def with_a_head(link, atoms, adj):
    return link.head(link.inner(atoms, adj))


# A model's function, and the cause of eager training (a pattern), or None if it is captured.
CONVERTED = {
    'captured': (lambda *given: three_columns(*given), None),
    'parameters that are missing': (with_a_head, None),
    'a step that counts': (counting, '.* changes the attribute counter of predictor at every run'),
    'a step that reads what the last one left': (reading_the_last, 'two runs of one batch .*'),
    'a step that fails with spare rows': (failing, '.* LookupError: mine .*'),
}


@pytest.mark.parametrize('name', CONVERTED)
def test_a_converter_is_called_once_a_step(device, graphs, name):
    """A user's converter may draw random numbers, so a second call would train with others."""
    function, cause = CONVERTED[name]
    converters = []

    def make(kind):
        converters.append(Noisy())
        model = small_model(function, last=None)
        if function is with_a_head:
            with model.predictor.init_scope():
                model.predictor.head = links.Linear(None, 3)
        optimizer = optimizers.SGD(0.01)
        model = without_dropout(model)
        return make_updater(kind, device, model, optimizer=optimizer, converter=converters[-1])

    with host_graphs.eager_causes() as causes:
        updater = assert_same_training(make, 6)
    assert [converter.n_calls for converter in converters] == [6, 6]
    assert is_captured(updater) == (cause is None) and len(causes) == bool(cause)
    for text in causes:
        assert re.fullmatch('GraphUpdater trains eagerly: ' + cause, text), text


def as_variable(batch, device):
    atoms, adj, label = chainer_bspmm.concat_mols(batch, device)
    return atoms, adj, chainer.Variable(label)


@pytest.mark.parametrize('convert', [as_variable, convert.concat_examples])
def test_a_converter_is_called_once_if_its_batches_cannot_be_captured(device, graphs, convert):
    def make(kind):
        converters.append(Noisy(convert))
        numpy.random.seed(0)
        model = links.Linear(4, 3)

        def loss_func(atoms, adj, label):
            x = model.xp.ones((len(label), 4), 'f')
            return functions.mean_squared_error(model(x), label)

        return make_updater(
            kind,
            device,
            model,
            optimizer=optimizers.SGD(0.01),
            converter=converters[-1],
            loss_func=loss_func,
        )

    converters = []
    message = '^GraphUpdater trains eagerly: converter: expected .*, got .*$'
    with pytest.warns(UserWarning, match=message):
        assert_same_training(make, 3)
    assert [converter.n_calls for converter in converters] == [3, 3]


def test_a_converter_is_called_once_if_a_replay_differs(device, graphs):
    converters = []

    def make(kind):
        converters.append(Noisy())
        weight = hidden(1.0)
        value = host_graphs.read_at_capture(lambda: weight.value)
        model = small_model(lambda *given: three_columns(*given) * value(), hidden_weight=weight)
        return make_updater(
            kind,
            device,
            without_dropout(model),
            optimizer=optimizers.SGD(0.01),
            converter=converters[-1],
            **({'on_difference': 'warn'} if kind is GraphUpdater else {}),
        )

    def change(updater):
        model = updater.get_optimizer('main').target
        model.predictor.hidden_weight.value = 0.5 if updater.iteration >= 4 else 1.0

    with host_graphs.eager_causes() as causes:
        assert_same_training(make, 9, change)
    assert len(causes) == 1 and 'a replay of the captured step differs' in causes[0]
    assert [converter.n_calls for converter in converters] == [9, 9]


def test_the_epoch_is_the_iterator_s():
    updater = make_updater(GraphUpdater, HOST, make_model(), molecules(20))
    iterator = updater.get_iterator('main')
    actual = []
    for _ in range(4):
        updater.update()
        actual.append(updater.epoch_detail)
        assert actual[-1] == updater.epoch_detail == iterator.epoch_detail
    assert len(set(actual)) == 4
    iterator.reset()
    assert updater.epoch_detail == 0


def test_a_seed_is_not_drawn():
    """The seed follows from NumPy's state without a draw, so StandardUpdater's order is kept."""
    given = HOST, make_model(), molecules(9)
    seeds = {make_updater(GraphUpdater, *given, seed=None).seed for _ in range(2)}
    after = numpy.random.rand()
    make_updater(StandardUpdater, *given)
    assert len(seeds) == 1 and numpy.random.rand() == after


@pytest.mark.parametrize(
    'seed, error, message',
    [
        (-1, ValueError, r'^seed: expected at least 0 and below 2\*\*63, got -1$'),
        (
            2**63,
            ValueError,
            r'^seed: expected at least 0 and below 2\*\*63, got 9223372036854775808$',
        ),
        (1.5, TypeError, r'^seed: expected an integer or None, got 1\.5$'),
    ],
)
def test_a_seed_that_cannot_be_assigned(seed, error, message):
    """A step with dropout would fail by it, or the next snapshot."""
    updater = make_updater(GraphUpdater, HOST)
    with pytest.raises(error, match=message):
        updater.seed = seed
    assert updater.seed == 7


def test_a_new_seed_draws_other_numbers(device, graphs):
    """Captured steps draw by the seed of their capture, so they are not replayed with another."""
    results = []
    for seed in (7, 8):
        updater = make_updater(GraphUpdater, device, make_model())
        run(updater, 4)
        assert is_captured(updater)
        updater.seed = seed
        run(updater, 1)
        results.append(parameters(updater))
    same, other = results
    assert any((same[name] != other[name]).any() for name in same)


def test_reports_have_the_name_of_the_innermost_reporter(device, graphs, no_causes):
    model = make_model()
    updater = make_updater(GraphUpdater, device, model, molecules(40))
    outer = chainer.Reporter()
    outer.add_observer('outer', model)
    for name in ['first'] * 4 + ['second'] * 4:
        inner = chainer.Reporter()
        inner.add_observer(name, model)
        observation: dict = {}
        with outer, inner.scope(observation):
            updater.update()
        assert list(observation) == [name + '/loss', name + '/mae']


def test_first_without_a_reporter(device, graphs):
    updater = make_updater(GraphUpdater, device)
    for _ in range(3):
        updater.update()
    assert all('main/loss' in report for report in run(updater, 3))


def test_a_check_waits_for_the_last_step(device, graphs, noted):
    """A check waits before it copies arrays, because the last step may be on another stream."""
    capturer = host_graphs.HostCapturer if graphs is not None else cuda_graphs.Capturer
    calls = []
    updater = make_updater(GraphUpdater, device, small_model(), molecules(BATCH))
    run(updater, 2)
    noted(capturer, 'join', calls, lambda *_: 'join')
    noted(snapshot.Copies, '__init__', calls, lambda *_: 'copies')
    noted(Program, '_checked_replay', calls, lambda *_: 'check')
    run(updater, 2)
    first = calls.index('check')
    assert calls[first : first + 3] == ['check', 'join', 'copies']


def test_all_that_a_program_runs_is_ordered(monkeypatch, noted):
    """Trials, runs, captures and checks are ordered after and before work on other streams."""
    graphs = host_graphs.stand_in(monkeypatch)
    modes = noted(TrainingStep, 'compute', of=lambda *given: (given[2], graphs[-1].is_ordered))
    run(make_updater(GraphUpdater, HOST), 8)
    assert len({mode for mode, _ in modes}) > 1 and all(is_ordered for _, is_ordered in modes)


def test_an_eager_step_between_captured_ones_waits_too(device, graphs, noted):
    capturer = host_graphs.HostCapturer if graphs is not None else cuda_graphs.Capturer
    updater = make_updater(GraphUpdater, device, small_model(), molecules(BATCH))
    run(updater, 2)
    calls = noted(capturer, 'join')
    message = '^GraphUpdater trains eagerly: the hook TimerHook has to see every call$'
    with pytest.warns(UserWarning, match=message), chainer.function_hooks.TimerHook():
        run(updater, 1)
    assert len(calls) == 1


def test_a_parameter_made_late_that_a_fused_update_refuses(monkeypatch):
    host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(update, 'why_unsupported', fused_update.why_unsupported)
    with chainer.using_config('dtype', numpy.dtype('e')):
        model = small_model()
        with model.init_scope():
            model.late = chainer.links.Linear(None, 3)

        def half(x):
            return functions.cast(x, 'e')

        model.lossfun = lambda x, t: functions.mean_squared_error(model.late(half(x)), half(t))
        for param in model.predictor.params(False):
            param.array = param.array.astype('f')
        updater = make_updater(GraphUpdater, HOST, model, same_molecules())
        message = (
            "^GraphUpdater updates eagerly after each replay: parameter '/late/b' is float16, "
            'expected float32 or float64$'
        )
        with pytest.warns(UserWarning, match=message):
            run(updater, 1)
        run(updater, 3)


def test_arguments_by_position():
    """StandardUpdater's arguments can be passed by position."""
    updater = GraphUpdater(
        SerialIterator(same_molecules(), BATCH),
        optimizers.SGD().setup(small_model()),
        chainer_bspmm.concat_mols,
        None,
        None,
        128.0,
        False,
    )
    assert updater.loss_scale == 128 and not updater.auto_new_epoch


@pytest.mark.parametrize(
    'argument, value, error, expected',
    [
        ('on_difference', 'ignore', ValueError, "one of 'warn', 'raise', got 'ignore'"),
        ('check_every', 0, ValueError, 'at least 1, got 0'),
        ('check_every', 2.5, TypeError, 'an int, got 2.5'),
        ('seed', 2**64, ValueError, 'at least 0 and below 2**63, got 18446744073709551616'),
        ('seed', -2, ValueError, 'at least 0 and below 2**63, got -2'),
        ('seed', -1, ValueError, 'at least 0 and below 2**63, got -1'),
        ('seed', 2**63, ValueError, 'at least 0 and below 2**63, got 9223372036854775808'),
        ('seed', 1.5, TypeError, 'an integer or None, got 1.5'),
        ('seed', '7', TypeError, "an integer or None, got '7'"),
        ('seed', True, TypeError, 'an integer or None, got True'),
    ],
)
def test_wrong_arguments(argument, value, error, expected):
    message = '%s: expected %s' % (argument, expected)
    with pytest.raises(error, match='^%s$' % re.escape(message)):
        make_updater(GraphUpdater, HOST, small_model(), same_molecules(), **{argument: value})
