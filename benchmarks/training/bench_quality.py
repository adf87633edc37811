"""Do the dense and the sparse models learn equally well: packed, padded, in captured steps?

Trains with the examples' own scripts to the end, over several seeds, and keeps the metric of the
test part: the mean ROC-AUC of Tox21's assays, the mean absolute error of QM9's sample. A seed
decides the split, the initial parameters and the order of the batches for all of them. On a GPU::

    python -m benchmarks.training.bench_quality --tox21 tox21.csv.gz --device 0 --processes 12

writes ``benchmarks/results/<gpu or cpu>/quality.json``.
"""

import concurrent.futures
import statistics

from benchmarks import harness
from benchmarks.training import example_runs

EPOCHS = {'tox21': 20, 'qm9': 100}
METRICS = {'tox21': 'mean ROC-AUC', 'qm9': 'MAE'}
METHODS = ('rsgcn', 'relgcn')
SEEDS = (0, 1, 2)
MODELS = {
    'dense': ['--dense'],
    'packed': [],
    'padded': ['--layout', 'padded'],
    'captured': ['--updater', 'graph'],
}  # packed, too


def train(run, options):
    """Return the test metric of one run (example, method, model, seed), and what it cost."""
    example, method, model, seed = run
    chosen = ['--method', method, '--epoch', EPOCHS[example], '--seed', seed]
    result = example_runs.train(example, [*chosen, *MODELS[model], *options[example]])
    metric = result['test'][METRICS[example]]
    if isinstance(metric, dict):  # by target: there is one
        (metric,) = metric.values()
    return {'metric': metric, 'seconds': result['seconds']['training'], 'steps': result['steps']}


def summary(results):
    """Return {example: {method: {model: metrics, their mean and standard deviation}}}."""
    found = {}
    for (example, method, model, _), result in results.items():
        found.setdefault(example, {}).setdefault(method, {}).setdefault(model, []).append(
            result['metric']
        )
    for methods in found.values():
        for method, models in methods.items():
            methods[method] = {
                model: {
                    'metrics': metrics,
                    'mean': statistics.mean(metrics),
                    'standard deviation': statistics.stdev(metrics) if len(metrics) > 1 else None,
                }
                for model, metrics in models.items()
            }
    return found


def main():
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz; without it QM9 alone")
    parser.add_argument('--device', default='-1', help='-1 (CPU) or the number of a GPU')
    parser.add_argument('--methods', nargs='+', default=METHODS)
    parser.add_argument('--processes', type=int, default=1, help='trainings at a time')
    args = parser.parse_args()
    device = harness.device_of(args.device)
    options = {'qm9': ['--data', 'sample', '--device', args.device]}
    if args.tox21:
        options['tox21'] = ['--data', args.tox21, '--device', args.device]
    models = [model for model in MODELS if model != 'captured' or args.device != '-1']
    # The slow ones first.
    runs = [
        (example, method, model, seed)
        for example in sorted(options, reverse=True)
        for method in reversed(args.methods)
        for model in models
        for seed in SEEDS
    ]
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        results = dict(zip(runs, pool.map(lambda run: train(run, options), runs)))
    result = {
        'question': 'test metrics after full-length trainings: dense; sparse, packed, padded, and '
        'packed in captured steps',
        'method': '%s; epochs %s; seeds %s, each with another split; %d trainings at a time, '
        'so seconds are not comparable with those of other files'
        % (' '.join(example_runs.OPTIONS), EPOCHS, SEEDS, args.processes),
        'conditions': harness.step_conditions(args.commit, device),
        'metrics': {example: METRICS[example] for example in options},
        'summary': summary(results),
        'runs': [
            dict(zip(('example', 'method', 'model', 'seed'), run), **value)
            for run, value in results.items()
        ],
    }
    for example, methods in result['summary'].items():
        for method, found in methods.items():
            print(
                '%s %s, %s: %s'
                % (
                    example,
                    method,
                    METRICS[example],
                    '; '.join(
                        '%s %s' % (model, ' '.join('%.4f' % metric for metric in of['metrics']))
                        for model, of in found.items()
                    ),
                )
            )
    print('wrote', harness.save('quality', result, args.out))


if __name__ == '__main__':
    main()
