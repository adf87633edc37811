"""Matrices by which the heads of graph attention multiply, made from a `BatchedCSR`."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.ops.segments import segment_sum_forward
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse.check import fits_int32
from chainer_bspmm.sparse.edges import derived, equal_rows, gathering


class AttentionPattern:
    """Edges of every head; with `within`, the edges of each relation are normalised separately.

    The features of node i in relation r and head k are row ``(i * R + r) * K + k``. Every edge has
    one entry per head. Entries are sorted by receiver, head and relation, so that entries that are
    summed or normalised together are adjacent. Spare entries come last and refer to row 0.

    - `product`: the matrix by which features are multiplied; its values are the attention weights.
      It has a row for every node, which sums over the node's heads, or with `side_by_side` a row
      for every (node, head).
    - `sources`, `receivers`: (nnz * K,) int32, each entry's two rows of features.
    - `segments`: int32, start of each group of entries that are normalised together.
    - `by_receiver`: (n_nodes * K * R + 1,) int32, start of the entries of each (node, head,
      relation).
    - `isolated`: a matrix with the rows of `product` and a column ``(g * R + r) * K + k`` for the
      sum over the nodes of graph g. It gives rows without edges their uniform weights. None if the
      host knows that every row has edges.
    """

    def __init__(self, adj, n_heads, within, side_by_side, dtype):
        xp, n_nodes, n_relations = adj.xp, adj.n_rows, adj.n_relations
        width, nnz = n_relations * n_heads, adj.nnz * n_heads
        fits_int32('nodes times relations times heads, twice', 2 * n_nodes * width)
        fits_int32('non-zeros times heads, twice', 2 * nnz)
        self.sources, self.receivers = xp.zeros((2, nnz), 'i')
        self.by_receiver = xp.empty(n_nodes * width + 1, 'i')
        _fill(adj, n_heads, self.sources, self.receivers, self.by_receiver)
        by_head = xp.ascontiguousarray(self.by_receiver[::n_relations])
        self.segments = self.by_receiver if within else by_head
        rows_per_node = n_heads if side_by_side else 1
        self.product = derived(
            adj,
            data=None,
            indices=self.sources,
            indptr=by_head if side_by_side else xp.ascontiguousarray(by_head[::n_heads]),
            row_offsets=adj.row_offsets * rows_per_node,
            n_rows=n_nodes * rows_per_node,
            max_rows=adj.max_rows * rows_per_node,
            col_offsets=adj.col_offsets * n_heads,
            n_cols=n_nodes * width,
            max_cols=adj.max_cols * n_heads,
            max_nnz=adj.max_nnz * n_heads,
            longest=build.times(adj.longest, 1 if side_by_side else n_heads),
        )
        entries = _isolated(
            adj, n_heads, within, rows_per_node, self.by_receiver, numpy.dtype(dtype)
        )
        self.isolated = None
        if entries is not None:
            data, indices, indptr = entries
            self.isolated = derived(
                self.product,
                data=data,
                indices=indices,
                indptr=indptr,
                col_offsets=xp.arange(adj.n_graphs + 1, dtype='i') * width,
                n_cols=adj.n_graphs * width,
                max_cols=width,
                max_nnz=adj.max_rows * width,
                longest=max(width, adj.max_rows * rows_per_node),
            )

    def gathers(self, adj, n_heads):
        """Return the matrix that adds the two scores of every entry.

        Scores have two columns: an entry gets column 0 of its source and column 1 of its receiver.
        ``adj`` is an argument because the pattern is cached on it: a reference back would make a
        cycle.
        """
        n_scores = 2 * n_heads
        return gathering(
            adj,
            columns=adj.xp.stack((2 * self.sources, 2 * self.receivers + 1), axis=1),
            row_offsets=adj.indptr[adj.row_offsets] * n_heads,
            col_offsets=adj.col_offsets * n_scores,
            max_rows=adj.max_nnz * n_heads,
            max_cols=adj.max_cols * n_scores,
            n_cols=adj.n_cols * n_scores,
        )


# These functions fill the arrays of a pattern, with NumPy or in one launch each. On a device, every
# captured step makes its pattern anew.


def _fill(adj, n_heads, sources, receivers, by_receiver):
    if not launch.on_gpu(by_receiver):
        n_relations = adj.n_relations
        nnz = adj._n_true_entries()
        heads = numpy.arange(n_heads)
        columns = adj.indices[:nnz, None]
        relation = columns % n_relations
        node = adj.entry_rows()[:nnz, None]
        group = ((node * n_heads + heads) * n_relations + relation).ravel()
        by_receiver[:], order = build.group(numpy, group, by_receiver.size - 1)
        size = order.size
        sources[:size] = (columns * n_heads + heads).ravel()[order]
        receivers[:size] = ((node * n_relations + relation) * n_heads + heads).ravel()[order]
        return
    kernel = cuda.elementwise(
        'raw I indptr, raw I columns, int32 n_relations, int32 n_heads, int32 n_nodes',
        'raw I sources, raw I receivers, I by_receiver',
        """
        // i is a (node, head, relation); the last i is the end of the table.
        const int relation = i % n_relations, head = i / n_relations % n_heads;
        const int node = i / n_relations / n_heads;
        const int begin = indptr[node], end = node < n_nodes ? indptr[node + 1] : begin;
        int place = n_heads * begin + head * (end - begin);
        for (int k = begin; k < end; ++k) place += columns[k] % n_relations < relation;
        by_receiver = place;
        for (int k = begin; k < end; ++k)
            if (columns[k] % n_relations == relation) {
                sources[place] = columns[k] * n_heads + head;
                receivers[place] = (node * n_relations + relation) * n_heads + head;
                ++place;
            }""",
        'bspmm_attention_entries',
    )
    sizes = adj.n_relations, n_heads, adj.n_rows
    kernel(adj.indptr, adj.indices, *sizes, sources, receivers, by_receiver)


def _slots(adj):
    """Return the number of nodes of every graph, (n_graphs,), by their weights."""
    if adj.row_weights is None:
        return adj.xp.diff(adj.row_offsets)
    return segment_sum_forward(adj.row_weights[:, None], adj.row_offsets, adj.max_rows)[:, 0]


def _isolated(adj, n_heads, within, rows_per_node, by_receiver, dtype):
    """Return data, indices, indptr of `AttentionPattern.isolated`, or None if it has no entry."""
    if not launch.on_gpu(by_receiver):
        n_nodes = int(adj.row_offsets[-1])
        n_relations = adj.n_relations
        shape = n_nodes, n_heads, n_relations
        empty = (numpy.diff(by_receiver) == 0)[: n_nodes * n_heads * n_relations].reshape(shape)
        if not within:
            empty = numpy.broadcast_to(empty.all(axis=2, keepdims=True), shape)
        place = numpy.flatnonzero(empty)
        if not place.size:
            return None
        node, head, relation = numpy.unravel_index(place, shape)
        graph = build.entry_rows(numpy, adj.row_offsets, n_nodes)[node]
        n_slots = numpy.maximum(_slots(adj), 1) * (1 if within else n_relations)
        width = n_heads * n_relations
        bounds = numpy.arange(0, adj.n_rows * width + 1, width // rows_per_node)
        return (
            (1 / n_slots.astype('d'))[graph].astype(dtype),
            ((graph * n_relations + relation) * n_heads + head).astype('i'),
            numpy.searchsorted(place, bounds).astype('i'),
        )
    # Every (node, head, relation) has an entry, of value 0 if it has edges, because counting the
    # others would synchronise.
    size = by_receiver.size - 1
    data = cuda.cupy.empty(size, dtype)
    indices = cuda.cupy.empty(size, 'i')
    kernel = cuda.elementwise(
        'raw I by_receiver, raw I row_offsets, raw W slots, int32 n_graphs, int32 n_relations, '
        'int32 n_heads, int32 within',
        'T data, I column',
        """
        const int relation = i % n_relations, head = i / n_relations % n_heads;
        const int node = i / n_relations / n_heads;
        int graph = 0, above = n_graphs;
        while (graph < above) {
            const int middle = graph + (above - graph) / 2;
            if (row_offsets[middle + 1] <= node) graph = middle + 1; else above = middle;
        }
        const int first = within ? i : i - relation, last = first + (within ? 1 : n_relations);
        data = (T)0;
        column = 0;
        if (graph < n_graphs) {  // else it is spare
            const double n_slots = max((double)slots[graph], 1.0) * (within ? 1 : n_relations);
            if (by_receiver[first] == by_receiver[last]) data = (T)(1 / n_slots);
            column = (graph * n_relations + relation) * n_heads + head;
        }""",
        'bspmm_attention_isolated',
    )
    sizes = adj.n_graphs, adj.n_relations, n_heads, int(within)
    kernel(by_receiver, adj.row_offsets, _slots(adj), *sizes, data, indices)
    n_rows = adj.n_rows * rows_per_node
    width = n_heads * adj.n_relations // rows_per_node
    return data, indices, equal_rows(adj, n_rows, width, adj.row_offsets[-1:] * rows_per_node)


def attention_pattern(adj, n_heads, within, side_by_side, dtype):
    """Return the `AttentionPattern` of a batch, cached on it; arguments as in the class."""
    options = n_heads, within, side_by_side, dtype
    return adj.cached(('attention', *options), lambda: AttentionPattern(adj, *options))
