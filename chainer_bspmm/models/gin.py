"""GIN (graph isomorphism network) on sparse batches."""

import chainer
from chainer import functions
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID

from chainer_bspmm.compat.chemistry_repairs import zero_unused_layers
from chainer_bspmm.links.ggnn_readout import GGNNReadout
from chainer_bspmm.links.gin_update import GINUpdate
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.models.updates_and_readouts import predict
from chainer_bspmm.models.updates_and_readouts import sparse_readouts


class GIN(chainer.Chain):
    """Predict a vector per molecule, or per atom, with the graph isomorphism network.

    Takes the place of ``chainer_chemistry.models.GIN``: the same arguments, parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch.

    Quirks of Chainer Chemistry, kept because trained parameters depend on them: every node counts
    twice in its own update (:class:`~chainer_bspmm.links.GINUpdate`), and there is a ``first_mlp``
    that is never used; the weights that it leaves open are zeros.

    Args:
        out_dim (int): width of the result.
        node_embedding (bool): return the nodes' features instead of a readout.
        hidden_channels (int): width of the node features.
        out_channels (int or None): width after the last update; None means hidden_channels. Another
            one goes with ``node_embedding`` alone: the readout's parameters are made for
            hidden_channels. (In Chainer Chemistry it fails at the first call.)
        n_update_layers (int): number of updates.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        dropout_ratio (float): dropout after every update; 0 or less means none.
        concat_hidden (bool): a readout after every update, the results side by side.
        weight_tying (bool): one set of parameters for all updates.
        activation (callable): activation of the readout, of nodes and of sums.
        n_edge_types (int): kept as an attribute; not used.

    Raises:
        ValueError: ``out_channels`` does not fit.

    Source:
        Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826); Chainer Chemistry 0.7.1, models/gin.py.
    """

    def __init__(
        self,
        out_dim,
        node_embedding=False,
        hidden_channels=16,
        out_channels=None,
        n_update_layers=4,
        n_atom_types=MAX_ATOMIC_NUM,
        dropout_ratio=0.5,
        concat_hidden=False,
        weight_tying=False,
        activation=functions.identity,
        n_edge_types=4,
    ):
        super().__init__()
        out_channels = hidden_channels if out_channels is None else out_channels
        widths = [hidden_channels] * n_update_layers
        if widths:
            widths = widths[: 1 if weight_tying else None]
            widths[-1] = out_channels
        n_readout_layers = n_update_layers if concat_hidden else 1
        # In upstream's order, so that one seed gives the same parameters.
        self._assemble(
            embed=EmbedAtomID(out_size=hidden_channels, in_size=n_atom_types),
            first_mlp=GINUpdate(hidden_channels=hidden_channels).graph_mlp,
            update_layers=[
                GINUpdate(
                    hidden_channels=hidden_channels, out_channels=width, dropout_ratio=dropout_ratio
                )
                for width in widths
            ],
            readout_layers=[
                GGNNReadout(
                    out_dim, hidden_channels * 2, activation=activation, activation_agg=activation
                )
                for _ in range(n_readout_layers)
            ],
            node_embedding=node_embedding,
            out_dim=out_dim,
            n_update_layers=n_update_layers,
            dropout_ratio=dropout_ratio,
            concat_hidden=concat_hidden,
            weight_tying=weight_tying,
            n_edge_types=n_edge_types,
        )

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        return twin_of(
            model,
            cls,
            embed=model.embed,
            first_mlp=model.first_mlp,
            update_layers=map(GINUpdate.from_dense, model.update_layers),
            readout_layers=sparse_readouts(model),
            node_embedding=model.node_embedding,
            out_dim=model.out_dim,
            n_update_layers=model.n_update_layers,
            dropout_ratio=model.dropout_ratio,
            concat_hidden=model.concat_hidden,
            weight_tying=model.weight_tying,
            n_edge_types=model.n_edge_types,
        )

    def _assemble(
        self,
        embed,
        first_mlp,
        update_layers,
        readout_layers,
        node_embedding,
        out_dim,
        n_update_layers,
        dropout_ratio,
        concat_hidden,
        weight_tying,
        n_edge_types,
    ):
        with self.init_scope():
            self.embed = embed
            self.first_mlp = first_mlp
            self.update_layers = chainer.ChainList(*update_layers)
            self.readout_layers = chainer.ChainList(*readout_layers)
        self.node_embedding = node_embedding
        self.out_dim = out_dim
        self.hidden_channels = embed.W.shape[1]
        self.n_update_layers = n_update_layers
        self.n_message_layers = len(self.update_layers)
        self.n_readout_layer = len(self.readout_layers)
        self.dropout_ratio = dropout_ratio
        self.concat_hidden = concat_hidden
        self.weight_tying = weight_tying
        self.n_edge_types = n_edge_types
        self._check_widths()
        # As in the repaired GIN of Chainer Chemistry: weights that stay None break optimizers and
        # put a pickled object into snapshots.
        zero_unused_layers(first_mlp, self.hidden_channels)

    def _check_widths(self):
        if not self.n_message_layers:
            return
        width = self.update_layers[-1].graph_mlp.layers[-1].out_size
        feeds_itself = self.weight_tying and self.n_update_layers > 1
        if width != self.hidden_channels and (feeds_itself or not self.node_embedding):
            raise ValueError(
                'out_channels: expected hidden_channels = %d, the width that %s, got %d'
                % (
                    self.hidden_channels,
                    'the tied update takes' if feeds_itself else "the readout's parameters have",
                    width,
                )
            )

    def forward(self, atom_array, adj, is_real_node=None):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices. Values of another dtype than the features' are
                converted.
            is_real_node (array or None): (n_nodes,), or (n_graphs, N) where ``adj`` is padded;
                nodes for which it is 0 do not count in the readout. None: all count.

        Returns:
            Variable: (n_graphs, out_dim); with ``concat_hidden`` (n_graphs, n_update_layers *
            out_dim); with ``node_embedding`` (n_nodes, out_channels), or (n_graphs, N,
            out_channels) where ``adj`` is padded.

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        # Chainer Chemistry rectifies once more after every update, which changes no number: the
        # update link rectifies, and dropout only scales.
        if not self.node_embedding:
            return predict(self, atom_array, adj, is_real_node=is_real_node)
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        for step in range(self.n_update_layers):
            h = self.update_layers[0 if self.weight_tying else step](h, adj)
        if adj.layout == 'padded':
            h = functions.reshape(h, (adj.n_graphs, adj.max_rows, h.shape[1]))
        return h
