"""How long does a user wait for a trained model: from the start of a command to the file?

It runs ``examples/qm9/train_qm9.py`` and ``examples/tox21/train_tox21.py`` with upstream's dense
model, with ours, and with ours captured. Each run is a new process, with empty caches or with the
caches of a run before::

    python -m benchmarks.bench_command --qm9 qm9.csv.gz --tox21 tox21.csv.gz --gpus 4

writes ``benchmarks/results/<gpu>/command.json``; ``examples/qm9/make_sample.py --all qm9.csv.gz``
makes QM9's file. Each method on a data set has a separate GPU and share of the processors, where
its contenders run one after the other. The file is written after every run. The same command, given
again, adds the missing runs, and names the contenders that are complete.
"""

import collections
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import gpus, harness
from benchmarks.training import example_runs

METHODS = ('rsgcn', 'relgcn')
EPOCHS = 20
UPSTREAM, EAGER, CAPTURED = 'upstream dense', 'ours eager', 'ours captured'
PADDED = ['--padded-to', 'batch']  # upstream pads to the largest molecule of a batch, too
OPTIONS = {
    UPSTREAM: ['--dense'],
    EAGER: ['--updater', 'standard', *PADDED],
    CAPTURED: ['--updater', 'graph', *PADDED],
}
COLD, WARM = 'cold', 'warm'
# options: options of the script; contenders: names of the contenders to run.
Task = collections.namedtuple('Task', 'data file method options contenders')

MOST_SECONDS, OVER_UPSTREAM = 12, 15  # bars of captured runs with warm caches
OVER_STEPS = 1.3  # bar of the time of an epoch, over the time of its steps


def environment(caches, shared):
    """Return environment variables for caches in a folder; other packages' caches are shared."""
    return {
        'CUPY_CACHE_DIR': str(caches / 'cupy'),
        'XDG_CACHE_HOME': str(caches / 'xdg'),
        'MPLCONFIGDIR': str(shared),
        'PYTHONPATH': example_runs.environment()['PYTHONPATH'],
    }


def command(task, name, epochs, out):
    """Return the words of a task's command; `name`: a key of `OPTIONS`."""
    script = harness.ROOT / 'examples' / task.data / ('train_%s.py' % task.data)
    words = [sys.executable, script, '--data', task.file, '--method', task.method]
    words += ['--epoch', epochs, '--out', out, *example_runs.OPTIONS]
    words += [*example_runs.OWN_OPTIONS[task.data], *task.options, *OPTIONS[name]]
    return [str(word) for word in words]


def run(task, name, epochs, place, variables, timeout=None):
    """Run a command; return its cost.

    'model' is the time in seconds from the start of the process to the saved model, 'exit' to the
    end of the process, with test and pictures. 'phases' are the script's own times. 'epochs' are
    the seconds from the start of the training to the end of each epoch. If a command fails, the
    RuntimeError ends with its output. subprocess.TimeoutExpired: it takes longer than `timeout`
    seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / 'out'
        printed = pathlib.Path(folder) / 'printed'
        with open(printed, 'w') as file:
            start = time.time()
            words = command(task, name, epochs, out)
            status = place.run(words, variables, stdout=file, stderr=file, timeout=timeout)
            end = time.time()
        if status:
            raise RuntimeError('exit status %s: %s' % (status, printed.read_text()[-400:].strip()))
        result = json.loads((out / 'result.json').read_text())
        log = json.loads((out / 'log').read_text())
        return {
            'model': round((out / 'model.npz').stat().st_mtime - start, 2),
            'exit': round(end - start, 2),
            'phases': result['seconds'],
            'milliseconds a step': result['milliseconds a step'],
            'steps': result['steps'],
            'epochs': [round(entry['elapsed_time'], 4) for entry in log],
            'test': result['test'],
        }


def extrapolated(found, epochs):
    """Return the seconds to the model for more epochs than were run.

    A missing epoch takes the mean time of the epochs that were run, without the first, which
    includes compilation.
    """
    ends = found['epochs']
    missing = epochs - len(ends)
    if not missing:
        return found['model']
    return round(found['model'] + missing * (ends[-1] - ends[0]) / (len(ends) - 1), 2)


def compare(args, deadline, keep, task, place):
    """Run the contenders of a task, until time.perf_counter() is `deadline`.

    After each run ``keep(task, name, found)`` is called with the contender's results so far.
    Returns name -> reason why some of its runs are missing.
    """
    not_run = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        # A first run brings Python's files into memory, and makes Matplotlib's list of fonts.
        short = task._replace(options=[*task.options, '--num-data', 200])
        try:
            run(short, EAGER, 1, place, environment(folder / 'first', folder / 'shared'))
        except RuntimeError as error:
            return {'all': str(error)}
        # Captured runs, which are measured for their own sake, come first.
        for name in sorted(task.contenders, key=lambda name: name != CAPTURED):
            costs = {}
            for kind in runs_of(args, name):
                # A warm run has the caches of the last cold run.
                cache = '%s %d' % (name, min(len(costs.get(COLD, [])), args.cold - 1))
                try:
                    cost = run(
                        task,
                        name,
                        EPOCHS if args.few is None or name == CAPTURED else args.few,
                        place,
                        environment(folder / cache, folder / 'shared'),
                        max(deadline - time.perf_counter(), 0),
                    )
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    # A timeout's own message is not stored, because it has the machine's folders.
                    is_late = isinstance(error, subprocess.TimeoutExpired)
                    why = '%s: %s' % (type(error).__name__, str(error)[-500:])
                    not_run[name] = 'the time of all runs was up' if is_late else why
                    print(task.data, task.method, name, not_run[name], flush=True)
                    break
                cost['seconds'] = extrapolated(cost, EPOCHS)
                costs.setdefault(kind, []).append(cost)
                keep(task, name, {kind: summary(of) for kind, of in costs.items()})
                line = '%s %s, %s, %s: %.1f s'
                print(line % (task.data, task.method, name, kind, cost['seconds']), flush=True)
    return not_run


def runs_of(args, name):
    """Return the kind of caches, `COLD` or `WARM`, for each run of a contender."""
    n_warm = args.warm if name == CAPTURED else min(args.warm, args.others)
    return [COLD] * args.cold + [WARM] * n_warm


def missing(args, of):
    """Return the contenders that lack runs of this commit."""
    return [
        name
        for name in args.contenders
        if 'commit' in of.get(name, {})
        or sum(len(kind['runs']) for kind in of.get(name, {}).values()) < len(runs_of(args, name))
    ]


def summary(costs):
    """Return a dict of the median of the seconds, and all runs."""
    return {
        'seconds': statistics.median(cost['seconds'] for cost in costs),
        'is_extrapolated': any(len(cost['epochs']) < EPOCHS for cost in costs),
        'runs': costs,
    }


def complete(result, earlier):
    """Copy contenders that were not run from an earlier result, together with its commit.

    Upstream's runs take most of the time, and do not change with this package. Captured runs are
    never copied, because they are the ones to be measured.
    """
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            found = earlier['data'].get(data, {'methods': {}})['methods'].get(method, {})
            for name in (UPSTREAM, EAGER):
                if name in found and name not in of:
                    of[name] = {'commit': earlier['conditions']['commit'], **found[name]}


def over_steps(costs):
    """Return the time of an epoch over the time of its steps, the median of runs; None if unknown.

    The time of an epoch is the mean over all epochs but the first, which includes compilation. Each
    step counts with the time of the median step, as the script measured it; that leaves out the
    work at the end of an epoch.
    """
    found = []
    for cost in costs:
        ends, step = cost['epochs'], cost['milliseconds a step']
        if len(ends) < 2 or step is None or 'steps' not in cost:
            return None
        an_epoch = (ends[-1] - ends[0]) / (len(ends) - 1)
        found.append(an_epoch / (cost['steps'] / len(ends) * step['median'] / 1e3))
    return statistics.median(found)


def bars(data):
    """Return {bar: {'value', 'met'}} for captured runs with warm caches."""
    found = {}
    for name, of_data in data.items():
        for method, of in of_data['methods'].items():
            seconds = {
                contender: kinds[WARM]['seconds']
                for contender, kinds in of.items()
                if WARM in kinds
            }
            if CAPTURED not in seconds:
                continue
            title = '%s %s: ' % (name, method)
            is_met = seconds[CAPTURED] <= MOST_SECONDS
            found[title + 'at most %d s' % MOST_SECONDS] = harness.bar(seconds[CAPTURED], is_met)
            times = over_steps(of[CAPTURED][WARM]['runs'])
            if times is not None:
                which = title + 'an epoch at most %s times its steps' % OVER_STEPS
                found[which] = harness.bar(times, times <= OVER_STEPS)
            if UPSTREAM in seconds:
                times = seconds[UPSTREAM] / seconds[CAPTURED]
                which = title + 'at least %dx faster than upstream' % OVER_UPSTREAM
                found[which] = harness.bar(times, times >= OVER_UPSTREAM, 1)
    return found


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--qm9', help='all of QM9, by examples/qm9/make_sample.py --all, or sample')
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz")
    parser.add_argument('--methods', nargs='+', default=METHODS)
    parser.add_argument('--contenders', nargs='+', default=list(OPTIONS), choices=OPTIONS)
    parser.add_argument(
        '--gpus', type=int, default=1, help='number of GPUs; 0: the CPU, which captures nothing'
    )
    parser.add_argument(
        '--earlier',
        nargs='+',
        default=[],
        type=pathlib.Path,
        help='results from which contenders are copied that are not run',
    )
    parser.add_argument('--cold', type=int, default=1, help='runs with empty caches, at least 1')
    parser.add_argument('--warm', type=int, default=3, help='runs with the caches of a cold run')
    parser.add_argument(
        '--others', type=int, default=1, help='warm runs of contenders that are not captured'
    )
    parser.add_argument(
        '--few',
        type=int,
        help='epochs of contenders that are not captured, at least 2; the rest is extrapolated',
    )
    parser.add_argument('--time', type=float, default=420, help='seconds of all runs, at most')
    parser.add_argument('--num-data', type=int, default=-1, help='molecules of each data set')
    args = parser.parse_args(argv)
    files = {data: getattr(args, data) for data in ('qm9', 'tox21') if getattr(args, data)}
    if not files or args.cold < 1 or (args.few is not None and not 2 <= args.few <= EPOCHS):
        parser.error('expected --qm9 or --tox21, --cold of at least 1, --few from 2 to %d' % EPOCHS)
    options = ['--num-data', args.num_data]
    if args.gpus:
        options += ['--device', 0]
    else:
        args.contenders = [name for name in args.contenders if name != CAPTURED]
    device = harness.device_of('0' if args.gpus else '-1')
    head = {
        'question': 'seconds from the start of a command to the saved model, %d epochs' % EPOCHS,
        'method': 'Medians of runs; each run is a new process. Options: %s. cold: the folders for '
        'kernels (CUPY_CACHE_DIR) and data sets (XDG_CACHE_HOME) are empty; warm: a run before has '
        'filled them. The files of Python packages are in memory in both cases. On several GPUs, '
        'all runs of a method on a data set take place one after the other on the same GPU, with '
        'the processors that belong to it. is_extrapolated: fewer epochs were run, and the missing '
        'ones are taken to last as long as the later ones of these'
        % ' '.join(example_runs.OPTIONS),
        'conditions': {
            **harness.conditions(args.commit, device),
            'n_gpus': args.gpus,
            'cpus of each': len(gpus.places(args.gpus)[0].cpus),
        },
        'options': {
            'few': args.few,
            'num-data': args.num_data,
            'qm9': 'sample' if args.qm9 == 'sample' else 'all',
        },
    }
    result = harness.resumed('command', head, args.out)
    tasks = []
    lock = threading.Lock()
    for data, path in files.items():
        path = path if path == 'sample' else os.path.abspath(path)
        of_data = result.setdefault('data', {}).setdefault(data, {'methods': {}, 'not_run': {}})
        for method in args.methods:
            of_data['not_run'][method] = {}
            names = missing(args, of_data['methods'].setdefault(method, {}))
            done = [name for name in args.contenders if name not in names]
            print('%s %s, there are: %s' % (data, method, ', '.join(done) or 'none'), flush=True)
            if names:
                tasks.append(Task(data, path, method, options, names))

    def keep(task, name, found):
        with lock:
            result['data'][task.data]['methods'][task.method][name] = found
            result['bars'] = bars(result['data'])
            harness.save('command', result, args.out)

    deadline = time.perf_counter() + args.time
    found = gpus.spread(tasks, args.gpus, functools.partial(compare, args, deadline, keep))
    for task, not_run in zip(tasks, found):
        result['data'][task.data]['not_run'][task.method] = not_run
    for path in args.earlier:
        complete(result, json.loads(path.read_text()))
    result['bars'] = bars(result['data'])
    harness.print_bars(result['bars'])
    print('wrote', harness.save('command', result, args.out))


if __name__ == '__main__':
    main()
