"""How busy are the SMs at figure 6b, n_B = 512: ours, the papers' kernels, TensorFlow's?

``python -m benchmarks.products.profile_figure6b`` on a GPU, with Nsight Compute installed, writes
``benchmarks/results/<gpu>/figure6b_sm.json``.
"""

import sys

import chainer_bspmm
import cupy
import numpy

from benchmarks import harness
from benchmarks.peers import tensorflow_spmm
from benchmarks.products import figures
from benchmarks.products import measure
from benchmarks.products import ncu
from chainer_bspmm import backend
from chainer_bspmm import reference

N_B = 512
# The share of elapsed cycles in which an SM has a warp, the mean over all SMs: what nvprof, which
# the report used, calls sm_efficiency.
BUSY = 'sm__cycles_active.avg.pct_of_peak_sustained_elapsed'
# The share of the peak of the SM's busiest unit, nearer to what is called utilisation today.
THROUGHPUT = 'sm__throughput.avg.pct_of_peak_sustained_elapsed'
TIME = 'gpu__time_duration.sum'  # nanoseconds
REPORT = {'st': 89.07, 'swa': 87.87, 'tensorflow': 35.51}  # on a P100, section 5.1


def contenders():
    """Return the products (dict) and their float64 result."""
    figure = figures.FIGURES['6b']
    rng = numpy.random.RandomState(0)
    host = chainer_bspmm.BatchedCSR.from_matrices(figures.random_matrices(figure, rng))
    adj = host.to_device(0)
    coo = chainer_bspmm.BatchedCOO.from_csr(adj)
    x = cupy.asarray(rng.uniform(-1, 1, (adj.n_cols, N_B)).astype('f'))
    return {
        'auto': lambda: backend.bspmm(adj, x),
        'swa': lambda: backend.bspmm(adj, x, algorithm='swa'),
        'st': lambda: backend.bspmm(coo, x, algorithm='st'),
        'tensorflow': tensorflow_spmm.Loop(host, x),
    }, reference.bspmm(host, x)


def profiled(name):
    """Run one product between the profiler's marks: what ncu is given as a program."""
    products, expected = contenders()
    harness.gate({name: harness.relative_error(products[name](), expected)}, 1e-5)
    ncu.profiled(products[name])


def figures_of(kernels):
    """Return launches, and time and the shares weighted by it (dict) of one product's kernels."""
    total = sum(kernel[TIME] for kernel in kernels)
    return {
        'kernels': sorted({kernel['kernel'] for kernel in kernels}),
        'launches': len(kernels),
        'nanoseconds': total,
        **{
            metric: round(sum(kernel[metric] * kernel[TIME] for kernel in kernels) / total, 2)
            for metric in (BUSY, THROUGHPUT)
        },
    }


def main():
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--profiled', help='what this program calls itself with, below ncu')
    args = parser.parse_args()
    if args.profiled:
        profiled(args.profiled)
        return
    measured = {}
    for name in ('auto', 'swa', 'st', 'tensorflow'):
        measured[name] = figures_of(
            ncu.run(
                (BUSY, THROUGHPUT, TIME),
                [sys.executable, '-m', 'benchmarks.products.profile_figure6b', '--profiled', name],
            )
        )
        print(
            '%-10s busy %6.2f %% (report, P100: %s), throughput %6.2f %%, %d launches'
            % (
                name,
                measured[name][BUSY],
                REPORT.get(name, '-'),
                measured[name][THROUGHPUT],
                measured[name]['launches'],
            )
        )
    result = {
        'question': 'how busy the SMs are at figure 6b, n_B = %d' % N_B,
        'method': 'Nsight Compute, clocks as they are, its default emptying of caches before every '
        'kernel; one product; shares of elapsed cycles within kernels, the mean over the '
        'launches weighted by time. The gaps between the launches of tensorflow are not '
        'in it, nor is the zeroing of its result.',
        'metrics': {
            BUSY: 'an SM has a warp: sm_efficiency of nvprof',
            THROUGHPUT: "of the peak of the SM's busiest unit",
        },
        'conditions': measure.conditions(args.commit),
        'report_sm_efficiency_p100': REPORT,
        'measured': measured,
    }
    print('wrote', harness.save('figure6b_sm', result, args.out))


if __name__ == '__main__':
    main()
