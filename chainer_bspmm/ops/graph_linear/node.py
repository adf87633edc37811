"""A whole layer of a graph convolution, or a linear layer, with its activation, as one node."""

from collections.abc import Callable

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer import Variable
from chainer.types import NdArray

from chainer_bspmm.cuda.gemm import step_for
from chainer_bspmm.ops import check
from chainer_bspmm.ops.bspmm import bspmm
from chainer_bspmm.ops.dropout import dropout
from chainer_bspmm.ops.dropout import dropout_forward
from chainer_bspmm.ops.dropout import dropout_relu
from chainer_bspmm.ops.dropout import step_draw
from chainer_bspmm.ops.elementwise import activate
from chainer_bspmm.ops.elementwise import activation_gradient
from chainer_bspmm.ops.elementwise import ACTIVATIONS
from chainer_bspmm.ops.elementwise import by_relation
from chainer_bspmm.ops.graph_linear import products
from chainer_bspmm.ops.graph_linear.launches import layer_backward
from chainer_bspmm.ops.graph_linear.launches import layer_forward
from chainer_bspmm.ops.graph_linear.launches import layer_of
from chainer_bspmm.ops.node import AccumulateInLaunch
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.relations import relation_rows
from chainer_bspmm.sparse.relations import transposed_rows


class GraphLinear(AccumulateInLaunch, FusedNode):
    """y of :func:`graph_linear`; inputs x and those of W, b, W_self, b_self that `names` has."""

    def __init__(self, adj, names, activation, dropout_ratio, loop):
        self._adj = adj
        self._names = names
        self._activation = ACTIVATIONS[activation]
        self._ratio = dropout_ratio
        self._loop = loop
        self._mask = None  # of dropout, if it is an array

    def _output(self, inputs):
        x, lead, given = _flat(dict(zip(self._names, inputs)))
        xp = chainer_backend.get_array_module(x)
        self._layer = layer_of(
            x,
            given,
            self._n_relations,
            self._loop,
            self._activation,
            longest=0 if self._adj is None else self._adj.longest,
        )
        is_drawn = bool(self._ratio) and self._layer is not None and step_for(x) is not None
        if self._layer is not None:
            rows = None if self._adj is None else relation_rows(self._adj)
            draw = step_draw() if is_drawn else None
            y = layer_forward(self._layer, rows, x, given, self._ratio if is_drawn else 0.0, draw)
        else:
            y, self._kept = products.forward(self._adj, x, given, self._loop)
            y = y.astype(x.dtype, copy=False)
            if not self._ratio:
                activate(xp, self._activation, y)
        if self._ratio and not is_drawn:
            if self._activation == 'relu':
                dropout_relu(y, self._ratio)
            else:
                self._mask, y = dropout_forward(y, self._ratio, *step_draw())
        self._y = y
        return y.reshape(lead + y.shape[1:])

    def _gradients(self, inputs, gy, wanted):
        wanted = {self._names[i] for i in wanted}
        x, lead, given = _flat(dict(zip(self._names, inputs)))
        gy = gy.reshape(len(x), gy.shape[-1])
        ratio = self._ratio
        if self._mask is not None:
            gy, ratio = gy * self._mask, 0.0
        if self._layer is not None:
            rows = None if self._adj is None else transposed_rows(self._adj)
            more = None if self._more is None else self._more.reshape(x.shape)
            gradients = layer_backward(
                self._layer, rows, x, self._y, gy, given, ratio, 'x' in wanted, more
            )
        else:
            gy = activation_gradient(self._activation, self._y, gy, ratio)
            gradients = products.backward(self._adj, x, given, self._loop, gy, wanted, self._kept)
        if 'x' in wanted:
            gradients['x'] = gradients['x'].reshape(lead + x.shape[1:])
        return {i: gradients[name] for i, name in enumerate(self._names) if name in wanted}

    @property
    def _n_relations(self):
        return 0 if self._adj is None else self._adj.n_relations

    def _composed(self, *inputs):
        given = dict(zip(self._names, inputs))
        x, adj = given.pop('x'), self._adj
        rows = functions.reshape(x, (-1, x.shape[-1]))
        given = {name: functions.cast(array, x.dtype) for name, array in given.items()}
        y = None
        if 'W_self' in given:
            y = functions.linear(rows, given['W_self'], given.get('b_self'))
        if 'W' in given:
            W, b = (
                by_relation(given[name], adj.n_relations) if name in given else None
                for name in 'Wb'
            )
            mapped = functions.linear(rows, W, b)
            mapped = functions.reshape(mapped, (adj.n_cols, len(W) // adj.n_relations))
            y = products.plus(y, bspmm(adj, mapped, residual=mapped if self._loop else None))
            if 'b_self' in given and 'W_self' not in given:
                y += functions.broadcast_to(given['b_self'], y.shape)
        y = functions.reshape(y, x.shape[:-1] + y.shape[1:])
        if not self._ratio:
            return getattr(functions, self._activation)(y)
        return y * self._factors().reshape(y.shape)

    def _factors(self):
        """Return what activation and dropout multiply by."""
        if self._mask is not None:
            return self._mask
        y = self._y
        if self._activation == 'relu':
            is_kept = y > 0
        else:  # elements that were dropped are -0, see kernels/graph_linear.cu
            xp = chainer_backend.get_array_module(y)
            is_kept = (y != 0) | ~xp.signbit(y)
        return is_kept.astype(y.dtype) * y.dtype.type(1 / (1 - self._ratio))


def _flat(given):
    """Return x as (n_nodes, in_channels), the shape of its other axes, and the parameters."""
    x = given.pop('x')
    # As in chainer.functions.linear, parameters may have another dtype than x (mixed precision).
    given = {name: array.astype(x.dtype, copy=False) for name, array in given.items()}
    return x.reshape(-1, x.shape[-1]), x.shape[:-1], given


def graph_linear(
    adj,
    x,
    W=None,
    b=None,
    W_self=None,
    b_self=None,
    activation=functions.identity,
    dropout_ratio=0.0,
    loop=False,
):
    """Compute ``act(sum_r sum_j A_r[i, j] (W_r x[j] + b_r) + W_self x[i] + b_self)``, then dropout.

    ``adj``, x, W, b, W_self, b_self and the result have the shapes of `functions.relation_linear`.
    Each of the parameters may be None, and ``adj`` without W; those of another dtype than x's are
    converted. With ``chainer.config.train`` dropout sets elements to 0 and divides the others by
    1 - dropout_ratio. ``loop`` adds the identity to A, of one relation.

    On a GPU one launch, and one for its gradients, if the matrices fit into shared memory and
    ``adj.longest`` is at most 128 (kernels/graph_linear.cu); else, and on a host, products.
    Differentiable to any order with respect to all but ``adj``; deterministic; does not
    synchronise.
    """
    if not 0 <= dropout_ratio < 1:
        raise ValueError('dropout_ratio: expected at least 0 and below 1, got %r' % dropout_ratio)
    if activation not in ACTIVATIONS:
        raise ValueError(
            'activation: expected one of chainer.functions.%s, got %r'
            % (', '.join(ACTIVATIONS.values()), activation)
        )
    n_relations = 1
    if adj is not None:
        check.relations(adj)
        n_relations = adj.n_relations
        if loop and n_relations > 1:
            raise ValueError('adj: expected one relation to go with loop=True, got %r' % adj)
        _check_features(adj, x)
    elif x.ndim != 2:
        raise ValueError('x: expected shape (n_rows, in_channels), got %s' % (x.shape,))
    given = {'x': x, 'W': W, 'b': b, 'W_self': W_self, 'b_self': b_self}
    given = {name: array for name, array in given.items() if array is not None}
    matrix = 'W' if W is not None else 'W_self'
    array, n_rows = given[matrix], n_relations if W is not None else 1
    if array.ndim != 2 or len(array) % n_rows or array.shape[1] != x.shape[-1]:
        raise ValueError(
            '%s: expected shape (out_channels%s, %d)%s, got %s'
            % (
                matrix,
                ' * %d' % n_rows if W is not None else '',
                x.shape[-1],
                ', a row for each output channel and relation of adj' if W is not None else '',
                array.shape,
            )
        )
    n_out = len(array) // n_rows
    expected = {'b': (n_out * n_rows,), 'W_self': (n_out, x.shape[-1]), 'b_self': (n_out,)}
    check.shapes(
        '%s of shape %s' % (matrix, array.shape),
        {name: (given.get(name), shape) for name, shape in expected.items()},
    )
    ratio = dropout_ratio if chainer.config.train else 0.0
    # With other activations than a rectifier's, dropout is part of the node in a step only.
    is_fused = activation is functions.relu or (
        activation is functions.identity and step_for(chainer.as_array(x)) is not None
    )
    node = GraphLinear(adj, tuple(given), activation, ratio if is_fused else 0.0, loop)
    (y,) = node.apply(tuple(given.values()))
    return y if is_fused or not ratio else dropout(y, ratio)


def _check_features(adj, x):
    check.features(adj, chainer.as_array(x))
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

    On a GPU one launch, and one for its gradients, if the matrices fit into shared memory; else,
    and on a host, products. The results differ by rounding only.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R), entry (i, j * R + r) is ``A_r[i, j]``.
        x (Variable or array): (n_nodes, in_channels) float16, float32 or float64; if ``adj`` is
            padded to N nodes per graph, also (n_graphs, N, in_channels).
        W (Variable or array): (out_channels * R, in_channels), the relation as the minor index of
            its rows.
        b (Variable or array or None): (out_channels * R,), rows as those of W.
        W_self (Variable or array or None): (out_channels, in_channels).
        b_self (Variable or array or None): (out_channels,).
        activation (callable): of the result: ``chainer.functions.identity``, ``relu`` or ``tanh``.

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
    return graph_linear(adj, x, W, b, W_self, b_self, activation)
