"""Checks of matrices and arrays before anything is launched; they never read from a device."""

import numpy

from chainer_bspmm.papers import BatchedCOO
from chainer_bspmm.papers import BatchedSELL
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import operands
from chainer_bspmm.sparse.validate import one_of

# What kernels/mean_loss.cu calculates, and whether from labels.
HAS_LABELS = {
    'SIGMOID_CROSS_ENTROPY': True,
    'BINARY_ACCURACY': True,
    'SQUARED_ERROR': False,
    'ABSOLUTE_ERROR': False,
}


def product(adj):
    """Check the matrix of a product, which may be any container."""
    operands.of_kind(adj, (BatchedCSR, BatchedCOO, BatchedSELL))


def adjacency(adj):
    """Check the matrix of any other function."""
    operands.of_kind(adj, (BatchedCSR, BatchedCOO))


def compressed(adj):
    """Check the matrix of a function that needs entries sorted by row."""
    operands.of_kind(adj, (BatchedCSR,))


def features(adj, x):
    """Check the rows that a matrix with a column for every row and relation is multiplied by."""
    operands.floating('x', x)
    operands.values_dtype(adj, x)
    operands.same_place('x', x, 'adj', adj.indptr)


def film(adj, messages, film, gy=None):
    n_channels = messages.shape[-1]
    for name, array, shape in (
        ('messages', messages, (adj.n_cols, n_channels)),
        ('film', film, (adj.n_cols, 2 * n_channels)),
        ('gy', gy, (adj.n_rows, n_channels)),
    ):
        if array is not None:
            operands.shaped(name, array, adj, shape)
            operands.same_dtype(name, array.dtype, messages.dtype)
    operands.values_dtype(adj, messages)


def rows(x):
    if x.ndim != 2:
        raise ValueError('x: expected shape (n_rows, n_B), got %s' % (x.shape,))
    operands.floating('x', x)


def norm(x, *parameters):
    rows(x)
    for name, parameter in zip(('gamma', 'beta'), parameters):
        if parameter.shape != (x.shape[1],):
            raise ValueError(
                '%s: expected shape (%d,), one for each channel of x, got %s'
                % (name, x.shape[1], parameter.shape)
            )
        operands.same_place(name, parameter, 'x', x)
        operands.same_dtype(name, parameter.dtype, x.dtype)


def segments(x, offsets, weights=None):
    rows(x)
    operands.same_place('x', x, 'offsets', offsets)
    row_weights(weights, len(x), offsets)


def row_weights(weights, n_rows, offsets):
    if weights is None:
        return
    if weights.shape != (n_rows,) or weights.dtype != numpy.float32:
        raise ValueError(
            'weights: expected float32 of shape (%d,), one for each row, got %s of shape %s'
            % (n_rows, weights.dtype, weights.shape)
        )
    operands.same_place('weights', weights, 'offsets', offsets)


def broadcast(y, offsets, n_rows, weights=None):
    if y.ndim != 2 or len(y) != offsets.size - 1:
        raise ValueError(
            'y: expected %d rows, one for each segment, got shape %s' % (offsets.size - 1, y.shape)
        )
    operands.floating('y', y)
    operands.same_place('y', y, 'offsets', offsets)
    row_weights(weights, n_rows, offsets)


def dropout(x, counter):
    operands.floating('x', x)
    elements(x.size)
    operands.same_place('x', x, 'counter', counter)


def loss(kind, x, t):
    one_of('kind', kind, HAS_LABELS)
    operands.floating('x', x)
    operands.same_place('t', t, 'x', x)
    if t.shape != x.shape:
        raise ValueError('t: expected the shape of x, %s, got %s' % (x.shape, t.shape))
    if HAS_LABELS[kind] and t.dtype.kind != 'i':
        raise TypeError('t: expected integers, the labels, got %s' % t.dtype)
    if not HAS_LABELS[kind]:
        operands.same_dtype('t', t.dtype, x.dtype)
    if x.size >= 2**31:
        raise ValueError('x: expected fewer than 2**31 elements, got %d' % x.size)


def elements(size):
    if size > 2**34:
        raise ValueError(
            'size: expected at most 2**34 elements, the random numbers that a layer '
            'has, got %d' % size
        )
