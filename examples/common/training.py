"""Train a model on a data set and test it: what every train_*.py does with its data."""

import gc
import math
import os
import sys
import time

import chainer
import numpy
from chainer import optimizers, serializers, training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.extensions.snapshot_writers import SimpleWriter, ThreadWriter
from chainer_bspmm.training import GraphUpdater
from common import data, files, measure
from common.arguments import use_device
from common.data import DataError
from common.ranks import ranks_of
from common.tasks import converter_of, labels_of

# All other options decide the model or the data: a resumed run must have the same.
MAY_CHANGE = 'out', 'force', 'resume', 'epoch', 'device', 'updater', 'communicator', 'dense'


class RandomState(training.Extension):
    """Keep NumPy's random state in the snapshot: it decides the order of later epochs.

    On a CPU it also decides dropout. Captured steps draw by the seed and their number; CuPy's own
    state (``--updater standard`` on a GPU) cannot be read.
    """

    name = 'random_state'
    trigger = (1, 'epoch')

    def __call__(self, trainer):
        pass

    def serialize(self, serializer):
        kind, *state = numpy.random.get_state()
        names = 'keys', 'position', 'has_gauss', 'gauss'
        keys, position, has_gauss, gauss = map(serializer, names, state)
        numpy.random.set_state((kind, keys, int(position), int(has_gauss), float(gauss)))


def ends_with_best(log, key, sign):
    """Return whether the last entry has the best value, even NaN, until there is a number.

    `sign` is -1 where less is better.
    """
    # Not a MinValueTrigger: captured steps take another look at the model after every step where a
    # trigger may be due that is no interval.
    *before, last = [sign * entry[key] for entry in log]
    best = max((value for value in before if not math.isnan(value)), default=-math.inf)
    return last > best or best == -math.inf


class NotTwiceASecond:
    """Tell whether to take a snapshot: on a GPU an epoch may take less. One after the last, too."""

    def __init__(self, updater, epochs, ranks):
        self._updater, self._epochs, self._ranks = updater, epochs, ranks
        self._next = 0  # seconds

    def __call__(self):
        now = time.perf_counter()
        is_due = self._ranks.share(now >= self._next or self._updater.epoch >= self._epochs)
        self._next = now + 1 if is_due else self._next
        return is_due


class PlainText:
    """Write to stdout without the codes that erase a progress bar, for pipes and files."""

    def write(self, text):
        sys.stdout.write(text.replace('\033[J', ''))

    def flush(self):
        sys.stdout.flush()


def is_captured(args, device):
    """Return whether `--updater` asks for captured steps, or refuse them."""
    is_possible = device.xp is not numpy and not args.dense
    if args.updater == 'graph' and not is_possible:
        raise DataError(
            '--updater graph: CUDA graphs need a GPU, as by --device 0, and no --dense; --device '
            'is %s' % args.device
        )
    return is_possible and args.updater != 'standard'


def layout_of(args, dataset):
    """Return {'layout', 'padded_to'} of a training, with numbers for words."""
    layout = 'dense' if args.dense else args.layout
    padded_to = args.padded_to
    if layout != 'folded' and padded_to not in (None, 'batch'):
        raise DataError('--padded-to: expected layout folded, got %s' % layout)
    if layout != 'folded' or padded_to == 'batch':
        padded_to = None
    elif padded_to in (None, 'largest'):
        padded_to = int(dataset.molecules.full_sizes.max())
    return {'layout': layout, 'padded_to': padded_to}


def prepare(source, task, args, n_ranks):
    """Read the data, and start or continue the run in its folder.

    Returns its settings, and the training, validation and test part of the data set.
    """
    files.check_folder(args.out, args.force, args.resume)
    missing = 'skip' if args.skip_missing else 'refuse'
    description, rows = source.read(args.data, vars(args), missing=missing)
    dataset, rows = data.load(description, rows, task, args.method, args.num_data, args.dense)
    used = rows.take(rows.reason == '')
    if numpy.isnan(used.labels).all():
        raise DataError('%s: no molecule has a label' % description)
    settings = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    settings.update(
        script=files.script_of(source),
        digest=data.digest(rows),
        n_molecules=len(dataset),
        ranks=n_ranks,
        **layout_of(args, dataset),
    )
    if description == args.data:  # a file: predictions may run in another folder, or it may move
        settings['data'] = os.path.abspath(args.data)
        settings['data from here'] = os.path.relpath(args.data, args.out)
    parts = [dataset[part] for part in data.split(used.smiles, settings)]
    if args.resume:
        files.continue_run(args.out, settings)
    else:
        files.start_run(args.out, settings, args.force)
    files.report_failures(rows, os.path.join(args.out, files.FAILED_FILE))
    data.report_duplicates(used)
    print('Split: %d training, %d validation, %d test' % tuple(map(len, parts)))
    if args.batchsize > len(parts[0]):
        print('Batches of all %d training molecules' % len(parts[0]))
    return settings, parts


@files.writing('into the folder of --out')
def train(source, args, title, report_every=1):
    """Train, test, and write models and results; return the exit status.

    `source` is the calling script as a module: `task_of(settings)` makes the task, `read(data,
    settings, **options)` returns (description, rows). A validation follows `report_every` epochs.
    """
    ranks = ranks_of(args.communicator)
    device = use_device(ranks.device(args.device))
    task = source.task_of(vars(args))
    is_cpu = device.xp is numpy
    captured = is_captured(args, device)

    # The data: the first rank reads and splits them.
    start = time.perf_counter()
    settings = train_labels = None
    parts = None, None, None  # training, validation, test
    if ranks.is_first:
        settings, parts = prepare(source, task, args, ranks.size)
        train_labels = labels_of(parts[0])
        for name, values in zip(task.names, train_labels.T):
            if task.kind == 'regression' and values.min() == values.max():
                print('All training molecules have one value of %s: nothing to learn' % name)
    settings, train_labels = ranks.share((settings, train_labels))
    train_part, validation_part = (ranks.scatter(part) for part in parts[:2])
    data_seconds = time.perf_counter() - start

    # The model.
    numpy.random.seed(args.seed)
    if not is_cpu:
        device.xp.random.seed(args.seed)  # layers that learn their input size start on the device
    model = task.build(settings, args.dense, train_labels)
    model.to_device(device)
    if not ranks.is_first:
        numpy.random.seed((args.seed + ranks.rank) % 2**32)  # other orders, other dropout
    optimizer = ranks.optimizer(optimizers.Adam())
    optimizer.setup(model)

    # The trainer.
    converter = converter_of(settings['layout'], settings['padded_to'])
    options = {'device': device, 'converter': converter}
    # Without captured steps evaluators stay Chainer's, too.
    vars(chainer.global_config)['bspmm_capture'] = captured
    iterator = ranks.iterator(train_part, args.batchsize)
    if captured:
        updater = GraphUpdater(iterator, optimizer, seed=args.seed + ranks.rank, **options)
    else:
        updater = training.StandardUpdater(iterator, optimizer, **options)
    trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)
    trigger = (min(report_every, args.epoch), 'epoch')
    iterator = SerialIterator(validation_part, args.batchsize, repeat=False, shuffle=False)
    evaluator = ranks.evaluator(task.evaluator(iterator, model, **options))
    trainer.extend(evaluator, name='validation', trigger=trigger)
    # What was on a GPU was copied and can be written while training continues; a CPU goes on
    # writing to its own. Compression would take longer than an epoch.
    writer = SimpleWriter if is_cpu or ranks.are_several else ThreadWriter
    if ranks.is_first:
        # mpirun gives the first rank a terminal, whatever its own output is.
        is_terminal = sys.stdout.isatty() and not ranks.are_several
        log = extensions.LogReport(trigger=trigger)
        trainer.extend(log)
        columns = ['epoch', *task.log_keys, 'elapsed_time']
        out = sys.stdout if is_terminal else PlainText()
        trainer.extend(extensions.PrintReport(columns, out=out), trigger=trigger)
        if is_terminal:
            trainer.extend(extensions.ProgressBar())
        best_model = extensions.snapshot_object(
            model,
            files.BEST_FILE,
            writer=writer(compression=False),
            condition=lambda: ends_with_best(log.log, *task.best),
        )
        trainer.extend(best_model, 'best_model', trigger, priority=-90)  # before the snapshot
    trainer.extend(RandomState())
    # Two of each rank: when one writes its next, all have written the one before.
    snapshot = extensions.snapshot(
        filename=files.SNAPSHOT_FILE % ('{.updater.iteration}', ranks.rank),
        writer=writer(compression=False),
        condition=NotTwiceASecond(updater, args.epoch, ranks),
        n_retains=2,
    )
    trainer.extend(snapshot)
    if args.resume:
        files.resume(args.out, trainer, ranks)
        print('Resumed %s: epoch %d, step %d' % (args.out, updater.epoch, updater.iteration))
    timer = measure.StepTimer(trainer, device)

    # Training.
    gc.freeze()  # modules and molecules stay: searching them for garbage takes as long as an epoch
    start = time.perf_counter()
    try:
        if updater.epoch < args.epoch:
            trainer.run(show_loop_exception_msg=False)  # what it would show follows anyway
        else:
            print('The run has all of the %d epochs: nothing to train' % args.epoch)
    except KeyboardInterrupt:
        has_snapshot = files.steps(args.out, 0)
        way = 'resume continues from the last snapshot' if has_snapshot else 'force starts again'
        print('\nInterrupted. The same command with --' + way)
        return 130
    finally:
        gc.unfreeze()
    training_seconds = time.perf_counter() - start
    if not ranks.is_first:
        return 0

    # The model, its test, and the pictures.
    losses = [log.log[-1].get(key, 0) for key in task.log_keys if key.endswith('/loss')]
    if not numpy.isfinite(losses).all():
        raise DataError('the last losses are %s: there is no model to save' % losses)
    path = os.path.join(args.out, files.MODEL_FILE)
    serializers.save_npz(path, model)
    test_labels = labels_of(parts[2])
    predictions = task.predict(model, parts[2], converter, args.batchsize)
    memory = measure.peak_memory(device, updater)  # before anything else allocates some
    step = measure.milliseconds_a_step(timer.rounds)
    lines, metrics = task.report(test_labels, predictions, train_labels)
    print('\n'.join(['', 'Test molecules:', *lines, '']))
    if step is not None:
        text = 'Time a step: %.2f ms, median of %d (batch, converter, forward, backward, update)'
        print(text % (step['median'], step['steps']))
    sizes = ['%s %.0f MB' % (name, size / 1e6) for name, size in memory.items()]
    print('Peak memory: ' + ', '.join(sizes))
    result = {
        'settings': settings,
        'dense': args.dense,
        'updater': 'graph' if captured else 'standard',
        'epochs': updater.epoch,
        'steps': updater.iteration,
        'test': metrics,
        'milliseconds a step': step,
        'seconds': {'data': round(data_seconds, 3), 'training': round(training_seconds, 3)},
        'peak memory in bytes': memory,
        'conditions': measure.conditions(device),
    }
    files.write_result(args.out, result)
    print('Model: %s; of the best validation: %s' % (path, files.BEST_FILE))
    from common import pictures  # here: Matplotlib takes a second, and the model is saved

    path = os.path.join(args.out, 'learning_curve.png')
    pictures.learning_curve(log.log, path, title, task.panels())
    print('Learning curve: %s' % path)
    if task.kind == 'regression':
        path = os.path.join(args.out, 'fit.png')
        pictures.fit(path, test_labels, predictions, task.titles())
        print('Predicted against true: %s' % path)
    return 0


def main(run):
    """Call a script's function and exit with its status; errors of the user have no traceback."""
    try:
        sys.exit(run())
    except DataError as error:
        sys.exit('error: %s' % error)
    except MemoryError as error:
        sys.exit('error: not enough memory: %s' % error)
    except KeyboardInterrupt:
        sys.exit('interrupted')
