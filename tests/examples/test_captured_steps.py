"""``--updater graph`` of the examples: where it is refused, how its steps are timed, resuming."""

import argparse
import json
import subprocess
import types

import chainer
import numpy
import pytest

from tests.examples.scripts import arrays
from tests.examples.scripts import command
from tests.examples.scripts import environment
from tests.examples.scripts import EXAMPLES
from tests.examples.scripts import imported
from tests.examples.scripts import run_at_once

TRAIN = EXAMPLES / 'qm9' / 'train_qm9.py'
QUICK = ['--unit-num', '8', '--conv-layers', '2', '--num-data', '200']


@pytest.fixture(scope='module')
def common():
    """The modules of examples/common."""
    imported(EXAMPLES / 'qm9', 'qm9_data')
    from common import data, measure, training

    return types.SimpleNamespace(data=data, measure=measure, training=training)


@pytest.mark.parametrize(
    'options, message',
    [
        ([], '--updater graph: CUDA graphs need a GPU, --device -1 is the CPU'),
        (['--device', '@numpy'], '--device @numpy is the CPU'),
    ],
)
def test_captured_steps_need_a_gpu(tmp_path, options, message):
    error = run_at_once(TRAIN, '--updater', 'graph', '--out', tmp_path / 'out', *options, status=1)
    assert error.startswith('error: ') and error.count('\n') == 1 and message in error
    assert not (tmp_path / 'out').exists()  # refused before anything was written


def test_updaters_and_options_that_exclude_each_other(common):
    training, cpu = common.training, types.SimpleNamespace(xp=numpy)
    gpu = types.SimpleNamespace(xp='cupy')

    def updater(device, name, dense=False):
        args = argparse.Namespace(device='0', updater=name, dense=dense)
        return training.updater_of(args, device)

    assert updater(gpu, 'auto') == updater(gpu, 'graph') == 'graph'
    assert updater(gpu, 'auto', dense=True) == updater(cpu, 'auto') == 'standard'
    assert updater(gpu, 'standard') == 'standard'
    with pytest.raises(common.data.DataError, match='leave out --dense'):
        updater(gpu, 'graph', dense=True)

    def layout(padded_to, layout='folded', dense=False):
        args = argparse.Namespace(padded_to=padded_to, layout=layout, dense=dense)
        sizes = types.SimpleNamespace(full_sizes=numpy.array([3, 7, 5]))
        return training.layout_of(args, types.SimpleNamespace(molecules=sizes))['padded_to']

    assert layout(None) == layout('largest') == 7
    assert (layout('batch'), layout(5), layout(None, 'packed')) == (None, 5, None)
    assert layout('batch', dense=True) is None
    for options in ((5, 'packed'), ('largest', 'padded'), (5, 'folded', True)):
        with pytest.raises(common.data.DataError, match='--padded-to: expected layout folded, got'):
            layout(*options)


def test_a_data_set_too_large_for_the_gpu_stays_on_the_host(common, monkeypatch, capsys):
    def refuse(dataset, device):
        raise ValueError('expected at most 1 bytes')

    monkeypatch.setattr(common.training, 'DeviceDataset', refuse)
    assert common.training.on_device('data', 'device') == 'data'
    assert 'stays on the host: expected at most 1 bytes' in capsys.readouterr().out


def test_steps_are_timed_in_rounds(common, monkeypatch, tmp_path):
    measure, now, waited = common.measure, [0.0], []

    class Steps:
        iteration = 0
        connect_trainer = finalize = lambda self, *args: None
        get_all_optimizers = dict
        epoch = property(lambda self: self.iteration // 7)
        epoch_detail = property(lambda self: self.iteration / 7)

        def update(self):
            self.iteration += 1
            now[0] += 1

    def wait():
        waited.append(updater.iteration)
        now[0] += 3

    def others(trainer):
        now[0] += 50

    def run(device):
        trainer = chainer.training.Trainer(updater, (12, 'iteration'), tmp_path)
        timer = measure.StepTimer(trainer, device)
        trainer.extend(others, trigger=(1, 'epoch'))
        trainer.run()
        return timer.rounds

    monkeypatch.setattr(measure.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(measure, 'STEPS_A_ROUND', 3)
    updater = Steps()
    gpu = types.SimpleNamespace(xp='cupy', device=types.SimpleNamespace(synchronize=wait))
    # The seventh step is the last of an epoch, the ninth the last of a round.
    assert run(gpu) == [(3, 2), (3, 2), (1, 4), (2, 2.5), (3, 2)]
    assert waited == [0, 0, 3, 3, 6, 6, 7, 7, 9, 9, 12, 12]  # before a round starts and ends
    updater = Steps()
    assert run(types.SimpleNamespace(xp=numpy)) == [(1, 1)] * 12  # it is done when a step returns


def test_the_first_rounds_are_not_counted(common):
    of = common.measure.milliseconds_a_step
    assert of([(100, 9.0)]) is None and of([(1, 9.0), (1, 9.0)]) is None
    assert of([(100, 9.0), (3, 0.002), (1, 0.004)]) == {'median': 2.0, 'steps': 4}
    assert of([(1, 9.0), (1, 9.0), (1, 0.001)])['steps'] == 1


def test_short_epochs_share_a_snapshot_and_the_last_has_one(common, monkeypatch):
    now, ranks = [5.0], types.SimpleNamespace(is_first=True)
    monkeypatch.setattr(common.training.time, 'perf_counter', lambda: now[0])
    snapshots = common.training.Snapshots(ranks, None, 9)

    def taken(seconds):
        found = []
        for epoch in range(1, 10):
            now[0] += seconds
            if snapshots.is_due(epoch):
                found.append(epoch)
        return found

    assert taken(0.3) == [1, 5, 9]
    assert taken(1.5) == list(range(1, 10))


@pytest.mark.gpu
def test_captured_training_resumes_exactly(tmp_path):
    for package in ('rdkit', 'pandas', 'sklearn', 'matplotlib'):
        pytest.importorskip(package)

    def train(folder, epochs, *options):
        arguments = ['--label', 'alpha', '--device', 0, '--epoch', epochs]
        arguments += ['--out', tmp_path / folder, *QUICK, *options]
        done = subprocess.run(
            command(TRAIN, arguments),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert 'GraphUpdater' not in done.stderr and 'stays on the host' not in done.stdout
        assert 'Time a step: ' in done.stdout
        result = json.loads((tmp_path / folder / 'result.json').read_text())
        assert result['updater'] == 'graph' and result['peak memory in bytes']['CUDA graphs'] > 0
        return arrays(tmp_path / folder / 'model.npz')

    expected = train('whole', 4)
    train('parts', 2)
    found = train('parts', 4, '--resume')
    assert found.keys() == expected.keys()
    for name in expected:
        numpy.testing.assert_array_equal(found[name], expected[name])
