#!/usr/bin/env python
"""Train a graph convolution network on Tox21 with batched sparse products.

python train_tox21.py --epoch 20 --unit-num 64 --batchsize 128 --out result
python train_tox21.py --data tox21.csv.gz --method relgcn --device 0 --out result
"""

import tox21_data  # before common, which it finds
from common import arguments
from common import training


def run(argv=None):
    """Train, test, and write the model; return the exit status."""
    parser = arguments.make_parser('Classification on Tox21.')
    parser.add_argument(
        '--data',
        default='download',
        help="download: Chainer Chemistry's; or a CSV file, plain or compressed, "
        "with the columns of MoleculeNet's: smiles and the 12 assays",
    )
    arguments.add_training_arguments(parser)
    return training.train(tox21_data, parser.parse_args(argv), __file__, 'Tox21: 12 assays')


if __name__ == '__main__':
    training.main(run)
