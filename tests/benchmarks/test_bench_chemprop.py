"""`bench_chemprop`, with a stand-in for chemprop's command that always predicts 1."""

import json
import sys

import numpy
import pytest

pytest.importorskip('rdkit')

from benchmarks.training import bench_chemprop as bench  # NOQA: E402

STAND_IN = """#!%s
import argparse, pathlib, pandas
parser = argparse.ArgumentParser()
for name in ['data-path', 'smiles-columns', 'splits-column', 'task-type', 'epochs', 'output-dir',
             'accelerator', 'devices']:
    parser.add_argument('--' + name)
parser.add_argument('--target-columns', nargs='+')
args = parser.parse_args(__import__('sys').argv[2:])
frame = pandas.read_csv(args.data_path)
counts = frame[args.splits_column].value_counts()
assert counts.to_dict() == {'train': 48, 'val': 6, 'test': 6}, counts
frame = frame[frame[args.splits_column] == '%s'][[args.smiles_columns, *args.target_columns]]
frame[args.target_columns] = 1.0
out = pathlib.Path(args.output_dir, 'model_0')
out.mkdir(parents=True)
frame.to_csv(out / 'test_predictions.csv', index=False)
"""


def stand_in(folder, monkeypatch, part='test'):
    path = folder / 'chemprop'
    path.write_text(STAND_IN % (sys.executable, part))
    path.chmod(0o755)
    monkeypatch.setattr(bench, 'versions', lambda path: {'chemprop': '0'})
    words = ['--chemprop', path, '--limit', 60, '--epochs', 1, '--seeds', 1, '--out', folder]
    bench.main([*map(str, words), '--commit', 'c'])
    return json.loads((folder / 'chemprop.json').read_text())


def test_metric():
    truth = numpy.array([[0, 1, 0], [1, numpy.nan, 0], [1, 0, 0]])
    answers = numpy.array([[0.2, 0.1, 0], [0.9, 0.5, 1], [0.1, 0.2, 1]])
    assert bench.metric('classification', truth, answers) == 0.25  # the third label has one class
    assert bench.metric('regression', answers, answers + [[1], [-2], [0]]) == pytest.approx(1)


def test_other_molecules_are_noticed(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match='^chemprop was tested with other molecules$'):
        stand_in(tmp_path, monkeypatch, 'val')


@pytest.mark.slow
def test_both_are_measured_once(tmp_path, monkeypatch):
    result = stand_in(tmp_path, monkeypatch)
    found = result['data']['qm9']
    runs = [(run['contender'], run['seed']) for run in found['runs']]
    assert runs == [('chemprop', 1), ('ours', 1)]
    chemprop, ours = found['median'].values()
    frame = bench.read('qm9', type('', (), {'limit': 60}))
    assert found['molecules'] == len(frame) == 60
    expected = frame['alpha'].to_numpy()[bench.parts(60, 1)[2]]
    assert chemprop['test'] == pytest.approx(abs(expected - 1).mean())
    assert ours['test'] < chemprop['test'] and ours['seconds'] > 0
    monkeypatch.setattr(bench, 'run', None)  # nothing must be run again
    assert stand_in(tmp_path, monkeypatch) == result
