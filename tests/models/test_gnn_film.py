"""GNNFiLM against Chainer Chemistry's: packed, padded, tied and untied, masked."""

import numpy
import pytest

from chainer_chemistry.links import GeneralReadout as DenseReadout
from chainer_chemistry.models import MLP
from chainer_chemistry.models.gnn_film import GNNFiLM as DenseGNNFiLM
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import set_up_predictor

from chainer_bspmm import concat_mols
from chainer_bspmm import sparsify
from chainer_bspmm.models import GNNFiLM
from tests.models import relation_models
from tests.models.relation_models import assert_features_stand_for_ids
from tests.models.relation_models import assert_half_precision
from tests.models.relation_models import assert_layouts_agree
from tests.models.relation_models import assert_masks_agree
from tests.models.relation_models import assert_same_constructor
from tests.models.relation_models import assert_snapshots_load_both_ways
from tests.models.relation_models import initialised
from tests.models.relation_models import labels_of_nodes
from tests.models.relation_models import OPTIONS
from tests.models.relation_models import randomised
from tests.models.relation_models import SIZES
from tests.models.swapping import check_one_training_step
from tests.models.swapping import check_swap_in_place_and_snapshots


def molecules(sizes, seed=0, n_relations=5):
    """Return molecules with a last channel of self-loops, as upstream's preprocessor makes it."""
    examples = relation_models.molecules(sizes, seed, n_relations)
    for atoms, adj, _ in examples:
        adj[-1] = numpy.eye(len(atoms)) * (1 if n_relations > 1 else 0.7) + (
            0 if n_relations > 1 else adj[-1]
        )
    return examples


def dense_model(seed=0, out_dim=3, **options):
    numpy.random.seed(seed)
    return randomised(initialised(DenseGNNFiLM(out_dim, **options), options.get('n_edge_types', 5)))


@pytest.mark.parametrize('name', OPTIONS)
def test_parity_in_both_layouts(device, name):
    examples = molecules(SIZES, n_relations=OPTIONS[name].get('n_edge_types', 5))
    assert_layouts_agree(dense_model(**OPTIONS[name]), device, examples)


def test_bonds_of_real_molecules(device):
    """Ones in place of values, and symmetric: the batch then has no values at all."""
    examples = [
        (atoms, (numpy.maximum(adj, adj.swapaxes(1, 2)) != 0).astype('f'), labels)
        for atoms, adj, labels in molecules(SIZES)
    ]
    assert concat_mols(examples)[1].data is None
    assert_layouts_agree(dense_model(), device, examples)


@pytest.mark.parametrize('options', [{}, {'concat_hidden': True}])
def test_is_real_node(device, options):
    assert_masks_agree(dense_model(**options), device, molecules(SIZES))


def test_features_in_place_of_ids():
    assert_features_stand_for_ids(sparsify(dense_model()), molecules(SIZES))


@pytest.mark.parametrize(
    'options',
    [{}, {'weight_tying': False, 'concat_hidden': True}, {'hidden_channels': 5, 'n_edge_types': 3}],
)
def test_constructor_makes_upstreams_parameters(options):
    assert_same_constructor(
        GNNFiLM,
        DenseGNNFiLM,
        dict(options, out_dim=4),
        [
            'out_dim',
            'hidden_channels',
            'n_update_layers',
            'n_edge_types',
            'activation',
            'concat_hidden',
            'weight_tying',
        ],
    )


@pytest.mark.parametrize('options', [{}, {'weight_tying': False, 'concat_hidden': True}])
def test_snapshots_load_both_ways(tmp_path, options):
    assert_snapshots_load_both_ways(
        lambda: DenseGNNFiLM(3, **options),
        tmp_path,
        molecules(SIZES),
        lambda model: randomised(initialised(model, 5)),
    )


@pytest.mark.parametrize(
    'wrapper',
    [
        lambda: GraphConvPredictor(DenseGNNFiLM(4, hidden_channels=6), MLP(3, 8)),
        lambda: set_up_predictor('gnnfilm', 6, 2, 3),
    ],
)
def test_swap_in_place(tmp_path, wrapper):
    check_swap_in_place_and_snapshots(tmp_path, wrapper, GNNFiLM, molecules(SIZES), randomised)


def test_one_training_step_from_equal_state(device):
    check_one_training_step(device, dense_model(), molecules([10] * 12), rate=0.001)


def test_nodes_are_few():
    """An update is four nodes."""
    model = sparsify(dense_model(n_update_layers=5))
    labels = labels_of_nodes(model, *concat_mols(molecules(SIZES))[:2])
    assert labels[1:21] == ['EdgeFiLM', 'ReLU', 'BatchedSpMM', 'LayerNorm'] * 5
    assert labels[21:] == ['GatedLinear', 'SegmentSum']


@pytest.mark.parametrize('dtype', ['float16', 'mixed16'])
def test_half_precision(device, dtype):
    # The molecules of this test have four relations.
    assert_half_precision(lambda: GNNFiLM(3, n_edge_types=4), device, dtype)


# --- what is refused ---


def test_mask_of_another_shape():
    atoms, adj, _ = concat_mols(molecules([3, 2]))
    with pytest.raises(ValueError, match=r'is_real_node: expected shape \(5,\) .*got \(2, 3\)'):
        GNNFiLM(3)(atoms, adj, numpy.ones((2, 3), 'f'))


def test_other_number_of_relations():
    with pytest.raises(ValueError, match='adj: expected 5 relations, .* got .* 4 relations'):
        GNNFiLM(3)(*concat_mols(molecules([3], n_relations=4))[:2])


def test_dense_adjacency_is_refused_with_advice():
    atoms, adj, _ = molecules([3])[0]
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR .*concat_mols'):
        GNNFiLM(3)(atoms[None], adj[None])


def test_readout_of_ones_own():
    dense = DenseGNNFiLM(3)
    dense.readout_layers[0] = DenseReadout()
    with pytest.raises(ValueError, match=r'model.readout_layers\[0\]: expected .* got .*Gen'):
        sparsify(dense)
