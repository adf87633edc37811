"""Run short versions of the benchmarks that make sense on this machine, and name the others.

``python -m benchmarks`` (``make bench``) takes a few minutes and writes to ``build/bench``. The
stored results in ``benchmarks/results`` come from the full versions, run one by one.
"""

import subprocess
import sys

from benchmarks import harness
from chainer_bspmm import info

OUT = harness.ROOT / 'build' / 'bench'

# module -> arguments of a short run
STEPS = ['--limit', 500, '--batches', 128, '--data', 'tox21']
CPU: dict[str, list] = {
    'training.bench_two_lines': ['--data', 'qm9', '--limit', 300, '--rounds', 1],
    'training.bench_steps': [*STEPS, '--device', -1],
    'training.bench_looks': ['--rounds', 3, '--device', -1],
}
GPU: dict[str, list] = {
    'products.bench_figures': ['--figures', '6b'],
    'training.bench_steps': [*STEPS, '--time', 90],
    'training.bench_looks': ['--rounds', 3],
}
LONG = {
    'bench_command': 'trains whole models',
    'products.bench_large': 'takes several minutes',
    'training.bench_chemprop': 'needs an installation of chemprop',
    'training.bench_deferred': 'takes several minutes',
    'training.bench_network': 'a graph of 115 million edges',
    'training.bench_quality': 'trains to the end',
    'training.bench_scaling': 'needs MPI',
    'training.bench_tf32': 'trains to the end',
    'training.bench_widths': 'takes several minutes',
    'parity': 'compares numbers, not times',
}


def main():
    args = harness.argument_parser(__doc__).parse_args()
    out = args.out or str(OUT)
    n_gpus, reason = info.count_gpus()
    runs = {**CPU, **(GPU if n_gpus else {})}
    left = [name for name in GPU if name not in runs]
    skipped = {**dict.fromkeys(left, 'needs a GPU: %s' % reason), **LONG}
    failed = []
    for name, arguments in runs.items():
        command = ['-m', 'benchmarks.' + name, '--commit', args.commit, '--out', out]
        command += map(str, arguments)
        print('\n== python %s' % ' '.join(command), flush=True)
        if subprocess.run([sys.executable, *command], cwd=harness.ROOT).returncode:
            failed.append(name)
    for name, why in skipped.items():
        print('skipped: python -m benchmarks.%s (%s)' % (name, why))
    print('results: %s%s' % (out, '; failed: ' + ', '.join(failed) if failed else ''))
    return 1 if failed else 0


if __name__ == '__main__':
    raise SystemExit(main())
