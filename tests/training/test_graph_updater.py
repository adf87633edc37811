"""`GraphUpdater` against StandardUpdater, and against its own steps run eagerly."""

import threading
import warnings

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.backends import cuda
from chainer.datasets import TransformDataset
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import reports
from chainer_bspmm.training import step_program
from chainer_bspmm.training.buffers import Inputs
from chainer_bspmm.training.graph_updater import GraphUpdater
from chainer_bspmm.training.guards import Guards
from chainer_bspmm.training import state
from chainer_bspmm.training.programs import Program
from chainer_bspmm.training.step_program import StepProgram
from tests.support import relative_error
from tests.support.training import BATCH
from tests.support.training import make_model
from tests.support.training import make_updater
from tests.support.training import MODELS
from tests.support.training import molecules
from tests.support.training import of_variables
from tests.support.training import parameters
from tests.support.training import RELATIONS
from tests.support.training import Row
from tests.support.training import run
from tests.support.training import same_molecules
from tests.support.training import without_dropout
from tests.training import host_graphs


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('name', MODELS)
def test_same_as_standard_updater(device, graphs, name):
    # Few steps: training multiplies rounding errors.
    examples = molecules(40, RELATIONS.get(name, 1))
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater = make_updater(
            kind, device, without_dropout(make_model(name)), examples, optimizers.SGD(1e-3)
        )
        reported = run(updater, 12)
        results.append((parameters(updater), reported))
    (expected, reports), (found, own) = results
    assert expected.keys() == found.keys()
    for key in expected:
        assert relative_error(found[key], expected[key]) < 1e-4, key
    assert [set(report) for report in own] == [set(report) for report in reports]
    for one, other in zip(own, reports):
        numpy.testing.assert_allclose([one[k] for k in one], [other[k] for k in one], rtol=1e-3)
    if graphs:
        assert graphs[0].n_captures and graphs[0].n_launches > 5


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('name', MODELS)
def test_captured_as_eager_to_the_bit(device, graphs, name, monkeypatch):
    """Dropout, batch norm, weight decay, clipping and a schedule, 200 steps."""
    examples = molecules(40, RELATIONS.get(name, 1), classes=True)
    results = []
    for captured in (True, False):
        hooks = optimizer_hooks.WeightDecay(1e-3), optimizer_hooks.GradientClipping(0.5)
        updater = make_updater(
            GraphUpdater, device, make_model(name, classes=True), examples, hooks=hooks
        )
        if not captured:
            monkeypatch.setattr(step_program.StepProgram, 'capture', lambda self: None)
        reported = []
        for _ in range(200 if graphs is None else 20):
            updater.get_optimizer('main').alpha *= 0.999
            reported += run(updater, 1)
        results.append((parameters(updater), reported))
        programs = list(updater._driver.programs.values())
        assert any(program.is_captured for program in programs) == captured
    (found, own), (expected, reports) = results
    assert own == reports
    for key in expected:
        assert found[key].tobytes() == expected[key].tobytes(), key


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('name', MODELS)
def test_kernels_are_compiled_together(device, graphs, name, monkeypatch):
    """By other threads, before the first step and after parameters were made that were missing."""
    compile_one, in_threads = kernels._compiled, {}

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


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_reports_keep_their_values(device, graphs, monkeypatch):
    """Through more steps than rows are allocated for at once."""
    monkeypatch.setattr(reports, 'N_ROWS', 8)
    model = make_model()
    updater = make_updater(GraphUpdater, device, model, molecules(40), check_every=7)

    def loss_func(*args):
        loss = model(*args)
        chainer.report({'double': loss.array.astype('d'), 'labels': 2 * args[2]}, model)
        return loss

    updater.loss_func = loss_func
    reporter, kept, seen = chainer.Reporter(), [], []
    reporter.add_observer('main', model)
    for _ in range(40):
        observation = {}
        with reporter.scope(observation):
            updater.update()
        kept.append({name: getattr(value, 'array', value) for name, value in observation.items()})
        seen.append({name: cuda.to_cpu(array).copy() for name, array in kept[-1].items()})
    assert sum(program.is_captured for program in updater._driver.programs.values())
    for arrays, values in zip(kept, seen):
        assert list(arrays) == ['main/loss', 'main/mae', 'main/double', 'main/labels']
        assert arrays['main/double'].dtype == 'd' and arrays['main/labels'].shape[1:] == (3,)
        for name, array in arrays.items():
            assert isinstance(array, device.xp.ndarray)
            numpy.testing.assert_array_equal(cuda.to_cpu(array), values[name])
    assert len({float(values['main/loss']) for values in seen}) == 40
    for values in seen:
        assert values['main/loss'] == values['main/double'].astype('f')


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_resume(device, graphs, tmp_path):
    examples = molecules(40)

    def make(seed):
        return make_updater(GraphUpdater, device, make_model(), examples, seed=seed)

    updater = make(7)
    run(updater, 7)
    chainer.serializers.save_npz(tmp_path / 'middle.npz', updater)
    state = numpy.random.get_state()
    run(updater, 9)
    again = make(1)
    run(again, 3)  # steps that were captured with its seed are not replayed
    chainer.serializers.load_npz(tmp_path / 'middle.npz', again)
    numpy.random.set_state(state)
    run(again, 9)
    assert again.seed == 7 and again.iteration == 16
    for key, value in parameters(updater).items():
        numpy.testing.assert_array_equal(parameters(again)[key], value)


def test_numbers_of_a_fused_update(device, graphs, monkeypatch):
    """A learning rate that changes with every step, and hooks that are added later."""
    if graphs is not None:
        host_graphs.fuse(monkeypatch)
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater = make_updater(
            kind, device, without_dropout(make_model()), same_molecules(), optimizers.SGD(0.01)
        )
        optimizer, capturers = updater.get_optimizer('main'), []
        for i in range(9):
            optimizer.lr *= 0.9
            if i == 4:
                optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))
            if i == 7:
                optimizer.target.predictor.mlp.layers[0].W.update_rule.add_hook(lambda *_: None)
            run(updater, 1)
            if kind is GraphUpdater:
                capturers.append(updater._driver.capturer)
        results.append(parameters(updater))
    assert len(set(map(id, capturers))) == 3  # one until each hook came
    assert all(capturers)
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-5, name


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_snapshots_go_both_ways(device, graphs, tmp_path):
    examples = molecules(40)
    own = make_updater(GraphUpdater, device, make_model(), examples)
    theirs = make_updater(StandardUpdater, device, make_model(seed=5), examples)
    run(theirs, 3)
    chainer.serializers.save_npz(tmp_path / 'theirs.npz', theirs)
    chainer.serializers.load_npz(tmp_path / 'theirs.npz', own)
    assert own.iteration == 3 and own.get_optimizer('main').t == 3
    run(own, 4)
    chainer.serializers.save_npz(tmp_path / 'own.npz', own)
    chainer.serializers.load_npz(tmp_path / 'own.npz', theirs)
    assert theirs.iteration == 7 and theirs.get_optimizer('main').t == 7
    for key, value in parameters(own).items():
        numpy.testing.assert_array_equal(parameters(theirs)[key], value)


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_under_a_trainer(device, graphs, tmp_path):
    updater = make_updater(
        GraphUpdater,
        device,
        without_dropout(make_model()),
        molecules(40),
        optimizers.Adam(alpha=0.01),
    )
    trainer = chainer.training.Trainer(updater, (8, 'epoch'), out=str(tmp_path))
    log = extensions.LogReport(trigger=(1, 'epoch'))
    trainer.extend(log)
    trainer.extend(extensions.observe_lr(), trigger=(1, 'iteration'))
    trainer.extend(extensions.ExponentialShift('alpha', 0.9), trigger=(1, 'epoch'))
    trainer.extend(
        extensions.Evaluator(
            SerialIterator(molecules(11, seed=1), BATCH, repeat=False, shuffle=False),
            updater.get_optimizer('main').target,
            device=device,
            converter=chainer_bspmm.concat_mols,
        ),
        trigger=(1, 'epoch'),
    )
    trainer.extend(extensions.snapshot(), trigger=(2, 'epoch'))
    trainer.run()
    assert len(log.log) == 8
    for entry in log.log:
        assert entry['main/loss'] > 0 and entry['validation/main/loss'] > 0
    assert log.log[-1]['main/loss'] < log.log[0]['main/loss']
    assert log.log[-1]['lr'] < log.log[0]['lr']


def eager_cause(device, function, n_steps=4, **kwargs):
    """Train with a model around `function`; return the warning; training continues."""
    model = Regressor(Row(function), lossfun=functions.mean_squared_error)
    updater = make_updater(GraphUpdater, device, model, molecules(40), **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        reported = run(updater, n_steps)
        run(updater, n_steps)
    assert all('main/loss' in report for report in reported)
    causes = [str(w.message) for w in caught if 'trains eagerly' in str(w.message)]
    assert len(causes) == 1  # one warning, however many steps
    return causes[0]


def test_a_model_that_averages_over_all_rows(device, graphs):
    def mean(link, atoms, adj):
        h = functions.mean(link.inner.embed(atoms), axis=0)
        return (
            functions.broadcast_to(h[None, :3], (adj.n_graphs, 3)) + link.inner(atoms, adj)[:, :3]
        )

    assert 'belong to no molecule' in eager_cause(device, mean)


@pytest.mark.gpu
@pytest.mark.parametrize(
    'function, words',
    [
        (lambda link, atoms, adj: link.inner(atoms, adj)[:, :3] * float(adj.data.sum()), 'apture'),
        (
            lambda link, atoms, adj: (
                link.inner(atoms, adj)[:, :3] + link.xp.asarray(numpy.ones(3, 'f'))
            ),
            'from the host',
        ),
        (lambda link, atoms, adj: link.inner(atoms, adj)[:, :3] + 0 * link.xp.random.rand(), 'Row'),
    ],
)
def test_what_cannot_be_captured(function, words):
    cause = eager_cause(chainer.get_device('@cupy:0'), function)
    assert 'Row' in cause and words in cause and __file__ in cause


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_random_numbers_that_are_not_the_step_s(device, graphs):
    cause = eager_cause(
        device, lambda link, atoms, adj: link.inner(atoms, adj)[:, :3] * link.xp.random.rand()
    )
    assert 'twice' in cause


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('owner, name', [(Program, 'launch'), (Inputs, 'fetched')])
def test_an_interrupt_around_a_launch(device, graphs, monkeypatch, owner, name):
    """Later steps have their own batches: the graph takes what the host has sent for it."""

    def interrupt(*args):
        raise KeyboardInterrupt

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


HOST = chainer.get_device('@numpy')


def copies(model):
    return [param.array.copy() for _, param in sorted(model.namedparams(include_uninit=False))]


@pytest.mark.parametrize(
    'owner, name',
    [
        (StepProgram, 'stage'),
        (StepProgram, 'launch'),
        (StepProgram, '_reported'),
        (StepProgram, '_run_again'),
        (state, 'difference'),
        (StepProgram, '_compute'),
        (StepProgram, '_update'),
        (StepProgram, '_gradients_now'),
    ],
)
@pytest.mark.parametrize(  # before; the 16th replay is checked
    'n_steps', (0, 2, 15, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 20)))
)
def test_an_interrupted_step_counts_if_it_was_done(monkeypatch, n_steps, owner, name):
    """Parameters and the number of updates go together."""
    graphs = host_graphs.stand_in(monkeypatch)
    host_graphs.fuse(monkeypatch)
    optimizer = optimizers.SGD(1e-3)
    model = without_dropout(make_model())
    with chainer.using_config('train', False):
        model(*chainer_bspmm.concat_mols(same_molecules()))  # makes all parameters
    updater = make_updater(GraphUpdater, HOST, model, same_molecules(), optimizer)
    run(updater, n_steps)
    before, t = copies(optimizer.target), optimizer.t
    found = getattr(owner, name)

    def interrupt(*args, **kwargs):
        if name in ('launch', '_run_again', '_gradients_now', 'difference'):
            found(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        try:
            run(updater, 1)
        except KeyboardInterrupt:
            pass
    is_done = any((one != other).any() for one, other in zip(copies(model), before))
    assert optimizer.t - t == is_done
    assert all(param.update_rule.t == optimizer.t for param in model.params())
    run(updater, 20)
    assert optimizer.t == t + is_done + 20 and graphs[0].n_launches > 10


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_an_interrupt_before_the_first_step(device, graphs, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    updater = make_updater(GraphUpdater, device, make_model(), same_molecules())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Guards, 'key', interrupt)
        run(updater, 1)
    run(updater, 20)
    assert all(program.is_captured for program in updater._driver.programs.values())


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_an_attribute_that_changes_every_step(device, graphs):
    def count(link, atoms, adj):
        link.counter += 1
        return link.inner(atoms, adj)[:, :3]

    cause = eager_cause(device, count, n_steps=40)
    assert 'the attribute counter of predictor' in cause


def test_other_causes_for_eager_steps(device, graphs):
    examples = molecules(40)

    def cause(**kwargs):
        updater = make_updater(GraphUpdater, device, make_model(), examples, **kwargs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            run(updater, 4)
        return ' '.join(str(w.message) for w in caught if 'trains eagerly' in str(w.message))

    assert 'expected arrays on the host' in cause(converter=of_variables)
    with chainer.function_hooks.TimerHook():
        assert 'hook TimerHook' in cause()
    with chainer.using_config('debug', True):
        assert 'debug' in cause()
    assert not cause()


def test_a_dense_model():
    from chainer_chemistry.models import RSGCN

    model = Regressor(
        GraphConvPredictor(RSGCN(5, hidden_channels=8), MLP(3, hidden_dim=8)),
        lossfun=functions.mean_squared_error,
    )
    updater = make_updater(
        GraphUpdater,
        chainer.get_device('@numpy'),
        model,
        molecules(20),
        converter=dense_concat_mols,
    )
    with pytest.warns(UserWarning, match='CUDA graphs need a GPU'):
        run(updater, 2)


@pytest.mark.filterwarnings('ignore:GraphUpdater')
def test_the_last_smaller_batch(device, graphs):
    examples = molecules(20)
    model = make_model()
    updater = make_updater(GraphUpdater, device, model, examples)
    updater._iterators['main'] = SerialIterator(examples, BATCH, repeat=False)
    run(updater, 3)
    assert updater.is_new_epoch and updater.epoch == 1


@pytest.mark.filterwarnings('ignore:GraphUpdater')
def test_the_epoch_is_the_iterator_s():
    updater = make_updater(GraphUpdater, chainer.get_device('@numpy'), make_model(), molecules(20))
    iterator = updater.get_iterator('main')
    found = []
    for _ in range(4):
        updater.update()
        found.append(updater.epoch_detail)
        assert found[-1] == updater.epoch_detail == iterator.epoch_detail
    assert len(set(found)) == 4
    iterator.reset()
    assert updater.epoch_detail == 0


@pytest.mark.parametrize('seed', (-1, 2**63))
def test_seed(seed):
    with pytest.raises(ValueError, match='seed: expected at least 0'):
        make_updater(
            GraphUpdater, chainer.get_device('@numpy'), make_model(), molecules(9), seed=seed
        )


def test_a_seed_is_not_drawn():
    """It follows NumPy's, and leaves that alone: batches come in StandardUpdater's order."""
    device = chainer.get_device('@numpy')
    seeds = {
        make_updater(GraphUpdater, device, make_model(), molecules(9), seed=None).seed
        for _ in range(2)
    }
    after = numpy.random.rand()
    make_updater(StandardUpdater, device, make_model(), molecules(9))
    assert len(seeds) == 1 and numpy.random.rand() == after
