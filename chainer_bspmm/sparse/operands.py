"""Checks of the arrays that are multiplied by a matrix, before anything is launched.

They read attributes only, never the device, and cost about a microsecond: every product makes them.
"""

import numpy

from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.sparse.validate import FLOATS


def of_kind(adj, kinds):
    """Check that a matrix is of one of some classes of containers."""
    if type(adj) not in kinds:
        raise TypeError(
            'adj: expected a %s, got %s%s; data sets become sparse batches with '
            'converter=chainer_bspmm.concat_mols, arrays with BatchedCSR.from_dense'
            % (
                ' or '.join(kind.__name__ for kind in kinds),
                type(adj).__name__,
                ' of shape %s' % (adj.shape,) if hasattr(adj, 'shape') else '',
            )
        )


def bspmm(adj, x, data, residual, trans):
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    _matrix('x', x, adj, n_in)
    dtype = x.dtype
    if data is not None:
        _on_device('data', data, adj)
        if data.shape != (adj.nnz,):
            raise ValueError(
                'data: expected shape (%d,), one value for each entry, got %s'
                % (adj.nnz, data.shape)
            )
        same_dtype('data', data.dtype, dtype)
    else:
        values_dtype(adj, x)
    if residual is not None:
        _on_device('residual', residual, adj)
        shape = result_shape(adj, n_out, x)
        if residual.shape != shape:
            raise ValueError(
                'residual: expected shape %s, that of the product, got %s' % (shape, residual.shape)
            )
        same_dtype('residual', residual.dtype, dtype)


def result_shape(adj, n_rows, x):
    """Return the shape of a product with `n_rows` rows in all, of two or three axes as `x`."""
    if x.ndim == 2:
        return n_rows, x.shape[1]
    return adj.n_graphs, n_rows // adj.n_graphs, x.shape[2]


def bsddmm(adj, u, v):
    _matrix('u', u, adj, adj.n_rows)
    _matrix('v', v, adj, adj.n_cols)
    if u.shape[-1] != v.shape[-1]:
        raise ValueError('v: expected %d channels as u, got shape %s' % (u.shape[-1], v.shape))
    same_dtype('v', v.dtype, u.dtype)


def _matrix(name, x, adj, n_rows):
    _on_device(name, x, adj)
    shape = x.shape
    if x.dtype not in FLOATS:
        floating(name, x)
    if len(shape) == 2:
        if shape[0] == n_rows:
            return
    elif len(shape) == 3 and adj.layout == 'padded' and adj.n_graphs:
        if shape[:2] == (adj.n_graphs, n_rows // adj.n_graphs):
            return
    expected = '(%d, n_B)' % n_rows
    if adj.layout == 'padded' and adj.n_graphs:
        expected += ' or (%d, %d, n_B)' % (adj.n_graphs, n_rows // adj.n_graphs)
    raise ValueError('%s: expected shape %s to go with %r, got %s' % (name, expected, adj, shape))


def shaped(name, x, adj, shape):
    _on_device(name, x, adj)
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


def _on_device(name, x, adj):
    offsets = adj.row_offsets
    if type(x) is type(offsets) and (
        type(x) is numpy.ndarray or x.data.device_id == offsets.data.device_id
    ):
        return
    same_place(name, x, 'adj', offsets)


def same_place(name, x, other_name, other):
    for label, array in ((name, x), (other_name, other)):
        if not isinstance(array, (numpy.ndarray, cuda.ndarray)):
            raise TypeError(
                '%s: expected a NumPy or CuPy array, got %s' % (label, type(array).__name__)
            )
    here, there = backend.get_device_from_array(x), backend.get_device_from_array(other)
    if here != there:
        raise ValueError('%s: expected on %s with %s, got on %s' % (name, there, other_name, here))
