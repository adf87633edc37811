"""The list of all methods, as far as it runs without a GPU, with stand-ins for captures."""

import json

import numpy
import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
import chainer_bspmm  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from benchmarks.training import bench_captured  # NOQA: E402
from benchmarks.training import bench_methods as bench  # NOQA: E402
from benchmarks.training import step_contenders  # NOQA: E402
from chainer_bspmm.models import METHODS  # NOQA: E402
from tests.support import captured_benchmarks  # NOQA: E402

HOST = chainer.get_device('@numpy')
N = 24


@pytest.fixture(scope='module')
def read():
    smiles, labels, _ = data_sets.tox21(limit=2 * N)
    small = sorted(range(2 * N), key=lambda i: len(smiles[i]))[:N]
    return [smiles[i] for i in small], labels[small]


def test_the_list_is_complete():
    assert sorted(bench.METHODS) == sorted({*METHODS, 'mpnn'}) and len(bench.METHODS) == 30


@pytest.mark.parametrize(
    'method',
    [
        'rsgcn_cwle',
        'nfp_wle',
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in ('mpnn', 'relgat', 'gnnfilm', 'ggnn_gwm', 'gin_gwle')
        ),
    ],
)
def test_methods_of_every_kind(read, method):
    result = bench.run_method(method, read, {}, HOST, (8,), 0)
    assert result['relative_errors']['loss'] < bench.LOSS_ERROR
    assert set(result['batches']['8']['milliseconds']) == {bench.UPSTREAM, bench.EAGER}
    assert result['batches']['8']['over upstream'] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
@pytest.mark.parametrize('method', ['mpnn', 'gin_gwle'])
def test_captured(read, method, monkeypatch):
    captured_benchmarks.stand_in(monkeypatch)
    monkeypatch.setattr(bench, 'WARM', {True: captured_benchmarks.WARM, False: 2})
    monkeypatch.setattr(bench, 'DeviceDataset', lambda sparse, device: sparse)
    monkeypatch.setattr(bench_captured, 'replay_ms', lambda contender: 0.01)
    result = bench.run_method(method, read, {}, HOST, (8,), 0)
    _, ours = result['batches']['8']['milliseconds']
    assert ours == (bench.CAPTURED if method == 'gin_gwle' else bench.ON_DEVICE)
    assert result['batches']['8']['milliseconds'][ours]['device'] == 0.01


@pytest.mark.parametrize('method', ['gin', 'relgcn_gwle'])
def test_other_results_are_refused(read, method, monkeypatch):
    subject = bench.subject_of(method, read, {})
    packed = chainer_bspmm.CSRConverter(
        'packed', n_node_columns=int(method.endswith('gwle')), strip_padding=True
    )
    monkeypatch.setattr(bench, 'subject_of', lambda *_: subject._replace(converter=packed))
    with pytest.raises(AssertionError, match='relative errors.*loss'):
        bench.run_method(method, read, {}, HOST, (8,), 0)


def test_without_memory_the_batch_is_smaller(read, monkeypatch):
    original = step_contenders.Trainer.run

    def run(self, n_steps):
        if self.updater.get_iterator('main').batch_size > 4:
            raise MemoryError('132 atoms')
        original(self, n_steps)

    monkeypatch.setattr(step_contenders.Trainer, 'run', run)
    found = bench.run_method('rsgcn', read, {}, HOST, (8, 4), 0)
    assert list(found['batches']) == ['8', '4']
    assert found['batches']['8'] == {'not_run': 'out of memory: MemoryError: 132 atoms'}
    text = bench.line('rsgcn', found)
    assert 'batch 8 out of memory' in text and 'batch 4 upstream dense' in text


def test_bars():
    def met(cells):
        return bench.bars({'relgat': cells})['relgat']

    cells = {'128': {'not_run': 'memory'}, '32': {'over upstream': 20.0}}
    assert met({'batches': cells}) == {'ratio': 20.0, 'met': True}
    assert not met({'batches': {'128': {'over upstream': 19.9}}})['met']
    assert met({'wrong': 'very'}) == {'ratio': None, 'met': False}
    assert bench.bars({'gin': {}}) == {}


def test_file_and_what_it_keeps(tmp_path, monkeypatch):
    options = '--device -1 --limit 12 --seconds 0 --batches 4 --commit none --out %s' % tmp_path
    bench.main([*options.split(), '--methods', 'nfp_cwle'])
    path = tmp_path / 'methods.json'
    monkeypatch.setattr(bench, 'LOSS_ERROR', 0)
    with pytest.raises(SystemExit, match='not all methods'):
        bench.main([*options.split(), '--methods', 'rsgcn', '--merge', str(path)])
    result = json.loads(path.read_text())
    assert list(result['methods']) == ['nfp_cwle', 'rsgcn']
    assert 'relative errors' in result['methods']['rsgcn']['wrong']
    assert numpy.isfinite(result['methods']['nfp_cwle']['batches']['4']['over upstream'])
    bench.main([*options.split(), '--methods', 'rsgcn', '--time', '0'])
    assert json.loads(path.read_text())['methods'] != {}
