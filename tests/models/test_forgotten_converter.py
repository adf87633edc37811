"""A swapped model with Chainer's or Chainer Chemistry's converter: the error says so."""

import functools

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import optimizers
from chainer.dataset import concat_examples
from chainer.dataset.convert import ConcatWithAsyncTransfer
from chainer.iterators import SerialIterator
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.prediction import Classifier, Regressor, set_up_predictor
from chainer_chemistry.training.extensions import ROCAUCEvaluator

from chainer_bspmm import BatchedCSR, CSRConverter, sparsify
from chainer_bspmm.training import GraphUpdater
from tests.support.molecules import molecules

EXAMPLES = molecules((5, 9, 3, 4))
OF_ONE_SIZE = molecules((5, 5, 5, 5))
INPUTS = [example[:2] for example in EXAMPLES]

MESSAGE = (
    '%s: expected converter=%s, because GGNN was swapped for sparse batches, got %s, which makes '
    'dense ones'
)
CHAINERS = "Chainer's concat_examples"
UPSTREAMS = "Chainer Chemistry's concat_mols"


def refusal(where, got=CHAINERS, remedy='chainer_bspmm.concat_mols'):
    return MESSAGE % (where, remedy, got)


def regressor():
    predictor = sparsify(set_up_predictor('ggnn', 4, 1, 3))
    return Regressor(predictor, lossfun=chainer.functions.mean_squared_error)


def classifier():
    return Classifier(sparsify(set_up_predictor('ggnn', 4, 1, 3)))


class OwnChain(chainer.Chain):
    """A user's Chain with a loss."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.predictor = sparsify(set_up_predictor('ggnn', 4, 1, 3))

    def forward(self, atoms, adj, t):
        return chainer.functions.mean_squared_error(self.predictor(atoms, adj), t)


class Converting(OwnChain):
    """A model that itself converts dense batches to sparse ones."""

    def forward(self, atoms, adj, t):
        return super().forward(atoms, BatchedCSR.from_dense(adj), t)


def updater(model, examples=EXAMPLES, kind=StandardUpdater, **options):
    optimizer = optimizers.SGD().setup(model)
    return kind(SerialIterator(examples, 4), optimizer, **options)


def message_of(call):
    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize('examples', [EXAMPLES, OF_ONE_SIZE])
def test_an_updater_without_a_converter(examples):
    assert message_of(lambda: updater(regressor(), examples)) == refusal('StandardUpdater')


@pytest.mark.parametrize(
    'converter, got',
    [
        (concat_examples, CHAINERS),
        (ConcatWithAsyncTransfer(), CHAINERS),
        (dense_concat_mols, UPSTREAMS),
        (functools.partial(dense_concat_mols, padding=0), UPSTREAMS),
    ],
)
def test_a_dense_converter(converter, got):
    message = message_of(lambda: updater(regressor(), converter=converter))
    assert message == refusal('StandardUpdater', got)


def test_a_graph_updater():
    message = message_of(
        lambda: updater(regressor(), kind=GraphUpdater, converter=dense_concat_mols)
    )
    assert message == refusal('GraphUpdater', UPSTREAMS)


def test_a_loss_function():
    """The loss function may be the model itself."""
    model = regressor()
    message = message_of(lambda: updater(model.predictor, loss_func=model))
    assert message == refusal('StandardUpdater')


@pytest.mark.parametrize('kind', [Evaluator, ROCAUCEvaluator])
def test_an_evaluator(kind):
    model = classifier()
    evaluator = kind(SerialIterator(EXAMPLES, 4, repeat=False), model)
    assert message_of(evaluator) == refusal(kind.__name__)


def test_an_evaluator_in_a_trainer_is_refused_before_the_first_step(tmp_path):
    """Otherwise the epochs before its first turn would be lost."""
    model = regressor()
    trainer = chainer.training.Trainer(
        updater(model, converter=chainer_bspmm.concat_mols), (2, 'epoch'), out=tmp_path
    )
    evaluator = Evaluator(SerialIterator(EXAMPLES, 4, repeat=False), model)
    trainer.extend(evaluator, trigger=(2, 'epoch'))
    assert message_of(trainer.run) == refusal('Evaluator')
    assert trainer.updater.iteration == 0


class Late(Evaluator):
    """A user's evaluator that sets its converter when it is called."""

    def __call__(self, trainer=None):
        self.converter = chainer_bspmm.concat_mols
        return super().__call__(trainer)


def test_an_evaluator_of_a_user_s_class_may_set_its_converter_late(tmp_path):
    model = regressor()
    trainer = chainer.training.Trainer(
        updater(model, converter=chainer_bspmm.concat_mols), (1, 'epoch'), out=tmp_path
    )
    trainer.extend(Late(SerialIterator(EXAMPLES, 4, repeat=False), model))
    trainer.run()
    assert trainer.updater.iteration == 1


def test_an_evaluator_of_a_function():
    model = classifier()
    evaluator = Evaluator(SerialIterator(INPUTS, 4, repeat=False), model, eval_func=model.predictor)
    assert message_of(evaluator) == refusal('Evaluator')


@pytest.mark.parametrize('method', ['predict', 'predict_proba'])
@pytest.mark.parametrize('given', [(), (3, dense_concat_mols)])
def test_predictions_of_a_classifier(method, given):
    message = message_of(lambda: getattr(classifier(), method)(INPUTS, *given))
    assert message == refusal('predict', UPSTREAMS if given else CHAINERS)


def test_predictions_with_inputs_that_are_kept():
    message = message_of(lambda: regressor().predict(INPUTS, retain_inputs=True))
    assert message == refusal('predict')


def test_without_capturing(monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', False)
    assert message_of(lambda: regressor().predict(INPUTS)) == refusal('predict')


@pytest.mark.parametrize(
    'converter, remedy',
    [
        (CSRConverter('packed'), "chainer_bspmm.CSRConverter('packed')"),
        (CSRConverter(padded_to=12), 'chainer_bspmm.CSRConverter(padded_to=12)'),
    ],
)
def test_the_converter_of_the_training_is_named(converter, remedy):
    model = regressor()
    updater(model, converter=converter).update()
    assert message_of(lambda: model.predict(INPUTS)) == refusal('predict', remedy=remedy)


def test_a_chain_of_ones_own():
    """The converter fails, or, if molecules have one size, the model says what it expects."""
    step = updater(OwnChain())
    assert message_of(step.update) == refusal('StandardUpdater')
    step = updater(OwnChain(), OF_ONE_SIZE)
    assert message_of(step.update).startswith('adj: expected a BatchedCSR, got ndarray of shape')


def test_an_evaluator_of_a_chain_of_ones_own():
    evaluator = Evaluator(SerialIterator(EXAMPLES, 4, repeat=False), OwnChain())
    assert message_of(evaluator) == refusal('Evaluator')


def test_an_error_of_the_data_of_a_dense_model_stays():
    step = updater(Regressor(set_up_predictor('ggnn', 4, 1, 3)))
    with pytest.raises(ValueError, match='^all the input array dimensions '):
        step.update()


class Failing(OwnChain):
    def forward(self, atoms, adj, t):
        raise ValueError('an error of the user')


@pytest.mark.parametrize(
    'make',
    [
        lambda model: updater(model, OF_ONE_SIZE).update,
        lambda model: Evaluator(SerialIterator(OF_ONE_SIZE, 4, repeat=False), model),
    ],
    ids=['updater', 'evaluator'],
)
def test_an_error_of_a_chain_of_ones_own_stays(make):
    with pytest.raises(ValueError, match='^an error of the user$'):
        make(Failing())()


def test_an_error_of_a_function_of_ones_own_for_predict_stays():
    def fail(*_):
        raise ValueError('an error of the user')

    with pytest.raises(ValueError, match='^an error of the user$'):
        regressor().predict([example[:2] for example in OF_ONE_SIZE], preprocess_fn=fail)


def test_a_chain_that_makes_sparse_batches_by_itself():
    updater(Converting(), converter=dense_concat_mols).update()


def test_a_function_that_makes_sparse_batches_for_predict():
    def preprocess(atoms, adj):
        return atoms, BatchedCSR.from_dense(adj)

    model = regressor()
    predictions = model.predict(INPUTS, converter=dense_concat_mols, preprocess_fn=preprocess)
    expected = model.predict(INPUTS, converter=chainer_bspmm.concat_mols)
    numpy.testing.assert_allclose(predictions, expected, rtol=1e-4, atol=1e-5)


def test_a_converter_of_ones_own_is_left_alone():
    def convert(batch, device=None):
        return chainer_bspmm.concat_mols(batch, device)

    updater(regressor(), converter=convert).update()


def test_an_updater_of_ones_own_is_left_alone():
    class Mine(StandardUpdater):
        def update_core(self):
            atoms, adj, t = self.converter(self.get_iterator('main').next(), None)
            optimizer = self.get_optimizer('main')
            optimizer.update(optimizer.target, atoms, BatchedCSR.from_dense(adj), t)

    updater(regressor(), kind=Mine, converter=dense_concat_mols).update()


def test_an_updater_of_ones_own_that_sets_its_converter():
    class Mine(StandardUpdater):
        def __init__(self, *args):
            super().__init__(*args)
            self.converter = chainer_bspmm.concat_mols

    updater(regressor(), kind=Mine).update()


def test_an_updater_of_ones_own_without_a_converter():
    class Mine(StandardUpdater):
        pass

    assert message_of(updater(regressor(), kind=Mine).update) == refusal('Mine')


def test_an_evaluator_without_a_main_target():
    """A user's `evaluate` is called, although no target is named "main"."""

    class Mine(Evaluator):
        def evaluate(self):
            return {}

    Mine(SerialIterator(EXAMPLES, 4), {'generator': regressor()})()
