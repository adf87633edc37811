"""Option ``--updater graph`` of the examples: refusals, times of steps, resuming."""

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
    """Modules of examples/common."""
    imported(EXAMPLES / 'qm9', 'train_qm9')
    from common import data, training

    return types.SimpleNamespace(data=data, training=training)


def test_captured_steps_need_a_gpu(tmp_path):
    error = error_of(TRAIN, '--updater', 'graph', '--out', tmp_path / 'out')
    assert error == (
        'error: --updater graph: CUDA graphs need a GPU, as by --device 0, and no --dense; '
        '--device is -1'
    )
    assert not (tmp_path / 'out').exists()  # nothing was written before the refusal


CPU = types.SimpleNamespace(xp=numpy)
GPU = types.SimpleNamespace(xp='cupy')


def options(updater, dense=False):
    return argparse.Namespace(device='0', updater=updater, dense=dense)


@pytest.mark.parametrize(
    'updater, dense, device, expected',
    [
        ('auto', False, GPU, True),
        ('graph', False, GPU, True),
        ('standard', False, GPU, False),
        ('auto', True, GPU, False),
        ('auto', False, CPU, False),
    ],
)
def test_updaters(common, updater, dense, device, expected):
    assert common.training.is_captured(options(updater, dense), device) == expected


def test_captured_steps_of_a_dense_model_are_refused(common):
    with pytest.raises(common.data.DataError) as error:
        common.training.is_captured(options('graph', dense=True), GPU)
    assert str(error.value) == (
        '--updater graph: CUDA graphs need a GPU, as by --device 0, and no --dense; --device is 0'
    )


def layout_of(common, padded_to, layout='folded', dense=False):
    """Return the layout of a training with molecules of at most 7 atoms."""
    args = argparse.Namespace(padded_to=padded_to, layout=layout, dense=dense)
    molecules = types.SimpleNamespace(full_sizes=numpy.array([3, 7, 5]))
    return common.training.layout_of(args, types.SimpleNamespace(molecules=molecules))


@pytest.mark.parametrize(
    'padded_to, layout, dense, expected',
    [
        (None, 'folded', False, 7),
        ('largest', 'folded', False, 7),
        ('batch', 'folded', False, None),
        (5, 'folded', False, 5),
        (None, 'packed', False, None),
        ('batch', 'folded', True, None),
    ],
)
def test_atoms_to_which_batches_are_padded(common, padded_to, layout, dense, expected):
    assert layout_of(common, padded_to, layout, dense)['padded_to'] == expected


def test_molecules_larger_than_those_that_are_padded_are_counted(common, capsys):
    layout_of(common, 5)
    assert capsys.readouterr().out == (
        '--padded-to 5: 1 molecule is larger and gets no phantom atoms, unlike the others\n'
    )
    layout_of(common, 7)
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('n_usual, is_told', [(98, False), (99, True)])
def test_a_molecule_that_is_far_larger_than_the_others(common, n_usual, is_told, capsys):
    """It is an exception if it is one in a hundred, and three times as large as the others."""
    sizes = numpy.array([9] * n_usual + [28])
    assert common.training.largest_of(sizes) == 28
    assert capsys.readouterr().out == is_told * (
        'The largest molecule has 28 atoms, and 99 % of them at most 9: a model may learn better '
        'with --padded-to 9 than with the padding to the largest\n'
    )
    assert common.training.largest_of(numpy.array([9] * 99 + [27])) == 27
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
    'padded_to, layout, dense, name',
    [
        (5, 'packed', False, 'packed'),
        ('largest', 'padded', False, 'padded'),
        (5, 'folded', True, 'dense'),
    ],
)
def test_only_folded_batches_are_padded_to_a_number(common, padded_to, layout, dense, name):
    with pytest.raises(common.data.DataError) as error:
        layout_of(common, padded_to, layout, dense)
    assert str(error.value) == '--padded-to: expected layout folded, got %s' % name


@pytest.mark.parametrize('rank', [0, 2])
def test_each_rank_draws_by_a_seed_of_its_own(common, tmp_path, monkeypatch, rank):
    """Dropout in captured steps depends on this seed."""
    seeds = []

    def make_updater(*args, seed, **options):
        seeds.append(seed)
        raise common.data.DataError('this is no GPU')

    ranks = common.training.ranks_of(None)
    ranks.rank = rank
    monkeypatch.setattr(common.training, 'ranks_of', lambda communicator: ranks)
    monkeypatch.setattr(common.training, 'is_captured', lambda *_: True)
    monkeypatch.setattr(common.training, 'GraphUpdater', make_updater)
    error = error_of(TRAIN, *QUICK, '--seed', 5, '--out', tmp_path / 'out')
    assert error == 'error: this is no GPU' and seeds == [5 + rank]


class Steps:
    """An updater without a model: a step takes one second, and an epoch has three steps."""

    iteration = 0
    get_all_optimizers = dict
    epoch = property(lambda self: self.iteration // 3)
    epoch_detail = property(lambda self: self.iteration / 3)

    def __init__(self, clock):
        self._clock = clock

    def connect_trainer(self, trainer):
        pass

    def finalize(self):
        pass

    def update(self):
        self.iteration += 1
        self._clock.now += 1


@pytest.fixture
def clock(common, monkeypatch):
    """Clock whose time `now`, in seconds, is set by the test."""
    clock = types.SimpleNamespace(now=5.0)
    monkeypatch.setattr(common.training.time, 'perf_counter', lambda: clock.now)
    return clock


def seconds_of_epochs(common, clock, updater, device, out):
    """Return the seconds that a StepTimer finds for three epochs beside a slow extension."""

    def slow(trainer):
        clock.now += 50

    trainer = chainer.training.Trainer(updater, (9, 'iteration'), out)
    timer = common.training.StepTimer(trainer, device)
    trainer.extend(slow, trigger=(1, 'epoch'))
    trainer.run()
    return timer.seconds


def test_steps_of_an_epoch_are_timed_until_a_gpu_is_done(common, clock, tmp_path):
    waited = []

    def wait():
        waited.append(updater.iteration)
        clock.now += 3

    updater = Steps(clock)
    gpu = types.SimpleNamespace(xp='cupy', device=types.SimpleNamespace(synchronize=wait))
    assert seconds_of_epochs(common, clock, updater, gpu, tmp_path) == [6, 6, 6]
    assert waited == [0, 3, 3, 6, 6, 9, 9]  # before the start and end of each epoch


def test_steps_are_timed_without_what_follows_an_epoch(common, clock, tmp_path):
    assert seconds_of_epochs(common, clock, Steps(clock), CPU, tmp_path) == [3, 3, 3]


@pytest.mark.parametrize(
    'seconds, expected', [(0.3, [1, 5, 9]), (1.5, [1, 2, 3, 4, 5, 6, 7, 8, 9])]
)
def test_at_most_one_epoch_in_a_second_is_due(common, clock, seconds, expected):
    is_due = common.training.every(1)
    found = []
    for epoch in range(1, 10):
        clock.now += seconds
        if next(is_due):
            found.append(epoch)
    assert found == expected


@pytest.mark.gpu
def test_captured_training_resumes_exactly(tmp_path):
    for package in ('rdkit', 'pandas', 'sklearn', 'matplotlib'):
        pytest.importorskip(package)

    def train(folder, epochs, *options):
        done = python(
            TRAIN,
            *('--label', 'alpha', '--device', 0, '--epoch', epochs),
            *('--out', tmp_path / folder, *QUICK, *options),
        )
        assert 'GraphUpdater' not in done.stderr
        assert 'Time a step: ' in done.stdout
        result = json.loads((tmp_path / folder / 'result.json').read_text())
        assert result['updater'] == 'graph'
        return arrays(tmp_path / folder / 'model.npz')

    expected = train('whole', 4)
    train('parts', 2)
    assert_same_bits(train('parts', 4, '--resume'), expected)
