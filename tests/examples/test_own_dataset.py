"""The scripts of examples/own_dataset, run as a user runs them."""

import json
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
        (['--data', 'separated.csv'], 'found Structure;log S; columns must be separated by commas'),
    ],
)
def test_errors_of_the_user_have_no_traceback(regression_file, tmp_path, change, message):
    (tmp_path / 'separated.csv').write_text('Structure;log S\nCCO;1\n')
    options = {
        '--data': regression_file,
        '--smiles-column': 'Structure',
        '--labels': 'log S',
        '--task': 'regression',
        '--out': tmp_path / 'result',
        **dict([change]),
    }
    words = [word for pair in options.items() for word in pair]
    text = run('train_own.py', *words, status=1, cwd=tmp_path)
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
    assert '--resume: digest was' in run('train_own.py', *options, *resume, status=1, cwd=tmp_path)
