"""Scripts of examples/own_dataset, run as users run them, and the folder of a run."""

import contextlib
import io
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import threading
import time
import types
import zipfile
from pathlib import Path

import chainer
import numpy
import pytest

from tests.examples.scripts import arrays, command, error_of, EXAMPLES, imported, rows, run_apart
from tests.examples.scripts import run_here
from tests.support.processes import environment, python, ROOT
from tests.support.training import assert_same_bits

OWN = EXAMPLES / 'own_dataset'
QUICK = '--unit-num 8 --conv-layers 2 --batchsize 16 --epoch 2'.split()
CHAINS = ['C' * n + end for n in range(1, 31) for end in ('', 'N', 'O')]
TABLE = 'smiles,y,name\n' + ''.join(
    '%s,%d,m%d\n' % (smiles, i, i) for i, smiles in enumerate(CHAINS)
)
SNAPSHOT = 'snapshot_8.0'  # last snapshot of a run with WORDS
WORDS = ['--data', 'mine.csv', '--labels', 'y', '--task', 'regression', '--out', 'result', *QUICK]


def run(script, *arguments, **options):
    return run_here(OWN / script, *arguments, **options)


def train_on(folder, text, *arguments, **options):
    """Write a CSV file to a folder, and train on it into the folder `result` there."""
    folder.mkdir(exist_ok=True)
    (folder / 'mine.csv').write_text(text)
    return run('train_own.py', *WORDS, *arguments, cwd=folder, **options)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Folder with mine.csv, and with `result` of a training on it."""
    folder = tmp_path_factory.mktemp('trained')
    train_on(folder, TABLE)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """Copy of the folder `trained`, for a test that changes it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / 'result' / 'settings.json'
    path.write_text(path.read_text().replace(str(trained), str(tmp_path)))
    return tmp_path


@pytest.fixture(scope='module')
def common():
    imported(OWN, 'train_own')
    import common.folder
    import common.training

    return common


@pytest.fixture
def error(tmp_path, monkeypatch):
    """Function that returns the error of a script in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return lambda script, *arguments: error_of(OWN / script, *arguments)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_regression_of_several_labels(tmp_path):
    lines = ['m%d,%s,%s,%d\n' % (i, s, -len(s) / 2, 14 * len(s)) for i, s in enumerate(CHAINS)]
    (tmp_path / 'mine.csv').write_text('name,Structure,log S,mass\n' + ''.join(lines))
    train = ['train_own.py', *WORDS, '--smiles-column', 'Structure', '--labels', 'log S', 'mass']
    text = run(*train, cwd=tmp_path)
    assert '90 molecules' in text and 'Targets: log S, mass' in text
    test = json.loads((tmp_path / 'result' / 'result.json').read_text())['test']
    assert list(test['MAE']) == ['log S', 'mass']
    printed = run('predict_own.py', '--out', 'p.csv', cwd=tmp_path)
    assert 'MAE of mass: %.6g, RMSE ' % test['MAE']['mass'] in printed
    names = ['name', 'Structure', 'log S', 'mass', 'log S predicted', 'mass predicted']
    assert list(rows(tmp_path / 'p.csv')[0]) == names
    (tmp_path / 'new.csv').write_text('id,Structure,mass\n7,CCO,46\n')
    run('predict_own.py', '--data', 'new.csv', '--out', 'q.csv', cwd=tmp_path)
    (row,) = rows(tmp_path / 'q.csv')
    assert list(row) == ['id', 'Structure', 'mass', 'log S predicted', 'mass predicted']
    assert row['id'] == '7'


def test_classification_by_scaffold(tmp_path):
    """Molecules with the same scaffold are in one part, and predictions use the same test part."""
    rings = [
        'C1CCCCC1',
        'c1ccccc1',
        'c1ccncc1',
        'C1CCCC1',
        'C1CCC1',
        'C1CC1',
        'C1CCNCC1',
        'c1ccoc1',
    ]
    lines = ['smiles,y,ring\n']
    for ring in rings:
        for end in ('C', 'CC', 'N', 'O', 'F', 'CN'):
            is_unknown = len(lines) % 5 == 1
            lines.append(
                '%s,%s,%s\n' % (end + ring, '' if is_unknown else int('N' in end + ring), ring)
            )
    text = ''.join(lines)
    printed = train_on(tmp_path, text, '--task', 'classification', '--split', 'scaffold')
    assert 'Split: 36 training, 6 validation, 6 test' in printed
    area = json.loads((tmp_path / 'result' / 'result.json').read_text())['test']['mean ROC-AUC']
    printed = run('predict_own.py', cwd=tmp_path)
    assert 'mean ROC-AUC: %.4f' % area in printed
    assert len({row['ring'] for row in rows(tmp_path / 'result' / 'predictions.csv')}) == 1


COLUMNS = "'Structure', 'y', 'name', 'twice', 'twice'"


@pytest.mark.parametrize(
    'change, message',
    [
        (
            ['--labels', 'log S'],
            "mine.csv has no column 'log S'; expected the columns 'Structure', 'log S', separated "
            'by commas, found ' + COLUMNS,
        ),
        (
            ['--smiles-column', 'x'],
            "mine.csv has no column 'x'; expected the columns 'x', 'y', separated by commas, found "
            + COLUMNS,
        ),
        (
            ['--task', 'classification'],
            "mine.csv row 2: target y is '2', expected 0, 1 or nothing (rows like this: 1)",
        ),
        (
            ['--labels', 'name'],
            "mine.csv row 2: target name is 'm0', expected a finite number (rows like this: 1)",
        ),
        (['--labels', 'twice'], "mine.csv has 2 columns 'twice'"),
        (['--labels', 'y', 'y'], '--labels: a column is named twice'),
        (
            ['--data', 'separated.csv'],
            "separated.csv has no column 'Structure'; expected the columns 'Structure', 'y', "
            "separated by commas, found 'Structure;y'",
        ),
    ],
)
def test_errors_of_the_user_have_no_traceback(tmp_path, error, change, message):
    (tmp_path / 'separated.csv').write_text('Structure;y\nCCO;1\n')
    (tmp_path / 'mine.csv').write_text('Structure,y,name,twice,twice\nCCO,2,m0,3,4\n')
    found = error('train_own.py', *WORDS, '--smiles-column', 'Structure', *change)
    assert found == 'error: ' + message
    assert not (tmp_path / 'result').exists()


@pytest.mark.parametrize(
    'content, place',
    [
        (TABLE.encode('utf-16'), 'row 1 %s 0xff in position 0: invalid start byte'),
        (b'smiles,y\nC\xe4,1\n', 'row 2 %s 0xe4 in position 1: invalid continuation byte'),
        (
            b'smiles,y,name\nC,1,"a\nb"\n\nC,1,caf\xe9\n',
            'row 4 %s 0xe9 in position 7: invalid continuation byte',
        ),
    ],
    ids=['UTF-16', 'Latin-1', 'Latin-1 in a column that is not learned'],
)
def test_files_that_are_not_utf_8_are_refused_by_their_row(tmp_path, error, content, place):
    (tmp_path / 'mine.csv').write_bytes(content)
    assert error('train_own.py', *WORDS) == (
        'error: mine.csv %s; expected text in UTF-8, plain or compressed by gzip'
        % (place % "cannot be read as CSV: 'utf-8' codec can't decode byte")
    )
    assert not (tmp_path / 'result').exists()


@pytest.mark.parametrize(
    'option, message',
    [
        (['--seed', '99999999999'], 'got 99999999999, expected a number from 0 to 4294967295'),
        (['--num-data', '-2'], 'got -2, expected a number at least -1'),
        (['--padded-to', '0'], 'got 0, expected a number at least 1, largest, batch'),
        (['--padded-to', 'big'], 'got big, expected a number at least 1, largest, batch'),
        (['--learning-rate', 'nan'], 'got nan, expected a number from 0 to 1'),
        (['--train-data-ratio', '1.5'], 'got 1.5, expected a number from 0 to 1'),
    ],
)
def test_numbers_out_of_range(capsys, option, message):
    with pytest.raises(SystemExit):
        imported(OWN, 'train_own').run(option)
    assert capsys.readouterr().err.splitlines()[-1].endswith(': ' + message)


@pytest.fixture
def options(common):
    """Function from the words of a command line to the options of a training."""

    def parsed(*words):
        from common import arguments

        parser = arguments.make_parser('')
        arguments.add_training_arguments(parser)
        return vars(parser.parse_args(words))

    return parsed


@pytest.mark.parametrize(
    'name, values',
    [
        ('seed', (0, 2**32 - 1)),
        ('num_data', (-1, 0)),
        ('padded_to', (1, 'largest', 'batch')),
        ('learning_rate', (0.0, 1.0)),
        ('train_data_ratio', (0.0, 1.0)),
        ('batchsize', (1,)),
        ('patience', (1,)),
        ('epoch', (1,)),
    ],
)
def test_numbers_at_the_ends_of_their_range(options, name, values):
    option = '--' + name.replace('_', '-')
    for value in values:
        assert options(option, str(value))[name] == value


def test_short_options(options):
    """They are those of Chainer Chemistry's examples."""
    words = '-m gin -c 2 -u 8 -e 3 -s 1 -r 0.5 -b 7 -d 0 -o folder'.split()
    found = options(*words)
    names = 'method', 'conv_layers', 'unit_num', 'epoch', 'seed', 'train_data_ratio'
    assert [found[name] for name in names] == ['gin', 2, 8, 3, 1, 0.5]
    assert [found[name] for name in ('batchsize', 'device', 'out')] == [7, '0', 'folder']


def test_defaults(options):
    """Numbers are those of Chainer Chemistry's example for QM9."""
    assert options() == {
        **{'conv_layers': 4, 'unit_num': 16, 'epoch': 20, 'seed': 777, 'batchsize': 32},
        **{'train_data_ratio': 0.7, 'learning_rate': 0.001, 'num_data': -1, 'patience': None},
        **{'method': 'rsgcn', 'layout': 'folded', 'padded_to': None},
        **{'device': '-1', 'updater': 'auto', 'communicator': None, 'out': 'result'},
        **dict.fromkeys(('force', 'resume', 'dense', 'skip_missing'), False),
    }


@pytest.mark.parametrize(
    'words', [[], ['--unit-num', '4'], ['--epoch', '1'], ['--data', 'result/failed.csv']]
)
def test_a_folder_belongs_to_one_run(folder, error, words):
    before = content(folder / 'result')
    assert error('train_own.py', *WORDS, *words) == (
        'error: --out: the folder result is not empty; expected a new one, --resume to '
        'continue its run, or --force to start again in it'
    )
    assert content(folder / 'result') == before


def test_a_folder_with_other_files_is_refused(folder, error):
    for words in [], ['--force']:
        assert error('train_own.py', *WORDS, '--out', '.', *words) == (
            'error: --out: the folder . has files that are not of a run, which --force does not '
            'remove; expected a new one'
        )
    assert (folder / 'mine.csv').read_text() == TABLE


def test_only_the_files_of_a_run_are_replaced(folder):
    (folder / 'result' / 'failed.csv').write_text('of the run before')
    (folder / 'result' / 'mine.txt').write_text('mine')
    (folder / 'result' / 'snapshot_99.1').write_text('of another rank')
    (folder / 'result' / 'predictions.csv').write_text('of its model')
    run('train_own.py', *WORDS, '--force', '--unit-num', '4', '--epoch', '1', cwd=folder)
    after = content(folder / 'result')
    assert after.pop('mine.txt') == b'mine'
    assert sum(name.startswith('snapshot') for name in after) == 1
    assert 'predictions.csv' not in after
    assert json.loads(after['settings.json'])['unit_num'] == 4


USERS = ['snapshot_4_backup.0', 'snapshot_8.0.bak', 'snapshot_of.me', 'snapshot_08.0']


@pytest.mark.parametrize('words', [['--force'], ['--resume', '--epoch', '5']])
def test_files_whose_names_resemble_those_of_snapshots_are_kept(folder, words):
    for name in USERS:
        (folder / 'result' / name).write_text('mine')
    run('train_own.py', *WORDS, *words, cwd=folder)
    after = content(folder / 'result')
    assert [after.pop(name, None) for name in USERS] == [b'mine'] * 4
    assert sum(name.startswith('snapshot') for name in after) == 2


def test_a_folder_with_the_name_of_a_file_is_found_before_any_is_removed(folder, error):
    (folder / 'result' / 'snapshot_4.1').mkdir()
    before = {path.name for path in (folder / 'result').iterdir()}
    assert error('train_own.py', *WORDS, '--force') == (
        'error: --force removes files of a run, and result/snapshot_4.1 is a folder; move it '
        'elsewhere'
    )
    assert {path.name for path in (folder / 'result').iterdir()} == before


def test_padding_that_is_given_needs_a_layout_with_padding(folder, error):
    message = 'error: --padded-to: expected layout folded, got packed'
    words = ['--resume', '--out', 'result', '--layout', 'packed', '--padded-to', '20']
    assert error('train_own.py', *words) == message


@pytest.mark.parametrize('layout', ['packed', 'folded'])
def test_a_resumption_of_a_dense_run_in_a_layout(tmp_path, error, layout):
    train_on(tmp_path, TABLE, '--dense')
    assert error('train_own.py', '--resume', '--out', 'result', '--layout', layout) == (
        "error: --resume: layout was 'dense' in the run in result, and is %r now; both must be the "
        'same' % layout
    )


@pytest.mark.parametrize('name', ['predictions.csv', 'test.csv', 'snapshot_8.0'])
def test_force_does_not_remove_the_data(folder, error, name):
    path = folder / 'result' / name
    path.write_text(TABLE)
    before = content(folder / 'result')
    assert error('train_own.py', *WORDS, '--force', '--data', path) == (
        'error: --force would remove result/%s, which --data reads; copy it elsewhere' % name
    )
    assert content(folder / 'result') == before


def test_an_empty_name_of_the_data_is_not_the_test_part(folder, error):
    message = "error: cannot read '': No such file or directory"
    assert error('predict_own.py', '--in-dir', 'result', '--data', '') == message
    assert not (folder / 'result' / 'predictions.csv').exists()


def test_an_empty_name_of_an_output(folder, error):
    message = 'error: --out: expected a file, got an empty name'
    assert error('predict_own.py', '--in-dir', 'result', '--out', '') == message


def test_names_and_smiles_may_have_bytes_that_are_not_utf_8(folder, tmp_path):
    """As on a command line, they are surrogates."""
    name = os.fsdecode(b'caf\xe9.csv')
    (tmp_path / name).write_text(TABLE)
    run('train_own.py', *WORDS, '--data', name, '--force', cwd=folder)
    smiles = os.fsdecode(b'C\xe9')
    words = ['--in-dir', 'result', '--smiles', 'CCO', smiles, '--out', 'p.csv']
    run('predict_own.py', *words, cwd=folder)
    row = b'\nC\xe9,,it has a character that is not ASCII\n'
    assert row in (folder / 'p.csv').read_bytes()
    printed = run_apart(OWN / 'predict_own.py', *words[:-1], '-', cwd=folder, check=True)
    assert row in printed.stdout


def test_a_folder_that_another_run_has_claimed_meanwhile(common, tmp_path):
    for _ in range(2):  # both runs check the folder before one starts
        common.folder.check(str(tmp_path), force=False)
    common.folder.start_run(str(tmp_path), {'seed': 1}, force=False)
    (tmp_path / 'log').write_text('of the first')
    with pytest.raises(common.folder.DataError) as error:
        common.folder.start_run(str(tmp_path), {'seed': 2}, force=False)
    message = '--out: another run has just started in the folder %s' % tmp_path
    assert str(error.value) == message
    assert json.loads((tmp_path / 'settings.json').read_text())['seed'] == 1
    assert (tmp_path / 'log').exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_twice_continues(folder):
    options = [*WORDS, '--batchsize', '2', '--epoch', '40', '--out', 'stopped']
    before = set()
    for how, more in ((signal.SIGINT, []), (signal.SIGKILL, ['--resume'])):
        process = subprocess.Popen(
            command(OWN / 'train_own.py', options + more),
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and set(folder.glob('stopped/snapshot_*')) <= before:
            time.sleep(0.01)
        process.send_signal(how)
        text, error = process.communicate(timeout=300)
        assert process.returncode == (130 if how == signal.SIGINT else -how), text + error
        assert not (folder / 'stopped' / 'model.npz').exists() and error == 'Parsing 90 molecules\n'
        if how == signal.SIGINT:
            way = '\nInterrupted. --resume --out stopped continues from the last snapshot\n'
            assert text.endswith(way)
        before = set(folder.glob('stopped/snapshot_*'))
    run('train_own.py', *options, '--resume', cwd=folder)
    run('train_own.py', *options, '--out', 'whole', cwd=folder)
    for name in ('model.npz', 'best_model.npz'):
        assert_same_bits(arrays(folder / 'stopped' / name), arrays(folder / 'whole' / name))


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_an_interrupt_without_a_snapshot(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(chainer.training.Trainer, 'run', interrupt)
    assert imported(OWN, 'train_own').run([*WORDS, '--out', 'new']) == 130
    assert 'Interrupted. The same command with --force starts again\n' in capsys.readouterr().out


def test_an_interrupt_before_the_training(common, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(common.training, 'prepare', interrupt)
    with pytest.raises(SystemExit, match='^130$'):
        common.training.main(lambda: imported(OWN, 'train_own').run(WORDS))
    assert capsys.readouterr().err.endswith('interrupted\n')


INTERRUPTED_WHILE_WRITING = """
import signal, sys
sys.path.append('examples')
from common.training import main

class Archive:
    def __del__(self):
        raise ValueError('seek of closed file')

def run():
    archive = Archive()
    signal.raise_signal(signal.SIGINT)

main(run)
"""


def test_what_an_interrupt_leaves_half_written_does_not_complain():
    done = python('-W', 'ignore', '-c', INTERRUPTED_WHILE_WRITING, cwd=ROOT, status=130)
    assert (done.stdout, done.stderr) == ('', 'interrupted\n')


def continued(folder, *words):
    """Resume the run in `result` with only these options; return the printed text."""
    return run('train_own.py', '--resume', '--out', 'result', *words, cwd=folder)


def test_a_resumption_needs_no_option_of_the_run(folder):
    """settings.json has the options of the last command, including the number of epochs."""
    text = continued(folder, '--epoch', '3')
    assert 'Resumed result: epoch 2, step 8\n' in text
    assert 'The run has completed all 3 epochs: nothing to train\n' in continued(folder)
    run('train_own.py', *WORDS, '--epoch', '3', '--out', 'whole', cwd=folder)
    assert_same_bits(
        arrays(folder / 'result' / 'model.npz'), arrays(folder / 'whole' / 'model.npz')
    )


@pytest.mark.parametrize(
    'words',
    [
        ['--padded-to', 'batch'],
        ['--dense'],
        pytest.param(['--layout', 'packed'], marks=pytest.mark.slow),
        pytest.param(['--layout', 'padded'], marks=pytest.mark.slow),
    ],
)
def test_a_resumption_keeps_the_layout(tmp_path, words):
    train_on(tmp_path, TABLE, *words)
    before = json.loads((tmp_path / 'result' / 'settings.json').read_text())
    continued(tmp_path)
    assert json.loads((tmp_path / 'result' / 'settings.json').read_text()) == before


@pytest.mark.parametrize(
    'words, name, before, now',
    [
        (['--unit-num', '4'], 'unit_num', 8, 4),
        (['--labels', 'z'], 'labels', ['y'], ['z']),
        (['--learning-rate', '0.1'], 'learning_rate', 0.001, 0.1),
        (['--layout', 'packed'], 'layout', 'folded', 'packed'),
        (['--layout', 'padded', '--padded-to', 'batch'], 'layout', 'folded', 'padded'),
        (['--dense'], 'layout', 'folded', 'dense'),
    ],
)
def test_a_resumption_with_another_option_names_both(folder, error, words, name, before, now):
    assert error('train_own.py', '--resume', '--out', 'result', *words) == (
        'error: --resume: %s was %r in the run in result, and is %r now; both must be the same'
        % (name, before, now)
    )


def test_a_resumption_that_removes_the_run_is_refused(folder, capsys):
    before = content(folder / 'result')
    with pytest.raises(SystemExit, match='^2$'):
        imported(OWN, 'train_own').run(['--resume', '--force', '--out', str(folder / 'result')])
    assert capsys.readouterr().err.endswith(
        'error: --resume continues the run in --out, --force removes it: expected one of them\n'
    )
    assert content(folder / 'result') == before


def test_a_resumption_to_fewer_epochs_than_the_run_has_is_refused(folder, error):
    before = content(folder / 'result')
    assert error('train_own.py', '--resume', '--out', 'result', '--epoch', '1') == (
        'error: --epoch 1: the run in result has 2 epochs already; expected at least as many'
    )
    assert content(folder / 'result') == before


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_run_on_a_terminal_is_continued_elsewhere(folder, monkeypatch, recwarn):
    """The snapshot of a run with a progress bar lacks the trigger of printed lines."""
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(Terminal()) as terminal:
        imported(OWN, 'train_own').run([*WORDS, '--out', 'new'])
    assert 'Split: 62 training, 14 validation, 14 test\n' in terminal.getvalue()
    run('train_own.py', '--resume', '--out', 'new', '--epoch', '3')
    assert not [str(each.message) for each in recwarn if 'is not saved' in str(each.message)]


def test_a_learning_rate(folder):
    run('train_own.py', *WORDS, '--learning-rate', '0', '--out', 'still', cwd=folder)
    log = json.loads((folder / 'still' / 'log').read_text())
    assert log[0]['validation/main/loss'] == log[1]['validation/main/loss']


def test_patience(folder):
    """With a learning rate of 0 no epoch is better than the first, which a snapshot remembers."""
    words = [*WORDS, '--learning-rate', '0', '--patience', '3', '--out', 'still']
    text = run('train_own.py', *words, '--epoch', '3', cwd=folder)
    assert 'Stopped' not in text
    text = run('train_own.py', '--resume', '--out', 'still', '--epoch', '9', cwd=folder)
    assert 'Stopped: 3 epochs without a better validation result\n' in text
    log = json.loads((folder / 'still' / 'log').read_text())
    assert [entry['epoch'] for entry in log] == [1, 2, 3, 4]


def test_patience_with_a_run_that_had_none(folder):
    text = continued(folder, '--epoch', '9', '--patience', '9')
    assert 'Resumed result: epoch 2, step 8\n' in text
    assert 'Stopped' not in text


def test_progress_within_an_epoch(common, monkeypatch, capsys):
    clock = iter([5, 11, 15.5, 25])
    monkeypatch.setattr(common.training.time, 'perf_counter', lambda: next(clock))
    show = common.training.progress()
    for epoch in 0.1, 0.25, 0.3, 0.5:
        show(types.SimpleNamespace(updater=types.SimpleNamespace(epoch_detail=epoch)))
    assert capsys.readouterr().out == 'epoch 0.10\nepoch 0.30\n'


def test_no_second_snapshot_within_a_second(trained, common, tmp_path, monkeypatch):
    """Only the first and the last epoch have one: two are kept, a third would delete one."""
    monkeypatch.chdir(tmp_path)
    clock = types.SimpleNamespace(perf_counter=itertools.count(5, 1e-6).__next__)
    monkeypatch.setattr(common.training, 'time', clock)
    words = [*WORDS, '--data', str(trained / 'mine.csv'), '--epoch', '3']
    imported(OWN, 'train_own').run(words)
    found = {path.name for path in (tmp_path / 'result').glob('snapshot_*')}
    assert found == {'snapshot_4.0', 'snapshot_12.0'}


def test_there_is_a_snapshot_of_the_last_epoch_however_short(trained):
    assert (trained / 'result' / SNAPSHOT).exists()


@pytest.mark.parametrize(
    'script', ['train_own.py', pytest.param('predict_own.py', marks=pytest.mark.slow)]
)
def test_an_interrupt_at_any_moment_is_one_line(trained, tmp_path, script):
    """The earliest of the interrupts come while modules are imported."""
    words = [*WORDS, '--data', trained / 'mine.csv', '--epoch', '9999']
    if script == 'predict_own.py':
        words = ['--in-dir', trained / 'result', '--data', '-']  # waits for data
    for seconds in 0, 0.3, 0.6, 2:
        process = subprocess.Popen(
            command(OWN / script, words),
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # NumPy is imported after the module that replaces Python's own answer to an interrupt. The
        # time that Python needs until then depends on the machine.
        while '_multiarray_umath' not in Path(f'/proc/{process.pid}/maps').read_text():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate()
        assert process.returncode == 130
        assert printed.splitlines()[-1].lower().startswith('interrupted')
        assert 'Traceback' not in printed
        shutil.rmtree(tmp_path / 'result', ignore_errors=True)


def test_force_replaces_links_and_does_not_follow_them(folder):
    (folder / 'precious.npz').write_text('of the user')
    for name in 'model.npz', 'fit.png', 'result.json':
        (folder / 'result' / name).unlink()
        (folder / 'result' / name).symlink_to('../precious.npz')
    run('train_own.py', *WORDS, '--force', cwd=folder)
    assert (folder / 'precious.npz').read_text() == 'of the user'
    assert not any(path.is_symlink() for path in (folder / 'result').iterdir())


def test_a_resumption_replaces_links_and_does_not_follow_them(folder):
    (folder / 'precious.npz').write_text('of the user')
    names = 'model.npz', 'best_model.npz', 'learning_curve.png', 'fit.png', 'test.csv', 'log'
    for name in names:
        (folder / 'result' / name).unlink()
        (folder / 'result' / name).symlink_to('../precious.npz')
    continued(folder, '--epoch', '3')
    assert (folder / 'precious.npz').read_text() == 'of the user'


def test_a_folder_with_a_link_but_no_run_is_refused(tmp_path, error):
    (tmp_path / 'mine.csv').write_text(TABLE)
    (tmp_path / 'result').mkdir()
    (tmp_path / 'result' / 'model.npz').symlink_to('../mine.csv')
    assert error('train_own.py', *WORDS, '--force') == (
        'error: --out: the folder result has files that are not of a run, which --force does not '
        'remove; expected a new one'
    )
    assert (tmp_path / 'mine.csv').read_text() == TABLE


def test_predictions_replace_a_link_and_do_not_follow_it(folder, error):
    (folder / 'p.csv').symlink_to('mine.csv')
    predict = ['predict_own.py', '--out', 'p.csv']
    message = 'error: --out: p.csv exists; expected a new file, or --force to replace it'
    assert error(*predict) == message
    run(*predict, '--force', cwd=folder)
    assert (folder / 'mine.csv').read_text() == TABLE
    assert not (folder / 'p.csv').is_symlink()


def test_predictions_touch_no_other_file(folder):
    (folder / 'part_p.csv').write_text('of the user')
    before = {path.name for path in folder.iterdir()}
    run('predict_own.py', '--out', 'p.csv', cwd=folder)
    assert (folder / 'part_p.csv').read_text() == 'of the user'
    assert {path.name for path in folder.iterdir()} == before | {'p.csv'}


def test_new_files_have_the_permissions_of_others(folder):
    (folder / 'plain').touch()
    modes = {(folder / name).stat().st_mode for name in ('plain', 'result/model.npz')}
    assert len(modes) == 1


@pytest.mark.parametrize(
    'name, value, reason',
    [
        ('method', 'foo', '[ERROR] Invalid method: foo'),
        ('layout', 'x', "layout: expected one of 'packed', 'folded', 'padded', got 'x'"),
        ('task', 'x', "'x'"),
    ],
)
def test_settings_that_no_run_has_are_one_line(folder, error, name, value, reason):
    path = folder / 'result' / 'settings.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert error('predict_own.py', '--smiles', 'C') == (
        'error: result/settings.json cannot be read, or is not of a run: ' + reason
    )


@pytest.mark.parametrize(
    'words', [['predict_own.py'], ['train_own.py', '--out', 'result', '--resume']]
)
def test_settings_without_those_of_the_model_are_one_line(folder, error, words):
    (folder / 'result' / 'settings.json').write_text('{"script": "train_own.py"}')
    assert error(*words) == (
        "error: result/settings.json cannot be read, or is not of a run: 'layout'"
    )


def test_a_resumption_needs_the_options_that_settings_lack(folder, capsys):
    path = folder / 'result' / 'settings.json'
    settings = json.loads(path.read_text())
    del settings['data']
    path.write_text(json.dumps(settings))
    with pytest.raises(SystemExit, match='^2$'):
        imported(OWN, 'train_own').run(['--resume', '--out', str(folder / 'result')])
    assert capsys.readouterr().err.endswith('error: the following arguments are required: --data\n')


class Evil:
    def __reduce__(self):
        return os.mkdir, ('evil',)


@pytest.mark.parametrize('name', ['model.npz', 'best_model.npz', SNAPSHOT, 'object'])
def test_objects_in_files_are_refused_before_they_run(common, folder, error, name):
    path = folder / 'result' / ('model.npz' if name == 'object' else name)
    with zipfile.ZipFile(path) as archive:
        found = [common.folder.read_array(archive.read(name)) for name in archive.namelist()]
    assert any(array.dtype == object for array in found)  # there is an array that contains None
    evil = numpy.array(None, object)
    evil[()] = 1.5 if name == 'object' else Evil()
    saved = arrays(path)
    with open(path, 'wb') as file:
        numpy.savez(file, **{**saved, list(saved)[-1]: evil})
    if name == SNAPSHOT:
        message = error('train_own.py', *WORDS, '--resume')
    else:
        model = 'best' if name.startswith('best') else 'last'
        message = error('predict_own.py', '--smiles', 'C', '--model', model)
    assert not (folder / 'evil').exists()
    assert message.startswith('error: result/')
    assert 'cannot be loaded, it is damaged or another kind of file: ' in message
    if name != 'object':  # a number, which runs nothing
        assert message.endswith(', and loading objects may run code')


def test_a_pickle_before_the_archive_is_not_loaded(folder):
    """NumPy would load the pickle instead of the archive behind it."""
    path = folder / 'result' / 'model.npz'
    expected = run('predict_own.py', '--smiles', 'C', cwd=folder)
    path.write_bytes(pickle.dumps(Evil()) + path.read_bytes())
    assert run('predict_own.py', '--smiles', 'C', cwd=folder) == expected
    assert not (folder / 'evil').exists()


@pytest.mark.parametrize('protocol', range(2, 6))
def test_none_of_every_pickle_protocol_is_no_object(common, protocol):
    header = io.BytesIO()
    description = {'descr': '|O', 'fortran_order': False, 'shape': ()}
    numpy.lib.format.write_array_header_1_0(header, description)
    text = pickle.dumps(numpy.array(None, object), protocol)
    texts = [text]
    if protocol < 4:  # modules may have the name of another version, because texts have no lengths
        for new in (b'numpy.core', b'numpy._core'):
            texts.append(text.replace(b'numpy._core', b'numpy.core').replace(b'numpy.core', new))
    for text in texts:
        assert common.folder.read_array(header.getvalue() + text).item() is None


@pytest.mark.parametrize('change', ['truncated', 'garbled', 'encrypted', 'model'])
def test_a_damaged_snapshot_is_one_line(folder, error, change):
    path = folder / 'result' / SNAPSHOT
    whole = path.read_bytes()
    flags = whole.index(b'PK\1\2') + 8  # flags in the directory at the end
    changed = {
        'truncated': whole[:-9],
        'garbled': whole[:200] + b'abcd' + whole[204:],
        'encrypted': whole[:flags] + b'\1' + whole[flags + 1 :],
        'model': (folder / 'result' / 'model.npz').read_bytes(),
    }
    path.write_bytes(changed[change])
    before = content(folder / 'result')
    message = error('train_own.py', *WORDS, '--resume')
    start = 'error: result/%s cannot be loaded, it is damaged or another kind of file: ' % SNAPSHOT
    assert message.startswith(start)  # the rest of the message is zipfile's or NumPy's
    assert content(folder / 'result') == before


@contextlib.contextmanager
def full_disk(most):
    """Limit files to `most` bytes, as if the disk was full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        # The limit would also cut the file to which pytest captures output.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    'most', [0, 3000, 10000], ids=['at settings', 'at a snapshot', 'at the model']
)
def test_a_full_disk_is_one_line_of_a_training(trained, tmp_path, error, most):
    with full_disk(most):
        message = error('train_own.py', *WORDS, '--data', trained / 'mine.csv', '--out', 'out')
    assert message == 'error: cannot write into the folder of --out: File too large'
    assert not (tmp_path / 'out' / 'model.npz').exists()


def test_predictions_that_a_full_disk_cannot_hold_replace_none(trained, tmp_path, error):
    (tmp_path / 'p.csv').write_text('of before')
    with full_disk(0):
        message = error(
            'predict_own.py', '--in-dir', trained / 'result', '--out', 'p.csv', '--force'
        )
    assert message == 'error: cannot write p.csv: File too large'
    assert (tmp_path / 'p.csv').read_text() == 'of before'


def test_a_loss_that_is_not_finite_is_an_error(common, folder, error, monkeypatch):
    from common.tasks import Regression

    build = Regression.build

    def broken(self, settings, dense, train_labels=None):
        model = build(self, settings, dense, train_labels)
        model.predictor.graph_conv.embed.W.array[...] = numpy.nan
        return model

    monkeypatch.setattr(Regression, 'build', broken)
    assert 'the last losses are [nan, nan]' in error('train_own.py', *WORDS, '--out', 'new')
    assert not (folder / 'new' / 'model.npz').exists()


def test_results_are_valid_json(common, tmp_path):
    common.folder.write_json(
        tmp_path / 'result.json', {'a': {'b': numpy.nan, 'c': -numpy.inf}, 'd': 1.5}
    )
    text = (tmp_path / 'result.json').read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {'a': {'b': None, 'c': None}, 'd': 1.5}


@pytest.fixture(params=['in another order', 'with another label'])
def changed(request, folder):
    """Folder of a training whose data have changed since."""
    header, first, *others = TABLE.splitlines(keepends=True)
    if request.param == 'in another order':
        lines = [*others, first]
    else:
        lines = [first.replace(',0,', ',7,'), *others]
    (folder / 'mine.csv').write_text(header + ''.join(lines))
    return folder


def test_the_test_part_is_that_of_the_training_though_the_data_have_changed(changed):
    test = json.loads((changed / 'result' / 'result.json').read_text())['test']
    assert 'MAE of y: %.6g, ' % test['MAE']['y'] in run('predict_own.py', cwd=changed)


def test_a_training_on_changed_data_is_not_resumed(changed, error):
    assert error('train_own.py', *WORDS, '--resume') == (
        'error: --resume: the molecules, their labels or their order differ from those of the run '
        'in result'
    )


def test_a_folder_may_move_without_the_data(folder):
    (folder / 'mine.csv').unlink()
    (folder / 'result').rename(folder / 'elsewhere')
    printed = run('predict_own.py', '--in-dir', 'elsewhere', cwd=folder)
    assert 'Data: elsewhere/test.csv: 14 molecules\n' in printed


MISSING = {0: '', 1: 'NaN', 2: ' n/a '}
# Three of thirty rows have no label. Three failures follow, and one molecule twice.
ODD_ROWS = 'smiles,y\n' + ''.join(
    '%s,%s\n' % (smiles, MISSING.get(i % 30, i)) for i, smiles in enumerate(CHAINS)
)
ODD_ROWS += 'C1CC,1\n[Og],1\nC1CC,2\nOC,1\nOC,2\n'


def test_molecules_without_labels_are_refused(tmp_path):
    assert train_on(tmp_path, ODD_ROWS, status=1) == (
        "error: mine.csv row 2: target y is '', expected a finite number (rows like this: 9; "
        '--skip-missing leaves empty ones out)'
    )


@pytest.fixture(scope='module')
def trained_on_odd_rows(tmp_path_factory):
    """Folder and printed text of a training on such rows, with batches larger than the file."""
    folder = tmp_path_factory.mktemp('odd')
    return folder, train_on(folder, ODD_ROWS, '--skip-missing', '--batchsize', '100000')


@pytest.mark.parametrize(
    'line',
    [
        'Data: mine.csv: 95 molecules, 83 of them used\n',
        '12 molecule(s) could not be used, all listed in result/failed.csv\n',
        "  mine.csv row 2: 'C': no label\n",
        "  mine.csv row 92: 'C1CC': RDKit cannot parse it\n",
        '  ... and 2 more\n',
        'Duplicates: 1 molecule(s) equal an earlier one except for stereo, the first: mine.csv row '
        "96: 'OC'; training and test may share molecules\n",
    ],
)
def test_molecules_that_are_not_learned_from_are_counted(trained_on_odd_rows, line):
    assert line in trained_on_odd_rows[1]


def test_molecules_that_cannot_be_used_are_listed(trained_on_odd_rows):
    failed = rows(trained_on_odd_rows[0] / 'result' / 'failed.csv')
    reasons = {row['row']: row['reason'] for row in failed if row['reason'] != 'no label'}
    assert len(failed) == 12
    assert reasons == {
        'mine.csv row 92': 'RDKit cannot parse it',
        'mine.csv row 93': 'atomic number 118, the models support those below 117',
        'mine.csv row 94': 'RDKit cannot parse it',
    }


def test_a_batch_larger_than_the_data_is_cut(trained_on_odd_rows):
    log = json.loads((trained_on_odd_rows[0] / 'result' / 'log').read_text())
    assert [(entry['epoch'], entry['iteration']) for entry in log] == [(1, 1), (2, 2)]


def test_the_test_part_of_molecules_with_labels_is_found_again(trained_on_odd_rows):
    folder, _ = trained_on_odd_rows
    mae = json.loads((folder / 'result' / 'result.json').read_text())['test']['MAE']['y']
    assert 'MAE of y: %.6g, ' % mae in run('predict_own.py', '--out', 'p.csv', cwd=folder)


def test_molecules_without_labels_are_predicted(trained_on_odd_rows):
    folder, _ = trained_on_odd_rows
    run('predict_own.py', '--data', 'mine.csv', '--out', 'all.csv', cwd=folder)
    assert len(rows(folder / 'all.csv')) == 95


def test_errors_are_those_of_the_molecules_that_were_predicted(trained_on_odd_rows):
    """The first molecule of the file cannot be predicted, which must not shift the others."""
    folder, _ = trained_on_odd_rows
    (folder / 'known.csv').write_text('smiles,y\nC1CC,500\nCCO,1\nCCN,90\n')
    printed = run('predict_own.py', '--data', 'known.csv', '--out', 'k.csv', cwd=folder)
    failed, *predicted = rows(folder / 'k.csv')
    assert failed['y predicted'] == ''
    errors = [abs(float(row['y predicted']) - float(row['y'])) for row in predicted]
    assert 'MAE of y: %.6g, ' % numpy.mean(errors) in printed


UNKNOWN = ''.join('%s,\n' % smiles for smiles in CHAINS)


def test_data_without_any_label_are_refused(tmp_path):
    text = 'smiles,y\n' + UNKNOWN
    message = train_on(tmp_path, text, '--task', 'classification', status=1)
    assert message == 'error: mine.csv: no molecule has a label'


def test_molecules_without_any_label_are_skipped(tmp_path):
    known = ''.join('%s,%d\n' % (smiles, 'N' in smiles) for smiles in CHAINS)
    text = 'smiles,y\n' + UNKNOWN + known
    printed = train_on(tmp_path, text, '--task', 'classification', '--skip-missing')
    assert 'Data: mine.csv: 180 molecules, 90 of them used\n' in printed
    assert "  mine.csv row 2: 'C': no label\n" in printed


def test_labels_of_one_value_are_said_to_teach_nothing(tmp_path):
    printed = train_on(tmp_path, 'smiles,y\n' + ''.join('%s,3\n' % each for each in CHAINS))
    assert 'All training molecules have one value of y: nothing to learn\n' in printed
    assert 'std was 0' not in printed  # this is a warning of Chainer Chemistry's scaler


@pytest.fixture
def predicted(trained, tmp_path):
    """File of predictions for all molecules of mine.csv."""
    path = tmp_path / 'first.csv'
    in_dir = trained / 'result'
    run('predict_own.py', '--in-dir', in_dir, '--data', trained / 'mine.csv', '--out', path)
    return path


def test_predictions_keep_the_other_columns(predicted):
    table = rows(predicted)
    assert list(table[0]) == ['smiles', 'y', 'name', 'y predicted'] and len(table) == 90
    assert all(row['name'] == 'm' + row['y'] for row in table)


def test_predictions_replace_no_column(trained, predicted, error):
    message = error(
        'predict_own.py', '--in-dir', trained / 'result', '--data', predicted, '-o', 'q.csv'
    )
    assert message == (
        "error: %s has a column 'y predicted', which the predictions would replace; rename it"
        % predicted
    )


def test_training_refuses_a_column_that_predictions_would_replace(predicted, error):
    assert error('train_own.py', *WORDS, '--data', predicted) == (
        "error: %s has a column 'y predicted', which the predictions would replace; rename it"
        % predicted
    )


@pytest.mark.parametrize('name', ['first.csv', 'mine.csv', 'result/model.npz'])
def test_predictions_replace_no_file(folder, predicted, error, name):
    before = (folder / name).read_bytes()
    message = error('predict_own.py', '--data', 'mine.csv', '--out', name)
    assert message == (
        'error: --out: %s exists; expected a new file, or --force to replace it' % name
    )
    assert (folder / name).read_bytes() == before


def test_renamed_predictions_stay_beside_new_ones(trained, predicted, tmp_path):
    predicted.write_text(predicted.read_text().replace('y predicted', 'before'))
    path = tmp_path / 'second.csv'
    run('predict_own.py', '--in-dir', trained / 'result', '--data', predicted, '--out', path)
    assert list(rows(path)[0]) == ['smiles', 'y', 'name', 'before', 'y predicted']


@pytest.fixture
def new_molecules(folder):
    """Folder of a training that has new.csv, whose second molecule cannot be used."""
    (folder / 'new.csv').write_text('smiles,name\nCCO,a\nC1,b\n')
    return folder


def test_predictions_into_a_pipe(new_molecules):
    folder = new_molecules
    os.mkfifo(folder / 'pipe')
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / 'pipe').read_text()))
    reader.start()
    run('predict_own.py', '--data', 'new.csv', '-o', 'pipe', cwd=folder)
    reader.join()
    header, ethanol, failure = read[0].splitlines()
    assert header == 'smiles,name,y predicted,not predicted'
    assert ethanol.startswith('CCO,a,') and failure == 'C1,b,,RDKit cannot parse it'


@pytest.fixture
def to_standard_output(new_molecules, capsys):
    """Function that predicts with --out -, and returns the standard output and error."""

    def predict(*words):
        path = new_molecules / '-'
        path.write_text("a user's")
        capsys.readouterr()
        printed = run('predict_own.py', *words, '--out', '-', cwd=new_molecules)
        assert path.read_text() == "a user's"
        return printed, capsys.readouterr().err

    return predict


def test_predictions_on_standard_output(to_standard_output):
    """Standard output has nothing but the table, so another program can read it."""
    out, err = to_standard_output('--data', 'new.csv')
    header, ethanol, failure = out.splitlines()
    assert header == 'smiles,name,y predicted,not predicted'
    assert ethanol.startswith('CCO,a,') and failure == 'C1,b,,RDKit cannot parse it'
    assert "1 molecule(s) could not be used\n  new.csv row 3: 'C1': RDKit cannot parse it\n" in err
    assert 'Predictions: ' not in err


def test_predictions_of_smiles_on_standard_output(to_standard_output):
    out, _ = to_standard_output('--smiles', 'CCO', 'CC')
    assert [line.split(',')[0] for line in out.splitlines()] == ['smiles', 'CCO', 'CC']


def test_a_test_error_does_not_mix_with_predictions_on_standard_output(to_standard_output):
    out, err = to_standard_output()
    assert out.startswith('smiles,y,name,y predicted\n') and 'MAE of y' not in out
    assert 'MAE of y: ' in err


def test_predictions_into_a_full_device(new_molecules, error):
    message = error('predict_own.py', '--data', 'new.csv', '-o', '/dev/full', '--force')
    assert message == 'error: cannot write /dev/full: No space left on device'


def test_predictions_on_a_standard_output_that_is_full(new_molecules):
    words = ['--in-dir', 'result', '--data', 'new.csv', '--out', '-']
    with open('/dev/full', 'w') as full:
        done = run_apart(OWN / 'predict_own.py', *words, cwd=new_molecules, stdout=full, text=True)
    assert done.returncode == 1
    message = 'error: cannot write standard output: No space left on device\n'
    assert done.stderr.endswith(message) and 'Traceback' not in done.stderr


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """List of figures in the order in which they would have been written to files."""
    figures = []

    def keep(figure, path, **options):
        figures.append(figure)
        open(path, 'w').close()

    monkeypatch.chdir(tmp_path)

    monkeypatch.setattr('matplotlib.figure.Figure.savefig', keep)
    return figures


def test_learning_curves(common, figures):
    from common import pictures

    entry = {
        'epoch': 1,
        'main/loss': 1.0,
        'validation/main/loss': 2,
        'validation/main/roc_auc': 0.6,
    }
    panels = ('loss', 'cross entropy'), ('roc_auc', 'ROC-AUC')
    pictures.learning_curve('', [entry], 'title', panels)
    left, right = figures[0].axes
    colors = [{line.get_label(): line.get_color() for line in ax.lines} for ax in (left, right)]
    assert colors == [{'training': 'C0', 'validation': 'C1'}, {'validation': 'C1'}]
    assert all(tick == int(tick) for tick in left.get_xticks())


def test_a_fit_has_a_panel_for_each_target(common, figures):
    from common import pictures

    values = numpy.arange(12.0).reshape(6, 2)
    pictures.fit('', values, values + 1, ['a', 'b (eV)'])
    assert [ax.get_title() for ax in figures[0].axes] == ['a', 'b (eV)']
