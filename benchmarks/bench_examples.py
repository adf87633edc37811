"""What do the examples cost from file to tested model, dense and sparse, after as many epochs?

Runs ``examples/tox21`` and ``examples/qm9`` as a user does, upstream's dense model and ours in
turn, and keeps their ``result.json``: seconds, memory, the metric of the test part. Needs no GPU::

    python -m benchmarks.bench_examples tox21 --data tox21.csv.gz
    python -m benchmarks.bench_examples qm9 --data full      # pip install qm9pack

writes ``benchmarks/results/cpu/example_tox21.json`` and ``example_qm9.json``.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results' / 'cpu'
EPOCHS = {'tox21': 20, 'qm9': 1}
OPTIONS = ['--unit-num', '64', '--batchsize', '128']
OWN_OPTIONS = {'tox21': [], 'qm9': ['--label', 'alpha']}
# The products are small: more threads make neither model faster, and the numbers worse.
THREADS = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


def train(example, options, folder):
    """Run the training script of an example; return its result and the log of its epochs."""
    script = ROOT / 'examples' / example / ('train_%s.py' % example)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    subprocess.run(
        [sys.executable, str(script), '--out', folder, *options],
        check=True,
        env=dict(os.environ, PYTHONPATH=path, **THREADS),
    )
    result = json.loads((pathlib.Path(folder) / 'result.json').read_text())
    result['settings']['data'] = os.path.basename(result['settings']['data'])
    result['log'] = json.loads((pathlib.Path(folder) / 'log').read_text())
    return result


def run(example, data, methods, epoch, num_data, commit):
    """Train every method dense and sparse; return what there is to keep."""
    if commit is None:
        commit = subprocess.run(
            ['git', 'describe', '--always', '--dirty'],
            text=True,
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.strip()
    options = [
        '--data',
        data,
        '--epoch',
        str(epoch),
        '--num-data',
        str(num_data),
        *OPTIONS,
        *OWN_OPTIONS[example],
    ]
    found = {'date': datetime.date.today().isoformat(), 'commit': commit, 'methods': {}}
    for method in methods:
        found['methods'][method] = {}
        for name, more in (('dense', ['--dense']), ('sparse', [])):
            with tempfile.TemporaryDirectory() as folder:
                found['methods'][method][name] = train(
                    example, ['--method', method, *options, *more], folder
                )
    return found


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('example', choices=sorted(EPOCHS))
    parser.add_argument('--data', required=True, help='--data of the example')
    parser.add_argument('--methods', nargs='+', default=['rsgcn'])
    parser.add_argument('--epoch', type=int, help='20 for tox21, 1 for qm9')
    parser.add_argument('--num-data', type=int, default=-1)
    parser.add_argument('--commit', help='what to note as the commit; asks git otherwise')
    parser.add_argument('--out', default=RESULTS, type=pathlib.Path, help='folder of the JSON file')
    args = parser.parse_args(argv)
    found = run(
        args.example,
        args.data,
        args.methods,
        args.epoch or EPOCHS[args.example],
        args.num_data,
        args.commit,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / ('example_%s.json' % args.example)
    path.write_text(json.dumps(found, indent=1) + '\n')
    print('\n'.join(table(found)))
    print('wrote', path)


if __name__ == '__main__':
    main()
