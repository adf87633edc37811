"""RelGCN against Chainer Chemistry's: packed, padded, the scaled adjacency."""

import copy

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout as DenseReadout
from chainer_chemistry.models import RelGCN as DenseRelGCN
from chainer_chemistry.models.relgcn import rescale_adj

from chainer_bspmm import BatchedCSR
from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm.models import RelGCN
from chainer_bspmm.models import sparsify
from chainer_bspmm.backend.scale_adj import scale_adj
from tests.models.relation_models import assert_half_precision
from tests.models.relation_models import assert_layouts_agree
from tests.models.relation_models import assert_same_constructor
from tests.models.relation_models import assert_snapshots_load_both_ways
from tests.models.relation_models import initialised
from tests.models.relation_models import labels_of_nodes
from tests.models.relation_models import molecules
from tests.models.relation_models import outcome
from tests.models.relation_models import SIZES
from tests.support import relative_error

OPTIONS = {
    'defaults': {},
    'scaled': {'scale_adj': True},
    'wide to narrow and back': {'hidden_channels': [7, 33, 5, 5, 12], 'out_dim': 3},
    'number of layers': {'hidden_channels': 6, 'n_update_layers': 3, 'scale_adj': True},
    'no convolution': {'hidden_channels': 6, 'n_update_layers': 1},
    'one relation': {'n_edge_types': 1, 'scale_adj': True},
    'two relations': {'n_edge_types': 2},
    'atom types': {'n_atom_types': 25},
}


def dense_model(seed=0, **options):
    numpy.random.seed(seed)
    return initialised(DenseRelGCN(**options), options.get('n_edge_types', 4))


def scaled_before(model, batches):
    """Chainer Chemistry's own scaling refuses float64: do it ahead, in NumPy."""
    if not model.scale_adj:
        return model, batches
    model.scale_adj = False
    scaled = []
    for x, adj in batches:
        degree = adj.sum(axis=(1, 2), keepdims=True)
        scaled.append((x, adj / numpy.where(degree == 0, 1, degree)))
    return model, scaled


@pytest.mark.parametrize('name', OPTIONS)
def test_parity_in_both_layouts(device, name):
    examples = molecules(SIZES, n_relations=OPTIONS[name].get('n_edge_types', 4))
    assert_layouts_agree(dense_model(**OPTIONS[name]), device, examples, scaled_before)


@pytest.mark.parametrize('scaled', [False, True])
def test_bonds_of_real_molecules(device, scaled):
    """Ones in place of values, and symmetric: the batch then has no values at all."""
    examples = [
        (atoms, numpy.maximum(adj, adj.swapaxes(1, 2)) != 0, labels)
        for atoms, adj, labels in molecules(SIZES)
    ]
    examples = [(atoms, adj.astype('f'), labels) for atoms, adj, labels in examples]
    assert concat_mols(examples)[1].data is None
    assert_layouts_agree(dense_model(scale_adj=scaled), device, examples, scaled_before)


@pytest.mark.parametrize('layout', ['packed', 'padded'])
def test_features_in_place_of_ids(device, layout):
    rng = numpy.random.RandomState(0)
    examples = [
        (rng.uniform(-1, 1, (len(a), 5)).astype('f'), adj) for a, adj, _ in molecules([6, 6, 6])
    ]
    features = numpy.stack([x for x, _ in examples])
    adj = numpy.stack([a for _, a in examples])
    dense = DenseRelGCN(4, input_type='float')
    expected = dense(features, adj).array
    model = sparsify(dense)
    model.to_device(device)
    actual = model(*CSRConverter(layout)(examples, device)).array
    assert relative_error(actual, expected) < 1e-5
    fresh = RelGCN(4, input_type='float')
    fresh.to_device(device)
    assert fresh(*CSRConverter(layout)(examples, device)).shape == (3, 4)


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'out_dim': 3, 'hidden_channels': [4, 5, 6]},
        {'hidden_channels': 8, 'n_update_layers': 3},
        {'input_type': 'float', 'scale_adj': True},
    ],
)
def test_constructor_makes_upstreams_parameters(options):
    assert_same_constructor(RelGCN, DenseRelGCN, options, ['input_type', 'scale_adj'])


@pytest.mark.parametrize('options', [{'scale_adj': True}, {'hidden_channels': [4, 5]}])
def test_snapshots_load_both_ways(tmp_path, options):
    assert_snapshots_load_both_ways(lambda: DenseRelGCN(3, **options), tmp_path, molecules(SIZES))


def test_training_steps(device):
    """Equal parameters and batch before; equal parameters after two steps."""

    def loss(model, atoms, adj, t):
        return chainer.functions.mean_squared_error(model(atoms, adj), t)

    examples = molecules([8] * 10)
    dense = dense_model(out_dim=3, scale_adj=True)
    sparse = sparsify(copy.deepcopy(dense))
    sparse.to_device(device)
    for model, converter in ((dense, dense_concat_mols), (sparse, concat_mols)):
        optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
        for _ in range(2):
            batch = converter(examples, -1 if model is dense else device)
            optimizer.update(loss, model, *batch)
    ours = dict(sparse.namedparams())
    for name, parameter in dense.namedparams():
        assert relative_error(ours[name].array, parameter.array) < 1e-5, name


def test_nodes_are_few():
    """A convolution is one node, its activation included."""
    model = sparsify(dense_model(hidden_channels=[4] * 6, scale_adj=True))
    labels = labels_of_nodes(model, *concat_mols(molecules(SIZES))[:2])
    assert labels[1:6] == ['RelationLinear'] * 5
    assert labels[6:] == ['GatedLinear', 'SegmentSum']


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_scale_adj(xp, dtype):
    examples = molecules(SIZES)
    adj = concat_mols(examples)[1].astype(dtype)
    device = chainer.get_device('@numpy' if xp is numpy else '@cupy:0')
    adj = adj.to_device(device)
    scaled = scale_adj(adj, numpy.dtype(dtype))
    assert scaled.data.dtype == dtype and scale_adj(adj, numpy.dtype(dtype)) is scaled
    dense = scaled.to_dense()
    for graph, (_, a, _) in enumerate(examples):
        n = a.shape[1]
        expected = rescale_adj(a[None]).array[0]
        assert relative_error(dense[graph, :, :n, :n], expected) < 1e-6
    assert relative_error(scaled.T.to_scipy().toarray(), scaled.to_scipy().toarray().T) == 0
    assert (cuda.to_cpu(adj.data) == concat_mols(examples)[1].data).all()


def test_scale_adj_where_the_matrix_is_symmetric():
    """Its scaled form is not, and must not be taken for its own transpose."""
    matrix = numpy.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]], 'f')
    for matrices in ([matrix], [matrix * 0.5]):
        adj = BatchedCSR.from_matrices(matrices)
        assert adj.is_symmetric
        scaled = scale_adj(adj, numpy.dtype('f'))
        numpy.testing.assert_array_equal(
            scaled.to_scipy().toarray(), [[0, 1, 1], [0.5, 0, 0], [0.5, 0, 0]]
        )
        numpy.testing.assert_array_equal(
            scaled.T.to_scipy().toarray(), [[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]]
        )


def test_degree_of_zero_counts_as_one():
    """Also where entries cancel each other, as in Chainer Chemistry."""
    matrix = numpy.array([[[0, 2, 1], [0, -2, 3], [0, 0, 0]]] * 2, 'f')
    adj = BatchedCSR.from_matrices([matrix])
    scaled = scale_adj(adj, numpy.dtype('f')).to_dense()
    numpy.testing.assert_array_equal(scaled[0], rescale_adj(matrix[None]).array[0])
    numpy.testing.assert_array_equal(scaled[0, 0], [[0, 2, 0.125], [0, -2, 0.375], [0, 0, 0]])


def test_gradients_do_not_leak_from_batch_to_batch(device):
    """Two batches through one model give what each gives by itself."""
    model = sparsify(dense_model(scale_adj=True))
    model.to_device(device)
    first, second = (
        concat_mols(molecules(sizes, seed), device)[:2] for seed, sizes in enumerate(([5, 3], [7]))
    )
    both = outcome(model, [first, second])
    parts = [outcome(model, [batch]) for batch in (first, second)]
    for name in both:
        if name != 'output':
            assert relative_error(both[name], parts[0][name] + parts[1][name]) < 1e-5


@pytest.mark.parametrize('dtype', ['float16', 'mixed16'])
def test_half_precision(device, dtype):
    assert_half_precision(lambda: RelGCN(3, scale_adj=True), device, dtype)


# --- what is refused ---


def test_number_of_layers():
    with pytest.raises(ValueError, match='n_update_layers: expected an int .* = 8, got None'):
        RelGCN(hidden_channels=8)


def test_unknown_input_type():
    with pytest.raises(ValueError, match="input_type: expected .*'int', 'float'.*'bool'"):
        RelGCN(input_type='bool')


def test_input_of_another_type():
    atoms, adj, _ = concat_mols(molecules([3, 2]))
    with pytest.raises(ValueError, match="x: expected atom ids with input_type='int', got float32"):
        RelGCN()(numpy.ones((5, 16), 'f'), adj)
    with pytest.raises(ValueError, match="x: expected features with input_type='float', got int32"):
        RelGCN(input_type='float')(atoms, adj)
    with pytest.raises(ValueError, match=r'x: expected shape \(5,\) and one more .*\(4, 16\)'):
        RelGCN(input_type='float')(numpy.ones((4, 16), 'f'), adj)


def test_other_number_of_relations():
    with pytest.raises(ValueError, match='adj: expected 4 relations, .* got .* 2 relations'):
        RelGCN()(*concat_mols(molecules([3], n_relations=2))[:2])


def test_dense_adjacency_is_refused_with_advice():
    atoms, adj, _ = molecules([3])[0]
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR .*concat_mols'):
        RelGCN()(atoms[None], adj[None])
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR .*concat_mols'):
        RelGCN(input_type='float')(numpy.ones((1, 3, 2), 'f'), adj[None])


def test_readout_of_ones_own():
    dense = DenseRelGCN()
    del dense.rgcn_readout
    with dense.init_scope():
        dense.rgcn_readout = DenseReadout()
    with pytest.raises(ValueError, match='model.rgcn_readout: expected a GGNNReadout .* got .*Gen'):
        sparsify(dense)
