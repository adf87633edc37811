"""The matrices that the heads of graph attention multiply by, made of a `BatchedCSR`."""

import numpy

from chainer_bspmm.sparse import build
from chainer_bspmm.sparse.edges import derived
from chainer_bspmm.sparse.edges import gathering
from chainer_bspmm.sparse.relations import relation_rows
from chainer_bspmm.sparse.validate import fits_int32


class AttentionPattern:
    """The edges of every head, once a batch: see :func:`attention_pattern`.

    With node i, relation r and head k, features are rows ``(i * R + r) * K + k``. Every edge has an
    entry for each head; entries are sorted by receiver, head, relation, so that what is summed or
    normalised together is adjacent.

    Attributes:
        product (BatchedCSR): what weights and features are multiplied by: a row for every node, in
            which all its heads add up, or with `side_by_side` for every (node, head).
        sources, receivers (array): (nnz * K,) int32, the two rows of features of every entry.
        segments (array): int32, where each group of entries that is normalised together starts.
        by_receiver (array): (n_nodes * K * R + 1,) int32, where the entries of every (node, head,
            relation) start.
        isolated (BatchedCSR or None): rows as `product`, columns ``(g * R + r) * K + k``: the
            weight of the sum over graph g's nodes in a row that has no edges to weigh; None if the
            host knows that there is no such row.
    """

    def __init__(self, adj, n_heads, within, side_by_side, dtype):
        xp, n_nodes, n_relations = adj.xp, adj.n_rows, adj.n_relations
        width = n_relations * n_heads
        fits_int32('nodes times relations times heads, twice', 2 * n_nodes * width)
        fits_int32('non-zeros times heads, twice', 2 * adj.nnz * n_heads)
        rows = relation_rows(adj)
        row = rows.entry_rows()
        starts, heads = rows.indptr, xp.arange(n_heads, dtype='i')
        first = starts[::n_relations]
        degree = first[1:] - first[:-1]
        # An edge comes after all heads of the rows before and the earlier heads of its row.
        node = row // n_relations
        place = ((n_heads - 1) * first[node] + xp.arange(rows.nnz, dtype='i'))[:, None]
        place = (place + heads * degree[node][:, None]).ravel()
        self.sources, self.receivers = (xp.empty(rows.nnz * n_heads, 'i') for _ in range(2))
        self.sources[place] = (
            (rows.indices * n_relations + row % n_relations)[:, None] * n_heads + heads
        ).ravel()
        self.receivers[place] = (row[:, None] * n_heads + heads).ravel()
        self.by_receiver = xp.empty(n_nodes * width + 1, 'i')
        self.by_receiver[-1] = rows.nnz * n_heads
        self.by_receiver[:-1] = (
            (starts[:-1].reshape(n_nodes, 1, n_relations) + (n_heads - 1) * first[:-1, None, None])
            + heads[:, None] * degree[:, None, None]
        ).ravel()
        by_head = xp.ascontiguousarray(self.by_receiver[::n_relations])
        self.segments = self.by_receiver if within else by_head
        rows_per_node = n_heads if side_by_side else 1
        self.product = derived(
            adj,
            data=None,
            indices=self.sources,
            nnz=rows.nnz * n_heads,
            indptr=by_head if side_by_side else xp.ascontiguousarray(by_head[::n_heads]),
            row_offsets=adj.row_offsets * rows_per_node,
            n_rows=n_nodes * rows_per_node,
            max_rows=adj.max_rows * rows_per_node,
            col_offsets=adj.col_offsets * n_heads,
            n_cols=n_nodes * width,
            max_cols=adj.max_cols * n_heads,
            max_nnz=adj.max_nnz * n_heads,
        )
        isolated = _without_edges(rows, n_relations, within)
        self.isolated = None
        if xp is not numpy or isolated.any():  # on a device, finding out would synchronise
            self.isolated = self._means(adj, isolated, within, n_heads, rows_per_node, dtype)

    def _means(self, adj, isolated, within, n_heads, rows_per_node, dtype):
        xp, (n_nodes, n_relations) = adj.xp, isolated.shape
        width = n_relations * n_heads
        graph = build.entry_rows(xp, adj.row_offsets, n_nodes)
        n_slots = xp.diff(adj.row_offsets)[graph] * (1 if within else n_relations)
        weight = isolated / n_slots[:, None].astype(dtype)
        # (node, head, relation)
        columns = (graph * width)[:, None, None] + xp.arange(width, dtype='i').reshape(
            n_relations, n_heads
        ).T
        return derived(
            self.product,
            data=xp.repeat(weight.astype(dtype)[:, None], n_heads, axis=1).ravel(),
            indices=columns.astype('i').ravel(),
            nnz=n_nodes * width,
            indptr=xp.arange(0, n_nodes * width + 1, width // rows_per_node, dtype='i'),
            col_offsets=xp.arange(adj.n_graphs + 1, dtype='i') * width,
            n_cols=adj.n_graphs * width,
            max_cols=width,
            max_nnz=adj.max_rows * width,
        )

    def gathers(self, adj, n_heads):
        """Return the (nnz * K) x (2 * n_nodes * R * K) matrix that adds two scores for every entry.

        They are column 0 of the source's row and column 1 of the receiver's. ``adj`` is passed in
        rather than stored: the pattern is kept with it, and a reference back would make a cycle.
        """
        return gathering(
            adj,
            adj.xp.stack((2 * self.sources, 2 * self.receivers + 1), axis=1),
            adj.indptr[adj.row_offsets] * n_heads,
            adj.col_offsets * (2 * n_heads),
            adj.max_nnz * n_heads,
            adj.max_cols * 2 * n_heads,
            2 * adj.n_cols * n_heads,
        )


def _without_edges(rows, n_relations, within):
    """Return (n_nodes, R) booleans: whether a node has no edge in a relation, else in any."""
    empty = (rows.indptr[1:] == rows.indptr[:-1]).reshape(-1, n_relations)
    return empty if within else empty.all(axis=1, keepdims=True) | rows.xp.zeros_like(empty)


def slots_as_edges(adj, within):
    """Return a matrix with an entry for every slot where there is no edge to normalise over.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R).
        within (bool): as in :func:`attention_pattern`.

    Returns:
        BatchedCSR: as ``adj``, without values; a node without edges (`within`: in a relation) has
        an entry for every row of its graph in every relation (in that one). Kept with ``adj``.
        array: (n_nodes * R,) booleans, which receivers have entries that ``adj`` has too.

    Note:
        The number of entries is not known on the host: synchronises a device, once a batch.
    """
    return adj.cached(('slots as edges', within), lambda: _slots_as_edges(adj, within))


def _slots_as_edges(adj, within):
    xp, n_relations, rows = adj.xp, adj.n_relations, relation_rows(adj)
    isolated = _without_edges(rows, n_relations, within).ravel()
    graph = xp.repeat(build.entry_rows(xp, adj.row_offsets, adj.n_rows), n_relations)
    starts = xp.zeros(isolated.size + 1, numpy.int64)
    starts[1:] = xp.cumsum(
        xp.where(isolated, xp.diff(adj.row_offsets)[graph], xp.diff(rows.indptr)), dtype=numpy.int64
    )
    nnz = int(starts[-1])  # synchronises
    fits_int32('non-zeros, slots counted', nnz)
    starts = starts.astype('i')
    row = build.entry_rows(xp, starts, nnz)
    # The first row of the graph instead of the first edge.
    order = xp.arange(nnz, dtype='i') - starts[row]
    source = adj.row_offsets[graph[row]] + order
    edges = xp.flatnonzero(~isolated[row])  # synchronises, as the next line does
    source[edges] = rows.indices[(rows.indptr[row] + order)[edges]]
    indptr = xp.ascontiguousarray(starts[::n_relations])
    expanded = derived(
        adj,
        data=None,
        indptr=indptr,
        indices=source * n_relations + row % n_relations,
        nnz=nnz,
        max_nnz=int(xp.diff(indptr[adj.row_offsets]).max()) if adj.n_graphs else 0,
        n_relations=n_relations,
    )
    return expanded, ~isolated


def attention_pattern(adj, n_heads, within, side_by_side, dtype):
    """Return the `AttentionPattern` of a batch, kept with it.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R); its values are not used.
        n_heads (int): K.
        within (bool): normalise the edges of every relation separately.
        side_by_side (bool): have a row for every head in the product, instead of their sum.
        dtype (numpy.dtype): of the features.

    Note:
        Does not synchronise.
    """
    options = n_heads, within, side_by_side, dtype
    return adj.cached(('attention', *options), lambda: AttentionPattern(adj, *options))
