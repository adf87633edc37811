"""NFP (neural fingerprints of Duvenaud et al.) on sparse batches."""

from typing import Any

from chainer import functions, Variable
from chainer_chemistry.models import nfp

from chainer_bspmm.links.embed import embed_atoms
from chainer_bspmm.links.ggnn_readout import pool
from chainer_bspmm.links.inner import is_known
from chainer_bspmm.links.nfp_readout import NFPReadout, summed_scores
from chainer_bspmm.links.nfp_update import NFPUpdate
from chainer_bspmm.models.sparse_model import SparseModel
from chainer_bspmm.sparse import BatchedCSR


class NFP(SparseModel, nfp.NFP):
    """Predict a vector per molecule with neural fingerprints.

    Arguments and parameters are upstream's; :class:`~chainer_bspmm.links.NFPUpdate` names the
    quirks that are kept. ``concat_hidden``, with which upstream fails, concatenates the layers'
    fingerprints instead of summing them.

    Raises:
        ValueError: ``n_update_layers`` is less than 1, or ``max_degree`` negative.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292); Chainer Chemistry 0.7.1, models/nfp.py.
    """

    parts = {'layers': (NFPUpdate,), 'readout_layers': (NFPReadout,)}

    @staticmethod
    def check(link):
        if link.n_update_layers < 1:
            raise ValueError('n_update_layers: expected at least 1, got %d' % link.n_update_layers)

    def forward(self, atom_array: Any, adj: BatchedCSR, is_real_node: Any = None) -> Variable:
        """Predict a vector per molecule.

        Arguments and errors are as in :meth:`MessagePassing.forward`; ``adj`` has self-loops.

        Returns:
            Variable: (n_graphs, out_dim); with ``concat_hidden``
            (n_graphs, n_update_layers * out_dim), the first layer's first.
        """
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        # The two differ if n_degree_types was assigned after the constructor.
        has_fewer = self.n_degree_types != self.max_degree + 1
        features = []
        for update in self.layers:
            h = update(h, adj, self.n_degree_types) if has_fewer else update(h, adj)
            features.append(h)
        if not all([is_known(readout, (NFPReadout,)) for readout in self.readout_layers]):
            results = [
                readout(h, adj, is_real_node=is_real_node)
                for readout, h in zip(self.readout_layers, features)
            ]
            return functions.concat(results) if self.concat_hidden else sum(results)
        # The scores of all layers are reduced at once.
        if self.concat_hidden:
            scores = [readout.scores(h) for readout, h in zip(self.readout_layers, features)]
            scores = functions.concat(scores, axis=1)
        else:
            scores = summed_scores(self.readout_layers, features)
        return pool(scores, adj, is_real_node)
