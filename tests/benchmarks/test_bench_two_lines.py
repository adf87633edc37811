"""`bench_two_lines`, on few molecules: its files and its printed table."""

import contextlib
import io
import json
import shutil
import sys
from unittest import mock

import pytest

from benchmarks.training import bench_two_lines as bench


def cells_of(result):
    ((cells,),) = [list(data.values()) for data in result['data'].values()]
    return cells


def run(folder, *batches):
    """Measure few molecules; return the printed text."""
    words = '--data qm9 --methods rsgcn --limit 60 --rounds 1 --commit c'.split()
    argv = ['bench', *words, '--batches', *batches, '--out', str(folder)]
    printed = io.StringIO()
    with mock.patch.object(sys, 'argv', argv), contextlib.redirect_stdout(printed):
        bench.main()
    return printed.getvalue()


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """Folder of a result with batches of 16, and the printed text."""
    folder = tmp_path_factory.mktemp('two_lines')
    return folder, run(folder, '16')


def read(folder):
    return json.loads((folder / 'two_lines.json').read_text())


def test_epochs_are_measured(measured):
    folder, printed = measured
    assert 'elapsed_time' not in printed  # a report of the trainings
    assert 'iters/sec' not in printed
    result = read(folder)
    cell = cells_of(result)['16']
    assert set(cell['seconds an epoch']) == {bench.UPSTREAM, bench.TWO_LINES}
    over = cell['over upstream'][bench.TWO_LINES]
    (bar,) = result['bars'].values()
    assert bar == {'value': over, 'met': over >= 5}
    assert ('MISSED' in printed) == (over < 5)


def test_predictions_are_measured(measured):
    predict = cells_of(read(measured[0]))[bench.PREDICT]
    assert predict['error'] < 1e-4
    assert set(predict['seconds']) == {bench.UPSTREAM, bench.TWO_LINES, bench.SPARSE}


def test_a_result_is_completed_by_other_batches(measured, monkeypatch, tmp_path):
    shutil.copytree(measured[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(bench, 'predicting', None)  # nothing must be predicted again
    run(tmp_path, '16', '8')
    before = cells_of(read(measured[0]))
    after = cells_of(read(tmp_path))
    assert list(after) == [bench.PREDICT, '16', '8']
    assert {name: after[name] for name in before} == before
