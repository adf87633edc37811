"""benchmarks/products/matrices.py: the generated matrices are what the benchmarks claim."""

import chainer_bspmm
import numpy
import pytest

from benchmarks.products import matrices


@pytest.fixture
def rng():
    return numpy.random.RandomState(0)


def checked(adj):
    """Return the same batch, made by the constructor with the checks that the generators skip."""
    return chainer_bspmm.BatchedCSR(
        adj.indptr, adj.indices, adj.row_offsets, adj.data, adj.col_offsets
    )


@pytest.mark.parametrize('batch', [1, 3, matrices.DIFFERENT + 2])
def test_regular_has_equal_rows_of_distinct_columns(rng, batch):
    adj = checked(matrices.regular(rng, batch, 7, 3))
    assert adj.n_graphs == batch and adj.max_rows == 7 and adj.data.dtype == numpy.float32
    dense = adj.to_dense()
    assert dense.shape == (batch, 7, 7)
    assert ((dense != 0).sum(axis=2) == 3).all()  # duplicates would have been added up


def test_regular_differs_from_graph_to_graph(rng):
    dense = matrices.regular(rng, 4, 7, 3).to_dense()
    assert len({(graph != 0).tobytes() for graph in dense}) == 4


def test_single_is_one_graph_with_the_same_entries(rng):
    matrix = matrices.power_law(rng, 40, 4, 20)[:, :30]
    adj = checked(matrices.single(matrix))
    assert adj.n_graphs == 1 and adj.shape == (40, 30)
    numpy.testing.assert_array_equal(adj.to_scipy().toarray(), matrix.toarray())


def test_banded_fills_its_diagonals(rng):
    dense = matrices.banded(rng, 20, 2).toarray()
    row, column = numpy.indices(dense.shape)
    numpy.testing.assert_array_equal(dense != 0, abs(row - column) <= 2)


def test_blocks_of_mesh_couples_neighbours_by_full_blocks(rng):
    side = 4
    matrix = matrices.blocks_of_mesh(rng, side)
    assert matrix.shape == (3 * side**3,) * 2
    node = numpy.stack(numpy.unravel_index(numpy.arange(side**3), (side,) * 3), axis=1)
    near = (abs(node[:, None] - node[None]) <= 1).all(axis=2)
    numpy.testing.assert_array_equal(matrix.toarray() != 0, numpy.kron(near, numpy.ones((3, 3))))
    assert numpy.diff(matrix.indptr).max() == 81


def test_power_law_lengths_follow_the_law(rng):
    n_rows, mean, longest = 20000, 8, 300
    matrix = matrices.power_law(rng, n_rows, mean, longest)
    lengths = numpy.diff(matrix.indptr)
    assert matrix.has_canonical_format and 0.9 * mean < lengths.mean() < mean
    assert lengths.max() <= longest
    for length in (8, 16, 32, 64):  # P(row longer than length) = (mean / 2 / length) ^ 2
        assert abs((lengths >= length).mean() / (mean / 2 / length) ** 2 - 1) < 0.2, length
    assert abs(numpy.corrcoef(numpy.arange(n_rows), lengths)[0, 1]) < 0.05  # in random order


def test_rmat_has_hubs(rng):
    matrix = matrices.rmat(rng, 12, 8)
    lengths = numpy.diff(matrix.indptr)
    assert matrix.shape == (4096, 4096) and 6 < lengths.mean() < 8
    assert lengths.max() > 20 * lengths.mean() and (lengths == 0).any()
    # Both ways: hubs are in rows and in columns.
    assert numpy.diff(matrix.tocsc().indptr).max() > 20 * lengths.mean()
    quadrants = numpy.add.reduceat(numpy.sort(lengths), [0, 2048])
    assert 0.7 < quadrants[1] / lengths.sum()
