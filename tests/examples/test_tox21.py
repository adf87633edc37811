"""The scripts of examples/tox21, run as a user runs them."""

import csv
import gzip
import json
import os

from chainer.dataset import download
import numpy
import pytest
from sklearn.metrics import roc_auc_score

from tests.examples.scripts import arrays, error_of, EXAMPLES, imported, rows, run_here

TOX21 = EXAMPLES / 'tox21'
QUICK = ['--unit-num', '8', '--conv-layers', '2', '--batchsize', '16']
# Path of MoleculeNet's file, if given: it is not part of the project.
REAL = os.environ.get('TOX21_CSV')
CHAINS = ['C' * n for n in range(1, 13)]


def run(script, *arguments, **options):
    return run_here(TOX21 / script, *arguments, **options)


@pytest.fixture(scope='module')
def tox21_data():
    return imported(TOX21, 'train_tox21')


@pytest.fixture(scope='module')
def tasks(tox21_data):
    from common import tasks

    return tasks


@pytest.fixture(scope='module')
def data_file(tox21_data, tmp_path_factory):
    """A set in the form of MoleculeNet's: nitrogen makes active, a third of the labels is blank."""
    rng = numpy.random.RandomState(0)
    path = tmp_path_factory.mktemp('data') / 'tox21.csv.gz'
    lines = [','.join([*tox21_data.ASSAYS, 'mol_id', 'smiles'])]
    for i in range(200):
        smiles = CHAINS[rng.randint(12)] + rng.choice(['N', 'O', 'F', 'Cl', ''])
        kinds = ['' if rng.uniform() < 1 / 3 else str(int('N' in smiles)) for _ in range(12)]
        lines.append(','.join([*kinds, 'TOX%d' % i, smiles]))
    lines.append(','.join(['0'] * 12 + ['TOX200', 'C1CC']))
    with gzip.open(path, 'wt') as f:
        f.write('\n'.join(lines) + '\n')
    return path


@pytest.fixture(scope='module')
def trained(data_file, tmp_path_factory):
    out = tmp_path_factory.mktemp('trained')
    return out, run('train_tox21.py', '--data', data_file, '--epoch', '3', '--out', out, *QUICK)


def test_roc_auc_is_that_of_scikit_learn_without_missing_labels(tasks):
    rng = numpy.random.RandomState(1)
    labels = rng.randint(-1, 2, (501, 3)).astype('f')
    labels[::7] = numpy.nan
    scores = (labels + rng.normal(size=labels.shape)).astype('f').round(1)  # with ties
    scores[::7] = 0
    expected = [roc_auc_score(t[t >= 0], y[t >= 0]) for t, y in zip(labels.T, scores.T)]
    numpy.testing.assert_allclose(tasks.roc_aucs(labels, scores), expected, rtol=1e-13)


def test_roc_auc_of_one_class_or_of_nan_is_undefined_and_left_out_of_the_mean(tasks):
    labels = numpy.array([[1, 1, -1, 1], [0, 1, -1, 0], [0, -1, -1, 0]])
    scores = numpy.array([[3.0, 1, 1, numpy.nan], [1, 2, 2, 1], [2, 3, 3, 1]])
    areas = tasks.roc_aucs(labels, scores)
    assert areas[0] == 1 and numpy.isnan(areas[1:]).all()
    assert tasks.mean_of_known(areas) == 1
    assert numpy.isnan(tasks.mean_of_known(areas[1:]))


def test_validation_reports_loss_and_roc_auc_of_all_molecules(tasks):
    import chainer
    from chainer_chemistry.models.prediction import Classifier

    rng = numpy.random.RandomState(0)
    scores, labels = rng.normal(size=(9, 2)).astype('f'), rng.randint(-1, 2, (9, 2)).astype('i')
    loss = chainer.functions.sigmoid_cross_entropy
    model = Classifier(chainer.Sequential(chainer.functions.identity), lossfun=loss)
    evaluator = tasks.Classification(['a', 'b']).evaluator(
        chainer.iterators.SerialIterator(list(zip(scores, labels)), 4, repeat=False, shuffle=False),
        model,
        device='@numpy',
        converter=chainer.dataset.concat_examples,
    )
    evaluator.name = 'validation'
    with chainer.Reporter():
        found = evaluator()
    expected = {'loss': model.lossfun(scores, labels).item()}
    expected['roc_auc'] = tasks.roc_aucs(labels, scores).mean()
    expected = {'validation/main/' + name: value for name, value in expected.items()}
    assert found == pytest.approx(expected)


def test_missing_labels_change_neither_loss_nor_gradient(tasks):
    task = tasks.Classification(['a', 'b'])
    model = task.build({'method': 'rsgcn', 'unit_num': 4, 'conv_layers': 1}, True)
    y = numpy.array([[1.0, -2], [3, 4]], 'f')
    full = model.lossfun(y[:, :1], numpy.array([[1], [0]], 'i'))
    masked = model.lossfun(y, numpy.array([[1, -1], [0, -1]], 'i'))
    assert float(full.array) == pytest.approx(float(masked.array))


def test_training_learns_and_reports(trained, tox21_data):
    out, text = trained
    assert '201 molecules, 200 of them used' in text
    assert '1 molecule(s) could not be used' in text
    assert "tox21.csv.gz row 202: 'C1CC': RDKit cannot parse it" in text
    assert 'Split: 140 training, 30 validation, 30 test' in text
    assert [row['smiles'] for row in rows(out / 'failed.csv')] == ['C1CC']
    assert (out / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')
    result = json.loads((out / 'result.json').read_text())
    assert tuple(result['test']['ROC-AUC']) == tox21_data.ASSAYS
    known = [area for area in result['test']['ROC-AUC'].values() if area is not None]
    assert result['test']['mean ROC-AUC'] == pytest.approx(numpy.mean(known))
    assert '\nmean ROC-AUC: %.4f\n' % result['test']['mean ROC-AUC'] in text
    assert 'Time a step: ' in text and 'Peak memory: host ' in text
    assert result['milliseconds a step']['steps'] == result['steps'] - 2 == 25


@pytest.mark.slow
def test_enough_training_separates_the_classes(data_file, tmp_path):
    options = '--epoch 25 --method gin --unit-num 16 --conv-layers 2 --batchsize 8'.split()
    run('train_tox21.py', '--data', data_file, '--out', tmp_path, *options)
    assert json.loads((tmp_path / 'result.json').read_text())['test']['mean ROC-AUC'] > 0.9


def test_prediction_repeats_the_roc_auc_of_the_training(trained, tmp_path):
    predict = 'predict_tox21.py', '--in-dir', trained[0], '--out', tmp_path / 'p.csv'
    area = json.loads((trained[0] / 'result.json').read_text())['test']['mean ROC-AUC']
    assert 'mean ROC-AUC: %.4f' % area in run(*predict)
    table = rows(tmp_path / 'p.csv')
    assert len(table) == 30
    probabilities = [float(row['NR-AR probability']) for row in table]
    assert 0 < min(probabilities) < max(probabilities) < 1
    assert {row['NR-AR true'] for row in table} == {'', '0', '1'}
    # The best model is that of the epoch with the largest ROC-AUC.
    log = json.loads((trained[0] / 'log').read_text())
    areas = [entry['validation/main/roc_auc'] for entry in log]
    last, best = (arrays(trained[0] / name) for name in ('model.npz', 'best_model.npz'))
    is_last = all((last[name] == best[name]).all() for name in last if last[name].dtype != object)
    assert is_last == (areas[-1] > max(areas[:-1]))
    assert 'mean ROC-AUC: ' in run(*predict, '--model', 'best', '--force')


def test_labels_of_one_class_have_no_area(trained, tmp_path):
    (tmp_path / 'mine.csv').write_text('smiles,NR-ER\nCCO,1\nC1CC,\nCCN,\n')
    options = '--in-dir', trained[0], '--data', tmp_path / 'mine.csv', '--out', tmp_path / 'a.csv'
    text = run('predict_tox21.py', *options)
    assert 'ROC-AUC of NR-ER: nan (1 molecules, 1 positive)' in text
    assert 'NR-AR true' not in rows(tmp_path / 'a.csv')[0]


@pytest.mark.parametrize('calculator', ('gradient', 'integrated', 'occlusion'))
def test_saliency_of_each_atom(trained, tmp_path, calculator):
    out, _ = trained
    smiles = 'CCO', 'C1CC', 'C[C@H](N)c1ccccc1'
    options = '--in-dir', out, '--assay', 'NR-ER', '--calculator', calculator
    run('explain_tox21.py', *options, '--out', tmp_path / 'a', '--smiles', *smiles)
    table = rows(tmp_path / 'a' / 'saliency.csv')
    assert [row['molecule'] for row in table] == 3 * ['1'] + 9 * ['3']
    assert sorted(row['element'] for row in table[3:]) == 8 * ['C'] + ['N']
    assert any(float(row['saliency']) for row in table)
    names = {path.name for path in (tmp_path / 'a').iterdir()}
    assert names == {'1.svg', '1.png', '3.svg', '3.png', 'saliency.csv', 'failed.csv'}
    text = (tmp_path / 'a' / '1.svg').read_text()
    assert '<svg' in text and text.count("class='legend'") > 20  # probability, scale, colours
    assert (tmp_path / 'a' / '3.png').read_bytes()[1:4] == b'PNG'
    error = error_of(TOX21 / 'explain_tox21.py', *options, '--out', out, '--smiles', 'CCO')
    assert 'is not empty; expected a new one' in error and (out / 'failed.csv').exists()


@pytest.mark.parametrize('calculator', ('gradient', 'occlusion'))
def test_saliency_of_a_super_node_and_of_single_atoms(data_file, tmp_path, calculator):
    """A batch of methane has as many rows as molecules."""
    options = '--method', 'ggnn_gwm', '--layout', 'packed', '--epoch', '1'
    run('train_tox21.py', '--data', data_file, '--out', tmp_path, *options, *QUICK)
    options = '--in-dir', tmp_path, '--calculator', calculator, '--batchsize', '1'
    run('explain_tox21.py', *options, '--smiles', 'CCO', 'C')
    table = rows(tmp_path / 'saliency' / 'saliency.csv')
    assert [row['molecule'] for row in table] == 3 * ['1'] + ['2']
    assert any(float(row['saliency']) for row in table)


def test_screening_repeats_the_predictions(trained, tmp_path):
    out, _ = trained
    path = tmp_path / 'molecules.smi'
    path.write_bytes(b'\xef\xbb\xbfCCO ethanol\nC1CC\n\nCCN\t2\r\n[Og]\nC\xe4C\nCCO')
    text = run('screen_tox21.py', path, '--in-dir', out, '--out', tmp_path / 'a.csv', '-b', '2')
    assert text == ''
    table = sorted(rows(tmp_path / 'a.csv'), key=lambda row: int(row['line']))
    assert [row['line'] for row in table] == list('1234567')
    assert [row['smiles'] for row in table] == ['CCO', 'C1CC', '', 'CCN', '[Og]', 'C\ufffdC', 'CCO']
    wrong, heavy = 'RDKit cannot parse it', 'atomic number 118, the models support those below 117'
    assert [row['error'] for row in table] == ['', wrong, 'no atoms', '', heavy, wrong, '']
    run('predict_tox21.py', '--in-dir', out, '--out', tmp_path / 'b.csv', '--smiles', 'CCO', 'CCN')
    ethanol, amine = rows(tmp_path / 'b.csv')
    for row, expected in zip(table, (ethanol, None, None, amine, None, None, ethanol)):
        for name in list(ethanol)[1:]:
            if expected is None:
                assert row[name] == ''
            else:
                assert float(row[name]) == pytest.approx(float(expected[name]), rel=1e-5)


@pytest.mark.slow
def test_screening_of_a_stream_in_several_processes(trained, tmp_path):
    path = tmp_path / 'molecules.smi'
    path.write_text('CCO\nC1CC\nCCCN\n' * 500)
    text = run('screen_tox21.py', path, '--in-dir', trained[0], '-b', '100')
    table = list(csv.DictReader(text.splitlines()))
    assert sorted(int(row['line']) for row in table) == list(range(1, 1501))
    assert all((row['smiles'] == 'C1CC') == bool(row['error']) for row in table)
    good = [row for row in table if not row['error']]
    assert [int(row['line']) % 3 for row in good] == [1, 0] * 500
    assert [row['smiles'] for row in good] == ['CCO', 'CCCN'] * 500
    values = numpy.array([float(row['NR-AR probability']) for row in good]).reshape(500, 2)
    numpy.testing.assert_allclose(values, values[:1].repeat(500, axis=0), rtol=1e-5)


def test_screening_ends_quietly_when_its_reader_closes_the_pipe(tox21_data, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, 'w') as pipe, pytest.raises(SystemExit) as end:
        monkeypatch.setattr('sys.stdout', pipe)
        with imported(TOX21, 'screen_tox21').written_to(None) as file:
            file.write('a row')
    assert end.value.code == 1


def test_screening_of_compressed_files_and_standard_input(tox21_data, tmp_path, monkeypatch):
    lines = ['CCO\n', 'CCN name, and more\n']
    plain, packed = tmp_path / 'a.smi', tmp_path / 'b.smi.gz'
    plain.write_text(''.join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    screen = imported(TOX21, 'screen_tox21')
    for path in (plain, packed):
        with screen.read_from(path) as file:
            assert list(file) == lines
    for name in (None, '-'):
        monkeypatch.setattr('sys.stdin', open(plain))
        with screen.read_from(name) as file:
            assert list(file) == lines


TWICE = gzip.compress(gzip.compress(b'CCO\n', mtime=0), mtime=0)  # as every process has it
TABLES = b'smiles,NR-AR\nCCO,1\n', b'smiles;name\nCCO;ethanol\n'


@pytest.mark.parametrize('content', [*TABLES, 'CCO\n'.encode('utf-16'), TWICE])
def test_screening_of_what_is_no_list_of_smiles(tox21_data, tmp_path, content):
    (tmp_path / 'file').write_bytes(content)
    screen = imported(TOX21, 'screen_tox21')
    with pytest.raises(ValueError, match='file: expected one SMILES a line, got'):
        screen.read_from(tmp_path / 'file')


def test_screening_says_what_it_cannot_read_or_write(trained, tmp_path):
    path = tmp_path / 'molecules.smi'
    path.write_text('CCO\n')
    for arguments, words in (
        ([tmp_path / 'none.smi'], 'error: cannot read'),
        ([path, '--out', path], 'exists; expected a new file, or --force to replace it'),
        ([path, '--out', tmp_path], 'error: --out: cannot write'),
        ([path, '--out', '/dev/full'], 'error: cannot write /dev/full: No space left on device'),
    ):
        assert words in error_of(TOX21 / 'screen_tox21.py', '--in-dir', trained[0], *arguments)
    assert path.read_text() == 'CCO\n'


def test_upstreams_cache_is_used_if_it_has_the_file(tox21_data, data_file, tmp_path, monkeypatch):
    folder = tmp_path / 'pfnet' / 'chainer' / 'molnet'
    folder.mkdir(parents=True)
    (folder / 'tox21.csv.gz').write_bytes(data_file.read_bytes())
    monkeypatch.setattr(download, '_dataset_root', str(tmp_path))
    description, table = tox21_data.read('download')
    assert "Tox21 from Chainer Chemistry's download" in description and len(table.smiles) == 201


def test_a_failing_download_says_where_to_put_the_file(tox21_data, monkeypatch, tmp_path):
    from chainer_chemistry.datasets.molnet import molnet

    def fail(*args, **kwargs):
        raise OSError('no route to host')

    monkeypatch.setattr(molnet, '_get_molnet_filepath', lambda name: str(tmp_path / name))
    monkeypatch.setattr(molnet, 'download_dataset', fail)
    with pytest.raises(tox21_data.DataError) as error:
        tox21_data.read('download')
    assert 'no route to host' in str(error.value) and '--data' in str(error.value)
    assert str(tmp_path / 'tox21.csv.gz') in str(error.value)


@pytest.mark.parametrize('value', ['2', 'yes', '-1', '0.5'])
def test_other_labels_are_refused(tox21_data, tmp_path, value):
    path = tmp_path / 'mine.csv'
    path.write_text('smiles,%s\nCC%s\n' % (','.join(tox21_data.ASSAYS), ',' + value + ',1' * 11))
    with pytest.raises(tox21_data.DataError) as error:
        tox21_data.read(str(path))
    message = "mine.csv row 2: target NR-AR is '%s', expected 0, 1 or nothing" % value
    assert message in str(error.value)


@pytest.mark.skipif(not REAL, reason="TOX21_CSV names no file: MoleculeNet's tox21.csv.gz")
def test_real_tox21(tmp_path):
    words = '--epoch', '1', '--out', tmp_path, '--batchsize', '128'
    text = run('train_tox21.py', '--data', REAL, *words)
    assert '8014 molecules, 8006 of them used' in text
    assert '8 molecule(s) could not be used' in text
