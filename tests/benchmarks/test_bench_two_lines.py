"""`bench_two_lines` on few molecules: what it writes."""

import json
import sys

from benchmarks.training import bench_two_lines as bench


def test_it_measures_epochs_and_predictions(monkeypatch, tmp_path, capsys):
    words = '--data qm9 --methods rsgcn --limit 60 --rounds 1 --batches 16 --commit c --out'.split()
    monkeypatch.setattr(sys, 'argv', ['bench', *words, str(tmp_path)])
    bench.main()
    printed = capsys.readouterr().out
    assert 'elapsed_time' not in printed and 'iters/sec' not in printed
    result = json.loads((tmp_path / 'two_lines.json').read_text())
    ((cells,),) = [list(data.values()) for data in result['data'].values()]
    cell = cells['16']
    predict = cells[bench.PREDICT]
    assert predict['error'] < 1e-4
    assert set(predict['seconds']) == {bench.UPSTREAM, bench.TWO_LINES, bench.SPARSE}
    assert set(cell['seconds an epoch']) == {bench.UPSTREAM, bench.TWO_LINES}
    over = cell['over upstream'][bench.TWO_LINES]
    (bar,) = result['bars'].values()
    assert bar == {'value': over, 'met': over >= 5}
    assert 'MISSED' in printed or over >= 5

    monkeypatch.setattr(bench, 'predicting', None)  # it goes on with other batches
    monkeypatch.setattr(sys, 'argv', ['bench', *words, str(tmp_path), '--batches', '16', '8'])
    bench.main()
    after = json.loads((tmp_path / 'two_lines.json').read_text())
    ((of,),) = [list(data.values()) for data in after['data'].values()]
    assert list(of) == [bench.PREDICT, '16', '8'] and {**of, **cells} == of
