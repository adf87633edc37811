"""MPNN (message passing neural network) with the messages of GGNN on sparse batches."""

from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.models.mpnn import MPNN as DenseMPNN

from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.links import GGNNUpdate
from chainer_bspmm.links.mpnn_readout import MPNNReadout
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.models.updates_and_readouts import predict
from chainer_bspmm.models.updates_and_readouts import RecurrentUpdatesAndReadouts

# Why the other message function has no sparse form.
EDGENET = (
    'gives every pair of atoms, bonded or not, a matrix of its own, made by a network with '
    'biases: its messages come from all atoms, and no entry is zero'
)


class MPNN(RecurrentUpdatesAndReadouts):
    """Predict a vector per molecule by message passing, with messages summed over neighbours.

    Takes the place of ``chainer_chemistry.models.MPNN`` with ``message_func='ggnn'``: parameter
    paths and snapshots are the same; packed and padded as :class:`chainer_bspmm.models.GGNN`, whose
    updates these are.

    Args:
        out_dim (int): width of the result.
        hidden_channels (int): width of the node features.
        n_update_layers (int): number of updates.
        n_atom_types (int): size of the embedding; atom ids lie in [0, n_atom_types).
        concat_hidden (bool): read out after every update, the results side by side.
        weight_tying (bool): one update link for all updates.
        n_edge_types (int): number of relations.
        nn (None): a network for ``'edgenet'``.
        message_func (str): ``'ggnn'``. The default of Chainer Chemistry, ``'edgenet'``, raises.
        readout_func (str): ``'set2set'`` or ``'ggnn'``.

    Raises:
        ValueError: ``message_func='edgenet'``, which has no sparse form; or an unknown readout.

    Source:
        Gilmer et al. 2017 (arXiv:1704.01212); Chainer Chemistry 0.7.1, models/mpnn.py.
    """

    options = (
        'out_dim',
        'hidden_channels',
        'n_update_layers',
        'n_edge_types',
        'concat_hidden',
        'weight_tying',
        'message_func',
        'readout_func',
    )

    def __init__(
        self,
        out_dim,
        hidden_channels=16,
        n_update_layers=4,
        n_atom_types=MAX_ATOMIC_NUM,
        concat_hidden=False,
        weight_tying=True,
        n_edge_types=4,
        nn=None,
        message_func='edgenet',
        readout_func='set2set',
    ):
        super().__init__()
        self._assemble(
            DenseMPNN(
                out_dim,
                hidden_channels,
                n_update_layers,
                n_atom_types,
                concat_hidden,
                weight_tying,
                n_edge_types,
                nn,
                message_func,
                readout_func,
            )
        )

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        return twin_of(model, cls, model)

    def _assemble(self, model):
        if model.message_func != 'ggnn':
            raise ValueError(
                "model.message_func: expected 'ggnn', got %r, which %s"
                % (model.message_func, EDGENET)
            )
        readout = GGNNReadout if model.readout_func == 'ggnn' else MPNNReadout
        super()._assemble(
            embed=model.embed,
            update_layers=map(GGNNUpdate.from_dense, model.update_layers),
            readout_layers=map(readout.from_dense, model.readout_layers),
            **self._options_of(model),
        )

    def forward(self, atom_array, adj):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices of ``n_edge_types`` relations. Values of another
                dtype than the features' are converted.

        Returns:
            Variable: (n_graphs, out_dim), or (n_graphs, out_dim * n_update_layers) with
            ``concat_hidden``.

        Raises:
            TypeError: ``adj`` is no BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        self.reset_state()
        return predict(self, atom_array, adj)
