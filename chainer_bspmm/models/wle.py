"""The CWLE and GWLE models (Weisfeiler-Lehman labels in addition to atom ids) on sparse batches."""

from typing import Any

import numpy

import chainer
from chainer import functions
from chainer_chemistry.models.cwle import cwle_graph_conv_model, cwle_net
from chainer_chemistry.models.gwle import gwle_graph_conv_model, gwle_net

from chainer_bspmm.links.embed import call_embed, embed_ids, node_shape
from chainer_bspmm.links.inner import is_known, LINEAR, TABLES
from chainer_bspmm.links.linear import linear_rows
from chainer_bspmm.models.graph_conv_model import GraphConvModel
from chainer_bspmm.sparse import BatchedCSR


class WLEGraphConvModel(GraphConvModel):
    """Base of the CWLE and GWLE models, which combine two embeddings by `_combine`."""

    def forward(
        self, atom_array: Any, adj: BatchedCSR, wle_array: Any = None, is_real_node: Any = None
    ) -> chainer.Variable:
        """Predict; all but ``wle_array`` is as in :meth:`GWMGraphConvModel.forward`.

        Args:
            wle_array (array or None): int32 labels in [0, n_wle_types), the column that
                `CSRConverter` puts after the adjacency; ignored if ``with_wle=False``. (n_rows,),
                or (n_graphs, N) if ``adj`` is padded, or (n_graphs, n) if every molecule has n
                atoms. On a GPU its values are not checked.
        """
        h, adj = self._embed(atom_array, adj)
        h0 = h
        if self.with_wle:
            is_table = is_known(self.embed_wle, TABLES)
            labels = _labels(wle_array, adj, len(self.embed_wle.W) if is_table else None)
            if is_table:
                labels = embed_ids(self.embed_wle, labels.reshape(-1))
            else:
                labels = call_embed(self.embed_wle, labels, adj)
            h = self._combine(h, labels)
        return self._convolve(h, h0, adj, is_real_node)


def _labels(wle_array, adj, n_wle_types):
    if not isinstance(wle_array, chainer.get_array_types()):
        text = 'wle_array: expected an array with a label for each atom, got %s'
        raise TypeError(text % type(wle_array).__name__)
    shape = node_shape(adj)
    per_graph = adj.n_graphs, adj.max_rows - (adj.layout == 'folded')
    # If all molecules have the same size, a converter cannot tell whether the last column has
    # labels of atoms or of molecules, and leaves it as (n_graphs, n).
    one_size = adj.n_rows == adj.n_graphs * adj.max_rows and not adj.has_spare
    if one_size and wle_array.shape == per_graph:
        if adj.layout == 'folded':
            xp = chainer.backend.get_array_module(wle_array)
            wle_array = xp.pad(wle_array, ((0, 0), (0, 1)), 'constant')
        wle_array = wle_array.reshape(shape)
    if wle_array.shape != shape or wle_array.dtype.kind != 'i':
        raise ValueError(
            'wle_array: expected integers of shape %s, a label for each atom of %r, got %s of '
            'shape %s; CSRConverter(n_node_columns=1) makes them'
            % (shape, adj, wle_array.dtype, wle_array.shape)
        )
    if n_wle_types is not None and isinstance(wle_array, numpy.ndarray) and wle_array.size:
        smallest, largest = int(wle_array.min()), int(wle_array.max())
        if smallest < 0 or largest >= n_wle_types:
            text = 'wle_array: expected labels in [0, %d), n_wle_types, got %d'
            raise ValueError(text % (n_wle_types, smallest if smallest < 0 else largest))
    return wle_array


class CWLEGraphConvModel(WLEGraphConvModel, cwle_graph_conv_model.CWLEGraphConvModel):
    """Predict a vector per molecule from atoms and labels of their neighbourhoods, concatenated.

    It is a :class:`GraphConvModel` whose molecules have a column of labels after the adjacency.
    After more than one round of labelling, the ids of atoms are labels, too, and labels begin at 0.
    So packed batches must come from ``CSRConverter('packed', strip_padding=False)``.

    Source:
        Chainer Chemistry 0.7.1, models/cwle/cwle_graph_conv_model.py.
    """

    inner_layers = {'linear_for_concat_wle': LINEAR, **WLEGraphConvModel.inner_layers}

    def _combine(self, h, labels):
        return linear_rows(self.linear_for_concat_wle, functions.concat((h, labels), axis=1))


class GWLEGraphConvModel(WLEGraphConvModel, gwle_graph_conv_model.GWLEGraphConvModel):
    """Predict as :class:`CWLEGraphConvModel`, but with the two embeddings mixed by a gate.

    The mixture is ``(1 - z) h + z l`` with ``z = sigmoid(W1 h + W2 l)``, where l is the embedded
    label.

    Source:
        Chainer Chemistry 0.7.1, models/gwle/gwle_graph_conv_model.py.
    """

    inner_layers = {'gate_W1': LINEAR, 'gate_W2': LINEAR, **WLEGraphConvModel.inner_layers}

    def _combine(self, h, labels):
        z = functions.sigmoid(linear_rows(self.gate_W1, h) + linear_rows(self.gate_W2, labels))
        return (1 - z) * h + z * labels


class GGNN_CWLE(CWLEGraphConvModel, cwle_net.GGNN_CWLE):
    """:class:`CWLEGraphConvModel` with the update and readout of GGNN."""


class GIN_CWLE(CWLEGraphConvModel, cwle_net.GIN_CWLE):
    """:class:`CWLEGraphConvModel` with the update of GIN and the readout of GGNN."""


class NFP_CWLE(CWLEGraphConvModel, cwle_net.NFP_CWLE):
    """:class:`CWLEGraphConvModel` with the update and readout of NFP."""


class RSGCN_CWLE(CWLEGraphConvModel, cwle_net.RSGCN_CWLE):
    """:class:`CWLEGraphConvModel` with the update of RSGCN; ``out_dim`` is hidden_channels."""


class RelGAT_CWLE(CWLEGraphConvModel, cwle_net.RelGAT_CWLE):
    """:class:`CWLEGraphConvModel` with the update of RelGAT and the readout of GGNN."""


class RelGCN_CWLE(CWLEGraphConvModel, cwle_net.RelGCN_CWLE):
    """:class:`CWLEGraphConvModel` with the update of RelGCN and the readout of GGNN."""


class GGNN_GWLE(GWLEGraphConvModel, gwle_net.GGNN_GWLE):
    """:class:`GWLEGraphConvModel` with the update and readout of GGNN."""


class GIN_GWLE(GWLEGraphConvModel, gwle_net.GIN_GWLE):
    """:class:`GWLEGraphConvModel` with the update of GIN and the readout of GGNN."""


class NFP_GWLE(GWLEGraphConvModel, gwle_net.NFP_GWLE):
    """:class:`GWLEGraphConvModel` with the update and readout of NFP."""


class RSGCN_GWLE(GWLEGraphConvModel, gwle_net.RSGCN_GWLE):
    """:class:`GWLEGraphConvModel` with the update of RSGCN; ``out_dim`` is hidden_channels."""


class RelGAT_GWLE(GWLEGraphConvModel, gwle_net.RelGAT_GWLE):
    """:class:`GWLEGraphConvModel` with the update of RelGAT and the readout of GGNN."""


class RelGCN_GWLE(GWLEGraphConvModel, gwle_net.RelGCN_GWLE):
    """:class:`GWLEGraphConvModel` with the update of RelGCN and the readout of GGNN."""


MODELS = tuple(
    kind
    for base in (CWLEGraphConvModel, GWLEGraphConvModel)
    for kind in (base, *base.__subclasses__())
)
