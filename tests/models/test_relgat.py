"""RelGAT against Chainer Chemistry's: packed, padded, both kinds of softmax, tied and untied."""

import copy

import numpy
import pytest

import chainer
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout as DenseReadout
from chainer_chemistry.links.update import relgat_update
from chainer_chemistry.links.update.relgat_update import RelGATUpdate as DenseRelGATUpdate
from chainer_chemistry.models import MLP
from chainer_chemistry.models import RelGAT as DenseRelGAT
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import set_up_predictor

from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm import sparsify
from chainer_bspmm.compat.module_view import ModuleView
from chainer_bspmm.links import RelGATUpdate
from chainer_bspmm.models import RelGAT
from tests.models.relation_models import assert_features_stand_for_ids
from tests.models.relation_models import assert_half_precision
from tests.models.relation_models import assert_layouts_agree
from tests.models.relation_models import assert_same_constructor
from tests.models.relation_models import assert_snapshots_load_both_ways
from tests.models.relation_models import initialised
from tests.models.relation_models import labels_of_nodes
from tests.models.relation_models import molecules
from tests.models.relation_models import randomised
from tests.models.relation_models import SIZES
from tests.models.swapping import check_one_training_step
from tests.models.swapping import check_swap_in_place_and_snapshots
from tests.support import relative_error

OPTIONS = {
    'defaults': {},
    'within': {'softmax_mode': 'within'},
    'side by side': {'concat_heads': True, 'n_update_layers': 3},
    'side by side, within': {'concat_heads': True, 'softmax_mode': 'within', 'n_heads': 2},
    'one head': {'n_heads': 1},
    'tied': {'weight_tying': True},
    'tied, one head side by side': {'weight_tying': True, 'concat_heads': True, 'n_heads': 1},
    'concatenated': {'concat_hidden': True, 'n_update_layers': 3},
    'concatenated, side by side': {'concat_hidden': True, 'concat_heads': True},
    'one update': {'n_update_layers': 1},
    'activated': {'activation': chainer.functions.tanh},
    'wide': {'hidden_channels': 33, 'n_update_layers': 2},
    'slope': {'negative_slope': 0.6},
    'two relations': {'n_edge_types': 2},
    'one relation': {'n_edge_types': 1},
    'atom types': {'n_atom_types': 25},
    'dropout of nothing': {'dropout_ratio': 0.0},
}


@pytest.fixture(autouse=True)
def upstream_runs_in_float64(monkeypatch):
    """It asks `where` to choose between float64 logits and a float32 constant, -10000."""

    def where(condition, x, y):
        return chainer.functions.where(condition, x, y.astype(x.dtype))

    monkeypatch.setattr(relgat_update, 'functions', ModuleView(chainer.functions, where=where))


def dense_model(seed=0, out_dim=3, **options):
    numpy.random.seed(seed)
    return initialised(DenseRelGAT(out_dim, **options), options.get('n_edge_types', 4))


@pytest.mark.parametrize('name', OPTIONS)
def test_parity_in_both_layouts(device, name):
    examples = molecules(SIZES, n_relations=OPTIONS[name].get('n_edge_types', 4))
    assert_layouts_agree(dense_model(**OPTIONS[name]), device, examples)


@pytest.mark.parametrize('mode', ['across', 'within'])
def test_bonds_of_real_molecules(device, mode):
    """Ones in place of values, and symmetric: the batch then has no values at all."""
    examples = [
        (atoms, (numpy.maximum(adj, adj.swapaxes(1, 2)) != 0).astype('f'), labels)
        for atoms, adj, labels in molecules(SIZES)
    ]
    assert concat_mols(examples)[1].data is None
    assert_layouts_agree(dense_model(softmax_mode=mode), device, examples)


def test_tied_updates_but_the_first_get_no_gradient():
    """As in Chainer Chemistry, which makes them all the same."""
    for model, converter in (
        (dense_model(weight_tying=True), dense_concat_mols),
        (sparsify(dense_model(weight_tying=True)), concat_mols),
    ):
        model.cleargrads()
        chainer.functions.sum(model(*converter(molecules(SIZES))[:2])).backward()
        without = {name for name, p in model.namedparams() if p.grad is None}
        assert without == {
            '/update_layers/%d/%s_layer/%s' % (i, layer, p)
            for i in (1, 2, 3)
            for layer in ('message', 'attention')
            for p in 'Wb'
        }


def test_prediction_does_not_depend_on_the_rest_of_the_batch(device):
    examples = molecules(SIZES)
    model = sparsify(dense_model())
    model.to_device(device)
    together = model(*concat_mols(examples, device)[:2]).array
    for example, row in zip(examples, together):
        single = model(*concat_mols([example], device)[:2]).array
        assert relative_error(row, single[0]) < 1e-5


def test_features_in_place_of_ids():
    assert_features_stand_for_ids(sparsify(dense_model()), molecules(SIZES))


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'concat_heads': True, 'concat_hidden': True},
        {'hidden_channels': 5, 'n_edge_types': 3},
        {'dropout_ratio': 0.3, 'negative_slope': 0.1, 'n_heads': 2, 'weight_tying': True},
    ],
)
def test_constructor_makes_upstreams_parameters(options):
    assert_same_constructor(
        RelGAT,
        DenseRelGAT,
        dict(options, out_dim=4),
        [
            'out_dim',
            'n_heads',
            'hidden_channels',
            'n_update_layers',
            'concat_hidden',
            'concat_heads',
            'weight_tying',
            'negative_slope',
            'n_edge_types',
            'dropout_ratio',
        ],
    )


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'concat_heads': True, 'concat_hidden': True},
        {'softmax_mode': 'within', 'weight_tying': True},
    ],
)
def test_snapshots_load_both_ways(tmp_path, options):
    assert_snapshots_load_both_ways(lambda: DenseRelGAT(3, **options), tmp_path, molecules(SIZES))


@pytest.mark.parametrize(
    'wrapper',
    [
        lambda: GraphConvPredictor(DenseRelGAT(4, hidden_channels=6), MLP(3, 8)),
        lambda: set_up_predictor('relgat', 6, 2, 3),
    ],
)
def test_swap_in_place(tmp_path, wrapper):
    check_swap_in_place_and_snapshots(tmp_path, wrapper, RelGAT, molecules(SIZES), randomised)


@pytest.mark.parametrize('mode', ['across', 'within'])
def test_update_link_in_a_chain_of_ones_own(mode):
    class Own(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.update = DenseRelGATUpdate(6, 4, softmax_mode=mode)

        def forward(self, h, adj):
            return chainer.functions.sum(self.update(h, adj), axis=1)

    examples, model = molecules([5, 9, 3]), Own()
    h = numpy.random.RandomState(0).uniform(size=(3, 9, 6)).astype('f')
    expected = model(h, dense_concat_mols(examples)[1]).array
    sparsify(model)
    assert type(model.update) is RelGATUpdate
    assert relative_error(model(h, CSRConverter('padded')(examples)[1]).array, expected) < 1e-5


@pytest.mark.parametrize('options', [{}, {'softmax_mode': 'within', 'concat_heads': True}])
def test_one_training_step_from_equal_state(device, options):
    check_one_training_step(device, dense_model(**options), molecules([10] * 12), rate=0.01)


def test_training_with_dropout_learns(device):
    numpy.random.seed(0)
    model = RelGAT(3, dropout_ratio=0.1)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(alpha=0.01).setup(model)
    *inputs, t = concat_mols(molecules(SIZES), device)
    losses = []
    for _ in range(40):
        optimizer.update(lambda: chainer.functions.mean_squared_error(model(*inputs), t))
        with chainer.using_config('train', False):
            losses.append(float(chainer.functions.mean_squared_error(model(*inputs), t).array))
    assert losses[-1] < losses[0] / 4


def test_nodes_are_few():
    """An update is two nodes."""
    model = sparsify(dense_model(n_update_layers=5))
    labels = labels_of_nodes(model, *concat_mols(molecules(SIZES))[:2])
    assert labels[1:11] == ['LinearFunction', 'RelationAttention'] * 5
    assert labels[11:] == ['GatedLinear', 'SegmentSum']


@pytest.mark.parametrize('dtype', ['float16', 'mixed16'])
def test_half_precision(device, dtype):
    assert_half_precision(lambda: RelGAT(3), device, dtype)


# --- what is refused ---


def test_tied_update_that_cannot_take_its_own_result():
    with pytest.raises(ValueError, match='weight_tying: expected False .* takes 16 .* gives 48'):
        RelGAT(3, weight_tying=True, concat_heads=True)
    with pytest.raises(ValueError, match='weight_tying: expected False'):
        sparsify(DenseRelGAT(3, weight_tying=True, concat_heads=True))
    RelGAT(3, weight_tying=True, concat_heads=True, n_update_layers=1)


def test_unknown_mode():
    with pytest.raises(ValueError, match="softmax_mode: expected .*'across', 'within'"):
        RelGAT(3, softmax_mode='beside')


def test_other_number_of_relations():
    with pytest.raises(ValueError, match='adj: expected 4 relations, .* got .* 2 relations'):
        RelGAT(3)(*concat_mols(molecules([3], n_relations=2))[:2])


def test_dense_adjacency_is_refused_with_advice():
    atoms, adj, _ = molecules([3])[0]
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR .*concat_mols'):
        RelGAT(3)(atoms[None], adj[None])


def test_readout_of_ones_own():
    dense = copy.deepcopy(DenseRelGAT(3))
    dense.readout_layers[0] = DenseReadout()
    with pytest.raises(ValueError, match=r'model.readout_layers\[0\]: expected .* got .*Gen'):
        sparsify(dense)
