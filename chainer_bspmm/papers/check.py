"""Checks of the arguments of the papers' algorithms, before anything is launched."""

import numbers
import numpy

from chainer import backend

from chainer_bspmm.ops import check
from chainer_bspmm.ops.bspmm import check_bsddmm
from chainer_bspmm.ops.bspmm import check_bspmm
from chainer_bspmm.papers.batched_coo import BatchedCOO
from chainer_bspmm.papers.batched_sell import BatchedSELL
from chainer_bspmm.sparse import BatchedCSR


def bspmm(adj, arrays):
    check.of_kind(adj, (BatchedCSR, BatchedCOO, BatchedSELL))
    if type(adj) is BatchedCSR and adj.has_spare:
        raise ValueError('adj: expected no spare rows, which these kernels would not write')
    data = arrays[1]
    if data is not None and type(adj) is BatchedSELL:
        raise ValueError(
            'data: expected None, because a BatchedSELL has its own values, got %s; '
            'edge values go with a BatchedCSR' % type(data).__name__
        )
    check_bspmm(adj, arrays)


def bsddmm(adj, u, v):
    check.of_kind(adj, (BatchedCOO,))
    check_bsddmm(adj, u, v)


def spmv(adj, x, alpha, beta, y):
    if type(adj) not in (BatchedCSR, BatchedSELL):
        raise TypeError('adj: expected a BatchedCSR or BatchedSELL, got %s' % type(adj).__name__)
    for name, factor in (('alpha', alpha), ('beta', beta)):
        if not isinstance(factor, numbers.Real):
            raise TypeError('%s: expected a real number, got %r' % (name, factor))
    _shaped('x', x, adj, (adj.n_cols,))
    check.values_dtype(adj, x)
    if y is None:
        if beta != 0:
            raise ValueError('y: expected an array to go with beta = %r, got None' % beta)
        return
    _shaped('y', y, adj, (adj.n_rows,))
    check.same_dtype('y', y.dtype, x.dtype)
    if not y.flags.c_contiguous:
        raise ValueError(
            'y: expected a C-contiguous array, because it is written in place, got '
            'strides %s' % (y.strides,)
        )
    if isinstance(y, numpy.ndarray) and not y.flags.writeable:
        raise ValueError('y: expected a writable array, got a read-only one')
    if backend.get_array_module(x).may_share_memory(x, y):
        raise ValueError('y: expected memory apart from that of x, got an overlap')


def _shaped(name, x, adj, shape):
    check.floats(name, x, adj)
    if x.shape != shape:
        raise ValueError(
            '%s: expected shape %s to go with %r, got %s' % (name, shape, adj, x.shape)
        )


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
