"""RelGCN: scaled adjacency, features instead of ids, refused inputs; RelGCNSparse."""

import re

import numpy
import pytest

from chainer.backends import cuda
from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import SparseGraphDataset
from chainer_chemistry.models.relgcn import RelGCNSparse as DenseRelGCNSparse
from chainer_chemistry.models.relgcn import rescale_adj

from chainer_bspmm import BatchedCSR, concat_mols, CSRConverter
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.models import RelGCN, RelGCNSparse
from chainer_bspmm.ops.scale_adj import scale_adj
from tests.support import assert_close_arrays, device_of, graph_data, parity, relative_error
from tests.support.molecules import molecules, SIZES


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_scale_adj(xp, dtype):
    examples = molecules(SIZES)
    adj = concat_mols(examples)[1].astype(dtype).to_device(device_of(xp))
    scaled = scale_adj(adj, numpy.dtype(dtype))
    assert scaled.data.dtype == dtype and scale_adj(adj, numpy.dtype(dtype)) is scaled
    dense = scaled.to_dense()
    for graph, (_, a, _) in enumerate(examples):
        n = a.shape[1]
        expected = rescale_adj(a[None]).array[0]
        assert relative_error(dense[graph, :, :n, :n], expected) < 1e-6
    assert relative_error(scaled.T.to_scipy().toarray(), scaled.to_scipy().toarray().T) == 0
    assert (cuda.to_cpu(adj.data) == concat_mols(examples)[1].data).all()


def test_scale_adj_where_the_matrix_is_symmetric():
    """The scaled matrix is not symmetric, and must not be taken for its own transpose."""
    matrix = numpy.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]], 'f')
    for matrices in ([matrix], [matrix * 0.5]):
        adj = BatchedCSR.from_matrices(matrices)
        assert adj.is_symmetric
        scaled = scale_adj(adj, numpy.dtype('f'))
        expected = numpy.array([[0, 1, 1], [0.5, 0, 0], [0.5, 0, 0]])
        numpy.testing.assert_array_equal(scaled.to_scipy().toarray(), expected)
        numpy.testing.assert_array_equal(scaled.T.to_scipy().toarray(), expected.T)


def test_degree_of_zero_counts_as_one():
    """A degree may be 0 because entries cancel each other, as in Chainer Chemistry."""
    matrix = numpy.array([[[0, 2, 1], [0, -2, 3], [0, 0, 0]]] * 2, 'f')
    adj = BatchedCSR.from_matrices([matrix])
    scaled = scale_adj(adj, numpy.dtype('f')).to_dense()
    numpy.testing.assert_array_equal(scaled[0], rescale_adj(matrix[None]).array[0])
    numpy.testing.assert_array_equal(scaled[0, 0], [[0, 2, 0.125], [0, -2, 0.375], [0, 0, 0]])


def test_features_instead_of_ids():
    _, adj, _ = CSRConverter('packed')(molecules([3, 2]))
    with pytest.raises(ValueError, match="x: expected atom ids with input_type='int', got float32"):
        RelGCN()(numpy.ones((5, 16), 'f'), adj)


def test_ids_instead_of_features():
    atoms, adj, _ = CSRConverter('packed')(molecules([3, 2]))
    with pytest.raises(ValueError, match="x: expected features with input_type='float', got int32"):
        RelGCN(input_type='float')(atoms, adj)


@pytest.mark.parametrize('shape', [(4, 16), (6, 16), (5, 2, 16), (16,)], ids=str)
def test_features_that_are_not_a_row_for_each_node(shape):
    _, adj, _ = CSRConverter('packed')(molecules([3, 2]))
    message = 'x: expected shape (5,) and one more dimension to go with %r, got %s' % (adj, shape)
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        RelGCN(input_type='float')(numpy.ones(shape, 'f'), adj)


@pytest.mark.parametrize('sizes', graph_data.SIZES.values(), ids=graph_data.SIZES)
def test_list_of_edges(device, sizes):
    """RelGCNSparse has the results of upstream's; its parameters have another order."""
    data = graph_data.edge_lists(sizes, 4)
    batch = SparseGraphDataset(data).converter(data, -1)
    dense = DenseRelGCNSparse(5)
    dense(batch)
    parity.randomised(dense)
    model = parity.swapped(dense, device)
    ours = CSRConverter('packed')(to_sparse(data, 4), device)
    expected = graph_data.outcome(dense, dense(batch))
    found = graph_data.outcome(model, model(*ours))
    assert_close_arrays(found, expected)


def test_first_call_of_relgcn_sparse_draws_as_upstream():
    data = graph_data.edge_lists([5, 3], 4, 6)
    models = []
    for make, batch in (
        (DenseRelGCNSparse, (SparseGraphDataset(data).converter(data, -1),)),
        (RelGCNSparse, CSRConverter('packed')(to_sparse(data, 4))),
    ):
        numpy.random.seed(0)
        models.append(make(3, input_type='float'))
        models[-1](*batch)
    for (name, expected), (_, found) in zip(*(model.namedparams() for model in models)):
        numpy.testing.assert_array_equal(found.array, expected.array, name)


def test_relgcn_sparse_scaled(device):
    """Upstream has no such model, so it is compared with RelGCN, with reordered parameters."""
    data = graph_data.edge_lists([6, 4], 4)
    batch = CSRConverter('packed')(to_sparse(data, 4), device)
    model = RelGCNSparse(3, scale_adj=True)
    other = RelGCN(3, scale_adj=True)
    for link in (model, other):
        parity.randomised(link)
        link.to_device(device)
    for own, conv in zip(other.rgcn_convs, model.rgcn_convs):
        for name in 'W', 'b':
            getattr(own.graph_linear_self, name).array = getattr(conv.root_weight, name).array
            edge = getattr(conv.edge_weight, name).array
            edge = edge.reshape((4, -1) + edge.shape[1:]).swapaxes(0, 1).reshape(edge.shape)
            getattr(own.graph_linear_edge, name).array = edge
    for name in 'i_layer', 'j_layer':
        getattr(other.rgcn_readout, name).W.array = getattr(model.rgcn_readout, name).W.array
    other.embed.W.array = model.embed.W.array
    assert relative_error(model(*batch).array, cuda.to_cpu(other(*batch).array)) < 1e-6


def test_relgcn_sparse_without_types():
    with pytest.raises(
        ValueError,
        match='adj: expected 4 relations, the n_edge_types of the link, got <BatchedCSR.*>',
    ):
        RelGCNSparse(3)(*CSRConverter('packed')(to_sparse(graph_data.edge_lists([3], 4))))
