"""``--updater graph`` of the examples: where it is refused, how its steps are timed, resuming."""

import argparse
import json
import subprocess
import types

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


@pytest.mark.parametrize(
    'options, message',
    [
        ({'updater': 'graph', 'dense': True}, 'leave out --dense'),
        ({'updater': 'graph'}, None),
        ({'padded_to': 9}, 'expected --layout folded, got --layout packed'),
        ({'padded_to': 9, 'dense': True}, 'got --dense'),
        ({'padded_to': 'largest', 'layout': 'folded'}, None),
    ],
)
def test_options_that_exclude_each_other(common, options, message):
    usual = {'updater': 'standard', 'dense': False, 'layout': 'packed', 'padded_to': None}
    args = argparse.Namespace(device='0', **{**usual, **options})
    device = types.SimpleNamespace(xp='cupy')
    if message is None:
        return common.training.check_options(args, device)
    with pytest.raises(common.data.DataError, match=message):
        common.training.check_options(args, device)


def test_a_data_set_too_large_for_the_gpu_stays_on_the_host(common, monkeypatch, capsys):
    def refuse(dataset, device):
        raise ValueError('expected at most 1 bytes')

    monkeypatch.setattr(common.training, 'DeviceDataset', refuse)
    assert common.training.on_device('data', 'device') == 'data'
    assert 'stays on the host: expected at most 1 bytes' in capsys.readouterr().out


def test_steps_are_timed_in_rounds(common, monkeypatch):
    now, waited = [0.0], []

    class Updater:
        n = 0
        input_device = types.SimpleNamespace(xp='cupy')

        def update(self):
            self.n += 1
            now[0] += 1

        @property
        def is_new_epoch(self):
            return self.n % 7 == 0

    class Timed(common.measure.Timed, Updater):
        def wait(self):
            waited.append(self.n)
            now[0] += 3

    monkeypatch.setattr(common.measure.time, 'perf_counter', lambda: now[0])
    updater = Timed()
    assert updater.steps_a_round > 1
    updater.steps_a_round = 3
    for _ in range(12):
        updater.update()
        now[0] += 0.5  # what the Trainer does
    # Each of the first steps is a round, and the seventh is the last of an epoch.
    assert waited == [1, 2, 5, 7, 10]
    assert updater.seconds == pytest.approx([4, 4] + [7 / 3] * 3 + [2.75] * 2 + [7 / 3] * 3)
    Updater.input_device.xp = numpy
    assert Timed().steps_a_round == 1  # a CPU is done when a step returns


def test_short_epochs_share_a_snapshot_and_the_last_has_one(common, monkeypatch):
    now, updater = [5.0], types.SimpleNamespace(epoch=0)
    monkeypatch.setattr(common.training.time, 'perf_counter', lambda: now[0])
    is_due = common.training.IsSnapshotDue(updater, 9)

    def taken(seconds):
        found = []
        for updater.epoch in range(1, 10):
            now[0] += seconds
            if is_due():
                found.append(updater.epoch)
        return found

    assert taken(0.3) == [1, 5, 9]
    assert taken(1.5) == list(range(1, 10))


def test_updaters_go_by_name(common):
    measure = common.measure
    assert {
        name: issubclass(kind, measure.GraphUpdater) for name, kind in measure.UPDATERS.items()
    } == {'standard': False, 'graph': True}


@pytest.mark.gpu
def test_captured_training_resumes_exactly(tmp_path):
    for package in ('rdkit', 'pandas', 'sklearn', 'matplotlib'):
        pytest.importorskip(package)

    def train(folder, epochs, *options):
        arguments = [
            '--label',
            'alpha',
            '--device',
            '0',
            '--updater',
            'graph',
            '--epoch',
            epochs,
            '--out',
            tmp_path / folder,
            *QUICK,
            *options,
        ]
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
    found = train('parts', 4, '--resume', tmp_path / 'parts' / 'snapshot.npz')
    assert found.keys() == expected.keys()
    for name in expected:
        numpy.testing.assert_array_equal(found[name], expected[name])
