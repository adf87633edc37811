"""How far is bspmm from a device copy of the same bytes, from 0.1 MB to 2 GB?

``python -m benchmarks.products.bench_roofline`` on a GPU writes
``benchmarks/results/<gpu>/roofline.json``; ``python -m benchmarks.plot roofline`` draws it.
"""

import math

import chainer_bspmm  # noqa: F401  first: lets Chainer import
import cupy
import numpy

from benchmarks import harness
from benchmarks.products import matrices
from benchmarks.products import measure
from chainer_bspmm import backend

# rows of a matrix, non-zeros a row, columns of the dense factor
SERIES = [(dim, 3, n_b) for n_b in (16, 64, 256) for dim in (20, 50, 128)] + [
    (50, nnz_per_row, n_b) for nnz_per_row in (1, 2) for n_b in (16, 64, 256)
]
MEGABYTES = (0.1, 0.3, 0.7, 3, 10, 30, 100, 300, 1000, 2000)
GRAPH_BYTES = 1e9  # a graph moves about as much, with 2 calls at least and measure.CALLS at most

ROUNDS = 12  # replays of every graph

RATIO_BAR, RATIO_FROM = 1.2, 10e6  # times the copy, where at least as many bytes move
TIME_BAR, TIME_BELOW = 2.2, 1e6  # microseconds with a warm L2, where fewer bytes move

BLOCKS, UNROLLS, WAVES = (256, 512), (1, 2, 4), ('whole', 'one wave')


class Round:
    """Call a function with 0, 1, ..., n - 1, and keep the results until they are replaced.

    Kept, they lie in n buffers; freed at once, they would take the same one again and again.
    """

    def __init__(self, function, n):
        self._function = function
        self._kept = [None] * n

    def __call__(self):
        for k in range(len(self._kept)):
            self._kept[k] = None  # freed first, so that call k always writes to buffer k
            self._kept[k] = self._function(k)


def copy_shapes(n_vectors):
    """Return {name: (unroll, grid, block)} of the copy kernels to try for n_vectors float4."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    shapes = {}
    for block in BLOCKS:
        resident = properties['multiProcessorCount'] * (
            properties['maxThreadsPerMultiProcessor'] // block
        )
        for unroll in UNROLLS:
            whole = -(-n_vectors // (block * unroll))
            for wave in WAVES if whole > resident else WAVES[:1]:
                shapes['%d threads, %d vectors, %s' % (block, unroll, wave)] = (
                    unroll,
                    whole if wave == 'whole' else resident,
                    block,
                )
    return shapes


def copies(buffers):
    """Return {name: function(k)}: ways to copy the k-th (source, target) of `buffers`."""
    n_vectors = buffers[0][0].nbytes // 16

    def memcpy(k):
        measure.copy(*buffers[k])

    def by_kernel(unroll, grid, block):
        kernel = cupy.RawKernel(measure.COPY, 'copy', ('-DUNROLL=%d' % unroll,))
        return lambda k: kernel((grid,), (block,), (*buffers[k], numpy.int32(n_vectors)))

    ways = {name: by_kernel(*shape) for name, shape in copy_shapes(n_vectors).items()}
    return {'memcpy': memcpy, **ways}


def check_copies(ways, buffers):
    for name, way in ways.items():
        for k in (0, len(buffers) - 1):
            source, target = buffers[k]
            target.fill(numpy.nan)
            way(k)
            assert cupy.array_equal(source, target), name


def product_error(adj, x, y):
    """Return the relative error of y = A x against float64, for equally long rows of A."""
    columns, values = adj.indices.reshape(adj.n_rows, -1), adj.data.reshape(adj.n_rows, -1)
    expected = cupy.zeros(y.shape, 'd')
    for k in range(columns.shape[1]):
        expected += values[:, k, None].astype('d') * x[columns[:, k]]
    return harness.relative_error(y, expected)


def measure_point(host, n_b, n_bytes, n_sets):
    """Return the times of bspmm and of the copies, over `n_sets` sets of buffers in turn."""
    adjacencies = [host.to_device(0) for _ in range(n_sets)]  # separate copies
    features = [cupy.random.uniform(-1, 1, (host.n_cols, n_b), 'f') for _ in range(n_sets)]
    half = -(-n_bytes // 32) * 4  # floats: source and target together move n_bytes
    buffers = [
        (cupy.random.uniform(-1, 1, half, 'f'), cupy.empty(half, 'f')) for _ in range(n_sets)
    ]

    def bspmm(k):
        return backend.bspmm(adjacencies[k], features[k])

    error = max(product_error(adjacencies[k], features[k], bspmm(k)) for k in {0, n_sets - 1})
    harness.gate({'bspmm': error}, 1e-5)
    ways = copies(buffers)
    check_copies(ways, buffers)

    n_calls = int(min(max(GRAPH_BYTES // n_bytes, 2), measure.CALLS))
    n_rounds = -(-n_calls // n_sets)
    device = measure.replay_times(
        {
            name: (*measure.capture(Round(function, n_sets), n_rounds), n_rounds * n_sets)
            for name, function in {'bspmm': bspmm, **ways}.items()
        },
        ROUNDS,
    )
    kernel = min(set(ways) - {'memcpy'}, key=lambda name: device[name]['median'])
    copy = min(device['memcpy']['median'], device[kernel]['median'])
    return {
        'calls_in_graph': n_rounds * n_sets,
        'relative_error': error,
        'device_us': {
            'bspmm': device['bspmm'],
            'memcpy': device['memcpy'],
            'copy kernel': device[kernel],
        },
        'copy_kernel': kernel,
        'copy_us': copy,
        'ratio': round(device['bspmm']['median'] / copy, 3),
        'terabytes_per_second': round(n_bytes / device['bspmm']['median'] / 1e6, 3),
    }


def bars(n_bytes, nnz_per_row, l2, point):
    """Return {bar: whether the point meets it} of the bars that are set for it."""
    met = {}
    if n_bytes >= RATIO_FROM and nnz_per_row <= 3:
        met['ratio <= %g' % RATIO_BAR] = point['ratio'] <= RATIO_BAR
    if n_bytes < TIME_BELOW and l2 == 'warm':
        met['us <= %g' % TIME_BAR] = point['device_us']['bspmm']['median'] <= TIME_BAR
    return met


def run_series(dim, nnz_per_row, n_b, cache_bytes):
    rng = numpy.random.RandomState(0)
    graph_bytes = dim * (2 * 4 * n_b + 4 + 8 * nnz_per_row)
    # Where one matrix moves more than the smallest size, it is the smallest.
    batches = sorted({math.ceil(size * 1e6 / graph_bytes) for size in MEGABYTES})
    for batch in batches:
        host = matrices.regular(rng, batch, dim, nnz_per_row)
        # What must be read and written: X, Y and the CSR arrays, each once.
        n_bytes = batch * graph_bytes + 4
        assert n_bytes == 8 * host.n_rows * n_b + (
            host.indptr.nbytes + host.indices.nbytes + host.data.nbytes
        )
        n_sets = 2 * cache_bytes // n_bytes + 1
        # Beyond twice the L2 one set evicts itself: there is only cold.
        for l2, sets in (('warm', 1), ('cold', n_sets)) if n_sets > 1 else (('cold', 1),):
            point = {
                'dim': dim,
                'nnz_per_row': nnz_per_row,
                'n_B': n_b,
                'batch': batch,
                'bytes': n_bytes,
                'l2': l2,
                'sets': sets,
            }
            point.update(measure_point(host, n_b, n_bytes, sets))
            point['bars_met'] = bars(n_bytes, nnz_per_row, l2, point)
            print(
                'dim %(dim)3d, nnz/row %(nnz_per_row)d, n_B %(n_B)3d, %(l2)s: '
                '%(bytes)10d bytes, copy %(copy_us)8.2f us, ratio %(ratio).3f, '
                '%(bars_met)s' % point
            )
            yield point


def main():
    args = harness.argument_parser(__doc__).parse_args()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    cache_bytes = properties['l2CacheSize']
    result = {
        'question': 'bspmm (float32) over the fastest device copy of the same bytes: X, Y and the '
        'CSR arrays each once',
        'method': 'device: median of %d interleaved replays of CUDA graphs of calls_in_graph calls '
        'each; copy: the faster of cudaMemcpyAsync and the best of up to %d float4 '
        'kernels; warm L2: every call uses the same buffers; cold L2: the calls of a '
        'graph use `sets` sets of buffers (matrix, X and Y; source and target) in turn, '
        'together more than twice the L2 of %d MB'
        % (ROUNDS, len(BLOCKS) * len(UNROLLS) * len(WAVES), cache_bytes // 10**6),
        'graphs': 'random columns, %d different graphs repeated' % matrices.DIFFERENT,
        'conditions': measure.conditions(args.commit),
        'points': [point for series in SERIES for point in run_series(*series, cache_bytes)],
    }
    met = [answer for point in result['points'] for answer in point['bars_met'].values()]
    print('%d of %d bars met' % (sum(met), len(met)))
    print('wrote', harness.save('roofline', result, args.out))


if __name__ == '__main__':
    main()
