"""Benchmark of deferred sums, as far as it runs without a GPU, with stand-ins for captures."""

import json

import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_deferred as bench, bench_steps  # NOQA: E402
from benchmarks.training import step_contenders as steps, subjects  # NOQA: E402
from chainer_bspmm.training.training_step import TrainingStep  # NOQA: E402
from tests.training import host_graphs  # NOQA: E402

HOST = chainer.get_device('@numpy')


@pytest.fixture
def captures(monkeypatch):
    """Run captured contenders on the host, in turns of few steps."""
    host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(bench, 'WARM', 8)
    monkeypatch.setattr(bench_steps, 'TURN', 0)
    monkeypatch.setattr(bench_steps, 'replay_ms', lambda replay: replay() or 0.01)
    monkeypatch.setattr(steps, 'can_capture', lambda device: True)
    monkeypatch.setattr(steps, 'DeviceDataset', lambda sparse, device: sparse)


@pytest.fixture
def subject():
    smiles, labels, _ = data_sets.tox21(limit=30)
    return subjects.subject_of('rsgcn', (smiles, labels), {}, 8, 2)


def run_main(folder, words=''):
    words = '--device -1 --limit 30 --commit none --seconds 0 --methods rsgcn --batches 8 ' + words
    bench.main([*words.split(), '--out', str(folder)])
    return json.loads((folder / 'deferred.json').read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_both_contenders_are_captured_and_agree(captures, tmp_path):
    result = run_main(tmp_path)
    of = result['methods']['rsgcn']
    cell = of['batches']['8']
    assert set(cell['milliseconds']) == {steps.ON_DEVICE, bench.AT_ONCE} and not cell['not_run']
    assert set(of['relative_errors']) == {steps.ON_DEVICE, bench.AT_ONCE}
    assert max(of['relative_errors'].values()) < 1e-5
    (bar,) = result['bars'].values()
    assert bar['value'] > 0


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('kind, defers', [(bench.Deferring, True), (bench.AtOnce, None)])
def test_which_steps_defer_sums(captures, subject, kind, defers):
    trainer = steps.trainers(subject, 8, HOST, kind)[steps.ON_DEVICE]()
    trainer.run(3)
    assert {program.work._defers_sums for program in trainer.programs()} == {defers}


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_steps_that_defer_nothing_are_not_timed_as_such(captures, subject, monkeypatch):
    monkeypatch.setattr(TrainingStep, '_backward', bench._backward)
    trainer = steps.trainers(subject, 8, HOST, bench.Deferring)[steps.ON_DEVICE]()
    with pytest.raises(AssertionError, match='^a step does not defer its sums$'):
        trainer.warm(3)


def test_eager_steps_on_a_cpu(tmp_path):
    result = run_main(tmp_path)
    cell = result['methods']['rsgcn']['batches']['8']
    assert set(cell['milliseconds']) == {steps.EAGER} and result['bars'] == {}


@pytest.mark.slow
def test_it_goes_on_with_what_is_missing(tmp_path):
    first = run_main(tmp_path)['methods']['rsgcn']
    both = run_main(tmp_path, '--methods rsgcn gin')['methods']
    assert both['rsgcn'] == first and both['gin']['batches']['8']


def test_bars_are_geometric_means():
    def of(with_deferred, without):
        times = {steps.ON_DEVICE: with_deferred, bench.AT_ONCE: without}
        cell = {name: {'wall': {'median': ms}} for name, ms in times.items()}
        return {'batches': {'128': {'milliseconds': cell}}}

    found = bench.bars({'gin': of(1.0, 1.21), 'nfp': of(1.0, 1.0)}, (128, 32))
    title = 'batch 128: steps that defer sums are at least 1.08x as fast'
    assert found == {title: {'value': 1.1, 'met': True}}
