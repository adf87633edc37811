"""Two linear maps of the same rows, one of which gates the other, as one node."""

import numpy

from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.cuda.partial_sums import shared
from chainer_bspmm.ops.elementwise import concat, SIGMOID, sigmoid
from chainer_bspmm.ops.gates.launches import gated_step_backward, gated_step_forward
from chainer_bspmm.ops.layer_end import column_sums, end_forward
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.sparse import check

ACTIVATIONS = (functions.identity, functions.tanh)


class GatedLinear(FusedNode):
    """Node of :func:`gated_linear`.

    Inputs are h and, if `n_parts` is 2, h0, then W_gate, W_value and, if there are biases, b_gate,
    b_value.
    """

    def __init__(self, n_parts, activation):
        self._n_parts = n_parts
        self._activation = activation
        self._is_tanh = activation is functions.tanh

    def _output(self, inputs):
        dtype = inputs[0].dtype
        parts = inputs[: self._n_parts]
        parameters = inputs[self._n_parts :]
        whole = gated_step_forward(*self._operands(inputs), is_tanh=self._is_tanh)
        self._is_whole = whole is not None
        if self._is_whole:
            y, self._saved = whole
            return y
        x = parts[0] if len(parts) == 1 else concat(parts, axis=1)
        both = dot(x, self._joined(inputs).T)
        if len(parameters) == 4:
            end_forward(both, concat(parameters[2:]).astype(dtype, copy=False), 'identity')
        *maps, y = _gated(both, self._is_tanh)
        self._saved = x, maps
        return y

    def _joined(self, inputs):
        """Return the weights of both maps, one below the other, in the dtype of h."""
        W_gate, W_value = inputs[self._n_parts : self._n_parts + 2]
        return concat([W_gate, W_value]).astype(inputs[0].dtype, copy=False)

    def _operands(self, inputs):
        """Return the rows, no state, and the pairs of parameters for `gated_step_forward`."""
        x = inputs[0]
        other = inputs[1] if self._n_parts == 2 else None
        parameters = [array.astype(x.dtype, copy=False) for array in inputs[self._n_parts :]]
        W_gate, W_value, *biases = parameters
        b_gate, b_value = biases or (None, None)
        return x, other, None, [(W_value, b_value), (W_gate, b_gate)]

    def _gradients(self, inputs, gy, indexes):
        first = self._n_parts
        if self._is_whole:
            dtypes = [inputs[i].dtype if i in indexes else None for i in range(first, len(inputs))]
            W_gate, W_value, *biases = dtypes
            b_gate, b_value = biases or (None, None)
            x, other, state, pairs = self._operands(inputs)
            gx, g_other, _, (gW_value, gb_value, gW_gate, gb_gate) = gated_step_backward(
                x,
                other,
                state,
                pairs,
                self._saved,
                gy,
                is_tanh=self._is_tanh,
                dtypes=[W_value, b_value, W_gate, b_gate],
            )
            by_parts = [gx] if other is None else [gx, g_other]
            return [*by_parts, gW_gate, gW_value, gb_gate, gb_value]
        x, maps = self._saved
        # Weights are joined anew, because Chainer's own nodes, too, use their values of now.
        W = self._joined(inputs)
        g = _gated_gradient(gy, *maps, is_tanh=self._is_tanh)
        gradients = {}
        start = 0
        for i, part in enumerate(inputs[:first]):
            end = start + part.shape[1]
            if i in indexes:
                gradients[i] = dot(g, W[:, start:end])
            start = end
        if {first, first + 1} & set(indexes):
            gradients.update(enumerate(shared(dot(g.T, x), 2), first))
        if indexes[-1] >= first + 2:
            gradients.update(enumerate(column_sums(g, 2), first + 2))
        return gradients

    def _composed(self, *inputs):
        x = functions.concat(inputs[: self._n_parts], axis=1)
        parameters = [functions.cast(array, x.dtype) for array in inputs[self._n_parts :]]
        biases = parameters[2:] or (None, None)
        gate, value = (functions.linear(x, W, b) for W, b in zip(parameters[:2], biases))
        return functions.sigmoid(gate) * self._activation(value)


def _gated(both, is_tanh):
    """Return what :func:`_gated_gradient` needs, one or two arrays, and the gated rows.

    `both`: (n_rows, 2 * n_out), the results of the two maps side by side. On a GPU, where memory is
    slower than arithmetic, only `both` is kept, and the gradient calculates the gate again. On a
    host the gate and the activated value are kept.
    """
    n = both.shape[1] // 2
    if not launch.on_gpu(both):
        # NumPy is several times slower on blocks of columns than on arrays without gaps.
        gate = numpy.ascontiguousarray(both[:, :n])
        value = numpy.ascontiguousarray(both[:, n:])
        sigmoid(gate)
        if is_tanh:
            numpy.tanh(value, out=value)
        return gate, value, gate * value
    y = cuda.cupy.empty((len(both), n), both.dtype)
    cuda.elementwise(
        'raw T both, int32 n',
        'T y',
        _gate_and_value(is_tanh) + 'y = gate * value',
        'bspmm_gated',
        preamble=SIGMOID,
    )(both, n, y)
    return both, y


def _gate_and_value(is_tanh):
    """Return code that calculates the gate and the activated value of element i of the result."""
    value = 'tanh(both[start + n])' if is_tanh else 'both[start + n]'
    return (
        """
        const ptrdiff_t start = i / n * 2 * n + i %% n;
        const T gate = SIGMOID(both[start]);
        const T value = %s;
        """
        % value
    )


def _gated_gradient(gy, both_or_gate, value=None, *, is_tanh):
    """Return the gradient with respect to the results of the two maps, side by side."""
    n_rows, n = gy.shape
    if value is not None:
        gate = both_or_gate
        g_value = gy * gate
        g_gate = 1 - gate
        g_gate *= value
        g_gate *= g_value
        if is_tanh:
            g_value *= 1 - value * value
        return numpy.concatenate([g_gate, g_value], axis=1)
    g = cuda.cupy.empty((n_rows, 2 * n), gy.dtype)
    of_value = 'by_value * ((T)1 - value * value)' if is_tanh else 'by_value'
    cuda.elementwise(
        'T gy, raw T both, int32 n',
        'raw T g',
        _gate_and_value(is_tanh)
        + """
        const T by_value = gy * gate;
        g[start] = by_value * value * ((T)1 - gate);
        g[start + n] = %s"""
        % of_value,
        'bspmm_gated_gradient',
        preamble=SIGMOID,
    )(gy, both_or_gate, n, g)
    return g


def gated_linear(h, h0, gate, value, activation=functions.identity):
    """Compute ``y[i] = sigmoid(W_g x[i] + b_g) * activation(W_v x[i] + b_v)`` in one node.

    x[i] is h[i], followed by h0[i] unless h0 is None. `gate` and `value` are pairs of W (n_out,
    n_in) and b, which may be None in both. Both maps are one GEMM; on a GPU everything is one
    kernel, unless the weights do not fit or cuBLAS is faster.
    """
    if activation not in ACTIVATIONS:
        text = 'activation: expected chainer.functions.identity or tanh, got %r'
        raise ValueError(text % (activation,))
    if (gate[1] is None) != (value[1] is None):
        raise ValueError('gate, value: expected a bias in both or in none')
    check.floating('h', h)
    parts = [h]
    if h0 is not None:
        check.floating('h0', h0)
        if h0.shape[:1] != h.shape[:1]:
            text = 'h0: expected a row for each row of h, got shapes %s and %s'
            raise ValueError(text % (h0.shape, h.shape))
        parts.append(h0)
    n_out = len(gate[0])
    n_in = sum([part.shape[1] for part in parts])
    expected = {
        'gate[0]': (gate[0], (n_out, n_in)),
        'gate[1]': (gate[1], (n_out,)),
        'value[0]': (value[0], (n_out, n_in)),
        'value[1]': (value[1], (n_out,)),
    }
    check.shapes('h and h0 of %d columns in all' % n_in, expected)
    inputs = [*parts, gate[0], value[0]]
    if gate[1] is not None:
        inputs += [gate[1], value[1]]
    return GatedLinear(len(parts), activation).apply(inputs)[0]
