"""The GWM models (graph warp module around an update) on sparse batches."""

from typing import Any

import chainer
from chainer import functions
from chainer_chemistry.models.gwm import gwm_graph_conv_model, gwm_net

from chainer_bspmm.compat.chemistry_repairs import zero_unused
from chainer_bspmm.links.gwm import GWM
from chainer_bspmm.links.sparse import swaps_at
from chainer_bspmm.models.graph_conv_model import GraphConvModel
from chainer_bspmm.sparse import BatchedCSR


class GWMGraphConvModel(GraphConvModel, gwm_graph_conv_model.GWMGraphConvModel):
    """Predict a vector per molecule by updates in which a super node of the molecule takes part.

    Arguments are as in :class:`GraphConvModel`. In folded and padded batches the super node attends
    to phantom atoms, too. With ``concat_hidden`` the super node exchanges messages with the atoms,
    but takes no part in the readout, as in upstream. ``linear_for_concat_super`` is then not used,
    and its weights become zeros.

    Source:
        Ishiguro, Maeda, Koyama 2019 (arXiv:1902.01020); Chainer Chemistry 0.7.1,
        models/gwm/gwm_graph_conv_model.py.
    """

    @classmethod
    def swaps(cls, link):
        pairs = super().swaps(link)
        return pairs + swaps_at('gwm', link.gwm, (GWM,)) if link.with_gwm else pairs

    def forward(
        self, atom_array: Any, adj: BatchedCSR, super_node: Any = None, is_real_node: Any = None
    ) -> chainer.Variable:
        """Predict a vector per molecule.

        Args:
            atom_array, adj, is_real_node: as in :meth:`MessagePassing.forward`, but
                ``GeneralReadout`` counts all nodes, as in upstream.
            super_node (array or None): (n_graphs, n_features) floats, the column that the ``*_gwm``
                preprocessors put after the adjacency; ignored if ``with_gwm=False``.

        Returns:
            Variable: (n_graphs, out_dim); with ``concat_hidden`` (n_graphs, n_update_layers *
            out_dim).

        Raises:
            TypeError: as in :meth:`MessagePassing.forward`, or ``super_node`` is not an array.
            ValueError: as in that method, or ``super_node`` has another shape.
        """
        h, adj = self._embed(atom_array, adj)
        if not self.with_gwm:
            return self._convolve(h, h, adj, is_real_node)
        if not isinstance(super_node, chainer.get_array_types() + (chainer.Variable,)):
            text = 'super_node: expected an array with a row for each molecule, got %s'
            raise TypeError(text % type(super_node).__name__)
        if super_node.ndim != 2 or len(super_node) != adj.n_graphs:
            text = 'super_node: expected shape (%d, n_features) to go with %r, got %s'
            raise ValueError(text % (adj.n_graphs, adj, super_node.shape))
        g = self.embed_super(super_node)

        def mix(h, h_new, index):
            nonlocal g
            h, g = self.gwm(h, h_new, g, adj, index)
            return h

        y = self._convolve(h, h, adj, is_real_node, mix)
        last = self.linear_for_concat_super
        if self.concat_hidden:
            zero_unused(last, y.shape[1] // self.n_update_layers + g.shape[1])
            return y
        return functions.relu(last(functions.concat((y, g), axis=1)))


class GGNN_GWM(GWMGraphConvModel, gwm_net.GGNN_GWM):
    """:class:`GWMGraphConvModel` with the update and readout of GGNN."""


class GIN_GWM(GWMGraphConvModel, gwm_net.GIN_GWM):
    """:class:`GWMGraphConvModel` with the update of GIN and the readout of GGNN."""


class NFP_GWM(GWMGraphConvModel, gwm_net.NFP_GWM):
    """:class:`GWMGraphConvModel` with the update and readout of NFP."""


class RSGCN_GWM(GWMGraphConvModel, gwm_net.RSGCN_GWM):
    """:class:`GWMGraphConvModel` with the update of RSGCN; ``out_dim`` is hidden_channels."""


MODELS = (GWMGraphConvModel, GGNN_GWM, GIN_GWM, NFP_GWM, RSGCN_GWM)
