"""``--updater graph`` of the examples: where it is refused, how its steps are timed, resuming."""

import argparse
import json
import types

import chainer
import numpy
import pytest

from tests.examples.scripts import arrays, error_of, EXAMPLES, imported
from tests.support.processes import python
from tests.support.training import assert_same_bits

TRAIN = EXAMPLES / 'qm9' / 'train_qm9.py'
QUICK = ['--unit-num', '8', '--conv-layers', '2', '--num-data', '200']


@pytest.fixture(scope='module')
def common():
    imported(EXAMPLES / 'qm9', 'train_qm9')
    from common import data, measure, ranks, training

    return types.SimpleNamespace(data=data, measure=measure, ranks=ranks, training=training)


def test_captured_steps_need_a_gpu(tmp_path):
    error = error_of(TRAIN, '--updater', 'graph', '--out', tmp_path / 'out')
    assert '--updater graph: CUDA graphs need a GPU, as by --device 0, and no --dense; ' in error
    assert not (tmp_path / 'out').exists()  # refused before anything was written


def test_updaters_and_options_that_exclude_each_other(common):
    training = common.training
    cpu = types.SimpleNamespace(xp=numpy)
    gpu = types.SimpleNamespace(xp='cupy')

    def captured(device, name, dense=False):
        options = argparse.Namespace(device='0', updater=name, dense=dense)
        return training.is_captured(options, device)

    assert captured(gpu, 'auto') and captured(gpu, 'graph') and not captured(gpu, 'standard')
    assert not captured(gpu, 'auto', dense=True) and not captured(cpu, 'auto')
    with pytest.raises(common.data.DataError, match='and no --dense'):
        captured(gpu, 'graph', dense=True)

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


def test_steps_of_an_epoch_are_timed_together_on_a_gpu(common, monkeypatch, tmp_path):
    measure = common.measure
    now = [0.0]
    waited = []

    class Steps:
        iteration = 0
        connect_trainer = finalize = lambda self, *args: None
        get_all_optimizers = dict
        epoch = property(lambda self: self.iteration // 3)
        epoch_detail = property(lambda self: self.iteration / 3)

        def update(self):
            self.iteration += 1
            now[0] += 1

    def wait():
        waited.append(updater.iteration)
        now[0] += 3

    def others(trainer):
        now[0] += 50

    def run(device):
        trainer = chainer.training.Trainer(updater, (9, 'iteration'), tmp_path)
        timer = measure.StepTimer(trainer, device)
        trainer.extend(others, trigger=(1, 'epoch'))
        trainer.run()
        return timer.rounds

    monkeypatch.setattr(measure.time, 'perf_counter', lambda: now[0])
    updater = Steps()
    gpu = types.SimpleNamespace(xp='cupy', device=types.SimpleNamespace(synchronize=wait))
    assert run(gpu) == [(3, 2)] * 3
    assert waited == [0, 3, 3, 6, 6, 9, 9]  # before a round starts and ends
    updater = Steps()
    assert run(types.SimpleNamespace(xp=numpy)) == [(1, 1)] * 9  # it is done when a step returns


def test_the_first_rounds_are_not_counted(common):
    of = common.measure.milliseconds_a_step
    assert of([(100, 9.0)]) is None and of([(1, 9.0), (1, 9.0)]) is None
    assert of([(100, 9.0), (3, 0.002), (1, 0.004)]) == {'median': 2.0, 'steps': 4}
    assert of([(1, 9.0), (1, 9.0), (1, 0.001)])['steps'] == 1


def test_short_epochs_share_a_snapshot_and_the_last_has_one(common, monkeypatch):
    now = [5.0]
    updater = types.SimpleNamespace(epoch=0)
    monkeypatch.setattr(common.training.time, 'perf_counter', lambda: now[0])
    is_due = common.training.NotTwiceASecond(updater, 9, common.ranks.OneRank())

    def taken(seconds):
        found = []
        for epoch in range(1, 10):
            now[0] += seconds
            updater.epoch = epoch
            if is_due():
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
        done = python(TRAIN, *arguments)
        assert 'GraphUpdater' not in done.stderr
        assert 'Time a step: ' in done.stdout
        result = json.loads((tmp_path / folder / 'result.json').read_text())
        assert result['updater'] == 'graph' and result['peak memory in bytes']['CUDA graphs'] > 0
        return arrays(tmp_path / folder / 'model.npz')

    expected = train('whole', 4)
    train('parts', 2)
    assert_same_bits(train('parts', 4, '--resume'), expected)
