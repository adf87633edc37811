"""Linear layers whose weight depends on the degree of the node, all of them in one node."""

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda
from chainer.functions.activation.sigmoid import SigmoidGrad

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.fused.arrays import concat
from chainer_bspmm.functions.fused.arrays import sigmoid
from chainer_bspmm.functions.node import FusedNode


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
    that is not symmetric this differs from the sum of its row.

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

    def find():
        ones = adj.xp.ones((adj.n_rows, 1), numpy.float32 if adj.dtype is None else adj.dtype)
        degree = backend.bspmm(adj, ones, trans=True)
        return Degrees(degree == adj.xp.arange(1, n_types + 1, dtype=ones.dtype))

    return adj.cached(('degrees', n_types), find)


# On the host the rows of one degree are gathered and multiplied by their own weight: the fewest
# operations. On a GPU the number of those rows is not known on the host, so every row is expanded
# to one block per degree, zero except for its own, and multiplied by the stacked weights:
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


class DegreeLinearSigmoid(FusedNode):
    """Inputs x, the weights, then as many biases."""

    def __init__(self, degrees):
        self._degrees = degrees

    def _output(self, inputs):
        x, weights, biases = _split(inputs)
        y = _product(self._degrees, x, weights, False)
        bias = (
            concat(biases).reshape(len(biases), y.shape[1]).sum(axis=0).astype(x.dtype, copy=False)
        )
        self._y = sigmoid(y, bias)
        return self._y

    def _gradients(self, inputs, gy, wanted):
        x, weights, biases = _split(inputs)
        (gy,) = SigmoidGrad((None,)).forward((self._y, gy))
        n_types, gradients = len(weights), {}
        if 0 in wanted:
            gradients[0] = _product(self._degrees, gy, weights, True)
        if set(range(1, n_types + 1)) & set(wanted):
            by_weights = _weight_gradients(self._degrees, x, gy, weights[0].dtype)
            gradients.update(enumerate(by_weights, 1))
        if wanted[-1] > n_types:
            # Equal, but in an array for each bias: optimizer hooks write to them.
            rows = chainer_backend.get_array_module(gy).empty(
                (n_types, gy.shape[1]), biases[0].dtype
            )
            rows[...] = backend.row_sum(gy)
            gradients.update(enumerate(rows, n_types + 1))
        return gradients

    def _composed(self, *inputs):
        """As in Chainer Chemistry: a linear layer a degree, its input masked."""
        x, weights, biases = _split(inputs)
        zero = x.xp.zeros((), x.dtype)
        total = 0
        for is_type, W, b in zip(self._degrees.is_type.T, weights, biases):
            total += functions.linear(
                functions.where(is_type[:, None], x, zero), W, functions.cast(b, x.dtype)
            )
        return functions.sigmoid(total)


def _split(inputs):
    n_types = len(inputs) // 2
    return inputs[0], inputs[1 : n_types + 1], inputs[n_types + 1 :]


def degree_linear_sigmoid(degrees, x, weights, biases):
    """Compute ``y[i] = sigmoid(W_d x[i] + sum over all e of b_e)``, d the degree of node i.

    A node of a degree without a weight gets ``sigmoid(sum of all biases)``. That every bias is
    added to every node of any degree is what Chainer Chemistry does: it masks the input of
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
            or biases differs from that of the degrees.

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
