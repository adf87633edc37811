#!/usr/bin/env python
"""Train a graph convolution network on QM9 with batched sparse products.

python train_qm9.py --label gap --epoch 50 --unit-num 64 --out result
python train_qm9.py --label gap --epoch 100 --unit-num 64 --out result --resume
"""

import qm9_data  # before common, which it finds
from common import arguments
from common import training


def run(argv=None, report_every=1):
    """Train, test, and write the model; return the exit status."""
    parser = arguments.make_parser('Regression on QM9.')
    parser.add_argument(
        '--label',
        '-l',
        choices=list(qm9_data.TARGETS) + ['all'],
        default='all',
        help='target; all means all 15 at once',
    )
    parser.add_argument(
        '--data',
        default='sample',
        help='sample: the 4,000 molecules in this repository; full: all of QM9 (pip install '
        'qm9pack, else a download); or a CSV file with the columns smiles and the target(s)',
    )
    arguments.add_training_arguments(parser)
    args = parser.parse_args(argv)
    title = 'all 15 targets'
    if args.label != 'all':
        title = '%s, %s' % (args.label, qm9_data.TARGETS[args.label][2])
    return training.train(qm9_data, args, __file__, 'QM9: ' + title, report_every)


if __name__ == '__main__':
    training.main(run)
