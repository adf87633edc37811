"""RSGCN (GCN of Kipf and Welling) on sparse batches."""

from typing import Any

from chainer import functions, Variable
from chainer_chemistry.models import rsgcn

from chainer_bspmm.ops.batch_norm import batch_norm
from chainer_bspmm.ops.dropout import dropout
from chainer_bspmm.links import GeneralReadout, RSGCNUpdate
from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.links.inner import expect_norm, is_known, NORMS
from chainer_bspmm.links.sparse import swaps_at
from chainer_bspmm.models.sparse_model import SparseModel
from chainer_bspmm.sparse import BatchedCSR


class RSGCN(SparseModel, rsgcn.RSGCN):
    """Predict a vector per molecule with the renormalised spectral graph convolution.

    Arguments and parameters are upstream's, but a ``readout`` of your own is called as
    ``readout(h, adj)`` with (n_rows, out_dim) node features and the BatchedCSR. Batch normalisation
    takes its statistics over all nodes, which include phantom atoms in folded and padded batches.

    Source:
        Kipf, Welling 2016 (arXiv:1609.02907); Chainer Chemistry 0.7.1, models/rsgcn.py.
    """

    parts = {'gconvs': (RSGCNUpdate,)}
    inner_layers = {'bnorms': NORMS}

    @classmethod
    def swaps(cls, link):
        pairs = super().swaps(link)
        if type(link.readout) is GeneralReadout.upstream:
            pairs += swaps_at('readout', link.readout, (GeneralReadout,))
        elif not isinstance(link, cls) and not isinstance(link.readout, GeneralReadout):
            raise ValueError(
                'readout: expected chainer_chemistry.links.GeneralReadout, got %r; a readout of '
                'your own is called as readout(h, adj) on sparse batches: pass it to '
                'chainer_bspmm.models.RSGCN' % (link.readout,)
            )
        return pairs

    def _padding_counts(self):
        is_sum = isinstance(self.readout, GeneralReadout) and self.readout.mode == 'sum'
        return not is_sum or any(bnorm is not None for bnorm in self.bnorms)

    def forward(self, atom_array: Any, adj: BatchedCSR) -> Variable:
        """Predict a vector per molecule.

        Arguments and errors are as in :meth:`MessagePassing.forward`; ``adj`` is normalised.

        Returns:
            Variable: (n_graphs, out_dim); twice as wide for a ``'summax'`` readout.
        """
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        for i, (gconv, bnorm) in enumerate(zip(self.gconvs, self.bnorms)):
            # As upstream: if there are more layers than n_update_layers, several count as last.
            is_last = i >= self.n_update_layers - 1
            if bnorm is None and is_known(gconv, (RSGCNUpdate,)):
                # Dropout multiplies by 0 or more, so the rectifier can come before it.
                h = gconv(h, adj, None if is_last else functions.relu, self.dropout_ratio)
                continue
            h = gconv(h, adj)
            if bnorm is not None:
                expect_norm(bnorm)
                h = batch_norm(adj, bnorm, h)
            if self.dropout_ratio > 0.0:
                h = dropout(h, self.dropout_ratio)
            if not is_last:
                h = functions.relu(h)
        return self.readout(h, adj)
