"""GNNFiLM (graph network with feature-wise linear modulation) on sparse batches."""

from chainer import functions
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.links import EmbedAtomID

from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.links import GNNFiLMUpdate
from chainer_bspmm.models.updates_and_readouts import predict
from chainer_bspmm.models.updates_and_readouts import UpdatesAndReadouts


class GNNFiLM(UpdatesAndReadouts):
    """Predict a vector per molecule with feature-wise linear modulation of its messages.

    Takes the place of ``chainer_chemistry.models.GNNFiLM``: the same arguments, parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch, phantom atoms included unless ``is_real_node`` leaves them out.

    Args:
        out_dim (int): width of the result.
        hidden_channels (int): width of the node features.
        n_update_layers (int): number of updates.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        concat_hidden (bool): read out after every update, with parameters of its own, and put the
            results side by side.
        weight_tying (bool): one update link for all updates.
        activation (callable): of the readout, both of the nodes and of the sums; that of the
            updates is a rectifier.
        n_edge_types (int): number of relations; Chainer Chemistry's preprocessor makes five.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192); Chainer Chemistry 0.7.1, models/gnn_film.py.
    """

    update_kind = GNNFiLMUpdate
    options = (
        'out_dim',
        'hidden_channels',
        'n_update_layers',
        'n_edge_types',
        'activation',
        'concat_hidden',
        'weight_tying',
    )

    def __init__(
        self,
        out_dim,
        hidden_channels=16,
        n_update_layers=4,
        n_atom_types=MAX_ATOMIC_NUM,
        concat_hidden=False,
        weight_tying=True,
        activation=functions.identity,
        n_edge_types=5,
    ):
        super().__init__()
        self._assemble(
            embed=EmbedAtomID(out_size=hidden_channels, in_size=n_atom_types),
            update_layers=[
                GNNFiLMUpdate(hidden_channels=hidden_channels, n_edge_types=n_edge_types)
                for _ in range(1 if weight_tying else n_update_layers)
            ],
            readout_layers=[
                GGNNReadout(
                    out_dim, hidden_channels * 2, activation=activation, activation_agg=activation
                )
                for _ in range(n_update_layers if concat_hidden else 1)
            ],
            out_dim=out_dim,
            hidden_channels=hidden_channels,
            n_update_layers=n_update_layers,
            n_edge_types=n_edge_types,
            activation=activation,
            concat_hidden=concat_hidden,
            weight_tying=weight_tying,
        )

    def forward(self, atom_array, adj, is_real_node=None):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations. Values of another
                dtype than the features' are converted.
            is_real_node (array or None): 1 for nodes that the readout counts, 0 for the others;
                (n_nodes,), or (n_graphs, N) where ``adj`` is padded.

        Returns:
            Variable: (n_graphs, out_dim), or (n_graphs, out_dim * n_update_layers) with
            ``concat_hidden``.

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        return predict(self, atom_array, adj, is_real_node=is_real_node)
