"""Every model with every option is captured in every layout, in training and for predictions."""

import itertools

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions
from chainer import optimizers
from chainer.backends import cuda
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.training import captured_predict
from chainer_bspmm.training import GraphUpdater
from tests.support import parity
from tests.support import relative_error
from tests.support.training import assert_same_update
from tests.support.training import make_updater
from tests.support.training import run
from tests.support.training import without_dropout
from tests.training import host_graphs

SIZES = (5, 1, 8, 3, 2, 6, 4, 1, 7, 5, 3, 2, 8, 8, 4, 8)  # two batches
LAYOUTS = 'packed', 'folded', 'padded'

every_model = pytest.mark.parametrize(
    'case, layout',
    [
        pytest.param(
            case,
            layout,
            id='%s, %s, %s' % (case.model, case.options, layout),
            marks=() if case in parity.DEFAULTS.values() else pytest.mark.slow,
        )
        for case, layout in itertools.product(parity.CASES, LAYOUTS)
    ],
)


class PerMolecule(GraphConvPredictor):
    """Sums what a model gives for each node, and leaves alone what it gives for each molecule."""

    def __call__(self, atoms, adj, *columns):
        y = self.graph_conv(atoms, adj, *columns)
        if getattr(self.graph_conv, 'node_embedding', False):
            y = chainer_bspmm.functions.segment_sum(adj, y.reshape((adj.n_rows, -1)))
        return self.mlp(y)


def make(case):
    numpy.random.seed(0)
    model = chainer_bspmm.sparsify(case.make())
    return without_dropout(PerMolecule(model, MLP(3, hidden_dim=8)))


def examples_of(case):
    rng = numpy.random.RandomState(1)
    examples = parity.examples_of(case._replace(sizes=SIZES))
    return [(*example, rng.normal(size=3).astype('f')) for example in examples]


def converter_for(case, layout):
    return chainer_bspmm.CSRConverter(layout, n_node_columns=int(case.column == 'labels'))


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@every_model
def test_training(device, monkeypatch, no_causes, case, layout):
    models = []
    for kind in (StandardUpdater, GraphUpdater):
        if kind is GraphUpdater and device.xp is numpy:
            host_graphs.stand_in(monkeypatch)
        model = Regressor(make(case), lossfun=functions.mean_squared_error)
        updater = make_updater(
            kind,
            device,
            model,
            examples_of(case),
            optimizers.SGD(1e-7),  # training would multiply rounding errors
            converter=converter_for(case, layout),
        )
        run(updater, 5)
        models.append(model)
    assert any(program.is_captured for program in updater._programs.values())
    # Losses were compared with and without spare rows, gradients not yet.
    expected, found = models
    assert_same_update(found, expected, {'f': 1e-5})


@every_model
def test_prediction(device, prediction_graphs, no_causes, case, layout):
    model, examples = make(case), examples_of(case)[:8]
    examples = 2 * (examples + examples[::-1])  # batches of one layout
    model.to_device(device)
    converter, n_inputs = converter_for(case, layout), 2 + (case.column is not None)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        expected = [
            cuda.to_cpu(model(*converter(examples[i : i + 8], device)[:n_inputs]).array)
            for i in range(0, 32, 8)
        ]
    found = captured_predict(model, examples, batch_size=8, converter=converter, n_inputs=n_inputs)
    found = [batch.values for batch in found]
    assert prediction_graphs.n_launches == 3
    assert relative_error(numpy.concatenate(found), numpy.concatenate(expected)) < 1e-5
