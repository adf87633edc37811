"""Forward pass of GGNN, GIN, GNNFiLM, MPNN and RelGAT."""

from typing import Any

from chainer import functions, Variable

from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.links.ggnn_readout import GGNNReadout
from chainer_bspmm.models.sparse_model import SparseModel
from chainer_bspmm.sparse import BatchedCSR


class MessagePassing(SparseModel):
    """Embedding, updates, and a readout after the last or (``concat_hidden``) after each."""

    parts = {'readout_layers': (GGNNReadout,)}

    def forward(self, atom_array: Any, adj: BatchedCSR, is_real_node: Any = None) -> Variable:
        """Predict a vector per molecule.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. If ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N, hidden_channels)
                features.
            adj (BatchedCSR): adjacency matrices, with as many relations as the updates take. Values
                are converted to the dtype of the features.
            is_real_node (array or None): 1 for nodes that the readout counts, 0 for the others;
                (n_nodes,), or (n_graphs, N) if ``adj`` is padded. With None, all nodes count.

        Returns:
            Variable: (n_graphs, out_dim), or (n_graphs, out_dim * n_update_layers) with
            ``concat_hidden``.

        Raises:
            TypeError: ``adj`` is not a BatchedCSR.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        return self._predict(atom_array, adj, is_real_node=is_real_node)

    def _predict(self, atom_array, adj, between=None, **of_readout):
        """Predict; apply the activation `between`, if there is one, between updates as GIN does."""
        self.reset_state()
        h = h0 = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        outputs = []
        for step in range(self.n_update_layers):
            h = self.update_layers[0 if self.weight_tying else step](h, adj)
            if between is not None and step != self.n_message_layers - 1:
                h = between(h)
            if self.concat_hidden:
                outputs.append(self.readout_layers[step](h=h, adj=adj, h0=h0, **of_readout))
        if self.concat_hidden:
            return functions.concat(outputs, axis=1)
        return self.readout_layers[0](h=h, adj=adj, h0=h0, **of_readout)

    def reset_state(self) -> None:
        """Forget the state of the updates that have one, as :meth:`forward` does at its start."""
        for update in self.update_layers:
            if hasattr(update, 'reset_state'):
                update.reset_state()
