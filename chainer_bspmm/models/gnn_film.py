"""GNNFiLM (graph network with feature-wise linear modulation) on sparse batches."""

from chainer_chemistry.models import gnn_film

from chainer_bspmm.links import GNNFiLMUpdate
from chainer_bspmm.models.message_passing import MessagePassing


class GNNFiLM(MessagePassing, gnn_film.GNNFiLM):
    """Predict a vector per molecule with feature-wise linear modulation of its messages.

    Arguments and parameters are upstream's. ``activation`` belongs to the readout; the updates have
    a rectifier.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192); Chainer Chemistry 0.7.1, models/gnn_film.py.
    """

    parts = {'update_layers': (GNNFiLMUpdate,), **MessagePassing.parts}
