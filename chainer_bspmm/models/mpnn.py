"""MPNN (message passing neural network) with the messages of GGNN on sparse batches."""

from typing import Any

from chainer import Variable
from chainer_chemistry.models import mpnn

from chainer_bspmm.links import GGNNReadout, GGNNUpdate, MPNNReadout
from chainer_bspmm.models.message_passing import MessagePassing
from chainer_bspmm.models.refusals import EDGENET, UNSWAPPED
from chainer_bspmm.sparse import BatchedCSR


class MPNN(MessagePassing, mpnn.MPNN):
    """Predict a vector per molecule by message passing, with messages summed over neighbours.

    Arguments and parameters are upstream's, but ``message_func`` must be ``'ggnn'``.

    Raises:
        ValueError: ``message_func='edgenet'``, upstream's default, which has no sparse form.

    Source:
        Gilmer et al. 2017 (arXiv:1704.01212); Chainer Chemistry 0.7.1, models/mpnn.py.
    """

    parts = {'update_layers': (GGNNUpdate,), 'readout_layers': (GGNNReadout, MPNNReadout)}

    @staticmethod
    def check(link):
        if link.message_func != 'ggnn':
            text = "message_func: expected 'ggnn', got %r, which %s.\n%s"
            raise ValueError(text % (link.message_func, EDGENET, UNSWAPPED))

    def forward(self, atom_array: Any, adj: BatchedCSR) -> Variable:
        """Predict, as :meth:`MessagePassing.forward`; all nodes count in the readout."""
        return self._predict(atom_array, adj)
