"""The benchmark of screening runs without a GPU, and refuses predictions that differ."""

import json

import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks.training import bench_screening as bench  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402


@pytest.mark.slow
def test_what_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, 'WARM_UP', 4)
    options = '--methods rsgcn relgcn --limit 24 --batch 8 --totals 16 64 48 --rounds 1'
    bench.main([*options.split(), '--commit', 'none', '--out', str(tmp_path)])
    result = json.loads((tmp_path / 'screening.json').read_text())
    assert result['conditions']['commit'] == 'none'
    assert list(result['data']) == ['qm9'] and result['data']['qm9']['n_molecules'] == 24
    methods = result['data']['qm9']['methods']
    assert list(methods) == ['rsgcn', 'relgcn']
    for found in methods.values():
        assert max(found['relative_errors'].values()) < bench.ERROR
        parsing = found['microseconds of a core to parse a molecule']
        assert set(parsing) == {
            name + of for name in ('RDKit', 'from_smiles') for of in (bench.ALONE, bench.ALL_CORES)
        }
        assert all(of['median'] > 0 for of in parsing.values())
        for rates in found['molecules a second'].values():
            assert set(rates) == {
                bench.UPSTREAM,
                bench.EAGER,
                bench.CAPTURED,
                bench.CAPTURED + bench.STEADY,
            }
            assert all(rate['median'] > 0 for rate in rates.values())
    assert 'molecules/s' in capsys.readouterr().out


@pytest.mark.parametrize('with_parsing', (False, True))
def test_wrong_predictions_are_refused(monkeypatch, with_parsing):
    smiles, labels, _ = data_sets.qm9(12)
    right = bench.capture

    def wrong(*args, **kwargs):
        values, rate = right(*args, **kwargs)
        return values * (1.001 if ('method' in kwargs) == with_parsing else 1), rate

    monkeypatch.setattr(bench, 'capture', wrong)
    with pytest.raises(AssertionError, match='relative errors'):
        bench.contenders('rsgcn', smiles, labels, chainer.get_device('@numpy'), 4, (4, 8, 8))
