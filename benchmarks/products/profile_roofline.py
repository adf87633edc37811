"""Why is bspmm slower than a copy of the same bytes, where both lie in the L2 cache?

Reads the hardware counters of both at sizes of ``bench_roofline`` that miss its bar.
``python -m benchmarks.products.profile_roofline`` on a GPU, with Nsight Compute, writes
``benchmarks/results/<gpu>/roofline_counters.json``.
"""

import sys

import chainer_bspmm  # noqa: F401  first: lets Chainer import
import cupy
import numpy

from benchmarks import harness
from benchmarks.products import matrices
from benchmarks.products import measure
from benchmarks.products import ncu
from chainer_bspmm import backend

# rows of a matrix, non-zeros a row, columns of the dense factor, bytes moved
POINTS = [(50, 3, 16, 30e6), (50, 3, 64, 10e6), (50, 3, 256, 10e6), (50, 3, 256, 30e6)]

METRICS = {
    'gpu__time_duration.sum': 'nanoseconds',
    'launch__registers_per_thread': 'registers a thread',
    'sm__warps_active.avg.pct_of_peak_sustained_active': 'occupancy, % of the most warps',
    'smsp__issue_active.avg.pct_of_peak_sustained_active': '% of cycles that issue',
    'smsp__inst_executed.sum': 'instructions of warps',
    'l1tex__t_sector_hit_rate.pct': '% of sectors found in L1',
    'l1tex__throughput.avg.pct_of_peak_sustained_elapsed': 'L1, % of its peak',
    'lts__t_sectors_op_read.sum': 'sectors of 32 bytes read from L2',
    'lts__t_sectors_op_write.sum': 'sectors written to L2',
    'lts__throughput.avg.pct_of_peak_sustained_elapsed': 'L2, % of its peak',
    'dram__bytes.sum': 'bytes of device memory',
    'smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio': (
        'warps that wait for L1, L2 or memory, for each that issues'
    ),
    'smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio': (
        'warps that wait for a place in the queue of loads, for each that issues'
    ),
}


def contenders(dim, nnz_per_row, n_b, n_bytes):
    rng = numpy.random.RandomState(0)
    # What bench_roofline measures: X and Y, and the CSR arrays.
    batch = round(n_bytes / (dim * (8 * n_b + 4 + 8 * nnz_per_row)))
    adj = matrices.regular(rng, batch, dim, nnz_per_row).to_device(0)
    x = cupy.random.uniform(-1, 1, (adj.n_cols, n_b), 'f')
    n_vectors = int(n_bytes) // 32
    source, target = (cupy.ones(4 * n_vectors, 'f') for _ in range(2))
    copy = cupy.RawKernel(measure.COPY, 'copy', ('-DUNROLL=2',))
    return {
        'bspmm': lambda: backend.bspmm(adj, x),
        'copy': lambda: copy(
            (-(-n_vectors // 512),), (256,), (source, target, numpy.int32(n_vectors))
        ),
    }


def profiled(name, point):
    """Run one contender between the profiler's marks, with a warm L2."""
    call = contenders(*POINTS[point])[name]
    for _ in range(5):
        call()
    ncu.profiled(call)


def main():
    parser = harness.argument_parser(__doc__)
    parser.add_argument(
        '--profiled',
        nargs=2,
        metavar=('NAME', 'POINT'),
        help='what this program calls itself with, below ncu',
    )
    args = parser.parse_args()
    if args.profiled:
        profiled(args.profiled[0], int(args.profiled[1]))
        return
    points = []
    for i, (dim, nnz_per_row, n_b, n_bytes) in enumerate(POINTS):
        point = {'dim': dim, 'nnz_per_row': nnz_per_row, 'n_B': n_b, 'bytes': n_bytes}
        for name in ('bspmm', 'copy'):
            (kernel,) = ncu.run(
                list(METRICS),
                [
                    sys.executable,
                    '-m',
                    'benchmarks.products.profile_roofline',
                    '--profiled',
                    name,
                    str(i),
                ],
                warm=True,
            )
            point[name] = {METRICS.get(metric, metric): value for metric, value in kernel.items()}
            print(point['n_B'], n_bytes / 1e6, name, point[name])
        points.append(point)
    result = {
        'question': 'hardware counters of bspmm and of a copy of as many bytes, warm L2',
        'method': 'Nsight Compute, clocks and caches as they are; one launch of each after five',
        'conditions': measure.conditions(args.commit),
        'points': points,
    }
    print('wrote', harness.save('roofline_counters', result, args.out))


if __name__ == '__main__':
    main()
