"""How accurate is a step in TF32, and does a training in TF32 end where one in FP32 does?

``python -m benchmarks.training.bench_tf32 --tox21 tox21.csv.gz`` on a GPU compares loss and
gradients of a step of five models with float64, then trains two models by the examples' own scripts
to the end, with several seeds. All is done in FP32 and in TF32, on a CPU in FP32 only. It writes
``benchmarks/results/<gpu or cpu>/tf32.json``.
"""

import collections
import itertools
import statistics
import time

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
import numpy

from benchmarks import harness
from benchmarks.training import bench_quality, bench_widths, example_runs, step_contenders, subjects
from benchmarks.training.step_contenders import PRECISIONS
from tests.support import parity

UNITS = 256, 64
N_BATCH = 128
DATA = 'tox21', 'qm9 alpha'  # data sets of bench_quality
TRAINED = 'rsgcn', 'ggnn'
SEEDS = 0, 1, 2
TIME, PROCESSES = 200.0, 8
# Largest relative error of a parameter's gradient in a step.
LIMITS = {'FP32': step_contenders.STEP_ERROR, 'TF32': step_contenders.TF32_ERROR}
METHOD = (
    'errors: the first step on %d molecules of the most frequent size, which upstream does not '
    "pad, without dropout, against upstream's dense model in float64 on the host. loss: relative. "
    'norm: ||difference|| / ||gradient|| of all parameters as one array. largest: largest '
    'difference over the largest element. worst parameter: the largest such norm of a single '
    "parameter. Ours: packed, on a GPU a replayed step. runs: the examples' scripts with %s, "
    'packed, captured where conditions name a GPU, with the largest of the units; seeds decide '
    'split, parameters and batches. TF32: with CUPY_TF32=1'
) % (N_BATCH, ' '.join(example_runs.OPTIONS[2:]))

# A run of bench_quality, and its precision.
Run = collections.namedtuple('Run', 'data method arm seed precision')


def expected(part):
    """Return the :func:`outcome` of upstream's model in float64 for all molecules as one batch."""
    model = parity.to_double(part.model)
    batch = upstream_concat_mols([part.dense[i] for i in range(len(part.dense))])
    with parity.dense_models_in_float64():
        model.cleargrads()
        model(*parity.double(batch)).backward()
    return outcome(model)


def outcome(model):
    """Return the loss and {path: gradient} of a model's last step, on the host."""
    gradients = {
        path: cuda.to_cpu(parameter.grad)
        for path, parameter in model.namedparams()
        if parameter.grad is not None
    }
    return float(model.loss.array), gradients


def distance(found, truth):
    """Return the errors of one :func:`outcome` relative to another one, by name; see METHOD."""
    loss, gradients = found
    true_loss, true_gradients = truth
    # Parameters without a gradient are left out, which an updater may have given zeros.
    gradients = {path: gradients[path] for path in true_gradients}
    whole = step_contenders.flat(gradients)
    true_whole = step_contenders.flat(true_gradients)
    errors = {
        'loss': abs(loss - true_loss) / abs(true_loss),
        'norm': harness.relative_error(whole, true_whole),
        'largest': numpy.abs(whole - true_whole).max() / numpy.abs(true_whole).max(),
        'worst parameter': max(
            harness.relative_error(gradients[path], true_gradients[path]) for path in true_gradients
        ),
    }
    return {name: float('%.3g' % error) for name, error in errors.items()}


def errors(subject, device):
    """Return the number of molecules, and contender -> :func:`distance` of a step from float64."""
    subject = subject._replace(model=step_contenders.without_dropout(subject.model))
    index = step_contenders.equal_sizes(subject.dense, N_BATCH)
    part = step_contenders.part_of(subject, index)
    truth = expected(part)
    found = {}
    for name, make in bench_widths.contenders(part, len(index), device).items():
        made = make()
        step_contenders.run_a_step(made)
        made.wait()
        found[name] = distance(outcome(made.model), truth)
        made.close()
    return {'molecules': len(index), 'errors': found}


def chosen(args, device):
    """Return the runs that the arguments select; runs of one seed follow one another."""
    precisions = PRECISIONS if step_contenders.can_capture(device) else PRECISIONS[:1]
    files = bench_quality.files_of(args)
    return [
        Run(data, method, 'packed', seed, precision)
        for seed, data, method, precision in itertools.product(
            args.seeds, DATA, TRAINED, precisions
        )
        if data in files and method in args.methods
    ]


def key(run):
    """Return the key of a stored run; runs are stored in the order of their keys."""
    return run['data'], run['method'], run['precision'], run['seed']


def summary(runs):
    """Return data -> method -> metrics by seed, and how far TF32 is from FP32 beside the seeds."""
    metrics = {}
    for run in runs:
        if run.get('metric') is not None:
            of = metrics.setdefault(run['data'], {}).setdefault(run['method'], {})
            of.setdefault(run['precision'], {})[run['seed']] = run['metric']
    return {
        data: {method: compared(of) for method, of in methods.items()}
        for data, methods in metrics.items()
    }


def compared(metrics):
    """Return the summary of {precision: {seed: metric}}; None where there are too few seeds."""
    fp32, tf32 = (metrics.get(precision, {}) for precision in PRECISIONS)
    differences = [tf32[seed] - fp32[seed] for seed in fp32 if seed in tf32]
    return {
        'FP32': list(fp32.values()),
        'TF32': list(tf32.values()),
        'mean difference': statistics.mean(differences) if differences else None,
        'standard deviation of differences': deviation(differences),
        'standard deviation between seeds': deviation(list(fp32.values())),
        'seeds that differ': sum(difference != 0 for difference in differences),
    }


def deviation(values):
    return statistics.stdev(values) if len(values) > 1 else None


def bars(result):
    """Return {bar: {'value', 'met'}} for all errors and trainings."""
    found = {}
    for units, methods in result['errors'].items():
        for method, of in methods.items():
            for name, error in of['errors'].items():
                limit = LIMITS['TF32' if name.endswith('TF32') else 'FP32']
                bar = '%s units, %s, %s: gradients within %g' % (units, method, name, limit)
                worst = error['worst parameter']
                found[bar] = harness.bar(worst, worst <= limit, digits=9)
    for data, methods in result['summary'].items():
        for method, of in methods.items():
            if of['mean difference'] is not None:
                # Trainings that are alike to the last bit have not multiplied in TF32.
                bar = '%s, %s: the switch reaches the training' % (data, method)
                found[bar] = harness.bar(of['seeds that differ'], of['seeds that differ'])
    return found


def save(result, out):
    """Write the result with its summary and bars; return the path."""
    result['runs'] = sorted(result['runs'], key=key)
    result['summary'] = summary(result['runs'])
    result['bars'] = bars(result)
    return harness.save('tf32', result, out)


def measure_errors(result, args, device, start):
    """Measure the errors that a result lacks."""
    *read, result['description'] = subjects.molecules('tox21', args)
    sets = {}
    for n_unit, method in itertools.product(args.units, args.methods):
        of = result['errors'].setdefault(str(n_unit), {})
        title = '%d units, %s' % (n_unit, method)
        if method in of:
            continue
        if time.perf_counter() - start > args.time:
            result['not_run'].append(title)
            continue
        of[method] = errors(subjects.subject_of(method, read, sets, n_unit), device)
        print('%4.0f s, %s: %s' % (time.perf_counter() - start, title, of[method]), flush=True)
        save(result, args.out)


def train_all(result, args, device, start):
    """Train what a result lacks, several trainings at a time."""
    result['runs'] = [run for run in result['runs'] if 'metric' in run]
    done = {key(run) for run in result['runs']}

    def work(run, of_device, cpus):
        slowest = max((of['seconds']['all'] for of in result['runs'] if 'metric' in of), default=0)
        if time.perf_counter() - start + slowest > args.time:
            return None
        return bench_quality.train(
            run,
            args,
            of_device,
            cpus,
            more=['--unit-num', max(args.units)],
            variables={'CUPY_TF32': str(int(run.precision == 'TF32'))},
        )

    def store(run, found):
        if found is None:
            result['not_run'].append(' '.join(map(str, run)))
            return
        result['runs'].append(found)
        print(bench_quality.line(run, found, time.perf_counter() - start), flush=True)
        save(result, args.out)

    runs = [run for run in chosen(args, device) if key(run._asdict()) not in done]
    bench_quality.at_a_time(runs, args, work, store)


def parse(argv=None):
    parser = subjects.argument_parser(
        __doc__, subjects.FIVE, '0', 'number of a GPU; -1 (CPU) has no TF32'
    )
    parser.add_argument('--units', nargs='+', type=int, default=UNITS)
    parser.add_argument('--seeds', nargs='+', type=int, default=SEEDS)
    parser.add_argument('--epoch', type=int, help='of all trainings, for a trial')
    parser.add_argument('--processes', type=int, default=PROCESSES, help='trainings at a time')
    subjects.add_time(parser, TIME)
    args = parser.parse_args(argv)
    # bench_quality does the trainings, and reads more arguments.
    args.devices = [args.device]
    args.num_data = args.limit or -1
    args.qm9 = None
    return args


def main(argv=None):
    start = time.perf_counter()
    args = parse(argv)
    device = harness.device_of(args.device)
    conditions = harness.step_conditions(args.commit, device)
    args.machine = conditions.get('gpu') or conditions['cpu']
    head = {
        'question': 'errors of a step in FP32 and TF32, and test metrics after trainings in both',
        'method': METHOD,
        'conditions': conditions,
        'metrics': {data: bench_quality.DATA[data].metric for data in DATA},
        'epochs': {data: args.epoch or bench_quality.DATA[data].epochs for data in DATA},
        'options': {
            'layers': subjects.N_LAYERS,
            'units of the trainings': max(args.units),
            'limit': args.limit,
            'tox21': 'a file' if args.tox21 else 'generated; no trainings',
        },
    }
    result = harness.resumed('tf32', head, args.out)
    result.setdefault('errors', {})
    result.setdefault('runs', [])
    result['not_run'] = []
    measure_errors(result, args, device, start)
    train_all(result, args, device, start)
    path = save(result, args.out)
    harness.print_bars(result['bars'])
    for data, methods in result['summary'].items():
        for method, of in methods.items():
            print('%s, %s: %s' % (data, method, of))
    print('not run for lack of time:', result['not_run'] or 'nothing')
    failed = sum('error' in run for run in result['runs'])
    print('%d failed; %.0f s in all; wrote %s' % (failed, time.perf_counter() - start, path))


if __name__ == '__main__':
    main()
