"""Matrices with a row for every relation, and with other values."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse.relations import relation_rows
from chainer_bspmm.sparse.relations import with_values


@pytest.fixture
def rectangular():
    """Two graphs of 1 and 2 receivers, 3 and 1 senders, two relations."""
    return BatchedCSR(
        numpy.array([0, 3, 4, 6]),
        numpy.array([5, 0, 3, 7, 6, 7]),
        numpy.array([0, 1, 3]),
        numpy.array([1.0, 2, 3, 4, 5, 6]),
        numpy.array([0, 6, 8]),
        n_relations=2,
    )


def test_rows_of_relations(rectangular):
    rows = relation_rows(rectangular)
    expected = numpy.zeros((6, 4))
    matrix = rectangular.to_scipy().tocoo()
    for i, column, value in zip(matrix.row, matrix.col, matrix.data):
        expected[2 * i + column % 2, column // 2] = value
    numpy.testing.assert_array_equal(rows.to_scipy().toarray(), expected)
    # The blocks of the graphs, and what follows from them.
    assert rows.row_offsets.tolist() == [0, 2, 6] and rows.col_offsets.tolist() == [0, 3, 4]
    assert (rows.max_rows, rows.max_cols, rows.n_relations) == (4, 3, 1)
    numpy.testing.assert_array_equal(rows.T.row_offsets, rows.col_offsets)
    numpy.testing.assert_array_equal(rows.to_dense()[0, :2, :3], expected[:2, :3])
    assert relation_rows(rectangular) is rows


def test_one_relation_has_them_already():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))])
    assert relation_rows(adj) is adj


def test_other_values_have_their_own_transpose(rectangular):
    values = numpy.arange(6.0)
    other = with_values(rectangular, values)
    expected = rectangular.to_scipy()
    expected.data = values
    numpy.testing.assert_array_equal(other.to_scipy().toarray(), expected.toarray())
    numpy.testing.assert_array_equal(other.T.to_scipy().toarray(), expected.T.toarray())
    assert other.T.indices is rectangular.T.indices
