"""RSGCN (GCN of Kipf and Welling) on sparse batches."""

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID
from chainer_chemistry.links import GraphBatchNormalization
from chainer_chemistry.links.readout.general_readout import GeneralReadout as DenseReadout

from chainer_bspmm.backend.check import adjacency
from chainer_bspmm.functions.batch_norm import batch_norm
from chainer_bspmm.functions.embed_rows import embed_rows
from chainer_bspmm.links import GeneralReadout
from chainer_bspmm.links import RSGCNUpdate
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


def embed_atoms(embed, atom_array, adj):
    """Return (n_rows, channels) node features of atom ids; features pass through, flattened.

    Ids are checked on the host: against the batch's stored maximum, or where that is unknown in
    the array itself, which synchronises if it lies on a device.
    """
    adjacency(adj)
    if not isinstance(atom_array, chainer.get_array_types() + (chainer.Variable,)):
        raise TypeError('atom_array: expected an array, got %s' % type(atom_array).__name__)
    lead = (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)
    is_ids = atom_array.dtype.kind in 'iu'
    if atom_array.shape[: len(lead)] != lead or atom_array.ndim != len(lead) + (not is_ids):
        raise ValueError(
            'atom_array: expected shape %s%s to go with %r, got %s'
            % (lead, ' ids, or features of one more dimension', adj, atom_array.shape)
        )
    flat = atom_array.reshape((adj.n_rows,) + atom_array.shape[len(lead) :])
    n_atom_types, n_channels = embed.W.shape
    if not is_ids:
        if flat.shape[1] != n_channels:
            raise ValueError(
                'atom_array: expected features of %d channels, got shape %s'
                % (n_channels, atom_array.shape)
            )
        return chainer.as_variable(flat)
    largest, smallest = adj.max_atom_id, 0
    if largest is None and flat.size:
        array = cuda.to_cpu(flat.array if isinstance(flat, chainer.Variable) else flat)
        largest, smallest = int(array.max()), int(array.min())
    if largest is not None and not (0 <= smallest and largest < n_atom_types):
        raise ValueError(
            'atom_array: expected ids in [0, %d), the size of the embedding, got %d'
            % (n_atom_types, smallest if smallest < 0 else largest)
        )
    return embed_ids(embed, flat.array if isinstance(flat, chainer.Variable) else flat)


def embed_ids(embed, ids):
    """Return ``embed(ids)``, (n_rows, channels), of an array of checked ids."""
    is_table = type(embed) in (EmbedAtomID, chainer.links.EmbedID)
    if not is_table or embed.ignore_label is not None or embed.local_link_hooks:
        return embed(ids)
    return embed_rows(ids, embed.W)
