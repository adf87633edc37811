"""Matrices with a row for every pair of node and relation, and with other values."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.scale_adj import scale_adj
from chainer_bspmm.sparse import build, relations
from chainer_bspmm.sparse.relations import relation_rows, with_values
from tests.emulation.kernel_cases import batch, integers, larger, offsets_of
from tests.support import batch_on
from tests.support.relations import relation_batch_on


@pytest.fixture
def rectangular():
    """Two graphs with 1 and 2 receivers, 3 and 1 senders, and two relations."""
    return BatchedCSR(
        indptr=numpy.array([0, 3, 4, 6]),
        indices=numpy.array([5, 0, 3, 7, 6, 7]),
        row_offsets=numpy.array([0, 1, 3]),
        data=numpy.array([1.0, 2, 3, 4, 5, 6]),
        col_offsets=numpy.array([0, 6, 8]),
        n_relations=2,
    )


def test_rows_of_relations(rectangular):
    rows = relation_rows(rectangular)
    expected = numpy.zeros((6, 4))
    matrix = rectangular.to_scipy().tocoo()
    for i, column, value in zip(matrix.row, matrix.col, matrix.data):
        expected[2 * i + column % 2, column // 2] = value
    numpy.testing.assert_array_equal(rows.to_scipy().toarray(), expected)
    # Check the blocks of graphs, and the sizes that follow from them.
    assert rows.row_offsets.tolist() == [0, 2, 6] and rows.col_offsets.tolist() == [0, 3, 4]
    assert (rows.max_rows, rows.max_cols, rows.n_relations) == (4, 3, 1)
    numpy.testing.assert_array_equal(rows.T.row_offsets, rows.col_offsets)
    numpy.testing.assert_array_equal(rows.to_dense()[0, :2, :3], expected[:2, :3])
    assert relation_rows(rectangular) is rows


def test_one_relation_has_them_already():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))])
    assert relation_rows(adj) is adj


@pytest.mark.parametrize('name', ['four relations', 'unsorted values'])
def test_rows_of_relations_of_batches(xp, name):
    adj = relation_batch_on(name, xp, 'float64')
    rows = relation_rows(adj)
    n_relations = adj.n_relations
    expected = adj.to_scipy().toarray().reshape(adj.n_rows, -1, n_relations).swapaxes(1, 2)
    expected = expected.reshape(adj.n_rows * n_relations, -1)
    numpy.testing.assert_array_equal(rows.to_scipy().toarray(), expected)
    numpy.testing.assert_array_equal(rows.T.to_scipy().toarray(), expected.T)
    assert rows.shape == (adj.n_rows * n_relations, adj.n_cols // n_relations)
    assert rows.indptr.dtype == rows.indices.dtype == rows.row_offsets.dtype == numpy.int32
    assert rows.max_rows == adj.max_rows * n_relations
    assert rows.max_cols == adj.max_cols // n_relations
    assert relation_rows(adj) is rows
    # The constructor, which checks arrays of unknown origin, accepts these.
    BatchedCSR(rows.indptr, rows.indices, rows.row_offsets, rows.data, rows.col_offsets)


@pytest.mark.parametrize('name', ['four relations', 'symmetric', 'symmetric ones', 'many'])
def test_with_values(xp, name):
    adj = batch_on(name, xp, 'float64')
    before = adj.to_scipy().toarray()
    new = with_values(adj, xp.arange(1.0, adj.nnz + 1))
    expected = adj.to_scipy()
    expected.data = numpy.arange(1.0, adj.nnz + 1)
    numpy.testing.assert_array_equal(new.to_scipy().toarray(), expected.toarray())
    numpy.testing.assert_array_equal(new.T.to_scipy().toarray(), expected.toarray().T)
    numpy.testing.assert_array_equal(adj.to_scipy().toarray(), before)


def check(gpu, adj, spare=0):
    expected = build.relation_rows(larger(numpy.array, adj, spare))
    given = larger(gpu.put, adj, spare)
    given.indices[adj.nnz :] = 2**30
    made = build.relation_rows(given)
    for name, array, of_host in zip(made._fields, made, expected, strict=True):
        assert (array is None) == (of_host is None)
        if of_host is not None:
            if name == 'indices':
                of_host = numpy.pad(of_host[: adj.nnz], (0, spare))
            numpy.testing.assert_array_equal(cuda.to_cpu(array), of_host, name)
            assert name == 'data' or array.dtype == 'i4'


@pytest.mark.parametrize('dtype', 'efd')
@pytest.mark.parametrize('spare', [0, 3])
def test_reciprocal_degrees(gpu, dtype, spare):
    """Rows have up to six entries, one has none; the transpose is compared, too."""
    rng = numpy.random.RandomState(0)
    halves = [numpy.triu(rng.uniform(size=(3, n, n)) < 0.2, 1) for n in (9, 1, 14)]
    adj = BatchedCSR.from_matrices([half | half.transpose(0, 2, 1) for half in halves])
    assert adj.is_symmetric and adj.data is None and numpy.diff(adj.indptr).max() > 4
    made = build.relation_rows(larger(gpu.put, adj, spare), numpy.dtype(dtype))
    plain = build.relation_rows(adj)
    degrees = numpy.maximum(numpy.diff(adj.indptr), 1).astype('d')
    rows = numpy.repeat(numpy.arange(3 * adj.n_rows), numpy.diff(plain.indptr)) // 3
    for actual, of in ((made.data, plain.indices), (made.transposed_data, rows)):
        expected = numpy.pad(1 / degrees[of], (0, spare), constant_values=1)
        if dtype != 'd':  # the quotient is float32, and is then rounded
            expected = expected.astype('f')
        assert actual.dtype == dtype
        numpy.testing.assert_array_equal(cuda.to_cpu(actual), expected.astype(dtype))


def test_rows_of_scaled_matrices(gpu):
    """One launch makes the rows of the matrix and the rows of its transpose."""
    rng = numpy.random.RandomState(0)
    halves = [numpy.triu(rng.uniform(size=(2, n, n)) < 0.3, 1) for n in (5, 3)]
    adj = BatchedCSR.from_matrices([half | half.transpose(0, 2, 1) for half in halves])
    expected = scale_adj(adj, numpy.dtype('d'))
    actual = relations.scaled_by_source(larger(gpu.put, adj), gpu.put(expected.data))
    rows, transposed = relations.relation_rows(actual), relations.transposed_rows(actual)
    assert len(gpu.launched) == 1
    assert (rows.to_scipy() != relations.relation_rows(expected).to_scipy()).nnz == 0
    assert (transposed.to_scipy() != expected.T.to_scipy()).nnz == 0
    assert (actual.T.to_scipy() != expected.T.to_scipy()).nnz == 0


@pytest.mark.parametrize('name', ['relations', 'duplicates', 'no edges', 'empty graphs', 'mixed'])
def test_batches(gpu, name):
    check(gpu, batch(name, 'f'))


def check_random(gpu, n_rows, most, spare):
    """Check rows with fewer than `most` entries, which are not sorted."""
    rng = numpy.random.RandomState(0)
    n_relations = 3
    counts = rng.randint(0, most, n_rows)
    columns = rng.randint(0, n_rows * n_relations, counts.sum())
    adj = BatchedCSR(
        indptr=offsets_of(counts),
        indices=columns,
        row_offsets=numpy.array([0, n_rows]),
        data=integers(counts.sum(), 'f'),
        n_relations=n_relations,
    )
    check(gpu, adj, spare)
    check(gpu, adj.replace(data=None), spare)


@pytest.mark.parametrize('spare', [0, 1, 300])
def test_many_rows_in_any_order(gpu, spare):
    """Buffers may have spare rows and entries."""
    check_random(gpu, 150, 6, spare)


def test_no_rows(gpu):
    check(gpu, BatchedCSR.from_matrices([numpy.zeros((2, 0, 0))]))
