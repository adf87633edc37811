"""Feature-wise linear modulation of the messages along edges, with its linear maps, as one node."""

import numpy

from chainer import backend as chainer_backend
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused import expect
from chainer_bspmm.functions.fused.arrays import by_channel
from chainer_bspmm.functions.fused.arrays import by_relation
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.sparse.edges import edges_of


class EdgeFiLM(FusedNode):
    """Inputs x, W, W_g of :func:`edge_film`."""

    def __init__(self, adj):
        self._edges = edges_of(adj)
        self._n_relations = adj.n_relations

    def _output(self, inputs):
        x, W, W_g = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        # Row i * R + r: the message of node i in relation r, and the gamma and beta that it
        # receives with.
        messages, film = (
            dot(x, by_relation(weight, self._n_relations).T).reshape(
                len(x) * self._n_relations, len(weight) // self._n_relations
            )
            for weight in (W, W_g)
        )
        self._kept = x, messages, film
        return _modulated(messages, film, self._edges.sources, self._edges.receivers)

    def _gradients(self, inputs, gz, wanted):
        x, messages, film = self._kept
        xp = chainer_backend.get_array_module(x)
        edges, n_channels, n_relations = self._edges, gz.shape[1], self._n_relations
        # By gamma and beta, columns as those of `film`.
        both = xp.concatenate((gz * messages[edges.sources], gz), axis=1)
        gfilm = backend.segment_sum(both, edges.by_receiver, edges.from_source.max_nnz)
        gmessages = backend.bspmm(
            edges.from_source, gz * film[edges.receivers, :n_channels], trans=True
        )
        gx, weights = None, []
        for g, weight in ((gmessages, inputs[1]), (gfilm, inputs[2])):
            g = g.reshape(len(x), len(weight))
            if 0 in wanted:
                by_x = dot(g, by_relation(weight.astype(x.dtype, copy=False), n_relations))
                gx = by_x if gx is None else gx + by_x
            weights.append(by_channel(dot(g.T, x), n_relations))
        return gx, *weights

    def _composed(self, x, W, W_g):
        edges, n_relations = self._edges, self._n_relations
        gathered = []
        for weight, matrix in ((W, edges.from_source), (W_g, edges.from_receiver)):
            rows = functions.linear(x, by_relation(functions.cast(weight, x.dtype), n_relations))
            rows = functions.reshape(rows, (matrix.n_cols, len(weight) // n_relations))
            gathered.append(bspmm(matrix, rows))
        messages, film = gathered
        n_channels = messages.shape[1]
        return film[:, :n_channels] * messages + film[:, n_channels:]


def _modulated(messages, film, sources, receivers):
    """Return ``gamma[receiver] * messages[source] + beta[receiver]`` of every edge, (nnz, C)."""
    n_channels = messages.shape[1]
    if isinstance(messages, numpy.ndarray):
        film = film[receivers]
        z = messages[sources]
        z *= film[:, :n_channels]
        z += film[:, n_channels:]
        return z
    kernel = cuda.elementwise(
        'raw T messages, raw T film, int32 source, int32 receiver, int32 channel, int32 n_channels',
        'T z',
        """const ptrdiff_t from = (ptrdiff_t)source * n_channels + channel;
           const ptrdiff_t to = (ptrdiff_t)receiver * 2 * n_channels + channel;
           z = film[to] * messages[from] + film[to + n_channels];""",
        'bspmm_edge_film',
    )
    channels = cuda.cupy.arange(n_channels, dtype=numpy.int32)
    return kernel(
        messages, film, sources[:, None], receivers[:, None], channels, numpy.int32(n_channels)
    )


def edge_film(adj, x, W, W_g):
    """Compute what every edge carries: ``z[e] = gamma[i, r] * messages[j, r] + beta[i, r]``.

    For the edge e from node j to node i in relation r, entry (i, j * R + r) of ``adj``, with
    ``messages[j, r, c] = sum_k W[c * R + r, k] x[j, k]``; gamma and beta of
    the receiver come from rows ``c * R + r`` and ``(C + c) * R + r`` of ``W_g``. One node of the
    computational graph, differentiable to any order.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R); its values are not used.
        x (Variable or array): (n_nodes, in_channels) floats.
        W (Variable or array): (C * R, in_channels).
        W_g (Variable or array): (2 * C * R, in_channels).

    Returns:
        Variable: (nnz, C) of x's dtype, edges in the order of ``sparse.edges.edges_of(adj)``.

    Raises:
        TypeError: ``adj`` is no BatchedCSR. ValueError: a shape does not fit.

    Note:
        Deterministic; does not synchronise.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192), the inner part of equation 6; Chainer Chemistry
        0.7.1, links/update/gnn_film_update.py.
    """
    expect.relations(adj)
    if x.ndim != 2 or len(x) != adj.n_rows:
        raise ValueError(
            'x: expected shape (%d, in_channels), a row for each node of %r, got %s'
            % (adj.n_rows, adj, x.shape)
        )
    if len(W) % adj.n_relations:
        raise ValueError(
            'W: expected a multiple of %d relations as its number of rows, got shape %s'
            % (adj.n_relations, W.shape)
        )
    expected = {'W': (W, (len(W), x.shape[1])), 'W_g': (W_g, (2 * len(W), x.shape[1]))}
    expect.shapes('x of shape %s' % (x.shape,), expected)
    return EdgeFiLM(adj).apply((x, W, W_g))[0]
