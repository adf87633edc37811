"""`NodeClassifier` has upstream's losses, metrics and gradients for nodes of one graph."""

import copy
import functools

import numpy
import pytest

import chainer
from chainer import functions
from chainer_chemistry.models import GIN as DenseGIN
from chainer_chemistry.models.gin import GINSparse as DenseGINSparse
from chainer_chemistry.models.prediction.node_classifier import NodeClassifier as Dense
from chainer_chemistry.utils.train_utils import run_node_classification_train

from chainer_bspmm import CSRConverter, densify, sparsify
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.models import GIN, GINSparse, NodeClassifier
from tests.support import parity, relative_error
from tests.support.cases import pairs
from tests.support.graph_data import edge_lists, OfPaddingData, padding_data

N, N_CHANNELS, N_CLASSES = 60, 9, 4
DATA = {
    'list of edges': lambda data: data,
    'dense': padding_data,
    'CooMatrix': functools.partial(padding_data, as_coo=True),
}

OPTIONS = {
    'defaults': {},
    'another loss': {'lossfun': lambda y, t: functions.sum(y * y) / len(t)},
    'hinge': {'lossfun': functions.hinge},
    'two metrics': {
        'metrics_fun': {
            'accuracy': functions.accuracy,
            'error': lambda y, t: 1 - functions.accuracy(y, t),
        }
    },
    'no metrics': {'metrics_fun': None},
}


def graph(kind):
    return DATA[kind](edge_lists([N], n_channels=N_CHANNELS, n_classes=N_CLASSES)[0])


def masks():
    rng = numpy.random.RandomState(1)
    train = rng.uniform(size=N) < 0.3
    return train, ~train & (rng.uniform(size=N) < 0.8)


def predictor(kind):
    numpy.random.seed(0)
    make = DenseGINSparse if kind == 'list of edges' else DenseGIN
    return make(
        3,
        node_embedding=True,
        hidden_channels=8,
        out_channels=N_CLASSES,
        n_update_layers=2,
        dropout_ratio=0.0,
    )


def result(model, *inputs):
    """Return the loss, the reported values, and the gradients."""
    reporter = chainer.Reporter()
    observed = {}
    reporter.add_observer('main', model)
    with reporter, reporter.scope(observed):
        loss = model(*inputs)
    model.cleargrads()
    loss.backward()
    gradients = [param.grad for param in model.params() if param.grad is not None]
    return loss.array, observed, gradients


@pytest.mark.parametrize('kind, name, as_numbers', pairs(list(DATA), list(OPTIONS), [False, True]))
def test_parity(device, kind, name, as_numbers):
    options = OPTIONS[name]
    train, valid = masks()
    gnn = predictor(kind)
    theirs = Dense(gnn if kind == 'list of edges' else OfPaddingData(gnn), **options)
    theirs(graph(kind), train, valid)  # makes the parameters
    parity.randomised(theirs)
    model = sparsify(Dense(copy.deepcopy(gnn), **options))
    model.to_device(device)
    expected_loss, expected, expected_gradients = result(theirs, graph(kind), train, valid)
    inputs = CSRConverter('packed')(to_sparse([graph(kind)]), device)
    if as_numbers:
        train, valid = (numpy.flatnonzero(mask)[None] for mask in (train, valid))
    loss, found, gradients = result(model, *inputs, device.send(train), device.send(valid))
    assert relative_error(loss, expected_loss) < 1e-5
    assert list(found) == list(expected)
    for name in expected:
        assert abs(float(found[name]) - float(expected[name])) < 1e-5 * abs(float(expected[name]))
    assert len(gradients) == len(expected_gradients)
    for one, other in zip(gradients, expected_gradients):
        assert relative_error(one, other) < 1e-5


def test_metrics_can_be_switched_off():
    model = sparsify(Dense(predictor('list of edges')))
    model.compute_metrics = False
    batch = CSRConverter('packed')(to_sparse([graph('list of edges')]))
    _, found, _ = result(model, *batch, *masks())
    assert list(found) == ['main/loss(train)', 'main/loss(valid)']


@pytest.mark.parametrize('layout', ['folded', 'padded'])
def test_other_layouts(layout):
    """Columns of nodes have rows for phantom atoms, which no mask selects."""
    train, valid = masks()
    data = graph('dense')
    example = (data.x, data.adj, data.y, train, valid)
    model = sparsify(Dense(predictor('dense')))
    expected, found = (
        model(*CSRConverter(one, n_node_columns=3)([example])).array for one in ('packed', layout)
    )
    assert abs(found - expected) < 1e-6


def test_swap():
    model = Dense(predictor('list of edges'))
    assert sparsify(model) is model and type(model) is NodeClassifier
    assert type(model.predictor) is GINSparse
    densify(model.predictor)
    sparsify(model)
    assert type(model) is NodeClassifier and type(model.predictor) is GINSparse
    densify(model)
    assert type(model) is Dense and type(model.predictor) is DenseGINSparse
    assert type(sparsify(Dense(predictor('dense'))).predictor) is GIN


def test_what_cannot_be_swapped():
    with pytest.raises(
        ValueError, match='model.predictor: abc.Mine is a subclass .* lists what can be swapped'
    ):
        sparsify(Dense(type('Mine', (DenseGIN,), {})(3)))
    with pytest.raises(
        ValueError,
        match='model: expected a graph convolution of Chainer Chemistry, .* lists what can '
        'be swapped',
    ):
        sparsify(Dense(chainer.links.Linear(3)))


def test_upstreams_training_function(tmp_path):
    """Upstream's function passes unconverted data, and the error recommends our function."""
    model = sparsify(Dense(predictor('list of edges')))
    with pytest.raises(
        TypeError,
        match='x: expected features of nodes, followed by a BatchedCSR, got a SparseGraphData: '
        'use chainer_bspmm.training.run_node_classification_train',
    ):
        run_node_classification_train(
            model, graph('list of edges'), *masks(), out=str(tmp_path), use_default_extensions=False
        )
