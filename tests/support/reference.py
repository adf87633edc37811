"""Float64 NumPy reference with which every fast path is compared: slow, plain loops.

All functions take host or device arrays and return float64 NumPy arrays. The docstrings of
``chainer_bspmm.functions`` have the same formulas.
"""

import numpy

from chainer.backends import cuda


def _host(array):
    return cuda.to_cpu(array).astype(numpy.float64)


def entries(adj):
    """Yield (entry, row, column) for every entry of a BatchedCSR or BatchedCOO."""
    if hasattr(adj, 'ids'):
        for entry, (row, column) in enumerate(cuda.to_cpu(adj.ids)):
            yield entry, row, column
        return
    indptr, indices = cuda.to_cpu(adj.indptr), cuda.to_cpu(adj.indices)
    for row in range(adj.n_rows):
        for entry in range(indptr[row], indptr[row + 1]):
            yield entry, row, indices[entry]


def bspmm(adj, x, data=None, residual=None, trans=False):
    """y[row] = sum over the row's entries of value * x[column] (+ residual[row])."""
    if hasattr(adj, 'slice_rows'):  # a BatchedSELL
        adj = adj.to_csr()
    x = _host(x)
    flat = x.reshape(adj.n_rows if trans else adj.n_cols, x.shape[-1])
    values = data if data is not None else adj.data
    values = numpy.ones(adj.nnz) if values is None else _host(values)
    y = numpy.zeros((adj.n_cols if trans else adj.n_rows, x.shape[-1]))
    for entry, row, column in entries(adj):
        if trans:
            row, column = column, row
        y[row] += values[entry] * flat[column]
    if x.ndim == 3:
        y = y.reshape(adj.n_graphs, len(y) // adj.n_graphs, x.shape[-1])
    return y if residual is None else y + _host(residual)


def spmv(adj, x, alpha=1.0, beta=0.0, y=None):
    """alpha * (sum over the row's entries of value * x[column]) + beta * y[row]; A in CSR."""
    product = alpha * bspmm(adj, x[:, None])[:, 0]
    return product if beta == 0 else product + beta * _host(y)


def bsddmm(adj, u, v):
    """w[entry] = dot(u[row], v[column])."""
    u, v = _host(u), _host(v)
    u, v = u.reshape(adj.n_rows, u.shape[-1]), v.reshape(adj.n_cols, v.shape[-1])
    w = numpy.zeros(adj.nnz)
    for entry, row, column in entries(adj):
        w[entry] = (u[row] * v[column]).sum()
    return w


def matrices(adj):
    """Return matrices (R, n_rows, n_rows) of a batch with a column for each node and relation."""
    dense = adj.to_scipy().toarray()
    n_relations = adj.n_relations
    return numpy.stack([dense[:, r::n_relations] for r in range(n_relations)])


def graph_linear(A, x, W=None, b=None, W_self=None, b_self=None):
    """y = sum over r of A[r] (x W_r^T + b_r) + x W_self^T + b_self.

    A: (R, n, n). Row c * R + r of W and b belongs to channel c and relation r.
    """
    x, W, b, W_self, b_self = (None if a is None else _host(a) for a in (x, W, b, W_self, b_self))
    y = numpy.zeros(1) if b_self is None else b_self
    for r, matrix in enumerate(A):
        mapped = x @ W[r :: len(A)].T
        y = y + matrix @ (mapped if b is None else mapped + b[r :: len(A)])
    return y if W_self is None else y + x @ W_self.T


def edge_film(adj, messages, film, gy=None, activation=lambda z: numpy.maximum(z, 0)):
    """y[row] = sum over the row's entries of value * activation(gamma * messages[column] + beta).

    gamma and beta are the halves of film[row * R + relation of the column]. If `gy` is given, also
    return the gradients with respect to messages and film; the activation is then a rectifier.
    """
    messages, film = _host(messages), _host(film)
    values = numpy.ones(adj.nnz) if adj.data is None else _host(adj.data)
    n_relations = adj.n_relations
    n_channels = messages.shape[1]
    y = numpy.zeros((adj.n_rows, n_channels))
    gmessages = numpy.zeros(messages.shape)
    gfilm = numpy.zeros(film.shape)
    for entry, row, column in entries(adj):
        pair = row * n_relations + column % n_relations
        gamma = film[pair, :n_channels]
        beta = film[pair, n_channels:]
        z = gamma * messages[column] + beta
        y[row] += values[entry] * activation(z)
        if gy is not None:
            g = values[entry] * gy[row].astype('d') * (z > 0)
            gmessages[column] += g * gamma
            gfilm[pair] += numpy.concatenate([g * messages[column], g])
    return y if gy is None else (y, gmessages, gfilm)


def _segments(n_rows, offsets, weights):
    """Yield, for each segment, the rows with a weight other than 0, and their weights (rows, 1)."""
    weights = numpy.ones(n_rows) if weights is None else _host(weights)
    offsets = cuda.to_cpu(offsets)
    for a, b in zip(offsets[:-1], offsets[1:]):
        rows = a + numpy.flatnonzero(weights[a:b])
        yield rows, weights[rows, None]


def segment_sum(x, offsets, weights=None):
    """y[g] = sum of weights[i] * x[i] over the rows i of segment g."""
    x = _host(x)
    y = numpy.zeros((len(offsets) - 1, x.shape[1]))
    for g, (rows, w) in enumerate(_segments(len(x), offsets, weights)):
        y[g] = (w * x[rows]).sum(axis=0)
    return y


def segment_max(x, offsets, weights=None):
    """y[g] = maximum of the rows of segment g whose weight is not 0; 0 if there is none."""
    x = _host(x)
    y = numpy.zeros((len(offsets) - 1, x.shape[1]))
    for g, (rows, _) in enumerate(_segments(len(x), offsets, weights)):
        if rows.size:
            y[g] = x[rows].max(axis=0)
    return y


def segment_broadcast(y, offsets, weights=None):
    """x[i] = weights[i] * y[g] for the rows i of segment g; 0 where the weight is 0."""
    y, n_rows = _host(y), int(offsets[-1])
    x = numpy.zeros((n_rows, y.shape[1]))
    for g, (rows, w) in enumerate(_segments(n_rows, offsets, weights)):
        x[rows] = w * y[g]
    return x


def segment_softmax(x, offsets, weights=None):
    """y[i] = exp(x[i]) / sum of weights[k] * exp(x[k]) over the rows k of i's segment.

    Rows of weight 0, and rows of no segment, get 0.
    """
    x = _host(x)
    y = numpy.zeros(x.shape)
    for rows, w in _segments(len(x), offsets, weights):
        if rows.size:
            powers = numpy.exp(x[rows] - x[rows].max(axis=0))
            y[rows] = powers / (w * powers).sum(axis=0)
    return y


def segment_softmax_grad(y, gy, offsets, weights=None):
    """gx[i] = y[i] (gy[i] - weights[i] * sum of y[k] gy[k] over the rows k of i's segment).

    Rows of weight 0, and rows of no segment, get 0.
    """
    y, gy = _host(y), _host(gy)
    gx = numpy.zeros(y.shape)
    for rows, w in _segments(len(y), offsets, weights):
        gx[rows] = y[rows] * (gy[rows] - w * (y[rows] * gy[rows]).sum(axis=0))
    return gx


def philox(counter, key):
    """Generator Philox4x32-10 of Salmon et al. 2011 (SC11).

    counter: four integers below 2**32, or arrays of them; key: two integers. Return four arrays of
    uint32.
    """
    c0, c1, c2, c3 = (numpy.asarray(word, numpy.uint64) for word in counter)
    key0, key1 = key
    low = numpy.uint64(2**32 - 1)
    half = numpy.uint64(32)
    for _ in range(10):
        first, second = numpy.uint64(0xD2511F53) * c0, numpy.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (second >> half) ^ c1 ^ numpy.uint64(key0),
            second & low,
            (first >> half) ^ c3 ^ numpy.uint64(key1),
            first & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return [word.astype(numpy.uint32) for word in (c0, c1, c2, c3)]


def random_words(n, seed, stream, step):
    """Return n random uint32 words, as in kernels/dropout.cu: word i % 4 of counter i / 4."""
    quads = numpy.arange(-(-n // 4), dtype=numpy.uint64)
    counter = (
        quads,
        numpy.full_like(quads, stream),
        numpy.full_like(quads, step % 2**32),
        numpy.full_like(quads, step >> 32),
    )
    words = philox(counter, (seed % 2**32, seed >> 32))
    return numpy.stack(words, axis=1).ravel()[:n]


def kept(n, ratio, seed, stream, step):
    """Return the mask (n,) of the elements that dropout keeps."""
    return random_words(n, seed, stream, step) >= min(ratio * 2.0**32, 2.0**32 - 1)
