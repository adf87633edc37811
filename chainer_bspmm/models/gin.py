"""GIN (graph isomorphism network) on sparse batches: upstream's two models."""

from typing import Any

import chainer
from chainer import functions
from chainer_chemistry.models import gin

from chainer_bspmm.compat.chemistry_repairs import zero_unused
from chainer_bspmm.links.embed import embed_atoms, node_shape
from chainer_bspmm.links.ggnn_readout import ScatterGGNNReadout
from chainer_bspmm.links.gin_update import GINSparseUpdate, GINUpdate
from chainer_bspmm.links.inner import is_known
from chainer_bspmm.links.mlp import MLP
from chainer_bspmm.links.update import activated_update
from chainer_bspmm.models.message_passing import MessagePassing
from chainer_bspmm.models.sparse_model import EdgeListModel
from chainer_bspmm.sparse import BatchedCSR


class GIN(MessagePassing, gin.GIN):
    """Predict a vector per molecule, or per atom, with the graph isomorphism network.

    Arguments and parameters are upstream's, and so are two quirks, because trained parameters
    depend on them. Every node counts twice in its own update
    (:class:`~chainer_bspmm.links.GINUpdate`). ``first_mlp`` is never used; its weights become zeros
    in the first forward pass.

    Raises:
        ValueError: ``out_channels`` is not ``hidden_channels``, although the readout or a tied
            update takes the result. (Upstream fails at the first call.)

    Source:
        Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826); Chainer Chemistry 0.7.1, models/gin.py.
    """

    parts = {'update_layers': (GINUpdate,), **MessagePassing.parts}

    @classmethod
    def swaps(cls, link):
        pairs = super().swaps(link)  # refuses unknown layers, so that their widths can be read
        cls._check_width(link)
        return pairs

    @staticmethod
    def _check_width(link):
        if not len(link.update_layers):
            return
        width = link.update_layers[-1].graph_mlp.layers[-1].out_size
        is_repeated = link.weight_tying and link.n_update_layers > 1
        if width != link.hidden_channels and (is_repeated or not link.node_embedding):
            which = 'the tied update takes' if is_repeated else "the readout's parameters have"
            text = 'out_channels: expected hidden_channels = %d, the width that %s, got %d'
            raise ValueError(text % (link.hidden_channels, which, width))

    def forward(
        self, atom_array: Any, adj: BatchedCSR, is_real_node: Any = None
    ) -> chainer.Variable:
        """Predict; with ``node_embedding`` return (n_nodes, out_channels) features of the nodes.

        With ``node_embedding``, features that are passed instead of atom ids may have any width,
        and the result is (n_graphs, N, out_channels) if ``adj`` is padded. Everything else is as in
        :meth:`MessagePassing.forward`.
        """
        for layer in self.first_mlp.links():
            zero_unused(layer, self.hidden_channels)
        # Upstream rectifies again after every update. That changes nothing, because the update
        # link already rectifies, and dropout only scales. But a user's subclass of the update link
        # may do something else.
        is_rectified = all([is_known(update, (GINUpdate,)) for update in self.update_layers])
        between = None if is_rectified else functions.relu
        if not self.node_embedding:
            return self._predict(atom_array, adj, between, is_real_node=is_real_node)
        h = embed_atoms(self.embed, atom_array, adj, any_width=True)
        adj = adj.astype(h.dtype)
        for step in range(self.n_update_layers):
            h = self.update_layers[0 if self.weight_tying else step](h, adj)
            if between is not None and step != self.n_message_layers - 1:
                h = between(h)
        return functions.reshape(h, node_shape(adj) + h.shape[1:]) if adj.layout == 'padded' else h


class GINSparse(EdgeListModel, gin.GINSparse):
    """Predict a vector per graph, or per node, as Chainer Chemistry's GINSparse does.

    Arguments and parameters are upstream's, and so are these differences from :class:`GIN`: the
    last update is not rectified, features of nodes go through ``first_mlp``, and with
    ``weight_tying`` there is only one update. With atom ids, ``first_mlp`` is never used, and its
    weights become zeros in the first forward pass.

    Raises:
        ValueError: ``concat_hidden``, with which upstream fails at the first call.
    """

    parts = {
        'first_mlp': (MLP,),
        'update_layers': (GINSparseUpdate,),
        'readout_layers': (ScatterGGNNReadout,),
    }

    @staticmethod
    def check(link):
        if link.concat_hidden:
            raise ValueError(
                'concat_hidden: expected False, got True, with which Chainer Chemistry fails in '
                'its forward pass'
            )

    def forward(self, x: Any, adj: BatchedCSR) -> chainer.Variable:
        """Predict; with ``node_embedding`` return (n_nodes, out_channels) features of the nodes.

        It is like :meth:`MessagePassing.forward`, but ``adj`` is packed, ``A[i, j]`` is the number
        of edges from j to i, and features may have any width.
        """
        h = embed_atoms(self.embed, x, adj, any_width=True)
        if x.dtype.kind in 'iu':
            for layer in self.first_mlp.links():
                zero_unused(layer, self.hidden_channels)
        else:
            h = self.first_mlp(h)
        h0, adj = h, adj.astype(h.dtype)
        for step in range(self.n_message_layers):
            update = self.update_layers[0 if self.weight_tying else step]
            is_last = step == self.n_message_layers - 1
            h = activated_update(update, h, adj, functions.identity if is_last else functions.relu)
        return h if self.node_embedding else self.readout_layers[0](h, adj, h0)
