"""The command line of the examples."""

import argparse

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import chainer
from chainer import training
from chainer_bspmm.training import GraphUpdater
from common.data import DataError
from common.ranks import COMMUNICATORS
from common.tasks import LAYOUTS
from common.tasks import supported_methods

UPDATERS = {'standard': training.StandardUpdater, 'graph': GraphUpdater}  # by their option


def at_least(kind, bound, most=None):
    """Return a converter of command line values between two bounds, the second of them optional."""

    def convert(text):
        value = kind(text)
        if value < bound or (most is not None and value > most):
            limits = 'at least %s' % bound if most is None else 'from %s to %s' % (bound, most)
            raise argparse.ArgumentTypeError('got %s, expected %s' % (text, limits))
        return value

    convert.__name__ = kind.__name__  # argparse shows it where the text is not a number
    return convert


def size_or_largest(text):
    """Return a number of atoms of at least 1, or the word ``largest``."""
    if text == 'largest':
        return text
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError('got %s, expected at least 1, or largest' % text)
    return value


def number_or_all(text):
    """Return a number of molecules of at least 1, or -1 for all of them."""
    value = int(text)
    if value < 1 and value != -1:
        raise argparse.ArgumentTypeError('got %s, expected at least 1, or -1 for all' % text)
    return value


def ratio(text):
    """Return a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError('got %s, expected a number between 0 and 1' % text)
    return value


def add_running_arguments(parser, batchsize=32):
    """Add the options of every script."""
    parser.add_argument(
        '--batchsize', '-b', type=at_least(int, 1), default=batchsize, help='batch size'
    )
    parser.add_argument(
        '--device',
        '-d',
        default='-1',
        help='-1: CPU; 0, 1, ...: that GPU; or a Chainer device specifier',
    )


def add_communicator_argument(parser, what):
    """Add the option for several processes; `what` is done with the data."""
    parser.add_argument(
        '--communicator',
        choices=COMMUNICATORS,
        help='under mpirun: %s the processes that it starts. naive: on CPUs; pure_nccl: each '
        'on the GPU of its number, whatever --device says' % what,
    )


def add_common_arguments(parser, dense_help):
    """Add the common options of training and prediction."""
    add_running_arguments(parser)
    parser.add_argument(
        '--no-cache',
        action='store_true',
        help='parse the SMILES even if an earlier run left them parsed in the cache folder '
        '(python -m chainer_bspmm info names it)',
    )
    parser.add_argument('--dense', action='store_true', help=dense_help)


def add_training_arguments(parser):
    """Add the options of every train_*.py."""
    parser.add_argument(
        '--method', '-m', choices=supported_methods(), default='rsgcn', help='method name'
    )
    parser.add_argument(
        '--conv-layers', '-c', type=at_least(int, 1), default=4, help='number of convolution layers'
    )
    parser.add_argument(
        '--unit-num',
        '-u',
        type=at_least(int, 1),
        default=16,
        help='number of units in one layer of the model',
    )
    parser.add_argument('--epoch', '-e', type=at_least(int, 1), default=20, help='number of epochs')
    parser.add_argument(
        '--seed',
        '-s',
        type=at_least(int, 0, 2**32 - 1),
        default=777,
        help='decides the split, the start and the order of the batches',
    )
    parser.add_argument(
        '--train-data-ratio',
        '-r',
        type=ratio,
        default=0.7,
        help='share of the training data; validation and test halve the rest',
    )
    parser.add_argument(
        '--num-data',
        type=number_or_all,
        default=-1,
        help='number of molecules to use, spread evenly over the data; -1: all',
    )
    parser.add_argument(
        '--skip-missing',
        action='store_true',
        help='leave out, and count, molecules without a label: in a regression without one of '
        'them, in a classification without any',
    )
    parser.add_argument('--out', '-o', default='result', help='folder for what the run writes')
    parser.add_argument(
        '--layout',
        choices=LAYOUTS,
        default='folded',
        help="folded, the default: upstream's results, the phantom atoms of its dense batches "
        'folded into one row a molecule; padded: the same, with all of them; packed: none, each '
        'molecule as it is',
    )
    parser.add_argument(
        '--padded-to',
        type=size_or_largest,
        metavar='N',
        help='atoms to which folded batches fill up their molecules; largest: those of '
        "the data set's largest molecule; default: of each batch's, as upstream",
    )
    parser.add_argument(
        '--updater',
        choices=sorted(UPDATERS),
        default='standard',
        help="standard: Chainer's; graph: on a GPU, the data set lies there and "
        'each training step is one launch of a CUDA graph',
    )
    add_communicator_argument(
        parser, 'share the molecules out to (batches of --batchsize on each of)'
    )
    parser.add_argument('--resume', metavar='SNAPSHOT', help='continue from this snapshot')
    add_force_argument(parser)
    add_common_arguments(parser, "train upstream's dense model instead, for comparison")


def add_force_argument(parser):
    """Add the option to overwrite a longer run."""
    parser.add_argument(
        '--force', action='store_true', help='overwrite a longer run in the folder of --out'
    )


def add_prediction_arguments(parser, script, data_help):
    """Add the options of every predict_*.py; `script` is the one that trains."""
    parser.add_argument('--in-dir', '-i', default='result', help='output folder of ' + script)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        '--data',
        help=data_help + '; errors are reported for the targets that it contains; '
        'default: the test part',
    )
    source.add_argument('--smiles', nargs='+', help='molecules')
    parser.add_argument('--out', '-o', help='CSV file to write (IN_DIR/predictions.csv)')
    add_layout_argument(parser)
    add_common_arguments(parser, "use upstream's dense model, with the same parameters")


def add_layout_argument(parser):
    """Add the layout of predictions."""
    parser.add_argument('--layout', choices=LAYOUTS, help="another layout than the training's")


def get_device(specifier):
    """Return the Chainer device of `--device`: a negative number is the CPU, another a GPU."""
    try:
        return chainer.get_device(int(specifier) if specifier.lstrip('-').isdigit() else specifier)
    except Exception as error:
        raise DataError(
            '--device %s cannot be used: %s: %s' % (specifier, type(error).__name__, error)
        ) from error
