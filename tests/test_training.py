"""The swap inside Chainer's and Chainer Chemistry's machinery: updaters, evaluators, resuming."""

import os
import pathlib
import subprocess
import sys
import textwrap

import numpy
import pytest

import chainer
from chainer import training
from chainer.datasets import SubDataset
from chainer.training import extensions
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
from chainer_chemistry.training.extensions import BatchEvaluator
from chainer_chemistry.training.extensions import ROCAUCEvaluator
from chainer_chemistry.utils import run_train

import chainer_bspmm
from chainer_bspmm import concat_mols
from chainer_bspmm import sparsify
from tests.support import relative_error
from tests.support.molecules import molecules

EXAMPLES = molecules([5, 9, 3, 7, 1, 12, 4, 8] * 3, 'normalised')


def regressor(device, seed=0, **options):
    numpy.random.seed(seed)
    model = Regressor(
        sparsify(set_up_predictor('rsgcn', 8, 2, 3, conv_kwargs={'dropout_ratio': 0.0})), **options
    )
    model(*concat_mols(EXAMPLES))  # gives lazy parameters their values while on the host
    model.cleargrads()
    model.to_device(device)
    return model


def parameters(model):
    return {
        name: numpy.array(chainer.backends.cuda.to_cpu(p.array)) for name, p in model.namedparams()
    }


def make_trainer(device, out, epochs, seed=0):
    model = regressor(device, seed, metrics_fun={'mae': chainer.functions.mean_absolute_error})
    optimizer = chainer.optimizers.Adam().setup(model)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(
            EXAMPLES,
            5,
            order_sampler=chainer.iterators.ShuffleOrderSampler(numpy.random.RandomState(1)),
        ),
        optimizer,
        device=device,
        converter=concat_mols,
    )
    trainer = training.Trainer(updater, (epochs, 'epoch'), out=str(out))
    trainer.extend(
        extensions.Evaluator(
            chainer.iterators.SerialIterator(EXAMPLES, 5, repeat=False, shuffle=False),
            model,
            device=device,
            converter=concat_mols,
        )
    )
    trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
    trainer.extend(extensions.snapshot(), trigger=(3, 'iteration'))
    return trainer, model


def test_standard_updater_evaluator_and_log(device, tmp_path):
    trainer, model = make_trainer(device, tmp_path, 3)
    before = parameters(model)
    trainer.run()
    assert any((before[name] != value).any() for name, value in parameters(model).items())
    log = trainer.get_extension('LogReport').log
    assert all(
        numpy.isfinite(entry['main/loss']) and numpy.isfinite(entry['main/mae']) for entry in log
    )
    assert any('validation/main/loss' in entry for entry in log)
    assert (tmp_path / 'log').exists()


def test_interrupted_training_resumes(device, tmp_path):
    """Resuming from a snapshot in the middle of an epoch ends in the same parameters.

    To the last bit on a CPU; Chainer's EmbedID adds up its gradient by atomicAdd on a GPU.
    """
    trainer, whole = make_trainer(device, tmp_path / 'whole', 3)
    trainer.run()
    trainer, _ = make_trainer(device, tmp_path / 'part', 1)
    trainer.run()
    trainer, resumed = make_trainer(device, tmp_path / 'part', 3, seed=7)
    chainer.serializers.load_npz(tmp_path / 'part' / 'snapshot_iter_3', trainer)
    trainer.run()
    for name, value in parameters(whole).items():
        error = relative_error(parameters(resumed)[name], value)
        assert error == 0 if device.xp is numpy else error < 1e-4, name


def test_run_train(device, tmp_path):
    run_train(
        regressor(device),
        EXAMPLES,
        valid=EXAMPLES,
        batch_size=6,
        epoch=1,
        out=str(tmp_path),
        device=device,
        converter=concat_mols,
    )
    assert (tmp_path / 'log').exists()


def test_parallel_updater(tmp_path):
    model = regressor('@numpy')
    before = parameters(model)
    updater = training.updaters.ParallelUpdater(
        chainer.iterators.SerialIterator(EXAMPLES, 6),
        chainer.optimizers.Adam().setup(model),
        devices={'main': '@numpy', 'second': '@numpy'},
        converter=concat_mols,
    )
    training.Trainer(updater, (1, 'epoch'), out=str(tmp_path)).run()
    assert any((before[name] != value).any() for name, value in parameters(model).items())


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_parallel_updater_on_two_gpus(tmp_path):
    model = regressor('@numpy')
    before = parameters(model)
    updater = training.updaters.ParallelUpdater(
        chainer.iterators.SerialIterator(EXAMPLES, 6),
        chainer.optimizers.Adam().setup(model),
        devices={'main': '@cupy:0', 'second': '@cupy:1'},
        converter=concat_mols,
    )
    training.Trainer(updater, (1, 'epoch'), out=str(tmp_path)).run()
    assert any((before[name] != value).any() for name, value in parameters(model).items())


def test_predict_does_not_depend_on_batches(device):
    model = regressor(device)
    inputs = [example[:2] for example in EXAMPLES]
    expected = model.predict(inputs, batchsize=1, converter=concat_mols)
    assert expected.shape == (24, 3)
    for data in (inputs, SubDataset(inputs, 0, 24)):
        numpy.testing.assert_allclose(
            model.predict(data, batchsize=7, converter=concat_mols), expected, rtol=1e-4, atol=1e-5
        )


def test_classifier_and_auc(device):
    rng = numpy.random.RandomState(0)
    examples = [(a, m, rng.randint(0, 2, 1).astype('i')) for a, m, _ in EXAMPLES]
    model = Classifier(
        sparsify(set_up_predictor('rsgcn', 8, 2, 1)),
        lossfun=chainer.functions.sigmoid_cross_entropy,
        metrics_fun=chainer.functions.binary_accuracy,
    )
    model.to_device(device)
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.update(model, *concat_mols(examples, device))
    inputs = [example[:2] for example in examples]
    proba = model.predict_proba(
        inputs, converter=concat_mols, postprocess_fn=chainer.functions.sigmoid
    )
    assert proba.shape == (24, 1) and ((0 <= proba) & (proba <= 1)).all()
    predicted = model.predict(
        inputs, converter=concat_mols, postprocess_fn=lambda y: (y.array > 0).astype('i')
    )
    numpy.testing.assert_array_equal(predicted, proba > 0.5)
    for evaluator, name in (
        (ROCAUCEvaluator, 'main/roc_auc'),
        (
            lambda *args, **kw: BatchEvaluator(
                *args, metrics_fun=lambda y, t: float(((y > 0) == t).mean()), **kw
            ),
            'main/evaluation',
        ),
    ):
        extension = evaluator(
            chainer.iterators.SerialIterator(examples, 5, repeat=False, shuffle=False),
            model,
            eval_func=model.predictor,
            converter=concat_mols,
            device=device,
        )
        result = extension()
        assert 0 <= result[name] <= 1


def test_multiprocess_iterator_feeds_the_converter():
    iterator = chainer.iterators.MultithreadIterator(EXAMPLES, 6, n_threads=2)
    try:
        atoms, adj, _ = concat_mols(iterator.next(), -1)
    finally:
        iterator.finalize()
    assert adj.n_graphs == 6 and len(atoms) == adj.n_rows


def test_a_script_with_the_two_lines_changed_runs(tmp_path):
    """A user's script, as they wrote it for Chainer Chemistry; only the marked lines are new."""
    script = tmp_path / 'train.py'
    script.write_text(
        textwrap.dedent("""
        import chainer_bspmm  # new
        import numpy
        from chainer import functions as F
        from chainer_chemistry.dataset.converters import concat_mols
        from chainer_chemistry.dataset.parsers import SmilesParser
        from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
        from chainer_chemistry.datasets import NumpyTupleDataset
        from chainer_chemistry.models.prediction import Regressor, set_up_predictor
        from chainer_chemistry.utils import run_train
        concat_mols = chainer_bspmm.concat_mols  # new

        smiles = ['C', 'CC', 'CCO', 'c1ccccc1', 'CC(=O)O', 'CN', 'C#N', 'OCC(O)CO'] * 4
        parser = SmilesParser(preprocess_method_dict['rsgcn']())
        dataset = parser.parse(smiles)['dataset']
        labels = numpy.array([[len(s)] for s in smiles], 'f')
        dataset = NumpyTupleDataset(*dataset.get_datasets(), labels)
        predictor = chainer_bspmm.sparsify(set_up_predictor('rsgcn', 16, 2, 1))  # new
        model = Regressor(predictor, lossfun=F.mean_squared_error,
                          metrics_fun={'mae': F.mean_absolute_error}, device=-1)
        run_train(model, dataset, valid=dataset, batch_size=8, epoch=2, device=-1, out='out',
                  converter=concat_mols)
        inputs = lambda batch, device=None: concat_mols(batch, device)[:2]
        print('predicted', model.predict(dataset, converter=inputs).shape)
    """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=checkout_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert 'predicted (32, 1)' in done.stdout
    assert (tmp_path / 'out' / 'log').exists()


def checkout_environment():
    """Return the environment in which a subprocess imports the package under test."""
    root = str(pathlib.Path(chainer_bspmm.__file__).parent.parent)
    return dict(
        os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
    )
