"""Checks of arrays against a container before anything is launched.

They read attributes only, never the device, and cost about a microsecond: they stand in the path
of every product.
"""

import numbers

import numpy

from chainer import backend
from chainer.backends import cuda

from chainer_bspmm.sparse import BatchedCOO
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import BatchedSELL
from chainer_bspmm.sparse.validate import FLOATS
from chainer_bspmm.sparse.validate import one_of  # NOQA: F401

PRODUCTS = (BatchedCSR, BatchedCOO, BatchedSELL)
CONTAINERS = (BatchedCSR, BatchedCOO)


def bspmm(adj, x, data, residual, trans):
    product(adj)
    if data is not None and type(adj) is BatchedSELL:
        raise ValueError(
            'data: expected None, because a BatchedSELL has its own values, got %s; '
            'edge values go with a BatchedCSR' % type(data).__name__
        )
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
        _same_dtype('data', data.dtype, dtype)
    else:
        _values_dtype(adj, x)
    if residual is not None:
        _on_device('residual', residual, adj)
        shape = result_shape(adj, n_out, x)
        if residual.shape != shape:
            raise ValueError(
                'residual: expected shape %s, that of the product, got %s' % (shape, residual.shape)
            )
        _same_dtype('residual', residual.dtype, dtype)


def result_shape(adj, n_rows, x):
    """Return the shape of a product with `n_rows` rows in all, given as `x` was."""
    if x.ndim == 2:
        return n_rows, x.shape[1]
    return adj.n_graphs, n_rows // adj.n_graphs, x.shape[2]


def spmv(adj, x, alpha, beta, y):
    if type(adj) not in (BatchedCSR, BatchedSELL):
        raise TypeError('adj: expected a BatchedCSR or BatchedSELL, got %s' % type(adj).__name__)
    for name, factor in (('alpha', alpha), ('beta', beta)):
        if not isinstance(factor, numbers.Real):
            raise TypeError('%s: expected a real number, got %r' % (name, factor))
    _vector('x', x, adj, adj.n_cols)
    _values_dtype(adj, x)
    if y is None:
        if beta != 0:
            raise ValueError('y: expected an array to go with beta = %r, got None' % beta)
        return
    _vector('y', y, adj, adj.n_rows)
    _same_dtype('y', y.dtype, x.dtype)
    if not y.flags.c_contiguous:
        raise ValueError(
            'y: expected a C-contiguous array, because it is written in place, got '
            'strides %s' % (y.strides,)
        )
    if isinstance(y, numpy.ndarray) and not y.flags.writeable:
        raise ValueError('y: expected a writable array, got a read-only one')
    if backend.get_array_module(x).may_share_memory(x, y):
        raise ValueError('y: expected memory apart from that of x, got an overlap')


def _vector(name, x, adj, size):
    _on_device(name, x, adj)
    _float(name, x)
    if x.shape != (size,):
        raise ValueError(
            '%s: expected shape (%d,) to go with %r, got %s' % (name, size, adj, x.shape)
        )


def bsddmm(adj, u, v):
    adjacency(adj)
    _matrix('u', u, adj, adj.n_rows)
    _matrix('v', v, adj, adj.n_cols)
    if u.shape[-1] != v.shape[-1]:
        raise ValueError('v: expected %d channels as u, got shape %s' % (u.shape[-1], v.shape))
    _same_dtype('v', v.dtype, u.dtype)


def rows(x):
    if x.ndim != 2:
        raise ValueError('x: expected shape (n_rows, n_B), got %s' % (x.shape,))
    _float('x', x)


def segments(x, offsets):
    rows(x)
    _same_place('x', x, 'offsets', offsets)


def broadcast(y, offsets):
    if y.ndim != 2 or len(y) != offsets.size - 1:
        raise ValueError(
            'y: expected %d rows, one for each segment, got shape %s' % (offsets.size - 1, y.shape)
        )
    _float('y', y)
    _same_place('y', y, 'offsets', offsets)


def dropout(x, counter):
    _float('x', x)
    elements(x.size)
    _same_place('x', x, 'counter', counter)


def elements(size):
    if size > 2**34:
        raise ValueError(
            'size: expected at most 2**34 elements, for which a layer has random '
            'numbers, got %d' % size
        )


def product(adj):
    """Check the matrix of a product, which knows every container."""
    _container(adj, PRODUCTS)


def adjacency(adj):
    """Check the matrix of anything else."""
    _container(adj, CONTAINERS)


def compressed(adj):
    """Check the matrix of what asks for entries in the order of the rows."""
    _container(adj, (BatchedCSR,))


def _container(adj, kinds):
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


def _matrix(name, x, adj, n_rows):
    _on_device(name, x, adj)
    shape = x.shape
    if x.dtype not in FLOATS:
        _float(name, x)
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


def st_dtype(x):
    """Refuse float16: an atomicAdd on halves would round every partial sum."""
    if x.dtype == numpy.float16:
        raise TypeError(
            'x: expected float32 or float64 with a BatchedCOO on a GPU, got float16; '
            'its kernels add with atomics; adj.to_csr() takes float16'
        )


def st_bytes(algorithm, n_bytes, what, largest):
    """Refuse a forced ST kernel whose share of the output exceeds a block's shared memory."""
    if n_bytes > largest:
        raise ValueError(
            'algorithm: %r expects %s in at most %d bytes of shared memory, got %d '
            "bytes; 'st' chooses a kernel that fits" % (algorithm, what, largest, n_bytes)
        )


def _float(name, x):
    if x.dtype not in FLOATS:
        raise TypeError('%s: expected float16, float32 or float64, got %s' % (name, x.dtype))


def _same_dtype(name, dtype, expected):
    if dtype != expected:
        raise TypeError('%s: expected %s, got %s' % (name, expected, dtype))


def _values_dtype(adj, x):
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
    _same_place(name, x, 'adj', offsets)


def _same_place(name, x, other_name, other):
    for label, array in ((name, x), (other_name, other)):
        if not isinstance(array, (numpy.ndarray, cuda.ndarray)):
            raise TypeError(
                '%s: expected a NumPy or CuPy array, got %s' % (label, type(array).__name__)
            )
    here, there = backend.get_device_from_array(x), backend.get_device_from_array(other)
    if here != there:
        raise ValueError('%s: expected on %s with %s, got on %s' % (name, there, other_name, here))
