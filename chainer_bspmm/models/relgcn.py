"""RelGCN (relational graph convolution) on sparse batches."""

import chainer
from chainer import functions
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID
from chainer_chemistry.links import GraphLinear
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout as DenseReadout

from chainer_bspmm import backend
from chainer_bspmm.backend.scale_adj import scale_adj
from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.links import RelGCNUpdate
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.links.embed import embed_atoms


class RelGCN(chainer.Chain):
    """Predict a vector per molecule with the relational graph convolution.

    Takes the place of ``chainer_chemistry.models.RelGCN``: the same arguments, parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch, phantom atoms included.

    Args:
        out_dim (int): width of the result.
        hidden_channels (None, int or list of int): widths of the node features, the embedding's
            first; None means [16, 128, 64]; an int stands for a list of ``n_update_layers`` of
            it, which, as in Chainer Chemistry, makes ``n_update_layers - 1`` convolutions.
        n_update_layers (int or None): needed where ``hidden_channels`` is an int, else ignored.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        n_edge_types (int): number of relations.
        input_type (str): ``'int'`` for atom ids, ``'float'`` for node features.
        scale_adj (bool): divide the adjacency matrices by the source's degree, :func:`scale_adj`.

    Raises:
        ValueError: unknown ``input_type``; ``hidden_channels`` without ``n_update_layers``.

    Source:
        Schlichtkrull et al. 2017 (arXiv:1703.06103); Chainer Chemistry 0.7.1, models/relgcn.py.
    """

    def __init__(
        self,
        out_dim=64,
        hidden_channels=None,
        n_update_layers=None,
        n_atom_types=MAX_ATOMIC_NUM,
        n_edge_types=4,
        input_type='int',
        scale_adj=False,
    ):
        super().__init__()
        if hidden_channels is None:
            hidden_channels = [16, 128, 64]
        elif isinstance(hidden_channels, int):
            if not isinstance(n_update_layers, int):
                raise ValueError(
                    'n_update_layers: expected an int to go with hidden_channels = '
                    '%d, got %r' % (hidden_channels, n_update_layers)
                )
            hidden_channels = [hidden_channels] * n_update_layers
        backend.check.one_of('input_type', input_type, ('int', 'float'))
        first = hidden_channels[0]
        self._assemble(
            embed=(
                EmbedAtomID(out_size=first, in_size=n_atom_types)
                if input_type == 'int'
                else GraphLinear(None, first)
            ),
            rgcn_convs=[
                RelGCNUpdate(*widths, n_edge_types)
                for widths in zip(hidden_channels, hidden_channels[1:])
            ],
            rgcn_readout=GGNNReadout(
                out_dim, hidden_channels[-1], nobias=True, activation=functions.tanh
            ),
            input_type=input_type,
            scale_adj=scale_adj,
        )

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        if type(model.rgcn_readout) is not DenseReadout:
            raise ValueError(
                'model.rgcn_readout: expected a GGNNReadout of Chainer Chemistry, '
                'got %r' % (model.rgcn_readout,)
            )
        return twin_of(
            model,
            cls,
            embed=model.embed,
            rgcn_convs=[RelGCNUpdate.from_dense(link) for link in model.rgcn_convs],
            rgcn_readout=GGNNReadout.from_dense(model.rgcn_readout),
            input_type=model.input_type,
            scale_adj=model.scale_adj,
        )

    def _assemble(self, embed, rgcn_convs, rgcn_readout, input_type, scale_adj):
        with self.init_scope():
            self.embed = embed
            self.rgcn_convs = chainer.ChainList(*rgcn_convs)
            self.rgcn_readout = rgcn_readout
        self.input_type = input_type
        self.scale_adj = scale_adj

    def forward(self, x, adj):
        """Predict.

        Args:
            x (array): (n_nodes,) int32 atom ids, or with ``input_type='float'`` (n_nodes, channels)
                features. Where ``adj`` is padded: (n_graphs, N) or (n_graphs, N, channels).
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations. Values of another
                dtype than the features' are converted.

        Returns:
            Variable: (n_graphs, out_dim).

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, ``x`` is not of the ``input_type``, or an atom id is
                outside of the embedding.
        """
        h = self._embed(x, adj)
        adj = adj.astype(h.dtype)
        if self.scale_adj:
            adj = scale_adj(adj, h.dtype)
        for rgcn_conv in self.rgcn_convs:
            h = rgcn_conv(h, adj, functions.tanh)
        return self.rgcn_readout(h, adj)

    def _embed(self, x, adj):
        is_ids = not hasattr(x, 'dtype') or x.dtype.kind in 'iu'
        if is_ids != (self.input_type == 'int'):
            raise ValueError(
                "x: expected %s with input_type='%s', got %s"
                % (
                    'atom ids' if self.input_type == 'int' else 'features',
                    self.input_type,
                    getattr(x, 'dtype', type(x).__name__),
                )
            )
        if is_ids:
            return embed_atoms(self.embed, x, adj)
        backend.check.adjacency(adj)
        lead = (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)
        if x.shape[:-1] != lead:
            raise ValueError(
                'x: expected shape %s and one more dimension to go with %r, got %s'
                % (lead, adj, x.shape)
            )
        # Past GraphLinear's own __call__, which insists on three dimensions.
        return chainer.links.Linear.__call__(self.embed, x.reshape((adj.n_rows, x.shape[-1])))
