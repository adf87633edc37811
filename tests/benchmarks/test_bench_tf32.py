"""Benchmark of TF32, as far as it runs without a GPU, with stand-ins for captures."""

import contextlib
import json
import os

import numpy
import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_quality, bench_tf32 as bench, bench_widths  # NOQA: E402
from benchmarks.training import example_runs, step_contenders as steps, subjects  # NOQA: E402
from tests.support.devices import slow_unless  # NOQA: E402
from tests.training import host_graphs  # NOQA: E402

HOST = chainer.get_device('@numpy')
TF32 = ['--device', '0', '--tox21', 'file']


@pytest.fixture
def captures(monkeypatch):
    """Run captured contenders on the host, with ordinary products instead of TF32."""
    host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(steps, 'can_capture', lambda device: True)
    monkeypatch.setattr(steps, 'DeviceDataset', lambda sparse, device: sparse)
    monkeypatch.setattr(steps, 'tf32', contextlib.nullcontext)


def subject_of(method):
    smiles, labels, _ = data_sets.tox21(limit=80)
    return subjects.subject_of(method, (smiles, labels), {}, 8, 2)


@pytest.mark.parametrize('method', [slow_unless(name == 'relgcn', name) for name in subjects.FIVE])
def test_a_step_in_float32_is_close_to_float64(method):
    found = bench.errors(subject_of(method), HOST)
    assert found['molecules'] > 1
    assert set(found['errors']) == {steps.UPSTREAM, steps.EAGER_PACKED}
    for errors in found['errors'].values():
        assert 0 < max(errors.values()) < 1e-5


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_losses_and_gradients_are_those_of_captured_steps(captures):
    found = bench.errors(subject_of('gin'), HOST)['errors']
    assert set(found) == {*bench_widths.OURS.values(), *bench_widths.UPSTREAM_S.values()}
    for errors in found.values():
        assert 0 < max(errors.values()) < 1e-5


def test_distance():
    truth = 2.0, {'/a': numpy.array([3.0, 4.0]), '/b': numpy.array([0.0, 12.0])}
    found = 2.5, {'/a': numpy.array([3.0, 4.5]), '/b': numpy.array([0.0, 12.0]), '/c': None}
    assert bench.distance(found, truth) == {
        'loss': 0.25,
        'norm': 0.0385,  # 0.5 / 13
        'largest': 0.0417,  # 0.5 / 12
        'worst parameter': 0.1,  # 0.5 / 5
    }


def test_trainings_of_one_seed_follow_one_another(captures):
    runs = bench.chosen(bench.parse(TF32), HOST)
    assert len(runs) == len(set(runs)) == 3 * 2 * 2 * 2
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert [run.precision for run in runs] == 12 * ['FP32', 'TF32']


def test_trainings_on_a_cpu_are_in_fp32():
    runs = bench.chosen(bench.parse(['--device', '-1', '--methods', 'ggnn', '--seeds', '1']), HOST)
    assert runs == [bench.Run('qm9 alpha', 'ggnn', 'packed', 1, 'FP32')]


def run_of(precision, seed, metric):
    return dict(data='tox21', method='gin', precision=precision, seed=seed, metric=metric)


def test_summary_is_of_seeds_in_both_precisions():
    runs = [run_of('FP32', 0, 0.5), run_of('FP32', 1, 0.75), run_of('FP32', 2, 1.0)]
    runs += [run_of('TF32', 0, 0.75), run_of('TF32', 2, 1.0)]
    assert bench.summary(runs)['tox21']['gin'] == {
        'FP32': [0.5, 0.75, 1.0],
        'TF32': [0.75, 1.0],
        'mean difference': 0.125,
        'standard deviation of differences': pytest.approx(0.25 / 2**0.5),
        'standard deviation between seeds': 0.25,
        'seeds that differ': 1,
    }


def test_summary_of_a_cpu():
    found = bench.summary([run_of('FP32', 0, 0.5)])['tox21']['gin']
    assert found['FP32'] == [0.5] and found['TF32'] == []
    assert found['mean difference'] is found['standard deviation between seeds'] is None


def test_bars():
    errors = {bench_widths.OURS['FP32']: 2e-4, bench_widths.OURS['TF32']: 2e-3}
    errors = {name: {'worst parameter': error} for name, error in errors.items()}
    runs = [run_of(precision, 0, 0.5) for precision in ('FP32', 'TF32')]
    found = bench.bars(
        {'errors': {'256': {'gin': {'errors': errors}}}, 'summary': bench.summary(runs)}
    )
    ours = '256 units, gin, ours captured, DeviceDataset, packed'
    assert found == {
        ours + ': gradients within 0.0001': {'value': 2e-4, 'met': False},
        ours + ', TF32: gradients within 0.05': {'value': 2e-3, 'met': True},
        'tox21, gin: the switch reaches the training': {'value': 0, 'met': False},
    }


def run_main(folder, words):
    words = '--device -1 --limit 40 --commit none --units 8 --epoch 1 --seeds 0 ' + words
    bench.main([*words.split(), '--out', str(folder)])
    return json.loads((folder / 'tf32.json').read_text())


def test_every_training_has_its_switch_and_its_width(captures, monkeypatch, tmp_path):
    given = {}

    def train(run, args, device, cpus, more, variables):
        given[run.data, run.precision] = more, variables
        return dict(run._asdict(), metric=1.0, seconds={'all': 0.1})

    monkeypatch.setattr(bench_quality, 'train', train)
    monkeypatch.setattr(bench, 'errors', lambda *_: {'errors': {}})
    result = run_main(tmp_path, '--methods rsgcn --processes 2')
    assert given == {
        ('qm9 alpha', 'FP32'): (['--unit-num', 8], {'CUPY_TF32': '0'}),
        ('qm9 alpha', 'TF32'): (['--unit-num', 8], {'CUPY_TF32': '1'}),
    }
    assert [run['precision'] for run in result['runs']] == ['FP32', 'TF32']
    assert not result['bars']['qm9 alpha, rsgcn: the switch reaches the training']['met']


def test_what_there_is_no_time_for_is_said(tmp_path):
    result = run_main(tmp_path, '--methods rsgcn --time 0')
    assert result['not_run'] == ['8 units, rsgcn', 'qm9 alpha rsgcn packed 0 FP32']


@pytest.mark.slow
def test_it_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    # Trainings set the number of threads in this process, too, and it is a condition of results.
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    first = run_main(tmp_path, '--methods rsgcn')
    (run,) = first['runs']
    assert run['metric'] > 0 and first['summary']['qm9 alpha']['rsgcn']['FP32'] == [run['metric']]
    assert all(bar['met'] for bar in first['bars'].values()) and not first['not_run']
    both = run_main(tmp_path, '--methods rsgcn ggnn')
    assert both['runs'][1] == run and both['errors']['8']['rsgcn'] == first['errors']['8']['rsgcn']
    assert {run['method'] for run in both['runs']} == set(both['errors']['8']) == {'rsgcn', 'ggnn'}
    monkeypatch.setattr(bench, 'errors', None)  # nothing must be measured again
    monkeypatch.setattr(bench_quality, 'train', None)
    assert run_main(tmp_path, '--methods rsgcn ggnn') == both


@pytest.mark.slow
def test_a_process_has_its_own_variables(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text("import os; print(os.environ['CUPY_TF32'])")
    for value in ('1', '0'):
        printed = tmp_path / value
        status = example_runs.run_preloaded(
            [str(script)], str(printed), os.devnull, variables={'CUPY_TF32': value}
        )
        assert status == 0 and printed.read_text() == value + '\n'
