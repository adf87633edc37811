"""Update step of neural fingerprints."""

from chainer_chemistry.links.update import nfp_update

from chainer_bspmm.links.inner import LINEAR
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.links.update import Update
from chainer_bspmm.ops.degree_linear import degree_linear_sigmoid


class NFPUpdate(Update, nfp_update.NFPUpdate):
    """Compute ``h'[i] = sigmoid(W_d sum_j A[i, j] h[j] + b_1 + b_2 + ...)``, d the degree of i.

    Arguments and parameters are upstream's, and so are these quirks, which trained parameters
    depend on: the degree of a node is the sum of its column of ``A``, self-loop included, and W_1
    is ``graph_linears/0``; the biases of all degrees are added to every node; a node of degree 0 or
    above max_degree + 1 gets no message, only the biases. ``A``, with self-loops, gives the
    degrees, once a batch, instead of upstream's argument ``deg_conds``. Called as ``update(h, adj,
    n_degrees)`` it takes the first layers only, as upstream does where that argument is shorter.

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
        weights, biases = zip(*[parameters_of(layer, h.shape[1]) for layer in layers])
        return degree_linear_sigmoid(adj, h, weights, biases)
