"""How much slower than the best variant is the one that the launch policy chooses?

Measures every variant of bspmm_csr over random shapes, and the one that ``'auto'`` takes among
them. The model in ``chainer_bspmm/cuda/policy.py`` was made from the samples of the seeds
0 and 1; its regret is what the sample of seed 2 says, which had no part in that.

``python -m benchmarks.products.bench_policy`` on a GPU writes
``benchmarks/results/<gpu>/policy_2.json``.
"""

import concurrent.futures
import time

import chainer_bspmm
import cupy
import numpy

from benchmarks import harness
from benchmarks.products import measure
from chainer_bspmm import backend
from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import policy

ROUNDS, CALLS = 5, 20
LANES, COLUMNS, ROWS, BLOCKS = (4, 8, 16, 32), (1, 2, 4), (1, 2, 4, 8), (128, 256)
AHEAD = policy.AHEAD, policy.AHEAD_LONG
MOST_BYTES = 400e6


def random_shape(rng):
    """Return the sizes of the graphs, the mean of the non-zeros a row, n_B and the dtype."""
    while True:
        batch = int(numpy.exp(rng.uniform(0, numpy.log(20000))))
        least, most = sorted(rng.randint(1, 257, 2))
        if rng.rand() < 0.7:
            least = most
        sizes = rng.randint(least, most + 1, batch)
        mean = numpy.exp(rng.uniform(0, numpy.log(30 if rng.rand() < 0.15 else 6)))
        n_b = int(numpy.exp(rng.uniform(0, numpy.log(1024))))
        if rng.rand() < 0.6:
            n_b = -(-n_b // 4) * 4
        dtype = rng.choice(['float32', 'float32', 'float32', 'float64', 'float16'])
        if 2 * sizes.sum() * n_b * numpy.dtype(dtype).itemsize <= MOST_BYTES:
            return sizes, mean, n_b, dtype


def random_batch(rng, sizes, mean, dtype):
    """Return a BatchedCSR on the GPU: rows of 1, 2, ... non-zeros at random columns."""
    starts = numpy.concatenate([[0], numpy.cumsum(sizes)])
    size = numpy.repeat(sizes, sizes)
    lengths = numpy.minimum(1 + rng.poisson(mean - 1, starts[-1]), size)
    row = numpy.repeat(numpy.arange(starts[-1]), lengths)
    columns = numpy.repeat(starts[:-1], sizes)[row] + (rng.rand(row.size) * size[row]).astype('i8')
    data = rng.uniform(0.5, 1.5, row.size).astype(dtype)
    indptr = numpy.concatenate([[0], numpy.cumsum(lengths)])
    return chainer_bspmm.BatchedCSR(indptr, columns, starts, data=data).to_device('@cupy:0')


def variants(adj, n_b, width, itemsize):
    """Return settings -> plan of everything that the policy could choose for a shape."""
    plans = {}
    n_vectors = n_b // width
    plain = 2 * adj.n_rows * n_b * itemsize < 10e6  # nothing streams what fits in a cache
    for lanes in LANES:
        for columns in COLUMNS:
            if lanes * columns >= 2 * max(n_vectors, 4) or columns * width * itemsize > 64:
                continue
            for rows in ROWS:
                for block in BLOCKS:
                    for stream in (False,) if plain else (False, True):
                        if rows > 1 and block > 128:
                            continue
                        for ahead in AHEAD if columns == 1 else AHEAD[:1]:
                            plan = policy.csr_launch(
                                adj.n_rows,
                                adj.n_cols,
                                n_b,
                                width,
                                lanes,
                                columns,
                                rows,
                                block,
                                ahead,
                                stream,
                            )
                            plans.setdefault(plan, (lanes, columns, rows, block, ahead, stream))
    return plans


def run_shape(rng):
    sizes, mean, n_b, dtype = random_shape(rng)
    adj = random_batch(rng, sizes, mean, dtype)
    x = cupy.asarray(rng.uniform(-1, 1, (adj.n_rows, n_b)).astype(dtype))
    y = cupy.empty_like(x)
    width = policy.vector_width(n_b, x.itemsize, 0)
    device = kernels.device(0)
    chosen = policy.bspmm_launch(adj.n_rows, adj.n_cols, adj.nnz, n_b, width, x.itemsize, device)
    plans = variants(adj, n_b, width, x.itemsize)
    plans.setdefault(chosen, ('none of these',))

    def load(plan):
        return kernels.load(
            0, 'bspmm_csr', x.dtype.char, plan.defines + (('WEIGHTS', 1), ('RESIDUAL', 0))
        )

    with concurrent.futures.ThreadPoolExecutor() as pool:  # NVRTC is slow, and there are many
        list(pool.map(load, {plan.defines: plan for plan in plans}.values()))

    def call(plan):
        kernel = load(plan)
        arguments = (
            adj.indptr,
            adj.indices,
            adj.data,
            numpy.uintp(0),
            x,
            numpy.uintp(0),
            y,
            *plan.arguments,
        )
        return lambda: kernel(plan.grid, plan.block, arguments)

    calls = {plan: call(plan) for plan in plans}
    expected = backend.bspmm(adj, x, algorithm='swa')  # tested elsewhere against the reference
    for plan, one in calls.items():
        y.fill(numpy.nan)
        one()
        errors = {plan: harness.relative_error(y, expected)}
        harness.gate(errors, {2: 1e-3, 4: 1e-5, 8: 1e-13}[x.itemsize])
    graphs = {plan: (*measure.capture(one, CALLS), CALLS) for plan, one in calls.items()}
    times = measure.replay_times(graphs, ROUNDS)
    microseconds = {plan: value['median'] for plan, value in times.items()}
    best = min(microseconds, key=microseconds.get)
    return {
        'batch': len(sizes),
        'dim': [int(sizes.min()), int(sizes.max())],
        'n_rows': adj.n_rows,
        'nnz': adj.nnz,
        'n_B': n_b,
        'dtype': str(x.dtype),
        'bytes': 2 * x.nbytes,
        'chosen': plans[chosen],
        'chosen_us': microseconds[chosen],
        'best': plans[best],
        'best_us': microseconds[best],
        'n_variants': len(plans),
        'regret': round(microseconds[chosen] / microseconds[best] - 1, 4),
    }, {str(plans[plan]): value for plan, value in microseconds.items()}


def main():
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--seed', type=int, default=2)
    parser.add_argument('--shapes', type=int, default=60)
    parser.add_argument('--seconds', type=float, default=1e9, help='stop measuring after these')
    parser.add_argument('--all', action='store_true', help='store the time of every variant')
    args = parser.parse_args()
    rng = numpy.random.RandomState(args.seed)
    cases, started = [], time.perf_counter()
    for _ in range(args.shapes):
        case, everything = run_shape(rng)
        print(
            '%(n_rows)8d rows %(nnz)9d nnz n_B %(n_B)4d %(dtype)s: chosen %(chosen)s '
            '%(chosen_us).2f us, best %(best)s %(best_us).2f us, regret %(regret).3f' % case
        )
        if args.all:
            case['all'] = everything
        cases.append(case)
        if time.perf_counter() - started > args.seconds:
            break
    regret = [case['regret'] for case in cases]
    result = {
        'question': 'time of the chosen variant of bspmm_csr over that of the best, less 1',
        'method': 'device: median of %d interleaved replays of CUDA graphs of %d calls, warm L2; '
        'random shapes of seed %d; the best of that many variants is a little too good, '
        'because the luckiest measurement wins' % (ROUNDS, CALLS, args.seed),
        'conditions': measure.conditions(args.commit),
        'regret': {
            'median': float(numpy.median(regret)),
            'mean': float(numpy.mean(regret)),
            'p95': float(numpy.percentile(regret, 95)),
            'worst': max(regret),
        },
        'cases': cases,
    }
    print(result['regret'])
    print('wrote', harness.save('policy_%d' % args.seed, result, args.out))


if __name__ == '__main__':
    main()
