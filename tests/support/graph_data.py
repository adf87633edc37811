"""Graph data of Chainer Chemistry, and outputs and gradients of models for it."""

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer.utils import CooMatrix
from chainer_chemistry.dataset.graph_dataset.base_graph_data import PaddingGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_data import SparseGraphData
import numpy

# name -> numbers of nodes. The last graph is never empty, because upstream would give it no row.
SIZES = {
    'one large graph': [300],
    'one node': [1],
    'several': [9, 17, 3, 25],
    'empty between, lone nodes': [4, 0, 1, 1, 0, 6],
}


def edge_lists(sizes, n_edge_types=None, n_channels=None, n_classes=None, seed=0):
    """Return SparseGraphData with directed edges, some of them twice, and a last node without any.

    Edges have no types if `n_edge_types` is None, nodes have ids if `n_channels` is None, and no
    labels if `n_classes` is None.
    """
    rng = numpy.random.RandomState(seed)
    data = []
    for n in sizes:
        edges = rng.randint(0, max(n - 1, 1), (2, 2 * n if n > 1 else 0))
        edges = numpy.concatenate([edges, edges[:, : n // 4]], axis=1)
        x = rng.randint(1, 20, n).astype('i')
        if n_channels is not None:
            x = rng.uniform(-1, 1, (n, n_channels)).astype('f')
        types = None if n_edge_types is None else rng.randint(0, n_edge_types, edges.shape[1])
        y = None if n_classes is None else rng.randint(0, n_classes, n).astype('i')
        data.append(SparseGraphData(x=x, edge_index=edges, edge_attr=types, y=y))
    return data


def padding_data(data, as_coo=False):
    """Return the same graph as PaddingGraphData, with a dense matrix or a CooMatrix."""
    n = len(data.x)
    sources, receivers = data.edge_index
    adj = numpy.zeros((n, n), 'f')
    numpy.add.at(adj, (receivers, sources), 1)
    if as_coo:
        row, col = adj.nonzero()
        adj = CooMatrix(adj[row, col], row, col, adj.shape, order='C')
    return PaddingGraphData(x=data.x, adj=adj, y=data.y)


class OfPaddingData(chainer.Chain):
    """Model for upstream's NodeClassifier, which takes features and matrix from the data."""

    def __init__(self, model):
        super().__init__()
        with self.init_scope():
            self.model = model

    def forward(self, data):
        return self.model(data.x, data.adj)


def outcome(model, y):
    """Return the output and the gradients of all parameters, by name, on the host."""
    model.cleargrads()
    weight = numpy.linspace(0.5, 1.5, y.shape[-1]).astype(y.dtype)
    functions.sum(y * y * model.xp.asarray(weight)).backward()
    found = {name: cuda.to_cpu(p.grad) for name, p in model.namedparams() if p.grad is not None}
    return {**found, 'output': cuda.to_cpu(y.array)}
