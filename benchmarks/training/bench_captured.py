"""How long does a training step take from iterator to update: eager, captured, dense, sparse?

Upstream's dense model, ours under StandardUpdater and under GraphUpdater, PyTorch Geometric eager
and captured, on a GPU: ``python -m benchmarks.training.bench_captured --tox21 tox21.csv.gz`` writes
``benchmarks/results/<gpu>/captured.json``; ``python -m benchmarks.plot captured`` draws it.
``--against jax`` times our captured steps beside those of the same networks in JAX,
``jax.json``; with ``--gpus 3`` each method on another GPU.
"""

import collections
import gc
import importlib.util
import itertools
import json
import pathlib
import sys
import tempfile
import time

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer.backends import cuda
import numpy

from benchmarks import gpus
from benchmarks import harness
from benchmarks.training import step_contenders
from benchmarks.training import subjects
from benchmarks.training.step_contenders import CAPTURED, EAGER, EAGER_PACKED, GEOMETRIC_CAPTURED
from benchmarks.training.step_contenders import (
    DRIVERS,
    JAX,
    ON_DEVICE,
    PACKED,
    SCANNED,
    synchronize,
)
from benchmarks.training.subjects import GEOMETRIC, MAX_ROUNDS, MIN_ROUNDS, UPSTREAM

METHODS = subjects.FIVE
BATCHES = (128, 1024, 32)
FIRST = 'tox21', 128  # data set and batch of the bars
SECONDS, TIME = 2.0, 185.0
TURN = 0.15  # seconds of a contender's turn, which has from MIN_STEPS to MAX_STEPS steps
# As in a training, where a processor's caches hold what a step needs.
MIN_STEPS, MAX_STEPS = 3, 256
REPLAYS = 50
PROFILED = 5  # steps
FOR_PROFILES = 25  # seconds reserved at the end

OVER_UPSTREAM, OVER_GEOMETRIC = 20, 5

# --against -> our contenders on a GPU, on a CPU; result file; methods.
Against = collections.namedtuple('Against', 'gpu cpu name methods')
AGAINST = {
    'geometric': Against(
        (UPSTREAM, EAGER, CAPTURED, ON_DEVICE, PACKED), (UPSTREAM, EAGER), 'captured', METHODS
    ),
    'jax': Against(
        (PACKED, ON_DEVICE, CAPTURED), (EAGER_PACKED, EAGER), 'jax', ('rsgcn', 'gin', 'relgcn')
    ),
}

METHOD = (
    'Medians of interleaved rounds (low, high: 10th and 90th percentile) of as many steps as take '
    '%g s, at least %d, at most %d, waited for after the last of them; wall is that time a step, '
    'host that until the last was launched; Chainer trains in the loop of its Trainer, without '
    'extensions; %d units, %d layers, float32, Adam. device: captured, between replays by events; '
    'eager, the sum of the kernels; busy: device over wall. peak_bytes: what the memory pools '
    'hold, parameters and data on the device included. epoch_seconds: wall times molecules over '
    'batch. ' % (TURN, MIN_STEPS, MAX_STEPS, subjects.N_UNIT, subjects.N_LAYERS)
)
METHODS_OF_PEERS = {
    'geometric': 'PyTorch Geometric eager: its loader in the same process; captured: batches by '
    'this package, which is faster, sent in one copy to padded buffers',
    'jax': 'JAX: the same molecules in the same order, loss, metric, dropout, Adam; batches padded '
    'to the size of the largest and on the device before the first step, so that it gathers none '
    'in a step. jit: a jitted step in a Python loop; scan: %d steps in one lax.scan. FP32: matmul '
    "precision 'highest'; TF32: JAX's default" % SCANNED,
}

# A method on a data set. peers: batch size -> name -> function that makes another library's
# contender; result: dict, what is stored.
Subject = collections.namedtuple('Subject', 'model dense sparse peers result')


def measure_rounds(found, device, seconds):
    """Time steps of all contenders, interleaved, in turns of as many as take `TURN` seconds.

    Args:
        found (dict): name -> contender, which was warmed up.

    Returns:
        tuple: name -> list, one for each round, of [host, wall], milliseconds a step until the
        turn's last one was launched, and until the device was done with it; name -> steps a turn.
    """
    n_steps = {}
    for name, contender in found.items():
        n_first = max(MIN_STEPS, contender.multiple)
        synchronize(device)
        start = time.perf_counter()
        contender.run(n_first)
        contender.wait()
        step = (time.perf_counter() - start) / n_first
        n_calls = numpy.clip(TURN / step, MIN_STEPS, MAX_STEPS) / contender.multiple
        n_steps[name] = max(1, int(n_calls)) * contender.multiple
    times = {name: [] for name in found}
    start, n_rounds = time.perf_counter(), 0
    while n_rounds < MIN_ROUNDS or (
        time.perf_counter() - start < seconds and n_rounds < MAX_ROUNDS
    ):
        for name, contender in found.items():
            # An unmeasured step fills the processor's caches again.
            contender.run(contender.multiple)
            contender.wait()
            clock = [time.perf_counter()]
            contender.run(n_steps[name])
            clock.append(time.perf_counter())
            contender.wait()
            clock.append(time.perf_counter())
            times[name].append([(end - clock[0]) * 1e3 / n_steps[name] for end in clock[1:]])
        n_rounds += 1
    return times, n_steps


def measure_steps(found, device, seconds):
    """Summarize :func:`measure_rounds`.

    Returns:
        tuple: name -> {'wall', 'host': summaries in milliseconds a step, 'steps a turn'}; number of
        rounds.
    """
    times, n_steps = measure_rounds(found, device, seconds)
    result = {}
    for name, rows in times.items():
        host, wall = zip(*rows)
        result[name] = {
            'wall': harness.summary(list(wall)),
            'host': harness.summary(list(host)),
            'steps a turn': n_steps[name],
        }
    return result, len(rows)


def replay_ms(contender):
    """Return device milliseconds of a captured step, from the start of one replay to the next."""
    start, stop = cuda.cupy.cuda.Event(), cuda.cupy.cuda.Event()
    contender.replay()
    start.record()
    for _ in range(REPLAYS):
        contender.replay()
    stop.record()
    stop.synchronize()
    return cuda.cupy.cuda.get_elapsed_time(start, stop) / REPLAYS


def profiled(call, device):
    """Return how many kernels a call launches and the milliseconds that they take.

    By PyTorch's profiler, which sees the kernels of a CUDA graph, too. It slows down what follows.
    """
    from torch import autograd
    from torch import profiler

    synchronize(device)
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        call()
        synchronize(device)
    microseconds = [
        event.time_range.elapsed_us()
        for event in found.events()
        if event.device_type == autograd.DeviceType.CUDA
        and not event.name.startswith(('Memcpy', 'Memset', 'Optimizer.'))
    ]
    return len(microseconds), sum(microseconds) / 1e3


def kernels_ms(contender, device):
    """Return the milliseconds that the kernels of an eager step take."""
    contender.run(step_contenders.WARM)
    return profiled(lambda: contender.run(PROFILED), device)[1] / PROFILED


def run_cell(makers, n_molecules, n_batch, device, seconds):
    """Return what is measured of one method, data set and batch; and the eager contenders."""
    found, not_run = {}, {}
    for name, make in makers.items():
        try:
            contender = make()
            contender.warm()
        except Exception as error:  # the others are timed anyway
            not_run[name] = described(error)
        else:
            found[name] = contender
    milliseconds, n_rounds = measure_steps(found, device, seconds)
    for name, contender in found.items():
        if contender.is_captured:
            add_device_time(milliseconds[name], replay_ms(contender))
        milliseconds[name]['epoch_seconds'] = round(
            milliseconds[name]['wall']['median'] * n_molecules / n_batch / 1e3, 4
        )
    result = {
        'n_rounds': n_rounds,
        'milliseconds': milliseconds,
        'not_run': not_run,
        'peak_bytes': {name: contender.peak_bytes() for name, contender in found.items()},
    }
    eager = {name: contender for name, contender in found.items() if not contender.is_captured}
    found.clear()
    gc.collect()  # or graphs would be freed while the next cell is timed
    for contender in eager.values():
        contender.free()
    return result, eager


def add_device_time(times, device_ms):
    """Add to a contender's times those of the device, and its share of the step."""
    times['device'] = round(device_ms, 4)
    times['busy'] = round(device_ms / times['wall']['median'], 3)


def ratio(cell, name, over):
    """Return how many times faster one is than another; None where one was not run."""
    times = cell['milliseconds']
    if name not in times or over not in times:
        return None
    return times[over]['wall']['median'] / times[name]['wall']['median']


def bars(methods, n_batch=FIRST[1]):
    """Return {bar: {'ratio', 'met'}} of the five models; not met where ours was not run."""
    found = {}
    for method, of in methods.items():
        if 'wrong' in of:
            found['%s: steps agree' % method] = {'ratio': None, 'met': False}
        cell = of['batches'].get(str(n_batch))
        if cell is None:
            continue
        for name in (ON_DEVICE, CAPTURED):
            for over, least in (
                (UPSTREAM, OVER_UPSTREAM),
                (GEOMETRIC, OVER_GEOMETRIC),
                (GEOMETRIC_CAPTURED, 1),
            ):
                if over not in cell['milliseconds']:
                    continue
                times = ratio(cell, name, over)
                found[
                    '%s, batch %d: %s at least %gx faster than %s'
                    % (method, n_batch, name, least, over)
                ] = {
                    'ratio': times and round(times, 2),
                    'met': times is not None and times >= least,
                }
    return found


def over_jax(cell, precision):
    """Return JAX's time, by a jitted step or a scan, over ours, packed.

    Ours is captured, with its data on the device; on a CPU it is eager.

    Returns:
        float or None: the smaller one of the two; None where one of the contenders was not run.
    """
    ours = EAGER_PACKED if EAGER_PACKED in cell['milliseconds'] else PACKED
    ratios = [ratio(cell, ours, JAX[driver, precision]) for driver in DRIVERS]
    return None if None in ratios else min(ratios)


def bars_jax(data):
    """Return {bar: {'ratio', 'met'}} of all cells beside JAX in FP32."""
    found = {}
    for name, of_data in data.items():
        for method, of in of_data['methods'].items():
            for n_batch, cell in of['batches'].items():
                times = over_jax(cell, 'FP32')
                found[
                    '%s %s, batch %s: at least as fast as JAX in FP32' % (name, method, n_batch)
                ] = {'ratio': times and round(times, 2), 'met': times is not None and times >= 1}
    return found


def table(title, cell):
    """Return a cell's results as lines of text."""
    lines = [title]
    for name, times in cell['milliseconds'].items():
        over = ratio(cell, name, UPSTREAM)
        peak = cell['peak_bytes'][name]
        lines.append(
            '  %-36s wall %8.3f ms (host %8.3f)%s%s%s'
            % (
                name,
                times['wall']['median'],
                times['host']['median'],
                '' if over is None else ' %6.1fx' % over,
                '; device %.3f, busy %.0f %%' % (times['device'], 100 * times['busy'])
                if 'device' in times
                else '',
                '' if peak is None else '; %.1f MB' % (peak / 1e6),
            )
        )
    return lines + ['  %s not run: %s' % item for item in cell['not_run'].items()]


def run(args, device):
    """Measure all cells, the most important first; the file is written after every one."""
    start = time.perf_counter()
    result = {
        'question': 'milliseconds of a training step: iterator, converter, forward, backward, Adam',
        'method': METHOD + METHODS_OF_PEERS[args.against],
        'conditions': harness.step_conditions(args.commit, device),
        'data': {},
    }
    read, sets, ready = {}, {}, {}
    eager, not_run = [], []
    is_profiled = args.against == 'geometric' and device.xp is not numpy
    reserved = FOR_PROFILES if is_profiled and importlib.util.find_spec('torch') else 0
    for n_batch, data, method in itertools.product(args.batches, args.data, args.methods):
        if data not in read:
            *read[data], description = subjects.molecules(data, args)
            result['data'][data] = {'description': description, 'methods': {}}
        of_data = result['data'][data]
        title = '%s %s, batch %d' % (data, method, n_batch)
        if time.perf_counter() - start > args.time - reserved:
            not_run.append(title)
            continue
        if (data, method) not in ready:
            found = subjects.of_kind(sets.setdefault(data, {}), read[data], method)
            of_data['n_molecules'] = len(found[0])
            ready[data, method] = prepared(method, *found, device=device, args=args)
            of_data['methods'][method] = ready[data, method].result
        subject = ready[data, method]
        if 'wrong' in subject.result or n_batch > len(subject.sparse):
            continue
        cell, running = run_cell(
            contenders(subject, n_batch, device, args.against),
            len(subject.sparse),
            n_batch,
            device,
            args.seconds,
        )
        subject.result['batches'][str(n_batch)] = cell
        eager.append((title, cell, running))
        print('\n'.join(table(title, cell)), flush=True)
        save(result, not_run, args)
    if reserved:
        profile(eager, device, start + args.time, not_run)
    path = save(result, not_run, args)
    report(result)
    print('%.0f s in all; wrote %s' % (time.perf_counter() - start, path))
    if any('wrong' in subject.result for subject in ready.values()):
        raise SystemExit('not all steps agree')


def report(result):
    """Print which bars are met, and what was not run."""
    for bar, of in result.get('bars', {}).items():
        print(
            '%s: %s%s'
            % (
                bar,
                'met' if of['met'] else 'MISSED',
                '' if of['ratio'] is None else ' (%.2fx)' % of['ratio'],
            )
        )
    print('not run for lack of time:', result['not_run'] or 'nothing')


def prepared(method, dense, sparse, device, args):
    """Return the `Subject` of a method on a data set; wrong steps are not timed."""
    model = subjects.upstream_model(method, sparse.molecules.labels[0], [dense[0]])
    result = {'relative_errors': {}, 'batches': {}}
    try:
        result['relative_errors'].update(step_contenders.check(model, dense, sparse, device))
    except Exception as error:  # the other methods are measured; the run fails at its end
        result['wrong'] = described(error)
        print('%s: %s' % (method, result['wrong']), flush=True)
    peers, errors = {}, {}
    try:
        if args.against == 'jax':
            sizes = [n_batch for n_batch in args.batches if n_batch <= len(sparse)]
            errors = step_contenders.check_jax(method, model, sparse, device)
            peers = step_contenders.jax_peers(method, model, sparse, sizes, device)
        elif device.xp is not numpy and importlib.util.find_spec('torch_geometric'):
            from benchmarks.peers import geometric_models

            if method in geometric_models.PEERS:
                examples = geometric_models.examples_of(sparse)
                peers = {
                    n_batch: step_contenders.peers(method, examples, sparse, n_batch, device)
                    for n_batch in args.batches
                }
                errors = step_contenders.check_peers(method, examples, sparse, device)
        result['relative_errors'].update(errors)
    except Exception as error:
        result['no peer'] = described(error)
        print('%s: no peer: %s' % (method, result['no peer']), flush=True)
    return Subject(model, dense, sparse, peers, result)


def described(error):
    return '%s: %s' % (type(error).__name__, str(error)[:500])


def contenders(subject, n_batch, device, against):
    """Return name -> function that makes a contender, of both libraries."""
    found = step_contenders.trainers(subject.model, subject.dense, subject.sparse, n_batch, device)
    ours = AGAINST[against].gpu if step_contenders.can_capture(device) else AGAINST[against].cpu
    found = {name: found[name] for name in ours}
    found.update(subject.peers.get(n_batch, {}))
    if 'no peer' in subject.result:
        found.pop(GEOMETRIC_CAPTURED, None)
    return found


def profile(eager, device, deadline, not_run):
    """Add the device time of eager steps; last, as a profiler slows down what follows it."""
    for title, cell, running in eager:
        for name, contender in running.items():
            if time.perf_counter() > deadline:
                not_run.append('device time of %s, %s' % (title, name))
                continue
            try:
                add_device_time(cell['milliseconds'][name], kernels_ms(contender, device))
            except RuntimeError as error:  # another profiler may be attached
                cell['not_run']['device time of %s' % name] = str(error)


def save(result, not_run, args):
    result['not_run'] = not_run
    if args.against == 'jax':
        result['bars'] = bars_jax(result['data'])
    elif FIRST[0] in result['data']:
        result['bars'] = bars(result['data'][FIRST[0]]['methods'])
    return harness.save(AGAINST[args.against].name, result, args.out)


def run_on_gpus(args, argv):
    """Measure each method in a process on one of several GPUs, and store all in one file."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:

        def measure(method, place):
            command = [sys.executable, '-m', 'benchmarks.training.bench_captured', *argv]
            out = pathlib.Path(folder) / method
            status = place.run(
                # Of options that are given twice the last one counts.
                [*command, '--gpus', '1', '--device', '0', '--methods', method, '--out', str(out)],
                cwd=harness.ROOT,
            )
            path = out / (AGAINST[args.against].name + '.json')
            return status, json.loads(path.read_text()) if path.exists() else None

        statuses, results = zip(*gpus.spread(args.methods, args.gpus, measure))
    if not any(results):
        raise SystemExit('nothing was measured')
    result, not_run = merged([result for result in results if result])
    path = save(result, not_run, args)
    report(result)
    print('%.0f s in all; wrote %s' % (time.perf_counter() - start, path))
    if any(statuses):
        raise SystemExit('failed: %s' % dict(zip(args.methods, statuses)))


def merged(results):
    """Return several results as one, of which no two have the same cells, and what was not run."""
    whole, *others = results
    for result in others:
        for data, of in result['data'].items():
            methods = whole['data'][data]['methods']
            for method, found in of['methods'].items():
                batches = methods.setdefault(method, found)['batches']
                batches.update(found['batches'])
    return whole, [title for result in results for title in result['not_run']]


def main(argv=None):
    parser = subjects.step_argument_parser(
        __doc__, METHODS, BATCHES, SECONDS, '0', 'number of a GPU; -1 (CPU) captures nothing'
    )
    parser.add_argument(
        '--against',
        choices=sorted(AGAINST),
        default='geometric',
        help='geometric: upstream, all of ours and PyTorch Geometric; jax: our captured steps (on '
        'a CPU: eager ones) and JAX',
    )
    parser.add_argument(
        '--gpus',
        type=int,
        default=1,
        help='so many GPUs, each with as many of the processors: one method at a time on each',
    )
    parser.add_argument(
        '--time',
        type=float,
        default=TIME,
        help='seconds of the whole run, on each GPU; what does not fit is skipped and listed',
    )
    parser.set_defaults(methods=None)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.methods = args.methods or AGAINST[args.against].methods
    if unknown := set(args.methods) - set(AGAINST[args.against].methods):
        parser.error('--methods: JAX has no %s' % ', '.join(sorted(unknown)))
    if args.gpus > 1:
        return run_on_gpus(args, argv)
    device = harness.device_of(args.device)
    run(args, device)


if __name__ == '__main__':
    main()
