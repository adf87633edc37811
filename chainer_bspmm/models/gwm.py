"""The GWM models (graph warp module around an update) on sparse batches."""

import chainer
from chainer import functions
from chainer_chemistry.models.gwm import gwm_graph_conv_model
from chainer_chemistry.models.gwm import gwm_net

from chainer_bspmm.compat.chemistry_repairs import zero_unused_layers
from chainer_bspmm.links.gwm import GWM
from chainer_bspmm.models.graph_conv_model import GraphConvModel


class GWMGraphConvModel(GraphConvModel):
    """Predict a vector per molecule by updates that a super node of the molecule takes part in.

    Takes the place of ``chainer_chemistry.models.gwm.GWMGraphConvModel``: the same arguments
    (``update_layer`` and ``readout_layer`` are classes of Chainer Chemistry), parameter paths and
    snapshots. On packed batches the answer for a molecule is what that model gives for it alone,
    without padding; on padded batches (``CSRConverter(layout='padded')``) it is what that model
    gives for the padded batch. There the attention of the super node goes to the padding as well.

    Quirks of Chainer Chemistry, kept because trained parameters depend on them: the updates of GGNN
    and GIN work with 16 hidden channels inside, whatever ``hidden_channels``; with
    ``concat_hidden`` the super node speaks to the atoms, but takes no part in the readout, and
    ``linear_for_concat_super`` none at all (the weights that it leaves open are zeros); with
    ``weight_tying`` the activation comes after the first update only.

    Source:
        Ishiguro, Maeda, Koyama 2019 (arXiv:1902.01020); Chainer Chemistry 0.7.1,
        models/gwm/gwm_graph_conv_model.py.
    """

    dense = gwm_graph_conv_model.GWMGraphConvModel

    def _assemble_wrapper(self, model):
        if model.with_gwm:
            self.gwm = GWM.from_dense(model.gwm)
            self.embed_super = model.embed_super
            self.linear_for_concat_super = model.linear_for_concat_super
            if model.concat_hidden:
                # Weights that stay None break optimizers and put a pickled object into snapshots.
                zero_unused_layers(
                    model.linear_for_concat_super,
                    model.linear_for_concat_super.out_size + model.gwm.hidden_dim_super,
                )

    def forward(self, atom_array, adj, super_node=None, is_real_node=None):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices, of as many relations as the updates take. Values
                of another dtype than the features' are converted.
            super_node (array or None): (n_graphs, n_features) floats, the column that the ``*_gwm``
                preprocessors put after the adjacency; not used ``with_gwm=False``.
            is_real_node (array or None): (n_nodes,), or (n_graphs, N) where ``adj`` is padded;
                nodes for which it is 0 do not count in the readout (``GeneralReadout`` counts all,
                as in Chainer Chemistry). None: all count.

        Returns:
            Variable: (n_graphs, out_dim); with ``concat_hidden`` (n_graphs, n_update_layers *
            out_dim).

        Raises:
            TypeError: ``adj`` is no BatchedCSR, ``super_node`` no array.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        h, adj = self._embed(atom_array, adj)
        if not self.with_gwm:
            return self._convolve(h, h, adj, is_real_node)
        if not isinstance(super_node, chainer.get_array_types() + (chainer.Variable,)):
            raise TypeError(
                'super_node: expected an array of a row for each molecule, got %s'
                % type(super_node).__name__
            )
        if super_node.ndim != 2 or len(super_node) != adj.n_graphs:
            raise ValueError(
                'super_node: expected shape (%d, n_features) to go with %r, got %s'
                % (adj.n_graphs, adj, super_node.shape)
            )
        self.gwm.reset_state()
        g = self.embed_super(super_node)

        def mix(h, h_new, index):
            nonlocal g
            h, g = self.gwm(h, h_new, g, adj, index)
            return h

        y = self._convolve(h, h, adj, is_real_node, mix)
        if self.concat_hidden:
            return y
        return functions.relu(self.linear_for_concat_super(functions.concat((y, g), axis=1)))


class GGNN_GWM(GWMGraphConvModel):
    """:class:`GWMGraphConvModel` with the update and readout of GGNN."""

    dense = gwm_net.GGNN_GWM


class GIN_GWM(GWMGraphConvModel):
    """:class:`GWMGraphConvModel` with the update of GIN and the readout of GGNN."""

    dense = gwm_net.GIN_GWM


class NFP_GWM(GWMGraphConvModel):
    """:class:`GWMGraphConvModel` with the update and readout of NFP."""

    dense = gwm_net.NFP_GWM


class RSGCN_GWM(GWMGraphConvModel):
    """:class:`GWMGraphConvModel` with the update of RSGCN; ``out_dim`` is hidden_channels."""

    dense = gwm_net.RSGCN_GWM


MODELS = (GWMGraphConvModel, GGNN_GWM, GIN_GWM, NFP_GWM, RSGCN_GWM)
