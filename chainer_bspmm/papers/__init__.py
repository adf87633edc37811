"""The containers and algorithms of the papers, for comparison and for data stored in these layouts.

They are the SparseTensor layout (:class:`BatchedCOO`) with the ST kernels, the SWA kernels on a
BatchedCSR, and sliced ELLPACK (:class:`BatchedSELL`) with its SpMV. Nothing else in the package
uses them.
"""

from chainer_bspmm.papers.batched_coo import BatchedCOO
from chainer_bspmm.papers.batched_sell import BatchedSELL
from chainer_bspmm.papers.products import algorithms, bsddmm, bspmm, spmv

__all__ = ['BatchedCOO', 'BatchedSELL', 'algorithms', 'bsddmm', 'bspmm', 'spmv']
