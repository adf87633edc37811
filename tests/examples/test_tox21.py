"""Scripts of examples/tox21, run as users run them."""

import csv
import gzip
import json
import os
import subprocess

from chainer.dataset import download
import numpy
import pytest
from sklearn.metrics import roc_auc_score

from chainer_bspmm.dataset import smiles, workers
from tests.examples.scripts import arrays, error_of, EXAMPLES, imported, rows, run_apart, run_here

TOX21 = EXAMPLES / 'tox21'
QUICK = ['--unit-num', '8', '--conv-layers', '2', '--batchsize', '16']
# Path of MoleculeNet's file, which is not part of the project.
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
    """File like MoleculeNet's: molecules with nitrogen are active, a third of labels is blank."""
    rng = numpy.random.RandomState(0)
    path = tmp_path_factory.mktemp('data') / 'tox21.csv.gz'
    lines = [','.join([*tox21_data.ASSAYS, 'mol_id', 'smiles'])]
    for i in range(200):
        smiles = CHAINS[rng.randint(12)] + rng.choice(['N', 'O', 'F', 'Cl', ''])
        labels = [
            '' if rng.uniform() < 1 / 3 else str(int('N' in smiles)) for _ in tox21_data.ASSAYS
        ]
        lines.append(','.join([*labels, 'TOX%d' % i, smiles]))
    lines.append(','.join(['0'] * 12 + ['TOX200', 'C1CC']))
    with gzip.open(path, 'wt') as f:
        f.write('\n'.join(lines) + '\n')
    return path


@pytest.fixture(scope='module')
def trained(data_file, tmp_path_factory):
    """Output folder and printed text of a short training."""
    out = tmp_path_factory.mktemp('trained')
    return out, run('train_tox21.py', '--data', data_file, '--epoch', '3', '--out', out, *QUICK)


def test_roc_auc_is_that_of_scikit_learn_without_missing_labels(tasks):
    rng = numpy.random.RandomState(1)
    labels = rng.randint(-1, 2, (501, 3)).astype('f')
    labels[::7] = numpy.nan
    scores = (labels + rng.normal(size=labels.shape)).astype('f').round(1)  # rounding makes ties
    scores[::7] = 0
    expected = [roc_auc_score(t[t >= 0], y[t >= 0]) for t, y in zip(labels.T, scores.T)]
    numpy.testing.assert_allclose(tasks.roc_aucs(labels, scores), expected, rtol=1e-13)


def test_roc_auc_of_one_class_or_of_nan_is_undefined(tasks):
    labels = numpy.array([[1, 1, -1, 1], [0, 1, -1, 0], [0, -1, -1, 0]])
    scores = numpy.array([[3.0, 1, 1, numpy.nan], [1, 2, 2, 1], [2, 3, 3, 1]])
    areas = tasks.roc_aucs(labels, scores)
    assert areas[0] == 1
    assert numpy.isnan(areas[1:]).all()


def test_undefined_areas_are_left_out_of_the_mean(tasks):
    labels = numpy.array([[1, 1, 1], [0, 1, 0], [0, 1, 1]])
    scores = numpy.array([[3.0, 1, 2], [1, 2, 1], [2, 3, 0]])
    _, found = tasks.Classification(['a', 'b', 'c']).report(labels, scores)
    assert (found['ROC-AUC']['a'], found['ROC-AUC']['c'], found['mean ROC-AUC']) == (1, 0.5, 0.75)


def test_the_mean_of_undefined_areas_is_undefined(tasks):
    _, found = tasks.Classification(['a']).report(numpy.ones((2, 1)), numpy.ones((2, 1)))
    assert numpy.isnan(found['mean ROC-AUC'])


def test_validation_reports_the_metrics_of_all_molecules(tasks):
    import chainer
    from chainer_chemistry.models.prediction import Classifier

    rng = numpy.random.RandomState(0)
    scores = rng.normal(size=(9, 2)).astype('f')
    labels = rng.randint(-1, 2, (9, 2)).astype('i')
    model = Classifier(
        chainer.Sequential(chainer.functions.identity),
        lossfun=chainer.functions.sigmoid_cross_entropy,
    )
    evaluator = tasks.Classification(['a', 'b']).evaluator(
        chainer.iterators.SerialIterator(list(zip(scores, labels)), 4, repeat=False, shuffle=False),
        model,
        device='@numpy',
        converter=chainer.dataset.concat_examples,
    )
    evaluator.name = 'validation'
    with chainer.Reporter():
        found = evaluator()
    assert found == pytest.approx(
        {
            'validation/main/loss': model.lossfun(scores, labels).item(),
            'validation/main/roc_auc': tasks.roc_aucs(labels, scores).mean(),
        }
    )


def test_missing_labels_change_neither_loss_nor_gradient(tasks):
    import chainer

    task = tasks.Classification(['a', 'b'])
    model = task.build({'method': 'rsgcn', 'unit_num': 4, 'conv_layers': 1}, True)
    scores = numpy.array([[1.0, -2], [3, 4]], 'f')
    known = chainer.Variable(scores[:, :1])
    both = chainer.Variable(scores)
    loss = model.lossfun(known, numpy.array([[1], [0]], 'i'))
    masked = model.lossfun(both, numpy.array([[1, -1], [0, -1]], 'i'))
    loss.backward()
    masked.backward()
    assert float(masked.array) == pytest.approx(float(loss.array))
    numpy.testing.assert_allclose(both.grad[:, :1], known.grad, rtol=1e-6)
    assert not both.grad[:, 1].any()


def test_training_prints_its_data(trained, data_file):
    _, text = trained
    assert 'Data: %s: 201 molecules, 200 of them used\n' % data_file in text
    assert 'Split: 140 training, 30 validation, 30 test\n' in text


def test_training_lists_molecules_that_cannot_be_used(trained):
    out, text = trained
    failed = out / 'failed.csv'
    assert '1 molecule(s) could not be used, all listed in %s\n' % failed in text
    assert "  tox21.csv.gz row 202: 'C1CC': RDKit cannot parse it\n" in text
    assert [row['smiles'] for row in rows(failed)] == ['C1CC']


def test_training_draws_its_learning_curve(trained):
    assert (trained[0] / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')


def test_training_reports_the_roc_auc_of_each_assay(trained, tox21_data):
    out, text = trained
    test = json.loads((out / 'result.json').read_text())['test']
    assert tuple(test['ROC-AUC']) == tox21_data.ASSAYS
    known = [area for area in test['ROC-AUC'].values() if area is not None]
    assert test['mean ROC-AUC'] == pytest.approx(numpy.mean(known))
    assert '\nmean ROC-AUC: %.4f\n' % test['mean ROC-AUC'] in text


def test_training_reports_its_cost(trained):
    out, text = trained
    step = json.loads((out / 'result.json').read_text())['milliseconds a step']
    assert step['epochs'] == 2
    assert 'Time a step: %.2f ms, median of 2 epochs ' % step['median'] in text


@pytest.mark.slow
def test_enough_training_separates_the_classes(data_file, tmp_path):
    options = '--epoch 25 --method gin --unit-num 16 --conv-layers 2 --batchsize 8'.split()
    run('train_tox21.py', '--data', data_file, '--out', tmp_path, *options)
    assert json.loads((tmp_path / 'result.json').read_text())['test']['mean ROC-AUC'] > 0.9


@pytest.fixture
def predict(trained, tmp_path, monkeypatch):
    """Function that predicts with the trained model in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: run('predict_tox21.py', '--in-dir', trained[0], *words)


def test_prediction_repeats_the_roc_auc_of_the_training(trained, predict):
    area = json.loads((trained[0] / 'result.json').read_text())['test']['mean ROC-AUC']
    assert '\nmean ROC-AUC: %.4f\n' % area in predict('--out', 'p.csv')


def test_predictions_are_probabilities_beside_the_truth(predict, tmp_path):
    predict('--out', 'p.csv')
    table = rows(tmp_path / 'p.csv')
    assert len(table) == 30
    probabilities = [float(row['NR-AR probability']) for row in table]
    assert 0 < min(probabilities) < max(probabilities) < 1
    assert {row['NR-AR'] for row in table} == {'', '0', '1'}


def test_the_best_model_is_that_of_the_epoch_with_the_largest_roc_auc(trained):
    out, _ = trained
    areas = [entry['validation/main/roc_auc'] for entry in json.loads((out / 'log').read_text())]
    last = arrays(out / 'model.npz')
    best = arrays(out / 'best_model.npz')
    is_last = all((last[name] == best[name]).all() for name in last if last[name].dtype != object)
    assert is_last == (areas[-1] > max(areas[:-1]))


def test_the_best_model_predicts(predict):
    assert '\nmean ROC-AUC: ' in predict('--model', 'best', '--out', 'p.csv')


@pytest.fixture
def from_file(predict, tmp_path):
    """Printed text and rows of a prediction for a file with one label."""
    (tmp_path / 'mine.csv').write_text('smiles,NR-ER\nCCO,1\nC1CC,\nCCN,\n')
    text = predict('--data', 'mine.csv', '--out', 'a.csv')
    return text, rows(tmp_path / 'a.csv')


def test_a_prediction_has_a_row_for_every_molecule_of_a_file(from_file):
    text, table = from_file
    line = "1 molecule(s) could not be used\n  mine.csv row 3: 'C1CC': RDKit cannot parse it\n"
    assert line in text
    assert [row['smiles'] for row in table] == ['CCO', 'C1CC', 'CCN']
    assert table[1]['NR-ER probability'] == ''


def test_columns_of_a_file_stay_before_its_predictions(from_file, tox21_data):
    _, table = from_file
    titles = ['%s probability' % name for name in tox21_data.ASSAYS]
    assert list(table[0]) == ['smiles', 'NR-ER', *titles, 'not predicted']


def test_labels_of_one_class_have_no_area(from_file):
    text, _ = from_file
    assert 'ROC-AUC of NR-ER: nan (1 molecules, 1 positive)\n' in text


def test_predictions_of_smiles_are_those_of_a_file(from_file, predict, tmp_path):
    _, table = from_file
    predict('--out', 'b.csv', '--smiles', 'OCC')
    (row,) = rows(tmp_path / 'b.csv')
    expected = float(table[0]['NR-ER probability'])
    assert float(row['NR-ER probability']) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize('calculator', ('gradient', 'integrated', 'occlusion'))
def test_saliency_of_each_atom(trained, tmp_path, calculator):
    run(
        'explain_tox21.py',
        *('--in-dir', trained[0]),
        *('--assay', 'NR-ER'),
        *('--calculator', calculator),
        *('--out', tmp_path / 'a'),
        *('--smiles', 'CCO', 'C1CC', 'C[C@H](N)c1ccccc1'),
    )
    table = rows(tmp_path / 'a' / 'saliency.csv')
    assert [row['molecule'] for row in table] == 3 * ['1'] + 9 * ['3']
    assert sorted(row['element'] for row in table[3:]) == 8 * ['C'] + ['N']
    assert any(float(row['saliency']) for row in table)
    names = {path.name for path in (tmp_path / 'a').iterdir()}
    assert names == {'1.svg', '1.png', '3.svg', '3.png', 'saliency.csv', 'failed.csv'}
    text = (tmp_path / 'a' / '1.svg').read_text()
    assert '<svg' in text and text.count("class='legend'") > 20  # probability, scale, colours
    assert (tmp_path / 'a' / '3.png').read_bytes()[1:4] == b'PNG'


def test_saliency_of_no_usable_molecule_is_refused(trained, tmp_path):
    words = ['--in-dir', trained[0], '--out', tmp_path / 'a', '--smiles', 'C1CC']
    assert error_of(TOX21 / 'explain_tox21.py', *words) == (
        'error: none of the molecules can be used, so nothing is predicted'
    )
    assert not (tmp_path / 'a').exists()


def test_saliency_replaces_no_folder(trained):
    out, _ = trained
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    script = TOX21 / 'explain_tox21.py'
    assert error_of(script, '--in-dir', out, '--out', out, '--smiles', 'CCO') == (
        'error: --out: the folder %s is not empty; expected a new one, or --force to write into it'
        % out
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_saliency_replaces_no_file(trained, tmp_path):
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'link').symlink_to('nothing')
    for name, found in ('file', 'the file file'), ('link', 'link, a link that leads nowhere'):
        script = TOX21 / 'explain_tox21.py'
        words = ['--in-dir', trained[0], '--out', name, '--smiles', 'CCO']
        assert error_of(script, *words, cwd=tmp_path) == (
            'error: --out: expected a folder, got ' + found
        )


@pytest.fixture(scope='module')
def trained_with_super_nodes(data_file, tmp_path_factory):
    """Output folder of a training of a model with a super node for each molecule."""
    out = tmp_path_factory.mktemp('super')
    method = ['--method', 'ggnn_gwm', '--layout', 'packed', '--epoch', '1']
    run('train_tox21.py', '--data', data_file, '--out', out, *method, *QUICK)
    return out


@pytest.mark.parametrize('calculator', ('gradient', 'occlusion'))
def test_saliency_beside_super_nodes(trained_with_super_nodes, tmp_path, calculator):
    """A batch of methane has as many rows as molecules, so super nodes look like rows."""
    run(
        'explain_tox21.py',
        *('--in-dir', trained_with_super_nodes),
        *('--calculator', calculator),
        *('--batchsize', '1'),
        *('--out', tmp_path / 'saliency'),
        *('--smiles', 'CCO', 'C'),
    )
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
    assert [row['name'] for row in table] == ['ethanol', '', '', '2', '', '', '']
    assert [row['error'] for row in table] == [
        '',
        'RDKit cannot parse it',
        'no atoms',
        '',
        'atomic number 118, the models support those below 117',
        'it has a character that is not ASCII',
        '',
    ]
    run('predict_tox21.py', '--in-dir', out, '--out', tmp_path / 'b.csv', '--smiles', 'CCO', 'CCN')
    ethanol, amine = rows(tmp_path / 'b.csv')
    for row, expected in zip(table, (ethanol, None, None, amine, None, None, ethanol)):
        for name in list(ethanol)[1:]:
            if expected is None:
                assert row[name] == ''
            else:
                assert float(row[name]) == pytest.approx(float(expected[name]), rel=1e-5)


def test_a_name_of_several_words_keeps_its_blanks(trained, tmp_path):
    path = tmp_path / 'molecules.smi'
    path.write_text('CCO \t ethyl alcohol, "pure"  \n  CCN amine\n')
    text = run('screen_tox21.py', path, '--in-dir', trained[0], '--out', '-', cwd=tmp_path)
    table = list(csv.DictReader(text.splitlines()))
    assert [(row['smiles'], row['name']) for row in table] == [
        ('CCO', 'ethyl alcohol, "pure"'),
        ('CCN', 'amine'),
    ]
    assert not (tmp_path / '-').exists()


@pytest.mark.parametrize('words', [[], ['--force']], ids=['new', 'force'])
def test_screening_continues_a_file_that_the_process_has_open(trained, tmp_path, words):
    (tmp_path / 'list.smi').write_text('CCO\n')
    link = tmp_path / 'link'
    with open(tmp_path / 'own', 'w') as file:
        print('before', file=file, flush=True)
        link.symlink_to('/proc/self/fd/%d' % file.fileno())
        screen = ['screen_tox21.py', 'list.smi', '--in-dir', trained[0], '--out', 'link', *words]
        run(*screen, cwd=tmp_path)
        assert link.is_symlink()
    before, header, ethanol = (tmp_path / 'own').read_text().splitlines()
    assert before == 'before'
    assert header.startswith('line,smiles,name,error,') and ethanol.startswith('1,CCO,,,')


def test_screening_replaces_a_link_and_does_not_follow_it(trained, tmp_path):
    (tmp_path / 'list.smi').write_text('CCO\n')
    (tmp_path / 'link').symlink_to('list.smi')
    run(
        'screen_tox21.py',
        'list.smi',
        *('--in-dir', trained[0]),
        *('--out', 'link'),
        '--force',
        cwd=tmp_path,
    )
    assert (tmp_path / 'list.smi').read_text() == 'CCO\n'
    assert not (tmp_path / 'link').is_symlink() and len(rows(tmp_path / 'link')) == 1


@pytest.mark.parametrize('redirect', [False, True])
@pytest.mark.parametrize('out', ['list.smi', 'hard link'])
def test_a_screening_does_not_overwrite_its_list(trained, tmp_path, redirect, out):
    text = 'CCO mol\n' * 20000  # more than is read at once
    (tmp_path / 'list.smi').write_text(text)
    (tmp_path / 'hard link').hardlink_to(tmp_path / 'list.smi')
    words = ['-' if redirect else 'list.smi', '--in-dir', trained[0], '--out', out, '--force']
    with open(tmp_path / 'list.smi') as file:
        done = run_apart(
            TOX21 / 'screen_tox21.py',
            *words,
            cwd=tmp_path,
            stdin=file if redirect else subprocess.DEVNULL,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == 'error: --out: %s is the list to screen; expected another file\n' % out
    assert (tmp_path / 'list.smi').read_text() == text


@pytest.mark.parametrize('out', ['-', '/dev/fd/1', 'link'])
def test_a_screening_appended_to_its_list_does_not_go_on_forever(trained, tmp_path, out):
    (tmp_path / 'list.smi').write_text('CCO\n')
    (tmp_path / 'link').symlink_to('/proc/self/fd/1')
    words = ['list.smi', '--in-dir', trained[0], '--out', out]
    with open(tmp_path / 'list.smi', 'a') as file:
        done = run_apart(
            TOX21 / 'screen_tox21.py', *words, cwd=tmp_path, stdout=file, text=True, timeout=300
        )
    message = 'error: --out: standard output is the list to screen; expected another file\n'
    assert done.stderr == message and done.returncode == 1


def test_a_screening_appended_to_its_list_through_another_descriptor(trained, tmp_path):
    (tmp_path / 'list.smi').write_text('CCO\n')
    with open(tmp_path / 'list.smi', 'a') as file:
        out = '/dev/fd/%d' % file.fileno()
        words = ['list.smi', '--in-dir', trained[0], '--out', out]
        done = run_apart(
            TOX21 / 'screen_tox21.py',
            *words,
            cwd=tmp_path,
            pass_fds=[file.fileno()],
            text=True,
            timeout=300,
        )
    message = 'error: --out: %s is the list to screen; expected another file\n' % out
    assert done.stderr == message and done.returncode == 1


def test_a_screening_of_nothing_into_nothing(trained, tmp_path):
    """The null device may be read and written to."""
    run('screen_tox21.py', os.devnull, '--in-dir', trained[0], '--out', os.devnull, cwd=tmp_path)


def test_a_screening_is_compressed_if_its_name_says_so(trained, tmp_path):
    (tmp_path / 'list.smi').write_text('CCO caf\xe9\nC1CC\n', encoding='utf-8')
    for out in ('a.csv', 'a.csv.gz'):
        run('screen_tox21.py', 'list.smi', '--in-dir', trained[0], '--out', out, cwd=tmp_path)
    plain = (tmp_path / 'a.csv').read_bytes()
    assert gzip.decompress((tmp_path / 'a.csv.gz').read_bytes()) == plain and b'caf' in plain


@pytest.mark.parametrize('out', ['-', 'link'])
def test_a_screening_on_standard_output_is_utf_8(trained, tmp_path, out):
    (tmp_path / 'list.smi').write_text('CCO caf\xe9\nCCN\n', encoding='utf-8')
    (tmp_path / 'link').symlink_to('/proc/self/fd/1')
    words = ['list.smi', '--in-dir', trained[0], '--out', out]
    variables = {'PYTHONIOENCODING': 'ascii'}
    done = run_apart(TOX21 / 'screen_tox21.py', *words, cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    table = list(csv.DictReader(done.stdout.decode('utf-8').splitlines()))
    assert [row['name'] for row in table] == ['caf\xe9', '']
    assert (tmp_path / 'link').is_symlink()


@pytest.mark.skipif(not workers.CAN_FORK, reason='processes are not forked here')
def test_screening_continues_after_a_molecule_that_ends_its_process(trained, tmp_path, monkeypatch):
    graph = smiles._graph
    monkeypatch.setattr(
        smiles, '_graph', lambda text, *args: os._exit(1) if 'S' in text else graph(text, *args)
    )
    monkeypatch.setattr(smiles, '_n_cpus', lambda: 2)
    lines = ['CCO', 'CCN'] * 600
    lines[700] = 'CCS'
    path = tmp_path / 'molecules.smi'
    path.write_text('\n'.join(lines))
    text = run('screen_tox21.py', path, '--in-dir', trained[0], '-b', '100')
    table = sorted(csv.DictReader(text.splitlines()), key=lambda row: int(row['line']))
    assert [row['smiles'] for row in table] == lines
    assert [row['line'] for row in table if row['error']] == ['701']
    assert table[700]['error'] == 'the process that parsed it died: exit status 1'


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


def test_a_screening_without_a_molecule_that_can_be_used(trained, tmp_path):
    """The table is written, and the exit status says that it has no prediction."""
    path = tmp_path / 'list.smi'
    path.write_text('C1CC\n')
    out = tmp_path / 'out.csv'
    error = error_of(TOX21 / 'screen_tox21.py', path, '--in-dir', trained[0], '--out', out)
    assert error == 'error: none of the molecules can be used, so nothing is predicted'
    assert len(out.read_text().splitlines()) == 2


def test_a_screening_of_an_empty_list_is_an_empty_table(trained, tmp_path):
    path = tmp_path / 'list.smi'
    path.write_text('')
    out = tmp_path / 'out.csv'
    run('screen_tox21.py', path, '--in-dir', trained[0], '--out', out)
    assert len(out.read_text().splitlines()) == 1


@pytest.fixture
def screen(tox21_data):
    return imported(TOX21, 'screen_tox21')


LINES = b'CCO\nCCN name, and more\n'


@pytest.mark.parametrize('content', [LINES, gzip.compress(LINES, mtime=0)], ids=['plain', 'gzip'])
def test_screening_reads_a_file(screen, tmp_path, content):
    (tmp_path / 'file').write_bytes(content)
    with screen.read_from(tmp_path / 'file') as file:
        assert list(file) == ['CCO\n', 'CCN name, and more\n']


def test_screening_reads_standard_input(screen, tmp_path, monkeypatch):
    (tmp_path / 'file').write_bytes(LINES)
    monkeypatch.setattr('sys.stdin', open(tmp_path / 'file'))
    with screen.read_from('-') as file:
        assert list(file) == ['CCO\n', 'CCN name, and more\n']


@pytest.mark.parametrize(
    'content, got',
    [
        (b'smiles,NR-AR\nCCO,1\n', "'smiles,NR-AR'"),
        (b'smiles;name\nCCO;ethanol\n', "'smiles;name'"),
        (b'\xff\xfeC\0C\0O\0', "'\ufffd\ufffdC\\x00C\\x00O\\x00'"),
        (gzip.compress(gzip.compress(b'CCO\n', mtime=0), mtime=0), None),
    ],
    ids=['commas', 'semicolons', 'UTF-16', 'compressed twice'],
)
def test_screening_of_what_is_no_list_of_smiles(screen, tmp_path, content, got):
    path = tmp_path / 'file'
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        screen.read_from(path)
    message = str(error.value)
    assert message.startswith('%s: expected one SMILES a line, got %s' % (path, got or ''))
    assert message.endswith('; for a CSV file use predict_tox21.py --data')


@pytest.mark.parametrize('most', [12, -12], ids=['first', 'last'])
def test_a_damaged_archive_of_a_list_is_one_line(trained, tmp_path, monkeypatch, most):
    """The archive has only its first bytes, or lacks its last ones."""
    monkeypatch.chdir(tmp_path)
    lines = ''.join('%s m%d\n' % ('C' * (i % 7 + 1), i) for i in range(50))
    (tmp_path / 'list.smi').write_bytes(gzip.compress(lines.encode(), mtime=0)[:most])
    error = error_of(TOX21 / 'screen_tox21.py', '--in-dir', trained[0], 'list.smi', '--out', 'a')
    assert error == (
        'error: list.smi cannot be read: Compressed file ended before the end-of-stream marker was '
        'reached'
    )


@pytest.mark.parametrize(
    'words, message',
    [
        (['none.smi'], 'cannot read FOLDER/none.smi: No such file or directory'),
        (
            ['molecules.smi', '--out', 'molecules.smi'],
            '--out: molecules.smi exists; expected a new file, or --force to replace it',
        ),
        (
            ['molecules.smi', '--out', '.'],
            '--out: cannot write .: it is a folder, or its folder does not exist',
        ),
        (
            ['molecules.smi', '--out', '/dev/full'],
            'cannot write /dev/full: No space left on device',
        ),
    ],
)
def test_screening_says_what_it_cannot_do(trained, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'molecules.smi').write_text('CCO\n')
    error = error_of(TOX21 / 'screen_tox21.py', '--in-dir', trained[0], *words)
    assert error == 'error: ' + message.replace('FOLDER', str(tmp_path))
    assert (tmp_path / 'molecules.smi').read_text() == 'CCO\n'


def test_upstreams_cache_is_used_if_it_has_the_file(tox21_data, data_file, tmp_path, monkeypatch):
    folder = tmp_path / 'pfnet' / 'chainer' / 'molnet'
    folder.mkdir(parents=True)
    (folder / 'tox21.csv.gz').write_bytes(data_file.read_bytes())
    monkeypatch.setattr(download, '_dataset_root', str(tmp_path))
    description, table = tox21_data.read('download')
    assert "Tox21 from Chainer Chemistry's download" in description
    assert len(table.smiles) == 201


def test_a_failing_download_says_where_to_put_the_file(tox21_data, monkeypatch, tmp_path):
    from chainer_chemistry.datasets.molnet import molnet

    def fail(*args, **kwargs):
        raise OSError('no route to host')

    monkeypatch.setattr(molnet, '_get_molnet_filepath', lambda name: str(tmp_path / name))
    monkeypatch.setattr(molnet, 'download_dataset', fail)
    with pytest.raises(tox21_data.DataError) as error:
        tox21_data.read('download')
    assert str(error.value) == (
        "Chainer Chemistry's download of Tox21 failed (OSError: no route to host). Get "
        'tox21.csv.gz of MoleculeNet elsewhere and name it with --data, or put it where Chainer '
        'Chemistry looks for it: %s' % (tmp_path / 'tox21.csv.gz')
    )


@pytest.mark.parametrize('value', ['2', 'yes', '-1', '0.5'])
def test_other_labels_are_refused(tox21_data, tmp_path, value):
    path = tmp_path / 'mine.csv'
    path.write_text('smiles,%s\nCC%s\n' % (','.join(tox21_data.ASSAYS), ',' + value + ',1' * 11))
    with pytest.raises(tox21_data.DataError) as error:
        tox21_data.read(str(path))
    message = "mine.csv row 2: target NR-AR is '%s', expected 0, 1 or nothing (rows like this: 1)"
    assert str(error.value) == message % value


@pytest.mark.skipif(not REAL, reason="TOX21_CSV names no file: MoleculeNet's tox21.csv.gz")
def test_real_tox21(tmp_path):
    text = run(
        'train_tox21.py', '--data', REAL, '--epoch', '1', '--out', tmp_path, '--batchsize', '128'
    )
    assert '8014 molecules, 8006 of them used' in text
    assert '8 molecule(s) could not be used' in text
