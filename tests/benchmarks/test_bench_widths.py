"""Benchmark of wide layers, as far as it runs without a GPU, with stand-ins for captures."""

import contextlib
import json

import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_steps, bench_widths as bench  # NOQA: E402
from benchmarks.training import step_contenders as steps, subjects  # NOQA: E402
from tests.training import host_graphs  # NOQA: E402

HOST = chainer.get_device('@numpy')
N_UNIT, N_LAYERS, N_BATCH = 8, 2, 10


def subject_of(method):
    smiles, labels, _ = data_sets.tox21(limit=80)
    return subjects.subject_of(method, (smiles, labels), {}, N_UNIT, N_LAYERS)


@pytest.fixture
def captures(monkeypatch):
    """Run captured contenders on the host, with ordinary products instead of TF32."""
    host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(bench_steps, 'replay_ms', lambda replay: replay() or 0.01)
    monkeypatch.setattr(steps, 'can_capture', lambda device: True)
    monkeypatch.setattr(steps, 'DeviceDataset', lambda sparse, device: sparse)
    monkeypatch.setattr(steps, 'tf32', contextlib.nullcontext)
    monkeypatch.setattr(bench, 'products_ms', lambda *_: 0.005)


def n_atoms(subject):
    return round(N_BATCH * sum(len(atoms) for atoms, *_ in subject.dense) / len(subject.dense))


HEAD = [(N_BATCH, 8, 8), (N_BATCH, 8, 12)]
PER_ATOM = {
    'rsgcn': [(8, 8), (8, 8)],
    # Messages; gates and candidate of one input; the candidate of the reset state. The first step
    # has no state. Later ones add the state's gates to those of the input.
    'ggnn': [(8, 32), (16, 16), (8, 32), (16, 24), (8, 8), (16, 16)],
    'gin': [(8, 8), (8, 8), (8, 8), (8, 8), (16, 16)],
    'relgcn': [(16, 5 * 128), (128, 5 * 64), (64, 2 * 8)],
}


@pytest.mark.parametrize('method', PER_ATOM)
def test_products_of_a_step(method):
    subject = subject_of(method)
    per_atom = [(n_atoms(subject), *sizes) for sizes in PER_ATOM[method]]
    assert bench.products_of(subject, N_BATCH) == per_atom + HEAD


def test_a_degree_s_product_is_of_its_atoms():
    subject = subject_of('nfp')
    found = bench.products_of(subject, N_BATCH)
    n = n_atoms(subject)
    assert found[-2:] == HEAD
    readouts = [i for i, product in enumerate(found) if product == (n, 8, 8)]
    assert len(readouts) == N_LAYERS
    degrees = found[: readouts[0]]
    assert len(degrees) > 1 and all(0 < n_rows < n for n_rows, *_ in degrees)
    assert sum(n_rows for n_rows, *_ in degrees) == pytest.approx(n, abs=len(degrees))


def cell(products=None, **milliseconds):
    """Return a cell with these times (`jit_fp32`, `ours_tf32`, ...) as wall and as device times."""
    names = {
        'ours_fp32': bench.OURS['FP32'],
        'ours_tf32': bench.OURS['TF32'],
        'jit_fp32': steps.JAX['jit', 'FP32'],
        'scan_fp32': steps.JAX['scan', 'FP32'],
        'jit_tf32': steps.JAX['jit', 'TF32'],
        'scan_tf32': steps.JAX['scan', 'TF32'],
    }
    times = {
        names[name]: {'wall': {'median': ms}, 'device': ms} for name, ms in milliseconds.items()
    }
    return {'milliseconds': times, 'products': products or {}}


def test_bars_against_the_faster_driver_of_jax():
    cells = {'128': cell(ours_fp32=1.0, jit_fp32=1.2, scan_fp32=1.04)}
    found = bench.bars({'256': {'gin': {'batches': cells}}})
    assert found == {
        '256 units, gin, batch 128, FP32: 1.05x as fast as JAX': {'value': 1.04, 'met': False},
        'geometric mean, FP32: 1.3x as fast as JAX': {'value': 1.04, 'met': False},
    }


def test_bars_over_the_products():
    cells = {
        '128': cell({'FP32': 1.0, 'TF32': 1.0}, ours_fp32=1.7, ours_tf32=2.6),
        '32': cell({'FP32': 1.0, 'TF32': 1.0}, ours_fp32=9.0, ours_tf32=9.0),
    }
    found = bench.bars({'256': {'ggnn': {'batches': cells}}})
    assert {title: bar['met'] for title, bar in found.items()} == {
        '256 units, ggnn, batch 128, FP32: at most 1.7x the time of its products': True,
        '256 units, ggnn, batch 128, TF32: at most 2.5x the time of its products': False,
    }


def test_no_bars_for_narrow_layers():
    slow = cell({'FP32': 0.1}, ours_fp32=1.0, jit_fp32=0.5, scan_fp32=0.5)
    assert bench.bars({'16': {'gin': {'batches': {'128': slow}}}}) == {}


def run_main(folder, words, name='widths'):
    words = '--device -1 --limit 30 --commit none --seconds 0 --layers 2 ' + words
    bench.main([*words.split(), '--out', str(folder)])
    return json.loads((folder / (name + '.json')).read_text())


@pytest.mark.slow
def test_every_width_has_its_model(tmp_path):
    result = run_main(tmp_path, '--units 8 16 --batches 8 --methods rsgcn nfp')
    assert list(result['data']) == ['8', '16'] and not result['not_run']
    for units, methods in result['data'].items():
        assert list(methods) == ['rsgcn', 'nfp']
        (of,) = methods['rsgcn']['batches'].values()
        assert of['product_sizes'][0][1] == int(units) and of['products'] == {}
        assert {steps.UPSTREAM, steps.EAGER_PACKED} <= set(of['milliseconds'])
        assert max(methods['rsgcn']['relative_errors'].values()) < steps.STEP_ERROR


@pytest.mark.slow
def test_another_data_set_has_a_result_of_its_own(tmp_path):
    words = '--units 8 --batches 8 --methods rsgcn'
    run_main(tmp_path, words)
    before = (tmp_path / 'widths.json').read_text()
    result = run_main(tmp_path, words + ' --data nci', 'widths_nci')
    assert result['options']['data'] == 'nci'
    assert (tmp_path / 'widths.json').read_text() == before


@pytest.mark.slow
def test_it_goes_on_with_what_is_missing(tmp_path):
    first = run_main(tmp_path, '--units 8 --batches 8 --methods rsgcn')
    both = run_main(tmp_path, '--units 8 16 --batches 8 --methods rsgcn')
    assert both['data']['8'] == first['data']['8'] and both['data']['16']['rsgcn']['batches']


def test_what_there_is_no_time_for_is_said(tmp_path):
    result = run_main(tmp_path, '--units 8 --batches 8 --methods rsgcn gin --time 0')
    assert result['not_run'] == ['8 units, rsgcn, batches 8', '8 units, gin, batches 8']


def test_a_wrong_step_of_jax_is_not_timed(tmp_path, monkeypatch):
    def check_jax(method, subject, device):
        raise AssertionError('expected below 0.05')

    monkeypatch.setattr(bench, 'has_jax', lambda method: True)
    monkeypatch.setattr(steps, 'check_jax', check_jax)
    result = run_main(tmp_path, '--units 8 --batches 8 --methods rsgcn')
    of = result['data']['8']['rsgcn']
    assert of['not_run'] == {'JAX': 'expected below 0.05'}
    assert set(of['batches']['8']['milliseconds']) == {steps.UPSTREAM, steps.EAGER_PACKED}


@pytest.mark.slow
def test_results_of_several_gpus_are_joined(tmp_path):
    result = run_main(tmp_path, '--units 8 16 --batches 8 --methods nfp rsgcn --gpus 2')
    assert {units: list(methods) for units, methods in result['data'].items()} == {
        '8': ['nfp', 'rsgcn'],
        '16': ['nfp', 'rsgcn'],
    }
    assert result['options']['gpus'] == 2 and result['not_run'] == []


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_both_precisions_are_captured(captures, tmp_path):
    result = run_main(tmp_path, '--units 8 --batches 8 --methods nfp')
    of = result['data']['8']['nfp']
    cell = of['batches']['8']
    names = {*bench.OURS.values(), *bench.UPSTREAM_S.values()}
    assert set(cell['milliseconds']) == names and not cell['not_run']
    assert cell['products'] == {'FP32': 0.005, 'TF32': 0.005}
    assert set(of['relative_errors']) == set(bench.OURS.values())
    assert bench.over_products(cell, 'TF32') == 2
