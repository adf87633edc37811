"""The scripts of examples/qm9, run as a user runs them."""

import gzip
import hashlib
import json
import signal
import re
import subprocess

import numpy
import pytest

from tests.examples.scripts import arrays
from tests.examples.scripts import command
from tests.examples.scripts import environment
from tests.examples.scripts import EXAMPLES
from tests.examples.scripts import imported
from tests.examples.scripts import rows
from tests.examples.scripts import run as run_script
from tests.examples.scripts import run_at_once

QM9 = EXAMPLES / 'qm9'
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
QUICK = ['--epoch', '2', '--unit-num', '8', '--conv-layers', '2', '--num-data', '200']


def run(script, *arguments, **options):
    return run_at_once(QM9 / script, *arguments, **options)


def run_by_python(script, *arguments, **options):
    return run_script(QM9 / script, *arguments, **options)


@pytest.fixture(scope='module')
def qm9_data():
    return imported(QM9, 'qm9_data')


@pytest.fixture(scope='module')
def data(qm9_data):
    from common import data

    return data


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The output folder of a short training, and what was printed."""
    out = tmp_path_factory.mktemp('trained')
    return out, run_by_python('train_qm9.py', '--label', 'alpha', '--out', out, *QUICK)


# The sample


def test_sample_is_the_one_that_make_sample_writes():
    with gzip.open(QM9 / 'data' / 'qm9_sample.csv.gz') as f:
        text = f.read()
    assert hashlib.sha256(text).hexdigest() == (
        '2562bb454932be7958f4f01455ff89e77bb5f38bbf24d37c9df48c51cbc162a6'
    )


@pytest.mark.parametrize('dense', [False, True])
def test_sample_has_4000_usable_molecules_and_all_targets(qm9_data, data, dense):
    task = qm9_data.task_of('all')
    _, table = qm9_data.read_qm9('sample', task)
    dataset, kept, failures = data.preprocess(table, 'rsgcn', task.labels(table), dense)
    assert len(dataset) == len(kept) == 4000 and not failures
    atoms, adj, labels = dataset[0]  # methane, with the numbers of QM9's first file
    assert atoms.tolist() == [6] and (adj if dense else adj.to_dense()[0]).tolist() == [[1]]
    numpy.testing.assert_array_equal(
        labels,
        numpy.float32(
            [
                157.7118,
                157.70997,
                157.70699,
                0,
                13.21,
                -0.3877,
                0.1171,
                0.5048,
                35.3641,
                0.044749,
                -40.47893,
                -40.476062,
                -40.475117,
                -40.498597,
                6.469,
            ]
        ),
    )


def test_targets_are_upstreams(qm9_data):
    from chainer_chemistry.datasets import get_qm9_label_names

    assert list(qm9_data.TARGETS) == get_qm9_label_names()


@pytest.mark.parametrize('dense', [False, True])
def test_preprocessing_is_upstreams(qm9_data, data, dense):
    from chainer_chemistry.dataset.parsers import CSVFileParser
    from chainer_chemistry.dataset.preprocessors import RSGCNPreprocessor

    task = qm9_data.task_of('gap')
    table = qm9_data.read_qm9('sample', task)[1].iloc[1000:1100]
    dataset, _, _ = data.preprocess(table, 'rsgcn', task.labels(table), dense)
    parser = CSVFileParser(
        RSGCNPreprocessor(),
        labels='gap',
        smiles_col='smiles',
        postprocess_label=lambda label: numpy.asarray(label, 'f'),
    )
    expected = parser.parse(qm9_data.SAMPLE, target_index=range(1000, 1100))['dataset']
    assert len(dataset) == len(expected) == 100
    for i, upstream in enumerate(expected):
        for a, b in zip(dataset[i], upstream):
            assert a.dtype == b.dtype
            numpy.testing.assert_array_equal(a if hasattr(a, 'ndim') else a.to_dense()[0], b)


def test_num_data_spreads_over_the_data(qm9_data, data):
    _, table = qm9_data.read_qm9('sample', qm9_data.task_of('gap'))
    assert data.thin_out(table, 4)['smiles'].tolist() == [
        table['smiles'][i] for i in (0, 1000, 2000, 3000)
    ]
    assert len(data.thin_out(table, 5000)) == len(data.thin_out(table, -1)) == 4000


def test_split_is_a_partition_decided_by_the_seed(data):
    parts = data.split_indices(101, 0.7, 1)
    assert [len(part) for part in parts] == [70, 15, 16]
    assert sorted(numpy.concatenate(parts)) == list(range(101))
    assert all((a == b).all() for a, b in zip(parts, data.split_indices(101, 0.7, 1)))
    assert (parts[0] != data.split_indices(101, 0.7, 2)[0]).any()


# Training


def test_training_prints_data_split_and_error_in_the_unit(trained):
    out, text = trained
    assert 'the sample of QM9 in this repository: 4000 molecules, 200 of them used' in text
    assert 'alpha (bohr^3)' in text
    assert 'Split: 140 training, 30 validation, 30 test' in text
    assert '\033' not in text
    assert len(json.loads((out / 'log').read_text())) == 2
    result = json.loads((out / 'result.json').read_text())
    line = next(line for line in text.splitlines() if line.startswith('alpha '))
    assert '%.5g' % result['test']['MAE']['alpha'] == line.split()[1]
    assert 'Time a step: %.2f ms' % result['milliseconds a step']['median'] in text
    assert 'Peak memory: host %.0f MB' % (result['peak memory in bytes']['host'] / 1e6) in text
    assert (result['epochs'], result['steps'], result['milliseconds a step']['steps']) == (2, 9, 7)
    assert result['updater'] == 'standard'
    assert (out / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')


def test_equal_seeds_train_equal_models(trained, tmp_path):
    out, _ = trained
    run('train_qm9.py', '--label', 'alpha', '--out', tmp_path, *QUICK)
    ours, other = arrays(out / 'model.npz'), arrays(tmp_path / 'model.npz')
    assert ours.keys() == other.keys()
    for name in ours:
        numpy.testing.assert_array_equal(ours[name], other[name])


def test_resumed_training_equals_an_uninterrupted_one(trained, tmp_path):
    out, _ = trained
    first = ['--epoch', '1'] + QUICK[2:]
    run('train_qm9.py', '--label', 'alpha', '--out', tmp_path, *first)
    snapshot = tmp_path / 'snapshot.npz'
    text = run('train_qm9.py', '--label', 'alpha', '--out', tmp_path, '--resume', snapshot, *QUICK)
    assert 'epoch 1' in text
    ours, other = arrays(out / 'model.npz'), arrays(tmp_path / 'model.npz')
    for name in ours:
        numpy.testing.assert_array_equal(ours[name], other[name])
    log, other_log = [
        [
            {key: entry[key] for key in entry if key != 'elapsed_time'}
            for entry in json.loads((folder / 'log').read_text())
        ]
        for folder in (out, tmp_path)
    ]
    assert log == other_log


@pytest.mark.slow
def test_interrupted_training_goes_on_at_the_same_step(tmp_path):
    options = [
        '--label',
        'gap',
        '--unit-num',
        '8',
        '--conv-layers',
        '2',
        '--num-data',
        '1000',
        '--epoch',
        '4',
        '--batchsize',
        '4',
    ]
    with subprocess.Popen(
        command(QM9 / 'train_qm9.py', options + ['--out', tmp_path / 'a']),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        text = ''
        for line in process.stdout:
            text += line
            if line.startswith('1 '):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130, text
    assert '--resume %s' % (tmp_path / 'a' / 'snapshot.npz') in text
    # The interrupt came in the middle of the training, not at its end.
    assert not (tmp_path / 'a' / 'model.npz').exists()
    run(
        'train_qm9.py',
        '--out',
        tmp_path / 'a',
        '--resume',
        tmp_path / 'a' / 'snapshot.npz',
        *options,
    )
    run('train_qm9.py', '--out', tmp_path / 'b', *options)
    ours, other = arrays(tmp_path / 'a' / 'model.npz'), arrays(tmp_path / 'b' / 'model.npz')
    for name in ours:
        numpy.testing.assert_array_equal(ours[name], other[name])


def test_snapshot_of_a_finished_training_only_tests_again(trained, tmp_path):
    out, text = trained
    again = run(
        'train_qm9.py',
        '--label',
        'alpha',
        '--out',
        tmp_path,
        '--resume',
        out / 'snapshot.npz',
        *QUICK,
    )
    assert 'nothing to train' in again
    line = [line for line in text.splitlines() if line.startswith('alpha ')][0]
    assert line in again
    assert (tmp_path / 'learning_curve.png').exists()


def test_resume_refuses_other_settings(trained, tmp_path):
    out, _ = trained
    message = run(
        'train_qm9.py',
        '--label',
        'gap',
        '--out',
        tmp_path,
        '--resume',
        out / 'snapshot.npz',
        *QUICK,
        status=1,
    )
    assert "label was 'alpha'" in message and "is 'gap' now" in message


def test_other_settings_remove_a_stale_model(trained, data, tmp_path):
    out, _ = trained
    names = ['settings.json', 'model.npz', 'snapshot.npz', 'result.json']
    for name in names:
        (tmp_path / name).write_bytes((out / name).read_bytes())
    from common import files

    settings = json.loads((out / 'settings.json').read_text())
    files.start_folder(tmp_path, settings)
    assert all((tmp_path / name).exists() for name in names)
    files.start_folder(tmp_path, dict(settings, unit_num=9))
    assert not any((tmp_path / name).exists() for name in names[1:])


def test_all_targets_dense(tmp_path):
    text = run('train_qm9.py', '--dense', '--out', tmp_path, *QUICK)
    assert 'U0 ' in text and 'cal/(mol K)' in text
    assert numpy.isfinite(arrays(tmp_path / 'model.npz')['predictor/mlp/l_out/W']).all()


@pytest.mark.slow
def test_layouts_with_phantom_atoms_train_as_the_dense_model_does(tmp_path):
    logs = {}
    for name, option in (
        ('dense', ['--dense']),
        ('padded', ['--layout', 'padded']),
        ('folded', []),
        ('packed', ['--layout', 'packed']),
    ):
        run(
            'train_qm9.py',
            '--label',
            'alpha',
            '--method',
            'relgcn',
            '--out',
            tmp_path / name,
            *option,
            *QUICK,
        )
        log = json.loads((tmp_path / name / 'log').read_text())
        logs[name] = [entry['validation/main/loss'] for entry in log]
    for name in ('padded', 'folded'):
        assert logs[name] == pytest.approx(logs['dense'], rel=1e-4)
    assert logs['packed'] != pytest.approx(logs['dense'], rel=1e-2)
    again = run('predict_qm9.py', '--in-dir', tmp_path / 'padded')  # in the layout of the training
    result = json.loads((tmp_path / 'padded' / 'result.json').read_text())
    assert 'MAE of alpha: %.6g ' % result['test']['MAE']['alpha'] in again


def test_predictions_are_in_the_layout_of_the_training(tmp_path):
    """A model trained dense has learned with padding: it is predicted with it, or warned of."""
    options = ['--label', 'alpha', '--method', 'ggnn', *QUICK]
    run('train_qm9.py', '--dense', '--out', tmp_path, *options)
    assert json.loads((tmp_path / 'settings.json').read_text())['layout'] == 'dense'
    mae = json.loads((tmp_path / 'result.json').read_text())['test']['MAE']['alpha']
    predict = command(QM9 / 'predict_qm9.py', ['--in-dir', tmp_path])
    for more, differs in (
        ([], False),
        (['--dense'], False),
        (['--layout', 'padded'], False),
        (['--layout', 'folded'], False),
        (['--layout', 'packed'], True),
    ):
        done = subprocess.run(
            predict + more, env=environment(), capture_output=True, text=True, check=True
        )
        found = float(re.search('MAE of alpha: ([0-9.]+) ', done.stdout).group(1))
        assert (abs(found / mae - 1) > 1e-3) == differs
        warning = 'Warning: the model was trained on dense batches; predictions from packed ones'
        assert done.stderr.count('\n') == done.stderr.count(warning) == differs


def test_padded_to_the_largest_of_the_data_set(tmp_path):
    run('train_qm9.py', '--layout', 'folded', '--padded-to', 'largest', '--out', tmp_path, *QUICK)
    assert json.loads((tmp_path / 'settings.json').read_text())['padded_to'] == 9


def test_methods_are_those_that_can_be_swapped(data):
    from common import tasks

    assert tasks.METHODS == tuple(METHODS)
    assert tasks.supported_methods()[:5] == METHODS[:5]


@pytest.mark.parametrize(
    'method',
    [*METHODS[:2], *(pytest.param(method, marks=pytest.mark.slow) for method in METHODS[2:])],
)
def test_every_method_trains_sparse_and_predicts_dense_the_same(data, tmp_path, method):
    from common import tasks

    if method not in tasks.supported_methods():
        pytest.skip('sparsify does not take %s' % method)
    run(
        'train_qm9.py',
        '--method',
        method,
        '--label',
        'mu',
        '--out',
        tmp_path,
        '--num-data',
        '60',
        '--epoch',
        '1',
        '--unit-num',
        '8',
        '--conv-layers',
        '2',
    )
    predictions = []
    for dense in ([], ['--dense']):  # in the same batches
        run('predict_qm9.py', '--in-dir', tmp_path, '--out', tmp_path / 'p.csv', *dense)
        predictions.append([float(row['mu predicted [D]']) for row in rows(tmp_path / 'p.csv')])
    assert len(predictions[0]) == 9 and numpy.std(predictions[0]) > 0
    numpy.testing.assert_allclose(predictions[0], predictions[1], rtol=1e-4)


# Data of the user's own


def test_broken_molecules_are_counted_and_listed(tmp_path):
    path = tmp_path / 'mine.csv'
    smiles = ['CCO', 'C1CC', 'CC', '', 'CCC', 'CCN', '[Og]', 'CCF', 'CCCC', 'C=C']
    path.write_text('smiles,gap\n' + ''.join('%s,0.%d\n' % (s, i) for i, s in enumerate(smiles)))
    text = run('train_qm9.py', '--data', path, '--label', 'gap', '--epoch', '1', '--out', tmp_path)
    assert '10 molecules, 7 of them used' in text
    assert '3 molecule(s) could not be used' in text
    assert "mine.csv row 3: 'C1CC': RDKit cannot parse it" in text
    assert "mine.csv row 8: '[Og]': atomic number 118" in text
    failed = rows(tmp_path / 'failed.csv')
    assert [row['row'] for row in failed] == ['mine.csv row %d' % i for i in (3, 5, 8)]


@pytest.mark.parametrize(
    'text, message',
    [
        (
            'smiles,gap\nCC,1\n\nCCC,high\n',
            "mine.csv row 4: target gap is 'high', expected a finite",
        ),
        ('smiles,gap\nCC,nan\n', "mine.csv row 2: target gap is 'nan', expected a finite number"),
        ('smiles,homo\nCC,1\n', 'has no column gap; expected the columns smiles, gap, found'),
        ('SMILES,gap\nCC,1\n', 'has no column smiles'),
        ('', 'cannot be read as CSV'),
        ('smiles,gap\n', 'the data have no molecules'),
        (
            'smiles,gap\nC1,1\n',
            "none of the 1 molecule(s) can be used, the first: mine.csv row 2: 'C1'",
        ),
        ('smiles,gap\nCC,1\n', 'leaves a part of the split empty'),
    ],
)
def test_bad_files(qm9_data, data, tmp_path, text, message):
    path = tmp_path / 'mine.csv'
    path.write_text(text)
    task = qm9_data.task_of('gap')
    with pytest.raises(data.DataError) as error:
        _, table = qm9_data.read_qm9(str(path), task)
        dataset, _, _ = data.load('mine', table, task, 'rsgcn', -1, tmp_path / 'failed.csv', False)
        data.split_indices(len(dataset), 0.7, 0)
    assert message in str(error.value)


def test_damaged_archives(qm9_data, data, tmp_path):
    whole = gzip.compress(b'smiles,gap\n' + bytes(range(48, 123)) * 50)
    path = tmp_path / 'mine.csv.gz'
    for text in (whole[:-20], whole[:30] + b'\xff' * 30 + whole[60:], b'smiles,gap\n'):
        path.write_bytes(text)
        with pytest.raises(data.DataError, match='cannot be read as CSV'):
            qm9_data.read_qm9(str(path), qm9_data.task_of('gap'))


def test_failures_are_the_same_from_the_cache(data):
    table = data.typed_smiles(['CC', 'C1', '', '[Og]', 'CCO'], ['gap'])
    labels = table[['gap']].to_numpy('f')
    (_, kept, failures), *others = [
        data.preprocess(table, 'relgcn', labels, cache=cache) for cache in (False, True, True)
    ]
    assert kept == [0, 4] and len(failures) == 3
    assert [other[1:] for other in others] == [(kept, failures)] * 2


def test_an_error_that_is_not_about_molecules_is_not_taken_for_one(data, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError('something else')

    monkeypatch.setattr(data, 'from_smiles', fail)
    table = data.typed_smiles(['CC', 'C1'], ['gap'])
    with pytest.raises(ValueError, match='something else'):
        data.preprocess(table, 'rsgcn', table[['gap']].to_numpy('f'))
    with pytest.raises(data.DataError, match=r'none of the 1 molecule\(s\) can be used'):
        data.preprocess(table[1:], 'rsgcn', table[['gap']].to_numpy('f')[1:])


def test_errors_reach_the_user_without_a_traceback(tmp_path):
    missing = tmp_path / 'missing.csv'
    message = run(
        'train_qm9.py', '--data', 'missing.csv', '--out', tmp_path, status=1, cwd=tmp_path
    )
    assert message == 'error: data file not found: %s\n' % missing
    message = run('predict_qm9.py', '--in-dir', tmp_path, status=1)
    assert message.startswith('error: ') and 'is not an output folder of train_qm9.py' in message
    message = run('train_qm9.py', '--train-data-ratio', '1.5', status=2)
    assert 'got 1.5, expected a number between 0 and 1' in message
    (tmp_path / 'file').touch()
    message = run('train_qm9.py', '--out', tmp_path / 'file', status=1)
    assert message == 'error: --out: cannot make the folder %s: File exists\n' % (tmp_path / 'file')


@pytest.mark.parametrize(
    'name, write',
    [
        ('model.npz', lambda old: old[:1000]),
        ('settings.json', lambda old: old[:20]),
        ('settings.json', lambda old: old.replace(b'train_qm9.py', b'train_own.py')),
    ],
)
def test_folders_that_do_not_fit_are_refused(trained, tmp_path, name, write):
    for file in ('model.npz', 'settings.json'):
        (tmp_path / file).write_bytes((trained[0] / file).read_bytes())
    (tmp_path / name).write_bytes(write((tmp_path / name).read_bytes()))
    message = run('predict_qm9.py', '--in-dir', tmp_path, '--smiles', 'C', status=1)
    assert (
        message.startswith('error: ')
        and message.count('\n') == 1
        and any(
            part in message
            for part in ('damaged', 'settings.json cannot be read', 'expected one of')
        )
    )


def test_a_model_is_no_snapshot(trained, tmp_path):
    message = run(
        'train_qm9.py',
        '--label',
        'alpha',
        '--out',
        tmp_path,
        '--resume',
        trained[0] / 'model.npz',
        *QUICK,
        status=1,
    )
    assert message.startswith('error: ') and 'model.npz cannot be loaded' in message


def test_settings_of_earlier_versions_are_read(trained, tmp_path):
    settings = json.loads((trained[0] / 'settings.json').read_text())
    for name in ('layout', 'padded_to', 'script'):
        del settings[name]
    (tmp_path / 'settings.json').write_text(json.dumps(settings))
    for name in ('model.npz', 'snapshot.npz'):
        (tmp_path / name).write_bytes((trained[0] / name).read_bytes())
    run('predict_qm9.py', '--in-dir', tmp_path, '--smiles', 'C')
    run(
        'train_qm9.py',
        '--label',
        'alpha',
        '--out',
        tmp_path,
        '--resume',
        tmp_path / 'snapshot.npz',
        '--layout',
        'packed',
        *QUICK,
    )


def test_a_prediction_keeps_other_files(trained, tmp_path):
    (tmp_path / 'failed.csv').write_text('mine')
    for out, status in ((tmp_path / 'p.csv', 0), (tmp_path, 1), (tmp_path / 'no' / 'p.csv', 1)):
        text = run(
            'predict_qm9.py',
            '--in-dir',
            trained[0],
            '--smiles',
            'C',
            'C1',
            '--out',
            out,
            status=status,
        )
        assert 'error: --out: ' in text if status else 'p_failed.csv' in text
    assert (tmp_path / 'failed.csv').read_text() == 'mine'
    assert [row['smiles'] for row in rows(tmp_path / 'p_failed.csv')] == ['C1']


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
    description, table = qm9_data.read_qm9('full', qm9_data.task_of('all'))
    assert "qm9pack's files" in description
    assert table['smiles'].tolist() == ['C', 'CC', 'CCC']
    assert table[list(qm9_data.TARGETS)].iloc[2].tolist() == list(range(15))


def test_full_falls_back_on_upstreams_download(qm9_data, tmp_path, monkeypatch, capsys):
    path = tmp_path / 'qm9.csv'  # as upstream writes it
    path.write_text(',SMILES1,SMILES2,gap\n0,CC,CC,0.5\n')
    monkeypatch.setattr(qm9_data, 'qm9pack_files', lambda: [])
    monkeypatch.setattr('chainer_chemistry.datasets.get_qm9_filepath', lambda: str(path))
    description, table = qm9_data.read_qm9('full', qm9_data.task_of('gap'))
    assert 'qm9pack is not installed' in capsys.readouterr().out
    assert str(path) in description and table['gap'].tolist() == [0.5]


# Prediction


@pytest.mark.parametrize('dense', [[], ['--dense']])
def test_prediction_repeats_the_test_error_of_the_training(trained, tmp_path, dense):
    out, text = trained
    line = [line for line in text.splitlines() if line.startswith('alpha ')][0]
    printed = run('predict_qm9.py', '--in-dir', out, '--out', tmp_path / 'p.csv', *dense)
    assert 'MAE of alpha: %s' % line.split()[1][:5] in printed
    result = rows(tmp_path / 'p.csv')
    errors = [
        abs(float(row['alpha predicted [bohr^3]']) - float(row['alpha true [bohr^3]']))
        for row in result
    ]
    assert len(errors) == 30
    assert numpy.mean(errors) == pytest.approx(float(line.split()[1]), rel=1e-4)


def test_prediction_of_smiles_and_files(trained, tmp_path):
    out, _ = trained
    path = tmp_path / 'mine.csv'
    path.write_text('smiles,alpha\nCCO,30\nC1CC,1\nOCC,\n')
    text = run_by_python(
        'predict_qm9.py', '--in-dir', out, '--data', path, '--out', tmp_path / 'a.csv'
    )
    assert '1 molecule(s) could not be used' in text and '(1 molecules)' in text
    from_file = rows(tmp_path / 'a.csv')
    assert [row['smiles'] for row in from_file] == ['CCO', 'C1CC', 'OCC']
    assert from_file[1]['alpha predicted [bohr^3]'] == ''
    run('predict_qm9.py', '--in-dir', out, '--out', tmp_path / 'b.csv', '--smiles', 'OCC', 'CC')
    from_smiles = rows(tmp_path / 'b.csv')
    assert list(from_smiles[0]) == ['smiles', 'alpha predicted [bohr^3]']
    ethanol = {
        float(row['alpha predicted [bohr^3]'])
        for row in (from_file[0], from_file[2], from_smiles[0])
    }
    assert max(ethanol) == pytest.approx(min(ethanol), rel=1e-5)


# The demo


def test_demo(tmp_path):
    text = run_by_python(
        'demo.py', '--epoch', '2', '--num-data', '300', '--repeats', '2', cwd=tmp_path
    )
    assert 'limit 1e-05: equal' in text
    table = re.findall(r'^  (\S.*?)' + 3 * r' +(-?\d+\.\d+)' + '$', text, re.MULTILINE)[:4]
    dense, folded, padded_to, packed = (list(map(float, values)) for _, *values in table)
    assert folded == pytest.approx(dense, rel=1e-3) and len(set(dense)) == 3
    assert padded_to == pytest.approx(dense[:1] * 3, rel=1e-3)
    assert packed == pytest.approx(dense[1:2] * 3, rel=1e-3)
    assert text.count('whole training step') == text.count('adjacency of a batch') >= 1
    for name in ('learning_curve.png', 'fit.png'):
        assert (tmp_path / 'result' / 'demo' / name).read_bytes().startswith(b'\x89PNG')
