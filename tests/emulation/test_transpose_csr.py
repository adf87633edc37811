import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse.build import transpose_launch
from tests.emulation.kernel_cases import batch, BATCHES, offsets_of, transpose_on


def check(device, adj):
    for array, expected in zip(
        transpose_on(device, adj), build.transpose(numpy, adj.indptr, adj.indices, adj.n_cols)
    ):
        assert array.dtype == numpy.int32
        numpy.testing.assert_array_equal(array, expected)
    assert len(device.launched) == 1


def random_batch(sizes, n_columns=None):
    """Return rows of 0 to 6 unsorted entries, some of which are in one place."""
    rng = numpy.random.RandomState(0)
    n_columns = sizes if n_columns is None else n_columns
    starts = offsets_of(n_columns)
    rows = [
        rng.randint(start, start + columns, rng.randint(7))
        for size, columns, start in zip(sizes, n_columns, starts)
        for _ in range(size)
    ]
    indices = numpy.concatenate(rows).astype(int)
    indptr = offsets_of(map(len, rows))
    return BatchedCSR(indptr, indices, offsets_of(sizes), col_offsets=starts)


@pytest.mark.parametrize('name', BATCHES)
def test_batches(device, name):
    check(device, batch(name, 'f'))


@pytest.mark.parametrize(
    'sizes', [(1,), (31, 32, 33), (11, 0, 1, 5), (40,) * 3, (100, 2, 3), (300,)], ids=str
)
def test_sizes(device, sizes):
    check(device, random_batch(sizes))


# So many columns that warps scan them in several rounds, and fewer columns than rows.
@pytest.mark.parametrize(
    'sizes, n_columns',
    [((3, 20), (12, 80)), ((40, 3), (2, 1)), ((2,), (100,)), ((20, 5), (300, 20))],
)
def test_rectangular(device, sizes, n_columns):
    check(device, random_batch(sizes, n_columns))


def test_no_columns(device):
    adj = BatchedCSR(
        indptr=numpy.zeros(4, int),
        indices=numpy.zeros(0, int),
        row_offsets=numpy.array([0, 1, 3]),
        col_offsets=numpy.array([0, 0, 0]),
    )
    check(device, adj)


@pytest.mark.parametrize('n_entries', [31, 32, 33, 128, 129, 300])
def test_all_entries_in_one_column_keep_their_order(device, n_entries):
    indptr = numpy.array([0, n_entries, n_entries])
    check(device, BatchedCSR(indptr, numpy.ones(n_entries, int), numpy.array([0, 2])))


@pytest.mark.parametrize('n_entries, warps', [(128, 1), (129, 2), (256, 2), (257, 4), (600, 8)])
def test_warps(device, n_entries, warps):
    indices = numpy.random.RandomState(0).randint(0, 20, n_entries)
    indptr = numpy.linspace(0, n_entries, 21).astype(int)
    adj = BatchedCSR(indptr, indices, numpy.array([0, 20]))
    check(device, adj)
    launch = transpose_launch(adj.n_graphs, adj.max_cols, adj.max_nnz)
    assert launch.block == (warps * 32, 1, 1)


@pytest.mark.parametrize('spare', [1, 70])
def test_capacity_beyond_the_batch(device, spare):
    adj = random_batch((3, 20))
    larger = adj.replace()
    larger.n_cols, larger.nnz = adj.n_cols + spare, adj.nnz + spare
    larger.indptr = numpy.pad(adj.indptr, (0, spare), mode='edge')
    larger.indices = numpy.pad(adj.indices, (0, spare), constant_values=2**30)
    indptr, indices, order = transpose_on(device, larger)
    expected = build.transpose(numpy, adj.indptr, adj.indices, adj.n_cols)
    # Columns that belong to no graph are empty rows of the transpose.
    numpy.testing.assert_array_equal(indptr, numpy.pad(expected[0], (0, spare), mode='edge'))
    numpy.testing.assert_array_equal(indices, numpy.pad(expected[1], (0, spare)))
    # `order` as a whole may index values, so spare places hold indices of spare entries.
    numpy.testing.assert_array_equal(order, [*expected[2], *range(adj.nnz, adj.nnz + spare)])
