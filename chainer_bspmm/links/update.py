"""Base class of the update links."""

from typing import Any

from chainer import functions, Variable

from chainer_bspmm.links.embed import node_shape
from chainer_bspmm.links.inner import CALLS, is_known
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency


def activated_update(update, h, adj, activation):
    """Return ``activation(update(h, adj))``, as one node unless the update is a user's subclass."""
    kind = type(update)
    if kind in CALLS and is_known(update, (kind,)):
        return update(h, adj, activation)
    return activation(update(h, adj))


class Update(Sparse):
    """Base of the update links; subclasses define `_update` for features of two dimensions."""

    def forward(self, h: Any, adj: BatchedCSR, *args: Any, **kwargs: Any) -> Variable:
        """Update the nodes.

        Args:
            h (Variable or array): (n_nodes, in_channels); or (n_graphs, N, in_channels) if ``adj``
                is padded.
            adj (BatchedCSR): adjacency matrices of h's dtype, of ``n_edge_types`` relations, or of
                one if the link has no such attribute.
            *args, **kwargs: further arguments of the link; see its class.

        Returns:
            Variable: (n_nodes, out_channels), or (n_graphs, N, out_channels).

        Raises:
            TypeError: ``adj`` is not a BatchedCSR, or its values have another dtype than ``h``.
            ValueError: a shape does not fit, or ``adj`` has another number of relations.
        """
        if type(adj) is not BatchedCSR:
            check_adjacency(adj)
        n_relations = getattr(self, 'n_edge_types', None)
        if n_relations is None:
            if adj.n_cols != adj.n_rows:
                text = 'adj: expected a matrix of one relation, with a column for each node, got %r'
                raise ValueError(text % adj)
        elif adj.n_relations != n_relations:
            text = 'adj: expected %d relations, the n_edge_types of the link, got %r'
            raise ValueError(text % (n_relations, adj))
        check.floating('h', h)
        lead = h.shape[:-1]
        if lead == (adj.n_rows,):
            return self._update(h, adj, *args, **kwargs)
        if lead != node_shape(adj):
            raise ValueError('h: expected a row for each node of %r, got shape %s' % (adj, h.shape))
        h = functions.reshape(h, (adj.n_rows, h.shape[2]))
        h = self._update(h, adj, *args, **kwargs)
        return functions.reshape(h, lead + h.shape[1:])
