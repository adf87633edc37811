"""Train a model on a data set and test it: the body of every train_*.py."""

import contextlib
import gc
import io
import math
import os
import signal
import sys
import time
import typing

import chainer
import numpy
from chainer import optimizers, serializers, training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.extensions.snapshot_writers import SimpleWriter, ThreadWriter
from chainer.training.triggers import EarlyStoppingTrigger
from chainer_bspmm.training import GraphUpdater
from common import data, folder
from common.arguments import use_device
from common.data import DataError
from common.ranks import ranks_of
from common.tasks import TINY, converter_of


NO_SETTINGS = ('out', 'force', 'resume', 'dense')  # 'layout' tells whether the run is dense


class RandomState(training.Extension):
    """Keep NumPy's random state in the snapshot: it decides the order of later epochs.

    On a CPU it also decides dropout. Random numbers of captured steps depend on the seed and the
    number of the step only; CuPy's own state (``--updater standard`` on a GPU) cannot be read.
    """

    def __call__(self, trainer):
        pass

    def serialize(self, serializer):
        kind, *state = numpy.random.get_state()
        names = 'keys', 'position', 'has_gauss', 'gauss'
        keys, position, has_gauss, gauss = map(serializer, names, state)
        numpy.random.set_state((kind, keys, int(position), int(has_gauss), float(gauss)))


def ends_with_best(log, key, sign):
    """Return whether the last entry has the best value; NaN counts as long as there is no number.

    `sign` is -1 if less is better.
    """
    # This is not a MinValueTrigger, because captured steps look at the model again after every step
    # at which a trigger other than an interval may be due.
    *before, last = [sign * entry[key] for entry in log]
    best = max((value for value in before if not math.isnan(value)), default=-math.inf)
    return last > best or best == -math.inf


def every(seconds):
    """Yield whether so many seconds have passed since the last True; the first item is True."""
    due = 0
    while True:
        now = time.perf_counter()
        yield now >= due
        if now >= due:
            due = now + seconds


class PlainText:
    """Write to stdout without the codes that erase a progress bar, for pipes and files."""

    def write(self, text):
        sys.stdout.write(text.replace('\033[J', ''))

    def flush(self):
        sys.stdout.flush()


class Patience(EarlyStoppingTrigger):
    """Chainer's trigger, with its state in snapshots, where Chainer leaves it out."""

    def serialize(self, serializer):
        with contextlib.suppress(KeyError):  # the run had no --patience
            self.best = serializer('best', self.best)
            self.count = serializer('count', self.count)


def keeping_two(kind: typing.Any):
    """Return a kind of Chainer's writers that keeps only the last two snapshots of its rank.

    Chainer's ``n_retains`` would remove a user's file whose name begins and ends like theirs.
    """

    class Writer(kind):
        def save(self, filename, outdir, *args, **options):
            super().save(filename, outdir, *args, **options)
            folder.remove_snapshots(outdir, filename, n_kept=2)

    return Writer


def progress():
    """Make an extension that prints the epoch now and then, where no progress bar can be drawn."""
    is_due = every(10)

    def show(trainer):
        if next(is_due):
            print('epoch %.2f' % trainer.updater.epoch_detail, flush=True)

    return training.make_extension(trigger=(10, 'iteration'))(show)


class StepTimer(training.Extension):
    """Timer of the steps of each epoch (`seconds`), without the extensions after an epoch.

    On a GPU a step returns before it is done, so the timer synchronises.
    """

    def __init__(self, trainer, device):
        self.seconds = []
        self._device = device
        # The first and the last extension after an epoch. Trainer sets an attribute `name` of both,
        # which a method would refuse; so the second one is a function.
        trainer.extend(self, 'timer', (1, 'epoch'), priority=1000)
        trainer.extend(
            lambda trainer: self.initialize(trainer), 'again', (1, 'epoch'), priority=-1000
        )

    def initialize(self, trainer):
        """Start an epoch."""
        self._start = self._now()

    def __call__(self, trainer):
        """End an epoch."""
        self.seconds.append(self._now() - self._start)

    def _now(self):
        if self._device.xp is not numpy:
            self._device.device.synchronize()
        return time.perf_counter()


def is_captured(args, device):
    """Return whether `--updater` asks for captured steps; refuse them if they are impossible."""
    is_possible = device.xp is not numpy and not args.dense
    if args.updater == 'graph' and not is_possible:
        raise DataError(
            '--updater graph: CUDA graphs need a GPU, as by --device 0, and no --dense; --device '
            'is %s' % args.device
        )
    return is_possible and args.updater != 'standard'


def layout_of(args, dataset):
    """Return {'layout', 'padded_to'} of a training; padded_to is a number or None, no word."""
    layout = 'dense' if args.dense else args.layout
    padded_to = args.padded_to
    if layout != 'folded' and padded_to not in (None, 'batch'):
        raise DataError('--padded-to: expected layout folded, got %s' % layout)
    if layout != 'folded' or padded_to == 'batch':
        padded_to = None
    elif padded_to in (None, 'largest'):
        padded_to = largest_of(dataset.molecules.full_sizes)
    elif n_larger := (dataset.molecules.full_sizes > padded_to).sum():
        print(
            '--padded-to %d: %d %s no phantom atoms, unlike the others'
            % (
                padded_to,
                n_larger,
                'molecule is larger and gets' if n_larger == 1 else 'molecules are larger and get',
            )
        )
    return {'layout': layout, 'padded_to': padded_to}


# A largest molecule that is so many times as large as all but one in a hundred is an exception. In
# Tox21 it is 2.1 times as large, and models learn more with the padding to it.
FAR_LARGER = 3


def largest_of(sizes):
    """Return the largest of the numbers of atoms; say so if nearly all molecules are far smaller.

    Then nearly all rows of the padding are phantom atoms, and a model may learn less.
    """
    largest = int(sizes.max())
    usual = int(numpy.percentile(sizes, 99, method='inverted_cdf'))
    if largest > FAR_LARGER * usual:
        print(
            'The largest molecule has %d atoms, and 99 %% of them at most %d: a model may learn '
            'better with --padded-to %d than with the padding to the largest'
            % (largest, usual, usual)
        )
    return largest


def prepare(source, task, args, n_ranks):
    """Read and split the data, and start or continue the run in its folder.

    Returns its settings, [training, validation and test part of the data set, without labels] and a
    list of their labels, float64.
    """
    folder.check(args.out, args.force, args.resume, args.data)
    missing = 'skip' if args.skip_missing else 'refuse'
    description, rows = source.read(args.data, vars(args), missing=missing)
    dataset, rows = data.load(description, rows, task, args.method, args.num_data, args.dense)
    used = rows.used
    if not len(dataset):
        raise DataError(
            '%s: none of the %d molecule(s) in the column %r can be used, the first: %s: %.60r: %s'
            % (
                description,
                len(rows.smiles),
                rows.smiles.name,
                rows.smiles.index[0],
                rows.smiles.iloc[0],
                rows.reason.iloc[0],
            )
        )
    if used.labels.isna().all(axis=None):
        raise DataError('%s: no molecule has a label' % description)
    settings = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    settings.update(
        script=os.path.basename(source.__file__),
        digest=data.digest(rows),
        n_molecules=len(dataset),
        ranks=n_ranks,
        **layout_of(args, dataset),
    )
    if description == args.data and os.path.isfile(args.data):
        settings['data'] = os.path.abspath(args.data)  # --resume may be called in another folder
    parts = data.split(used.smiles, settings)
    if args.resume:
        before = folder.load_settings(args.out, source.__file__)
        folder.refuse_changes(args.out, before, settings)
    else:
        folder.start_run(args.out, settings, args.force)
    data.report_failures(rows, os.path.join(args.out, folder.FAILED_FILE))
    data.report_duplicates(used)
    print('Split: %d training, %d validation, %d test' % tuple(map(len, parts)))
    known, _, test = (used.take(part) for part in parts)
    for name, deviation in known.labels.std(ddof=0).items():
        if numpy.isnan(deviation):
            print('No training molecule has a label of %s: its predictions mean nothing' % name)
        elif deviation < TINY:
            print('All training molecules have one value of %s: nothing to learn' % name)
    data.write_table(os.path.join(args.out, folder.TEST_FILE), test.table)
    data.write_table(os.path.join(args.out, folder.KNOWN_FILE), known.canonical.to_frame())
    labels = [used.labels.to_numpy()[part] for part in parts]
    return settings, [dataset[part] for part in parts], labels


@data.writing('into the folder of --out')
def train(source, args, title):
    """Train, test, and write models and results; return the exit status.

    `source` is the calling script as a module: `task_of(settings)` makes the task, `read(data,
    settings, **options)` returns (description, rows).
    """
    ranks = ranks_of(args.communicator)
    device = use_device(ranks.device(args.device))
    task = source.task_of(vars(args))
    is_cpu = device.xp is numpy
    captured = is_captured(args, device)

    # The first rank reads and splits the data.
    start = time.perf_counter()
    settings = labels = None
    parts = None, None, None  # training, validation, test
    if ranks.is_first:
        settings, parts, labels = prepare(source, task, args, ranks.size)
    settings, labels = ranks.share((settings, labels))
    data_seconds = time.perf_counter() - start

    # The model.
    numpy.random.seed(args.seed)
    if not is_cpu:
        device.xp.random.seed(args.seed)  # layers without an input size draw weights on the device
    model = task.build(settings, args.dense, labels[0])
    model.to_device(device)
    if not ranks.is_first:
        numpy.random.seed((args.seed + ranks.rank) % 2**32)  # other orders, other dropout
    optimizer = ranks.optimizer(optimizers.Adam(args.learning_rate))
    optimizer.setup(model)

    # The trainer.
    train_part, validation_part = [
        ranks.scatter(data.labelled(part, task.labels(known, model)) if ranks.is_first else None)
        for part, known in zip(parts[:2], labels)
    ]
    converter = converter_of(settings['layout'], settings['padded_to'])
    options = {'device': device, 'converter': converter}
    # Without captured steps evaluators stay Chainer's, too.
    vars(chainer.global_config)['bspmm_capture'] = captured
    iterator = ranks.iterator(train_part, args.batchsize)
    if captured:
        updater = GraphUpdater(iterator, optimizer, seed=args.seed + ranks.rank, **options)
    else:
        updater = training.StandardUpdater(iterator, optimizer, **options)
    best, sign = task.best
    end = args.epoch, 'epoch'
    if args.patience:
        mode = 'max' if sign > 0 else 'min'
        end = Patience(monitor=best, patience=args.patience, mode=mode, max_trigger=end)
    trainer = training.Trainer(updater, end, out=args.out)
    iterator = SerialIterator(validation_part, args.batchsize, repeat=False, shuffle=False)
    evaluator = ranks.evaluator(task.evaluator(iterator, model, **options))
    trainer.extend(evaluator, name='validation')
    # Arrays of a GPU are copied, so a thread can write them to a file while training continues; on
    # a CPU training would change them meanwhile. Compression would take longer than an epoch.
    writer = SimpleWriter if is_cpu or ranks.are_several else ThreadWriter
    if ranks.is_first:
        # mpirun gives the first rank a terminal, whatever its own output is.
        is_terminal = sys.stdout.isatty() and not ranks.are_several
        log = extensions.LogReport()
        trainer.extend(log)
        columns = ['epoch', *task.log_keys, 'elapsed_time']
        report = extensions.PrintReport(columns, out=sys.stdout if is_terminal else PlainText())
        trainer.extend(report, trigger=(1, 'epoch'))
        trainer.extend(extensions.ProgressBar() if is_terminal else progress(), 'progress')
        best_model = extensions.snapshot_object(
            model,
            folder.BEST_FILE,
            writer=writer(compression=False),
            condition=lambda: ends_with_best(log.log, best, sign),
        )
        trainer.extend(best_model, 'best_model', priority=-90)  # before the snapshot
    trainer.extend(RandomState(), 'random_state', (1, 'epoch'))
    is_due = every(1)  # on a GPU an epoch may take less than a second
    # Each rank keeps two: once a rank writes its next snapshot, all have written the one before.
    snapshot = extensions.snapshot(
        filename=folder.SNAPSHOT_FILE % ('{.updater.iteration}', ranks.rank),
        writer=keeping_two(writer)(compression=False),
        condition=lambda: ranks.share(next(is_due) or updater.epoch >= args.epoch),
    )
    trainer.extend(snapshot)
    if args.resume:
        folder.load_snapshot(args.out, trainer, ranks)
        if args.epoch < updater.epoch:
            raise DataError(
                '--epoch %d: the run in %s has %d epochs already; expected at least as many'
                % (args.epoch, args.out, updater.epoch)
            )
        if ranks.is_first:
            folder.write_json(os.path.join(args.out, folder.SETTINGS_FILE), settings)
        # The snapshot was taken before the trigger of --patience saw the results of this epoch.
        trainer.observation = ranks.share(log.log[-1] if ranks.is_first else None)
        print('Resumed %s: epoch %d, step %d' % (args.out, updater.epoch, updater.iteration))
    timer = StepTimer(trainer, device)

    # Training.
    gc.freeze()  # modules and molecules stay: searching them for garbage takes as long as an epoch
    start = time.perf_counter()
    try:
        if updater.epoch < args.epoch:
            trainer.run(show_loop_exception_msg=False)  # the error is printed anyway
        else:
            print('The run has completed all %d epochs: nothing to train' % args.epoch)
    except KeyboardInterrupt:
        way = 'The same command with --force starts again'
        if folder.steps(args.out, 0):
            way = '--resume --out %s continues from the last snapshot' % args.out
        print('\nInterrupted. ' + way)
        return 130
    finally:
        gc.unfreeze()
    training_seconds = time.perf_counter() - start
    if not ranks.is_first:
        return 0
    if updater.epoch < args.epoch:
        print('Stopped: %d epochs without a better validation result' % args.patience)

    # The model, its test, and the pictures.
    losses = [log.log[-1].get(key, 0) for key in task.log_keys if key.endswith('/loss')]
    if not numpy.isfinite(losses).all():
        raise DataError('the last losses are %s: there is no model to save' % losses)
    with data.replacing(os.path.join(args.out, folder.MODEL_FILE)) as new:
        serializers.save_npz(new, model)
    predictions = task.predict(model, parts[2], converter, args.batchsize)
    step = None
    if len(timer.seconds) > 1:  # the first epoch compiles and allocates
        n_steps = updater.iteration / updater.epoch
        median = 1e3 * numpy.median(timer.seconds[1:]) / n_steps
        step = {'median': round(float(median), 3), 'epochs': len(timer.seconds) - 1}
    lines, metrics = task.report(labels[2], predictions, labels[0])
    result = {
        'settings': settings,
        'dense': args.dense,
        'updater': 'graph' if captured else 'standard',
        'epochs': updater.epoch,
        'steps': updater.iteration,
        'test': metrics,
        'milliseconds a step': step,
        'seconds': {'data': round(data_seconds, 3), 'training': round(training_seconds, 3)},
    }
    folder.write_json(os.path.join(args.out, 'result.json'), result)
    print('\n'.join(['', 'Test molecules:', *lines, '']))
    if step is not None:
        print(
            'Time a step: %.2f ms, median of %d epochs (converter, forward, backward, update)'
            % (step['median'], step['epochs'])
        )
    from common import pictures  # here: Matplotlib takes a second, and the model is saved

    pictures.learning_curve(args.out, log.log, title, task.panels())
    if task.kind == 'regression':
        pictures.fit(args.out, labels[2], predictions, task.titles())
    print('Model, results and pictures: %s' % args.out)
    return 0


def end_output():
    """Flush stdout, or discard what it cannot take: Python's flush on exit must not fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number, frame):
    """Raise KeyboardInterrupt; a half-written archive must not complain when it is freed."""
    sys.unraisablehook = _tell_only_of_interrupts
    signal.default_int_handler(number, frame)


def _tell_only_of_interrupts(error):
    if issubclass(error.exc_type, KeyboardInterrupt):  # it has interrupted a destructor alone
        sys.__unraisablehook__(error)


def main(run):
    """Call a script's function and exit with its status; print users' errors without traceback."""
    try:
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, _interrupt)  # instead of common's
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Messages show cells, which may have characters that a terminal lacks.
            sys.stdout.reconfigure(errors='backslashreplace')
        status = run()
        with data.writing('standard output'):
            sys.stdout.flush()
        sys.exit(status)
    except DataError as error:
        sys.exit('error: %s' % error)
    except MemoryError as error:
        sys.exit('error: not enough memory: %s' % error)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout has ended, such as `head`
        sys.exit(1)
    finally:
        end_output()
