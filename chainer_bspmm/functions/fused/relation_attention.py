"""The attention of a relational graph convolution, scores to weighted sum, as one node."""

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused import expect
from chainer_bspmm.functions.fused.attention_pattern import attention_pattern
from chainer_bspmm.functions.fused.attention_pattern import slots_as_edges
from chainer_bspmm.functions.fused.dropout_draws import dropout_mask
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.functions.segment import Segments
from chainer_bspmm.functions.segment import segment_sum
from chainer_bspmm.functions.segment_softmax import SegmentSoftmax


class RelationAttention(FusedNode):
    """Inputs m, W, b of :func:`relation_attention`.

    `mask` is what dropout multiplies the weights by, `is_edge` is 0 for entries whose logit
    is 0 for all features, else 1; both (nnz * K,) or None.
    """

    def __init__(self, adj, pattern, n_heads, concat_heads, slope, mask, is_edge):
        self._adj = adj
        self._pattern = pattern
        self._n_heads = n_heads
        self._concat_heads = concat_heads
        self._slope = slope
        self._mask = mask
        self._is_edge = is_edge

    def _output(self, inputs):
        m, W, b = _cast(inputs)
        pattern, adj = self._pattern, self._adj
        n_channels = W.shape[1] // 2
        x = m.reshape(adj.n_cols * self._n_heads, n_channels)
        scores = dot(x, W.reshape(2, n_channels).T)
        scores[:, 0] += b
        logits, self._slopes = _logits(scores, pattern.sources, pattern.receivers, self._slope)
        if self._is_edge is not None:
            logits *= self._is_edge
            self._slopes *= self._is_edge
        self._alpha = backend.segment_softmax(logits[:, None], pattern.segments)
        residual = None
        if pattern.isolated is not None:
            sums = backend.segment_sum(m, adj.row_offsets, adj.max_rows)
            residual = backend.bspmm(pattern.isolated, sums.reshape(-1, n_channels))
        y = backend.bspmm(pattern.product, x, self._weights(), residual)
        if self._concat_heads:
            return y.reshape(adj.n_rows, self._n_heads * n_channels)
        y *= y.dtype.type(1 / self._n_heads)
        return y

    def _weights(self):
        alpha = self._alpha[:, 0]
        return alpha if self._mask is None else alpha * self._mask

    def _gradients(self, inputs, gy, wanted):
        m, W, _ = _cast(inputs)
        xp = chainer_backend.get_array_module(m)
        pattern, adj, n_heads = self._pattern, self._adj, self._n_heads
        n_channels, product = W.shape[1] // 2, self._pattern.product
        x = m.reshape(adj.n_cols * n_heads, n_channels)
        gy = gy.reshape(product.n_rows, n_channels)
        if not self._concat_heads:
            gy = gy * gy.dtype.type(1 / n_heads)
        residual = None
        if pattern.isolated is not None:
            gsums = backend.bspmm(pattern.isolated, gy, trans=True)
            residual = backend.segment_broadcast(
                gsums.reshape(adj.n_graphs, m.shape[1]), adj.row_offsets, adj.n_rows, adj.max_rows
            ).reshape(x.shape)
        gx = backend.bspmm(product, gy, self._weights(), residual, trans=True)
        galpha = backend.bsddmm(product, gy, x)
        if self._mask is not None:
            galpha *= self._mask
        glogits = backend.segment_softmax_grad(self._alpha, galpha[:, None], pattern.segments)
        glogits *= self._slopes[:, None]
        gscores = xp.empty((len(x), 2), x.dtype)
        # The sum over the edges that leave a node is its column's: a product with ones.
        ones = xp.ones((product.n_rows, 1), x.dtype)
        gscores[:, :1] = backend.bspmm(product, ones, glogits[:, 0], trans=True)
        gscores[:, 1] = (
            backend.segment_sum(glogits, pattern.by_receiver, product.max_nnz)
            .reshape(adj.n_rows, n_heads, adj.n_relations)
            .swapaxes(1, 2)
            .ravel()
        )
        gx += dot(gscores, W.reshape(2, n_channels))
        gW, gb = dot(gscores.T, x), backend.row_sum(gscores)[:1]
        return gx.reshape(m.shape), gW.reshape(W.shape), gb

    def _composed(self, m, W, b):
        pattern, adj, n_heads = self._pattern, self._adj, self._n_heads
        n_channels = W.shape[1] // 2
        W, b = (functions.cast(parameter, m.dtype) for parameter in (W, b))
        x = functions.reshape(m, (adj.n_cols * n_heads, n_channels))
        scores = functions.linear(x, functions.reshape(W, (2, n_channels)))
        scores = functions.reshape(scores, (scores.size, 1))
        logits = bspmm(pattern.gathers(adj, n_heads), scores)[:, 0]
        logits += functions.broadcast_to(b, logits.shape)
        logits = functions.leaky_relu(logits, self._slope)
        if self._is_edge is not None:
            logits = logits * self._is_edge
        (alpha,) = SegmentSoftmax(Segments(pattern.segments, len(logits))).apply((logits,))
        if self._mask is not None:
            alpha = alpha * self._mask
        residual = None
        if pattern.isolated is not None:
            sums = segment_sum(adj, m)
            residual = bspmm(
                pattern.isolated, functions.reshape(sums, (pattern.isolated.n_cols, n_channels))
            )
        y = bspmm(pattern.product, x, alpha, residual)
        if self._concat_heads:
            return functions.reshape(y, (adj.n_rows, n_heads * n_channels))
        return y * (1 / n_heads)


def _cast(arrays):
    """Return arrays in the first one's dtype: parameters may have another (mixed precision)."""
    return [array.astype(arrays[0].dtype, copy=False) for array in arrays]


def _logits(scores, sources, receivers, slope):
    """Return ``leaky(scores[source, 0] + scores[receiver, 1])`` of every edge, and its slope."""
    slope = scores.dtype.type(slope)
    if isinstance(scores, numpy.ndarray):
        z = scores[:, 0].take(sources)
        z += scores[:, 1].take(receivers)
        slopes = numpy.where(z > 0, scores.dtype.type(1), slope)
        z *= slopes
        return z, slopes
    kernel = cuda.elementwise(
        'raw T scores, int32 source, int32 receiver, T slope',
        'T z, T slopes',
        """z = scores[2 * source] + scores[2 * receiver + 1];
           slopes = z > (T)0 ? (T)1 : slope;
           z = z * slopes;""",
        'bspmm_attention_logits',
    )
    return kernel(scores, sources, receivers, slope)


def relation_attention(
    adj, m, W, b, n_heads, within=False, concat_heads=False, negative_slope=0.2, dropout_ratio=0.0
):
    """Sum every node's neighbours with weights that it derives from them and itself.

    With node i, relation r, head k, and ``m[i, r, k]`` a vector of C channels: every edge, entry
    (i, j * R + r) of ``adj``, has for every head the logit ``leaky(W[0, :C] . m[j, r, k] +
    W[0, C:] . m[i, r, k] + b)``. Its softmax over the edges of node i, or with ``within`` over
    those of node i in relation r, is alpha; ``y[i, k] = sum over r, j of alpha m[j, r, k]``; the
    result is the mean over k. One node of the computational graph, differentiable to any order.

    If there is no edge to normalise over, the weights are uniform over all slots of the graph: its
    nodes, and in padded layout the rows past them; times the R relations unless ``within``. In
    Chainer Chemistry this is what a softmax over a matrix of masked logits amounts to; here it is a
    mean.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R). An entry is an edge, even if its value is 0; one
            that is stored twice counts twice.
        m (Variable or array): (n_nodes, R * n_heads * C) floats.
        W (Variable or array): (1, 2 * C).
        b (Variable or array): (1,).
        n_heads (int): K.
        within (bool): normalise every relation separately.
        concat_heads (bool): return the heads side by side instead of their mean.
        negative_slope (float): of the leaky rectifier.
        dropout_ratio (float): of the weights, in training; 0 or less means none.

    Returns:
        Variable: (n_nodes, C), or (n_nodes, K * C) with ``concat_heads``; of m's dtype.

    Raises:
        TypeError: ``adj`` is no BatchedCSR. ValueError: it has spare rows or entries, or a shape
        does not fit.

    Note:
        Deterministic except for dropout; does not synchronise. Heads are folded into the matrix,
        which has an entry for each head of an edge: one product does them all, forward and
        backward, with neither a loop nor an array of (edges, heads, C). Dropout in training also
        drops uniform weights one by one. They become entries (with ``within``, most slots
        do), and a device is synchronised once per batch.

    Source:
        Busbridge et al. 2019 (arXiv:1904.05811), equations 6 and 7 there with additive logits;
        Chainer Chemistry 0.7.1, links/update/relgat_update.py.
    """
    expect.relations(adj)
    adj.refuse_spare()
    n_channels = W.shape[-1] // 2
    expected = {
        'W': (W, (1, 2 * n_channels)),
        'b': (b, (1,)),
        'm': (m, (adj.n_rows, adj.n_relations * n_heads * n_channels)),
    }
    expect.shapes('W of shape %s, %d heads and %r' % (W.shape, n_heads, adj), expected)
    mask = is_edge = None
    drops = chainer.config.train and dropout_ratio > 0
    if drops:
        adj, has_edges = slots_as_edges(adj, within)
    pattern = attention_pattern(adj, n_heads, within, concat_heads, m.dtype)
    if drops:
        mask = dropout_mask(m, adj.nnz * n_heads, dropout_ratio)
        is_edge = has_edges[pattern.receivers // n_heads].astype(m.dtype)
    node = RelationAttention(adj, pattern, n_heads, concat_heads, negative_slope, mask, is_edge)
    return node.apply((m, W, b))[0]
