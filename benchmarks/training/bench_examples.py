"""What do the examples cost from file to tested model, dense and sparse, after as many epochs?

Runs ``examples/tox21`` and ``examples/qm9`` as a user does, with upstream's dense model and with
ours, and stores their ``result.json``: seconds, memory, the metric of the test part. Needs no GPU::

    python -m benchmarks.training.bench_examples tox21 --data tox21.csv.gz
    python -m benchmarks.training.bench_examples qm9 --data full      # pip install qm9pack

writes ``benchmarks/results/cpu/example_tox21.json`` and ``example_qm9.json``.
"""

import datetime

from benchmarks import harness
from benchmarks.training import example_runs

EPOCHS = {'tox21': 20, 'qm9': 1}


def run(args):
    """Train every method dense and sparse, and return what is stored."""
    options = ['--data', args.data, '--epoch', args.epoch or EPOCHS[args.example]]
    options += ['--num-data', args.num_data, '--updater', 'standard', '--padded-to', 'batch']
    return {
        'date': datetime.date.today().isoformat(),
        'commit': args.commit,
        'methods': {
            method: {
                name: example_runs.train(args.example, ['--method', method, *options, *more])
                for name, more in (('dense', ['--dense']), ('sparse', []))
            }
            for method in args.methods
        },
    }


def table(found):
    """Return the results as lines of text."""
    lines = []
    for method, pair in found['methods'].items():
        for name, result in pair.items():
            test = result['test']
            lines.append(
                '%-7s %-6s: data %.1f s, training %.1f s, %s ms a step, %.0f MB, %s'
                % (
                    method,
                    name,
                    result['seconds']['data'],
                    result['seconds']['training'],
                    (result['milliseconds a step'] or {}).get('median'),
                    result['peak memory in bytes']['host'] / 1e6,
                    ', '.join(
                        '%s %s' % (key, test[key]) for key in ('mean ROC-AUC', 'MAE') if key in test
                    ),
                )
            )
    return lines


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('example', choices=sorted(EPOCHS))
    parser.add_argument('--data', required=True, help='--data of the example')
    parser.add_argument('--methods', nargs='+', default=['rsgcn'])
    parser.add_argument('--epoch', type=int, help='20 for tox21, 1 for qm9')
    parser.add_argument('--num-data', type=int, default=-1)
    args = parser.parse_args(argv)
    found = run(args)
    print('\n'.join(table(found)))
    print('wrote', harness.save('example_%s' % args.example, found, args.out))


if __name__ == '__main__':
    main()
