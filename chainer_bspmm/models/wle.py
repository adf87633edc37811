"""The CWLE and GWLE models (Weisfeiler-Lehman labels beside atom ids) on sparse batches."""

import numpy

import chainer
from chainer import functions
from chainer_chemistry.models.cwle import cwle_graph_conv_model
from chainer_chemistry.models.cwle import cwle_net
from chainer_chemistry.models.gwle import gwle_graph_conv_model
from chainer_chemistry.models.gwle import gwle_net

from chainer_bspmm.models.graph_conv_model import GraphConvModel
from chainer_bspmm.links.embed import embed_ids


class _WLEGraphConvModel(GraphConvModel):
    """What both have in common; a subclass combines the two embeddings in `_combine`."""

    dense = chainer.Chain  # no constructor of its own

    def forward(self, atom_array, adj, wle_array=None, is_real_node=None):
        """Predict.

        Args:
            atom_array (array): (n_nodes,) int32 atom ids, or (n_nodes, hidden_channels) node
                features. Where ``adj`` is padded: (n_graphs, N) ids or (n_graphs, N,
                hidden_channels) features.
            adj (BatchedCSR): adjacency matrices, of as many relations as the updates take. Values
                of another dtype than the features' are converted.
            wle_array (array or None): (n_nodes,) int32 labels in [0, n_wle_types), or (n_graphs, N)
                where ``adj`` is padded: the column that ``CSRConverter(n_node_columns=1)`` gives
                after the adjacency; not used ``with_wle=False``. On a GPU its values are not
                checked.
            is_real_node (array or None): (n_nodes,), or (n_graphs, N) where ``adj`` is padded;
                nodes for which it is 0 do not count in the readout (``GeneralReadout`` counts all,
                as in Chainer Chemistry). None: all count.

        Returns:
            Variable: (n_graphs, out_dim); with ``concat_hidden`` (n_graphs, n_update_layers *
            out_dim).

        Raises:
            TypeError: ``adj`` is no BatchedCSR, ``wle_array`` no array.
            ValueError: shapes do not fit, or an atom id is outside of the embedding.
        """
        h, adj = self._embed(atom_array, adj)
        h0 = h
        if self.with_wle:
            labels = _labels(wle_array, adj, self.embed_wle.W.shape[0])
            h = self._combine(h, embed_ids(self.embed_wle, labels))
        return self._convolve(h, h0, adj, is_real_node)


def _labels(wle_array, adj, n_wle_types):
    if not isinstance(wle_array, chainer.get_array_types()):
        raise TypeError(
            'wle_array: expected an array of a label for each atom, got %s'
            % type(wle_array).__name__
        )
    shape = (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)
    if wle_array.shape != shape or wle_array.dtype.kind != 'i':
        raise ValueError(
            'wle_array: expected integers of shape %s, a label for each atom of %r, got %s of '
            'shape %s; CSRConverter(n_node_columns=1) makes them'
            % (shape, adj, wle_array.dtype, wle_array.shape)
        )
    if isinstance(wle_array, numpy.ndarray) and wle_array.size:
        smallest, largest = int(wle_array.min()), int(wle_array.max())
        if smallest < 0 or largest >= n_wle_types:
            raise ValueError(
                'wle_array: expected labels in [0, %d), n_wle_types, got %d'
                % (n_wle_types, smallest if smallest < 0 else largest)
            )
    return wle_array.reshape(-1)


def _linear(linear, h):
    # Past GraphLinear's own __call__, which insists on three dimensions.
    return chainer.links.Linear.__call__(linear, h)


class CWLEGraphConvModel(_WLEGraphConvModel):
    """Predict a vector per molecule from atoms and labels of their neighbourhoods, concatenated.

    Takes the place of ``chainer_chemistry.models.cwle.CWLEGraphConvModel``: the same arguments
    (``update_layer`` and ``readout_layer`` are classes of Chainer Chemistry), parameter paths and
    snapshots; packed and padded as :class:`chainer_bspmm.models.GWMGraphConvModel`, whose quirks of
    hidden channels and weight tying it shares. Batches come from
    ``CSRConverter(n_node_columns=1)``: the labels of a molecule are a column of its own. After more
    than one round of labelling the atoms are labels too, which begin at 0: then with
    ``strip_padding=False``.

    Source:
        Chainer Chemistry 0.7.1, models/cwle/cwle_graph_conv_model.py.
    """

    dense = cwle_graph_conv_model.CWLEGraphConvModel

    def _assemble_wrapper(self, model):
        if model.with_wle:
            self.embed_wle = model.embed_wle
            self.linear_for_concat_wle = model.linear_for_concat_wle

    def _combine(self, h, labels):
        return _linear(self.linear_for_concat_wle, functions.concat((h, labels), axis=1))


class GWLEGraphConvModel(_WLEGraphConvModel):
    """As :class:`CWLEGraphConvModel`, but the two embeddings mixed by a gate.

    ``(1 - z) h + z l`` with ``z = sigmoid(W1 h + W2 l)``, where l is the embedded label. Takes the
    place of ``chainer_chemistry.models.gwle.GWLEGraphConvModel``.

    Source:
        Chainer Chemistry 0.7.1, models/gwle/gwle_graph_conv_model.py.
    """

    dense = gwle_graph_conv_model.GWLEGraphConvModel

    def _assemble_wrapper(self, model):
        if model.with_wle:
            self.embed_wle = model.embed_wle
            self.gate_W1 = model.gate_W1
            self.gate_W2 = model.gate_W2

    def _combine(self, h, labels):
        z = functions.sigmoid(_linear(self.gate_W1, h) + _linear(self.gate_W2, labels))
        return (1 - z) * h + z * labels


class GGNN_CWLE(CWLEGraphConvModel):
    """:class:`CWLEGraphConvModel` with the update and readout of GGNN."""

    dense = cwle_net.GGNN_CWLE


class GIN_CWLE(CWLEGraphConvModel):
    """:class:`CWLEGraphConvModel` with the update of GIN and the readout of GGNN."""

    dense = cwle_net.GIN_CWLE


class NFP_CWLE(CWLEGraphConvModel):
    """:class:`CWLEGraphConvModel` with the update and readout of NFP."""

    dense = cwle_net.NFP_CWLE


class RSGCN_CWLE(CWLEGraphConvModel):
    """:class:`CWLEGraphConvModel` with the update of RSGCN; ``out_dim`` is hidden_channels."""

    dense = cwle_net.RSGCN_CWLE


class RelGAT_CWLE(CWLEGraphConvModel):
    """:class:`CWLEGraphConvModel` with the update of RelGAT and the readout of GGNN."""

    dense = cwle_net.RelGAT_CWLE


class RelGCN_CWLE(CWLEGraphConvModel):
    """:class:`CWLEGraphConvModel` with the update of RelGCN and the readout of GGNN."""

    dense = cwle_net.RelGCN_CWLE


class GGNN_GWLE(GWLEGraphConvModel):
    """:class:`GWLEGraphConvModel` with the update and readout of GGNN."""

    dense = gwle_net.GGNN_GWLE


class GIN_GWLE(GWLEGraphConvModel):
    """:class:`GWLEGraphConvModel` with the update of GIN and the readout of GGNN."""

    dense = gwle_net.GIN_GWLE


class NFP_GWLE(GWLEGraphConvModel):
    """:class:`GWLEGraphConvModel` with the update and readout of NFP."""

    dense = gwle_net.NFP_GWLE


class RSGCN_GWLE(GWLEGraphConvModel):
    """:class:`GWLEGraphConvModel` with the update of RSGCN; ``out_dim`` is hidden_channels."""

    dense = gwle_net.RSGCN_GWLE


class RelGAT_GWLE(GWLEGraphConvModel):
    """:class:`GWLEGraphConvModel` with the update of RelGAT and the readout of GGNN."""

    dense = gwle_net.RelGAT_GWLE


class RelGCN_GWLE(GWLEGraphConvModel):
    """:class:`GWLEGraphConvModel` with the update of RelGCN and the readout of GGNN."""

    dense = gwle_net.RelGCN_GWLE


MODELS = (
    CWLEGraphConvModel,
    GGNN_CWLE,
    GIN_CWLE,
    NFP_CWLE,
    RSGCN_CWLE,
    RelGAT_CWLE,
    RelGCN_CWLE,
    GWLEGraphConvModel,
    GGNN_GWLE,
    GIN_GWLE,
    NFP_GWLE,
    RSGCN_GWLE,
    RelGAT_GWLE,
    RelGCN_GWLE,
)
