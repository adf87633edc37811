"""The benchmark of captured steps, as far as it runs without a GPU, with stand-ins for captures."""

import json
import types

import numpy
import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_captured as bench  # NOQA: E402
from benchmarks.training import step_contenders  # NOQA: E402
from benchmarks.training import subjects  # NOQA: E402
from tests.support import captured_benchmarks  # NOQA: E402
from tests.training import host_graphs  # NOQA: E402

HOST = chainer.get_device('@numpy')
N = 40


def read(method, limit=N):
    smiles, labels, _ = data_sets.tox21(limit=limit)
    dense, sparse = data_sets.of_smiles(smiles, labels, method)
    model = subjects.upstream_model(method, labels, [dense[0]])
    return model, dense, sparse


@pytest.fixture
def captures(monkeypatch):
    captured_benchmarks.stand_in(monkeypatch)


@pytest.mark.parametrize('method', ['rsgcn', 'relgcn', 'nfp'])
def test_both_ways_of_reading_agree(method):
    smiles, labels, _ = data_sets.tox21(limit=12)
    (dense, sparse), (expected, _) = (
        of(smiles, labels, method) for of in (data_sets.of_smiles, data_sets.of_method)
    )
    assert len(dense) == len(sparse) == len(expected)
    for one, other in zip(dense, expected):
        assert len(one) == len(other) == 3
        for a, b in zip(one, other):
            assert a.shape == b.shape and a.dtype == b.dtype
            numpy.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize(
    'method',
    [
        'relgcn',
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in ('rsgcn', 'ggnn', 'gin', 'nfp')
        ),
    ],
)
def test_steps_agree(captures, method):
    found = step_contenders.check(*read(method), device=HOST)
    assert set(found) == {
        bench.EAGER,
        bench.EAGER_PACKED,
        bench.CAPTURED,
        bench.ON_DEVICE,
        bench.PACKED,
    }
    assert max(found.values()) < 1e-5


@pytest.mark.filterwarnings('ignore:GraphUpdater')
@pytest.mark.parametrize('name', [bench.EAGER, bench.CAPTURED])
def test_steps_that_differ_are_refused(captures, monkeypatch, name):
    sets = read('rsgcn')
    original = step_contenders.trainers

    def trainers(*args, **kwargs):
        made = original(*args, **kwargs)

        def wrong():
            trainer = made[name]()
            trainer.optimizer.alpha *= 1.001
            return trainer

        return {bench.UPSTREAM: made[bench.UPSTREAM], name: wrong}

    monkeypatch.setattr(step_contenders, 'trainers', trainers)
    with pytest.raises(AssertionError, match='relative errors'):
        step_contenders.check(*sets, device=HOST)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater')
def test_eager_steps_are_not_timed_as_captured(captures, monkeypatch):
    sets = read('rsgcn')
    monkeypatch.setattr(host_graphs.HostCapturer, 'capture', lambda *_: 1 / 0)
    with pytest.raises(AssertionError, match='trains eagerly.*ZeroDivisionError'):
        step_contenders.check(*sets, device=HOST)
    makers = step_contenders.trainers(*sets, n_batch=8, device=HOST)
    monkeypatch.setattr(bench, 'replay_ms', lambda contender: 1.0)
    cell, _ = bench.run_cell(makers, N, 8, HOST, 0)
    assert set(cell['milliseconds']) == {bench.UPSTREAM, bench.EAGER, bench.EAGER_PACKED}
    assert 'trains eagerly' in cell['not_run'][bench.CAPTURED]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_cell(captures, monkeypatch):
    monkeypatch.setattr(bench, 'replay_ms', lambda contender: contender.replay() or 0.01)
    makers = step_contenders.trainers(*read('rsgcn'), n_batch=8, device=HOST)
    cell, eager = bench.run_cell(makers, N, 8, HOST, 0)
    assert cell['n_rounds'] == bench.MIN_ROUNDS and not cell['not_run']
    assert set(eager) == {bench.UPSTREAM, bench.EAGER, bench.EAGER_PACKED}
    for name, times in cell['milliseconds'].items():
        wall = times['wall']['median']
        assert wall >= times['host']['median'] > 0
        assert bench.MIN_STEPS <= times['steps a turn'] <= bench.MAX_STEPS
        assert times['epoch_seconds'] == pytest.approx(wall * N / 8e3, abs=1e-4)
        assert ('busy' in times) == (name not in eager)
    assert cell['milliseconds'][bench.CAPTURED]['busy'] == pytest.approx(
        0.01 / cell['milliseconds'][bench.CAPTURED]['wall']['median'], abs=1e-3
    )
    assert (
        'busy 1'
        in bench.table(
            '',
            dict(
                cell,
                milliseconds={
                    bench.UPSTREAM: dict(cell['milliseconds'][bench.UPSTREAM], device=1.0, busy=1.0)
                },
            ),
        )[1]
    )


def test_turns_are_as_long(monkeypatch):
    """A clock that only the contenders move: how often they run follows from their steps."""
    now = [0.0]
    monkeypatch.setattr(bench, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Fake:
        def __init__(self, seconds, multiple=1):
            self.seconds, self.multiple = seconds, multiple

        def run(self, n_steps):
            assert n_steps % self.multiple == 0
            now[0] += n_steps * self.seconds

        def wait(self):
            pass

    times, n_rounds = bench.measure_steps(
        {
            'fast': Fake(1e-4),
            'slow': Fake(0.01),
            'slowest': Fake(9.0),
            'scan': Fake(1e-4, 64),
            'short scan': Fake(0.01, 4),
        },
        HOST,
        1.0,
    )
    n_steps = [of['steps a turn'] for of in times.values()]
    assert n_steps == [bench.MAX_STEPS, 15, bench.MIN_STEPS, bench.MAX_STEPS, 12]
    walls = [of['wall']['median'] for of in times.values()]
    assert walls == pytest.approx([0.1, 10, 9000, 0.1, 10])
    assert n_rounds == bench.MIN_ROUNDS


def test_bars():
    def methods(ours, captured):
        times = {
            bench.UPSTREAM: 8.0,
            bench.ON_DEVICE: ours,
            bench.GEOMETRIC: 2.0,
            bench.GEOMETRIC_CAPTURED: captured,
        }
        return {
            'gin': {
                'batches': {
                    '128': {
                        'milliseconds': {
                            name: {'wall': {'median': ms}} for name, ms in times.items() if ms
                        }
                    }
                }
            }
        }

    def met(*args):
        return [of['met'] for of in bench.bars(methods(*args)).values()]

    # Upstream, PyTorch Geometric, captured; of the data set on the device, then on the host.
    assert met(0.39, 0.4) == [True, True, True, False, False, False]
    assert met(0.41, 0.4)[:3] == [False, False, False]
    assert met(0.6, 0.7)[:3] == [False, False, True]
    assert met(None, 0.7) == [False] * 6
    assert len(met(0.3, None)) == 4  # it has no such model, or could not capture it
    assert {of['ratio'] for of in bench.bars(methods(0.5, None)).values()} == {16.0, 4.0, None}
    assert bench.bars({'gin': {'batches': {}}}) == {}
    (wrong,) = bench.bars({'gin': {'wrong': 'very', 'batches': {}}}).values()
    assert not wrong['met']


def beside_jax(ours, jit, scan):
    times = {bench.PACKED: ours, bench.JAX['jit', 'FP32']: jit, bench.JAX['scan', 'FP32']: scan}
    return {
        'batches': {
            '32': {
                'milliseconds': {name: {'wall': {'median': ms}} for name, ms in times.items() if ms}
            }
        }
    }


def test_bars_beside_jax():
    """The faster one of JAX's two counts; without it nothing is met."""

    def bar(*times):
        (found,) = bench.bars_jax({'qm9': {'methods': {'gin': beside_jax(*times)}}}).values()
        return found['ratio'], found['met']

    assert bar(0.1, 0.15, 0.3) == (1.5, True)
    assert bar(0.2, 0.15, 0.3) == (0.75, False)
    assert bar(0.2, 0.3, 0.1) == (0.5, False)
    assert bar(0.1, 0.15, None) == bar(None, 0.1, 0.1) == (None, False)


def test_results_of_several_runs_are_one():
    def result(method, n_batch, not_run):
        methods = {method: {'batches': {n_batch: method + n_batch}}}
        return {'data': {'qm9': {'methods': methods}}, 'not_run': not_run}

    runs = result('gin', '32', ['a']), result('nfp', '32', ['b']), result('gin', '128', [])
    whole, not_run = bench.merged(list(runs))
    assert whole['data']['qm9']['methods'] == {
        'gin': {'batches': {'32': 'gin32', '128': 'gin128'}},
        'nfp': {'batches': {'32': 'nfp32'}},
    }
    assert not_run == ['a', 'b']


def run_main(folder, *options):
    bench.main(
        [
            *'--device -1 --limit 30 --methods rsgcn --commit none --out'.split(),
            str(folder),
            *options,
        ]
    )


def test_file(tmp_path, capsys):
    run_main(tmp_path, '--seconds', '0', '--batches', '8', '99')
    result = json.loads((tmp_path / 'captured.json').read_text())
    assert result['conditions']['commit'] == 'none' and not result['not_run']
    for found in result['data'].values():
        method = found['methods']['rsgcn']
        assert method['relative_errors'].keys() == {bench.EAGER, bench.EAGER_PACKED}
        assert list(method['batches']) == ['8']  # 99 are more than there are
        assert set(method['batches']['8']['milliseconds']) == {bench.UPSTREAM, bench.EAGER}
    assert 'tox21 rsgcn, batch 8' in capsys.readouterr().out


def test_what_there_is_no_time_for_is_said(tmp_path):
    run_main(tmp_path, '--time', '0')
    result = json.loads((tmp_path / 'captured.json').read_text())
    assert len(result['not_run']) == 6 and result['not_run'][0] == 'tox21 rsgcn, batch 128'
    assert all(not found['methods'] for found in result['data'].values())


def test_a_wrong_method_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(step_contenders, 'STEP_ERROR', 0)
    with pytest.raises(SystemExit, match='not all steps agree'):
        run_main(tmp_path, '--batches', '8')
    result = json.loads((tmp_path / 'captured.json').read_text())
    assert all(
        'relative errors' in of['methods']['rsgcn']['wrong']
        and not of['methods']['rsgcn']['batches']
        for of in result['data'].values()
    )
    assert [of['met'] for of in result['bars'].values()] == [False]


@pytest.mark.parametrize('size', [0, 1, 2])
@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'relgcn'])
def test_static_batches_of_pytorch_geometric(method, size):
    """Loss and gradients over padded arrays are those of an ordinary batch."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('torch_geometric')
    from benchmarks.peers import geometric_models

    smiles, labels, _ = data_sets.tox21(limit=N)
    sparse = data_sets.of_smiles(smiles, labels, method)[1]
    model = geometric_models.network(method, 8, 2, labels.shape[1]).eval()
    index = numpy.argsort(sparse.molecules.sizes)[:6].tolist()
    static = geometric_models.Static(sparse, len(index))
    examples = [sparse[i] for i in index]
    if size == 2:  # larger than those that were chosen
        static.sizes = [(1,) * len(static.sizes[0])] * 2
    arrays, found = static.convert(examples)
    if size == 1:
        found = static.sizes[1]
    assert found == static.sizes[size]
    views = {
        name: numpy.full(shape, 77, dtype) for name, (shape, dtype) in static.layout(found).items()
    }
    static.write(views, arrays)
    assert views['batch'][-1] == 6  # at least one row is to spare

    def results(loss):
        model.zero_grad()
        loss.backward()
        return [loss.detach().numpy()] + [p.grad.numpy().copy() for p in model.parameters()]

    batch = geometric_models.Batch.from_data_list(
        [geometric_models.examples_of(sparse)[i] for i in index]
    )
    expected = results(geometric_models._loss(model(batch), batch.y))
    actual = results(
        static.loss(model, {name: torch.from_numpy(array) for name, array in views.items()})
    )
    for one, other in zip(actual, expected):
        numpy.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_loader_of_pytorch_geometric_trains():
    pytest.importorskip('torch_geometric')
    from benchmarks.peers import geometric_models

    _, _, sparse = read('gin', 16)
    model = geometric_models.network('gin', 8, 2, sparse.molecules.labels[0].shape[1])
    peer = geometric_models.Loaded(model, geometric_models.examples_of(sparse), 5, HOST)
    peer.run(1)
    first = float(peer.loss.detach())
    peer.run(80)  # more than one epoch
    assert float(peer.loss.detach()) < first


def test_molecules_of_equal_size():
    _, _, sparse = read('rsgcn')
    index = step_contenders.equal_sizes(sparse)
    sizes = sparse.molecules.sizes[index]
    assert 1 < len(index) <= step_contenders.N_EQUAL and len(set(sizes)) == 1 and sizes[0] > 3
    part = sparse[numpy.arange(N)[::-1].copy()]
    assert len(set(part.molecules.sizes[part.order[step_contenders.equal_sizes(part)]])) == 1


@pytest.mark.parametrize('data', ['tox21', 'qm9'])
@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'relgcn'])
def test_a_step_of_jax_agrees(method, data):
    pytest.importorskip('jax')
    smiles, labels, _ = data_sets.tox21(limit=N) if data == 'tox21' else data_sets.qm9(N)
    dense, sparse = data_sets.of_smiles(smiles, labels, method)
    model = subjects.upstream_model(method, labels, [dense[0]])
    found = step_contenders.check_jax(method, model, sparse, HOST)
    assert set(found) == set(bench.JAX.values())
    assert max(found.values()) < 1e-5


def test_batches_of_jax():
    """All have one size; targets and molecules ascend; spare edges lead among spare rows."""
    pytest.importorskip('jax')
    from benchmarks.peers import jax_models

    _, _, sparse = read('relgcn')
    batches = jax_models.host_batches(chainer.iterators.SerialIterator(sparse, 8), 3)
    assert len(batches) == 3
    for batch in batches:
        for name, array in batch.items():
            assert array.shape == batches[0][name].shape, name
        n = (batch['graph'] < 8).sum()
        assert n < len(batch['graph']) and (batch['graph'][:n] < 8).all()
        is_spare = batch['target'] >= n
        assert ((batch['source'] >= n) == is_spare).all() and not batch['values'][is_spare].any()
        for ascending in (batch['graph'], batch['target'] * 4 + batch['relation']):
            assert (numpy.diff(ascending) >= 0).all()


def test_jax_trains(tmp_path):
    pytest.importorskip('jax')
    run_main(tmp_path, *'--against jax --seconds 0 --batches 8 --data qm9'.split())
    result = json.loads((tmp_path / 'jax.json').read_text())
    times = result['data']['qm9']['methods']['rsgcn']['batches']['8']['milliseconds']
    assert set(times) == {bench.EAGER, bench.EAGER_PACKED, *bench.JAX.values()}
    assert times[bench.JAX['scan', 'TF32']]['steps a turn'] == bench.SCANNED
    assert list(result['bars'].values())[0]['ratio'] > 0


def test_methods_that_jax_lacks(capsys):
    with pytest.raises(SystemExit):
        bench.main(['--against', 'jax', '--methods', 'nfp'])
    assert 'JAX has no nfp' in capsys.readouterr().err
