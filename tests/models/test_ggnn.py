"""GGNN against Chainer Chemistry's: packed, padded, tied and untied, masked, its state."""

import numpy
import pytest

import chainer
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout as DenseReadout
from chainer_chemistry.models import GGNN as DenseGGNN

from chainer_bspmm import concat_mols
from chainer_bspmm.models import GGNN
from chainer_bspmm.models import sparsify
from tests.models.relation_models import assert_features_stand_for_ids
from tests.models.relation_models import assert_half_precision
from tests.models.relation_models import assert_layouts_agree
from tests.models.relation_models import assert_masks_agree
from tests.models.relation_models import assert_same_constructor
from tests.models.relation_models import assert_snapshots_load_both_ways
from tests.models.relation_models import initialised
from tests.models.relation_models import labels_of_nodes
from tests.models.relation_models import molecules
from tests.models.relation_models import OPTIONS
from tests.models.relation_models import SIZES


def dense_model(seed=0, **options):
    numpy.random.seed(seed)
    return initialised(DenseGGNN(3, **options), options.get('n_edge_types', 4))


@pytest.mark.parametrize('name', OPTIONS)
def test_parity_in_both_layouts(device, name):
    examples = molecules(SIZES, n_relations=OPTIONS[name].get('n_edge_types', 4))
    assert_layouts_agree(dense_model(**OPTIONS[name]), device, examples)


@pytest.mark.parametrize('options', [{}, {'concat_hidden': True}])
def test_is_real_node(device, options):
    assert_masks_agree(dense_model(**options), device, molecules(SIZES))


def test_untied_recurrent_parameters_get_no_gradient():
    """As in Chainer Chemistry: each GRU is called once, without a state."""
    for model, converter in (
        (dense_model(weight_tying=False), dense_concat_mols),
        (sparsify(dense_model(weight_tying=False)), concat_mols),
    ):
        model.cleargrads()
        chainer.functions.sum(model(*converter(molecules(SIZES))[:2])).backward()
        without = {name for name, p in model.namedparams() if p.grad is None}
        assert without == {
            '/update_layers/%d/update_layer/%s/%s' % (i, u, p)
            for i in range(4)
            for u in ('U', 'U_r', 'U_z', 'W_r')
            for p in 'Wb'
        }


def test_calls_do_not_depend_on_the_calls_before(device):
    model = sparsify(dense_model())
    model.to_device(device)
    first = concat_mols(molecules(SIZES), device)[:2]
    second = concat_mols(molecules([3, 5]), device)[:2]
    expected = model(*first).array
    model(*second)  # another number of nodes than the state has
    assert (model(*first).array == expected).all()


def test_features_in_place_of_ids():
    assert_features_stand_for_ids(sparsify(dense_model()), molecules(SIZES))


@pytest.mark.parametrize(
    'options',
    [{}, {'weight_tying': False, 'concat_hidden': True}, {'hidden_channels': 5, 'n_edge_types': 3}],
)
def test_constructor_makes_upstreams_parameters(options):
    assert_same_constructor(
        GGNN,
        DenseGGNN,
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
    assert_snapshots_load_both_ways(lambda: DenseGGNN(3, **options), tmp_path, molecules(SIZES))


def test_nodes_are_few():
    """An update is two nodes."""
    model = sparsify(dense_model(n_update_layers=5))
    labels = labels_of_nodes(model, *concat_mols(molecules(SIZES))[:2])
    assert labels[1:11] == ['RelationLinear', 'GRUStep'] * 5
    assert labels[11:] == ['GatedLinear', 'SegmentSum']


@pytest.mark.parametrize('dtype', ['float16', 'mixed16'])
def test_half_precision(device, dtype):
    assert_half_precision(lambda: GGNN(3), device, dtype)


# --- what is refused ---


def test_mask_of_another_shape():
    atoms, adj, _ = concat_mols(molecules([3, 2]))
    with pytest.raises(ValueError, match=r'is_real_node: expected shape \(5,\) .*got \(2, 3\)'):
        GGNN(3)(atoms, adj, numpy.ones((2, 3), 'f'))


def test_other_number_of_relations():
    with pytest.raises(ValueError, match='adj: expected 4 relations, .* got .* 1 relation,'):
        GGNN(3)(*concat_mols(molecules([3], n_relations=1))[:2])


def test_dense_adjacency_is_refused_with_advice():
    atoms, adj, _ = molecules([3])[0]
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR .*concat_mols'):
        GGNN(3)(atoms[None], adj[None])


def test_readout_of_ones_own():
    dense = DenseGGNN(3)
    dense.readout_layers[0] = DenseReadout()
    with pytest.raises(ValueError, match=r'model.readout_layers\[0\]: expected .* got .*Gen'):
        sparsify(dense)
