"""The scripts of examples/qm9, run as a user runs them."""

import functools
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
METHODS = 'rsgcn relgcn ggnn gin nfp relgat gnnfilm rsgcn_gwm ggnn_gwm gin_gwm nfp_gwm'.split()
SLOW = [pytest.param(method, '--dense', marks=pytest.mark.slow) for method in METHODS]
LAYOUTS = '--dense', '--layout packed'


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
    out = tmp_path_factory.mktemp('trained')
    return out, run('train_qm9.py', '--out', out, *ALPHA)


def test_sample_is_the_one_that_make_sample_writes():
    with gzip.open(QM9 / 'data' / 'qm9_sample.csv.gz') as f:
        text = f.read()
    digest = '2562bb454932be7958f4f01455ff89e77bb5f38bbf24d37c9df48c51cbc162a6'
    assert hashlib.sha256(text).hexdigest() == digest


@pytest.mark.parametrize('dense', [False, True])
def test_sample_has_4000_usable_molecules_and_all_targets(qm9_data, data, dense):
    """They are what upstream's parser makes of them."""
    from chainer_chemistry.dataset.parsers import CSVFileParser
    from chainer_chemistry.dataset.preprocessors import RSGCNPreprocessor
    from chainer_chemistry.datasets import get_qm9_label_names

    assert list(qm9_data.TARGETS) == get_qm9_label_names()
    settings = {'label': 'all'}
    _, table = qm9_data.read('sample', settings)
    dataset, table = data.preprocess(table, qm9_data.task_of(settings), 'rsgcn', dense)
    assert len(dataset) == 4000 and (table.reason == '').all()
    as_floats = functools.partial(numpy.asarray, dtype='f')
    parser = CSVFileParser(
        RSGCNPreprocessor(),
        postprocess_label=as_floats,
        labels=list(qm9_data.TARGETS),
        smiles_col='smiles',
    )
    index = [0, *range(1000, 1050)]
    expected = parser.parse(qm9_data.SAMPLE, target_index=index)['dataset']
    for i, upstream in zip(index, expected):
        for a, b in zip(dataset[i], upstream):
            assert a.dtype == b.dtype
            numpy.testing.assert_array_equal(a if hasattr(a, 'ndim') else a.to_dense()[0], b)
    methane = '157.7118 157.70997 157.70699 0 13.21 -0.3877 0.1171 0.5048 35.3641 0.044749'
    methane += ' -40.47893 -40.476062 -40.475117 -40.498597 6.469'  # of QM9's first file
    numpy.testing.assert_array_equal(dataset[0][2], numpy.float32(methane.split()))


def test_num_data_spreads_over_the_data(data):
    assert data.spread(4000, 4).tolist() == [0, 1000, 2000, 3000]
    assert len(data.spread(40, 50)) == len(data.spread(40, -1)) == 40


def test_split_is_a_partition_decided_by_the_seed(data):
    settings = [dict(RANDOM_SPLIT, seed=seed) for seed in (1, 1, 2)]
    parts, same, other = [data.split(range(101), of) for of in settings]
    assert [len(part) for part in parts] == [70, 15, 16]
    assert sorted(numpy.concatenate(parts)) == list(range(101))
    assert all((a == b).all() for a, b in zip(parts, same))
    assert (parts[0] != other[0]).any()


def test_training_prints_data_split_and_error_in_the_unit(trained):
    out, text = trained
    assert 'the sample of QM9 in this repository: 4000 molecules, 200 of them used' in text
    assert 'alpha (bohr^3)' in text
    assert 'Split: 140 training, 30 validation, 30 test' in text
    assert '\033' not in text
    assert len(json.loads((out / 'log').read_text())) == 2
    result = json.loads((out / 'result.json').read_text())
    test = result['test']
    errors = test['MAE']['alpha'], test['MAE of the mean alone']['alpha']
    line = 'MAE of alpha: %.6g bohr^3 (30 molecules; always the mean: %.6g)' % errors
    assert line in text
    assert 'Time a step: %.2f ms' % result['milliseconds a step']['median'] in text
    assert 'Peak memory: host %.0f MB' % (result['peak memory in bytes']['host'] / 1e6) in text
    assert (result['epochs'], result['steps'], result['milliseconds a step']['steps']) == (2, 9, 7)
    assert result['updater'] == 'standard' and result['settings']['padded_to'] == 9
    for name in ('learning_curve.png', 'fit.png'):
        assert (out / name).read_bytes().startswith(b'\x89PNG')


def test_resumed_training_equals_an_uninterrupted_one(trained, tmp_path):
    """Equal seeds train equal models, too."""
    train = ['train_qm9.py', '--out', tmp_path, *ALPHA]
    run(*train, '--epoch', '1')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for option, value, line in (
        ('--label', 'gap', "label was 'alpha' in the run in %s, and is 'gap' now" % tmp_path),
        ('--padded-to', 'batch', 'padded_to was 9 in the run in'),
        ('--num-data', '100', 'num_data was 200 in the run in'),
    ):
        message = error_of(QM9 / train[0], *train[1:], '--resume', option, value)
        assert message.startswith('error: --resume: ' + line)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
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
    assert 'MAE of U0: ' in text and ' cal/(mol K) ' in text
    assert numpy.isfinite(arrays(tmp_path / 'model.npz')['predictor/mlp/l_out/W']).all()


@pytest.mark.slow
def test_layouts_with_phantom_atoms_train_as_the_dense_model_does(tmp_path):
    logs = {}
    layouts = {'padded': '--layout padded', 'folded': '--padded-to batch'}
    layouts.update(dense='--dense', packed='--layout packed')
    for name, option in layouts.items():
        run('train_qm9.py', '--method', 'relgcn', '--out', tmp_path / name, *option.split(), *ALPHA)
        log = json.loads((tmp_path / name / 'log').read_text())
        logs[name] = [entry['validation/main/loss'] for entry in log]
    for name in ('padded', 'folded'):
        assert logs[name] == pytest.approx(logs['dense'], rel=1e-4)
    assert logs['packed'] != pytest.approx(logs['dense'], rel=1e-2)
    again = run('predict_qm9.py', '--in-dir', tmp_path / 'padded')  # in the layout of the training
    result = json.loads((tmp_path / 'padded' / 'result.json').read_text())
    assert 'MAE of alpha: %.6g ' % result['test']['MAE']['alpha'] in again


@pytest.mark.parametrize('method, options', [*(('ggnn', how) for how in LAYOUTS), *SLOW])
def test_predictions_are_in_the_layout_of_the_training(tmp_path, method, options):
    """A model trained dense has learned with padding: it is predicted with it."""
    options = ['--method', method, *options.split(), *ALPHA, '--num-data', '60']
    run('train_qm9.py', '--out', tmp_path, *options)
    mae = json.loads((tmp_path / 'result.json').read_text())['test']['MAE']['alpha']
    text = run('predict_qm9.py', '--in-dir', tmp_path)
    assert float(re.search('MAE of alpha: ([0-9.]+) ', text).group(1)) == pytest.approx(mae, 1e-4)


def test_methods_are_those_that_are_tested(data):
    from common import tasks

    assert tasks.METHODS == tuple(METHODS)


@pytest.mark.parametrize(
    'text, message',
    [
        ('smiles,gap\nCC,1\n\nCCC,high\n', "mine.csv row 4: target gap is 'high', expected a fin"),
        ('smiles,gap\nCC,nan\n', "mine.csv row 2: target gap is 'nan', expected a finite number"),
        ('smiles,gap\nCC,1e39\n', "mine.csv row 2: target gap is '1e39', expected a finite"),
        ('smiles,gap\nCC,%s\n' % (400 * 'x'), "target gap is '%s, expected" % (59 * 'x')),
        ('smiles, gap\nCC,1\n', "'smiles', 'gap', separated by commas, found 'smiles', ' gap'"),
        ('SMILES,gap\nCC,1\n', "has no column 'smiles'"),
        ('', 'cannot be read as CSV'),
        ('smiles,gap\n', 'the data have no molecules'),
        ('smiles,gap\nC1,1\n', "one molecule that can be used, got 1, the first: 'C1': RDKit"),
        ('smiles,gap\n[Og],1\n', 'none of the 1 molecule(s) can be used, the first: mine.csv row'),
        ('smiles,gap\nCC,1\n', 'a random split of 1 with --train-data-ratio 0.7 has an empty part'),
    ],
)
def test_bad_files(qm9_data, data, tmp_path, text, message):
    path = tmp_path / 'mine.csv'
    path.write_text(text)
    with pytest.raises(data.DataError) as error:
        _, table = qm9_data.read(str(path), GAP)
        dataset, *_ = data.load('mine', table, qm9_data.task_of(GAP), 'rsgcn')
        data.split(dataset, RANDOM_SPLIT)
    assert message in str(error.value)


def test_damaged_archives(qm9_data, data, tmp_path):
    whole = gzip.compress(b'smiles,gap\n' + bytes(range(48, 123)) * 50)
    path = tmp_path / 'mine.csv.gz'
    for text in (whole[:-20], whole[:30] + b'\xff' * 30 + whole[60:], b'smiles,gap\n'):
        path.write_bytes(text)
        with pytest.raises(data.DataError, match='cannot be read as CSV'):
            qm9_data.read(str(path), GAP)


def test_failures_are_the_same_dense_and_from_the_cache(qm9_data, data):
    table = data.typed_smiles(['CC', 'C1', '', '[Og]', 'CCO'], 1)
    task = qm9_data.task_of(GAP)
    results = [data.preprocess(table, task, 'relgcn', dense) for dense in (True, False, False)]
    for dataset, found in results:
        assert [len(dataset[i][0]) for i in range(2)] == [2, 3]
        assert numpy.flatnonzero(found.reason).tolist() == [1, 2, 3]
        assert found.reason.tolist() == results[0][1].reason.tolist()


@pytest.mark.parametrize(
    'options, message',
    [
        ('--data missing.csv', 'data file not found: '),
        ('--out file', '--out: expected a folder, got the file file'),
        ('--resume', '--resume: the folder result has no snapshot'),
        ('--device -2', '--device -2 cannot be used (ValueError: no GPU has this number)'),
        ('--device cuda:0', '--device cuda:0 cannot be used (RuntimeError: '),
        ('--device x', '--device x cannot be used (RuntimeError: Tried to parse ChainerX'),
        ('--layout packed --padded-to 9', '--padded-to: expected layout folded, got packed'),
        ('--unit-num 1000000000000', 'not enough memory: Unable to allocate'),
    ],
)
def test_errors_reach_the_user_without_a_traceback(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').touch()
    assert error_of(QM9 / 'train_qm9.py', '--num-data', '60', *options.split()).startswith(
        'error: ' + message
    )
    assert not (tmp_path / 'result' / 'model.npz').exists()


@pytest.mark.parametrize(
    'name, write, message',
    [
        ('model.npz', lambda old: old[:1000], 'model.npz cannot be loaded, it is damaged'),
        ('model.npz', lambda old: None, 'model.npz not found'),
        ('settings.json', lambda old: old[:20], 'settings.json cannot be read, or is not of a run'),
        ('settings.json', lambda old: None, 'not found: expected the folder of a run of train_q'),
        ('settings.json', lambda old: b'{}', "or is not of a run: 'script'"),
        ('settings.json', lambda old: b'[]', 'settings.json cannot be read, or is not of a run'),
        ('settings.json', lambda old: old.replace(b'n_qm9', b'n_own'), 'is a folder of train_own.'),
    ],
)
def test_folders_that_do_not_fit_are_refused(trained, tmp_path, name, write, message):
    for file in ('model.npz', 'settings.json'):
        content = (trained[0] / file).read_bytes()
        content = write(content) if file == name else content
        if content is not None:
            (tmp_path / file).write_bytes(content)
    assert message in error_of(QM9 / 'predict_qm9.py', '--in-dir', tmp_path, '--smiles', 'C')


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
    assert table.labels[2].tolist() == list(range(15))


def test_full_falls_back_on_upstreams_download(qm9_data, tmp_path, monkeypatch, capsys):
    path = tmp_path / 'qm9.csv'  # as upstream writes it
    path.write_text(',SMILES1,SMILES2,gap\n0,CC,CC,0.5\n')
    monkeypatch.setattr(qm9_data, 'qm9pack_files', lambda: [])
    monkeypatch.setattr(qm9_data, 'get_qm9_filepath', lambda: str(path))
    description, table = qm9_data.read('full', GAP)
    assert 'qm9pack is not installed' in capsys.readouterr().out
    assert str(path) in description and table.labels.tolist() == [[0.5]]


def test_prediction_repeats_the_test_error_of_the_training(trained):
    out, _ = trained
    mae = json.loads((out / 'result.json').read_text())['test']['MAE']['alpha']
    predict = 'predict_qm9.py', '--in-dir', out
    assert 'MAE of alpha: %.6g ' % mae in run(*predict)
    result = rows(out / 'predictions.csv')
    names = 'alpha predicted [bohr^3]', 'alpha true [bohr^3]'
    errors = [abs(float(row[names[0]]) - float(row[names[1]])) for row in result]
    assert len(errors) == 30 and numpy.mean(errors) == pytest.approx(mae, rel=1e-4)
    # What is there is not replaced, and --smiles writes no file.
    before = (out / 'predictions.csv').read_bytes()
    error = error_of(QM9 / predict[0], *predict[1:])
    assert 'predictions.csv exists; expected a new file, or --force' in error
    text = run(*predict, '--smiles', 'OCC', 'C1')
    assert 'Predictions: ' not in text and "--smiles 2: 'C1': RDKit cannot parse it" in text
    assert (out / 'predictions.csv').read_bytes() == before
    assert not (out / 'predictions_failed.csv').exists()
    assert 'MAE of alpha: ' in run(*predict, '--model', 'best', '--force')


def test_prediction_of_smiles_and_files(trained, tmp_path):
    out, _ = trained
    path = tmp_path / 'mine.csv'
    path.write_text('smiles,alpha\nCCO,30\nC1CC,1\nOCC,\nCC,>5\n')
    predict = QM9 / 'predict_qm9.py', '--in-dir', out
    text = run_here(*predict, '--data', path, '--out', tmp_path / 'a.csv')
    assert '1 molecule(s) could not be used' in text and '(1 molecules)' in text
    assert "Unknown labels: mine.csv row 5: target alpha is '>5', expected a finite" in text
    from_file = rows(tmp_path / 'a.csv')
    assert [row['smiles'] for row in from_file] == ['CCO', 'C1CC', 'OCC', 'CC']
    assert from_file[1]['alpha predicted [bohr^3]'] == from_file[3]['alpha true [bohr^3]'] == ''
    assert [row['smiles'] for row in rows(tmp_path / 'a_failed.csv')] == ['C1CC']
    run_here(*predict, '--out', tmp_path / 'b.csv.gz', '--smiles', 'OCC', 'CC')
    table = gzip.decompress((tmp_path / 'b.csv.gz').read_bytes()).decode().splitlines()
    assert table[0] == 'smiles,alpha predicted [bohr^3]'
    values = [float(row['alpha predicted [bohr^3]']) for row in (from_file[0], from_file[2])]
    assert values == pytest.approx(2 * [float(table[1].split(',')[1])], rel=1e-5)
    for name in ('', 'no/p.csv'):
        text = error_of(*predict, '--smiles', 'C', '--out', tmp_path / name)
        assert text.startswith('error: --out: ')


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
