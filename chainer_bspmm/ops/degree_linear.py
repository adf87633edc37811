"""A graph convolution whose weight depends on the degree of the node, as one node."""

import math
from typing import Any, NamedTuple

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda
from chainer.functions.activation.sigmoid import SigmoidGrad

from chainer_bspmm.cuda.gemm import dot_selected
from chainer_bspmm.ops.bspmm import bspmm, bspmm_forward
from chainer_bspmm.ops.elementwise import concat, sigmoid
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from chainer_bspmm.ops.node import AccumulateInLaunch, FusedNode
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.sparse import check
from chainer_bspmm.sparse.batched_csr import check_adjacency
from chainer_bspmm.sparse.relations import degree_rows

# Rows of a tile: few rows are not filled up far, and large tiles have fewer partial sums.
TILE_ROWS, TILE_ROWS_OF_MANY = 64, 256
MANY_NODES = 8192


class Degrees(NamedTuple):
    """Degrees of the nodes of a batch.

    is_type (array): (n_nodes, n_types) bool, whether a node has degree 1, 2, ...
    groups (NodeLists or Tiles): the nodes of each degree.
    """

    is_type: Any
    groups: Any


def degrees_of(adj, n_types):
    """Return the `Degrees` of a batch's nodes: sums of columns as upstream, not of rows."""

    def find():
        ones = adj.xp.ones((adj.n_rows, 1), numpy.float32 if adj.dtype is None else adj.dtype)
        degree = bspmm_forward(adj, ones, trans=True)
        is_type = degree == adj.xp.arange(1, n_types + 1, dtype=ones.dtype)
        if adj.xp is numpy:
            return Degrees(
                is_type, NodeLists([numpy.flatnonzero(of_type) for of_type in is_type.T])
            )
        is_many = adj.n_rows >= MANY_NODES
        return Degrees(is_type, tiles_of(is_type, TILE_ROWS_OF_MANY if is_many else TILE_ROWS))

    return adj.cached(('degrees', n_types), find)


# Where the whole node is one launch on a GPU, degrees are relations (kernels/degree_rows.cu).
# Otherwise neighbours are summed first, and a host multiplies the rows of each degree, `NodeLists`.
# A GPU's host does not know how many rows a degree has. So a GPU sorts the rows into `Tiles`, and
# cuBLAS multiplies each tile by the weight of its degree.


class NodeLists(NamedTuple):
    """Nodes of each degree, on a host, and products with the weights of the degrees."""

    of_types: list  # for each degree the indices of its nodes

    def split(self, x):
        """Return rows of nodes as the other methods take them."""
        return x

    def product(self, x, weights, dtype, trans=False):
        """Compute ``y[i] = W_d x[i]`` (trans: ``x[i] W_d``), d the degree; 0 if d has no weight."""
        y = numpy.zeros((len(x), weights[0].shape[1 if trans else 0]), dtype)
        for rows, weight in zip(self.of_types, weights):
            if rows.size:
                y[rows] = x[rows].dot(weight if trans else weight.T)
        return y

    def gradients(self, gy, x, weights):
        """Return the gradient of each weight for the gradient of `product`."""
        return [gy[rows].T.dot(x[rows]) for rows in self.of_types]


class Tiles(NamedTuple):
    """Nodes sorted into tiles, each for one degree only, with the same products as `NodeLists`.

    There are as many tiles as any degrees of so many nodes need, so that shapes do not depend on
    the degrees.
    """

    nodes: Any  # (n_tiles, n_rows) int32, the node at each place, or -1
    places: Any  # (n_nodes,) int32, the place of each node among the rows of all tiles, or -1
    types: Any  # (n_tiles,) int32, the position of each tile's weight
    all: Any  # (n_tiles,) int32, the position of each tile

    def split(self, x):
        """Return rows as (n_tiles, n_rows, n), float16 as float32: partial sums are not rounded."""
        return _gather(x, self.nodes, numpy.promote_types(x.dtype, numpy.float32))

    def product(self, x, weights, dtype, trans=False):
        n_out, n_in = weights[0].shape
        matrices = concat(weights).astype(x.dtype, copy=False).reshape(len(weights), n_out, n_in)
        y = dot_selected(x, matrices if trans else matrices.swapaxes(1, 2), self.types)
        return _gather(y.reshape(self.nodes.size, y.shape[2]), self.places, dtype)

    def gradients(self, gy, x, weights):
        partials = dot_selected(gy.swapaxes(1, 2), x, self.all)
        sums = _sum_by_type(partials, self.types, len(weights))
        return sums.astype(weights[0].dtype, copy=False)


def tiles_of(is_type, n_rows):
    """Sort nodes into `Tiles` of `n_rows` rows; nodes of one degree keep their order."""
    xp = chainer_backend.get_array_module(is_type)
    n_nodes, n_types = is_type.shape
    n_tiles = n_nodes // n_rows + n_types
    counts = is_type.sum(axis=0, dtype=numpy.int32)
    n_tiles_of = -(-counts // n_rows)
    stops = n_tiles_of.cumsum(dtype=numpy.int32)
    # Nodes are counted over all degrees, one degree after the other; tiles begin somewhat later.
    ranks = xp.cumsum(is_type.T.ravel(), dtype=numpy.int32).reshape(n_types, n_nodes)
    shifts = (stops - n_tiles_of) * n_rows - (counts.cumsum(dtype=numpy.int32) - counts)
    places = xp.where(is_type.T, ranks - 1 + shifts[:, None], -1).max(axis=0).astype(numpy.int32)
    nodes = xp.full(n_tiles * n_rows + 1, -1, numpy.int32)
    nodes[places] = xp.arange(n_nodes, dtype=numpy.int32)  # the last one is for nodes without place
    tiles = xp.arange(n_tiles, dtype=numpy.int32)
    types = (tiles[:, None] >= stops).sum(axis=1)
    types = xp.minimum(types, n_types - 1).astype(numpy.int32)  # the last tiles may be empty
    return Tiles(nodes[:-1].reshape(n_tiles, n_rows), places, types, tiles)


def _gather(x, places, dtype):
    """Return the rows of x at `places` in a dtype, and zeros for places of -1."""
    if isinstance(x, numpy.ndarray):
        y = numpy.zeros(places.shape + x.shape[1:], dtype)
        y[places >= 0] = x[places[places >= 0]]
        return y
    y = cuda.cupy.empty(places.shape + x.shape[1:], dtype)
    cuda.elementwise(
        'raw T x, raw int32 places, int32 n_columns',
        'U y',
        """
        const ptrdiff_t place = places[i / n_columns];
        y = place < 0 ? (U)0 : (U)x[place * n_columns + i % n_columns];""",
        'bspmm_gather',
    )(x, places, x.shape[1], y)
    return y


def _sum_by_type(partials, types, n_types):
    """Return the sum (n_types, ...) of the partial sums of each type's tiles."""
    if isinstance(partials, numpy.ndarray):
        return numpy.stack([partials[types == k].sum(axis=0) for k in range(n_types)])
    y = cuda.cupy.empty((n_types, *partials.shape[1:]), partials.dtype)
    cuda.elementwise(
        'raw T partials, raw int32 types, int32 n_tiles, int64 size',
        'T y',
        """
        T sum = 0;
        for (int tile = 0; tile < n_tiles; ++tile)
            if (types[tile] == i / size) sum += partials[tile * size + i % size];
        y = sum;""",
        'bspmm_sum_by_type',
    )(partials, types, len(types), math.prod(partials.shape[1:]), y)
    return y


class DegreeLinearSigmoid(AccumulateInLaunch, FusedNode):
    """Node of :func:`degree_linear_sigmoid`; inputs are x, the weights, then as many biases."""

    def __init__(self, adj):
        self._adj = adj

    def _output(self, inputs):
        x, weights, biases = _split(inputs)
        n_types = len(weights)
        self._layer = None
        if self._has_relations(x):
            n_out, n_in = weights[0].shape
            n_all = n_types * n_out
            arrays = [array.astype(x.dtype, copy=False).ravel() for array in inputs[1:]]
            joined = concat(arrays)  # in one launch
            W = joined[: n_all * n_in].reshape(n_all, n_in)
            b = joined[n_all * n_in :]
            self._joined = {'W': W, 'b_self': b}
            self._layer = layer_of(
                x,
                self._joined,
                n_relations=n_types,
                loop=False,
                activation='sigmoid',
                by_relation=True,
                longest=self._adj.longest,
            )
        self._adds_more = self._layer is not None
        if self._layer is not None:
            rows, _ = degree_rows(self._adj, n_types, x.dtype)
            self._y = layer_forward(self._layer, rows, x, self._joined)
            return self._y
        groups = degrees_of(self._adj, n_types).groups
        self._sums = groups.split(bspmm_forward(self._adj, x))
        y = groups.product(self._sums, weights, x.dtype)
        bias = concat(biases).reshape(n_types, y.shape[1]).sum(axis=0).astype(x.dtype, copy=False)
        self._y = sigmoid(y, bias)
        return self._y

    def _has_relations(self, x):
        """Return whether degrees can be relations: a node's row sum must equal its column sum."""
        return self._adj.is_symmetric and not isinstance(x, numpy.ndarray)

    def _gradients(self, inputs, gy, indexes):
        x, weights, biases = _split(inputs)
        n_types = len(weights)
        gradients = {}
        if self._layer is not None:
            _, rows = degree_rows(self._adj, n_types, x.dtype)
            by_name = layer_backward(
                self._layer,
                rows,
                x,
                self._y,
                gy,
                parameters=self._joined,
                has_features=0 in indexes,
                more=self._more,
            )
            return (by_name['x'], *by_name['W'], *by_name['b_self'])
        (gy,) = SigmoidGrad((None,)).forward((self._y, gy))
        groups = degrees_of(self._adj, n_types).groups
        split = groups.split(gy)
        if 0 in indexes:
            by_sums = groups.product(split, weights, gy.dtype, trans=True)
            gradients[0] = bspmm_forward(self._adj, by_sums, trans=True)
        if set(range(1, n_types + 1)) & set(indexes):
            gradients.update(enumerate(groups.gradients(split, self._sums, weights), 1))
        if indexes[-1] > n_types:
            # All biases have the same gradient, but separate arrays: optimizer hooks write to them.
            rows = chainer_backend.get_array_module(gy).empty(
                (n_types, gy.shape[1]), biases[0].dtype
            )
            rows[...] = row_sum(gy)
            gradients.update(enumerate(rows, n_types + 1))
        return gradients

    def _composed(self, *inputs):
        """Compose the layer as Chainer Chemistry does: a linear layer per degree, input masked."""
        x, weights, biases = _split(inputs)
        sums = bspmm(self._adj, x)
        zero = x.xp.zeros((), x.dtype)
        total = 0
        for is_type, W, b in zip(degrees_of(self._adj, len(weights)).is_type.T, weights, biases):
            total += functions.linear(
                functions.where(is_type[:, None], sums, zero), W, functions.cast(b, x.dtype)
            )
        return functions.sigmoid(total)


def _split(inputs):
    n_types = len(inputs) // 2
    return inputs[0], inputs[1 : n_types + 1], inputs[n_types + 1 :]


def degree_linear_sigmoid(adj, x, weights, biases):
    """Compute ``y[i] = sigmoid(W_d sum_j A[i, j] x[j] + b_1 + b_2 + ...)``, (n_nodes, n_out).

    d is the degree of node i; for a degree without a weight only the biases are left. Every bias is
    added to every node, because Chainer Chemistry masks the inputs of its linear layers, not their
    outputs.
    """
    check_adjacency(adj)
    if adj.n_rows != adj.n_cols:
        raise ValueError('adj: expected a column for each node to take degrees from, got %r' % adj)
    check.features(x, adj, 'n_in')
    if not weights:
        raise ValueError('weights: expected at least one, got none')
    if len(biases) != len(weights):
        text = 'biases: expected one for each of %d weights, got %d'
        raise ValueError(text % (len(weights), len(biases)))
    n_in = x.shape[1]
    if weights[0].ndim != 2 or weights[0].shape[1] != n_in:
        text = 'weights[0]: expected shape (n_out, %d), got %s'
        raise ValueError(text % (n_in, weights[0].shape))
    n_out = len(weights[0])
    expected = {'weights[%d]' % i: (W, (n_out, n_in)) for i, W in enumerate(weights)}
    expected.update(('biases[%d]' % i, (b, (n_out,))) for i, b in enumerate(biases))
    check.shapes('x of shape %s' % (x.shape,), expected)
    return DegreeLinearSigmoid(adj).apply((x, *weights, *biases))[0]
