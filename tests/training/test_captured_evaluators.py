"""Captured evaluators have the results of eager ones."""

from collections.abc import Callable
import re
import types
import warnings

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.training.extensions import BatchEvaluator, R2ScoreEvaluator, ROCAUCEvaluator
from chainer_chemistry.training.extensions.prc_auc_evaluator import PRCAUCEvaluator

from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.captured_evaluators import capture_evaluator
from chainer_bspmm.training.guards import Guards
from tests.support.training import BATCH, hidden, make_model, make_updater, molecules
from tests.support.training import small_model
from tests.training import host_graphs

KINDS = ROCAUCEvaluator, PRCAUCEvaluator, R2ScoreEvaluator, BatchEvaluator
VALIDATION = molecules(5 * BATCH + 3, seed=1)  # the last batch is smaller


def make(device, model, kind=extensions.Evaluator, dataset=VALIDATION, **kwargs):
    """Return an evaluator like that of a script."""
    kwargs.setdefault('converter', chainer_bspmm.concat_mols)
    iterator = SerialIterator(dataset, BATCH, repeat=False, shuffle=False)
    evaluator = kind(iterator, model, device=device, **kwargs)
    evaluator.name = 'validation'  # the name that Trainer.extend gives
    return evaluator


def make_pair(device, model, *args, **kwargs):
    """Return two evaluators, the first of which is captured."""
    own, theirs = (make(device, model, *args, **kwargs) for _ in range(2))
    capture_evaluator(own)
    return own, theirs


def evaluated(evaluator):
    """Run an evaluator like a Trainer's extension; return the observation as floats."""
    with chainer.Reporter().scope({}):
        return {name: float(value) for name, value in evaluator().items()}


def on(device, model):
    model.to_device(device)
    return model


def assert_close(actual, expected, rtol=1e-5):
    assert list(actual) == list(expected)
    for name in expected:
        numpy.testing.assert_allclose(actual[name], expected[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize('where', ('examples', 'SparseDataset', 'DeviceDataset'))
def test_same_numbers_as_eager(device, prediction_graphs, no_causes, where):
    dataset = VALIDATION
    if where == 'SparseDataset':
        dataset = chainer_bspmm.dataset.to_sparse(VALIDATION)
    elif where == 'DeviceDataset':
        if device.xp is numpy:
            pytest.skip('a DeviceDataset is on a GPU')
        dataset = DeviceDataset(VALIDATION, device)
    model = on(device, make_model('RSGCN, batch norm'))
    own, theirs = make_pair(device, model, dataset=dataset)
    for _ in range(3):
        expected = evaluated(theirs)
        assert {'validation/main/loss', 'validation/main/mae'} == set(expected)
        assert_close(evaluated(own), expected)
        for param in model.params():  # the next evaluation must see the change
            param.array[...] *= 1.1
    assert own.get_iterator('main').__dict__.keys() == theirs.get_iterator('main').__dict__.keys()
    assert own.get_iterator('main').epoch_detail == theirs.get_iterator('main').epoch_detail == 1
    assert prediction_graphs.n_captures >= 2 and prediction_graphs.n_launches >= 10


@pytest.mark.parametrize('kind', KINDS)
def test_predictions_are_collected(device, prediction_graphs, no_causes, kind):
    is_score = kind is R2ScoreEvaluator
    dataset = molecules(len(VALIDATION), seed=1, classes=not is_score)
    model = on(device, make_model(classes=not is_score))
    seen = []
    options = {} if is_score else {'ignore_labels': -1}
    if kind is BatchEvaluator:

        def largest(y, t):
            seen.append((y, t))
            return y.max()

        options = {'metrics_fun': {'largest': largest}}
    options['eval_func'] = model.predictor
    own, theirs = (make(device, model, kind, dataset, **options) for _ in range(2))
    own.name = theirs.name = 'other'
    capture_evaluator(own)
    for _ in range(2):
        expected = evaluated(theirs)
        assert_close(evaluated(own), expected, 1e-4)
    assert isinstance(own, kind) and all(name.startswith('other/main/') for name in expected)
    for (y, t), (own_y, own_t) in zip(seen[::2], seen[1::2]):
        assert y.shape == own_y.shape == (3 * len(dataset),) and isinstance(own_y, numpy.ndarray)
        numpy.testing.assert_array_equal(t, own_t)
        numpy.testing.assert_allclose(y, own_y, rtol=1e-4, atol=1e-6)
    assert prediction_graphs.n_launches >= 5


def test_a_loop_that_somebody_else_replaced_is_used(device, prediction_graphs, monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', True)
    monkeypatch.setattr(extensions.Evaluator, 'evaluate', lambda self: {'called': self})
    evaluator = make(device, on(device, make_model()))
    assert evaluator() == {'called': evaluator} and type(evaluator) is extensions.Evaluator


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_evaluators_of_a_trainer(device, graphs, prediction_graphs, tmp_path, monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', True)
    updater = make_updater(GraphUpdater, device, make_model(), molecules(40))
    model = updater.get_optimizer('main').target
    trainer = chainer.training.Trainer(updater, (6, 'epoch'), out=str(tmp_path))
    evaluators = [
        make(device, model),
        make(device, model, R2ScoreEvaluator, eval_func=model.predictor),
        make(device, model, OwnEvaluator),
    ]
    for number, evaluator in enumerate(evaluators):
        trainer.extend(evaluator, name='evaluator_%d' % number, trigger=(1, 'epoch'))
    log = extensions.LogReport()
    trainer.extend(log)
    kinds = list(map(type, evaluators))
    trainer.run()
    changed = [type(evaluator) is not kind for evaluator, kind in zip(evaluators, kinds)]
    assert changed == [True, True, False]
    assert len(log.log) == 6 and prediction_graphs.n_launches > 20
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', False)
    expected = evaluated(make(device, model))
    for name in ('loss', 'mae'):
        value = pytest.approx(expected['validation/main/' + name], rel=1e-4)
        for number in (0, 2):
            assert log.log[-1]['evaluator_%d/main/%s' % (number, name)] == value
    assert numpy.isfinite(log.log[-1]['evaluator_1/main/r2_score'])
    assert evaluators[0]._evaluation is None  # the graphs were freed at the end
    loss = pytest.approx(expected['validation/main/loss'], rel=1e-4)
    assert evaluated(evaluators[0])['evaluator_0/main/loss'] == loss


class OwnEvaluator(extensions.Evaluator):
    """A user's subclass, which may override any method."""


class Once(chainer.dataset.Iterator):
    """An iterator that cannot begin again; Chainer evaluates a copy."""

    dataset = VALIDATION


def own_converter(batch, device):
    return chainer_bspmm.concat_mols(batch, device)


def with_iterator(evaluator, iterator):
    evaluator._iterators['main'] = iterator
    return evaluator


def with_model_on(evaluator, device):
    evaluator._targets['main'] = types.SimpleNamespace(device=device)
    return evaluator


OTHERS: dict[str, Callable] = {
    'of another class': lambda *args: make(*args, kind=OwnEvaluator),
    'with a progress bar': lambda *args: make(*args, progress_bar=True),
    'without a device': lambda _, model: make(None, model),
    'of a model on another device': lambda *args: with_model_on(make(*args), '@cupy:7'),
    'without a main target': lambda device, model: make(
        device, {'generator': model}, eval_func=model
    ),
    'with a converter of its own': lambda *args: make(*args, converter=own_converter),
    "with upstream's converter": lambda *args: make(*args, converter=dense_concat_mols),
    'of what cannot begin again': lambda *args: with_iterator(make(*args), Once()),
}


@pytest.mark.parametrize('name', OTHERS)
def test_evaluators_that_stay_as_they_are(device, prediction_graphs, name):
    evaluator = OTHERS[name](device, on(device, make_model()))
    kind = type(evaluator)
    capture_evaluator(evaluator)
    assert type(evaluator) is kind


def test_an_evaluator_on_the_cpu_stays_as_it_is():
    device = chainer.get_device('@numpy')
    evaluator = make(device, make_model())
    capture_evaluator(evaluator)
    assert type(evaluator) is extensions.Evaluator


def test_an_updater_on_the_cpu_leaves_evaluators_alone(tmp_path):
    device = chainer.get_device('@numpy')
    updater = make_updater(GraphUpdater, device, make_model(), molecules(20))
    trainer = chainer.training.Trainer(updater, (1, 'iteration'), out=str(tmp_path))
    evaluator = make(device, updater.get_optimizer('main').target)
    trainer.extend(evaluator)
    message = '^GraphUpdater trains eagerly: CUDA graphs need a GPU, the device is @numpy$'
    with pytest.warns(UserWarning, match=message):
        trainer.run()
    assert type(evaluator) is extensions.Evaluator


def half(batch, device):
    atoms, adj, labels = chainer_bspmm.concat_mols(batch, device)
    return atoms, adj, labels / 2


def test_what_is_watched_leads_to_a_new_capture(device, prediction_graphs, no_causes):
    model = on(device, small_model(factor=1.0))

    def forward(link, atoms, adj):
        return link.inner(atoms, adj)[:, :3] * link.factor

    model.predictor.function = forward
    own, theirs = make_pair(device, model)
    for factor in (1.0, 2.0):
        model.predictor.factor = factor
        for _ in range(2):
            assert_close(evaluated(own), evaluated(theirs))
    n_captures = prediction_graphs.n_captures
    for param in model.params():
        param.array = param.array + 0.1  # another array
    assert_close(evaluated(own), evaluated(theirs))
    assert_close(evaluated(own), evaluated(theirs))
    assert prediction_graphs.n_captures > n_captures
    own.converter = theirs.converter = half
    assert_close(evaluated(own), evaluated(theirs))
    own.eval_func = theirs.eval_func = lambda *arrays: chainer.report({'twice': 2 * model(*arrays)})
    assert set(evaluated(own)) == {'validation/main/loss', 'twice'}
    assert_close(evaluated(own), evaluated(theirs))


def test_another_name(device, prediction_graphs, no_causes):
    """A Trainer may rename an evaluator that a script has called before."""
    own, theirs = make_pair(device, on(device, make_model()))
    for name in ('validation', 'test'):
        own.name = theirs.name = name
        for _ in range(2):
            assert_close(evaluated(own), evaluated(theirs))


def test_another_model(device, prediction_graphs, no_causes):
    own, theirs = make_pair(device, on(device, make_model()))
    for seed in (0, 1):
        model = on(device, make_model(seed=seed))
        own._targets['main'] = theirs._targets['main'] = model
        for _ in range(2):
            assert_close(evaluated(own), evaluated(theirs))


def test_a_change_by_a_checked_replay_is_seen_by_the_next(device, prediction_graphs):
    """The check of a replay runs the model, which changes an attribute here."""
    model = on(device, small_model(factor=1.0))
    late = hidden(1.0)  # its value is not watched

    def forward(link, atoms, adj):
        y = link.inner(atoms, adj)[:, :3] * link.factor
        link.factor = late.value
        return y

    model.predictor.function = forward
    evaluator = make(device, model)
    capture_evaluator(evaluator)
    evaluated(evaluator)
    n_launches = prediction_graphs.n_launches
    late.value = 2.0
    evaluated(evaluator)  # the fourth batch is replay 8, which is checked, and changes the factor
    assert prediction_graphs.n_launches == n_launches + 4


def warned(evaluator, n_times=3):
    """Evaluate several times; return the warnings that name a cause."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(n_times):
            evaluated(evaluator)
    return [str(w.message) for w in caught if 'evaluates eagerly' in str(w.message)]


def test_what_is_not_watched_is_found(device, prediction_graphs):
    """A check finds the change, and evaluation continues eagerly."""
    factor = hidden(1.0)  # its value is not watched
    read = host_graphs.read_at_capture(lambda: factor.value)

    def forward(link, atoms, adj):
        return link.inner(atoms, adj)[:, :3] * read()

    model = on(device, small_model(forward))
    own, theirs = make_pair(device, model)
    assert not warned(own)
    factor.value = 3.0
    (cause,) = warned(own)
    message = (
        'GraphUpdater: an evaluator evaluates eagerly: a replay of the captured evaluation differs '
        r'from an eager one in validation/main/loss \(relative difference \d.\de-01\): it reads '
        'something from Python that has changed since it was captured, and that is not watched '
        r'\(docs/captured_training.md\)'
    )
    assert re.fullmatch(message, cause)
    assert_close(evaluated(own), evaluated(theirs))


def test_guards_look_once_an_evaluation(device, prediction_graphs, no_causes, noted):
    def forward(link, atoms, adj):
        return link.inner(atoms, adj)[:, :3] * (2.0 if link.counter else 1.0)

    looks = noted(Guards, 'key')
    model = on(device, small_model(forward))
    own, theirs = make_pair(device, model)
    for _ in range(40):  # until most replays are not compared with eager evaluations
        evaluated(own)
    looks.clear()
    assert_close(evaluated(own), evaluated(theirs))
    assert len(looks) == 1
    model.predictor.counter = 1
    assert_close(evaluated(own), evaluated(theirs))


def test_numbers_on_the_host(device, prediction_graphs, no_causes):
    """A replay repeats the numbers of its capture; if they change, there is a new capture."""
    model = on(device, small_model())
    model.threshold = 3.0

    def report(*arrays):
        chainer.report({'threshold': model.threshold, 'loss': model(*arrays)})

    own, theirs = make_pair(device, model, eval_func=report)
    for threshold in (3.0, 3.0, 3.0, 0.5, 0.5, 0.5):
        model.threshold = threshold
        found = evaluated(own)
        assert_close(found, evaluated(theirs))
        assert found['threshold'] == threshold
    assert prediction_graphs.n_launches


def test_numbers_on_the_host_that_count(device, prediction_graphs):
    model = on(device, small_model())
    n_calls = hidden(0)

    def report(*arrays):
        n_calls.value += 1
        chainer.report({'n': n_calls.value, 'loss': model(*arrays)})

    own, _ = make_pair(device, model, eval_func=report)
    (cause,) = warned(own)
    assert cause == (
        'GraphUpdater: an evaluator evaluates eagerly: n is reported as a value on the host, which '
        'a replay would repeat'
    )
    assert not prediction_graphs.n_launches


def test_the_loss_of_the_last_batch_is_left_in_the_model(device, prediction_graphs):
    """An evaluation leaves the same loss as an eager one, whatever loss a step had left there."""
    model = on(device, make_model())
    own, theirs = make_pair(device, model, dataset=VALIDATION[: 2 * BATCH])
    for _ in range(20):  # until replays are no longer compared with eager evaluations
        evaluated(own)
    n_launches = prediction_graphs.n_launches
    model.loss = of_step = functions.sum(model.predictor.mlp.layers[0].W)
    value = float(of_step.array)
    left = []
    for evaluator in (theirs, own):
        evaluated(evaluator)
        left.append(float(model.loss.array))
    assert prediction_graphs.n_launches == n_launches + 2
    assert left[1] == pytest.approx(left[0], rel=1e-6) and float(of_step.array) == value


def test_eval_hook(device, prediction_graphs, no_causes):
    called = []
    own, theirs = make_pair(device, on(device, make_model()), eval_hook=called.append)
    for _ in range(2):
        assert_close(evaluated(own), evaluated(theirs))
    assert called == [own, theirs] * 2


def test_an_iterator_of_another_class(device, prediction_graphs, no_causes):
    own, theirs = make_pair(device, on(device, make_model()))
    kind = type('Iterator', (SerialIterator,), {})
    own._iterators['main'] = kind(VALIDATION, BATCH, repeat=False, shuffle=False)
    for _ in range(2):
        assert_close(evaluated(own), evaluated(theirs))
