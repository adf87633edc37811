"""`example_of`: convert graph data of Chainer Chemistry to an example of a data set."""

from chainer.utils import CooMatrix
from chainer_chemistry.dataset.graph_dataset.base_graph_data import PaddingGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_data import SparseGraphData
import numpy
import scipy.sparse

from chainer_bspmm.sparse.build import to_host


def example_of(data, name, n_edge_types=None):
    """Convert graph data to ``(x, adj)``, or ``(x, adj, y)`` if it has a label.

    Anything else is returned as it is. The adjacency is an array, a SciPy matrix, or a list of
    `n_edge_types` SciPy matrices, to which ``edge_attr`` assigns the edges (it is ignored if
    `n_edge_types` is None). ``A[i, j]`` is the number of columns ``(j, i)`` of ``edge_index``.
    ValueError: edges that are not (2, n) indices of nodes, types out of range, a CooMatrix of
    several graphs.
    """
    if isinstance(data, SparseGraphData):
        adj = _of_edges(data, name, n_edge_types)
    elif isinstance(data, PaddingGraphData):
        adj = _of_coo(data.adj, name) if isinstance(data.adj, CooMatrix) else data.adj
    else:
        return data
    return (data.x, adj) if data.y is None else (data.x, adj, data.y)


def _of_edges(data, name, n_edge_types):
    n_nodes = len(data.x)
    edges = numpy.asarray(to_host(data.edge_index))
    if edges.ndim != 2 or len(edges) != 2:
        raise ValueError('%s.edge_index: expected shape (2, n_edges), got %s' % (name, edges.shape))
    _check_range('%s.edge_index' % name, edges, n_nodes, 'the number of nodes')
    if n_edge_types is None:
        return _counts(edges, n_nodes)
    if data.edge_attr is None:
        text = '%s.edge_attr: expected the types of the edges, for n_edge_types = %d, got None'
        raise ValueError(text % (name, n_edge_types))
    types = numpy.asarray(to_host(data.edge_attr))
    if types.shape != edges.shape[1:]:
        text = '%s.edge_attr: expected a type for each of %d edges, got shape %s'
        raise ValueError(text % (name, edges.shape[1], types.shape))
    _check_range('%s.edge_attr' % name, types, n_edge_types, 'n_edge_types')
    return [_counts(edges[:, types == r], n_nodes) for r in range(n_edge_types)]


def _check_range(name, array, bound, what):
    if array.dtype.kind not in 'iu':
        raise ValueError('%s: expected integers, got %s' % (name, array.dtype))
    is_wrong = (array < 0) | (array >= bound)
    if is_wrong.any():
        text = '%s: expected integers of at least 0 and less than %d, %s, got %d'
        raise ValueError(text % (name, bound, what, array[is_wrong][0]))


def _counts(edges, n_nodes):
    """Return the adjacency of edges, (2, n_edges); an edge that is given twice counts twice."""
    sources, receivers = edges
    ones = numpy.ones(len(sources), numpy.float32)
    return scipy.sparse.coo_matrix((ones, (receivers, sources)), (n_nodes, n_nodes))


def _of_coo(matrix, name):
    arrays = [to_host(array) for array in (matrix.data.array, matrix.row, matrix.col)]
    if arrays[0].ndim == 2 and len(arrays[0]) == 1:  # GIN of Chainer Chemistry adds this axis
        arrays = [array[0] for array in arrays]
    data, row, col = arrays
    if data.ndim != 1:
        text = '%s.adj: expected the CooMatrix of one graph, got data of shape %s'
        raise ValueError(text % (name, data.shape))
    for part, array, n in ('row', row, matrix.shape[0]), ('col', col, matrix.shape[1]):
        _check_range('%s.adj.%s' % (name, part), array, n, 'its shape')
    return scipy.sparse.coo_matrix((data, (row, col)), matrix.shape)
