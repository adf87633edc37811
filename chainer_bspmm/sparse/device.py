"""The arrays of a matrix that kernels are given."""

# How a kernel finds the value of an entry (WEIGHTS); see kernels/bspmm_csr.cu.
ONES, DATA, ORDERED = 0, 1, 2


def values_of(adj, data=None, trans=False):
    """Return WEIGHTS, the array of values and that of their order, each None where there is none.

    They are the transpose's with `trans`. `data` replaces the values, in the order of the entries.
    """
    if data is not None:
        return (ORDERED, data, adj.transpose_order) if trans else (DATA, data, None)
    data = (adj.T if trans else adj).data
    return (ONES, None, None) if data is None else (DATA, data, None)
