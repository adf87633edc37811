"""Update step of the gated graph neural network."""

from chainer import links
from chainer_chemistry.links.update import ggnn_update

from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import gated_step, parameters_of
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.graph_linear import graph_linear


class GGNNUpdate(Update, ggnn_update.GGNNUpdate):
    """Compute ``s' = GRU([h[i]; sum_r sum_j A_r[i, j] (W_r h[j] + b_r)], s)`` for every node.

    Arguments and parameters are upstream's; rows of ``graph_linear/W`` have the relation as their
    minor index. The state s of the GRU is kept from call to call until :meth:`reset_state`. On the
    first call there is no state, and the parameters U take no part. An update is two nodes of the
    computational graph, so hooks of the child links are refused.

    Source:
        Li et al. 2015 (arXiv:1511.05493), section 3.2; the GRU also sees ``h`` itself.
    """

    inner_layers = {'graph_linear': LINEAR, 'update_layer': (links.GRU,)}

    def _update(self, h, adj, **kwargs):
        message = graph_linear(adj, h, *parameters_of(self.graph_linear, h.shape[1]))
        return gated_step(self.update_layer, h, message)
