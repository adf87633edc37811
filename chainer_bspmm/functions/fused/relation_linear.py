"""A whole relational graph convolution, linear map and sum over the neighbours, as one node."""

from collections.abc import Callable

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer import Variable
from chainer.functions.activation.tanh import TanhGrad
from chainer.types import NdArray

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused import expect
from chainer_bspmm.functions.fused.arrays import by_channel
from chainer_bspmm.functions.fused.arrays import by_relation
from chainer_bspmm.functions.node import AccumulateInPlace
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.relations import relation_rows

ACTIVATIONS = (functions.identity, functions.tanh)


def aggregates_first(in_channels, out_channels):
    """Tell whether it is cheaper to sum neighbours first than to map features first.

    Both orders do the same multiplications in their GEMMs. They differ in the array between GEMM
    and product, written by the one and read by the other, forward and backward: (n_nodes, R, width)
    with the width of the input if neighbours are summed first, else of the output. If the widths
    are equal, summing first wins: it needs no permutation of W, which is a matrix of shape
    (out_channels, R * in_channels) as it lies in memory.
    """
    return out_channels >= in_channels


class RelationLinear(AccumulateInPlace, FusedNode):
    """y of :func:`relation_linear`; inputs x and those of W, b, W_self, b_self that `names` has."""

    def __init__(self, adj, names, activation):
        self._adj = adj
        self._names = names
        self._is_tanh = activation is functions.tanh

    def _output(self, inputs):
        x, lead, given = _flat(dict(zip(self._names, inputs)))
        xp = chainer_backend.get_array_module(x)
        if xp is numpy:
            y = backend.cpu.graph_linear(self._adj, **dict(given, x=x))
            return self._activated(xp, y, lead)
        own = dot(x, given['W_self'].T) if 'W_self' in given else None
        if 'b_self' in given:
            own = _plus(own, xp.broadcast_to(given['b_self'], (len(x), given['b_self'].size)))
        layer = _layer(self._adj, x, given['W'])
        y, self._sums = layer.forward(x, given['W'], given.get('b'), own)
        return self._activated(xp, y, lead)

    def _activated(self, xp, y, lead):
        if self._is_tanh:
            xp.tanh(y, out=y)
            self._y = y
        return y.reshape(lead + y.shape[1:])

    def _gradients(self, inputs, gy, wanted):
        wanted = {self._names[i] for i in wanted}
        x, lead, given = _flat(dict(zip(self._names, inputs)))
        gy = gy.reshape(len(x), gy.shape[-1])
        if self._is_tanh:
            (gy,) = TanhGrad(None).forward((self._y, gy))
        if isinstance(x, numpy.ndarray):
            gradients = backend.cpu.graph_linear_grad(
                self._adj, x, gy, given['W'], given.get('W_self'), wanted
            )
        else:
            gradients = self._gradients_on_gpu(x, given, gy, wanted)
        if 'x' in wanted:
            gradients['x'] = gradients['x'].reshape(lead + x.shape[1:])
        return {i: gradients[name] for i, name in enumerate(self._names) if name in wanted}

    def _gradients_on_gpu(self, x, given, gy, wanted):
        gradients = {}
        if 'W_self' in wanted:
            gradients['W_self'] = dot(gy.T, x)
        if 'b_self' in wanted:
            gradients['b_self'] = backend.row_sum(gy)
        own = dot(gy, given['W_self']) if 'x' in wanted and 'W_self' in given else None
        if wanted & {'x', 'W', 'b'}:
            layer = _layer(self._adj, x, given['W'])
            gradients.update(layer.backward(x, given['W'], gy, own, wanted, self._sums))
        return gradients

    def _composed(self, *inputs):
        given = dict(zip(self._names, inputs))
        x, adj = given.pop('x'), self._adj
        rows = functions.reshape(x, (adj.n_rows, x.shape[-1]))
        given = {name: functions.cast(array, x.dtype) for name, array in given.items()}
        W, b = (
            by_relation(given[name], adj.n_relations) if name in given else None for name in 'Wb'
        )
        mapped = functions.linear(rows, W, b)
        mapped = functions.reshape(mapped, (adj.n_cols, len(W) // adj.n_relations))
        y = bspmm(adj, mapped)
        if 'W_self' in given:
            y += functions.linear(rows, given['W_self'], given.get('b_self'))
        elif 'b_self' in given:
            y += functions.broadcast_to(given['b_self'], y.shape)
        y = functions.reshape(y, x.shape[:-1] + y.shape[1:])
        return functions.tanh(y) if self._is_tanh else y


class _TransformFirst:
    """sum_r A_r (x W_r^T + b_r): one GEMM makes (n_nodes * R, out) rows, one product adds them."""

    def __init__(self, adj):
        self._adj = adj

    def forward(self, x, W, b, own):
        n_relations = self._adj.n_relations
        mapped = dot(x, by_relation(W, n_relations).T)
        if b is not None:
            mapped += by_relation(b, n_relations)
        mapped = mapped.reshape(len(x) * n_relations, len(W) // n_relations)
        return backend.bspmm(self._adj, mapped, residual=own), None

    def backward(self, x, W, gy, own, wanted, _):
        grads = {}
        n_relations = self._adj.n_relations
        mapped = backend.bspmm(self._adj, gy, trans=True).reshape(len(x), len(W))
        if 'W' in wanted:
            grads['W'] = by_channel(dot(mapped.T, x), n_relations)
        if 'b' in wanted:
            grads['b'] = by_channel(backend.row_sum(mapped), n_relations)
        if 'x' in wanted:
            grads['x'] = _plus(own, dot(mapped, by_relation(W, n_relations)))
        return grads


class _AggregateFirst:
    """[A_1 x | .. | A_R x] [W_1 | .. | W_R]^T + sum_r degree_r b_r: a product, then one GEMM."""

    def __init__(self, adj):
        self._adj = adj
        self._rows = relation_rows(adj)

    def forward(self, x, W, b, own):
        sums = self._sum(x)
        y = _plus(own, dot(sums, self._matrix(W).T))
        if b is not None:
            y += dot(self._degrees(x), self._matrix(b).T)
        return y, sums

    def backward(self, x, W, gy, own, wanted, sums):
        grads = {}
        if 'W' in wanted:
            grads['W'] = dot(gy.T, self._sum(x) if sums is None else sums).reshape(W.shape)
        if 'b' in wanted:
            grads['b'] = dot(gy.T, self._degrees(x)).ravel()
        if 'x' in wanted:
            mapped = dot(gy, self._matrix(W)).reshape(self._rows.n_rows, x.shape[1])
            grads['x'] = backend.bspmm(self._rows, mapped, residual=own, trans=True)
        return grads

    def _sum(self, x):
        """Return (n_nodes, R * in_channels): the sum over each relation's neighbours."""
        return backend.bspmm(self._rows, x).reshape(
            self._adj.n_rows, self._adj.n_relations * x.shape[1]
        )

    def _matrix(self, parameter):
        """Return W as (out, R * in), or b as (out, R): views."""
        return parameter.reshape(len(parameter) // self._adj.n_relations, -1)

    def _degrees(self, x):
        """Return (n_nodes, R): what a constant feature becomes, row sums of every relation."""
        return self._adj.cached(
            ('relation degrees', x.dtype),
            lambda: self._sum(self._adj.xp.ones((len(x), 1), x.dtype)),
        )


def _layer(adj, x, W):
    summed_first = aggregates_first(x.shape[1], len(W) // adj.n_relations)
    return (_AggregateFirst if summed_first else _TransformFirst)(adj)


def _flat(given):
    """Return x as (n_nodes, in_channels), the shape of its other axes, and all in x's dtype."""
    x = given['x']
    # As in chainer.functions.linear, parameters may have another dtype than x (mixed precision).
    given = {name: array.astype(x.dtype, copy=False) for name, array in given.items()}
    return x.reshape(-1, x.shape[-1]), x.shape[:-1], given


def _plus(a, b):
    return b if a is None else a + b


def relation_linear(
    adj: BatchedCSR,
    x: Variable | NdArray,
    W: Variable | NdArray,
    b: Variable | NdArray | None = None,
    W_self: Variable | NdArray | None = None,
    b_self: Variable | NdArray | None = None,
    activation: Callable = functions.identity,
) -> Variable:
    """Map the features of every node by a matrix per relation and sum over its neighbours.

    ``y[i, c] = sum_r sum_j A_r[i, j] (sum_k W[c * R + r, k] x[j, k] + b[c * R + r])``, and with a
    term for the node itself ``+ sum_k W_self[c, k] x[i, k] + b_self[c]``. One node of the
    computational graph, differentiable to any order with respect to all but ``adj``.

    If ``out_channels < in_channels``, features are mapped first, then summed over neighbours and
    relations in one product; else neighbours are summed first and one GEMM does the rest. The
    results differ by rounding only.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R), entry (i, j * R + r) is ``A_r[i, j]``.
        x (Variable or array): (n_nodes, in_channels) float16, float32 or float64; if ``adj`` is
            padded to N nodes per graph, also (n_graphs, N, in_channels).
        W (Variable or array): (out_channels * R, in_channels), the relation as the minor index of
            its rows.
        b (Variable or array or None): (out_channels * R,), rows as those of W.
        W_self (Variable or array or None): (out_channels, in_channels).
        b_self (Variable or array or None): (out_channels,).
        activation (callable): of the result: ``chainer.functions.identity`` or ``tanh``.

    Returns:
        Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels); of x's dtype, to which
        parameters of another dtype are converted.

    Raises:
        TypeError: ``adj`` is no BatchedCSR, or its values have another dtype than ``x``.
        ValueError: a shape or a device does not fit, or another activation is given.

    Note:
        Deterministic; does not synchronise.

    Source:
        Nagasaka et al. (CCGrid 2019), the graph convolution with several channels, there a product
        per channel; Chainer Chemistry 0.7.1, links/update/relgcn_update.py and ggnn_update.py.
    """
    given = {'x': x, 'W': W, 'b': b, 'W_self': W_self, 'b_self': b_self}
    given = {name: array for name, array in given.items() if array is not None}
    if activation not in ACTIVATIONS:
        raise ValueError(
            'activation: expected chainer.functions.identity or tanh, got %r' % (activation,)
        )
    expect.relations(adj)
    leads = [(adj.n_rows,)]
    if adj.layout == 'padded':
        leads.append((adj.n_graphs, adj.max_rows))
    if x.shape[:-1] not in leads:
        raise ValueError(
            'x: expected shape %s to go with %r, got %s'
            % (
                ' or '.join('(%s, in_channels)' % ', '.join(map(str, lead)) for lead in leads),
                adj,
                x.shape,
            )
        )
    if W.ndim != 2 or len(W) % adj.n_relations or W.shape[1] != x.shape[-1]:
        raise ValueError(
            'W: expected shape (out_channels * %d, %d), a row for each output channel '
            'and relation of adj, got %s' % (adj.n_relations, x.shape[-1], W.shape)
        )
    n_out = len(W) // adj.n_relations
    expected = {'b': (len(W),), 'W_self': (n_out, x.shape[-1]), 'b_self': (n_out,)}
    expect.shapes(
        'W of shape %s' % (W.shape,),
        {name: (given.get(name), shape) for name, shape in expected.items()},
    )
    return RelationLinear(adj, tuple(given), activation).apply(tuple(given.values()))[0]
