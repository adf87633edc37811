"""Quality study: its runs and their order, failures, merging, stored results."""

import json

import pytest

from benchmarks.training import bench_quality as bench


ALL_DENSE = ['--tox21', 'file', '--qm9', 'file', '--arms', 'dense']


def test_long_runs_come_first():
    costs = [bench.cost(run) for run in bench.chosen(bench.parse(ALL_DENSE))]
    assert costs == sorted(costs, reverse=True)


def test_runs_are_those_that_are_asked_for():
    runs = bench.chosen(bench.parse(ALL_DENSE))
    assert len(runs) == len(set(runs)) == 3 * 7 * 3 + 2
    few = bench.chosen(bench.parse(['--methods', 'gin', '--seeds', '1', '--arms', 'packed']))
    assert set(few) == {bench.Run(data, 'gin', 'packed', 1) for data in ('qm9 alpha', 'qm9 gap')}


def test_trainings_take_turns_on_the_devices():
    slots = bench.slots(bench.parse('--devices 0 1 --processes 4'.split()))
    assert [slots.get()[0] for _ in range(4)] == ['0', '1', '0', '1']


@pytest.mark.slow
def test_a_failed_run_is_made_up_for(tmp_path, monkeypatch, capsys):
    options = '--epoch 1 --num-data 40 --methods rsgcn --processes 2 --out %s' % tmp_path
    options = [*options.split(), '--examples', 'qm9 alpha', '--arms', 'packed', 'dense', '--seeds']
    monkeypatch.setitem(bench.ARMS, 'packed', ['--layout', 'none'])
    bench.main([*options, '0', '--commit', 'one'])
    path = tmp_path / 'quality.json'
    failed, found = sorted(json.loads(path.read_text())['runs'], key=lambda run: 'metric' in run)
    assert failed['arm'] == 'packed' and "invalid choice: 'none'" in failed['error']
    assert '1 failed' in capsys.readouterr().out
    monkeypatch.undo()
    bench.main([*options, '0', '1', '--merge', str(path), '--missing', '--commit', 'two'])
    result = json.loads(path.read_text())
    commits = {(run['arm'], run['seed']): run['commit'] for run in result['runs']}
    assert commits == {
        ('dense', 0): 'one',
        ('dense', 1): 'two',
        ('packed', 0): 'two',
        ('packed', 1): 'two',
    }
    arms = result['summary']['qm9 alpha']['rsgcn']
    assert arms['dense']['metrics'][0] == found['metric'] and len(arms['packed']['metrics']) == 2
    assert arms['dense']['standard deviation'] > 0
    assert '0 failed' in capsys.readouterr().out
    monkeypatch.setattr(bench, 'train', None)  # nothing must be trained again
    bench.main([*options, '1', '--commit', 'two'])
    assert json.loads(path.read_text()) == result
