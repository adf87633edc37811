"""The papers' containers on NumPy arrays, by SciPy."""

import numpy
import scipy.sparse

from chainer_bspmm.ops.bspmm import matrix_on_host, multiply_on_host
from chainer_bspmm.ops.elementwise import compute_dtype
from chainer_bspmm.papers.batched_coo import BatchedCOO
from chainer_bspmm.sparse import BatchedCSR, build


def bspmm(adj, x, data, residual, trans, algorithm='auto'):
    """Compute `products.bspmm_forward` on a host."""
    dtype = compute_dtype(x)
    if type(adj) is BatchedCSR:
        matrix = matrix_on_host(adj, data, dtype, trans)
    elif type(adj) is BatchedCOO:
        matrix = _coo_matrix(adj, data, dtype, trans)
    else:
        matrix = _scipy_matrix(adj.T if trans else adj, dtype)
    return multiply_on_host(matrix, adj, x, residual)


def _scipy_matrix(adj, dtype):
    return adj.cached(('scipy', dtype), lambda: adj.to_scipy().astype(dtype, copy=False))


def _coo_matrix(adj, data, dtype, trans):
    # SciPy's own conversion would add up entries at the same place, and their sum may overflow.
    rows = adj.entry_rows()
    columns = adj.entry_columns()
    shape = adj.shape
    if trans:
        rows, columns, shape = columns, rows, shape[::-1]
    indptr, order = adj.cached(('sorted', trans), lambda: build.group(numpy, rows, shape[0]))

    def make(values):
        values = values.astype(dtype, copy=False)[order]
        return scipy.sparse.csr_matrix((values, columns[order], indptr), shape=shape)

    if data is not None:
        return make(data)
    return adj.cached(('scipy', dtype, trans), lambda: make(adj._host_values()))


def spmv(adj, x, alpha, beta, y):
    """Compute `products.spmv` on a host."""
    compute = compute_dtype(x).type
    product = _scipy_matrix(adj, numpy.dtype(compute)) @ x.astype(compute, copy=False)
    alpha, beta = compute(alpha), compute(beta)
    with numpy.errstate(invalid='ignore'):  # SciPy's product does not warn of infinities either
        product *= alpha
        if beta != 0:  # y may hold NaN, and 0 times NaN is NaN
            product += beta * y.astype(compute, copy=False)
    if y is None:
        return product.astype(x.dtype, copy=False)
    y[...] = product
    return y
