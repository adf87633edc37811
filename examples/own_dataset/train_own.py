#!/usr/bin/env python
"""Train a graph convolution network on a CSV file of your own with batched sparse products.

    python train_own.py --data solubility.csv --labels logS --task regression
    python train_own.py --data assays.csv --smiles-column SMILES --labels hERG AMES \\
        --task classification --method gin --out result
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

from common import arguments, training
from common.data import DataError, name_of, read_csv
from common.tasks import TASKS


def task_of(settings):
    """Return the task of the settings: a regression or classification of some columns."""
    return TASKS[settings['task']](settings['labels'])


def read(data, settings, **options):
    """Return (description, rows) of a CSV file, by :func:`common.data.read_csv`."""
    return name_of(data), read_csv(data, settings['smiles_column'], task_of(settings), **options)


def run(argv=None):
    """Train, test, and write the model; return the exit status."""
    parser = arguments.make_parser('Training on a CSV file of your own.')
    group = arguments.add_training_arguments(parser)
    group.add_argument(
        '--data', required=True, help='CSV file, plain or gzip; - for standard input'
    )
    group.add_argument('--smiles-column', default='smiles', help='name of the column of SMILES')
    group.add_argument('--labels', nargs='+', required=True, help='names of the columns to learn')
    group.add_argument(
        '--task',
        choices=sorted(TASKS),
        required=True,
        help='regression: every label is a number; classification: 1, 0, or nothing where it is '
        'unknown',
    )
    group.add_argument(
        '--split',
        choices=('random', 'scaffold'),
        default='random',
        help='scaffold: molecules with the same ring systems and linkers are in one part, so that '
        'test molecules differ from training molecules',
    )
    args = arguments.parse_training(parser, argv, sys.modules[__name__])
    if len(set(args.labels)) < len(args.labels):
        raise DataError('--labels: a column is named twice')
    title = '%s: %s' % (args.data, ', '.join(args.labels))
    return training.train(sys.modules[__name__], args, title)


if __name__ == '__main__':
    training.main(run)
