"""How long does a training step take from iterator to update: eager, captured, dense, sparse?

``python -m benchmarks.training.bench_steps --tox21 tox21.csv.gz`` on a GPU times upstream's dense
model, ours under StandardUpdater and under GraphUpdater, and PyTorch Geometric, eager and captured.
``--against jax`` times our captured steps beside steps of the same networks in JAX. ``--against
upstream`` times every method that can be swapped beside upstream's dense one, with the fastest data
set for it. They write ``captured.json``, ``jax.json`` and ``methods.json`` to
``benchmarks/results/<gpu or cpu>``, from which ``benchmarks.plot`` and ``benchmarks.tables`` draw.
"""

import collections
import gc
import importlib.util
import itertools
import time

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer.backends import cuda

from benchmarks import harness
from benchmarks.training import step_contenders, subjects
from benchmarks.training.step_contenders import CAPTURED, EAGER, EAGER_PACKED, GEOMETRIC
from benchmarks.training.step_contenders import GEOMETRIC_CAPTURED, JAX, ON_DEVICE, PACKED
from benchmarks.training.step_contenders import ratio, SCANNED, UPSTREAM, WARM_CAPTURED

TIME = 185.0
MIN_ROUNDS, MAX_ROUNDS = 3, 30
# Least number of rounds with captured steps. The check of a replay takes as long as a hundred of
# them; in few rounds a turn with one could be the median.
MIN_ROUNDS_CAPTURED = 9
TURN = 0.15  # seconds of a contender's turn, which has from MIN_STEPS to MAX_STEPS steps
# A turn has several steps because in a training, too, the processor's caches hold a step's data.
MIN_STEPS, MAX_STEPS = 3, 256
REPLAYS = 50

# name: name of the result. gpu, cpu: upstream's and our contenders on a GPU and on a CPU.
# warm: steps of a captured contender before it is timed. bars: methods, and the contenders of ours
# that must be a number of times faster than others. method: the result's text about the peers.
Study = collections.namedtuple(
    'Study', 'name methods data batches seconds gpu cpu warm bars method'
)
Bars = collections.namedtuple('Bars', 'methods ours least')
STUDIES = {
    'geometric': Study(
        name='captured',
        methods=subjects.FIVE,
        data=('tox21', 'qm9'),
        batches=(128, 1024, 32),
        seconds=2.0,
        gpu=(UPSTREAM, EAGER, CAPTURED, ON_DEVICE, PACKED),
        cpu=(UPSTREAM, EAGER, EAGER_PACKED),
        warm=WARM_CAPTURED,
        bars=Bars(
            subjects.FIVE,
            (ON_DEVICE, CAPTURED),
            {UPSTREAM: 20, GEOMETRIC: 5, GEOMETRIC_CAPTURED: 1},
        ),
        method='PyTorch Geometric eager: its loader in the same process; captured: batches by this '
        'package, which is faster, sent in one copy to padded buffers',
    ),
    'jax': Study(
        name='jax',
        methods=('rsgcn', 'gin', 'relgcn'),
        data=('tox21', 'qm9'),
        batches=(128, 1024, 32),
        seconds=2.0,
        gpu=(PACKED, ON_DEVICE, CAPTURED),
        cpu=(EAGER_PACKED, EAGER),
        warm=WARM_CAPTURED,
        bars=Bars(
            ('rsgcn', 'gin', 'relgcn'),
            (PACKED, EAGER_PACKED),
            {JAX['jit', 'FP32']: 1, JAX['scan', 'FP32']: 1},
        ),
        method='JAX: the same molecules in the same order, loss, metric, dropout, Adam; batches '
        'padded to the size of the largest and on the device before the first step, so that it '
        'gathers none in a step. jit: a jitted step in a Python loop; scan: %d steps in one '
        "lax.scan. FP32: matmul precision 'highest'; TF32: JAX's default" % SCANNED,
    ),
    'upstream': Study(
        name='methods',
        methods=subjects.METHODS,
        data=('tox21',),
        batches=(128, 32),  # 32 if upstream has not enough memory for 128
        seconds=0.8,
        gpu=(UPSTREAM, ON_DEVICE),
        cpu=(UPSTREAM, EAGER),
        warm=150,  # to pass the checks of a form's first replays
        bars=Bars(subjects.LARGE, (ON_DEVICE,), {UPSTREAM: 20}),
        method='Ours is folded, from the fastest data set that a method can have: DeviceDataset, '
        'for cwle and gwle dense examples, by updates without a Trainer',
    ),
}
METHOD = (
    'Medians of interleaved rounds (low, high: 10th and 90th percentile). A round has as many '
    'steps as take %g s, at least %d and at most %d. wall: time per step until the last one has '
    'ended; host: until it has been launched. Every 2,000th replay is checked; the median leaves '
    'out the few rounds that have such a step. Chainer trains in the loop of its Trainer, without '
    'extensions. %d units, %d layers, float32, Adam. device: time of a captured step between '
    'replays, by events; busy: device over wall. peak_bytes: memory that the pools hold, with '
    'parameters and data. ' % (TURN, MIN_STEPS, MAX_STEPS, subjects.N_UNIT, subjects.N_LAYERS)
)


def measure(found, seconds, not_run):
    """Time steps of all contenders, interleaved, in turns of as many as take `TURN` seconds.

    A contender that fails is removed from `found`, and the reason added to `not_run`. Returns name
    -> {'wall', 'host': summaries in milliseconds a step, 'steps a turn'}, and the number of rounds.
    """
    times = {name: [] for name in found}
    n_steps = {
        name: step_contenders.steps_of_a_turn(contender, TURN, MIN_STEPS, MAX_STEPS)
        for name, contender in found.items()
    }
    is_captured = any(contender.is_captured for contender in found.values())
    least = MIN_ROUNDS_CAPTURED if is_captured else MIN_ROUNDS
    start = time.perf_counter()
    n_rounds = 0
    while n_rounds < least or (time.perf_counter() - start < seconds and n_rounds < MAX_ROUNDS):
        for name, contender in list(found.items()):
            try:
                # A step that is not measured fills the processor's caches again.
                contender.run(contender.multiple)
                contender.wait()
                times[name].append(step_contenders.turn(contender, n_steps[name]))
            except Exception as error:  # such as too little memory for a larger batch
                not_run[name] = described(error)
                close([found.pop(name)])
        n_rounds += 1
    result = {}
    for name in found:
        host, wall = map(list, zip(*times[name]))
        result[name] = {
            'wall': harness.summary(wall),
            'host': harness.summary(host),
            'steps a turn': n_steps[name],
        }
    return result, n_rounds


def replay_ms(replay):
    """Return device milliseconds of a captured graph, from the start of one replay to the next."""
    start, stop = cuda.cupy.cuda.Event(), cuda.cupy.cuda.Event()
    replay()
    start.record()
    for _ in range(REPLAYS):
        replay()
    stop.record()
    stop.synchronize()
    return cuda.cupy.cuda.get_elapsed_time(start, stop) / REPLAYS


def run_cell(makers, warm, seconds):
    """Measure the cell of a method, data set and batch; see `Study` for `warm`."""
    found, not_run = {}, {}
    for name, make in makers.items():
        contender = None
        try:
            contender = make()
            contender.warm(warm)
        except Exception as error:  # it is noted, and the others are timed
            not_run[name] = described(error)
        else:
            found[name] = contender
            continue
        close([contender])  # it may have taken all memory
    milliseconds, n_rounds = measure(found, seconds, not_run)
    for name, contender in found.items():
        if contender.is_captured:
            device_ms = replay_ms(contender.replay)
            times = milliseconds[name]
            times['device'] = round(device_ms, 4)
            times['busy'] = round(device_ms / times['wall']['median'], 3)
    peak_bytes = {name: contender.peak_bytes() for name, contender in found.items()}
    del contender
    close(found.values())  # otherwise graphs would be freed while the next cell is timed
    found.clear()
    return {
        'n_rounds': n_rounds,
        'milliseconds': milliseconds,
        'not_run': not_run,
        'peak_bytes': peak_bytes,
    }


def close(contenders):
    """Free the memory of contenders that have a method `close`; some may be None."""
    for contender in contenders:
        if isinstance(contender, step_contenders.Trainer):
            contender.close()
    gc.collect()


def described(error):
    return '%s: %s' % (type(error).__name__, str(error)[:500])


def prepared(method, subject, study, batches, device):
    """Check the contenders of a method on a data set; wrong steps are not timed.

    Returns the entry to be stored for the method, and batch size -> name -> function that makes
    another library's contender.
    """
    result = {'relative_errors': {}}
    peers = {}
    try:
        names = names_of(study, subject, device)
        result['relative_errors'].update(step_contenders.check(method, subject, names, device))
    except Exception as error:  # other methods are measured before the run fails
        result['wrong'] = described(error)
        print('%s: %s' % (method, result['wrong']), flush=True)
    try:
        errors, peers = PEERS[study.name](method, subject, batches, device)
        result['relative_errors'].update(errors)
    except Exception as error:
        result['no peer'] = described(error)
        print('%s: no peer: %s' % (method, result['no peer']), flush=True)
    gc.collect()
    return result, peers


def geometric_peers(method, subject, batches, device):
    if not step_contenders.can_capture(device) or not importlib.util.find_spec('torch_geometric'):
        return {}, {}
    from benchmarks.peers import geometric_models

    if method not in geometric_models.PEERS:
        return {}, {}
    examples = geometric_models.examples_of(subject.data)
    peers = {
        n_batch: step_contenders.peers(method, examples, subject.data, n_batch, device)
        for n_batch in batches
    }
    return step_contenders.check_peers(method, examples, subject, device), peers


def jax_peers(method, subject, batches, device):
    errors = step_contenders.check_jax(method, subject, device)
    batches = [n_batch for n_batch in batches if n_batch <= len(subject.dense)]
    return errors, step_contenders.jax_peers(method, subject, batches, device)


PEERS = {'captured': geometric_peers, 'jax': jax_peers, 'methods': lambda *_: ({}, {})}


def names_of(study, subject, device):
    """Return our contenders of a method."""
    if not step_contenders.can_capture(device):
        return study.cpu
    on_device = CAPTURED if subject.data is subject.dense else ON_DEVICE
    return [on_device if name == ON_DEVICE else name for name in study.gpu]


def bars(data, study):
    """Return {bar: {'value', 'met'}} for all cells; not met if ours failed or is wrong."""
    found = {}
    for name, of_data in data.items():
        for method, of in of_data['methods'].items():
            if 'wrong' in of:
                found['%s %s: steps agree' % (name, method)] = harness.bar(None, False)
            if method not in study.bars.methods:
                continue
            for n_batch, cell in of['batches'].items():
                ours = [
                    n for n in study.bars.ours if n in {**cell['milliseconds'], **cell['not_run']}
                ]
                for one, (over, least) in itertools.product(ours, study.bars.least.items()):
                    if over not in cell['milliseconds']:
                        continue
                    times = ratio(cell, one, over)
                    title = '%s %s, batch %s: %s at least %gx faster than %s'
                    title %= name, method, n_batch, one, least, over
                    found[title] = harness.bar(times, times is not None and times >= least)
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
    """Measure missing cells, the most important first; the file is written after every one."""
    start = time.perf_counter()
    study = STUDIES[args.against]
    head = {
        'question': 'milliseconds of a training step: iterator, converter, forward, backward, Adam',
        'method': METHOD + study.method,
        'conditions': harness.step_conditions(args.commit, device),
        'options': {
            'limit': args.limit,
            'seconds': args.seconds,
            'tox21': 'a file' if args.tox21 else 'generated',
        },
    }
    result = harness.resumed(study.name, head, args.out)
    result.setdefault('data', {})
    result['not_run'] = []
    read, sets, ready = {}, {}, {}
    for n_batch, data, method in itertools.product(args.batches, args.data, args.methods):
        if data not in read:
            *read[data], description = subjects.molecules(data, args)
            result['data'].setdefault(data, {'description': description, 'methods': {}})
            sets[data] = {}
        of_data = result['data'][data]
        title = '%s %s, batch %d' % (data, method, n_batch)
        of = of_data['methods'].get(method, {'batches': {}})
        is_done = args.against == 'upstream' and any(
            UPSTREAM in cell['milliseconds'] for cell in of['batches'].values()
        )
        if 'wrong' in of or is_done or str(n_batch) in of['batches']:
            continue
        if time.perf_counter() - start > args.time:
            result['not_run'].append(title)
            continue
        if (data, method) not in ready:
            subject = subjects.subject_of(method, read[data], sets[data])
            of_data['n_molecules'] = len(subject.dense)
            found, peers = prepared(method, subject, study, args.batches, device)
            of = of_data['methods'][method] = {**found, 'batches': of['batches']}
            ready[data, method] = subject, peers
        subject, peers = ready[data, method]
        if 'wrong' in of or n_batch > len(subject.dense):
            continue
        makers = step_contenders.trainers(subject, n_batch, device)
        makers = {name: makers[name] for name in names_of(study, subject, device)}
        makers.update(peers.get(n_batch, {}))
        cell = of['batches'][str(n_batch)] = run_cell(makers, study.warm, args.seconds)
        print('\n'.join(table(title, cell)), flush=True)
        result['bars'] = bars(result['data'], study)
        harness.save(study.name, result, args.out)
    result['bars'] = bars(result['data'], study)
    harness.print_bars(result['bars'])
    path = harness.save(study.name, result, args.out)
    print('not run for lack of time:', result['not_run'] or 'nothing')
    print('%.0f s in all; wrote %s' % (time.perf_counter() - start, path))
    if any(
        'wrong' in of for of_data in result['data'].values() for of in of_data['methods'].values()
    ):
        raise SystemExit('not all steps agree')


def main(argv=None):
    parser = subjects.argument_parser(
        __doc__, subjects.METHODS, '0', 'number of a GPU; -1 (CPU) captures nothing'
    )
    parser.add_argument(
        '--against',
        choices=STUDIES,
        default='geometric',
        help='geometric: upstream, all of ours and PyTorch Geometric; jax: our captured steps (on '
        'a CPU: eager ones) and JAX; upstream: every method, upstream and our fastest steps',
    )
    parser.add_argument('--data', nargs='+', choices=['tox21', 'qm9'])
    parser.add_argument('--batches', nargs='+', type=int)
    parser.add_argument(
        '--seconds',
        type=float,
        help='for each method, data set and batch size: from %d to %d rounds'
        % (MIN_ROUNDS, MAX_ROUNDS),
    )
    subjects.add_time(parser, TIME)
    parser.set_defaults(methods=None)
    args = parser.parse_args(argv)
    study = STUDIES[args.against]
    for name in ('methods', 'data', 'batches', 'seconds'):
        if getattr(args, name) is None:
            setattr(args, name, getattr(study, name))
    if unknown := set(args.methods) - set(study.methods):
        parser.error('--methods: not among those against %s: %s' % (args.against, unknown))
    run(args, harness.device_of(args.device))


if __name__ == '__main__':
    main()
