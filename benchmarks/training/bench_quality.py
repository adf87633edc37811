"""Do the sparse models learn as well as upstream's dense ones, and in which layout?

It runs the examples' own scripts to the end, with several seeds, and stores the metric of the test
part: the mean ROC-AUC of Tox21's assays, or the mean absolute error of a target of QM9. A seed
decides on the split, the initial parameters and the order of the batches for all arms. On a GPU::

    python -m benchmarks.training.bench_quality --tox21 tox21.csv.gz --devices 0 --processes 12

writes ``benchmarks/results/<gpu or cpu>/quality.json`` after every run. ``--merge FILE`` copies
runs from an earlier commit's file that are not repeated.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import statistics
import threading
import time

from benchmarks import harness
from benchmarks.training import example_runs

# A data set: script, its options, epochs, name of the metric, seeds, methods (None: all).
DataSet = collections.namedtuple('DataSet', 'script options epochs metric seeds methods')

METHODS = ('rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp', 'relgat', 'gnnfilm')
SEEDS = (0, 1, 2)
DATA = {
    'tox21': DataSet('tox21', [], 20, 'mean ROC-AUC', SEEDS, METHODS),
    'qm9 alpha': DataSet('qm9', ['--label', 'alpha'], 60, 'MAE', SEEDS, METHODS),
    'qm9 gap': DataSet('qm9', ['--label', 'gap'], 60, 'MAE', SEEDS, METHODS),
    # It has as many steps as 100 epochs of the sample.
    'all qm9 alpha': DataSet('qm9', ['--label', 'alpha'], 3, 'MAE', SEEDS[:1], ('relgcn', 'ggnn')),
}
ARMS = {
    'dense': ['--dense'],
    'folded': ['--layout', 'folded', '--padded-to', 'batch'],
    'folded to the largest': ['--layout', 'folded', '--padded-to', 'largest'],
    'packed': ['--layout', 'packed'],
}
CAPTURED = ['--updater', 'graph']  # for every arm on a GPU except the dense one

# Smaller batches, because upstream makes an array with an element for every pair of atoms and
# channel: 68 GB for 128 molecules of Tox21.
BATCHES = {('tox21', 'relgat'): 32, ('tox21', 'gnnfilm'): 32}

# Milliseconds of a dense step, to start long runs first; a captured step takes a tenth.
STEP = {'rsgcn': 7, 'relgcn': 15, 'ggnn': 30, 'gin': 15, 'nfp': 34, 'relgat': 30, 'gnnfilm': 30}
SIZES = {'tox21': 8006, 'qm9 alpha': 4000, 'qm9 gap': 4000, 'all qm9 alpha': 130831}

Run = collections.namedtuple('Run', 'data method arm seed')


def cost(run):
    """Return an estimate of the time of a run, in milliseconds."""
    batch = BATCHES.get((run.data, run.method), 128)
    n_steps = 0.7 * SIZES[run.data] / batch * DATA[run.data].epochs
    # Reading takes a tenth of a millisecond per molecule.
    return n_steps * STEP[run.method] / (1 if run.arm == 'dense' else 10) + SIZES[run.data] / 10


def chosen(args):
    """Return the runs that the arguments select, long ones first."""
    files = files_of(args)
    runs = [
        Run(data, method, arm, seed)
        for data in args.examples
        if data in files
        for method in args.methods
        if method in DATA[data].methods
        for arm in args.arms
        for seed in DATA[data].seeds
        if seed in args.seeds
    ]
    return sorted(runs, key=cost, reverse=True)


def files_of(args):
    """Return {data set: --data of its script} for the data sets that can be read."""
    files = {'tox21': args.tox21, 'all qm9 alpha': args.qm9}
    files.update({data: 'sample' for data in DATA if data not in files})
    return {data: file for data, file in files.items() if file}


def train(run, args, device, cpus, more=(), variables=None):
    """Train; return the entry to be stored: the test metric and the cost, or the error.

    `more`: further options of the script. `variables`: environment variables of its process.
    """
    found = dict(run._asdict(), commit=args.commit, machine=args.machine)
    data = DATA[run.data]
    options = ['--data', files_of(args)[run.data], '--device', device, *data.options]
    options += ['--method', run.method, '--seed', run.seed, '--num-data', args.num_data]
    options += ['--epoch', args.epoch or data.epochs, *ARMS[run.arm]]
    if run[:2] in BATCHES:
        options += ['--batchsize', BATCHES[run[:2]]]
    if run.arm != 'dense' and device != '-1':
        options += CAPTURED
    options += more
    start = time.perf_counter()
    try:
        result = example_runs.train(
            data.script, options, preloaded=True, cpus=cpus, variables=variables
        )
    except Exception as error:  # it is stored, because the other runs continue
        return dict(found, error='%s: %s' % (type(error).__name__, error))
    metric = result['test'][data.metric]
    if isinstance(metric, dict):  # target -> metric, for a single target
        (metric,) = metric.values()
    return dict(
        found,
        metric=metric,
        epochs=result['epochs'],
        steps=result['steps'],
        batchsize=result['settings']['batchsize'],
        padded_to=result['settings']['padded_to'],
        seconds=dict(result['seconds'], all=round(time.perf_counter() - start, 3)),
        milliseconds_a_step=(result['milliseconds a step'] or {}).get('median'),
    )


def slots(args):
    """Return a queue of (device, processors or None), one for each training that runs at a time.

    Each has a share of the processors. Otherwise it would start as many processes to read its
    molecules as there are processors.
    """
    found = queue.SimpleQueue()
    cpus = sorted(os.sched_getaffinity(0))
    for i in range(args.processes):
        share = {cpus[i * len(cpus) // args.processes % len(cpus)]}
        found.put((args.devices[i % len(args.devices)], share if args.processes > 1 else None))
    return found


def at_a_time(runs, args, work, store):
    """Call work(run, device, processors) for `args.processes` runs at a time, in their order.

    Each result is passed to store(run, found), in one call at a time.
    """
    free = slots(args)
    lock = threading.Lock()
    # The server that starts the processes inherits these variables, and so do the processes.
    os.environ.update(example_runs.environment())

    def worked(run):
        device, cpus = free.get()
        found = work(run, device, cpus)
        free.put((device, cpus))
        with lock:
            store(run, found)

    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(worked, runs))


def summary(runs):
    """Return {data set: {method: {arm: metrics, their mean and standard deviation}}}."""
    found = {}
    for run in runs:
        if run.get('metric') is not None:
            arms = found.setdefault(run['data'], {}).setdefault(run['method'], {})
            arms.setdefault(run['arm'], []).append(run['metric'])
    for methods in found.values():
        for arms in methods.values():
            for arm, metrics in arms.items():
                arms[arm] = {
                    'metrics': metrics,
                    'mean': statistics.mean(metrics),
                    'standard deviation': statistics.stdev(metrics) if len(metrics) > 1 else None,
                }
    return found


def key(run):
    """Return the key of a stored run; runs are stored in the order of their keys."""
    order = [list(DATA), list(METHODS), list(ARMS)]
    names = run['data'], run['method'], run['arm']
    return *(of.index(name) for of, name in zip(order, names)), run['seed']


def save(result, runs, out):
    """Write all runs, {key: run}, and their summary; return the path."""
    runs = [runs[which] for which in sorted(runs)]
    return harness.save('quality', {**result, 'summary': summary(runs), 'runs': runs}, out)


def line(run, found, seconds):
    """Return a line of text about a run that has ended after so many seconds of the benchmark."""
    ending = found.get('error') or '%(metric)s, %(seconds)s' % found
    return '%4.0f s, %s: %s' % (seconds, ' '.join(map(str, run)), ending)


def table(found):
    """Return the summary as lines of text."""
    lines = []
    for data, methods in found.items():
        for method, arms in methods.items():
            cells = [
                '%s %s' % (arm, ' '.join('%.4f' % metric for metric in of['metrics']))
                for arm, of in arms.items()
            ]
            lines.append('%s %s, %s: %s' % (data, method, DATA[data].metric, '; '.join(cells)))
    return lines


def parse(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz; without it QM9 alone")
    parser.add_argument('--qm9', help='all of QM9, by examples/qm9/make_sample.py --all')
    parser.add_argument('--devices', nargs='+', default=['-1'], help='-1 (CPU) or numbers of GPUs')
    parser.add_argument('--examples', nargs='+', default=list(DATA), choices=list(DATA))
    parser.add_argument('--methods', nargs='+', default=METHODS, choices=METHODS)
    parser.add_argument('--arms', nargs='+', default=list(ARMS), choices=list(ARMS))
    parser.add_argument('--seeds', nargs='+', type=int, default=SEEDS)
    parser.add_argument('--processes', type=int, default=1, help='trainings at a time')
    parser.add_argument('--merge', metavar='FILE', help='keep the runs of this file')
    parser.add_argument('--missing', action='store_true', help='train only runs that FILE lacks')
    parser.add_argument('--epoch', type=int, help='epochs of all trainings, for a trial')
    parser.add_argument('--num-data', type=int, default=-1, help='molecules, for a trial')
    args = parser.parse_args(argv)
    args.devices = [str(device) for device in args.devices]
    return args


def main(argv=None):
    args = parse(argv)
    start = time.perf_counter()
    conditions = harness.step_conditions(args.commit, harness.device_of(args.devices[0]))
    args.machine = conditions.get('gpu') or conditions['cpu']
    head = {
        'question': 'metrics on the test set after full-length trainings: upstream, dense; ours, '
        'folded and padded to the largest molecule of the batch or of the data set, and packed',
        'method': 'Options: %s. A seed determines split, parameters and batches. On a GPU, ours '
        'trains in captured steps. Several trainings run at the same time, so the seconds cannot '
        'be compared with other files' % ' '.join(example_runs.OPTIONS),
        'conditions': conditions,
        'metrics': {data: of.metric for data, of in DATA.items()},
        'epochs': {data: args.epoch or of.epochs for data, of in DATA.items()},
        'options': {'num-data': args.num_data},
    }
    result = harness.resumed('quality', head, args.out)
    old = json.loads(pathlib.Path(args.merge).read_text())['runs'] if args.merge else []
    stored = {key(run): run for run in (*old, *result.get('runs', []))}
    done = [run for run in result.get('runs', []) if run['commit'] == args.commit]
    done = {key(run) for run in done + old * args.missing if 'metric' in run}
    runs = [run for run in chosen(args) if key(run._asdict()) not in done]

    def work(run, device, cpus):
        return train(run, args, device, cpus)

    def store(run, found):
        stored[key(found)] = found
        save(result, stored, args.out)
        print(line(run, found, time.perf_counter() - start), flush=True)

    at_a_time(runs, args, work, store)
    print('\n'.join(table(summary(stored.values()))))
    failed = sum('error' in run for run in stored.values())
    print('%d failed; wrote %s' % (failed, save(result, stored, args.out)))


if __name__ == '__main__':
    main()
