"""A layer on bare arrays, as products: what has no launch of a GPU.

Its parts are what :func:`~chainer_bspmm.ops.graph_linear.node.graph_linear` sums.
"""

import numpy

from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.elementwise import by_channel
from chainer_bspmm.ops.elementwise import by_relation
from chainer_bspmm.ops.graph_linear.host import graph_linear_grad_on_host
from chainer_bspmm.ops.graph_linear.host import graph_linear_on_host
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.sparse.relations import relation_rows


def aggregates_first(in_channels, out_channels):
    """Tell whether it is cheaper to sum neighbours first than to map features first.

    The orders differ in the array between GEMM and product, (n_nodes, R, width), with the width of
    the input if neighbours are summed first, else of the output. If these are equal, summing first
    wins: it needs no permutation of W, (out_channels, R * in_channels) as it lies in memory.
    """
    return out_channels >= in_channels


class TransformFirst:
    """sum_r A_r (x W_r^T + b_r): one GEMM makes (n_nodes * R, out) rows, one product adds them."""

    def __init__(self, adj):
        self._adj = adj

    def forward(self, x, W, b, own):
        n_relations = self._adj.n_relations
        mapped = dot(x, by_relation(W, n_relations).T)
        if b is not None:
            mapped += by_relation(b, n_relations)
        mapped = mapped.reshape(len(x) * n_relations, len(W) // n_relations)
        return bspmm_forward(self._adj, mapped, residual=own), None

    def backward(self, x, W, gy, own, wanted, _):
        grads = {}
        n_relations = self._adj.n_relations
        mapped = bspmm_forward(self._adj, gy, trans=True).reshape(len(x), len(W))
        if 'W' in wanted:
            grads['W'] = by_channel(dot(mapped.T, x), n_relations)
        if 'b' in wanted:
            grads['b'] = by_channel(row_sum(mapped), n_relations)
        if 'x' in wanted:
            grads['x'] = plus(own, dot(mapped, by_relation(W, n_relations)))
        return grads


class AggregateFirst:
    """[A_1 x | .. | A_R x] [W_1 | .. | W_R]^T + sum_r degree_r b_r: a product, then one GEMM.

    loop: whether A_1 has a 1 more on its diagonal.
    """

    def __init__(self, adj, loop=False):
        self._adj = adj
        self._rows = relation_rows(adj)
        self._loop = loop

    def forward(self, x, W, b, own):
        sums = self._sum(x)
        y = plus(own, dot(sums, self._matrix(W).T))
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
            own = plus(own, mapped) if self._loop else own
            grads['x'] = bspmm_forward(self._rows, mapped, residual=own, trans=True)
        return grads

    def _sum(self, x):
        """Return (n_nodes, R * in_channels): the sum over each relation's neighbours."""
        return bspmm_forward(self._rows, x, residual=x if self._loop else None).reshape(
            self._adj.n_rows, self._adj.n_relations * x.shape[1]
        )

    def _matrix(self, parameter):
        """Return W as (out, R * in), or b as (out, R): views."""
        return parameter.reshape(len(parameter) // self._adj.n_relations, -1)

    def _degrees(self, x):
        """Return (n_nodes, R): what a constant feature becomes, row sums of every relation."""
        return self._adj.cached(
            ('relation degrees', x.dtype, self._loop),
            lambda: self._sum(self._adj.xp.ones((len(x), 1), x.dtype)),
        )


def _order(adj, x, W, loop):
    if loop or aggregates_first(x.shape[1], len(W) // adj.n_relations):
        return AggregateFirst(adj, loop)
    return TransformFirst(adj)


def _is_on_host(x):
    """Return whether the host's own products do a layer with a matrix, all parts at once."""
    return isinstance(x, numpy.ndarray)


def forward(adj, x, parameters, loop):
    """Return the sum of all parts, (n_nodes, out_channels), and what `backward` may use."""
    sums = None
    if 'W' not in parameters:
        y = dot(x, parameters['W_self'].T)
    elif _is_on_host(x):
        return graph_linear_on_host(adj, x, **parameters, loop=loop), None
    else:
        own = dot(x, parameters['W_self'].T) if 'W_self' in parameters else None
        order = _order(adj, x, parameters['W'], loop)
        y, sums = order.forward(x, parameters['W'], parameters.get('b'), own)
    if 'b_self' in parameters:
        y += parameters['b_self']
    return y, sums


def backward(adj, x, parameters, loop, gy, needed, sums):
    """Return {name: gradient} of what is needed, given that of the sum."""
    W, W_self = parameters.get('W'), parameters.get('W_self')
    if W is not None and _is_on_host(x):
        return graph_linear_grad_on_host(adj, x, gy, W, W_self, needed, loop)
    gradients = {}
    if 'W_self' in needed:
        gradients['W_self'] = dot(gy.T, x)
    if 'b_self' in needed:
        gradients['b_self'] = row_sum(gy)
    own = dot(gy, W_self) if 'x' in needed and W_self is not None else None
    if W is None:
        gradients['x'] = own
    elif needed & {'x', 'W', 'b'}:
        gradients.update(_order(adj, x, W, loop).backward(x, W, gy, own, needed, sums))
    return gradients


def plus(a, b):
    """Return the sum of two arrays, of which the first may be None."""
    return b if a is None else a + b
