"""A training script in the manner of Chainer Chemistry's, with its updater changed for ours."""

import os
import pathlib
import subprocess
import sys

import numpy
import pytest

ROOT = pathlib.Path(__file__).parents[2]
WARNING = 'GraphUpdater trains eagerly: CUDA graphs need a GPU'

SCRIPT = """
import numpy
from chainer import functions, iterators, optimizers, serializers, training
from chainer.datasets import split_dataset_random
from chainer.training import extensions
from chainer_chemistry.dataset.converters import concat_mols
from chainer_chemistry.dataset.parsers import CSVFileParser
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.models.prediction import Regressor, set_up_predictor

device = -1
numpy.random.seed(0)
parser = CSVFileParser(preprocess_method_dict['rsgcn'](), labels=['length'], smiles_col='smiles',
                       postprocess_label=lambda labels: numpy.asarray(labels, 'f'))
dataset = parser.parse('molecules.csv')['dataset']
train, valid = split_dataset_random(dataset, 40, seed=0)
predictor = set_up_predictor('rsgcn', 8, 2, 1)
model = Regressor(predictor, lossfun=functions.mean_squared_error,
                  metrics_fun={'mae': functions.mean_absolute_error}, device=device)
optimizer = optimizers.Adam()
optimizer.setup(model)
train_iter = iterators.SerialIterator(train, 8)
valid_iter = iterators.SerialIterator(valid, 8, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer, device=device, converter=concat_mols)
trainer = training.Trainer(updater, (3, 'epoch'), out='out')
trainer.extend(extensions.Evaluator(valid_iter, model, device=device, converter=concat_mols))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(['epoch', 'main/loss', 'validation/main/mae']))
trainer.extend(extensions.snapshot())
trainer.run()
serializers.save_npz('model.npz', model)
"""


def changed(script, *changes):
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


SWAPPED = changed(
    SCRIPT,
    ('\nimport numpy\n', '\nimport chainer_bspmm\nimport numpy\n'),
    (
        "set_up_predictor('rsgcn', 8, 2, 1)",
        "chainer_bspmm.sparsify(set_up_predictor('rsgcn', 8, 2, 1))",
    ),
    ('from chainer_chemistry.dataset.converters import', 'from chainer_bspmm import'),
)
CAPTURED = changed(
    SWAPPED,
    (
        'from chainer_chemistry.dataset.parsers',
        'from chainer_bspmm.training import GraphUpdater\nfrom chainer_chemistry.dataset.parsers',
    ),
    ('training.StandardUpdater', 'GraphUpdater'),
)


def run(script, folder):
    """Run a script in a new folder; return its stdout, its stderr and the model's arrays."""
    folder.mkdir()
    (folder / 'molecules.csv').write_text(
        'smiles,length\n'
        + ''.join(
            '%s,%d\n' % ('C' * n + end, n) for n in range(1, 13) for end in ('', 'N', 'O', 'F')
        )
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    done = subprocess.run(
        [sys.executable, '-c', script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, PYTHONPATH=path),
    )
    assert done.returncode == 0, done.stderr
    with numpy.load(folder / 'model.npz') as f:
        return done.stdout, done.stderr, {name: f[name] for name in f}


def test_without_a_gpu_it_warns_once_and_trains_the_same(tmp_path):
    pytest.importorskip('rdkit')
    expected_print, quiet, expected = run(SWAPPED, tmp_path / 'standard')
    printed, warned, found = run(CAPTURED, tmp_path / 'graph')
    assert WARNING not in quiet and warned.count(WARNING) == 1
    assert printed == expected_print and len(printed.splitlines()) > 3  # a line for each epoch
    assert found.keys() == expected.keys()
    for name in expected:
        numpy.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.gpu
def test_on_a_gpu_it_captures(tmp_path):
    pytest.importorskip('rdkit')
    asked = (
        'trainer.extend(lambda trainer: print(any(program.is_captured for program '
        'in updater._driver.programs.values())), name="asked", trigger=(3, "epoch"))\n'
    )
    script = changed(
        CAPTURED, ('device = -1', 'device = 0'), ('trainer.run()', asked + 'trainer.run()')
    )
    printed, warned, arrays = run(script, tmp_path / 'graph')
    assert 'True' in printed.splitlines() and 'GraphUpdater' not in warned
    assert all(numpy.isfinite(array).all() for array in arrays.values() if array.dtype == 'f')
