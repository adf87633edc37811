"""The container for batches of small sparse matrices, on NumPy or CuPy arrays."""

from chainer_bspmm.sparse.batched_csr import BatchedCSR

__all__ = ['BatchedCSR']
