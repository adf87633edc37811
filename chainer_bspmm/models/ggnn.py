"""GGNN (gated graph neural network) on sparse batches."""

from chainer_chemistry.models import ggnn

from chainer_bspmm.links import GGNNUpdate
from chainer_bspmm.models.message_passing import MessagePassing


class GGNN(MessagePassing, ggnn.GGNN):
    """Predict a vector per molecule with the gated graph neural network.

    Arguments and parameters are upstream's. With ``weight_tying=False`` every update starts without
    a state, so, as in upstream, its ``U``, ``U_r``, ``U_z`` and ``W_r`` take no part and get no
    gradient.

    Source:
        Li et al. 2015 (arXiv:1511.05493); Chainer Chemistry 0.7.1, models/ggnn.py.
    """

    parts = {'update_layers': (GGNNUpdate,), **MessagePassing.parts}
