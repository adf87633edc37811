"""How fast is bspmm on one large graph with rows of all lengths, against cuSPARSE and PyTorch?

``python -m benchmarks.products.bench_large`` on a GPU takes about 40 seconds and writes
``benchmarks/results/<gpu>/large.json``.
"""

import time
from unittest import mock

import chainer_bspmm  # noqa: F401  first: repairs Chainer
import cupy
import numpy

from benchmarks import harness
from benchmarks.peers import cusparse
from benchmarks.products import matrices, measure
from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.plans import widest_vector
from chainer_bspmm.ops.bspmm import bspmm_forward, piece_length

try:
    from benchmarks.peers import torch_peers
except ImportError as error:
    torch_peers = None
    no_torch = str(error)

WIDTHS = 16, 64, 256
CALLS, ROUNDS = 5, 15
TOLERANCE = 1e-5
AUTO, WHOLE, COPY, TORCH = 'auto', 'whole rows', 'copy', 'torch.sparse.mm'
CUSPARSE = ['cuSPARSE csr alg%d' % number for number in (1, 2, 3)]
BARS = {'geometric mean over cuSPARSE': 1.2, 'least over cuSPARSE': 0.9}

# Name -> function of a random generator that makes a SciPy matrix.
CASES = {
    'power law, 20,000 rows': lambda rng: matrices.power_law(rng, 20_000, 8, 5_000),
    'power law, 524,288 rows': lambda rng: matrices.power_law(rng, 2**19, 8, 2_048),
    'R-MAT, 16,384 rows': lambda rng: matrices.rmat(rng, 14, 16),
    'R-MAT, 262,144 rows': lambda rng: matrices.rmat(rng, 18, 16),
    'mesh, 98,304 rows': lambda rng: matrices.blocks_of_mesh(rng, 32),
    'banded, 262,144 rows': lambda rng: matrices.banded(rng, 2**18, 3),
}


def contenders(adj, x):
    """Return name -> function that returns A x; each of cuSPARSE's has a separate result array."""

    def whole():
        with mock.patch('chainer_bspmm.ops.bspmm.piece_length', lambda *_: 0):
            return bspmm_forward(adj, x)

    calls = {AUTO: lambda: bspmm_forward(adj, x), WHOLE: whole}
    for name in CUSPARSE:
        matrix = cusparse.csr(adj.indptr, adj.indices, adj.data, adj.n_cols)
        y = cupy.full((adj.n_rows, x.shape[1]), numpy.nan, 'f')
        calls[name] = cusparse.SpMM(matrix, x, y, name.removeprefix('cuSPARSE '))
    if torch_peers:
        calls[TORCH] = torch_peers.sparse_mm(adj, x)
    return calls


def run_point(adj, n_b):
    x = numpy.random.RandomState(1).uniform(-1, 1, (adj.n_cols, n_b)).astype('f')
    expected = cupy.asarray(adj.to_scipy().astype('d') @ x.astype('d'))
    x = cupy.asarray(x)
    calls = contenders(adj, x)
    errors = {
        name: harness.relative_error(cupy.from_dlpack(call()), expected)
        for name, call in calls.items()
    }
    harness.gate(errors, TOLERANCE)
    del expected
    n_bytes = adj.nbytes + x.nbytes + adj.n_rows * n_b * 4
    calls[COPY] = measure.copy_of(n_bytes)
    graphs = {
        name: (*(torch_peers if name == TORCH else measure).capture(call, CALLS), CALLS)
        for name, call in calls.items()
    }
    times = measure.replay_times(graphs, ROUNDS)
    width = widest_vector(n_b, 4, 0)
    return {
        'n_B': n_b,
        'piece': piece_length(
            adj.n_rows,
            adj.n_cols,
            adj.nnz,
            adj.longest,
            n_b // width,
            kernels.device(cupy.cuda.Device().id),
        ),
        'relative_error': max(errors.values()),
        'microseconds': times,
        'times_faster': times_faster(times),
    }


def times_faster(times):
    """Return the times of cuSPARSE's best algorithm, and of all others, over ours."""
    medians = {name: time['median'] for name, time in times.items()}
    best = min(medians[name] for name in CUSPARSE)
    others = {name: medians[name] for name in (WHOLE, TORCH, COPY) if name in medians}
    return {
        name: round(median / medians[AUTO], 3)
        for name, median in {'cuSPARSE, best': best, **others}.items()
    }


def bars(cases):
    """Return {bar: {'value', 'met'}} for the geometric mean and the worst of all points."""
    ratios = [point['times_faster']['cuSPARSE, best'] for case in cases for point in case['points']]
    found = numpy.exp(numpy.log(ratios).mean()), min(ratios)
    return {
        'at least %.1f, %s' % (least, name): harness.bar(value, value >= least, 3)
        for (name, least), value in zip(BARS.items(), found)
    }


def run_case(name, matrix):
    start = time.perf_counter()
    adj = chainer_bspmm.BatchedCSR.from_matrices([matrix.astype('f')])
    seconds = time.perf_counter() - start
    adj = adj.to_device(0)
    case = {
        'name': name,
        'rows': adj.n_rows,
        'nnz': adj.nnz,
        'longest_row': adj.longest,
        'seconds_to_build': round(seconds, 3),
        'points': [run_point(adj, n_b) for n_b in WIDTHS],
    }
    for point in case['points']:
        print(
            '%-24s n_B %3d, pieces of %4d: %s us, times faster than %s'
            % (
                name,
                point['n_B'],
                point['piece'],
                point['microseconds'][AUTO]['median'],
                point['times_faster'],
            ),
            flush=True,
        )
    return case


def main():
    parser = harness.argument_parser(__doc__)
    args = parser.parse_args()
    conditions = {**measure.conditions(args.commit), 'cusparse': cusparse.version()}
    if torch_peers:
        conditions.update(torch_peers.versions())
    head = {
        'question': 'one large graph, float32: bspmm against cuSPARSE, PyTorch, and a copy of as '
        'many bytes as the arrays have',
        'method': 'device: median of %d interleaved replays of CUDA graphs of %d calls each, warm '
        'L2; relative errors against float64' % (ROUNDS, CALLS),
        'conditions': conditions,
        'not_run': {} if torch_peers else {TORCH: no_torch},
    }
    result = harness.resumed('large', head, args.out)
    cases = result.setdefault('cases', [])
    rng = numpy.random.RandomState(0)
    done = [case['name'] for case in cases]
    for name, make in CASES.items():
        matrix = make(rng)
        if name not in done:
            cases.append(run_case(name, matrix))
            result['bars'] = bars(cases)
            harness.save('large', result, args.out)
    harness.print_bars(result['bars'])
    print('wrote', harness.save('large', result, args.out))


if __name__ == '__main__':
    main()
