"""`GraphUpdater` against StandardUpdater, and against its own steps run eagerly."""

import warnings

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm import models
from chainer_bspmm.training import step_program
from chainer_bspmm.training.graph_updater import GraphUpdater
from tests.support import relative_error

BATCH = 8
MODELS = {
    'RSGCN': lambda: models.RSGCN(5, 8, 3),
    'RSGCN, batch norm': lambda: models.RSGCN(5, 8, 3, use_batch_norm=True),
    'RelGCN': lambda: models.RelGCN(5, hidden_channels=[8, 8]),
    'GGNN': lambda: models.GGNN(5, 8, n_update_layers=2),
    'GIN': lambda: models.GIN(8, hidden_channels=8, n_update_layers=2),
    'NFP': lambda: models.NFP(5, 8, n_update_layers=2),
}
RELATIONS = {'RelGCN': 4, 'GGNN': 4}


def molecules(n, n_relations=1, seed=0, classes=False):
    """Return examples (atoms, adj, label) with random bonds; sizes from 1 to 12."""
    rng = numpy.random.RandomState(seed)
    examples = []
    for _ in range(n):
        size = rng.randint(1, 13)
        adj = rng.uniform(size=(n_relations, size, size)) < 2.5 / size / n_relations
        adj = numpy.maximum(adj, adj.transpose(0, 2, 1)).astype('f') / 3
        atoms = rng.randint(1, 20, size).astype('i')
        label = (
            rng.randint(-1, 2, 3).astype('i')
            if classes
            else (atoms.sum() / 50 + rng.normal(size=3)).astype('f')
        )
        examples.append((atoms, adj if n_relations > 1 else adj[0], label))
    return examples


def make_model(name='RSGCN', classes=False, seed=0, lossfun=functions.mean_squared_error):
    numpy.random.seed(seed)
    predictor = GraphConvPredictor(MODELS[name](), chainer_mlp(3))
    if classes:
        return Classifier(
            predictor,
            lossfun=functions.sigmoid_cross_entropy,
            metrics_fun=functions.binary_accuracy,
        )
    return Regressor(predictor, lossfun=lossfun, metrics_fun={'mae': functions.mean_absolute_error})


def chainer_mlp(out):
    from chainer_chemistry.models.mlp import MLP

    return MLP(out, hidden_dim=8)


def make_updater(kind, device, model, examples, optimizer=None, hooks=(), **kwargs):
    optimizer = (optimizer or optimizers.Adam()).setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    chainer.global_config.tested_optimizer = optimizer
    numpy.random.seed(3)
    if device.xp is not numpy:
        device.xp.random.seed(3)  # layers that learn their input size start on the device
    iterator = SerialIterator(examples, BATCH)
    kwargs.setdefault('converter', chainer_bspmm.concat_mols)
    if kind is GraphUpdater:
        kwargs.setdefault('seed', 7)
    return kind(iterator, optimizer, device=device, **kwargs)


def parameters(updater):
    return {
        name: cuda.to_cpu(param.array).copy()
        for name, param in updater.get_optimizer('main').target.namedparams(include_uninit=False)
    }


def run(updater, n_steps):
    """Update; return what was reported, a list of dicts."""
    reporter, reported = chainer.Reporter(), []
    target = updater.get_optimizer('main').target
    reporter.add_observer('main', target)
    reporter.add_observers('main', target.namedlinks(skipself=True))
    for _ in range(n_steps):
        observation = {}
        with reporter.scope(observation):
            updater.update()
        reported.append(
            {name: float(getattr(value, 'array', value)) for name, value in observation.items()}
        )
    return reported


def without_dropout(model):
    for link in model.links():
        if getattr(link, 'dropout_ratio', 0):
            link.dropout_ratio = 0.0
    return model


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
        programs = list(updater._programs.values())
        assert any(program.is_captured for program in programs) == captured
    (found, own), (expected, reports) = results
    assert own == reports
    for key in expected:
        assert found[key].tobytes() == expected[key].tobytes(), key


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_resume(device, graphs, tmp_path):
    examples = molecules(40)

    def make():
        return make_updater(GraphUpdater, device, make_model(), examples)

    updater = make()
    run(updater, 7)
    chainer.serializers.save_npz(tmp_path / 'middle.npz', updater)
    state = numpy.random.get_state()
    run(updater, 9)
    again = make()
    run(again, 2)  # whatever it did before is forgotten
    again.seed = 1
    chainer.serializers.load_npz(tmp_path / 'middle.npz', again)
    numpy.random.set_state(state)
    run(again, 9)
    assert again.seed == 7 and again.iteration == 16
    for key, value in parameters(updater).items():
        numpy.testing.assert_array_equal(parameters(again)[key], value)


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_snapshots_go_both_ways(device, graphs, tmp_path):
    examples = molecules(40)
    own = make_updater(GraphUpdater, device, make_model(), examples)
    theirs = make_updater(StandardUpdater, device, make_model(seed=5), examples)
    run(theirs, 3)
    chainer.serializers.save_npz(tmp_path / 'theirs.npz', theirs)
    chainer.serializers.load_npz(tmp_path / 'theirs.npz', own)
    assert own.iteration == 3 and own.get_optimizer('main').t == 3
    chainer.global_config.tested_optimizer = own.get_optimizer('main')
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


class Row(chainer.Chain):
    """A model around a function of (atoms, adj); `counter` is an attribute to be changed."""

    def __init__(self, function, predictor=None):
        super().__init__()
        self.function, self.counter = function, 0
        with self.init_scope():
            self.inner = predictor or MODELS['RSGCN']()

    def forward(self, atoms, adj):
        return self.function(self, atoms, adj)


def eager_cause(device, function, n_steps=4, **kwargs):
    """Train with a model around `function`; return the warning, and that training goes on."""
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
def test_an_attribute_that_changes(device, graphs):
    def scaled(link, atoms, adj):
        return link.inner(atoms, adj)[:, :3] * (1.0 + link.counter)

    model = Regressor(Row(scaled), lossfun=functions.mean_squared_error)
    updater = make_updater(GraphUpdater, device, model, molecules(40))

    def n_frozen():
        run(updater, 4)
        return len({key[-1] for key in updater._programs})

    assert n_frozen() == 1
    model.predictor.counter = 1
    assert n_frozen() == 2
    model.predictor.counter = 0
    assert n_frozen() == 2
    model.predictor.inner.embed.disable_update()
    assert n_frozen() == 3
    with chainer.using_config('train', False):
        assert n_frozen() == 4


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

    assert "layout='packed'" in cause(converter=chainer_bspmm.CSRConverter('padded'))
    with chainer.function_hooks.TimerHook():
        assert 'hook TimerHook' in cause()
    with chainer.using_config('debug', True):
        assert 'debug' in cause()
    assert not cause()


def test_a_dense_model():
    from chainer_chemistry.models import RSGCN

    model = Regressor(
        GraphConvPredictor(RSGCN(5, hidden_channels=8), chainer_mlp(3)),
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


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_a_frozen_value_is_found(device, graphs, monkeypatch):
    """What `Frozen` does not look into, a list: the checked replay stops the run."""
    monkeypatch.setattr(step_program, 'CHECK_EVERY', 3)

    def scaled(link, atoms, adj):
        return link.inner(atoms, adj)[:, :3] * link.factors[0]

    row = Row(scaled)
    row.factors = [1.0]
    if graphs is not None:  # the stand-in reads it anew: give it what a graph would have frozen
        pytest.skip('needs a captured graph: only a GPU freezes what Python says')
    model = Regressor(row, lossfun=functions.mean_squared_error)
    updater = make_updater(GraphUpdater, device, model, molecules(40))
    run(updater, 4)
    row.factors[0] = 2.0
    with pytest.raises(step_program.StepDiffers, match='run eagerly'):
        run(updater, 6)


@pytest.mark.filterwarnings('ignore:GraphUpdater')
def test_the_last_smaller_batch(device, graphs):
    examples = molecules(20)
    model = make_model()
    updater = make_updater(GraphUpdater, device, model, examples)
    updater._iterators['main'] = SerialIterator(examples, BATCH, repeat=False)
    run(updater, 3)
    assert updater.is_new_epoch and updater.epoch == 1


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
