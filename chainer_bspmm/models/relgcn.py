"""RelGCN (relational graph convolution) on sparse batches: upstream's two models."""

from typing import Any

from chainer import functions, Variable
from chainer_chemistry.models import relgcn

from chainer_bspmm.ops.scale_adj import scale_adj
from chainer_bspmm.links import GGNNReadout, RelGCNSparseUpdate, RelGCNUpdate, ScatterGGNNReadout
from chainer_bspmm.links.embed import embed_atoms, node_shape
from chainer_bspmm.links.inner import check_layers, LINEAR
from chainer_bspmm.links.linear import linear_rows
from chainer_bspmm.links.update import activated_update
from chainer_bspmm.models.sparse_model import EdgeListModel, SparseModel
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.batched_csr import check_adjacency


class RelationalModel(SparseModel):
    """Base of RelGCN and RelGCNSparse, with their forward pass."""

    @classmethod
    def swaps(cls, link):
        if link.input_type == 'float':
            check_layers(link, {'embed': LINEAR})
        return super().swaps(link)

    def forward(self, x: Any, adj: BatchedCSR) -> Variable:
        """Predict as :meth:`MessagePassing.forward`; x has the ``input_type`` of the model."""
        h = self._embed(x, adj)
        adj = adj.astype(h.dtype)
        if self.scale_adj:
            adj = scale_adj(adj, h.dtype)
        for rgcn_conv in self.rgcn_convs:
            h = activated_update(rgcn_conv, h, adj, functions.tanh)
        return self.rgcn_readout(h, adj)

    def _embed(self, x, adj):
        is_ids = not hasattr(x, 'dtype') or x.dtype.kind in 'iu'
        if is_ids != (self.input_type == 'int'):
            expected = 'features' if is_ids else 'atom ids'
            dtype = getattr(x, 'dtype', type(x).__name__)
            text = "x: expected %s with input_type='%s', got %s"
            raise ValueError(text % (expected, self.input_type, dtype))
        if is_ids:
            return embed_atoms(self.embed, x, adj)
        check_adjacency(adj)
        lead = node_shape(adj)
        if x.shape[:-1] != lead:
            text = 'x: expected shape %s and one more dimension to go with %r, got %s'
            raise ValueError(text % (lead, adj, x.shape))
        return linear_rows(self.embed, x.reshape((adj.n_rows, x.shape[-1])))


class RelGCN(RelationalModel, relgcn.RelGCN):
    """Predict a vector per molecule with the relational graph convolution.

    Arguments and parameters are upstream's; with ``scale_adj`` the adjacency matrices are divided
    by the source's degree (:func:`~chainer_bspmm.ops.scale_adj.scale_adj`).

    Source:
        Schlichtkrull et al. 2017 (arXiv:1703.06103); Chainer Chemistry 0.7.1, models/relgcn.py.
    """

    parts = {'rgcn_convs': (RelGCNUpdate,), 'rgcn_readout': (GGNNReadout,)}


class RelGCNSparse(EdgeListModel, RelationalModel, relgcn.RelGCNSparse):
    """Predict as :class:`RelGCN`, with the parameters of Chainer Chemistry's RelGCNSparse.

    Batches are packed, with a relation for each type of edge: ``to_sparse(data, n_edge_types)``.
    With ``scale_adj`` upstream fails at the first call.
    """

    parts = {'rgcn_convs': (RelGCNSparseUpdate,), 'rgcn_readout': (ScatterGGNNReadout,)}
