"""examples/network_graph: a generated network, files in Cora's format, refusals."""

import json

from chainer import serializers
from chainer.dataset import download
from chainer_chemistry.models.gin import GIN, GINSparse
from chainer_chemistry.models.prediction.node_classifier import NodeClassifier
import numpy
import pytest

from tests.examples.scripts import EXAMPLES, error_of, imported, run_here

FOLDER = EXAMPLES / 'network_graph'
SCRIPT = FOLDER / 'train_network_graph.py'
RESULTS = EXAMPLES.parent / 'benchmarks' / 'results' / 'earlier'
MODEL = 'graph convolution'
LARGEST = 'always the largest class'
REGRESSION = 'logistic regression of the words, without edges'


@pytest.fixture(scope='module')
def network_data():
    return imported(FOLDER, 'network_data')


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Empty folder of Cora in Chainer's cache."""
    monkeypatch.setattr(download, '_dataset_root', str(tmp_path / 'cache'))
    folder = tmp_path / 'cache' / 'pfnet' / 'chainer' / 'cora'
    folder.mkdir(parents=True)
    return folder


def write_cora(folder):
    """Write a ring of twelve papers of three classes, which have different words."""
    papers = ['p%d' % i for i in range(12)]
    with open(folder / 'cora.content', 'w') as file:
        for i, paper in enumerate(papers):
            words = [str(int(i % 3 == word)) for word in range(5)]
            print(paper, *words, 'class_%d' % (i % 3), sep='\t', file=file)
    pairs = list(zip(papers, papers[1:] + papers[:1]))
    pairs += [('p0', 'p0'), ('p1', 'p0'), ('p3', 'unknown')]
    (folder / 'cora.cites').write_text(''.join('%s\t%s\n' % pair for pair in pairs))


@pytest.mark.parametrize(
    'method, epochs', [('gin_sparse', 100), pytest.param('gin', 60, marks=pytest.mark.slow)]
)
def test_generated(tmp_path, method, epochs):
    out = tmp_path / 'out'
    text = run_here(
        SCRIPT, '--dataset', 'generated', '--out', out, '--method', method, '--epoch', epochs
    )
    assert text.startswith('Data: generated, not real')
    assert 'Split: 400 training, 800 validation, 800 test' in text
    result = json.loads((out / 'result.json').read_text())
    test = result['test']
    assert test[MODEL] > 0.8 > 0.6 > test[REGRESSION] > 2 * test[LARGEST]
    assert '%6.1f %%  %s' % (100 * test[MODEL], MODEL) in text
    log = json.loads((out / 'log').read_text())
    assert [entry['epoch'] for entry in log] == list(range(epochs // 10, epochs + 1, epochs // 10))
    assert {'main/loss(train)', 'main/accuracy(valid)'} <= log[0].keys()
    # Upstream's model can load the file.
    kind = {'gin_sparse': GINSparse, 'gin': GIN}[method]
    model = NodeClassifier(kind(None, True, hidden_channels=32, out_channels=7, n_update_layers=2))
    serializers.load_npz(out / 'model.npz', model)


def test_cora_in_the_cache_is_read(cache, network_data):
    write_cora(cache)
    network = network_data.load('auto', 0)
    assert network.description == 'cora' and network.x.shape == (12, 5)
    numpy.testing.assert_array_equal(network.y, numpy.arange(12) % 3)
    numpy.testing.assert_array_equal(network.x, numpy.eye(5)[network.y])
    ring = {(i, (i + 1) % 12) for i in range(12)}
    assert set(map(tuple, network.edges.T)) == ring | {(b, a) for a, b in ring}
    assert network.edges.shape == (2, 24)


def test_cora_in_the_cache_is_the_default(cache, tmp_path):
    write_cora(cache)
    text = run_here(SCRIPT, '--out', tmp_path / 'out', '--epoch', 2, '--train-data-ratio', 0.5)
    assert text.startswith('Data: cora\n12 nodes of 3 classes, 12 edges, 5 words')


def test_cora_that_is_not_in_the_cache_is_refused(cache, tmp_path, network_data):
    error = error_of(SCRIPT, '--out', tmp_path / 'out', '--dataset', 'cora')
    assert error == (
        'error: --dataset cora: %s not found. Unpack %s there, or use --dataset generated'
        % (cache / 'cora.content', network_data.URL % 'cora')
    )
    assert not (tmp_path / 'out').exists()


def test_without_cora_a_network_is_generated(cache, network_data):
    assert network_data.load('auto', 0).description.startswith('generated, not real')


@pytest.mark.parametrize(
    'name, text, reason',
    [
        ('cora.cites', 'p0 p1 p2\n', 'too many values to unpack (expected 2'),
        ('cora.content', 'p0 1 0 a\np1 1 a\n', 'setting an array element with a sequence.'),
    ],
)
def test_files_unlike_those_of_cora_are_refused(cache, network_data, name, text, reason):
    write_cora(cache)
    (cache / name).write_text(text)
    with pytest.raises(network_data.DataError) as error:
        network_data.load('auto', 0)
    start = '%s is not as in %s: %s' % (cache / name, network_data.URL % 'cora', reason)
    assert str(error.value).startswith(start)  # the rest of the message is NumPy's or Python's


EMPTY = (
    'a random split of 2000 with --train-data-ratio %s has an empty part; expected at least one '
    'each for training, validation and test'
)


@pytest.mark.parametrize(
    'ratio, message',
    [
        ('0', EMPTY % '0'),
        ('1', EMPTY % '1'),
        ('0.0005', '--train-data-ratio: the training nodes are of one class, expected two or more'),
    ],
)
def test_splits_that_are_refused(tmp_path, ratio, message):
    error = error_of(SCRIPT, '--dataset', 'generated', '--out', tmp_path, '-r', ratio)
    assert error == 'error: ' + message


def test_a_folder_belongs_to_one_run(tmp_path):
    words = '--dataset', 'generated', '--out', tmp_path, '--epoch'
    run_here(SCRIPT, *words, '1')
    error = error_of(SCRIPT, *words, '2')
    assert error == (
        'error: --out: the folder %s is not empty; expected a new one, or --force to start again '
        'in it' % tmp_path
    )
    (tmp_path / 'snapshot_6.0').write_text('of a run of train_qm9.py')
    run_here(SCRIPT, *words, '2', '--force')
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {'log', 'model.npz', 'result.json', 'settings.json'}
    settings = json.loads((tmp_path / 'settings.json').read_text())
    assert settings['script'] == 'train_network_graph.py' and settings['epoch'] == 2


def test_readme_has_the_stored_shares():
    stored = json.loads((RESULTS / 'example_network_graph.json').read_text())
    readme = ' '.join((FOLDER / 'README.md').read_text().split())
    shares = ['%.1f %%' % (100 * share) for share in stored['test'].values()]
    assert 'these are %s, %s and %s ' % tuple(shares) in readme
