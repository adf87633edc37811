"""Train a model on a data set and test it: what every train_*.py does with its data."""

import gc
import math
import os
import sys
import time

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import chainer
import numpy
import pandas
from chainer import optimizers
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.extensions.snapshot_writers import SimpleWriter
from chainer.training.extensions.snapshot_writers import ThreadWriter
from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.training import GraphUpdater
from common import data
from common import files
from common import measure
from common.arguments import get_device
from common.data import DataError
from common.ranks import Ranks
from common.tasks import converter_of
from common.tasks import labels_of

# Options that decide the model or the data, in every example: a resumed run must have the same.
SETTINGS = (
    *('method', 'conv_layers', 'unit_num', 'batchsize', 'seed', 'train_data_ratio'),
    *('data', 'num_data', 'skip_missing', 'split'),
)


class RandomState(training.Extension):
    """Keep NumPy's random state in the snapshot, which decides the order of later epochs.

    It also decides dropout on a CPU. On a GPU with ``--updater standard`` dropout draws from CuPy,
    whose state cannot be read: a resumed run continues with other random numbers. With captured
    steps the random numbers follow from the seed and the number of the step, which are in the
    snapshot.
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


class BestModel(training.Extension):
    """Save the model after the epochs whose validation is the best so far.

    Not a MinValueTrigger: captured steps take another look at the model after every step where a
    trigger may be due that is no interval. `best` is (key of the value, min or max).
    """

    name, priority = 'best_model', -90  # after the validation, before the snapshot

    def __init__(self, model, best, writer, every):
        self.trigger = every, 'epoch'
        self._key, self._better = best
        self._value = math.nan
        self._save = extensions.snapshot_object(model, files.BEST_FILE, writer=writer)

    def __call__(self, trainer):
        value = float(trainer.observation.get(self._key, math.nan))
        # min and max of a pair return the first where the second is NaN.
        if math.isnan(self._value) or self._better(self._value, value) != self._value:
            self._value = value
            self._save(trainer)

    def serialize(self, serializer):
        self._value = float(serializer('value', self._value))

    def finalize(self):
        self._save.finalize()


class Snapshots(training.Extension):
    """Take a snapshot of this rank after an epoch, but not twice in a second; after the last, too.

    On a GPU an epoch takes a tenth of a second, and writing a fifth of that. The first rank's
    snapshot is overwritten, and counts: the others have theirs of the same step, whenever the run
    is killed, because they write before the first does, and keep the last three.
    """

    trigger = (1, 'epoch')
    priority, name = -100, '_Snapshot'  # as of Chainer's, also in its snapshots

    def __init__(self, ranks, writer, epochs):
        self._ranks, self._epochs = ranks, epochs
        self._next = 0  # seconds
        if ranks.is_first:
            self._snapshot = extensions.snapshot(filename=files.SNAPSHOT_FILE, writer=writer)
        else:
            name = snapshot_of(files.SNAPSHOT_FILE, '{.updater.iteration}', ranks.comm.rank)
            self._snapshot = extensions.snapshot(filename=name, writer=writer, n_retains=3)

    def is_due(self, epoch):
        """Return whether to take a snapshot after an epoch."""
        now = time.perf_counter()
        if now < self._next and epoch < self._epochs:
            return False
        self._next = now + 1
        return True

    def initialize(self, trainer):
        self._snapshot.initialize(trainer)

    def __call__(self, trainer):
        if self._ranks.share(self.is_due(trainer.updater.epoch)):
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


def updater_of(args, device):
    """Return ``graph`` or ``standard``, as `--updater` says, or refuse it."""
    is_cpu = device.xp is numpy
    if args.updater == 'auto':
        return 'standard' if is_cpu or args.dense else 'graph'
    if args.updater == 'graph' and is_cpu:
        raise DataError(
            '--updater graph: CUDA graphs need a GPU, --device %s is the CPU; use --device 0, or '
            'drop --updater' % args.device
        )
    if args.updater == 'graph' and args.dense:
        raise DataError(
            '--updater graph: steps of the dense model cannot be captured; leave out --dense'
        )
    return args.updater


def layout_of(args, dataset):
    """Return {'layout', 'padded_to'} of a training, with numbers for words."""
    layout = 'dense' if args.dense else args.layout
    padded_to = args.padded_to
    if layout != 'folded':
        if padded_to not in (None, 'batch'):
            raise DataError('--padded-to: expected layout folded, got %s' % layout)
        padded_to = 'batch'
    if padded_to in (None, 'largest'):
        padded_to = int(dataset.molecules.full_sizes.max())
    return {'layout': layout, 'padded_to': None if padded_to == 'batch' else padded_to}


def on_device(dataset, device):
    """Return the data set on a GPU, or as it is, with a message, where it is too large.

    Batches of its parts are gathered on the GPU, too.
    """
    try:
        return DeviceDataset(dataset, device)
    except ValueError as error:
        print('The data set stays on the host: %s' % error)
        return dataset


def set_up_trainer(task, model, parts, args, converter, device, report_every, ranks):
    """Return upstream's usual trainer, with snapshots; `parts` are training and validation."""
    optimizer = ranks.optimizer(optimizers.Adam())
    optimizer.setup(model)
    of_both = {'device': device, 'converter': converter}
    vars(chainer.global_config)['bspmm_capture'] = (
        args.updater == 'graph'
    )  # else evaluators stay, too
    iterator = ranks.iterator(parts[0], args.batchsize)
    if args.updater == 'graph':
        seed = args.seed + ranks.comm.rank
        updater = GraphUpdater(iterator, optimizer, seed=seed, **of_both)
    else:
        updater = training.StandardUpdater(iterator, optimizer, **of_both)
    trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)
    trigger = (report_every, 'epoch')
    iterator = SerialIterator(parts[1], args.batchsize, repeat=False, shuffle=False)
    evaluator = ranks.evaluator(task.evaluator(iterator, model, **of_both))
    trainer.extend(evaluator, name='validation', trigger=trigger)

    def writer():
        # Compressing a hundred thousand numbers, the order of the molecules, takes 0.1 s. What was
        # on a GPU was copied and can be written while training continues; a CPU goes on writing to
        # its own. The first rank writes when the others have: not only begun to.
        is_behind = device.xp is not numpy and ranks.is_first
        return (ThreadWriter if is_behind else SimpleWriter)(compression=False)

    if ranks.is_first:
        # mpirun gives the first rank a terminal, whatever its own output is.
        is_terminal = sys.stdout.isatty() and not ranks.are_several
        trainer.extend(extensions.LogReport(filename=files.LOG_FILE, trigger=trigger))
        columns = ['epoch', *task.log_keys, 'elapsed_time']
        out = sys.stdout if is_terminal else PlainText()
        trainer.extend(extensions.PrintReport(columns, out=out), trigger=trigger)
        if is_terminal:
            trainer.extend(extensions.ProgressBar())
        trainer.extend(BestModel(model, task.best, writer(), report_every))
    trainer.extend(RandomState())
    trainer.extend(Snapshots(ranks, writer(), args.epoch))
    return trainer


def plot_learning_curve(log, path, title, panels):
    """Draw the learning curve; `panels` are (key in the log (list of dict), name of the axis)."""
    from matplotlib.figure import Figure  # here: not before the model is saved

    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout='constrained')
    table = pandas.DataFrame(log)
    for ax, (key, name) in zip(figure.subplots(1, len(panels)), panels):
        for prefix, part, color in (('', 'training', 'C0'), ('validation/', 'validation', 'C1')):
            column = prefix + 'main/' + key
            if column in table:
                ax.plot(table['epoch'], table[column], '.-', label=part, color=color)
        ax.set(xlabel='epoch', ylabel=name, xlim=(0, table['epoch'].max() + 1))
        if key != 'roc_auc':
            ax.set_ylim(0, None)
        ax.locator_params(axis='x', integer=True)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def plot_fit(path, truth, predictions, titles):
    """Draw predicted against true values of the test molecules, a panel for each target."""
    from matplotlib.figure import Figure

    n_columns = min(len(titles), 4)
    n_rows = -(-len(titles) // n_columns)
    figure = Figure(figsize=(4 * n_columns, 3.8 * n_rows), layout='constrained')
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for ax, t, y, title in zip(axes, truth.T, predictions.T, titles):
        ax.axline((t.mean(), t.mean()), slope=1, color='gray', linewidth=1)
        ax.scatter(t, y, s=8, alpha=0.5)
        ax.set(xlabel='true', ylabel='predicted', title=title)
        ax.grid(alpha=0.3)
    for ax in axes[len(titles) :]:
        ax.set_axis_off()
    figure.savefig(path, dpi=120)


def prepare(task, read, args, script, own_settings, device, ranks):
    """Read the data, and start or continue the run in its folder.

    Returns what all ranks need (settings, labels of the training part, seconds for the data), and
    the three parts of the data set.
    """
    files.check_folder(args.out, args.force, args.resume)
    start = time.perf_counter()
    description, rows = read('skip' if args.skip_missing else 'refuse')
    dataset, rows, kept, failures = data.load(
        description, rows, task, args.method, args.num_data, args.dense, not args.no_cache
    )
    if numpy.isnan(rows.labels[kept]).all():
        raise DataError('%s: no molecule has a label' % description)
    settings = {name: getattr(args, name) for name in (*SETTINGS, *own_settings)}
    settings.update(
        script=os.path.basename(script),
        n_molecules=len(dataset),
        digest=data.digest(rows),
        ranks=ranks.comm.size,
        **layout_of(args, dataset),
    )
    if args.data not in data.NAMED:
        settings['data'] = os.path.abspath(args.data)  # predictions may run in another folder
    indices = data.split(rows.smiles[kept], settings)
    if args.resume:
        files.continue_run(args.out, settings)
    else:
        files.start_run(args.out, settings, args.force)
    files.report_failures(failures, os.path.join(args.out, files.FAILED_FILE))
    data.report_duplicates(rows.take(kept))
    seconds = time.perf_counter() - start
    if args.updater == 'graph' and not ranks.are_several:
        dataset = on_device(dataset, device)
    parts = [dataset[part] for part in indices]
    train_labels = labels_of(parts[0])
    if task.kind == 'regression':
        for name, values in zip(task.names, train_labels.T):
            if values.min() == values.max():
                print('All training molecules have one value of %s: nothing to learn' % name)
    print('Split: %d training, %d validation, %d test' % tuple(map(len, parts)))
    if args.batchsize > len(parts[0]):
        print('Batches of all %d training molecules' % len(parts[0]))
    return (settings, train_labels, seconds), parts


def train(task, read, args, script, title, own_settings=(), report_every=1):
    """Train, test, and write models and results; return the exit status.

    `read` takes what to do about missing labels, and returns (description, rows). `own_settings`
    are further names of `args` that decide the model or the data, `report_every` epochs between
    validations.
    """
    ranks = Ranks(args.communicator)
    device = get_device(ranks.device(args.device))
    args.updater = updater_of(args, device)
    device.use()
    found, parts = None, (None, None, None)
    if ranks.is_first:
        found, parts = prepare(task, read, args, script, own_settings, device, ranks)
    settings, train_labels, data_seconds = ranks.share(found)
    test = parts[2]
    parts = [ranks.scatter(part) for part in parts[:2]]
    converter = converter_of(settings['layout'], settings['padded_to'])
    if args.updater == 'graph' and ranks.are_several:
        parts = [on_device(part, device) for part in parts]

    numpy.random.seed(args.seed)
    if device.xp is not numpy:
        device.xp.random.seed(args.seed)  # layers that learn their input size start on the device
    model = task.build(settings, args.dense, train_labels)
    model.to_device(device)
    if ranks.comm.rank:
        numpy.random.seed((args.seed + ranks.comm.rank) % 2**32)  # other orders, other dropout
    every = min(report_every, args.epoch)
    trainer = set_up_trainer(task, model, parts, args, converter, device, every, ranks)
    updater = trainer.updater
    if args.resume:
        resume(args.out, trainer, ranks)
        print('Resumed %s: epoch %d, step %d' % (args.out, updater.epoch, updater.iteration))
    timer = measure.StepTimer(trainer, device)
    gc.freeze()  # modules and molecules stay: searching them for garbage takes as long as an epoch
    start = time.perf_counter()
    try:
        if updater.epoch < args.epoch:
            with files.writing('into ' + args.out):
                trainer.run(show_loop_exception_msg=False)  # what it would show follows anyway
        else:
            print('The run has all of the %d epochs: nothing to train' % args.epoch)
    except KeyboardInterrupt:
        has_snapshot = os.path.exists(os.path.join(args.out, files.SNAPSHOT_FILE))
        way = (
            '--resume continues from the last snapshot' if has_snapshot else '--force starts again'
        )
        print('\nInterrupted. The same command with ' + way)
        return 130
    finally:
        gc.unfreeze()
    training_seconds = time.perf_counter() - start
    if not ranks.is_first:
        return 0

    log = trainer.get_extension('LogReport').log
    losses = [log[-1].get(key, 0) for key in task.log_keys if key.endswith('/loss')]
    if not numpy.isfinite(losses).all():
        raise DataError('the last losses are %s: there is no model to save' % losses)
    path = files.save_model(args.out, model)
    predictions = task.predict(model, test, converter, args.batchsize)
    # Before anything else allocates memory.
    memory = measure.peak_memory(device, updater)
    step = measure.milliseconds_a_step(timer.rounds)
    lines, metrics = task.report(labels_of(test), predictions, train_labels)
    print('\nTest molecules:')
    print('\n'.join([*lines, '', *measure.cost_report(step, memory)]))
    files.write_result(
        args.out,
        {
            'settings': settings,
            'dense': args.dense,
            'updater': args.updater,
            'epochs': updater.epoch,
            'steps': updater.iteration,
            'test': metrics,
            'milliseconds a step': step,
            'seconds': {'data': round(data_seconds, 3), 'training': round(training_seconds, 3)},
            'peak memory in bytes': memory,
            'conditions': measure.conditions(device),
        },
    )
    print('Model: %s; of the best validation: %s' % (path, files.BEST_FILE))
    path = os.path.join(args.out, files.PLOT_FILE)
    plot_learning_curve(log, path, title, task.panels())
    print('Learning curve: %s' % path)
    if task.kind == 'regression':
        path = os.path.join(args.out, files.FIT_FILE)
        plot_fit(path, labels_of(test), predictions, task.titles())
        print('Predicted against true: %s' % path)
    return 0


def resume(out, trainer, ranks):
    """Load the snapshot of the first rank, and those of the others that go with it."""
    path = os.path.join(out, files.SNAPSHOT_FILE)
    if ranks.is_first:
        files.load_npz(path, trainer)
    iteration = ranks.share(trainer.updater.iteration)
    if not ranks.is_first:
        files.load_npz(snapshot_of(path, iteration, ranks.comm.rank), trainer)


def main(run):
    """Call a script's function and exit with its status; errors of the user have no traceback."""
    try:
        sys.exit(run())
    except DataError as error:
        sys.exit('error: %s' % error)
    except MemoryError as error:
        sys.exit('error: not enough memory: %s' % error)
