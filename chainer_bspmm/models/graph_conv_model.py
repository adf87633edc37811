"""Base of the wrappers of Chainer Chemistry (GWM, CWLE, GWLE) on sparse batches."""

from chainer import functions

from chainer_bspmm import links
from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.links.inner import expect_elementwise, expect_norm, NORMS
from chainer_bspmm.models.sparse_model import SparseModel
from chainer_bspmm.ops.batch_norm import batch_norm
from chainer_bspmm.ops.dropout import dropout
from chainer_bspmm.ops.scale_adj import scale_adj

# The update links that are swapped anywhere in a tree of links.
UPDATES = (
    links.RSGCNUpdate,
    links.GINUpdate,
    links.NFPUpdate,
    links.RelGCNUpdate,
    links.GGNNUpdate,
    links.RelGATUpdate,
    links.GNNFiLMUpdate,
)

# Swapped as parts of a model only: elsewhere they are called without an adjacency.
READOUTS = (links.GGNNReadout, links.NFPReadout, links.GeneralReadout)


class GraphConvModel(SparseModel):
    """Embedding, updates and readouts, and between them the steps that a wrapper adds.

    Arguments and parameters are upstream's; ``update_layer`` and ``readout_layer`` are classes of
    Chainer Chemistry. Quirks of upstream that trained parameters depend on: the updates of GGNN and
    GIN work with 16 hidden channels inside, for any ``hidden_channels``; with ``weight_tying``
    the activation comes after the first update only.

    Raises:
        ValueError: upstream's constructor takes the options together, but not its forward pass; or
            an update or readout has no sparse form.
    """

    parts = {'update_layers': UPDATES, 'readout_layers': READOUTS}
    inner_layers = {'bnorms': NORMS}

    @staticmethod
    def check(link):
        if (link.concat_hidden or link.sum_hidden) and (
            len(link.readout_layers) < link.n_update_layers
        ):
            raise ValueError(
                'weight_tying: expected False to go with a readout after each of %d updates '
                '(concat_hidden, sum_hidden), got True, for which Chainer Chemistry makes one '
                'readout and fails in its forward pass' % link.n_update_layers
            )

    def _embed(self, atom_array, adj):
        """Reset the state; return node features, and the adjacency that goes with them."""
        self.reset_state()
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        return h, scale_adj(adj, h.dtype) if self.scale_adj else adj

    def _convolve(self, h, h0, adj, is_real_node, mix=None):
        """Return the readout, of h and h0, or several side by side (`concat_hidden`).

        ``mix(h, h_new, index)`` returns the nodes, given those before and after an update.
        """

        def read(readout):
            return readout(h=h, adj=adj, h0=h0, is_real_node=is_real_node)

        of_update = {}
        n_degrees = getattr(self, 'n_degree_type', None)  # of the models with NFP's update
        if n_degrees is not None and n_degrees != self.max_degree + 1:  # it was set later
            of_update['n_degrees'] = n_degrees
        results = []
        for step in range(self.n_update_layers):
            index = 0 if self.weight_tying else step
            h_new = self.update_layers[index](h=h, adj=adj, **of_update)
            h = h_new if mix is None else mix(h, h_new, index)
            if self.use_batchnorm:
                expect_norm(self.bnorms[index])
                h = batch_norm(adj, self.bnorms[index], h)
            if self.dropout_ratio > 0.0:
                h = dropout(h, self.dropout_ratio)
            if self.activation is not None and step < self.n_activation:
                expect_elementwise(self.activation)
                h = self.activation(h)
            if self.concat_hidden or self.sum_hidden:
                results.append(read(self.readout_layers[step]))
        if self.concat_hidden:
            return functions.concat(results, axis=1)
        if self.sum_hidden:
            return functions.add(*results) if len(results) > 1 else results[0]
        return read(self.readout_layers[0])
