"""Softmax over the entries of every row of a sparse matrix, attention's normalisation."""

from chainer import function_node

from chainer_bspmm import backend
from chainer_bspmm.functions.node import apply_untracked


class SegmentSoftmax(function_node.FunctionNode):
    """y of :func:`segment_softmax`; `offsets` (n_segments + 1,) say where the segments start."""

    def __init__(self, offsets):
        self._offsets = offsets

    def forward(self, inputs):
        self.retain_outputs((0,))
        (x,) = inputs
        return (backend.segment_softmax(_columns(x), self._offsets).reshape(x.shape),)

    def backward(self, indexes, grad_outputs):
        (y,) = self.get_retained_outputs()
        return apply_untracked(SegmentSoftmaxGrad(self._offsets), (y, grad_outputs[0]))


class SegmentSoftmaxGrad(function_node.FunctionNode):
    """Compute ``gx = y (gy - total(y gy))``, total being the sum over a row's own segment."""

    def __init__(self, offsets):
        self._offsets = offsets

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        y, gy = inputs
        gx = backend.segment_softmax_grad(_columns(y), _columns(gy), self._offsets)
        return (gx.reshape(y.shape),)

    def backward(self, indexes, grad_outputs):
        y, gy = self.get_retained_inputs()
        (ggx,) = grad_outputs

        def total(a):
            return SegmentTotal(self._offsets).apply((a,))[0]

        gradients = []
        if 0 in indexes:
            gradients.append(ggx * (gy - total(y * gy)) - gy * total(y * ggx))
        if 1 in indexes:
            gradients += SegmentSoftmaxGrad(self._offsets).apply((y, ggx))
        return tuple(gradients)


class SegmentTotal(function_node.FunctionNode):
    """Give every row the sum over its segment. A symmetric map: its own gradient."""

    def __init__(self, offsets):
        self._offsets = offsets

    def forward(self, inputs):
        self.retain_inputs(())
        (x,) = inputs
        sums = backend.segment_sum(_columns(x), self._offsets)
        return (backend.segment_broadcast(sums, self._offsets, len(x)).reshape(x.shape),)

    def backward(self, indexes, grad_outputs):
        return SegmentTotal(self._offsets).apply(grad_outputs)


def _columns(x):
    return x if x.ndim == 2 else x[:, None]


def segment_softmax(adj, x):
    """Normalise values of the entries over every row: ``y[k] = exp(x[k]) / sum_l exp(x[l])``.

    l runs over the entries of the row that k is in; a row without entries has nothing to
    normalise. Differentiable to any order.

    Args:
        adj (BatchedCSR): the pattern; its values are not used.
        x (Variable or array): (nnz,) or (nnz, n_B) float16, float32 or float64, in the order of
            adj's entries; columns are normalised apart.

    Returns:
        Variable: of x's shape and dtype. The values of a row sum to 1 up to their own rounding,
        however large x is: the row's maximum is subtracted first. Computed in float64.
        A NaN or +inf, or a row of nothing but -inf, makes NaN of its row and column alone.

    Raises:
        TypeError, ValueError: ``adj`` is no BatchedCSR; shape, dtype or device of ``x`` do not fit.

    Note:
        Deterministic; does not synchronise. One launch forward and one backward.

    Source:
        Velickovic et al. 2017 (arXiv:1710.10903), equation 2; ``kernels/segment_softmax.cu``.

    Example:
        >>> import numpy
        >>> import chainer_bspmm
        >>> adj = chainer_bspmm.BatchedCSR.from_matrices([numpy.array([[1., 1.], [0., 1.]])])
        >>> chainer_bspmm.functions.segment_softmax(adj, numpy.array([5., 5., -7.])).array
        array([0.5, 0.5, 1. ])
    """
    backend.check.compressed(adj)
    adj.refuse_spare()
    if x.ndim not in (1, 2) or len(x) != adj.nnz:
        raise ValueError(
            'x: expected shape (%d,) or (%d, n_B), a row for each entry of adj, '
            'got %s' % (adj.nnz, adj.nnz, x.shape)
        )
    return SegmentSoftmax(adj.indptr).apply((x,))[0]
