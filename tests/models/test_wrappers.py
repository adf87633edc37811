"""GWM, CWLE and GWLE models: swap, snapshots, real data, refusals.

Their results are compared with Chainer Chemistry's in test_parity.py.
"""

import copy
import functools

import numpy
import pytest

import chainer
from chainer import functions
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.dataset.preprocessors.wle import apply_cwle_for_datasets
from chainer_chemistry.dataset.preprocessors.wle import apply_wle_for_datasets
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout
from chainer_chemistry.links.readout.schnet_readout import SchNetReadout
from chainer_chemistry.links.update.ggnn_update import GGNNUpdate
from chainer_chemistry.links.update.relgcn_update import RelGCNUpdate
from chainer_chemistry.links.update.schnet_update import SchNetUpdate
from chainer_chemistry.models.gwm.gwm_graph_conv_model import GWMGraphConvModel
from chainer_chemistry.models.prediction import set_up_predictor as set_up_dense_predictor

from chainer_bspmm import BatchedCSR, concat_mols, CSRConverter, sparsify, models
from chainer_bspmm.dataset import from_smiles, to_sparse
from chainer_bspmm.models import gwm, wle
from tests.support import parity, relative_error
from tests.support.data_sets import tuple_data_set
from tests.support.molecules import molecules

CASES = parity.DEFAULTS


def predictor(method, make=set_up_dense_predictor):
    numpy.random.seed(0)
    options = {}
    if not method.endswith('_gwm'):
        options['n_wle_types'] = parity.N_LABELS
    if method.split('_')[0] in ('rsgcn', 'gin'):
        options['conv_kwargs'] = {'dropout_ratio': 0.0}
    return make(method, 8, 2, 3, **options)


def initialised(model, examples):
    model(*dense_concat_mols(examples[:1]))
    model.cleargrads()
    return model


def predictions(model, converter, examples):
    with chainer.using_config('train', False):
        return numpy.concatenate([model(*converter([e])).array for e in examples])


@pytest.mark.parametrize('model', [models.NFP_GWM, models.GIN_GWM])
def test_unused_layer_gets_weights(tmp_path, model):
    """A layer that concat_hidden does not use gets weights, so that no snapshot contains None."""
    tied = {} if model is models.NFP_GWM else {'weight_tying': False}
    ours = model(3, concat_hidden=True, **tied)
    ours(*concat_mols(parity.examples_of(CASES[model.__name__])))
    dense = model.upstream(3, concat_hidden=True, **tied)
    weight = ours.linear_for_concat_super.W
    assert weight.shape == (3, 3 + 16) and not weight.array.any()
    chainer.serializers.save_npz(tmp_path / 'model.npz', ours)
    chainer.serializers.load_npz(tmp_path / 'model.npz', dense)
    with numpy.load(tmp_path / 'model.npz') as snapshot:
        assert all(snapshot[key].dtype.kind == 'f' for key in snapshot.files)
    numpy.testing.assert_array_equal(dense.linear_for_concat_super.W.array, weight.array)


# Options of all wrappers, named after the operations that they add between or after updates.
STEPS = {
    'batch norm': {'use_batchnorm': True},
    'dropout': {'dropout_ratio': 0.3},
    'activation after two updates': {'activation': functions.tanh, 'n_activation': 2},
    'all of these': {'use_batchnorm': True, 'dropout_ratio': 0.3, 'activation': functions.relu},
    'scaled adjacency': {'scale_adj': True},
    'results side by side': {'concat_hidden': True},
    'sum of results': {'sum_hidden': True},
    'tied, with batch norm': {'use_batchnorm': True, 'weight_tying': True},
}


@pytest.mark.parametrize('options', STEPS.values(), ids=STEPS)
def test_steps_between_updates(monkeypatch, options):
    """Training is compared without the wrapper, which is in test_parity.py."""
    make = functools.partial(
        GWMGraphConvModel,
        update_layer=RelGCNUpdate,
        readout_layer=GGNNReadout,
        hidden_channels=6,
        out_dim=5,
        n_update_layers=3,
        with_gwm=False,
        **{'weight_tying': False, **options},
    )
    examples = [example[:2] for example in molecules([7] * 5)]
    parity.assert_same_in_training(monkeypatch, make, examples)


def test_tied_updates_are_activated_once():
    """Upstream activates only after the first of several tied updates."""
    examples = parity.examples_of(CASES['GGNN_GWM'])
    model = GWMGraphConvModel(
        update_layer=GGNNUpdate,
        readout_layer=GGNNReadout,
        hidden_channels=6,
        out_dim=5,
        n_update_layers=3,
        activation=functions.tanh,
        weight_tying=True,
    )
    expected = model(*dense_concat_mols(examples)).array
    assert relative_error(sparsify(model)(*concat_mols(examples)).array, expected) < 1e-5


@pytest.mark.parametrize('n_degrees', [2, 9])
@pytest.mark.parametrize('method', ['NFP_GWM', 'NFP_CWLE', 'NFP_GWLE'])
def test_degrees_of_nfp_that_count_are_those_of_the_model(method, n_degrees):
    """If the number of degrees is changed, upstream leaves out layers of degrees from there on."""
    case = CASES[method]
    examples = parity.examples_of(case)
    model = initialised(case.make(), examples)
    assert model.n_degree_type == 7
    model.n_degree_type = n_degrees
    expected = model(*dense_concat_mols(examples)).array
    assert relative_error(sparsify(model)(*concat_mols(examples)).array, expected) < 1e-5


class Own(chainer.Link):
    """A user's update, which takes what Chainer Chemistry's updates have in common."""

    def __call__(self, h, adj):
        return h + 1


@pytest.mark.parametrize('max_degree', [5, 6])
@pytest.mark.parametrize('method', ['NFP', 'NFP_GWM'])
def test_updates_of_users_get_no_number_of_degrees_that_was_not_changed(method, max_degree):
    examples = parity.examples_of(CASES[method])
    model = sparsify(initialised(CASES[method].make(max_degree=max_degree), examples))
    name = 'layers' if method == 'NFP' else 'update_layers'
    n_layers = len(getattr(model, name))
    delattr(model, name)
    with model.init_scope():
        setattr(model, name, chainer.ChainList(*[Own() for _ in range(n_layers)]))
    assert numpy.isfinite(model(*concat_mols(examples)).array).all()


SMILES = ['C', 'CC(=O)Oc1ccccc1C(=O)O', 'CN1C=NC2=C1C(=O)N(C)C(=O)N2C', 'CCO', 'c1ccccc1']


def preprocessed(method):
    from rdkit import Chem

    preprocessor = preprocess_method_dict[method]()
    return [tuple(preprocessor.get_input_features(Chem.MolFromSmiles(s))) for s in SMILES]


@pytest.mark.parametrize('method', ['rsgcn_gwm', 'nfp_gwm', 'ggnn_gwm', 'gin_gwm'])
def test_data_set_with_super_nodes(method):
    """Predictions from SMILES equal upstream's, for dense and for sparse data sets.

    The super node's features are a column of the sparse data set like any other.
    """
    pytest.importorskip('rdkit')
    examples = preprocessed(method)
    sparse = from_smiles(SMILES, method).dataset
    assert len(sparse) == len(examples)
    dense = initialised(predictor(method), examples)
    with chainer.using_config('train', False):
        expected = dense(*dense_concat_mols(examples)).array
        model = sparsify(dense)
        for data in (examples, to_sparse(examples), sparse):
            batch = concat_mols([data[i] for i in range(len(data))])
            assert relative_error(model(*batch).array, expected) < 1e-5


@pytest.mark.parametrize(
    'method, rounds',
    [('ggnn_cwle', 1), ('relgcn_gwle', 2), ('rsgcn_cwle', 3), ('ggnn_wle', 1), ('relgcn_wle', 2)],
)
def test_data_set_with_labels(method, rounds):
    """Predictions from SMILES equal upstream's, with labels of Chainer Chemistry's own.

    The first molecule is methane, one atom without bonds, whose label 0 is not padding.
    """
    pytest.importorskip('rdkit')
    data = [(*each, numpy.zeros(1, 'f')) for each in preprocessed(method.split('_')[0])]
    is_column = int(not method.endswith('_wle'))
    label = apply_cwle_for_datasets if is_column else apply_wle_for_datasets
    (labelled,), names, _ = label([tuple_data_set(data)], k=rounds)
    assert len(names) <= parity.N_LABELS
    examples = [labelled[i] for i in range(len(labelled))]
    assert examples[0][2 if is_column else 0] == [0]
    inputs = [e[:-1] for e in examples]
    dense = initialised(predictor(method), inputs)
    # If molecules have one size, and no target follows, the column looks like a label.
    one_size = (inputs[:1], inputs[1:2], [inputs[3]] * 3)
    with chainer.using_config('train', False):
        alone = predictions(dense, dense_concat_mols, inputs)
        together, *few = (dense(*dense_concat_mols(batch)).array for batch in (inputs, *one_size))
        sparsify(dense)
        for layout, expected in (('packed', alone), ('folded', together), ('padded', together)):
            converter = CSRConverter(layout, strip_padding=False if layout == 'packed' else None)
            *batch, t = converter(examples)
            assert t.shape == (len(SMILES), 1)
            assert relative_error(dense(*batch).array, expected) < 1e-5
            for given, result in zip((inputs, *one_size), (expected, *few)):
                assert relative_error(dense(*converter(given)).array, result) < 1e-5
        # The same holds with phantom atoms.
        for batch in one_size:
            found, expected = (
                dense(*CSRConverter(padded_to=30, n_node_columns=n_columns)(batch)).array
                for n_columns in (None, is_column)
            )
            numpy.testing.assert_array_equal(found, expected)
        if not is_column:
            sparse = to_sparse(examples)
            assert relative_error(dense(*concat_mols(sparse)[:2]).array, together) < 1e-5
            for data_set in (examples, sparse):
                with pytest.raises(
                    ValueError, match=r'strip_padding: .* batch\[0\] would lose .* keeps them'
                ):
                    CSRConverter('packed')(data_set)


@pytest.mark.parametrize('name', ['GGNN_CWLE', 'RSGCN_GWLE'])
def test_batch_without_atoms(name):
    model = sparsify(CASES[name].make())
    shape = (4, 0, 0) if name == 'GGNN_CWLE' else (0, 0)
    adj = BatchedCSR.from_matrices([numpy.zeros(shape, 'f')] * 2)
    model.cleargrads()
    y = model(numpy.zeros(0, 'i'), adj, numpy.zeros(0, 'i'))
    chainer.functions.sum(y).backward()
    assert len(y) == 2 and numpy.isfinite(y.array).all()
    assert not model.embed_wle.W.grad.any()


def test_super_node():
    model = models.GGNN_GWM(3)
    examples = parity.examples_of(CASES['GGNN_GWM'])
    atoms, adj, super_node = concat_mols(examples)
    with pytest.raises(TypeError, match='super_node: expected an array .* got NoneType'):
        model(atoms, adj)
    with pytest.raises(
        ValueError, match=r'super_node: expected shape \(8, n_features\) .*\(3, 7\)'
    ):
        model(atoms, adj, super_node[:3])
    with pytest.raises(
        TypeError,
        match='adj: expected a BatchedCSR, got ndarray of shape .* with BatchedCSR.from_dense',
    ):
        model(*dense_concat_mols(examples))


@pytest.fixture
def labelled():
    """A model that takes labels of atoms from 0 to 39, and its batch of 83 rows."""
    examples = parity.examples_of(CASES['GGNN_CWLE'])
    batch = CSRConverter('packed', n_node_columns=1)(examples)
    return models.GGNN_CWLE(3, n_wle_types=40), *batch


def test_no_labels(labelled):
    model, atoms, adj, _ = labelled
    with pytest.raises(TypeError, match='wle_array: expected an array .* got NoneType'):
        model(atoms, adj)


def test_labels_of_another_shape(labelled):
    model, atoms, adj, labels = labelled
    message = (
        r'wle_array: expected integers of shape \(83,\).* got int32 of shape \(82,\); '
        r'CSRConverter\(n_node_columns=1\) makes them'
    )
    with pytest.raises(ValueError, match=message):
        model(atoms, adj, labels[1:])


def test_labels_that_are_no_integers(labelled):
    model, atoms, adj, labels = labelled
    with pytest.raises(
        ValueError,
        match=r'wle_array: expected integers .* got float32 of shape \(83,\); '
        r'CSRConverter\(n_node_columns=1\) makes them',
    ):
        model(atoms, adj, labels.astype('f'))


@pytest.mark.parametrize('label', [-2, -1, 40, 41])
def test_labels_out_of_range(labelled, label):
    model, atoms, adj, labels = labelled
    message = r'wle_array: expected labels in \[0, 40\), .*got %d' % label
    with pytest.raises(ValueError, match=message):
        model(atoms, adj, numpy.append(labels[1:], label))


def test_tied_update_of_relgat_that_cannot_take_its_own_result():
    options = {'weight_tying': True, 'concat_heads': True}
    with pytest.raises(
        ValueError, match='weight_tying: expected False .* takes 16 .* gives 48, got True'
    ):
        models.RelGAT(3, **options)
    with pytest.raises(
        ValueError,
        match=r'model\.weight_tying: expected False to go with .* and gives 48, got True',
    ):
        sparsify(models.RelGAT.upstream(3, **options))
    models.RelGAT(3, n_update_layers=1, **options)
    models.RelGAT(3, n_heads=1, **options)


@pytest.mark.parametrize('model', [gwm.GGNN_GWM, gwm.GIN_GWM, wle.GGNN_CWLE, wle.RelGCN_GWLE])
def test_one_readout_for_many_updates(model):
    dense = model.upstream(3, concat_hidden=True)
    for make in (lambda: model(3, concat_hidden=True), lambda: sparsify(dense)):
        with pytest.raises(
            ValueError,
            match=r'^(model\.)?weight_tying: expected False .* each of 4 updates .* forward pass',
        ):
            make()


@pytest.mark.parametrize(
    'given, message',
    [
        (
            {'update_layer': SchNetUpdate},
            r'model\.update_layers\.0: expected .*RSGCNUpdate or GINUpdate or NFPUpdate .* '
            'object at 0x.*>',
        ),
        (
            {'readout_layer': SchNetReadout},
            r'model\.readout_layers\.0: expected .*GGNNReadout or NFPReadout or .* object '
            'at 0x.*>',
        ),
    ],
)
def test_parts_without_a_sparse_form(given, message):
    class Update(SchNetUpdate):
        def __init__(self, in_channels, out_channels, **kwargs):
            super().__init__(hidden_channels=in_channels)

    parts = {'update_layer': GGNNUpdate, 'readout_layer': GGNNReadout, **given}
    if 'update_layer' in given:
        parts['update_layer'] = Update
    dense = GWMGraphConvModel(hidden_channels=6, out_dim=6, n_update_layers=2, **parts)
    before = copy.copy(dense.update_layers)
    with pytest.raises(ValueError, match=message):
        sparsify(dense)
    assert all(a is b for a, b in zip(before, dense.update_layers))
