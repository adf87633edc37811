"""Folded batches: the row for all phantom atoms of a graph, and its weight."""

import pickle

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR, BatchedSELL
from chainer_bspmm.functions import segment_sum
from chainer_bspmm.sparse.batched_csr import fill_buffers
from chainer_bspmm.sparse.edges import edges_of
from chainer_bspmm.sparse.relations import relation_rows, with_values
from tests.support import assert_same_arrays, device_of, MATRIX_SIZES, random_matrices
from tests.support.spare import buffers_for, with_spare

# padded_to -> weights of all rows; the last row of each graph stands for its phantom atoms.
WEIGHTS = {
    None: [1, 1, 1, 2, 1, 4, 5, 1, 1, 1, 1, 1, 0],
    1: [1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0],
    3: [1, 1, 1, 0, 1, 2, 3, 1, 1, 1, 1, 1, 0],
    9: [1, 1, 1, 6, 1, 8, 9, 1, 1, 1, 1, 1, 4],
}


def folded(n_relations=1, padded_to=None, **options):
    matrices = random_matrices(n_relations, **options)
    return BatchedCSR.from_matrices(matrices, 'folded', max_atom_id=7, padded_to=padded_to)


def assert_weights(adj, padded_to, n_spare=0):
    assert adj.layout == 'folded' and adj.padded_to == padded_to
    assert isinstance(adj.row_weights, adj.xp.ndarray) and adj.row_weights.dtype == numpy.float32
    assert adj.row_weights.tolist() == WEIGHTS[padded_to] + [0] * n_spare


@pytest.mark.parametrize('padded_to', WEIGHTS)
@pytest.mark.parametrize('n_relations', [1, 3])
def test_from_matrices(xp, n_relations, padded_to):
    dense = random_matrices(n_relations)
    given = [xp.asarray(matrix) for matrix in dense]
    adj = BatchedCSR.from_matrices(given, 'folded', padded_to=padded_to)
    assert_weights(adj, padded_to)
    packed = BatchedCSR.from_matrices(dense)
    assert cuda.to_cpu(adj.row_offsets).tolist() == [0, 4, 6, 7, 13]
    assert cuda.to_cpu(adj.col_offsets).tolist() == [n * n_relations for n in (0, 4, 6, 7, 13)]
    assert (adj.n_graphs, adj.n_rows, adj.max_rows) == (4, 13, 6)
    assert (adj.n_cols, adj.max_cols) == (13 * n_relations, 6 * n_relations)
    assert (adj.nnz, adj.max_nnz) == (packed.nnz, packed.max_nnz)
    # The entries are the packed batch's; rows and columns of phantom atoms have none.
    result = cuda.to_cpu(adj.to_dense())
    assert result.shape[-2:] == (6, 6)
    numpy.testing.assert_array_equal(result[..., :5, :5], packed.to_dense())
    for matrix, n in zip(result, MATRIX_SIZES):
        assert not matrix[..., n:, :].any() and not matrix[..., n:].any()


def test_only_empty_graphs():
    adj = BatchedCSR.from_matrices([numpy.zeros((0, 0))] * 2, 'folded')
    assert (adj.n_rows, adj.nnz, list(adj.row_weights)) == (2, 0, [0, 0])
    adj = BatchedCSR.from_matrices([numpy.zeros((0, 0))] * 2, 'folded', padded_to=4)
    assert list(adj.row_weights) == [4, 4]


@pytest.mark.parametrize('layout', ['packed', 'padded'])
def test_other_layouts_have_no_weights(layout):
    adj = BatchedCSR.from_matrices(random_matrices(), layout)
    assert adj.row_weights is None and adj.padded_to is None


def test_symmetry_is_found():
    assert folded(symmetric=True).is_symmetric and folded(symmetric=True).T.row_weights is not None
    assert not folded().is_symmetric


@pytest.mark.parametrize('padded_to', [None, 9])
@pytest.mark.parametrize('n_relations', [1, 3])
def test_what_has_the_same_rows_has_the_weights(xp, n_relations, padded_to):
    host = folded(n_relations, padded_to)
    adj = host.to_device(device_of(xp))
    arrays = host.indptr, host.indices, host.data, host.row_offsets, host.col_offsets
    expected = sum(array.nbytes for array in (*arrays, host.row_weights))
    assert adj.nbytes == host.nbytes == expected
    coo = BatchedCOO.from_csr(adj)
    has_entry = host.to_dense() != 0
    for same in (
        adj,
        adj.to_device(-1),
        adj.astype('e'),
        adj.replace(max_atom_id=None),
        with_values(adj, adj.data * 2),
        coo,
        coo.astype('f'),
        coo.to_csr(),
        coo.to_device(-1),
        BatchedSELL(adj).to_csr(),
        BatchedSELL(adj, 2, True).to_csr(),
        pickle.loads(pickle.dumps(host)),
    ):
        assert_weights(same, padded_to)
        numpy.testing.assert_array_equal(cuda.to_cpu(same.to_dense()) != 0, has_entry)


@pytest.mark.parametrize('n_relations', [1, 3])
def test_what_has_other_rows_has_none(xp, n_relations):
    """Weights count nodes, so matrices whose rows are edges, or pairs with relations, have none."""
    adj = folded(n_relations).to_device(device_of(xp))
    edges = edges_of(adj)
    others = [edges.from_source, edges.from_receiver, edges.to_node.T]
    if n_relations > 1:
        others += [adj.T, with_values(adj, adj.data).T, relation_rows(adj)]
    for other in others:
        assert other.row_weights is None
    for other in (edges.from_source, edges.to_node):
        assert (other.layout, other.padded_to) == ('packed', None)
    if n_relations > 1:
        assert (adj.T.layout, adj.T.padded_to) == ('packed', None)


def test_the_transpose_of_one_relation_has_the_weights_of_its_nodes(xp):
    adj = folded(1).to_device(device_of(xp))
    assert not adj.is_symmetric
    for transposed in (adj.T, with_values(adj, adj.data).T):
        assert transposed.layout == 'folded'
        assert_same_arrays(transposed, adj, ['row_weights', 'row_offsets'])
        ones = xp.ones((adj.n_rows, 1), 'f')
        assert_same_arrays(segment_sum(transposed, ones), segment_sum(adj, ones), ['array'])


@pytest.mark.parametrize(
    'layout, padded_to, error, message',
    [
        (
            'packed',
            5,
            ValueError,
            "padded_to: expected None with layout='packed', got 5; it goes with 'folded'",
        ),
        (
            'padded',
            5,
            ValueError,
            "padded_to: expected None with layout='padded', got 5; it goes with 'folded'",
        ),
        ('folded', 0, ValueError, 'padded_to: expected at least 1, got 0'),
        ('folded', -2, ValueError, 'padded_to: expected at least 1, got -2'),
        ('folded', 2.0, TypeError, r'padded_to: expected an int, got 2\.0'),
        ('folded', True, TypeError, 'padded_to: expected an int, got True'),
        (
            'fold',
            None,
            ValueError,
            "layout: expected one of 'packed', 'folded', 'padded', got 'fold'",
        ),
    ],
)
def test_bad_layout(layout, padded_to, error, message):
    with pytest.raises(error, match=message):
        BatchedCSR.from_matrices(random_matrices(), layout, padded_to=padded_to)


NO_PLACE = "layout: expected one of 'packed', 'padded', got 'folded'"


def test_raw_arrays_have_no_place_for_weights():
    with pytest.raises(ValueError, match=NO_PLACE):
        BatchedCSR(
            indptr=numpy.array([0, 0]),
            indices=numpy.array([], 'i'),
            row_offsets=numpy.array([0, 1]),
            layout='folded',
        )


def test_a_dense_batch_has_no_place_for_weights():
    with pytest.raises(ValueError, match=NO_PLACE):
        BatchedCSR.from_dense(numpy.zeros((1, 2, 2)), layout='folded')


@pytest.mark.parametrize('padded_to', [None, 9])
@pytest.mark.parametrize('spare_rows, spare_nnz', [(0, 0), (2, 0), (3, 5)])
def test_buffers(xp, spare_rows, spare_nnz, padded_to):
    spare = with_spare(folded(padded_to=padded_to), spare_rows, spare_nnz, xp)
    assert_weights(spare, padded_to, spare_rows)
    for same in (spare.astype('f'), spare.to_device(-1)):
        assert_weights(same, padded_to, spare_rows)
    assert spare.T.row_weights is spare.row_weights


def test_filling_again_leaves_no_weight_behind():
    large, small = (
        BatchedCSR.from_matrices([numpy.ones((n, n)) for n in sizes], 'folded')
        for sizes in ((4, 2), (1, 2))
    )
    buffers = buffers_for(large, 0, 0)
    for adj, weights in ((large, [1, 1, 1, 1, 0, 1, 1, 2]), (small, [1, 1, 1, 1, 0, 0, 0, 0])):
        fill_buffers(buffers._replace(data=None), numpy.zeros(adj.n_rows, 'i'), adj, [])
        assert buffers.row_weights.tolist() == weights


def test_labels_of_nodes():
    adj = folded()
    buffers = buffers_for(adj, 2, 0, 1)
    buffers.labels.insert(0, numpy.full((15, 3), numpy.nan))
    of_nodes, of_graphs = numpy.ones((13, 3)), numpy.ones((4, 2))
    fill_buffers(buffers, numpy.zeros(13, 'i'), adj, [of_nodes, of_graphs])
    numpy.testing.assert_array_equal(buffers.labels[0], numpy.pad(of_nodes, ((0, 2), (0, 0))))
    numpy.testing.assert_array_equal(buffers.labels[1], of_graphs)
