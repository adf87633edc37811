"""Examples under mpirun: training, resuming, screening, options that exclude each other."""

import csv
import json
import re
import shutil
import threading
import types
import zlib

import numpy
import pytest

from tests.examples.scripts import arrays, error_of, EXAMPLES, imported, rows, run_here
from tests.support.ranks import mpirun, needs_mpi
from tests.support.training import assert_same_bits

TRAIN = EXAMPLES / 'tox21' / 'train_tox21.py'
SCREEN = EXAMPLES / 'tox21' / 'screen_tox21.py'
QUICK = ['--unit-num', '8', '--conv-layers', '2', '--batchsize', '16', '--method', 'nfp']
TWO = ['--communicator', 'naive']


@pytest.fixture(scope='module')
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp('data') / 'data.csv'
    assays = imported(EXAMPLES / 'tox21', 'train_tox21').ASSAYS
    rng = numpy.random.RandomState(0)
    with open(path, 'w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['smiles', *assays])
        for i in range(101):
            smiles = 'C' * rng.randint(1, 12) + 'NOF'[i % 3]
            writer.writerow([smiles, *(int(i % 3 == 0) for _ in assays)])
    return path


@pytest.fixture(scope='module')
def train(data_file, tmp_path_factory):
    """Function that trains on two ranks, and returns the output folder and the printed text."""
    folder = tmp_path_factory.mktemp('trained')

    def run(name, *options):
        out = folder / name
        done = mpirun(2, TRAIN, '--data', data_file, *QUICK, *TWO, '--out', out, *options)
        return out, done.stdout

    return run


@pytest.fixture(scope='module')
def trained(train):
    return train('whole', '--epoch', '2')


@needs_mpi
def test_training(trained, data_file):
    out, text = trained
    assert text.count('Split: 70 training, 15 validation, 16 test') == 1  # by the first rank
    assert text.count('Model, results and pictures: ') == 1
    assert '\033' not in text  # mpirun may give the first rank a terminal
    names = {'best_model.npz', 'learning_curve.png', 'log', 'model.npz', 'result.json'}
    names |= {
        'settings.json',
        'test.csv',
        'training.csv',
        *('snapshot_%d.%d' % (i, j) for i in (3, 6) for j in (0, 1)),
    }
    assert {path.name for path in out.iterdir()} == names
    result = json.loads((out / 'result.json').read_text())
    assert result['settings']['ranks'] == 2
    assert result['steps'] == 2 * 3  # each rank has 35 molecules, in steps of at most 16


@needs_mpi
def test_ranks_draw_other_random_numbers(trained):
    """Dropout and the order of molecules depend on the random state of each rank."""
    out, _ = trained
    states = [arrays(out / ('snapshot_6.%d' % rank)) for rank in (0, 1)]
    keys = [state['extensions/random_state/keys'] for state in states]
    assert (keys[0] != keys[1]).any()


@needs_mpi
def test_a_run_is_not_continued_by_another_number_of_ranks(trained, data_file):
    out, _ = trained
    error = error_of(TRAIN, '--data', data_file, *QUICK, '--out', out, '--resume')
    assert error == (
        'error: --resume: ranks was 2 in the run in %s, and is 1 now; both must be the same' % out
    )


@needs_mpi
@pytest.mark.slow
def test_resuming_ends_with_the_same_model(train, trained):
    out, _ = train('part', '--epoch', '1')
    # The run seems to have been killed after the second rank's snapshot, before the first rank's.
    shutil.copy(trained[0] / 'snapshot_6.1', out)
    _, text = train('part', '--epoch', '2', '--resume')
    assert text.count('Resumed ') == 1
    for file in ('model.npz', 'best_model.npz'):
        assert_same_bits(arrays(out / file), arrays(trained[0] / file))


@needs_mpi
@pytest.mark.slow
def test_all_ranks_lose_patience_together(train):
    options = ['--learning-rate', '0', '--patience', '2']
    out, text = train('patient', '--epoch', '2', *options)
    assert 'Stopped' not in text
    done = mpirun(2, TRAIN, '--resume', '--out', out, '--epoch', '9', *TWO)
    assert done.stdout.count('Stopped: 2 epochs without a better validation result\n') == 1
    assert json.loads((out / 'result.json').read_text())['epochs'] == 3


@needs_mpi
@pytest.mark.slow
def test_screening_is_that_of_one_process(trained, tmp_path):
    lines = ['C' * (i % 9 + 1) + 'NOF'[i % 3] for i in range(50)]
    lines[7] = lines[31] = 'C1CC'
    path = tmp_path / 'molecules.smi'
    path.write_text('\n'.join(lines) + '\n')
    options = [path, '--in-dir', trained[0], '-b', '4']
    run_here(SCREEN, *options, '--out', tmp_path / 'one.csv')
    done = mpirun(3, SCREEN, *options, *TWO, '--out', tmp_path / 'three.csv')
    assert done.stderr.count('molecules: 50, not usable: 2') == 1
    one, three = rows(tmp_path / 'one.csv'), rows(tmp_path / 'three.csv')
    assert [row['line'] for row in three] == [str(i + 1) for i in range(50)]
    one.sort(key=lambda row: int(row['line']))
    for a, b in zip(one, three):
        assert list(a.values())[:4] == list(b.values())[:4]
        for x, y in zip(list(a.values())[4:], list(b.values())[4:]):
            assert x == y == '' or abs(float(x) - float(y)) < 1e-5


def test_ranks_resume_from_the_last_snapshot_of_all(tmp_path, monkeypatch):
    """The run may have been killed after one rank's snapshot and before another's."""
    imported(EXAMPLES / 'tox21', 'train_tox21')
    from common import folder

    for step in (5, 10, 20):
        (tmp_path / ('snapshot_%d.1' % step)).touch()
    loaded = []
    monkeypatch.setattr(folder, 'load_npz', lambda *args: loaded.append(args))
    ranks = types.SimpleNamespace(rank=1, common=lambda steps: {5, 10} & set(steps))
    folder.load_snapshot(str(tmp_path), 'trainer', ranks)
    assert loaded == [(str(tmp_path / 'snapshot_10.1'), 'trainer')]


@pytest.mark.parametrize('n_lines', [0, 3, 8, 24, 49, 50])
def test_lines_of_all_ranks_are_in_order(n_lines):
    """Each of three ranks has every third group of four lines, and knows failures only later."""
    screen = imported(EXAMPLES / 'tox21', 'screen_tox21')
    barrier = threading.Barrier(3, timeout=30)
    turns = [None] * 3
    found = [None] * 3

    def work(rank):
        def allgather(turn):
            turns[rank] = turn
            barrier.wait()
            copied = list(turns)
            barrier.wait()
            return copied

        mpi_comm = types.SimpleNamespace(allgather=allgather)
        ranks = types.SimpleNamespace(comm=types.SimpleNamespace(mpi_comm=mpi_comm))
        lines = [i for i in range(n_lines) if i // 4 % 3 == rank]
        mine = [(i + 1,) for i in sorted(lines, key=lambda i: (lines.index(i) % 8 == 2, i))]
        found[rank] = list(screen.from_all(ranks, mine, 4))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == [(i + 1,) for i in range(n_lines)]


@needs_mpi
@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(tmp_path):
    path = tmp_path / 'missing.csv'
    done = mpirun(2, TRAIN, *TWO, '--data', path, '--out', tmp_path / 'out', status=None)
    assert done.stderr.count('error: cannot read %s: No such file or directory\n' % path) == 1
    assert done.stderr.count('has failed, all ranks end') == 1


@needs_mpi
@pytest.mark.slow
def test_standard_input_of_several_processes_is_refused(trained):
    error = mpirun(2, SCREEN, '--in-dir', trained[0], *TWO, status=None).stderr
    message = 'error: --communicator: expected a file of SMILES, which every process reads\n'
    assert error.count(message) == 1


def test_several_processes_need_the_option(monkeypatch):
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '2')
    error = error_of(SCREEN, 'x.smi', '--in-dir', 'result')
    assert error == (
        'error: expected --communicator in each of 2 processes (OMPI_COMM_WORLD_SIZE): otherwise '
        'all would do the same'
    )


def test_processes_that_read_different_files(tmp_path):
    screen = imported(EXAMPLES / 'tox21', 'screen_tox21')
    path = tmp_path / 'molecules.smi'
    path.write_text('CCO\n')
    checksum = zlib.crc32(b'CCO\n')

    def ranks(other):
        return types.SimpleNamespace(common=lambda mine: set(mine) & {other})

    screen.check_source(ranks(checksum), path)
    screen.check_source(ranks(None), tmp_path / 'missing')
    message = '^%s$' % re.escape('--communicator: %s is not the same for all processes' % path)
    for other in (checksum + 1, None):
        with pytest.raises(screen.DataError, match=message):
            screen.check_source(ranks(other), path)
