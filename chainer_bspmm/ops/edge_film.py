"""Feature-wise linear modulation of messages, with its linear maps and sum, as one node."""

import collections

import numpy

from chainer import as_variable, functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.cuda import plans
from chainer_bspmm.ops.bspmm import bspmm
from chainer_bspmm.ops.elementwise import by_channel, by_relation, compute_dtype
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.ops.segments import sum_at
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_relations
from chainer_bspmm.sparse.build import values_of
from chainer_bspmm.sparse.edges import edges_of


@plans.kept
def film_launch(n_units, n_channels, width, n_relations) -> plans.Launch:
    """Plan edge_film: a thread per (row of the result, vector)."""
    n_vectors = n_channels // width
    return plans.vector_threads(n_units, n_vectors, width, (n_units, n_vectors, n_relations))


def _launch(result, side, n_relations, n_units, messages, film, gy=None):
    """Launch kernels/edge_film.cu for one of its results; `side`: the matrix or its transpose."""
    n_channels = messages.shape[1]
    width = film.shape[1] if result == 'BY_FILM' else n_channels
    y = cuda.cupy.empty((n_units, width), messages.dtype)
    if y.size:
        weights, data, _ = values_of(side)
        width = launch.vector_width(n_channels, messages, film, y, gy)
        plan = film_launch(n_units, n_channels, width, n_relations)
        arrays = side.indptr, side.indices, data, messages, film, gy, y
        launch.run('edge_film', y, plan, *arrays, RESULT=result, WEIGHTED=weights)
    return y


FILM_BLOCK = 2**18  # edges times channels of a block, which stays in the CPU's cache

# The n edges of a block of graphs.
# rows, columns, pairs: slices of these graphs' rows, columns, and pairs of row and relation.
# row, column, pair: for each edge, counted from the start of the slices.
# value: (n, 1), or 1 for all.
# message, gamma, z: (n, C); z is the modulated message before the rectifier.
_FilmBlock = collections.namedtuple(
    '_FilmBlock', 'rows columns pairs row column pair value message gamma z'
)


def _film_blocks(adj, messages, film):
    """Yield a `_FilmBlock` for a few graphs at a time."""
    n_channels = messages.shape[1]
    n_relations = adj.n_relations
    starts = adj.indptr[adj.row_offsets]
    rows = adj.entry_rows()
    most = FILM_BLOCK // max(n_channels, 1)
    graph = 0
    while graph < adj.n_graphs:
        last = int(numpy.searchsorted(starts, starts[graph] + most, 'right')) - 1
        last = max(last, graph + 1)
        of_rows, of_columns, entries = (
            slice(int(offsets[graph]), int(offsets[last]))
            for offsets in (adj.row_offsets, adj.col_offsets, starts)
        )
        of_pairs = slice(of_rows.start * n_relations, of_rows.stop * n_relations)
        row, column = rows[entries], adj.indices[entries]
        pair = row * n_relations + column % n_relations
        message, both = (
            array.astype(compute_dtype(messages), copy=False)
            for array in (messages[column], film[pair])
        )
        gamma = both[:, :n_channels]
        yield _FilmBlock(
            rows=of_rows,
            columns=of_columns,
            pairs=of_pairs,
            row=row - of_rows.start,
            column=column - of_columns.start,
            pair=pair - of_pairs.start,
            value=1 if adj.data is None else adj.data[entries, None],
            message=message,
            gamma=gamma,
            z=gamma * message + both[:, n_channels:],
        )
        graph = last


def edge_film_forward(adj: BatchedCSR, messages, film):
    """Compute ``y[i] = sum of value max(0, gamma[i, r] messages[j, r] + beta[i, r])``.

    The sum is over the entries (i, j * R + r) of row i. `messages` is (n_nodes * R, C), `film`
    (n_nodes * R, 2 * C), gamma and beta. No array of (nnz, C) is made on a GPU.
    """
    if not launch.on_gpu(messages):
        y = numpy.zeros((adj.n_rows, messages.shape[1]), messages.dtype)
        for block in _film_blocks(adj, messages, film):
            z = numpy.maximum(block.z, 0, out=block.z)
            z *= block.value
            y[block.rows] = sum_at(block.row, z, len(y[block.rows]))
        return y
    with launch.device_of(messages):
        messages, film = launch.contiguous(messages), launch.contiguous(film)
        return _launch('OUTPUT', adj, adj.n_relations, adj.n_rows, messages, film)


def edge_film_backward(adj: BatchedCSR, messages, film, gy):
    """Return the gradients of :func:`edge_film_forward` with respect to messages and film."""
    if not launch.on_gpu(messages):
        gmessages, gfilm = numpy.zeros_like(messages), numpy.zeros_like(film)
        for block in _film_blocks(adj, messages, film):
            g = gy[block.rows].astype(block.z.dtype, copy=False)[block.row]
            g *= block.z > 0
            g *= block.value
            both = numpy.concatenate([g * block.message, g], axis=1)
            gfilm[block.pairs] = sum_at(block.pair, both, len(gfilm[block.pairs]))
            g *= block.gamma
            gmessages[block.columns] = sum_at(block.column, g, len(gmessages[block.columns]))
        return gmessages, gfilm
    with launch.device_of(messages):
        arrays = [launch.contiguous(array) for array in (messages, film, gy)]
        return (
            _launch('BY_MESSAGES', adj.T, adj.n_relations, adj.n_cols, *arrays),
            _launch('BY_FILM', adj, adj.n_relations, adj.n_cols, *arrays),
        )


class EdgeFiLM(FusedNode):
    """Node of :func:`edge_film` with a rectifier; inputs are x, W, W_g."""

    def __init__(self, adj):
        self._adj = adj

    def _output(self, inputs):
        x, W, W_g = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        n_relations = self._adj.n_relations
        # Row i * R + r has the message of node i in relation r, and the gamma and beta by which i
        # modulates the messages that it receives.
        messages, film = (
            dot(x, by_relation(weight, n_relations).T).reshape(
                self._adj.n_cols, len(weight) // n_relations
            )
            for weight in (W, W_g)
        )
        self._saved = x, messages, film
        return edge_film_forward(self._adj, messages, film)

    def _gradients(self, inputs, gy, indexes):
        x, messages, film = self._saved
        n_relations = self._adj.n_relations
        gx = None
        weights = []
        for g, weight in zip(edge_film_backward(self._adj, messages, film, gy), inputs[1:]):
            g = g.reshape(len(x), len(weight))
            if 0 in indexes:
                by_x = dot(g, by_relation(weight.astype(x.dtype, copy=False), n_relations))
                gx = by_x if gx is None else gx + by_x
            weights.append(by_channel(dot(g.T, x), n_relations))
        return gx, *weights

    def _composed(self, x, W, W_g):
        return _composed(self._adj, x, W, W_g, functions.relu)


def _composed(adj, x, W, W_g, activation):
    edges = edges_of(adj)
    n_relations = adj.n_relations
    gathered = []
    for weight, matrix in ((W, edges.from_source), (W_g, edges.from_receiver)):
        rows = functions.linear(x, by_relation(functions.cast(weight, x.dtype), n_relations))
        rows = functions.reshape(rows, (adj.n_cols, len(weight) // n_relations))
        gathered.append(bspmm(matrix, rows))
    messages, film = gathered
    n_channels = messages.shape[1]
    z = film[:, :n_channels] * messages + film[:, n_channels:]
    return bspmm(edges.to_node, activation(z))


def edge_film(adj, x, W, W_g, activation=functions.relu):
    """Compute ``y[i] = sum of A_r[i, j] act(gamma[i, r] * messages[j, r] + beta[i, r])``.

    The sum is over the entries (i, j * R + r) of ``adj``, whose values, of x's dtype, are A;
    ``messages[j, r, c] = sum_k W[c * R + r, k] x[j, k]``, and gamma and beta of the receiver come
    from rows ``c * R + r`` and ``(C + c) * R + r`` of ``W_g``, (2 * C * R, in_channels).
    With ``chainer.functions.relu`` it is one node. Any other activation takes a few nodes, which
    store arrays of (nnz, C), also on a GPU. Differentiable to any order.
    """
    check_relations(adj)
    check.features(x, adj, 'in_channels')
    if len(W) % adj.n_relations:
        text = 'W: expected a multiple of %d relations as its number of rows, got shape %s'
        raise ValueError(text % (adj.n_relations, W.shape))
    expected = {'W': (W, (len(W), x.shape[1])), 'W_g': (W_g, (2 * len(W), x.shape[1]))}
    check.shapes('x of shape %s' % (x.shape,), expected)
    if activation is not functions.relu:
        return _composed(adj, as_variable(x), W, W_g, activation)
    return EdgeFiLM(adj).apply((x, W, W_g))[0]
