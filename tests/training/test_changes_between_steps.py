"""`GraphUpdater` where something else happens between steps, or goes wrong in one."""

import warnings

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.backend import GpuDevice
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.training import batches as training_batches
from chainer_bspmm.training import step_driver
from chainer_bspmm.training import state
from chainer_bspmm.training import step_program
from chainer_bspmm.training import fused_update
from chainer_bspmm.training.graph_updater import GraphUpdater
from tests.support import relative_error
from tests.support.training import BATCH
from tests.support.training import make_model
from tests.support.training import make_updater
from tests.support.training import molecules
from tests.support.training import parameters
from tests.support.training import run
from tests.support.training import same_molecules
from tests.support.training import small_model
from tests.support.training import three_columns
from tests.support.training import without_dropout
from tests.training import host_graphs
from tests.training.host_graphs import causes

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


def compare(device, change, n_steps=6, **kwargs):
    """Train with both updaters, calling ``change(updater)`` between steps; compare parameters."""
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater = make_updater(
            kind,
            device,
            without_dropout(make_model()),
            same_molecules(),
            # Small steps: larger ones magnify what the kernels of a step round otherwise.
            kwargs.get('optimizer', optimizers.SGD)(0.02),
        )
        for _ in range(n_steps):
            run(updater, 1)
            change(updater)
        results.append(parameters(updater))
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-5, name


# Gradients are those of the graph, even if the parameters were given others since.


def halve(optimizer):
    """A hook that gives the parameters other arrays."""
    for param in optimizer.target.params(False):
        param.grad = param.grad * numpy.float32(0.5)


def test_a_hook_that_replaces_gradients(device, graphs, no_causes):
    def change(updater):
        hooks = updater.get_optimizer('main')._hookable._pre_update_hooks
        if 'halve' not in hooks:
            updater.get_optimizer('main').add_hook(halve, 'halve')

    compare(device, change)


@pytest.mark.parametrize(
    'change',
    [
        lambda model: model.cleargrads(),
        lambda model: [setattr(param, 'grad', param.array.copy()) for param in model.params(False)],
    ],
)
def test_gradients_that_are_changed_between_steps(device, graphs, no_causes, change):
    def add_noop(updater):
        optimizer = updater.get_optimizer('main')
        if 'noop' not in optimizer._hookable._pre_update_hooks:
            optimizer.add_hook(lambda optimizer: None, 'noop')  # so that updates are eager
        change(optimizer.target)

    compare(device, add_noop)


# Reports.


def test_first_without_a_reporter(device, graphs):
    updater = make_updater(GraphUpdater, device, small_model(), same_molecules())
    for _ in range(3):
        updater.update()
    assert all('main/loss' in report for report in run(updater, 3))


def test_a_report_that_comes_and_goes(device, graphs):
    def sometimes(link, atoms, adj):
        link.calls.append(0)
        y = three_columns(link, atoms, adj)
        if len(link.calls) % 2:
            chainer.report({'extra': functions.sum(y)}, link)
        return y

    updater = make_updater(GraphUpdater, device, small_model(sometimes, calls=[]), same_molecules())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        run(updater, 3)
    assert len(causes(caught)) == 1 and 'extra' in causes(caught)[0]


def test_a_report_of_a_number(device, graphs):
    def reports(link, atoms, adj):
        chainer.report({'weight': 0.5, 'n': 3, 'flag': True}, link)
        return three_columns(link, atoms, adj)

    updater = make_updater(GraphUpdater, device, small_model(reports), same_molecules())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        reported = run(updater, 3)
    assert len(causes(caught)) == 1 and 'value on the host' in causes(caught)[0]
    assert all(report['main/predictor/weight'] == 0.5 for report in reported)


def test_labels_that_are_nan(device, graphs, no_causes):
    examples = [
        (atoms, adj, label * numpy.float32('nan')) for atoms, adj, label in same_molecules()
    ]
    updater = make_updater(GraphUpdater, device, small_model(), examples)
    assert all(numpy.isnan(report['main/loss']) for report in run(updater, 3))


@pytest.mark.parametrize(
    'found, expected, tolerance, differs',
    [
        ([1.0, numpy.nan], [1.0, numpy.nan], 1e-3, False),
        ([1.0, numpy.nan], [1.0, 2.0], 1e-3, True),
        ([1.0, numpy.inf], [1.0001, numpy.inf], 1e-3, False),
        ([1.0, numpy.inf], [1.0, -numpy.inf], 1e-3, True),
        ([1.0, -numpy.nan], [1.0, numpy.nan], 1e-3, False),
        ([1.0, 2.0], [1.0, 2.01], 1e-3, True),
        ([True, False], [True, True], 1e-3, True),
        ([1.5e-4], [1e-4], 1e-3, True),  # the bound is relative
        ([1.0, 2.0], [1.0, numpy.nextafter(2, 3)], 0, True),
    ],
)
def test_difference(found, expected, tolerance, differs):
    found, expected = {'x': numpy.array(found)}, {'x': numpy.array(expected)}
    assert bool(state.difference(found, expected, tolerance)) == differs


# What a check leaves behind: nothing.


def test_a_check_changes_nothing(device, graphs):
    """Counters, sums and averages of a link go up by one a step, as in StandardUpdater."""
    if device.xp is not numpy:
        pytest.skip('needs the stand-ins')
    counts = []
    for kind in (StandardUpdater, GraphUpdater):

        def count(link, atoms, adj):
            link.counter += 1
            link.total += 1
            link.average = link.average * 0.5 + 1
            return three_columns(link, atoms, adj)

        model = small_model(count, total=numpy.zeros(2, 'f'), average=numpy.zeros((), 'f'))
        updater = make_updater(kind, device, model, same_molecules())
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            run(updater, 3)
        row = model.predictor
        counts.append((row.counter, row.total.tolist(), float(row.average)))
    assert counts[0] == counts[1]


def test_state_that_goes_on_from_step_to_step(device, graphs):
    def stateful(link, atoms, adj):
        y = three_columns(link, atoms, adj)
        link.h = y if link.h is None else 0.5 * chainer.Variable(link.h.array) + y
        return link.h

    results = []
    for kind in (StandardUpdater, GraphUpdater):
        updater = make_updater(
            kind, device, small_model(stateful, h=None), same_molecules(), optimizers.SGD(1e-2)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            run(updater, 4)
        results.append(parameters(updater))
    assert 'twice' in causes(caught)[0]
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-5, name


def test_a_converter_that_draws(device, graphs, no_causes):
    rng = numpy.random.RandomState(0)

    def noisy(batch, device):
        atoms, adj, label = chainer_bspmm.concat_mols(batch, device)
        return atoms, adj, label + rng.normal(size=label.shape).astype('f')

    updater = make_updater(GraphUpdater, device, small_model(), same_molecules(), converter=noisy)
    run(updater, 3)


# Things that are replaced.


def test_another_loss_function(device, graphs, no_causes):
    model = small_model()
    updater = make_updater(GraphUpdater, device, model, same_molecules())
    run(updater, 4)
    updater.loss_func = lambda *args: 100 * model(*args)
    loss_func = updater.loss_func
    run(updater, 3)
    assert updater._driver.function is loss_func


def test_the_optimizer_is_set_up_again(device, graphs, no_causes):
    def change(updater):
        optimizer = updater.get_optimizer('main')
        if updater.iteration == 3:
            optimizer.setup(optimizer.target)
        elif updater.iteration == 4 and isinstance(updater, GraphUpdater):
            rules = [param.update_rule for param in optimizer.target.params()]
            assert updater._driver.guards.key().update == rules

    compare(device, change, optimizer=optimizers.Adam)


def test_the_loss_is_scaled_from_some_step_on(device, graphs):
    updater = make_updater(GraphUpdater, device, small_model(), same_molecules())
    run(updater, 3)
    updater.get_optimizer('main').set_loss_scale(8)
    with pytest.warns(UserWarning, match='scales the loss'):
        run(updater, 1)


def test_an_optimizer_with_an_update_of_its_own(device, graphs):
    class Twice(optimizers.SGD):
        def update(self, lossfun=None, *args, **kwargs):
            assert lossfun is not None
            super().update(lossfun, *args, **kwargs)
            super().update(lossfun, *args, **kwargs)

    updater = make_updater(GraphUpdater, device, small_model(), same_molecules(), Twice())
    with pytest.warns(UserWarning, match='Twice'):
        run(updater, 3)


# Batches of several sources.


class Gathered:
    """A `DeviceBatch` on the host: `source` a tuple of batches, of which it sends the number."""

    is_fixed = False

    def __init__(self, source, number):
        host = source[number]
        self.source, self._number = source, number
        self.form, self.need = host.form, host.need
        self._host = host
        self.arrays_on = host.arrays_on

    def staged(self, capacity):
        return {'index': ((1,), 'i4')}

    def write(self, views):
        views['index'][...] = self._number

    def gather(self, sent, buffers):
        self.source[int(sent['index'][0])]._fill(buffers)


def test_two_data_sets_on_the_device(graphs, monkeypatch):
    device = chainer.get_device('@numpy')
    if graphs is None:
        pytest.skip('needs the stand-ins')
    monkeypatch.setattr(
        training_batches.HostBatch,
        '_fill',
        lambda self, buffers: training_batches.fill_buffers(buffers, *self._rows),
        raising=False,
    )
    examples = same_molecules(24)
    batches = [
        training_batches.batch_of(examples[start : start + BATCH], chainer_bspmm.concat_mols, None)
        for start in (0, BATCH, 2 * BATCH)
    ]
    gathered = [Gathered((batches[0],), 0), Gathered((batches[1],), 0), batches[2]]
    results = []
    for kind in ('mixed', 'host'):
        order = iter([0, 1, 2] * 4)
        of_kind = gathered if kind == 'mixed' else batches
        monkeypatch.setattr(
            training_batches,
            'batch_of',
            lambda *args, order=order, of_kind=of_kind: of_kind[next(order)],
        )
        updater = make_updater(GraphUpdater, device, small_model(), examples, optimizers.SGD(0.1))
        run(updater, 12)
        results.append(parameters(updater))
    for name, expected in results[1].items():
        numpy.testing.assert_array_equal(results[0][name], expected)


# Counters.


def test_counters_after_a_step_that_failed(graphs, monkeypatch):
    if graphs is None:
        pytest.skip('needs the stand-ins')
    host_graphs.fuse(monkeypatch)
    updater = make_updater(
        GraphUpdater,
        chainer.get_device('@numpy'),
        small_model(),
        same_molecules(),
        optimizers.SGD(),
    )
    optimizer = updater.get_optimizer('main')
    run(updater, 4)
    assert optimizer.t == updater.iteration == 4

    def fail(self, *args):
        raise MemoryError

    for name in ('stage', 'replay'):
        with monkeypatch.context() as patch:
            patch.setattr(step_program.StepProgram, name, fail)
            with pytest.raises(MemoryError):
                run(updater, 1)
        assert optimizer.t == updater.iteration == 4
        assert {param.update_rule.t for param in optimizer.target.params()} == {4}
    run(updater, 2)
    assert optimizer.t == updater.iteration == 6


def test_a_parameter_made_late_that_a_fused_update_refuses(graphs, monkeypatch):
    if graphs is None:
        pytest.skip('needs the stand-ins')
    monkeypatch.setattr(step_driver, 'why_unsupported', fused_update.why_unsupported)
    with chainer.using_config('dtype', numpy.dtype('e')):
        model = small_model()
        with model.init_scope():
            model.late = chainer.links.Linear(None, 3)
        model.lossfun = lambda x, t: functions.mean_squared_error(
            model.late(functions.cast(x, 'e')), functions.cast(t, 'e')
        )
        for param in model.predictor.params(False):
            param.array = param.array.astype('f')
        updater = make_updater(GraphUpdater, chainer.get_device('@numpy'), model, same_molecules())
        with pytest.warns(UserWarning, match='updates eagerly.*float16'):
            run(updater, 1)
        run(updater, 3)


def test_two_updaters_of_one_model(device, graphs, no_causes):
    results = []
    for kind in (StandardUpdater, GraphUpdater):
        # Small steps: large ones of so few molecules make rounding errors a hundred times as large.
        updater = make_updater(
            kind,
            device,
            without_dropout(make_model()),
            same_molecules(),
            optimizers.SGD(0.01),
            hooks=[optimizer_hooks.GradientNoise(0)],
        )
        optimizer = updater.get_optimizer('main')
        other = kind(
            SerialIterator(same_molecules(16)[8:], BATCH),
            optimizer,
            device=device,
            converter=chainer_bspmm.concat_mols,
        )
        for _ in range(6):
            run(updater, 1)
            run(other, 1)
        results.append(parameters(updater))
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-5, name


SPIN = """
extern "C" __global__ void spin(long long n_clocks) {
    const long long start = clock64();
    while (clock64() - start < n_clocks) {}
}
"""


@pytest.mark.gpu
def test_from_stream_to_stream(no_causes):
    """Every step on another stream, half of them late, without a synchronisation of the user's."""
    device, results = GpuDevice.from_device_id(0), []
    for n_streams in (1, 3):
        updater = make_updater(GraphUpdater, device, make_model(), molecules(40))
        with device.device:
            streams = [device.xp.cuda.Stream(non_blocking=True) for _ in range(n_streams)]
            spin = device.xp.RawKernel(SPIN, 'spin')
            device.device.synchronize()
            for i in range(60):
                with streams[i % n_streams]:
                    if i % 2 == 0:
                        spin((1,), (1,), (numpy.int64(4_000_000),))  # about 2 ms
                    updater.update()
            device.device.synchronize()
        results.append(parameters(updater))
    for name, expected in results[0].items():
        numpy.testing.assert_array_equal(results[1][name], expected)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_on_a_device_that_is_not_the_current_one(no_causes):
    cupy = chainer.backends.cuda.cupy
    results = []
    for number in (0, 1):
        with cupy.cuda.Device(0):
            updater = make_updater(
                GraphUpdater,
                chainer.get_device('@cupy:%d' % number),
                without_dropout(small_model()),
                same_molecules(),
            )
            run(updater, 20)
            results.append(parameters(updater))
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-4, name


@pytest.mark.gpu
def test_clipping_with_several_layouts(no_causes):
    """Scratch memory of the first graph is not reused while others are captured."""
    cupy = chainer.backends.cuda.cupy
    device = chainer.get_device('@cupy:0')
    updater = make_updater(
        GraphUpdater,
        device,
        make_model(),
        molecules(20),
        hooks=[optimizer_hooks.GradientClipping(0.5)],
    )
    iterators = [SerialIterator(molecules(20), n) for n in (8, 4)]
    others = []
    for i in range(12):
        updater._iterators['main'] = iterators[i % 2]
        run(updater, 1)
        others += [cupy.full(n, 7, 'd') for n in (512, 1024, 2048)]
    assert all(bool((other == 7).all()) for other in others)
