"""Batches and values that the kernel tests share.

Values are integers. They are small enough for sums to be exact in the dtype in which the kernels
calculate, and too large for sums in a narrower one to be exact. So results must equal the
reference, rounded once to the storage dtype, without any tolerance.
"""

import types

import numpy

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse.build import transpose_launch
from chainer_bspmm.training.peer_memory import PeerMemory, words_of

DTYPES = 'efd'
CHANNELS = (1, 2, 3, 31, 33, 64, 1024)
# All widths in float32, and two or three in other dtypes: rows of one of these are read by the
# widest vectors, rows of another one element by element.
CHANNELS_OF_DTYPES = (
    *(('f', n_channels) for n_channels in CHANNELS),
    *(('e', 2), ('e', 33), ('e', 64), ('d', 33), ('d', 64)),
)
# Largest values if products are summed (sums stay below 2**24 for float16 and float32, and between
# 2**24 and 2**53 for float64), and if values themselves are summed.
FACTOR = {'e': 31, 'f': 255, 'd': 2**20}
TERM = {'e': 2000, 'f': 2**19, 'd': 2**40}
# (dtype, n_B, options of `csr_launch`): variants that the policy chooses for larger batches.
CSR_VARIANTS = [
    ('f', 36, {'lanes': 8, 'columns': 2}),
    ('f', 33, {'lanes': 9, 'columns': 4, 'rows_per_thread': 2}),
    ('f', 132, {'lanes': 8, 'columns': 4, 'rows_per_thread': 3, 'stream': True}),
    ('e', 8, {'lanes': 1, 'rows_per_thread': 16, 'stream': True}),
    ('e', 3, {'lanes': 2, 'columns': 2, 'stream': True}),
    ('e', 4, {'lanes': 32, 'rows_per_thread': 4}),
    ('d', 6, {'lanes': 4, 'ahead': 8, 'rows_per_thread': 5}),
    ('d', 5, {'lanes': 2, 'ahead': 8, 'stream': True}),
]
BATCHES = ('mixed', 'one node', 'no edges', 'empty graphs', 'duplicates', 'relations', 'padded')


def integers(shape, dtype, largest=FACTOR, seed=0):
    """Return random integers of both signs, as floats."""
    bound = largest[dtype]
    return numpy.random.RandomState(seed).randint(-bound, bound + 1, shape).astype(dtype)


def offsets_of(sizes):
    """Return the starts of rows, graphs or segments of these sizes, and the end."""
    return numpy.cumsum((0, *sizes)).astype('i')


def weighted(offsets, n_channels, dtype, spare=0):
    """Return negative features (n_rows, n_channels), and float32 weights of the rows.

    Weights are 0, 1 or 50, so that even the sum of 24 rows is exact. Rows of the third segment, and
    of no segment, have weight 0. Rows of weight 0 hold infinity and NaN.
    """
    n_rows = int(offsets[-1]) + spare
    weights = numpy.random.RandomState(1).choice([0, 1, 50], n_rows).astype('f')
    weights[slice(*offsets[2:4])] = weights[offsets[-1] :] = 0
    x = -1 - abs(integers((n_rows, n_channels), dtype))
    x[weights == 0] = numpy.inf
    x[weights == 0, ::2] = numpy.nan
    return x, weights


def batch(name, dtype):
    """Return one of BATCHES, or 'small', as a BatchedCSR, which is not symmetric."""

    def graph(*shape, density=0.4):
        shape = shape if len(shape) > 1 else shape * 2
        values = integers(shape, dtype, seed=shape[-1])
        kept = numpy.random.RandomState(shape[-1]).uniform(size=shape) < density
        return values * kept

    def empty(n):
        return numpy.zeros((n, n), dtype)

    if name == 'duplicates':
        indices = [1, 1, 1, 0, 0, 2, 2, 1, 2]
        return BatchedCSR(
            indptr=numpy.array([0, 3, 3, 9]),
            indices=numpy.array(indices),
            row_offsets=numpy.array([0, 3]),
            data=integers(len(indices), dtype),
        )
    if name == 'mixed':  # one huge graph among small ones, with a row far longer than the others
        huge = graph(24, density=0.12)
        huge[5] = integers(24, dtype, seed=1)
        matrices = [empty(0), graph(3), empty(1), empty(4), huge, empty(0), graph(2, density=1)]
    else:
        matrices = {
            'small': [graph(3), graph(2, density=1)],
            'one node': [empty(1)],
            'no edges': [empty(3), empty(1)],
            'empty graphs': [empty(0), graph(3), empty(0)],
            'relations': [graph(3, 3, 3), numpy.zeros((3, 1, 1), dtype), graph(3, 6, 6)],
            'padded': [graph(3), empty(1), graph(6)],
        }[name]
    layout = 'padded' if name == 'padded' else 'packed'
    return BatchedCSR.from_matrices(matrices, layout).astype(dtype)


def with_room(adj, spare):
    """Return the matrix in larger arrays; spare columns are out of range, spare values are NaN."""
    return adj.replace(
        n_rows=adj.n_rows + spare,
        n_cols=adj.n_cols + spare,
        nnz=adj.nnz + spare,
        indptr=numpy.pad(adj.indptr, (0, spare), mode='edge'),
        indices=numpy.pad(adj.indices, (0, spare), constant_values=2**30),
        data=numpy.pad(adj.data, (0, spare), constant_values=numpy.nan),
        has_spare=True,
    )


def larger(put, adj, spare=0):
    """Return the matrix in larger arrays on a device; spare values are 3."""
    new = adj.replace(has_spare=spare > 0)
    new.n_rows, new.nnz = adj.n_rows + spare, adj.nnz + spare
    new.indptr = put(numpy.pad(adj.indptr, (0, spare), mode='edge'))
    new.indices = put(numpy.pad(adj.indices, (0, spare)))
    if adj.data is not None:
        new.data = put(numpy.pad(adj.data, (0, spare), constant_values=3))
    new.row_offsets, new.col_offsets = put(adj.row_offsets), put(adj.col_offsets)
    return new


def share_channels(monkeypatch, module, name):
    """Make a plan launch two blocks side by side, which stride over the channels."""
    plan = getattr(module, name)
    plan = getattr(plan, '__wrapped__', plan)

    def narrow(*sizes, **options):
        made = plan(*sizes, **options)
        launches = [made] if hasattr(made, 'grid') else made
        launches = [launch._replace(grid=(launch.grid[0], 2, 1)) for launch in launches]
        return launches[0] if hasattr(made, 'grid') else launches

    monkeypatch.setattr(module, name, narrow)


def film_arrays(adj, n_channels, dtype):
    """Return messages, film and gy for edge_film."""
    largest = {'e': 15, 'f': 31, 'd': 2**10}  # for products of three values
    shapes = (adj.n_cols, n_channels), (adj.n_cols, 2 * n_channels), (adj.n_rows, n_channels)
    return [integers(shape, dtype, largest, seed) for seed, shape in enumerate(shapes)]


def transpose_on(device, adj):
    """Transpose a BatchedCSR of the host by the kernel; return indptr, indices, order."""
    assert transpose_launch(adj.n_graphs, adj.max_cols, adj.max_nnz) is not None
    placed = types.SimpleNamespace(
        n_graphs=adj.n_graphs,
        n_cols=adj.n_cols,
        nnz=adj.nnz,
        max_cols=adj.max_cols,
        max_nnz=adj.max_nnz,
        **{name: device.put(getattr(adj, name)) for name in adj._integers},
    )
    return build.transpose_batch(placed)


def summed(partials, parts):
    """Sum partials in NumPy, for tests that need not launch sum_partials."""
    return [
        partials[:, first : first + numpy.prod(shape)].sum(axis=0).reshape(shape).astype(dtype)
        for first, shape, dtype in parts
    ]


def words(values, turn):
    """Return (n,) uint64: 32 bits of the values in the lower half, a turn in the upper half."""
    bits = values.view('u2').astype('u4') if values.itemsize == 2 else values.view('u4')
    return bits.ravel().astype('u8') | numpy.uint64(turn << 32)


class Peers:
    """Memory of three ranks, to which the other two have written their values of turn 7.

    Args:
        device (Emulated): the GPU of all three ranks.
        flat (FlatGradients): the gradients of this rank.
        rank (int): this rank.
        others (dict): rank -> values that it sends.
        n_more (int): number of elements, and of flags, beyond the necessary ones.
    """

    TURN = 7
    fits = PeerMemory.fits
    vectors = ()

    def __init__(self, device, flat, rank, others, n_more=0):
        self._sizes = self.size, dtype, chunks = flat._room()
        self.size += n_more  # the memory may have been made for a larger model
        shape = 2, 3, self.size * words_of(dtype)
        self.arrays = [device.put(numpy.zeros(shape, 'u8')) for _ in range(3)]
        device.reachable += self.arrays
        self.data = numpy.array([array.ctypes.data for array in self.arrays], 'u8')
        self.turn = device.put(numpy.full(sum(n for _, n in chunks) + n_more, self.TURN - 1, 'u4'))
        for other, values in others.items():
            sent = words(values.astype(dtype), self.TURN)
            self.arrays[rank][self.TURN % 2, other, : sent.size] = sent
