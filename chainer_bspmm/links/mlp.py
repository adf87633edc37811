"""The head of a predictor."""

from typing import Any

from chainer import functions
from chainer import Variable
from chainer_chemistry.models import mlp

from chainer_bspmm.links.linear import activated
from chainer_bspmm.links.sparse import Sparse


class MLP(Sparse, mlp.MLP):
    """Several linear layers, each but the last one with its activation as one node.

    Arguments and parameters are upstream's.
    """

    def forward(self, x: Any) -> Variable:
        """Map (n_graphs, ...), flattened as by Chainer's Linear, to (n_graphs, out_dim)."""
        if x.ndim != 2:
            x = functions.reshape(x, (len(x), -1))
        for linear in self.layers:
            x = activated(linear, x, self.activation)
        return activated(self.l_out, x, functions.identity)
