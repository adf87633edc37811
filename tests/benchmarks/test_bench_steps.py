"""Benchmark of steps, as far as it runs without a GPU, with stand-ins for captures."""

import json
import types

import numpy
import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_steps as bench, step_contenders as steps  # NOQA: E402
from benchmarks.training import subjects  # NOQA: E402
from chainer_bspmm.models import METHODS  # NOQA: E402
from tests.training import host_graphs  # NOQA: E402

HOST = chainer.get_device('@numpy')
N, WARM = 40, 8


def subject_of(method, n=N):
    smiles, labels, _ = data_sets.tox21(limit=2 * n)
    small = sorted(range(2 * n), key=lambda i: len(smiles[i]))[:n]
    return subjects.subject_of(method, ([smiles[i] for i in small], labels[small]), {})


@pytest.fixture
def captures(monkeypatch):
    """Run captured contenders on the host, in turns of few steps."""
    host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(bench, 'TURN', 0)
    monkeypatch.setattr(bench, 'replay_ms', lambda replay: replay() or 0.01)
    monkeypatch.setattr(steps, 'can_capture', lambda device: True)
    monkeypatch.setattr(steps, 'DeviceDataset', lambda sparse, device: sparse)


def test_every_method_has_its_bars():
    assert sorted(subjects.METHODS) == sorted({*METHODS, 'mpnn'}) and len(subjects.METHODS) == 30
    for study in bench.STUDIES.values():
        assert set(study.bars.methods) <= set(study.methods) <= set(subjects.METHODS)


def test_molecules_of_a_check():
    dense = subject_of('gin').dense
    sizes = numpy.array([len(atoms) for atoms, *_ in dense])
    equal, mixed = steps.equal_sizes(dense), steps.mixed_sizes(dense)
    assert 1 < len(equal) <= steps.N_EQUAL and len(set(sizes[equal])) == 1 and sizes[equal[0]] > 3
    assert len(mixed) == steps.N_EQUAL and len(set(sizes[mixed])) > 5


SLOW = ['rsgcn', 'ggnn', 'gin', 'nfp', 'mpnn', 'gin_gwle', 'rsgcn_cwle']


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize(
    'method', ['relgcn', *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_steps_agree(captures, method):
    subject = subject_of(method, 24)
    names = list(steps.trainers(subject, 8, HOST))
    assert (steps.ON_DEVICE in names) == (not method.endswith(('cwle', 'gwle')))
    found = steps.check(method, subject, names[1:], HOST)
    assert set(found) == set(names[1:]) and max(found.values()) < 1e-5


@pytest.mark.filterwarnings('ignore:GraphUpdater')
@pytest.mark.parametrize('method', ['rsgcn', 'rsgcn_wle'])
@pytest.mark.parametrize('name', [steps.EAGER, steps.CAPTURED])
def test_steps_that_differ_are_refused(captures, monkeypatch, method, name):
    original = steps.trainers

    def trainers(*args, **kwargs):
        def wrong():
            trainer = made[name]()
            trainer.optimizer.alpha *= 1.001
            return trainer

        made = original(*args, **kwargs)
        return {**made, name: wrong}

    monkeypatch.setattr(steps, 'trainers', trainers)
    subject = subject_of(method, 16)
    with pytest.raises(AssertionError, match='^relative errors .*, expected below 0.0001'):
        steps.check(method, subject, [name], HOST)


@pytest.mark.filterwarnings('ignore:GraphUpdater')
def test_eager_steps_are_not_timed_as_captured(captures, monkeypatch):
    subject = subject_of('rsgcn', 16)
    monkeypatch.setattr(host_graphs.HostCapturer, 'capture', lambda *_: 1 / 0)
    with pytest.raises(
        AssertionError, match=r'trains eagerly.*ZeroDivisionError: division by zero \(.*\)'
    ):
        steps.check('rsgcn', subject, [steps.CAPTURED], HOST)
    makers = steps.trainers(subject, 8, HOST)
    makers = {name: makers[name] for name in (steps.EAGER, steps.CAPTURED)}
    cell = bench.run_cell(makers, WARM, 0)
    assert set(cell['milliseconds']) == {steps.EAGER}
    assert 'trains eagerly' in cell['not_run'][steps.CAPTURED]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_cell(captures):
    makers = steps.trainers(subject_of('rsgcn'), 8, HOST)
    cell = bench.run_cell(makers, WARM, 0)
    assert cell['n_rounds'] == bench.MIN_ROUNDS_CAPTURED and not cell['not_run']
    assert set(cell['milliseconds']) == set(makers) == set(cell['peak_bytes'])
    for name, times in cell['milliseconds'].items():
        wall = times['wall']['median']
        assert wall >= times['host']['median'] > 0
        assert bench.MIN_STEPS <= times['steps a turn'] <= bench.MAX_STEPS
        assert ('busy' in times) == (name in (steps.CAPTURED, steps.ON_DEVICE, steps.PACKED))
        assert times.get('busy', 0.01 / wall) == pytest.approx(0.01 / wall, abs=1e-3)
    lines = bench.table('', cell)
    (line,) = [line for line in lines if line.split()[:3] == ['ours', 'captured', 'wall']]
    assert 'device 0.010, busy' in line


class Fake:
    """Contender whose steps only advance a clock, `multiple` at a time; it fails after `until`."""

    def __init__(self, clock, seconds, multiple=1, until=None, is_captured=False):
        self.is_captured = is_captured
        self.clock = clock
        self.seconds = seconds
        self.multiple = multiple
        self.until = until

    def run(self, n_steps):
        assert n_steps % self.multiple == 0
        self.clock[0] += n_steps * self.seconds
        if self.until is not None and self.clock[0] > self.until:
            raise MemoryError('132 atoms')

    def wait(self):
        pass

    def warm(self, n_captured):
        self.run(n_captured)

    def peak_bytes(self):
        return 0


@pytest.fixture
def clock(monkeypatch):
    """Clock that only contenders advance."""
    now = [0.0]
    for module in bench, steps:
        monkeypatch.setattr(module, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_turns_are_as_long(clock):
    fakes = {
        'fast': Fake(clock, 1e-4),
        'slow': Fake(clock, 0.01),
        'slowest': Fake(clock, 9.0),
        'scan': Fake(clock, 1e-4, 64),
        'short scan': Fake(clock, 0.01, 4),
    }
    times, _ = bench.measure(fakes, 1.0, {})
    n_steps = [of['steps a turn'] for of in times.values()]
    assert n_steps == [bench.MAX_STEPS, 15, bench.MIN_STEPS, bench.MAX_STEPS, 12]
    walls = [of['wall']['median'] for of in times.values()]
    assert walls == pytest.approx([0.1, 10, 9000, 0.1, 10])


@pytest.mark.parametrize(
    'is_captured, expected', [(False, bench.MIN_ROUNDS), (True, bench.MIN_ROUNDS_CAPTURED)]
)
def test_captured_steps_are_timed_in_more_rounds(clock, is_captured, expected):
    fakes = {'eager': Fake(clock, 0.01), 'other': Fake(clock, 0.01, is_captured=is_captured)}
    _, n_rounds = bench.measure(fakes, 0, {})
    assert n_rounds == expected


def test_the_others_are_timed_without_one_that_fails(clock):
    makers = {
        'at once': lambda: Fake(clock, 0.1, until=0.5),
        'later': lambda: Fake(clock, 0.1, until=3.5),
        'never': lambda: Fake(clock, 0.1),
    }
    cell = bench.run_cell(makers, 8, 0)
    assert cell['not_run'] == dict.fromkeys(['at once', 'later'], 'MemoryError: 132 atoms')
    assert list(cell['milliseconds']) == list(cell['peak_bytes']) == ['never']


def test_bars_without_a_contender():
    """A bar is not met if our run failed, and is left out if the other library lacks the model."""

    def met(ours, captured, **not_run):
        times = {steps.UPSTREAM: 8.0, steps.ON_DEVICE: ours, steps.GEOMETRIC_CAPTURED: captured}
        walls = {name: {'wall': {'median': ms}} for name, ms in times.items() if ms}
        cell = {'milliseconds': walls, 'not_run': not_run}
        data = {'tox21': {'methods': {'gin': {'batches': {'128': cell}}}}}
        return [bar['met'] for bar in bench.bars(data, bench.STUDIES['geometric']).values()]

    assert met(0.39, 0.4) == [True, True]
    assert met(0.41, 0.4) == [False, False]
    assert met(None, 0.7) == []
    assert met(None, 0.7, **{steps.ON_DEVICE: 'why'}) == [False, False]
    assert met(0.3, None) == [True]


def run_main(folder, words, *options):
    words = '--device -1 --limit 30 --commit none --seconds 0 ' + words
    bench.main([*words.split(), '--out', str(folder), *options])
    (path,) = folder.glob('*.json')
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_next_batch_is_for_what_upstream_had_no_memory_for(tmp_path, monkeypatch):
    original = steps.Trainer.run

    def run(self, n_steps):
        batch_size = self.updater.get_iterator('main').batch_size
        if self.updater.converter is steps.upstream_concat_mols and batch_size == 4:
            raise MemoryError('132 atoms')
        original(self, n_steps)

    monkeypatch.setattr(steps.Trainer, 'run', run)
    words = '--against upstream --methods rsgcn_cwle --batches 99 4 3 2'
    result = run_main(tmp_path, words)
    method = result['data']['tox21']['methods']['rsgcn_cwle']
    batches = method['batches']
    assert list(batches) == ['4', '3']  # there are fewer than 99 molecules
    assert method['relative_errors'].keys() == {steps.EAGER} and not result['not_run']
    assert batches['4']['not_run'] == {steps.UPSTREAM: 'MemoryError: 132 atoms'}
    assert set(batches['3']['milliseconds']) == {steps.UPSTREAM, steps.EAGER}
    monkeypatch.setattr(bench, 'prepared', None)  # nothing must be measured again
    assert run_main(tmp_path, words) == result


@pytest.mark.slow
def test_it_goes_on_with_what_is_missing(tmp_path):
    words = '--methods rsgcn --data qm9 --batches '
    result = run_main(tmp_path, words + '8')
    before = result['data']['qm9']['methods']['rsgcn']['batches']['8']
    after = run_main(tmp_path, words + '4 8')['data']['qm9']['methods']['rsgcn']['batches']
    assert list(after) == ['8', '4'] and after['8'] == before
    after = run_main(tmp_path, words + '8 --seconds 0.1')['data']['qm9']['methods']['rsgcn']
    assert list(after['batches']) == ['8'] and after['batches']['8'] != before


def test_what_there_is_no_time_for_is_said(tmp_path):
    result = run_main(tmp_path, '--methods rsgcn --time 0')
    assert len(result['not_run']) == 6 and result['not_run'][0] == 'tox21 rsgcn, batch 128'
    assert all(not found['methods'] for found in result['data'].values())


def test_a_wrong_method_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, 'STEP_ERROR', 0)
    with pytest.raises(SystemExit, match='^not all steps agree$'):
        run_main(tmp_path, '--methods rsgcn --batches 8')
    result = json.loads((tmp_path / 'captured.json').read_text())
    for of in result['data'].values():
        assert 'relative errors' in of['methods']['rsgcn']['wrong']
        assert not of['methods']['rsgcn']['batches']
    assert [of['met'] for of in result['bars'].values()] == [False, False]


@pytest.mark.parametrize('size', [0, 1, 2])
@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'relgcn'])
def test_static_batches_of_pytorch_geometric(method, size):
    """Padded arrays give the loss and gradients of an ordinary batch."""
    torch = pytest.importorskip('torch')
    data = pytest.importorskip('torch_geometric.data')
    from benchmarks.peers import geometric_models

    sparse = subject_of(method).data
    n_labels = sparse.molecules.labels[0].shape[1]
    model = geometric_models.network(method, 8, 2, n_labels).eval()
    index = numpy.argsort(sparse.molecules.sizes)[:6].tolist()
    static = geometric_models.Static(sparse, len(index))
    if size == 2:  # the batch is larger than the chosen sizes
        static.sizes = [(1,) * len(static.sizes[0])] * 2
    arrays, found = static.convert([sparse[i] for i in index])
    if size == 1:
        found = static.sizes[1]
    assert found == static.sizes[size]
    views = {
        name: numpy.full(shape, 77, dtype) for name, (shape, dtype) in static.layout(found).items()
    }
    static.write(views, arrays)
    assert views['batch'][-1] == 6  # at least one row is spare

    def results(loss):
        model.zero_grad()
        loss.backward()
        return [loss.detach().numpy()] + [p.grad.numpy().copy() for p in model.parameters()]

    examples = geometric_models.examples_of(sparse)
    batch = data.Batch.from_data_list([examples[i] for i in index])
    expected = results(geometric_models._loss(model(batch), batch.y))
    tensors = {name: torch.from_numpy(array) for name, array in views.items()}
    for one, other in zip(results(static.loss(model, tensors)), expected):
        numpy.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'relgcn'])
def test_the_loader_of_pytorch_geometric_trains(method):
    pytest.importorskip('torch_geometric')
    from benchmarks.peers import geometric_models

    sparse = subject_of(method, 16).data
    model = geometric_models.network(method, 8, 2, sparse.molecules.labels[0].shape[1])
    peer = geometric_models.Loaded(model, geometric_models.examples_of(sparse), 5, HOST)
    peer.run(1)
    first = float(peer.loss.detach())
    peer.run(80)  # more than one epoch
    assert float(peer.loss.detach()) < first


@pytest.mark.parametrize('data', ['tox21', 'qm9'])
@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'relgcn'])
def test_a_step_of_jax_agrees(method, data):
    pytest.importorskip('jax')
    smiles, labels, _ = data_sets.tox21(limit=N) if data == 'tox21' else data_sets.qm9(N)
    found = steps.check_jax(method, subjects.subject_of(method, (smiles, labels), {}), HOST)
    assert set(found) == set(steps.JAX.values())
    assert max(found.values()) < 1e-5


def test_batches_of_jax():
    """Batches of JAX have one size, ascending targets and molecules, spare edges in spare rows."""
    pytest.importorskip('jax')
    from benchmarks.peers import jax_models

    sparse = subject_of('relgcn').data
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
    result = run_main(tmp_path, '--against jax --methods rsgcn --batches 8 --data qm9')
    times = result['data']['qm9']['methods']['rsgcn']['batches']['8']['milliseconds']
    assert set(times) == {steps.EAGER, steps.EAGER_PACKED, *steps.JAX.values()}
    assert times[steps.JAX['scan', 'TF32']]['steps a turn'] == steps.SCANNED
    assert list(result['bars'].values())[0]['value'] > 0


def test_methods_that_jax_lacks(capsys):
    with pytest.raises(SystemExit):
        bench.main(['--against', 'jax', '--methods', 'nfp'])
    assert "not among those against jax: {'nfp'}" in capsys.readouterr().err
