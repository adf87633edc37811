"""The command line of the examples."""

import argparse

import chainer
from common.data import DataError
from common.ranks import COMMUNICATORS
from common.tasks import LAYOUTS, METHODS


def number(kind, low, high=None):
    """Return a converter of command line values to numbers from low to high."""

    def convert(text):
        value = kind(text)
        if value < low or (high is not None and value > high):
            expected = 'at least %s' % low if high is None else 'from %s to %s' % (low, high)
            raise argparse.ArgumentTypeError('got %s, expected %s' % (text, expected))
        return value

    convert.__name__ = kind.__name__  # argparse shows it where the text is not a number
    return convert


POSITIVE = number(int, 1)


def number_of_atoms(text):
    """Return the value of ``--padded-to``: a word, or a number."""
    return text if text in ('largest', 'batch') else POSITIVE(text)


def make_parser(description):
    """Return a parser without abbreviations: they would change with every new option."""
    return argparse.ArgumentParser(description=description, allow_abbrev=False)


def add_device_argument(parser):
    """Add the option for the device."""
    parser.add_argument(
        '--device', '-d', default='-1', help='-1: CPU; 0, 1, ...: that GPU; or as Chainer names it'
    )


def add_running_arguments(parser, batchsize=32):
    """Add the options of every script with batches."""
    parser.add_argument('--batchsize', '-b', type=POSITIVE, default=batchsize, help='batch size')
    add_device_argument(parser)


def add_communicator_argument(parser, what):
    """Add the option for several processes; `what` is done with the data."""
    parser.add_argument(
        '--communicator',
        choices=COMMUNICATORS,
        help='under mpirun: %s its processes, on CPUs (naive) or each on a GPU (pure_nccl)' % what,
    )


def add_model_arguments(parser, methods, conv_layers, unit_num, epoch, train_data_ratio):
    """Add the options of every training; the numbers are defaults."""
    parser.add_argument('--method', '-m', choices=methods, default=methods[0], help='method name')
    for name, default, what in (
        ('--conv-layers', conv_layers, 'number of convolution layers'),
        ('--unit-num', unit_num, 'number of units in one layer'),
        ('--epoch', epoch, 'number of epochs'),
    ):
        parser.add_argument(name, name[1:3], type=POSITIVE, default=default, help=what)
    parser.add_argument(
        '--seed',
        '-s',
        type=number(int, 0, 2**32 - 1),
        default=777,
        help='decides the split, the start, the order of the batches',
    )
    parser.add_argument(
        '--train-data-ratio',
        '-r',
        type=number(float, 0, 1),
        default=train_data_ratio,
        help='share of the training data; validation and test halve the rest',
    )
    parser.set_defaults(split='random')
    parser.add_argument('--out', '-o', default='result', help='new or empty folder of the run')
    parser.add_argument('--force', action='store_true', help='remove the run in --out, start again')


def add_training_arguments(parser):
    """Add the options of every train_*.py on molecules."""
    add_model_arguments(parser, METHODS, 4, 16, 20, 0.7)
    add_running_arguments(parser)
    parser.add_argument(
        '--num-data',
        type=number(int, -1),
        default=-1,
        help='molecules to use, evenly spread; -1: all',
    )
    parser.add_argument(
        '--skip-missing', action='store_true', help='leave out, and count, molecules without labels'
    )
    parser.add_argument(
        '--layout',
        choices=LAYOUTS,
        default='folded',
        help='how a molecule is filled up with phantom atoms, as upstream does. folded, the '
        'default: in one row; padded: in a row for each of them; packed: not at all',
    )
    parser.add_argument(
        '--padded-to',
        type=number_of_atoms,
        metavar='N',
        help='atoms to which folded batches fill up their molecules; largest, the default: as the '
        'largest of the data set has; batch: as the largest of each batch, as upstream',
    )
    parser.add_argument(
        '--updater',
        choices=('auto', 'graph', 'standard'),
        default='auto',
        help='graph: each training step is one launch of a CUDA graph; standard: by Python; auto, '
        'the default: graph on a GPU, standard on a CPU and with --dense',
    )
    add_communicator_argument(parser, 'share the molecules out to')
    parser.add_argument(
        '--resume', action='store_true', help='continue the run in --out from its last snapshot'
    )
    parser.add_argument(
        '--dense', action='store_true', help="train upstream's dense model instead, for comparison"
    )


def add_trained_arguments(parser, script, batchsize=32):
    """Add the options that say which model predicts, and where; `script` has trained it."""
    parser.add_argument('--in-dir', '-i', default='result', help='output folder of ' + script)
    parser.add_argument(
        '--model',
        choices=('last', 'best'),
        default='last',
        help='last, the default: of the last epoch; best: of that with the best validation',
    )
    add_running_arguments(parser, batchsize)


def use_device(specifier):
    """Make the device of `--device` the current one and return it: -1 is the CPU."""
    is_number = specifier.lstrip('-').isdigit()
    try:
        if is_number and int(specifier) < -1:
            raise ValueError('no GPU has this number')
        device = chainer.get_device(int(specifier) if is_number else specifier)
        device.use()
        return device
    except Exception as error:  # Chainer's and CuPy's are of many types
        raise DataError(
            '--device %s cannot be used (%s: %s); expected -1 (CPU), 0, 1, ... (that GPU; needs '
            'CuPy: docs/install.md) or a Chainer device, such as @cupy:0'
            % (specifier, type(error).__name__, str(error).strip().split('\n')[0])
        ) from error
