"""Generated matrices of the benchmarks have the claimed properties."""

import numpy
import pytest

from benchmarks.products import matrices


@pytest.fixture
def rng():
    return numpy.random.RandomState(0)


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
    assert abs(numpy.corrcoef(numpy.arange(n_rows), lengths)[0, 1]) < 0.05  # the order is random


def test_rmat_has_hubs(rng):
    matrix = matrices.rmat(rng, 12, 8)
    lengths = numpy.diff(matrix.indptr)
    assert matrix.shape == (4096, 4096) and 6 < lengths.mean() < 8
    assert lengths.max() > 20 * lengths.mean() and (lengths == 0).any()
    # There are hubs among rows and among columns.
    assert numpy.diff(matrix.tocsc().indptr).max() > 20 * lengths.mean()
    quadrants = numpy.add.reduceat(numpy.sort(lengths), [0, 2048])
    assert 0.7 < quadrants[1] / lengths.sum()
