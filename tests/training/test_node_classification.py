"""`run_node_classification_train` has upstream's results, in captured steps."""

import copy
import json
import re

import numpy
import pytest

import chainer
from chainer.training import extensions
from chainer_chemistry.models import GIN
from chainer_chemistry.models.gin import GINSparse
from chainer_chemistry.models.prediction.node_classifier import NodeClassifier
from chainer_chemistry.utils import train_utils

from chainer_bspmm import sparsify
from chainer_bspmm.training import GraphUpdater, node_classification, run_node_classification_train
from tests.support import relative_error
from tests.support.graph_data import edge_lists, OfPaddingData, padding_data
from tests.training import host_graphs

N, N_CLASSES, EPOCHS = 80, 4, 6
DATA = {'GINSparse': lambda data: data, 'GIN, dense': padding_data}
DATA['GIN, CooMatrix'] = lambda data: padding_data(data, as_coo=True)
MASK = numpy.random.RandomState(1).uniform(size=N) < 0.4


def graph(kind='GINSparse', **options):
    options = {'n_channels': 7, 'n_classes': N_CLASSES, **options}
    return DATA[kind](edge_lists([N], **options)[0])


def relabelled(y):
    data = graph()
    data.y = y
    return data


@pytest.fixture
def captured(device, monkeypatch):
    """Capture the function's steps, also on the host; list of the updaters that it makes."""
    made = []

    class Updater(GraphUpdater):
        def __init__(self, iterator, optimizer, **kwargs):
            super().__init__(iterator, optimizer, on_difference='raise', **kwargs)
            made.append(self)

    if device.xp is numpy:
        host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(node_classification, 'StandardUpdater', Updater)
    monkeypatch.setattr(node_classification, 'GraphUpdater', Updater)
    return made


def train(function, model, data, out, **options):
    """Train; return the log, which has a dict for each epoch."""
    numpy.random.seed(0)  # layers that learn their input size are initialised in the first step
    optimizer = chainer.optimizers.SGD(0.1)
    log = [extensions.LogReport(trigger=(1, 'iteration'))]
    options = {'epoch': EPOCHS, 'extensions_list': log, 'optimizer': optimizer, **options}
    function(model, data, MASK, ~MASK, out=str(out), use_default_extensions=False, **options)
    return json.loads((out / 'log').read_text())


def assert_same_training(ours, theirs):
    """Check that two logs agree, except in times."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one.keys() == other.keys()
        for name in one.keys() - {'elapsed_time'}:
            assert abs(one[name] - other[name]) <= 1e-5 * abs(other[name]), name


def make_pair(kind='GINSparse'):
    """Return the classifier of upstream's example, and ours with the same parameters.

    Upstream's has a readout that never gets parameters.
    """
    numpy.random.seed(0)
    make = GINSparse if kind == 'GINSparse' else GIN
    theirs = make(
        out_dim=None,
        node_embedding=True,
        hidden_channels=8,
        out_channels=N_CLASSES,
        n_update_layers=2,
        dropout_ratio=0.0,
    )
    classifier = NodeClassifier(theirs if kind == 'GINSparse' else OfPaddingData(theirs))
    with chainer.no_backprop_mode():
        classifier(graph(kind), MASK, ~MASK)
    return classifier, sparsify(NodeClassifier(copy.deepcopy(theirs)))


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('kind', DATA)
def test_results_are_upstreams(device, captured, no_causes, tmp_path, kind):
    theirs, ours = make_pair(kind)
    expected = train(train_utils.run_node_classification_train, theirs, graph(kind), tmp_path)
    found = train(run_node_classification_train, ours, graph(kind), tmp_path, device=device)
    assert_same_training(found, expected)
    for one, other in zip(ours.params(), theirs.params()):
        if other.is_initialized:  # upstream never initialises first_mlp
            assert relative_error(one.array, other.array) < 1e-5
    (updater,) = captured
    (program,) = updater._driver.programs.values()  # one graph is one form
    assert program.is_captured


def test_on_a_cpu_steps_are_chainers(tmp_path, recwarn):
    theirs, ours = make_pair()
    expected = train(train_utils.run_node_classification_train, theirs, graph(), tmp_path)
    found = train(run_node_classification_train, ours, graph(), tmp_path)
    assert_same_training(found, expected)
    assert not [warning for warning in recwarn if 'GraphUpdater' in str(warning.message)]


def test_resume(tmp_path):
    """A snapshot lacks parameters that are never used, and can be resumed nevertheless."""

    def trained(model, name, **options):
        optimizer = chainer.optimizers.Adam()
        folder = tmp_path / name
        return train(
            run_node_classification_train, model, graph(), folder, optimizer=optimizer, **options
        )

    _, model = make_pair()
    at_once = trained(model, 'at once')
    _, model = make_pair()
    snapshot = extensions.snapshot(filename='snapshot')
    log = extensions.LogReport(trigger=(1, 'iteration'))
    trained(model, 'resumed', epoch=3, extensions_list=[snapshot, log])
    _, model = make_pair()
    for param in model.params(include_uninit=False):
        param.array[...] = 0  # resuming must replace these values
    resumed = trained(model, 'resumed', resume_path=tmp_path / 'resumed' / 'snapshot')
    assert_same_training(resumed, at_once)


def test_default_extensions(tmp_path):
    _, model = make_pair()
    run_node_classification_train(
        model,
        graph(),
        numpy.flatnonzero(MASK),
        numpy.flatnonzero(~MASK),
        epoch=2,
        out=str(tmp_path),
    )
    assert len(json.loads((tmp_path / 'log').read_text())) == 2


@pytest.mark.parametrize(
    'change, error, message',
    [
        (
            {'model': make_pair()[0]},
            TypeError,
            'model: expected the NodeClassifier of chainer_bspmm.sparsify(model), got '
            'chainer_chemistry.models.prediction.node_classifier.NodeClassifier',
        ),
        (
            {'data': graph(n_classes=None)},
            ValueError,
            'data.y: expected a label for each of 80 nodes, got None',
        ),
        (
            {'data': relabelled(numpy.zeros((40, 2), 'i'))},
            ValueError,
            'data.y: expected a label for each of 80 nodes, got shape (40, 2)',
        ),
        (
            {'data': (1, 2)},
            TypeError,
            'data: expected SparseGraphData or PaddingGraphData, got tuple',
        ),
        (
            {'valid_mask': MASK[1:]},
            ValueError,
            'valid_mask: expected a bool for each of 80 nodes, got shape (79,)',
        ),
        (
            {'train_mask': numpy.array([80])},
            ValueError,
            'train_mask: expected node indices in [0, 80), got 80',
        ),
        (
            {'train_mask': numpy.array([3, 82, 79])},
            ValueError,
            'train_mask: expected node indices in [0, 80), got 82',
        ),
        (
            {'train_mask': numpy.array([-1, 3])},
            ValueError,
            'train_mask: expected node indices in [0, 80), got -1',
        ),
        (
            {'train_mask': numpy.zeros_like(MASK)},
            ValueError,
            'train_mask: expected nodes to train on, got none',
        ),
        (
            {'train_mask': MASK * 1.0},
            TypeError,
            'train_mask: expected bools or integers of one dimension, got float64 of shape (80,)',
        ),
    ],
)
def test_errors(tmp_path, change, error, message):
    given = {'model': make_pair()[1], 'data': graph(), 'train_mask': MASK, 'valid_mask': ~MASK}
    with pytest.raises(error, match='^%s$' % re.escape(message)):
        run_node_classification_train(**{**given, **change}, out=str(tmp_path))
