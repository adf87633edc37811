"""A whole relational graph convolution, linear map and sum over the neighbours, as one node."""

import chainer
from chainer import backend as chainer_backend
from chainer import function_node
from chainer import functions
from chainer.functions.activation.tanh import TanhGrad

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.node import apply_untracked
from chainer_bspmm.functions.node import AccumulateInPlace
from chainer_bspmm.functions.fused.relation_order import by_channel
from chainer_bspmm.functions.fused.relation_order import by_relation
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.relations import relation_rows


def aggregates_first(in_channels, out_channels):
    """Tell in which order the layer is cheaper: neighbours summed first, or features mapped first.

    Both orders do the same multiplications in their GEMMs. What differs is the array between GEMM
    and product, written by the one and read by the other, forward and backward: (n_nodes, R, width)
    with the input's width where neighbours are summed first, else the output's. Where the widths
    are equal, summing first wins: W needs no permutation then, being a matrix of shape
    (out_channels, R * in_channels) as it lies in memory.
    """
    return out_channels >= in_channels


class RelationLinear(AccumulateInPlace, function_node.FunctionNode):
    """y of :func:`relation_linear`; inputs x and those of W, b, W_self, b_self that `names` has."""

    def __init__(self, adj, names):
        self._adj = adj
        self._names = names
        self._sums = None

    def forward(self, inputs):
        given = dict(zip(self._names, inputs))
        self.retain_inputs(
            tuple(i for i, name in enumerate(self._names) if name in ('x', 'W', 'W_self'))
        )
        self._dtypes = {name: array.dtype for name, array in given.items()}
        x, lead, given = _flat(given)
        own = dot(x, given['W_self'].T) if 'W_self' in given else None
        if 'b_self' in given:
            shape = len(x), given['b_self'].size
            own = _plus(
                own, chainer_backend.get_array_module(x).broadcast_to(given['b_self'], shape)
            )
        layer = _layer(self._adj, x, given['W'])
        y, self._sums = layer.forward(x, given['W'], given.get('b'), own)
        return (y.reshape(lead + y.shape[1:]),)

    def backward(self, indexes, grad_outputs):
        retained = dict(
            zip([n for n in self._names if n in ('x', 'W', 'W_self')], self.get_retained_inputs())
        )
        retained['gy'] = grad_outputs[0]
        wanted = tuple(self._names[i] for i in indexes)
        return _gradients(self._adj, wanted, retained, self._dtypes, self._sums)


class RelationTanh(RelationLinear):
    """The hyperbolic tangent of the same."""

    def forward(self, inputs):
        (y,) = super().forward(inputs)
        chainer_backend.get_array_module(y).tanh(y, out=y)
        self.retain_outputs((0,))
        return (y,)

    def backward(self, indexes, grad_outputs):
        (y,) = self.get_retained_outputs()
        return super().backward(indexes, apply_untracked(TanhGrad(None), (y, grad_outputs[0])))


NODES = {functions.identity: RelationLinear, functions.tanh: RelationTanh}


class RelationLinearGrad(function_node.FunctionNode):
    """The gradients `wanted` of `RelationLinear`; inputs `names`: x, gy, W and W_self, if any."""

    def __init__(self, adj, names, wanted, dtypes, sums):
        self._adj = adj
        self._names = names
        self._wanted = wanted
        self._dtypes = dtypes
        self._sums = sums

    def forward(self, inputs):
        self.retain_inputs(tuple(range(len(inputs))))
        x, lead, given = _flat(dict(zip(self._names, inputs)))
        gy = given['gy']
        grads = {}
        if 'W_self' in self._wanted:
            grads['W_self'] = dot(gy.T, x)
        if 'b_self' in self._wanted:
            grads['b_self'] = backend.row_sum(gy)
        own = None
        if 'x' in self._wanted and 'W_self' in given:
            own = dot(gy, given['W_self'])
        layer = _layer(self._adj, x, given['W'])
        grads.update(layer.backward(x, given['W'], gy, own, self._wanted, self._sums))
        if 'x' in grads:
            grads['x'] = grads['x'].reshape(lead + x.shape[1:])
        return tuple(grads[name].astype(self._dtypes[name], copy=False) for name in self._wanted)

    def backward(self, indexes, grad_outputs):
        # With T(x, W, gy) = <gy, sum_r A_r x W_r^T> each output of either node is the derivative of
        # T by one argument, so those of this one are again values of the two nodes.
        given = dict(zip(self._names, self.get_retained_inputs()))
        gg = dict(zip(self._wanted, grad_outputs))
        by_x = gg.get('x')
        by_parameter = {
            name: gg[name] for name in ('W', 'b', 'W_self', 'b_self') if gg.get(name) is not None
        }
        gradients = dict.fromkeys(self._names)
        weights = {name: given[name] for name in ('W', 'W_self') if name in given}
        wanted = {self._names[i] for i in indexes}
        if by_x is not None:
            if 'gy' in wanted:
                gradients['gy'] = _apply(self._adj, dict(weights, x=by_x))
            names = tuple(name for name in weights if name in wanted)
            if names:
                gradients.update(
                    zip(
                        names,
                        _gradients(
                            self._adj, names, dict(weights, x=by_x, gy=given['gy']), self._dtypes
                        ),
                    )
                )
        if by_parameter:
            if 'W' not in by_parameter:
                by_parameter['W'] = given['W'].xp.zeros_like(given['W'].array)
            if 'gy' in wanted:
                y = _apply(self._adj, dict(by_parameter, x=given['x']))
                gradients['gy'] = y if gradients['gy'] is None else gradients['gy'] + y
            if 'x' in wanted:
                factors = {name: by_parameter[name] for name in weights if name in by_parameter}
                (gradients['x'],) = _gradients(
                    self._adj, ('x',), dict(factors, x=given['x'], gy=given['gy']), self._dtypes
                )
        return tuple(gradients[self._names[i]] for i in indexes)


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
        if not {'x', 'W', 'b'} & set(wanted):
            return grads
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
        key = 'relation degrees', x.dtype
        if key not in self._adj._cache:
            self._adj._cache[key] = self._sum(
                chainer_backend.get_array_module(x).ones((len(x), 1), x.dtype)
            )
        return self._adj._cache[key]


def _layer(adj, x, W):
    summed_first = aggregates_first(x.shape[1], len(W) // adj.n_relations)
    return (_AggregateFirst if summed_first else _TransformFirst)(adj)


def _apply(adj, given, node=RelationLinear):
    names = tuple(name for name in ('x', 'W', 'b', 'W_self', 'b_self') if name in given)
    return node(adj, names).apply([given[name] for name in names])[0]


def _gradients(adj, wanted, given, dtypes, sums=None):
    if 'W' not in given:
        # Only W_self plays a part; the shape of W tells the node the number of channels.
        gy, x = given['gy'], given['x']
        given['W'] = gy.xp.zeros((gy.shape[-1] * adj.n_relations, x.shape[-1]), dtypes['W'])
    names = tuple(name for name in ('x', 'gy', 'W', 'W_self') if name in given)
    node = RelationLinearGrad(adj, names, wanted, dtypes, sums)
    return node.apply([given[name] for name in names])


def _flat(given):
    """Return x as (n_nodes, in_channels), the shape of its other axes, and all in x's dtype."""
    x = given['x']
    # As in chainer.functions.linear, parameters may have another dtype than x (mixed precision).
    given = {name: array.astype(x.dtype, copy=False) for name, array in given.items()}
    if 'gy' in given:
        given['gy'] = given['gy'].reshape(-1, given['gy'].shape[-1])
    return x.reshape(-1, x.shape[-1]), x.shape[:-1], given


def _plus(a, b):
    return b if a is None else a + b


def relation_linear(adj, x, W, b=None, W_self=None, b_self=None, activation=functions.identity):
    """Map the features of every node by a matrix per relation and sum over its neighbours.

    ``y[i, c] = sum_r sum_j A_r[i, j] (sum_k W[c * R + r, k] x[j, k] + b[c * R + r])``, and with a
    term for the node itself ``+ sum_k W_self[c, k] x[i, k] + b_self[c]``. One node of the
    computational graph, differentiable to any order with respect to all but ``adj``.

    Where ``out_channels < in_channels`` features are mapped first, then summed over neighbours and
    relations in one product; else neighbours are summed first and one GEMM does the rest. The
    results differ by rounding alone.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R), entry (i, j * R + r) is ``A_r[i, j]``.
        x (Variable or array): (n_nodes, in_channels) float16, float32 or float64; where ``adj`` is
            padded to N nodes a graph, also (n_graphs, N, in_channels).
        W (Variable or array): (out_channels * R, in_channels), the relation as the minor index of
            its rows.
        b (Variable or array or None): (out_channels * R,), rows as those of W.
        W_self (Variable or array or None): (out_channels, in_channels).
        b_self (Variable or array or None): (out_channels,).
        activation (callable): of the result: ``chainer.functions.identity`` or ``tanh``.

    Returns:
        Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels); of x's dtype, to which
        parameters of another one are converted.

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
    _check(adj, given)
    if activation not in NODES:
        raise ValueError(
            'activation: expected chainer.functions.identity or tanh, got %r' % (activation,)
        )
    return _apply(adj, given, NODES[activation])


def _check(adj, given):
    if type(adj) is not BatchedCSR:
        raise TypeError(
            'adj: expected a BatchedCSR, got %s; data sets become sparse batches with '
            'converter=chainer_bspmm.concat_mols' % type(adj).__name__
        )
    n_relations = adj.n_relations
    if adj.n_cols != adj.n_rows * n_relations:
        raise ValueError(
            'adj: expected a column for each of its %d rows and %d relations, got %r'
            % (adj.n_rows, n_relations, adj)
        )
    x, W = given['x'], given['W']
    leads = [(adj.n_rows,)]
    if adj.layout == 'padded':
        leads.append((adj.n_graphs, adj.max_rows))
    if x.shape[:-1] not in leads or x.dtype.kind != 'f':
        raise ValueError(
            'x: expected floats of shape %s to go with %r, got %s of shape %s'
            % (
                ' or '.join('(%s, in_channels)' % ', '.join(map(str, lead)) for lead in leads),
                adj,
                x.dtype,
                x.shape,
            )
        )
    if adj.data is not None and adj.data.dtype != x.dtype:
        raise TypeError(
            'x: expected %s as the values of adj, got %s; adj.astype(x.dtype) converts'
            % (adj.data.dtype, x.dtype)
        )
    in_channels = x.shape[-1]
    if W.ndim != 2 or len(W) % n_relations or W.shape[1] != in_channels:
        raise ValueError(
            'W: expected shape (out_channels * %d, %d), a row for each output channel '
            'and relation of adj, got %s' % (n_relations, in_channels, W.shape)
        )
    out_channels = len(W) // n_relations
    shapes = {'b': (len(W),), 'W_self': (out_channels, in_channels), 'b_self': (out_channels,)}
    for name, shape in shapes.items():
        if name in given and given[name].shape != shape:
            raise ValueError(
                '%s: expected shape %s to go with W of shape %s, got %s'
                % (name, shape, W.shape, given[name].shape)
            )
    place = chainer_backend.get_device_from_array(adj.row_offsets)
    for name, array in given.items():
        bare = array.array if isinstance(array, chainer.Variable) else array
        here = chainer_backend.get_device_from_array(bare)
        if here != place:
            raise ValueError(
                '%s: expected on %s with adj, got on %s' % (name, place.name, here.name)
            )
