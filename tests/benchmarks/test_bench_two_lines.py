"""`bench_two_lines` on few molecules: what it writes, and its bars."""

import json
import sys

from benchmarks.training import bench_two_lines as bench


def test_it_measures_epochs_and_predictions(monkeypatch, tmp_path, capsys):
    words = '--data qm9 --methods rsgcn --limit 60 --rounds 1 --batches 16 --commit c --out'.split()
    monkeypatch.setattr(sys, 'argv', ['bench', *words, str(tmp_path)])
    bench.main()
    result = json.loads((tmp_path / 'two_lines.json').read_text())
    ((cells,),) = [list(data.values()) for data in result['data'].values()]
    cell, predict = cells['16'], cells[bench.PREDICT]
    assert predict['error'] < 1e-4
    assert set(predict['seconds']) == {bench.UPSTREAM, bench.TWO_LINES, bench.SPARSE}
    assert set(cell['seconds an epoch']) == {bench.UPSTREAM, bench.TWO_LINES}
    over = cell['over upstream'][bench.TWO_LINES]
    (bar,) = result['bars'].values()
    assert bar == {'value': over, 'met': over >= 5}
    assert 'MISSED' in capsys.readouterr().out or over >= 5


def test_bars_on_a_gpu():
    times = {name: {'median': value} for name, value in zip(bench.EPOCHS, (4.0, 0.1, 0.05))}
    cell = {'over upstream': {bench.TWO_LINES: 40.0}, 'seconds an epoch': times}
    found = bench.bars({'data': {'Tox21': {'gin': {'32': cell}}}}, True)
    assert [(of['value'], of['met']) for of in found.values()] == [(40.0, True), (2.0, False)]
