"""Containers for batches of small sparse matrices, on NumPy or CuPy arrays."""

from chainer_bspmm.sparse.batched_coo import BatchedCOO
from chainer_bspmm.sparse.batched_csr import BatchedCSR
from chainer_bspmm.sparse.batched_sell import BatchedSELL

__all__ = ['BatchedCOO', 'BatchedCSR', 'BatchedSELL']
