"""Linear layers whose weight depends on the degree of the node, all of them in one node."""

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import function_node
from chainer import functions
from chainer.backends import cuda
from chainer.functions.activation.sigmoid import SigmoidGrad

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.fused.concat import concat
from chainer_bspmm.functions.node import apply_untracked
from chainer_bspmm.functions.row_sum import RowSum
from chainer_bspmm.functions.fused.sigmoid import sigmoid


class Degrees:
    """Which nodes have degree 1, 2, ..., n_types; made once a batch by :func:`degrees_of`.

    Attributes:
        is_type (array): (n_nodes, n_types) bool; all False in a row of any other degree.
        rows (list of array): on the host, the rows of each type; None on a GPU, where their number
            is not known without synchronising.
    """

    def __init__(self, is_type):
        self.is_type = is_type
        self.rows = None
        if isinstance(is_type, numpy.ndarray):
            self.rows = [numpy.flatnonzero(column) for column in is_type.T]


def degrees_of(adj, n_types):
    """Return the `Degrees` of a batch's nodes, kept with it.

    A node's degree is the sum of its column of the matrix, as in Chainer Chemistry: in a matrix
    that is not symmetric that is another one than the sum of its row.

    Args:
        adj (BatchedCSR or BatchedCOO): (n_nodes, n_nodes), on any device.
        n_types (int): degrees from 1 to n_types count.

    Returns:
        Degrees: on the device of ``adj``.

    Raises:
        ValueError: the matrix is not square, as with several relations.

    Note:
        One product with the transposed matrix at the first call; does not synchronise.
    """
    if adj.n_rows != adj.n_cols:
        raise ValueError('adj: expected a column for each node to take degrees from, got %r' % adj)
    key = 'degrees', n_types
    if key not in adj._cache:
        xp = adj.xp
        with cuda.get_device_from_array(adj.row_offsets):
            ones = xp.ones((adj.n_rows, 1), numpy.float32 if adj.dtype is None else adj.dtype)
            degree = backend.bspmm(adj, ones, trans=True)
            adj._cache[key] = Degrees(degree == xp.arange(1, n_types + 1, dtype=ones.dtype))
    return adj._cache[key]


# On the host the rows of one degree are gathered and multiplied by their own weight: the fewest
# operations. On a GPU, which would have to be asked how many rows those are, every row is expanded
# to one block a degree, all zeros but its own, and multiplied by the weights on top of each other:
# n_types times the operations, but one product of a fixed shape.


def _expand(x, is_type):
    """Return (n_nodes, n_types * n_in): x[i] in the block of its degree, zeros elsewhere."""
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
    """Compute ``y[i] = W_d x[i]`` (trans: ``x[i] W_d``) where d is the degree; 0 if there is none.

    weights: n_types arrays (n_out, n_in).
    """
    if degrees.rows is None:
        stacked = concat(weights, axis=0 if trans else 1)
        y = dot(_expand(x, degrees.is_type), stacked if trans else stacked.T)
        return y.astype(x.dtype, copy=False)
    y = numpy.zeros((len(x), weights[0].shape[1 if trans else 0]), x.dtype)
    for rows, weight in zip(degrees.rows, weights):
        if rows.size:
            y[rows] = x[rows].dot(weight if trans else weight.T)
    return y


def _weight_gradients(degrees, x, gy, dtype):
    """Compute ``gW_d = sum of gy[i]^T x[i]`` over the nodes i of degree d, n_types arrays."""
    if degrees.rows is None:
        stacked = dot(_expand(gy, degrees.is_type).T, x).astype(dtype, copy=False)
        return tuple(stacked.reshape(degrees.is_type.shape[1], gy.shape[1], x.shape[1]))
    return tuple(gy[rows].T.dot(x[rows]).astype(dtype, copy=False) for rows in degrees.rows)


class DegreeProduct(function_node.FunctionNode):
    """Inputs x, then the weights; no bias."""

    def __init__(self, degrees, trans=False):
        self._degrees = degrees
        self._trans = trans

    def forward(self, inputs):
        x, *weights = inputs
        self.retain_inputs(tuple(range(len(inputs))))
        return (_product(self._degrees, x, weights, self._trans),)

    def backward(self, indexes, grad_outputs):
        return _product_gradients(
            self._degrees, self.get_retained_inputs(), grad_outputs[0], indexes, self._trans
        )


class DegreeWeightGradients(function_node.FunctionNode):
    """Inputs x and gy; outputs the gradient of every weight."""

    def __init__(self, degrees, dtype):
        self._degrees = degrees
        self._dtype = dtype

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        return _weight_gradients(self._degrees, *inputs, self._dtype)

    def backward(self, indexes, grad_outputs):
        x, gy = self.get_retained_inputs()
        xp = chainer_backend.get_array_module(x)
        shape = gy.shape[1], x.shape[1]
        weights = [
            xp.zeros(shape, self._dtype) if weight is None else weight for weight in grad_outputs
        ]
        pairs = (gy, True), (x, False)
        return tuple(
            DegreeProduct(self._degrees, trans).apply((given, *weights))[0]
            for given, trans in map(pairs.__getitem__, indexes)
        )


def _product_gradients(degrees, inputs, gy, indexes, trans=False):
    """Return the gradients of `DegreeProduct` for `indexes`, as Variables."""
    x, *weights = inputs
    gradients = []
    if 0 in indexes:
        gradients += apply_untracked(DegreeProduct(degrees, not trans), (gy, *weights))
    if len(indexes) > len(gradients):
        pair = (gy, x) if trans else (x, gy)
        all_weights = apply_untracked(DegreeWeightGradients(degrees, weights[0].dtype), pair)
        gradients += [all_weights[index - 1] for index in indexes if index]
    return tuple(gradients)


class DegreeLinearSigmoid(function_node.FunctionNode):
    """Inputs x, the weights, then as many biases."""

    def __init__(self, degrees):
        self._degrees = degrees

    def forward(self, inputs):
        n_types = len(inputs) // 2
        x, weights, biases = inputs[0], inputs[1 : n_types + 1], inputs[n_types + 1 :]
        self.retain_inputs(tuple(range(n_types + 1)))
        self.retain_outputs((0,))
        y = _product(self._degrees, x, weights, False)
        bias = concat(biases).reshape(n_types, y.shape[1]).sum(axis=0).astype(x.dtype, copy=False)
        return (sigmoid(y, bias),)

    def backward(self, indexes, grad_outputs):
        n_types = len(self.inputs) // 2
        (y,) = self.get_retained_outputs()
        (gy,) = apply_untracked(SigmoidGrad((None,)), (y, grad_outputs[0]))
        gradients = _product_gradients(
            self._degrees,
            self.get_retained_inputs(),
            gy,
            [index for index in indexes if index <= n_types],
        )
        n_biases = len(indexes) - len(gradients)
        if n_biases:
            (bias,) = apply_untracked(RowSum(), (gy,))
            gradients += _copies(functions.cast(bias, self.inputs[-1].dtype), n_biases)
        return gradients


def _copies(x, n):
    """Return n times x, each in memory of its own, which optimizer hooks write to."""
    if chainer.config.enable_backprop:
        rows = functions.tile(x, (n, 1))
        return tuple(rows[i] for i in range(n))
    rows = x.xp.empty((n, x.size), x.dtype)
    rows[...] = x.array
    return tuple(chainer.Variable(row, requires_grad=False) for row in rows)


def degree_linear_sigmoid(degrees, x, weights, biases):
    """Compute ``y[i] = sigmoid(W_d x[i] + sum over all e of b_e)``, d the degree of node i.

    A node of a degree without a weight gets ``sigmoid(sum of all biases)``. That every bias is
    added to every node, whatever its degree, is what Chainer Chemistry does: it masks the input of
    each of its linear layers, not the output. Differentiable to any order.

    Args:
        degrees (Degrees): of the batch, for as many types as there are weights.
        x (Variable or array): (n_nodes, n_in) floats.
        weights (sequence of Variable or array): (n_out, n_in) each, for degree 1, 2, ...
        biases (sequence of Variable or array): (n_out,) each, as many.

    Returns:
        Variable: (n_nodes, n_out), of x's dtype.

    Raises:
        ValueError: ``x`` is not two-dimensional with a row for each node, or the number of weights
            or biases is another one than that of the degrees.

    Note:
        Does not synchronise. Deterministic.
    """
    n_nodes, n_types = degrees.is_type.shape
    if x.ndim != 2 or len(x) != n_nodes:
        raise ValueError(
            'x: expected shape (%d, n_in), a row for each node, got %s' % (n_nodes, x.shape)
        )
    for name, given in (('weights', weights), ('biases', biases)):
        if len(given) != n_types:
            raise ValueError(
                '%s: expected one for each of %d degrees, got %d' % (name, n_types, len(given))
            )
    return DegreeLinearSigmoid(degrees).apply((x, *weights, *biases))[0]
