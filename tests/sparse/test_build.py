"""Gathering graphs into one CSR: its limits, symmetry, and the plan of the transpose."""

import re

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse import build, check


def gather_two_graphs():
    """Gather graphs of two and three nodes with two relations: 10 columns and 12 entries."""
    return build.block_diagonal(
        rows=numpy.array([2, 3]),
        row_nnz=numpy.array([3, 3, 2, 2, 2]),
        nnz=numpy.array([6, 6]),
        columns=numpy.array([0, 1, 2] * 2 + [0, 5] * 3),
        n_relations=2,
    )


def test_a_batch_that_is_as_large_as_int32_allows(monkeypatch):
    monkeypatch.setattr(check, 'INT32_MAX', 12)
    assert gather_two_graphs()['col_offsets'].tolist() == [0, 4, 10]


@pytest.mark.parametrize(
    'limit, message',
    [
        (11, 'non-zeros: expected at most 2**31 - 1 = 11 in one batch, got 12'),
        (9, 'nodes times relations: expected at most 2**31 - 1 = 9 in one batch, got 10'),
    ],
)
def test_all_graphs_of_a_batch_together_are_too_large(monkeypatch, limit, message):
    monkeypatch.setattr(check, 'INT32_MAX', limit)
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        gather_two_graphs()


@pytest.mark.parametrize('last, is_symmetric', [(1, True), (3, False)])
def test_values_of_entries_at_one_place_have_no_order(last, is_symmetric):
    adj = BatchedCSR(
        indptr=numpy.array([0, 2, 4]),
        indices=numpy.array([2, 2, 0, 0]),
        data=numpy.array([1, 2, 2, last], 'f'),
        row_offsets=numpy.array([0, 2]),
        n_relations=2,
    )
    assert adj.is_symmetric == is_symmetric


def test_a_block_has_at_most_1024_threads():
    assert build.transpose_launch(n_graphs=1, max_cols=4, max_nnz=5000).block == (1024, 1, 1)


@pytest.mark.parametrize('max_cols, warps', [(5951, 2), (5952, 1)])
def test_fewer_warps_share_the_memory_of_a_block(max_cols, warps):
    """All entries, and a number for each column and warp, take 4 bytes each."""
    plan = build.transpose_launch(n_graphs=1, max_cols=max_cols, max_nnz=130)
    assert plan.block == (32 * warps, 1, 1)
    assert plan.shared_bytes == 4 * (130 + warps * max_cols) <= 47 * 1024


@pytest.mark.parametrize(
    'n_graphs, max_cols, fits', [(1, 11904, True), (1, 11905, False), (0, 0, False)]
)
def test_a_launch_for_graphs_that_fit(n_graphs, max_cols, fits):
    plan = build.transpose_launch(n_graphs, max_cols, max_nnz=128 if n_graphs else 0)
    assert (plan is not None) == fits
