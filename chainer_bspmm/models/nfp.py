"""NFP (neural fingerprints of Duvenaud et al.) on sparse batches."""

import chainer
from chainer import functions
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID

from chainer_bspmm.links.nfp_readout import NFPReadout
from chainer_bspmm.links.nfp_readout import pool
from chainer_bspmm.links.nfp_update import NFPUpdate
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.links.embed import embed_atoms


class NFP(chainer.Chain):
    """Predict a vector per molecule with neural fingerprints.

    Takes the place of ``chainer_chemistry.models.NFP``: the same arguments, parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch. :class:`~chainer_bspmm.links.NFPUpdate` names the quirks kept.

    Args:
        out_dim (int): width of a fingerprint.
        hidden_channels (int): width of the node features.
        n_update_layers (int): number of updates; each has a readout of its own.
        max_degree (int): there are weights for degrees from 1 to max_degree + 1.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        concat_hidden (bool): the layers' fingerprints side by side instead of summed. (This option
            fails in Chainer Chemistry, which concatenates along an axis that is not there.)

    Raises:
        ValueError: ``n_update_layers`` is less than 1, or ``max_degree`` negative.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292); Chainer Chemistry 0.7.1, models/nfp.py.
    """

    def __init__(
        self,
        out_dim,
        hidden_channels=16,
        n_update_layers=4,
        max_degree=6,
        n_atom_types=MAX_ATOMIC_NUM,
        concat_hidden=False,
    ):
        super().__init__()
        if n_update_layers < 1:
            raise ValueError('n_update_layers: expected at least 1, got %d' % n_update_layers)
        self._assemble(
            embed=EmbedAtomID(in_size=n_atom_types, out_size=hidden_channels),
            layers=[
                NFPUpdate(hidden_channels, hidden_channels, max_degree=max_degree)
                for _ in range(n_update_layers)
            ],
            readout_layers=[NFPReadout(out_dim, hidden_channels) for _ in range(n_update_layers)],
            concat_hidden=concat_hidden,
        )

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        return twin_of(
            model,
            cls,
            embed=model.embed,
            layers=map(NFPUpdate.from_dense, model.layers),
            readout_layers=map(NFPReadout.from_dense, model.readout_layers),
            concat_hidden=model.concat_hidden,
        )

    def _assemble(self, embed, layers, readout_layers, concat_hidden):
        with self.init_scope():
            self.embed = embed
            self.layers = chainer.ChainList(*layers)
            self.readout_layers = chainer.ChainList(*readout_layers)
        self.out_dim = self.readout_layers[0].out_dim
        self.hidden_channels = embed.W.shape[1]
        self.max_degree = self.layers[0].max_degree
        self.n_degree_types = self.max_degree + 1
        self.n_update_layers = len(self.layers)
        self.concat_hidden = concat_hidden

    def forward(self, atom_array, adj, is_real_node=None):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices with self-loops. Values of another dtype than the
                features' are converted.
            is_real_node (array or None): (n_nodes,), or (n_graphs, N) where ``adj`` is padded;
                nodes for which it is 0 do not count in the fingerprints. None: all count.

        Returns:
            Variable: (n_graphs, out_dim); with ``concat_hidden``
            (n_graphs, n_update_layers * out_dim), the first layer's first.

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        scores = []
        for update, readout in zip(self.layers, self.readout_layers):
            h = update(h, adj)
            scores.append(readout.scores(h))
        # One reduction for all layers.
        if self.concat_hidden:
            scores = functions.concat(scores, axis=1)
        else:
            scores = functions.add(*scores) if len(scores) > 1 else scores[0]
        return pool(scores, adj, is_real_node)
