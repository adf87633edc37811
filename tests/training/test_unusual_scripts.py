"""`GraphUpdater` in scripts that do unusual things that Chainer allows."""

import gc
import types
import warnings
import weakref

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions
from chainer import links
from chainer import optimizers
from chainer.datasets import split_dataset
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.training.graph_updater import GraphUpdater
from chainer_bspmm.cuda import gemm
from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.training import batches
from chainer_bspmm.training.step_driver import StepDriver
from tests.support import relative_error
from tests.support.training import assert_same_bits
from tests.support.training import BATCH
from tests.support.training import make_updater
from tests.support.training import molecules
from tests.support.training import n_keys
from tests.support.training import of_variables
from tests.support.training import parameters
from tests.support.training import Row
from tests.support.training import run
from tests.support.training import same_molecules
from tests.support.training import small_model
from tests.support.training import three_columns
from tests.support.training import without_dropout
from tests.training import host_graphs
from tests.training.host_graphs import causes

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


def on_host(array):
    return chainer.backends.cuda.to_cpu(getattr(array, 'array', array)).tolist()


# What the model keeps of a step.


def test_attributes_that_a_step_sets(device, graphs, no_causes):
    """They are those of the last step, from any graph, as after a step run eagerly."""

    def function(link, atoms, adj):
        link.n_graphs = adj.n_graphs
        return three_columns(link, atoms, adj)

    examples, seen = same_molecules(14), []
    for kind in (StandardUpdater, GraphUpdater):
        model = without_dropout(small_model(function, n_graphs=0))
        updater = make_updater(kind, device, model, examples, optimizers.SGD(0.01))
        iterators = [SerialIterator(examples, n, shuffle=False) for n in (8, 6)]
        kept = []
        for i in range(24):
            updater._iterators['main'] = iterators[i % 2]
            loss = run(updater, 1)[0]['main/loss']
            assert on_host(model.loss) == pytest.approx(loss, rel=1e-6)
            kept.append([model.predictor.n_graphs, len(model.y), loss])
            with chainer.using_config('train', False), chainer.no_backprop_mode():
                model(*chainer_bspmm.concat_mols(examples[:3], device))
        seen.append(kept)
    if graphs:
        assert graphs[0].n_launches > 12
    numpy.testing.assert_allclose(seen[1], seen[0], rtol=1e-3)


# A model of which the optimizer has only a part, and links that are no model's part.


def only_a_head(kind, device):
    """Return an updater of the last layer of a model, and the part that is not trained."""
    numpy.random.seed(0)
    row = Row(lambda link, atoms, adj: link.head(link.inner(atoms, adj)))
    with row.init_scope():
        row.head = links.Linear(5, 3)
    without_dropout(row).to_device(device)

    def loss_func(atoms, adj, labels):
        return functions.mean_squared_error(row(atoms, adj), labels)

    updater = make_updater(
        kind, device, row.head, same_molecules(), optimizers.SGD(0.01), loss_func=loss_func
    )
    return updater, row.inner


def test_parameters_that_are_not_the_optimizer_s(device, graphs, no_causes):
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater, body = only_a_head(kind, device)
        run(updater, 4)
        for param in body.params(False):
            param.array = param.array * device.xp.float32(1.5)
        run(updater, 4)
        results.append(parameters(updater))
        if kind is GraphUpdater:
            assert n_keys(updater) == 2
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-5, name


def test_gradients_of_parameters_that_are_not_the_optimizer_s(device, graphs, no_causes):
    updater, body = only_a_head(GraphUpdater, device)
    gradients = []
    for param in body.params(False):
        param.grad = device.xp.full_like(param.array, 7)
        gradients.append(param.grad)
    run(updater, 4)
    for param, gradient in zip(body.params(False), gradients):
        assert param.grad is gradient and bool((gradient == 7).all())


def test_a_teacher_in_a_closure(device, graphs):
    """Averages of a link that the loss uses, and no optimizer has, move once a step."""
    averages = []
    for kind in (StandardUpdater, GraphUpdater):
        teacher, model = links.BatchNormalization(3), small_model()
        teacher.to_device(device)

        def loss_func(atoms, adj, labels):
            return functions.mean_squared_error(teacher(labels), model.predictor(atoms, adj))  # NOQA: B023

        updater = make_updater(kind, device, model, same_molecules(), loss_func=loss_func)
        run(updater, 4)
        averages.append(chainer.backends.cuda.to_cpu(teacher.avg_mean))
    assert graphs is None or graphs[0].n_launches
    assert relative_error(averages[1], averages[0]) < 1e-5


def test_batch_norm_that_learns_its_size(device, graphs):
    averages = []
    for kind in (StandardUpdater, GraphUpdater):

        def function(link, atoms, adj):
            y = three_columns(link, atoms, adj)
            return link.norm(y)

        model = without_dropout(small_model(function))
        with model.predictor.init_scope():
            model.predictor.norm = links.BatchNormalization(axis=0)
        updater = make_updater(kind, device, model, same_molecules(), optimizers.SGD(0.01))
        run(updater, 5)
        averages.append(chainer.backends.cuda.to_cpu(model.predictor.norm.avg_mean))
    assert graphs is None or graphs[0].n_launches
    assert relative_error(averages[1], averages[0]) < 1e-4


# Causes to train eagerly, and what is left of the graphs then.


def test_a_model_that_fails_with_spare_rows(device, graphs):
    def five_atoms_each(link, atoms, adj):
        h = functions.reshape(link.inner.embed(atoms), (adj.n_graphs, 5 + 1, -1))
        return functions.sum(h[:, :5], axis=1)[:, :3]

    updater = make_updater(GraphUpdater, device, small_model(five_atoms_each), same_molecules())
    with pytest.warns(UserWarning, match='/predictor .Row. cannot be captured: ') as caught:
        reported = run(updater, 3)
    assert len(causes(caught)) == 1 and __file__ in causes(caught)[0]
    assert all('main/loss' in report for report in reported)


def test_a_model_that_insists_on_three_dimensions(device, graphs):
    def padded(link, atoms, adj):
        n_graphs, n_atoms = atoms.shape
        return link.inner(atoms, adj)[:, :3] / n_atoms

    converter = chainer_bspmm.CSRConverter('padded')
    updater = make_updater(
        GraphUpdater, device, small_model(padded), same_molecules(), converter=converter
    )
    with pytest.warns(UserWarning, match='/predictor .Row. cannot be captured: ') as caught:
        reported = run(updater, 3)
    assert len(causes(caught)) == 1
    assert all('main/loss' in report for report in reported)


@pytest.mark.parametrize('dtype', ('float16', 'float32'))
def test_rounding_of_the_parameters_dtype(monkeypatch, dtype):
    """However exact the loss is."""
    host_graphs.stand_in(monkeypatch)

    def function(link, atoms, adj):
        y = functions.cast(three_columns(link, atoms, adj), 'float32')
        return y * (1.003 if adj.has_spare else 1.0)

    with chainer.using_config('dtype', numpy.dtype(dtype)):
        updater = make_updater(
            GraphUpdater,
            chainer.get_device('@numpy'),
            without_dropout(small_model(function)),
            same_molecules(),
            optimizers.SGD(1e-4),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            run(updater, 3)
    assert bool(causes(caught)) == (dtype == 'float32')


def test_an_error_of_the_user_s(device, graphs):
    """It comes as from StandardUpdater, after the warning."""

    def fails(link, atoms, adj):
        raise LookupError('mine')

    updater = make_updater(GraphUpdater, device, small_model(fails), same_molecules())
    with pytest.warns(UserWarning, match='LookupError: mine'), pytest.raises(LookupError):
        run(updater, 1)
    assert updater.iteration == updater.get_optimizer('main').t == 0


@pytest.mark.parametrize('value', ('a word', None, (1.0, 2)))
def test_reports_that_are_no_numbers(device, graphs, value):
    def reports(link, atoms, adj):
        chainer.report({'value': value}, link)
        return three_columns(link, atoms, adj)

    model = small_model(reports)
    updater = make_updater(GraphUpdater, device, model, same_molecules())
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    reporter.add_observer('row', model.predictor)
    with pytest.warns(UserWarning, match='row/value is reported as a value on the host'):
        for _ in range(3):
            with reporter.scope({}):
                updater.update()


def test_a_loss_that_is_none(device, graphs):
    updater = make_updater(
        GraphUpdater, device, small_model(), same_molecules(), loss_func=lambda *args: None
    )
    with (
        pytest.warns(UserWarning, match='trains eagerly'),
        pytest.raises(AttributeError, match="'NoneType' object has no attribute 'backward'"),
    ):
        run(updater, 1)


def test_memory_goes_when_steps_turn_eager(device, graphs):
    updater = make_updater(GraphUpdater, device, small_model(), same_molecules())
    run(updater, 3)
    capturer = weakref.ref(updater._driver.capturer)
    if graphs:
        graphs.clear()
    updater.converter = of_variables
    with pytest.warns(UserWarning, match='expected arrays on the host'):
        run(updater, 1)
    gc.collect()
    assert updater.graph_nbytes == 0 and capturer() is None


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_memory_goes_with_the_updater(monkeypatch):
    """Not with the next garbage collection: a driver and its programs are no cycle."""
    host_graphs.stand_in(monkeypatch)
    device = chainer.get_device('@numpy')
    updater = make_updater(GraphUpdater, device, small_model(), same_molecules())
    run(updater, 3)
    assert any(program.is_captured for program in updater._driver.programs.values())
    driver = weakref.ref(updater._driver)
    gc.disable()
    try:
        del updater
        assert driver() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_made_of_a_standard_updater(device, graphs, no_causes):
    """All that it has besides is one object, which can be made late."""
    results = []
    for kind in (GraphUpdater, StandardUpdater):
        updater = make_updater(kind, device, without_dropout(small_model()), same_molecules())
        if kind is StandardUpdater:
            updater.__class__ = GraphUpdater
            updater._driver = StepDriver(updater.get_optimizer('main'), updater.input_device)
        run(updater, 6)
        assert any(program.is_captured for program in updater._driver.programs.values())
        results.append(parameters(updater))
    assert_same_bits(*results)


def test_no_cublas(device, graphs, monkeypatch):
    def fails():
        raise FileNotFoundError('/proc/self/maps')

    monkeypatch.setattr(gemm, 'Blas', fails)
    updater = make_updater(GraphUpdater, device, small_model(), same_molecules())
    with pytest.warns(UserWarning, match='trains eagerly: no cuBLAS handle .*proc/self/maps'):
        run(updater, 2)
    assert updater._driver.capturer is None


def test_parameters_elsewhere(monkeypatch):
    host_graphs.stand_in(monkeypatch)
    updater = make_updater(
        GraphUpdater, chainer.get_device('@numpy'), small_model(), same_molecules()
    )
    updater._driver.device = types.SimpleNamespace(xp=numpy, name='@cupy:1')
    assert updater._driver._why_not() == (
        "parameter '/predictor/inner/embed/W' is on @numpy, the device is @cupy:1"
    )


def test_a_label_that_is_no_row_of_each_molecule(device, graphs):
    def convert(batch, device=None):
        return (*chainer_bspmm.concat_mols(batch, device), numpy.full((), 2, 'f'))

    model = small_model()
    updater = make_updater(
        GraphUpdater,
        device,
        model,
        same_molecules(),
        converter=convert,
        loss_func=lambda atoms, adj, labels, factor: model(atoms, adj, labels) * float(factor),
    )
    with pytest.warns(UserWarning, match=r'each of 8 molecules in output 3, got shape \(\)'):
        run(updater, 2)


@pytest.mark.gpu
def test_columns_of_nodes_with_a_data_set_on_the_device():
    device = chainer.get_device('@cupy:0')
    updater = make_updater(
        GraphUpdater,
        device,
        small_model(),
        DeviceDataset(same_molecules(), device),
        converter=chainer_bspmm.CSRConverter(n_node_columns=1),
    )
    with pytest.raises(ValueError, match='expected dense examples with n_node_columns = 1'):
        run(updater, 1)


def test_buffers_for_a_part_that_chainer_split_off():
    dataset = to_sparse(molecules(60))
    order = numpy.random.RandomState(0).permutation(60)
    first, _ = split_dataset(split_dataset(dataset, 60, order)[0], 40)
    found, expected = (
        batches.capacities(part, BATCH, 'packed')._levels for part in (first, dataset[order[:40]])
    )
    assert found == expected and len(found) == 2
    for other in (
        dataset[:0],
        split_dataset(dataset, 0)[0],
        molecules(3),
        split_dataset(molecules(3), 2)[0],
    ):
        assert not batches.capacities(other, BATCH, 'packed')._levels


# Arguments.


@pytest.mark.parametrize('seed', (1.5, '7', True))
def test_seed(seed):
    with pytest.raises(TypeError, match='seed: expected an integer or None, got '):
        make_updater(
            GraphUpdater, chainer.get_device('@numpy'), small_model(), same_molecules(), seed=seed
        )


def test_arguments_by_position():
    """As many as StandardUpdater takes."""
    updater = GraphUpdater(
        SerialIterator(same_molecules(), BATCH),
        optimizers.SGD().setup(small_model()),
        chainer_bspmm.concat_mols,
        None,
        None,
        128.0,
        False,
    )
    assert updater.loss_scale == 128 and not updater.auto_new_epoch
