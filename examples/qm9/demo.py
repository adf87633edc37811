#!/usr/bin/env python
"""Show in about a minute what chainer_bspmm does; `make demo` runs this.

Trains RelGCN on the sample of QM9 in this folder, then compares it with upstream's dense model: the
same predictions from the same parameters, what padding does to a prediction in each layout, the
time of a training step, the size of the adjacency. Everything printed is measured in this run.
Exits with 1 if the predictions differ.
"""

import os
import platform
import time

# Such small products are not faster on several threads, and much slower on a busy machine.
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')

import chainer_bspmm  # first: lets Chainer import on today's Python and NumPy
import chainer
import chainer_chemistry
import numpy
import pandas
import train_qm9
from chainer import optimizers
from chainer_bspmm.dataset import to_sparse
from common import data, folder, training
from common.arguments import make_parser, number
from common.tasks import converter_of
from rdkit import RDConfig

METHOD = 'relgcn'
LABEL = 'alpha'
TASK = train_qm9.task_of({'label': LABEL})
OUT = os.path.join('result', 'demo')
MAX_DIFFERENCE = 1e-5
BATCHSIZE = 128
REPEATS = 25  # measurements of each step
LARGEST = 9  # atoms of the largest molecule of QM9; hydrogens are not counted
N_PARTNER = 30  # atoms of a larger molecule to share a batch with


def headline(text):
    print('\n' + text, '-' * len(text), sep='\n')


def dense_examples(smiles):
    """Return upstream's (atoms, adj) of molecules."""
    rows = data.typed_smiles(smiles, TASK.names)
    dataset, rows = data.preprocess(rows, METHOD, dense=True)
    data.report_failures(rows, shown=0)
    return dataset[:]


def print_padding(sparse, dense):
    """Print the trained model's predictions for ethanol in different batches."""
    ethanol, largest, partner = dense_examples(['CCO', 'C' * LARGEST, 'C' * N_PARTNER])
    print('Upstream pads a batch to its largest molecule, and a model learns with that padding.')
    print(
        '%s [%s] of ethanol, predicted by the trained model in different batches:'
        % (LABEL, TASK.units[LABEL])
    )
    columns = '+ %d atoms' % LARGEST, 'ethanol only', '+ %d atoms' % N_PARTNER
    print('%-38s %14s %14s %14s' % ('', *columns))
    for name, model, converter in (
        ("upstream's dense model", dense, converter_of('dense')),
        ('sparse: concat_mols', sparse, converter_of('folded')),
        ('sparse: CSRConverter(padded_to=%d)' % LARGEST, sparse, converter_of('folded', LARGEST)),
        ("sparse: CSRConverter('packed')", sparse, converter_of('packed')),
    ):
        values = [
            TASK.predict(model, [ethanol] + others, converter, 2)[0, 0]
            for others in ([largest], [], [partner])
        ]
        print('  %-36s %14.2f %14.2f %14.2f' % (name, *values))


def print_steps(name, settings, examples):
    """Time training steps, dense and sparse in turn, on the same molecules; print medians."""
    n_atoms = numpy.array([len(example[0]) for example in examples])
    labels = n_atoms[:, None].astype(numpy.float32)  # their values do not matter
    examples = [(*example, label) for example, label in zip(examples, labels)]
    models = []
    for dense in (True, False):
        numpy.random.seed(0)
        model = TASK.build(settings, dense, labels)
        optimizer = optimizers.Adam().setup(model)
        held = examples if dense else to_sparse(examples)
        models.append((model, optimizer, converter_of('dense' if dense else 'folded'), held))
    times, sizes, padded = [], [], []
    order = numpy.random.RandomState(0)
    for _ in range(2 + REPEATS):
        index = order.permutation(len(examples))[:BATCHSIZE].tolist()
        padded.append(n_atoms[index].max())
        for model, optimizer, convert, held in models:
            batch = [held[i] for i in index]
            start = time.perf_counter()
            arrays = convert(batch, chainer.get_device('@numpy'))
            middle = time.perf_counter()
            optimizer.update(model, *arrays)
            end = time.perf_counter()
            times.append([middle - start, end - middle, end - start])
            sizes.append(arrays[1].nbytes)
    # Medians of dense and sparse, without the first two steps, which allocate and warm up.
    times = 1e3 * numpy.median(numpy.reshape(times, (-1, 2, 3))[2:], axis=0)
    sizes = numpy.reshape(sizes, (-1, 2)).mean(axis=0)
    print(
        '%s: %d molecules, %.1f atoms on average, %d at most;'
        % (name, len(examples), n_atoms.mean(), n_atoms.max())
    )
    print('  a dense batch pads them to %.0f on average' % numpy.mean(padded))
    print('  %-36s %10s %10s   %s' % ('', 'dense', 'sparse', 'ratio'))
    for title, (upstream, ours) in (
        ('converter [ms]', times[:, 0]),
        ('forward, backward, update [ms]', times[:, 1]),
        ('whole training step [ms]', times[:, 2]),
        ('adjacency of a batch [kB]', sizes / 1e3),
    ):
        print('  %-36s %10.2f %10.2f   %.1fx' % (title, upstream, ours, upstream / ours))


def main():
    parser = make_parser(__doc__.split('\n')[0])
    parser.add_argument('--out', '-o', default=OUT, help='folder for pictures, log and models')
    parser.add_argument('--epoch', '-e', type=number(int, 1), default=30, help='number of epochs')
    parser.add_argument(
        '--num-data', type=number(int, -1), default=-1, help='molecules of the sample; -1: all'
    )
    args = parser.parse_args()
    start = time.perf_counter()
    modules = numpy, chainer, chainer_chemistry
    versions = ['%s %s' % (module.__name__, module.__version__) for module in modules]
    print(
        'chainer_bspmm %s: graph convolutions as batched sparse products'
        % chainer_bspmm.__version__
    )
    print('Python %s, %s' % (platform.python_version(), ', '.join(versions)), end='; ')
    print('CPU, BLAS thread(s): %s' % os.environ['OPENBLAS_NUM_THREADS'])

    headline('1. RelGCN learns from real molecules')
    words = ['--method', METHOD, '--label', LABEL, '--unit-num', 64, '--epoch', args.epoch]
    # Upstream's padding, to compare with it.
    words += ['--padded-to', 'batch', '--num-data', args.num_data, '--out', args.out]
    words += ['--force'] if args.out == OUT else []  # the folder of an earlier demo
    status = train_qm9.run([str(word) for word in words])
    if status:
        return status

    headline("2. Same parameters, same predictions as upstream's dense model")
    settings = folder.load_settings(args.out, 'train_qm9.py')
    sparse, dense = models = [TASK.build(settings, dense) for dense in (False, True)]
    for model in models:
        folder.load_npz(os.path.join(args.out, folder.MODEL_FILE), model)
    _, rows = train_qm9.read('sample', settings)
    rows = rows.take(data.spread(len(rows.smiles), args.num_data))
    dataset, _ = data.preprocess(rows, METHOD, dense=True)
    test = dataset[data.split(rows.smiles, settings)[2]]
    ours = TASK.predict(sparse, test, converter_of('folded'), BATCHSIZE)
    upstream = TASK.predict(dense, test, converter_of('dense'), BATCHSIZE)
    difference = (numpy.abs(ours - upstream) / numpy.abs(upstream)).max()
    equal = difference < MAX_DIFFERENCE
    print('%d test molecules in batches of %d:' % (len(test), BATCHSIZE))
    print(
        '  largest relative difference of a prediction: %.1e, limit %.0e: %s\n'
        % (difference, MAX_DIFFERENCE, 'equal' if equal else 'DIFFERENT')
    )
    print_padding(sparse, dense)

    about = '3. A training step, batch of %d, medians of %d, dense and sparse in turn'
    headline(about % (BATCHSIZE, REPEATS))
    print_steps('QM9 sample', settings, dataset[:])
    path = os.path.join(RDConfig.RDDataDir, 'NCI', 'first_5K.smi')
    if os.path.exists(path):  # larger molecules
        table = pandas.read_csv(path, sep='\t', header=None, usecols=[0], dtype=str)
        print('\nReading the NCI compounds shipped with RDKit')
        larger = dense_examples(table[0].tolist())
        print_steps('NCI compounds shipped with RDKit', settings, larger)
    print('\nThe demo took %.0f seconds.' % (time.perf_counter() - start))
    return 0 if equal else 1


if __name__ == '__main__':
    training.main(main)
