import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.scale_adj import scale_adj
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse import relations
from tests.emulation.kernel_cases import batch


def larger(device, adj, spare):
    """Return the matrix in arrays with room to spare."""
    new = adj.replace(has_spare=spare > 0)
    new.n_rows, new.nnz = adj.n_rows + spare, adj.nnz + spare
    new.indptr = device.put(numpy.pad(adj.indptr, (0, spare), mode='edge'))
    new.indices = device.put(numpy.pad(adj.indices, (0, spare)))
    if adj.data is not None:
        new.data = device.put(numpy.pad(adj.data, (0, spare)))
    new.row_offsets, new.col_offsets = device.put(adj.row_offsets), device.put(adj.col_offsets)
    return new


def check(device, adj, spare=0):
    expected = build.relation_rows(larger(device, adj, spare))
    given = larger(device, adj, spare)
    given.indices[adj.nnz :] = 2**30
    made = build.launch_relation_rows(given)
    for name, array, of_host in zip(made._fields, made, expected, strict=True):
        if of_host is None:
            assert array is None
        elif name == 'indices':
            numpy.testing.assert_array_equal(array, numpy.pad(of_host[: adj.nnz], (0, spare)))
        else:
            numpy.testing.assert_array_equal(array, of_host, name)
        assert array is None or name == 'data' or array.dtype == 'i4'


@pytest.mark.parametrize('dtype', 'efd')
@pytest.mark.parametrize('spare', [0, 3])
def test_reciprocal_degrees(device, dtype, spare):
    """Of rows with up to six entries, and of one without; also those of the transpose."""
    rng = numpy.random.RandomState(0)
    halves = [numpy.triu(rng.uniform(size=(3, n, n)) < 0.2, 1) for n in (9, 1, 14)]
    adj = BatchedCSR.from_matrices([half | half.transpose(0, 2, 1) for half in halves])
    assert adj.is_symmetric and adj.data is None and numpy.diff(adj.indptr).max() > 4
    made = build.launch_relation_rows(larger(device, adj, spare), numpy.dtype(dtype))
    plain = build.relation_rows(adj)
    degrees = numpy.maximum(numpy.diff(adj.indptr), 1).astype('d')
    rows = numpy.repeat(numpy.arange(3 * adj.n_rows), numpy.diff(plain.indptr)) // 3
    for actual, of in ((made.data, plain.indices), (made.transposed_data, rows)):
        expected = numpy.pad(1 / degrees[of], (0, spare), constant_values=1)
        if dtype != 'd':  # divided in float32, then rounded
            expected = expected.astype('f')
        assert actual.dtype == dtype
        numpy.testing.assert_array_equal(actual, expected.astype(dtype))


def test_scaled_matrices_have_their_rows_and_those_of_the_transpose(device, monkeypatch):
    rng = numpy.random.RandomState(0)
    halves = [numpy.triu(rng.uniform(size=(2, n, n)) < 0.3, 1) for n in (5, 3)]
    adj = BatchedCSR.from_matrices([half | half.transpose(0, 2, 1) for half in halves])
    expected = scale_adj(adj, numpy.dtype('d'))
    with monkeypatch.context() as patch:
        patch.setattr(build, 'relation_rows', build.launch_relation_rows)
        actual = relations.scaled_by_source(larger(device, adj, 0), expected.data)
    rows, transposed = relations.relation_rows(actual), relations.transposed_rows(actual)
    assert len(device.launched) == 1
    assert (rows.to_scipy() != relations.relation_rows(expected).to_scipy()).nnz == 0
    assert (transposed.to_scipy() != expected.T.to_scipy()).nnz == 0
    assert (actual.T.to_scipy() != expected.T.to_scipy()).nnz == 0


@pytest.mark.parametrize('name', ['relations', 'duplicates', 'no edges', 'empty graphs', 'mixed'])
def test_batches(device, name):
    check(device, batch(name, 'f'))


@pytest.mark.parametrize('spare', [0, 1, 300])
def test_many_rows_in_any_order_and_capacity_beyond_them(device, spare):
    rng, n_rows, n_relations = numpy.random.RandomState(0), 150, 3
    counts = rng.randint(0, 6, n_rows)
    columns = rng.randint(0, n_rows * n_relations, counts.sum())
    adj = BatchedCSR(
        numpy.concatenate([[0], counts.cumsum()]),
        columns,
        numpy.array([0, n_rows]),
        n_relations=n_relations,
    )
    check(device, adj, spare)


def test_no_rows(device):
    check(device, BatchedCSR.from_matrices([numpy.zeros((2, 0, 0))]))
