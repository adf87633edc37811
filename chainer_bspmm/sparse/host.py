"""Products on NumPy arrays, the same for every container. float16 is computed in float32."""

import numpy

from chainer_bspmm.sparse import operands


def compute_dtype(x):
    """Return the dtype that products of an array are computed in."""
    return numpy.dtype('f') if x.dtype == numpy.float16 else x.dtype


def bspmm(matrix, adj, x, residual):
    """Multiply by a SciPy matrix of x's `compute_dtype`, made from `adj` or its transpose."""
    y = matrix @ x.reshape(matrix.shape[1], x.shape[-1]).astype(matrix.dtype, copy=False)
    if residual is not None:
        y += residual.reshape(y.shape)
    return y.astype(x.dtype, copy=False).reshape(operands.result_shape(adj, len(y), x))


def bsddmm(adj, u, v):
    u, v = u.reshape(adj.n_rows, u.shape[-1]), v.reshape(adj.n_cols, v.shape[-1])
    n_entries = adj._n_true_entries()
    # In row-major order, as indexing returns it, einsum adds up halves in float32 by itself.
    w = numpy.einsum(
        'kc,kc->k', u[adj.entry_rows()[:n_entries]], v[adj.entry_columns()[:n_entries]]
    )
    return numpy.pad(w, (0, adj.nnz - n_entries)) if adj.has_spare else w
