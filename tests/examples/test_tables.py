"""Every row of a user's table is accounted for, in training and prediction."""

import csv
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import types

import numpy
import pytest

from chainer_bspmm.dataset import smiles, workers
from tests.examples.scripts import EXAMPLES, command, error_of, imported, rows, run_apart, run_here
from tests.support.processes import environment

OWN = EXAMPLES / 'own_dataset'
TRAIN, PREDICT = OWN / 'train_own.py', OWN / 'predict_own.py'
CHAINS = ['C' * n + end for n in range(1, 31) for end in ('', 'N', 'O')]
TABLE = 'smiles,y,name\n' + ''.join('%s,%d,m%d\n' % (s, i, i) for i, s in enumerate(CHAINS))
QUICK = '--unit-num 8 --conv-layers 2 --batchsize 16 --epoch 1'.split()
WORDS = ['--data', 'mine.csv', '--labels', 'y', '--task', 'regression', '--out', 'out', *QUICK]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Output folder of a training on 90 chains."""
    folder = tmp_path_factory.mktemp('trained')
    (folder / 'mine.csv').write_text(TABLE)
    run_here(TRAIN, *WORDS, cwd=folder)
    return folder / 'out'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Function that writes mine.csv in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / 'mine.csv').write_text(text)


@pytest.fixture
def predicted(trained, write, tmp_path):
    """Function that predicts a table, and returns the printed text and the rows."""

    def predict(text, *words):
        write(text)
        words = words or ['--data', 'mine.csv']
        printed = run_here(PREDICT, '--in-dir', trained, *words, '--out', 'p.csv', '--force')
        return printed, rows(tmp_path / 'p.csv')

    return predict


@pytest.fixture
def data():
    imported(OWN, 'train_own')
    from common import data

    return data


# Tables are read.


@pytest.mark.parametrize(
    'text, message',
    [
        (
            'smiles,y\nCC,3\nCCC,4,50\nCCCC,6,00\n',
            "mine.csv row 3 has 3 cells (rows like this: 2): 'CCC,4,50'; expected 2, as "
            "mine.csv row 1, which was taken as the header: 'smiles,y'; a cell with a comma "
            'needs quotes',
        ),
        (
            '\n# made by me\nsmiles,y\nCC,3\n',
            "mine.csv row 3 has 2 cells (rows like this: 2): 'smiles,y'; expected 1, as "
            "mine.csv row 2, which was taken as the header: '# made by me'; a cell with a "
            'comma needs quotes',
        ),
        (
            'smiles,y\n"CC,3\nCCC,4\n',
            'mine.csv row 2 cannot be read as CSV: unexpected end of data',
        ),
        (
            'smiles,y\nCC,3\nC"C",3\n"C"C,4\n',
            "mine.csv row 4 cannot be read as CSV: ',' expected after '\"'",
        ),
    ],
    ids=['decimal commas', 'a line above the header', 'an open quote', 'a quote amid a cell'],
)
@pytest.mark.parametrize('script', ['train', 'predict'])
def test_rows_that_are_no_rows_of_the_table(trained, write, script, text, message):
    write(text)
    if script == 'train':
        error = error_of(TRAIN, *WORDS)
    else:
        error = error_of(PREDICT, '--in-dir', trained, '--data', 'mine.csv', '--out', 'p.csv')
    assert error == 'error: ' + message


def test_empty_cells_beyond_the_header_are_no_cells(predicted):
    _, table = predicted('smiles,name\nCCO,a,,\nCCN,b, \n')
    assert [row['name'] for row in table] == ['a', 'b']


def test_rows_with_fewer_cells_than_the_header(predicted):
    _, table = predicted('name,smiles,note\na,CCO\nb,CCN,x\n')
    assert [(row['name'], row['note']) for row in table] == [('a', ''), ('b', 'x')]


def test_blank_lines_keep_the_numbers_of_the_others(predicted):
    printed, table = predicted('\n\nsmiles,name\n  \nCCO,a\n\nC1,b\n')
    assert "  mine.csv row 7: 'C1': RDKit cannot parse it\n" in printed
    assert [row['name'] for row in table] == ['a', 'b']


def test_rows_of_commas_are_rows_below_the_header_only(predicted):
    printed, table = predicted(',\nid,smiles\n1,CCO\n2,\n,\n4,CCN\n,\n')
    assert [row['id'] for row in table] == ['1', '2', '', '4', '']
    reasons = ['', 'no SMILES', 'no SMILES', '', 'no SMILES']
    assert [row['not predicted'] for row in table] == reasons
    assert '3 molecule(s) could not be used\n' in printed
    assert "  mine.csv row 7: '': no SMILES\n" in printed


def test_empty_cells_of_a_single_column_are_rows(predicted):
    _, table = predicted('smiles\nCCO\n""\n\nCCN\n')
    assert [row['smiles'] for row in table] == ['CCO', '', 'CCN']


def test_a_training_lists_the_rows_of_commas_at_the_end_of_a_file(write, tmp_path):
    write(TABLE + ',,\n,,\n')
    assert 'Data: mine.csv: 92 molecules, 90 of them used\n' in run_here(TRAIN, *WORDS)
    assert [tuple(row.values()) for row in rows(tmp_path / 'out' / 'failed.csv')] == [
        ('mine.csv row 92', '', 'no SMILES'),
        ('mine.csv row 93', '', 'no SMILES'),
    ]


@pytest.mark.parametrize('end', ['\n', '\r\n', '\r'], ids=['LF', 'CRLF', 'CR'])
@pytest.mark.parametrize('start', ['', '\ufeff'], ids=['plain', 'BOM'])
def test_ends_of_lines(data, tmp_path, start, end):
    path = tmp_path / 'mine.csv'
    path.write_bytes((start + end.join(['smiles,"a, b"', 'CCO,"x\ny"', 'CCN,'])).encode())
    table = data.read_table(str(path))
    assert list(table) == ['smiles', 'a, b']
    assert table['a, b'].tolist() == ['x\ny', '']
    assert table.index.tolist() == ['mine.csv row 2', 'mine.csv row 3']


@pytest.mark.parametrize(
    'encode, reason',
    [
        (lambda text: text.encode('utf-16'), 'byte 0xff in position 0: invalid start byte'),
        (
            lambda text: text.replace('m', '\xe4').encode('latin-1'),
            'byte 0xe4 in position 1: invalid continuation byte',
        ),
        (lambda text: lzma.compress(text.encode()), 'byte 0xfd in position 0: invalid start byte'),
    ],
    ids=['UTF-16', 'Latin-1', 'xz'],
)
def test_other_encodings_and_compressors_are_said_to_be_neither_utf_8_nor_gzip(
    data, tmp_path, encode, reason
):
    path = tmp_path / 'mine.csv'
    path.write_bytes(encode(TABLE))
    with pytest.raises(data.DataError) as error:
        data.read_table(str(path))
    assert str(error.value) == (
        "mine.csv row 1 cannot be read as CSV: 'utf-8' codec can't decode %s; expected text in "
        'UTF-8, plain or compressed by gzip' % reason
    )


def test_a_missing_column_among_many_is_told_on_one_screen(write):
    header = ','.join('c%d' % i for i in range(10001))
    write('smiles,%s\nCCO%s\n' % (header, ',1' * 10001))
    message = error_of(TRAIN, *WORDS)
    assert message.startswith(
        "error: mine.csv has no column 'y'; expected the columns 'smiles', 'y', separated by "
        "commas, found 'smiles', 'c0', 'c1', 'c2', "
    )
    assert message.endswith(' [...]') and len(message) < 700


def test_many_columns_are_kept(predicted):
    names = ['c%d' % i for i in range(10001)]
    _, (row,) = predicted('smiles,%s\nCCO%s\n' % (','.join(names), ',1' * 10001))
    assert list(row) == ['smiles', *names, 'y predicted']


def test_columns_with_one_name_are_kept(predicted, tmp_path):
    predicted('smiles,name,name\nCCO,a,b\n')
    header, row = (tmp_path / 'p.csv').read_text().splitlines()
    assert header == 'smiles,name,name,y predicted' and row.startswith('CCO,a,b,')


def test_gzip_is_known_by_its_bytes(data, tmp_path):
    path = tmp_path / 'mine.csv'
    path.write_bytes(gzip.compress(b'smiles\nCCO\n', mtime=0))
    assert data.read_table(str(path))['smiles'].tolist() == ['CCO']


@pytest.mark.parametrize('compress', [bytes, gzip.compress], ids=['plain', 'gzip'])
def test_standard_input(data, monkeypatch, compress):
    stdin = types.SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(compress(b'smiles\nCCO\n'))))
    monkeypatch.setattr('sys.stdin', stdin)
    table = data.read_table('-')
    assert table['smiles'].to_dict() == {'standard input row 2': 'CCO'}


@pytest.mark.parametrize(
    'text, message',
    [
        ('', 'standard input is empty'),
        ('smiles,y\n', "standard input has no molecules: its only row, the header, is 'smiles,y'"),
        (
            'SMILES,y\nC,1\n',
            "standard input has no column 'smiles'; expected the columns 'smiles', 'y', separated "
            "by commas, found 'SMILES', 'y'",
        ),
    ],
)
def test_errors_of_standard_input_call_it_so(write, monkeypatch, text, message):
    stdin = types.SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(text.encode())))
    monkeypatch.setattr('sys.stdin', stdin)
    assert error_of(TRAIN, *WORDS, '--data', '-') == 'error: ' + message


def test_training_on_a_pipe(tmp_path):
    """A pipe can be read only once, but the test part can be predicted later."""
    path = tmp_path / 'out'
    words = ['--data', '/dev/stdin', '--out', path, *WORDS[2:6], *QUICK]
    for script in [TRAIN, *words], [PREDICT, '--in-dir', path]:
        done = run_apart(*script, input=TABLE, text=True)
        assert done.returncode == 0, done.stderr
    assert len(rows(path / 'predictions.csv')) == 14


# Every row keeps its line, and every column its place.


def test_rows_without_smiles_are_predicted_to_nothing(predicted):
    printed, table = predicted('id,smiles,score\n1,CCO,0.1\n2,,0.2\n3,CCN,0.3\n4,  ,0.4\n')
    assert 'Data: mine.csv: 4 molecules, 2 of them used\n' in printed
    assert (
        "2 molecule(s) could not be used\n  mine.csv row 3: '': no SMILES\n"
        "  mine.csv row 5: '  ': no SMILES\n"
    ) in printed
    assert [row['id'] for row in table] == list('1234')
    assert [bool(row['y predicted']) for row in table] == [True, False, True, False]
    assert [row['not predicted'] for row in table] == ['', 'no SMILES', '', 'no SMILES']


NONE_USED = 'error: none of the molecules can be used, so nothing is predicted'


def test_a_table_without_any_usable_molecule_is_written_with_the_reasons(trained, write, tmp_path):
    write('smiles,id\nbad,1\n,2\n')
    words = ['--in-dir', trained, '--data', 'mine.csv', '--out', 'p.csv']
    assert error_of(PREDICT, *words) == NONE_USED
    assert (tmp_path / 'p.csv').read_text() == (
        'smiles,id,y predicted,not predicted\nbad,1,,RDKit cannot parse it\n,2,,no SMILES\n'
    )


def test_smiles_of_the_command_line_that_are_all_unusable_have_their_reasons(trained, capsys):
    words = ['--in-dir', trained, '--smiles', 'C1', '--out', '-']
    assert error_of(PREDICT, *words) == NONE_USED
    assert "  --smiles 1: 'C1': RDKit cannot parse it\n" in capsys.readouterr().err


@pytest.mark.parametrize('dense', [[], ['--dense']], ids=['sparse', 'dense'])
def test_a_training_without_any_usable_molecule_names_the_column(write, tmp_path, dense):
    write('smiles,y,id\nC,1,m1\nCC,2,m2\n')
    assert error_of(TRAIN, *WORDS, '--smiles-column', 'id', *dense) == (
        "error: mine.csv: none of the 2 molecule(s) in the column 'id' can be used, the first: "
        "mine.csv row 2: 'm1': RDKit cannot parse it"
    )
    assert not (tmp_path / 'out').exists()


def test_a_training_on_elements_that_no_model_knows_is_refused(write):
    write('smiles,y\n[Og],1\n')
    assert error_of(TRAIN, *WORDS) == (
        "error: mine.csv: none of the 1 molecule(s) in the column 'smiles' can be used, the first: "
        "mine.csv row 2: '[Og]': atomic number 118, the models support those below 117"
    )


def test_a_training_on_no_molecules_is_refused(write):
    write(TABLE)
    assert error_of(TRAIN, *WORDS, '--num-data', '0') == (
        'error: --num-data 0: expected at least one molecule, or -1 for all'
    )


@pytest.mark.skipif(not workers.CAN_FORK, reason='processes are not forked here')
def test_molecules_that_end_their_process_are_predicted_to_nothing(predicted, monkeypatch):
    graph = smiles._graph
    monkeypatch.setattr(
        smiles, '_graph', lambda text, *args: os._exit(1) if 'S' in text else graph(text, *args)
    )
    long = 'CS' * 1500
    printed, table = predicted('smiles\nCCO\n%s\nCCN\n' % long)
    reason = 'the process that parsed it died: exit status 1'
    assert (
        "1 molecule(s) could not be used\n  mine.csv row 3: '%sC: %s\n" % ('CS' * 29, reason)
    ) in printed
    assert [row['smiles'] for row in table] == ['CCO', long, 'CCN']
    assert [bool(row['y predicted']) for row in table] == [True, False, True]
    assert [row['not predicted'] for row in table] == ['', reason, '']


def test_rows_without_smiles_are_listed_by_a_training(write, tmp_path):
    write(TABLE + ',7,nothing\n,,a footnote\n')
    printed = run_here(TRAIN, *WORDS)
    assert 'Data: mine.csv: 92 molecules, 90 of them used\n' in printed
    assert [row['reason'] for row in rows(tmp_path / 'out' / 'failed.csv')] == 2 * ['no SMILES']


def test_columns_keep_their_names_and_order(write, tmp_path):
    lines = ['%d,%s,%s,%d.50' % (i, s[::-1], s, i) for i, s in enumerate(CHAINS)]
    write('\n'.join(['id,smiles,canonical_smiles,y', *lines]) + '\n')
    run_here(TRAIN, *WORDS, '--smiles-column', 'canonical_smiles')
    run_here(PREDICT, '--in-dir', 'out', '--data', 'mine.csv', '--out', 'p.csv')
    found = (tmp_path / 'p.csv').read_text().splitlines()
    assert found[0] == 'id,smiles,canonical_smiles,y,y predicted'
    assert [line.rsplit(',', 1)[0] for line in found[1:]] == lines


def test_a_cell_of_several_lines_is_no_smiles(predicted):
    _, table = predicted('smiles,name\n"CCO\nCCN",a\nCCO,b\n')
    assert [row['smiles'] for row in table] == ['CCO\nCCN', 'CCO']
    reason = 'it has several lines, expected one SMILES'
    assert [row['not predicted'] for row in table] == [reason, '']


@pytest.mark.parametrize('cell', ['a\rb', 'a\nb', 'a\r\nb', '\r', 'a "b", c'])
def test_cells_are_written_as_they_were_read(write, trained, tmp_path, cell):
    path = tmp_path / 'mine.csv'
    quoted = '"%s"' % cell.replace('"', '""')
    text = 'smiles,name,%s\nCCO,%s,7\nCCN,b,8\n' % (quoted, quoted)
    path.write_bytes(text.encode())
    run_here(PREDICT, '--in-dir', trained, '--data', 'mine.csv', '--out', 'p.csv')
    with open('p.csv', newline='') as file:
        header, first, second = csv.reader(file)
    assert header == ['smiles', 'name', cell, 'y predicted']
    assert first[:3] == ['CCO', cell, '7'] and second[:3] == ['CCN', 'b', '8']


# Labels of tables.


@pytest.mark.parametrize('mean, spread', [(-2912301, 0.1), (-1e9, 1)])
def test_a_spread_far_below_the_mean_is_learned(write, tmp_path, mean, spread):
    """The printed test error is that of result.json, in the units of the labels of the file."""
    draw = random.Random(0)
    smiles = ['C' * (n % 20 + 1) + 'NOSPF'[n % 5] for n in range(120)]
    lines = ['%s,%.4f' % (text, mean + draw.gauss(0, spread)) for text in smiles]
    write('\n'.join(['smiles,y', *lines]) + '\n')
    printed = run_here(TRAIN, *WORDS, '--epoch', '8', '--method', 'ggnn')
    assert 'nothing to learn' not in printed
    test = json.loads((tmp_path / 'out' / 'result.json').read_text())['test']
    line = 'MAE of y: %.6g, RMSE %.6g, R2 %.4f (18 molecules'
    line %= tuple(test[name]['y'] for name in ('MAE', 'RMSE', 'R2'))
    assert (
        '\n%s; always the mean: MAE %.6g)\n' % (line, test['MAE of the mean alone']['y']) in printed
    )
    assert line + ')\n' in run_here(PREDICT, '--in-dir', 'out')
    table = rows(tmp_path / 'out' / 'predictions.csv')
    assert {'%s,%s' % (row['smiles'], row['y']) for row in table} <= set(lines)
    error = numpy.mean([abs(float(row['y']) - float(row['y predicted'])) for row in table])
    assert error == pytest.approx(test['MAE']['y'], rel=1e-2)
    assert 0.3 * spread < error < 1.5 * spread


def test_labels_of_one_value_for_float32(write):
    write('smiles,y\n' + ''.join('%s,%de-40\n' % (s, i) for i, s in enumerate(CHAINS)))
    printed = run_here(TRAIN, *WORDS)
    assert 'All training molecules have one value of y: nothing to learn\n' in printed
    assert ', R2 nan (14 molecules; always the mean: MAE ' in printed


def test_not_available_as_excel_writes_it_is_a_missing_label(write, tmp_path):
    write(TABLE.replace('C,0,m0', 'C,#N/A,m0', 1))
    assert error_of(TRAIN, *WORDS) == (
        "error: mine.csv row 2: target y is '#N/A', expected a finite number (rows like this: 1; "
        '--skip-missing leaves empty ones out)'
    )
    run_here(TRAIN, *WORDS, '--skip-missing')
    (row,) = rows(tmp_path / 'out' / 'failed.csv')
    assert row == {'row': 'mine.csv row 2', 'smiles': 'C', 'reason': 'no label'}


def test_a_classification_says_that_a_label_teaches_nothing(write):
    lines = ['%s,%d,1\n' % (s, i % 2) for i, s in enumerate(CHAINS)]
    write('smiles,y,z\n' + ''.join(lines))
    printed = run_here(TRAIN, *WORDS, '--labels', 'y', 'z', '--task', 'classification')
    assert 'All training molecules have one value of z: nothing to learn\n' in printed
    assert 'value of y' not in printed


def test_a_classification_says_that_predictions_of_a_class_without_labels_mean_nothing(write):
    write('smiles,y,z\n' + ''.join('%s,%d,\n' % (s, i % 2) for i, s in enumerate(CHAINS)))
    printed = run_here(TRAIN, *WORDS, '--labels', 'y', 'z', '--task', 'classification')
    assert 'No training molecule has a label of z: its predictions mean nothing\n' in printed
    assert 'value of z' not in printed


def test_files_have_the_scaler_of_the_labels_as_they_are(trained):
    """Upstream's model can load the file, because its scaler is for labels without a shift."""
    with numpy.load(trained / 'model.npz', allow_pickle=True) as file:
        mean, std = (file['predictor/label_scaler/' + name] for name in ('mean', 'std'))
    known = {row['smiles'] for row in rows(trained / 'training.csv')}
    labels = [i for i, smiles in enumerate(CHAINS) if smiles in known]
    assert mean.tolist() == [numpy.mean(labels)]
    assert std == pytest.approx(numpy.std(labels), rel=1e-6)


def test_several_errors_of_a_regression(data):
    from common.tasks import Regression

    labels = numpy.array([[1.0, 5], [2, numpy.nan], [4, numpy.nan]])
    predictions = numpy.array([[1.0, 7], [3, 0], [6, 0]])
    lines, found = Regression(['a', 'b']).report(labels, predictions)
    assert found['MAE'] == {'a': 1, 'b': 2}
    assert found['RMSE'] == pytest.approx({'a': (5 / 3) ** 0.5, 'b': 2})
    assert found['R2'] == pytest.approx({'a': 1 - 5 / 3 / (14 / 9), 'b': numpy.nan}, nan_ok=True)
    assert lines == [
        'MAE of a: 1, RMSE 1.29099, R2 -0.0714 (3 molecules)',
        'MAE of b: 2, RMSE 2, R2 nan (1 molecules)',
    ]


def test_the_mean_alone_is_that_of_each_target(data):
    from common.tasks import Regression

    labels = numpy.array([[0.0, 100], [2, 104]])
    truth = numpy.array([[1.0, 103]])
    _, found = Regression(['a', 'b']).report(truth, truth, labels)
    assert found['MAE of the mean alone'] == {'a': 0, 'b': 1}


@pytest.mark.parametrize('labels, expected', [([[0.0], [4]], 3), ([[0.0, 1], [4, 2]], 3.75)])
def test_the_mae_of_a_log_is_in_the_target_s_unit_only_if_there_is_one(data, labels, expected):
    """The standard deviation of the first target is 2, that of the second 0.5."""
    from common.tasks import Regression

    settings = {'method': 'rsgcn', 'unit_num': 4, 'conv_layers': 1}
    labels = numpy.array(labels)
    model = Regression('ab'[: labels.shape[1]]).build(settings, True, labels)
    y = numpy.full(labels.shape, 3, 'f')
    assert float(model.metrics_fun['mae'](y, 0 * y).array) == expected


@pytest.mark.parametrize(
    'names, unit', [(['a'], ' [eV]'), (['b'], ''), (['a', 'b'], ' [standard deviations]')]
)
def test_the_axis_of_a_learning_curve_has_the_unit_of_the_mae(data, names, unit):
    from common.tasks import Regression

    _, (key, title) = Regression(names, {'a': 'eV'}).panels()
    assert (key, title) == ('mae', 'mean absolute error' + unit)


def test_a_label_may_have_dollar_signs(write, tmp_path):
    name = r'$\frac_T_g$'
    write(TABLE.replace('y,', name + ',', 1))
    run_here(TRAIN, *WORDS, '--labels', name)
    assert (tmp_path / 'out' / 'fit.png').read_bytes().startswith(b'\x89PNG')


# Equal molecules.


def test_duplicates_are_the_same_however_they_are_written(write):
    again = ['OCC', 'C(O)C', '[CH3][CH2][OH]', 'C[C@H](N)O', 'C[C@@H](N)O']
    write(TABLE + ''.join('%s,1,again\n' % smiles for smiles in again))
    assert (
        'Duplicates: 4 molecule(s) equal an earlier one except for stereo, the first: mine.csv row '
        "92: 'OCC'; training and test may share molecules\n"
    ) in run_here(TRAIN, *WORDS)


def test_molecules_of_the_training_are_counted(trained, predicted):
    known = rows(trained / 'training.csv')
    assert len(known) == 62
    first = known[0]['smiles']
    text = (
        'molecules that were used in the training: %d of %d; how well these are predicted says '
        'nothing about new molecules\n'
    )
    assert text % (62, 91) in predicted(TABLE + 'c1ccccc1,7,new\n')[0]
    assert text % (1, 2) in predicted('', '--smiles', 'c1ccccc1', first)[0]


def test_a_test_part_without_molecules_of_the_training(predicted):
    assert 'used in the training' not in predicted('smiles\nc1ccccc1\n')[0]


@pytest.mark.parametrize('dense', [True, False], ids=['dense', 'sparse'])
def test_both_kinds_of_data_set_take_the_same_smiles(data, dense):
    smiles = ['CCO', 'C\xe4C', 'CCN name', 'C.[Og]', '*', '[Na+].[Cl-]', 'C1', '\t']
    found = data.preprocess(data.typed_smiles(smiles, ['y']), 'ggnn', dense)
    assert found[1].reason.tolist() == [
        '',
        'it has a character that is not ASCII',
        '',
        'atomic number 118, the models support those below 117',
        '',
        '',
        'RDKit cannot parse it',
        'no SMILES',
    ]
    assert len(found[0]) == 4


# Output files.


@pytest.mark.parametrize('script', ['train', 'predict'])
def test_a_reader_that_closes_the_pipe_ends_the_program_quietly(trained, write, tmp_path, script):
    write(TABLE)
    words = [PREDICT, '--in-dir', trained, '--data', 'mine.csv', '--out', 'p.csv']
    if script == 'train':
        words = [TRAIN, *WORDS]
    process = subprocess.Popen(
        command(words[0], words[1:]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == 'Parsing 90 molecules\n'
    assert process.wait() == 1
    if script == 'predict':
        assert len(rows(tmp_path / 'p.csv')) == 90


def predict_as_a_process(trained, *words, stdout=subprocess.PIPE, **variables):
    """Predict in another process, which has its own standard output."""
    words = ['--in-dir', trained, '--data', 'mine.csv', *words]
    return run_apart(PREDICT, *words, stdout=stdout, variables=variables)


def test_a_link_to_standard_output_is_standard_output(trained, write, tmp_path):
    """The file of the output keeps its contents, and gets nothing but the table."""
    write('smiles,name\nCCO,a\n')
    (tmp_path / 'link').symlink_to('/proc/self/fd/1')
    (tmp_path / 'found').write_text('before\n')
    for words in [], ['--force']:
        with open('found', 'a') as found:
            done = predict_as_a_process(trained, '--out', 'link', *words, stdout=found)
        assert done.returncode == 0, done.stderr
    before, *tables = (tmp_path / 'found').read_text().splitlines()
    assert before == 'before'
    header, ethanol = tables[:2]
    assert header == 'smiles,name,y predicted' and ethanol.startswith('CCO,a,')
    assert tables == [header, ethanol] * 2
    assert os.readlink(tmp_path / 'link') == '/proc/self/fd/1'


def test_tables_on_standard_output_are_utf_8(trained, write, tmp_path):
    (tmp_path / 'mine.csv').write_text('smiles,name\nCCO,caf\xe9\n', encoding='utf-8')
    done = predict_as_a_process(trained, '--out', '-', PYTHONIOENCODING='ascii')
    assert done.returncode == 0, done.stderr
    assert 'CCO,caf\xe9,' in done.stdout.decode('utf-8')


def test_characters_that_standard_output_lacks_are_escaped_in_messages(trained, write, tmp_path):
    (tmp_path / 'mine.csv').write_text('smiles\nCCO\nC\xe9\n', encoding='utf-8')
    done = predict_as_a_process(trained, '--out', 'new.csv', PYTHONIOENCODING='ascii')
    assert done.returncode == 0, done.stderr
    assert b"  mine.csv row 3: 'C\\xe9': it has a character that is not ASCII\n" in done.stdout


@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_messages_that_standard_output_cannot_hold_are_one_line(
    trained, write, tmp_path, unbuffered
):
    write('smiles\nCCO\n')
    with open('/dev/full', 'w') as full:
        done = predict_as_a_process(
            trained, '--out', 'new.csv', stdout=full, PYTHONUNBUFFERED=unbuffered
        )
    assert done.returncode == 1
    assert done.stderr.decode() == (
        'Parsing 1 molecules\nerror: cannot write standard output: No space left on device\n'
    )
    assert len(rows(tmp_path / 'new.csv')) == 1


@pytest.fixture
def own_file(tmp_path):
    """Link to a file that this process has open, and to which it has written a line."""
    with open(tmp_path / 'own', 'w') as file:
        print('before', file=file, flush=True)
        link = tmp_path / 'link'
        link.symlink_to('/proc/self/fd/%d' % file.fileno())
        yield link
        assert link.is_symlink()


@pytest.mark.parametrize('words', [[], ['--force']], ids=['new', 'force'])
def test_predictions_continue_a_file_that_the_process_has_open(
    trained, write, tmp_path, own_file, words
):
    write('smiles,name\nCCO,a\n')
    run_here(PREDICT, '--in-dir', trained, '--data', 'mine.csv', '--out', own_file, *words)
    before, header, ethanol = (tmp_path / 'own').read_text().splitlines()
    assert (before, header) == ('before', 'smiles,name,y predicted')
    assert ethanol.startswith('CCO,a,')


@pytest.mark.parametrize(
    'path, special',
    [
        ('/dev/null', True),
        ('/dev/fd/1', True),
        ('/proc/self/fd/2', True),
        ('to standard output', True),
        ('to a link to standard output', True),
        ('to a device', True),
        ('file', False),
        ('to a file', False),
        ('to nothing', False),
        ('to itself', False),
        ('nothing', False),
        ('/dev/fd/', True),
    ],
)
def test_special_files_are_written_to_as_they_are(data, tmp_path, monkeypatch, path, special):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').touch()
    for name, target in (
        ('to standard output', '/proc/self/fd/1'),
        ('to a link to standard output', 'to standard output'),
        ('to a device', '/dev/null'),
        ('to a file', 'file'),
        ('to nothing', 'nothing'),
        ('to itself', 'to itself'),
    ):
        (tmp_path / name).symlink_to(target)
    assert data.is_special(path) == special


@pytest.mark.parametrize('words', [[], ['--force']], ids=['new', 'force'])
def test_a_link_that_leads_nowhere_is_said_to_be_one(trained, write, tmp_path, words):
    write(TABLE)
    (tmp_path / 'link').symlink_to('nothing')
    assert error_of(TRAIN, *WORDS, '--out', 'link', *words) == (
        'error: --out: expected a folder, got link, a link that leads nowhere'
    )
    predict = [PREDICT, '--in-dir', trained, '--data', 'mine.csv', '--out', 'link', *words]
    if words:
        run_here(*predict)
        assert not (tmp_path / 'link').is_symlink() and len(rows(tmp_path / 'link')) == 90
    else:
        assert error_of(*predict) == (
            'error: --out: link is a link to a file that does not exist; expected a new file, or '
            '--force to replace it'
        )
