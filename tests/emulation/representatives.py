"""Representatives: small uses of every kernel that cover all of its code. They run under the
sanitizers, and planted faults must change their results.

Each is a function of an emulated device that raises AssertionError if a result is wrong. Most call
the functions of the operation's tests, with sizes that leave out no line of the kernel.
"""

import types
from unittest import mock

import numpy
import pytest

import chainer
from chainer import optimizer_hooks as hooks
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR, BatchedSELL
from chainer_bspmm.cuda.partial_sums import PendingSums
from chainer_bspmm.cuda.plans import Device, one_block
from chainer_bspmm.dataset.gather_batch import gather_launch
from chainer_bspmm.ops.bspmm import csr_launch
from chainer_bspmm.ops.embed_rows import EMBED_CHUNK, embed_launch
from chainer_bspmm.ops.graph_linear import launches
from chainer_bspmm.ops.graph_linear.launches import layer_launch
from chainer_bspmm.ops.mean_loss import loss_launches
from chainer_bspmm.papers import policy
from chainer_bspmm.training import reports, staging
from chainer_bspmm.training.flat_gradients import FlatGradients
from chainer_bspmm.training.peer_memory import PeerMemory, PeerSums
from chainer_bspmm.training.reports import Reports
from tests.emulation.kernel_cases import batch, integers, Peers, share_channels, summed, words
from tests.emulation import test_degree_rows as degree_rows
from tests.emulation import test_fused_update as fused_update
from tests.emulation import test_gather_batch as gather_batch
from tests.emulation import test_sum_partials as partial_sums
from tests.emulation import test_transpose_csr as transpose
from tests.ops import test_activated_linear as activated
from tests.ops import test_dropout as dropout
from tests.ops import test_edge_film as edge_film
from tests.ops import test_embed_rows as embed_rows
from tests.ops import test_gated_launches as gated
from tests.ops import test_graph_linear_launches as layers
from tests.ops import test_layer_end as layer_end
from tests.ops import test_layer_norm as layer_norm
from tests.ops import test_long_rows as long_rows
from tests.ops import test_mean_loss as mean_loss
from tests.ops import test_segment_softmax as softmax
from tests.ops import test_segments as segments
from tests.papers import test_products as products
from tests.papers import test_spmv as spmv
from tests.sparse import test_relations as relations
from tests.support.data_sets import molecule_set
from tests.support.products import check_product, check_sampled


def use(check, *arguments, **options):
    """Return a use that calls a function of a test."""
    return lambda gpu: check(gpu, *arguments, **options)


# --- products ---


product = use(check_product, batch('mixed', 'f'), 'f', 8)


def pipelined(gpu):
    """Threads have two vectors, and up to four rows."""
    adj = batch('mixed', 'f')
    plan = csr_launch(adj.n_rows, adj.n_cols, 24, 4, lanes=3, columns=2, rows_per_thread=4, block=9)
    with mock.patch('chainer_bspmm.ops.bspmm.bspmm_launch', lambda *_: plan):
        check_product(gpu, adj, 'f', 24)


pieces_of_four = mock.patch('chainer_bspmm.ops.bspmm.piece_length', lambda *_: 4)


def long_adj():
    """Return rows that begin or end with a chunk of four, meet in one, or cover several or many."""
    return long_rows.rows_of([0, 5, 6, 1, 0, 8, 12, 2, 37, 4, 0], 'f')


# There are one vector, three lanes and a residual.
in_pieces = pieces_of_four(use(long_rows.check, long_adj(), 'f', 36, with_residual=True))
sampled_in_pieces = pieces_of_four(use(long_rows.check_sampled, long_adj(), 36))
sampled = use(check_sampled, batch('mixed', 'f'), 'f', 36)
sampled_coo = use(products.check_sampled, 'mixed', 'f', 36)


# --- other operations ---


modulated = use(edge_film.check, batch('relations', 'f'), 'f', 12)
# Rows have eight lanes, and the last block has fewer rows.
normalised = use(layer_norm.check, 'f', (41, 32))
# Each row has nine lanes.
summed_softmax = use(activated.check, 'f', (3, 41, 36))


def rows_of_degrees(gpu):
    """One batch has values and spare entries, the other one implicit ones without spare entries."""
    degree_rows.check(gpu, degree_rows.symmetric(), 7, 'f', 2)
    degree_rows.check(gpu, BatchedCSR.from_matrices([numpy.ones((3, 3)), numpy.eye(2)]), 7, 'f', 2)


recurrent = use(gated.check, 'f', 19, (6, 3, 5), 'given')
# The state is x, and a chunk has columns of x and of the message.
recurrent_rows = use(gated.check, 'f', 19, (5, 30, 5), 'x')
# There is no message, and there are more columns than in a chunk.
gated_rows = use(gated.check, 'f', 19, (37, 0, 2), is_tanh=False)
# Sums are computed by another kernel, which would take longest of all.
without_sums = mock.patch('chainer_bspmm.ops.gates.launches.sum_partials', summed)
# One input has two tiles, and rows have two parts, of which the last is short.
weights_of_gates = without_sums(use(gated.check, 'f', 70, (33, 3, 5)))
# The state is x, which is two tiles wide.
weights_of_recurrent_rows = without_sums(use(gated.check, 'f', 19, (33, 3, 33), 'x'))


def maximum(gpu):
    """Segments have two lanes, of which one is idle in the second segment."""
    x = -1 - abs(integers((20, 8), 'f'))
    x[3] = numpy.nan
    segments.check(gpu, 'max', x, (19, 1))


# One segment begins within a chunk of 256 rows and ends with one, another one the other way round.
long_segments = use(segments.check, 'sum', integers((900, 3), 'f'), (9, 503, 288, 100))
# Segments are short and long, and all rows of the third have weight 0.
weighted_sum = use(segments.check_weighted, 'sum', 3, 'f', (9, 388, 3, 300))
weighted_maximum = use(segments.check_weighted, 'max', 3, 'f', (9, 388, 3, 300))
broadcast = use(segments.check_broadcast, integers((3, 8), 'f'), (0, 9, 3), spare=2)
weighted_broadcast = use(segments.check_weighted_broadcast, 'f', 8, (9, 321, 370), 2)
# Segments cross the border between two chunks of a block.
long_broadcast = use(segments.check_broadcast, integers((3, 3), 'f'), (9, 321, 370))
# The last rows belong to no segment.
row_softmaxes = use(softmax.check, 'f', 12, (4, 0, 1, 8), 300)
weighted_softmaxes = use(softmax.test_weights, 'f', 12, (4, 3, 0, 2))


def transposed(gpu):
    """Blocks have two warps."""
    indices = numpy.arange(150, dtype=numpy.int32) ** 2 % 40
    adj = BatchedCSR(numpy.array([0, 3, 3, 150] + [150] * 37), indices, numpy.array([0, 40]))
    transpose.check(gpu, adj)


# There are two blocks.
dropped = use(dropout.test_dropout, 'f', (137, 9), (1, 2, 5))

# Rows have more vectors than a block has columns, or few or single elements, with several lanes and
# blocks.
layer_ended = use(layer_end.test_bias_and_activation, 'f', (3, 300), 'relu', True)
layer_ended_and_dropped = use(layer_end.test_dropout_is_that_of_the_step, 'f', (5, 7), 'identity')
layer_summed = use(layer_end.test_sums_over_neighbours, 'f', (150, 8), True, False)
layer_spread = use(
    layer_end.test_gradients_of_sums_over_neighbours, 'f', (150, 8), ('z', 'bias'), False
)
layer_begun = use(layer_end.test_gradients, 'f', (600, 8), 'tanh', True)
layer_begun_in_singles = use(layer_end.test_gradients, 'f', (5, 7), 'sigmoid', True)


def gathered(gpu, check):
    """A warp gathers several graphs."""
    index = (3, 0, 6, 5, 5, 2, 1, 7, 0) * 4

    def two_warps(*sizes):
        return gather_launch(*sizes)._replace(block=(64, 1, 1))

    with mock.patch('chainer_bspmm.dataset.gather_batch.gather_launch', two_warps):
        check(gpu, molecule_set(n_relations=2), index)


def gathered_packed(gpu):
    gathered(gpu, gather_batch.check_exact)


def gathered_folded(gpu):
    """Molecules are smaller and larger than the padding."""
    gathered(gpu, lambda *given: gather_batch.check_folded(*given, padded_to=12, spare=(70, 1)))


def summed_by_type(gpu):
    """There are two runs, one of two chunks, and two blocks of channels; some rows have no type."""
    n_rows = EMBED_CHUNK + 90
    ids = numpy.random.RandomState(0).randint(-3, 23, n_rows).astype('i')
    ids[20:60] = 3
    ids[-1] = 19  # the last row of the last run
    plan = embed_launch(n_rows, 20, 35)
    sizes = *plan.arguments[:3], numpy.int32(EMBED_CHUNK + 32)
    plan = plan._replace(grid=(2, *plan.grid[1:]), arguments=sizes)
    with mock.patch('chainer_bspmm.ops.embed_rows.embed_launch', lambda *sizes: plan):
        embed_rows.check(gpu, 'd', ids, 20, 35)


def cross_entropy(gpu):
    """Blocks have 64 elements, the last one has one."""
    launches = loss_launches.__wrapped__
    with mock.patch.multiple('chainer_bspmm.ops.mean_loss', LOSS_CHUNK=64, loss_launches=launches):
        check_loss(gpu, 'SIGMOID_CROSS_ENTROPY', (3, 43))


@mock.patch('chainer_bspmm.ops.mean_loss.loss_launches', loss_launches.__wrapped__)
@mock.patch('chainer_bspmm.cuda.plans.MAX_BLOCK', 64)
def cross_entropy_along(gpu):
    """A block has two warps, and also computes accuracy and gradient."""
    check_loss(gpu, 'SIGMOID_CROSS_ENTROPY', (3, 43))
    mean_loss.test_what_comes_along(gpu, 'SIGMOID_CROSS_ENTROPY', 'd', (3, 43))


def check_loss(gpu, kind, shape):
    mean_loss.check(gpu, kind, 'd', *mean_loss.arrays_of(kind, 'd', shape))


squared_error = use(check_loss, 'SQUARED_ERROR', (7, 20))
# Values are also NaN and 0.
absolute_error = use(mean_loss.test_values_that_are_nan, 'ABSOLUTE_ERROR', True)


def layer(gpu, width_in, width_out, ratio=0.0, slices=1, **options):
    """There are two blocks with two tiles each, and sums have two parts."""
    gpu.sizes = Device(1, 60 << 20)
    with mock.patch.multiple(
        launches,
        LAYER_ROWS=(16,),
        LAYER_SLICES=(slices,),
        LAYER_THREADS=32 if slices > 1 else launches.LAYER_THREADS,
    ):
        layer_launch.cache_clear()
        layers.check(gpu, 'f', layers.layer(width_in, width_out, **options), 60, ratio=ratio)
    layer_launch.cache_clear()


layer_of_relations = use(
    layer, 8, 5, n_relations=2, has_self=True, has_relation_bias=True, n_biases=1
)
rectified_layer = use(layer, 8, 5, n_relations=2, has_self=True, n_biases=1, activation='relu')
# Rows are their own neighbours in the only relation.
dropped_layer = use(layer, 6, 6, 0.5, n_relations=1, loop=True, has_relation_bias=True, n_biases=1)
# The result is rectified, and blocks share its columns.
dropped_slices = use(layer, 8, 16, 0.5, 2, n_relations=1, activation='relu')
# There are three separate matrices and biases, blocks share columns, and sums have uneven parts.
layer_of_degrees = use(layer, 24, 24, 0.0, 2, n_relations=3, n_biases=3, by_relation=True)

# There are many rows, and results have several chunks.
sums_of_partials = use(partial_sums.check_rows, 'f', 70)


def sums_of_many_columns(gpu):
    with mock.patch('chainer_bspmm.cuda.partial_sums.MANY', 1):
        partial_sums.check_rows(gpu, 'f', 70)


def tied_sums(gpu):
    with mock.patch('chainer_bspmm.cuda.step.current') as current:
        current.return_value.sums = sums = PendingSums()
        partial_sums.test_tied_parameters_are_summed_together(gpu, sums)


# Entries are not sorted, and some rows have more of them than are read at once.
rows_of_relations = use(relations.check_random, 40, 7, 0)
# Values of the transpose are computed, too.
rows_of_scaled_relations = use(relations.test_reciprocal_degrees, 'd', 0)


def updated(gpu):
    """The norms are too small for clipping."""
    clipping = hooks.GradientClipping(1e9), hooks.GradientClipping(1e8)
    shapes = (1100,), (3,)
    make = fused_update.OPTIMIZERS['SGD']
    fused_update.check(gpu, make, 'f', shapes, (hooks.WeightDecay(2), *clipping), 2)


def updated_by_other_rules(gpu):
    add_hooks = hooks.Lasso(0.5), hooks.GradientHardClipping(-1.2, 0.9)
    for name in ('MOMENTUM_SGD', 'RMSPROP', 'AMSGRAD'):
        fused_update.check(gpu, fused_update.OPTIMIZERS[name], 'd', [(37,)], add_hooks, 2)


# --- kernels of the papers ---


def sliced(gpu):
    """Slices have up to 64 rows and two warps, and the last block has warps without a slice."""
    adj = BatchedCSR.from_matrices([integers((n, n), 'f') for n in (35, 3, 2)])
    products.check(gpu, 'sell', BatchedSELL(adj, 64, True), 'f', 9)


def sliced_by_two_blocks(gpu):
    """Blocks share the columns of a slice."""
    with pytest.MonkeyPatch.context() as patch:
        share_channels(patch, policy, 'sell_launch')
        products.check(gpu, 'sell', BatchedSELL(batch('small', 'f'), 2), 'f', 33)


sliced_vector = use(spmv.check, batch('mixed', 'f'), 'f', 'sell 7 sorted')
# Rows have several lanes, and need several rounds.
vector = use(spmv.check, BatchedCSR.from_matrices([integers((n, n), 'f') for n in (35, 3)]), 'f')
# If there are nine columns, 16 lanes share a row. Blocks have 8 rows, the last one has 5.
swa = use(products.check, 'swa', batch('mixed', 'f'), 'f', 9)
swa_blocked = use(products.check, 'swa_blocked', batch('mixed', 'f'), 'f', 80)


def swa_full(gpu):
    """Of two blocks of 16 sub-warps, two sub-warps have no row in the last graph, two no graph."""
    adj = BatchedCSR.from_matrices([1 + abs(integers((n, n), 'f')) for n in (7, 5)])
    products.check(gpu, 'swa', adj, 'f', 16)


st_shared = use(products.check, 'st_shared', batch('relations', 'f'), 'f', 5)
st_blocked = use(products.check, 'st_blocked', batch('relations', 'f'), 'f', 5)
st_global = use(products.check, 'st_global', batch('duplicates', 'f'), 'f', 5)
# Entries need several rounds of a block, and columns of a sub-warp; the matrix is transposed.
st_shared_wide = use(products.check, 'st_shared', batch('mixed', 'f'), 'f', 33, trans=True)
st_blocked_wide = use(products.check, 'st_blocked', batch('mixed', 'f'), 'f', 33)
st_global_wide = use(products.check, 'st_global', batch('mixed', 'f'), 'f', 33, trans=True)


# --- steps and ranks ---


def assert_same(actual, expected):
    """Check that all elements of two lists of arrays are equal."""
    flat = [numpy.concatenate([numpy.ravel(a).astype('d') for a in s]) for s in (actual, expected)]
    numpy.testing.assert_array_equal(*flat)


def summed_over_peers(gpu):
    """Vectors of 300 elements are summed in turn 3, and again with another vector of this rank."""
    n, n_ranks, rank = 300, 3, 1
    peers = PeerMemory.__new__(PeerMemory)
    vectors = [integers((n,), 'f', seed=r) for r in range(4)]
    arrays = [gpu.put(numpy.zeros((2, n_ranks, n), 'u8')) for _ in range(n_ranks)]
    gpu.reachable += arrays
    for other in (0, 2):
        arrays[rank][1, other] = words(vectors[other], 3)
    peers.slots = [None, numpy.array([array.ctypes.data for array in arrays], 'u8')]
    peers.data = peers.slots[1]
    peers.vectors = [(1, numpy.dtype('d')), (n, numpy.dtype('f'))]
    peers.turns = gpu.put(numpy.array([0, 2], 'u4'))
    sums = PeerSums(types.SimpleNamespace(rank=rank), peers)
    sums._next, sums._alone = 1, False
    total = sums.sum(gpu.put(vectors[1]))
    sums._next, sums._alone = 1, True
    again = sums.sum(gpu.put(vectors[3]))
    sent = numpy.zeros((2, 2, n_ranks, n), 'u8')
    sent[:, 1, rank] = words(vectors[1], 3)
    others = vectors[0] + vectors[2]
    expected = [others + vectors[1], others + vectors[3], *sent, [0, 3]]
    assert_same([total, again, arrays[0], arrays[2], peers.turns], expected)


VALUES = integers((3,), 'f'), integers((1100,), 'f', seed=1)  # two chunks, the last is short


def _flat(gpu):
    """Return `FlatGradients` of rank 1 of 3, whose loss is not finite, and its gradients."""
    link = chainer.Link()
    with link.init_scope():
        link.v, link.w = (chainer.Parameter(gpu.put(value)) for value in VALUES)
    link.v.grad, link.w.grad = grads = [gpu.put(value) for value in VALUES]
    gpu.reachable += grads
    comm = types.SimpleNamespace(rank=1, size=3, allreduce_grad_dtype=None)
    place = types.SimpleNamespace(alloc_pinned_memory=bytearray)
    with mock.patch.object(cuda.cupy, 'cuda', place):
        flat_gradients = FlatGradients(types.SimpleNamespace(target=link, communicator=comm))
        flat_gradients.pack(4, gpu.put(numpy.array(numpy.inf, 'f')))
    return flat_gradients, grads


def packed(gpu):
    assert_same([_flat(gpu)[0].sent], [*(4 * value for value in VALUES), [4, 0, 1, 0]])


def averaged(gpu, flags=(0, 0, 0)):
    flat_gradients, grads = _flat(gpu)
    sent = numpy.concatenate([*(8 * value for value in VALUES), [2], flags]).astype('f')
    is_bad = gpu.put(numpy.zeros(3, 'i4'))
    flat_gradients._launch(False, gpu.put(sent), None, is_bad, 0)
    factor = 0 if any(flags) else 4
    assert_same([*grads, is_bad], [*(factor * value for value in VALUES), flags])


zeroed = use(averaged, (0, 1, 0))


def exchanged(gpu):
    """The other ranks' memory, the turns of all chunks, and the mean gradients are compared."""
    flat_gradients, grads = _flat(gpu)

    def sent(factor, n_molecules):
        parts = [factor * value for value in VALUES]
        return numpy.concatenate([*parts, [n_molecules, 0, 0, 0]]).astype('f')

    others = {0: sent(2, 2), 2: sent(10, 2)}
    peers = flat_gradients.peers = Peers(gpu, flat_gradients, 1, others)
    is_bad = gpu.put(numpy.zeros(3, 'i4'))
    flat_gradients._exchange(4, gpu.put(numpy.array(1, 'f')), is_bad)
    expected = numpy.zeros((3, *peers.arrays[0].shape), 'u8')
    for other in others:
        expected[1, 1, other] = words(others[other], 7)
        expected[other, 1, 1] = words(sent(4, 4), 7)
    mean = [2 * value for value in VALUES]  # (2 + 4 + 10) / (2 + 4 + 2)
    actual = [*peers.arrays, peers.turn, *grads, is_bad]
    assert_same(actual, [*expected, [7] * 3, *mean, [0] * 3])


def staged(gpu):
    """The third and fourth of four slots are copied; a thread has one or two quads."""
    n_quads = 1024 + 5
    slots = gpu.put(numpy.arange(4 * 4 * n_quads, dtype='u4').reshape(4, 4 * n_quads))
    to = gpu.put(numpy.zeros_like(slots[:2]))
    position = gpu.put(numpy.array([2**32 - 2], 'u4'))
    plan = one_block(n_quads)
    kernel = staging.kernels.load(0, 'staged_copy', 'f', plan.defines)
    for row in to:
        sizes = numpy.int32(n_quads), numpy.int32(4)
        kernel(plan.grid, plan.block, (slots, row, *sizes, position))
    assert_same([to, position], [slots[2:], [0]])


def reported(gpu):
    """Two launches write numbers of all sizes to the second row."""
    numbers = [gpu.put(numpy.array(5, kind)) for kind in ('f', 'd', 'e', 'i1', 'i8')]
    rows = gpu.put(numpy.full((2, len(numbers)), 2**64 - 1, numpy.uint64))
    gpu.reachable += [*numbers, rows[1]]
    to = Reports(types.SimpleNamespace(device=types.SimpleNamespace(id=0)))
    with mock.patch.object(reports, '_N_VALUES', 3):
        to.write(dict(enumerate(numbers)), gpu.put(numpy.array([rows[1].ctypes.data], 'u8')))
    expected = numpy.full(rows.shape, 2**64 - 1, numpy.uint64)
    for i, number in enumerate(numbers):
        expected[1, i : i + 1].view(number.dtype)[0] = number
    numpy.testing.assert_array_equal(rows, expected)
