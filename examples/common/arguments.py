"""The command line of the examples."""

import argparse
import contextlib
import sys

import chainer
from common import folder
from common.data import DataError
from common.ranks import COMMUNICATORS
from common.tasks import LAYOUTS, METHODS


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with defaults, except for switches and options without a default."""

    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help


def number(kind, low, high=None, words=()):
    """Return a type for argparse: a number from low to high, or one of some words."""

    def convert(text):
        if text in words:
            return text
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= (value if high is None else high):
                return value
        limits = 'at least %s' % low if high is None else 'from %s to %s' % (low, high)
        expected = ', '.join(['a number ' + limits, *words])
        raise argparse.ArgumentTypeError('got %s, expected %s' % (text, expected))

    return convert


POSITIVE = number(int, 1)
LAYOUT = ('layout', 'padded_to')


def make_parser(description):
    """Return a parser without abbreviations: they would change with every new option."""
    return argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=Formatter
    )


def add_device_argument(group):
    """Add the option for the device."""
    group.add_argument(
        '--device', '-d', default='-1', help='-1: CPU; 0, 1, ...: that GPU; or as Chainer names it'
    )


def add_communicator_argument(group, what):
    """Add the option for several processes; its help begins with `what`."""
    group.add_argument(
        '--communicator',
        choices=COMMUNICATORS,
        help='under mpirun: %s its processes, on CPUs (naive) or each on a GPU (pure_nccl)' % what,
    )


def add_model_arguments(parser, methods, conv_layers, unit_num, epoch, train_data_ratio):
    """Add the options of every training; the numbers are defaults. Return groups of options."""
    data, model, training, run = groups = [
        parser.add_argument_group(name) for name in ('data', 'model', 'training', 'run')
    ]
    model.add_argument('--method', '-m', choices=methods, default=methods[0], help='method name')
    for group, name, default, what in (
        (model, '--conv-layers', conv_layers, 'number of convolution layers'),
        (model, '--unit-num', unit_num, 'number of units in one layer'),
        (training, '--epoch', epoch, 'number of epochs'),
    ):
        group.add_argument(name, name[1:3], type=POSITIVE, default=default, help=what)
    training.add_argument(
        '--seed',
        '-s',
        type=number(int, 0, 2**32 - 1),
        default=777,
        help='decides the split, the initial parameters and the order of the batches',
    )
    data.add_argument(
        '--train-data-ratio',
        '-r',
        type=number(float, 0, 1),
        default=train_data_ratio,
        help='share of the training data; validation and test halve the rest',
    )
    run.add_argument('--out', '-o', default='result', help='new or empty folder of the run')
    run.add_argument('--force', action='store_true', help='remove the run in --out, start again')
    add_device_argument(run)
    return groups


def add_training_arguments(parser):
    """Add the options of every train_*.py on molecules; return the group of data options."""
    data, model, training, run = add_model_arguments(parser, METHODS, 4, 16, 20, 0.7)
    training.add_argument('--batchsize', '-b', type=POSITIVE, default=32, help='batch size')
    training.add_argument(
        '--learning-rate', type=number(float, 0, 1), default=0.001, help='learning rate of Adam'
    )
    training.add_argument(
        '--patience',
        type=POSITIVE,
        metavar='N',
        help='stop after N epochs without a better validation result',
    )
    data.add_argument(
        '--num-data',
        type=number(int, -1),
        default=-1,
        help='molecules to use, evenly spread; -1: all',
    )
    data.add_argument(
        '--skip-missing', action='store_true', help='leave out, and count, molecules without labels'
    )
    model.add_argument(
        '--layout',
        choices=LAYOUTS,
        default='folded',
        help="how a molecule's phantom atoms (upstream's padding) are stored. folded: one row for "
        'all; padded: a row for each; packed: none',
    )
    model.add_argument(
        '--padded-to',
        type=number(int, 1, words=('largest', 'batch')),
        metavar='N',
        help='number of atoms to which folded batches pad their molecules; largest (default): size '
        'of the largest molecule of the data set; batch: of each batch, as upstream',
    )
    model.add_argument(
        '--dense', action='store_true', help="train upstream's dense model instead, for comparison"
    )
    run.add_argument(
        '--updater',
        choices=('auto', 'graph', 'standard'),
        default='auto',
        help='graph: each training step is one launch of a CUDA graph; standard: by Python; auto: '
        'graph on a GPU, standard on a CPU and with --dense',
    )
    add_communicator_argument(run, 'distribute the molecules to')
    run.add_argument(
        '--resume',
        action='store_true',
        help='continue the run in --out from its last snapshot, with its options',
    )
    return data


def parse_training(parser, argv, source):
    """Parse the command line of a train_*.py, the module `source`.

    With ``--resume``, options that are not given have the values of the run in ``--out``.
    """
    argv = sys.argv[1:] if argv is None else argv
    required = [action for action in parser._actions if action.required]
    for action in required:
        action.required = '--resume' not in argv
    args = parser.parse_args(argv)
    if args.resume and args.force:
        parser.error(
            '--resume continues the run in --out, --force removes it: expected one of them'
        )
    if args.resume:
        folder.check(args.out, args.force, args.resume)
        settings, *_ = folder.load_run(args.out, source)
        for action in required:
            action.required = action.dest not in settings
        settings['padded_to'] = settings['padded_to'] or 'batch'
        parser.set_defaults(**settings)
        is_padding_given = args.padded_to is not None
        args = parser.parse_args(argv)
        args.dense = args.dense or args.layout == 'dense'  # the layout of the run, if none is given
        if not is_padding_given and (args.dense or args.layout != 'folded'):
            args.padded_to = 'batch'  # if the layout is another one, that is what has changed
        # The layout may depend on the data, which are not read yet.
        given = {name: value for name, value in vars(args).items() if name not in LAYOUT}
        folder.refuse_changes(args.out, settings, given)
    return args


def add_trained_arguments(parser, script, out, batchsize=32):
    """Add the options of a prediction: its model, device and output.

    `script` has trained the model; `out` is the help of --out.
    """
    parser.add_argument('--in-dir', '-i', default='result', help='output folder of ' + script)
    parser.add_argument(
        '--model',
        choices=('last', 'best'),
        default='last',
        help='last: model of the last epoch; best: model of the epoch with the best validation '
        'result',
    )
    parser.add_argument('--batchsize', '-b', type=POSITIVE, default=batchsize, help='batch size')
    add_device_argument(parser)
    parser.add_argument('--out', '-o', help=out)
    parser.add_argument('--force', action='store_true', help='overwrite existing output')


def use_device(specifier):
    """Make the device of `--device` the current one and return it: -1 is the CPU."""
    is_number = specifier.lstrip('-').isdigit()
    try:
        if is_number and int(specifier) < -1:
            raise ValueError('no GPU has this number')
        device = chainer.get_device(int(specifier) if is_number else specifier)
        device.use()
        return device
    except Exception as error:  # errors of Chainer and CuPy have many types
        raise DataError(
            '--device %s cannot be used (%s: %s); expected -1 (CPU), 0, 1, ... (that GPU; needs '
            'CuPy: docs/install.md) or a Chainer device, such as @cupy:0'
            % (specifier, type(error).__name__, str(error).strip().split('\n')[0])
        ) from error
