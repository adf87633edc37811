"""Every model is captured with every option and in every layout, for training and prediction."""

import copy
import functools
import re

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions, optimizers
from chainer.backends import cuda
from chainer.training.updaters import StandardUpdater
from chainer_chemistry import functions as chemistry_functions, models
from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import SparseGraphDataset
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.prediction import Classifier, GraphConvPredictor, Regressor

from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.models import layout_of
from chainer_bspmm.training import captured_predict, GraphUpdater
from tests.support import parity, relative_error
from tests.support.devices import slow_unless
from tests.support.training import assert_same_update, BATCH, HOST, is_captured, make_updater
from tests.support.training import run
from tests.training import host_graphs

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')

SIZES = (5, 1, 8, 3, 2, 6, 4, 1, 7, 5, 3, 2, 8, 8, 4, 8)  # two batches
LAYOUTS = 'packed', 'folded', 'padded'

# Models that join more arrays than CuPy can without sending a table from the host.
RELATIONS = {'adjacency': 'relations'}
HEADS = {'n_edge_types': 2, 'n_heads': 9}
NINE = tuple(
    parity.new_case(name, 'nine ' + what, getattr(models, name), out_dim=3, **given)
    for name, what, given in (
        *(('GIN', 'layers', dict(adjacency='counted', n_update_layers=9, concat_hidden=True)),),
        *((name, 'relations', dict(RELATIONS, n_edge_types=9)) for name in ('GGNN', 'GNNFiLM')),
        ('RelGAT', 'heads', {**RELATIONS, **HEADS}),
        ('RelGAT', 'heads concatenated', dict(RELATIONS, **HEADS, concat_heads=True)),
    )
)


def cases(chosen, layouts=LAYOUTS, quick=LAYOUTS, models=parity.QUICK_MODELS):
    """Parametrize a test over cases and layouts, most of which are slow tests.

    A model with default options is tested in all of the layouts. Every other option is tested in
    one of them, in turn: an option has the same code in every layout, and
    tests/models/test_parity.py has all combinations.

    layouts: layouts of the test; quick, models: layouts and models whose defaults are not slow.
    """
    params = []
    for i, case in enumerate(chosen):
        is_default = case is parity.DEFAULTS[case.model]
        for layout in layouts if is_default else (layouts[i % len(layouts)],):
            is_quick = is_default and case.model in models and layout in quick
            name = '%s, %s, %s' % (case.model, case.options, layout)
            params.append(slow_unless(is_quick, case, layout, id=name))
    return pytest.mark.parametrize('case, layout', params)


class PerMolecule(GraphConvPredictor):
    """Predictor that sums the results of a molecule's nodes, unless the model itself does."""

    def __call__(self, atoms, adj, *columns):
        y = self.graph_conv(atoms, adj, *columns)
        if getattr(self.graph_conv, 'node_embedding', False):
            y = chainer_bspmm.functions.segment_sum(adj, y.reshape((adj.n_rows, -1)))
        return self.mlp(y)


def make(case, dropout_ratio=0.0):
    """Return a predictor whose links have this ratio of dropout, if they have any."""
    numpy.random.seed(0)
    # A copy, because the swap happens in place, and all tests share the readouts of a case.
    model = PerMolecule(chainer_bspmm.sparsify(copy.deepcopy(case.make())), MLP(3, hidden_dim=8))
    for link in model.links():
        if hasattr(link, 'dropout_ratio'):
            link.dropout_ratio = dropout_ratio
    return model


def examples_of(case, label=lambda rng: rng.normal(size=3).astype('f')):
    rng = numpy.random.RandomState(1)
    examples = parity.examples_of(case._replace(sizes=SIZES))
    return [(*example, label(rng)) for example in examples]


def converter_for(case, layout):
    return chainer_bspmm.CSRConverter(layout, n_node_columns=int(case.column == 'labels'))


def check_training(device, monkeypatch, case, layout, examples, bound=1e-5, wrap=None):
    """Compare captured training with that of a StandardUpdater; return the captured model."""
    wrap = wrap or functools.partial(Regressor, lossfun=functions.mean_squared_error)
    trained = []
    for kind in (StandardUpdater, GraphUpdater):
        if kind is GraphUpdater and device.xp is numpy:
            host_graphs.stand_in(monkeypatch)
        sgd = optimizers.SGD(1e-7)  # larger steps would multiply rounding errors
        converter = converter_for(case, layout)
        updater = make_updater(kind, device, wrap(make(case)), examples, sgd, converter=converter)
        run(updater, 5)
        trained.append(updater.get_optimizer('main').target)
    assert is_captured(updater)
    # Gradients are compared, too: the trial compares only losses with and without spare rows.
    expected, found = trained
    assert_same_update(found, expected, dict.fromkeys('efd', bound))
    assert layout_of(found) == layout_of(expected) is not None
    return found


@cases(parity.CASES + NINE, quick=('folded',))
def test_training(device, monkeypatch, no_causes, case, layout):
    check_training(device, monkeypatch, case, layout, examples_of(case))


class PerGraph(GraphConvPredictor):
    """Predictor like :class:`PerMolecule`, for upstream's batches of lists of edges."""

    def __call__(self, batch):
        y = self.graph_conv(batch)
        if getattr(self.graph_conv, 'node_embedding', False):
            sums = self.xp.zeros((int(batch.batch[-1]) + 1, y.shape[1]), y.dtype)
            y = functions.scatter_add(sums, batch.batch, y)
        return self.mlp(y)


edge_cases = pytest.mark.parametrize(
    'case',
    [
        pytest.param(
            case,
            id='%s, %s' % (case.model, case.options),
            marks=() if case.options == 'defaults' else pytest.mark.slow,
        )
        for case in parity.EDGE_CASES
    ],
)


def labelled_graphs(case):
    rng = numpy.random.RandomState(1)
    data = parity.examples_of(case._replace(sizes=SIZES))
    for graph in data:
        graph.y = rng.normal(size=3).astype('f')
    return data


@edge_cases
def test_lists_of_edges(device, monkeypatch, no_causes, case):
    examples = to_sparse(labelled_graphs(case), case.n_relations)
    check_training(device, monkeypatch, case, 'packed', examples)


@edge_cases
def test_lists_of_edges_against_upstream(device, monkeypatch, no_causes, case):
    """Training equals that of upstream's model, which is trained on the host.

    Everything is float64, because a sum that is 0 up to rounding may be positive in only one of the
    models, and is then rectified in the other.

    """
    data = labelled_graphs(case)
    for graph in data:
        graph.y = graph.y.astype('d')
        if graph.x.dtype.kind == 'f':
            graph.x = graph.x.astype('d')
    converter = SparseGraphDataset(data).converter
    numpy.random.seed(0)
    with chainer.using_config('dtype', numpy.dtype('d')):
        dense = Regressor(
            PerGraph(copy.deepcopy(case.make()), MLP(3, hidden_dim=8)),
            lossfun=functions.mean_squared_error,
        )
        with chainer.no_backprop_mode(), parity.dense_models_in_float64():
            dense(converter(data[:1], -1))  # makes all parameters

        def started(predictor):
            """Return a Regressor with this predictor and the parameters of upstream's model."""
            model = Regressor(predictor, lossfun=functions.mean_squared_error)
            model.copyparams(dense)
            return model

        examples = to_sparse(data, case.n_relations)
        captured = check_training(
            device, monkeypatch, case, 'packed', examples, bound=1e-12, wrap=started
        )
        sgd = optimizers.SGD(1e-7)
        updater = make_updater(StandardUpdater, HOST, dense, data, sgd, converter=converter)
        with parity.dense_models_in_float64():
            run(updater, 5)
    assert_same_update(captured, dense, {'d': parity.FLOAT64})


@cases(parity.CASES + NINE, quick=('packed', 'folded'))
def test_prediction(device, prediction_graphs, no_causes, case, layout):
    model = make(case)
    examples = examples_of(case)[:8]
    examples = 2 * (examples + examples[::-1])  # all batches have one form
    model.to_device(device)
    converter = converter_for(case, layout)
    n_inputs = 2 + (case.column is not None)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        batches = [converter(examples[i : i + 8], device)[:n_inputs] for i in range(0, 32, 8)]
        expected = [cuda.to_cpu(model(*batch).array) for batch in batches]
    batches = captured_predict(
        model, examples, batch_size=8, converter=converter, n_inputs=n_inputs
    )
    found = [batch.values for batch in batches]
    assert prediction_graphs.n_launches == 3
    assert relative_error(numpy.concatenate(found), numpy.concatenate(expected)) < 1e-5


DTYPES = {'float64': numpy.dtype('d'), 'mixed16': chainer.mixed16}


@pytest.mark.parametrize('dtype', DTYPES)
@cases(parity.DEFAULTS.values(), layouts=('folded',), models=('GGNN',))
def test_dtypes(device, monkeypatch, no_causes, case, layout, dtype):
    dtype = DTYPES[dtype]
    with chainer.using_config('dtype', dtype):
        in_dtype = chainer.get_dtype(dtype)

        def cast(x):
            return x.astype(in_dtype) if x.dtype.kind == 'f' else x

        examples = [tuple(map(cast, example)) for example in examples_of(case)]
        bound = 1e-12 if in_dtype == 'd' else 3e-2
        check_training(device, monkeypatch, case, layout, examples, bound)


HAS_DROPOUT = re.compile('RSGCN|GIN|RelGAT|GWM|WLE')
WITH_DROPOUT = tuple(
    case for case in parity.CASES if HAS_DROPOUT.search(case.model) and case.options != 'no layer'
)


@pytest.mark.parametrize('name', [name for name in parity.DEFAULTS if not HAS_DROPOUT.search(name)])
def test_the_others_have_no_dropout(name):
    model = parity.DEFAULTS[name].make()
    assert not any(hasattr(link, 'dropout_ratio') for link in model.links())


@cases(WITH_DROPOUT, quick=('folded',), models=('RSGCN', 'GIN', 'RelGAT', 'GGNN_GWM', 'NFP_GWLE'))
def test_dropout(device, graphs, no_causes, case, layout):
    """Every captured step drops other elements."""
    predictor = make(case, dropout_ratio=0.3)
    assert any(getattr(link, 'dropout_ratio', 0) for link in predictor.links())
    examples = examples_of(case)[:BATCH]
    converter = converter_for(case, layout)
    # Parameters are drawn on the host, because with a GPU's draw all outputs of a rectifier may
    # be 0.
    with chainer.no_backprop_mode(), chainer.using_config('train', False):
        predictor(*converter(examples)[:-1])
    model = Regressor(predictor, lossfun=functions.mean_squared_error)
    updater = make_updater(
        GraphUpdater,
        device,
        model,
        examples=examples,
        optimizer=optimizers.SGD(0),
        converter=converter,
    )
    run(updater, 2)
    assert is_captured(updater)
    losses = [reported['main/loss'] for reported in run(updater, 8)]
    # Molecules and parameters stay the same, so only dropout changes the loss beyond rounding.
    assert numpy.ptp(losses) > 1e-4 * max(losses)


def partial_labels(rng):
    label = rng.normal(size=3).astype('f')
    label[rng.randint(3)] = numpy.nan
    return label


def ignoring(function):
    return functools.partial(function, ignore_nan=True)


metrics = {'mae': chemistry_functions.mean_absolute_error, 'r2': chemistry_functions.r2_score}
# name -> (function that makes a label, class around the predictor, its loss and metrics)
OBJECTIVES = {
    'classes': (lambda rng: numpy.array(rng.randint(-1, 3), 'i'), Classifier),
    'classes, ignored in metrics': (
        *(lambda rng: numpy.array(rng.randint(-1, 3), 'i'), Classifier),
        functools.partial(functions.softmax_cross_entropy, normalize=False),
        functools.partial(functions.accuracy, ignore_label=-1),
    ),
    'several labels': (
        *(lambda rng: rng.randint(-1, 2, 3).astype('i'), Classifier),
        *(functions.sigmoid_cross_entropy, functions.binary_accuracy),
    ),
    'partial labels': (
        *(partial_labels, Regressor, ignoring(chemistry_functions.mean_squared_error)),
        {name: ignoring(metric) for name, metric in metrics.items()},
    ),
}


@pytest.mark.parametrize('objective', OBJECTIVES)
@pytest.mark.parametrize(
    'layout',
    [pytest.param(name, marks=() if name == 'folded' else pytest.mark.slow) for name in LAYOUTS],
)
def test_objectives(device, monkeypatch, no_causes, layout, objective):
    label, kind, *functions_ = OBJECTIVES[objective]
    wrap = functools.partial(kind, **dict(zip(('lossfun', 'metrics_fun'), functions_)))
    case = parity.DEFAULTS['GGNN']
    examples = examples_of(case, label)
    check_training(device, monkeypatch, case, layout, examples, wrap=wrap)
