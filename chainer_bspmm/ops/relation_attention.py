"""The attention of a relational graph convolution, from scores to weighted sum, as one node."""

import numpy

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.ops.attention_pattern import attention_pattern
from chainer_bspmm.ops.bspmm import bsddmm_forward, bspmm, bspmm_forward
from chainer_bspmm.ops.dropout import dropout_mask
from chainer_bspmm.ops.node import FusedNode
from chainer_bspmm.ops.segment_softmax import segment_softmax_backward, segment_softmax_forward
from chainer_bspmm.ops.segment_softmax import SegmentSoftmax
from chainer_bspmm.ops.segments import row_sum, segment_broadcast_forward, segment_sum
from chainer_bspmm.ops.segments import segment_sum_forward, Segments
from chainer_bspmm.sparse import check
from chainer_bspmm.sparse.batched_csr import check_relations


class RelationAttention(FusedNode):
    """Node of :func:`relation_attention`; inputs are m, W, b.

    Dropout multiplies the weights of entries by `edge_mask`, (nnz * K,). Rows without edges weight
    all rows of features of their graph; these weights are multiplied by `slot_mask`,
    (n_nodes * R * K,). Without dropout both are None.
    """

    def __init__(self, adj, pattern, n_heads, concat_heads, slope, edge_mask, slot_mask):
        self._adj = adj
        self._pattern = pattern
        self._n_heads = n_heads
        self._concat_heads = concat_heads
        self._slope = slope
        self._edge_mask = edge_mask
        self._slot_mask = slot_mask

    def _output(self, inputs):
        m, W, b = _cast(inputs)
        pattern, adj = self._pattern, self._adj
        n_channels = W.shape[1] // 2
        x = m.reshape(adj.n_cols * self._n_heads, n_channels)
        scores = dot(x, W.reshape(2, n_channels).T)
        slope = scores.dtype.type(self._slope)
        logits, self._slopes = _logits(scores, pattern.sources, pattern.receivers, b, slope)
        self._alpha = segment_softmax_forward(logits[:, None], pattern.segments)
        residual = None
        if pattern.isolated is not None:
            slots = self._dropped(x).reshape(m.shape)
            sums = segment_sum_forward(slots, adj.row_offsets, adj.max_rows, adj.row_weights)
            residual = bspmm_forward(
                pattern.isolated, sums.reshape(pattern.isolated.n_cols, n_channels)
            )
        y = bspmm_forward(pattern.product, x, self._weights(self._alpha[:, 0]), residual)
        if self._concat_heads:
            return y.reshape(adj.n_rows, self._n_heads * n_channels)
        y *= y.dtype.type(1 / self._n_heads)
        return y

    def _weights(self, alpha):
        """Return the entries' alpha, (nnz * K,), after dropout."""
        return alpha if self._edge_mask is None else alpha * self._edge_mask

    def _dropped(self, x):
        """Return features, (n_nodes * R * K, C), after dropout, for rows without edges."""
        return x if self._slot_mask is None else x * self._slot_mask[:, None]

    def _gradients(self, inputs, gy, indexes):
        m, W, _ = _cast(inputs)
        pattern, adj, n_heads = self._pattern, self._adj, self._n_heads
        n_channels = W.shape[1] // 2
        product = self._pattern.product
        x = m.reshape(adj.n_cols * n_heads, n_channels)
        gy = gy.reshape(product.n_rows, n_channels)
        if not self._concat_heads:
            gy = gy * gy.dtype.type(1 / n_heads)
        residual = None
        if pattern.isolated is not None:
            gsums = bspmm_forward(pattern.isolated, gy, trans=True)
            gsums = gsums.reshape(adj.n_graphs, m.shape[1])
            gslots = segment_broadcast_forward(
                gsums,
                adj.row_offsets,
                n_rows=adj.n_rows,
                max_rows=adj.max_rows,
                weights=adj.row_weights,
            )
            residual = self._dropped(gslots.reshape(x.shape))
        gx = bspmm_forward(product, gy, self._weights(self._alpha[:, 0]), residual, trans=True)
        galpha = self._weights(bsddmm_forward(product, gy, x))
        glogits = segment_softmax_backward(self._alpha, galpha[:, None], pattern.segments)
        gscores = adj.xp.empty((len(x), 2), x.dtype)
        _score_gradients(glogits[:, 0], self._slopes, pattern, adj.n_relations, n_heads, gscores)
        gx += dot(gscores, W.reshape(2, n_channels))
        # Each column of gscores adds up to the gradient of b. The receivers' column is summed,
        # because its terms have already cancelled within each row.
        gW = dot(gscores.T, x)
        gb = row_sum(gscores)[1:]
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
        (alpha,) = SegmentSoftmax(Segments(pattern.segments, len(logits))).apply((logits,))
        alpha = self._weights(alpha)
        residual = None
        if pattern.isolated is not None:
            sums = segment_sum(adj, functions.reshape(self._dropped(x), m.shape))
            residual = bspmm(
                pattern.isolated, functions.reshape(sums, (pattern.isolated.n_cols, n_channels))
            )
        y = bspmm(pattern.product, x, alpha, residual)
        if self._concat_heads:
            return functions.reshape(y, (adj.n_rows, n_heads * n_channels))
        return y * (1 / n_heads)


def _cast(arrays):
    """Return arrays in the first one's dtype; with mixed precision parameters have another."""
    return [array.astype(arrays[0].dtype, copy=False) for array in arrays]


def _logits(scores, sources, receivers, b, slope):
    """Return ``leaky(scores[source, 0] + scores[receiver, 1] + b)`` of all edges, and slopes."""
    if not launch.on_gpu(scores):
        z = scores[:, 0].take(sources)
        z += scores[:, 1].take(receivers)
        z += b
        slopes = numpy.where(z > 0, scores.dtype.type(1), slope)
        z *= slopes
        return z, slopes
    return cuda.elementwise(
        'raw T scores, int32 source, int32 receiver, T b, T slope',
        'T z, T slopes',
        """z = scores[2 * source] + scores[2 * receiver + 1] + b;
           slopes = z > (T)0 ? (T)1 : slope;
           z = z * slopes;""",
        'bspmm_attention_logits',
    )(scores, sources, receivers, b, slope)


def _score_gradients(glogits, slopes, pattern, n_relations, n_heads, gscores):
    """Write the gradients of the two scores of every row of features to gscores, (n_rows, 2)."""
    if not launch.on_gpu(glogits):
        by_entry = glogits * slopes
        n_rows = len(gscores)
        gscores[:, 0] = numpy.bincount(pattern.sources, by_entry, n_rows)
        gscores[:, 1] = numpy.bincount(pattern.receivers, by_entry, n_rows)
        return
    kernel = cuda.elementwise(
        'raw T glogits, raw T slopes, raw I starts, raw I order, raw I by_receiver, '
        'int32 n_relations, int32 n_heads',
        'T of_source, T of_receiver',
        """
        double sum = 0;
        for (int k = starts[i]; k < starts[i + 1]; ++k)
            sum += (double)glogits[order[k]] * (double)slopes[order[k]];
        of_source = (T)sum;
        const int head = i % n_heads, relation = i / n_heads % n_relations;
        const int node = i / n_heads / n_relations;
        const int at = (node * n_heads + head) * n_relations + relation;
        sum = 0;
        for (int k = by_receiver[at]; k < by_receiver[at + 1]; ++k)
            sum += (double)glogits[k] * (double)slopes[k];
        of_receiver = (T)sum;""",
        'bspmm_attention_score_gradients',
    )
    product, by_receiver = pattern.product, pattern.by_receiver
    tables = product.T.indptr, product.transpose_order, by_receiver, n_relations, n_heads
    kernel(glogits, slopes, *tables, gscores[:, 0], gscores[:, 1])


def relation_attention(
    adj, m, W, b, n_heads, within=False, concat_heads=False, negative_slope=0.2, dropout_ratio=0.0
):
    """Sum every node's neighbours with attention weights.

    ``m``, (n_nodes, R * n_heads * C), has a vector ``m[i, r, k]`` for node i, relation r and head
    k. Every edge, entry (i, j * R + r) of ``adj``, has for every head the logit ``leaky(W[0, :C] .
    m[j, r, k] + W[0, C:] . m[i, r, k] + b)``. The weights alpha are its softmax over the edges of
    node i, or with ``within`` over the edges of node i in relation r. ``y[i, k] = sum over r, j of
    alpha m[j, r, k]``. The result is the mean of y over k, (n_nodes, C), or with ``concat_heads``
    all k side by side. An entry is an edge even if its value is 0. An entry that is stored twice
    counts twice.

    If a node has no edges to normalise over, its weights are uniform over all slots of the graph.
    Every row of the graph is ``adj.row_weights`` slots in each of the R relations. With ``within``,
    only the slots of one relation count. Chainer Chemistry gets the same result from a softmax over
    masked logits.

    Dropout in training drops weights one by one, as in Chainer Chemistry, with two exceptions. All
    rows without edges of a graph share a draw for each slot and head, and a row that stands for
    several nodes is dropped for all of them or for none.

    It is one node, differentiable to any order. Heads are folded into the matrix, which has an
    entry for each head of an edge, so that one product covers all heads, without an array of
    (edges, heads, C).
    """
    check_relations(adj)
    check.floats('m', m, adj)
    n_channels = W.shape[-1] // 2
    expected = {
        'W': (W, (1, 2 * n_channels)),
        'b': (b, (1,)),
        'm': (m, (adj.n_rows, adj.n_relations * n_heads * n_channels)),
    }
    check.shapes('W of shape %s, %d heads and %r' % (W.shape, n_heads, adj), expected)
    if chainer.config.train and not dropout_ratio < 1:
        raise ValueError('dropout_ratio: expected below 1, got %r' % dropout_ratio)
    pattern = attention_pattern(adj, n_heads, within, concat_heads, m.dtype)
    edge_mask = slot_mask = None
    if chainer.config.train and dropout_ratio > 0:
        # Two masks are drawn separately, because the second one must not depend on the number of
        # spare entries.
        edge_mask = dropout_mask(m, pattern.product.nnz, dropout_ratio)
        if pattern.isolated is not None:
            slot_mask = dropout_mask(m, adj.n_cols * n_heads, dropout_ratio)
    node = RelationAttention(
        adj,
        pattern,
        n_heads=n_heads,
        concat_heads=concat_heads,
        slope=negative_slope,
        edge_mask=edge_mask,
        slot_mask=slot_mask,
    )
    return node.apply((m, W, b))[0]
