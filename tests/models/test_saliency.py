"""Chainer Chemistry's saliency calculators give swapped models the bits of dense ones."""

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
from chainer_chemistry.models.prediction import Regressor, set_up_predictor
from chainer_chemistry.saliency.calculator.gradient_calculator import GradientCalculator
from chainer_chemistry.saliency.calculator.integrated_gradients_calculator import (
    IntegratedGradientsCalculator,
)
from chainer_chemistry.saliency.calculator.occlusion_calculator import OcclusionCalculator

from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.models import layout_of
from chainer_bspmm.sparse.check import LAYOUTS
from tests.support import parity
from tests.support.cases import pairs
from tests.support.devices import slow_unless
from tests.support.molecules import molecules as molecules_of_sizes
from tests.support.training import molecules

RELATIONS = {'ggnn': 4}
PACKED = chainer_bspmm.CSRConverter('packed')
CALCULATORS = [
    (GradientCalculator, {}),
    (GradientCalculator, {'multiply_target': True}),
    (IntegratedGradientsCalculator, {'steps': 4}),
    (OcclusionCalculator, {'slide_axis': 1}),
    (OcclusionCalculator, {'slide_axis': (1, 2)}),
]


def examples(method, n=7):
    return [example[:2] for example in molecules(n, RELATIONS.get(method, 1))]


def pair(method, data=None, n=7):
    """Return data, upstream's model, and a swapped copy of it."""
    data = examples(method, n) if data is None else data
    numpy.random.seed(0)
    model = Regressor(set_up_predictor(method, 6, 2, 1), device=-1)
    with chainer.using_config('train', False):
        model.predictor(*concat_mols(data))
    return data, model, chainer_bspmm.sparsify(copy.deepcopy(model))


def embedding(model):
    return model.predictor.graph_conv.embed


def first_embedding(model):
    return next(link for name, link in sorted(model.namedlinks()) if name.endswith('/embed'))


def score(model):
    """Return the function that occlusion needs: from a batch to an array (n_graphs, 1)."""
    if hasattr(model, 'predictor'):
        return model.predictor
    return lambda *batch: chainer.functions.sum(model(*batch), axis=1, keepdims=True)


def compute(
    kind, model, data, converter, batchsize=4, link=embedding, options=None, timing='post', **more
):
    """Return a calculator and its result; ``link(model)`` is the link that it watches."""
    hook = VariableMonitorLinkHook(link(model), timing=timing)
    calculator = kind(model, hook, eval_fun=score(model), device=-1, **options or {})
    more.setdefault('show_progress', False)
    return calculator, calculator.compute(data, converter=converter, batchsize=batchsize, **more)


def alone(kind, model, data, **more):
    """Return the saliency that a calculator computes for each molecule by itself."""
    return [compute(kind, model, [example], concat_mols, 1, **more)[1][0] for example in data]


def assert_as_alone(found, expected):
    """Compare (samples, molecules, atoms, ...) with a list of (1, atoms, ...), padded with 0."""
    assert found.shape[:3] == (1, len(expected), max(values.shape[1] for values in expected))
    for values, (right,) in zip(found[0], expected):
        numpy.testing.assert_array_equal(values[: len(right)], right)
        assert not values[len(right) :].any()


# Occlusion runs a forward pass for each window, so only one model has quick tests of everything.
# The other models have quick tests of the gradient, in one layout.
@pytest.mark.parametrize(
    'name, kind, options, layout',
    [
        slow_unless(
            name == 'GGNN'
            or (name in parity.QUICK_MODELS and kind is GradientCalculator and layout == 'folded'),
            name,
            kind,
            options,
            layout,
            id='%s, %s, %s' % (name, kind.__name__, layout),
        )
        for name in parity.DEFAULTS
        for kind, options in CALCULATORS[1:4:2]
        for layout in LAYOUTS
    ],
)
def test_upstream_s_numbers(name, kind, options, layout):
    case = parity.DEFAULTS[name]
    data = parity.examples_of(case)
    upstream = parity.initialised(case.make, data)
    ours = chainer_bspmm.sparsify(copy.deepcopy(upstream))
    kinds = [type(link) for link in ours.links()]

    def of_batch(model, converter):
        _, saliency = compute(
            kind, model, data, converter, len(data), link=first_embedding, options=options
        )
        return saliency

    found = of_batch(ours, parity.converters_of(case)[layout])
    if layout == 'packed':
        expected = alone(kind, upstream, data, link=first_embedding, options=options)
        assert_as_alone(found, expected)
    else:
        expected = of_batch(upstream, concat_mols)
        numpy.testing.assert_array_equal(found, expected)
    assert [type(link) for link in ours.links()] == kinds


LINKS = {
    'linear': ('gin', lambda model: model.graph_conv.update_layers[0].graph_mlp.layers[0]),
    'gru': ('ggnn', lambda model: model.graph_conv.update_layers[0].update_layer),
    'of_molecules': ('ggnn', lambda model: model.mlp.layers[0]),
}


@pytest.mark.parametrize('method, link', LINKS.values(), ids=LINKS)
def test_any_link_in_batches_of_other_sizes(method, link):
    data, upstream, ours = pair(method, n=9)

    def of_model(model):
        return link(model.predictor)

    _, expected = compute(GradientCalculator, upstream, data, concat_mols, link=of_model)
    _, found = compute(GradientCalculator, ours, data, chainer_bspmm.concat_mols, link=of_model)
    numpy.testing.assert_array_equal(found, expected)


def test_links_that_upstream_calls_without_hooks():
    data, upstream, ours = pair('ggnn')
    graph_conv = ours.predictor.graph_conv

    def of_link(link):
        _, found = compute(
            GradientCalculator, ours, data, chainer_bspmm.concat_mols, link=lambda model: link
        )
        return found

    of_update = of_link(graph_conv.update_layers[0])
    assert of_update.shape[1:3] == (7, max(len(atoms) for atoms, _ in data)) and of_update.any()
    _, expected = compute(
        GradientCalculator,
        upstream,
        data,
        concat_mols,
        link=lambda model: model.predictor.mlp.layers[0],
        timing='pre',  # watches the output of the readout
    )
    numpy.testing.assert_array_equal(of_link(graph_conv.readout_layers[0]), expected)


def test_sizes_that_do_not_depend_on_the_batch():
    """Molecules are padded to `padded_to`, even beside larger ones, which keep their size."""
    data, upstream, ours = pair('gin', n=9)
    n = int(numpy.median([len(atoms) for atoms, _ in data]))
    converter = chainer_bspmm.CSRConverter(padded_to=n)
    _, found = compute(GradientCalculator, ours, data, converter, len(data))
    padded = [parity.padded_example(parity.DEFAULTS['GIN'], example, n) for example in data]
    assert_as_alone(found, alone(GradientCalculator, upstream, padded))


def test_a_sparse_data_set():
    data, upstream, ours = pair('rsgcn')
    _, found = compute(GradientCalculator, ours, to_sparse(data), chainer_bspmm.concat_mols)
    _, expected = compute(GradientCalculator, upstream, data, concat_mols)
    numpy.testing.assert_array_equal(found, expected)


def test_functions_around_the_calculation():
    data, _, ours = pair('gin')
    _, found = compute(
        GradientCalculator,
        ours,
        data,
        chainer_bspmm.concat_mols,
        preprocess_fn=lambda atoms, adj: (atoms, adj),
        postprocess_fn=lambda saliency: 2 * saliency,
    )
    _, plain = compute(GradientCalculator, ours, data, chainer_bspmm.concat_mols)
    numpy.testing.assert_array_equal(found, 2 * plain)


def test_inputs_that_are_kept():
    data, _, ours = pair('gin')
    calculator, found = compute(
        GradientCalculator, ours, data, chainer_bspmm.concat_mols, retain_inputs=True
    )
    atoms, adj = concat_mols(data)
    numpy.testing.assert_array_equal(calculator.inputs[0], atoms)
    numpy.testing.assert_array_equal(calculator.inputs[1], adj)
    total = calculator.aggregate(found, ch_axis=3)
    assert total.shape == atoms.shape


# Some batches of size 1 and 2 have only molecules of one atom.
ONE_ATOM = {
    name: [example[:2] for example in molecules_of_sizes(sizes, 'bonds')]
    for name, sizes in {'alone': (1,), 'last': (4, 3, 1), 'first': (1, 1, 2)}.items()
}


@pytest.mark.parametrize(
    'calculator, layout, name',
    pairs(CALCULATORS[::2], ['packed', 'folded', 'padded'], list(ONE_ATOM)),
)
def test_batches_of_one_atom(calculator, layout, name):
    """Batches of single atoms have as many rows as molecules."""
    kind, options = calculator
    data, upstream, ours = pair('ggnn', ONE_ATOM[name])
    converter = chainer_bspmm.CSRConverter(layout)
    for batchsize in 1, 2:
        _, found = compute(kind, ours, data, converter, batchsize, options=options)
        n = 1 if layout == 'packed' else batchsize
        _, expected = compute(kind, upstream, data, concat_mols, n, options=options)
        numpy.testing.assert_array_equal(found, expected)


def test_windows_of_several_atoms_are_those_of_the_molecule():
    data, upstream, ours = pair('ggnn')
    options = {'slide_axis': 1, 'size': 2}
    _, found = compute(OcclusionCalculator, ours, data, PACKED, len(data), options=options)
    assert_as_alone(found, alone(OcclusionCalculator, upstream, data, options=options))


def test_dropout_is_no_training():
    data, _, ours = pair('gin')
    optimizer = chainer.optimizers.SGD().setup(ours)
    batch = chainer_bspmm.concat_mols(data)
    optimizer.update(ours, *batch, numpy.zeros((len(data), 1), 'f'))
    assert layout_of(ours.predictor) == ('folded', None)
    compute(GradientCalculator, ours, data, PACKED, train=True, M=2)
    assert layout_of(ours.predictor) == ('folded', None)


@pytest.mark.parametrize(
    'layout, name, column',
    pairs(
        ['packed', 'folded', 'padded', 'padded_to'],
        [*ONE_ATOM, 'several'],
        [None, 'super', 'labels'],
    ),
)
def test_predictions_keep_inputs(layout, name, column):
    """Inputs are kept in upstream's form, padded to the largest molecule or further."""
    data = examples('ggnn') if name == 'several' else ONE_ATOM[name]
    case = parity.DEFAULTS['GGNN']._replace(column=column)
    columns = {
        None: lambda atoms: (),
        'super': lambda atoms: (numpy.linspace(0, atoms[0], 3, dtype='f'),),
        'labels': lambda atoms: (atoms[::-1] + 1,),
    }
    data = [(atoms, adj, *columns[column](atoms)) for atoms, adj in data]
    options = {'padded_to': 15} if layout == 'padded_to' else {'layout': layout}
    converter = chainer_bspmm.CSRConverter(**options, n_node_columns=int(column == 'labels'))
    model = Regressor(ZeroForEach(), device=-1)
    model.predict(data, batchsize=2, converter=converter, retain_inputs=True)
    if layout == 'padded_to':
        data = [parity.padded_example(case, example, 15) for example in data]
    for array, right in zip(model.inputs, concat_mols(data), strict=True):
        numpy.testing.assert_array_equal(array, right)


class ZeroForEach(chainer.Chain):
    def forward(self, atoms, adj, *columns):
        return chainer.Variable(numpy.zeros((adj.n_graphs, 1), 'f'))


def test_an_error_leaves_the_model_as_it_was():
    data, _, ours = pair('ggnn')
    kinds = [type(link) for link in ours.links()]
    with pytest.raises(TypeError, match='nothing'):
        compute(
            GradientCalculator,
            ours,
            data,
            chainer_bspmm.concat_mols,
            preprocess_fn=lambda atoms, adj: atoms.reshape(nothing=True),
        )
    assert [type(link) for link in ours.links()] == kinds
    assert not chainer._get_link_hooks()


def test_labels_may_be_left_out_by_the_converter():
    data, upstream, ours = pair('ggnn')
    labelled = [(*example, numpy.int32(i)) for i, example in enumerate(data)]

    def without_labels(batch, device):
        return PACKED(batch, device)[:-1]

    _, found = compute(GradientCalculator, ours, labelled, without_labels)
    assert_as_alone(found, alone(GradientCalculator, upstream, data))


def test_models_of_edge_lists_have_no_dense_form():
    model = chainer_bspmm.models.GINSparse(2)
    calculator = GradientCalculator(model, device=-1)
    with pytest.raises(
        ValueError,
        match='model: got a GINSparse, whose dense form takes lists of edges, which saliency '
        'calculators cannot pass',
    ):
        calculator.compute(examples('gin'), converter=PACKED, show_progress=False)
