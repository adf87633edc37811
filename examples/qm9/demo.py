#!/usr/bin/env python
"""Show in about a minute what chainer_bspmm does; `make demo` runs this.

Trains RelGCN on the sample of QM9 in this folder, then compares it with upstream's dense model: the
same predictions from the same parameters, what padding does to a prediction in each layout, the
time of a training step, the size of the adjacency. Everything printed is measured in this run.
Exits with 1 if the predictions differ.
"""

import argparse
import os
import platform
import sys
import time

# Such small products are not faster on several threads, and much slower on a busy machine.
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')

import chainer_bspmm  # first: lets Chainer import on today's Python and NumPy
import chainer
import chainer_chemistry
import numpy
import pandas
import qm9_data
import train_qm9
from chainer import optimizers
from chainer_bspmm.dataset import to_sparse
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from common import data
from common import files
from common.arguments import at_least
from common.arguments import number_or_all
from common.tasks import converter_of
from common.tasks import labels_of
from matplotlib.figure import Figure
from rdkit import RDConfig

METHOD = 'relgcn'
LABEL = 'alpha'
SCRIPT = 'train_qm9.py'
TASK = qm9_data.task_of(LABEL)
MAX_DIFFERENCE = 1e-5
BATCHSIZE = 128
LARGEST = 9  # atoms of the largest molecule of QM9; hydrogens are not counted
N_PARTNER = 30  # atoms of a larger molecule to share a batch with


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0], allow_abbrev=False)
    parser.add_argument(
        '--out',
        '-o',
        default=os.path.join('result', 'demo'),
        help='folder for the pictures, the log and the model',
    )
    parser.add_argument('--epoch', '-e', type=at_least(int, 1), default=30, help='number of epochs')
    parser.add_argument(
        '--num-data', type=number_or_all, default=-1, help='molecules of the sample to use; -1: all'
    )
    parser.add_argument(
        '--repeats', type=at_least(int, 1), default=25, help='measurements of each step time'
    )
    return parser.parse_args(argv)


def headline(text):
    print('\n%s\n%s' % (text, '-' * len(text)))


def trained_models(folder):
    """Return the trained model twice, sparse and in upstream's dense code."""
    device, settings = chainer.get_device('@numpy'), files.load_settings(folder, SCRIPT)
    return [files.load_model(folder, TASK, settings, dense, device) for dense in (False, True)]


def nci_molecules(method, out):
    """Return graphs of the larger molecules that RDKit ships, or None if it does not."""
    path = os.path.join(RDConfig.RDDataDir, 'NCI', 'first_5K.smi')
    if not os.path.exists(path):
        return None
    table = pandas.read_csv(path, sep='\t', header=None, names=['smiles', 'where'], dtype=str)
    table['where'] = 'first_5K.smi compound ' + table['where']
    # Any number as label: the time of a step does not depend on it.
    labels = table['smiles'].str.len().to_numpy('f')[:, None]
    dataset, _, failures = data.preprocess(table, method, labels, dense=True)
    data.report_failures(failures, os.path.join(out, 'nci_failed.csv'), shown=0)
    return [dataset[i] for i in range(len(dataset))]


def compare_predictions(sparse, dense, examples):
    """Return the largest relative difference of the predictions, in the same batches."""
    ours = TASK.predict(sparse, examples, converter_of('folded'), BATCHSIZE)
    upstream = TASK.predict(dense, examples, converter_of('dense'), BATCHSIZE)
    return float((numpy.abs(ours - upstream) / numpy.abs(upstream)).max())


def print_padding(sparse, dense):
    """Print what the trained model predicts for ethanol in different batches."""
    ethanol, largest, partner = (
        (*data.dense_graph(smiles, preprocess_method_dict[METHOD]())[0], numpy.zeros(1, 'f'))
        for smiles in ('CCO', 'C' * LARGEST, 'C' * N_PARTNER)
    )
    print(
        'Upstream pads a batch to its largest molecule, and a model learns with that padding.\n'
        '%s [%s] of ethanol from the trained model, by what is in the batch:'
        % (LABEL, qm9_data.TARGETS[LABEL][0])
    )
    print(
        '%-38s %12s %12s %12s'
        % ('', '+ %d atoms' % LARGEST, 'ethanol only', '+ %d atoms' % N_PARTNER)
    )
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
        print('  %-36s %12.2f %12.2f %12.2f' % (name, *values))


def measure_steps(settings, examples, repeats):
    """Time training steps, dense and sparse in turn, on the same molecules.

    Args:
        settings (dict): of the model.
        examples (list): of (atoms, adj, labels).
        repeats (int): number of batches.

    Returns:
        tuple: (median milliseconds (2, 3): dense, sparse x converter, update, both together;
        mean bytes of a batch's adjacency (2,): dense, sparse;
        atoms that each molecule is padded to, on average).
    """
    models = []
    for dense in (True, False):
        numpy.random.seed(0)
        model = TASK.build(settings, dense, labels_of(examples))
        optimizer = optimizers.Adam()
        optimizer.setup(model)
        held = examples if dense else to_sparse(examples)
        models.append((model, optimizer, converter_of('dense' if dense else 'folded'), held))
    device = chainer.get_device('@numpy')
    times, sizes, padded = [], [], []
    order = numpy.random.RandomState(0)
    for _ in range(2 + repeats):
        index = order.permutation(len(examples))[:BATCHSIZE].tolist()
        row, size = [], []
        for model, optimizer, convert, held in models:
            batch = [held[i] for i in index]
            start = time.perf_counter()
            arrays = convert(batch, device)
            middle = time.perf_counter()
            optimizer.update(model, *arrays)
            end = time.perf_counter()
            row.append([middle - start, end - middle, end - start])
            size.append(arrays[1].nbytes)
        times.append(row)
        sizes.append(size)
        padded.append(max(len(examples[i][0]) for i in index))
    # The first two steps allocate and warm up.
    return 1e3 * numpy.median(times[2:], axis=0), numpy.mean(sizes, axis=0), numpy.mean(padded)


def plot_fit(path, truth, predictions):
    """Draw predicted against true values."""
    unit, _, description = qm9_data.TARGETS[LABEL]
    figure = Figure(figsize=(4.6, 4.4), layout='constrained')
    ax = figure.subplots()
    low = min(truth.min(), predictions.min())
    high = max(truth.max(), predictions.max())
    ax.plot([low, high], [low, high], color='gray', linewidth=1)
    ax.scatter(truth, predictions, s=8, alpha=0.5)
    ax.set(
        xlabel='DFT [%s]' % unit,
        ylabel='predicted [%s]' % unit,
        aspect='equal',
        title='%s of %d test molecules' % (description, len(truth)),
    )
    ax.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def print_steps(name, settings, examples, repeats):
    """Measure and print one comparison."""
    n_atoms = numpy.array([len(example[0]) for example in examples])
    times, sizes, padded = measure_steps(settings, examples, repeats)
    print(
        '%s: %d molecules, %.1f atoms on average, %d at most;\n'
        '  a dense batch pads them to %.0f on average'
        % (name, len(examples), n_atoms.mean(), n_atoms.max(), padded)
    )
    print('  %-36s %10s %10s   %s' % ('', 'dense', 'sparse', 'ratio'))
    rows = [
        ('converter [ms]', times[:, 0]),
        ('forward, backward, update [ms]', times[:, 1]),
        ('whole training step [ms]', times[:, 2]),
        ('adjacency of a batch [kB]', sizes / 1e3),
    ]
    for title, (upstream, ours) in rows:
        print('  %-36s %10.2f %10.2f   %.1fx' % (title, upstream, ours, upstream / ours))


def main():
    args = parse_arguments()
    start = time.perf_counter()
    print(
        'chainer_bspmm %s: graph convolutions as batched sparse products'
        % chainer_bspmm.__version__
    )
    print(
        'Python %s, NumPy %s, Chainer %s, Chainer Chemistry %s; CPU, BLAS thread(s): %s'
        % (
            platform.python_version(),
            numpy.__version__,
            chainer.__version__,
            chainer_chemistry.__version__,
            os.environ['OPENBLAS_NUM_THREADS'],
        )
    )

    headline('1. RelGCN learns from real molecules')
    status = train_qm9.run(
        [
            '--method',
            METHOD,
            '--layout',
            'folded',
            '--label',
            LABEL,
            '--unit-num',
            '64',
            '--epoch',
            str(args.epoch),
            '--num-data',
            str(args.num_data),
            '--out',
            args.out,
        ],
        report_every=10,
    )
    if status:
        return status
    sparse, dense = trained_models(args.out)
    settings = files.load_settings(args.out, SCRIPT)
    _, table = qm9_data.read_qm9('sample', TASK)
    table = data.thin_out(table, args.num_data)
    dataset, _, _ = data.preprocess(table, settings['method'], TASK.labels(table), dense=True)
    examples = [dataset[i] for i in range(len(dataset))]
    test = data.split_indices(len(examples), settings['train_data_ratio'], settings['seed'])[2]
    test_examples = [examples[i] for i in test]
    path = os.path.join(args.out, 'fit.png')
    plot_fit(
        path,
        labels_of(test_examples)[:, 0],
        TASK.predict(sparse, test_examples, converter_of('folded'), BATCHSIZE)[:, 0],
    )
    print('Predicted against true: %s' % path)

    headline("2. Same parameters, same predictions as upstream's dense model")
    difference = compare_predictions(sparse, dense, test_examples)
    equal = difference < MAX_DIFFERENCE
    print(
        '%d test molecules in batches of %d:\n'
        '  largest relative difference of a prediction: %.1e, limit %.0e: %s\n'
        % (len(test), BATCHSIZE, difference, MAX_DIFFERENCE, 'equal' if equal else 'DIFFERENT')
    )
    print_padding(sparse, dense)

    headline(
        '3. A training step, batch of %d, medians of %d, dense and sparse in turn'
        % (BATCHSIZE, args.repeats)
    )
    print_steps('QM9 sample', settings, examples, args.repeats)
    print()
    larger = nci_molecules(settings['method'], args.out)
    if larger is not None:
        print_steps('NCI compounds shipped with RDKit', settings, larger, args.repeats)
    print('\nThe demo took %.0f seconds.' % (time.perf_counter() - start))
    return 0 if equal else 1


if __name__ == '__main__':
    try:
        sys.exit(main())
    except data.DataError as error:
        sys.exit('error: %s' % error)
