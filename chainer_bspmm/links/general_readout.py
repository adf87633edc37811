"""Readout of a batch of graphs by sum, maximum, or both."""

from typing import Any

import chainer
from chainer_chemistry.links.readout import general_readout

from chainer_bspmm.links.inner import expect_elementwise, refuse_patched
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.ops.segments import segment_max, segment_sum
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.check import one_of

MODES = ('sum', 'max', 'summax')


class GeneralReadout(Sparse, general_readout.GeneralReadout):
    """Reduce the nodes of every graph to one vector, without parameters.

    Arguments are upstream's. A graph without nodes gives 0.
    """

    @staticmethod
    def check(link):
        one_of('mode', link.mode, MODES)

    def forward(self, h: Any, adj: BatchedCSR, **kwargs: Any) -> chainer.Variable:
        """Reduce (n_rows, channels) to (n_graphs, channels); ``'summax'`` is twice as wide.

        Further arguments, which other readouts take (h0, is_real_node), are ignored.
        """
        refuse_patched(self.name or 'GeneralReadout', self, self.upstream)
        if self.activation is not None:
            expect_elementwise(self.activation)
            h = self.activation(h)
        if self.mode == 'sum':
            return segment_sum(adj, h)
        if self.mode == 'max':
            return segment_max(adj, h)
        return chainer.functions.concat((segment_sum(adj, h), segment_max(adj, h)), axis=1)
