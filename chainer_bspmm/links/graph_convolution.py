"""The graph convolution with several channels."""

from typing import Any

import chainer
from chainer import initializers

from chainer_bspmm.ops.graph_linear import relation_linear
from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.batched_csr import check_adjacency


class GraphConvolution(chainer.Link):
    """Compute ``Y = sum over channels ch of A_ch (X W_ch + b_ch)`` for a batch of graphs.

    A channel is a relation, such as a kind of bond. One product covers all graphs and channels;
    together with the linear maps it is one node of the computational graph.

    Args:
        in_channels (int or None): width of X; None takes it from the first call.
        out_channels (int): width of Y.
        n_relations (int): number of channels.

    Raises:
        TypeError: one of the numbers is not an integer.
        ValueError: one of them is too small.

    Attributes:
        W (Parameter): (out_channels * n_relations, in_channels); ``W_ch[k, c]`` is
            ``W[c * n_relations + ch, k]``. Initially normal, scaled by ``in_channels ** -0.5``.
        b (Parameter): (out_channels * n_relations,), in the same order; initially 0.

    Source:
        Nagasaka et al. (CCGrid 2019), the multi-channel graph convolution. In the paper it takes
        two launches for each graph and channel or, batched, two for each channel. There every node
        is its own neighbour (``a_uu = 1``), here only if the matrices say so.

    Example:
        >>> import numpy
        >>> import chainer_bspmm
        >>> bonds = numpy.array([[[0, 1], [1, 0]], [[1, 0], [0, 1]]], 'f')  # two channels
        >>> adj = chainer_bspmm.BatchedCSR.from_matrices([bonds])
        >>> conv = chainer_bspmm.links.GraphConvolution(3, 4, n_relations=2)
        >>> conv(numpy.ones((2, 3), 'f'), adj).shape
        (2, 4)
    """

    def __init__(self, in_channels: int | None, out_channels: int, n_relations: int):
        super().__init__()
        if in_channels is not None:
            in_channels = check.count('in_channels', in_channels, 1)
        self.in_channels = in_channels
        self.out_channels = check.count('out_channels', out_channels, 1)
        self.n_relations = check.count('n_relations', n_relations, 1)
        self.out_size = self.out_channels * self.n_relations
        with self.init_scope():
            self.W = chainer.Parameter(initializers.LeCunNormal())
            self.b = chainer.Parameter(0, self.out_size)
        if in_channels is not None:
            self._initialize(in_channels)

    def _initialize(self, in_channels):
        if self.W.array is None:
            self.W.initialize((self.out_size, in_channels))

    def forward(self, x: Any, adj: BatchedCSR) -> chainer.Variable:
        """Convolve by ``adj``, a BatchedCSR of ``n_relations`` relations.

        Arguments, result and errors are as in :func:`chainer_bspmm.functions.relation_linear`.
        """
        check_adjacency(adj)
        if adj.n_relations != self.n_relations:
            text = 'adj: expected %d relations, the n_relations of the link, got %r'
            raise ValueError(text % (self.n_relations, adj))
        check.floats('x', x, adj)
        if x.ndim not in (2, 3):
            raise ValueError('x: expected 2 or 3 dimensions, got shape %s' % (x.shape,))
        self._initialize(x.shape[-1])
        return relation_linear(adj, x, self.W, self.b)
