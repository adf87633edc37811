"""Products with the papers' containers, and with a BatchedCSR by their SWA kernels."""

from __future__ import annotations

import numbers
from typing import Any

import numpy

import chainer
from chainer import backend, Variable
from chainer.types import NdArray

from chainer_bspmm.cuda import launch
from chainer_bspmm.ops.bspmm import arrays_of, BatchedSDDMM, BatchedSpMM
from chainer_bspmm.ops.bspmm import bsddmm_forward as bsddmm_of_csr
from chainer_bspmm.ops.bspmm import check_bsddmm, check_bspmm
from chainer_bspmm.papers import cpu, gpu
from chainer_bspmm.papers.batched_coo import BatchedCOO
from chainer_bspmm.papers.batched_sell import BatchedSELL
from chainer_bspmm.sparse import BatchedCSR, check


def bspmm_forward(adj, x, data=None, residual=None, trans=False, algorithm='auto'):
    """Compute ``ops.bspmm.bspmm_forward`` on checked arrays."""
    calculate = gpu.bspmm if launch.on_gpu(x) else cpu.bspmm
    return calculate(adj, x, data, residual, trans, algorithm)


def bsddmm_forward(adj, u, v):
    """Compute ``ops.bspmm.bsddmm_forward`` on checked arrays."""
    if type(adj) is BatchedCSR or not launch.on_gpu(u):
        return bsddmm_of_csr(adj, u, v)
    return gpu.bsddmm(adj, u, v)


class PaperSpMM(BatchedSpMM):
    """Node of :func:`bspmm`."""

    product = staticmethod(bspmm_forward)


class PaperSDDMM(BatchedSDDMM):
    """Node of :func:`bsddmm`."""

    product = staticmethod(bsddmm_forward)
    by_factors = PaperSpMM


PaperSpMM.by_values = PaperSDDMM


def algorithms(adj: BatchedCSR | BatchedCOO | BatchedSELL) -> list[str]:
    """Return the names of the algorithms that :func:`bspmm` has for a matrix on a GPU."""
    return list(gpu.algorithms(adj))


def bspmm(
    adj: BatchedCSR | BatchedCOO | BatchedSELL,
    x: Variable | NdArray,
    data: Variable | NdArray | None = None,
    residual: Variable | NdArray | None = None,
    algorithm: str = 'auto',
) -> Variable:
    """Compute :func:`chainer_bspmm.functions.bspmm` by an algorithm of the papers.

    Args:
        adj (BatchedCSR, BatchedCOO or BatchedSELL): the batch of matrices, n_rows x n_cols. A
            BatchedSELL suits an ``x`` of at most about eight columns. For a wider ``x`` the matrix
            is read once for every eight columns. Its backward pass multiplies by the SELL of the
            transpose, which is built once and kept.
        x, data, residual (Variable or array): as in that function; no ``data`` with a BatchedSELL.
        algorithm (str): ``'auto'``, or on a GPU the name of one of :func:`algorithms`. It runs
            forward and in every derivative, and each of these may refuse it. ``'auto'`` means
            ``'swa'`` for a BatchedCSR, ``'sell'`` for a BatchedSELL, and ``'st'`` for a BatchedCOO.
            ``'st'`` follows the paper's rule: ``'st_shared'`` if the output of the largest matrix
            fits in 32 KB, ``'st_blocked'`` if one column of it fits (8,192 rows of float32, 4,096
            of float64), else ``'st_global'``.

    Returns:
        Variable: (n_rows, n_B), or (n_graphs, N, n_B) for a three-dimensional ``x``; of x's dtype.

    Raises:
        TypeError: ``adj`` is not such a container, or a dtype does not fit (such as float16 with a
            BatchedCOO on a GPU, whose atomics would round every partial sum).
        ValueError: a shape, a device or the algorithm does not fit.

    Note:
        Deterministic, except with a BatchedCOO on a GPU, where atomics add in any order;
        ``chainer.config.warn_nondeterministic`` makes that a warning. Does not synchronise.

    Source:
        Nagasaka, Nukada, Kojima, Matsuoka: Batched Sparse Matrix Multiplication for Accelerating
        Graph Convolutional Networks (CCGrid 2019). ``'swa'`` is their CSR kernel as written;
        ``'swa_rows'`` and ``'swa_blocked'`` are its forms (c) and (d) of figure 5 at any width.
        ``kernels/papers/bspmm_swa.cu`` names deviations. The SparseTensor variant (figures 3, 5-(a)
        and 5-(b), section 4.3) is ``bspmm_st_shared.cu`` and ``bspmm_st_global.cu``; the paper
        leaves the block size open, and offsets replace its tables of pointers. SELL comes from IPSJ
        report 2018-HPC-164 No. 3, which has it for one column; ``kernels/papers/bspmm_sell.cu``.
    """
    arrays = arrays_of(x=x, data=data, residual=residual)
    check.of_kind(adj, (BatchedCSR, BatchedCOO, BatchedSELL))
    if type(adj) is BatchedCSR and adj.has_spare:
        text = 'adj: expected a batch without spare rows, which these kernels do not write, got %r'
        raise ValueError(text % adj)
    if data is not None and type(adj) is BatchedSELL:
        raise ValueError(
            'data: expected None, because a BatchedSELL has its own values, got %s; '
            'edge values go with a BatchedCSR' % type(arrays[1]).__name__
        )
    check_bspmm(adj, arrays)
    check.algorithm(algorithm, launch.on_gpu(arrays[0]), ('auto', *algorithms(adj)))
    inputs = [array for array in (x, data, residual) if array is not None]
    node = PaperSpMM(adj, data is not None, residual is not None, algorithm=algorithm)
    return node.apply(inputs)[0]


def bsddmm(adj: BatchedCOO, u: Variable | NdArray, v: Variable | NdArray) -> Variable:
    """Compute :func:`chainer_bspmm.functions.bsddmm` at the entries of a BatchedCOO.

    Arguments, result and errors are as in that function; the entries are in the order of
    ``adj.ids``. Deterministic and does not synchronise, but its gradients are products with a
    BatchedCOO, which on a GPU add by atomics and refuse float16.
    """
    check.of_kind(adj, (BatchedCOO,))
    check_bsddmm(adj, chainer.as_array(u), chainer.as_array(v))
    return PaperSDDMM(adj).apply((u, v))[0]


def _check_spmv(adj, x, alpha, beta, y):
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
        text = 'y: expected a C-contiguous array, because it is written in place, got strides %s'
        raise ValueError(text % (y.strides,))
    if isinstance(y, numpy.ndarray) and not y.flags.writeable:
        raise ValueError('y: expected a writable array, got a read-only one')
    if backend.get_array_module(x).may_share_memory(x, y):
        raise ValueError('y: expected memory that x does not overlap, got an overlap')


def _shaped(name, x, adj, shape):
    check.floats(name, x, adj)
    if x.shape != shape:
        text = '%s: expected shape %s to go with %r, got %s'
        raise ValueError(text % (name, shape, adj, x.shape))


def spmv(
    adj: BatchedCSR | BatchedSELL, x: Any, alpha: float = 1, beta: float = 0, y: Any = None
) -> Any:
    """Compute ``y[i] = alpha sum_k value[k] x[column[k]] + beta y[i]``, in ``y`` if that is given.

    As in BLAS, beta scales y once, and with ``beta=0`` y is never read, even if it holds NaN. alpha
    and beta are rounded to x's dtype (for float16 to float32). Unlike in BLAS, ``alpha=0`` still
    multiplies, so a NaN in x stays NaN. Deterministic; does not synchronise.

    Args:
        adj (BatchedCSR or BatchedSELL): n_rows x n_cols.
        x (array): (n_cols,) float16, float32 or float64.
        alpha, beta (float): factors.
        y (array or None): (n_rows,) of x's dtype, C-contiguous, not overlapping x. None means a new
            array, and requires ``beta=0``.

    Raises:
        TypeError, ValueError: an argument does not fit. They are raised before anything is
            launched.

    Source:
        IPSJ report 2018-HPC-164 No. 3, figures 2, 4 and 5; ``kernels/papers/bspmm_sell.cu`` and
        ``kernels/papers/spmv_csr.cu``. The report's listing has beta inside the loop, which would
        scale y more than once.
    """
    _check_spmv(adj, x, alpha, beta, y)
    calculate = gpu.spmv if launch.on_gpu(x) else cpu.spmv
    return calculate(adj, x, alpha, beta, y)
