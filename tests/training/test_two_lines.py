"""The two lines of a script lead to captured steps, evaluations and predictions."""

import copy
import pickle
import warnings

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions as F, optimizers, training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.prediction import set_up_predictor
from chainer_chemistry.models.prediction.base import BaseForwardModel
from chainer_chemistry.utils import run_train

from chainer_bspmm import adoption, CSRConverter
from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.captured_predict import MIN_BATCHES
from tests.support import assert_close_arrays
from tests.support.training import assert_same_bits, BATCH, HOST, make_model, molecules, parameters
from tests.support.training import run, without_dropout

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
EXAMPLES = molecules(5 * BATCH + 3)
TWO_GPUS = [pytest.mark.gpu, pytest.mark.multi_gpu]


@pytest.fixture(autouse=True)
def adopting(monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', True)


def script(device, kind=StandardUpdater, examples=EXAMPLES, converter=None, model=None, by=None):
    """Return an updater like that of a script."""
    model = model or make_model(seed=0)
    optimizer = (by or optimizers.Adam()).setup(model)
    numpy.random.seed(3)
    if device.xp is not numpy:
        device.xp.random.seed(3)  # layers that learn their input size are initialised there
    iterator = SerialIterator(examples, BATCH)
    converter = converter or chainer_bspmm.concat_mols
    return kind(iterator, optimizer, converter=converter, device=device)


def test_a_standard_updater_trains_captured(device, graphs, no_causes):
    """Parameters have the bits of a GraphUpdater's, and of eager steps."""
    actual = []
    for kind in (StandardUpdater, GraphUpdater):
        model = without_dropout(make_model(seed=0))
        updater = script(device, kind, model=model, by=optimizers.SGD(1e-3))
        assert type(updater) is GraphUpdater
        run(updater, 30)
        actual.append(parameters(updater))
        assert updater._driver.session is not None
        if graphs is not None:
            assert graphs[-1].n_launches > 20
        updater.finalize()
    assert_same_bits(*actual)
    with chainer.using_config('bspmm_capture', False):
        model = without_dropout(make_model(seed=0))
        updater = script(device, model=model, by=optimizers.SGD(1e-3))
    assert type(updater) is StandardUpdater
    run(updater, 30)
    assert_close_arrays(actual[0], parameters(updater), 1e-3)


Own = type('Own', (StandardUpdater,), {})


@pytest.mark.parametrize(
    'kind, converter',
    [
        (Own, None),
        (StandardUpdater, lambda batch, device=None: chainer_bspmm.concat_mols(batch, device)),
        (StandardUpdater, type('OfUser', (CSRConverter,), {})()),
    ],
)
def test_what_stays_as_it_is(kind, converter):
    assert type(script(HOST, kind, converter=converter)) is kind


def test_a_choice_that_was_made_first_stays(monkeypatch):
    """The import leaves a user's earlier choice in Chainer's configuration alone."""
    for owner, name in (
        (StandardUpdater, '__init__'),
        (StandardUpdater, 'update'),
        (extensions.Evaluator, '__call__'),
        (extensions.Evaluator, 'initialize'),
        (BaseForwardModel, '_forward'),
        (chainer.GradientMethod, 'update'),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # is put back at the end
    monkeypatch.setattr(adoption, '_is_installed', False)
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', False)
    adoption.install()
    assert not chainer.config.bspmm_capture


def test_a_dense_model_with_its_converter_stays_as_it_is():
    model = chainer_bspmm.densify(make_model(seed=0))
    updater = script(HOST, converter=dense_concat_mols, model=model)
    assert type(updater) is StandardUpdater


def test_dense_validation_sets_are_kept_from_the_first_on(device, graphs, no_causes, tmp_path):
    updater = script(device)
    evaluator = evaluator_of(updater, molecules(11, seed=2), device)
    trainer = training.Trainer(updater, (4, 'iteration'), out=str(tmp_path))
    trainer.extend(evaluator, trigger=(2, 'iteration'))
    seen = []

    def note(_):
        seen.append(evaluator._evaluation.examples._form is not None)

    trainer.extend(note, trigger=(2, 'iteration'))
    trainer.run()
    assert seen == [True, True]


def evaluator_of(updater, dataset, device):
    iterator = SerialIterator(dataset, 4, repeat=False, shuffle=False)
    model, converter = updater.get_optimizer('main').target, chainer_bspmm.concat_mols
    return extensions.Evaluator(iterator, model, converter=converter, device=device)


def of_ranks(optimizer):
    optimizer.communicator = 'of ChainerMN'
    return optimizer


@pytest.mark.parametrize(
    'given',
    [of_ranks, lambda optimizer: {'generator': optimizer}],
    ids=['several ranks', 'named optimizers'],
)
def test_updaters_that_stay_eager(given):
    updater = StandardUpdater(
        SerialIterator(EXAMPLES, BATCH),
        given(optimizers.Adam().setup(make_model())),
        converter=chainer_bspmm.concat_mols,
    )
    assert type(updater) is StandardUpdater


@pytest.mark.parametrize(
    'first, second', [('@numpy', '@numpy'), pytest.param('@cupy:0', '@cupy:1', marks=TWO_GPUS)]
)
def test_a_parallel_updater_trains_as_it_is(first, second):
    model = make_model()
    converter = chainer_bspmm.concat_mols
    model(*converter(EXAMPLES[:2]))  # all parameters exist before the copies are made
    devices = {'main': first, 'second': second}
    updater = training.updaters.ParallelUpdater(
        SerialIterator(EXAMPLES, 6),
        optimizers.Adam().setup(model),
        converter=converter,
        devices=devices,
    )
    assert type(updater) is training.updaters.ParallelUpdater
    before = parameters(updater)
    updater.update()
    assert any((before[name] != value).any() for name, value in parameters(updater).items())


def test_without_a_gpu_it_trains_as_before(tmp_path):
    """Training has the same bits without a warning, and dense examples are converted once."""
    run(script(HOST), 9)  # a loop without a Trainer, which locks nothing
    EXAMPLES[0][0][...] = EXAMPLES[0][0]
    seen, actual = [], []
    for captured in (True, False):
        with warnings.catch_warnings(), chainer.using_config('bspmm_capture', captured):
            warnings.simplefilter('error')
            updater = script(HOST)
            trainer = training.Trainer(updater, (9, 'iteration'), out=str(tmp_path))
            trainer.extend(lambda _: seen.append(EXAMPLES[0][0].flags.writeable))
            trainer.run()
        assert EXAMPLES[0][0].flags.writeable
        actual.append(parameters(updater))
    assert seen == [False] * (len(seen) // 2) + [True] * (len(seen) // 2)
    assert_same_bits(*actual)


of_both_kinds_of_copies = pytest.mark.parametrize(
    'copied', [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)


@of_both_kinds_of_copies
def test_a_copy_of_an_updater_trains_by_itself(device, graphs, copied):
    updater = script(device, model=make_model('GIN'))
    run(updater, 20)
    other = copied(updater)
    assert type(other) is GraphUpdater and other.seed == updater.seed
    run(other, 3)
    name, value = next(iter(parameters(updater).items()))
    assert (parameters(other)[name] != value).any()


@of_both_kinds_of_copies
def test_a_copy_of_an_evaluator_is_chainers(device, graphs, copied, tmp_path):
    updater = script(device, model=make_model('GIN'))
    trainer = training.Trainer(updater, (20, 'iteration'), out=str(tmp_path))
    evaluator = evaluator_of(updater, EXAMPLES, device)
    trainer.extend(evaluator, trigger=(5, 'iteration'))
    trainer.run()
    assert type(copied(evaluator)) is extensions.Evaluator


def test_an_optimizer_that_is_replaced(device, graphs, no_causes):
    updater = script(device)
    run(updater, 5)
    model = make_model(seed=1)
    model.to_device(device)
    updater._optimizers['main'] = optimizers.Adam().setup(model)
    updater.get_optimizer('main').use_auto_new_epoch = True
    run(updater, 5)
    assert updater.get_optimizer('main').t == 5


class Gan(StandardUpdater):
    """An updater whose methods use an attribute before its `__init__` has assigned it."""

    def __init__(self, optimizer, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generator = optimizer

    def get_all_optimizers(self):
        return {'main': self.generator}


class OwnEvaluator(extensions.Evaluator):
    def __init__(self, model):
        self._targets = {'main': model}
        self.name = None

    def evaluate(self):
        return {'x': 1}


def test_subclasses_that_are_made_in_their_own_way():
    model = make_model()
    optimizer = optimizers.Adam().setup(model)
    iterator = SerialIterator(EXAMPLES, BATCH)
    assert type(Gan(optimizer, iterator, optimizer)) is Gan
    assert OwnEvaluator(model)() == {'x': 1}


def test_loops_that_somebody_else_replaced_are_used(monkeypatch):
    called = []
    monkeypatch.setattr(StandardUpdater, 'update_core', lambda self: called.append(self))
    updater = script(HOST)
    updater.update()
    assert called == [updater] and type(updater) is StandardUpdater


def trained(device, folder, n_steps, resume=None, captured=True):
    """Train in a Trainer with upstream's extensions; return the updater."""
    with chainer.using_config('bspmm_capture', captured):
        updater = script(device)
    trainer = training.Trainer(updater, (n_steps, 'iteration'), out=str(folder))
    trainer.extend(evaluator_of(updater, EXAMPLES[:11], device))
    trainer.extend(extensions.snapshot(filename='{.updater.iteration}'), trigger=(5, 'iteration'))
    if resume is not None:
        if captured:
            updater.seed = 9  # the snapshot's seed replaces it, which leads to new captures
            run(updater, 3)
        chainer.serializers.load_npz(resume, trainer)
    trainer.run()
    return updater


def test_snapshots_are_resumed_both_ways(device, graphs, no_causes, tmp_path):
    whole = trained(device, tmp_path / 'whole', 10)
    again = trained(device, tmp_path / 'again', 10, tmp_path / 'whole' / '5')
    assert_same_bits(parameters(whole), parameters(again))
    assert again.seed == whole.seed
    for captured in (True, False):
        trained(device, tmp_path / 'one', 5, captured=captured)
        other = trained(device, tmp_path / 'other', 5, tmp_path / 'one' / '5', not captured)
        assert other.iteration == other.get_optimizer('main').t == 5
        saved = numpy.load(tmp_path / 'one' / '5')
        for name, value in parameters(other).items():
            expected = saved['updater/model:main' + name]
            numpy.testing.assert_array_equal(value, expected, err_msg=name)


def test_run_train_of_upstream(device, graphs, no_causes, prediction_graphs, tmp_path, noted):
    made = noted(GraphUpdater, 'connect_trainer', of=lambda updater, _: updater)
    options = {'batch_size': BATCH, 'epoch': 4, 'out': str(tmp_path), 'device': device}
    options.update(converter=chainer_bspmm.concat_mols, extensions_list=[extensions.LogReport()])
    run_train(make_model(), EXAMPLES, valid=EXAMPLES[:20], **options)
    assert len(made) == 1 and made[0].iteration > 20


DATA = [example[:2] for example in molecules(120, seed=4)]


def on(device, **options):
    model = make_model(**options)
    model.to_device(device)
    return model


def predictions(model, how='predict', data=DATA, **kwargs):
    return getattr(model, how)(data, batchsize=3, converter=chainer_bspmm.concat_mols, **kwargs)


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    numpy.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('how', ['predict', 'predict_proba'])
def test_predictions_of_upstream_replay(device, prediction_graphs, no_causes, how, monkeypatch):
    model = on(device, classes=how == 'predict_proba')
    actual = predictions(model, how)
    assert prediction_graphs.n_launches > 20
    n_launches = prediction_graphs.n_launches
    with chainer.using_config('bspmm_capture', False):
        expected = predictions(model, how)
    assert prediction_graphs.n_launches == n_launches
    assert_close(actual, expected)


def test_predictions_that_upstreams_loop_makes(device, prediction_graphs, no_causes):
    """Few batches, kept inputs, preprocessing, and results of other shapes use upstream's loop."""
    model = on(device)
    expected = predictions(model)
    n_launches = prediction_graphs.n_launches
    assert_close(predictions(model, data=DATA[:9]), expected[:9])
    assert_close(predictions(model, retain_inputs=True), expected)
    for kept, inputs in zip(model.inputs, dense_concat_mols(DATA)):
        numpy.testing.assert_array_equal(kept, inputs)
    assert_close(predictions(model, preprocess_fn=lambda *inputs: inputs), expected)
    dense = chainer_bspmm.densify(model)
    actual = dense.predict(DATA, batchsize=3, converter=dense_concat_mols)
    numpy.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)
    assert prediction_graphs.n_launches == n_launches


def test_how_many_batches_are_replayed(device, prediction_graphs, no_causes):
    model = on(device)
    n_launches = prediction_graphs.n_launches
    predictions(model, data=(DATA * 2)[: 3 * MIN_BATCHES - 3])
    assert prediction_graphs.n_launches == n_launches
    predictions(model, data=(DATA * 2)[: 3 * MIN_BATCHES])
    assert prediction_graphs.n_launches > n_launches


def test_predictions_read_a_data_set_of_a_user_once(device, prediction_graphs, no_causes):
    class Counted:
        def __init__(self, examples):
            self.examples = examples
            self.n_read = [0] * len(examples)

        def __len__(self):
            return len(self.examples)

        def __getitem__(self, i):
            self.n_read[i] += 1
            return self.examples[i]

    model, data = on(device), Counted(DATA)
    actual = predictions(model, data=data)
    assert set(data.n_read) == {1} and prediction_graphs.n_launches > 20
    assert_close(actual, predictions(model))


@pytest.fixture
def predicting():
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        yield


def test_forward_with_positional_arguments(device, prediction_graphs, predicting):
    model = on(device)
    given = DATA, model.predictor, 3, chainer_bspmm.concat_mols, False
    with chainer.using_config('bspmm_capture', False):
        expected = model._forward(*given)
    assert_close(model._forward(*given), expected)
    assert_close(model._forward(*given[:3], converter=chainer_bspmm.concat_mols), expected)


def test_forward_in_training_is_upstreams(device, prediction_graphs):
    """Replays are for test mode, without dropout, and must not be used in training mode."""
    model = on(device)
    with chainer.no_backprop_mode():
        model._forward(DATA, model.predictor, 3, chainer_bspmm.concat_mols)
    assert not prediction_graphs.n_launches


def test_forward_of_several_outputs(device, prediction_graphs, predicting):
    model = on(device)

    def both(*inputs):
        y = model.predictor(*inputs)
        return y, F.exp(y)

    converter = chainer_bspmm.concat_mols
    first, second = model._forward(DATA, both, 3, converter)
    with chainer.using_config('bspmm_capture', False):
        expected = model._forward(DATA, model.predictor, 3, converter)
    assert_close(first, expected)
    assert_close(second, numpy.exp(first))


class Loss(chainer.Chain):
    def __init__(self, divisor):
        super().__init__()
        self.divisor = divisor
        with self.init_scope():
            self.predictor = chainer_bspmm.sparsify(set_up_predictor('rsgcn', 8, 2, 1))

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.sum(y * y) / self.divisor(atoms, t)
        chainer.report({'loss': loss}, self)
        return loss


def of_rows(atoms, t):
    return len(atoms)


def of_molecules(atoms, t):
    return len(t)


def checked(device, model, examples=EXAMPLES):
    """Return the warnings of the first steps that are about the swap."""
    updater = script(device, StandardUpdater, examples, model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        run(updater, 2)
    return [str(w.message) for w in caught if 'takes rows' in str(w.message)]


def test_the_first_step_checks_the_loss(device, graphs):
    """Other updaters are in tests/training/test_first_step.py."""
    (text,) = checked(device, Loss(of_rows))
    assert 'use len(t)' in text
    classes = molecules(9, classes=True)
    assert not checked(device, Loss(of_molecules))
    assert not checked(device, make_model())
    assert not checked(device, make_model(classes=True), examples=classes)
    with chainer.using_config('bspmm_check_swap', False):
        assert not checked(device, Loss(of_rows))
    assert checked(device, Loss(of_rows), examples=chainer_bspmm.dataset.to_sparse(EXAMPLES))
