#!/usr/bin/env python
"""Train a graph convolution network on QM9 with batched sparse products.

    python train_qm9.py --label gap --epoch 50 --unit-num 64 --out result
    python train_qm9.py --label gap --epoch 100 --unit-num 64 --out result \\
        --resume result/snapshot.npz
"""
import argparse
import os
import shlex
import signal
import sys

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import matplotlib
import numpy
import qm9_data
import qm9_model
from chainer import optimizers
from chainer import serializers
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.triggers import IntervalTrigger
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

matplotlib.use('Agg')  # pictures go to files

SNAPSHOT_FILE = 'snapshot.npz'
PLOT_FILE = 'learning_curve.png'
# What a resumed run must have in common with the run that made the snapshot.
FIXED_SETTINGS = ['method', 'label', 'conv_layers', 'unit_num', 'batchsize', 'seed',
                  'train_data_ratio', 'data', 'num_data', 'n_molecules']


def ratio(text):
    """Return a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError('got %s, expected a number between 0 and 1' % text)
    return value


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description='Regression on QM9.', allow_abbrev=False)
    parser.add_argument('--method', '-m', choices=qm9_model.METHODS, default='rsgcn',
                        help='method name')
    parser.add_argument('--label', '-l', choices=list(qm9_data.TARGETS) + ['all'], default='all',
                        help='target; all means all 15 at once')
    parser.add_argument('--conv-layers', '-c', type=qm9_model.at_least(int, 1), default=4,
                        help='number of convolution layers')
    parser.add_argument('--batchsize', '-b', type=qm9_model.at_least(int, 1), default=32,
                        help='batch size')
    parser.add_argument('--device', '-d', default='-1',
                        help='-1: CPU; 0, 1, ...: that GPU; or a Chainer device specifier')
    parser.add_argument('--out', '-o', default='result', help='folder for what the run writes')
    parser.add_argument('--epoch', '-e', type=qm9_model.at_least(int, 1), default=20,
                        help='number of epochs')
    parser.add_argument('--unit-num', '-u', type=qm9_model.at_least(int, 1), default=16,
                        help='number of units in one layer of the model')
    parser.add_argument('--seed', '-s', type=qm9_model.at_least(int, 0), default=777,
                        help='decides the split, the start and the order of the batches')
    parser.add_argument('--train-data-ratio', '-r', type=ratio, default=0.7,
                        help='share of the training data; validation and test halve the rest')
    parser.add_argument('--num-data', type=int, default=-1,
                        help='use so many molecules, spread evenly over the data; -1: all')
    parser.add_argument('--data', default='sample',
                        help='sample: the 4,000 molecules in this repository; full: all of QM9 '
                             '(pip install qm9pack, else a download); or a CSV file '
                             'with the columns smiles and the target(s)')
    parser.add_argument('--dense', action='store_true',
                        help="train upstream's dense model instead, for comparison")
    parser.add_argument('--resume', metavar='SNAPSHOT', help='go on from this snapshot')
    return parser.parse_args(argv)


def fit_scaler(scaler, train):
    """Fit a StandardScaler to the labels of the training data.

    In float64: a float32 sum over 90,000 energies of -400 hartree would lose their spread.
    """
    scaler.fit(labels_of(train))
    scaler.mean = scaler.mean.astype(numpy.float32)
    scaler.std = scaler.std.astype(numpy.float32)


class RandomState(training.Extension):
    """Keep NumPy's random state in the snapshot: the order of all later epochs comes from it."""

    name = 'random_state'
    trigger = (1, 'epoch')

    def __call__(self, trainer):
        pass

    def serialize(self, serializer):
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        keys = serializer('keys', keys)
        position = serializer('position', position)
        has_gauss = serializer('has_gauss', has_gauss)
        gauss = serializer('gauss', gauss)
        numpy.random.set_state((kind, keys, int(position), int(has_gauss), float(gauss)))


class EpochsOrInterrupt(IntervalTrigger):
    """Stop after so many epochs, or on Ctrl-C as soon as the current step is complete.

    A KeyboardInterrupt raised in the middle of a step would leave half of the parameters updated.
    """

    def __init__(self, epochs):
        super().__init__(epochs, 'epoch')
        self.interrupted = False

    def __call__(self, trainer):
        return super().__call__(trainer) or self.interrupted

    def __enter__(self):
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, signum, frame):
        self.interrupted = True
        signal.signal(signal.SIGINT, self._previous)  # a second Ctrl-C stops at once


class PlainText:
    """Write to stdout without the codes that erase a progress bar, for pipes and files."""

    def write(self, text):
        sys.stdout.write(text.replace('\033[J', ''))

    def flush(self):
        sys.stdout.flush()


def set_up_trainer(regressor, train, valid, dense, batchsize, epoch, device, out, report_every):
    """Put upstream's usual trainer together.

    Args:
        regressor (Regressor): on its device.
        train, valid (dataset): of (atoms, adj, labels).
        dense (bool): whether the model is upstream's dense one.
        batchsize, epoch (int): molecules a batch; passes over the training data.
        device (chainer.backend.Device): where to train.
        out (str): output folder.
        report_every (int): epochs between validations, and lines of the log.

    Returns:
        Trainer: it takes a snapshot after each epoch.
    """
    optimizer = optimizers.Adam()
    optimizer.setup(regressor)
    converter = qm9_model.converter_of(dense)
    updater = training.StandardUpdater(SerialIterator(train, batchsize), optimizer,
                                       device=device, converter=converter)
    trainer = training.Trainer(updater, EpochsOrInterrupt(epoch), out=out)
    trigger = (report_every, 'epoch')
    trainer.extend(extensions.Evaluator(
        SerialIterator(valid, batchsize, repeat=False, shuffle=False), regressor,
        device=device, converter=converter), trigger=trigger)
    trainer.extend(extensions.LogReport(filename='log', trigger=trigger))
    is_terminal = sys.stdout.isatty()
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss', 'main/mae', 'validation/main/mae',
         'elapsed_time'], out=sys.stdout if is_terminal else PlainText()), trigger=trigger)
    if is_terminal:
        trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.extend(RandomState())
    trainer.extend(extensions.snapshot(filename=SNAPSHOT_FILE), trigger=(1, 'epoch'))
    return trainer


def plot_learning_curve(log, out, label, baseline):
    """Draw OUT/learning_curve.png.

    Args:
        log (list of dict): what LogReport collected.
        out (str): output folder.
        label (str): target, or 'all'.
        baseline (dict): {'loss': ..., 'mae': ...} of always answering the mean of the training
            labels, on the validation data.

    Returns:
        str: path of the picture.
    """
    if label == 'all':
        title, unit = 'all 15 targets', 'standard deviations'
    else:
        title, unit = '%s, %s' % (label, qm9_data.TARGETS[label][2]), qm9_data.unit(label)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout='constrained')
    panels = [('loss', 'mean squared error / variance'), ('mae', 'mean absolute error [%s]' % unit)]
    for ax, (key, name) in zip(axes, panels):
        for prefix, part in (('main/', 'training'), ('validation/main/', 'validation')):
            ax.plot([entry['epoch'] for entry in log], [entry[prefix + key] for entry in log],
                    marker='.', label=part)
        ax.axhline(baseline[key], color='gray', linestyle='--', label='always the mean')
        ax.set(xlabel='epoch', ylabel=name, ylim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
        ax.legend()
    figure.suptitle('QM9: ' + title)
    path = os.path.join(out, PLOT_FILE)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def labels_of(examples):
    """Return the labels of a list of examples, (M, T) float64."""
    return numpy.array([example[-1] for example in examples], dtype=numpy.float64)


def baseline_errors(regressor, scaler, labels):
    """Return {'loss': ..., 'mae': ...} of always answering the mean of the training labels."""
    t = labels.astype(numpy.float32)
    y = numpy.broadcast_to(scaler.mean, t.shape)
    return {'loss': float(regressor.lossfun(y, t).array),
            'mae': float(regressor.metrics_fun['mae'](y, t).array)}


def test_report(label, labels, predictions, train_mean):
    """Return the lines that compare test errors with those of always answering the mean.

    Args:
        label (str): target, or 'all'.
        labels, predictions (numpy.ndarray): (M, T) in the targets' units.
        train_mean (numpy.ndarray): (T,) mean of the training labels.
    """
    mae = numpy.abs(predictions - labels).mean(axis=0)
    baseline = numpy.abs(train_mean - labels).mean(axis=0)
    lines = ['%-6s  %10s  %-11s  %22s  %5s' % ('target', 'test MAE', 'unit',
                                               'MAE of the mean alone', 'ratio')]
    for name, error, base in zip(qm9_data.target_names(label), mae, baseline):
        lines.append('%-6s  %10.5g  %-11s  %22.5g  %5.2f' % (
            name, error, qm9_data.unit(name), base, error / base if base else numpy.nan))
    return lines


def check_resumable(snapshot, settings):
    """Refuse to go on from a snapshot of a run with other settings."""
    if not os.path.isfile(snapshot):
        raise qm9_data.DataError('--resume: snapshot not found: %s' % snapshot)
    before = qm9_model.load_settings(os.path.dirname(snapshot) or '.')
    for name in FIXED_SETTINGS:
        if settings[name] != before.get(name):
            raise qm9_data.DataError(
                '--resume: %s was %r in the run that made %s, and is %r now; both must be the same'
                % (name, before.get(name), snapshot, settings[name]))


def resume_command(args):
    """Return the command that goes on with the run."""
    words = [sys.executable, os.path.relpath(__file__)]
    for name, default in vars(parse_arguments([])).items():
        value = getattr(args, name)
        if value != default and name != 'resume':
            words.append('--' + name.replace('_', '-'))
            words += [] if value is True else [str(value)]
    return shlex.join(words + ['--resume', os.path.join(args.out, SNAPSHOT_FILE)])


def run_until_done(trainer, args):
    """Run the trainer; return whether it came to its end, with a snapshot and a hint if not."""
    path = os.path.join(args.out, SNAPSHOT_FILE)
    try:
        with trainer.stop_trigger:
            trainer.run()
    except KeyboardInterrupt:
        if os.path.exists(path):
            print('\nInterrupted within a step. Go on from the last snapshot with\n  %s'
                  % resume_command(args))
        return False
    if trainer.updater.epoch < args.epoch:
        serializers.save_npz(path + '.tmp', trainer)
        os.replace(path + '.tmp', path)
        print('\nInterrupted in epoch %d, after step %d. Go on exactly there with\n  %s' % (
            trainer.updater.epoch + 1, trainer.updater.iteration, resume_command(args)))
        return False
    return True


def run(args, report_every=1):
    """Train, test, and write the model; return the exit status."""
    device = qm9_model.get_device(args.device)
    device.use()
    os.makedirs(args.out, exist_ok=True)

    dataset, _, _ = qm9_data.load_qm9(args.data, args.label, args.method, args.num_data, args.out)
    settings = {name: getattr(args, name) for name in FIXED_SETTINGS if name != 'n_molecules'}
    settings['n_molecules'] = len(dataset)
    if args.resume:
        check_resumable(args.resume, settings)
    qm9_model.start_folder(args.out, settings, [qm9_model.MODEL_FILE, SNAPSHOT_FILE])

    train, valid, test = [[dataset[int(i)] for i in part] for part in qm9_data.split_indices(
        len(dataset), args.train_data_ratio, args.seed)]
    print('Split: %d training, %d validation, %d test' % (len(train), len(valid), len(test)))

    numpy.random.seed(args.seed)
    if device.xp is not numpy:
        device.xp.random.seed(args.seed)  # layers that learn their input size start on the device
    scaler = StandardScaler()
    fit_scaler(scaler, train)
    regressor = qm9_model.build_regressor(settings, args.dense, scaler)
    regressor.to_device(device)
    trainer = set_up_trainer(regressor, train, valid, args.dense, args.batchsize, args.epoch,
                             device, args.out, min(report_every, args.epoch))
    if args.resume:
        serializers.load_npz(args.resume, trainer)
        print('Resumed from %s: epoch %d, step %d' % (
            args.resume, trainer.updater.epoch, trainer.updater.iteration))
    if trainer.updater.epoch >= args.epoch:
        print('The snapshot has all of the %d epochs: nothing to train' % args.epoch)
    elif not run_until_done(trainer, args):
        return 130

    qm9_model.save_model(args.out, regressor)
    predictions = qm9_model.predict(regressor, test, args.dense, args.batchsize)
    regressor.to_device('@numpy')
    print()
    print('\n'.join(test_report(args.label, labels_of(test), predictions, scaler.mean)))
    print()
    print('Model: %s' % os.path.join(args.out, qm9_model.MODEL_FILE))
    baseline = baseline_errors(regressor, scaler, labels_of(valid))
    print('Learning curve: %s' % plot_learning_curve(
        trainer.get_extension('LogReport').log, args.out, args.label, baseline))
    return 0


def main():
    try:
        sys.exit(run(parse_arguments()))
    except qm9_data.DataError as error:
        sys.exit('error: %s' % error)
    except KeyboardInterrupt:
        sys.exit('interrupted before the training began')


if __name__ == '__main__':
    main()
