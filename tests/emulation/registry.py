"""Registry of the kernels, with their representatives and the variants that nvcc compiles."""

import itertools
import typing

import numpy

from chainer_bspmm.cuda import partial_sums
from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.ops.bspmm import AHEAD_LONG, sum_pieces_launch
from chainer_bspmm.ops.embed_rows import embed_launch
from chainer_bspmm.ops.gates.launches import gated_launch, gated_weights_launch
from chainer_bspmm.ops.graph_linear.launches import Layer, layer_launch
from chainer_bspmm.ops.mean_loss import LOSS_CHUNK
from chainer_bspmm.training import flat_gradients, fused_update, peer_memory, reports
from tests.emulation import representatives as use

# Widest and narrowest vector of every storage dtype.
STORAGE = [('e', 8), ('e', 1), ('f', 4), ('f', 1), ('d', 2), ('d', 1)]
H200 = Device(132, 60 << 20)


class Kernel(typing.NamedTuple):
    """Uses of a kernel, and compile-time constants with which nvcc must not spill registers."""

    uses: tuple  # representatives; the first one runs most of the code
    # Variants as (name, value) pairs without VECTOR, which need most registers, or have widths that
    # are not whole quads. Each is combined with the next dtype and vector of `storage`.
    constants: list = [()]
    storage: list = STORAGE
    widest: int = 8  # largest number of elements of a vector
    reads_ahead: bool = False  # only AddressSanitizer notices that it reads too far

    def compiled(self):
        """Return the variants that nvcc compiles, as [(dtype, constants), ...]."""
        n = max(len(self.storage), len(self.constants))
        turns = zip(itertools.cycle(self.storage), itertools.cycle(self.constants))
        return [
            (dtype, (('VECTOR', min(width, self.widest)), *constants))
            for (dtype, width), constants in itertools.islice(turns, n)
        ]


def table(names, *rows, **others):
    """Return constants with the values of each row, and with `others`, which all rows share."""
    return [(*zip(names, row, strict=True), *others.items()) for row in rows]


def dots(**others):
    """Return constants of sampled products."""
    return table(('LANES', 'TILE'), (1, 1), (2, 4), (4, 4), (8, 2), (16, 2), (32, 4), **others)


def gated_step(n_rows, widths, has_state, is_gradient, itemsize, is_same=False):
    plan = gated_launch(n_rows, widths, has_state, is_same, 1, itemsize, H200, is_gradient)
    return (*plan.defines[1:], ('TANH', int(has_state)))


def gated_weights(widths, has_state, itemsize, is_same=False):
    return gated_weights_launch(2300, widths, has_state, is_same, 1, itemsize, H200).defines[1:]


def graph_linear(n_rows, is_backward, itemsize, has_quads, *layer):
    layer = Layer(*layer)
    plan = layer_launch(layer, n_rows, itemsize, has_quads, H200, is_backward)
    has_dropout = int(layer.activation == 'relu')
    return (*plan.defines[1:], ('WEIGHTED', 1), ('DROPOUT', has_dropout), ('FEATURES', 1))


def flat_gradient(is_pack, flat, loss, n_peers):
    return flat_gradients.defines(is_pack, numpy.dtype(flat), numpy.dtype(loss), n_peers)[1:]


ST = table(('SUBWARP', 'WEIGHTS', 'TRANS'), (4, 1, 0), (32, 0, 1), (1, 0, 0), (32, 1, 1))
# Largest values that the policy chooses.
CSR = table(
    ('WEIGHTS', 'RESIDUAL', 'AHEAD', 'COLUMNS', 'PIPELINED', 'STREAM', 'OFFSET'),
    (1, 1, 3, 2, 1, 1, 'unsigned'),
    (0, 0, 5, 1, 0, 0, 'unsigned'),
    (2, 1, 3, 2, 1, 1, 'size_t'),
    (1, 0, 3, 4, 0, 1, 'unsigned'),
    (1, 1, 3, 2, 1, 0, 'size_t'),
    (2, 0, 5, 1, 1, 0, 'unsigned'),
) + table(
    ('WEIGHTS', 'RESIDUAL', 'STREAM', 'OFFSET'),
    (1, 1, 1, 'unsigned'),
    (0, 0, 0, 'unsigned'),
    (2, 1, 1, 'size_t'),
    (1, 0, 1, 'unsigned'),
    (1, 1, 0, 'size_t'),
    (2, 0, 0, 'unsigned'),
    AHEAD=AHEAD_LONG,
    COLUMNS=1,
    PIPELINED=0,
    PIECES=1,
)
KERNELS = {
    'bspmm_csr': Kernel((use.pipelined, use.product, use.in_pieces), CSR, reads_ahead=True),
    'sum_pieces': Kernel(
        (use.in_pieces,), [sum_pieces_launch(2, 64, 64).defines[1:]], reads_ahead=True
    ),
    'bsddmm_csr': Kernel(
        (use.sampled, use.sampled_in_pieces), dots() + dots(PIECES=1), reads_ahead=True
    ),
    'bsddmm_coo': Kernel((use.sampled_coo,), dots()),
    'edge_film': Kernel(
        (use.modulated,),
        table(
            ('RESULT', 'WEIGHTED'),
            ('BY_FILM', 1),
            ('OUTPUT', 0),
            ('BY_MESSAGES', 1),
            ('BY_FILM', 0),
            ('OUTPUT', 1),
            ('BY_MESSAGES', 0),
        ),
    ),
    'gated_step': Kernel(
        (use.recurrent, use.recurrent_rows, use.gated_rows),
        [
            gated_step(2300, (64, 64, 64), True, False, 4),
            gated_step(2300, (33, 5, 7), False, True, 4),
            gated_step(18400, (128, 128, 128), True, True, 4, is_same=True),
            gated_step(600, (65, 1, 65), True, False, 4, is_same=True),
            gated_step(18400, (64, 64, 64), True, True, 8),
            gated_step(2300, (64, 0, 33), False, False, 8),
        ],
        widest=4,
    ),
    'gated_weights': Kernel(
        (use.weights_of_gates, use.weights_of_recurrent_rows),
        [
            gated_weights((64, 64, 64), True, 4),
            gated_weights((33, 5, 7), False, 4),
            gated_weights((64, 64, 64), True, 4, is_same=True),
            gated_weights((16, 0, 33), False, 4),
            gated_weights((64, 64, 64), True, 8),
            gated_weights((3, 5, 7), True, 8),
        ],
        widest=4,
    ),
    'layer_norm': Kernel(
        (use.normalised,),
        table(('LANES', 'GRADIENT'), (32, 1), (1, 0), (8, 1), (4, 0), (16, 0), (32, 1)),
    ),
    'row_softmax': Kernel(
        (use.summed_softmax,),
        table(('LANES', 'GRADIENT'), (32, 0), (1, 1), (16, 0), (4, 1), (16, 1), (32, 0)),
    ),
    'degree_rows': Kernel(
        (use.rows_of_degrees,),
        table(('RELATIONS', 'WEIGHTED'), (7, 1), (1, 0), (7, 0), (7, 1), (16, 1), (3, 0)),
    ),
    'segment_reduce': Kernel(
        (use.long_segments, use.maximum, use.weighted_sum, use.weighted_maximum),
        table(
            ('AHEAD', 'OPERATION', 'COMBINE', 'WEIGHTED'),
            (8, 'SUM', 1, 0),
            (4, 'MAX', 0, 1),
            (8, 'MAX', 0, 1),
            (4, 'SUM', 1, 1),
            (8, 'MAX', 1, 1),
            (8, 'SUM', 0, 0),
        ),
    ),
    'segment_broadcast': Kernel(
        (use.long_broadcast, use.broadcast, use.weighted_broadcast),
        table(('WEIGHTED',), (1,), (0,), (1,), (0,), (0,), (1,)),
    ),
    'segment_softmax': Kernel(
        (use.row_softmaxes, use.weighted_softmaxes),
        table(('GRADIENT', 'WEIGHTED'), (1, 1), (0, 0), (0, 1), (1, 0), (0, 0), (1, 1)),
    ),
    'transpose_csr': Kernel((use.transposed,)),
    'bspmm_sell': Kernel(
        (use.sliced, use.sliced_by_two_blocks, use.sliced_vector),
        # TILE is the number of columns of x that the policy gives to a thread.
        table(
            ('TILE', 'WEIGHTS', 'WHOLE_WARPS'),
            (1, 1, 1),
            (8, 1, 0),
            (2, 0, 1),
            (8, 1, 1),
            (4, 1, 0),
            (8, 0, 0),
        ),
    ),
    'spmv_csr': Kernel(
        (use.vector,), table(('LANES', 'WEIGHTS'), (1, 1), (2, 0), (4, 1), (8, 1), (16, 0), (32, 1))
    ),
    'bspmm_swa': Kernel(
        (use.swa_full, use.swa, use.swa_blocked),
        # They are given to the dtypes in turn, so that every dtype gets three.
        table(('SUBWARP', 'WEIGHTS'), (1, 0), (2, 1), (4, 2), (8, 0), (16, 1), (32, 2)),
    ),
    # These kernels add one element at a time, and have no atomics on half.
    'bspmm_st_shared': Kernel(
        (use.st_blocked, use.st_shared, use.st_shared_wide, use.st_blocked_wide),
        ST,
        STORAGE[2:],
        widest=1,
    ),
    'bspmm_st_global': Kernel((use.st_global, use.st_global_wide), ST, STORAGE[2:], widest=1),
    'dropout': Kernel((use.dropped,), table(('KIND',), *[('DROPOUT',), ('MASK',)] * 3), widest=4),
    'graph_linear': Kernel(
        (
            use.layer_of_relations,
            use.rectified_layer,
            use.dropped_layer,
            use.dropped_slices,
            use.layer_of_degrees,
        ),
        # The largest numbers of matrices whose gradients a thread holds, with half and all of the
        # threads.
        [
            graph_linear(2300, True, 2, True, 64, 64, 6, False, False, False, 6, True, 'sigmoid'),
            graph_linear(18400, True, 2, False, 63, 61, 6, False, False, True, 0, False, 'relu'),
            graph_linear(18400, True, 4, True, 64, 64, 4, True, False, True, 1, False, 'tanh'),
            graph_linear(18400, True, 4, False, 64, 62, 7, False, False, False, 7, True, 'sigmoid'),
            graph_linear(18400, False, 8, True, 64, 64, 4, True, False, True, 1, False, 'tanh'),
            graph_linear(18400, True, 8, True, 64, 96, 1, False, True, True, 1, False, 'relu'),
        ],
        reads_ahead=True,
    ),
    'layer_end': Kernel(
        (
            use.layer_ended,
            use.layer_begun,
            use.layer_begun_in_singles,
            use.layer_ended_and_dropped,
            use.layer_summed,
            use.layer_spread,
        ),
        table(
            ('ACTIVATION', 'DROPOUT', 'BIAS', 'SUMMED', 'WEIGHTED', 'LOOP', 'ADDED', 'BACKWARD'),
            ('RELU', 1, 1, 0, 0, 0, 1, 0),
            ('IDENTITY', 1, 1, 1, 1, 0, 0, 0),
            ('TANH', 0, 1, 1, 1, 0, 0, 1),
            ('RELU', 1, 1, 1, 0, 1, 0, 1),
            ('TANH', 0, 1, 1, 0, 1, 1, 0),
            ('IDENTITY', 0, 1, 0, 0, 0, 0, 1),
            ('SIGMOID', 0, 1, 1, 0, 0, 0, 0),
            ('SIGMOID', 0, 1, 0, 0, 0, 0, 1),
            WIDTH=256,
        ),
        widest=4,
        reads_ahead=True,
    ),
    'sum_partials': Kernel(
        (use.sums_of_partials, use.sums_of_many_columns, use.tied_sums),
        [partial_sums.defines(each)[1:] for each in (1, 4)],
    ),
    'relation_rows': Kernel(
        (use.rows_of_relations, use.rows_of_scaled_relations),
        table(('VALUES',), ('RECIPROCALS',), ('NONE',), ('GIVEN',)),
    ),
    'gather_batch': Kernel(
        (use.gathered_packed, use.gathered_folded),
        table(('LABELS_ONLY', 'FOLDED'), (0, 0), (1, 0), (0, 1)),
    ),
    'fused_update': Kernel(
        (use.updated, use.updated_by_other_rules),
        [
            fused_update.defines(numpy.dtype(dtype), rule)[1:]
            for rule in (
                'NONE',
                'ADAM',
                'SGD',
                'MOMENTUM_SGD',
                'RMSPROP',
                'RMSPROP_EPS_INSIDE',
                'AMSGRAD',
            )
            for dtype in 'fd'
        ],
        [('f', 1), ('d', 1)],
    ),
    'flat_gradients': Kernel(
        (use.packed, use.averaged, use.zeroed, use.exchanged),
        [
            flat_gradient(True, 'f', 'f', 0),
            flat_gradient(False, 'f', 'f', 0),
            flat_gradient(True, 'e', 'd', 0),
            flat_gradient(False, 'd', 'f', 0),
            flat_gradient(True, 'd', 'e', 8),
            flat_gradient(True, 'e', 'd', 2),
            flat_gradient(True, 'f', 'f', 8),
        ],
        widest=1,
    ),
    'peer_sum': Kernel((use.summed_over_peers,), [peer_memory.defines(n)[1:] for n in (2, 8)]),
    'embed_grad': Kernel(
        (use.summed_by_type,), [embed_launch(2300, 118, 64).defines[1:]], widest=1
    ),
    'mean_loss': Kernel(
        (use.cross_entropy, use.cross_entropy_along, use.absolute_error, use.squared_error),
        table(
            ('KIND', 'IGNORE_NAN', 'COUNTED', 'GRADIENT', 'COMBINE', 'ALONG'),
            ('SIGMOID_CROSS_ENTROPY', 0, 1, 0, 0, 1),
            ('SQUARED_ERROR', 0, 0, 0, 0, 1),
            ('SIGMOID_CROSS_ENTROPY', 0, 1, 0, 0, 1),
            ('ABSOLUTE_ERROR', 1, 0, 1, 0, 0),
            ('SIGMOID_CROSS_ENTROPY', 0, 1, 1, 0, 0),
            ('BINARY_ACCURACY', 0, 1, 0, 1, 0),
            CHUNK=LOSS_CHUNK,
        ),
        widest=1,
    ),
    'report': Kernel((use.reported,), [reports.DEFINES[1:]]),
    'staged_copy': Kernel((use.staged,)),
}
