"""Checks of matrices and arrays by public functions; they never read from a device."""

import numpy

import chainer
from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.validate import FLOATS, one_of


def of_kind(adj, kinds):
    """Check that a matrix is of one of some classes of containers."""
    if type(adj) not in kinds:
        advice = (
            'data sets become sparse batches with converter=chainer_bspmm.concat_mols, '
            'arrays with BatchedCSR.from_dense'
        )
        if hasattr(adj, 'to_csr'):
            advice = 'adj.to_csr() makes one, chainer_bspmm.papers.bspmm takes it'
        got = type(adj).__name__ + (' of shape %s' % (adj.shape,) if hasattr(adj, 'shape') else '')
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise TypeError('adj: expected a %s, got %s; %s' % (names, got, advice))


def adjacency(adj):
    """Check for a BatchedCSR."""
    if type(adj) is not BatchedCSR:
        of_kind(adj, (BatchedCSR,))


def relations(adj):
    """Check for a BatchedCSR with a column for every row and relation."""
    if type(adj) is not BatchedCSR or adj.n_cols != adj.n_rows * adj.n_relations:
        adjacency(adj)
        text = 'adj: expected a column for each of its %d rows and %d relations, got %r'
        raise ValueError(text % (adj.n_rows, adj.n_relations, adj))


def rows(name, x, adj, n_rows, width='n_B', each='node'):
    """Check for a row of floats for each node, or each graph, on the device of the batch."""
    floats(name, x, adj)
    if x.ndim != 2 or len(x) != n_rows:
        text = '%s: expected shape (%d, %s), a row for each %s of %r, got %s'
        raise ValueError(text % (name, n_rows, width, each, adj, x.shape))


def features(x, adj, width):
    """Check for :func:`rows` that a matrix multiplies, whose values have their dtype."""
    rows('x', x, adj, adj.n_rows, width)
    values_dtype(adj, x)


def shapes(context, expected):
    """Check shapes; expected: {name: (array or None, shape)}."""
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            text = '%s: expected shape %s to go with %s, got %s'
            raise ValueError(text % (name, shape, context, array.shape))


def floats(name, x, adj):
    """Check for an array of floats, or a Variable, where a matrix is."""
    on_device(name, x, adj)
    if x.dtype not in FLOATS:
        floating(name, x)


def floating(name, x):
    if not hasattr(x, 'dtype') or x.dtype not in FLOATS:
        found = getattr(x, 'dtype', type(x).__name__)
        raise TypeError('%s: expected float16, float32 or float64, got %s' % (name, found))


def same_dtype(name, dtype, expected):
    if dtype != expected:
        raise TypeError('%s: expected %s, got %s' % (name, expected, dtype))


def values_dtype(adj, x):
    if adj.data is not None and adj.data.dtype != x.dtype:
        text = 'x: expected %s as the values of adj, got %s; adj.astype(x.dtype) converts'
        raise TypeError(text % (adj.data.dtype, x.dtype))


def on_device(name, x, adj):
    """Check that an array, or that of a Variable, is where a matrix is."""
    x, offsets = chainer.as_array(x), adj.row_offsets
    if type(x) is type(offsets) and (
        type(x) is numpy.ndarray or x.data.device_id == offsets.data.device_id
    ):
        return
    if not isinstance(x, (numpy.ndarray, cuda.ndarray)):
        raise TypeError('%s: expected a NumPy or CuPy array, got %s' % (name, type(x).__name__))
    here, there = backend.get_device_from_array(x), backend.get_device_from_array(offsets)
    if here != there:
        raise ValueError('%s: expected on %s with adj, got on %s' % (name, there, here))


def gradient(gy, result):
    """Check the gradient of a remembered result; ``chainer.grad`` passes on any."""
    if (gy.dtype, gy.shape, type(gy)) == result:
        return
    dtype, shape, kind = result
    if gy.dtype != dtype:
        raise TypeError('gy: expected %s, as the result, got %s' % (dtype, gy.dtype))
    if gy.shape != shape:
        raise ValueError('gy: expected shape %s, as the result, got %s' % (shape, gy.shape))
    if isinstance(gy, cuda.ndarray) != issubclass(kind, cuda.ndarray):
        where = 'a GPU' if issubclass(kind, cuda.ndarray) else 'the host'
        raise ValueError('gy: expected on %s, as the result, got %s' % (where, type(gy).__name__))


def algorithm(name, is_on_gpu, names):
    """Check the name of an algorithm, one of some on a GPU; a CPU has none but 'auto'."""
    if is_on_gpu:
        one_of('algorithm', name, names)
    else:
        one_of('algorithm on a CPU', name, ('auto',))
