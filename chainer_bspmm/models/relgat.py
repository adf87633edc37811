"""RelGAT (relational graph attention network) on sparse batches."""

from chainer import functions
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID

from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.links import RelGATUpdate
from chainer_bspmm.models.updates_and_readouts import predict
from chainer_bspmm.models.updates_and_readouts import UpdatesAndReadouts


class RelGAT(UpdatesAndReadouts):
    """Predict a vector per molecule with the relational graph attention network.

    Takes the place of ``chainer_chemistry.models.RelGAT``: the same arguments, parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch, phantom atoms included. Atoms without neighbours are updated by a
    mean over the whole molecule (in padded layout: over all N slots), as they are there:
    :class:`~chainer_bspmm.links.RelGATUpdate`.

    Args:
        out_dim (int): width of the result.
        hidden_channels (int): width of the node features, for every head.
        n_update_layers (int): number of updates.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        concat_hidden (bool): read out after every update, with parameters of its own, and put the
            results side by side.
        dropout_ratio (float): of the attention's weights; 0 or less means none.
        weight_tying (bool): use the first update link for all updates. As in Chainer Chemistry the
            others are there all the same, and get no gradient.
        activation (callable): of the readout, both of the nodes and of the sums.
        n_edge_types (int): number of relations.
        n_heads (int): number of heads.
        negative_slope (float): of the leaky rectifier.
        softmax_mode (str): ``'across'`` relations, or ``'within'`` each.
        concat_heads (bool): the heads side by side instead of their mean. Not with
            ``weight_tying``, unless the widths agree: the first update takes ``hidden_channels``
            and gives ``n_heads`` times that. (In Chainer Chemistry it fails at the first call.)

    Raises:
        ValueError: unknown ``softmax_mode``; a tied update that cannot take its own result.

    Source:
        Busbridge et al. 2019 (arXiv:1904.05811); Chainer Chemistry 0.7.1, models/relgat.py.
    """

    update_kind = RelGATUpdate
    options = (
        'out_dim',
        'n_heads',
        'hidden_channels',
        'n_update_layers',
        'concat_hidden',
        'concat_heads',
        'weight_tying',
        'negative_slope',
        'n_edge_types',
        'dropout_ratio',
    )

    def __init__(
        self,
        out_dim,
        hidden_channels=16,
        n_update_layers=4,
        n_atom_types=MAX_ATOMIC_NUM,
        concat_hidden=False,
        dropout_ratio=-1.0,
        weight_tying=False,
        activation=functions.identity,
        n_edge_types=4,
        n_heads=3,
        negative_slope=0.2,
        softmax_mode='across',
        concat_heads=False,
    ):
        super().__init__()
        width = hidden_channels * (n_heads if concat_heads else 1)
        # In upstream's order, so that one seed gives the same parameters.
        self._assemble(
            embed=EmbedAtomID(out_size=hidden_channels, in_size=n_atom_types),
            update_layers=[
                RelGATUpdate(
                    width if i else hidden_channels,
                    hidden_channels,
                    n_heads=n_heads,
                    n_edge_types=n_edge_types,
                    dropout_ratio=dropout_ratio,
                    negative_slope=negative_slope,
                    softmax_mode=softmax_mode,
                    concat_heads=concat_heads,
                )
                for i in range(n_update_layers)
            ],
            readout_layers=[
                GGNNReadout(
                    out_dim,
                    width + hidden_channels,
                    activation=activation,
                    activation_agg=activation,
                )
                for _ in range(n_update_layers if concat_hidden else 1)
            ],
            out_dim=out_dim,
            n_heads=n_heads,
            hidden_channels=hidden_channels,
            n_update_layers=n_update_layers,
            concat_hidden=concat_hidden,
            concat_heads=concat_heads,
            weight_tying=weight_tying,
            negative_slope=negative_slope,
            n_edge_types=n_edge_types,
            dropout_ratio=dropout_ratio,
        )

    def _assemble(self, **parts):
        super()._assemble(**parts)
        if (
            self.weight_tying
            and self.concat_heads
            and self.n_update_layers > 1
            and self.n_heads != 1
        ):
            raise ValueError(
                'weight_tying: expected False to go with concat_heads, because the tied update '
                'takes %d channels and gives %d, got %r'
                % (self.hidden_channels, self.hidden_channels * self.n_heads, self.weight_tying)
            )

    def forward(self, atom_array, adj):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations, of which only the
                places of entries count.

        Returns:
            Variable: (n_graphs, out_dim), or (n_graphs, out_dim * n_update_layers) with
            ``concat_hidden``.

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        return predict(self, atom_array, adj)
