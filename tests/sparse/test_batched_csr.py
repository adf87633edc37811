"""`BatchedCSR`: construction, conversions, transfers, refusals."""

import pickle
import re

import hypothesis
from hypothesis import strategies
import numpy
import pytest
import scipy.sparse

from chainer.backends import cuda
from chainer.datasets import SubDataset

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse import check
from chainer_bspmm.sparse.relations import relation_rows, transposed_rows
from tests.support import (
    assert_same_arrays,
    BATCHES,
    batch_on,
    device_of,
    MATRIX_SIZES,
    random_matrices,
    random_matrix,
)

ARRAYS = 'indptr', 'indices', 'data', 'row_offsets', 'col_offsets', 'row_weights'


def padded(dense, n):
    out = numpy.zeros((len(dense),) + dense[0].shape[:-2] + (n, n), dense[0].dtype)
    for row, matrix in zip(out, dense):
        row[..., : matrix.shape[-1], : matrix.shape[-1]] = matrix
    return out


def as_scipy(matrices):
    """Return SciPy matrices, or, for each stack of relations, a list of them."""
    sparse = scipy.sparse.csr_matrix
    return [sparse(m) if m.ndim == 2 else [sparse(one) for one in m] for m in matrices]


@pytest.mark.parametrize('n_relations', [1, 3])
@pytest.mark.parametrize('layout', ['packed', 'padded'])
def test_from_dense_matrices(xp, layout, n_relations):
    dense = random_matrices(n_relations)
    adj = BatchedCSR.from_matrices([xp.asarray(m) for m in dense], layout)
    assert adj.xp is xp and isinstance(adj.indptr, xp.ndarray)
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.to_dense()), padded(dense, 5))
    rows = 20 if layout == 'padded' else 9
    assert (adj.n_graphs, adj.n_rows, adj.n_cols) == (4, rows, rows * n_relations)
    assert adj.n_relations == n_relations and adj.max_rows == 5
    counts = [(m != 0).sum() for m in dense]
    assert (adj.nnz, adj.max_nnz) == (sum(counts), max(counts))
    offsets = numpy.array([0, 5, 10, 15, 20] if layout == 'padded' else [0, 3, 4, 4, 9])
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.row_offsets), offsets)
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.col_offsets), offsets * n_relations)
    assert adj.indptr.dtype == adj.indices.dtype == adj.row_offsets.dtype == numpy.int32
    assert adj.dtype == numpy.float64 and adj.layout == layout


def test_entries_of_a_row_are_sorted_by_relation_then_column():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 3, 3), 'f')])
    numpy.testing.assert_array_equal(adj.indices[:6], [0, 2, 4, 1, 3, 5])  # column * R + relation


@pytest.mark.parametrize('n_relations', [1, 3])
def test_from_scipy_matrices(n_relations):
    dense = random_matrices(n_relations)
    for layout in ('packed', 'folded', 'padded'):
        of_scipy = BatchedCSR.from_matrices(as_scipy(dense), layout)
        of_numpy = BatchedCSR.from_matrices(dense, layout)
        assert_same_arrays(of_scipy, of_numpy, ARRAYS)


@pytest.mark.parametrize('dtype', ['f', 'd'])
def test_entries_of_a_scipy_matrix_at_one_place_keep_their_order(dtype):
    row = [1, 0, 1, 0, 1]
    column = [1, 1, 0, 1, 1]
    data = numpy.array([5, 3, -0.0, 2, 4], dtype)
    matrix = scipy.sparse.coo_matrix((data, (row, column)), (2, 2))
    adj = BatchedCSR.from_matrices([matrix, matrix])
    numpy.testing.assert_array_equal(adj.indptr, [0, 2, 5, 7, 10])
    numpy.testing.assert_array_equal(adj.indices, [1, 1, 0, 1, 1, 3, 3, 2, 3, 3])
    numpy.testing.assert_array_equal(adj.data, [3, 2, 0, 5, 4] * 2)
    assert adj.data.dtype == dtype and numpy.signbit(adj.data[2])


@pytest.mark.parametrize('n_relations', [1, 3])
def test_from_padded_dense_batch(xp, n_relations):
    dense = padded(random_matrices(n_relations), 6)
    adj = BatchedCSR.from_dense(xp.asarray(dense))
    assert adj.layout == 'padded' and adj.xp is xp
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.to_dense()), dense)
    packed = BatchedCSR.from_dense(xp.asarray(dense), n_nodes=MATRIX_SIZES, layout='packed')
    assert packed.layout == 'packed' and packed.n_rows == 9
    numpy.testing.assert_array_equal(cuda.to_cpu(packed.to_dense()), dense[..., :5, :5])


def test_from_raw_arrays(xp):
    adj = BatchedCSR(
        xp.array([0, 2, 3]),
        xp.array([0, 1, 2]),
        xp.array([0, 1, 2]),
        data=xp.array([1.0, 2.0, 3.0], 'f'),
        col_offsets=xp.array([0, 2, 3]),
    )
    assert adj.xp is xp and adj.shape == (2, 3) and adj.max_rows == 1 and adj.max_nnz == 2
    numpy.testing.assert_array_equal(adj.to_scipy().toarray(), [[1, 2, 0], [0, 0, 3]])


def test_no_graphs(xp):
    empty = BatchedCSR(xp.array([0]), xp.array([], 'i'), xp.array([0]))
    assert (empty.n_graphs, empty.n_rows, empty.nnz, empty.max_rows) == (0, 0, 0, 0)
    assert (empty.max_cols, empty.max_nnz) == (0, 0)


@pytest.mark.parametrize(
    'given, expected', [('e', 'e'), ('f', 'f'), ('d', 'd'), ('int64', 'f'), ('?', None)]
)
def test_value_dtype(given, expected):
    matrix = numpy.array([[2, 0], [1, 3]])
    adj = BatchedCSR.from_matrices([matrix.astype(given)])
    assert adj.dtype == (expected and numpy.dtype(expected)) and adj.nnz == 3


def test_ones_are_implicit():
    adj = BatchedCSR.from_matrices(random_matrices(ones=True))
    assert adj.data is None and adj.dtype is None and adj.astype('float16') is adj
    assert adj.to_dense().dtype == numpy.float32


def test_nan_is_a_value():
    adj = BatchedCSR.from_matrices([numpy.array([[0.0, numpy.nan], [1.0, 0.0]])])
    assert adj.nnz == 2 and numpy.isnan(adj.data[0]) and not adj.is_symmetric


@pytest.mark.parametrize('n_relations', [1, 2])
def test_symmetry_of_every_relation_is_found(n_relations):
    symmetric = random_matrices(n_relations, symmetric=True)
    for given in (
        symmetric,
        as_scipy(symmetric),
        random_matrices(n_relations, symmetric=True, ones=True),
    ):
        adj = BatchedCSR.from_matrices(given)
        assert adj.is_symmetric and (adj.T is adj) == (n_relations == 1)
        rows = relation_rows(adj)
        transpose = adj.T
        assert transposed_rows(adj) is rows
        numpy.testing.assert_array_equal(rows.to_scipy().toarray(), transpose.to_scipy().toarray())
    almost = [m.copy() for m in symmetric]
    almost[3][almost[3] != 0] += numpy.arange((almost[3] != 0).sum()) * 1e-9
    others = [almost]
    if n_relations == 2:
        others.append([stack.copy() for stack in symmetric])
        first, second = others[1][3]
        i, j = numpy.argwhere((first != 0) & (second == 0) & ~numpy.eye(5, dtype=bool))[0]
        second[i, j], first[i, j] = first[i, j], 0  # the directions have different relations
    for other in others:
        for given in (other, as_scipy(other)):
            adj = BatchedCSR.from_matrices(given)
            assert not adj.is_symmetric and transposed_rows(adj) is adj.T is not adj


def test_symmetry_of_relations_in_any_order_is_found():
    adj = BatchedCSR.from_matrices(random_matrices(2, symmetric=True, ones=True))
    backwards = numpy.lexsort((-adj.indices, adj.entry_rows()))
    again = BatchedCSR(adj.indptr, adj.indices[backwards], adj.row_offsets, n_relations=2)
    assert again.is_symmetric


@pytest.mark.gpu
@pytest.mark.parametrize(
    'sizes, n_relations, density',
    [
        ((18, 5, 0, 132, 31), 1, 0.1),
        ((20, 1, 7), 4, 0.1),
        ((50,) * 20, 1, 0.06),
        ((900,), 1, 0.004),
        # These have more entries or columns than a block of a GPU handles.
        ((150, 3), 1, 0.9),
        ((13000,), 1, 1e-5),
    ],
    ids=str,
)
def test_transpose_is_that_of_the_host_bit_for_bit(sizes, n_relations, density):
    rng = numpy.random.RandomState(0)

    def matrix(n):
        nnz = int(density * n * n)
        entries = numpy.unique(rng.randint(0, n * n, nnz)) if nnz else numpy.zeros(0, int)
        values = rng.uniform(size=entries.size)
        return scipy.sparse.csr_matrix((values, divmod(entries, max(n, 1))), (n, n))

    host = BatchedCSR.from_matrices([[matrix(n) for _ in range(n_relations)] for n in sizes])
    adj = host.to_device('@cupy:0')
    assert_same_arrays(adj.T, host.T, ('indptr', 'indices', 'data'))
    numpy.testing.assert_array_equal(cuda.to_cpu(adj.transpose_order), host.transpose_order)
    assert adj.transpose_order.dtype == numpy.int32


@pytest.mark.parametrize('name', BATCHES)
def test_transpose(xp, name):
    adj = batch_on(name, xp, 'float32')
    transposed = adj.T
    assert adj.T is transposed
    assert transposed.n_relations == (adj.n_relations if transposed is adj else 1)
    assert (transposed.max_rows, transposed.max_cols) == (adj.max_cols, adj.max_rows)
    numpy.testing.assert_array_equal(transposed.T.to_scipy().toarray(), adj.to_scipy().toarray())
    for side in (adj, transposed):
        for most, offsets in ((side.max_rows, side.row_offsets), (side.max_cols, side.col_offsets)):
            assert most == numpy.diff(cuda.to_cpu(offsets)).max(initial=0)
    assert transposed.xp is xp and transposed.shape == adj.shape[::-1]
    a, b = adj.to_scipy(), transposed.to_scipy()
    numpy.testing.assert_array_equal(a.toarray().T, b.toarray())
    order = cuda.to_cpu(adj.transpose_order)
    assert order.dtype == numpy.int32
    numpy.testing.assert_array_equal(numpy.sort(order), numpy.arange(adj.nnz))
    numpy.testing.assert_array_equal(a.data[order], b.data)
    back = cuda.to_cpu(transposed.transpose_order)
    numpy.testing.assert_array_equal(b.data[back], transposed.T.to_scipy().data)


@pytest.mark.parametrize('name', BATCHES)
def test_round_trip_to_a_device(xp, name):
    adj = BATCHES[name]
    moved = adj.to_device(device_of(xp))
    assert moved.xp is xp
    assert moved.to_device(device_of(xp)) is moved
    assert_same_arrays(moved.to_device(-1), adj, ARRAYS)
    for attribute in (
        'n_graphs',
        'max_rows',
        'max_cols',
        'max_nnz',
        'n_relations',
        'nbytes',
        'layout',
        'is_symmetric',
        'max_atom_id',
    ):
        assert getattr(moved, attribute) == getattr(adj, attribute)


def test_astype():
    adj = BatchedCSR.from_matrices(random_matrices())
    half = adj.astype('float16')
    assert half.dtype == numpy.float16 and adj.dtype == numpy.float64
    assert half.to_dense().dtype == numpy.float16 and half.to_scipy().dtype == numpy.float32
    assert half.T.dtype == numpy.float16 and adj.astype(float) is adj
    assert adj.astype('float16') is half  # so the cached transpose is kept as well
    assert adj.astype('f').dtype == numpy.float32 and adj.astype('float16') is half
    with pytest.raises(TypeError, match='dtype: expected float16, float32 or float64, got int32'):
        adj.astype('int32')


@pytest.fixture
def two_diagonals(xp):
    adj = BatchedCSR.from_matrices([numpy.eye(2, dtype='f') * 3, numpy.eye(1, dtype='f')])
    return adj.to_device(device_of(xp))


OPERATIONS = {
    'times an array': lambda adj, array: adj * array,
    'an array times it': lambda adj, array: array * adj,
    'times a number': lambda adj, array: 2 * adj,
    'with self-loops': lambda adj, array: adj + array,
    'self-loops and it': lambda adj, array: array + adj,
    'divided by degrees': lambda adj, array: adj / array,
    'product': lambda adj, array: adj @ array,
    'product with it': lambda adj, array: array @ adj,
    'mask': lambda adj, array: adj > 0,
    'entries': lambda adj, array: adj != 0,
    'equal to an array': lambda adj, array: adj == array,
    'equal to a bool': lambda adj, array: adj == numpy.bool_(1),
    'remainder': lambda adj, array: adj % 2,
    'absolute': lambda adj, array: abs(adj),
    'cast, then masked': lambda adj, array: adj.astype('f') * array,
    'item': lambda adj, array: adj[0],
    'slice': lambda adj, array: adj[:, 1],
}


@pytest.mark.parametrize('name', OPERATIONS)
def test_operators_name_the_dense_array(xp, name):
    adj = BatchedCSR.from_dense(xp.ones((2, 3, 3), 'f'))
    with pytest.raises(TypeError) as caught:
        OPERATIONS[name](adj, xp.eye(3, dtype='f'))
    assert str(caught.value) == (
        "adj: a BatchedCSR has no operators and no items. With CSRConverter('padded') "
        'adj.to_dense() is the array that the dense model has, (n_graphs, N, N), or (n_graphs, R, '
        'N, N) of R relations; BatchedCSR.from_dense makes a batch of such an array'
    )


@pytest.mark.parametrize(
    'function',
    [
        lambda adj: numpy.count_nonzero(adj, axis=-1),
        lambda adj: numpy.where(adj, 1, 0),
        lambda adj: numpy.zeros(3) != adj,
        numpy.asarray,
        numpy.array,
        numpy.copy,
    ],
)
def test_numpy_does_not_take_a_batch_for_a_number(function):
    with pytest.raises(TypeError, match='^adj: a BatchedCSR has no operators and no items[.] '):
        function(BatchedCSR.from_dense(numpy.ones((2, 3, 3), 'f')))


def test_arrays_of_objects_may_hold_batches():
    adj, other = (BatchedCSR.from_dense(numpy.ones((1, 2, 2))) for _ in range(2))
    rows = numpy.array([(1, adj), (2, other)], object)
    assert rows.shape == (2, 2) and rows[0, 1] is adj and rows[1, 1] is other
    several = numpy.empty(2, object)
    several[:] = [adj, other]
    assert several[0] is adj and several[1] is other


def test_a_batch_equals_only_itself():
    adj, other = (BatchedCSR.from_dense(numpy.ones((1, 2, 2))) for _ in range(2))
    assert adj == adj and adj != other and adj != 'other' and adj is not None
    assert adj in [other, adj] and len({adj, other, adj}) == 2


def test_a_batch_cannot_be_iterated():
    with pytest.raises(TypeError, match="^'BatchedCSR' object is not iterable$"):
        iter(BatchedCSR.from_dense(numpy.ones((2, 3, 3))))


def test_repr(xp, two_diagonals):
    assert repr(two_diagonals) == (
        '<BatchedCSR: 2 graphs (packed), 3 x 3, 1 relation, 3 entries, symmetric, '
        'float32 on %s>' % device_of(xp)
    )


def test_number_of_bytes(two_diagonals):
    assert two_diagonals.nbytes == 4 * (4 + 3 + 3 + 3 + 3)


def test_nothing_is_shared_with_the_arrays_given_or_returned():
    data = numpy.array([1.0, 2.0, 2.0, 1.0])
    adj = BatchedCSR(numpy.array([0, 2, 4]), numpy.array([0, 1, 0, 1]), numpy.array([0, 2]), data)
    expected = adj.to_dense()
    data[1] = 9
    adj.to_scipy().data[:] = 7
    adj.to_scipy().indices[:] = 0
    numpy.testing.assert_array_equal(adj.to_dense(), expected)


def test_pickle():
    adj = BatchedCSR.from_matrices(random_matrices(), max_atom_id=8)
    assert adj.T is not adj  # the cached transpose refers back to adj
    again = pickle.loads(pickle.dumps(adj))
    assert again.max_atom_id == 8
    numpy.testing.assert_array_equal(again.to_dense(), adj.to_dense())
    numpy.testing.assert_array_equal(again.T.to_dense(), adj.T.to_dense())


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    strategies.lists(strategies.integers(0, 7), min_size=1, max_size=6),
    strategies.integers(1, 3),
    strategies.integers(0, 2**31 - 1),
    strategies.floats(0, 1),
    strategies.sampled_from(['packed', 'padded']),
)
def test_random_batches_survive_the_round_trip(sizes, n_relations, seed, density, layout):
    rng = numpy.random.RandomState(seed)
    dense = [random_matrix(rng, n, n_relations, density=density) for n in sizes]
    adj = BatchedCSR.from_matrices(dense, layout)
    numpy.testing.assert_array_equal(adj.to_dense(), padded(dense, max(sizes)))
    raw = BatchedCSR(
        adj.indptr, adj.indices, adj.row_offsets, adj.data, n_relations=n_relations, layout=layout
    )
    numpy.testing.assert_array_equal(raw.to_dense(), adj.to_dense())
    assert raw.is_symmetric == adj.is_symmetric


GOOD = {'indptr': [0, 2, 3, 4], 'indices': [0, 1, 1, 2], 'row_offsets': [0, 2, 3]}


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'indptr': [0, 3, 2, 4]}, 'indptr: expected not to decrease, got 2 after 3 at position 2'),
        (
            {'indptr': numpy.array([0, 3, 2, 4], 'u4')},
            'indptr: expected not to decrease, got 2 after 3 at position 2',
        ),
        ({'indptr': [1, 2, 3, 4]}, 'indptr: expected to start at 0, got 1'),
        ({'indptr': [0, 2, 3, 5]}, r'indptr: expected to end at 4 \(.*non-zeros.*\), got 5'),
        ({'indptr': [0, 2, 3, 3]}, r'indptr: expected to end at 4 \(.*non-zeros.*\), got 3'),
        ({'indptr': [-1, 2, 3, 4]}, 'indptr: expected to start at 0, got -1'),
        ({'indptr': [0, 2, 4]}, r'row_offsets: expected to end at 2 \(.*rows.*\), got 3'),
        ({'indptr': []}, r'indptr: expected n_rows \+ 1 entries, got none'),
        (
            {'indices': [0, 1, 1, -1]},
            r'indices: graph 1, row 2: expected a column in \[2, 3\), .* got -1 \(entry 3\)',
        ),
        (
            {'indices': [0, 2, 1, 2]},
            r'indices: graph 0, row 0: expected a column in \[0, 2\), .* got 2 \(entry 1\)',
        ),
        (
            {'indices': [0, 1, 4, 2]},
            r'indices: graph 0, row 1: expected a column in \[0, 2\), .* got 4 \(entry 2\)',
        ),
        (
            {'indices': [0, 1, 1, 3]},
            r'indices: graph 1, row 2: expected a column in \[2, 3\), .* got 3 \(entry 3\)',
        ),
        ({'row_offsets': [0, 2]}, 'row_offsets: expected to end at 3 .*, got 2'),
        ({'row_offsets': [0, 2, 5]}, 'row_offsets: expected to end at 3 .*, got 5'),
        ({'row_offsets': [1, 3]}, 'row_offsets: expected to start at 0, got 1'),
        (
            {'row_offsets': [0, 3, 2, 3]},
            'row_offsets: expected not to decrease, got 2 after 3 at position 2',
        ),
        (
            {'row_offsets': [0, 1, 3, 2]},
            'row_offsets: expected not to decrease, got 2 after 3 at position 3',
        ),
        ({'row_offsets': []}, 'row_offsets: expected at least one entry, got none'),
        ({'col_offsets': [0, 3]}, r'col_offsets: expected n_graphs \+ 1 = 3 entries .*, got 2'),
        (
            {'col_offsets': [0, 4, 3]},
            'col_offsets: expected not to decrease, got 3 after 4 at position 2',
        ),
        ({'layout': 'padded'}, 'row_offsets: .*expects blocks of one size, got 1 to 2'),
        (
            {
                'layout': 'padded',
                'indptr': [0, 2, 4],
                'indices': [0, 1, 2, 2],
                'row_offsets': [0, 1, 2],
                'col_offsets': [0, 2, 3],
            },
            'col_offsets: .*expects blocks of one size, got 1 to 2',
        ),
        ({'layout': 'ragged'}, "layout: expected one of 'packed', 'padded', got 'ragged'"),
        ({'n_relations': 0}, 'n_relations: expected at least 1, got 0'),
        ({'n_relations': -2}, 'n_relations: expected at least 1, got -2'),
        (
            {'n_relations': 2, 'col_offsets': [0, 3, 6]},
            'col_offsets: expected multiples of n_relations = 2, got 3',
        ),
        (
            {'col_offsets': [0, 2, 3 * 10**9]},
            r'col_offsets: expected at most 2\*\*31 - 1 = 2147483647 in one batch, got '
            '3000000000',
        ),
        ({'max_atom_id': -1}, 'max_atom_id: expected at least 0, got -1'),
        ({'data': numpy.ones(3)}, 'data: expected one value for each of the 4 indices, got 3'),
        ({'indptr': numpy.zeros((2, 2), int)}, r'indptr: expected 1 dimension, got shape \(2, 2\)'),
        ({'indptr': numpy.array([0.0, 2, 3, 4])}, 'indptr: expected integers, got float64'),
        ({'indices': 'abc'}, 'indices: expected a NumPy or CuPy array, got str'),
        ({'data': numpy.ones(4, int)}, 'data: expected float16, float32 or float64, got int64'),
        ({'n_relations': 1.5}, 'n_relations: expected an int, got 1.5'),
        ({'max_atom_id': 'x'}, "max_atom_id: expected an int, got 'x'"),
    ],
)
def test_bad_raw_arrays(changes, message):
    """A wrong type or dtype is a TypeError, everything else a ValueError."""
    of_kind = 'integers|a NumPy|float16|an int'
    error = TypeError if re.search('expected (%s)' % of_kind, message) else ValueError
    given = {
        name: numpy.array(value, None if value else 'i') if isinstance(value, list) else value
        for name, value in {**GOOD, **changes}.items()
    }
    with pytest.raises(error, match=message):
        BatchedCSR(**given)


@pytest.mark.gpu
def test_raw_arrays_on_two_devices():
    with pytest.raises(
        ValueError, match='row_offsets: expected an array on .*cupy:0.* got one on .*numpy'
    ):
        BatchedCSR(cuda.cupy.array([0, 1]), cuda.cupy.array([0]), numpy.array([0, 1]))


def test_too_many_entries():
    huge = numpy.broadcast_to(numpy.int32(0), (2**31,))  # takes only four bytes
    message = r'non-zeros: expected at most 2\*\*31 - 1 .* got 2147483648'
    with pytest.raises(ValueError, match=message):
        BatchedCSR(numpy.array([0, 1]), huge, numpy.array([0, 1]))


def test_too_many_columns():
    with pytest.raises(ValueError, match='nodes times relations: .* got 3000000000'):
        BatchedCSR(numpy.zeros(4, 'i'), numpy.zeros(0, 'i'), numpy.array([0, 3]), n_relations=10**9)
    n = 2500 * 10**6
    with pytest.raises(ValueError, match='nodes times relations: .* got 2500000000'):
        BatchedCSR.from_matrices([scipy.sparse.coo_matrix(([], ([], [])), shape=(n, n), dtype='f')])


@pytest.mark.parametrize('layout, n_rows', [('padded', 8), ('folded', 7)])
def test_too_many_columns_with_the_rows_of_a_layout(monkeypatch, layout, n_rows):
    matrices = [numpy.zeros((3, n, n), 'f') for n in (1, 4)]
    monkeypatch.setattr(check, 'INT32_MAX', 3 * n_rows)
    BatchedCSR.from_matrices(matrices, layout=layout)
    monkeypatch.setattr(check, 'INT32_MAX', 3 * n_rows - 1)
    with pytest.raises(ValueError, match='nodes times relations: .* got %d' % (3 * n_rows)):
        BatchedCSR.from_matrices(matrices, layout=layout)


def ones(*shape):
    return numpy.ones(shape)


@pytest.mark.parametrize(
    'given, error, message',
    [
        ([], ValueError, 'matrices: expected at least one matrix, got an empty sequence'),
        (
            [ones(2, 3)],
            ValueError,
            r'matrices\[0\]: expected shape \(n, n\) as in matrices\[0\], got \(2, 3\)',
        ),
        ([ones(2, 2), ones(3, 2)], ValueError, r'matrices\[1\]: .* got \(3, 2\)'),
        ([ones(2, 2), ones(1, 2, 2)], ValueError, r'matrices\[1\]: .* got \(1, 2, 2\)'),
        (
            [ones(2, 2, 2), ones(3, 2, 2)],
            ValueError,
            r'matrices\[1\]: expected shape \(2, n, n\) as in .* got \(3, 2, 2\)',
        ),
        ([ones(2)], ValueError, r'matrices\[0\]: .* got \(2,\)'),
        (
            [ones(0, 2, 2)],
            ValueError,
            r'matrices\[0\]: expected at least one relation, got shape \(0, 2, 2\)',
        ),
        ([ones(2, 2) * 1j], TypeError, 'matrices: expected float16, .* got complex128'),
        (
            [[[1, 2], [3, 4]]],
            TypeError,
            r'matrices\[0\]: expected SciPy sparse matrices, or arrays throughout the '
            'batch, got list',
        ),
        ([scipy.sparse.eye(2), numpy.eye(2)], TypeError, r'matrices\[1\]: .* got ndarray'),
        (
            [scipy.sparse.csr_matrix((2, 3))],
            ValueError,
            r'matrices\[0\]: expected square matrices of one size, got \[\(2, 3\)\]',
        ),
        (
            [[scipy.sparse.eye(2)], [scipy.sparse.eye(2)] * 2],
            ValueError,
            r'matrices\[1\]: expected 1 relations as in matrices\[0\], got 2',
        ),
        (
            [[scipy.sparse.eye(2)] * 3, [scipy.sparse.eye(2)] * 2],
            ValueError,
            r'matrices\[1\]: expected 3 relations as in matrices\[0\], got 2',
        ),
        ([[]], ValueError, r'matrices\[0\]: expected at least one relation, got none'),
        (
            [scipy.sparse.eye(2), []],
            ValueError,
            r'matrices\[1\]: expected at least one relation, got none',
        ),
    ],
)
def test_bad_matrices(given, error, message):
    with pytest.raises(error, match=message):
        BatchedCSR.from_matrices(given)


@pytest.mark.parametrize(
    'adj, n_nodes, message',
    [
        (ones(2, 2), None, r'adj: expected shape .* got \(2, 2\)'),
        (ones(1, 2, 3), None, r'adj: expected shape .* got \(1, 2, 3\)'),
        (ones(1, 2, 2), None, 'n_nodes: .* got None'),
        (
            ones(1, 2, 2),
            [1, 2],
            r'n_nodes: expected 1 integers, one for each graph, got int64 \(2,\)',
        ),
        (ones(1, 2, 2), [3], r'n_nodes\[0\]: expected 0 to 2, got 3'),
        (ones(2, 2, 2), [2, 5], r'n_nodes\[1\]: expected 0 to 2, got 5'),
        (ones(1, 2, 2), [-1], r'n_nodes\[0\]: expected 0 to 2, got -1'),
        (ones(1, 2, 2), [1], r'adj\[0\]: expected zeros outside of its 1 nodes, got other values'),
        (
            numpy.triu(-ones(1, 2, 2), 1),
            [1],
            r'adj\[0\]: expected zeros outside of its 1 nodes, got other values',
        ),
        (
            numpy.tril(-ones(1, 2, 2), -1),
            [1],
            r'adj\[0\]: expected zeros outside of its 1 nodes, got other values',
        ),
    ],
)
def test_bad_dense_batch(adj, n_nodes, message):
    with pytest.raises(ValueError, match=message):
        BatchedCSR.from_dense(adj, n_nodes=n_nodes, layout='packed')


def test_dense_batch_without_graphs():
    with pytest.raises(
        ValueError, match=r'adj: expected at least one graph, got shape \(0, 2, 2\)'
    ):
        BatchedCSR.from_dense(ones(0, 2, 2))


def test_matrices_may_be_a_data_set_of_chainer():
    matrices = SubDataset([numpy.eye(n) for n in (2, 3, 1)], 0, 2)
    assert BatchedCSR.from_matrices(matrices).n_graphs == 2


@pytest.mark.parametrize('error, given', [(ValueError, -3), (TypeError, '6')])
def test_largest_id_that_is_none(error, given):
    with pytest.raises(error, match='^max_atom_id: expected '):
        BatchedCSR.from_dense(ones(1, 2, 2), max_atom_id=given)


@pytest.mark.parametrize('matrices', [scipy.sparse.eye(3), scipy.sparse.eye(3).tocsr(), None])
def test_one_matrix_is_no_sequence(matrices):
    message = 'matrices: expected a sequence with a matrix for each graph, got one %s'
    with pytest.raises(TypeError, match='^%s$' % (message % type(matrices).__name__)):
        BatchedCSR.from_matrices(matrices)


@pytest.mark.parametrize('convert', [numpy.asarray, scipy.sparse.csr_matrix])
@pytest.mark.parametrize(
    'dtypes, expected', [('fi', 'f'), ('ief', 'f'), ('ie', 'e'), ('dif', 'd'), ('i?', 'f')]
)
def test_integers_take_the_dtype_of_the_others(convert, dtypes, expected):
    if convert is not numpy.asarray and 'e' in dtypes:
        pytest.skip('SciPy has no float16')
    matrices = [convert(numpy.diag([2, 3]).astype(dtype)) for dtype in dtypes]
    assert BatchedCSR.from_matrices(matrices).dtype == expected


def test_dense_batch_of_an_unknown_layout():
    with pytest.raises(
        ValueError, match="layout: expected one of 'packed', 'padded', got 'ragged'"
    ):
        BatchedCSR.from_dense(ones(1, 2, 2), layout='ragged')


def test_dense_batch_that_is_no_array():
    with pytest.raises(TypeError, match='adj: expected a NumPy or CuPy array, got list'):
        BatchedCSR.from_dense([[1]])


def test_transpose_of_symmetric_relations():
    """It has the relations in its rows, so it is not its own transpose."""
    matrix = numpy.array([[0, 1, 2], [1, 0, 3], [2, 3, 0]], 'f')
    adj = BatchedCSR.from_matrices([numpy.stack([matrix, 2 * matrix])])
    transpose = adj.T
    assert adj.is_symmetric and not transpose.is_symmetric
    assert (transpose.T.to_scipy() != adj.to_scipy()).nnz == 0


def test_other_values_may_not_be_symmetric():
    adj = BatchedCSR.from_matrices([numpy.ones((3, 3), 'f')])
    data = numpy.arange(9, dtype='f')
    assert adj.is_symmetric and adj.astype('d').is_symmetric
    assert not adj.replace(data=data).is_symmetric
    assert (adj.replace(data=data).T.to_scipy() != adj.replace(data=data).to_scipy().T).nnz == 0
    assert adj.replace(data=data, is_symmetric=True).is_symmetric
