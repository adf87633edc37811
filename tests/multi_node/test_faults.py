"""If a rank fails, all end within seconds, with one message, and snapshots stay."""

import functools
import os
import re
import signal
import socket
import sys
import time
import types

from chainer_bspmm import CSRConverter  # repairs Chainer before anything imports it
import chainer
import numpy
import pytest
from chainer.iterators import SerialIterator
from chainer.training import extensions, StandardUpdater

from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.multi_node import faults
from tests.multi_node.models import At
from tests.support.ranks import needs_mpi, on_kept_ranks, on_ranks
from tests.support.training import MODELS, molecules

SECONDS = 20  # includes the start of processes; a hang would last forever
N_STEPS = 8
CHECKPOINTS, SNAPSHOTS = 'checkpointer', 'snapshots'


def make_trainer(comm, folder, n_steps=N_STEPS, kind=SNAPSHOTS):
    import chainermn
    from chainer_chemistry.models.prediction import Regressor

    numpy.random.seed(comm.rank)

    def loss(y, t):
        return chainer.functions.mean_squared_error(y[:, :3], t)

    model = Regressor(MODELS['NFP'](), lossfun=loss)
    mine = to_sparse(molecules(22)) if comm.rank == 0 else None
    part = chainermn.scatter_dataset(mine, comm, shuffle=True, seed=0)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    # A snapshot does not contain the state of random numbers.
    iterator = SerialIterator(part, 4, shuffle=False)
    updater = StandardUpdater(iterator, optimizer, converter=CSRConverter('packed'))
    trainer = chainer.training.Trainer(updater, (n_steps, 'iteration'), out=folder)
    if kind == CHECKPOINTS:
        saved = chainermn.create_multi_node_checkpointer('run', comm)
        trainer.extend(saved, trigger=(2, 'iteration'))
    else:
        saved = extensions.snapshot(filename='snapshot_{.updater.iteration}')
        saved_by_all = chainermn.extensions.multi_node_snapshot(comm, saved, [*range(comm.size)])
        trainer.extend(saved_by_all, trigger=(2, 'iteration'))
    return trainer, model, saved


def fail(how, folder):
    import chainermn

    comm = chainermn.create_communicator('naive')
    trainer, model, _ = make_trainer(comm, folder, kind=CHECKPOINTS if how == 'raise' else '')
    parts = {
        'raise': lambda: 1 // 0,
        'exit': lambda: sys.exit('no more disk'),
        'killed': lambda: os.kill(os.getpid(), signal.SIGKILL),
        'nan': lambda: model.predictor.embed.W.array.fill(numpy.nan),
        'all raise': lambda: 1 // 0,
    }
    if comm.rank == 1 or how == 'all raise':
        trainer.extend(At(5, parts[how]), priority=-1)  # after the snapshot
    trainer.run()
    sys.exit('was not ended')


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
ENDS = r'chainer_bspmm: rank %d of 2 on \S+ \(process \d+\) has failed, all ranks end: '
BY_ZERO = 'ZeroDivisionError: .*by zero'


@needs_mpi
@pytest.mark.parametrize(
    'how, message',
    [
        ('raise', ENDS % 1 + BY_ZERO),
        slow('exit', ENDS % 1 + 'exit status 1'),
        slow('nan', ENDS % 1 + 'FloatingPointError: the loss of rank 1 is nan in step 6'),
        slow('killed', 'rank 1 .*[Kk]illed'),  # mpirun's own message
        slow('all raise', ENDS % 0 + BY_ZERO),
    ],
)
def test_a_rank_that_fails_ends_all(tmp_path, how, message):
    start = time.monotonic()
    done = on_ranks(2, fail, how, tmp_path / 'out', status=None)
    assert time.monotonic() - start < SECONDS
    assert re.search(message, ' '.join(done.stderr.split()))
    assert done.stderr.count('all ranks end') == (how != 'killed')
    assert 'was not ended' not in done.stderr
    if how == 'exit':
        assert 'no more disk' in done.stderr
    # There are snapshots of two ranks after two steps and after four.
    saved = sorted(os.listdir(tmp_path / 'out'))
    assert len(saved) == 4
    for name in saved:
        with numpy.load(tmp_path / 'out' / name) as file:
            assert len([file[key] for key in file]) > 20


def test_other_ranks_wait_a_little_before_they_show_an_error(monkeypatch):
    """An error of all ranks is shown by the first, which ends the others."""
    waited = {}
    monkeypatch.setattr(faults.time, 'sleep', lambda seconds: waited.update({comm.rank: seconds}))
    monkeypatch.setattr(faults, '_world', lambda: comm)
    for rank in range(100):
        comm = types.SimpleNamespace(rank=rank)
        faults._wait_for_lower_ranks()
    assert list(waited) == list(range(1, 100))
    assert min(waited.values()) >= 1 and max(waited.values()) <= 3
    assert all(waited[rank] < waited[rank + 1] for rank in range(1, 20))


@pytest.fixture
def installed(monkeypatch):
    """What happens once faults end all ranks: causes of the end, and functions at exit."""
    found = types.SimpleNamespace(causes=[], at_exit=[])
    monkeypatch.setattr(faults, '_process', None)
    monkeypatch.setattr(faults, '_abort', found.causes.append)
    monkeypatch.setattr(faults, '_wait_for_lower_ranks', lambda: None)
    monkeypatch.setattr(faults.atexit, 'register', found.at_exit.append)
    for name in ('exit', 'excepthook'):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    return found


def test_an_exit_that_was_caught_is_none(installed):
    faults.end_all_on_error()
    for status in (1, 0):
        with pytest.raises(SystemExit):
            sys.exit(status)
        installed.at_exit[0]()
        assert installed.causes == ['exit status 1']


@pytest.mark.parametrize(
    'status, causes',
    [(3, ['exit status 3']), ('no more disk', ['exit status 1']), (0, []), (None, [])],
)
def test_an_exit_with_an_error_ends_all(installed, status, causes):
    faults.end_all_on_error()
    with pytest.raises(SystemExit) as end:
        sys.exit(status)
    installed.at_exit[0]()
    assert end.value.code == status and installed.causes == causes


@pytest.mark.parametrize('is_of_chainermn', [False, True])
def test_an_error_is_shown_once_and_ends_all(installed, monkeypatch, is_of_chainermn):
    """ChainerMN's own hook would end the ranks itself, without a word of who has failed."""
    shown = []

    def theirs(kind, value, traceback):
        shown.append('theirs')

    if is_of_chainermn:
        theirs.__module__ = 'chainermn.global_except_hook'
    monkeypatch.setattr(sys, '__excepthook__', lambda *_: shown.append("Python's"))
    monkeypatch.setattr(sys, 'excepthook', theirs)
    faults.end_all_on_error()
    faults.end_all_on_error()  # for another communicator
    sys.excepthook(KeyError, KeyError('N'), None)
    assert shown == ["Python's" if is_of_chainermn else 'theirs']
    assert installed.causes == ["KeyError: 'N'"] and len(installed.at_exit) == 1


@pytest.mark.parametrize(
    'is_child, is_finalized, is_ended', [(False, False, 1), (True, False, 0), (False, True, 0)]
)
def test_only_ranks_end_all(monkeypatch, capsys, is_child, is_finalized, is_ended):
    """A process that a rank has started fails alone, and so does a rank without MPI."""
    ended = []
    world = types.SimpleNamespace(rank=2, size=3, Abort=ended.append)
    mpi = types.SimpleNamespace(COMM_WORLD=world, Is_finalized=lambda: is_finalized)
    monkeypatch.setitem(sys.modules, 'mpi4py', types.SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(faults, '_process', os.getpid() + is_child)
    faults._abort('exit status 3')
    assert ended == [1] * is_ended
    message = 'chainer_bspmm: rank 2 of 3 on %s (process %d) has failed, all ranks end: %s\n' % (
        socket.gethostname(),
        os.getpid(),
        'exit status 3',
    )
    assert capsys.readouterr().err == message * is_ended


def train(folder, *runs):
    import chainermn

    comm = chainermn.create_communicator('naive')
    for kind in (SNAPSHOTS, CHECKPOINTS):
        for name, n_steps, resume in runs:
            path = os.path.join(folder, kind, name)
            trainer, model, saved = make_trainer(comm, path, n_steps, kind)
            if resume and kind == CHECKPOINTS:
                saved.maybe_load(trainer)
            elif resume:
                snapshot = os.path.join(path, 'snapshot_%d.%d' % (resume, comm.rank))
                chainer.serializers.load_npz(snapshot, trainer)
            assert trainer.updater.iteration == resume
            saved.finalize = lambda: None  # would remove the checkpoints of a complete run
            trainer.run()
            chainer.serializers.save_npz(os.path.join(path, 'model.%d' % comm.rank), model)


def continue_with_more(path):
    import chainermn

    comm = chainermn.create_communicator('naive')
    trainer, model, _ = make_trainer(comm, os.path.dirname(path))
    optimizer = trainer.updater.get_optimizer('main')
    for target, name in ((model, 'model'), (optimizer, 'optimizer')):
        chainer.serializers.load_npz(path, target, 'updater/%s:main/' % name)
    assert optimizer.t == 4
    trainer.run()
    assert optimizer.t == 4 + N_STEPS
    assert len(set(comm.mpi_comm.allgather(model.predictor.embed.W.array.tobytes()))) == 1


def assert_same(one, two):
    with numpy.load(one) as one, numpy.load(two) as two:
        assert len(one.files) > 5
        for key in one.files:
            numpy.testing.assert_array_equal(one[key], two[key], key)


@needs_mpi
@pytest.mark.slow  # tests/examples/test_ranks.py resumes runs, too
def test_resuming(tmp_path):
    on_kept_ranks(2, train, tmp_path, ('whole', N_STEPS, 0), ('part', 4, 0))
    on_kept_ranks(2, train, tmp_path, ('part', N_STEPS, 4))
    for kind in (SNAPSHOTS, CHECKPOINTS):  # all bits are equal
        for rank in range(2):
            name = 'model.%d' % rank
            assert_same(tmp_path / kind / 'whole' / name, tmp_path / kind / 'part' / name)
        assert_same(tmp_path / kind / 'part' / 'model.0', tmp_path / kind / 'part' / 'model.1')
    # Parameters and optimizer can be loaded by another number of ranks.
    on_kept_ranks(3, continue_with_more, tmp_path / SNAPSHOTS / 'part' / 'snapshot_4.0')
