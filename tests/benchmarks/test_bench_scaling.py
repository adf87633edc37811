"""The benchmark of scaling runs on two ranks of a CPU, and what it makes of steps."""

import json
import os

import pytest

pytest.importorskip('rdkit')

from benchmarks.training import bench_scaling as bench  # NOQA: E402
from tests.support import ranks  # NOQA: E402

LINKS = dict(zip(bench.LINKS, (100.0, 10.0, 5.0, 20.0)))
N_BYTES = 10**6


@pytest.mark.parametrize(
    'n_gpus, added',
    [
        (2, 0),
        (8, 6 * 0.01),  # six more GPUs send a megabyte each
        # Two hosts send half of it twice, wait twice, and launch again.
        (16, 6 * 0.01 + 0.1 + 0.01 + 0.02),
        (64, 6 * 0.01 + 0.175 + 0.03 + 0.02),
    ],
)
def test_a_modelled_step(n_gpus, added):
    assert bench.modelled(1.2, 10, N_BYTES, n_gpus, LINKS) == pytest.approx(1.21 + added)


def found(walls, exchange=None):
    cells = {
        str(n_batch): {'wall': {'median': wall}, 'bytes of gradients': N_BYTES}
        for n_batch, wall in walls.items()
    }
    if exchange is not None:
        cells['128']['exchange alone, us'] = exchange
    return {'methods': {'gin': cells}}


def test_efficiencies_and_bars():
    runs = {
        1: found({128: 0.93, 256: 1.5}),
        2: found({128: 1.0, 256: 1.6}, 10),
        4: found({128: 1.2, 256: 1.8, 64: 0.6}),
    }
    summary = bench.summarized(runs, (128, 256), 256, LINKS)
    shares = summary['gin']['weak']['128']
    assert shares['2'] == {'measured': 0.93, 'modelled': round(0.93 / 0.94, 3)}
    assert shares['4'] == {'measured': 0.775, 'modelled': round(0.93 / 0.96, 3)}
    assert shares['8'] == {'modelled': 0.93}
    assert summary['gin']['weak']['256']['4'] == {'measured': 0.833}
    assert summary['gin']['strong'] == {'2': 1.5, '4': 2.5}
    two, model = bench.bars(summary).values()  # there is none for the other batch
    assert two == {'value': 0.93, 'met': True}
    assert model == {'value': round(0.969 / 0.775 - 1, 3), 'met': False}
    runs[1] = found({128: 0.92, 256: 1.5})
    del runs[4]
    two, model = bench.bars(bench.summarized(runs, (128, 256), 256, LINKS)).values()
    assert not two['met'] and model['met']


def test_other_links_for_an_earlier_result(tmp_path):
    stored = bench.harness.RESULTS / 'nvidia-h200' / 'scaling.json'
    before = json.loads(stored.read_text())
    options = ['--again', str(stored), '--out', str(tmp_path)]
    bench.main(options)
    assert json.loads((tmp_path / 'scaling.json').read_text()) == before
    bench.main([*options, '--us-of-a-second-launch', '100'])
    after = json.loads((tmp_path / 'scaling.json').read_text())
    assert after['ranks'] == before['ranks'] and after['conditions'] == before['conditions']
    old, new = (of['summary']['rsgcn']['weak']['128'] for of in (before, after))
    assert new['8'] == old['8'] and new['64']['modelled'] < old['64']['modelled'] / 1.5


@ranks.needs_mpi
@pytest.mark.slow
def test_two_ranks_of_a_cpu(tmp_path, monkeypatch):
    for name, value in ranks.SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('PATH', os.path.dirname(ranks.MPIRUN), prepend=os.pathsep)
    options = (
        '--device -1 --limit 24 --methods rsgcn --batches 8 --total 16 --rounds 1 --commit none'
    )
    options = [*options.split(), '--mpirun=--oversubscribe', '--commit', 'none']
    bench.main([*options, '--out', str(tmp_path)])
    result = json.loads((tmp_path / 'scaling.json').read_text())
    assert list(result['ranks']) == ['1', '2'] and list(result['summary']) == ['rsgcn']
    for of in result['ranks'].values():
        assert of['methods']['rsgcn']['8']['wall']['median'] > 0
    assert result['summary']['rsgcn']['weak']['8']['2']['measured'] > 0
    assert result['summary']['rsgcn']['strong']['2'] > 0
