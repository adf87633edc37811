"""The scripts of examples/own_dataset, run as a user runs them."""

import gzip
import json
import resource
import shutil
import signal
import subprocess

import numpy
import pytest

from tests.examples.scripts import arrays
from tests.examples.scripts import command
from tests.examples.scripts import environment
from tests.examples.scripts import EXAMPLES
from tests.examples.scripts import rows
from tests.examples.scripts import run as run_script
from tests.examples.scripts import run_at_once

OWN = EXAMPLES / 'own_dataset'
QUICK = ['--unit-num', '8', '--conv-layers', '2', '--batchsize', '16', '--epoch', '2']
CHAINS = ['C' * n + end for n in range(1, 31) for end in ('', 'N', 'O')]


def run(script, *arguments, **options):
    return run_at_once(OWN / script, *arguments, **options)


def run_by_python(script, *arguments, **options):
    return run_script(OWN / script, *arguments, **options)


@pytest.fixture
def regression_file(tmp_path):
    path = tmp_path / 'mine.csv'
    path.write_text(
        'name,Structure,log S,mass\n'
        + ''.join(
            'm%d,%s,%s,%d\n' % (i, smiles, -len(smiles) / 2, 14 * len(smiles))
            for i, smiles in enumerate(CHAINS)
        )
    )
    return path


@pytest.fixture
def classification_file(tmp_path):
    path = tmp_path / 'mine.csv'
    path.write_text(
        'smiles,amine\n'
        + ''.join(
            '%s,%s\n' % (smiles, '' if i % 5 == 0 else int('N' in smiles))
            for i, smiles in enumerate(CHAINS)
        )
    )
    return path


@pytest.mark.parametrize('dense', [[], pytest.param(['--dense'], marks=pytest.mark.slow)])
def test_regression(regression_file, tmp_path, dense):
    out = tmp_path / 'result'
    text = run(
        'train_own.py',
        '--data',
        regression_file,
        '--smiles-column',
        'Structure',
        '--labels',
        'log S',
        'mass',
        '--task',
        'regression',
        '--out',
        out,
        *QUICK,
        *dense,
    )
    assert '90 molecules' in text and 'Targets: log S, mass' in text
    test = json.loads((out / 'result.json').read_text())['test']
    assert list(test['MAE']) == ['log S', 'mass'] and 'Time a step' in text
    printed = run('predict_own.py', '--in-dir', out, '--out', tmp_path / 'p.csv', *dense)
    assert 'MAE of mass: %.6g (14 molecules)' % test['MAE']['mass'] in printed
    table = rows(tmp_path / 'p.csv')
    assert list(table[0]) == [
        'smiles',
        'name',
        'log S predicted',
        'log S true',
        'mass predicted',
        'mass true',
    ]
    path = tmp_path / 'new.csv'
    path.write_text('id,Structure,mass\n7,CCO,46\n')
    run('predict_own.py', '--in-dir', out, '--data', path, '--out', tmp_path / 'q.csv', *dense)
    (row,) = rows(tmp_path / 'q.csv')
    names = ['smiles', 'id', 'log S predicted', 'mass predicted', 'mass true']
    assert list(row) == names and row['id'] == '7'


def test_a_longer_run_is_not_overwritten(regression_file, tmp_path):
    words = ['--data', regression_file, '--smiles-column', 'Structure', '--labels', 'mass']
    words += ['--task', 'regression', '--out', tmp_path, *QUICK]
    run('train_own.py', *words, '--epoch', '2')
    before = (tmp_path / 'model.npz').read_bytes()
    error = run('train_own.py', *words, '--epoch', '1', status=1)
    assert 'has a run of 2 epochs, and this one would overwrite it with 1; use' in error
    assert (tmp_path / 'model.npz').read_bytes() == before
    run('train_own.py', *words, '--epoch', '1', '--force')
    assert (tmp_path / 'model.npz').read_bytes() != before


def test_classification(classification_file, tmp_path):
    out = tmp_path / 'result'
    text = run(
        'train_own.py',
        '--data',
        classification_file,
        '--labels',
        'amine',
        '--task',
        'classification',
        '--out',
        out,
        *QUICK,
    )
    assert 'test ROC-AUC' in text
    area = json.loads((out / 'result.json').read_text())['test']['mean ROC-AUC']
    assert 0 <= area <= 1
    printed = run_by_python('predict_own.py', '--in-dir', out, '--out', tmp_path / 'p.csv')
    assert 'mean ROC-AUC: %.4f' % area in printed


def test_interrupted_training_goes_on_with_the_command_that_is_printed(regression_file, tmp_path):
    options = [
        '--data',
        regression_file,
        '--smiles-column',
        'Structure',
        '--labels',
        'log S',
        'mass',
        '--task',
        'regression',
        '--unit-num',
        '8',
        '--conv-layers',
        '2',
        '--batchsize',
        '1',
        '--epoch',
        '8',
    ]
    out = tmp_path / 'with space'
    with subprocess.Popen(
        command(OWN / 'train_own.py', options + ['--out', out]),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        text = ''
        for line in process.stdout:
            text += line
            if line.startswith('2 '):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130, text
    assert not (out / 'model.npz').exists()
    # As a shell would run it.
    subprocess.run(
        text.splitlines()[-1], shell=True, check=True, env=environment(), capture_output=True
    )
    run('train_own.py', '--out', tmp_path / 'whole', *options)
    ours, other = arrays(out / 'model.npz'), arrays(tmp_path / 'whole' / 'model.npz')
    for name in ours:
        numpy.testing.assert_array_equal(ours[name], other[name])


@pytest.mark.parametrize(
    'change, message',
    [
        (
            ['--labels', 'logS'],
            'has no column logS; expected the columns Structure, logS, found name,',
        ),
        (['--smiles-column', 'smiles'], 'has no column smiles'),
        (['--task', 'classification'], "mine.csv row 2: target log S is '-0.5', expected 0, 1 or"),
        (['--labels', 'name'], "mine.csv row 2: target name is 'm0', expected a finite number"),
        (['--data', 'missing.csv'], 'data file not found: /'),
        (['--data', 'where.csv', '--labels', 'where'], 'a label cannot be called where'),
        (['--data', 'where.csv', '--labels', 'smiles'], 'a label cannot be called smiles'),
        (['--data', 'where.csv', '--labels', 'log S'], 'where.csv has 2 columns log S'),
        (['--labels', 'mass', 'mass'], '--labels: mass is named twice'),
        (['--data', 'separated.csv'], 'found Structure;log S; columns must be separated by commas'),
    ],
)
def test_errors_of_the_user_have_no_traceback(regression_file, tmp_path, change, message):
    (tmp_path / 'separated.csv').write_text('Structure;log S\nCCO;1\n')
    (tmp_path / 'where.csv').write_text('Structure,where,smiles,log S,log S\nCCO,1,2,3,4\n')
    options = ['--data', regression_file, '--smiles-column', 'Structure', '--labels', 'log S']
    options += ['--task', 'regression', '--out', tmp_path / 'result']
    text = run('train_own.py', *options, *change, status=1, cwd=tmp_path)
    assert text.startswith('error: ') and message in text and text.count('\n') == 1


def test_resume_refuses_other_labels(regression_file, tmp_path):
    out = tmp_path / 'result'
    options = [
        '--data',
        regression_file,
        '--smiles-column',
        'Structure',
        '--task',
        'regression',
        '--out',
        out,
        *QUICK,
    ]
    run('train_own.py', '--labels', 'mass', *options)
    text = run(
        'train_own.py', '--labels', 'log S', '--resume', out / 'snapshot.npz', *options, status=1
    )
    assert "labels was ['mass']" in text and "is ['log S'] now" in text


@pytest.mark.parametrize(
    'option, message',
    [
        (['--seed', '99999999999'], 'got 99999999999, expected from 0 to 4294967295'),
        (['--num-data', '0'], 'got 0, expected at least 1, or -1 for all'),
        (['--num-data', '-2'], 'got -2, expected at least 1, or -1 for all'),
    ],
)
def test_numbers_out_of_range(regression_file, option, message):
    text = run('train_own.py', '--data', regression_file, *option, status=2)
    assert message in text.splitlines()[-1] and 'Traceback' not in text


def test_training_data_that_changed_or_moved(regression_file, tmp_path):
    """Predictions never overwrite data; the test part is refused where the data are others."""
    folder = tmp_path / 'elsewhere'
    folder.mkdir()
    options = ['--smiles-column', 'Structure', '--labels', 'mass', '--task', 'regression']
    options += ['--data', 'mine.csv', '--out', 'result', *QUICK]
    assert 'Starting again' not in run('train_own.py', *options, cwd=tmp_path)
    assert 'Starting again: the snapshot' in run('train_own.py', *options, cwd=tmp_path)
    predict = ['predict_own.py', '--in-dir', tmp_path / 'result']
    run(*predict, cwd=folder)  # by the absolute path of the data
    text = regression_file.read_text()
    other = tmp_path / 'other.csv'
    other.write_text(text)
    for more in (
        ['--out', regression_file],
        ['--data', other, '--out', other],
        ['--data', other, '--out', tmp_path / 'elsewhere' / '..' / 'other.csv'],
    ):
        assert 'holds the data that are read' in run(*predict, *more, status=1)
    assert regression_file.read_text() == other.read_text() == text
    header, *lines = text.splitlines(keepends=True)
    regression_file.write_text(header + ''.join(lines[::-1]))
    assert 'in another order' in run(*predict, status=1)
    resume = ['--resume', tmp_path / 'result' / 'snapshot.npz']
    error = run('train_own.py', *options, *resume, status=1, cwd=tmp_path)
    assert '--resume: the data have other molecules' in error


def train_on(folder, text, *arguments, **options):
    """Train on a CSV file of this text in a folder, into the folder `result` there."""
    folder.mkdir(exist_ok=True)
    (folder / 'mine.csv').write_text(text)
    words = ['--data', 'mine.csv', '--labels', 'y', '--task', 'regression', *QUICK]
    return run('train_own.py', *words, '--out', 'result', *arguments, cwd=folder, **options)


TABLE = 'smiles,y,name\n' + ''.join(
    '%s,%d,m%d\n' % (smiles, i, i) for i, smiles in enumerate(CHAINS)
)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with mine.csv and, of a training on it, result."""
    folder = tmp_path_factory.mktemp('trained')
    train_on(folder, TABLE)
    return folder


def copy_of(trained, folder):
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return folder


def test_rows_with_more_cells_than_the_header(tmp_path):
    # With the first row among them, pandas would take the first column for an index.
    train_on(tmp_path, TABLE.replace('m0\n', 'm0,4\n').replace('m7\n', 'm7,5,6\n'))
    out = tmp_path / 'all.csv'
    run('predict_own.py', '--in-dir', 'result', '--data', 'mine.csv', '--out', out, cwd=tmp_path)
    assert [row['name'] for row in rows(out)] == ['m%d' % i for i in range(len(CHAINS))]


def test_earlier_predictions_are_not_replaced(trained, tmp_path):
    predict = 'predict_own.py', '--in-dir', trained / 'result', '--data'
    first, second = tmp_path / 'first.csv', tmp_path / 'second.csv'
    run(*predict, trained / 'mine.csv', '--out', first)
    error = run(*predict, first, '--out', second, status=1)
    assert "a column 'y predicted', which the predictions would replace; rename it" in error
    text = first.read_text().replace('y predicted', 'before')
    first.write_text(text)
    run(*predict, first, '--out', second)  # no label y here: nothing replaces y true
    assert list(rows(second)[0]) == ['smiles', 'name', 'before', 'y true', 'y predicted']
    first.write_text(text.replace('y true', 'y'))
    run(*predict, first, '--out', second)
    assert list(rows(second)[0]) == ['smiles', 'name', 'before', 'y predicted', 'y true']
    first.write_text(text.replace('name', 'y'))
    first.write_text(first.read_text().replace(',m', ','))
    error = run(*predict, first, '--out', second, status=1)
    assert "a column 'y true', which the predictions would replace; rename it" in error


def test_predictions_into_a_pipe(trained, tmp_path):
    result = copy_of(trained, tmp_path) / 'result'
    (tmp_path / 'new.csv').write_text('smiles,name\nCCO,a\nC1,b\n')
    words = ['--in-dir', result, '--data', tmp_path / 'new.csv', '-o', '/dev/stdout']
    done = subprocess.run(
        command(OWN / 'predict_own.py', words), env=environment(), capture_output=True, text=True
    )
    assert not done.returncode and 'smiles,name,y predicted\nCCO,a,' in done.stdout, done.stderr
    assert [row['smiles'] for row in rows(result / 'predictions_failed.csv')] == ['C1']


def test_a_damaged_snapshot_removes_no_other_run(trained, tmp_path):
    result = copy_of(trained, tmp_path) / 'result'
    (result / 'failed.csv').write_text('of the other run')
    before = sorted(result.iterdir())
    damaged = tmp_path / 'damaged'
    damaged.mkdir()
    for name in 'settings.json', 'snapshot.npz':
        content = (result / name).read_bytes()
        (damaged / name).write_bytes(content)
    flags = content.index(b'PK\1\2') + 8  # in the directory at the end
    for broken in (
        content[:-9],
        content[:200] + b'abcd' + content[204:],
        content[:flags] + b'\1' + content[flags + 1 :],  # seems encrypted
        (result / 'model.npz').read_bytes(),
    ):
        (damaged / 'snapshot.npz').write_bytes(broken)
        error = train_on(
            tmp_path,
            TABLE,
            '--force',
            '--resume',
            damaged / 'snapshot.npz',
            '--seed',
            '1',
            status=1,
        )
        assert 'snapshot.npz cannot be loaded, it is damaged' in error
        assert sorted(result.iterdir()) == before


@pytest.mark.parametrize('name', ['model.npz', 'settings.json', 'snapshot.npz', 'log'])
def test_predictions_overwrite_no_file_of_the_training(trained, name):
    before = (trained / 'result' / name).read_bytes()
    options = ['--in-dir', 'result', '--smiles', 'C', '--out', trained / 'result' / name]
    text = run('predict_own.py', *options, cwd=trained, status=1)
    assert text.startswith('error: --out: ') and 'holds the data that are read' in text
    assert (trained / 'result' / name).read_bytes() == before


def test_the_list_of_failures_is_no_file_that_is_read(trained, tmp_path):
    """The molecules of p_failed.csv may have been mended, and are predicted into p.csv again."""
    folder = copy_of(trained, tmp_path)
    for script, name in (('predict_own.py', 'p_failed.csv'), ('train_own.py', 'failed.csv')):
        path = folder / 'result' / name
        path.write_text(TABLE)
        options = ['--data', path]
        if script == 'predict_own.py':
            options += ['--in-dir', folder / 'result', '--out', folder / 'result' / 'p.csv']
        else:
            options += ['--labels', 'y', '--task', 'regression', '--out', folder / 'result', *QUICK]
        assert run(script, *options, status=1).startswith('error: --')
        assert path.read_text() == TABLE


def test_predictions_of_the_test_part_keep_the_columns_of_the_data(trained, tmp_path):
    text = 'where,smiles,y,name\n' + ''.join(
        'x%d,%s,%d,\xe4%d\n' % (i, smiles, i, i) for i, smiles in enumerate(CHAINS)
    )
    other = tmp_path / 'latin.csv'
    other.write_text(text, encoding='latin-1')
    run('predict_own.py', '--in-dir', 'result', '--out', tmp_path / 'p.csv', cwd=trained)
    table = rows(tmp_path / 'p.csv')
    assert list(table[0]) == ['smiles', 'name', 'y predicted', 'y true']
    assert all(row['name'] == 'm%d' % float(row['y true']) for row in table) and len(table) == 14
    options = ['--in-dir', 'result', '--data', other, '--out', tmp_path / 'q.csv']
    run('predict_own.py', *options, cwd=trained)
    table = rows(tmp_path / 'q.csv')
    assert len(table) == 90 and table[3]['where'] == 'x3' and table[3]['name'] == '\ufffd3'


def test_molecules_without_labels_are_skipped_and_counted(tmp_path):
    text = 'smiles,y\n' + ''.join(
        '%s,%s\n' % (smiles, {0: '', 1: 'NaN', 2: ' n/a '}.get(i % 30, i))
        for i, smiles in enumerate(CHAINS)
    )
    error = train_on(tmp_path, text, status=1)
    assert "row 2: target y is '', expected a finite number (9 such rows; --skip-missing" in error
    printed = train_on(tmp_path, text, '--skip-missing')
    assert 'Skipped 9 molecule(s) without each label of y, the first: mine.csv row 2\n' in printed
    assert '81 molecules' in printed
    mae = json.loads((tmp_path / 'result' / 'result.json').read_text())['test']['MAE']['y']
    predict = ['predict_own.py', '--in-dir', tmp_path / 'result']
    assert 'MAE of y: %.6g ' % mae in run(*predict)
    run(*predict, '--data', tmp_path / 'mine.csv')  # such labels are no errors in a prediction
    assert len(rows(tmp_path / 'result' / 'predictions.csv')) == 90


def test_a_classification_needs_some_label(tmp_path):
    words = '--task', 'classification', '--labels', 'y'
    nothing = ''.join('%s,\n' % smiles for smiles in CHAINS)
    error = train_on(tmp_path, 'smiles,y\n' + nothing, *words, status=1)
    assert error == 'error: mine.csv: no molecule has a label\n'
    some = ''.join('%s,%d\n' % (smiles, 'N' in smiles) for smiles in CHAINS)
    printed = train_on(tmp_path, 'smiles,y\n' + nothing + some, *words, '--skip-missing')
    assert 'Skipped 90 molecule(s) without any label of y' in printed and '90 molecules' in printed


def test_duplicates_are_named(trained, tmp_path):
    printed = train_on(tmp_path, TABLE + 'CN,7,a\nCN,8,b\nC1C,1,c\nC1C,1,d\n')
    assert (
        'Duplicates: 2 molecule(s) have the SMILES of an earlier one, the first: mine.csv row 3 '
        "and mine.csv row 92: 'CN'; test molecules may be among those of the training\n"
    ) in printed


def test_batches_have_a_molecule_once(tmp_path):
    printed = train_on(tmp_path, TABLE, '--batchsize', '100000')
    assert 'Batches of all 62 training molecules\n' in printed
    log = json.loads((tmp_path / 'result' / 'log').read_text())
    assert [(entry['epoch'], entry['iteration']) for entry in log] == [(1, 1), (2, 2)]


def test_folder_and_data_may_move_together(trained, tmp_path):
    moved = copy_of(trained, tmp_path / 'before')
    settings = json.loads((moved / 'result' / 'settings.json').read_text())
    for name in ('data', 'folder'):
        settings[name] = settings[name].replace(str(trained), '/nowhere/project')
    (moved / 'result' / 'settings.json').write_text(json.dumps(settings))
    printed = run('predict_own.py', '--in-dir', moved / 'result', cwd=tmp_path)
    assert 'Data: %s: 90 molecules' % (moved / 'mine.csv') in printed
    (moved / 'mine.csv').unlink()
    error = run('predict_own.py', '--in-dir', moved / 'result', cwd=tmp_path, status=1)
    assert error == 'error: data file not found: /nowhere/project/mine.csv\n'


def test_a_longer_run_in_another_folder_than_the_snapshots(trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    resume = ['--resume', trained / 'result' / 'snapshot.npz', '--data', trained / 'mine.csv']
    error = train_on(folder, TABLE, *resume, '--epoch', '1', status=1)
    assert 'has a run of 2 epochs, and this one would overwrite it with 1; use another' in error


def test_what_a_killed_run_left_is_removed(trained, tmp_path):
    folder = copy_of(trained, tmp_path) / 'result'
    left = {
        'tmpsnapshot.npzabcd_123': 'snapshot.npz',
        'tmpsnapshot.npz.12.1abcd_123': 'snapshot.npz.12.1',
        'tmpmodel.npzabcd_123': 'model.npz',
        'logabcd_123': 'log.json',
    }
    mine = {'log20240101': 'mine', 'logs': 'log.json', 'tmpmodel.npzabcd_124': 'mine'}
    for name, file in {**left, **mine}.items():
        (folder / name).mkdir()
        (folder / name / file).write_text('')
    train_on(tmp_path, TABLE)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(mine)


@pytest.mark.parametrize('most', [0, 3000, 10000])
def test_a_full_disk_is_one_line(trained, tmp_path, most):
    """A limit of the size of files stands for the disk: of settings, snapshot, model."""
    folder = copy_of(trained, tmp_path)
    before = sorted(path.name for path in (folder / 'result').iterdir())
    model = (folder / 'result' / 'model.npz').read_bytes()
    words = ['--data', trained / 'mine.csv', '--labels', 'y', '--task', 'regression']
    words += ['--out', folder / 'result', '--no-cache', *QUICK]
    predict = ['--in-dir', folder / 'result', '--data', folder / 'mine.csv', '--no-cache']
    scripts = [('train_own.py', words)]
    if not most:
        (folder / 'result' / 'predictions.csv').write_text('good')
        before = sorted([*before, 'predictions.csv'])
        scripts.append(('predict_own.py', predict))
    for script, arguments in scripts:
        done = subprocess.run(
            command(OWN / script, arguments),
            env=environment(),
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        )
        assert done.returncode == 1
        assert done.stderr == 'error: cannot write: File too large\n'
        assert sorted(path.name for path in (folder / 'result').iterdir()) == before
    assert (folder / 'result' / 'model.npz').read_bytes() == model
    if not most:
        assert (folder / 'result' / 'predictions.csv').read_text() == 'good'
        error = run_by_python('predict_own.py', *predict, '--out', '/dev/full', status=1)
        assert error == 'error: cannot write: No space left on device\n'


@pytest.mark.parametrize(
    'text', [TABLE.encode('utf-16'), gzip.compress(TABLE.encode()), b'smiles,y\nC\xe4,1\n']
)
def test_other_encodings_are_named(tmp_path, text):
    (tmp_path / 'other.csv').write_bytes(text)
    error = train_on(tmp_path, TABLE, '--data', 'other.csv', status=1)
    assert error.startswith('error: other.csv cannot be read as CSV: it is not text in UTF-8; a')
    assert error.count('\n') == 1
