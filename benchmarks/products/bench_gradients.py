"""How fast are bsddmm, the transpose and the segmented reductions against a copy of the same bytes?

And against the alternatives: the sort that a transpose without a kernel needs, and torch's and
PyG's scatter where they are installed. ``python -m benchmarks.products.bench_gradients`` on a GPU
writes ``benchmarks/results/<gpu>/gradients.json``.
"""

import chainer_bspmm
import cupy
import numpy

from benchmarks import harness
from benchmarks.products import measure
from chainer_bspmm import backend
from chainer_bspmm import reference
from chainer_bspmm.sparse import build

try:
    import torch
except ImportError:
    torch = None
try:
    import torch_geometric.utils as pyg
except ImportError:
    pyg = None

# name -> sizes of the graphs; columns of the feature matrix
CASES = {
    'Tox21-like: 128 graphs of 18 nodes on average': ('poisson', 128, 18, 64),
    '4096 graphs of 20 nodes': ('equal', 4096, 20, 64),
    '100 graphs of 50 nodes': ('equal', 100, 50, 512),
    'one graph of a million nodes': ('equal', 1, 10**6, 64),
    'one graph of 100000 nodes and 4096 of 20': ('huge', 4096, 20, 64),
}
NNZ_PER_ROW = 3
SLOW_US = 2000  # what is slower is not captured: hundreds of calls of it would take minutes


def sizes_of(kind, n_graphs, n_nodes):
    if kind == 'poisson':
        return numpy.maximum(numpy.random.RandomState(0).poisson(n_nodes, n_graphs), 1)
    sizes = numpy.full(n_graphs, n_nodes)
    return sizes if kind == 'equal' else numpy.append(sizes, 10**5)


def random_batch(sizes):
    """Return a BatchedCSR with NNZ_PER_ROW float32 values in every row, at random columns."""
    rng = numpy.random.RandomState(1)
    starts = numpy.cumsum(numpy.append(0, sizes))
    rows = numpy.repeat(sizes, sizes)[:, None]
    columns = rng.randint(0, rows, (len(rows), NNZ_PER_ROW))
    indices = numpy.sort(columns + numpy.repeat(starts[:-1], sizes)[:, None], axis=1).ravel()
    return chainer_bspmm.BatchedCSR(
        numpy.arange(len(rows) + 1) * NNZ_PER_ROW,
        indices,
        starts,
        rng.uniform(0.5, 1.5, indices.size).astype('f'),
    ).to_device(0)


def reductions(adj, x, rng):
    """Return name of the question -> (bytes to move, contenders, the first's float64 truth)."""
    offsets, n_graphs = adj.row_offsets, adj.n_graphs
    y = cupy.asarray(rng.uniform(-1, 1, (n_graphs, x.shape[1])).astype('f'))
    n_bytes = x.nbytes + y.nbytes + offsets.nbytes
    total = {
        'ours': lambda: backend.segment_sum(x, offsets, adj.max_rows),
        'ours, offsets only': lambda: backend.segment_sum(x, offsets),
    }
    largest = {'ours': lambda: backend.segment_max(x, offsets, adj.max_rows)}
    spread = {'ours': lambda: backend.segment_broadcast(y, offsets, adj.n_rows, adj.max_rows)}
    if torch is not None:
        x_torch, y_torch = torch.from_dlpack(x), torch.from_dlpack(y)
        of_row = torch.repeat_interleave(
            torch.arange(n_graphs, device='cuda'), torch.from_dlpack(cupy.diff(offsets))
        )
        total['torch index_add'] = on_stream(
            lambda: x_torch.new_zeros((n_graphs, x.shape[1])).index_add_(0, of_row, x_torch)
        )
        total['torch segment_reduce'] = on_stream(
            lambda: torch.segment_reduce(x_torch, 'sum', offsets=torch.from_dlpack(offsets).long())
        )
        spread['torch index_select'] = on_stream(lambda: y_torch[of_row])
        if pyg is not None:
            for name, calls in (('sum', total), ('max', largest)):
                calls['PyG scatter'] = on_stream(
                    lambda name=name: pyg.scatter(x_torch, of_row, 0, n_graphs, name)
                )
    return {
        'segment_sum': (n_bytes, total, lambda: reference.segment_sum(x, offsets)),
        'segment_max': (n_bytes, largest, lambda: reference.segment_max(x, offsets)),
        'segment_broadcast': (n_bytes, spread, lambda: reference.segment_broadcast(y, offsets)),
    }


def on_stream(call):
    """Make torch launch on CuPy's current stream."""

    def launch():
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            return call()

    return launch


def sampled(adj, u, v):
    calls = {'BatchedCSR': lambda: backend.bsddmm(adj, u, v)}
    coo = chainer_bspmm.BatchedCOO.from_csr(adj)
    calls['BatchedCOO'] = lambda: backend.bsddmm(coo, u, v)
    rows, columns = adj.entry_rows(), adj.indices
    calls['cupy gather, multiply, sum'] = lambda: (u[rows] * v[columns]).sum(axis=1)
    n_bytes = u.nbytes + v.nbytes + adj.indptr.nbytes + 2 * adj.indices.nbytes

    def expected():
        return numpy.einsum(
            'kc,kc->k', u.get().astype('d')[rows.get()], v.get().astype('d')[columns.get()]
        )

    return n_bytes, calls, expected


def transposes(adj):
    truth = adj.to_device(-1).T
    for name in ('indptr', 'indices', 'data'):  # of which only the indices are compared later
        numpy.testing.assert_array_equal(getattr(adj.T, name).get(), getattr(truth, name))

    def ours():
        adj._cache.clear()
        return adj.T.indices

    def sort():
        return build.transpose(cupy, adj.indptr, adj.indices, adj.n_cols)[1]

    n_bytes = 2 * adj.indptr.nbytes + 3 * adj.indices.nbytes + 2 * adj.data.nbytes
    return (
        n_bytes,
        {'BatchedCSR.T': ours, 'cupy argsort and searchsorted, no values': sort},
        (lambda: truth.indices),
    )


def run_case(name):
    kind, n_graphs, n_nodes, n_channels = CASES[name]
    adj = random_batch(sizes_of(kind, n_graphs, n_nodes))
    rng = numpy.random.RandomState(0)
    x, v = (cupy.asarray(rng.uniform(0, 1, (adj.n_rows, n_channels)).astype('f')) for _ in range(2))
    questions = reductions(adj, x, rng)
    questions['bsddmm'] = sampled(adj, x, v)
    questions['transpose'] = transposes(adj)
    return {
        'case': name,
        'n_rows': adj.n_rows,
        'nnz': adj.nnz,
        'n_B': n_channels,
        'questions': {question: run_question(*parts) for question, parts in questions.items()},
    }


def run_question(n_bytes, calls, expected):
    expected = expected()
    errors = {}
    for name, call in calls.items():
        result = call()
        cupy.cuda.Device().synchronize()  # torch uses other streams
        errors[name] = harness.relative_error(cupy.from_dlpack(result), expected)
        # The peers add one by one.
        limit = 1e-4 if name.startswith(('torch', 'PyG')) else 1e-5
        harness.gate({name: errors[name]}, limit)
    eager = {
        name: call
        for name, call in calls.items()
        if eager_us(call, 3) > SLOW_US or not can_be_captured(call)
    }
    captured = {name: call for name, call in calls.items() if name not in eager}
    return {
        'bytes': n_bytes,
        'relative_error': errors,
        'device_us': measure.device_times(dict(captured, copy=measure.copy_of(n_bytes))),
        'eager_us': {name: round(eager_us(call), 3) for name, call in eager.items()},
        'host_us': measure.host_times(dict(calls), 20),
    }


def eager_us(call, n_calls=10):
    """Return microseconds a call between two events on the stream, launched one by one."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    with cupy.cuda.Stream(non_blocking=True):
        call()
        start.record()
        for _ in range(n_calls):
            call()
        stop.record()
        stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) * 1e3 / n_calls


def can_be_captured(call):
    """A sort cannot: it allocates, and waits for the device."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
            failed = False
        except Exception:  # of CuPy or torch
            failed = True
        try:
            stream.end_capture()
        except cupy.cuda.runtime.CUDARuntimeError:
            failed = True
    return not failed


def main():
    args = harness.argument_parser(__doc__).parse_args()
    result = {
        'question': 'bsddmm, transpose and segmented reductions (float32) against a device copy '
        'that reads and writes as many bytes, and their peers',
        'method': 'device: median of %d interleaved replays of CUDA graphs of %d calls each, warm '
        'L2; host: median of %d rounds of 20 calls, never waiting for the device'
        % (measure.ROUNDS, measure.CALLS, measure.ROUNDS),
        'conditions': measure.conditions(args.commit),
        'cases': [run_case(name) for name in CASES],
    }
    for case in result['cases']:
        print('%(case)s, n_B %(n_B)d' % case)
        for question, answer in case['questions'].items():
            for kind in ('device_us', 'host_us'):
                for name, times in answer[kind].items():
                    print(
                        '  %-17s %-6s %-42s %9.2f us  (%.2f to %.2f)'
                        % (question, kind[:-3], name, times['median'], times['low'], times['high'])
                    )
            for name, microseconds in answer['eager_us'].items():
                print('  %-17s %-6s %-42s %9.2f us' % (question, 'eager', name, microseconds))
    print('wrote', harness.save('gradients', result, args.out))


if __name__ == '__main__':
    main()
