"""The scripts of examples/own_dataset, run as a user runs them; what a run does with its folder."""

import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import threading
import time
import zipfile

import chainer
import numpy
import pytest

from tests.examples.scripts import arrays, command, error_of, EXAMPLES, imported, rows, run_here
from tests.support.processes import environment
from tests.support.training import assert_same_bits

OWN = EXAMPLES / 'own_dataset'
QUICK = '--unit-num 8 --conv-layers 2 --batchsize 16 --epoch 2'.split()
CHAINS = ['C' * n + end for n in range(1, 31) for end in ('', 'N', 'O')]
TABLE = 'smiles,y,name\n' + ''.join(
    '%s,%d,m%d\n' % (smiles, i, i) for i, smiles in enumerate(CHAINS)
)
SNAPSHOT = 'snapshot_8.0'  # the last of WORDS
WORDS = ['--data', 'mine.csv', '--labels', 'y', '--task', 'regression', '--out', 'result', *QUICK]


def run(script, *arguments, **options):
    return run_here(OWN / script, *arguments, **options)


def train_on(folder, text, *arguments, **options):
    """Train on a CSV file of this text in a folder, into the folder `result` there."""
    folder.mkdir(exist_ok=True)
    (folder / 'mine.csv').write_text(text)
    return run('train_own.py', *WORDS, *arguments, cwd=folder, **options)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with mine.csv and, of a training on it, result."""
    folder = tmp_path_factory.mktemp('trained')
    train_on(folder, TABLE)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it, for a test that changes it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / 'result' / 'settings.json'
    path.write_text(path.read_text().replace(str(trained), str(tmp_path)))
    return tmp_path


@pytest.fixture(scope='module')
def common():
    imported(OWN, 'train_own')
    import common.files
    import common.training

    return common


@pytest.fixture
def error(tmp_path, monkeypatch):
    """A function for the error of a script in the folder of the test."""
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
    assert 'MAE of mass: %.6g (14 molecules)' % test['MAE']['mass'] in printed
    names = ['smiles', 'name', 'log S predicted', 'log S true', 'mass predicted', 'mass true']
    assert list(rows(tmp_path / 'p.csv')[0]) == names
    (tmp_path / 'new.csv').write_text('id,Structure,mass\n7,CCO,46\n')
    run('predict_own.py', '--data', 'new.csv', '--out', 'q.csv', cwd=tmp_path)
    (row,) = rows(tmp_path / 'q.csv')
    names = ['smiles', 'id', 'log S predicted', 'mass predicted', 'mass true']
    assert list(row) == names and row['id'] == '7'


def test_classification_by_scaffold(tmp_path):
    """Molecules with one scaffold are in one part; predictions find the test part again."""
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
            "mine.csv row 2: target y is '2', expected 0, 1 or nothing (1 such rows)",
        ),
        (
            ['--labels', 'name'],
            "mine.csv row 2: target name is 'm0', expected a finite number (1 such rows)",
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
    'content',
    [TABLE.encode('utf-16'), gzip.compress(TABLE.encode(), mtime=0), b'smiles,y\nC\xe4,1\n'],
    ids=['UTF-16', 'gzip', 'Latin-1'],
)
def test_files_that_are_not_utf_8_are_refused(tmp_path, error, content):
    (tmp_path / 'mine.csv').write_bytes(content)
    start = "error: mine.csv cannot be read as CSV: 'utf-8' codec can't decode byte "
    assert error('train_own.py', *WORDS).startswith(start)
    assert not (tmp_path / 'result').exists()


@pytest.mark.parametrize(
    'option, message',
    [
        (['--seed', '99999999999'], 'got 99999999999, expected from 0 to 4294967295'),
        (['--num-data', '-2'], 'got -2, expected at least -1'),
        (['--padded-to', '0'], 'got 0, expected at least 1'),
        (['--train-data-ratio', '1.5'], 'got 1.5, expected from 0 to 1'),
    ],
)
def test_numbers_out_of_range(capsys, option, message):
    with pytest.raises(SystemExit):
        imported(OWN, 'train_own').run(option)
    assert capsys.readouterr().err.splitlines()[-1].endswith(': ' + message)


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
    assert error('train_own.py', *WORDS, '--out', '.') == (
        'error: --out: the folder . is not empty; expected a new one, or --force to start again '
        'in it'
    )


def test_only_the_files_of_a_run_are_replaced(folder):
    (folder / 'result' / 'failed.csv').write_text('of the run before')
    (folder / 'result' / 'mine.txt').write_text('mine')
    (folder / 'result' / 'snapshot_99.1').write_text('of another rank')
    run('train_own.py', *WORDS, '--force', '--unit-num', '4', '--epoch', '1', cwd=folder)
    after = content(folder / 'result')
    assert after.pop('mine.txt') == b'mine'
    assert sum(name.startswith('snapshot') for name in after) == 1
    assert json.loads(after['settings.json'])['unit_num'] == 4


def test_a_folder_that_another_run_has_claimed_meanwhile(common, tmp_path):
    for _ in range(2):  # two runs, before either starts
        common.files.check_folder(str(tmp_path), force=False)
    common.files.start_run(str(tmp_path), {'seed': 1}, force=False)
    (tmp_path / 'log').write_text('of the first')
    with pytest.raises(common.files.DataError) as error:
        common.files.start_run(str(tmp_path), {'seed': 2}, force=False)
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
            # What runs in the background of a shell script ignores it otherwise.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while process.poll() is None and set(folder.glob('stopped/snapshot_*')) <= before:
            time.sleep(0.01)
        process.send_signal(how)
        text, error = process.communicate(timeout=300)
        assert process.returncode == (130 if how == signal.SIGINT else -how), text + error
        assert not (folder / 'stopped' / 'model.npz').exists() and error == ''
        if how == signal.SIGINT:
            assert text.endswith('command with --resume continues from the last snapshot\n')
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


def test_an_interrupt_before_the_training(common, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(common.training, 'prepare', interrupt)
    with pytest.raises(SystemExit, match='^interrupted$'):
        common.training.main(lambda: imported(OWN, 'train_own').run(WORDS))


class Evil:
    def __reduce__(self):
        return os.mkdir, ('evil',)


@pytest.mark.parametrize('name', ['model.npz', 'best_model.npz', SNAPSHOT, 'pickle', 'object'])
def test_objects_in_files_are_refused_before_they_run(common, folder, error, name):
    path = folder / 'result' / ('model.npz' if name in ('pickle', 'object') else name)
    common.files.check_arrays(path)  # has a None
    evil = numpy.array(None, object)
    evil[()] = 1.5 if name == 'object' else Evil()
    if name == 'pickle':  # which NumPy would load, though an archive follows
        whole = path.read_bytes()
        with open(path, 'wb') as file:
            pickle.dump(Evil(), file)
            file.write(whole)
        assert zipfile.is_zipfile(path)
    else:
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


@pytest.mark.parametrize('protocol', range(2, 6))
def test_none_of_every_pickle_protocol_is_no_object(common, tmp_path, protocol):
    header = io.BytesIO()
    description = {'descr': '|O', 'fortran_order': False, 'shape': ()}
    numpy.lib.format.write_array_header_1_0(header, description)
    text = pickle.dumps(numpy.array(None, object), protocol)
    texts = [text]
    if protocol < 4:  # no lengths of texts: what other versions of NumPy have written
        for new in (b'numpy.core', b'numpy._core'):
            texts.append(text.replace(b'numpy._core', b'numpy.core').replace(b'numpy.core', new))
    for text in texts:
        with zipfile.ZipFile(tmp_path / 'file.npz', 'w') as archive:
            archive.writestr('a.npy', header.getvalue() + text)
        common.files.check_arrays(tmp_path / 'file.npz')


@pytest.mark.parametrize('change', ['truncated', 'garbled', 'encrypted', 'model'])
def test_a_damaged_snapshot_is_one_line(folder, error, change):
    path = folder / 'result' / SNAPSHOT
    whole = path.read_bytes()
    flags = whole.index(b'PK\1\2') + 8  # in the directory at the end
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
    assert message.startswith(start)  # the reason is zipfile's or NumPy's
    assert content(folder / 'result') == before


@contextlib.contextmanager
def full_disk(most):
    """Let no file have more than `most` bytes, as if the disk was full by then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
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
    common.files.write_result(tmp_path, {'a': {'b': numpy.nan, 'c': -numpy.inf}, 'd': 1.5})
    text = (tmp_path / 'result.json').read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {'a': {'b': None, 'c': None}, 'd': 1.5}


@pytest.fixture(params=['in another order', 'with another label'])
def changed(request, folder):
    """The folder of a training whose data have changed since."""
    header, first, *others = TABLE.splitlines(keepends=True)
    if request.param == 'in another order':
        lines = [*others, first]
    else:
        lines = [first.replace(',0,', ',7,'), *others]
    (folder / 'mine.csv').write_text(header + ''.join(lines))
    return folder


def test_the_test_part_of_changed_data_is_refused(changed, error):
    assert error('predict_own.py') == (
        'error: %s has other molecules or labels, or in another order, than when the model was '
        'trained: the test part cannot be found again' % (changed / 'mine.csv')
    )


def test_a_training_on_changed_data_is_not_resumed(changed, error):
    assert error('train_own.py', *WORDS, '--resume') == (
        'error: --resume: the data have other molecules or labels, or in another order, than those '
        'of the run in result'
    )


@pytest.fixture
def moved(folder):
    """The folder of a training that has moved from /nowhere/project, together with the data."""
    path = folder / 'result' / 'settings.json'
    path.write_text(path.read_text().replace(str(folder), '/nowhere/project'))
    return folder


def test_a_folder_may_move_together_with_the_data(moved):
    printed = run('predict_own.py', '--in-dir', moved / 'result')
    assert 'Data: %s: 90 molecules' % (moved / 'mine.csv') in printed


def test_data_that_were_removed_are_named_where_they_were(moved, error):
    (moved / 'mine.csv').unlink()
    message = 'error: data file not found: /nowhere/project/mine.csv'
    assert error('predict_own.py') == message


def test_rows_with_more_cells_than_the_header(trained, tmp_path):
    # With the first row among them, pandas would take the first column for an index.
    (tmp_path / 'mine.csv').write_text(TABLE.replace('m0\n', 'm0,4\n').replace('m7\n', 'm7,5,6\n'))
    predict = 'predict_own.py', '--in-dir', trained / 'result', '--data', 'mine.csv'
    run(*predict, '--out', 'all.csv', cwd=tmp_path)
    assert [row['name'] for row in rows(tmp_path / 'all.csv')] == ['m%d' % i for i in range(90)]


MISSING = {0: '', 1: 'NaN', 2: ' n/a '}
# Three rows in thirty have no label; then follow three failures, and twice one molecule.
ODD_ROWS = 'smiles,y\n' + ''.join(
    '%s,%s\n' % (smiles, MISSING.get(i % 30, i)) for i, smiles in enumerate(CHAINS)
)
ODD_ROWS += 'C1CC,1\n[Og],1\nC1CC,2\nOC,1\nOC,2\n'


def test_molecules_without_labels_are_refused(tmp_path):
    assert train_on(tmp_path, ODD_ROWS, status=1) == (
        "error: mine.csv row 2: target y is '', expected a finite number (9 such rows; "
        '--skip-missing leaves empty ones out)'
    )


@pytest.fixture(scope='module')
def trained_on_odd_rows(tmp_path_factory):
    """The folder of a training on such a file, in batches too large for it; what was printed."""
    folder = tmp_path_factory.mktemp('odd')
    return folder, train_on(folder, ODD_ROWS, '--skip-missing', '--batchsize', '100000')


@pytest.mark.parametrize(
    'line',
    [
        'Skipped 9 molecule(s) without each label of y, the first: mine.csv row 2\n',
        'Data: mine.csv: 86 molecules, 83 of them used\n',
        '3 molecule(s) could not be used, all listed in result/failed.csv\n',
        "  mine.csv row 92: 'C1CC': RDKit cannot parse it\n",
        "  mine.csv row 93: '[Og]': atomic number 118, the models support those below 117\n",
        'Duplicates: 1 molecule(s) have the SMILES of an earlier one, the first: mine.csv row 96: '
        "'OC'; test molecules may be among those of the training\n",
        'Batches of all 58 training molecules\n',
    ],
)
def test_molecules_that_are_not_learned_from_are_counted(trained_on_odd_rows, line):
    assert line in trained_on_odd_rows[1]


def test_molecules_that_cannot_be_used_are_listed(trained_on_odd_rows):
    failed = rows(trained_on_odd_rows[0] / 'result' / 'failed.csv')
    assert [row['row'] for row in failed] == ['mine.csv row %d' % i for i in (92, 93, 94)]


def test_a_batch_larger_than_the_data_is_cut(trained_on_odd_rows):
    log = json.loads((trained_on_odd_rows[0] / 'result' / 'log').read_text())
    assert [(entry['epoch'], entry['iteration']) for entry in log] == [(1, 1), (2, 2)]


def test_the_test_part_of_molecules_with_labels_is_found_again(trained_on_odd_rows):
    folder, _ = trained_on_odd_rows
    mae = json.loads((folder / 'result' / 'result.json').read_text())['test']['MAE']['y']
    assert 'MAE of y: %.6g ' % mae in run('predict_own.py', '--out', 'test.csv', cwd=folder)


def test_molecules_without_labels_are_predicted(trained_on_odd_rows):
    folder, _ = trained_on_odd_rows
    run('predict_own.py', '--data', 'mine.csv', '--out', 'all.csv', cwd=folder)
    assert len(rows(folder / 'all.csv')) == 95


UNKNOWN = ''.join('%s,\n' % smiles for smiles in CHAINS)


def test_data_without_any_label_are_refused(tmp_path):
    text = 'smiles,y\n' + UNKNOWN
    message = train_on(tmp_path, text, '--task', 'classification', status=1)
    assert message == 'error: mine.csv: no molecule has a label'


def test_molecules_without_any_label_are_skipped(tmp_path):
    known = ''.join('%s,%d\n' % (smiles, 'N' in smiles) for smiles in CHAINS)
    text = 'smiles,y\n' + UNKNOWN + known
    printed = train_on(tmp_path, text, '--task', 'classification', '--skip-missing')
    message = 'Skipped 90 molecule(s) without any label of y, the first: mine.csv row 2\n'
    assert message in printed
    assert 'Data: mine.csv: 90 molecules' in printed


def test_labels_of_one_value_are_said_to_teach_nothing(tmp_path):
    printed = train_on(tmp_path, 'smiles,y\n' + ''.join('%s,3\n' % each for each in CHAINS))
    assert 'All training molecules have one value of y: nothing to learn\n' in printed
    assert 'std was 0' not in printed  # of Chainer Chemistry's scaler


@pytest.fixture
def predicted(trained, tmp_path):
    """A file of predictions for all of mine.csv."""
    path = tmp_path / 'first.csv'
    in_dir = trained / 'result'
    run('predict_own.py', '--in-dir', in_dir, '--data', trained / 'mine.csv', '--out', path)
    return path


def test_predictions_keep_the_other_columns(predicted):
    table = rows(predicted)
    assert list(table[0]) == ['smiles', 'name', 'y predicted', 'y true'] and len(table) == 90
    assert all(row['name'] == 'm%d' % float(row['y true']) for row in table)


def test_predictions_replace_no_column(trained, predicted, error):
    message = error(
        'predict_own.py', '--in-dir', trained / 'result', '--data', predicted, '-o', 'q.csv'
    )
    assert message == (
        "error: the data have a column 'y predicted', which the predictions would replace; rename "
        'it'
    )


@pytest.mark.parametrize('name', ['first.csv', 'mine.csv', 'result/model.npz'])
def test_predictions_replace_no_file(folder, predicted, error, name):
    before = (folder / name).read_bytes()
    message = error('predict_own.py', '--data', 'mine.csv', '--out', name)
    assert message == (
        'error: --out: %s exists; expected a new file, or --force to replace it' % name
    )
    assert (folder / name).read_bytes() == before


def test_the_list_of_failures_replaces_no_file(folder, error):
    (folder / 'p_failed.csv').write_text('of before')
    message = error('predict_own.py', '--data', 'mine.csv', '--out', 'p.csv')
    assert message == (
        'error: --out: p_failed.csv exists; expected a new file, or --force to replace it'
    )
    assert (folder / 'p_failed.csv').read_text() == 'of before'


@pytest.mark.parametrize(
    'truth, columns',
    [
        # Without a label y nothing replaces the column 'y true'.
        ('y true', ['smiles', 'name', 'before', 'y true', 'y predicted']),
        ('y', ['smiles', 'name', 'before', 'y predicted', 'y true']),
    ],
)
def test_renamed_predictions_stay_beside_new_ones(trained, predicted, tmp_path, truth, columns):
    text = predicted.read_text().replace('y predicted', 'before').replace('y true', truth)
    predicted.write_text(text)
    path = tmp_path / 'second.csv'
    run('predict_own.py', '--in-dir', trained / 'result', '--data', predicted, '--out', path)
    assert list(rows(path)[0]) == columns


@pytest.fixture
def new_molecules(folder):
    """The folder of a training, and in it new.csv, whose second molecule cannot be used."""
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
    assert read[0].startswith('smiles,name,y predicted\nCCO,a,')
    table = rows(folder / 'result' / 'predictions_failed.csv')
    assert [row['smiles'] for row in table] == ['C1']


def test_predictions_into_a_full_device(new_molecules, error):
    message = error('predict_own.py', '--data', 'new.csv', '-o', '/dev/full', '--force')
    assert message == 'error: cannot write /dev/full: No space left on device'


@pytest.fixture
def figures(monkeypatch):
    """Figures that would have been written to a file, in order."""
    figures = []

    def keep(figure, *args, **options):
        figures.append(figure)

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
    pictures.learning_curve([entry], 'path', 'title', panels)
    left, right = figures[0].axes
    colors = [{line.get_label(): line.get_color() for line in ax.lines} for ax in (left, right)]
    assert colors == [{'training': 'C0', 'validation': 'C1'}, {'validation': 'C1'}]
    assert all(tick == int(tick) for tick in left.get_xticks())


def test_a_fit_has_a_panel_for_each_target(common, figures):
    from common import pictures

    values = numpy.arange(12.0).reshape(6, 2)
    pictures.fit('path', values, values + 1, ['a', 'b (eV)'])
    assert [ax.get_title() for ax in figures[0].axes] == ['a', 'b (eV)']
