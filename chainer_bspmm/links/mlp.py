"""The head of a predictor."""

from typing import Any

from chainer import functions, links, Variable
from chainer_chemistry.models import mlp

from chainer_bspmm.links.inner import is_known, refuse_patched
from chainer_bspmm.links.linear import activated
from chainer_bspmm.links.sparse import Sparse


class MLP(Sparse, mlp.MLP):
    """Apply linear layers, with an activation after all but the last.

    A layer and its activation are one node. Arguments and parameters are upstream's.
    """

    def forward(self, x: Any) -> Variable:
        """Map (n_graphs, ...), flattened as in Chainer's Linear, to (n_graphs, out_dim)."""
        refuse_patched(self.name or 'MLP', self, mlp.MLP)
        for link in self.layers:
            x = _applied(link, x, self.activation)
        return _applied(self.l_out, x, functions.identity)


def _applied(link, x, activation):
    if not is_known(link, (links.Linear,)) or x.dtype.kind != 'f':
        return activation(link(x))  # calls a user's link, or raises Chainer's error
    if x.ndim != 2:
        x = functions.reshape(x, (len(x), -1))
    return activated(link, x, activation)
