"""`BatchedSELL`: slices, padding, conversions, transfers, refusals."""

import pickle
import weakref

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR, BatchedSELL
from chainer_bspmm.sparse import check
from tests.support import assert_same_arrays, BATCHES, batch_on, device_of

SIZES = (1, 7, 1000)  # one row, a few, and more rows than any graph has
ARRAYS = ('slice_starts', 'slice_rows', 'column', 'data', 'row_order', 'row_offsets', 'col_offsets')


def report_example():
    """Return the matrix of figures 1 and 3 of the report, followed by another graph."""
    first = numpy.array([[1, 0, 2, 0], [0, 3, 0, 4], [0, 5, 0, 0], [0, 0, 0, 6]], float)
    second = numpy.array([[0, 0, 0], [7, 8, 9], [0, 0, 0]], float)
    return BatchedCSR.from_matrices([first, second])


def test_slices_by_hand(xp):
    """Arrays are written out for one size; all sizes are in test_slices."""
    sell = BatchedSELL(report_example().to_device(device_of(xp)), 3)
    assert sell.xp is xp and sell.row_order is None
    for name, expected in {
        'slice_rows': [0, 3, 4, 7],
        'slice_starts': [0, 6, 7, 16],
        'column': [0, 1, 1, 2, 3, -1, 3, -1, 4, -1, -1, 5, -1, -1, 6, -1],
        'data': [1, 3, 5, 2, 4, 0, 6, 0, 7, 0, 0, 8, 0, 0, 9, 0],
    }.items():
        numpy.testing.assert_array_equal(cuda.to_cpu(getattr(sell, name)), expected)
    assert (sell.n_slices, sell.padding_ratio, sell.max_slice_rows) == (3, 16 / 9, 3)


def test_sorted_slices_by_hand():
    sell = BatchedSELL(report_example(), 2, sort_rows=True)
    numpy.testing.assert_array_equal(sell.row_order, [0, 1, 2, 3, 5, 4, 6])
    numpy.testing.assert_array_equal(sell.slice_starts, [0, 4, 6, 12, 12])
    numpy.testing.assert_array_equal(sell.column[6:], [4, -1, 5, -1, 6, -1])
    one_row_a_slice = BatchedSELL(report_example(), 1, sort_rows=True)
    numpy.testing.assert_array_equal(one_row_a_slice.data, [1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize('sort_rows', [False, True])
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('name', BATCHES)
def test_round_trip(xp, name, size, sort_rows):
    adj = batch_on(name, xp, 'float32')
    sell = BatchedSELL(adj, size, sort_rows)
    back = sell.to_csr()
    assert back.xp is xp and sell.xp is xp
    assert_same_arrays(back, adj, ('indptr', 'indices', 'data', 'row_offsets', 'col_offsets'))
    for attribute in (
        'n_graphs',
        'n_rows',
        'n_cols',
        'nnz',
        'n_relations',
        'max_rows',
        'max_cols',
        'shape',
        'layout',
        'max_atom_id',
        'is_symmetric',
        'dtype',
    ):
        assert getattr(back, attribute) == getattr(sell, attribute) == getattr(adj, attribute)
    numpy.testing.assert_array_equal(sell.to_scipy().toarray(), adj.to_scipy().toarray())
    dense = sell.to_dense()
    assert isinstance(dense, xp.ndarray) and dense.dtype == numpy.float32
    numpy.testing.assert_array_equal(cuda.to_cpu(dense), cuda.to_cpu(adj.to_dense()))


@pytest.mark.parametrize('sort_rows', [False, True])
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('name', BATCHES)
def test_slices(name, size, sort_rows):
    adj = BATCHES[name]
    sell = BatchedSELL(adj, size, sort_rows)
    heights = numpy.diff(sell.slice_rows)
    offsets = set(adj.row_offsets.tolist())
    lengths = numpy.diff(adj.indptr)
    if sort_rows:
        for a, b in zip(adj.row_offsets[:-1], adj.row_offsets[1:]):
            assert sorted(sell.row_order[a:b]) == list(range(a, b))
            assert (numpy.diff(lengths[sell.row_order[a:b]]) <= 0).all()
        lengths = lengths[sell.row_order]
    assert offsets <= set(sell.slice_rows.tolist()) and heights.min(initial=1) >= 1
    assert heights.max(initial=0) == sell.max_slice_rows == min(size, adj.max_rows)
    for s, height in enumerate(heights):
        first, end = sell.slice_rows[s : s + 2]
        assert height == size or end in offsets  # only the last slice of a graph is short
        n_places = sell.slice_starts[s + 1] - sell.slice_starts[s]
        assert n_places == height * lengths[first:end].max()
    for name in ('slice_starts', 'slice_rows', 'column'):
        assert getattr(sell, name).dtype == numpy.int32
    n_places = sell.column.size
    assert sell.slice_starts[-1] == n_places and (sell.column == -1).sum() == n_places - adj.nnz
    assert sell.padding_ratio == (n_places / adj.nnz if adj.nnz else 1)


@pytest.mark.parametrize('name', BATCHES)
def test_transpose(xp, name):
    adj = batch_on(name, xp, 'float64')
    sell = BatchedSELL(adj, 7, True)
    assert sell.T.xp is xp and sell.T is sell.T
    assert (sell.T is sell) == adj.is_symmetric
    assert sell.T.slice_size == 7 and sell.T.row_order is not None
    numpy.testing.assert_array_equal(sell.T.to_scipy().toarray(), adj.to_scipy().toarray().T)
    assert_same_arrays(sell.T.T, BatchedSELL(adj.T.T, 7, True), ARRAYS)


def test_transpose_of_symmetric_relations():
    """Rows of the transpose are pairs of node and relation, so it is another matrix."""
    adj = BatchedCSR.from_matrices([numpy.stack([numpy.eye(3), numpy.ones((3, 3))])])
    assert adj.is_symmetric
    transpose = BatchedSELL(adj).T
    numpy.testing.assert_array_equal(transpose.to_scipy().toarray(), adj.to_scipy().toarray().T)


@pytest.mark.parametrize('sort_rows', [False, True])
@pytest.mark.parametrize('name', ['many', 'ones', 'only empty graphs', 'rectangular'])
def test_round_trip_to_a_device(xp, name, sort_rows):
    sell = BatchedSELL(BATCHES[name], 7, sort_rows)
    moved = sell.to_device(device_of(xp))
    assert moved.xp is xp and moved.to_device(device_of(xp)) is moved
    assert_same_arrays(moved.to_device(-1), sell, ARRAYS)
    assert moved.nbytes == sell.nbytes and repr(moved.to_device(-1)) == repr(sell)


def test_ones_stay_implicit():
    sell = BatchedSELL(BATCHES['ones'])
    assert sell.data is None and sell.dtype is None and sell.astype('float16') is sell
    assert sell.to_csr().data is None and sell.to_scipy().dtype == numpy.float32


def test_stored_zero_is_no_padding():
    adj = BatchedCSR(
        indptr=numpy.array([0, 1, 3]),
        indices=numpy.array([0, 0, 1]),
        row_offsets=numpy.array([0, 2]),
        data=numpy.array([0.0, 0.0, 2.0]),
    )
    again = BatchedSELL(adj).to_csr()
    assert again.nnz == 3
    numpy.testing.assert_array_equal(again.data, [0, 0, 2])


def test_astype():
    sell = BatchedSELL(BATCHES['many'])
    assert sell.T.dtype == numpy.float64
    half = sell.astype('float16')
    assert half.dtype == half.T.dtype == numpy.float16 and sell.dtype == numpy.float64
    assert sell.astype(float) is sell and sell.astype('float16') is half
    assert half.to_scipy().dtype == numpy.float32
    with pytest.raises(TypeError, match='dtype: expected float16, float32 or float64, got int32'):
        sell.astype('int32')


@pytest.fixture
def two_graphs(xp):
    adj = BatchedCSR.from_matrices([numpy.array([[1, 2], [0, 1]], 'f'), numpy.eye(1, dtype='f')])
    return BatchedSELL(adj.to_device(device_of(xp)), 2, sort_rows=True)


def test_repr(xp, two_graphs):
    assert repr(two_graphs) == (
        '<BatchedSELL: 2 graphs (packed), 3 x 3, 1 relation, 4 entries, '
        '2 slices of up to 2 rows, sorted, padding ratio 1.25, float32 on %s>' % device_of(xp)
    )


def test_number_of_bytes(two_graphs):
    assert two_graphs.nbytes == 4 * (3 + 3 + 5 + 5 + 3 + 3 + 3)


def test_transpose_does_not_refer_back():
    sell = BatchedSELL(BATCHES['many'])
    transpose = sell.T
    freed = weakref.ref(sell)
    del sell
    assert freed() is None and transpose.nnz


def test_pickle():
    sell = BatchedSELL(BATCHES['many'], 7, True)
    assert sell.T is not sell  # the transpose is cached, and is pickled as well
    again = pickle.loads(pickle.dumps(sell))
    assert_same_arrays(again, sell, ARRAYS)
    assert_same_arrays(again.T, sell.T, ARRAYS)


def test_no_graphs():
    sell = BatchedSELL(BatchedCSR(numpy.array([0]), numpy.array([], 'i'), numpy.array([0])))
    assert (sell.n_slices, sell.column.size, sell.max_slice_rows) == (0, 0, 0)
    assert sell.to_csr().shape == (0, 0)


def test_size_beyond_64_bits():
    assert BatchedSELL(report_example(), 10**30).n_slices == 2


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        ((numpy.ones((2, 2)),), TypeError, 'adj: expected a BatchedCSR, got ndarray'),
        ((report_example(), 0), ValueError, 'slice_size: expected at least 1, got 0'),
        ((report_example(), 2.0), TypeError, 'slice_size: expected an int, got 2.0'),
        ((report_example(), 2, 'yes'), TypeError, "sort_rows: expected a bool, got 'yes'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        BatchedSELL(*arguments)


def test_too_much_padding(monkeypatch):
    monkeypatch.setattr(check, 'INT32_MAX', 15)
    with pytest.raises(ValueError, match='non-zeros with padding: expected at most .* got 16'):
        BatchedSELL(report_example(), 3)
    BatchedSELL(report_example(), 2)
