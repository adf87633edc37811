"""Readout of a batch of graphs by sum, maximum, or both."""

import chainer

from chainer_bspmm.functions import segment_max
from chainer_bspmm.functions import segment_sum

MODES = ('sum', 'max', 'summax')


class GeneralReadout(chainer.Link):
    """Reduce the nodes of every graph to one vector.

    Takes the place of ``chainer_chemistry.links.GeneralReadout``; has no parameters.

    Args:
        mode (str): ``'sum'``, ``'max'``, or ``'summax'`` (both, side by side).
        activation (callable or None): applied to the nodes first, element by element.

    Raises:
        ValueError: unknown mode.
    """

    def __init__(self, mode='sum', activation=None):
        super().__init__()
        if mode not in MODES:
            raise ValueError(
                'mode: expected one of %s, got %r' % (', '.join(map(repr, MODES)), mode)
            )
        self.mode = mode
        self.activation = activation

    def forward(self, h, adj, **kwargs):
        """Reduce. What other readouts take besides (h0, is_real_node) is not used.

        Args:
            h (Variable or array): (n_rows, channels) node features.
            adj (BatchedCSR): says which rows are whose. In padded layout the rows past a graph's
                nodes take part, as they do in Chainer Chemistry.

        Returns:
            Variable: (n_graphs, channels), or (n_graphs, 2 * channels) for ``'summax'``. A graph
            without nodes gives 0.
        """
        if self.activation is not None:
            h = self.activation(h)
        if self.mode == 'sum':
            return segment_sum(adj, h)
        if self.mode == 'max':
            return segment_max(adj, h)
        return chainer.functions.concat((segment_sum(adj, h), segment_max(adj, h)), axis=1)
