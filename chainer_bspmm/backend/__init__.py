"""The products and reductions on bare arrays: checks first, then SciPy or a CUDA kernel.

Every function takes arrays that lie on the device of the matrix, launches on that device's current
stream, does not synchronise, and returns new C-contiguous arrays, except where
:func:`spmv` is given the array to fill; :func:`relu_dropout` works in place.
"""

from chainer.backends import cuda

from chainer_bspmm.backend import check
from chainer_bspmm.backend import cpu
from chainer_bspmm.backend import gpu


def _module(x):
    return gpu if isinstance(x, cuda.ndarray) else cpu


def bspmm(adj, x, data=None, residual=None, trans=False, algorithm='auto'):
    """Compute ``y[i] = sum_k value[k] x[column[k]] (+ residual[i])`` over the entries of row i.

    Args:
        adj (BatchedCSR, BatchedCOO or BatchedSELL): n_rows x n_cols.
        x (array): (n_cols, n_B); or (n_graphs, N, n_B) where ``adj`` is padded.
        data (array or None): (nnz,) values of the entries in place of ``adj.data``; None with a
            BatchedSELL.
        residual (array or None): of the result's shape, added to the product.
        trans (bool): multiply by the transposed matrix; ``data`` keeps the order of ``adj``.
        algorithm (str): ``'auto'``, or on a GPU a name from ``gpu.algorithms(adj)``.

    Returns:
        array: (n_rows, n_B), or (n_graphs, N, n_B) for a three-dimensional ``x``, of x's dtype.
    """
    check.bspmm(adj, x, data, residual, trans)
    if _module(x) is cpu:
        check.one_of('algorithm on a CPU', algorithm, ('auto',))
        return cpu.bspmm(adj, x, data, residual, trans)
    if algorithm != 'auto':
        check.one_of('algorithm', algorithm, ('auto', *gpu.algorithms(adj)))
    return gpu.bspmm(adj, x, data, residual, trans, algorithm)


def spmv(adj, x, alpha=1, beta=0, y=None):
    """Compute ``y[i] = alpha sum_k value[k] x[column[k]] + beta y[i]``, in ``y`` where it is given.

    As in BLAS beta scales y once, and ``beta=0`` never reads y, whatever it holds. alpha and beta
    are rounded to x's dtype (float16: to float32). Unlike in BLAS, ``alpha=0`` still multiplies:
    a NaN in x stays one.

    Args:
        adj (BatchedCSR or BatchedSELL): n_rows x n_cols.
        x (array): (n_cols,) float16, float32 or float64.
        alpha, beta (float): factors.
        y (array or None): (n_rows,) of x's dtype, C-contiguous, apart from x in memory. None means
            a new array, and asks for ``beta=0``.

    Returns:
        array: ``y``, or a new array (n_rows,) of x's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit; before anything is launched.

    Note:
        Deterministic; does not synchronise.

    Source:
        IPSJ report 2018-HPC-164 No. 3, figures 2, 4 and 5; ``kernels/bspmm_sell.cu``,
        ``kernels/spmv_csr.cu``. beta stands in the report's loop, which is not what is meant.
    """
    check.spmv(adj, x, alpha, beta, y)
    return _module(x).spmv(adj, x, alpha, beta, y)


def bsddmm(adj, u, v):
    """Compute ``w[k] = sum_c u[row[k], c] v[column[k], c]`` for every entry k.

    Args:
        adj (BatchedCSR or BatchedCOO): the pattern, n_rows x n_cols; its values are not used.
        u (array): (n_rows, n_B), or (n_graphs, N, n_B) where ``adj`` is padded.
        v (array): (n_cols, n_B), or three-dimensional likewise.

    Returns:
        array: (nnz,), of u's dtype.
    """
    check.bsddmm(adj, u, v)
    return _module(u).bsddmm(adj, u, v)


def segment_sum(x, offsets, max_rows=None):
    """Compute ``y[g] = sum of x[offsets[g]:offsets[g + 1]]``; an empty segment gives 0.

    Args:
        x (array): (n_rows, n_B) floats.
        offsets (array): (n_segments + 1,) int32, as ``BatchedCSR.row_offsets``.
        max_rows (int or None): the most rows that a segment has, where the host knows it. A GPU
            then need not prepare for a segment of all the rows, which costs it a second launch.

    Returns:
        array: (n_segments, n_B), of x's dtype.
    """
    check.segments(x, offsets)
    return _module(x).segment_sum(x, offsets, max_rows)


def segment_max(x, offsets, max_rows=None):
    """Compute the maximum of every segment; arguments as :func:`segment_sum`.

    An empty segment gives 0; NaN propagates.
    """
    check.segments(x, offsets)
    return _module(x).segment_max(x, offsets, max_rows)


def row_sum(x):
    """Compute ``y[c] = sum of x[:, c]``, the gradient of a bias; 0 where there are no rows.

    Args:
        x (array): (n_rows, n_B) floats.

    Returns:
        array: (n_B,), of x's dtype. Formed in a tree, which is closer than row after row, and on a
        GPU at the speed of memory, which CuPy's sum over the first axis is far from.
    """
    check.rows(x)
    return _module(x).row_sum(x)


def segment_broadcast(y, offsets, n_rows, max_rows=None):
    """Copy row g of ``y`` to every row of segment g: the transpose of :func:`segment_sum`.

    Args:
        y (array): (n_segments, n_B) floats.
        offsets (array): (n_segments + 1,) int32.
        n_rows (int): ``offsets[-1]``, known on the host, or more; rows past it get 0.
        max_rows (int or None): as in :func:`segment_sum`.

    Returns:
        array: (n_rows, n_B), of y's dtype.
    """
    check.broadcast(y, offsets)
    return _module(y).segment_broadcast(y, offsets, n_rows, max_rows)


def segment_softmax(x, offsets):
    """Compute ``y[i, c] = exp(x[i, c]) / sum over the rows k of i's segment of exp(x[k, c])``.

    The maximum is subtracted first: nothing overflows. On a GPU one thread does a segment's
    column: segments are meant to be short, as the entries of a row are.

    Args:
        x (array): (n_rows, n_B) floats.
        offsets (array): (n_segments + 1,) int32 from 0 to n_rows.

    Returns:
        array: (n_rows, n_B), of x's dtype; computed in float64.
    """
    check.segments(x, offsets)
    return _module(x).segment_softmax(x, offsets)


def segment_softmax_grad(y, gy, offsets):
    """Compute ``gx[i, c] = y[i, c] (gy[i, c] - sum over i's segment of y[k, c] gy[k, c])``.

    Args:
        y (array): (n_rows, n_B), what :func:`segment_softmax` gave.
        gy (array): (n_rows, n_B) of y's dtype.
        offsets (array): the same.

    Returns:
        array: (n_rows, n_B), of y's dtype.
    """
    check.segments(y, offsets)
    return _module(y).segment_softmax_grad(y, gy, offsets)


def dropout(x, ratio, seed, stream, counter):
    """Compute ``y = x * mask``, the mask being 0 with probability ratio, else 1 / (1 - ratio).

    The same random numbers wherever and however often it is called with the same seed, stream and
    step; ``kernels/dropout.cu`` says which.

    Args:
        x (array): floats of any shape, at most 2**34.
        ratio (float): in [0, 1).
        seed (int): in [0, 2**64).
        stream (int): number of the layer in the step, in [0, 2**32).
        counter (array): (1,) uint64 on x's device, number of the step.

    Returns:
        tuple of arrays: mask and y, of x's shape and dtype.
    """
    check.dropout(x, counter)
    return _module(x).dropout(x, ratio, seed, stream, counter)


def relu_dropout(x, ratio, seed, stream, counter):
    """Compute ``max(0, x) * mask`` in place; arguments as :func:`dropout`. NaN stays NaN."""
    check.dropout(x, counter)
    _module(x).relu_dropout(x, ratio, seed, stream, counter)


def dropout_mask(size, dtype, ratio, seed, stream, counter):
    """Return the mask alone, (size,) on the device of `counter`; other arguments as `dropout`."""
    check.elements(size)
    return _module(counter).dropout_mask(size, dtype, ratio, seed, stream, counter)
