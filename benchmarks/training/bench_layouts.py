"""What does it cost to fold phantom atoms into a row: a captured step folded, beside packed?

From a `DeviceDataset`, on a GPU:
``python -m benchmarks.training.bench_layouts --data tox21 --tox21 tox21.csv.gz``
writes ``benchmarks/results/<gpu>/layouts.json``.
"""

import gc
import time

import numpy

from benchmarks import harness
from benchmarks.training import bench_captured
from benchmarks.training import step_contenders
from benchmarks.training import subjects
from benchmarks.training.step_contenders import ON_DEVICE, PACKED

BATCHES = (128, 1024)
SECONDS, TIME = 2.0, 120.0
# Both sizes that a data set's batches have are past the checks of their first 16 replays; a later
# check is in few of the rounds.
WARM = 200
AT_MOST = 1.08


def compared(found, device, seconds):
    """Return the times of contenders, folded and packed, and how their turns compare."""
    times, n_steps = bench_captured.measure_rounds(found, device, seconds)
    walls = {name: numpy.array(rows)[:, 1] for name, rows in times.items()}
    return {
        'n_rounds': len(walls[PACKED]),
        'steps a turn': {'folded': n_steps[ON_DEVICE], 'packed': n_steps[PACKED]},
        'folded': harness.summary(walls[ON_DEVICE].tolist()),
        'packed': harness.summary(walls[PACKED].tolist()),
        'folded over packed': harness.summary((walls[ON_DEVICE] / walls[PACKED]).tolist()),
    }


def run(args, device):
    """Measure all cells; the file is written after every one."""
    start = time.perf_counter()
    result: dict = {
        'question': 'a captured step folded and packed: milliseconds, and the ratio of turns that '
        'follow one another',
        'method': 'Interleaved rounds, medians (low, high: 10th and 90th percentile); iterator, '
        'DeviceDataset, forward, backward, Adam; %d units, %d layers, float32'
        % (subjects.N_UNIT, subjects.N_LAYERS),
        'conditions': harness.step_conditions(args.commit, device),
        'at most': AT_MOST,
        'not_run': [],
        'data': {},
    }
    for data in args.data:
        *read, description = subjects.molecules(data, args)
        methods, sets = {}, {}
        result['data'][data] = {'description': description, 'methods': methods}
        for method in args.methods:
            dense, sparse = subjects.of_kind(sets, read, method)
            model = subjects.upstream_model(method, sparse.molecules.labels[0], [dense[0]])
            errors = step_contenders.check(model, dense, sparse, device)
            methods[method] = {'relative_errors': errors, 'batches': {}}
            for n_batch in args.batches:
                title = '%s %s, batch %d' % (data, method, n_batch)
                if time.perf_counter() - start > args.time or n_batch > len(sparse):
                    result['not_run'].append(title)
                    continue
                makers = step_contenders.trainers(model, dense, sparse, n_batch, device)
                found = {name: makers[name]() for name in (ON_DEVICE, PACKED)}
                for contender in found.values():
                    contender.warm(WARM)
                cell = compared(found, device, args.seconds)
                methods[method]['batches'][str(n_batch)] = cell
                harness.save('layouts', result, args.out)
                print('%s: %s' % (title, cell), flush=True)
                del makers, contender, found
                gc.collect()  # or graphs would be freed while the next cell is timed
    path = harness.save('layouts', result, args.out)
    print('not run:', result['not_run'] or 'nothing')
    print('%.0f s in all; wrote %s' % (time.perf_counter() - start, path))


def main(argv=None):
    parser = subjects.step_argument_parser(
        __doc__, subjects.FIVE, BATCHES, SECONDS, '0', 'number of a GPU'
    )
    parser.add_argument('--time', type=float, default=TIME, help='seconds; the rest is skipped')
    args = parser.parse_args(argv)
    run(args, harness.device_of(args.device))


if __name__ == '__main__':
    main()
