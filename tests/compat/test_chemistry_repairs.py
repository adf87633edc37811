"""Repairs of Chainer Chemistry, each tested by the code that needs it."""

import contextlib
import importlib
import json
import pickle
import re
import sys
import types
import warnings

import chainer_bspmm  # noqa: F401
import chainer
from chainer import cuda, functions, serializers
import numpy
import pytest

rdkit = pytest.importorskip('rdkit')

from chainer_chemistry import dataset, datasets  # noqa: E402
from chainer_chemistry.dataset.converters import concat_mols  # noqa: E402
from chainer_chemistry.dataset.parsers import SmilesParser  # noqa: E402
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict, wle  # noqa: E402
from chainer_chemistry.dataset.splitters import split_method_dict  # noqa: E402
from chainer_chemistry.datasets import NumpyTupleDataset  # noqa: E402
from chainer_chemistry.links import StandardScaler  # noqa: E402
from chainer_chemistry.links.array import shape_transformer_to_2d  # noqa: E402
from chainer_chemistry.models import GIN, RelGAT  # noqa: E402
from chainer_chemistry.models.gin import GINSparse  # noqa: E402
from chainer_chemistry.models.prediction import Classifier, Regressor  # noqa: E402
from chainer_chemistry.models.prediction import set_up_predictor  # noqa: E402
from chainer_chemistry.training.extensions import prc_auc_evaluator, ROCAUCEvaluator  # noqa: E402
from chainer_chemistry.utils import run_train  # noqa: E402

SMILES = [
    'CCO',
    'c1ccccc1O',
    'CC(=O)O',
    'CCN(CC)CC',
    'C1CCCCC1',
    'CC#N',
    'O=C(O)c1ccccc1',
    'CCCl',
    'OCC(O)CO',
    'Cc1ccccc1',
]


@pytest.fixture(autouse=True)
def numpy_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.filterwarnings('error', module='chainer')
        # Parsers first try a ragged array, which NumPy < 1.24 makes with this warning.
        warnings.filterwarnings('ignore', 'Creating an ndarray from ragged')
        yield


def make_dataset(method, dtype=numpy.float32):
    """Parse molecules with two labels each to upstream's data set."""
    features = SmilesParser(preprocess_method_dict[method]()).parse(SMILES)['dataset']
    labels = numpy.arange(len(SMILES) * 2).reshape(-1, 2) % 2
    return NumpyTupleDataset(*features.get_datasets(), labels.astype(dtype))


@contextlib.contextmanager
def module_of_a_checkout(package, name, text, tmp_path, monkeypatch):
    """Make a module of Chainer Chemistry that its wheel lacks."""
    *folders, file = name.split('.')
    folder = tmp_path.joinpath(*folders)
    folder.mkdir(parents=True)
    (folder / f'{file}.py').write_text(text)
    monkeypatch.setattr(package, '__path__', [*package.__path__, str(tmp_path)])
    name = f'{package.__name__}.{name}'
    try:
        yield importlib.import_module(name)
    finally:
        for imported in (name, name.rpartition('.')[0]):
            sys.modules.pop(imported, None)


def test_network_graphs_of_a_checkout_read_int(tmp_path, monkeypatch):
    text = 'import numpy\n\n\ndef ids(values):\n    return numpy.array(values, dtype=numpy.int)\n'
    name = 'networkx_preprocessors.base_networkx'
    with module_of_a_checkout(dataset, name, text, tmp_path, monkeypatch) as module:
        assert module.ids([1, 2]).tolist() == [1, 2]


def test_reddit_of_a_checkout_reads_sparse_matrices(tmp_path, monkeypatch):
    """A stand-in for version 3 of networkx is used, which is not installed."""
    text = (
        'import types\nnx = types.ModuleType("networkx")\nnx.from_scipy_sparse_array = str\n\n\n'
        'def read(x):\n    return nx.from_scipy_sparse_matrix(x)\n'
    )
    with module_of_a_checkout(datasets, 'reddit.reddit', text, tmp_path, monkeypatch) as module:
        assert module.read(3) == '3'


@pytest.mark.parametrize(
    'name',
    [
        'chainer_chemistry.dataset.networkx_preprocessors.base_networkx',
        'chainer_chemistry.datasets.citation_network.citation',
        'chainer_chemistry.datasets.reddit.reddit',
    ],
)
def test_network_graphs_that_the_wheel_lacks(name):
    missing = name.rpartition('.')[0]
    message = (
        "No module named '%s': the wheel of Chainer Chemistry lacks it. Clone "
        'https://github.com/chainer/chainer-chemistry and put that folder first on PYTHONPATH'
    )
    with pytest.raises(ModuleNotFoundError, match=re.escape(message % missing) + '$') as caught:
        importlib.import_module(name)
    assert caught.value.name == missing


def test_graph_datasets_of_both_kinds_share_no_table_of_features():
    from chainer_chemistry.dataset.graph_dataset import base_graph_data, base_graph_dataset

    x = numpy.zeros(2, 'i')
    dense = base_graph_data.PaddingGraphData(x=x, adj=numpy.zeros((2, 2), 'f'))
    sparse = base_graph_data.SparseGraphData(x=x, edge_index=numpy.zeros((2, 1), int))
    sets = [
        base_graph_dataset.PaddingGraphDataset([dense]),
        base_graph_dataset.SparseGraphDataset([sparse]),
    ]
    padded, concatenated = (one.converter(one.data_list, device=-1) for one in sets)
    assert not hasattr(concatenated, 'adj') and not hasattr(padded, 'edge_index')


def test_sparse_graph_dataset_numbers_the_graph_of_each_node():
    from chainer_chemistry.dataset.graph_dataset import base_graph_data, base_graph_dataset

    data = [
        base_graph_data.BaseGraphData(x=numpy.arange(n, dtype='i'), y=numpy.zeros(1, 'f'))
        for n in (2, 3)
    ]
    batch = base_graph_dataset.SparseGraphDataset(data).converter(data, device=-1)
    numpy.testing.assert_array_equal(batch.batch, [0, 0, 1, 1, 1])
    assert batch.batch.dtype.kind == 'i'


@pytest.mark.parametrize('method, shape', [('gin', (3, 3)), ('relgcn', (4, 3, 3))])
def test_sparse_preprocessor(method, shape):
    adj = numpy.zeros(shape, 'f')
    adj[..., 0, 1] = 1
    preprocessor = preprocess_method_dict[method + '_sparse']()
    data = preprocessor.construct_sparse_data(numpy.arange(3, dtype='i'), adj, numpy.zeros(1, 'f'))
    assert data.edge_index.dtype.kind == 'i'
    assert data.edge_index.shape == (2, numpy.count_nonzero(adj))


def test_supernode_feature_of_gwm_method():
    # An error in a preprocessor would silently drop the molecule.
    assert len(make_dataset('rsgcn_gwm')) == len(SMILES)
    super_node = make_dataset('rsgcn_gwm')[0][2]
    assert super_node.dtype == numpy.float32
    # Features: number of atoms, bonds of any type, their share, and elements, here C and O.
    assert super_node[0] == 3
    assert numpy.flatnonzero(super_node[4 : 4 + 117]).tolist() == [5, 7]


def test_indexer_takes_lists():
    features = make_dataset('rsgcn').features
    assert features[[0, 2], 2].shape == (2, 2)
    assert len(features[:, [0, 2]]) == 2


def test_indexer_takes_masks():
    assert make_dataset('rsgcn').features[[True] + [False] * 9, 2].shape == (1, 2)


@pytest.mark.parametrize(
    'kind, name',
    [(ROCAUCEvaluator, 'roc_auc_score'), (prc_auc_evaluator.PRCAUCEvaluator, 'prc_auc_score')],
)
def test_score_ignores_labels(kind, name):
    iterator = chainer.iterators.SerialIterator([0], 1, repeat=False)
    evaluator = kind(iterator, chainer.Chain(), ignore_labels=[-1])
    score = getattr(evaluator, name)
    labels = numpy.array([1, -1, 0, 1])
    assert score(numpy.array([0.9, 0.1, 0.2, 0.8]), labels) == 1
    assert score(numpy.array([0.1, 0.1, 0.9, 0.2]), labels) < 0.6


def test_relgat_mask():
    atoms = numpy.array([[6, 6, 8]], 'i')
    adj = numpy.zeros((1, 4, 3, 3), 'f')
    adj[0, 0, 0, 1] = adj[0, 0, 1, 0] = 1
    assert RelGAT(out_dim=2)(atoms, adj).shape == (1, 2)


def test_sparse_utils_are_available():
    from chainer_chemistry.utils.sparse_utils import sparse_utils_available

    assert sparse_utils_available() is True


def test_extend_adj():
    from chainer_chemistry.utils.extend import extend_adj

    assert extend_adj([numpy.ones((2, 2), 'f')], 3).sum() == 4


def test_saliency_in_single_precision_is_drawn():
    from chainer_chemistry.saliency.visualizer.mol_visualizer import SmilesVisualizer

    saliency = numpy.array([0.1, 0.2, -0.3], 'f')
    assert '<svg' in SmilesVisualizer().visualize(saliency, 'CCO')
    assert saliency.dtype == numpy.float32


def test_windows_of_occlusion_have_several_elements():
    from chainer_chemistry.saliency.calculator.occlusion_calculator import OcclusionCalculator

    weights = numpy.array([[1, 2, 4], [8, 16, 32]], 'f')

    def summed(x):
        return chainer.functions.sum(x * weights, axis=(1, 2))

    calculator = OcclusionCalculator(
        chainer.Chain(), eval_fun=summed, device=-1, slide_axis=(1, 2), size=2
    )
    found = calculator.compute(
        [numpy.ones((2, 3), 'f')] * 2,
        converter=chainer.dataset.concat_examples,
        show_progress=False,
    )
    # There are two windows with sums of 27 and 54, and the column in the middle is in both.
    expected = numpy.array([[27, 81, 54]] * 2)
    numpy.testing.assert_array_equal(found, [[expected, expected]])


@pytest.mark.parametrize('name', sorted(split_method_dict))
def test_splitters_give_a_partition(name):
    dataset = make_dataset('rsgcn', numpy.int32)
    parts = split_method_dict[name]().train_valid_test_split(
        dataset,
        smiles_list=SMILES,
        time_list=list(range(10)),
        seed=0,
        frac_train=0.6,
        frac_valid=0.2,
        frac_test=0.2,
    )
    assert sorted(numpy.concatenate(parts).tolist()) == list(range(10))
    if 'scaffold' not in name:
        assert [len(part) for part in parts] == [6, 2, 2]


def test_scaffold_splitter_keeps_the_split_of_a_seed():
    # The unrepaired splitter has drawn this with NumPy 1.22.
    splitter = split_method_dict['scaffold']()
    parts = splitter.train_valid_test_split(
        list(SMILES), SMILES, seed=3, frac_train=0.4, frac_valid=0.3, frac_test=0.3
    )
    assert [part.tolist() for part in parts] == [[0, 2, 3, 5, 7, 8], [1, 6, 9], [4]]


@pytest.mark.parametrize('method', ['nfp', 'relgcn'])
def test_wle(method):
    dataset = make_dataset(method)
    slices = slice(0, 6), slice(6, 8), slice(8, 10)
    parts = tuple(NumpyTupleDataset(*dataset.features[part]) for part in slices)
    expanded, labels, frequencies = wle.apply_wle_for_datasets(parts, 0, 1)
    assert sum(frequencies.values()) == sum(len(atoms) for atoms, _, _ in dataset)
    for part, expanded_part in zip(parts, expanded):
        for (atoms, adj, label), (new_atoms, new_adj, new_label) in zip(part, expanded_part):
            assert new_atoms.shape == atoms.shape
            assert max(new_atoms) < len(labels)
            numpy.testing.assert_array_equal(new_adj, adj)
            numpy.testing.assert_array_equal(new_label, label)


def test_cwle():
    dataset = make_dataset('ggnn')
    expanded, labels, _ = wle.apply_cwle_for_datasets((dataset, dataset), 1)
    assert len(expanded[0][0]) == 4
    assert expanded[0][1][2].dtype == numpy.int32


def test_cgcnn_converter():
    from chainer_chemistry.dataset.converters import cgcnn_converter

    batch = [
        (
            numpy.ones((n, 2), 'f'),
            numpy.ones((n, 3, 4), 'f'),
            numpy.zeros((n, 3), 'i'),
            numpy.zeros(1, 'f'),
        )
        for n in (2, 3)
    ]
    indices = cgcnn_converter(batch, device=chainer.get_device(-1))[2]
    assert [part.tolist() for part in indices] == [[0, 1], [2, 3, 4]]


def test_roc_auc_of_one_class_raises_if_asked_to():
    iterator = chainer.iterators.SerialIterator([0], 1, repeat=False)
    scores, labels = numpy.array([0.1, 0.9]), numpy.array([1, 1])
    with pytest.raises(ValueError, match='Only one class'):
        ROCAUCEvaluator(iterator, chainer.Chain()).roc_auc_score(scores, labels)

    messages = []
    logger = types.SimpleNamespace(warning=messages.append)
    evaluator = ROCAUCEvaluator(iterator, chainer.Chain(), raise_value_error=False, logger=logger)
    assert numpy.isnan(evaluator.roc_auc_score(scores, labels))
    assert 'Only one class' in messages[0]


class _DeviceArray(cuda.ndarray if not cuda.available else object):
    """Stand-in for a CuPy array; copying it to the host fails the test."""

    shape = (1,)
    device = None

    def reshape(self, shape):
        assert shape == ()
        return 'zero-dimensional device array'

    def get(self, *args, **kwargs):
        raise AssertionError('copied to the host')


@pytest.mark.parametrize('model_class', [Regressor, Classifier])
def test_report_of_a_device_array_stays_on_the_device(monkeypatch, model_class):
    monkeypatch.setattr(cuda, 'ndarray', _DeviceArray)
    model = model_class(chainer.Chain())
    assert model._convert_to_scalar(_DeviceArray()) == 'zero-dimensional device array'


@pytest.mark.parametrize('model_class', [Regressor, Classifier])
def test_report_of_a_host_array_is_a_python_scalar(model_class):
    convert = model_class(chainer.Chain())._convert_to_scalar
    for value in (numpy.array(1.5, 'f'), numpy.array([1.5]), chainer.Variable(numpy.array(1.5))):
        assert type(convert(value)) is float and convert(value) == 1.5
    assert convert(numpy.float32(1.5)) == 1.5
    with pytest.raises(ValueError):
        convert(numpy.zeros(2))


ATOMS = numpy.array([[6, 6, 8]], 'i')
ADJ = numpy.ones((1, 3, 3), 'f')


def make_gin(kind):
    """Return a GIN, and a function that calls it."""
    if kind == 'dense':
        model = GIN(out_dim=2, hidden_channels=4, n_update_layers=1, dropout_ratio=0)
        return model, lambda model=model: model(ATOMS, ADJ)
    model = GINSparse(out_dim=2, hidden_channels=4, n_update_layers=1, dropout_ratio=0)
    batch = types.SimpleNamespace(
        x=ATOMS[0], edge_index=numpy.array([[0, 1], [1, 2]]), batch=numpy.zeros(3, 'i')
    )
    return model, lambda model=model: model(batch)


@pytest.mark.parametrize('kind', ['dense', 'sparse'])
def test_gin_npz_holds_no_pickled_object(tmp_path, kind):
    """Older files without weights of the first MLP can be loaded as well."""
    model, forward = make_gin(kind)
    expected = forward().array
    path = str(tmp_path / 'gin.npz')
    serializers.save_npz(path, model)
    with numpy.load(path, allow_pickle=False) as file:
        state = dict(file)
    assert all(array.dtype == numpy.float32 for array in state.values())
    names = [name for name in state if name.startswith('first_mlp') and name.endswith('W')]
    assert len(names) == 2
    for weight in (state[names[0]], numpy.asarray(None)):
        numpy.savez(path, **{**state, names[0]: weight})
        loaded, forward = make_gin(kind)
        serializers.load_npz(path, loaded)
        numpy.testing.assert_array_equal(forward().array, expected)


@pytest.mark.parametrize('kind', ['dense', 'sparse'])
def test_gin_updates_unused_layers_to_finite_values(kind):
    model, forward = make_gin(kind)
    optimizer = chainer.optimizers.Adam().setup(model)
    forward()
    model.cleargrads()
    functions.sum(forward()).backward()
    optimizer.update()
    assert all(numpy.isfinite(param.array).all() for param in model.params())


@pytest.mark.parametrize('kind', ['dense', 'sparse'])
def test_a_step_of_gin_draws_no_random_numbers(kind):
    model, forward = make_gin(kind)
    optimizer = chainer.optimizers.Adam().setup(model)
    forward()
    model.cleargrads()
    state = numpy.random.get_state()[2]
    functions.sum(forward()).backward()
    optimizer.update()
    assert numpy.random.get_state()[2] == state


def test_gin_draws_as_many_random_numbers_as_its_used_layers():
    numpy.random.seed(0)
    model, forward = make_gin('dense')
    state = numpy.random.get_state()[1:3]
    # Draws of two layers whose input size is open: of the update layer, and of first_mlp.
    numpy.random.normal(size=(4, 4))
    expected = numpy.random.normal()
    numpy.random.seed(0)
    model, forward = make_gin('dense')
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state()[1:3], state))
    forward()
    assert numpy.random.normal() == expected
    first = [link.W.array for link in model.first_mlp.layers]
    assert not first[0].any() and first[1].any()


def test_gin_sparse_still_takes_features_through_first_mlp():
    model, _ = make_gin('sparse')
    batch = types.SimpleNamespace(
        x=numpy.ones((3, 7), 'f'), edge_index=numpy.array([[0], [1]]), batch=numpy.zeros(3, 'i')
    )
    model(batch)
    assert model.first_mlp.layers[0].W.shape == (4, 7)
    assert model.first_mlp.layers[0].W.array.any()


@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'ggnn_gwm'])
def test_train_resume_predict(tmp_path, method):
    dataset = make_dataset(method)

    def run(epoch, resume=None):
        model = Regressor(
            set_up_predictor(method, 4, 1, 2), metrics_fun={'mae': functions.mean_absolute_error}
        )
        snapshot = chainer.training.extensions.snapshot(filename='snapshot')
        run_train(
            model,
            dataset,
            dataset,
            batch_size=5,
            epoch=epoch,
            out=str(tmp_path),
            converter=concat_mols,
            extensions_list=[snapshot],
            resume_path=resume,
        )
        return model

    run(1)
    model = run(2, str(tmp_path / 'snapshot'))
    log = json.loads((tmp_path / 'log').read_text())
    assert [entry['epoch'] for entry in log] == [1, 2]
    assert all(numpy.isfinite(entry['main/loss']) for entry in log)
    assert all(numpy.isfinite(entry['validation/main/mae']) for entry in log)

    def features_only(batch, device):
        return concat_mols(batch, device)[:-1]

    expected = model.predict(dataset, converter=features_only)
    assert expected.shape == (len(SMILES), 2)
    model.save_pickle(str(tmp_path / 'model.pkl'))
    loaded = Regressor.load_pickle(str(tmp_path / 'model.pkl'))
    numpy.testing.assert_array_equal(loaded.predict(dataset, converter=features_only), expected)
    assert pickle.loads(pickle.dumps(dataset[0]))[0].shape == dataset[0][0].shape


@pytest.mark.parametrize(
    'shape, axis, n_nodes',
    [((3, 2), 1, 2), ((3, 2), -1, 2), ((3, 2), 0, 5), ((3, 2, 4), 1, 6)],
    ids=str,
)
def test_scaler_leaves_matrices_as_they_are(shape, axis, n_nodes):
    x = numpy.random.RandomState(0).rand(*shape).astype('f')
    others = tuple(i for i in range(len(shape)) if i != axis % len(shape))
    mean, std = (f(x, axis=others, keepdims=True) for f in (numpy.mean, numpy.std))
    scaler = StandardScaler().fit(x, axis=axis)
    scaled = scaler.transform(chainer.Variable(x), axis=axis)
    numpy.testing.assert_allclose(scaled.array, (x - mean) / std, rtol=1e-5, atol=1e-6)
    numpy.testing.assert_allclose(scaler.inverse_transform(scaled, axis=axis).array, x, rtol=1e-5)
    numpy.testing.assert_array_equal(scaler.transform(x, axis=axis), scaled.array)
    node = scaled.creator_node
    n_found = 0
    while node is not None:
        node = node.inputs[0].creator_node
        n_found += 1
    assert n_found == n_nodes


def test_what_is_no_matrix_is_refused_also_after_a_matrix():
    transformer = shape_transformer_to_2d.ShapeTransformerTo2D(axis=1)
    transformer.transform(numpy.zeros((3, 2), 'f'))
    for shape in (3, 2, 4), (6,):
        with pytest.raises(ValueError, match='2-dim array is expected'):
            transformer.inverse_transform(numpy.zeros(shape, 'f'))
