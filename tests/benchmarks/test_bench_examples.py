"""A small measurement of whole runs of the examples."""

import json

import pytest

from benchmarks.training import bench_examples
from benchmarks.training import example_runs


@pytest.mark.slow
def test_dense_and_sparse_runs_are_kept(tmp_path, capsys):
    bench_examples.main(
        [
            *'qm9 --data sample --num-data 300 --commit none --out'.split(),
            str(tmp_path),
            *'--methods rsgcn gin'.split(),
        ]
    )
    found = json.loads((tmp_path / 'example_qm9.json').read_text())
    assert list(found['methods']) == ['rsgcn', 'gin'] and found['commit'] == 'none'
    for pair in found['methods'].values():
        assert [pair[name]['dense'] for name in ('dense', 'sparse')] == [True, False]
        dense, sparse = (dict(pair[name]['settings']) for name in ('dense', 'sparse'))
        assert (dense.pop('layout'), sparse.pop('layout')) == ('dense', 'folded')
        assert dense == sparse and sparse['n_molecules'] == 300
        for result in pair.values():
            assert len(result['log']) == result['epochs'] == 1
            assert result['test']['MAE']['alpha'] > 0
            assert result['conditions']['threads'] == example_runs.THREADS
    assert capsys.readouterr().out.count(' ms a step') == 4
