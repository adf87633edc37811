"""A graph convolution whose weight depends on the degree of the node, as one node."""

import collections

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda
from chainer.functions.activation.sigmoid import SigmoidGrad

from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.ops.bspmm import bspmm, bspmm_forward
from chainer_bspmm.ops.elementwise import concat, sigmoid
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from chainer_bspmm.ops.node import AccumulateInLaunch, FusedNode
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.sparse import check
from chainer_bspmm.sparse.batched_csr import check_adjacency
from chainer_bspmm.sparse.relations import degree_rows

# `is_type`: (n_nodes, n_types) bool, whether a node has degree 1, 2, ...; `rows`: for each degree,
# the indices of its nodes, or None on a GPU.
Degrees = collections.namedtuple('Degrees', 'is_type rows')


def degrees_of(adj, n_types):
    """Return the `Degrees` of a batch's nodes: sums of columns as upstream, not of rows."""

    def find():
        ones = adj.xp.ones((adj.n_rows, 1), numpy.float32 if adj.dtype is None else adj.dtype)
        degree = bspmm_forward(adj, ones, trans=True)
        is_type = degree == adj.xp.arange(1, n_types + 1, dtype=ones.dtype)
        rows = None
        if adj.xp is numpy:
            rows = [numpy.flatnonzero(of_type) for of_type in is_type.T]
        return Degrees(is_type, rows)

    return adj.cached(('degrees', n_types), find)


# Where the whole node is one launch on a GPU, degrees are relations (kernels/degree_rows.cu).
# Otherwise neighbours are summed first. Then a host gathers the rows of each degree and multiplies
# them by its weight, which takes the fewest operations. For a GPU, the number of these rows would
# have to be known on the host. Instead, every row is expanded to one block per degree, zero except
# for its own degree's, and multiplied by the stacked weights: n_types times the operations, but one
# product of a fixed shape.


def _expand(x, is_type):
    """Return (n_nodes, n_types * n_in): x[i] in the block of i's degree, zeros elsewhere."""
    n_types, n_in = is_type.shape[1], x.shape[1]
    blocks = cuda.cupy.empty((len(x), n_types * n_in), x.dtype)
    cuda.elementwise(
        'T x, raw bool is_type, int32 n_types, int32 n_in',
        'raw T blocks',
        """
        const ptrdiff_t row = i / n_in, first = row * n_types * n_in + i % n_in;
        for (int type = 0; type < n_types; ++type)
            blocks[first + type * n_in] = is_type[row * n_types + type] ? x : (T)0;""",
        'bspmm_expand',
    )(x, is_type, n_types, n_in, blocks)
    return blocks


def _product(degrees, x, weights, trans):
    """Compute ``y[i] = W_d x[i]`` (trans: ``x[i] W_d``), d the degree; 0 if d has no weight."""
    if degrees.rows is None:
        stacked = concat(weights, axis=0 if trans else 1)
        y = dot(_expand(x, degrees.is_type), stacked if trans else stacked.T)
        return y.astype(x.dtype, copy=False)
    y = numpy.zeros((len(x), weights[0].shape[1 if trans else 0]), x.dtype)
    for rows, weight in zip(degrees.rows, weights):
        if rows.size:
            y[rows] = x[rows].dot(weight if trans else weight.T)
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
        self._sums = bspmm_forward(self._adj, x)
        y = _product(degrees_of(self._adj, n_types), self._sums, weights, False)
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
        degrees = degrees_of(self._adj, n_types)
        (gy,) = SigmoidGrad((None,)).forward((self._y, gy))
        if 0 in indexes:
            by_sums = _product(degrees, gy, weights, True)
            gradients[0] = bspmm_forward(self._adj, by_sums, trans=True)
        if set(range(1, n_types + 1)) & set(indexes):
            sums = self._sums
            if degrees.rows is not None:
                by_weights = [gy[rows].T.dot(sums[rows]) for rows in degrees.rows]
            else:
                stacked = dot(_expand(gy, degrees.is_type).T, sums)
                by_weights = stacked.reshape(n_types, gy.shape[1], x.shape[1])
            gradients.update(enumerate(by_weights, 1))
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
