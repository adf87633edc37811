"""The benchmark of scaling runs on two ranks of a CPU, and what it makes of steps."""

import json
import os

import pytest

pytest.importorskip('rdkit')

from benchmarks.training import bench_scaling as bench  # NOQA: E402
from tests.support import ranks  # NOQA: E402

LINKS = dict(zip(bench.LINKS, (100.0, 10.0, 5.0)))
N_BYTES = 10**6


def found(wall):
    cell = {'wall': {'median': wall}, 'bytes of gradients': N_BYTES}
    return {'methods': {'gin': {'128': cell, '256': cell}}}


@pytest.mark.parametrize(
    'n_gpus, added',
    [
        (2, 0),
        (8, 6 * 0.01),  # six more GPUs send a megabyte each
        (16, 6 * 0.01 + 0.1 + 0.01),  # two hosts send half of it twice, and wait twice
        (64, 6 * 0.01 + 0.175 + 0.03),
    ],
)
def test_a_modelled_step(n_gpus, added):
    assert bench.modelled(1.2, N_BYTES, n_gpus, LINKS) == pytest.approx(1.2 + added)


def test_efficiencies_and_bars():
    summary = bench.summarized({1: found(0.93), 2: found(1.0), 4: found(1.2)}, LINKS)
    assert summary['gin']['128']['efficiency'] == {'2': 0.93, '4': 0.775}
    assert summary['gin']['128']['modelled']['8'] == round(0.93 / 1.06, 3)
    (bar,) = bench.bars(summary).values()  # there is none for the other batch
    assert bar == {'value': 0.93, 'met': True}
    (bar,) = bench.bars(bench.summarized({1: found(0.92), 2: found(1.0)}, LINKS)).values()
    assert not bar['met']


@ranks.needs_mpi
def test_two_ranks_of_a_cpu(tmp_path, monkeypatch):
    for name, value in ranks.SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('PATH', os.path.dirname(ranks.MPIRUN), prepend=os.pathsep)
    options = '--device -1 --limit 24 --methods rsgcn --batches 8 --rounds 1 --commit none'
    bench.main([*options.split(), '--mpirun=--oversubscribe', '--out', str(tmp_path)])
    result = json.loads((tmp_path / 'scaling.json').read_text())
    assert list(result['ranks']) == ['1', '2'] and list(result['summary']) == ['rsgcn']
    for of in result['ranks'].values():
        assert of['methods']['rsgcn']['8']['wall']['median'] > 0
