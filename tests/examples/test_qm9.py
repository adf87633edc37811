"""Scripts of examples/qm9, run as users run them."""

import gzip
import hashlib
import itertools
import json
import re

import numpy
import pytest

from tests.examples.scripts import arrays, error_of, EXAMPLES, imported, rows, run_here
from tests.support.processes import python
from tests.support.training import assert_same_bits

QM9 = EXAMPLES / 'qm9'
QUICK = '--epoch 2 --unit-num 8 --conv-layers 2 --num-data 200'.split()
ALPHA = ['--label', 'alpha', *QUICK]
RANDOM_SPLIT = {'split': 'random', 'train_data_ratio': 0.7, 'seed': 0}
GAP = {'label': 'gap'}
METHODS = [
    'rsgcn',
    'relgcn',
    'ggnn',
    'gin',
    'nfp',
    'relgat',
    'gnnfilm',
    'rsgcn_gwm',
    'ggnn_gwm',
    'gin_gwm',
    'nfp_gwm',
]


def run(script, *arguments, **options):
    return run_here(QM9 / script, *arguments, **options)


@pytest.fixture(scope='module')
def qm9_data():
    return imported(QM9, 'train_qm9')


@pytest.fixture(scope='module')
def data(qm9_data):
    from common import data

    return data


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Output folder and printed text of a short training."""
    out = tmp_path_factory.mktemp('trained')
    return out, run('train_qm9.py', '--out', out, *ALPHA)


def test_sample_is_the_one_that_make_sample_writes():
    with gzip.open(QM9 / 'data' / 'qm9_sample.csv.gz') as f:
        text = f.read()
    digest = '2562bb454932be7958f4f01455ff89e77bb5f38bbf24d37c9df48c51cbc162a6'
    assert hashlib.sha256(text).hexdigest() == digest


def test_targets_are_upstreams(qm9_data):
    from chainer_chemistry.datasets import get_qm9_label_names

    assert list(qm9_data.TARGETS) == get_qm9_label_names()


@pytest.fixture(scope='module', params=[False, True], ids=['sparse', 'dense'])
def sample(request, qm9_data, data):
    """Data set of the sample without labels, and its rows with all targets and reasons."""
    _, table = qm9_data.read('sample', {'label': 'all'})
    return data.preprocess(table, 'rsgcn', request.param)


def test_all_4000_molecules_of_the_sample_can_be_used(sample):
    dataset, table = sample
    assert len(dataset) == 4000 and table.is_used.all()


def test_molecules_of_the_sample_are_those_of_upstreams_parser(qm9_data, sample):
    from chainer_chemistry.dataset.parsers import CSVFileParser
    from chainer_chemistry.dataset.preprocessors import RSGCNPreprocessor

    parser = CSVFileParser(
        RSGCNPreprocessor(),
        labels=list(qm9_data.TARGETS),
        smiles_col='smiles',
        postprocess_label=lambda label: numpy.asarray(label, 'f'),
    )
    dataset, _ = sample
    index = [0, *range(1000, 1050)]
    expected = parser.parse(qm9_data.SAMPLE, target_index=index)['dataset']
    assert len(expected) == len(index)
    for i, upstream in zip(index, expected):
        for a, b in zip(dataset[i], upstream):
            assert a.dtype == b.dtype
            numpy.testing.assert_array_equal(a if hasattr(a, 'ndim') else a.to_dense()[0], b)


def test_labels_of_methane_are_those_of_qm9(sample):
    _, table = sample
    rotation = [157.7118, 157.70997, 157.70699]  # A, B, C of the first file of QM9
    electrons = [0, 13.21, -0.3877, 0.1171, 0.5048, 35.3641]  # mu, alpha, homo, lumo, gap, r2
    energies = [0.044749, -40.47893, -40.476062, -40.475117, -40.498597]  # zpve, U0, U, H, G
    heat_capacity = [6.469]
    expected = rotation + electrons + energies + heat_capacity
    assert table.labels.iloc[0].tolist() == expected


def test_num_data_spreads_over_the_data(data):
    assert data.spread(4000, 4).tolist() == [0, 1000, 2000, 3000]
    assert len(data.spread(40, 50)) == len(data.spread(40, -1)) == 40


def test_split_is_a_partition_decided_by_the_seed(data):
    parts, same, other = [
        data.split(range(101), dict(RANDOM_SPLIT, seed=seed)) for seed in (1, 1, 2)
    ]
    assert [len(part) for part in parts] == [70, 15, 16]
    assert sorted(numpy.concatenate(parts)) == list(range(101))
    assert all((a == b).all() for a, b in zip(parts, same))
    assert (parts[0] != other[0]).any()


def test_training_prints_its_data(trained):
    _, text = trained
    assert 'the sample of QM9 in this repository: 4000 molecules, 200 of them used\n' in text
    assert 'alpha (bohr^3)' in text
    assert 'Split: 140 training, 30 validation, 30 test\n' in text


def test_training_prints_no_codes_of_a_terminal(trained):
    assert '\033' not in trained[1]


def test_training_prints_the_error_in_the_unit(trained):
    out, text = trained
    test = json.loads((out / 'result.json').read_text())['test']
    values = [test[name]['alpha'] for name in ('MAE', 'RMSE', 'R2', 'MAE of the mean alone')]
    line = 'MAE of alpha: %.6g bohr^3, RMSE %.6g, R2 %.4f (30 molecules; always the mean: MAE %.6g)'
    assert '\n%s\n' % (line % tuple(values)) in text


def test_training_prints_its_cost(trained):
    out, text = trained
    result = json.loads((out / 'result.json').read_text())
    assert (
        'Time a step: %.2f ms, median of 1 epochs (converter, forward, backward, update)\n'
        % result['milliseconds a step']['median']
        in text
    )


def test_the_time_of_a_step_is_that_of_an_epoch_by_its_steps(data, tmp_path, monkeypatch):
    from common import training

    seconds = itertools.count()
    monkeypatch.setattr(training.StepTimer, '_now', lambda self: next(seconds))
    options = ['--out', tmp_path, *ALPHA, '--num-data', 40, '--batchsize', 7]
    text = run('train_qm9.py', *options)  # an epoch takes a second, and has four steps
    result = json.loads((tmp_path / 'result.json').read_text())
    assert result['milliseconds a step'] == {'median': 250, 'epochs': 1}
    assert 'Time a step: 250.00 ms, median of 1 epochs ' in text


def test_training_writes_what_it_did(trained):
    out, _ = trained
    result = json.loads((out / 'result.json').read_text())
    assert (result['epochs'], result['steps']) == (2, 9)
    assert result['updater'] == 'standard'
    assert result['settings']['padded_to'] == 9
    assert [entry['epoch'] for entry in json.loads((out / 'log').read_text())] == [1, 2]


@pytest.mark.parametrize('name', ['learning_curve.png', 'fit.png'])
def test_training_draws_pictures(trained, name):
    out, _ = trained
    assert (out / name).read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    'option, value, name, before, now',
    [
        ('--label', 'gap', 'label', 'alpha', 'gap'),
        ('--padded-to', 'batch', 'padded_to', 9, None),
        ('--num-data', '100', 'num_data', 200, 100),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(trained, option, value, name, before, now):
    out, _ = trained
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    error = error_of(QM9 / 'train_qm9.py', '--out', out, *ALPHA, '--resume', option, value)
    assert error == (
        'error: --resume: %s was %r in the run in %s, and is %r now; both must be the same'
        % (name, before, out, now)
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_resumed_training_equals_an_uninterrupted_one(trained, tmp_path):
    """Two runs with the same seed train equal models as well."""
    train = ['train_qm9.py', '--out', tmp_path, *ALPHA]
    run(*train, '--epoch', '1')
    assert 'Resumed %s: epoch 1, step 5\n' % tmp_path in run(*train, '--resume')
    for name in ('model.npz', 'best_model.npz'):
        assert_same_bits(arrays(tmp_path / name), arrays(trained[0] / name))
    logs = [json.loads((folder / 'log').read_text()) for folder in (trained[0], tmp_path)]
    for entry in itertools.chain(*logs):
        del entry['elapsed_time']
    assert logs[0] == logs[1]
    again = run(*train, '--resume')
    assert 'nothing to train' in again and re.search('MAE.*', trained[1])[0] in again


def test_the_model_with_the_best_validation_is_kept(data):
    from common import training

    log = [{'loss': value} for value in (numpy.nan, 0.5, 0.7, numpy.nan, 0.5, 0.4)]
    lengths = range(1, len(log) + 1)
    assert [n for n in lengths if training.ends_with_best(log[:n], 'loss', -1)] == [1, 2, 6]
    assert [n for n in lengths if training.ends_with_best(log[:n], 'loss', 1)] == [1, 2, 3]


def test_all_targets_dense(tmp_path):
    text = run('train_qm9.py', '--dense', '--out', tmp_path, *QUICK, '--num-data', '40')
    assert 'MAE of U0: ' in text and ' cal/(mol K), RMSE ' in text
    assert numpy.isfinite(arrays(tmp_path / 'model.npz')['predictor/mlp/l_out/W']).all()


@pytest.mark.slow
def test_layouts_with_phantom_atoms_train_as_the_dense_model_does(tmp_path):
    logs = {}
    for name, option in (
        ('dense', '--dense'),
        ('padded', '--layout padded'),
        ('folded', '--padded-to batch'),
        ('packed', '--layout packed'),
    ):
        run('train_qm9.py', '--method', 'relgcn', '--out', tmp_path / name, *option.split(), *ALPHA)
        log = json.loads((tmp_path / name / 'log').read_text())
        logs[name] = [entry['validation/main/loss'] for entry in log]
    for name in ('padded', 'folded'):
        assert logs[name] == pytest.approx(logs['dense'], rel=1e-4)
    assert logs['packed'] != pytest.approx(logs['dense'], rel=1e-2)
    again = run('predict_qm9.py', '--in-dir', tmp_path / 'padded')  # in the training's layout
    result = json.loads((tmp_path / 'padded' / 'result.json').read_text())
    assert 'MAE of alpha: %.6g ' % result['test']['MAE']['alpha'] in again


@pytest.mark.parametrize(
    'method, options',
    [
        ('ggnn', '--dense'),
        ('ggnn', '--layout packed'),
        *(pytest.param(method, '--dense', marks=pytest.mark.slow) for method in METHODS),
    ],
)
def test_predictions_are_in_the_layout_of_the_training(tmp_path, method, options):
    """A model that was trained dense has learned with padding, so it predicts with padding."""
    options = ['--method', method, *options.split(), *ALPHA, '--num-data', '60']
    run('train_qm9.py', '--out', tmp_path, *options)
    mae = json.loads((tmp_path / 'result.json').read_text())['test']['MAE']['alpha']
    text = run('predict_qm9.py', '--in-dir', tmp_path)
    assert float(re.search('MAE of alpha: ([0-9.]+) ', text).group(1)) == pytest.approx(mae, 1e-4)


def test_methods_are_those_that_are_tested(data):
    from common import tasks

    assert tasks.METHODS == tuple(METHODS)


def test_the_page_names_the_methods():
    (text,) = re.findall(r'`--method` takes (.*?)\. ', (QM9 / 'README.md').read_text(), re.DOTALL)
    assert sorted(re.findall('`(.*?)`', text)) == sorted(METHODS)


@pytest.mark.parametrize(
    'text, message',
    [
        (
            'smiles,gap\nCC,1\n\nCCC,high\n',
            "mine.csv row 4: target gap is 'high', expected a finite number (rows like this: 1)",
        ),
        (
            'smiles,gap\nCC,nan\n',
            "mine.csv row 2: target gap is 'nan', expected a finite number (rows like this: 1; "
            '--skip-missing leaves empty ones out)',
        ),
        (
            'smiles,gap\nCC,1e39\n',
            "mine.csv row 2: target gap is '1e39', expected a finite number (rows like this: 1)",
        ),
        (
            'smiles,gap\nCC,%s\n' % (400 * 'x'),
            "mine.csv row 2: target gap is '%s, expected a finite number (rows like this: 1)"
            % (59 * 'x'),
        ),
        (
            'smiles, gap\nCC,1\n',
            "FILE has no column 'gap'; expected the columns 'smiles', 'gap', separated by commas, "
            "found 'smiles', ' gap'",
        ),
        (
            'SMILES,gap\nCC,1\n',
            "FILE has no column 'smiles'; expected the columns 'smiles', 'gap', separated by "
            "commas, found 'SMILES', 'gap'",
        ),
        ('', 'FILE is empty'),
        ('\n , \n', 'FILE is empty'),
        ('smiles,gap\n', "FILE has no molecules: its only row, the header, is 'smiles,gap'"),
        (
            'smiles,gap\nCC,1\n',
            'a random split of 1 with --train-data-ratio 0.7 has an empty part; expected at least '
            'one each for training, validation and test',
        ),
    ],
)
def test_bad_files(qm9_data, data, tmp_path, text, message):
    path = tmp_path / 'mine.csv'
    path.write_text(text)
    with pytest.raises(data.DataError) as error:
        _, table = qm9_data.read(str(path), GAP)
        dataset, *_ = data.load('mine', table, qm9_data.task_of(GAP), 'rsgcn')
        data.split(dataset, RANDOM_SPLIT)
    assert str(error.value) == message.replace('FILE', str(path))


ARCHIVE = gzip.compress(b'smiles,gap\n' + bytes(range(48, 123)) * 50)


@pytest.mark.parametrize(
    'content, row',
    [(ARCHIVE[:-20], 2), (ARCHIVE[:30] + b'\xff' * 30 + ARCHIVE[60:], 1)],
    ids=['truncated', 'garbled'],
)
def test_damaged_archives(qm9_data, data, tmp_path, content, row):
    path = tmp_path / 'mine.csv.gz'
    path.write_bytes(content)
    with pytest.raises(data.DataError) as error:
        qm9_data.read(str(path), GAP)
    message = str(error.value)
    assert message.startswith('mine.csv.gz row %d cannot be read as CSV: ' % row)  # zlib's reason
    assert message.endswith('; expected text in UTF-8, plain or compressed by gzip')


FAILING = ['CC', 'C1', '', '[Og]', 'CCO']
REASONS = [
    '',
    'RDKit cannot parse it',
    'no SMILES',
    'atomic number 118, the models support those below 117',
    '',
]


@pytest.mark.parametrize('dense', [True, False])
def test_failures_are_left_out_with_their_reasons(qm9_data, data, dense):
    table = data.typed_smiles(FAILING, ['gap'])
    dataset, found = data.preprocess(table, 'relgcn', dense)
    assert [len(dataset[i][0]) for i in range(len(dataset))] == [2, 3]
    assert found.reason.tolist() == REASONS


def test_failures_from_the_cache_have_their_reasons(qm9_data, data):
    table = data.typed_smiles(FAILING, ['gap'])
    for _ in range(2):
        _, found = data.preprocess(table, 'relgcn')
        assert found.reason.tolist() == REASONS


@pytest.fixture
def error(tmp_path, monkeypatch):
    """Function that returns the error of train_qm9.py in the folder of the test, with `file`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').touch()
    return lambda *words: error_of(QM9 / 'train_qm9.py', '--num-data', '60', *words)


@pytest.mark.parametrize(
    'options, message',
    [
        ('--data missing.csv', 'cannot read FOLDER/missing.csv: No such file or directory'),
        ('--out file', '--out: expected a folder, got the file file'),
        ('--resume', '--resume: the folder result has no snapshot'),
        ('--layout packed --padded-to 9', '--padded-to: expected layout folded, got packed'),
    ],
)
def test_errors_reach_the_user_without_a_traceback(tmp_path, error, options, message):
    assert error(*options.split()) == 'error: ' + message.replace('FOLDER', str(tmp_path))
    assert not (tmp_path / 'result' / 'model.npz').exists()


@pytest.mark.parametrize(
    'device, reason',
    [
        ('-2', 'ValueError: no GPU has this number'),
        ('cuda:0', 'RuntimeError: '),
        ('x', 'RuntimeError: Tried to parse ChainerX'),
    ],
)
def test_devices_that_cannot_be_used(tmp_path, error, device, reason):
    message = error('--device', device)
    assert message.startswith('error: --device %s cannot be used (%s' % (device, reason))
    assert message.endswith(
        '); expected -1 (CPU), 0, 1, ... (that GPU; needs CuPy: docs/install.md) or a Chainer '
        'device, such as @cupy:0'
    )
    assert not (tmp_path / 'result' / 'model.npz').exists()


def test_too_little_memory_is_no_traceback(tmp_path, error):
    message = error('--unit-num', '1000000000000')
    assert message.startswith('error: not enough memory: Unable to allocate ')  # says how much
    assert not (tmp_path / 'result' / 'model.npz').exists()


@pytest.mark.parametrize(
    'name, write, message',
    [
        (
            'model.npz',
            lambda old: old[:1000],
            'FOLDER/model.npz cannot be loaded, it is damaged or another kind of file: File is not '
            'a zip file',
        ),
        ('model.npz', lambda old: None, 'FOLDER/model.npz not found'),
        (
            'settings.json',
            lambda old: b'',
            'FOLDER/settings.json cannot be read, or is not of a run: Expecting value: line 1 '
            'column 1 (char 0)',
        ),
        (
            'settings.json',
            lambda old: None,
            'FOLDER/settings.json not found: expected the folder of a run of train_qm9.py',
        ),
        (
            'settings.json',
            lambda old: b'{}',
            "FOLDER/settings.json cannot be read, or is not of a run: 'script'",
        ),
        (
            'settings.json',
            lambda old: b'[]',
            'FOLDER/settings.json cannot be read, or is not of a run: list indices must be '
            'integers or slices, not str',
        ),
        (
            'settings.json',
            lambda old: old.replace(b'n_qm9', b'n_own'),
            'FOLDER is a folder of train_own.py, expected one of train_qm9.py',
        ),
    ],
)
def test_folders_that_do_not_fit_are_refused(trained, tmp_path, name, write, message):
    for file in ('model.npz', 'settings.json'):
        content = (trained[0] / file).read_bytes()
        content = write(content) if file == name else content
        if content is not None:
            (tmp_path / file).write_bytes(content)
    error = error_of(QM9 / 'predict_qm9.py', '--in-dir', tmp_path, '--smiles', 'C')
    assert error == 'error: ' + message.replace('FOLDER', str(tmp_path))


def test_full_reads_qm9pack(qm9_data, tmp_path, monkeypatch):
    folder = tmp_path / 'qm9pack'
    (folder / 'data').mkdir(parents=True)
    (folder / '__init__.py').write_text('raise ImportError("qm9pack must not be imported")\n')
    columns = [column for _, column, _ in qm9_data.TARGETS.values()]
    for part in (1, 2, 3):
        (folder / 'data' / ('qm9_part%d.csv' % part)).write_text(
            'Index,SMILES,%s\n%d,%s,%s\n'
            % (','.join(columns), part, 'C' * part, ','.join(str(i) for i in range(15)))
        )
    monkeypatch.syspath_prepend(tmp_path)
    description, table = qm9_data.read('full', {'label': 'all'})
    assert "qm9pack's files" in description
    assert table.smiles.tolist() == ['C', 'CC', 'CCC']
    assert table.labels.iloc[2].tolist() == list(range(15))
    assert list(table.table)[:4] == [
        'Index',
        'smiles',
        'A',
        'B',
    ]  # test.csv has the columns of the sample


def test_full_falls_back_on_upstreams_download(qm9_data, tmp_path, monkeypatch, capsys):
    path = tmp_path / 'qm9.csv'  # like upstream's file
    path.write_text(',SMILES1,SMILES2,gap\n0,CC,CC,0.5\n')
    monkeypatch.setattr(qm9_data, 'qm9pack_files', lambda: [])
    monkeypatch.setattr(qm9_data, 'get_qm9_filepath', lambda: str(path))
    description, table = qm9_data.read('full', GAP)
    assert 'qm9pack is not installed' in capsys.readouterr().out
    assert str(path) in description and table.labels.to_numpy().tolist() == [[0.5]]


PREDICTED = 'alpha predicted [bohr^3]'


@pytest.fixture
def predict(trained, tmp_path, monkeypatch):
    """Function that predicts with the trained model in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: run('predict_qm9.py', '--in-dir', trained[0], *words)


@pytest.fixture
def prediction_error(trained, tmp_path, monkeypatch):
    """Function that returns the error of a prediction with the trained model."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: error_of(QM9 / 'predict_qm9.py', '--in-dir', trained[0], *words)


def test_prediction_repeats_the_test_error_of_the_training(trained, predict, tmp_path):
    test = json.loads((trained[0] / 'result.json').read_text())['test']
    line = 'MAE of alpha: %.6g bohr^3, RMSE %.6g, R2 %.4f (30 molecules)\n'
    text = predict('--out', 'p.csv')
    assert line % tuple(test[name]['alpha'] for name in ('MAE', 'RMSE', 'R2')) in text
    errors = [abs(float(row[PREDICTED]) - float(row['alpha'])) for row in rows(tmp_path / 'p.csv')]
    assert len(errors) == 30
    assert numpy.mean(errors) == pytest.approx(test['MAE']['alpha'], rel=1e-9)


def test_predictions_are_beside_the_model_unless_said_otherwise(trained, predict):
    path = trained[0] / 'predictions.csv'
    assert predict('--force').endswith('Predictions: %s\n' % path)
    assert len(rows(path)) == 30


def test_predictions_are_not_replaced(prediction_error, tmp_path):
    path = tmp_path / 'p.csv'
    path.write_text('of before')
    error = prediction_error('--out', path)
    assert error == (
        'error: --out: %s exists; expected a new file, or --force to replace it' % path
    )
    assert path.read_text() == 'of before'


def test_the_best_model_predicts(predict):
    assert 'MAE of alpha: ' in predict('--model', 'best', '--out', 'p.csv')


def test_prediction_of_smiles_writes_no_file_unless_asked(trained, predict):
    before = {path.name: path.read_bytes() for path in trained[0].iterdir()}
    text = predict('--smiles', 'OCC', 'C1')
    assert 'Predictions: ' not in text
    assert "  --smiles 2: 'C1': RDKit cannot parse it\n" in text
    assert {path.name: path.read_bytes() for path in trained[0].iterdir()} == before


@pytest.mark.parametrize(
    'layout, padded_to, is_told',
    [
        ('packed', None, False),
        ('folded', 9, False),
        ('folded', None, True),
        ('padded', None, True),
        ('dense', None, True),
    ],
)
def test_predictions_that_depend_on_their_batch_are_said_to(
    qm9_data, capsys, layout, padded_to, is_told
):
    from common import prediction

    settings = {'layout': layout, 'padded_to': padded_to, 'method': 'rsgcn'}
    prediction.from_smiles(['C'], settings, qm9_data.task_of(GAP))
    note = (
        'Note: as in Chainer Chemistry, a prediction may depend on the other molecules of its '
        'batch; training with --padded-to largest avoids that\n'
    )
    assert capsys.readouterr().err == (note if is_told else '')


@pytest.fixture
def from_file(predict, tmp_path):
    """Printed text and rows of a prediction for a file with odd rows."""
    (tmp_path / 'mine.csv').write_text('smiles,alpha\nCCO,30\nC1CC,1\nOCC,\nCC,>5\n')
    text = predict('--data', 'mine.csv', '--out', 'a.csv')
    return text, rows(tmp_path / 'a.csv')


def test_a_prediction_has_a_row_for_every_molecule_of_a_file(from_file):
    _, table = from_file
    assert [row['smiles'] for row in table] == ['CCO', 'C1CC', 'OCC', 'CC']


def test_molecules_that_cannot_be_predicted_are_listed(from_file):
    text, table = from_file
    line = "1 molecule(s) could not be used\n  mine.csv row 3: 'C1CC': RDKit cannot parse it\n"
    assert line in text
    assert table[1][PREDICTED] == ''
    reasons = [row['not predicted'] for row in table]
    assert reasons == ['', 'RDKit cannot parse it', '', '']


def test_unknown_labels_are_left_out_of_the_error(from_file):
    text, table = from_file
    assert (
        "Unknown labels: mine.csv row 5: target alpha is '>5', expected a finite number (rows "
        'like this: 1)\n' in text
    )
    assert re.search(r'MAE of alpha: \S+ bohr\^3, RMSE \S+, R2 nan \(1 molecules\)\n', text)
    assert table[3]['alpha'] == '>5'  # the text of the file


def test_predictions_of_smiles_are_those_of_a_file(from_file, predict, tmp_path):
    predict('--out', 'b.csv.gz', '--smiles', 'OCC', 'CC')
    header, ethanol, _ = gzip.decompress((tmp_path / 'b.csv.gz').read_bytes()).decode().splitlines()
    assert header == 'smiles,' + PREDICTED
    value = pytest.approx(float(ethanol.split(',')[1]), rel=1e-5)
    _, table = from_file
    assert float(table[0][PREDICTED]) == float(table[2][PREDICTED]) == value


@pytest.mark.parametrize('name', ['', 'no/p.csv'])
def test_predictions_need_a_file_in_a_folder(prediction_error, tmp_path, name):
    path = tmp_path / name
    message = 'error: --out: cannot write %s: it is a folder, or its folder does not exist' % path
    assert prediction_error('--smiles', 'C', '--out', path) == message


@pytest.mark.slow
def test_demo(tmp_path):
    text = python(QM9 / 'demo.py', '--epoch', '2', '--num-data', '300', cwd=tmp_path).stdout
    assert 'limit 1e-05: equal' in text
    table = re.findall(r'^  (\S.*?)' + 3 * r' +(-?\d+\.\d+)' + '$', text, re.MULTILINE)[:4]
    dense, folded, padded_to, packed = (list(map(float, values)) for _, *values in table)
    assert folded == pytest.approx(dense, rel=1e-3) and len(set(dense)) == 3
    assert padded_to == pytest.approx(dense[:1] * 3, rel=1e-3)
    assert packed == pytest.approx(dense[1:2] * 3, rel=1e-3)
    assert text.count('whole training step') == text.count('adjacency of a batch') >= 1
    for name in ('learning_curve.png', 'fit.png'):
        assert (tmp_path / 'result' / 'demo' / name).read_bytes().startswith(b'\x89PNG')
