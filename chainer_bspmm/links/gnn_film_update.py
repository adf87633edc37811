"""Update step of the graph network with feature-wise linear modulation."""

from chainer import links
from chainer_chemistry.links.update import gnn_film_update

from chainer_bspmm.links.inner import expect_elementwise, expect_known, LINEAR
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.edge_film import edge_film
from chainer_bspmm.ops.layer_norm import layer_norm
from chainer_bspmm.ops.link_hooks import expect_no_hooks

NORM = (links.LayerNormalization,)


class GNNFiLMUpdate(Update, gnn_film_update.GNNFiLMUpdate):
    """Compute ``h'[i] = norm(sum_r sum_j A_r[i, j] act(gamma_r[i] * (W_r h[j]) + beta_r[i]))``.

    gamma and beta are linear in h[i], norm is a layer normalisation. Arguments and parameters are
    upstream's; rows of ``W_linear/W`` and ``W_g/W`` have the relation as their minor index. The
    last relation of upstream's preprocessor holds the self-loops. An update is two nodes of the
    computational graph (more if ``activation`` is not a rectifier), so hooks of the linear layers
    and of the norm are refused. A node without edges gets the normalisation of 0, which is the
    norm's bias.

    Source:
        Brockschmidt 2019 (arXiv:1906.12192), equation 6.
    """

    inner_layers = {'W_linear': LINEAR, 'W_g': LINEAR, 'norm_layer': NORM}

    def _update(self, h, adj):
        W, W_g = (parameters_of(layer, h.shape[1])[0] for layer in (self.W_linear, self.W_g))
        expect_elementwise(self.activation)
        h = edge_film(adj, h, W, W_g, self.activation)
        norm = self.norm_layer
        expect_known(norm, NORM)
        expect_no_hooks(norm)
        if norm.gamma.array is None:
            norm._initialize_params(h.shape[1])
        return layer_norm(h, norm.gamma, norm.beta, norm.eps)
