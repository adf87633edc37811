"""`BatchedCOO`: construction, conversions, transfers, refusals."""

import pickle

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR
from tests.support import assert_same_arrays, BATCHES, batch_on, coo_batch_on, device_of, shuffled

ATTRIBUTES = (
    'n_graphs',
    'n_rows',
    'n_cols',
    'nnz',
    'n_relations',
    'max_rows',
    'max_cols',
    'max_nnz',
    'layout',
    'max_atom_id',
)
ARRAYS = ('ids', 'row_offsets', 'col_offsets', 'entry_offsets', 'data')


def assert_same(a, b):
    assert_same_arrays(a, b, ARRAYS)
    for name in ATTRIBUTES:
        assert getattr(a, name) == getattr(b, name)


@pytest.mark.parametrize('name', BATCHES)
def test_round_trip_by_csr(xp, name):
    csr = batch_on(name, xp, 'float32')
    coo = BatchedCOO.from_csr(csr)
    assert coo.xp is xp and coo.ids.shape == (csr.nnz, 2) and coo.ids.flags.c_contiguous
    for attribute in (*ATTRIBUTES, 'shape', 'dtype'):
        assert getattr(coo, attribute) == getattr(csr, attribute)
    numpy.testing.assert_array_equal(cuda.to_cpu(coo.to_dense()), cuda.to_cpu(csr.to_dense()))
    again = coo.to_csr()
    assert again.xp is xp and type(again) is BatchedCSR
    assert_same_arrays(again, csr, ('indptr', 'indices', 'row_offsets', 'col_offsets'))
    numpy.testing.assert_array_equal(again.to_scipy().toarray(), csr.to_scipy().toarray())
    assert again.is_symmetric == csr.is_symmetric and again.layout == csr.layout


@pytest.mark.parametrize('name', BATCHES)
def test_order_of_entries_does_not_matter(xp, name):
    csr = BATCHES[name]
    coo = coo_batch_on(name, xp, 'float64')
    assert (coo.max_rows, coo.max_cols, coo.max_nnz) == (csr.max_rows, csr.max_cols, csr.max_nnz)
    for matrix in (coo.to_scipy(), coo.to_csr().to_scipy()):
        numpy.testing.assert_allclose(matrix.toarray(), csr.to_scipy().toarray(), rtol=1e-15)
    numpy.testing.assert_allclose(cuda.to_cpu(coo.to_dense()), csr.to_dense(), rtol=1e-15)
    assert (numpy.diff(coo.to_csr().to_device(-1).indptr) >= 0).all()


def test_entries_of_a_row_keep_their_order():
    coo = BatchedCOO(
        ids=numpy.array([[1, 1], [0, 1], [1, 0], [0, 1], [1, 1]]),
        row_offsets=numpy.array([0, 2]),
        entry_offsets=numpy.array([0, 5]),
        data=numpy.arange(5.0),
    )
    csr = coo.to_csr()
    numpy.testing.assert_array_equal(csr.indptr, [0, 2, 5])
    numpy.testing.assert_array_equal(csr.indices, [1, 1, 1, 0, 1])
    numpy.testing.assert_array_equal(csr.data, [1, 3, 0, 2, 4])
    numpy.testing.assert_array_equal(coo.to_scipy().toarray(), [[0, 4], [2, 4]])


def test_from_raw_arrays(xp):
    adj = BatchedCOO(
        ids=xp.array([[1, 3], [0, 0], [2, 4]], 'u1'),
        row_offsets=xp.array([0, 2, 2, 3]),
        entry_offsets=xp.array([0, 2, 2, 3]),
        data=xp.array([1, 2, 3], 'f'),
        col_offsets=xp.array([0, 4, 4, 6]),
    )
    assert adj.xp is xp and adj.ids.dtype == numpy.int32 and adj.ids.flags.c_contiguous
    assert (adj.n_graphs, adj.shape, adj.nnz) == (3, (3, 6), 3)
    assert (adj.max_rows, adj.max_cols, adj.max_nnz) == (2, 4, 2)
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.entry_rows()), [1, 0, 2])
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.entry_columns()), [3, 0, 4])
    expected = [[2, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 3, 0]]
    numpy.testing.assert_array_equal(adj.to_scipy().toarray(), expected)


def test_no_graphs(xp):
    empty = BatchedCOO(xp.zeros((0, 2), 'i'), xp.array([0]), xp.array([0]))
    assert (empty.n_graphs, empty.n_rows, empty.nnz, empty.max_rows) == (0, 0, 0, 0)
    assert (empty.max_cols, empty.max_nnz) == (0, 0)
    assert empty.to_csr().n_graphs == 0


def test_columns_follow_from_relations():
    adj = BatchedCOO(numpy.array([[1, 5]]), numpy.array([0, 2]), numpy.array([0, 1]), n_relations=3)
    assert adj.n_cols == adj.max_cols == 6 and adj.data is None and adj.dtype is None
    numpy.testing.assert_array_equal(
        adj.to_dense(), [[[[0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [0, 1]]]]
    )


def test_input_arrays_in_any_memory_order():
    ids = numpy.array([[0, 1], [1, 0], [1, 1]])
    for given in (numpy.asfortranarray(ids), ids[::-1], ids.astype('>i8')):
        adj = BatchedCOO(given, numpy.array([0, 2]), numpy.array([0, 3]))
        assert adj.ids.flags.c_contiguous and adj.ids.dtype == numpy.int32
        numpy.testing.assert_array_equal(adj.ids, given)


@pytest.mark.parametrize('name', BATCHES)
def test_round_trip_to_a_device(xp, name):
    adj = coo_batch_on(name, numpy, 'float64')
    moved = adj.to_device(device_of(xp))
    assert moved.xp is xp and moved.to_device(device_of(xp)) is moved
    assert moved.nbytes == adj.nbytes
    assert_same(moved.to_device(-1), adj)


@pytest.fixture
def two_graphs(xp):
    matrices = [numpy.array([[2.0, 1.0], [0.0, 1.0]]), numpy.eye(1)]
    csr = BatchedCSR.from_matrices(matrices, max_atom_id=7)
    return shuffled(BatchedCOO.from_csr(csr)).to_device(device_of(xp))


def test_astype(two_graphs):
    half = two_graphs.astype('float16')
    assert half.dtype == numpy.float16 and two_graphs.dtype == numpy.float64
    assert half.to_dense().dtype == numpy.float16 and half.to_scipy().dtype == numpy.float32
    assert two_graphs.astype(float) is two_graphs
    with pytest.raises(TypeError, match='dtype: expected float16, float32 or float64, got int32'):
        two_graphs.astype('int32')


def test_number_of_bytes(two_graphs):
    assert two_graphs.nbytes == 4 * (2 * 4 + 3 + 3 + 3) + 8 * 4


def test_pickle(two_graphs):
    assert_same(pickle.loads(pickle.dumps(two_graphs)), two_graphs)


def test_repr(xp, two_graphs):
    assert repr(two_graphs) == (
        '<BatchedCOO: 2 graphs (packed), 3 x 3, 1 relation, 4 entries, float64 '
        'on %s>' % device_of(xp)
    )


IDS = numpy.array([[0, 0], [1, 0], [1, 1], [2, 2]])
GOOD = {'ids': IDS, 'row_offsets': [0, 2, 3], 'entry_offsets': [0, 3, 4]}


# Checks that BatchedCSR has, too, have one case each here.
@pytest.mark.parametrize(
    'changes, message',
    [
        *(
            ({'ids': numpy.array([*IDS[:entry], pair, *IDS[entry + 1 :]])}, message)
            for entry, pair, message in (
                (2, [2, 1], r'ids: graph 0, entry 2: expected a row in \[0, 2\), .* got 2'),
                (3, [1, 2], r'ids: graph 1, entry 3: expected a row in \[2, 3\), .* got 1'),
                (1, [-1, 0], r'ids: graph 0, entry 1: expected a row in \[0, 2\), .* got -1'),
                (0, [0, 2], r'ids: graph 0, entry 0: expected a column in \[0, 2\), .* got 2'),
                (3, [2, 3], r'ids: graph 1, entry 3: expected a column in \[2, 3\), .* got 3'),
            )
        ),
        ({'ids': numpy.zeros((2, 4), int)}, r'ids: expected shape \(nnz, 2\), .* got \(2, 4\)'),
        ({'ids': numpy.zeros(4, int)}, r'ids: expected shape \(nnz, 2\), .* got \(4,\)'),
        (
            {'row_offsets': [0, 4, 3]},
            'row_offsets: expected not to decrease, got 3 after 4 at position 2',
        ),
        ({'row_offsets': []}, 'row_offsets: expected at least one entry, got none'),
        ({'entry_offsets': [0, 4]}, r'entry_offsets: expected n_graphs \+ 1 = 3 entries .*, got 2'),
        ({'entry_offsets': [0, 3, 5]}, r'entry_offsets: expected to end at 4 \(.*non-zeros.*got 5'),
        (
            {'entry_offsets': [0, 5, 4]},
            'entry_offsets: .* not to decrease, got 4 after 5 at position 2',
        ),
        ({'col_offsets': [0, 3]}, r'col_offsets: expected n_graphs \+ 1 = 3 entries .*, got 2'),
        ({'data': numpy.ones(3)}, 'data: expected one value for each of the 4 ids, got 3'),
        ({'layout': 'padded'}, 'row_offsets: .*blocks of one size, got 1 to 2'),
        ({'n_relations': 0}, 'n_relations: expected at least 1, got 0'),
        ({'n_relations': 10**9}, 'nodes times relations: .* got 3000000000'),
    ],
)
def test_bad_raw_arrays(changes, message):
    given = {
        name: numpy.array(value, int) if isinstance(value, list) else value
        for name, value in {**GOOD, **changes}.items()
    }
    with pytest.raises(ValueError, match=message):
        BatchedCOO(**given)


def test_too_many_entries():
    huge = numpy.broadcast_to(numpy.int32(0), (2**31, 2))  # takes only four bytes
    with pytest.raises(ValueError, match=r'non-zeros: expected at most .* got 2147483648'):
        BatchedCOO(huge, numpy.array([0, 1]), numpy.array([0, 2**31]))


def test_too_many_rows():
    with pytest.raises(ValueError, match='row_offsets: expected at most .* got 2147483648'):
        BatchedCOO(
            ids=numpy.zeros((0, 2), int),
            row_offsets=numpy.array([0, 2**31]),
            entry_offsets=numpy.array([0, 0]),
            col_offsets=numpy.array([0, 1]),
        )


def test_from_csr_of_something_else():
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR, got ndarray'):
        BatchedCOO.from_csr(numpy.eye(2))


@pytest.mark.gpu
def test_raw_arrays_on_two_devices():
    with pytest.raises(
        ValueError, match='row_offsets: expected an array on .*cupy:0.* got one on .*numpy'
    ):
        BatchedCOO(cuda.cupy.array([[0, 0]]), numpy.array([0, 1]), numpy.array([0, 1]))
