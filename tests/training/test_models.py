"""Models with functions of their own that must cope with spare rows and entries, captured."""

import warnings

import numpy
import pytest

import chainer
from chainer import functions
from chainer import optimizers
from chainer.backends import cuda
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm import concat_mols
from chainer_bspmm import models
from chainer_bspmm.training import captured_predict
from chainer_bspmm.training import GraphUpdater
from tests.support import relative_error
from tests.support.training import make_updater
from tests.support.training import molecules
from tests.support.training import parameters
from tests.support.training import run
from tests.support.training import without_dropout
from tests.training import host_graphs

MODELS = {
    'GNNFiLM': lambda: models.GNNFiLM(5, 8, 2, n_edge_types=4),
    'RelGAT': lambda: models.RelGAT(5, 8, n_update_layers=2, n_edge_types=4),
    'MPNN': lambda: models.MPNN(5, 8, 2, n_edge_types=4, message_func='ggnn'),
    'RelGAT, dropout': lambda: models.RelGAT(
        5, 8, n_update_layers=2, n_edge_types=4, dropout_ratio=0.3
    ),
}


@pytest.mark.parametrize('name', MODELS)
def test_training(device, monkeypatch, name):
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        if kind is GraphUpdater and device.xp is numpy:
            host_graphs.stand_in(monkeypatch)
        numpy.random.seed(0)
        model = Regressor(
            GraphConvPredictor(MODELS[name](), MLP(3, hidden_dim=8)),
            lossfun=functions.mean_squared_error,
        )
        updater = make_updater(kind, device, model, molecules(40, 4), optimizers.SGD(1e-3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            run(updater, 6)
        assert not [w for w in caught if 'trains eagerly' in str(w.message)]
        results.append(parameters(updater))
    for key, expected in results[0].items():
        assert numpy.isfinite(cuda.to_cpu(results[1][key])).all(), key
        if 'dropout' not in name:
            assert relative_error(results[1][key], expected) < 1e-5, key


@pytest.mark.parametrize('name', MODELS)
def test_prediction(device, monkeypatch, name):
    if device.xp is numpy:
        host_graphs.stand_in_for_prediction(monkeypatch)
    examples = molecules(40, 4)
    numpy.random.seed(0)
    model = without_dropout(GraphConvPredictor(MODELS[name](), MLP(3, hidden_dim=8)))
    model.to_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        found = list(captured_predict(model, examples, batch_size=8))
    with chainer.using_config('train', False):
        expected = model(*concat_mols([example[:2] for example in examples], device))
    values = numpy.concatenate([cuda.to_cpu(batch.values) for batch in found])
    assert relative_error(values, expected.array) < 1e-5
