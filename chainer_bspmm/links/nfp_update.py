"""Update step of neural fingerprints."""

from chainer_chemistry.links.update import nfp_update

from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import with_bias
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.degree_linear import degree_linear_sigmoid


class NFPUpdate(Update, nfp_update.NFPUpdate):
    """Compute ``h'[i] = sigmoid(W_d sum_j A[i, j] h[j] + b_1 + b_2 + ...)``, d the degree of i.

    Arguments and parameters are upstream's, and so are these quirks, because trained parameters
    depend on them:

    - The degree of a node is the sum of its column of ``A``, self-loop included; W_1 is
      ``graph_linears/0``.
    - The biases of all degrees are added to every node.
    - A node of degree 0 or above max_degree + 1 gets no message, only the biases.

    Degrees are computed from ``A``, with self-loops, once per batch, instead of being passed as
    upstream's ``deg_conds``. ``update(h, adj, n_degrees)`` uses the layers of the first n_degrees
    degrees only, as upstream does if ``deg_conds`` is shorter.

    Source:
        Duvenaud et al. 2015 (arXiv:1509.09292), algorithm 2, lines 6 to 8.
    """

    inner_layers = {'graph_linears': LINEAR}

    @staticmethod
    def check(link):
        if link.max_degree < 0:
            raise ValueError('max_degree: expected at least 0, got %d' % link.max_degree)

    def _update(self, h, adj, n_degrees=None):
        layers = self.graph_linears[:n_degrees]
        weights, biases = zip(*[with_bias(layer, h.shape[1]) for layer in layers])
        return degree_linear_sigmoid(adj, h, weights, biases)
