"""A small test of every kernel, or of what a CPU does instead, against float64 NumPy."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator

import numpy
import scipy.sparse

import chainer
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm import reference
from chainer_bspmm.cuda.policy import LONG_ROW
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.papers import BatchedCOO
from chainer_bspmm.papers import BatchedSELL
from chainer_bspmm.papers import spmv
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import relations
from chainer_bspmm.training.buffers import Staging
from chainer_bspmm.training.flat_gradients import FlatGradients
from chainer_bspmm.training.fused_update import FusedUpdate
from chainer_bspmm.training.peer_memory import PeerMemory
from chainer_bspmm.training.peer_sums import PeerSums
from chainer_bspmm.training.reports import Reports

N_CHANNELS = 33  # more than a warp, and no multiple of one
N_OUT = 8  # of linear layers
N_TYPES = 5  # relations, degrees, rows of a table
SEED = 3 * 2**32 + 5  # of dropout: both halves of it matter
# Largest relative error, in the maximum norm: rounding of the result, and of sums of a few terms.
TOLERANCES = {'e': 1e-3, 'f': 1e-5, 'd': 1e-12}

# kernel: name of the CUDA source; dtype: one letter; error (float or None): relative, None where
# the call failed; reason (str or None): why it failed, or what is wrong with the numbers.
Outcome = collections.namedtuple('Outcome', 'kernel dtype error reason')

# adj: BatchedCSR; x: (n_rows, 33), y: (n_graphs, 33), all on the device.
Case = collections.namedtuple('Case', 'adj x y')


def _spmv(case, function):
    return function(case.adj, case.x[:, 0].copy())


def _film(case):
    return case.adj.xp.concatenate([case.x[::-1], case.x], axis=1)


def _gathered(case, on_device):
    """Return the product of a batch that was gathered from the graphs of the case."""
    adj = case.adj.to_device(-1)
    sizes = numpy.diff(adj.row_offsets).astype(numpy.int64)
    columns = adj.indices - numpy.repeat(
        adj.row_offsets[:-1], numpy.diff(adj.indptr[adj.row_offsets])
    )
    molecules = Molecules(
        cuda.to_cpu(case.x), sizes, sizes, numpy.diff(adj.indptr), columns, adj.data, 1, []
    )
    if on_device:
        molecules = DeviceMolecules(molecules, chainer.backend.get_device_from_array(case.x))
    atoms, batch, _ = molecules.batch(numpy.array([2, 0, 3, 2]), 'packed')
    return (backend if on_device else reference).bspmm(batch, atoms)


def _updated(case):
    """Return x after a step of SGD with weight decay whose gradient is x * x."""
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(case.x.copy())
    link.x.grad = case.x * case.x
    optimizer = chainer.optimizers.SGD(0.25).setup(link)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.5))
    update = FusedUpdate(optimizer)
    update.prepare()
    update.launch(case.adj.xp.asarray(update.advance()))
    return link.x.array


def _averaged(case):
    """Return x after it was the gradient that the only rank sends to itself."""
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(case.x)
    link.x.grad = case.x.copy()
    comm = types.SimpleNamespace(rank=0, size=1, allreduce_grad_dtype=None)
    flat = FlatGradients(types.SimpleNamespace(target=link, communicator=comm))
    flat.pack(3, case.x[0, :1])
    flat._sum[...] = flat.sent
    flat.unpack()
    return link.x.grad


def _summed_over_ranks(case):
    """Return x's sum over the only rank there is."""
    peers = PeerMemory(1, 1, case.x.dtype, (), [(case.x.size, case.x.dtype)])
    peers.map([peers.handle()], 0)
    sums = PeerSums(types.SimpleNamespace(rank=0), peers)
    sums.begin(alone=False)
    return sums.sum(case.x)


def _expected_update(case):
    x = cuda.to_cpu(case.x).astype(numpy.float64)
    return x - 0.25 * (x * x + 0.5 * x)


def _double(array):
    return cuda.to_cpu(array).astype(numpy.float64)


def _sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


def _softmax(x):
    exponentials = numpy.exp(x)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _linear(case):
    """Return two pairs of a weight and a bias: of messages and of x, or of value and gate."""
    return [
        (case.x[first : first + N_OUT], case.y[i, :N_OUT].copy())
        for i, first in enumerate((0, N_OUT))
    ]


def _expected_linear(case):
    x = _double(case.x)
    return [x @ _double(W).T + _double(b) for W, b in _linear(case)]


def _layer(case):
    (W, b), (W_self, b_self) = _linear(case)
    given = {'W': W, 'b': b, 'W_self': W_self, 'b_self': b_self}
    layer = backend.layer_of(case.x, given, 1, False, 'relu')
    return backend.layer(layer, case.adj, case.x, given)


def _expected_layer(case):
    messages, own = _expected_linear(case)
    return numpy.maximum(reference.bspmm(case.adj, messages, residual=own), 0)


def _gated(case):
    """Return the gated rows, and the gradient by the weight of their values if that is x."""
    pairs, dtype = _linear(case), case.x.dtype
    y, kept = backend.gated_step(case.x, None, None, pairs, False)
    gy = case.x[:, :N_OUT]
    *_, of_parameters = backend.gated_step_grad(
        case.x, None, None, pairs, kept, gy, False, [dtype, None, None, None]
    )
    return y, of_parameters[0]


def _expected_gated(case):
    x, (value, gate) = _double(case.x), _expected_linear(case)
    return value * _sigmoid(gate), (x[:, :N_OUT] * _sigmoid(gate)).T @ x


def _ids(case):
    return case.adj.xp.arange(len(case.x), dtype=numpy.int32) % N_TYPES


def _expected_embed_grad(case):
    x = _double(case.x)
    return numpy.stack([x[t::N_TYPES].sum(axis=0) for t in range(N_TYPES)])


def _expected_loss(case):
    x = _double(case.x)
    return ((x - x[::-1]) ** 2).mean()


def _partials(case):
    """Return x in the dtype that kernels leave partial sums in."""
    return case.x.astype(numpy.promote_types(case.x.dtype, numpy.float32))


def _reported(case):
    """Return the numbers of a row of x after a captured step would have reported them."""
    xp, dtype = case.adj.xp, case.x.dtype
    row = xp.zeros(N_CHANNELS, numpy.uint64)
    numbers = {i: case.x[0, i : i + 1].reshape(()) for i in range(N_CHANNELS)}
    reports = Reports(chainer.backend.get_device_from_array(case.x))
    reports.write(numbers, xp.array([row.data.ptr], numpy.uint64))
    return row.view(dtype)[:: row.itemsize // dtype.itemsize]


def _staged(case):
    """Return x after it went to the host and back, row by row, as what captured steps read."""
    device = chainer.backend.get_device_from_array(case.x)
    staging = Staging({'row': (case.x.shape[1:], case.x.dtype)}, device)
    found = case.adj.xp.empty_like(case.x)
    for row, to in zip(cuda.to_cpu(case.x), found):
        staging.fill()['row'][...] = row
        staging.send(cuda.cupy.cuda.get_current_stream())
        to[...] = staging.device['row']
    return found


def _long_row(case):
    """Return a matrix of the same size whose only row with entries is done in pieces."""
    n_rows, n_entries = len(case.x), 16 * LONG_ROW
    indptr = numpy.zeros(n_rows + 1, numpy.int32)
    indptr[N_TYPES + 1 :] = n_entries
    adj = BatchedCSR(
        indptr,
        numpy.arange(n_entries, dtype=numpy.int32) % n_rows,
        numpy.array([0, n_rows]),
        cuda.to_cpu(case.x).ravel()[:n_entries],
    )
    return adj.to_device(chainer.backend.get_device_from_array(case.x))


def _rows_times(rows, case):
    """Multiply a matrix with N_TYPES rows for every node by x, on the host."""
    data, indices, indptr = map(cuda.to_cpu, (rows.data, rows.indices, rows.indptr))
    matrix = scipy.sparse.csr_matrix(
        (data.astype(numpy.float64), indices, indptr), (indptr.size - 1, len(case.x))
    )
    return (matrix @ _double(case.x)).reshape(len(case.x), N_TYPES, N_CHANNELS)


def _relation_rows(case):
    """Of the matrix, entry k of which has the relation k % N_TYPES."""
    adj = case.adj
    relation = adj.xp.arange(adj.nnz, dtype=numpy.int32) % N_TYPES
    adj = adj.replace(
        indices=adj.indices * N_TYPES + relation,
        col_offsets=adj.col_offsets * N_TYPES,
        n_cols=adj.n_cols * N_TYPES,
        max_cols=adj.max_cols * N_TYPES,
        n_relations=N_TYPES,
    )
    return _rows_times(relations.relation_rows(adj), case)


def _expected_relation_rows(case):
    data, products = _double(case.adj.data), []
    for relation in range(N_TYPES):
        of_relation = numpy.arange(data.size) % N_TYPES == relation
        products.append(reference.bspmm(case.adj, case.x, data * of_relation))
    return numpy.stack(products, axis=1)


def _symmetric(case):
    """Return the pattern of A + A^T, as a float64 array on the host."""
    pattern = case.adj.to_device(-1).to_scipy().toarray() != 0
    return (pattern | pattern.T).astype(numpy.float64)


def _degree_rows(case):
    adj = BatchedCSR.from_matrices([_symmetric(case)])
    adj = adj.to_device(chainer.backend.get_device_from_array(case.x))
    both = relations.degree_rows(adj, N_TYPES, case.x.dtype)
    return numpy.concatenate([_rows_times(rows, case) for rows in both])


def _expected_degree_rows(case):
    A, x = _symmetric(case), _double(case.x)
    has_degree = A.sum(axis=1)[:, None] == numpy.arange(1, N_TYPES + 1)
    by_row = has_degree[:, :, None] * (A @ x)[:, None]
    return numpy.concatenate([by_row, numpy.einsum('ij,jd,jc->idc', A, has_degree, x)])


# Kernel -> (its call, the reference's); both take a Case. A CPU has one algorithm per container.
GPU_CHECKS = {
    'bspmm_csr': (
        lambda case: backend.bspmm(case.adj, case.x),
        lambda case: reference.bspmm(case.adj, case.x),
    ),
    'sum_pieces': (
        lambda case: backend.bspmm(_long_row(case), case.x),
        lambda case: reference.bspmm(_long_row(case), case.x),
    ),
    'transpose_csr': (
        lambda case: backend.bspmm(case.adj, case.x, trans=True),
        lambda case: reference.bspmm(case.adj, case.x, trans=True),
    ),
    'bspmm_swa': (
        lambda case: backend.bspmm(case.adj, case.x, algorithm='swa'),
        lambda case: reference.bspmm(case.adj, case.x),
    ),
    'bspmm_st_shared': (
        lambda case: backend.bspmm(BatchedCOO.from_csr(case.adj), case.x, algorithm='st_shared'),
        lambda case: reference.bspmm(case.adj, case.x),
    ),
    'bspmm_st_global': (
        lambda case: backend.bspmm(BatchedCOO.from_csr(case.adj), case.x, algorithm='st_global'),
        lambda case: reference.bspmm(case.adj, case.x),
    ),
    'bspmm_sell': (
        lambda case: backend.bspmm(BatchedSELL(case.adj), case.x),
        lambda case: reference.bspmm(case.adj, case.x),
    ),
    'spmv_csr': (lambda case: _spmv(case, spmv), lambda case: _spmv(case, reference.spmv)),
    'bsddmm_csr': (
        lambda case: backend.bsddmm(case.adj, case.x, case.x),
        lambda case: reference.bsddmm(case.adj, case.x, case.x),
    ),
    'bsddmm_coo': (
        lambda case: backend.bsddmm(BatchedCOO.from_csr(case.adj), case.x, case.x),
        lambda case: reference.bsddmm(case.adj, case.x, case.x),
    ),
    'segment_reduce': (
        lambda case: backend.segment_sum(case.x, case.adj.row_offsets),
        lambda case: reference.segment_sum(case.x, case.adj.row_offsets),
    ),
    'segment_softmax': (
        lambda case: backend.segment_softmax(case.x, case.adj.row_offsets),
        lambda case: reference.segment_softmax(case.x, case.adj.row_offsets),
    ),
    'dropout': (
        lambda case: backend.dropout(case.x, 0.5, SEED, 1, case.adj.xp.full(1, 2, numpy.uint64))[1],
        lambda case: (
            cuda.to_cpu(case.x)
            * numpy.where(reference.kept(case.x.size, 0.5, SEED, 1, 2), 2.0, 0.0).reshape(
                case.x.shape
            )
        ),
    ),
    'segment_broadcast': (
        lambda case: backend.segment_broadcast(case.y, case.adj.row_offsets, case.adj.n_rows),
        lambda case: reference.segment_broadcast(case.y, case.adj.row_offsets),
    ),
    'edge_film': (
        lambda case: backend.edge_film(case.adj, case.x, _film(case)),
        lambda case: reference.edge_film(case.adj, case.x, _film(case)),
    ),
    'layer_norm': (
        lambda case: backend.layer_norm(case.x, case.x[0], case.x[1], 1e-3)[0],
        lambda case: reference.layer_norm(case.x, case.x[0], case.x[1], 1e-3),
    ),
    'graph_linear': (_layer, _expected_layer),
    'gated_step': (lambda case: _gated(case)[0], lambda case: _expected_gated(case)[0]),
    'gated_weights': (lambda case: _gated(case)[1], lambda case: _expected_gated(case)[1]),
    'row_softmax': (
        lambda case: backend.row_softmax(case.adj.xp.stack([case.x, case.x[::-1]])),
        lambda case: _softmax(_double(case.x)) + _softmax(_double(case.x[::-1])),
    ),
    'embed_grad': (
        lambda case: backend.embed_grad(_ids(case), case.x, N_TYPES),
        _expected_embed_grad,
    ),
    'mean_loss': (
        lambda case: backend.mean_loss('SQUARED_ERROR', case.x, case.x[::-1].copy(), case.x.size)[
            0
        ],
        _expected_loss,
    ),
    'sum_partials': (
        lambda case: backend.sum_partials(_partials(case), [(0, (N_CHANNELS,), case.x.dtype)])[0],
        lambda case: _double(case.x).sum(axis=0),
    ),
    'flat_gradients': (_averaged, lambda case: _double(case.x)),
    'peer_sum': (_summed_over_ranks, lambda case: _double(case.x)),
    'report': (_reported, lambda case: _double(case.x[0])),
    'staged_copy': (_staged, lambda case: _double(case.x)),
    'relation_rows': (_relation_rows, _expected_relation_rows),
    'degree_rows': (_degree_rows, _expected_degree_rows),
    'gather_batch': (lambda case: _gathered(case, True), lambda case: _gathered(case, False)),
    'fused_update': (_updated, _expected_update),
}
CPU_CHECKS = {
    'bspmm': GPU_CHECKS['bspmm_csr'],
    'bspmm, transposed': GPU_CHECKS['transpose_csr'],
    'bspmm, BatchedCOO': (
        lambda case: backend.bspmm(BatchedCOO.from_csr(case.adj), case.x),
        GPU_CHECKS['bspmm_csr'][1],
    ),
    'bspmm, BatchedSELL': GPU_CHECKS['bspmm_sell'],
    'spmv': GPU_CHECKS['spmv_csr'],
    'bsddmm': GPU_CHECKS['bsddmm_csr'],
    'segment_sum': GPU_CHECKS['segment_reduce'],
    'segment_softmax': GPU_CHECKS['segment_softmax'],
    'dropout': GPU_CHECKS['dropout'],
    'segment_broadcast': GPU_CHECKS['segment_broadcast'],
    'edge_film': GPU_CHECKS['edge_film'],
    'layer_norm': GPU_CHECKS['layer_norm'],
    'row_softmax': GPU_CHECKS['row_softmax'],
    'embed_grad': GPU_CHECKS['embed_grad'],
    'mean_loss': GPU_CHECKS['mean_loss'],
    'relation_rows': GPU_CHECKS['relation_rows'],
}
# The first two have no atomics for halves, the last updates no parameters of float16.
WITHOUT_HALVES = ('bspmm_st_shared', 'bspmm_st_global', 'fused_update')


def _case(device, dtype):
    rng = numpy.random.RandomState(0)
    matrices = [
        (rng.uniform(-1, 1, (n, n)) * (rng.uniform(size=(n, n)) < 3 / max(n, 3))).astype(dtype)
        for n in (5, 1, 40, 17)
    ]
    adj = BatchedCSR.from_matrices(matrices)
    x = rng.uniform(-1, 1, (adj.n_rows, N_CHANNELS)).astype(dtype)
    y = rng.uniform(-1, 1, (adj.n_graphs, N_CHANNELS)).astype(dtype)
    return Case(adj.to_device(device), device.send(x), device.send(y))


def run(device: chainer.backend.Device) -> Iterator[Outcome]:
    """Test a device; on a GPU each part compiles a different kernel.

    Args:
        device (chainer.backend.Device): of NumPy or CuPy.

    Yields:
        Outcome: one for each kernel and dtype, as soon as it is known. Nothing is raised.
    """
    checks = CPU_CHECKS if device.xp is numpy else GPU_CHECKS
    for name, (call, expect) in checks.items():
        for dtype in 'efd':
            if dtype != 'e' or name not in WITHOUT_HALVES:
                yield _outcome(name, dtype, device, call, expect)


def _outcome(name, dtype, device, call, expect):
    try:
        with chainer.using_device(device):
            case = _case(device, dtype)
            expected = expect(case)
            actual = cuda.to_cpu(call(case))  # waits for the kernel
    except Exception as error:  # any error belongs in the report
        return Outcome(name, dtype, None, '%s: %s' % (type(error).__name__, error))
    if actual.shape != expected.shape:
        return Outcome(name, dtype, None, 'shape %s, expected %s' % (actual.shape, expected.shape))
    error = float(numpy.abs(actual - expected).max() / numpy.abs(expected).max())
    # Not `error > tolerance`, which NaN would pass.
    good, limit = error <= TOLERANCES[dtype], TOLERANCES[dtype]
    return Outcome(
        name,
        dtype,
        error,
        None if good else 'relative error %.1e, expected at most %.0e' % (error, limit),
    )
