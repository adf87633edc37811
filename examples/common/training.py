"""Train a model on a data set and test it: what every train_*.py does with its data."""

import contextlib
import errno
import gc
import os
import shlex
import signal
import sys
import time

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
from chainer import optimizers
from chainer import serializers
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.extensions.snapshot_writers import SimpleWriter
from chainer.training.extensions.snapshot_writers import ThreadWriter
from chainer.training.triggers import IntervalTrigger
from chainer_bspmm.dataset import DeviceDataset
from common import data
from common import files
from common import measure
from common.arguments import get_device
from common.arguments import UPDATERS
from common.ranks import Ranks
from common.tasks import converter_of
from common.tasks import labels_of

# Settings that a resumed run must share with the run that made the snapshot, in every example.
FIXED_SETTINGS = (
    'method',
    'conv_layers',
    'unit_num',
    'batchsize',
    'seed',
    'train_data_ratio',
    'data',
    'num_data',
    'skip_missing',
)
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # no space left, for one reason or another


class RandomState(training.Extension):
    """Keep NumPy's random state in the snapshot, which decides the order of later epochs.

    It also decides dropout on a CPU. On a GPU dropout draws from CuPy, whose state cannot be read:
    a resumed run continues with other random numbers there. With ``--updater graph`` the random
    numbers follow from the seed and the number of the step, which are in the snapshot.
    """

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
    """Stop after a number of epochs, or on Ctrl-C as soon as the current step is complete.

    A KeyboardInterrupt in the middle of a step would leave half of the parameters updated.
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


class IsSnapshotDue:
    """Tell to take a snapshot after an epoch, but not twice in a second; always after the last.

    On a GPU an epoch takes a tenth of a second, and writing a fifth of that.

    Args:
        updater (chainer.training.Updater): which counts the epochs.
        epochs (int): of the training.
    """

    def __init__(self, updater, epochs):
        self._updater, self._epochs = updater, epochs
        self._next = 0  # seconds

    def __call__(self):
        now = time.perf_counter()
        is_due = now >= self._next or self._updater.epoch >= self._epochs
        if is_due:
            self._next = now + 1
        return is_due


class Snapshots(training.Extension):
    """Take a snapshot of this rank after the epochs that the first rank chooses.

    That of the first rank is overwritten, and counts: the others have theirs of the same step,
    whenever the run is killed, because they write before the first does, and keep the last three.
    """

    trigger = (1, 'epoch')
    priority, name = -100, '_Snapshot'  # as of Chainer's, also in its snapshots

    def __init__(self, ranks, writer, is_due):
        self._ranks, self._is_due = ranks, is_due
        if ranks.is_first:
            self._snapshot = extensions.snapshot(filename=files.SNAPSHOT_FILE, writer=writer)
        else:
            name = snapshot_of(files.SNAPSHOT_FILE, '{.updater.iteration}', ranks.comm.rank)
            self._snapshot = extensions.snapshot(filename=name, writer=writer, n_retains=3)

    def initialize(self, trainer):
        self._snapshot.initialize(trainer)

    def __call__(self, trainer):
        if self._ranks.share(self._is_due()):
            self._ranks.in_turn(lambda: self._snapshot(trainer))

    def finalize(self):
        self._snapshot.finalize()


def snapshot_of(path, iteration, rank):
    """Return the path of another rank's snapshot that goes with one of the first."""
    return '%s.%s.%d' % (path, iteration, rank)


class PlainText:
    """Write to stdout without the codes that erase a progress bar, for pipes and files."""

    def write(self, text):
        sys.stdout.write(text.replace('\033[J', ''))

    def flush(self):
        sys.stdout.flush()


def set_up_trainer(task, model, train, valid, args, converter, device, report_every, ranks):
    """Set up upstream's usual trainer.

    Args:
        task (Regression or Classification): the task.
        model (Regressor or Classifier): on its device.
        train, valid (dataset): of (atoms, adj, ..., labels).
        args (argparse.Namespace): `updater`, `seed`, `batchsize`, `epoch`, `out`.
        converter (callable): of the layout.
        device (chainer.backend.Device): where to train.
        report_every (int): epochs between validations, and lines of the log.
        ranks (Ranks): those that train together.

    Returns:
        Trainer: it takes a snapshot after each epoch, of short ones once in a second.
    """
    optimizer = ranks.optimizer(optimizers.Adam())
    optimizer.setup(model)
    options = {'seed': args.seed + ranks.comm.rank} if args.updater == 'graph' else {}
    updater = UPDATERS[args.updater](
        ranks.iterator(train, args.batchsize),
        optimizer,
        device=device,
        converter=converter,
        **options,
    )
    trainer = training.Trainer(updater, EpochsOrInterrupt(args.epoch), out=args.out)
    trigger = (report_every, 'epoch')
    evaluator = task.evaluator(
        SerialIterator(valid, args.batchsize, repeat=False, shuffle=False),
        model,
        device=device,
        converter=converter,
    )
    trainer.extend(ranks.evaluator(evaluator), name='validation', trigger=trigger)
    if ranks.is_first:
        # mpirun gives the first rank a terminal, whatever its own output is.
        report(trainer, task, trigger, sys.stdout.isatty() and not ranks.are_several)
    trainer.extend(RandomState())
    # Compressing a hundred thousand numbers, the order of the molecules, takes 0.1 s. What was on a
    # GPU was copied and can be written while training continues; a CPU goes on writing to its own.
    # The first rank writes when the others have: not only begun to.
    is_behind = device.xp is not numpy and ranks.is_first
    writer = (ThreadWriter if is_behind else SimpleWriter)(compression=False)
    trainer.extend(Snapshots(ranks, writer, IsSnapshotDue(updater, args.epoch)))
    return trainer


def report(trainer, task, trigger, is_terminal):
    """Let a trainer write the log and show its progress."""
    trainer.extend(extensions.LogReport(filename='log', trigger=trigger))
    trainer.extend(
        extensions.PrintReport(
            ['epoch', *task.log_keys, 'elapsed_time'],
            out=sys.stdout if is_terminal else PlainText(),
        ),
        trigger=trigger,
    )
    if is_terminal:
        trainer.extend(extensions.ProgressBar())


def plot_learning_curve(log, path, title, panels, baseline):
    """Draw the learning curve.

    Args:
        log (list of dict): what LogReport collected.
        path (str): the picture.
        title (str): its title.
        panels (list): (key in the log, name of the axis).
        baseline (dict): {key: value of an answer that ignores the molecule}.
    """
    from matplotlib.figure import Figure  # here: not before the model is saved
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout='constrained')
    axes = figure.subplots(1, len(panels))
    for ax, (key, name) in zip(axes, panels):
        for prefix, part in (('main/', 'training'), ('validation/main/', 'validation')):
            known = [entry for entry in log if prefix + key in entry]
            if known:
                ax.plot(
                    [entry['epoch'] for entry in known],
                    [entry[prefix + key] for entry in known],
                    marker='.',
                    label=part,
                )
        ax.axhline(baseline[key], color='gray', linestyle='--', label='always the mean')
        ax.set(xlabel='epoch', ylabel=name)
        if key != 'roc_auc':
            ax.set_ylim(0, None)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
        ax.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def check_options(args, device):
    """Refuse options that exclude each other."""
    if args.padded_to and (args.dense or args.layout != 'folded'):
        raise data.DataError(
            '--padded-to: expected --layout folded, got %s'
            % ('--dense' if args.dense else '--layout ' + args.layout)
        )
    if args.updater != 'graph':
        return
    if device.xp is numpy:
        raise data.DataError(
            '--updater graph: CUDA graphs need a GPU, --device %s is the CPU; '
            'use --device 0, or drop --updater' % args.device
        )
    if args.dense:
        raise data.DataError(
            '--updater graph: steps of the dense model cannot be captured; leave out --dense'
        )


def layout_of(args, dataset):
    """Return {'layout', 'padded_to'} of a training, with numbers for words."""
    padded_to = args.padded_to
    if padded_to == 'largest':
        padded_to = int(dataset.molecules.full_sizes.max())
    return {'layout': 'dense' if args.dense else args.layout, 'padded_to': padded_to}


def on_device(dataset, device):
    """Return the data set on a GPU, or as it is, with a message, where it is too large.

    Batches of its parts are gathered on the GPU, too.
    """
    try:
        return DeviceDataset(dataset, device)
    except ValueError as error:
        print('The data set stays on the host: %s' % error)
        return dataset


def check_resumable(snapshot, settings):
    """Refuse to continue from a snapshot of a run with other settings."""
    before = files.load_settings(os.path.dirname(snapshot) or '.', settings['script'])
    for name in settings:
        if settings[name] == before.get(name):
            continue
        if name == 'digest':
            raise data.DataError(
                '--resume: the data have other molecules or labels, or in another order, than in '
                'the run that made %s' % snapshot
            )
        raise data.DataError(
            '--resume: %s was %r in the run that made %s, and is %r now; both must be the same'
            % (name, before.get(name), snapshot, settings[name])
        )


def resume_command(script, parser, args, ranks):
    """Return the command that continues the run."""
    words = ['mpirun', '-n', str(ranks.comm.size)] if ranks.are_several else []
    words += [sys.executable, os.path.relpath(script)]
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name != 'resume':
            words.append('--' + name.replace('_', '-'))
            values = value if isinstance(value, list) else [value]
            words += [] if value is True else [str(word) for word in values]
    return shlex.join(words + ['--resume', os.path.join(args.out, files.SNAPSHOT_FILE)])


def run_until_done(trainer, epoch, path, command, ranks):
    """Run the trainer; return whether it finished, with a snapshot and a hint if not.

    Several ranks would not stop at the same step: mpirun ends them all at once.
    """
    gc.freeze()  # modules and molecules stay: searching them for garbage takes as long as an epoch
    try:
        with contextlib.nullcontext() if ranks.are_several else trainer.stop_trigger:
            trainer.run(show_loop_exception_msg=False)  # what it would show follows anyway
    except KeyboardInterrupt:
        if os.path.exists(path):
            print('\nInterrupted in a step. Continue from the last snapshot with\n  %s' % command)
        return False
    finally:
        gc.unfreeze()
    if trainer.updater.epoch < epoch:
        with files.replacing(path) as new:
            serializers.save_npz(new, trainer)
        print(
            '\nInterrupted in epoch %d, after step %d. Continue exactly there with\n  %s'
            % (trainer.updater.epoch + 1, trainer.updater.iteration, command)
        )
        return False
    return True


def train(task, read, args, parser, script, title, own_settings=(), report_every=1):
    """Train, test, and write model and results.

    Args:
        task (Regression or Classification): the task.
        read (callable): what to do about missing labels, as of `data.read_csv` ->
            (description of the data (str), its table).
        args (argparse.Namespace): the options, those of `arguments.add_training_arguments`.
        parser (argparse.ArgumentParser): it has parsed `args`.
        script (str): the script's file.
        title (str): of the learning curve.
        own_settings (sequence of str): further names of `args` that decide the model or the data.
        report_every (int): epochs between validations.

    Returns:
        int: the exit status.
    """
    ranks = Ranks(args.communicator)
    device = get_device(ranks.device(args.device))
    check_options(args, device)
    device.use()
    found = None
    if ranks.is_first:
        found = prepare(task, read, args, script, own_settings, device, ranks)
    settings, train_labels, valid_labels, data_seconds = ranks.share(found and found[0])
    train, valid, test = found[1] if ranks.is_first else (None, None, None)
    train, valid = ranks.scatter(train), ranks.scatter(valid)
    converter = converter_of(settings['layout'], settings['padded_to'])
    if args.updater == 'graph' and ranks.are_several:
        train, valid = on_device(train, device), on_device(valid, device)

    numpy.random.seed(args.seed)
    if device.xp is not numpy:
        device.xp.random.seed(args.seed)  # layers that learn their input size start on the device
    model = task.build(settings, args.dense, train_labels)
    model.to_device(device)
    if ranks.comm.rank:
        numpy.random.seed((args.seed + ranks.comm.rank) % 2**32)  # other orders, other dropout
    trainer = set_up_trainer(
        task, model, train, valid, args, converter, device, min(report_every, args.epoch), ranks
    )
    if args.resume:
        resume(args.resume, trainer, ranks)
        print(
            'Resumed from %s: epoch %d, step %d'
            % (args.resume, trainer.updater.epoch, trainer.updater.iteration)
        )
    timer = measure.StepTimer(trainer, device)
    start = time.perf_counter()
    if trainer.updater.epoch >= args.epoch:
        print('The snapshot has all of the %d epochs: nothing to train' % args.epoch)
    elif not run_until_done(
        trainer,
        args.epoch,
        os.path.join(args.out, files.SNAPSHOT_FILE),
        resume_command(script, parser, args, ranks),
        ranks,
    ):
        return 130
    training_seconds = time.perf_counter() - start
    if not ranks.is_first:
        return 0

    path = files.save_model(args.out, model)
    predictions = task.predict(model, test, converter, args.batchsize)
    # Before anything else allocates memory.
    memory = measure.peak_memory(device, trainer.updater)
    step = measure.milliseconds_a_step(timer.rounds)
    model.to_device('@numpy')
    lines, metrics = task.test_report(labels_of(test), predictions, train_labels)
    print()
    print('\n'.join(lines + [''] + measure.cost_report(step, memory)))
    files.write_json(
        os.path.join(args.out, files.RESULT_FILE),
        {
            'settings': settings,
            'dense': args.dense,
            'updater': args.updater,
            'epochs': trainer.updater.epoch,
            'steps': trainer.updater.iteration,
            'test': metrics,
            'milliseconds a step': step,
            'seconds': {'data': round(data_seconds, 3), 'training': round(training_seconds, 3)},
            'peak memory in bytes': memory,
            'conditions': measure.conditions(device),
        },
    )
    print('Model: %s' % path)
    path = os.path.join(args.out, files.PLOT_FILE)
    plot_learning_curve(
        trainer.get_extension('LogReport').log,
        path,
        title,
        task.panels(),
        task.baseline(model, train_labels, valid_labels),
    )
    print('Learning curve: %s' % path)
    return 0


def resume(path, trainer, ranks):
    """Load the snapshot of the first rank, and those of the others that go with it."""
    if ranks.is_first:
        files.load_npz(path, trainer)
    iteration = ranks.share(trainer.updater.iteration)
    if not ranks.is_first:
        files.load_npz(snapshot_of(path, iteration, ranks.comm.rank), trainer)


def prepare(task, read, args, script, own_settings, device, ranks):
    """Read the data, and start the folder of the run.

    Returns:
        tuple: what all ranks need: settings (dict), labels of training and validation part, seconds
        for the data; the parts of the data set: training, validation, test.
    """
    if args.resume:  # before it takes the time that the data take, and a file is removed
        if not os.path.isfile(args.resume):
            raise data.DataError('--resume: snapshot not found: %s' % args.resume)
        files.check_snapshot(args.resume)
    files.make_folder(args.out)
    if files.is_one_of(args.data, files.of_run(args.out)):
        raise data.DataError('--data: %s would be overwritten, use another --out' % args.data)
    is_continued = args.resume and files.is_one_of(os.path.dirname(args.resume) or '.', [args.out])
    if not is_continued:
        files.check_not_longer(args.out, args.epoch, args.force)
    start = time.perf_counter()
    description, table = read('skip' if args.skip_missing else 'refuse')
    dataset, table, kept = data.load(
        description,
        table,
        task,
        args.method,
        args.num_data,
        os.path.join(args.out, files.FAILED_FILE),
        args.dense,
        not args.no_cache,
    )
    if not table[task.names].notna().to_numpy().any():
        raise data.DataError('%s: no molecule has a label' % description)
    data.report_duplicates(table.iloc[kept])
    data_seconds = time.perf_counter() - start
    settings = {name: getattr(args, name) for name in (*FIXED_SETTINGS, *own_settings)}
    settings.update(
        script=os.path.basename(script),
        n_molecules=len(dataset),
        digest=data.digest(table, task),
        ranks=ranks.comm.size,
        **layout_of(args, dataset),
    )
    if args.data not in data.NAMED:
        settings['data'] = os.path.abspath(args.data)  # predictions may run in another folder
    if args.resume:
        check_resumable(args.resume, settings)
    elif os.path.exists(os.path.join(args.out, files.SNAPSHOT_FILE)):
        print(
            'Starting again: the snapshot of an earlier run in %s is overwritten after the first '
            'epoch (to continue it, use --resume)' % args.out
        )
    files.start_folder(args.out, settings)
    if args.updater == 'graph' and not ranks.are_several:
        dataset = on_device(dataset, device)
    parts = [
        dataset[part] for part in data.split_indices(len(dataset), args.train_data_ratio, args.seed)
    ]
    print('Split: %d training, %d validation, %d test' % tuple(map(len, parts)))
    if args.batchsize > len(parts[0]):
        print('Batches of all %d training molecules' % len(parts[0]))
    return (settings, labels_of(parts[0]), labels_of(parts[1]), data_seconds), parts


def main(run):
    """Call a script's function and exit with its status; user errors have no traceback."""
    try:
        sys.exit(run())
    except data.DataError as error:
        sys.exit('error: %s' % error)
    except OSError as error:
        if error.errno not in FULL:
            raise
        sys.unraisablehook = lambda _: None  # a half-written archive complains, too, when it goes
        sys.exit('error: cannot write: %s' % error.strerror)
    except KeyboardInterrupt:
        sys.exit('interrupted')
