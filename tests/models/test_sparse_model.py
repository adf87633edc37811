"""Layout that a model was trained with, and the warning about batches of another one."""

import pickle
import warnings

import numpy
import pytest

import chainer
from chainer_chemistry import models as dense
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout
from chainer_chemistry.models import MLP
from chainer_chemistry.models.prediction import GraphConvPredictor, Regressor

from chainer_bspmm import BatchedCSR, CSRConverter, densify, models, sparsify
from chainer_bspmm.models import layout_of
from tests.support import parity
from tests.support.devices import slow_unless
from tests.support.molecules import molecules

EXAMPLES = molecules((5, 9, 3))
PACKED, PADDED = CSRConverter('packed'), CSRConverter('padded')
MODELS = {name: getattr(models, name) for name in parity.DEFAULTS}


def regressor(kind=dense.RelGCN, **options):
    numpy.random.seed(0)  # with other weights, predictions near 0 would have larger relative errors
    return Regressor(
        GraphConvPredictor(kind(4, **options), MLP(3, 8)), chainer.functions.mean_squared_error
    )


def trained(model, converter, examples=EXAMPLES):
    chainer.optimizers.SGD(1e-3).setup(model).update(model, *converter(examples, -1))
    return model


def predicted(model, converter, examples=EXAMPLES):
    """Return predictions, and the warnings about the layout."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        values = model.predict([example[:2] for example in examples], converter=converter)
    return values, [warning for warning in caught if 'was trained on' in str(warning.message)]


@pytest.mark.parametrize(
    'name', [slow_unless(name in parity.QUICK_MODELS, name) for name in MODELS]
)
def test_every_model_remembers(name):
    case = parity.DEFAULTS[name]
    model = sparsify(case.make())
    chainer.optimizers.SGD().setup(model)
    converters = parity.converters_of(case)
    examples = parity.examples_of(case)
    for name, layout in (
        ('packed', 'packed'),
        ('padded', 'folded'),
        ('packed', 'packed'),
        ('folded', 'folded'),
    ):
        atoms, adj, *rest = converters[name](examples, -1)
        model(atoms, adj, *rest)
        assert model.trained_with == layout_of(model) == (layout, None)
    if not rest:
        atoms, adj = converters['packed'](examples, -1)
        model(atoms, adj=adj)
        assert model.trained_with == ('packed', None)


def folded(padded_to):
    atoms = numpy.concatenate([numpy.append(atoms, 0) for atoms, _, _ in EXAMPLES]).astype('i')
    return atoms, BatchedCSR.from_matrices([e[1] for e in EXAMPLES], 'folded', 0, padded_to)


def test_the_size_of_padding():
    model = sparsify(dense.RelGCN(4))
    chainer.optimizers.SGD().setup(model)
    model(*folded(29))
    assert layout_of(model) == ('folded', 29)
    with chainer.using_config('train', False), pytest.warns(UserWarning) as caught:
        model(*folded(29))
        model(*folded(None))
        model(*folded(17))
    assert [str(warning.message) for warning in caught] == [
        'RelGCN was trained on folded batches (padded_to=29) and predicts on folded ones '
        '(padded_to=None): its predictions may be far off; '
        "use CSRConverter(layout='folded', padded_to=29)"
    ]
    model(*folded(None))
    assert layout_of(model) == ('folded', None)
    with chainer.using_config('train', False), warnings.catch_warnings():
        warnings.simplefilter('error')
        model(*PADDED(EXAMPLES)[:2])


def test_calls_that_are_no_training():
    """A first call may just make parameters, and predictions may run in training mode."""
    model = sparsify(regressor())
    model(*PACKED(EXAMPLES))
    assert layout_of(model) is None
    trained(model, PACKED)
    with chainer.no_backprop_mode():
        model.predictor(*PADDED(EXAMPLES)[:2])
    assert layout_of(model) == ('packed', None)


def test_one_warning_for_each_model():
    model = trained(sparsify(regressor()), PACKED)
    assert not predicted(model, PACKED)[1]
    (warning,) = predicted(model, PADDED)[1]
    assert str(warning.message) == (
        'RelGCN was trained on packed batches and predicts on padded ones: its predictions may be '
        "far off; use CSRConverter(layout='packed')"
    )
    assert warning.category is UserWarning and warning.filename == __file__
    assert not predicted(model, PADDED)[1]
    again = pickle.loads(pickle.dumps(model))
    assert layout_of(again) == ('packed', None) and len(predicted(again, PADDED)[1]) == 1


def test_padded_batches_of_a_captured_step():
    """Padded batches of a captured step are rows in a buffer, but count as padded ones."""
    atoms, adj = PADDED(EXAMPLES)[:2]
    model = trained(sparsify(regressor()), PACKED).predictor
    with (
        chainer.using_config('train', False),
        pytest.warns(
            UserWarning,
            match='RelGCN was trained on packed batches and predicts on padded ones: its '
            r"predictions may be far off; use CSRConverter\(layout='packed'\)",
        ),
    ):
        model(atoms.ravel(), adj.replace(layout='unfolded'))


def test_training_goes_on_with_another_layout():
    model = trained(trained(sparsify(regressor()), PACKED), PADDED)
    assert layout_of(model) == ('folded', None)
    assert not predicted(model, PADDED)[1] and len(predicted(model, PACKED)[1]) == 1


@pytest.mark.parametrize(
    'options, n_warnings',
    [({}, 0), ({'use_batch_norm': True}, 1), ({'readout': GeneralReadout('max')}, 1)],
)
def test_rsgcn(options, n_warnings):
    """A sum without batch normalisation does not depend on padding."""
    examples = molecules((5, 9, 3), 'normalised')
    model = sparsify(regressor(dense.RSGCN, **options))
    trained(model, PACKED, examples)
    expected, none = predicted(model, PACKED, examples)
    values, caught = predicted(model, PADDED, examples)
    assert not none and len(caught) == n_warnings
    if not n_warnings:
        numpy.testing.assert_allclose(values, expected, rtol=1e-5)


def test_a_model_that_upstream_trained():
    """The optimizer's counts, which a pickle keeps, show that upstream's code trained the model."""
    model = trained(regressor(), dense_concat_mols)
    model = sparsify(pickle.loads(pickle.dumps(model)))
    assert layout_of(model) == ('folded', None)
    expected, caught = predicted(densify(model), dense_concat_mols)
    assert not caught
    values, caught = predicted(sparsify(model), PADDED)
    assert not caught
    numpy.testing.assert_allclose(values, expected, rtol=1e-5)
    assert len(predicted(model, PACKED)[1]) == 1


def test_nothing_is_known_of_a_new_model():
    """A new model has no layout, even if its optimizer is set up."""
    model = regressor()
    chainer.optimizers.Adam().setup(model)
    assert layout_of(sparsify(model)) is None


def test_nothing_is_known_of_a_file(tmp_path):
    model = trained(sparsify(regressor()), PACKED)
    chainer.serializers.save_npz(tmp_path / 'model.npz', model)
    fresh = sparsify(regressor())
    chainer.serializers.load_npz(tmp_path / 'model.npz', fresh)
    assert layout_of(fresh) is None
    assert not predicted(fresh, PACKED)[1] and not predicted(fresh, PADDED)[1]


def test_a_file_loaded_over_a_trained_model(tmp_path):
    model = trained(sparsify(regressor()), PACKED)
    chainer.serializers.save_npz(tmp_path / 'model.npz', model)
    assert layout_of(model) == ('packed', None)
    chainer.serializers.load_npz(tmp_path / 'model.npz', model)
    assert layout_of(model) is None
    assert not predicted(model, PACKED)[1] and not predicted(model, PADDED)[1]


def test_densify_leaves_it():
    model = trained(sparsify(regressor()), PACKED)
    densify(model)
    assert layout_of(model) is None
    assert not predicted(model, dense_concat_mols)[1]
    assert layout_of(sparsify(model)) == ('packed', None)


def test_a_new_training_as_upstreams_counts_even_if_it_is_shorter():
    model = trained(sparsify(regressor()), PACKED)
    model.predictor.graph_conv.embed.W.update_rule.t = 7
    trained(densify(model), dense_concat_mols)
    assert layout_of(sparsify(model)) == ('folded', None)


def test_training_goes_on_as_upstreams():
    model = densify(trained(sparsify(regressor()), PACKED))
    model = pickle.loads(pickle.dumps(model))
    for param in model.params():
        param.update_rule.t += 1  # like a step of the optimizer
    assert layout_of(sparsify(model)) == ('folded', None)


def test_several_models():
    packed, padded = trained(sparsify(regressor()), PACKED), trained(sparsify(regressor()), PADDED)
    assert layout_of(chainer.ChainList(packed, sparsify(regressor()))) == ('packed', None)
    assert layout_of(chainer.ChainList(packed, padded)) is None
    assert layout_of(chainer.links.Linear(3)) is None
