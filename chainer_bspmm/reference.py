"""The float64 NumPy reference that every fast path is compared with; slow, plain loops.

All functions take host or device arrays and return float64 NumPy arrays. The formulas are those
in the docstrings of ``chainer_bspmm.functions``. Only tests and the self-test import this file.
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


def segment_sum(x, offsets):
    """y[g] = sum of x[offsets[g]:offsets[g + 1]]."""
    x, offsets = _host(x), cuda.to_cpu(offsets)
    return numpy.stack([x[a:b].sum(axis=0) for a, b in zip(offsets[:-1], offsets[1:])])


def segment_max(x, offsets):
    """y[g] = maximum of x[offsets[g]:offsets[g + 1]]; 0 for an empty segment."""
    x, offsets = _host(x), cuda.to_cpu(offsets)
    return numpy.stack(
        [
            x[a:b].max(axis=0) if b > a else numpy.zeros(x.shape[1])
            for a, b in zip(offsets[:-1], offsets[1:])
        ]
    )


def segment_broadcast(y, offsets):
    """x[i] = y[g] for the rows i of segment g."""
    return numpy.repeat(_host(y), numpy.diff(cuda.to_cpu(offsets)), axis=0)


def segment_softmax(x, offsets):
    """y[i] = exp(x[i]) / sum of exp(x[k]) over the rows k of i's segment."""
    x, offsets = _host(x), cuda.to_cpu(offsets)
    y = numpy.zeros(x.shape)
    for a, b in zip(offsets[:-1], offsets[1:]):
        if b > a:
            y[a:b] = numpy.exp(x[a:b] - x[a:b].max(axis=0))
            y[a:b] /= y[a:b].sum(axis=0)
    return y


def philox(counter, key):
    """Philox4x32-10 of Salmon et al. 2011 (SC11).

    counter: four integers below 2**32, or arrays of them; key: two integers. Returns four uint32
    arrays.
    """
    c0, c1, c2, c3 = (numpy.asarray(word, numpy.uint64) for word in counter)
    key0, key1 = key
    low, half = numpy.uint64(2**32 - 1), numpy.uint64(32)
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
    """The uint32 words of n elements, see kernels/dropout.cu: word i % 4 of counter i / 4."""
    quads = numpy.arange(-(-n // 4), dtype=numpy.uint64)
    words = philox(
        (
            quads,
            numpy.full_like(quads, stream),
            numpy.full_like(quads, step % 2**32),
            numpy.full_like(quads, step >> 32),
        ),
        (seed % 2**32, seed >> 32),
    )
    return numpy.stack(words, axis=1).ravel()[:n]


def kept(n, ratio, seed, stream, step):
    """(n,) bool: which elements dropout keeps."""
    return random_words(n, seed, stream, step) >= min(ratio * 2.0**32, 2.0**32 - 1)
