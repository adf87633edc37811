"""A layer on bare arrays, computed by products: on a host, and on a GPU if it is not one launch."""

import math

import numpy

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.cuda.partial_sums import shared
from chainer_bspmm.ops.bspmm import bspmm_forward
from chainer_bspmm.ops.elementwise import activate, activation_gradient, by_channel, by_relation
from chainer_bspmm.ops.graph_linear.host import graph_linear_grad_on_host, graph_linear_on_host
from chainer_bspmm.ops.layer_end import can_sum, end_backward, end_forward
from chainer_bspmm.ops.layer_end import summed_backward, summed_forward
from chainer_bspmm.sparse.relations import relation_rows, transposed_rows


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
    width = adj.n_relations * math.prod(parameter.shape[1:])
    return parameter.reshape(len(parameter) // adj.n_relations, width)


def _is_on_host(x):
    """Return whether x is on the host, where `host.py` computes all of a layer that has W."""
    return isinstance(x, numpy.ndarray)


def _ends_with_sums(adj, x, parameters):
    """Return whether neighbours are summed by the launch that ends the layer."""
    return 'W' in parameters and 'b' not in parameters and launch.on_gpu(x) and can_sum(adj)


def forward(adj, x, parameters, loop=False, activation='identity', dropout_ratio=0.0, draw=None):
    """Return the result of a layer, (n_nodes, out_channels), and the `sums` of :func:`backward`.

    Dropout is for a GPU only, and `draw` is the result of `ops.dropout.step_draw`.
    """
    if 'W' in parameters and _is_on_host(x):
        y = graph_linear_on_host(adj, x, **parameters, loop=loop).astype(x.dtype, copy=False)
        activate(activation, y)
        return y, None
    end = parameters.get('b_self'), activation, dropout_ratio, draw
    y = dot(x, parameters['W_self'].T) if 'W_self' in parameters else None
    if _ends_with_sums(adj, x, parameters):
        mapped = dot(x, parameters['W'].T)
        return summed_forward(adj, mapped, y, *end, loop=loop), None
    sums = None
    b = parameters.get('b')
    if 'W' in parameters:
        sums_first = loop or aggregates_first(x.shape[1], len(parameters['W']) // adj.n_relations)
        if sums_first:
            sums = _sums(adj, x, loop)
            y = dot(sums, _by_channel(adj, parameters['W']).T, to=y)
        if b is not None:
            y = dot(_degrees(adj, x, loop), _by_channel(adj, b).T, to=y)
        if not sums_first:
            mapped = dot(x, by_relation(parameters['W'], adj.n_relations).T)
            n_out = mapped.shape[1] // adj.n_relations
            y = bspmm_forward(adj, mapped.reshape(adj.n_cols, n_out), residual=y)
    end_forward(y, *end)
    return y, sums


def backward(
    adj,
    x,
    parameters,
    loop=False,
    *,
    gy,
    needed,
    sums=None,
    activation='identity',
    y=None,
    dropout_ratio=0.0,
    more=None,
):
    """Return {name: gradient} for the names in `needed`, given gy, the gradient of the result y.

    The gradient with respect to x is added to `more`, which is for a GPU only.
    """
    W, W_self = parameters.get('W'), parameters.get('W_self')
    if W is not None and _is_on_host(x):
        gy = activation_gradient(activation, y, gy, dropout_ratio)
        return graph_linear_grad_on_host(adj, x, gy, W, W_self, needed, loop)
    gradients = {}
    if _ends_with_sums(adj, x, parameters):
        mapped, z, gradients['b_self'] = summed_backward(
            transposed_rows(adj),
            y,
            gy,
            activation,
            dropout_ratio,
            has_bias='b_self' in needed,
            needs_z=W_self is not None,
            loop=loop,
        )
        if 'W' in needed:
            (gradients['W'],) = shared(dot(mapped.T, x))
        if 'W_self' in needed:
            (gradients['W_self'],) = shared(dot(z.T, x))
        if 'x' in needed:
            gx = dot(mapped, W)
            gradients['x'] = _plus(gx if z is None else dot(z, W_self, to=gx), more)
        return gradients
    gy, of_biases = end_backward(y, gy, activation, dropout_ratio, int('b_self' in needed))
    if of_biases:
        (gradients['b_self'],) = of_biases
    if 'W_self' in needed:
        (gradients['W_self'],) = shared(dot(gy.T, x))
    if W is None:
        if 'x' in needed:
            gradients['x'] = _plus(dot(gy, W_self), more)
        return gradients
    if 'b' in needed:
        (gradients['b'],) = shared(dot(gy.T, _degrees(adj, x, loop)).ravel())
    if sums is not None:
        if 'W' in needed:
            (gradients['W'],) = shared(dot(gy.T, sums).reshape(W.shape))
        if 'x' in needed:
            rows = relation_rows(adj)
            mapped = dot(gy, _by_channel(adj, W)).reshape(rows.n_rows, x.shape[1])
            if loop:
                more = mapped if more is None else mapped + more
            gx = bspmm_forward(rows, mapped, residual=more, trans=True)
            gradients['x'] = gx if W_self is None else dot(gy, W_self, to=gx)
    elif needed & {'x', 'W'}:
        mapped = bspmm_forward(adj, gy, trans=True).reshape(len(x), len(W))
        if 'W' in needed:
            (gradients['W'],) = shared(by_channel(dot(mapped.T, x), adj.n_relations))
        if 'x' in needed:
            gx = dot(mapped, by_relation(W, adj.n_relations))
            gx = gx if W_self is None else dot(gy, W_self, to=gx)
            gradients['x'] = _plus(gx, more)
    return gradients


def _plus(array, more):
    """Add another array, if there is one, in place."""
    if more is not None:
        array += more
    return array
