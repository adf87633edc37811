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

# Readouts are swapped only as parts of a model, because elsewhere they are called without an
# adjacency.
READOUTS = (links.GGNNReadout, links.NFPReadout, links.GeneralReadout)


class GraphConvModel(SparseModel):
    """Embedding, updates and readouts, and between them the steps that a wrapper adds.

    Arguments and parameters are upstream's; ``update_layer`` and ``readout_layer`` are classes of
    Chainer Chemistry. Two quirks of upstream are kept, because trained parameters depend on them.
    The updates of GGNN and GIN work with 16 hidden channels inside, for any ``hidden_channels``.
    With ``weight_tying`` the activation comes after the first update only.

    Raises:
        ValueError: the options are accepted by upstream's constructor, but fail together in its
            forward pass; or an update or readout has no sparse form.
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
        """Reset the state; return node features, and the adjacency that the updates take."""
        self.reset_state()
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        return h, scale_adj(adj, h.dtype) if self.scale_adj else adj

    def _convolve(self, h, h0, adj, is_real_node, mix=None):
        """Apply the updates; return the result of the readout.

        With `concat_hidden` the readouts after each update are side by side, with `sum_hidden` they
        are added up. ``mix(h, h_new, index)`` combines the nodes before and after each update.
        """

        def read(readout):
            return readout(h=h, adj=adj, h0=h0, is_real_node=is_real_node)

        options = {}
        n_degrees = getattr(self, 'n_degree_type', None)  # models with NFP's update have it
        # The two differ if n_degree_type was assigned after the constructor.
        if n_degrees is not None and n_degrees != self.max_degree + 1:
            options['n_degrees'] = n_degrees
        results = []
        for step in range(self.n_update_layers):
            index = 0 if self.weight_tying else step
            h_new = self.update_layers[index](h=h, adj=adj, **options)
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
