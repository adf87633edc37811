"""A whole layer of a graph convolution, or a linear layer, with its activation, as one node."""

from collections.abc import Callable

import chainer
from chainer import backend as chainer_backend
from chainer import functions, Variable
from chainer.types import NdArray

from chainer_bspmm.cuda import launch, step
from chainer_bspmm.cuda.gemm import step_for
from chainer_bspmm.ops.bspmm import bspmm
from chainer_bspmm.ops.dropout import dropout, dropout_relu, step_draw
from chainer_bspmm.ops.elementwise import ACTIVATIONS, by_relation
from chainer_bspmm.ops.graph_linear import products
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from chainer_bspmm.ops.node import AccumulateInLaunch, FusedNode
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency, check_relations
from chainer_bspmm.sparse.check import FLOATS
from chainer_bspmm.sparse.relations import relation_rows, transposed_rows


class GraphLinear(AccumulateInLaunch, FusedNode):
    """Node of :func:`graph_linear`; inputs are x and the parameters of these `names`."""

    def __init__(self, adj, names, activation, dropout_ratio, loop):
        self._adj = adj
        self._names = names
        self._activation = ACTIVATIONS[activation]
        self._ratio = dropout_ratio
        self._loop = loop

    def _split(self, inputs):
        """Return x and the parameters in x's dtype; with mixed precision they have another."""
        x, *parameters = inputs
        parameters = [array.astype(x.dtype, copy=False) for array in parameters]
        return x, dict(zip(self._names, parameters))

    def _output(self, inputs):
        x, parameters = self._split(inputs)
        adj, ratio = self._adj, self._ratio
        n_relations, longest = (0, 0) if adj is None else (adj.n_relations, adj.longest)
        self._layer = layer_of(
            x, parameters, n_relations, self._loop, self._activation, longest=longest
        )
        self._adds_more = launch.on_gpu(x)
        # In a captured step, the launch that ends the layer also applies dropout.
        is_drawn = ratio > 0 and step.current() is not None and launch.on_gpu(x)
        end = {'dropout_ratio': ratio, 'draw': step_draw()} if is_drawn else {}
        if self._layer is not None:
            rows = None if adj is None else relation_rows(adj)
            y = layer_forward(self._layer, rows, x, parameters, **end)
        else:
            activation = self._activation if is_drawn or not ratio else 'identity'
            y, self._sums = products.forward(
                adj, x, parameters, self._loop, activation=activation, **end
            )
        if ratio and not is_drawn:  # only a rectifier has dropout outside of a step
            dropout_relu(y, ratio)
        self._y = y
        return y

    def _gradients(self, inputs, gy, indexes):
        x, parameters = self._split(inputs)
        names = 'x', *self._names
        needed = {names[i] for i in indexes}
        if self._layer is not None:
            rows = None if self._adj is None else transposed_rows(self._adj)
            gradients = layer_backward(
                self._layer,
                rows,
                x,
                self._y,
                gy,
                parameters=parameters,
                dropout_ratio=self._ratio,
                has_features='x' in needed,
                more=self._more,
            )
        else:
            gradients = products.backward(
                self._adj,
                x,
                parameters,
                self._loop,
                gy=gy,
                needed=needed,
                sums=self._sums,
                activation=self._activation,
                y=self._y,
                dropout_ratio=self._ratio,
                more=self._more,
            )
        return {i: gradients[names[i]] for i in indexes}

    def _composed(self, x, *arrays):
        adj = self._adj
        arrays = [functions.cast(array, x.dtype) for array in arrays]
        parameters = dict(zip(self._names, arrays))
        y = None
        if 'W_self' in parameters:
            y = functions.linear(x, parameters['W_self'], parameters.get('b_self'))
        if 'W' in parameters:
            W, b = (
                by_relation(parameters[name], adj.n_relations) if name in parameters else None
                for name in 'Wb'
            )
            mapped = functions.linear(x, W, b)
            mapped = functions.reshape(mapped, (adj.n_cols, len(W) // adj.n_relations))
            sums = bspmm(adj, mapped, residual=mapped if self._loop else None)
            y = sums if y is None else y + sums
            if 'b_self' in parameters and 'W_self' not in parameters:
                y += functions.broadcast_to(parameters['b_self'], y.shape)
        return y * self._factors() if self._ratio else getattr(functions, self._activation)(y)

    def _factors(self):
        """Return the factors by which activation and dropout multiply the gradient."""
        y = self._y
        if self._activation == 'relu':
            is_kept = y > 0
        else:  # dropped elements are -0, and no other element is: see kernels/graph_linear.cu
            xp = chainer_backend.get_array_module(y)
            is_kept = (y != 0) | ~xp.signbit(y)
        return is_kept.astype(y.dtype) * y.dtype.type(1 / (1 - self._ratio))


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

    Arguments are as in `functions.relation_linear`, but x has two dimensions and each parameter may
    be None; without W, ``adj`` may be None, too. With ``chainer.config.train`` dropout sets
    elements to 0 and divides the others by 1 - dropout_ratio. ``loop`` adds the identity to A,
    which then has one relation.
    """
    if not 0 <= dropout_ratio < 1:
        raise ValueError('dropout_ratio: expected at least 0 and below 1, got %r' % dropout_ratio)
    if activation not in ACTIVATIONS:
        text = 'activation: expected one of chainer.functions.%s, got %r'
        raise ValueError(text % (', '.join(ACTIVATIONS.values()), activation))
    if adj is not None:
        check_relations(adj)
        if loop and adj.n_relations > 1:
            raise ValueError('adj: expected one relation to go with loop=True, got %r' % adj)
        check.features(x, adj, 'in_channels')
    elif x.ndim != 2:
        raise ValueError('x: expected shape (n_rows, in_channels), got %s' % (x.shape,))
    parameters = {'W': W, 'b': b, 'W_self': W_self, 'b_self': b_self}
    parameters = {name: array for name, array in parameters.items() if array is not None}
    _check_parameters(adj, x.shape[1], parameters)
    ratio = dropout_ratio if chainer.config.train else 0.0
    # After activations other than a rectifier, dropout is part of the node in a captured step only.
    is_fused = activation is functions.relu or (
        activation is functions.identity and step_for(chainer.as_array(x)) is not None
    )
    node = GraphLinear(adj, tuple(parameters), activation, ratio if is_fused else 0.0, loop)
    (y,) = node.apply((x, *parameters.values()))
    return y if is_fused or not ratio else dropout(y, ratio)


def _check_parameters(adj, n_in, parameters):
    for name, array in parameters.items():
        if not hasattr(array, 'dtype') or array.dtype not in FLOATS:
            check.floating(name, array)
    name = 'W_self'
    n_relations = 1
    advice = ''
    if 'W' in parameters:
        name = 'W'
        n_relations = adj.n_relations
        advice = ', a row for each output channel and relation of adj'
    matrix = parameters[name]
    if matrix.ndim != 2 or len(matrix) % n_relations or matrix.shape[1] != n_in:
        n_rows = 'out_channels * %d' % n_relations if advice else 'out_channels'
        text = '%s: expected shape (%s, %d)%s, got %s'
        raise ValueError(text % (name, n_rows, n_in, advice, matrix.shape))
    n_out = len(matrix) // n_relations
    get = parameters.get
    expected = {
        'b': (get('b'), (n_out * n_relations,)),
        'W_self': (get('W_self'), (n_out, n_in)),
        'b_self': (get('b_self'), (n_out,)),
    }
    check.shapes('%s of shape %s' % (name, matrix.shape), expected)


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

    On a GPU it is one launch, and one for its gradients, if the matrices fit into shared memory and
    cuBLAS is not faster. Otherwise, and on a host, it is computed by products. The results differ
    by rounding only.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R), entry (i, j * R + r) is ``A_r[i, j]``.
        x (Variable or array): (n_nodes, in_channels) float16, float32 or float64; if ``adj`` is
            padded to N nodes per graph, also (n_graphs, N, in_channels).
        W (Variable or array): (out_channels * R, in_channels), the relation as the minor index of
            its rows.
        b (Variable or array or None): (out_channels * R,), in the order of W's rows.
        W_self (Variable or array or None): (out_channels, in_channels).
        b_self (Variable or array or None): (out_channels,).
        activation (callable): applied to the sum; ``chainer.functions.identity``, ``relu`` or
            ``tanh``.

    Returns:
        Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels); of x's dtype, to which
        parameters of another dtype are converted.

    Raises:
        TypeError: ``adj`` is not a BatchedCSR, or its values have another dtype than ``x``; an
            array is not of floats.
        ValueError: a shape or a device does not fit, or the activation is another one.

    Note:
        Deterministic; does not synchronise.

    Source:
        Nagasaka et al. (CCGrid 2019), the graph convolution with several channels, which takes a
        product per channel there; Chainer Chemistry 0.7.1, links/update/relgcn_update.py and
        ggnn_update.py.
    """
    if adj is None or W is None:  # `graph_linear` would accept None
        check_adjacency(adj)
        check.floating('W', W)
    shape = getattr(x, 'shape', ())
    if len(shape) == 3 and type(adj) is BatchedCSR and adj.layout == 'padded':
        if shape[:2] == (adj.n_graphs, adj.max_rows):
            rows = functions.reshape(x, (adj.n_rows, shape[2]))
            y = graph_linear(adj, rows, W, b, W_self, b_self, activation=activation)
            return functions.reshape(y, (*shape[:2], y.shape[1]))
    return graph_linear(adj, x, W, b, W_self, b_self, activation=activation)
