"""One or two small uses of every kernel that cover all of its code: they run under the sanitizers,
and planted faults must change their results.

Each is a function of an emulated device that returns (result, what it must equal).
"""

import types
from unittest import mock

import numpy
import scipy.sparse

import chainer
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.backend import CpuDevice
from chainer.backends import cuda

from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import papers
from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.partial_sums import PendingSums
from chainer_bspmm.cuda.plans import Device, one_block
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.gather_batch import gather_launch
from chainer_bspmm.ops import segments
from chainer_bspmm.ops.bspmm import bsddmm_forward, bspmm_forward, csr_launch
from chainer_bspmm.ops.dropout import dropout_forward
from chainer_bspmm.ops.edge_film import edge_film_backward, edge_film_forward
from chainer_bspmm.ops.embed_rows import EMBED_CHUNK, embed_launch, embed_rows_backward
from chainer_bspmm.ops.gates.launches import _weights, gated_step_backward, gated_step_forward
from chainer_bspmm.ops.graph_linear.launches import Layer, layer_backward, layer_forward
from chainer_bspmm.ops.graph_linear.launches import layer_launch, LAYER_THREADS
from chainer_bspmm.ops.layer_norm import layer_norm_backward, layer_norm_forward
from chainer_bspmm.ops.linear_softmax import row_softmax_backward, row_softmax_forward
from chainer_bspmm.ops.mean_loss import loss_launches, mean_loss_backward, mean_loss_forward
from chainer_bspmm.ops.mean_loss import training_loss
from chainer_bspmm.ops.segment_softmax import segment_softmax_backward, segment_softmax_forward
from chainer_bspmm.ops.segments import segment_broadcast_forward, segment_max_forward
from chainer_bspmm.ops.segments import segment_sum_forward
from chainer_bspmm.sparse import build
from chainer_bspmm.training import buffers, reports
from chainer_bspmm.training.flat_gradients import FlatGradients
from chainer_bspmm.training.fused_update import FusedUpdate
from chainer_bspmm.training.peer_memory import PeerMemory
from chainer_bspmm.training.peer_memory import PeerSums
from chainer_bspmm.training.reports import Reports
from tests.emulation.gated_cases import arrays, expected, summed
from tests.emulation.kernel_cases import batch, film_arrays, film_truth, gather_folded
from tests.emulation.kernel_cases import integers, Peers, transpose_on, weighted, words
from tests.support import reference
from tests.support import shuffled
from tests.support.data_sets import molecule_set
from tests.support.launches import DeviceArray


def flat(arrays):
    """Return all elements of arrays, of which some may be None."""
    present = [array for array in arrays if array is not None]
    return numpy.concatenate([numpy.ravel(array).astype('d') for array in present])


def product(device):
    adj = batch('mixed', 'f')
    x = device.put(integers((adj.n_cols, 8), 'f', seed=2))
    return bspmm_forward(adj, x, None, None, False), reference.bspmm(adj, x)


def pipelined(device):
    """Two vectors per thread, which goes through up to four rows."""
    adj = batch('mixed', 'f')
    x = device.put(integers((adj.n_cols, 24), 'f', seed=2))
    plan = csr_launch(adj.n_rows, adj.n_cols, 24, 4, lanes=3, columns=2, rows_per_thread=4, block=9)
    with mock.patch('chainer_bspmm.ops.bspmm.bspmm_launch', lambda *_: plan):
        return bspmm_forward(adj, x, None, None, False), reference.bspmm(adj, x)


def _long_rows():
    """Rows that begin with a chunk of four, end with one, meet in one, cover several, or many."""
    lengths = numpy.array([0, 5, 6, 1, 0, 8, 12, 2, 37, 4, 0])
    rng = numpy.random.RandomState(0)
    return BatchedCSR(
        numpy.append(0, numpy.cumsum(lengths)),
        rng.randint(0, lengths.size, lengths.sum()),
        numpy.array([0, lengths.size]),
        integers(lengths.sum(), 'f', {'f': 63}, seed=1),
    )


def in_pieces(device):
    """A vector and three lanes, with a residual."""
    adj = _long_rows()
    x, residual = (
        device.put(integers((adj.n_rows, 36), 'f', {'f': 63}, seed=seed)) for seed in (2, 3)
    )
    with mock.patch('chainer_bspmm.ops.bspmm.piece_length', lambda *_: 4):
        y = bspmm_forward(adj, x, None, residual, False)
    return y, reference.bspmm(adj, x, residual=residual)


def sampled_in_pieces(device):
    adj = _long_rows()
    u, v = (device.put(integers((adj.n_rows, 36), 'f', {'f': 63}, seed=seed)) for seed in (2, 3))
    with mock.patch('chainer_bspmm.ops.bspmm.piece_length', lambda *_: 4):
        return bsddmm_forward(adj, u, v), reference.bsddmm(adj, u, v)


def sampled(device):
    adj = batch('mixed', 'f')
    u, v = (device.put(integers((adj.n_rows, 36), 'f', seed=seed)) for seed in (2, 3))
    return bsddmm_forward(adj, u, v), reference.bsddmm(adj, u, v)


def sampled_coo(device):
    adj = shuffled(BatchedCOO.from_csr(batch('mixed', 'f')))
    u, v = (device.put(integers((adj.n_rows, 36), 'f', seed=seed)) for seed in (2, 3))
    return papers.gpu.bsddmm(adj, u, v), reference.bsddmm(adj, u, v)


def modulated(device):
    adj = batch('relations', 'f')
    arrays = film_arrays(adj, 12, 'f')
    messages, film, _ = map(device.put, arrays)
    return edge_film_forward(adj, messages, film), film_truth(adj, *arrays)[0]


def modulated_gradients(device):
    adj = batch('relations', 'f')
    arrays = film_arrays(adj, 12, 'f')
    found = edge_film_backward(adj, *map(device.put, arrays))
    return flat(found), flat(film_truth(adj, *arrays)[1:])


def normalised(device):
    """Rows of -1 and 1 in equal numbers, so that every mean is exact."""
    x, gamma, beta = _norm_arrays()
    y, statistics = layer_norm_forward(*map(device.put, (x, gamma, beta)), eps=0.25)
    inv_std = 1 / numpy.sqrt(1.25)
    return _rounded([y, statistics]), _rounded(
        [gamma * (x * inv_std) + beta, numpy.tile([0, inv_std], (len(x), 1))]
    )


def normalised_gradients(device):
    """With an inverse deviation of 1."""
    x, gamma, _ = _norm_arrays()
    gy = integers(x.shape, 'f', seed=4)
    statistics = numpy.tile(numpy.array([0, 1], 'f'), (len(x), 1))
    with mock.patch(
        'chainer_bspmm.ops.layer_norm.row_sum', lambda terms: terms.sum(axis=0)
    ):  # another kernel's
        gx, ggamma, gbeta = layer_norm_backward(*map(device.put, (x, gamma, gy, statistics)))
    g = (gy * gamma).astype('d')
    expected = g - g.mean(axis=1, keepdims=True) - x * (g * x).mean(axis=1, keepdims=True)
    return flat([gx, ggamma, gbeta]), flat([expected, (gy * x).sum(axis=0), gy.sum(axis=0)])


def summed_softmax(device):
    """Rows of one element other than -inf, and of equal ones, each of nine lanes."""
    a = numpy.full((3, 41, 36), -numpy.inf, 'f')
    a[:, range(41), numpy.arange(41) % 36] = integers((3, 41), 'f')
    a[1, ::2] = 7
    expected = numpy.exp(a.astype('d') - a.max(axis=2, keepdims=True))
    expected /= expected.sum(axis=2, keepdims=True)
    a = device.put(a)
    y = row_softmax_forward(a)
    return flat([a, y]), flat([expected.astype('f'), expected.astype('f').sum(axis=0)])


def row_softmax_gradient(device):
    a, g = integers((2, 41, 36), 'f', {'f': 31}), integers((41, 36), 'f', {'f': 31}, seed=2)
    return row_softmax_backward(device.put(a), device.put(g)), row_softmax_backward(a, g)


def rows_of_degrees(device):
    """With spare entries; values, and then ones."""
    rng = numpy.random.RandomState(0)
    matrix = rng.randint(0, 2, (9, 9))
    matrix = numpy.maximum(matrix, matrix.T)
    matrix[4, 4] += 2
    found, wanted = [], []
    for values in (matrix, matrix != 0):
        adj = BatchedCSR.from_matrices([values.astype('f')])
        degrees, n = values.sum(axis=0), 7
        types = numpy.where((degrees >= 1) & (degrees <= n), degrees - 1, n - 1)
        dense = values * 1.0
        own = numpy.where((degrees >= 1) & (degrees <= n), 1.0, 0.0)
        places = numpy.stack([types == r for r in range(n)])
        has_entry = (values != 0)[:, None, :]
        for counts, kind in ((own[:, None], places.T[:, :, None]), (own, places[None])):
            rows = ((kind & has_entry) * 1).reshape(9 * n, 9)
            kept = (dense * counts)[:, None, :].repeat(n, axis=1).reshape(9 * n, 9)
            at = numpy.nonzero(rows)
            wanted += [numpy.append(0, rows.sum(axis=1).cumsum()), kept[at], [0, 0]]
            if counts is own:
                wanted += [at[1], [0, 0]]
        larger = adj.replace(
            indptr=device.put(adj.indptr), indices=device.put(numpy.pad(adj.indices, (0, 2)))
        )
        if adj.data is not None:
            larger.data = device.put(numpy.pad(adj.data, (0, 2)))
        larger.nnz = adj.nnz + 2
        indptr, data, t_indptr, t_indices, t_data = build.launch_degree_rows(
            larger, n, numpy.dtype('f')
        )
        found += [indptr, data, t_indptr, t_data, t_indices]
    return flat(found), flat(wanted)


def _norm_arrays():
    """Return x, gamma, beta: rows of eight lanes, of which the last block has too few."""
    x = numpy.tile(numpy.array([1, -1], 'f'), (41, 16))
    x[::3] *= -1
    return x, integers(32, 'f', seed=2), integers(32, 'f', seed=3)


def _rounded(arrays):
    """Up to the rounding of a square root."""
    return numpy.round(flat(arrays), 2)


def summed_over_peers(device):
    """Vectors of 300 elements, each of turn 3; and once more with another one of this rank."""
    n, n_ranks, rank = 300, 3, 1
    peers = PeerMemory.__new__(PeerMemory)
    vectors = [integers((n,), 'f', seed=r) for r in range(4)]
    arrays = [device.put(numpy.zeros((2, n_ranks, n), 'u8')) for _ in range(n_ranks)]
    device.reachable = arrays
    for other in (0, 2):
        arrays[rank][1, other] = words(vectors[other], 3)
    peers.slots = [None, numpy.array([array.ctypes.data for array in arrays], 'u8')]
    peers.data, peers.vectors = peers.slots[1], [(1, numpy.dtype('d')), (n, numpy.dtype('f'))]
    peers.turns = device.put(numpy.array([0, 2], 'u4'))
    sums = PeerSums(types.SimpleNamespace(rank=rank), peers)
    sums._next, sums._alone = 1, False
    with mock.patch.object(DeviceArray, 'data', property(_memory), create=True):
        total = sums.sum(device.put(vectors[1]))
        sums._next, sums._alone = 1, True
        again = sums.sum(device.put(vectors[3]))
    sent = numpy.zeros((2, 2, n_ranks, n), 'u8')
    sent[:, 1, rank] = words(vectors[1], 3)
    others = vectors[0] + vectors[2]
    return flat([total, again, arrays[0], arrays[2], peers.turns]), flat(
        [others + vectors[1], others + vectors[3], *sent, [0, 3]]
    )


def recurrent(device):
    return _gated(device, (6, 3, 5), True)


def recurrent_rows(device):
    """The state is x; what a chunk has is x's and the message's."""
    return _gated(device, (5, 30, 5), True, is_same=True)


def gated_rows(device):
    """Without a message, and with more inputs than a chunk has."""
    return _gated(device, (37, 0, 2), False)


def _gated(device, widths, has_state, is_same=False):
    """Which elements of the results are about right, of 19 rows in three blocks."""
    given = list(arrays(19, widths, has_state))
    if is_same:
        given[3] = given[1]
    gy, x, message, state, pairs = [
        [tuple(device.put(array.astype('f')) for array in pair) for pair in item]
        if isinstance(item, list)
        else None
        if item is None
        else device.put(item.astype('f'))
        for item in given
    ]
    state = x if is_same else state
    y, kept = gated_step_forward(x, message, state, pairs, has_state)
    # Sums over the rows: the gradients of parameters are another kernel's.
    with mock.patch('chainer_bspmm.ops.gates.launches._weights', lambda g, *_: list(g.sum(axis=1))):
        *rows, biases = gated_step_backward(
            x, message, state, pairs, kept, gy, has_state, ['f'] * 2 * len(pairs)
        )
    reference = expected(*given, is_tanh=has_state)
    of_biases = reference[5::2][: len(biases)]
    return _about(flat([y, *rows, *biases]), flat([*reference[:4], *of_biases]))


def weights_of_gates(device):
    """Two tiles of one input, and two parts of the rows, of which the last is short."""
    return _weights_of_gates(device, (33, 3, 5), False)


def weights_of_recurrent_rows(device):
    """The state is x, whose width is two tiles."""
    return _weights_of_gates(device, (33, 3, 33), True)


def _weights_of_gates(device, widths, is_same):
    n_rows = 70
    g = integers((3, n_rows, widths[2]), 'f', seed=1)
    x, message = (integers((n_rows, width), 'f', seed=width) for width in widths[:2])
    state, reset = (integers((n_rows, widths[2]), 'f', seed=seed) for seed in (2, 3))
    g, x, message, state, reset = map(device.put, (g, x, message, state, reset))
    if is_same:
        state = x
    given = g, x, message, state, reset
    with mock.patch('chainer_bspmm.ops.gates.launches.sum_partials', summed):
        found = _weights(*given, widths, ['d'] * 12)
    both = numpy.concatenate([x, message], axis=1)
    of_W = [array for of_map in g for array in (of_map.T @ both, of_map.sum(axis=0))]
    of_U = [
        array
        for of_map, factor in zip(g, (reset, state, state))
        for array in (of_map.T @ factor, of_map.sum(axis=0))
    ]
    return flat(found), flat(of_W + of_U)


def maximum(device):
    """Two lanes per segment, one of which is idle in the second."""
    offsets = numpy.array([0, 19, 20], numpy.int32)
    x = device.put(-1 - abs(integers((20, 8), 'f')))
    x[3] = numpy.nan
    return segment_max_forward(x, offsets), reference.segment_max(x, offsets)


def long_segments(device):
    """One that begins within a chunk of 256 rows and ends with one, and the other way about."""
    offsets = numpy.array([0, 9, 512, 800, 900], numpy.int32)
    x = device.put(integers((900, 3), 'f'))
    return segment_sum_forward(x, offsets), reference.segment_sum(x, offsets)


def weighted_sum(device):
    return _long_weighted(device, 'segment_sum')


def weighted_maximum(device):
    return _long_weighted(device, 'segment_max')


def _long_weighted(device, name):
    """Short and long segments, one of each without a row that counts; a column of -inf."""
    offsets = numpy.array([0, 9, 12, 400, 700], numpy.int32)
    x, weights = weighted(offsets, 3, 'f')
    weights[9:12] = 0
    x[:9, 0] = -numpy.inf
    y = getattr(segments, name + '_forward')(device.put(x), offsets, None, device.put(weights))
    return y, getattr(reference, name)(x, offsets, weights)


def broadcast(device):
    offsets = numpy.array([0, 0, 9, 12], numpy.int32)
    y = device.put(integers((3, 8), 'f'))
    expected = numpy.pad(reference.segment_broadcast(y, offsets), ((0, 2), (0, 0)))
    return segment_broadcast_forward(y, offsets, 14), expected


def weighted_broadcast(device):
    offsets = numpy.array([0, 9, 330, 700], numpy.int32)
    _, weights = weighted(offsets, 8, 'f', spare=2)
    y = integers((3, 8), 'f')
    y[2] = numpy.nan
    x = segment_broadcast_forward(device.put(y), offsets, 702, None, device.put(weights))
    expected = reference.segment_broadcast(y, offsets, weights)
    return x, numpy.pad(expected, ((0, 2), (0, 0)))


def long_broadcast(device):
    """Segments that reach over the border of two chunks, which one block owns."""
    offsets = numpy.array([0, 9, 330, 700], numpy.int32)
    y = device.put(integers((3, 3), 'f'))
    return segment_broadcast_forward(y, offsets, 700), reference.segment_broadcast(y, offsets)


def softmax(device):
    """Equal rows, so that every element is a power of two; the last are of no segment."""
    offsets = numpy.array([0, 4, 4, 5, 13], numpy.int32)
    x = device.put(numpy.repeat(integers((5, 12), 'f'), [4, 0, 1, 8, 300], axis=0))
    return segment_softmax_forward(x, offsets), reference.segment_softmax(x, offsets)


def softmax_gradient(device):
    offsets = numpy.array([0, 4, 4, 5, 13], numpy.int32)
    a, g = (device.put(integers((20, 12), 'f', seed=seed)) for seed in (2, 3))
    return segment_softmax_backward(a, g, offsets), reference.segment_softmax_grad(a, g, offsets)


def weighted_softmax(device):
    """The same, with weights that add up to 8."""
    offsets = numpy.array([0, 4, 7, 7, 9], numpy.int32)
    x = numpy.repeat(integers((5, 12), 'f'), [4, 3, 0, 2, 3], axis=0)
    weights = numpy.array([3, 0, 1, 4, 0, 0, 0, 0, 8, 1, 1, 1], 'f')
    x[weights == 0] = 1e6
    return (
        segment_softmax_forward(device.put(x), offsets, device.put(weights)),
        reference.segment_softmax(x, offsets, weights),
    )


def weighted_softmax_gradient(device):
    offsets = numpy.array([0, 4, 4, 5, 13], numpy.int32)
    a, weights = weighted(offsets, 12, 'f', spare=7)
    g = integers((20, 12), 'f', seed=3)
    return (
        segment_softmax_backward(device.put(a), device.put(g), offsets, device.put(weights)),
        reference.segment_softmax_grad(a, g, offsets, weights),
    )


def transposed(device):
    """Row bounds, columns and the order of the entries of the transpose, two warps a block."""
    indices = numpy.arange(150, dtype=numpy.int32) ** 2 % 40
    adj = BatchedCSR(numpy.array([0, 3, 3, 150] + [150] * 37), indices, numpy.array([0, 40]))
    return flat(transpose_on(device, adj)), flat(
        build.transpose(numpy, adj.indptr, adj.indices, 40)
    )


def sliced(device):
    """Slices of up to 64 rows, two warps each; the last block has warps without a slice."""
    adj = BatchedCSR.from_matrices([integers((n, n), 'f') for n in (35, 3, 2)])
    x, y = (device.put(integers((adj.n_cols, 9), 'f', seed=seed)) for seed in (2, 3))
    return papers.gpu.bspmm(BatchedSELL(adj, 64, True), x, None, y, False), reference.bspmm(
        adj, x, residual=y
    )


def sliced_by_two_blocks(device):
    """Blocks that share the columns of a slice."""
    plan = papers.policy.sell_launch

    def two(*sizes):
        return plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 2, 1))

    adj = batch('small', 'f')
    x = device.put(integers((adj.n_cols, 33), 'f', seed=2))
    with mock.patch.object(papers.policy, 'sell_launch', two):
        return papers.gpu.bspmm(BatchedSELL(adj, 2), x, None, None, False), reference.bspmm(adj, x)


def _in_place(device, adj, matrix):
    x, y = (device.put(integers(adj.n_cols, 'f', seed=seed)) for seed in (2, 3))
    expected = reference.spmv(adj, x, 2, 3, y)
    return papers.gpu.spmv(matrix, x, 2, 3, y), expected


def sliced_vector(device):
    adj = batch('mixed', 'f')
    return _in_place(device, adj, BatchedSELL(adj, 7))


def vector(device):
    """Several lanes a row, and rounds of them."""
    adj = BatchedCSR.from_matrices([integers((n, n), 'f') for n in (35, 3)])
    return _in_place(device, adj, adj)


def swa(device, algorithm='swa', n_channels=9):
    """With nine columns 16 lanes share a row: 8 rows per block, of which the last uses 5."""
    adj = batch('mixed', 'f')
    x = device.put(integers((adj.n_cols, n_channels), 'f', seed=2))
    residual = device.put(integers((adj.n_rows, n_channels), 'f', seed=3))
    y = papers.gpu.bspmm(adj, x, None, residual, False, algorithm)
    return y, reference.bspmm(adj, x, residual=residual)


def swa_blocked(device):
    return swa(device, 'swa_blocked', 80)


def swa_full(device):
    """Of the 16 sub-warps of two blocks two have no row in the last graph, two have no graph."""
    adj = BatchedCSR.from_matrices([1 + abs(integers((n, n), 'f')) for n in (7, 5)])
    x = device.put(integers((adj.n_cols, 16), 'f', seed=2))
    return papers.gpu.bspmm(adj, x, None, None, False, 'swa'), reference.bspmm(adj, x)


def _st(device, algorithm, name='relations', n_channels=5, trans=False):
    adj = shuffled(BatchedCOO.from_csr(batch(name, 'f')))
    x = device.put(integers((adj.n_rows if trans else adj.n_cols, n_channels), 'f', seed=2))
    y = papers.gpu.bspmm(adj, x, None, None, trans, algorithm)
    return y, reference.bspmm(adj, x, trans=trans)


def st_shared(device):
    return _st(device, 'st_shared')


def st_blocked(device):
    return _st(device, 'st_blocked')


def st_global(device):
    return _st(device, 'st_global', 'duplicates')


def st_shared_wide(device):
    """Entries go round a block more than once, columns round a sub-warp; the transpose."""
    return _st(device, 'st_shared', 'mixed', 33, trans=True)


def st_blocked_wide(device):
    return _st(device, 'st_blocked', 'mixed', 33)


def st_global_wide(device):
    return _st(device, 'st_global', 'mixed', 33, trans=True)


def dropped(device):
    """By two blocks."""
    x = device.put(integers((137, 9), 'f'))
    counter = device.put(numpy.array([5], numpy.uint64))
    mask, y = dropout_forward(x, 0.5, 1, 2, counter)
    kept = reference.kept(x.size, 0.5, 1, 2, 5).reshape(x.shape)
    return flat([mask, y]), flat([2 * kept, 2 * kept * x])


MOLECULES = numpy.array((3, 0, 6, 5, 5, 2, 1, 7, 0) * 4)


def _gathered(device, gather):
    """Several graphs per warp."""
    emulated = CpuDevice()
    emulated.send = device.put
    plan = gather_launch

    def two_warps(*sizes):
        return plan(*sizes)._replace(block=(64, 1, 1))

    with mock.patch('chainer_bspmm.dataset.gather_batch.gather_launch', two_warps):
        return gather(DeviceMolecules(molecule_set(n_relations=2), emulated))


def gathered(device):
    def gather(molecules):
        return [each.batch(MOLECULES, 'packed') for each in (molecules, molecules.host)]

    return tuple(
        flat([atoms, adj.indptr, adj.indices, adj.data, adj.row_offsets, adj.col_offsets, *labels])
        for atoms, adj, labels in _gathered(device, gather)
    )


def gathered_folded(device):
    """Of sizes below and above that of the padding."""

    def gather(molecules):
        return gather_folded(device, molecules, MOLECULES, 12, spare=(70, 1))

    return tuple(flat([*buffers[:-1], *buffers.labels]) for buffers in _gathered(device, gather))


def updated(device):
    """A decay and norms that do not clip: exact in integers."""
    data, grad = (integers((1100,), 'f', seed=seed) for seed in (2, 3))
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(device.put(data))
        link.v = chainer.Parameter(device.put(data[:3]))
    optimizer = optimizers.SGD(0.5).setup(link)
    optimizer.add_hook(optimizer_hooks.WeightDecay(2))
    optimizer.add_hook(optimizer_hooks.GradientClipping(1e9))
    optimizer.add_hook(optimizer_hooks.GradientClipping(1e8), 'second')
    link.w.grad, link.v.grad = device.put(grad), device.put(grad[:3])
    _update(device, optimizer)
    hooked = grad + 2 * data
    expected = data - hooked / 2
    found = flat([link.w.array, link.w.grad, link.v.array, link.v.grad])
    return found, flat([expected, hooked, expected[:3], hooked[:3]])


def updated_by_other_rules(device):
    """Which elements are about what Chainer makes of them on a host, with other hooks."""
    data, grad = (integers((37,), 'd', {'d': 5}, seed=seed) for seed in (2, 3))
    found, wanted = [], []
    for make in (optimizers.MomentumSGD, optimizers.RMSprop, optimizers.AMSGrad):
        for put, to in (device.put, found), (numpy.array, wanted):
            link = chainer.Link()
            with link.init_scope():
                link.w = chainer.Parameter(put(data))
            optimizer = make(0.5).setup(link)
            optimizer.add_hook(optimizer_hooks.Lasso(0.5))
            optimizer.add_hook(optimizer_hooks.GradientHardClipping(-3, 4))
            link.w.grad = put(grad)
            if to is found:
                _update(device, optimizer)
            else:
                optimizer.update()
            to += [link.w.array, link.w.grad]
    return _about(flat(found), flat(wanted))


def _update(device, optimizer):
    update = FusedUpdate(optimizer)
    update.prepare()
    params = list(optimizer.target.params())
    device.reachable = [array for param in params for array in (param.array, param.grad)]
    device.reachable += [state for param in params for state in param.update_rule.state.values()]
    update.launch(device.put(update.advance()))


def _about(found, wanted):
    """Return which elements are about right, and ones."""
    return 1.0 * (abs(found - wanted) < 1e-5), numpy.ones(wanted.size)


def _flat(device, values):
    """Return `FlatGradients` of rank 1 of 3, which has a bad loss, and its gradients."""
    link = chainer.Link()
    with link.init_scope():
        link.v, link.w = (chainer.Parameter(device.put(value)) for value in values)
    link.v.grad, link.w.grad = grads = [device.put(value) for value in values]
    device.reachable = [*grads]
    comm = types.SimpleNamespace(rank=1, size=3, allreduce_grad_dtype=None)
    place = types.SimpleNamespace(alloc_pinned_memory=bytearray)
    with (
        mock.patch.object(cuda.cupy, 'cuda', place),
        mock.patch.object(DeviceArray, 'data', property(_memory), create=True),
    ):
        flat_gradients = FlatGradients(types.SimpleNamespace(target=link, communicator=comm))
        flat_gradients.pack(4, device.put(numpy.array(numpy.inf, 'f')))
    return flat_gradients, grads


def _memory(array):
    return types.SimpleNamespace(ptr=array.ctypes.data, device_id=0)


def packed(device):
    """Two chunks, the last with a few elements, and a rank whose loss is not finite."""
    values = integers((3,), 'f'), integers((1100,), 'f', seed=1)
    flat_gradients, _ = _flat(device, values)
    return flat_gradients.sent, flat([*(4 * value for value in values), [4, 0, 1, 0]])


def _averaged(device, flags):
    values = integers((3,), 'f'), integers((1100,), 'f', seed=1)
    flat_gradients, grads = _flat(device, values)
    received = device.put(flat([*(8 * value for value in values), [2], flags]).astype('f'))
    is_bad = device.put(numpy.zeros(3, 'i4'))
    with mock.patch.object(DeviceArray, 'data', property(_memory), create=True):
        flat_gradients._launch(False, received, None, is_bad, 0)
    factor = 0 if any(flags) else 4
    return flat([*grads, is_bad]), flat([*(factor * value for value in values), flags])


def averaged(device):
    return _averaged(device, [0, 0, 0])


def zeroed(device):
    return _averaged(device, [0, 1, 0])


SENT = {0: 2, 2: 10}  # rank -> what it sends, times the values; of two molecules each


def exchanged(device):
    """What is written to the other ranks' half of this turn, each chunk with its flag; the mean."""
    values = integers((3,), 'f'), integers((1100,), 'f', seed=1)
    flat_gradients, grads = _flat(device, values)
    others = {
        rank: flat([*(factor * value for value in values), [2, 0, 0, 0]]).astype('f')
        for rank, factor in SENT.items()
    }
    peers = flat_gradients.peers = Peers(device, flat_gradients, 1, others)
    is_bad = device.put(numpy.zeros(3, 'i4'))
    loss = device.put(numpy.array(1, 'f'))
    with mock.patch.object(DeviceArray, 'data', property(_memory), create=True):
        flat_gradients._exchange(4, loss, is_bad)
    expected = numpy.zeros((3, *peers.arrays[0].shape), 'u8')
    for other in SENT:
        expected[1, 1, other] = words(others[other], 7)
        mine = flat([*(4 * value for value in values), [4, 0, 0, 0]]).astype('f')
        expected[other, 1, 1] = words(mine, 7)
    mean = [2 * value for value in values]  # (2 + 4 + 10) / (2 + 4 + 2)
    found = flat([*peers.arrays, peers.turn, *grads, is_bad])
    return found, flat([*expected, [7] * 3, *mean, [0] * 3])


def summed_by_type(device):
    """Two runs, one of two chunks, and two blocks of channels; some rows are of no type."""
    rng = numpy.random.RandomState(0)
    n_rows = EMBED_CHUNK + 90
    ids, gy = rng.randint(-3, 23, n_rows).astype('i'), integers((n_rows, 35), 'd')
    ids[20:60] = 3
    ids[-1] = 19  # the last row of the last run
    plan = embed_launch(n_rows, 20, 35)
    sizes = *plan.arguments[:3], numpy.int32(EMBED_CHUNK + 32)
    plan = plan._replace(grid=(2, *plan.grid[1:]), arguments=sizes)
    with (
        mock.patch('chainer_bspmm.ops.embed_rows.embed_launch', lambda *sizes: plan),
        mock.patch(
            'chainer_bspmm.ops.embed_rows.sum_partials',
            lambda partials, parts: [partials.sum(axis=0)],
        ),
    ):
        result = embed_rows_backward(device.put(ids), device.put(gy), 20)
    return result.reshape(20, 35), embed_rows_backward(ids, gy, 20)


def _labelled():
    """Return x, of which the exponential is 0 or 1, and labels, of which some are ignored."""
    labels = numpy.random.RandomState(0).randint(-1, 2, (3, 43)).astype('i')
    return integers((3, 43), 'd') * 100, labels


def _on_both(device, function, kind, *arrays, **options):
    """Return what a function makes of arrays by the kernel, and on the host."""
    both = function(kind, *map(device.put, arrays), **options), function(kind, *arrays, **options)
    return tuple(flat(each if isinstance(each, tuple) else [each]) for each in both)


def cross_entropy(device):
    """Of blocks of 64 elements, the last with one."""
    launches = loss_launches.__wrapped__
    with mock.patch.multiple('chainer_bspmm.ops.mean_loss', LOSS_CHUNK=64, loss_launches=launches):
        return _on_both(device, mean_loss_forward, 'SIGMOID_CROSS_ENTROPY', *_labelled())


def cross_entropy_gradient(device):
    x, t = _labelled()
    count = numpy.asarray((t != -1).sum())
    gy = numpy.asarray(1.0 * count)
    return _on_both(device, mean_loss_backward, 'SIGMOID_CROSS_ENTROPY', x, t, gy, count)


def cross_entropy_along(device):
    """With accuracy and gradient, by a block of two warps."""
    with mock.patch('chainer_bspmm.cuda.plans.MAX_BLOCK', 64):
        return _on_both(device, training_loss, 'SIGMOID_CROSS_ENTROPY', *_labelled())


def absolute_error(device):
    """With NaN, and 0."""
    t = integers((7, 9), 'd', seed=1)
    x = integers((7, 9), 'd', {'d': 3}) + t
    x[2], t[3] = numpy.nan, x[3]
    options = dict(divisor=4, ignore_nan=True)
    return _on_both(device, mean_loss_forward, 'ABSOLUTE_ERROR', x, t, **options)


def squared_error_gradient(device):
    x, t = (integers((7, 20), 'd', seed=seed) for seed in (0, 1))
    gy = numpy.asarray(2.0)
    return _on_both(device, mean_loss_backward, 'SQUARED_ERROR', x, t, gy, divisor=4)


def staged(device):
    """The third slot of four, then the next; a thread has two quads, or one."""
    n_quads = 1024 + 5
    slots = device.put(numpy.arange(4 * 4 * n_quads, dtype='u4').reshape(4, 4 * n_quads))
    to = device.put(numpy.zeros_like(slots[:2]))
    position = device.put(numpy.array([2**32 - 2], 'u4'))
    plan = one_block(n_quads)
    kernel = buffers.kernels.load(0, 'staged_copy', 'f', plan.defines)
    for row in to:
        sizes = numpy.int32(n_quads), numpy.int32(4)
        kernel(plan.grid, plan.block, (slots, row, *sizes, position))
    return numpy.append(to, position), numpy.append(slots[2:], 0)


def reported(device):
    """Numbers of all sizes, to the second row, by two launches."""
    numbers = [device.put(numpy.array(5, kind)) for kind in ('f', 'd', 'e', 'i1', 'i8')]
    rows = device.put(numpy.full((2, len(numbers)), 2**64 - 1, numpy.uint64))
    device.reachable = [*numbers, rows[1]]
    to = Reports(types.SimpleNamespace(device=types.SimpleNamespace(id=0)))
    with mock.patch.object(reports, '_N_VALUES', 3):
        to.write(dict(enumerate(numbers)), device.put(numpy.array([rows[1].ctypes.data], 'u8')))
    expected = numpy.full(rows.shape, 2**64 - 1, numpy.uint64)
    for i, number in enumerate(numbers):
        expected[1, i : i + 1].view(number.dtype)[0] = number
    return rows, expected


def layer(device):
    """Two relations, rectified, by two blocks with two tiles each; sums in two parts."""
    spec = Layer(8, 5, 2, True, False, True, 1, False, 'relu')
    return _layer(device, spec)


def dropped_layer(device):
    """One relation that the rows themselves belong to, with dropout of results that may be 0."""
    spec = Layer(6, 6, 1, False, True, True, 1, False, 'identity')
    return _layer(device, spec, dropout_ratio=0.5)


def dropped_slices(device):
    """Rectified, by blocks that share the columns of a result."""
    spec = Layer(8, 16, 1, False, False, False, 0, False, 'relu')
    return _layer(device, spec, dropout_ratio=0.5, slices=2)


def layer_of_degrees(device):
    """Three matrices one after the other, as many biases, shared columns; sums in uneven parts."""
    spec = Layer(24, 24, 3, False, False, False, 3, True, 'identity')
    return _layer(device, spec, slices=2)


def _layer(device, spec, dropout_ratio=0.0, slices=1):
    """Results and gradients of a layer of integers."""
    rng = numpy.random.RandomState(0)
    n_rows, n_in, n_out, n_relations = 60, *spec[:3]
    shape = n_relations, n_rows, n_rows
    A = rng.randint(1, 3, shape) * (rng.uniform(size=shape) < 0.1)
    A[0, 32:48] = A[0, :, 16:32] = 0  # a tile each way without the first relation
    # Rows of the others with and without entries of each relation.
    for r in range(n_relations):
        A[r, r::4] = A[r, :, r::4] = 0
    x, gy = rng.randint(-2, 3, (n_rows, n_in)), rng.randint(-2, 3, (n_rows, n_out))
    W, W_self = rng.randint(-2, 3, (n_relations * n_out, n_in)), rng.randint(-2, 3, (n_out, n_in))
    b = rng.randint(-2, 3, (n_relations * n_out,))
    b_self = rng.randint(-2, 3, (spec.n_biases, n_out))
    has = dict(W=True, W_self=spec.has_self, b=spec.has_relation_bias, b_self=spec.n_biases)
    given = {'W': W, 'W_self': W_self, 'b': b, 'b_self': b_self.ravel()}
    given = {name: device.put(given[name].astype('f')) for name in given if has[name]}
    draw = 3, 1, device.put(numpy.array([5], 'u8'))

    def rows(stacked):
        flat = scipy.sparse.csr_matrix(stacked.transpose(1, 0, 2).reshape(-1, n_rows))
        return types.SimpleNamespace(
            indptr=device.put(flat.indptr),
            indices=device.put(flat.indices),
            data=device.put(flat.data.astype('f')),
        )

    small = Device(1, 60 << 20)
    with (
        mock.patch.object(kernels, 'device', lambda device_id: small),
        mock.patch(
            'chainer_bspmm.ops.graph_linear.launches.sum_partials', summed
        ),  # another kernel's
        mock.patch.multiple(
            'chainer_bspmm.ops.graph_linear.launches', LAYER_ROWS=(16,), LAYER_SLICES=(slices,)
        ),
        mock.patch(
            'chainer_bspmm.ops.graph_linear.launches.LAYER_THREADS',
            32 if slices > 1 else LAYER_THREADS,
        ),
    ):
        layer_launch.cache_clear()
        features = device.put(x.astype('f'))
        y = layer_forward(spec, rows(A), features, given, dropout_ratio, draw)
        found = layer_backward(
            spec,
            rows(A.transpose(0, 2, 1)),
            features,
            y,
            device.put(gy.astype('f')),
            given,
            dropout_ratio,
            more=features,
        )
        layer_launch.cache_clear()
    A[0] += spec.loop * numpy.eye(n_rows, dtype=int)
    if spec.by_relation:
        by_relation = W.reshape(n_relations, n_out, n_in)
    else:
        by_relation = W.reshape(n_out, n_relations, n_in).swapaxes(0, 1)
    value = numpy.einsum('rij,jk,rck->ic', A, x, by_relation) + b_self.sum(axis=0)
    value += has['W_self'] * (x @ W_self.T)
    value += has['b'] * numpy.einsum('rij,cr->ic', A, b.reshape(n_out, n_relations))
    factors = numpy.ones(value.shape)
    if dropout_ratio:
        factors = 2 * reference.kept(value.size, dropout_ratio, 3, 1, 5).reshape(value.shape)
    if spec.activation == 'relu':
        factors = factors * (value > 0)
    z = gy * factors
    S = numpy.einsum('rij,ic->rjc', A, z)
    axes = 'rck' if spec.by_relation else 'crk'
    expected = {
        'x': x + numpy.einsum('rjc,rck->jk', S, by_relation) + has['W_self'] * (z @ W_self),
        'W': numpy.einsum('rjc,jk->' + axes, S, x),
        'W_self': z.T @ x,
        'b': S.sum(axis=1).T,
        'b_self': numpy.tile(z.sum(axis=0), (spec.n_biases if spec.by_relation else 1, 1)),
    }
    names = ['x', *(name for name in given)]
    arrays = [array for name in names for array in _each(found[name])]
    return flat([y, *arrays]), flat([value * factors, *(expected[name] for name in names)])


def _each(found):
    return found if isinstance(found, list) else [found]


def partial_sums(device):
    """Two results of several chunks, one of which is the sum of two, from many rows."""
    sources = [device.put(integers((n, 100), 'f', seed=n)) for n in (70, 9)]
    device.reachable = list(sources)
    pending = PendingSums()
    first, second, third = (
        pending.add(source, start, shape, 'f')
        for source, start, shape in zip(
            (sources[0], sources[1], sources[0]), (1, 20, 50), ((40,), (40,), (5, 10))
        )
    )
    device.reachable += [first, third]
    pending.chain(first, second)
    pending.launch()
    sums = sources[0].sum(axis=0)
    expected = sums[1:41] + sources[1][:, 20:60].sum(axis=0)
    return flat([first, third]), flat([expected, sums[50:]])


def _on(device, adj):
    arrays = {name: device.put(getattr(adj, name)) for name in adj._integers}
    return adj.replace(data=None if adj.data is None else device.put(adj.data), **arrays)


def rows_of_relations(device):
    """In any order; of some rows more entries than are read at once."""
    rng = numpy.random.RandomState(0)
    counts = rng.randint(0, 7, 40)
    adj = BatchedCSR(
        numpy.concatenate([[0], counts.cumsum()]),
        rng.randint(0, 120, counts.sum()),
        numpy.array([0, 40]),
        data=integers((counts.sum(),), 'f'),
        n_relations=3,
    )
    made = build.relation_rows(_on(device, adj))
    return flat(made[:-1]), flat(build.relation_rows(adj)[:-1])


def rows_of_scaled_relations(device):
    """Also the values of the transpose."""
    ones = numpy.ones((2, 4, 4)) - numpy.array([numpy.eye(4), numpy.eye(4)[::-1]])
    ones[:, 3] = ones[:, :, 3] = 0
    ones[1, 0, 3] = ones[1, 3, 0] = 1
    adj = BatchedCSR.from_matrices([ones, ones[:, :2, :2]])
    made = build.relation_rows(_on(device, adj), numpy.dtype('d'))
    plain, degrees = build.relation_rows(adj), numpy.diff(adj.indptr)
    rows = numpy.repeat(numpy.arange(2 * adj.n_rows), numpy.diff(plain.indptr)) // 2
    expected = plain._replace(data=1 / degrees[plain.indices], transposed_data=1 / degrees[rows])
    return flat(made), flat(expected)
