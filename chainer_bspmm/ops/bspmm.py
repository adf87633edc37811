"""Batched sparse times dense product (Batched SpMM), and its gradient with respect to values."""

from collections.abc import Callable
import functools

import numpy
import scipy.sparse

import chainer
from chainer import Variable
from chainer.backends import cuda
from chainer.function_node import FunctionNode
from chainer.types import NdArray

from chainer_bspmm.cuda import kernels, launch, plans
from chainer_bspmm.ops.elementwise import compute_dtype
from chainer_bspmm.ops.node import apply_untracked
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency
from chainer_bspmm.sparse.build import values_of

AHEAD = 3  # entries of a row whose loads are issued together; molecules have two to four
AHEAD_LONG = 5  # the same for longer rows, if that leaves enough threads


def csr_launch(
    n_rows,
    n_cols,
    n_channels,
    width,
    lanes,
    columns=1,
    rows_per_thread=1,
    block=plans.BLOCK,
    ahead=AHEAD,
    stream=False,
) -> plans.Launch:
    """Plan bspmm_csr: a thread computes `columns` vectors of `rows_per_thread` rows.

    At most `lanes` threads share a row, fewer if that splits it more evenly. A thread loads `ahead`
    entries at once. `stream` writes the result past the L2 cache.
    """
    n_vectors = n_channels // width
    needed = -(-n_vectors // columns)
    tiles = -(-needed // lanes)
    lanes = -(-needed // tiles)
    rows = max(block // lanes, 1)
    y = min(tiles, plans.MAX_GRID_Y)
    few = max(n_rows, n_cols) * n_vectors < 2**32
    return plans.Launch(
        (
            ('VECTOR', width),
            ('AHEAD', ahead),
            ('COLUMNS', columns),
            ('PIPELINED', int(rows_per_thread > 1)),
            ('STREAM', int(stream)),
            ('OFFSET', 'unsigned' if few else 'size_t'),
        ),
        (-(-n_rows // (rows * rows_per_thread)), y, -(-tiles // y)),
        (lanes, rows, 1),
        arguments=(numpy.uint32(n_rows), numpy.uint32(n_vectors), numpy.uint32(rows_per_thread)),
    )


# Thresholds of bspmm_launch, fitted to 177 random shapes on an H200. policy_2.json, in
# benchmarks/results/earlier, tells how far its choices are from the best ones for other shapes.
# `work`: vectors of the result per multiprocessor, that is threads if each had one vector of one
# row; `length`: mean entries per row.
SMALL = 1800  # work; about the number of threads that are resident at once
PIPELINED = 3400  # work from which a thread is given several rows
LARGE = 6800  # work from which it is also given two vectors of 16 bytes
HUGE = 10000  # work from which it is given eight rows of narrower vectors
SHORT, MEDIUM, LONG, VERY_LONG = 1.5, 3, 4, 10  # length
NARROW = 8  # vectors per row; below, two vectors per thread would leave warps half empty


@plans.kept
def bspmm_launch(
    n_rows, n_cols, nnz, n_channels, width, itemsize, device, algorithm='auto', piece=0
) -> plans.Launch:
    """Plan a product on a GPU, by a small model that was fitted to measurements.

    `piece` is the result of :func:`piece_length`; unless it is 0, the plan is for
    :func:`with_pieces`.
    """
    n_vectors = n_channels // width
    work = n_rows * n_vectors / device.n_sms
    length = nnz / n_rows
    plan = functools.partial(
        csr_launch,
        n_rows,
        n_cols,
        n_channels,
        width,
        # A result that does not fit in L2 together with x would push x out of it.
        stream=(n_rows + n_cols) * n_channels * itemsize > device.l2_bytes // 2,
    )
    if piece:  # one row per thread: a warp waits for the longest of its rows
        return plan(plans.WARP, ahead=AHEAD_LONG)
    lanes, columns, rows, options = _csr_settings(
        work, length, n_vectors, width * itemsize, itemsize
    )
    if algorithm == 'vector':
        rows = 1
    elif algorithm == 'pipelined':
        rows = max(rows, 2)
    return plan(lanes, columns, rows, **options)


def _csr_settings(work, length, n_vectors, vector_bytes, itemsize):
    """Return lanes, columns and rows_per_thread of :func:`csr_launch`, and its further options."""
    half = itemsize == 2
    long = length > (SHORT if work < SMALL else LONG)
    options = {'ahead': AHEAD_LONG if long and work < LARGE else AHEAD}
    if work < PIPELINED:
        return plans.WARP, 1, 1, options
    if n_vectors < NARROW:
        # float16 is added as float32: several rows per thread would need too many registers.
        return plans.WARP, 1, 1 if half or length > VERY_LONG else 4, options
    two_warps = n_vectors > 2 * plans.WARP
    if half and vector_bytes < plans.VECTOR_BYTES or vector_bytes == 4 and (two_warps or long):
        # If a load is only a few bytes, a thread with two vectors has too few bytes in flight.
        return plans.WARP if two_warps else 16, 4, 1 if half or length > MEDIUM else 4, {}
    if length > VERY_LONG:
        return 16, 1, 1, {'block': 2 * plans.BLOCK}
    wide = vector_bytes == plans.VECTOR_BYTES
    if wide and work < LARGE:
        return 16, 1, 1 if long else 4, options
    if long:
        return plans.WARP, 1, 4, {}
    # A tile is a whole row if a warp can hold it, else 512 bytes of one.
    lanes = 16 if two_warps and wide else plans.WARP
    return lanes, 2, 8 if not wide and work > HUGE and length < MEDIUM else 4, {}


PIECE = 128  # least number of entries of a piece; half as many where threads have few entries
FEW_ENTRIES = 22  # entries times vectors of a row, per thread of a full GPU; fewer count as few
RESIDENT = 1024  # threads of a multiprocessor


def piece_length(n_rows, n_cols, nnz, longest, n_vectors, device) -> int:
    """Return the length of the pieces into which long rows are split, or 0 to split none.

    A thread then walks at most that many entries of a row. `longest`: upper bound of the number of
    entries in a row.
    """
    # A piece has at least as many entries as a row has pieces, because one thread also walks the
    # sums of a row's pieces. The sums of all pieces take at most twice the memory of x and y.
    longest = min(longest, nnz)
    if longest <= plans.LONG_ROW:
        return 0
    few = nnz * n_vectors < FEW_ENTRIES * RESIDENT * device.n_sms
    piece = PIECE // 2 if few else PIECE
    while piece * piece < longest or piece * (n_rows + n_cols) < nnz:
        piece *= 2
    return piece if 2 * piece < longest else 0


def with_pieces(plan: plans.Launch, nnz, piece) -> tuple[plans.Launch, int]:
    """Extend a plan of bspmm_csr or bsddmm_csr to pieces of rows; also return how many."""
    n_pieces = 2 * -(-nnz // piece)
    rows = plan.block[1]
    plan = plan._replace(
        defines=plan.defines + (('PIECES', 1),),
        grid=(plan.grid[0] + -(-n_pieces // rows), *plan.grid[1:]),
        arguments=(*plan.arguments, numpy.int32(piece), numpy.uint32(n_pieces)),
    )
    return plan, n_pieces


def sum_pieces_launch(n_pieces, n_channels, piece) -> plans.Launch:
    """Plan sum_pieces: a thread per chunk and channel."""
    n_chunks = n_pieces // 2
    chunks_per_block = 8
    tiles = -(-n_channels // plans.WARP)
    y = min(tiles, plans.MAX_GRID_Y)
    return plans.Launch(
        (('VECTOR', 1), ('AHEAD', 8)),
        (-(-n_chunks // chunks_per_block), y, -(-tiles // y)),
        (plans.WARP, chunks_per_block, 1),
        arguments=tuple(map(numpy.int32, (n_channels, piece, n_chunks))),
    )


ALGORITHMS = 'auto', 'vector', 'pipelined'  # the last two: one row per thread, or several


def multiply_on_host(matrix, adj, x, residual):
    """Multiply by a SciPy matrix of x's `compute_dtype`, made from `adj` or its transpose."""
    y = matrix @ x.reshape(matrix.shape[1], x.shape[-1]).astype(matrix.dtype, copy=False)
    if residual is not None:
        y += residual.reshape(y.shape)
    return y.astype(x.dtype, copy=False).reshape(result_shape(adj, len(y), x))


def matrix_on_host(adj, data, dtype, trans):
    """Return the SciPy matrix of a batch or its transpose; cached on the batch without `data`."""
    side = adj.T if trans else adj
    if data is not None:
        values = data.astype(dtype, copy=False)
        return _scipy_matrix(side, values[adj.transpose_order] if trans else values)

    def make():
        values = numpy.ones(side.nnz, dtype) if side.data is None else side.data.astype(dtype)
        return _scipy_matrix(side, values)

    return side.cached(('scipy', dtype), make)  # making one takes time: SciPy checks its arrays


def _scipy_matrix(adj, values):
    return scipy.sparse.csr_matrix((values, adj.indices, adj.indptr), shape=adj.shape)


def check_bspmm(adj, arrays):
    """Check x, data and residual of a product by any container."""
    x, data, residual = arrays
    _check_matrix('x', x, adj, adj.n_cols)
    if data is None:
        check.values_dtype(adj, x)
    else:
        check.on_device('data', data, adj)
        if data.shape != (adj.nnz,):
            text = 'data: expected shape (%d,), one value for each entry, got %s'
            raise ValueError(text % (adj.nnz, data.shape))
        check.same_dtype('data', data.dtype, x.dtype)
    if residual is not None:
        check.on_device('residual', residual, adj)
        shape = result_shape(adj, adj.n_rows, x)
        if residual.shape != shape:
            text = 'residual: expected shape %s, like the product, got %s'
            raise ValueError(text % (shape, residual.shape))
        check.same_dtype('residual', residual.dtype, x.dtype)


def result_shape(adj, n_rows, x):
    """Return the shape of a product with `n_rows` rows in all; it has as many axes as `x`."""
    if x.ndim == 2:
        return n_rows, x.shape[1]
    return adj.n_graphs, n_rows // adj.n_graphs, x.shape[2]


def check_bsddmm(adj, u, v):
    """Check the arrays of a sampled product with any container."""
    _check_matrix('u', u, adj, adj.n_rows)
    _check_matrix('v', v, adj, adj.n_cols)
    if u.ndim != v.ndim:
        raise ValueError('v: expected %d dimensions, like u, got shape %s' % (u.ndim, v.shape))
    if u.shape[-1] != v.shape[-1]:
        text = 'v: expected %d channels, as many as u has, got shape %s'
        raise ValueError(text % (u.shape[-1], v.shape))
    check.same_dtype('v', v.dtype, u.dtype)


def _check_matrix(name, x, adj, n_rows):
    check.floats(name, x, adj)
    if x.ndim == 2 and len(x) == n_rows:
        return
    expected = '(%d, n_B)' % n_rows
    if adj.layout == 'padded' and adj.n_graphs:
        lead = adj.n_graphs, n_rows // adj.n_graphs
        if x.ndim == 3 and x.shape[:2] == lead:
            return
        expected += ' or (%d, %d, n_B)' % lead
    raise ValueError('%s: expected shape %s to go with %r, got %s' % (name, expected, adj, x.shape))


def arrays_of(**inputs):
    """Return the arrays of inputs, None for None; refuse a Parameter that is not initialised."""
    arrays = list(map(chainer.as_array, inputs.values()))
    for (name, value), array in zip(inputs.items(), arrays):
        if array is None and value is not None:
            raise ValueError('%s: expected an array, got an uninitialised Parameter' % name)
    return arrays


def bspmm_forward(adj: BatchedCSR, x, data=None, residual=None, trans=False, algorithm='auto'):
    """Compute ``y[i] = sum_k value[k] x[column[k]] (+ residual[i])`` over the entries of row i.

    x and the result are (rows, n_B), or (n_graphs, N, n_B) where ``adj`` is padded. ``data``, in
    the order of ``adj``'s entries even with ``trans``, replaces its values. ``algorithm``, on a GPU
    only, is one of ALGORITHMS: 'vector' gives a thread vectors of one row, 'pipelined' of several;
    'auto' chooses, and may also split long rows into pieces.
    """
    if not launch.on_gpu(x):
        matrix = matrix_on_host(adj, data, compute_dtype(x), trans)
        return multiply_on_host(matrix, adj, x, residual)
    side = adj.T if trans else adj
    with launch.device_of(x):
        y = cuda.cupy.empty(result_shape(adj, side.n_rows, x), x.dtype)
        if not y.size:
            return y
        x, data, residual = map(launch.contiguous, (x, data, residual))
        n_channels = x.shape[-1]
        weights, data, order = values_of(adj, data, trans)
        device = kernels.device(x.data.device_id)
        width = launch.vector_width(n_channels, x, y, residual)
        sizes = side.n_rows, side.n_cols, side.nnz
        piece = 0
        if algorithm == 'auto':
            piece = piece_length(*sizes, side.longest, n_channels // width, device)
        plan = bspmm_launch(*sizes, n_channels, width, x.itemsize, device, algorithm, piece)
        sums = ()
        if piece:
            plan, n_pieces = with_pieces(plan, side.nnz, piece)
            sums = (
                cuda.cupy.empty((n_pieces, n_channels), launch.arithmetic(x.dtype)),
                cuda.cupy.empty(n_pieces // 2, numpy.int32),
            )
        arrays = side.indptr, side.indices, data, order, x, residual, y, *sums
        launch.run('bspmm_csr', x, plan, *arrays, WEIGHTS=weights, RESIDUAL=residual is not None)
        if piece:
            plan = sum_pieces_launch(n_pieces, n_channels, piece)
            launch.run('sum_pieces', x, plan, side.indptr, *sums, y)
    return y


def bsddmm_forward(adj: BatchedCSR, u, v):
    """Compute ``w[k] = sum_c u[row[k], c] v[column[k], c]``, (nnz,), for every entry k."""
    if not launch.on_gpu(u):
        u, v = u.reshape(adj.n_rows, u.shape[-1]), v.reshape(adj.n_cols, v.shape[-1])
        n_entries = adj._n_true_entries()
        # Indexing returns row-major arrays, in which einsum adds up float16 in float32 by itself.
        w = numpy.einsum(
            'kc,kc->k', u[adj.entry_rows()[:n_entries]], v[adj.entry_columns()[:n_entries]]
        )
        return numpy.pad(w, (0, adj.nnz - n_entries)) if adj.has_spare else w
    n_channels = u.shape[-1]
    with launch.device_of(u):
        u, v = launch.contiguous(u), launch.contiguous(v)
        w = cuda.cupy.empty(adj.nnz, u.dtype)
        if not n_channels or adj.has_spare:  # the kernel does not write spare entries
            w.fill(0)
        if n_channels and w.size:
            width = launch.vector_width(n_channels, u, v)
            plan = plans.dot_launch(adj.n_rows, n_channels, width)
            device = kernels.device(u.data.device_id)
            piece = piece_length(
                adj.n_rows, adj.n_cols, adj.nnz, adj.longest, n_channels // width, device
            )
            if piece:
                plan, _ = with_pieces(plan, adj.nnz, piece)
            launch.run('bsddmm_csr', u, plan, adj.indptr, adj.indices, u, v, w)
    return w


class BatchedSpMM(FunctionNode):
    """Node of ``C = A X (+ residual)``, A transposed with `trans`.

    Inputs are x, and if given edge values and residual.
    """

    product = staticmethod(bspmm_forward)  # papers/products.py overrides it for other containers
    by_values: Callable  # class of the node that computes the gradient of edge values

    def __init__(self, adj, has_data, has_residual, trans=False, algorithm='auto'):
        self._adj = adj
        self._has_data = has_data
        self._has_residual = has_residual
        self._trans = trans
        self._algorithm = algorithm

    def forward(self, inputs):
        x = inputs[0]
        data = inputs[1] if self._has_data else None
        residual = inputs[-1] if self._has_residual else None
        # The product is linear in x, so only gradients that involve edge values need the inputs.
        self.retain_inputs((0, 1) if self._has_data else ())
        y = self.product(self._adj, x, data, residual, self._trans, self._algorithm)
        self._result = y.dtype, y.shape, type(y)
        return (y,)

    def backward(self, indexes, grad_outputs):
        (gy,) = grad_outputs
        check.gradient(gy.array, self._result)
        x, data = self.get_retained_inputs() if self._has_data else (None, None)
        gradients = []
        for index in indexes:
            if index == 0:
                node = type(self)(
                    self._adj, self._has_data, False, not self._trans, self._algorithm
                )
                gradients += apply_untracked(node, (gy, data) if self._has_data else (gy,))
            elif index == 1 and self._has_data:
                pair = (x, gy) if self._trans else (gy, x)
                gradients += apply_untracked(self.by_values(self._adj, self._algorithm), pair)
            else:
                gradients.append(gy)
        return tuple(gradients)


class BatchedSDDMM(FunctionNode):
    """Node of the sampled product of u and v, its inputs."""

    product = staticmethod(bsddmm_forward)
    by_factors = BatchedSpMM

    def __init__(self, adj, algorithm='auto'):
        self._adj = adj
        self._algorithm = algorithm  # for its gradients, which are products

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        u, v = inputs
        w = self.product(self._adj, u, v)
        self._result = w.dtype, w.shape, type(w)
        return (w,)

    def backward(self, indexes, grad_outputs):
        u, v = self.get_retained_inputs()
        (gw,) = grad_outputs
        check.gradient(gw.array, self._result)
        gradients = []
        for index in indexes:
            # w is bilinear: the gradient with respect to a factor is the sparse product, with gw as
            # values, of the other factor.
            node = self.by_factors(self._adj, True, False, index == 1, self._algorithm)
            gradients += apply_untracked(node, (u if index == 1 else v, gw))
        return tuple(gradients)


BatchedSpMM.by_values = BatchedSDDMM


def bspmm(
    adj: BatchedCSR,
    x: Variable | NdArray,
    data: Variable | NdArray | None = None,
    residual: Variable | NdArray | None = None,
    algorithm: str = 'auto',
) -> Variable:
    """Multiply every graph's sparse matrix by its block of dense rows, in one launch.

    ``y[i, c] = sum_k value[k] * x[column[k], c] (+ residual[i, c])`` over the entries k of row i.
    Differentiable to any order with respect to ``x``, ``data`` and ``residual``.

    Args:
        adj (BatchedCSR): the batch of matrices, n_rows x n_cols, on the device of ``x``. Its own
            values are constants. :func:`chainer_bspmm.papers.bspmm` takes other containers.
        x (Variable or array): (n_cols, n_B) float16, float32 or float64. If ``adj`` is padded to N
            columns per graph, also (n_graphs, N, n_B).
        data (Variable or array or None): (nnz,) edge values of x's dtype, used instead of
            ``adj.data``, in the order of its entries. NaN propagates as in a dense product.
        residual (Variable or array or None): added to the product; has its shape and dtype.
        algorithm (str): ``'auto'``; for tests and benchmarks on a GPU also ``'vector'`` or
            ``'pipelined'``, forward and in every derivative. A thread has one row, or several.

    Returns:
        Variable: (n_rows, n_B), or (n_graphs, N, n_B) for a three-dimensional ``x``; of x's dtype.
        float16 is summed in float32.

    Raises:
        TypeError: ``adj`` is not a BatchedCSR, or a dtype does not fit.
        ValueError: a shape, a device or the algorithm does not fit. Both errors are raised before
            anything is launched.

    Note:
        Deterministic. Does not synchronise. Arrays that are not C-contiguous are copied. On a GPU
        float32 denormals are flushed to zero, and if a graph has a row of more than 128 entries,
        its rows may be summed in pieces by several threads; a second launch adds the pieces up.

    Source:
        Nagasaka, Nukada, Kojima, Matsuoka: Batched Sparse Matrix Multiplication for Accelerating
        Graph Convolutional Networks (CCGrid 2019), CSR variant; ``kernels/bspmm_csr.cu``.

    Example:
        >>> import numpy
        >>> import chainer_bspmm
        >>> adj = chainer_bspmm.BatchedCSR.from_matrices([numpy.ones((2, 2)), numpy.eye(1)])
        >>> chainer_bspmm.functions.bspmm(adj, numpy.array([[1.], [2.], [3.]])).array
        array([[3.],
               [3.],
               [3.]])
    """
    check_adjacency(adj)
    arrays = arrays_of(x=x, data=data, residual=residual)
    check_bspmm(adj, arrays)
    if algorithm != 'auto':
        check.algorithm(algorithm, launch.on_gpu(arrays[0]), ALGORITHMS)
    inputs = [array for array in (x, data, residual) if array is not None]
    node = BatchedSpMM(adj, data is not None, residual is not None, algorithm=algorithm)
    return node.apply(inputs)[0]


def bsddmm(adj: BatchedCSR, u: Variable | NdArray, v: Variable | NdArray) -> Variable:
    """Multiply two dense matrices at the entries of a sparse pattern only, in one launch.

    ``w[k] = sum_c u[row[k], c] * v[column[k], c]`` for every entry k of ``adj``. Differentiable to
    any order with respect to ``u`` and ``v``.

    Args:
        adj (BatchedCSR): the pattern, n_rows x n_cols; its values are not used.
        u (Variable or array): (n_rows, n_B) float16, float32 or float64; or (n_graphs, N, n_B) if
            ``adj`` is padded to N rows per graph.
        v (Variable or array): (n_cols, n_B), or three-dimensional as u; of u's dtype.

    Returns:
        Variable: (nnz,) in the order of adj's entries, of u's dtype; float16 is summed in
        float32.

    Raises:
        TypeError, ValueError: as :func:`chainer_bspmm.functions.bspmm`.

    Note:
        Deterministic; does not synchronise. Its gradients are products by
        :func:`chainer_bspmm.functions.bspmm`, which is deterministic, too.
    """
    check_adjacency(adj)
    check_bsddmm(adj, chainer.as_array(u), chainer.as_array(v))
    return BatchedSDDMM(adj).apply((u, v))[0]
