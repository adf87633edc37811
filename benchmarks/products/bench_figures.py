"""How fast is bspmm at every point of the report's figures 6 to 8, against all of its peers?

``python -m benchmarks.products.bench_figures`` on a GPU writes
``benchmarks/results/<gpu>/figures.json``; ``python -m benchmarks.plot figures`` draws it.
"""

import time

import cupy
import numpy
import scipy.sparse

import chainer_bspmm
import chainer

from benchmarks import harness
from benchmarks.peers import cublas, cusparse, tensorflow_spmm
from benchmarks.peers.tables import Tables
from benchmarks.products import figures, measure
from benchmarks.products.figures import LOOP, TABLES
from chainer_bspmm import papers
from chainer_bspmm.ops.bspmm import bspmm_forward
from tests.support import reference


try:
    from benchmarks.peers import torch_peers
except ImportError as error:
    torch_peers = None
    no_torch = str(error)

DEVICE_WARM, DEVICE_COLD, WALL = KINDS = 'device, warm L2', 'device, cold L2', 'wall'
WARM_ROUNDS = measure.ROUNDS
COLD_ROUNDS = 20
WALL_ROUNDS = 20
COLD_CALLS = 10
MANY_BYTES, FEW_CALLS = 10000000, 20  # a product of more bytes has only so few calls in a graph
BSR_SIZES = 8, 16  # rows and columns of a block; the fastest of sizes 2 to 32 on an H200
ALL = ','.join(figures.FIGURES)
TORCH = ('torch.sparse.mm', 'PyTorch Geometric')
OURS = ('auto', 'swa', 'st')
TOLERANCE = 1e-5  # relative error norm, float32
TF32_TOLERANCE = 1e-3  # the same in TF32, where inputs are rounded to 10 bits


class Batch:
    """Matrices of a figure, in the formats of all contenders, and the widest dense factor."""

    def __init__(self, figure):
        rng = numpy.random.RandomState(0)
        matrices = figures.random_matrices(figure, rng)
        self.host = chainer_bspmm.BatchedCSR.from_matrices(matrices)
        self.adj = self.host.to_device(0)
        self.coo = chainer_bspmm.BatchedCOO.from_csr(self.adj)
        x = rng.uniform(-1, 1, (self.host.n_cols, max(figure.n_b))).astype('f')
        self._x = cupy.asarray(x)
        self._expected = cupy.asarray(reference.bspmm(self.host, x))
        self.dense = self.adj.to_dense()
        self.chainer_coo = chainer.utils.to_coo(self.dense)
        self.equal_sizes = len({len(matrix) for matrix in matrices}) == 1
        # For every row of the packed batch, its row in the padded batch as (batch * N, n_B).
        self._places = cupy.asarray(
            numpy.concatenate(
                [
                    graph * self.host.max_rows + numpy.arange(len(matrix))
                    for graph, matrix in enumerate(matrices)
                ]
            )
        )
        self.csr_parts = self._csr_parts()
        self.bsr = {size: self._bsr(size) for size in BSR_SIZES}

    def _csr_parts(self):
        """Return (first row, end, CSR arrays) for every single matrix."""
        adj = self.host
        parts = []
        for first, last in zip(adj.row_offsets[:-1].tolist(), adj.row_offsets[1:].tolist()):
            indptr = adj.indptr[first : last + 1]
            entries = slice(indptr[0], indptr[-1])
            parts.append(
                (
                    first,
                    last,
                    *map(
                        cupy.asarray,
                        (indptr - indptr[0], adj.indices[entries] - first, adj.data[entries]),
                    ),
                )
            )
        return parts

    def _bsr(self, size):
        """Return indptr, indices and data of the block-diagonal matrix in BSR, in whole blocks."""
        adj = self.host
        n_rows = -(-adj.n_rows // size) * size
        indptr = numpy.pad(adj.indptr, (0, n_rows - adj.n_rows), 'edge')
        matrix = scipy.sparse.csr_matrix((adj.data, adj.indices, indptr), (n_rows, n_rows)).tobsr(
            (size, size)
        )
        return [
            cupy.asarray(numpy.ascontiguousarray(array))
            for array in (matrix.indptr.astype('i'), matrix.indices.astype('i'), matrix.data)
        ]

    def x(self, n_b):
        return cupy.ascontiguousarray(self._x[:, :n_b])

    def padded(self, x):
        """Return x as (batch, N, n_B); if all sizes are equal, without a copy."""
        shape = self.host.n_graphs, self.host.max_rows, x.shape[1]
        if self.equal_sizes:
            return x.reshape(shape)
        padded = cupy.zeros(shape, 'f')
        padded.reshape(-1, x.shape[1])[self._places] = x
        return padded

    def error(self, y, n_b):
        """Return the relative error norm of a result: packed, padded, or with extra rows."""
        if y.ndim == 3:
            y = y.reshape(-1, n_b)[self._places]
        expected = self._expected[:, :n_b]
        return harness.relative_error(y[: len(expected)], expected)

    def n_bytes(self, n_b):
        """Return the bytes that a product must read and write: X, Y, CSR arrays, each once."""
        adj = self.adj
        return 2 * 4 * adj.n_rows * n_b + adj.indptr.nbytes + adj.indices.nbytes + adj.data.nbytes


def makers(batch, n_b):
    """Return, for every contender, a function that makes the function to be timed.

    The function to be timed launches on the current stream and returns the result, on the device.
    """
    adj = batch.adj
    coo = batch.coo
    x = batch.x(n_b)
    n_graphs = batch.adj.n_graphs
    stacked = batch.padded(x)

    def packed(algorithm, matrix, n_pointers=0, n_sizes=0):
        def product():
            multiply = bspmm_forward if algorithm == 'auto' else papers.products.bspmm_forward
            return multiply(matrix, x, algorithm=algorithm)

        # Our kernels read offsets on the device, whereas the paper's read tables like these. Their
        # contents do not matter for the time of moving them.
        tables = Tables(
            [numpy.zeros(n_graphs, 'u8')] * n_pointers + [numpy.zeros(n_graphs, 'i4')] * n_sizes
        )

        def with_tables():
            tables.move()
            return product()

        return lambda: with_tables if n_pointers else product

    def cusparse_loop(algorithm):
        y = cupy.full(x.shape, numpy.nan, 'f')
        products = [
            cusparse.SpMM(
                cusparse.csr(indptr, indices, data, last - first),
                x[first:last],
                y[first:last],
                algorithm,
            )
            for first, last, indptr, indices, data in batch.csr_parts
        ]

        def loop():
            for product in products:
                product()
            return y

        return loop

    def cusparse_csr(algorithm):
        y = cupy.full(x.shape, numpy.nan, 'f')
        return cusparse.SpMM(
            cusparse.csr(adj.indptr, adj.indices, adj.data, adj.n_cols), x, y, algorithm
        )

    def cusparse_bsr(size):
        indptr, indices, data = batch.bsr[size]
        y = cupy.full(((indptr.size - 1) * size, n_b), numpy.nan, 'f')
        longer = cupy.zeros_like(y)
        longer[: len(x)] = x
        return cusparse.SpMM(
            cusparse.bsr(indptr, indices, data, indptr.size - 1), longer, y, 'bsr alg1'
        )

    def sparse_matmul():
        return lambda: chainer.functions.sparse_matmul(batch.chainer_coo, stacked).array

    result = {
        'auto': packed('auto', adj),
        'swa': packed('swa', adj),
        'swa' + TABLES: packed('swa', adj, 5, 1),  # rpt, colids, values, B, C; rows
        'st': packed('st', coo),
        'st' + TABLES: packed('st', coo, 4, 2),  # ids, values, B, C; rows, non-zeros
        'TensorFlow' + LOOP: lambda: tensorflow_spmm.Loop(batch.host, x),
    }
    for algorithm in ('csr alg1', 'csr alg2', 'csr alg3'):
        result['cuSPARSE ' + algorithm + LOOP] = lambda name=algorithm: cusparse_loop(name)
        result['cuSPARSE ' + algorithm] = lambda name=algorithm: cusparse_csr(name)
    for size in BSR_SIZES:
        result['cuSPARSE bsr alg1, blocks of %d' % size] = lambda size=size: cusparse_bsr(size)
    padded = '' if batch.equal_sizes else ', padded'
    result['cuBLAS fp32' + padded] = lambda: cublas.BatchedGemm(batch.dense, stacked)
    result['cuBLAS tf32' + padded] = lambda: cublas.BatchedGemm(batch.dense, stacked, tf32=True)
    if batch.equal_sizes:
        result['cuBLAS fp32 by pointers'] = lambda: cublas.PointerGemm(
            batch.dense, stacked, move_tables=False
        )
        result['cuBLAS fp32 by pointers' + TABLES] = lambda: cublas.PointerGemm(
            batch.dense, stacked, move_tables=True
        )
    result['F.sparse_matmul'] = sparse_matmul
    if torch_peers:
        result['torch.sparse.mm'] = lambda: torch_peers.sparse_mm(adj, x)
        result['PyTorch Geometric'] = lambda: torch_peers.geometric(adj, x)
    return result


def gated(batch, n_b):
    """Make every contender and check its result; raise AssertionError if one of ours is wrong.

    Returns name -> function; name -> relative error; name -> reason why a peer is left out.
    """
    calls, errors, not_run = {}, {}, {}
    if not batch.equal_sizes:
        not_run['cuBLAS'] = 'a batched GEMM wants matrices of one size; padded to it instead'
    if torch_peers is None:
        not_run.update(dict.fromkeys(TORCH, no_torch))
    for name, make in makers(batch, n_b).items():
        try:
            # Memory that a call allocates is NaN at first, so that no other call's result is left.
            with cupy.cuda.using_allocator(_poisoned):
                call = make()
                y = call()
            error = batch.error(y if isinstance(y, cupy.ndarray) else cupy.from_dlpack(y), n_b)
        except (RuntimeError, NotImplementedError) as failure:
            if name in OURS:
                raise
            not_run[name] = str(failure).splitlines()[0]
            continue
        limit = TF32_TOLERANCE if 'tf32' in name else TOLERANCE
        assert error < limit or name not in OURS, (name, n_b, error)
        if error < limit:
            calls[name], errors[name] = call, error
        else:
            not_run[name] = 'wrong: relative error %g' % error
    return calls, errors, not_run


def _poisoned(n_bytes):
    memory = cupy.get_default_memory_pool().malloc(n_bytes)
    memory.memset_async(255, n_bytes)  # a float32 of which all bits are 1 is NaN
    return memory


def capture(name, call, n_calls, flush=None):
    """Return a graph as :func:`measure.replay_times` takes it, with a flush before each call."""

    def flushed():
        flush()
        call()

    make = torch_peers.capture if name in TORCH else measure.capture
    return (*make(flushed if flush else call, n_calls), n_calls)


def run_point(name, batch, n_b, flush, flushes):
    calls, errors, not_run = gated(batch, n_b)
    n_bytes = batch.n_bytes(n_b)
    calls[figures.COPY] = measure.copy_of(n_bytes)
    many = FEW_CALLS if n_bytes > MANY_BYTES else measure.CALLS
    warm = {key: capture(key, call, 1 if LOOP in key else many) for key, call in calls.items()}
    times = {DEVICE_WARM: measure.replay_times(warm, WARM_ROUNDS)}
    times[DEVICE_COLD] = measure.cold_times(
        {
            key: capture(key, call, 1 if LOOP in key else COLD_CALLS, flush)
            for key, call in calls.items()
        },
        flushes,
        COLD_ROUNDS,
    )
    # For a loop a replay of its graph is timed, because Python between its launches would hide all
    # else.
    times[WALL] = measure.wall_times(
        {
            key: (lambda graph=warm[key]: graph[0].launch(graph[1])) if LOOP in key else call
            for key, call in calls.items()
        },
        WALL_ROUNDS,
    )
    return {
        'figure': name,
        'n_B': n_b,
        'nnz': batch.adj.nnz,
        'bytes': n_bytes,
        'relative_error': {key: float('%.2g' % error) for key, error in errors.items()},
        'microseconds': times,
        'gflops': {
            kind: {
                key: figures.gflops(batch.adj.nnz, n_b, time['median'])
                for key, time in times[kind].items()
                if key != figures.COPY and time['median'] > 0
            }
            for kind in KINDS
        },
        'time_over_auto': {kind: figures.ratios(times[kind]) for kind in KINDS},
        'not_run': not_run,
        'not_captured': [
            key
            for key in TORCH
            if isinstance(warm.get(key, [None])[0], getattr(torch_peers, 'Eager', ()))
        ],
    }


def summary(points):
    """Return means, losses and headline ratios of all points, for every kind of time."""
    return {
        kind: {
            'geometric_mean_time_over_auto': figures.geometric_means(points, kind),
            'auto_is_slower': figures.losses(points, kind),
            'headlines': figures.headlines(points, kind),
        }
        for kind in KINDS
    }


def print_table(points, summaries):
    for point in points:
        warm = point['microseconds'][DEVICE_WARM]
        ratios = {
            name: ratio
            for name, ratio in point['time_over_auto'][DEVICE_WARM].items()
            if name != figures.COPY
        }
        best = min(ratios, key=ratios.get)
        print(
            'figure %-2s n_B %4d  auto %7.2f us %8.1f GFLOP/s, %5.2f x copy;  next %5.2f x: %s'
            % (
                point['figure'],
                point['n_B'],
                warm['auto']['median'],
                point['gflops'][DEVICE_WARM]['auto'],
                warm['auto']['median'] / warm[figures.COPY]['median'],
                ratios[best],
                best,
            )
        )
    for kind, what in summaries.items():
        print('%s: time over auto, geometric mean' % kind)
        for name, mean in what['geometric_mean_time_over_auto'].items():
            print('  %-42s %8.2f' % (name, mean))
        lost = what['auto_is_slower']
        print(
            '  auto is slower at %d points of a contender, %d of them within the allowance'
            % (len(lost), sum(loss['allowed'] for loss in lost))
        )
        for loss in lost[:10]:
            print('    figure %(figure)s, n_B %(n_B)d, %(contender)s: %(time_over_auto)s' % loss)
        for row in what['headlines']:
            print('  ' + ', '.join('%s %s' % item for item in row.items()))


def main():
    parser = harness.argument_parser(__doc__)
    parser.add_argument(
        '--figures',
        default=ALL,
        help='which, separated by commas; default all. A part is stored in a separate file',
    )
    args = parser.parse_args()
    names = args.figures.split(',')
    if not set(names) <= set(figures.FIGURES):
        parser.error('--figures: expected some of %s, got %s' % (ALL, args.figures))
    conditions = measure.conditions(args.commit)
    conditions['cusparse'] = cusparse.version()
    if torch_peers:
        conditions.update(torch_peers.versions())
    head = {
        'question': 'bspmm (float32) at the points of figures 6 to 8 of Nagasaka et al. 2019, '
        'against its peers',
        'method': {
            DEVICE_WARM: 'median, 10th and 90th percentile of %d interleaved replays of CUDA '
            'graphs; only the second of two replays in a row is timed. A graph has %d calls, or '
            '%d where the arrays take at least %d bytes, or 1 where a call multiplies matrix by '
            'matrix' % (WARM_ROUNDS, measure.CALLS, FEW_CALLS, MANY_BYTES),
            DEVICE_COLD: 'the same with %d replays of graphs of %d calls, or 1. Before each replay '
            'other memory, of twice the size of the L2, is read; the time for that is measured in '
            'the same round and subtracted' % (COLD_ROUNDS, COLD_CALLS),
            WALL: 'from the start of one call in Python until the device is done, %d interleaved '
            'turns of 5 calls after an unmeasured one; matrix by matrix: the replay of a '
            'CUDA graph. auto, swa and st allocate the result, as '
            'do Chainer and PyTorch; cuBLAS and cuSPARSE are called bare, into an existing '
            'array' % WALL_ROUNDS,
            'gflops': '2 nnz n_B / time, for dense methods too',
            TABLES[2:]: 'every call first copies the tables that the method as published wants: '
            'one pointer or size a matrix in each, one asynchronous copy a table from '
            'page-locked memory',
            'cuSPARSE': 'one block-diagonal matrix unless matrix by matrix; descriptors, buffers '
            'and analysis are made once',
        },
        'conditions': conditions,
    }
    file_name = 'figures' if args.figures == ALL else 'figures_' + '_'.join(names)
    result = harness.resumed(file_name, head, args.out)
    points = result.setdefault('points', [])
    done = {(point['figure'], point['n_B']) for point in points}
    flush = measure.Flush()
    flushes = (*measure.capture(flush, COLD_CALLS), COLD_CALLS)
    start = time.time()
    with chainer.no_backprop_mode():
        for name in names:
            missing = [n_b for n_b in figures.FIGURES[name].n_b if (name, n_b) not in done]
            batch = Batch(figures.FIGURES[name]) if missing else None
            for n_b in missing:
                points.append(run_point(name, batch, n_b, flush, flushes))
                harness.save(file_name, result, args.out)
                print(
                    '%4.0f s  figure %s, n_B %d: %d contenders; not run: %s'
                    % (
                        time.time() - start,
                        name,
                        n_b,
                        len(points[-1]['relative_error']),
                        points[-1]['not_run'],
                    ),
                    flush=True,
                )
    result['summary'] = summary(points)
    print_table(points, result['summary'])
    print('%.0f s; wrote %s' % (time.time() - start, harness.save(file_name, result, args.out)))


if __name__ == '__main__':
    main()
