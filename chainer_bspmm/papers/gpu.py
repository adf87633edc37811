"""The papers' algorithms on CuPy arrays, each a function of (adj, x, data, residual, trans)."""

import functools

import numpy

from chainer import utils
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.ops.bspmm import result_shape
from chainer_bspmm.papers import policy
from chainer_bspmm.papers.batched_coo import BatchedCOO
from chainer_bspmm.papers.batched_sell import BatchedSELL
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.build import values_of


def bspmm(adj, x, data, residual, trans, algorithm='auto'):
    """Compute `products.bspmm_forward` on a GPU."""
    product = DEFAULT[type(adj)] if algorithm == 'auto' else algorithms(adj)[algorithm]
    with launch.device_of(x):
        y = product(
            adj, launch.contiguous(x), launch.contiguous(data), launch.contiguous(residual), trans
        )
    return y.reshape(result_shape(adj, len(y), x))


def _swa(adj, x, data, residual, trans, blocked=None):
    """Launch kernels/papers/bspmm_swa.cu: a sub-warp per row, with sums in shared memory."""
    side = adj.T if trans else adj
    n_rows = side.n_rows
    n_channels = x.shape[-1]
    y = cuda.cupy.empty((n_rows, n_channels), x.dtype)
    if y.size:
        plan = policy.swa_launch(side.n_graphs, side.max_rows, n_channels, x.itemsize, blocked)
        weights, data, order = values_of(adj, data, trans)
        matrix = side.row_offsets, side.indptr, side.indices, data, order
        launch.run('bspmm_swa', x, plan, *matrix, x, residual, y, WEIGHTS=weights)
    return y


SWA_ALGORITHMS = {  # for a BatchedCSR without spare rows, because they write graphs' rows only
    'swa': _swa,
    'swa_rows': functools.partial(_swa, blocked=False),
    'swa_blocked': functools.partial(_swa, blocked=True),
}


def _sell(adj, x, data, residual, trans):
    """Multiply with a thread per row of a slice; `data` is None."""
    side = adj.T if trans else adj
    y = cuda.cupy.empty((side.n_rows, x.shape[-1]), x.dtype)
    _launch_sell(side, x, 1, 0 if residual is None else 1, residual, y)
    return y


SELL_ALGORITHMS = {'sell': _sell}


def _launch_sell(adj, x, alpha, beta, residual, y):
    """Compute ``y = alpha A x + beta residual`` by kernels/papers/bspmm_sell.cu.

    `residual` is y itself, another array, or None.
    """
    if not y.size:
        return
    n_channels = y.size // adj.n_rows
    width = launch.vector_width(n_channels, x, y, residual)
    slots = policy.sell_slots(adj.max_slice_rows)
    plan = policy.sell_launch(adj.n_slices, slots, n_channels, width)
    weights, data, _ = values_of(adj)
    factors = map(launch.arithmetic(x.dtype), (alpha, beta))
    matrix = adj.slice_starts, adj.slice_rows, adj.column, data, adj.row_order
    launch.run('bspmm_sell', x, plan, *matrix, x, residual, y, *factors, WEIGHTS=weights)


def spmv(adj, x, alpha, beta, y):
    """Compute `products.spmv` on a GPU."""
    with launch.device_of(x):
        if y is None:
            y = cuda.cupy.empty(adj.n_rows, x.dtype)
        x = launch.contiguous(x)
        if type(adj) is BatchedSELL:
            _launch_sell(adj, x, alpha, beta, y, y)
        elif y.size:
            plan = policy.spmv_launch(adj.n_rows, adj.nnz)
            weights, data, _ = values_of(adj)
            factors = map(launch.arithmetic(x.dtype), (alpha, beta))
            matrix = adj.indptr, adj.indices, data
            launch.run('spmv_csr', x, plan, *matrix, x, y, *factors, WEIGHTS=weights)
    return y


def _check_dtype(x):
    """Refuse float16, because its atomicAdd would round every partial sum."""
    if x.dtype == numpy.float16:
        raise TypeError(
            'x: expected float32 or float64 with a BatchedCOO on a GPU, got float16; '
            'its kernels add with atomics; adj.to_csr() takes float16'
        )


def _st(adj, x, data, residual, trans):
    """Multiply by the kernel that the paper's rule chooses."""
    algorithm = policy.st_algorithm(_st_side(adj, trans)[1], x.shape[-1], x.itemsize)
    return ST_ALGORITHMS[algorithm](adj, x, data, residual, trans)


def _st_side(adj, trans):
    """Return the rows of the product, the rows of its largest matrix, and its row offsets."""
    if trans:
        return adj.n_cols, adj.max_cols, adj.col_offsets
    return adj.n_rows, adj.max_rows, adj.row_offsets


def _st_blocks(adj, x, data, residual, trans, blocked=False):
    """Launch kernels/papers/bspmm_st_shared.cu: a block per matrix, or per partition of columns.

    The paper has them as figures 5-(a) and, `blocked`, 5-(b).
    """
    n_rows, max_rows, offsets = _st_side(adj, trans)
    n_channels = n_columns = x.shape[-1]
    n_bytes = max_rows * x.itemsize * (1 if blocked else n_channels)
    if n_bytes > policy.SHARED_BUDGET:
        what = (
            ('st_blocked', 'one column of the output') if blocked else ('st_shared', 'the output')
        )
        raise ValueError(
            'algorithm: %r expects %s of the largest matrix in at most %d bytes of shared memory, '
            "got %d bytes; 'st' chooses a kernel that fits" % (*what, policy.SHARED_BUDGET, n_bytes)
        )
    _check_dtype(x)
    if blocked:
        n_columns = policy.st_partition(max_rows, n_channels, x.itemsize)
    y = cuda.cupy.empty((n_rows, n_channels), x.dtype)
    if y.size:
        plan = policy.st_shared_launch(
            adj.n_graphs, max_rows, adj.max_nnz, n_channels, n_columns, x.itemsize
        )
        arrays = adj.entry_offsets, offsets, x, residual, y
        _run_st('bspmm_st_shared', plan, adj, x, data, trans, arrays)
    return y


def _st_global(adj, x, data, residual, trans):
    """Launch kernels/papers/bspmm_st_global.cu: a sub-warp per entry, case 3 of section 4.3."""
    _check_dtype(x)
    shape = _st_side(adj, trans)[0], x.shape[-1]
    # y is initialised by another launch, because the kernel only adds, by atomics.
    if residual is None:
        y = cuda.cupy.zeros(shape, x.dtype)
    else:
        y = residual.reshape(shape).copy()
    if y.size and adj.nnz:
        plan = policy.st_global_launch(adj.n_graphs, adj.nnz, shape[1])
        _run_st('bspmm_st_global', plan, adj, x, data, trans, (adj.entry_offsets, x, y))
    return y


def _run_st(name, plan, adj, x, data, trans, arrays):
    utils.nondeterministic('atomicAdd in bspmm with a BatchedCOO')
    weights, data, _ = values_of(adj, data)  # `trans` is for the kernel, which swaps the indices
    launch.run(name, x, plan, adj.ids, data, *arrays, WEIGHTS=weights, TRANS=trans)


ST_ALGORITHMS = {  # for a BatchedCOO; all of them add by atomics
    'st': _st,
    'st_shared': _st_blocks,
    'st_blocked': functools.partial(_st_blocks, blocked=True),
    'st_global': _st_global,
}

# The algorithm that 'auto' chooses for a container.
DEFAULT = {BatchedCSR: _swa, BatchedCOO: _st, BatchedSELL: _sell}


def algorithms(adj):
    """Return the algorithms (dict) for the container of a batch."""
    if type(adj) is BatchedCSR:
        return {} if adj.has_spare else SWA_ALGORITHMS
    return ST_ALGORITHMS if type(adj) is BatchedCOO else SELL_ALGORITHMS


def bsddmm(adj, u, v):
    """Compute `products.bsddmm_forward` on a GPU."""
    n_channels = u.shape[-1]
    with launch.device_of(u):
        u, v = launch.contiguous(u), launch.contiguous(v)
        w = cuda.cupy.empty(adj.nnz, u.dtype)
        if not n_channels:
            w.fill(0)
        elif w.size:
            width = launch.vector_width(n_channels, u, v)
            plan = policy.coo_dot_launch(adj.n_graphs, adj.nnz, n_channels, width)
            launch.run('bsddmm_coo', u, plan, adj.ids, adj.entry_offsets, u, v, w)
    return w
