"""A layer on NumPy arrays: BLAS over the pairs of relation and node that have entries."""

import collections

import numpy
import scipy.sparse

from chainer_bspmm.ops.bspmm import matrix_on_host
from chainer_bspmm.ops.elementwise import compute_dtype
from chainer_bspmm.ops.segments import row_sum

# The factors of a layer, derived from its graph. A source is a pair of relation and node that has
# entries; sources are sorted by relation, then by node.
# matrix, transpose: (n_rows, n_sources), the values of the entries, and its transpose.
# nodes: (n_sources,), the node of each source.
# parts: (relation, slice of its sources) for each relation that has any.
# spread: (n_nodes, n_sources), 1 where the source belongs to the node.
# With a single relation every node is a source: nodes and spread are None.
_Sources = collections.namedtuple('_Sources', 'matrix transpose nodes parts spread')


def graph_linear_on_host(adj, x, W, b=None, W_self=None, b_self=None, loop=False):
    """Compute ``y = sum over r of A_r (x W_r^T + b_r) + x W_self^T + b_self``, (n_rows, n_out).

    Most nodes have entries in few relations. Only the pairs of relation and node that have entries
    are mapped, which for molecules is a third of the arithmetic.
    """
    sources = _sources(adj, compute_dtype(x))
    x, W, b, W_self, b_self = _cast(sources, x, W, b, W_self, b_self)
    mapped = _map(sources, _take(sources, x), _by_relation(adj, W).transpose(1, 2, 0))
    y = sources.matrix @ mapped
    if loop:
        y += mapped
    own = [] if W_self is None else [(x, W_self)]
    if b is not None:
        own.append((_degrees(adj, y.dtype, loop), b.reshape(-1, adj.n_relations)))
        if b_self is not None:
            own.append((numpy.ones((len(y), 1), y.dtype), b_self[:, None]))
            b_self = None
    if own:  # all in one product, because adding to y takes as long as a narrow product
        rows, matrices = zip(*own)
        y += numpy.dot(numpy.concatenate(rows, axis=1), numpy.concatenate(matrices, axis=1).T)
    if b_self is not None:
        y += b_self
    return y


def graph_linear_grad_on_host(adj, x, gy, W, W_self, needed, loop=False):
    """Return the gradients of :func:`graph_linear`: {name: array} for the arguments in `needed`."""
    sources = _sources(adj, compute_dtype(x))
    gradients = {}
    x, gy, W, W_self = _cast(sources, x, gy, W, W_self)
    if needed & {'x', 'W'}:
        summed = sources.transpose @ gy
        if loop:
            summed += gy
    if 'x' in needed:
        gx = _map(sources, summed, _by_relation(adj, W).transpose(1, 0, 2))
        if sources.spread is not None:
            gx = sources.spread @ gx
        if W_self is not None:
            gx += numpy.dot(gy, W_self)
        gradients['x'] = gx
    if 'W' in needed:
        gradients['W'] = numpy.zeros_like(W)
        by_relation = _by_relation(adj, gradients['W'])
        rows = _take(sources, x)
        for relation, part in sources.parts:
            by_relation[:, relation] = numpy.dot(summed[part].T, rows[part])
    if 'W_self' in needed:
        gradients['W_self'] = numpy.dot(gy.T, x)
    if 'b' in needed:
        gradients['b'] = numpy.dot(gy.T, _degrees(adj, gy.dtype, loop)).ravel()
    if 'b_self' in needed:
        gradients['b_self'] = row_sum(gy)
    return gradients


def _cast(sources, *arrays):
    dtype = sources.matrix.dtype
    return [None if array is None else array.astype(dtype, copy=False) for array in arrays]


def _by_relation(adj, W):
    """Return W as (n_out, R, n_in)."""
    return W.reshape(len(W) // adj.n_relations, adj.n_relations, W.shape[1])


def _take(sources, x):
    return x if sources.nodes is None else x.take(sources.nodes, axis=0)


def _map(sources, rows, matrices):
    """Multiply the rows of each relation by its matrix; `matrices` are (R, n, m)."""
    y = numpy.empty((len(rows), matrices.shape[2]), rows.dtype)
    for relation, part in sources.parts:
        numpy.dot(rows[part], matrices[relation], out=y[part])
    return y


def _degrees(adj, dtype, loop):
    """Return (n_rows, R), the row sums of each relation."""

    def make():
        n_entries = adj._n_true_entries()
        n_relations = adj.n_relations
        pair = adj.entry_rows() * numpy.int64(n_relations) + adj.indices % n_relations
        weights = None if adj.data is None else adj.data[:n_entries]
        degrees = numpy.bincount(pair[:n_entries], weights, adj.n_rows * n_relations)
        return degrees.reshape(adj.n_rows, n_relations).astype(dtype) + dtype.type(loop)

    return adj.cached(('degrees', dtype, loop), make)


def _sources(adj, dtype):
    return adj.cached(('sources', dtype), lambda: _make_sources(adj, dtype))


def _make_sources(adj, dtype):
    n_relations = adj.n_relations
    n_entries = adj._n_true_entries()
    n_nodes = adj.n_cols // n_relations
    if n_relations == 1:
        matrix = matrix_on_host(adj, None, dtype, False)
        transpose = matrix if adj.is_symmetric else matrix.T
        return _Sources(matrix, transpose, nodes=None, parts=[(0, slice(None))], spread=None)

    node, relation = numpy.divmod(adj.indices[:n_entries], numpy.int64(n_relations))
    values = numpy.ones(n_entries, dtype) if adj.data is None else adj.data[:n_entries]
    values = values.astype(dtype, copy=False)

    # Sources are numbered in the order of relations, then nodes.
    column = relation * n_nodes + node
    is_used = numpy.zeros(n_relations * n_nodes, bool)
    is_used[column] = True
    used = numpy.flatnonzero(is_used)
    number = numpy.cumsum(is_used, dtype=numpy.int32)
    number -= 1
    nodes = used % n_nodes
    starts = numpy.searchsorted(used, numpy.arange(n_relations + 1) * n_nodes).tolist()

    matrix = scipy.sparse.csr_matrix(
        (values, number[column], adj.indptr), shape=(adj.n_rows, len(nodes))
    )
    spread = scipy.sparse.csc_matrix(
        (numpy.ones(len(nodes), dtype), nodes, numpy.arange(len(nodes) + 1)),
        shape=(n_nodes, len(nodes)),
    )
    parts = [
        (r, slice(start, end))
        for r, (start, end) in enumerate(zip(starts, starts[1:]))
        if start < end
    ]
    return _Sources(matrix, matrix.T, nodes, parts, spread)
