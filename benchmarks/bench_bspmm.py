"""How fast is bspmm against a device copy of the same bytes, cuBLAS and F.sparse_matmul?

Run it on a GPU from the checkout: ``python -m benchmarks.bench_bspmm``. It writes
``benchmarks/results/<gpu>/bspmm.json``; ``python -m benchmarks.plot_bspmm`` draws that.
"""
import argparse

import chainer_bspmm
import chainer
import cupy
import numpy

from benchmarks import cublas
from benchmarks import figures
from benchmarks import measure
from chainer_bspmm import backend
from chainer_bspmm import reference

# batch, rows of a matrix, non-zeros a row, columns of the dense factor
CASES = [(100, 50, 3, 64), (100, 50, 3, 512), (4096, 20, 3, 64)]


def run_case(batch, dim, nnz_per_row, n_b):
    rng = numpy.random.RandomState(0)
    matrices = figures.random_matrices(
        figures.Figure(batch, (dim, dim), (nnz_per_row, nnz_per_row), [n_b]), rng)
    dense = cupy.asarray(numpy.stack(matrices))
    adj = chainer_bspmm.BatchedCSR.from_matrices(matrices).to_device(0)
    x = cupy.asarray(rng.uniform(-1, 1, (batch * dim, n_b)).astype('f'))
    stacked = x.reshape(batch, dim, n_b)
    coo = chainer.utils.to_coo(dense)
    gemm = {tf32: cublas.BatchedGemm(dense, stacked, tf32) for tf32 in (False, True)}
    # What must be read and written: X, Y and the CSR arrays, each once.
    n_bytes = 2 * x.nbytes + adj.indptr.nbytes + adj.indices.nbytes + adj.data.nbytes

    def ours():
        return backend.bspmm(adj, x)

    def sparse_matmul():
        return chainer.functions.sparse_matmul(coo, stacked).array

    # Nobody is timed on a wrong answer.
    expected = reference.bspmm(adj, x)
    for tf32 in gemm:
        gemm[tf32]()
    errors = {
        'bspmm': _error(ours(), expected), 'cublas fp32': _error(gemm[False].c, expected),
        'cublas tf32': _error(gemm[True].c, expected),
        'F.sparse_matmul': _error(sparse_matmul(), expected)}
    for name, error in errors.items():
        limit = 1e-3 if name == 'cublas tf32' else 1e-5
        assert error < limit, (name, error)

    def matmul():
        return cupy.matmul(dense, stacked)

    with chainer.no_backprop_mode():
        device = measure.device_times({
            'bspmm': ours, 'copy': measure.copy_of(n_bytes), 'cublas fp32': gemm[False],
            'cublas tf32': gemm[True], 'F.sparse_matmul': sparse_matmul})
        host_us = measure.host_times({
            'backend.bspmm': ours,
            'functions.bspmm': lambda: chainer_bspmm.functions.bspmm(adj, x),
            'functions.identity (an empty FunctionNode)': lambda: chainer.functions.identity(x),
            'cupy.matmul': matmul, 'F.matmul': lambda: chainer.functions.matmul(dense, stacked),
            'F.sparse_matmul': sparse_matmul})
    ours_us = device['bspmm']['median']
    return {
        'batch': batch, 'dim': dim, 'nnz_per_row': nnz_per_row, 'n_B': n_b, 'bytes': n_bytes,
        'relative_error': errors, 'device_us': device, 'host_us': host_us,
        'gflops': round(2 * adj.nnz * n_b / ours_us / 1e3, 1),
        'device_time_over_bspmm': {
            name: round(times['median'] / ours_us, 3) for name, times in device.items()},
    }


def _error(actual, expected):
    actual = actual.get().reshape(expected.shape).astype('d')
    return float(numpy.linalg.norm(actual - expected) / numpy.linalg.norm(expected))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--commit', help='commit to note down where git is not at hand')
    parser.add_argument('--out', help='folder for the result in place of results/<gpu>')
    args = parser.parse_args()
    result = {
        'question': 'bspmm (float32) against a device copy of the same bytes and its peers',
        'method': 'device: median of %d interleaved replays of CUDA graphs of %d calls each, warm '
                  'L2; host: median of %d rounds of 100 calls, never waiting for the device, '
                  'without backprop' % (measure.ROUNDS, measure.CALLS, measure.ROUNDS),
        'conditions': measure.conditions(args.commit),
        'cases': [run_case(*case) for case in CASES],
    }
    for case in result['cases']:
        print('batch %(batch)d, dim %(dim)d, nnz/row %(nnz_per_row)d, n_B %(n_B)d' % case)
        for kind in ('device_us', 'host_us'):
            for name, times in case[kind].items():
                print('  %-9s %-44s %9.2f us  (%.2f to %.2f)' % (
                    kind[:-3], name, times['median'], times['low'], times['high']))
    print('wrote', measure.save('bspmm', result, args.out))


if __name__ == '__main__':
    main()
