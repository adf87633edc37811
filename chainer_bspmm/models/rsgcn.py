"""RSGCN (GCN of Kipf and Welling) on sparse batches."""

import chainer
from chainer import functions
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID
from chainer_chemistry.links import GraphBatchNormalization
from chainer_chemistry.links.readout.general_readout import GeneralReadout as DenseReadout

from chainer_bspmm.functions.fused.batch_norm import batch_norm
from chainer_bspmm.links import GeneralReadout
from chainer_bspmm.links import RSGCNUpdate
from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.links.twin import twin_of


class RSGCN(chainer.Chain):
    """Predict a vector per molecule with the renormalised spectral graph convolution.

    Takes the place of ``chainer_chemistry.models.RSGCN``: the same arguments, parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch. Batch normalisation takes its statistics over the rows there are:
    real atoms in packed batches, padding included in padded ones.

    Args:
        out_dim (int): width of the result.
        hidden_channels (int): width of the node features.
        n_update_layers (int): number of convolutions.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        use_batch_norm (bool): normalise after every convolution.
        readout (callable or None): called as ``readout(h, adj)`` with (n_rows, out_dim) node
            features and the BatchedCSR; None means ``links.GeneralReadout('sum')``.
        dropout_ratio (float): dropout after every convolution; 0 or less means none.

    Source:
        Kipf, Welling 2016 (arXiv:1609.02907); Chainer Chemistry 0.7.1, models/rsgcn.py.
    """

    def __init__(
        self,
        out_dim,
        hidden_channels=32,
        n_update_layers=4,
        n_atom_types=MAX_ATOMIC_NUM,
        use_batch_norm=False,
        readout=None,
        dropout_ratio=0.5,
    ):
        super().__init__()
        if n_update_layers < 1:
            raise ValueError('n_update_layers: expected at least 1, got %d' % n_update_layers)
        widths = [hidden_channels] * (n_update_layers - 1) + [out_dim]
        self._assemble(
            embed=EmbedAtomID(out_size=hidden_channels, in_size=n_atom_types),
            gconvs=[RSGCNUpdate(hidden_channels, width) for width in widths],
            bnorms=(
                chainer.ChainList(*[GraphBatchNormalization(width) for width in widths])
                if use_batch_norm
                else [None] * n_update_layers
            ),
            readout=GeneralReadout() if readout is None else readout,
            dropout_ratio=dropout_ratio,
        )

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        readout = model.readout
        if type(readout) is not DenseReadout:
            raise ValueError(
                'model.readout: expected chainer_chemistry.links.GeneralReadout, got %r; a readout '
                'of your own is called as readout(h, adj) on sparse batches: pass it to '
                'chainer_bspmm.models.RSGCN' % (readout,)
            )
        return twin_of(
            model,
            cls,
            embed=model.embed,
            gconvs=[RSGCNUpdate.from_dense(link) for link in model.gconvs],
            bnorms=model.bnorms,
            readout=GeneralReadout(readout.mode, readout.activation),
            dropout_ratio=model.dropout_ratio,
        )

    def _assemble(self, embed, gconvs, bnorms, readout, dropout_ratio):
        with self.init_scope():
            self.embed = embed
            self.gconvs = chainer.ChainList(*gconvs)
            # Links among these two are registered; None and plain callables are not.
            self.bnorms = bnorms
            self.readout = readout
        self.out_dim = gconvs[-1].out_channels
        self.hidden_channels = embed.W.shape[1]
        self.n_update_layers = len(gconvs)
        self.dropout_ratio = dropout_ratio

    def forward(self, atom_array, adj):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): normalised adjacency matrices. Values of another dtype than the
                features' are converted.

        Returns:
            Variable: (n_graphs, out_dim); twice as wide for a ``'summax'`` readout.

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        for i, (gconv, bnorm) in enumerate(zip(self.gconvs, self.bnorms)):
            if bnorm is None:
                # Dropout multiplies by 0 or more: a rectifier may as well come before it.
                is_last = i == self.n_update_layers - 1
                h = gconv(h, adj, None if is_last else functions.relu, self.dropout_ratio)
                continue
            h = gconv(h, adj)
            h = batch_norm(adj, bnorm, h)
            if self.dropout_ratio > 0.0:
                h = functions.dropout(h, ratio=self.dropout_ratio)
            if i < self.n_update_layers - 1:
                h = functions.relu(h)
        return self.readout(h, adj)
