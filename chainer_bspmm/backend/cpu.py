"""The products on NumPy arrays, by SciPy. float16 is computed in float32, softmax in float64."""

import collections
import math

import numpy
import scipy.sparse

from chainer_bspmm.sparse import host
from chainer_bspmm.sparse.host import bsddmm  # NOQA: F401

# The C library of Linux (glibc) gives freed arrays of more than 128 KB back to the system, which
# takes as long as a product to provide them again. It learns what a program frees: after this one
# array it keeps up to 64 MB.
numpy.empty(2**25 - 2**16, numpy.uint8)


def bspmm(adj, x, data, residual, trans):
    return host.bspmm(_matrix(adj, data, host.compute_dtype(x), trans), adj, x, residual)


def _matrix(adj, data, dtype, trans):
    side = adj.T if trans else adj
    if data is not None:
        values = data.astype(dtype, copy=False)
        return _scipy_matrix(side, values[adj.transpose_order] if trans else values)

    def make():
        values = numpy.ones(side.nnz, dtype) if side.data is None else side.data.astype(dtype)
        return _scipy_matrix(side, values)

    return side.cached(('scipy', dtype), make)  # SciPy checks a new one, which takes time


def _scipy_matrix(adj, values):
    return scipy.sparse.csr_matrix((values, adj.indices, adj.indptr), shape=adj.shape)


# What a layer multiplies by. matrix: (n_rows, n_sources), a column for each pair of relation and
# node that has entries, in this order, and transpose; nodes: (n_sources,), the node of each; parts:
# (relation, slice of its columns) for those relations that have any; spread: (n_nodes, n_sources),
# 1 where a column is one of a node. A single relation has a column for every node: nodes and spread
# are None.
_Sources = collections.namedtuple('_Sources', 'matrix transpose nodes parts spread')


def graph_linear(adj, x, W, b=None, W_self=None, b_self=None, loop=False):
    """Compute ``y = sum over r of A_r (x W_r^T + b_r) + x W_self^T + b_self``, (n_rows, n_out).

    Row ``c * R + r`` of W and b is row c of W_r; `loop` adds the identity to A, of one relation.
    With many relations most nodes have entries in few of them: only pairs of relation and node that
    have any are mapped, which is a third of the arithmetic for molecules.
    """
    sources = _sources(adj, host.compute_dtype(x))
    x, W, b, W_self, b_self = (
        array if array is None else array.astype(sources.matrix.dtype, copy=False)
        for array in (x, W, b, W_self, b_self)
    )
    mapped = _map(sources, _take(sources, x), _by_relation(adj, W).transpose(1, 2, 0))
    y = sources.matrix @ mapped
    if loop:
        y += mapped
    own = [] if W_self is None else [(x, W_self)]
    if b is not None:
        own.append((_degrees(adj, y.dtype, loop), b.reshape(-1, adj.n_relations)))
        if b_self is not None:
            own.append((numpy.ones((len(y), 1), y.dtype), b_self[:, None]))
            b_self = None
    if own:  # one product, because adding to y takes as long as a narrow one
        rows, matrices = (numpy.concatenate(parts, axis=1) for parts in zip(*own))
        y += numpy.dot(rows, matrices.T)
    if b_self is not None:
        y += b_self
    return y


def graph_linear_grad(adj, x, gy, W, W_self, wanted, loop=False):
    """Return the gradients of :func:`graph_linear`: {name: array} of the arguments in `wanted`."""
    sources, gradients = _sources(adj, host.compute_dtype(x)), {}
    x, gy, W, W_self = (
        array if array is None else array.astype(sources.matrix.dtype, copy=False)
        for array in (x, gy, W, W_self)
    )
    if wanted & {'x', 'W'}:
        summed = sources.transpose @ gy
        if loop:
            summed += gy
    if 'x' in wanted:
        gx = _map(sources, summed, _by_relation(adj, W).transpose(1, 0, 2))
        if sources.spread is not None:
            gx = sources.spread @ gx
        if W_self is not None:
            gx += numpy.dot(gy, W_self)
        gradients['x'] = gx
    if 'W' in wanted:
        gradients['W'] = numpy.zeros_like(W)
        by_relation, rows = _by_relation(adj, gradients['W']), _take(sources, x)
        for relation, part in sources.parts:
            by_relation[:, relation] = numpy.dot(summed[part].T, rows[part])
    if 'W_self' in wanted:
        gradients['W_self'] = numpy.dot(gy.T, x)
    if 'b' in wanted:
        gradients['b'] = numpy.dot(gy.T, _degrees(adj, gy.dtype, loop)).ravel()
    if 'b_self' in wanted:
        gradients['b_self'] = row_sum(gy)
    return gradients


def _by_relation(adj, W):
    """Return W as (n_out, R, n_in)."""
    return W.reshape(-1, adj.n_relations, W.shape[1])


def _take(sources, x):
    return x if sources.nodes is None else x.take(sources.nodes, axis=0)


def _map(sources, rows, matrices):
    """Multiply the rows of each relation by its matrix, one of (R, n, m)."""
    y = numpy.empty((len(rows), matrices.shape[2]), rows.dtype)
    for relation, part in sources.parts:
        numpy.dot(rows[part], matrices[relation], out=y[part])
    return y


def _degrees(adj, dtype, loop):
    """Return (n_rows, R): the row sums of each relation, which is what constant features become."""

    def make():
        n_entries, n_relations = adj._n_true_entries(), adj.n_relations
        pair = adj.entry_rows() * numpy.int64(n_relations) + adj.indices % n_relations
        weights = None if adj.data is None else adj.data[:n_entries]
        degrees = numpy.bincount(pair[:n_entries], weights, adj.n_rows * n_relations)
        return degrees.reshape(adj.n_rows, n_relations).astype(dtype) + dtype.type(loop)

    return adj.cached(('degrees', dtype, loop), make)


def _sources(adj, dtype):
    return adj.cached(('sources', dtype), lambda: _make_sources(adj, dtype))


def _make_sources(adj, dtype):
    n_relations, n_entries = adj.n_relations, adj._n_true_entries()
    n_nodes = adj.n_cols // n_relations
    if n_relations == 1:
        matrix = _matrix(adj, None, dtype, False)
        transpose = matrix if adj.is_symmetric else matrix.T
        return _Sources(matrix, transpose, None, [(0, slice(None))], None)
    node, relation = numpy.divmod(adj.indices[:n_entries], numpy.int64(n_relations))
    values = numpy.ones(n_entries, dtype) if adj.data is None else adj.data[:n_entries]
    values = values.astype(dtype, copy=False)
    column = relation * n_nodes + node
    is_used = numpy.zeros(n_relations * n_nodes, bool)
    is_used[column] = True
    used = numpy.flatnonzero(is_used)
    number = numpy.cumsum(is_used, dtype=numpy.int32)
    number -= 1
    nodes = used % n_nodes
    starts = numpy.searchsorted(used, numpy.arange(n_relations + 1) * n_nodes).tolist()
    matrix = scipy.sparse.csr_matrix(
        (values, number[column], adj.indptr), shape=(adj.n_rows, len(nodes))
    )
    spread = scipy.sparse.csc_matrix(
        (numpy.ones(len(nodes), dtype), nodes, numpy.arange(len(nodes) + 1)),
        shape=(n_nodes, len(nodes)),
    )
    parts = [
        (r, slice(start, end))
        for r, (start, end) in enumerate(zip(starts, starts[1:]))
        if start < end
    ]
    return _Sources(matrix, matrix.T, nodes, parts, spread)


def layer_norm(x, gamma, beta, eps):
    dtype = host.compute_dtype(x)
    mean = x.mean(axis=1, keepdims=True, dtype=dtype)
    x_hat = x - mean
    inv_std = 1 / numpy.sqrt(numpy.square(x_hat).mean(axis=1, keepdims=True) + dtype.type(eps))
    x_hat *= inv_std
    y = x_hat * gamma + beta
    return y.astype(x.dtype, copy=False), numpy.concatenate([mean, inv_std], axis=1)


def layer_norm_grad(x, gamma, gy, statistics):
    mean, inv_std = statistics[:, :1], statistics[:, 1:]
    x_hat = (x - mean) * inv_std
    g = gy.astype(x_hat.dtype, copy=False) * gamma
    gx = g - g.mean(axis=1, keepdims=True)
    gx -= x_hat * (g * x_hat).mean(axis=1, keepdims=True)
    gx *= inv_std
    x_hat *= gy
    return gx.astype(x.dtype, copy=False), row_sum(x_hat), row_sum(gy)


def row_softmax(a):
    a -= a.max(axis=2, keepdims=True)
    numpy.exp(a, out=a)
    a /= a.sum(axis=2, keepdims=True)
    return a[0] if len(a) == 1 else a.sum(axis=0)


def row_softmax_grad(a, g):
    y = a * g
    y -= a * y.sum(axis=2, keepdims=True)
    return y


def embed_grad(ids, gy, n_types):
    dtype = host.compute_dtype(gy)
    is_type = (ids >= 0) & (ids < n_types)
    if not is_type.all():  # SciPy would write past its arrays
        ids, gy = ids[is_type], gy[is_type]
    one_hot = scipy.sparse.csr_matrix(
        (numpy.ones(len(ids), dtype), ids, numpy.arange(len(ids) + 1)), shape=(len(ids), n_types)
    )
    return (one_hot.T @ gy.astype(dtype, copy=False)).astype(gy.dtype, copy=False)


def mean_loss(kind, x, t, divisor=None, ignore_nan=False):
    count = None
    if divisor is None:
        divisor = count = numpy.asarray(max((t != -1).sum(), 1))
    terms, _ = _terms(kind, x, t, ignore_nan)
    return numpy.asarray(terms.sum() / divisor, x.dtype), count


def training_loss(kind, x, t, divisor=None, ignore_nan=False, with_gradient=True):
    loss, count = mean_loss(kind, x, t, divisor, ignore_nan)
    accuracy = gx = None
    if count is not None:
        accuracy, _ = mean_loss('BINARY_ACCURACY', x, t)
    if with_gradient:
        gx = mean_loss_grad(kind, x, t, 1, count if divisor is None else divisor, ignore_nan)
    return loss, count, accuracy, gx


def mean_loss_grad(kind, x, t, gy, divisor, ignore_nan=False):
    _, slopes = _terms(kind, x, t, ignore_nan)
    return numpy.asarray(gy * slopes / divisor, x.dtype)


def _terms(kind, x, t, ignore_nan):
    """Return every element's term of a `mean_loss`, and its slope by x, in float64."""
    x = x.astype(numpy.float64)
    is_positive, is_known = x >= 0, t != -1
    if kind == 'BINARY_ACCURACY':
        return is_positive == t, None
    if kind == 'SIGMOID_CROSS_ENTROPY':
        small = numpy.exp(-abs(x))  # does not overflow
        return (
            is_known * (numpy.log1p(small) - x * (t - is_positive)),
            is_known * (numpy.where(is_positive, 1, small) / (1 + small) - t),
        )
    d = x - t
    if ignore_nan:
        d = numpy.where(numpy.isnan(d), 0, d)
    return (d * d, 2 * d) if kind == 'SQUARED_ERROR' else (abs(d), numpy.sign(d))


FILM_BLOCK = 2**18  # elements of edges and channels, which stay in the cache
# The edges of some graphs: slices of these graphs' rows, columns, and pairs of row and relation;
# each edge's row, column and pair, counted from the start of the slices, and value, (n, 1) or 1;
# (n, C): its message, its gamma, and what it carries before the rectifier.
_FilmBlock = collections.namedtuple(
    '_FilmBlock', 'rows columns pairs row column pair value message gamma z'
)


def edge_film(adj, messages, film):
    y = numpy.zeros((adj.n_rows, messages.shape[1]), messages.dtype)
    for block in _film_blocks(adj, messages, film):
        z = numpy.maximum(block.z, 0, out=block.z)
        z *= block.value
        y[block.rows] = _sum_at(block.row, z, block.rows)
    return y


def edge_film_grad(adj, messages, film, gy):
    gmessages, gfilm = numpy.zeros_like(messages), numpy.zeros_like(film)
    for block in _film_blocks(adj, messages, film):
        g = gy[block.rows].astype(block.z.dtype, copy=False)[block.row]
        g *= block.z > 0
        g *= block.value
        both = numpy.concatenate([g * block.message, g], axis=1)
        gfilm[block.pairs] = _sum_at(block.pair, both, block.pairs)
        g *= block.gamma
        gmessages[block.columns] = _sum_at(block.column, g, block.columns)
    return gmessages, gfilm


def _film_blocks(adj, messages, film):
    """Yield the `_FilmBlock` of some graphs at a time."""
    n_channels, n_relations = messages.shape[1], adj.n_relations
    starts, rows = adj.indptr[adj.row_offsets], adj.entry_rows()
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
            array.astype(host.compute_dtype(messages), copy=False)
            for array in (messages[column], film[pair])
        )
        gamma = both[:, :n_channels]
        yield _FilmBlock(
            of_rows,
            of_columns,
            of_pairs,
            row - of_rows.start,
            column - of_columns.start,
            pair - of_pairs.start,
            1 if adj.data is None else adj.data[entries, None],
            message,
            gamma,
            gamma * message + both[:, n_channels:],
        )
        graph = last


def _sum_at(index, values, part):
    """Add up the rows of `values` that have the same index, which counts rows of a slice."""
    ones, order = numpy.ones(len(index), values.dtype), numpy.arange(len(index) + 1)
    shape = part.stop - part.start, len(index)
    return scipy.sparse.csc_matrix((ones, index, order), shape=shape) @ values  # by columns


def segment_sum(x, offsets, max_rows=None, weights=None):
    compute = numpy.float32 if x.dtype == numpy.float16 else x.dtype
    if weights is None:
        rows, values = numpy.arange(len(x), dtype=numpy.int32), numpy.ones(len(x), compute)
    else:
        rows, offsets = _counted(offsets, weights)
        values = weights[rows].astype(compute, copy=False)
    membership = scipy.sparse.csr_matrix((values, rows, offsets), shape=(offsets.size - 1, len(x)))
    return (membership @ x.astype(compute, copy=False)).astype(x.dtype, copy=False)


def _counted(offsets, weights):
    """Return the rows whose weight is not 0, and where those of each segment start, both int32."""
    rows = numpy.flatnonzero(weights[: offsets[-1]]).astype(numpy.int32)
    return rows, numpy.searchsorted(rows, offsets).astype(numpy.int32)


def row_sum(x):
    # numpy.sum adds one row after the other: its rounding error grows with the batch, and it
    # reads memory a few channels at a time. Blocks of about sqrt(n_rows) rows are added to one
    # block, then the rows of that one: several times quicker and closer.
    n_rows, n_channels = x.shape
    dtype = numpy.float32 if x.dtype == numpy.float16 else x.dtype
    block = max(math.isqrt(n_rows), 1)
    n_blocks = n_rows // block
    blocks = x[: n_blocks * block].reshape(n_blocks, block * n_channels)
    y = blocks.sum(axis=0, dtype=dtype).reshape(block, n_channels).sum(axis=0)
    y += x[n_blocks * block :].sum(axis=0, dtype=dtype)
    return y.astype(x.dtype, copy=False)


def segment_max(x, offsets, max_rows=None, weights=None):
    if weights is None:
        x = x[: offsets[-1]]
    else:
        rows, offsets = _counted(offsets, weights)
        x = x[rows]
    y = numpy.zeros((offsets.size - 1, x.shape[1]), x.dtype)
    # reduceat gives x[start] for an empty segment, so only the others take part.
    used = numpy.flatnonzero(numpy.diff(offsets))
    if used.size:
        y[used] = numpy.maximum.reduceat(x, offsets[used], axis=0)
    return y


def segment_broadcast(y, offsets, n_rows, max_rows=None, weights=None):
    x = numpy.repeat(y, numpy.diff(offsets), axis=0)
    if weights is not None:
        weights = weights[: len(x), None]
        x[weights[:, 0] == 0] = 0  # first: 0 times infinity is NaN
        numpy.multiply(x, weights, out=x, casting='same_kind')  # float16 in float32
    if len(x) == n_rows:
        return x
    return numpy.concatenate([x, numpy.zeros((n_rows - len(x), x.shape[1]), x.dtype)])


def segment_softmax(x, offsets, weights=None):
    # In double, as kernels/segment_softmax.cu explains.
    n_rows = len(x)
    largest = segment_broadcast(segment_max(x, offsets, weights=weights), offsets, n_rows)
    # A difference may be infinite, and infinities become NaN, without a warning, as on a GPU.
    with numpy.errstate(over='ignore', divide='ignore', invalid='ignore'):
        y = x - largest.astype('d')
        numpy.exp(y, out=y)
        y /= segment_broadcast(segment_sum(y, offsets, weights=weights), offsets, n_rows)
    y[offsets[-1] :] = 0
    if weights is not None:
        y[weights == 0] = 0
    return y.astype(x.dtype, copy=False)


def segment_softmax_grad(y, gy, offsets, weights=None):
    dtype, n_true = y.dtype, offsets[-1]
    y, gy = y.astype('d', copy=False), gy.astype('d', copy=False)
    if weights is not None or n_true < len(y):
        is_counted = numpy.arange(len(y)) < n_true
        if weights is not None:
            is_counted &= weights != 0
        y, gy = (numpy.where(is_counted[:, None], array, 0) for array in (y, gy))
    # Weights are part of gy already: the gradient by a row is the sum over its copies.
    inner = segment_sum(y * gy, offsets)
    gx = y * (gy - segment_broadcast(inner, offsets, len(y), weights=weights))
    return gx.astype(dtype, copy=False)


def dropout(x, ratio, *draw):
    mask = dropout_mask(x.size, x.dtype, ratio, *draw).reshape(x.shape)
    return mask, x * mask


def relu_dropout(x, ratio, *draw):
    numpy.maximum(x, 0, out=x)
    x *= dropout_mask(x.size, x.dtype, ratio, *draw).reshape(x.shape)


def dropout_mask(size, dtype, ratio, seed, stream, counter):
    least = min(math.ceil(ratio * 2**32), 2**32 - 1)  # random word with which an element is kept
    kept = _random_words(size, seed, stream, int(counter[0])) >= least
    return kept * dtype.type(1 / (1 - ratio))


# Of Philox4x32-10 (Salmon et al. 2011): what words 0 and 2 of a counter are multiplied by in each
# round, and what is added to the two words of the key after it.
_MULTIPLIERS = numpy.array([[0xD2511F53], [0xCD9E8D57]], numpy.uint64)
_KEY_STEPS = numpy.array([[0x9E3779B9], [0xBB67AE85]], numpy.uint64)
_LOW, _HALF = numpy.uint64(2**32 - 1), numpy.uint64(32)


def _random_words(size, seed, stream, step):
    """Return the random word of every element, (size,), as kernels/dropout.cu draws them."""
    quads = numpy.arange(-(-size // 4), dtype=numpy.uint64)
    even = numpy.stack([quads, numpy.full_like(quads, step % 2**32)])  # words 0 and 2
    odd = numpy.empty_like(even)  # words 1 and 3
    odd[0], odd[1] = stream, step >> 32
    key = numpy.array([[seed % 2**32], [seed >> 32]], numpy.uint64)
    for _ in range(10):
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _HALF) ^ odd ^ key, products & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return numpy.stack([even[0], odd[0], even[1], odd[1]], axis=1).ravel()[:size]
