"""The least work of a step, by hand; and the run of all cells with stand-ins for the GPU."""

import json

import pytest

pytest.importorskip('rdkit')

from benchmarks.training import floors  # NOQA: E402
from tests.support import captured_benchmarks  # NOQA: E402

GRAPH = '/predictor/graph_conv/'


def least(method, shapes, has_values=False):
    paths = {GRAPH + path: shape for path, shape in shapes.items()}
    return floors.work(
        method, {**paths, '/predictor/mlp/l_out/W': (12, 64)}, 1000, 3000, 10, 12, has_values
    )


def test_work():
    """Two layers of RelGCN: features of 16, 128 and 64; sums over neighbours of 16 and 64."""
    found = least('relgcn', {'embed/W': (117, 16), 'a/W': (128, 16), 'a/b': (128,)}, True)
    n_parameters = 117 * 16 + 128 * 16 + 128 + 12 * 64
    numbers = 5 * 1000 * 208 + 2 * 2 * (2 * 3000 + 1000) + 2 * 1000 + 120 + 10 * n_parameters
    assert found['bytes'] == 4 * numbers
    assert found['flops'] == 6 * (1000 * 128 * 16 + 10 * 12 * 64) + 4 * 3000 * 80


def test_how_often_a_matrix_is_applied():
    def flops(method, *paths):
        zero = least(method, {})['flops']
        found = least(method, {path: (64, 64) for path in paths})['flops'] - zero
        return found / (6 * 1000 * 64 * 64)

    assert flops('gin', 'update_layers/0/W', 'first_mlp/layers/0/W') == 1
    assert flops('ggnn', 'update_layers/0/W', 'readout_layers/0/W') == floors.N_LAYERS + 1
    degrees = ['layers/%d/graph_linears/%d/W' % (i, j) for i in range(2) for j in range(7)]
    assert flops('nfp', *degrees) == pytest.approx(2)


def test_floor():
    found = floors.floor_us({'bytes': 43e6, 'flops': 67e6}, 20, 1.25)
    assert found == {'bytes_us': 10.0, 'flops_us': 1.0, 'launches_us': 25.0, 'floor_us': 35.0}


def test_bars():
    def met(device_us, kernels):
        cell = {'packed': {'device_us': device_us, 'kernels': kernels}}
        data = {'tox21': {'methods': {'rsgcn': {'batches': {'128': cell}}}}}
        return [bar['met'] for bar in floors.bars(data).values()]

    assert met(90.0, 25.0) == [True, True] and met(90.1, 26.0) == [False, False]
    assert floors.bars({'tox21': {'methods': {'gin': {}}}}) == {}


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_file(tmp_path, monkeypatch):
    captured_benchmarks.stand_in(monkeypatch)
    monkeypatch.setattr(floors, 'WARM', captured_benchmarks.WARM)
    monkeypatch.setattr(floors, 'launch_us', lambda: 1.5)
    times = {'kernels': 20.0, 'device_us': 90.0, 'kernels_us': 60.0}

    def measured(trainer, device):
        trainer.replay()
        return times if trainer.updater.get_iterator('main').batch_size == 8 else 1 / 0

    monkeypatch.setattr(floors, 'measured', measured)
    options = '--device -1 --limit 30 --methods rsgcn --batches 99 8 --commit none --out'
    floors.main([*options.split(), str(tmp_path)])
    result = json.loads((tmp_path / 'floors.json').read_text())
    found = result['data']['tox21']['methods']['rsgcn']
    assert 'ZeroDivisionError' in found['not_run']['99']
    packed, folded = found['batches']['8'].values()
    assert folded['rows'] == packed['rows'] + 8 and folded['bytes'] > packed['bytes'] > 0
    for of in (packed, folded):
        assert of['launches_us'] == 30 and 30 < of['floor_us'] < 90 == of['device_us']
