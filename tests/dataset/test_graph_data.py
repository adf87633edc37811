"""Graph data of Chainer Chemistry become sparse batches with the same nodes, edges and labels."""

import re

import numpy
import pytest

from chainer.backends import cuda
from chainer.utils import CooMatrix
from chainer_chemistry.dataset.graph_dataset.base_graph_data import PaddingGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_data import SparseGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import PaddingGraphDataset
from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import SparseGraphDataset

from chainer_bspmm import concat_mols, CSRConverter
from chainer_bspmm.dataset import to_sparse
from tests.support.graph_data import edge_lists, padding_data, SIZES

PACKED = CSRConverter('packed')


def entries(adj):
    """Return the block-diagonal matrix as a dense array."""
    return adj.to_scipy().toarray()


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES)
@pytest.mark.parametrize('n_channels', [None, 5])
def test_edge_lists(device, sizes, n_channels):
    dataset = SparseGraphDataset(edge_lists(sizes, n_channels=n_channels))
    theirs = dataset.converter(dataset.data_list, -1)
    x, adj = PACKED(to_sparse(dataset), device)
    numpy.testing.assert_array_equal(cuda.to_cpu(x), theirs.x)
    assert numpy.diff(cuda.to_cpu(adj.row_offsets)).tolist() == sizes
    expected = numpy.zeros((len(theirs.x),) * 2)
    numpy.add.at(expected, (theirs.edge_index[1], theirs.edge_index[0]), 1)
    numpy.testing.assert_array_equal(entries(adj), expected)


def test_edge_types():
    sizes = SIZES['several']
    dataset = SparseGraphDataset(edge_lists(sizes, n_edge_types=3))
    theirs = dataset.converter(dataset.data_list, -1)
    _, adj = PACKED(to_sparse(dataset, n_edge_types=5))
    assert adj.n_relations == 5
    n = sum(sizes)
    expected = numpy.zeros((n, n * 5))
    columns = theirs.edge_index[0] * 5 + theirs.edge_attr
    numpy.add.at(expected, (theirs.edge_index[1], columns), 1)
    numpy.testing.assert_array_equal(entries(adj), expected)
    _, adj = PACKED(to_sparse(dataset))  # without types of edges
    assert adj.n_relations == 1 and adj.nnz == len(theirs.edge_attr)


def test_labels():
    data = edge_lists([3, 5])
    for graph, y in zip(data, ([1.0, 2.0], [3.0, 4.0])):
        graph.y = numpy.array(y, 'f')
    dataset = to_sparse(SparseGraphDataset(data))
    numpy.testing.assert_array_equal(PACKED(dataset)[2], [[1, 2], [3, 4]])


@pytest.mark.parametrize('as_coo', [False, True])
def test_padding_data(as_coo):
    data = [padding_data(graph) for graph in edge_lists([5, 9, 1])]
    theirs = PaddingGraphDataset(data).converter(data, -1)
    data = [padding_data(graph, as_coo) for graph in edge_lists([5, 9, 1])]
    x, adj = CSRConverter('padded')(to_sparse(data))
    numpy.testing.assert_array_equal(x, theirs.x)
    numpy.testing.assert_array_equal(adj.to_dense(), theirs.adj)


def test_coo_matrix_that_upstream_has_changed():
    """Upstream's GIN adds a dimension to the arrays of the matrix of a single graph."""
    data = padding_data(edge_lists([7])[0], as_coo=True)
    expected = entries(to_sparse([data])[0][1])
    for name in ('data', 'row', 'col'):
        setattr(data.adj, name, getattr(data.adj, name)[None])
    numpy.testing.assert_array_equal(entries(to_sparse([data])[0][1]), expected)


def broken(**changed):
    fields = {'x': numpy.zeros(3, 'i'), 'edge_index': numpy.array([[0, 1], [1, 2]])}
    return SparseGraphData(**{**fields, **changed})


COO = CooMatrix(*(numpy.zeros((2, 4), dtype) for dtype in 'fii'), shape=(3, 3))
FAR = CooMatrix(numpy.ones(1, 'f'), numpy.array([0], 'i'), numpy.array([7], 'i'), (3, 3))


@pytest.mark.parametrize(
    'data, options, message',
    [
        (
            broken(edge_index=numpy.zeros(4, 'i')),
            {},
            'edge_index: expected shape (2, n_edges), got (4,)',
        ),
        (
            broken(edge_index=numpy.array([[0], [3]])),
            {},
            'edge_index: expected integers of at least 0 and less than 3, the number of nodes, '
            'got 3',
        ),
        (
            broken(edge_index=numpy.array([[0], [-1]])),
            {},
            'edge_index: expected integers of at least 0 and less than 3, the number of nodes, '
            'got -1',
        ),
        (
            broken(edge_index=numpy.array([[5], [0]])),
            {},
            'edge_index: expected integers of at least 0 and less than 3, the number of nodes, '
            'got 5',
        ),
        (broken(edge_index=numpy.zeros((2, 1))), {}, 'edge_index: expected integers, got float64'),
        (
            broken(),
            {'n_edge_types': 2},
            'edge_attr: expected the types of the edges, for n_edge_types = 2, got None',
        ),
        (
            broken(edge_attr=numpy.array([0])),
            {'n_edge_types': 2},
            'edge_attr: expected a type for each of 2 edges, got shape (1,)',
        ),
        (
            broken(edge_attr=numpy.array([0, 2])),
            {'n_edge_types': 2},
            'edge_attr: expected integers of at least 0 and less than 2, n_edge_types, got 2',
        ),
        (
            PaddingGraphData(x=numpy.zeros(3, 'i'), adj=COO),
            {},
            'adj: expected the CooMatrix of one graph, got data of shape (2, 4)',
        ),
        (
            PaddingGraphData(x=numpy.zeros(3, 'i'), adj=FAR),
            {},
            'adj.col: expected integers of at least 0 and less than 3, its shape, got 7',
        ),
    ],
)
def test_errors(data, options, message):
    with pytest.raises(ValueError, match='^%s$' % re.escape('dataset[1].' + message)):
        to_sparse([broken(edge_attr=numpy.array([0, 1])), data], **options)


@pytest.mark.parametrize('n_edge_types', [None, 2])
def test_a_last_node_of_id_0_is_no_padding(n_edge_types):
    """Upstream does not pad lists of edges."""
    data = broken(edge_index=[[0, 1], [1, 0]], edge_attr=[0, 1])
    x, adj = to_sparse([data], n_edge_types)[0]
    assert x.tolist() == [0, 0, 0]
    assert adj.to_dense().sum() == 2 and adj.to_dense().shape[-1] == 3


def test_no_edge_type():
    with pytest.raises(ValueError, match='^n_edge_types: expected at least 1, got 0$'):
        to_sparse([broken()], n_edge_types=0)


def test_a_batch_of_graph_data():
    message = (
        'batch[0]: expected a tuple (atoms, adj, label...), got SparseGraphData; '
        'dataset.to_sparse takes these'
    )
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        concat_mols([broken()])
