"""Whole commands: their runs, their caches, and figures computed from their seconds."""

import json
import pathlib
import subprocess
import types

import pytest

pytest.importorskip('rdkit')

from benchmarks import bench_command as bench, gpus  # NOQA: E402

TASK = bench.Task('qm9', 'sample', 'gin', [], list(bench.OPTIONS))


def arguments(**given):
    names = {'contenders': list(bench.OPTIONS), 'cold': 1, 'warm': 3, 'others': 1, 'few': 3}
    return types.SimpleNamespace(**{**names, **given})


@pytest.fixture
def runs(monkeypatch):
    """Recorded runs that take no time: the first epoch counts as 5 s, the others as 2 s each."""
    made = []

    def run(task, name, epochs, place, variables, timeout=None):
        if '--num-data' not in task.options:
            made.append((name, epochs, variables['CUPY_CACHE_DIR']))
        if name in failing:
            raise RuntimeError('exit status 1: no such thing')
        ends = [5 + 2 * epoch for epoch in range(epochs)]
        return {'model': 10 + ends[-1], 'epochs': ends}

    failing = []
    monkeypatch.setattr(bench, 'run', run)
    return made, failing


def compare(args):
    found = {}
    not_run = bench.compare(args, 1e9, lambda _, *of: found.update([of]), TASK, None)
    return found, not_run


def test_runs(runs):
    """A cold run has a new cache, a warm run that of the last cold one; other runs are fewer."""
    made, _ = runs
    args = arguments(cold=2, warm=2)
    found, not_run = compare(args)
    assert not not_run and not bench.missing(args, found)
    names = [name for name, _, _ in made]
    assert names == [bench.CAPTURED] * 4 + [bench.UPSTREAM] * 3 + [bench.EAGER] * 3
    for name in names:
        caches = [path for contender, _, path in made if contender == name]
        assert len(set(caches[:2])) == 2 and set(caches[2:]) == {caches[1]}
    assert len({path for _, _, path in made}) == 6
    # 20 epochs: 10 s, 5 s for the first one, and 2 s for each of the other 19.
    for name, kinds in found.items():
        assert {kind: kinds[kind]['seconds'] for kind in kinds} == {'cold': 53, 'warm': 53}
        assert kinds['warm']['is_extrapolated'] == (name != bench.CAPTURED)
    found[bench.UPSTREAM]['commit'] = 'earlier'
    found[bench.CAPTURED]['warm']['runs'].pop()
    assert bench.missing(args, found) == [bench.UPSTREAM, bench.CAPTURED]


def test_a_contender_that_fails_is_not_run_again(runs):
    made, failing = runs
    failing.append(bench.CAPTURED)
    found, not_run = compare(arguments())
    assert not_run == {bench.CAPTURED: 'RuntimeError: exit status 1: no such thing'}
    assert list(found) == [bench.UPSTREAM, bench.EAGER]
    assert found[bench.EAGER]['warm']['seconds'] == 53
    assert [name for name, _, _ in made].count(bench.CAPTURED) == 1


def test_what_there_is_no_time_for_is_said_without_its_command(runs, monkeypatch):
    whole = bench.run

    def run(task, name, *rest):
        if name == bench.UPSTREAM:
            raise subprocess.TimeoutExpired(['/folder/python3', 'train.py'], 1.0)
        return whole(task, name, *rest)

    monkeypatch.setattr(bench, 'run', run)
    found, not_run = compare(arguments())
    assert not_run == {bench.UPSTREAM: 'the time of all runs was up'}
    assert list(found) == [bench.CAPTURED, bench.EAGER]


def test_how_many_times_its_steps_an_epoch_takes():
    cost = {'epochs': [9.0, 10.0], 'steps': 200, 'milliseconds a step': {'median': 8.0}}
    assert bench.over_steps([cost]) == 1.25
    earlier = {key: value for key, value in cost.items() if key != 'steps'}
    for unknown in (earlier, dict(cost, epochs=[9.0]), {**cost, 'milliseconds a step': None}):
        assert bench.over_steps([cost, unknown]) is None


def test_contenders_that_are_not_run_are_taken_from_an_earlier_result():
    def result(commit, **contenders):
        found = {name: {'warm': value} for name, value in contenders.items()}
        return {'conditions': {'commit': commit}, 'data': {'qm9': {'methods': {'gin': found}}}}

    ours, upstream = bench.CAPTURED, bench.UPSTREAM
    found = result('new', **{ours: 1})
    bench.complete(found, result('old', **{ours: 2, upstream: 3}))
    bench.complete(found, result('older', **{upstream: 4, ours: 5}))
    bench.complete(found, {'conditions': {'commit': 'none'}, 'data': {}})
    kept = {'warm': 3, 'commit': 'old'}  # commit of the run
    assert found['data']['qm9']['methods']['gin'] == {ours: {'warm': 1}, upstream: kept}
    failed = result('newer')
    bench.complete(failed, found)
    assert failed['data']['qm9']['methods']['gin'] == {upstream: kept}


def test_commands_that_fail_end_with_what_they_print(tmp_path):
    variables = bench.environment(tmp_path / 'caches', tmp_path / 'shared')
    with pytest.raises(
        RuntimeError,
        match=r"(?s)exit status 2: .*invalid choice: 'nothing' \(choose from .*nfp_gwm.*\)",
    ):
        task = TASK._replace(method='nothing')
        bench.run(task, bench.EAGER, 1, gpus.places(0)[0], variables)


@pytest.mark.slow
def test_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, 'EPOCHS', 3)
    options = '--qm9 sample --methods rsgcn --gpus 0 --num-data 200 --few 2 --warm 1 --commit none'
    bench.main([*options.split(), '--out', str(tmp_path)])
    result = json.loads(pathlib.Path(tmp_path / 'command.json').read_text())
    contenders = result['data']['qm9']['methods']['rsgcn']
    assert list(contenders) == [bench.UPSTREAM, bench.EAGER]
    for kinds in contenders.values():
        assert list(kinds) == ['cold', 'warm']
        for found in kinds.values():
            (cost,) = found['runs']
            assert found['is_extrapolated'] and len(cost['epochs']) == 2
            assert 0 < cost['model'] <= cost['exit'] and cost['seconds'] > cost['model']
            assert set(cost['phases']) >= {'data', 'training'}
    monkeypatch.setattr(bench, 'run', None)  # nothing must be run
    bench.main([*options.split(), '--out', str(tmp_path)])
    assert 'there are: %s, %s' % tuple(contenders) in capsys.readouterr().out
    assert json.loads((tmp_path / 'command.json').read_text()) == result
