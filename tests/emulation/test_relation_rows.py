import numpy
import pytest

from chainer_bspmm.sparse import build

from chainer_bspmm import BatchedCSR

from tests.emulation.kernel_cases import batch


def check(device, adj, spare=0):
    expected = build.relation_rows(adj)
    larger = adj.replace()
    larger.n_rows, larger.nnz = adj.n_rows + spare, adj.nnz + spare
    larger.indptr = device.put(numpy.pad(adj.indptr, (0, spare), mode='edge'))
    larger.indices = device.put(numpy.pad(adj.indices, (0, spare), constant_values=2**30))
    indptr, indices, order = build.launch_relation_rows(larger)
    more = spare * adj.n_relations
    numpy.testing.assert_array_equal(indptr, numpy.pad(expected[0], (0, more), mode='edge'))
    numpy.testing.assert_array_equal(indices, numpy.pad(expected[1], (0, spare)))
    rest = numpy.arange(adj.nnz, adj.nnz + spare)
    numpy.testing.assert_array_equal(order, numpy.append(expected[2], rest))
    assert {array.dtype for array in (indptr, indices, order)} == {numpy.dtype('i4')}


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
    adj = BatchedCSR.from_matrices([numpy.zeros((2, 0, 0))])
    check(device, adj)
    assert not device.launched
