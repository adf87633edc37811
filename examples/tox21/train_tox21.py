#!/usr/bin/env python
"""Train a graph convolution network on Tox21 with batched sparse products.

python train_tox21.py --epoch 20 --unit-num 64 --batchsize 128 --out result
python train_tox21.py --data tox21.csv.gz --method relgcn --device 0 --out result
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

from common import arguments, training
from common.data import DataError, name_of, read_csv
from common.tasks import Classification
from chainer_chemistry.datasets.molnet import molnet
from chainer_chemistry.datasets.molnet.molnet_config import molnet_default_config

ASSAYS = tuple(molnet_default_config['tox21']['tasks'])  # the names of the 12 columns


def task_of(settings=None):
    """Return the task of every training: the 12 assays."""
    return Classification(ASSAYS)


def download():
    """Return the path of MoleculeNet's Tox21 file, which Chainer Chemistry downloads once."""
    path = molnet.get_molnet_filepath('tox21', download_if_not_exist=False)
    if os.path.exists(path):
        return path
    try:
        return molnet.get_molnet_filepath('tox21')
    except OSError as error:  # urllib's errors are subclasses
        raise DataError(
            "Chainer Chemistry's download of Tox21 failed (%s: %s). Get tox21.csv.gz of "
            'MoleculeNet elsewhere and name it with --data, or put it where Chainer Chemistry '
            'looks for it: %s' % (type(error).__name__, error, path)
        ) from error


def read(data, settings=None, **options):
    """Return (description, rows) of `--data`: the download, or a CSV file with its columns.

    `options`: see :func:`common.data.read_csv`.
    """
    path = data
    description = name_of(data)
    if data == 'download':
        path = download()
        description = "Tox21 from Chainer Chemistry's download, %s" % path
    return description, read_csv(path, 'smiles', task_of(), **options)


def run(argv=None):
    """Train, test, and write the model; return the exit status."""
    parser = arguments.make_parser('Classification on Tox21.')
    group = arguments.add_training_arguments(parser)
    group.add_argument(
        '--data',
        default='download',
        help="download: Chainer Chemistry's; or a CSV file, plain or gzip, "
        "with the columns of MoleculeNet's: smiles and the 12 assays",
    )
    parser.set_defaults(split='random')
    args = arguments.parse_training(parser, argv, sys.modules[__name__])
    return training.train(sys.modules[__name__], args, 'Tox21: 12 assays')


if __name__ == '__main__':
    training.main(run)
