"""GIN (graph isomorphism network) on sparse batches."""

from typing import Any

import chainer
from chainer_chemistry.models import gin

from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.links.gin_update import GINUpdate
from chainer_bspmm.links.linear import zero_unused
from chainer_bspmm.links.rows import as_given
from chainer_bspmm.links.rows import node_shape
from chainer_bspmm.models.message_passing import MessagePassing
from chainer_bspmm.sparse import BatchedCSR


class GIN(MessagePassing, gin.GIN):
    """Predict a vector per molecule, or per atom, with the graph isomorphism network.

    Arguments and parameters are upstream's, and so are these quirks, which trained parameters
    depend on: every node counts twice in its own update (:class:`~chainer_bspmm.links.GINUpdate`),
    and ``first_mlp`` is never used; its weights become zeros in the first forward pass.

    Raises:
        ValueError: ``out_channels`` is not ``hidden_channels``, but the readout or a tied update
            takes that. (Upstream fails at the first call.)

    Source:
        Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826); Chainer Chemistry 0.7.1, models/gin.py.
    """

    parts = {'update_layers': (GINUpdate,), **MessagePassing.parts}

    @staticmethod
    def check(link):
        if not len(link.update_layers):
            return
        width = link.update_layers[-1].graph_mlp.layers[-1].out_size
        is_repeated = link.weight_tying and link.n_update_layers > 1
        if width != link.hidden_channels and (is_repeated or not link.node_embedding):
            raise ValueError(
                'out_channels: expected hidden_channels = %d, the width that %s, got %d'
                % (
                    link.hidden_channels,
                    'the tied update takes' if is_repeated else "the readout's parameters have",
                    width,
                )
            )

    def forward(
        self, atom_array: Any, adj: BatchedCSR, is_real_node: Any = None
    ) -> chainer.Variable:
        """Predict; with ``node_embedding`` return (n_nodes, out_channels) features of the nodes.

        If ``adj`` is padded, these are (n_graphs, N, out_channels). Everything else is as in
        :meth:`MessagePassing.forward`.
        """
        for layer in self.first_mlp.layers:
            zero_unused(layer, self.hidden_channels)
        # Upstream rectifies again after every update, which changes no number: the update link
        # rectifies, and dropout only scales.
        if not self.node_embedding:
            return self._predict(atom_array, adj, is_real_node=is_real_node)
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        for step in range(self.n_update_layers):
            h = self.update_layers[0 if self.weight_tying else step](h, adj)
        return as_given(h, node_shape(adj))
