"""Folded beside packed steps, with stand-ins for captures."""

import json

import numpy
import pytest

pytest.importorskip('rdkit')

from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_captured  # NOQA: E402
from benchmarks.training import bench_layouts as bench  # NOQA: E402
from benchmarks.training import step_contenders  # NOQA: E402
from tests.support import captured_benchmarks  # NOQA: E402


def test_ratios_are_of_turns_that_follow_one_another(monkeypatch):
    rounds = {
        bench.ON_DEVICE: [[0, 2.0], [0, 3.0], [0, 30.0]],
        bench.PACKED: [[0, 1.0], [0, 3.0], [0, 10.0]],
    }
    monkeypatch.setattr(
        bench_captured, 'measure_rounds', lambda *_: (rounds, dict.fromkeys(rounds, 5))
    )
    found = bench.compared({}, None, 0)
    assert found['n_rounds'] == 3 and found['steps a turn'] == {'folded': 5, 'packed': 5}
    assert [found[key]['median'] for key in ('folded', 'packed', 'folded over packed')] == [3, 3, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_file(tmp_path, monkeypatch):
    captured_benchmarks.stand_in(monkeypatch)
    monkeypatch.setattr(bench, 'WARM', captured_benchmarks.WARM)
    layouts = []
    original = step_contenders.Trainer.warm

    def warm(self, n_captured):
        original(self, n_captured)
        layouts.append(self.updater.converter.layout)

    monkeypatch.setattr(step_contenders.Trainer, 'warm', warm)
    options = '--device -1 --limit 40 --methods relgcn --data tox21 --batches 8 99 --seconds 0'
    bench.main([*options.split(), '--commit', 'none', '--out', str(tmp_path)])
    result = json.loads((tmp_path / 'layouts.json').read_text())
    assert layouts == ['folded', 'packed'] and result['not_run'] == ['tox21 relgcn, batch 99']
    found = result['data']['tox21']['methods']['relgcn']
    assert max(found['relative_errors'].values()) < step_contenders.STEP_ERROR
    assert list(found['batches']) == ['8']
    assert found['batches']['8']['n_rounds'] >= 3


def test_molecules_of_several_sizes_are_compared():
    smiles, labels, _ = data_sets.tox21(limit=40)
    _, sparse = data_sets.of_smiles(smiles, labels, 'gin')
    sizes = sparse.molecules.sizes[step_contenders.mixed_sizes(sparse)]
    assert len(sizes) == step_contenders.N_EQUAL and len(numpy.unique(sizes)) > 5
