"""The containers and algorithms of the papers, apart from the default product.

The SparseTensor layout (:class:`BatchedCOO`) with the ST kernels, the SWA kernels on a BatchedCSR,
and sliced ELLPACK (:class:`BatchedSELL`) with its SpMV: for comparison, and for data stored
in these layouts. ``chainer_bspmm.backend`` calls this package for all but a BatchedCSR.
"""

from __future__ import annotations

from typing import Any

from chainer.backends import cuda

from chainer_bspmm.papers import check
from chainer_bspmm.papers import cpu
from chainer_bspmm.papers import gpu
from chainer_bspmm.papers.batched_coo import BatchedCOO
from chainer_bspmm.papers.batched_sell import BatchedSELL
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.validate import one_of

__all__ = ['BatchedCOO', 'BatchedSELL', 'bsddmm', 'bspmm', 'spmv']


def _module(x):
    return gpu if isinstance(x, cuda.ndarray) else cpu


def bspmm(
    adj: BatchedCOO | BatchedSELL,
    x: Any,
    data: Any = None,
    residual: Any = None,
    trans: bool = False,
    algorithm: str = 'auto',
) -> Any:
    """Compute the product; see ``chainer_bspmm.backend.bspmm``."""
    check.bspmm(adj, x, data, residual, trans)
    if _module(x) is cpu:
        one_of('algorithm on a CPU', algorithm, ('auto',))
        return cpu.bspmm(adj, x, data, residual, trans)
    one_of('algorithm', algorithm, ('auto', *gpu.algorithms(adj)))
    return gpu.bspmm(adj, x, data, residual, trans, algorithm)


def bsddmm(adj: BatchedCOO, u: Any, v: Any) -> Any:
    """Compute the sampled product; see ``chainer_bspmm.backend.bsddmm``."""
    check.bsddmm(adj, u, v)
    return _module(u).bsddmm(adj, u, v)


def spmv(
    adj: BatchedCSR | BatchedSELL, x: Any, alpha: float = 1, beta: float = 0, y: Any = None
) -> Any:
    """Compute ``y[i] = alpha sum_k value[k] x[column[k]] + beta y[i]``, in ``y`` where it is given.

    As in BLAS, beta scales y once, and ``beta=0`` never reads y, not even a NaN. alpha and beta
    are rounded to x's dtype (float16: to float32). Unlike in BLAS, ``alpha=0`` still multiplies:
    a NaN in x stays one.

    Args:
        adj (BatchedCSR or BatchedSELL): n_rows x n_cols.
        x (array): (n_cols,) float16, float32 or float64.
        alpha, beta (float): factors.
        y (array or None): (n_rows,) of x's dtype, C-contiguous, not overlapping x. None means a new
            array, and requires ``beta=0``.

    Returns:
        array: ``y``, or a new array (n_rows,) of x's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit; before anything is launched.

    Note:
        Deterministic; does not synchronise.

    Source:
        IPSJ report 2018-HPC-164 No. 3, figures 2, 4 and 5; ``papers/bspmm_sell.cu``,
        ``papers/spmv_csr.cu`` of the kernels. The report's listing has beta inside the loop, which
        would scale y more than once.
    """
    check.spmv(adj, x, alpha, beta, y)
    return _module(x).spmv(adj, x, alpha, beta, y)
