"""Chainer Chemistry's saliency calculators on swapped models, against its dense models."""

import copy

import chainer_bspmm
import chainer
import numpy
import pytest

try:
    import rdkit.Chem.Draw  # NOQA: F401  (upstream's package of saliency imports it)
except ImportError as error:
    pytest.skip(f'RDKit cannot draw here: {error}', allow_module_level=True)

from chainer_chemistry.dataset.converters import concat_mols
from chainer_chemistry.link_hooks import VariableMonitorLinkHook
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
from chainer_chemistry.saliency.calculator.calculator_utils import GaussianNoiseSampler
from chainer_chemistry.saliency.calculator.gradient_calculator import GradientCalculator
from chainer_chemistry.saliency.calculator.integrated_gradients_calculator import (
    IntegratedGradientsCalculator,
)
from chainer_chemistry.saliency.calculator.occlusion_calculator import OcclusionCalculator

from chainer_bspmm.models import layout_of
from tests.support.molecules import molecules as molecules_of_sizes
from tests.support.training import molecules

METHODS = 'nfp', 'ggnn', 'rsgcn', 'relgcn', 'gin', 'relgat', 'gnnfilm'
RELATIONS = {'ggnn': 4, 'relgcn': 4, 'relgat': 4, 'gnnfilm': 5}
CALCULATORS = [
    (GradientCalculator, {}),
    (GradientCalculator, {'multiply_target': True}),
    (IntegratedGradientsCalculator, {'steps': 4}),
    (OcclusionCalculator, {'slide_axis': 1}),
    (OcclusionCalculator, {'slide_axis': (1, 2)}),
]
BOUND = {OcclusionCalculator: 1e-4}  # a difference of outputs


def examples(method, n=7):
    return [example[:2] for example in molecules(n, RELATIONS.get(method, 1))]


def pair(method, data):
    """Return upstream's model and the same one, swapped."""
    numpy.random.seed(0)
    model = Regressor(set_up_predictor(method, 6, 2, 1), device=-1)
    with chainer.using_config('train', False):
        model.predictor(*concat_mols(data))
    return model, chainer_bspmm.sparsify(copy.deepcopy(model))


def embedding(model):
    return model.predictor.graph_conv.embed


def compute(kind, model, data, converter, batchsize=4, link=embedding, options=None, **more):
    hook = VariableMonitorLinkHook(link(model), timing='post')
    calculator = kind(
        model, target_extractor=hook, eval_fun=model.predictor, device=-1, **options or {}
    )
    more.setdefault('show_progress', False)
    return calculator, calculator.compute(data, converter=converter, batchsize=batchsize, **more)


def errors(found, expected):
    return abs(found - expected).max(initial=0) / max(abs(expected).max(initial=0), 1e-6)


@pytest.mark.parametrize('kind, options', CALCULATORS)
@pytest.mark.parametrize('method', METHODS)
def test_each_molecule_as_alone(method, kind, options):
    data = examples(method)
    upstream, ours = pair(method, data)
    converter = chainer_bspmm.CSRConverter('packed')
    _, found = compute(kind, ours, data, converter, options=options)
    largest = max(len(atoms) for atoms, _ in data)
    assert found.shape[:3] == (1, len(data), largest)
    for values, example in zip(found[0], data):
        _, alone = compute(kind, upstream, [example], concat_mols, options=options)
        n = len(example[0])
        assert errors(values[:n], alone[0, 0]) < BOUND.get(kind, 1e-5)
        assert not values[n:].any()


@pytest.mark.parametrize('layout', ('folded', 'padded'))
@pytest.mark.parametrize('kind, options', CALCULATORS)
@pytest.mark.parametrize('method', METHODS)
def test_batches_as_upstream_s(method, kind, options, layout):
    """Phantom atoms included; but a window hides only atoms where they are folded."""
    data = examples(method)
    upstream, ours = pair(method, data)
    converter = chainer_bspmm.CSRConverter(layout)
    (_, found), (_, expected) = (
        compute(kind, model, data, converter, len(data), options=options)
        for model, converter in ((ours, converter), (upstream, concat_mols))
    )
    assert found.shape == expected.shape
    if layout == 'folded' and kind is OcclusionCalculator:
        for values, right, (atoms, _) in zip(found[0], expected[0], data):
            assert not values[len(atoms) :].any()
            right[len(atoms) :] = 0
    assert errors(found, expected) < BOUND.get(kind, 1e-5)


@pytest.mark.parametrize('layout', ('packed', 'folded'))
def test_a_layer_inside_and_batches_of_other_sizes(layout):
    data = examples('gin', 9)
    upstream, ours = pair('gin', data)

    def link(model):
        return model.predictor.graph_conv.update_layers[0].graph_mlp.layers[0]

    converter = chainer_bspmm.CSRConverter(
        layout, **{'padded_to': 12} if layout == 'folded' else {}
    )
    _, found = compute(GradientCalculator, ours, data, converter, 4, link)
    if layout == 'packed':
        for values, example in zip(found[0], data):
            # Upstream's GraphLinear has a row for each atom, too.
            _, alone = compute(GradientCalculator, upstream, [example], concat_mols, 1, link)
            assert errors(values[: len(example[0])], alone[0]) < 1e-5
    else:
        assert found.shape[:3] == (1, 9, 12)


def test_noise_is_sampled_for_each_molecule():
    data = examples('rsgcn')
    _, ours = pair('rsgcn', data)
    seen = []

    class Sampler(GaussianNoiseSampler):
        def sample(self, array):
            seen.append(array.shape)
            return super().sample(array)

    numpy.random.seed(0)
    _, found = compute(
        GradientCalculator, ours, data, chainer_bspmm.concat_mols, M=3, noise_sampler=Sampler()
    )
    assert found.shape[0] == 3 and (found[0] != found[1]).any()
    assert seen == 3 * [(1, len(atoms), 6) for atoms, _ in data]


def test_functions_before_and_after():
    data = examples('gin')
    _, ours = pair('gin', data)
    calculator, found = compute(
        GradientCalculator,
        ours,
        data,
        chainer_bspmm.concat_mols,
        retain_inputs=True,
        preprocess_fn=lambda atoms, adj: (atoms, adj),
        postprocess_fn=lambda saliency: 2 * saliency,
    )
    _, plain = compute(GradientCalculator, ours, data, chainer_bspmm.concat_mols)
    numpy.testing.assert_array_equal(found, 2 * plain)
    atoms, adj = concat_mols(data)
    numpy.testing.assert_array_equal(calculator.inputs[0], atoms)
    numpy.testing.assert_array_equal(calculator.inputs[1], adj)
    total = calculator.aggregate(found, ch_axis=3)
    assert total.shape == atoms.shape


@pytest.mark.parametrize('layout', ('packed', 'folded', 'padded', 'upstream'))
@pytest.mark.parametrize('method', ('ggnn', 'rsgcn'))
def test_predictions_keep_inputs(method, layout):
    data = examples(method)
    upstream, ours = pair(method, data)
    if layout == 'upstream':
        upstream.predict(data, converter=concat_mols, retain_inputs=True)
        found = upstream.inputs
    else:
        converter = chainer_bspmm.CSRConverter(layout)
        ours.predict(data, batchsize=3, converter=converter, retain_inputs=True)
        found = ours.inputs
    for array, expected in zip(found, concat_mols(data), strict=True):
        numpy.testing.assert_array_equal(array, expected)
    ours.predict(data, converter=chainer_bspmm.concat_mols)


# Of batches of 1 and of 2 some have molecules of one atom only.
ONE_ATOM = [
    [example[:2] for example in molecules_of_sizes(sizes, 'bonds')]
    for sizes in ((1,), (4, 3, 1), (1, 1, 2))
]


@pytest.mark.parametrize('data', ONE_ATOM, ids=('alone', 'last', 'first'))
@pytest.mark.parametrize('layout', ('packed', 'folded', 'padded'))
@pytest.mark.parametrize('kind, options', CALCULATORS[2:4])
def test_batches_of_one_atom(kind, options, layout, data):
    """They have as many rows as molecules."""
    upstream, ours = pair('ggnn', data)
    converter = chainer_bspmm.CSRConverter(layout)
    for batchsize in 1, 2:
        _, found = compute(kind, ours, data, converter, batchsize, options=options)
        _, expected = compute(
            kind,
            upstream,
            data,
            concat_mols,
            1 if layout == 'packed' else batchsize,
            options=options,
        )
        assert found.shape == expected.shape
        if layout == 'folded':  # a window hides only atoms
            for values, right, (atoms, _) in zip(found[0], expected[0], data):
                values[len(atoms) :] = right[len(atoms) :] = 0
        assert errors(found, expected) < BOUND.get(kind, 1e-5)


@pytest.mark.parametrize('data', ONE_ATOM, ids=('alone', 'last', 'first'))
def test_a_layer_of_molecules(data):
    def link(model):
        return model.predictor.mlp.layers[0]

    upstream, ours = pair('ggnn', data)
    packed = chainer_bspmm.CSRConverter('packed')
    _, found = compute(GradientCalculator, ours, data, packed, 1, link)
    _, expected = compute(GradientCalculator, upstream, data, concat_mols, 1, link)
    assert found.shape == expected.shape and errors(found, expected) < 1e-5


def test_windows_of_several_atoms_are_those_of_the_molecule():
    """Upstream's fail along the atoms."""
    data = examples('ggnn')
    _, ours = pair('ggnn', data)
    packed = chainer_bspmm.CSRConverter('packed')
    options = {'slide_axis': 1, 'size': 2}
    _, found = compute(OcclusionCalculator, ours, data, packed, len(data), options=options)
    for values, example in zip(found[0], data):
        _, alone = compute(OcclusionCalculator, ours, [example], packed, options=options)
        assert errors(values[: len(example[0])], alone[0, 0]) < 1e-4
        assert not values[len(example[0]) :].any()


def test_dropout_is_no_training():
    data = examples('gin')
    _, ours = pair('gin', data)
    optimizer = chainer.optimizers.SGD().setup(ours)
    batch = chainer_bspmm.concat_mols(data)
    optimizer.update(ours, *batch, numpy.zeros((len(data), 1), 'f'))
    assert layout_of(ours.predictor) == ('folded', None)
    packed = chainer_bspmm.CSRConverter('packed')
    compute(GradientCalculator, ours, data, packed, train=True, M=2)
    assert layout_of(ours.predictor) == ('folded', None)


@pytest.mark.parametrize('column', ('none', 'super', 'labels'))
@pytest.mark.parametrize('data', ONE_ATOM, ids=('alone', 'last', 'first'))
@pytest.mark.parametrize('layout', ('packed', 'folded', 'padded', 'padded_to'))
def test_inputs_of_batches_of_one_atom(layout, data, column):
    rng = numpy.random.RandomState(0)
    columns = {
        'none': lambda atoms: (),
        'super': lambda atoms: (rng.uniform(size=3).astype('f'),),
        'labels': lambda atoms: (rng.randint(1, 9, len(atoms)).astype('i'),),
    }
    data = [(atoms, adj, *columns[column](atoms)) for atoms, adj in data]
    options = {'n_node_columns': 1} if column == 'labels' else {}
    options.update({'padded_to': 5} if layout == 'padded_to' else {'layout': layout})
    model = Regressor(ZeroForEach(), device=-1)
    model.predict(
        data, batchsize=2, converter=chainer_bspmm.CSRConverter(**options), retain_inputs=True
    )
    expected = list(concat_mols(data))
    if layout == 'padded_to':
        room = (0, 5 - expected[0].shape[1])
        expected[0] = numpy.pad(expected[0], [(0, 0), room])
        expected[1] = numpy.pad(expected[1], [(0, 0), (0, 0), room, room])
        if column == 'labels':
            expected[2] = numpy.pad(expected[2], [(0, 0), room])
    for array, right in zip(model.inputs, expected, strict=True):
        numpy.testing.assert_array_equal(array, right)


class ZeroForEach(chainer.Chain):
    def forward(self, atoms, adj, *columns):
        return chainer.Variable(numpy.zeros((adj.n_graphs, 1), 'f'))


def test_a_link_that_is_not_called():
    data = examples('ggnn')
    _, ours = pair('ggnn', data)
    with pytest.raises(ValueError, match='target_extractor: GRU is part of a larger operation'):
        compute(
            GradientCalculator,
            ours,
            data,
            chainer_bspmm.concat_mols,
            link=lambda model: model.predictor.graph_conv.update_layers[0].update_layer,
        )
    assert not chainer._get_link_hooks()
