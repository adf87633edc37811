"""RelGAT (relational graph attention network) on sparse batches."""

from typing import Any

from chainer import Variable
from chainer_chemistry.models import relgat

from chainer_bspmm.links import RelGATUpdate
from chainer_bspmm.models.message_passing import MessagePassing
from chainer_bspmm.sparse import BatchedCSR


class RelGAT(MessagePassing, relgat.RelGAT):
    """Predict a vector per molecule with the relational graph attention network.

    Arguments and parameters are upstream's. Only the positions of the adjacency matrices' entries
    count, not their values. As upstream, with ``weight_tying`` the updates after the first exist,
    but get no gradient, and atoms without neighbours get a mean over the molecule
    (:class:`~chainer_bspmm.links.RelGATUpdate`).

    Raises:
        ValueError: ``softmax_mode`` is unknown, or the update is tied and cannot take its own
            result (``concat_heads`` with several heads). (Upstream fails at the first call.)

    Source:
        Busbridge et al. 2019 (arXiv:1904.05811); Chainer Chemistry 0.7.1, models/relgat.py.
    """

    parts = {'update_layers': (RelGATUpdate,), **MessagePassing.parts}

    @staticmethod
    def check(link):
        is_repeated = link.weight_tying and link.n_update_layers > 1
        if is_repeated and link.concat_heads and link.n_heads != 1:
            raise ValueError(
                'weight_tying: expected False to go with concat_heads, because the tied update '
                'takes %d channels and gives %d, got %r'
                % (link.hidden_channels, link.hidden_channels * link.n_heads, link.weight_tying)
            )

    def forward(self, atom_array: Any, adj: BatchedCSR) -> Variable:
        """Predict, as :meth:`MessagePassing.forward`; all nodes count in the readout."""
        return self._predict(atom_array, adj)
