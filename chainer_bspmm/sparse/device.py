"""The arrays of a matrix that kernels are given."""

from chainer_bspmm.cuda.launch import NULL

# How a kernel finds the value of an entry (WEIGHTS); see kernels/bspmm_csr.cu.
ONES, DATA, ORDERED = 0, 1, 2


def values_of(adj, data=None, trans=False):
    """Return WEIGHTS and the arrays of values and of their order, for the matrix or its transpose.

    `data` replaces the values of the matrix, in the order of its entries.
    """
    if data is not None:
        return (ORDERED, data, adj.transpose_order) if trans else (DATA, data, NULL)
    data = (adj.T if trans else adj).data
    return (ONES, NULL, NULL) if data is None else (DATA, data, NULL)
