"""Checks of matrices and arrays, before anything is launched; they never read from a device.

Public functions make them, once; what is below trusts its arguments.
"""

import numpy

from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.validate import FLOATS
from chainer_bspmm.sparse.validate import one_of


def result(y):
    """Return what a node remembers of its result, for :func:`gradient`."""
    return y.dtype, y.shape, launch.on_gpu(y)


def of_kind(adj, kinds):
    """Check that a matrix is of one of some classes of containers."""
    if type(adj) not in kinds:
        raise TypeError(
            'adj: expected a %s, got %s%s; %s'
            % (
                ' or '.join(kind.__name__ for kind in kinds),
                type(adj).__name__,
                ' of shape %s' % (adj.shape,) if hasattr(adj, 'shape') else '',
                'adj.to_csr() makes one, chainer_bspmm.papers.bspmm takes it'
                if hasattr(adj, 'to_csr')
                else 'data sets become sparse batches with converter=chainer_bspmm.concat_mols, '
                'arrays with BatchedCSR.from_dense',
            )
        )


def adjacency(adj):
    """Check for a BatchedCSR."""
    of_kind(adj, (BatchedCSR,))


def features(adj, x):
    """Check the rows that a matrix with a column for every row and relation is multiplied by."""
    floating('x', x)
    values_dtype(adj, x)
    on_device('x', x, adj)


def relations(adj):
    """Check for a BatchedCSR with a column for every row and relation."""
    adjacency(adj)
    if adj.n_cols != adj.n_rows * adj.n_relations:
        raise ValueError(
            'adj: expected a column for each of its %d rows and %d relations, got %r'
            % (adj.n_rows, adj.n_relations, adj)
        )


def shapes(context, expected):
    """Check shapes; expected: {name: (array or None, shape)}."""
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                '%s: expected shape %s to go with %s, got %s' % (name, shape, context, array.shape)
            )


def shaped(name, x, adj, shape):
    on_device(name, x, adj)
    floating(name, x)
    if x.shape != shape:
        raise ValueError(
            '%s: expected shape %s to go with %r, got %s' % (name, shape, adj, x.shape)
        )


def floating(name, x):
    if x.dtype not in FLOATS:
        raise TypeError('%s: expected float16, float32 or float64, got %s' % (name, x.dtype))


def same_dtype(name, dtype, expected):
    if dtype != expected:
        raise TypeError('%s: expected %s, got %s' % (name, expected, dtype))


def values_dtype(adj, x):
    if adj.data is not None and adj.data.dtype != x.dtype:
        raise TypeError(
            'x: expected %s as the values of adj, got %s; adj.astype(x.dtype) converts'
            % (adj.data.dtype, x.dtype)
        )


def on_device(name, x, adj):
    """Check that an array is where a matrix is."""
    offsets = adj.row_offsets
    if type(x) is type(offsets) and (
        type(x) is numpy.ndarray or x.data.device_id == offsets.data.device_id
    ):
        return
    if not isinstance(x, (numpy.ndarray, cuda.ndarray)):
        raise TypeError('%s: expected a NumPy or CuPy array, got %s' % (name, type(x).__name__))
    here, there = backend.get_device_from_array(x), backend.get_device_from_array(offsets)
    if here != there:
        raise ValueError('%s: expected on %s with adj, got on %s' % (name, there, here))


def gradient(gy, remembered):
    """Check the gradient that comes in for a result; ``chainer.grad`` passes on any."""
    dtype, shape, is_on_gpu = remembered
    if gy.dtype != dtype:
        raise TypeError('gy: expected %s, as the result, got %s' % (dtype, gy.dtype))
    if gy.shape != shape:
        raise ValueError('gy: expected shape %s, as the result, got %s' % (shape, gy.shape))
    if launch.on_gpu(gy) != is_on_gpu:
        where = 'a GPU' if is_on_gpu else 'the host'
        raise ValueError('gy: expected on %s, as the result, got %s' % (where, type(gy).__name__))


def algorithm(name, is_on_gpu, names):
    """Check the name of an algorithm, one of some on a GPU; a CPU has none but 'auto'."""
    if is_on_gpu:
        one_of('algorithm', name, names)
    else:
        one_of('algorithm on a CPU', name, ('auto',))
