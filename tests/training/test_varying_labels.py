"""Labels of several shapes, and names: trained, evaluated and predicted as upstream does."""

import re
import warnings

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions as F, optimizers
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.training import GraphUpdater
from tests.support import assert_close_arrays
from tests.support.training import BATCH, HOST, make_model, MODELS, molecules, parameters, run
from tests.support.training import without_dropout

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
N_BATCHES = 5


def examples_of(seed=0, n=N_BATCHES * BATCH):
    """Return molecules with one to three labels each, so that batches are one to three wide."""
    widths = [3 if i % 19 == 0 else 2 if i % 11 == 0 else 1 for i in range(n)]
    return [
        (atoms, adj, label[:width])
        for (atoms, adj, label), width in zip(molecules(n, seed=seed), widths, strict=True)
    ]


EXAMPLES = examples_of()


def loss_of_width(y, t):
    """Mean squared error over the labels of the widest molecule of a batch, padding included."""
    return F.mean_squared_error(y[:, : t.shape[1]], t)


def model_of(is_dense=False):
    model = without_dropout(make_model(lossfun=loss_of_width))
    model.metrics_fun = {}
    return chainer_bspmm.densify(model) if is_dense else model


def iterator_of(dataset, **options):
    return SerialIterator(dataset, BATCH, shuffle=False, **options)


@pytest.fixture
def adopting(monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', True)


def trained(dataset, device, converter=None, n_steps=8 * N_BATCHES):
    """Return the updater of a script, its reported values and its parameters."""
    device.xp.random.seed(3)  # layers that learn their input size are initialised there
    model = model_of(is_dense=converter is not None)
    updater = StandardUpdater(
        iterator_of(dataset),
        optimizers.SGD(1e-2).setup(model),
        converter=converter or chainer_bspmm.concat_mols,
        device=device,
    )
    return updater, run(updater, n_steps), parameters(updater)


@pytest.mark.parametrize('kind', [list, to_sparse], ids=['dense examples', 'a SparseDataset'])
def test_it_trains_as_upstream(device, graphs, no_causes, adopting, kind):
    """Each width has its own captured step, and padding of one batch is not used for another."""
    _, expected_reports, expected = trained(EXAMPLES, device, dense_concat_mols)
    updater, reports, actual = trained(kind(EXAMPLES), device)
    assert type(updater) is GraphUpdater
    assert {form.labels for form, *_ in updater._driver.programs} == {
        ((numpy.dtype('f'), (width,)),) for width in (1, 2, 3)
    }
    if graphs is not None:
        assert graphs[-1].n_launches > 4 * N_BATCHES
    for ours, theirs in zip(reports, expected_reports, strict=True):
        numpy.testing.assert_allclose(ours['main/loss'], theirs['main/loss'], rtol=1e-4)
    assert_close_arrays(actual, expected, 1e-3)


def test_it_trains_as_upstream_without_captures():
    _, expected_reports, expected = trained(EXAMPLES, HOST, dense_concat_mols, N_BATCHES)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        _, reports, actual = trained(EXAMPLES, HOST, n_steps=N_BATCHES)
    for ours, theirs in zip(reports, expected_reports, strict=True):
        numpy.testing.assert_allclose(ours['main/loss'], theirs['main/loss'], rtol=1e-5)
    assert_close_arrays(actual, expected, 1e-5)


@pytest.mark.parametrize('kind', [list, to_sparse], ids=['dense examples', 'a SparseDataset'])
def test_it_is_evaluated_as_upstream(device, prediction_graphs, no_causes, adopting, kind):
    losses = []
    for converter, dataset in ((dense_concat_mols, EXAMPLES), (None, kind(EXAMPLES))):
        device.xp.random.seed(3)  # layers that learn their input size are initialised there
        model = model_of(is_dense=converter is not None)
        model.to_device(device)
        evaluator = extensions.Evaluator(
            iterator_of(dataset, repeat=False),
            model,
            converter=converter or chainer_bspmm.concat_mols,
            device=device,
        )
        for _ in range(3):
            with chainer.Reporter().scope({}):
                losses.append(float(evaluator()['main/loss']))
    numpy.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    assert prediction_graphs.n_launches


class WithExtra(chainer.Chain):
    """A predictor with one more input, which has several values for each molecule."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.graph_conv = MODELS['RSGCN']()

    def forward(self, atoms, adj, extra):
        return self.graph_conv(atoms, adj) * F.mean(extra, axis=1, keepdims=True)


@pytest.mark.parametrize('kind', [list, to_sparse], ids=['dense examples', 'a SparseDataset'])
def test_it_predicts_as_upstream(device, prediction_graphs, adopting, kind):
    numpy.random.seed(0)
    model = Regressor(WithExtra(), lossfun=F.mean_squared_error)
    model.to_device(device)
    ours = model.predict(kind(EXAMPLES), BATCH, converter=chainer_bspmm.concat_mols)
    chainer_bspmm.densify(model)
    theirs = model.predict(EXAMPLES, BATCH, converter=dense_concat_mols)
    numpy.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_models_are_compared_on_such_labels():
    assert chainer_bspmm.check_swap(model_of(), EXAMPLES[:16]).equal is True


class NamedLoss(chainer.Chain):
    """A loss that keeps the names of its molecules."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.model = model_of()

    def forward(self, atoms, adj, names, t):
        self.names = names
        return self.model(atoms, adj, t)


def named_updater(device=None):
    dataset = [(*e[:2], 'id%d' % i, e[2]) for i, e in enumerate(EXAMPLES)]
    optimizer = optimizers.SGD(1e-2).setup(NamedLoss())
    return StandardUpdater(
        iterator_of(dataset), optimizer, converter=chainer_bspmm.concat_mols, device=device
    )


def test_names_reach_the_loss():
    updater = named_updater()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        updater.update()
        updater.update()
    names = updater.get_optimizer('main').target.names
    assert names.tolist() == ['id%d' % i for i in range(BATCH, 2 * BATCH)]


def test_a_step_with_names_is_not_captured(device, graphs, adopting):
    updater = named_updater(device)
    message = (
        'GraphUpdater trains eagerly: converter: expected numbers, got names (<U3); '
        'leave the column out'
    )
    with pytest.warns(UserWarning, match='^%s$' % re.escape(message)):
        if graphs is not None:
            updater.update()
        else:  # The eager step asks for arrays on the GPU, which cannot hold names.
            with pytest.raises(
                TypeError, match=r'^batch\[\.\.\.\]\[2\]: expected numbers for @cupy:0'
            ):
                updater.update()
