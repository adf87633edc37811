"""Memory, streams, models and GPUs of several `GraphUpdater` side by side, and an interrupt."""

import contextlib
import gc
import weakref

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import optimizer_hooks, optimizers
from chainer.backend import GpuDevice
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.training import GraphUpdater
from tests.support.training import assert_same_bits, BATCH, HOST, is_captured, make_model
from tests.support.training import make_updater, molecules, of_variables, parameters, RELATIONS, run
from tests.support.training import calls_of_the_first_check, hidden, same_molecules, small_model
from tests.training import host_graphs

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')

N_STEPS = 12


def make(name='RSGCN', device='@cupy:0', on_device=False):
    """Return an updater whose model has all parameters, and whose batches have a fixed order."""
    examples = molecules(40, RELATIONS.get(name, 1))
    model = make_model(name)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        model(*chainer_bspmm.concat_mols(examples[:2]))
    examples = DeviceDataset(examples, device) if on_device else examples
    iterator = SerialIterator(examples, BATCH, shuffle=False)
    optimizer = optimizers.Adam()
    return GraphUpdater(iterator, optimizer.setup(model), device=chainer.get_device(device), seed=7)


def step(updater, n_steps=N_STEPS):
    for _ in range(n_steps):
        updater.update()


def trained(*args):
    """Return the parameters after a training with nothing beside it."""
    updater = make(*args)
    step(updater)
    return checked_parameters(updater)


def checked_parameters(updater):
    assert updater._driver.reason is None
    assert is_captured(updater)
    return parameters(updater)


@pytest.mark.gpu
@pytest.mark.parametrize('on_device', (False, True))
def test_memory_is_given_back(on_device):
    def used():
        gc.collect()
        return cuda.cupy.get_default_memory_pool().used_bytes()

    trained('RSGCN', '@cupy:0', on_device)  # tables of kernels are never freed
    before = used()
    updater = make(on_device=on_device)
    step(updater)
    pool = updater._driver.session.capturer._pool
    assert updater.graph_nbytes == pool.total_bytes()
    assert checked_parameters(updater) and pool.used_bytes() > 0
    assert used() > before
    del updater
    assert used() == before
    assert pool.total_bytes() == 0


@pytest.mark.gpu
def test_gradients_outlive_the_updater():
    updater = make()
    step(updater)
    assert checked_parameters(updater)
    model = updater.get_optimizer('main').target
    expected = [cuda.to_cpu(parameter.grad).copy() for parameter in model.params()]
    del updater
    gc.collect()
    step(make('RelGCN'))  # takes the memory that was given back
    for parameter, gradient in zip(model.params(), expected):
        numpy.testing.assert_array_equal(cuda.to_cpu(parameter.grad), gradient)
    updater = StandardUpdater(
        SerialIterator(molecules(40), BATCH),
        optimizers.Adam().setup(model),
        converter=chainer_bspmm.concat_mols,
        device=model.device,
    )
    step(updater, 2)
    assert all(numpy.isfinite(array).all() for array in parameters(updater).values())


@pytest.mark.gpu
def test_models_take_turns_on_one_gpu():
    names = 'RSGCN', 'RelGCN', 'RSGCN, batch norm'
    alone = [trained(name) for name in names]
    updaters = [make(name) for name in names]
    for _ in range(N_STEPS):
        for updater in updaters:
            updater.update()
    for updater, expected in zip(updaters, alone):
        assert_same_bits(checked_parameters(updater), expected)


@pytest.mark.gpu
def test_a_deleted_updater_leaves_the_others_alone():
    expected = trained()
    updater = make()
    other = make('RelGCN')
    step(updater, 6)
    step(other, 6)
    del other
    gc.collect()
    cuda.cupy.get_default_memory_pool().free_all_blocks()
    step(updater, N_STEPS - 6)
    assert_same_bits(checked_parameters(updater), expected)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize('on_device, made_current', [(False, False), (True, True)])
def test_two_gpus_take_turns(on_device, made_current):
    devices = [chainer.get_device('@cupy:%d' % i) for i in range(2)]
    alone, updaters = [], []
    for device in devices:
        with chainer.using_device(device):
            alone.append(trained('RSGCN', device.name, on_device))
            updaters.append(make('RSGCN', device.name, on_device))
    for _ in range(N_STEPS):
        for device, updater in zip(devices, updaters):
            with chainer.using_device(device) if made_current else contextlib.nullcontext():
                updater.update()
    for device, updater, expected in zip(devices, updaters, alone):
        with chainer.using_device(device):
            assert_same_bits(checked_parameters(updater), expected)
        for parameter in updater.get_optimizer('main').target.params():
            assert parameter.device == device


def test_an_interrupt_during_capture(device, graphs):
    """If a user presses Ctrl-C during a capture, training continues as without that step."""
    results = []
    is_on_host = graphs is not None  # else the guards would watch `graphs` in `function`
    # Three calls try the first batch out, one trains with it, and then rows are checked.
    first = 3 + 1 + calls_of_the_first_check(device)
    for interrupted in ((first + 1,), ()):  # the next call would be the capture's
        n_calls = hidden(0)  # if this were watched, every step would train eagerly

        def function(link, atoms, adj):
            h = link.inner(atoms, adj)[:, :3]
            n_calls.value += 1  # NOQA: B023
            if n_calls.value in interrupted:  # NOQA: B023
                assert is_on_host or link.xp.cuda.get_current_stream().is_capturing()
                raise KeyboardInterrupt
            return h

        updater = make_updater(GraphUpdater, device, small_model(function), same_molecules(32))
        run(updater, 1)
        assert n_calls.value == first
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                run(updater, 1)
            assert updater.iteration == 1
        else:
            updater.get_iterator('main').next()
        run(updater, N_STEPS)
        assert updater.iteration == 1 + N_STEPS
        results.append(checked_parameters(updater))
    assert_same_bits(*results)
    if graphs:
        assert [capturer.n_launches for capturer in graphs] == [N_STEPS] * 2


def test_memory_goes_when_steps_turn_eager(device, graphs):
    updater = make_updater(GraphUpdater, device)
    run(updater, 3)
    assert updater.graph_nbytes > 0
    capturer = weakref.ref(updater._driver.session.capturer)
    if graphs:
        graphs.clear()
    updater.converter = of_variables
    message = (
        '^GraphUpdater trains eagerly: converter: expected arrays on the host for device=None, got '
        'Variable$'
    )
    with pytest.warns(UserWarning, match=message):
        run(updater, 1)
    gc.collect()
    assert updater.graph_nbytes == 0 and capturer() is None


def test_memory_goes_with_the_updater(monkeypatch):
    """A driver and its programs form no cycle, so memory is freed without garbage collection."""
    host_graphs.stand_in(monkeypatch)
    updater = make_updater(GraphUpdater, HOST)
    run(updater, 3)
    assert is_captured(updater)
    driver = weakref.ref(updater._driver)
    gc.disable()
    try:
        del updater
        assert driver() is None
    finally:
        gc.enable()


SPIN = """
extern "C" __global__ void spin(long long n_clocks) {
    const long long start = clock64();
    while (clock64() - start < n_clocks) {}
}
"""


@pytest.mark.gpu
def test_from_stream_to_stream(no_causes):
    """Each step runs on another stream, every second one is late, and nobody synchronises."""
    device = GpuDevice.from_device_id(0)
    results = []
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
def test_clipping_with_several_layouts(no_causes):
    """Scratch memory of the first graph is not used again while others are captured."""
    device = chainer.get_device('@cupy:0')
    clipping = [optimizer_hooks.GradientClipping(0.5)]
    updater = make_updater(GraphUpdater, device, make_model(), molecules(20), hooks=clipping)
    iterators = [SerialIterator(molecules(20), n) for n in (8, 4)]
    others = []
    for i in range(12):
        updater._iterators['main'] = iterators[i % 2]
        run(updater, 1)
        others += [cuda.cupy.full(n, 7, 'd') for n in (512, 1024, 2048)]
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize('end', [lambda driver: driver.forget(), lambda driver: driver.give_up('')])
def test_what_a_key_holds_goes_with_the_programs(monkeypatch, end):
    """A key keeps an array alive that a step reads, but only as long as there are programs."""
    host_graphs.stand_in(monkeypatch)
    model = small_model(with_a_weight, weight=numpy.ones(3, 'f'))
    updater = make_updater(GraphUpdater, HOST, model)
    run(updater, 4)
    assert is_captured(updater)
    is_held = weakref.ref(model.predictor.weight)
    model.predictor.weight = None
    end(updater._driver)
    gc.collect()
    assert is_held() is None


def with_a_weight(link, atoms, adj):
    return link.inner(atoms, adj)[:, :3] * link.weight
