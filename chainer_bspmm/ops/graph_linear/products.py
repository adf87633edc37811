"""A layer on bare arrays, computed by products: on a host, and on a GPU if it is not one launch."""

import numpy

from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.elementwise import by_channel, by_relation
from chainer_bspmm.ops.graph_linear.host import graph_linear_grad_on_host, graph_linear_on_host
from chainer_bspmm.ops.segments import row_sum
from chainer_bspmm.sparse.relations import relation_rows


def aggregates_first(in_channels, out_channels):
    """Return whether it is cheaper to sum neighbours first than to map features first.

    The array between the two products is as wide as the input if neighbours are summed first, and
    as wide as the output otherwise. If both widths are equal, neighbours are summed first, because
    mapping first needs a permutation of W.
    """
    return out_channels >= in_channels


def _sums(adj, x, loop):
    """Return (n_nodes, R * in_channels), the sums over each relation's neighbours."""
    sums = bspmm_forward(relation_rows(adj), x, residual=x if loop else None)
    return sums.reshape(adj.n_rows, adj.n_relations * x.shape[1])


def _degrees(adj, x, loop):
    """Return (n_nodes, R), the row sums of each relation."""
    return adj.cached(
        ('relation degrees', x.dtype, loop),
        lambda: _sums(adj, adj.xp.ones((len(x), 1), x.dtype), loop),
    )


def _by_channel(adj, parameter):
    """Return a view of W as (out, R * in), or of b as (out, R)."""
    return parameter.reshape(len(parameter) // adj.n_relations, -1)


def _is_on_host(x):
    """Return whether `host.py` computes all parts of a layer with a matrix at once."""
    return isinstance(x, numpy.ndarray)


def forward(adj, x, parameters, loop):
    """Return the sum of all parts, (n_nodes, out_channels), and `sums` for `backward`."""
    sums = None
    b = parameters.get('b')
    if 'W' in parameters and _is_on_host(x):
        return graph_linear_on_host(adj, x, **parameters, loop=loop), None
    own = dot(x, parameters['W_self'].T) if 'W_self' in parameters else None
    if 'W' not in parameters:
        y = own
    elif loop or aggregates_first(x.shape[1], len(parameters['W']) // adj.n_relations):
        sums = _sums(adj, x, loop)
        y = plus(own, dot(sums, _by_channel(adj, parameters['W']).T))
        if b is not None:
            y += dot(_degrees(adj, x, loop), _by_channel(adj, b).T)
    else:
        mapped = dot(x, by_relation(parameters['W'], adj.n_relations).T)
        if b is not None:
            mapped += by_relation(b, adj.n_relations)
        n_out = mapped.shape[1] // adj.n_relations
        y = bspmm_forward(adj, mapped.reshape(adj.n_cols, n_out), residual=own)
    if 'b_self' in parameters:
        y += parameters['b_self']
    return y, sums


def backward(adj, x, parameters, loop, gy, needed, sums):
    """Return {name: gradient} for the names in `needed`; gy: with respect to the sum."""
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
    elif sums is not None:
        if 'W' in needed:
            gradients['W'] = dot(gy.T, sums).reshape(W.shape)
        if 'b' in needed:
            gradients['b'] = dot(gy.T, _degrees(adj, x, loop)).ravel()
        if 'x' in needed:
            rows = relation_rows(adj)
            mapped = dot(gy, _by_channel(adj, W)).reshape(rows.n_rows, x.shape[1])
            own = plus(own, mapped) if loop else own
            gradients['x'] = bspmm_forward(rows, mapped, residual=own, trans=True)
    elif needed & {'x', 'W', 'b'}:
        mapped = bspmm_forward(adj, gy, trans=True).reshape(len(x), len(W))
        if 'W' in needed:
            gradients['W'] = by_channel(dot(mapped.T, x), adj.n_relations)
        if 'b' in needed:
            gradients['b'] = by_channel(row_sum(mapped), adj.n_relations)
        if 'x' in needed:
            gradients['x'] = plus(own, dot(mapped, by_relation(W, adj.n_relations)))
    return gradients


def plus(a, b):
    """Return the sum of two arrays, of which the first may be None."""
    return b if a is None else a + b
