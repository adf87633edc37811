"""The scripts of examples/own_dataset, run as a user runs them; what a run does with its folder."""

import gzip
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
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
TABLE = 'smiles,y,name\n' + ''.join('%s,%d,m%d\n' % (each, i, i) for i, each in enumerate(CHAINS))
SNAPSHOT = 'snapshot_8.0'  # the last of WORDS
WORDS = ['--data', 'mine.csv', '--labels', 'y', '--task', 'regression', '--out', 'result', *QUICK]


def run(script, *arguments, **options):
    return run_here(OWN / script, *arguments, **options)


def train_on(folder, text, *arguments, **options):
    folder.mkdir(exist_ok=True)
    (folder / 'mine.csv').write_text(text)
    return run('train_own.py', *WORDS, *arguments, cwd=folder, **options)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    train_on(folder, TABLE)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
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
    rings = 'C1CCCCC1 c1ccccc1 c1ccncc1 C1CCCC1 C1CCC1 C1CC1 C1CCNCC1 c1ccoc1'.split()
    smiles = [end + ring for ring in rings for end in ('C', 'CC', 'N', 'O', 'F', 'CN')]
    labels = ['' if i % 5 == 0 else int('N' in each) for i, each in enumerate(smiles)]
    lines = ['%s,%s,%s\n' % (each, labels[i], rings[i // 6]) for i, each in enumerate(smiles)]
    text = 'smiles,y,ring\n' + ''.join(lines)
    printed = train_on(tmp_path, text, '--task', 'classification', '--split', 'scaffold')
    assert 'Split: 36 training, 6 validation, 6 test' in printed
    area = json.loads((tmp_path / 'result' / 'result.json').read_text())['test']['mean ROC-AUC']
    printed = run('predict_own.py', cwd=tmp_path)
    assert 'mean ROC-AUC: %.4f' % area in printed
    assert len({row['ring'] for row in rows(tmp_path / 'result' / 'predictions.csv')}) == 1


@pytest.mark.parametrize(
    'change, message',
    [
        (['--labels', 'log S'], "has no column 'log S'; expected the columns 'Structure', 'log S'"),
        (['--smiles-column', 'x'], "has no column 'x'"),
        (['--task', 'classification'], "mine.csv row 2: target y is '2', expected 0, 1 or nothing"),
        (['--labels', 'name'], "mine.csv row 2: target name is 'm0', expected a finite number"),
        (['--labels', 'twice'], "mine.csv has 2 columns 'twice'"),
        (['--labels', 'y', 'y'], '--labels: a column is named twice'),
        (['--data', 'separated.csv'], "separated by commas, found 'Structure;y'"),
        (['--data', 'utf16.csv'], "utf16.csv cannot be read as CSV: 'utf-8' codec can't decode"),
        (['--data', 'gzip.csv'], "gzip.csv cannot be read as CSV: 'utf-8' codec can't decode"),
        (['--data', 'latin.csv'], "latin.csv cannot be read as CSV: 'utf-8' codec can't decode"),
    ],
)
def test_errors_of_the_user_have_no_traceback(tmp_path, error, change, message):
    (tmp_path / 'separated.csv').write_text('Structure;y\nCCO;1\n')
    (tmp_path / 'utf16.csv').write_text(TABLE, encoding='utf-16')
    (tmp_path / 'gzip.csv').write_bytes(gzip.compress(TABLE.encode()))
    (tmp_path / 'latin.csv').write_bytes(b'Structure,y\nC\xe4,1\n')
    (tmp_path / 'mine.csv').write_text('Structure,y,name,twice,twice\nCCO,2,m0,3,4\n')
    assert message in error('train_own.py', *WORDS, '--smiles-column', 'Structure', *change)
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
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_belongs_to_one_run(folder, error):
    before = content(folder / 'result')
    train = ['train_own.py', *WORDS]
    for words in ([], ['--unit-num', '4'], ['--epoch', '1'], ['--data', 'result/failed.csv']):
        assert error(*train, *words) == (
            'error: --out: the folder result is not empty; expected a new one, --resume to '
            'continue its run, or --force to start again in it'
        )
    message = error(*train, '--out', '.')  # the data are there, but no run
    assert 'the folder . is not empty; expected a new one, or --force' in message
    assert content(folder / 'result') == before
    (folder / 'result' / 'failed.csv').write_text('of the run before')
    (folder / 'result' / 'mine.txt').write_text('mine')
    (folder / 'result' / 'snapshot_99.1').write_text('of another rank')
    run(*train, '--force', '--unit-num', '4', '--epoch', '1', cwd=folder)
    after = content(folder / 'result')
    assert after.pop('mine.txt') == b'mine'
    assert sum(name.startswith('snapshot') for name in after) == 1
    assert json.loads(after['settings.json'])['unit_num'] == 4


def test_a_folder_that_another_run_has_claimed_meanwhile(common, tmp_path):
    for _ in range(2):  # two runs, before either starts
        common.files.check_folder(str(tmp_path), force=False)
    common.files.start_run(str(tmp_path), {'seed': 1}, force=False)
    (tmp_path / 'log').write_text('of the first')
    with pytest.raises(common.files.DataError, match='another run has just started in the folder'):
        common.files.start_run(str(tmp_path), {'seed': 2}, force=False)
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
        assert_same_bits(*(arrays(folder / part / name) for part in ('stopped', 'whole')))


def test_an_interrupt_without_a_snapshot(folder, error, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(chainer.training.Trainer, 'run', interrupt)
    assert imported(OWN, 'train_own').run([*WORDS, '--out', 'new']) == 130
    assert 'Interrupted. The same command with --force starts again\n' in capsys.readouterr().out
    monkeypatch.setattr('common.training.prepare', interrupt)
    with pytest.raises(SystemExit, match='interrupted'):
        sys.modules['common.training'].main(lambda: imported(OWN, 'train_own').run(WORDS))


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
    changed = {'truncated': whole[:-9], 'garbled': whole[:200] + b'abcd' + whole[204:]}
    changed['encrypted'] = whole[:flags] + b'\1' + whole[flags + 1 :]
    changed['model'] = (folder / 'result' / 'model.npz').read_bytes()
    path.write_bytes(changed[change])
    before = content(folder / 'result')
    message = error('train_own.py', *WORDS, '--resume')
    assert '/%s cannot be loaded, it is damaged or' % SNAPSHOT in message
    assert content(folder / 'result') == before


@pytest.mark.parametrize('most', [0, 3000, 10000])
def test_a_full_disk_is_one_line(trained, tmp_path, error, capsys, most):
    """A limit of the size of files stands for the disk: of settings, snapshot, model."""
    (tmp_path / 'p.csv').write_text('of before')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        message = error('train_own.py', *WORDS, '--data', trained / 'mine.csv', '--out', 'out')
        prediction = (
            None
            if most
            else error(
                'predict_own.py', '--in-dir', trained / 'result', '--out', 'p.csv', '--force'
            )
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert message == 'error: cannot write into the folder of --out: File too large'
    assert not (tmp_path / 'out' / 'model.npz').exists()
    assert prediction in (None, 'error: cannot write p.csv: File too large')
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


def test_the_test_part_is_refused_when_the_data_have_changed(folder, error):
    header, *lines = TABLE.splitlines(keepends=True)
    for changed in (lines[::-1], [lines[0].replace(',0,', ',7,'), *lines[1:]]):
        (folder / 'mine.csv').write_text(header + ''.join(changed))
        assert 'in another order' in error('predict_own.py')
        message = error('train_own.py', *WORDS, '--resume')
        assert '--resume: the data have other molecules or labels' in message


def test_folder_and_data_may_move_together(folder, error):
    path = folder / 'result' / 'settings.json'
    path.write_text(path.read_text().replace(str(folder), '/nowhere/project'))
    printed = run('predict_own.py', '--in-dir', folder / 'result')
    assert 'Data: %s: 90 molecules' % (folder / 'mine.csv') in printed
    (folder / 'mine.csv').unlink()
    message = 'error: data file not found: /nowhere/project/mine.csv'
    assert error('predict_own.py', '--force') == message


def test_rows_with_more_cells_than_the_header(trained, tmp_path):
    # With the first row among them, pandas would take the first column for an index.
    (tmp_path / 'mine.csv').write_text(TABLE.replace('m0\n', 'm0,4\n').replace('m7\n', 'm7,5,6\n'))
    predict = 'predict_own.py', '--in-dir', trained / 'result', '--data', 'mine.csv'
    run(*predict, '--out', 'all.csv', cwd=tmp_path)
    assert [row['name'] for row in rows(tmp_path / 'all.csv')] == ['m%d' % i for i in range(90)]


def test_molecules_that_are_not_learned_from(tmp_path):
    """Those that cannot be used, those without labels, duplicates; large batches are cut."""
    labels = {0: '', 1: 'NaN', 2: ' n/a '}
    lines = ['%s,%s\n' % (smiles, labels.get(i % 30, i)) for i, smiles in enumerate(CHAINS)]
    text = 'smiles,y\n' + ''.join(lines)
    text += 'C1CC,1\n[Og],1\nC1CC,2\nOC,1\nOC,2\n'
    message = train_on(tmp_path, text, status=1)
    assert "row 2: target y is '', expected a finite number (9 such rows; --skip-missing" in message
    printed = train_on(tmp_path, text, '--skip-missing', '--batchsize', '100000')
    for line in (
        'Skipped 9 molecule(s) without each label of y, the first: mine.csv row 2\n',
        '86 molecules, 83 of them used',
        '3 molecule(s) could not be used, all listed in result/failed.csv',
        "mine.csv row 92: 'C1CC': RDKit cannot parse it",
        "mine.csv row 93: '[Og]': atomic number 118",
        'Duplicates: 1 molecule(s) have the SMILES of an earlier one, the first: mine.csv row 96: '
        "'OC'; test molecules may be among those of the training\n",
        'Batches of all 58 training molecules\n',
    ):
        assert line in printed
    failed = rows(tmp_path / 'result' / 'failed.csv')
    assert [row['row'] for row in failed] == ['mine.csv row %d' % i for i in (92, 93, 94)]
    log = json.loads((tmp_path / 'result' / 'log').read_text())
    assert [(entry['epoch'], entry['iteration']) for entry in log] == [(1, 1), (2, 2)]
    mae = json.loads((tmp_path / 'result' / 'result.json').read_text())['test']['MAE']['y']
    assert 'MAE of y: %.6g ' % mae in run('predict_own.py', cwd=tmp_path)
    run('predict_own.py', '--data', 'mine.csv', '--force', cwd=tmp_path)  # labels are not needed
    assert len(rows(tmp_path / 'result' / 'predictions.csv')) == 95


def test_labels_from_which_nothing_is_learned(tmp_path):
    words = '--task', 'classification'
    nothing = ''.join('%s,\n' % smiles for smiles in CHAINS)
    message = train_on(tmp_path, 'smiles,y\n' + nothing, *words, status=1)
    assert message == 'error: mine.csv: no molecule has a label'
    some = ''.join('%s,%d\n' % (smiles, 'N' in smiles) for smiles in CHAINS)
    printed = train_on(tmp_path, 'smiles,y\n' + nothing + some, *words, '--skip-missing')
    assert 'Skipped 90 molecule(s) without any label of y' in printed and '90 molecules' in printed
    constant = 'smiles,y\n' + ''.join('%s,3\n' % smiles for smiles in CHAINS)
    printed = train_on(tmp_path, constant, '--out', 'constant')
    assert 'All training molecules have one value of y: nothing to learn\n' in printed
    assert 'std was 0' not in printed


def test_earlier_predictions_are_not_replaced(trained, tmp_path, error):
    predict = 'predict_own.py', '--in-dir', trained / 'result', '--data'
    first, second = tmp_path / 'first.csv', tmp_path / 'second.csv'
    run(*predict, trained / 'mine.csv', '--out', first)
    table = rows(first)
    assert list(table[0]) == ['smiles', 'name', 'y predicted', 'y true'] and len(table) == 90
    assert all(row['name'] == 'm%d' % float(row['y true']) for row in table)
    message = error(*predict, first, '--out', second)
    assert "a column 'y predicted', which the predictions would replace; rename it" in message
    for path in (first, trained / 'mine.csv', trained / 'result' / 'model.npz'):
        before = path.read_bytes()
        message = error(*predict, first, '--out', path)
        assert message.startswith('error: --out: %s exists; expected a new file' % path)
        assert path.read_bytes() == before
    failed = tmp_path / 'second_failed.csv'
    failed.write_text('')
    message = error(*predict, trained / 'mine.csv', '--out', second)
    assert message.startswith('error: --out: %s exists' % failed)
    failed.unlink()
    text = first.read_text().replace('y predicted', 'before')
    first.write_text(text)
    run(*predict, first, '--out', second)  # no label y here: nothing replaces y true
    assert list(rows(second)[0]) == ['smiles', 'name', 'before', 'y true', 'y predicted']
    first.write_text(text.replace('y true', 'y'))
    run(*predict, first, '--out', second, '--force')
    assert list(rows(second)[0]) == ['smiles', 'name', 'before', 'y predicted', 'y true']


def test_predictions_into_a_pipe(folder):
    (folder / 'new.csv').write_text('smiles,name\nCCO,a\nC1,b\n')
    os.mkfifo(folder / 'pipe')
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / 'pipe').read_text()))
    reader.start()
    run('predict_own.py', '--data', 'new.csv', '-o', 'pipe', cwd=folder)
    reader.join()
    assert read[0].startswith('smiles,name,y predicted\nCCO,a,')
    table = rows(folder / 'result' / 'predictions_failed.csv')
    assert [row['smiles'] for row in table] == ['C1']
    message = error_of(
        OWN / 'predict_own.py', '--data', 'new.csv', '-o', '/dev/full', '--force', cwd=folder
    )
    assert message == 'error: cannot write /dev/full: No space left on device'


def test_pictures(common, monkeypatch):
    from common import pictures

    figures = []

    def save(self, *_, **__):
        return figures.append(self)

    monkeypatch.setattr('matplotlib.figure.Figure.savefig', save)
    of_validation = {'validation/main/loss': 2, 'validation/main/roc_auc': 0.6}
    entry = {'epoch': 1, 'main/loss': 1.0, **of_validation}
    panels = ('loss', 'cross entropy'), ('roc_auc', 'ROC-AUC')
    pictures.learning_curve([entry], 'path', 'title', panels)
    left, right = figures[0].axes
    colors = [{line.get_label(): line.get_color() for line in ax.lines} for ax in (left, right)]
    assert colors[0] == {'training': 'C0', 'validation': 'C1'} and colors[1] == {'validation': 'C1'}
    assert all(tick == int(tick) for tick in left.get_xticks())
    values = numpy.arange(12.0).reshape(6, 2)
    pictures.fit('path', values, values + 1, ['a', 'b (eV)'])
    assert [ax.get_title() for ax in figures[1].axes] == ['a', 'b (eV)']
