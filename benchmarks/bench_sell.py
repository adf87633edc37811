"""When does SELL pay? Against our CSR and cuSPARSE, over slice sizes, sorted and not.

Run it on a GPU from the checkout: ``python -m benchmarks.bench_sell --tox21 tox21.csv.gz``. It
writes ``benchmarks/results/<gpu>/sell.json``; ``python -m benchmarks.plot_sell`` draws that.
"""

import argparse
import itertools
import pathlib

import chainer_bspmm
import cupy
import numpy

from benchmarks import cusparse
from benchmarks import matrices
from benchmarks import measure
from chainer_bspmm import backend
from chainer_bspmm import papers

QM9 = pathlib.Path(__file__).parent.parent / 'examples' / 'qm9' / 'data' / 'qm9_sample.csv.gz'
SLICE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BATCH = 128  # molecules of a training step
CALLS = 20  # in a graph; the fastest of these products takes microseconds
ROUNDS = 12  # replays of every graph
ERRORS = {'f': 1e-6, 'd': 1e-14}  # largest relative error; measured: about 1e-7 and 1e-16

PEER_SLICES = (8, 32, 128)  # slice sizes of cuSPARSE's SELL

WIDTHS = (1, 2, 4, 8)  # columns of the products
WIDE_SLICES = (8, 32, 128)

# The fastest of all that it has, and of what it had for the paper: no SELL.
PEERS = ('cusparse', 'cusparse csr')

PAPER = {
    'mean': 78,
    'worst': 38,
    'best': 102,
    'dtype': 'float64',
    'gpus': 'P100 and V100',
    'peer': 'the best of the routines of cuSPARSE 9.1',
    'matrices': 'ten of the Florida collection',
    'note': 'read from OCR',
}


def cases(tox21):
    """Yield (name, kind, BatchedCSR of float64 on the host)."""
    rng = numpy.random.RandomState(0)
    files = {'QM9': (QM9, 'smiles'), 'Tox21': (tox21, 'smiles')}
    for name, (path, column) in files.items():
        if path is None:
            print('SKIPPED: %s, whose file was not given' % name)
            continue
        molecules = matrices.molecules(matrices.smiles(path, column))
        # Spread evenly: QM9 is sorted by size.
        places = numpy.arange(BATCH) * len(molecules) // BATCH
        for batch in ([molecules[place] for place in places], molecules):
            yield (
                '%s, %d molecules' % (name, len(batch)),
                'molecules',
                chainer_bspmm.BatchedCSR.from_matrices(batch),
            )
    # More bytes in float64 than the L2 of an H200 holds, the power law's apart.
    yield 'banded', 'single', matrices.single(matrices.banded(rng, 2**19, 7))
    yield 'mesh, 3x3 blocks', 'single', matrices.single(matrices.blocks_of_mesh(rng, 32))
    yield 'power law', 'single', matrices.single(matrices.power_law(rng, 2**19, 8, 2048))


def slicings(adj, slice_sizes):
    """Return {(slice size, sorted): BatchedSELL on the GPU}.

    Of the sizes that no graph fills only the smallest: they all make the same slices.
    """
    larger = [size for size in slice_sizes if size >= adj.max_rows]
    sizes = [size for size in slice_sizes if size < adj.max_rows] + larger[:1]
    return {
        (size, sort_rows): chainer_bspmm.BatchedSELL(adj, size, sort_rows).to_device(0)
        for size in sizes
        for sort_rows in (False, True)
    }


def error(actual, expected):
    return float(numpy.linalg.norm(actual.get() - expected) / numpy.linalg.norm(expected))


def times_and_error(adj, x, calls):
    """Return the device times of calls that compute A x, and their largest relative error."""
    expected = adj.to_scipy().astype('d') @ x.get().astype('d')
    errors = {name: error(call(), expected) for name, call in calls.items()}
    for name in errors:  # nobody is timed on a wrong answer
        assert errors[name] < ERRORS[x.dtype.char], (name, errors[name])
    graphs = {name: (*measure.capture(call, CALLS), CALLS) for name, call in calls.items()}
    return measure.replay_times(graphs, ROUNDS), max(errors.values())


def name_of(slicing):
    return 'sell %d%s' % (slicing[0], ' sorted' if slicing[1] else '')


def peer_slicings(matrix):
    """Return {slice size: BatchedSELL on the host} of a SciPy matrix, as cuSPARSE wants its SELL.

    That has the rows of all graphs in one series of slices, the last of them as high as the others.
    """
    slicings = {}
    for size in PEER_SLICES:
        padded = matrix.copy()
        padded.resize((-(-matrix.shape[0] // size) * size, matrix.shape[1]))
        slicings[size] = chainer_bspmm.BatchedSELL(matrices.single(padded), size)
    return slicings


def peers(adj, slicings, x):
    """Return {name: function}: the products of cuSPARSE, each into an array of its own."""
    products = {
        'cusparse ' + algorithm: (
            cusparse.csr(adj.indptr, adj.indices, adj.data, adj.n_cols),
            algorithm,
        )
        for algorithm in ('csr alg1', 'csr alg2')
    }
    for size, sell in slicings.items():
        sell = sell.astype(adj.dtype).to_device(0)
        products['cusparse sell %d' % size] = (
            cusparse.sliced_ell(
                sell.slice_starts, sell.column, sell.data, adj.n_rows, adj.n_cols, adj.nnz, size
            ),
            'sell alg1',
        )
    calls = {}
    for name, (matrix, algorithm) in products.items():
        y = cupy.full(adj.n_rows, numpy.nan, x.dtype)
        product = cusparse.SpMV(matrix, x, y, algorithm)

        def call(product=product, y=y):
            product()
            return y

        calls[name] = call
    return calls


def vectors(adj, sells, peer_sells, rng):
    """Return the times of y = A x of every format, and the largest relative error."""
    x = cupy.asarray(rng.uniform(-1, 1, adj.n_cols).astype(adj.dtype))
    calls = {
        name_of(slicing): lambda sell=sell: papers.spmv(sell, x) for slicing, sell in sells.items()
    }
    calls['csr'] = lambda: papers.spmv(adj, x)
    calls.update(peers(adj, peer_sells, x))
    return times_and_error(adj, x, calls)


def products(adj, sells, n_b, rng):
    """Return the times of Y = A X with n_b columns, of our two formats."""
    x = cupy.asarray(rng.uniform(-1, 1, (adj.n_cols, n_b)).astype(adj.dtype))
    calls = {
        name_of(slicing): lambda sell=sell: backend.bspmm(sell, x)
        for slicing, sell in sells.items()
        if slicing[0] in WIDE_SLICES
    }
    calls['csr'] = lambda: backend.bspmm(adj, x)
    return times_and_error(adj, x, calls)


def run_case(name, kind, host):
    rng = numpy.random.RandomState(1)
    counts = numpy.diff(host.indptr)
    in_double = slicings(host, SLICE_SIZES)
    peer_sells = peer_slicings(host.to_scipy())
    for dtype in ('float64', 'float32'):
        adj = host.astype(dtype).to_device(0)
        sells = {slicing: sell.astype(dtype) for slicing, sell in in_double.items()}
        spmv_us, spmv_error = vectors(adj, sells, peer_sells, rng)
        bspmm = {n_b: products(adj, sells, n_b, rng) for n_b in WIDTHS}
        fastest = {
            who: min(
                (name for name in spmv_us if name.startswith(who)),
                key=lambda name: spmv_us[name]['median'],
            )
            for who in ('sell', 'csr', 'cusparse', 'cusparse csr')
        }
        best_us = {who: spmv_us[which]['median'] for who, which in fastest.items()}
        case = {
            'name': name,
            'kind': kind,
            'dtype': dtype,
            'graphs': host.n_graphs,
            'rows': host.n_rows,
            'nnz': host.nnz,
            'longest_row': int(counts.max()),
            'csr_bytes': adj.indptr.nbytes + adj.indices.nbytes + adj.data.nbytes,
            'slicings': [
                {
                    'name': name_of((size, sort_rows)),
                    'slice_size': size,
                    'sorted': sort_rows,
                    'padding_ratio': round(sell.padding_ratio, 4),
                }
                for (size, sort_rows), sell in sells.items()
            ],
            'relative_error': max([spmv_error] + [error for _, error in bspmm.values()]),
            'spmv_device_us': spmv_us,
            'bspmm_device_us': {n_b: times for n_b, (times, _) in bspmm.items()},
            'fastest': fastest,
            'gflops': {who: round(2 * host.nnz / us / 1e3, 2) for who, us in best_us.items()},
            **{
                'percent_of_' + peer.replace(' ', '_'): {
                    who: round(100 * best_us[peer] / best_us[who], 1) for who in ('sell', 'csr')
                }
                for peer in PEERS
            },
        }
        print('%-24s %s: gflops %s, fastest %s' % (name, dtype, case['gflops'], fastest))
        yield case


def summary(results):
    """Return how our best SELL and our CSR stand to the best of cuSPARSE, as the paper sums up."""
    summed = {'paper': PAPER}
    for kind, dtype, who, peer in itertools.product(
        ('single', 'molecules'), ('float64', 'float32'), ('sell', 'csr'), PEERS
    ):
        percent = [
            case['percent_of_' + peer.replace(' ', '_')][who]
            for case in results
            if (case['kind'], case['dtype']) == (kind, dtype)
        ]
        summed['our %s over %s, %s, %s' % (who, peer, kind, dtype)] = {
            'mean': round(float(numpy.mean(percent)), 1),
            'worst': min(percent),
            'best': max(percent),
        }
    return summed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--tox21',
        help='CSV file of Tox21 with a column `smiles`; without it that data set is skipped',
    )
    parser.add_argument('--commit', help='commit to note down where git is not at hand')
    parser.add_argument('--out', help='folder for the result in place of results/<gpu>')
    args = parser.parse_args()
    results = [result for case in cases(args.tox21) for result in run_case(*case)]
    result = {
        'question': 'SELL over slice sizes, sorted and not, against our CSR and cuSPARSE: y = A x, '
        'and Y = A X with few columns',
        'method': 'device: median of %d interleaved replays of CUDA graphs of %d calls each, warm '
        'L2; percent: the fastest time of cuSPARSE over our fastest; gflops: 2 nnz / time'
        % (ROUNDS, CALLS),
        'conditions': {**measure.conditions(args.commit), 'cusparse': cusparse.version()},
        'cases': results,
        'summary_percent': summary(results),
    }
    for name, percent in result['summary_percent'].items():
        print(
            '%-50s mean %s %%, %s to %s'
            % (name, percent['mean'], percent['worst'], percent['best'])
        )
    print('wrote', measure.save('sell', result, args.out))


if __name__ == '__main__':
    main()
