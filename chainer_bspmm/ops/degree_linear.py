"""A graph convolution whose weight depends on the degree of the node, as one node."""

from typing import Any, NamedTuple

import numpy

from chainer import functions

from chainer_bspmm.cuda.gemm import dot_selected
from chainer_bspmm.ops.bspmm import bspmm, bspmm_forward
from chainer_bspmm.ops.elementwise import concat, sigmoid
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from chainer_bspmm.ops.layer_end import end_backward, summed_forward
from chainer_bspmm.ops.node import AccumulateInLaunch, FusedNode
from chainer_bspmm.ops.segments import segment_sum_forward
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency
from chainer_bspmm.sparse.relations import degree_rows

# Rows of a tile. In small tiles a degree of few nodes wastes few rows; large ones leave fewer
# partial sums to add.
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
        return Degrees(is_type, tiles_of(adj, is_type, TILE_ROWS_OF_MANY if is_many else TILE_ROWS))

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

    def stacked(self, weights, dtype):
        """Return the weights of all degrees as `product` takes them."""
        return weights

    def product(self, x, weights, trans=False):
        """Compute ``y[i] = W_d x[i]`` (trans: ``x[i] W_d``), d the degree; 0 if d has no weight."""
        y = numpy.zeros_like(x, shape=(len(x), weights[0].shape[1 if trans else 0]))
        for rows, weight in zip(self.of_types, weights):
            if rows.size:
                y[rows] = x[rows].dot(weight if trans else weight.T)
        return y

    def joined(self, y, dtype):
        """Return the result of `product` as rows of nodes."""
        return y

    def ended(self, y, bias):
        """Return the sigmoid of the result of `product` and a bias, as rows of nodes."""
        return sigmoid(y, bias)

    def gradients(self, gy, x, weights):
        """Return the gradient of each weight for the gradient of `product`."""
        return [gy[rows].T.dot(x[rows]) for rows in self.of_types]


class Tiles(NamedTuple):
    """Nodes sorted into tiles on a GPU, each for one degree, with the products of `NodeLists`.

    There are enough tiles for the same number of nodes with any other degrees, so that shapes do
    not depend on the degrees.
    """

    selection: BatchedCSR  # (n_tiles * n_rows, n_nodes), a one for the node at each place
    types: Any  # (n_tiles,) int32, the position of each tile's weight
    offsets: Any  # (n_types + 1,) int32, the first tile of each type, and the end of the last
    all: Any  # (n_tiles,) int32, the position of each tile

    def split(self, x):
        """Return rows as (n_tiles, n_rows, n), float16 as float32: partial sums are not rounded."""
        x = x.astype(numpy.promote_types(x.dtype, numpy.float32), copy=False)
        n_tiles = len(self.types)
        shape = n_tiles, self.selection.n_rows // n_tiles, x.shape[1]
        return bspmm_forward(self.selection, x).reshape(shape)

    def stacked(self, weights, dtype):
        dtype = numpy.promote_types(dtype, numpy.float32)
        return concat(weights).astype(dtype, copy=False).reshape(len(weights), *weights[0].shape)

    def product(self, x, weights, trans=False):
        y = dot_selected(x, weights if trans else weights.swapaxes(1, 2), self.types)
        return y.reshape(self.selection.n_rows, y.shape[2])

    def joined(self, y, dtype):
        return bspmm_forward(self.selection, y.astype(dtype, copy=False), trans=True)

    def ended(self, y, bias):
        y = y.astype(bias.dtype, copy=False)
        return summed_forward(self.selection.T, y, None, bias, 'sigmoid')

    def gradients(self, gy, x, weights):
        partials = dot_selected(gy.swapaxes(1, 2), x, self.all)
        rows = partials.reshape(len(partials), weights[0].size)
        sums = segment_sum_forward(rows, self.offsets).reshape(len(weights), *weights[0].shape)
        return sums.astype(weights[0].dtype, copy=False)


def tiles_of(adj, is_type, n_rows):
    """Sort a batch's nodes into `Tiles` of `n_rows` rows; nodes of one degree keep their order."""
    xp = adj.xp
    n_nodes, n_types = is_type.shape
    n_tiles = n_nodes // n_rows + n_types
    # Nodes that have a weight are numbered, degree by degree; `bounds` has each degree's first
    # number, and the end of the last. A degree's first place in the tiles comes somewhat later than
    # its first number, because it is where a tile begins.
    counted = xp.cumsum(is_type.T.ravel(), dtype=numpy.int32).reshape(n_types, n_nodes)
    bounds = xp.zeros(n_types + 1, numpy.int32)
    if n_nodes:
        bounds[1:] = counted[:, -1]
    counts = bounds[1:] - bounds[:-1]
    offsets = xp.zeros(n_types + 1, numpy.int32)
    offsets[1:] = xp.cumsum(-(-counts // n_rows))
    first_places = offsets[:-1] * n_rows
    shifts = (first_places - bounds[:-1])[:, None]
    numbers = xp.where(is_type.T, counted - 1, -1).max(axis=0)  # of every node, or -1
    places = xp.where(is_type.T, counted - 1 + shifts, -1).max(axis=0)

    tiles = xp.arange(n_tiles + 1, dtype=numpy.int32)
    types = (tiles[:, None] >= offsets[1:]).sum(axis=1)
    types = xp.minimum(types, n_types - 1).astype(numpy.int32)  # the last tiles may be empty
    all_places = xp.arange(n_tiles * n_rows + 1, dtype=numpy.int32)
    type_of = types[all_places // n_rows]
    before = xp.minimum(all_places - first_places[type_of], counts[type_of])
    nodes = xp.arange(n_nodes, dtype=numpy.int32)
    ends = xp.zeros(n_nodes + 1, numpy.int32)
    ends[1:] = xp.cumsum(numbers >= 0, dtype=numpy.int32)
    selection = adj.replace(
        indptr=bounds[type_of] + before,
        indices=_scattered(xp, nodes, numbers),
        data=None,
        n_rows=n_tiles * n_rows,
        n_cols=n_nodes,
        nnz=n_nodes,
        longest=1,
        has_spare=True,
        layout='packed',
        row_weights=None,
    )
    transpose = selection.replace(
        indptr=ends,
        indices=_scattered(xp, places, xp.where(numbers >= 0, ends[:-1], -1)),
        n_rows=n_nodes,
        n_cols=n_tiles * n_rows,
    )
    selection.cached('transpose', lambda: (transpose, None))
    return Tiles(selection, types[:-1], offsets, tiles[:-1])


def _scattered(xp, values, at):
    """Return an int32 array with `values` at their places, and zeros elsewhere; -1 is no place."""
    found = xp.zeros(len(values) + 1, numpy.int32)
    found[at] = values
    return found[:-1]


class DegreeLinearSigmoid(AccumulateInLaunch, FusedNode):
    """Node of :func:`degree_linear_sigmoid`; inputs are x, the weights, then as many biases."""

    _adds_more = True

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
        if self._layer is not None:
            rows, _ = degree_rows(self._adj, n_types, x.dtype)
            self._y = layer_forward(self._layer, rows, x, self._joined)
            return self._y
        groups = degrees_of(self._adj, n_types).groups
        self._sums = groups.split(bspmm_forward(self._adj, x))
        self._stacked = groups.stacked(weights, x.dtype)
        y = groups.product(self._sums, self._stacked)
        bias = concat(biases).reshape(n_types, y.shape[1]).sum(axis=0).astype(x.dtype, copy=False)
        self._y = groups.ended(y, bias)
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
        groups = degrees_of(self._adj, n_types).groups
        biases_needed = [i for i in indexes if i > n_types]  # all have the same gradient
        gy, of_biases = end_backward(self._y, gy, 'sigmoid', n_biases=len(biases_needed))
        split = groups.split(gy)
        if 0 in indexes:
            by_sums = groups.joined(groups.product(split, self._stacked, trans=True), gy.dtype)
            gradients[0] = bspmm_forward(self._adj, by_sums, residual=self._more, trans=True)
        if set(range(1, n_types + 1)) & set(indexes):
            gradients.update(enumerate(groups.gradients(split, self._sums, weights), 1))
        gradients.update(zip(biases_needed, of_biases))
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
