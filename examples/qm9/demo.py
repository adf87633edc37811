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
import qm9_data
import train_qm9
from chainer import optimizers
from chainer_bspmm.dataset import to_sparse
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from common import data
from common import files
from common import training
from common.arguments import make_parser
from common.arguments import number
from common.arguments import number_or_all
from common.tasks import converter_of
from common.tasks import labels_of
from rdkit import RDConfig

METHOD = 'relgcn'
LABEL = 'alpha'
SCRIPT = 'train_qm9.py'
TASK = qm9_data.task_of(LABEL)
OUT = os.path.join('result', 'demo')
MAX_DIFFERENCE = 1e-5
BATCHSIZE = 128
LARGEST = 9  # atoms of the largest molecule of QM9; hydrogens are not counted
N_PARTNER = 30  # atoms of a larger molecule to share a batch with


def parse_arguments():
    parser = make_parser(__doc__.split('\n')[0])
    parser.add_argument('--out', '-o', default=OUT, help='folder for pictures, log and models')
    positive = number(int, 1)
    parser.add_argument('--epoch', '-e', type=positive, default=30, help='number of epochs')
    parser.add_argument(
        '--num-data', type=number_or_all, default=-1, help='molecules of the sample to use; -1: all'
    )
    parser.add_argument(
        '--repeats', type=positive, default=25, help='measurements of each step time'
    )
    return parser.parse_args()


def headline(text):
    print('\n%s\n%s' % (text, '-' * len(text)))


def trained_models(folder, settings):
    """Return the trained model twice, sparse and in upstream's dense code."""
    models = [TASK.build(settings, dense) for dense in (False, True)]
    for model in models:
        files.load_npz(os.path.join(folder, files.MODEL_FILE), model)
    return models


def nci_molecules(method):
    """Return graphs of the larger molecules that RDKit ships, or None if it does not."""
    path = os.path.join(RDConfig.RDDataDir, 'NCI', 'first_5K.smi')
    if not os.path.exists(path):
        return None
    smiles = pandas.read_csv(path, sep='\t', header=None, usecols=[0], dtype=str)[0].tolist()
    rows = data.typed_smiles(smiles, 1)
    # Any number as label: the time of a step does not depend on it.
    labels = numpy.array([[len(text)] for text in smiles], 'f')
    dataset, _, failures = data.preprocess(rows, method, labels, dense=True)
    files.report_failures(failures, shown=0)
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
    words = ['--method', METHOD, '--label', LABEL, '--unit-num', 64, '--epoch', args.epoch]
    # Upstream's padding, to compare with it.
    words += ['--padded-to', 'batch', '--num-data', args.num_data, '--out', args.out]
    words += ['--force'] if args.out == OUT else []  # the folder of an earlier demo
    status = train_qm9.run([str(word) for word in words], report_every=10)
    if status:
        return status
    settings = files.load_settings(args.out, SCRIPT)
    sparse, dense = trained_models(args.out, settings)
    _, rows = qm9_data.read_qm9('sample', TASK)
    rows = rows.take(data.spread(len(rows.smiles), args.num_data))
    dataset, _, _ = data.preprocess(rows, METHOD, TASK.labels(rows.labels), dense=True)
    examples = [dataset[i] for i in range(len(dataset))]
    test = data.split(rows.smiles, settings)[2]
    test_examples = [examples[i] for i in test]

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
    larger = nci_molecules(METHOD)
    if larger is not None:
        print_steps('NCI compounds shipped with RDKit', settings, larger, args.repeats)
    print('\nThe demo took %.0f seconds.' % (time.perf_counter() - start))
    return 0 if equal else 1


if __name__ == '__main__':
    training.main(main)
