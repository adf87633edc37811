"""Run short versions of the benchmarks that make sense on this machine, and name the others.

``python -m benchmarks`` (``make bench``) takes a few minutes and writes to ``build/bench``. The
stored results in ``benchmarks/results`` come from the full versions::

    python -m benchmarks --full --gpus 4 --tox21 tox21.csv.gz --qm9 qm9.csv.gz --out FOLDER

runs these on several GPUs at once, which takes half an hour on four. What was measured before in
the same folder is not measured again, so it can be stopped.
"""

import pathlib
import subprocess
import sys

from benchmarks import gpus, harness
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


# Full versions that need one GPU each, the longest first; they read Tox21 if that is given.
OF_TOX21 = [
    ['training.bench_steps', '--against', 'jax'],
    ['training.bench_two_lines', '--device', '0'],
    ['training.bench_steps'],
    ['training.bench_steps', '--against', 'upstream'],
    ['training.bench_tf32'],
]
OF_NO_DATA = [
    ['products.bench_figures'],
    ['products.bench_large'],
    ['training.bench_network', '--device', '0'],
    ['parity', '--gpu'],
    ['training.bench_looks'],
]


def full_runs(args):
    """Return the commands of all full versions: on one GPU each, and on all GPUs."""
    tox21 = ['--tox21', args.tox21]
    both = [*tox21, '--qm9', args.qm9]
    numbers = list(map(str, range(args.gpus)))
    alone = [[*words, *tox21] for words in OF_TOX21] + OF_NO_DATA
    if args.chemprop:
        words = ['training.bench_chemprop', '--chemprop', args.chemprop, '--device', '0']
        alone.insert(0, words + tox21)
    ranks = [number for number in ('1', '2', '4') if int(number) <= args.gpus]
    together = [
        ['training.bench_widths', '--gpus', str(args.gpus), *tox21],
        ['bench_command', '--gpus', str(args.gpus), '--few', '3', *both],
        [
            *('training.bench_quality', '--processes', str(12 * args.gpus), *both),
            *('--devices', *numbers),
        ],
        ['training.bench_scaling', '--ranks', *ranks, *both],
    ]
    return alone, together


def run_full(args):
    """Run the full versions, each with a log beside its result; return the names of failed ones."""
    out = pathlib.Path(args.out or OUT)
    out.mkdir(parents=True, exist_ok=True)
    alone, together = full_runs(args)

    def call(words, place=None):
        name, *options = words
        command = [sys.executable, '-m', 'benchmarks.' + name, *options]
        command += ['--commit', args.commit, '--out', str(out)]
        log = out / ('_'.join([name, *options[:2]]).replace('/', '_') + '.log')
        with open(log, 'w') as file:
            start = subprocess.run if place is None else place.run
            done = start(command, stdout=file, stderr=file, cwd=harness.ROOT)
        status = done.returncode if place is None else done
        print('%s: %s, %s' % (' '.join(words), 'failed' if status else 'done', log), flush=True)
        return name if status else None

    failed = gpus.spread(alone, args.gpus, call) + [call(words) for words in together]
    return [name for name in failed if name is not None]


def main():
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--full', action='store_true', help='the full versions')
    parser.add_argument('--gpus', type=int, default=1, help='number of GPUs of --full')
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz, for --full")
    parser.add_argument('--qm9', help='all of QM9, by examples/qm9/make_sample.py --all')
    parser.add_argument('--chemprop', help="path of chemprop's command, to compare with it")
    args = parser.parse_args()
    if args.full:
        if not (args.tox21 and args.qm9):
            parser.error('--full: expected --tox21 and --qm9')
        failed = run_full(args)
        print('failed: %s' % (', '.join(failed) or 'none'))
        return 1 if failed else 0
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
