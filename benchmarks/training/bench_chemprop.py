"""How good and how fast is the command of chemprop, beside ``train_own.py`` of examples/?

Both learn the same CSV file for equally many epochs: the polarizability alpha in QM9's sample, and
with ``--tox21 FILE`` the 12 assays of Tox21. ``--chemprop`` is the path of chemprop's command,
which may be installed in another environment::

    python -m benchmarks.training.bench_chemprop --chemprop VENV/bin/chemprop --tox21 tox21.csv.gz

writes ``benchmarks/results/cpu/chemprop.json``, on two threads; ``--device 0`` runs on a GPU.

chemprop has its defaults: messages along bonds, depth 3, 300 units, batches of 64, and a learning
rate that rises for two epochs and falls from then on. It tests the model of the best validation.
Ours is RelGCN with 128 units, an option that a user sets. By default it has 4 layers, pads to the
largest molecule, takes batches of 32, and tests the last model.

A seed decides which molecules are for training, validation and test: train_own.py draws them, and a
column of the file tells chemprop. The test molecules are compared. chemprop's weights have no seed,
because with a seed it would use PyTorch's deterministic algorithms, which are slower. Seconds are
measured from the start of a command until it has written the result of its test. Before that each
command runs for a few epochs, so that imports and kernels are in caches. Molecules are parsed in
every run.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import chainer_bspmm
import numpy
import pandas
from sklearn.metrics import roc_auc_score

from benchmarks import bench_command, data_sets, harness

OURS, CHEMPROP = 'ours', 'chemprop'
OPTIONS = ['--method', 'relgcn', '--unit-num', '128']
TRAIN = 0.8  # share of the molecules; validation and test get half of the rest each
WARM_EPOCHS = 3  # the fewest that chemprop accepts
EXAMPLE = harness.ROOT / 'examples' / 'own_dataset'
KINDS = {'qm9': 'regression', 'tox21': 'classification'}
# Kind of task -> name of its metric.
METRICS = {'regression': 'MAE', 'classification': 'mean ROC-AUC'}
ANSWERS = {'regression': '%s predicted', 'classification': '%s probability'}


def read(name, args):
    """Return a data set (DataFrame): the SMILES that RDKit accepts, and the columns to learn."""
    if name == 'qm9':
        frame = pandas.read_csv(data_sets.QM9_SAMPLE)[['smiles', 'alpha']]
    else:
        frame = pandas.read_csv(args.tox21).drop(columns='mol_id')
    frame = data_sets.limited(frame, args.limit)
    labels = [column for column in frame if column != 'smiles']
    kept = chainer_bspmm.dataset.from_smiles(frame['smiles'].tolist(), 'relgcn').kept
    return frame[['smiles', *labels]].iloc[kept].reset_index(drop=True)


def parts(n, seed):
    """Return indices of training, validation and test molecules, as train_own.py draws them."""
    n_train = int(n * TRAIN)
    order = numpy.random.RandomState(seed).permutation(n)
    return numpy.split(order, [n_train, n_train + (n - n_train) // 2])


def command(name, args, kind, labels, seed, epochs, data, out):
    """Return the words of a command, and the file that it writes after testing the model."""
    if name == OURS:
        words = [sys.executable, EXAMPLE / 'train_own.py', '--data', data, '--labels', *labels]
        words += ['--task', kind, *OPTIONS, '--epoch', epochs, '--seed', seed, '--out', out]
        words += ['--train-data-ratio', TRAIN, '--device', args.device]
        return [str(word) for word in words], out / 'result.json'
    words = [args.chemprop, 'train', '--data-path', data, '--smiles-columns', 'smiles']
    words += ['--target-columns', *labels, '--splits-column', 'split', '--task-type', kind]
    words += ['--epochs', epochs, '--output-dir', out]
    words += ['--accelerator', 'cpu' if args.device == '-1' else 'gpu', '--devices', '1']
    return [str(word) for word in words], out / 'model_0' / 'test_predictions.csv'


def metric(kind, truth, answers):
    """Return the mean absolute error, or the mean ROC-AUC; unknown labels are NaN."""
    if kind == 'regression':
        return float(numpy.abs(answers - truth).mean())
    areas = []
    for t, y in zip(truth.T, answers.T):
        known = ~numpy.isnan(t)
        if 0 < t[known].sum() < known.sum():
            areas.append(roc_auc_score(t[known], y[known]))
    return float(numpy.mean(areas))


def run(name, args, kind, frame, seed, epochs, folder):
    """Run a command; return the seconds until it had tested its model, and the test metric.

    Raises AssertionError if it tests other molecules.
    """
    labels = [column for column in frame if column != 'smiles']
    *_, test = split = parts(len(frame), seed)
    names = numpy.repeat(['train', 'val', 'test'], list(map(len, split)))
    names = pandas.Series(names, numpy.concatenate(split))
    with tempfile.TemporaryDirectory(dir=folder) as own:
        own = pathlib.Path(own)
        data, out = own / 'data.csv', own / 'out'
        frame.assign(split=names).to_csv(data, index=False)
        variables = {**os.environ, **bench_command.environment(folder, folder)}
        variables['XDG_CACHE_HOME'] = str(own)  # an empty cache, without parsed molecules
        if args.device == '-1':
            variables.update(OMP_NUM_THREADS=args.threads, OPENBLAS_NUM_THREADS=args.threads)
        words, written = command(name, args, kind, labels, seed, epochs, data, out)
        start = time.time()
        called(words, variables)
        seconds = written.stat().st_mtime - start
        columns = labels
        if name == OURS:
            called([sys.executable, str(EXAMPLE / 'predict_own.py'), '-i', str(out)], variables)
            written = out / 'predictions.csv'
            columns = [ANSWERS[kind] % label for label in labels]
        else:
            test = numpy.sort(test)
        found = pandas.read_csv(written)
    expected = frame.iloc[test]
    if found['smiles'].tolist() != expected['smiles'].tolist():
        raise AssertionError('%s was tested with other molecules' % name)
    value = metric(kind, expected[labels].to_numpy(float), found[columns].to_numpy(float))
    return {'contender': name, 'seed': seed, 'seconds': round(seconds, 2), 'test': value}


def called(words, variables=None):
    """Run a command; return its output."""
    done = subprocess.run(words, env=variables, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError('exit status %d: %s' % (done.returncode, done.stderr[-800:].strip()))
    return done.stdout


def versions(chemprop):
    """Return the versions of chemprop and PyTorch in the environment of chemprop's command."""
    python = pathlib.Path(chemprop).read_text().splitlines()[0].removeprefix('#!')
    code = 'from importlib.metadata import version as v; print(v("chemprop"), v("torch"))'
    found = called([python, '-c', code]).split()
    return dict(zip((CHEMPROP, 'torch'), found))


def medians(runs):
    """Return contender -> medians of its seconds and of its test metrics."""
    return {
        name: {
            what: statistics.median(run[what] for run in runs if run['contender'] == name)
            for what in ('seconds', 'test')
        }
        for name in dict.fromkeys(run['contender'] for run in runs)
    }


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--chemprop', required=True, help="path of chemprop's command")
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz; without it QM9 alone")
    parser.add_argument('--device', default='-1', help='-1: the CPU; 0: the first GPU')
    parser.add_argument('--threads', default='2', help='of each command on the CPU')
    parser.add_argument('--epochs', type=int, default=20)
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2])
    parser.add_argument('--limit', type=int, help='largest number of molecules of a data set')
    args = parser.parse_args(argv)
    device = harness.device_of(args.device)
    head = {
        'question': 'seconds from the start of a command to the result of its test, and that: '
        'chemprop with its defaults and train_own.py %s' % ' '.join(OPTIONS),
        'method': 'Medians of several seeds, which decide the split; %d epochs; %g of the '
        'molecules are for training, the others halved for validation and test, the same for both. '
        'Each run is a new process that parses the molecules; imports and kernels are in caches'
        % (args.epochs, TRAIN),
        'conditions': {
            **harness.conditions(args.commit, device),
            **versions(args.chemprop),
            'threads': args.threads if args.device == '-1' else 'not limited',
        },
        'options': {'limit': args.limit},
    }
    result = harness.resumed('chemprop', head, args.out)
    for data, kind in KINDS.items():
        if data == 'tox21' and not args.tox21:
            continue
        of = result.setdefault('data', {}).setdefault(data, {'runs': []})
        done = [(run['seed'], run['contender']) for run in of['runs']]
        both = [(seed, name) for seed in args.seeds for name in (CHEMPROP, OURS)]
        missing = [run for run in both if run not in done]
        if not missing:
            continue
        frame = read(data, args)
        of.update(molecules=len(frame), metric=METRICS[kind])
        with tempfile.TemporaryDirectory() as folder:
            for name in (CHEMPROP, OURS):
                run(name, args, kind, frame, 0, WARM_EPOCHS, pathlib.Path(folder))
            for seed, name in missing:
                found = run(name, args, kind, frame, seed, args.epochs, pathlib.Path(folder))
                print('%s: %s' % (data, found), flush=True)
                of['runs'].append(found)
                of['median'] = medians(of['runs'])
                harness.save('chemprop', result, args.out)
    print('\n'.join('%s: %s' % (data, of['median']) for data, of in result['data'].items()))


if __name__ == '__main__':
    main()
