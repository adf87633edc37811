"""Feature-wise linear modulation of messages, with its linear maps and sum, as one node."""

from chainer import as_variable
from chainer import functions

from chainer_bspmm import backend
from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused import expect
from chainer_bspmm.functions.fused.arrays import by_channel
from chainer_bspmm.functions.fused.arrays import by_relation
from chainer_bspmm.functions.node import FusedNode
from chainer_bspmm.sparse.edges import edges_of


class EdgeFiLM(FusedNode):
    """Inputs x, W, W_g of :func:`edge_film` with a rectifier."""

    def __init__(self, adj):
        self._adj = adj

    def _output(self, inputs):
        x, W, W_g = (array.astype(inputs[0].dtype, copy=False) for array in inputs)
        n_relations = self._adj.n_relations
        # Row i * R + r: the message of node i in relation r, and the gamma and beta that it
        # receives with.
        messages, film = (
            dot(x, by_relation(weight, n_relations).T).reshape(
                self._adj.n_cols, len(weight) // n_relations
            )
            for weight in (W, W_g)
        )
        self._kept = x, messages, film
        return backend.edge_film(self._adj, messages, film)

    def _gradients(self, inputs, gy, wanted):
        x, messages, film = self._kept
        gx, weights, n_relations = None, [], self._adj.n_relations
        for g, weight in zip(backend.edge_film_grad(self._adj, messages, film, gy), inputs[1:]):
            g = g.reshape(len(x), len(weight))
            if 0 in wanted:
                by_x = dot(g, by_relation(weight.astype(x.dtype, copy=False), n_relations))
                gx = by_x if gx is None else gx + by_x
            weights.append(by_channel(dot(g.T, x), n_relations))
        return gx, *weights

    def _composed(self, x, W, W_g):
        return _composed(self._adj, x, W, W_g, functions.relu)


def _composed(adj, x, W, W_g, activation):
    edges, n_relations = edges_of(adj), adj.n_relations
    gathered = []
    for weight, matrix in ((W, edges.from_source), (W_g, edges.from_receiver)):
        rows = functions.linear(x, by_relation(functions.cast(weight, x.dtype), n_relations))
        rows = functions.reshape(rows, (adj.n_cols, len(weight) // n_relations))
        gathered.append(bspmm(matrix, rows))
    messages, film = gathered
    n_channels = messages.shape[1]
    z = film[:, :n_channels] * messages + film[:, n_channels:]
    return bspmm(edges.to_node, activation(z))


def edge_film(adj, x, W, W_g, activation=functions.relu):
    """Compute ``y[i] = sum of A_r[i, j] act(gamma[i, r] * messages[j, r] + beta[i, r])``.

    The sum is over the entries (i, j * R + r) of ``adj``, whose values, of x's dtype, are A;
    ``messages[j, r, c] = sum_k W[c * R + r, k] x[j, k]``, and gamma and beta of the receiver come
    from rows ``c * R + r`` and ``(C + c) * R + r`` of ``W_g``, (2 * C * R, in_channels).
    Differentiable to any order by x, W and W_g; deterministic; does not synchronise. As one node
    for ``chainer.functions.relu``, which on a GPU stores no array of (nnz, C); any other activation
    takes a few nodes, which do. A node without edges gets 0.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192), equation 6 without its norm; Chainer Chemistry
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
    if activation is not functions.relu:
        return _composed(adj, as_variable(x), W, W_g, activation)
    return EdgeFiLM(adj).apply((x, W, W_g))[0]
