"""Benchmark of scaling, on two ranks of a CPU."""

import json
import os

import pytest

pytest.importorskip('rdkit')

from benchmarks.training import bench_scaling  # NOQA: E402
from tests.support import ranks  # NOQA: E402


@ranks.needs_mpi
@pytest.mark.slow
def test_two_ranks_of_a_cpu(tmp_path, monkeypatch):
    for name, value in ranks.SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('PATH', os.path.dirname(ranks.MPIRUN), prepend=os.pathsep)
    options = '--device -1 --limit 24 --methods rsgcn --batches 8 --total 16 --rounds 1'.split()
    options += ['--commit', 'none', '--mpirun=--oversubscribe', '--out', str(tmp_path)]
    bench_scaling.main(options)
    result = json.loads((tmp_path / 'scaling.json').read_text())
    assert list(result['ranks']) == ['1', '2'] and list(result['summary']) == ['rsgcn']
    for found in result['ranks'].values():
        assert found['methods']['rsgcn']['8']['wall']['median'] > 0
    assert result['summary']['rsgcn']['weak']['8']['2']['measured'] > 0
    assert result['summary']['rsgcn']['strong']['2'] > 0
