"""Matrices with rows far longer than the mean: products, and what a batch knows of its rows."""

import numpy
import pytest
import scipy.sparse

from chainer import functions

from chainer_bspmm import backend
from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.cuda import policy
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.functions import bsddmm
from chainer_bspmm.functions import bspmm
from chainer_bspmm.functions.fused.graph_linear import graph_linear
from chainer_bspmm.sparse.relations import relation_rows
from chainer_bspmm.training.batches import HostBatch
from chainer_bspmm.training.buffers import batch_over, buffers_of, batch_arrays
from tests.support import assert_close
from tests.support import DTYPES
from tests.support import features
from tests.support.gradients import check_gradients

H200 = policy.Device(132, 60 << 20)


def star(n_leaves, both_ways=True):
    """Return a graph whose node 0 gathers from as many others, with weights."""
    leaves = numpy.arange(1, n_leaves + 1)
    values = numpy.random.RandomState(0).uniform(0.5, 1.5, n_leaves)
    matrix = scipy.sparse.coo_matrix((values, (0 * leaves, leaves)), (n_leaves + 1,) * 2)
    return (matrix + matrix.T if both_ways else matrix).tocoo()


def power_law(rng, n_rows):
    """Return a matrix with rows of n_rows, n_rows / 2, n_rows / 3, ... entries, some made empty."""
    lengths = rng.permutation(n_rows // numpy.arange(1, n_rows + 1))
    lengths[rng.choice(n_rows, n_rows // 4)] = 0
    rows = numpy.repeat(numpy.arange(n_rows), lengths)
    values, columns = rng.uniform(-1, 1, rows.size), rng.randint(0, n_rows, rows.size)
    return scipy.sparse.coo_matrix((values, (rows, columns)), (n_rows, n_rows))


def power_law_batch(xp, dtype):
    rng = numpy.random.RandomState(0)
    matrices = [power_law(rng, 2000), star(5), power_law(rng, 700)]
    adj = BatchedCSR.from_matrices(matrices).astype(dtype)
    assert policy.piece_length(adj.nnz, adj.max_row_nnz, 1, H200)
    return rng, adj if xp is numpy else adj.to_device(0)


@pytest.mark.parametrize('n_channels', [1, 7, 64, 300])
@pytest.mark.parametrize('dtype', DTYPES)
def test_power_law(xp, dtype, n_channels):
    rng, adj = power_law_batch(xp, dtype)
    x = features(rng, xp, adj.n_cols, n_channels, dtype)
    residual = features(rng, xp, adj.n_rows, n_channels, dtype)
    y = bspmm(adj, x, residual=residual).array
    assert_close(y, reference.bspmm(adj, x, residual=residual), dtype)
    assert y.tobytes() == bspmm(adj, x, residual=residual).array.tobytes()
    w = bsddmm(adj, residual, x).array
    assert_close(w, reference.bsddmm(adj, residual, x), dtype)
    assert w.tobytes() == bsddmm(adj, residual, x).array.tobytes()


def test_transpose_of_power_law(xp):
    rng, adj = power_law_batch(xp, 'float32')
    x = features(rng, xp, adj.n_rows, 8, 'float32')
    assert_close(bspmm(adj.T, x).array, reference.bspmm(adj, x, trans=True), 'float32')


@pytest.mark.parametrize('both_ways', [False, True])
def test_gradients(xp, both_ways):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([star(150, both_ways)])
    adj = adj if xp is numpy else adj.to_device(0)
    x = features(rng, xp, adj.n_cols, 2, 'float64')
    data = features(rng, xp, adj.nnz, 1, 'float64')[:, 0]
    check_gradients(lambda x, data: bspmm(adj, x, data) ** 2, x, data)


@pytest.mark.parametrize('both_ways', [False, True])
def test_layer_of_a_graph_with_long_rows(xp, monkeypatch, both_ways):
    """Products, not one launch in whose tiles the other rows would wait."""
    monkeypatch.setattr(backend.gpu, 'layer', lambda *_: pytest.fail('one launch'))
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([star(150, both_ways)])
    adj = adj if xp is numpy else adj.to_device(0)
    x, W = features(rng, xp, 151, 6, 'float64'), features(rng, xp, 3, 6, 'float64')
    y = graph_linear(adj, x, W, activation=functions.relu).array
    expected = numpy.maximum(reference.bspmm(adj, x @ W.T), 0)
    assert_close(y, expected, 'float64')


def longest(adj):
    return adj.max_row_nnz, adj.max_col_nnz


def test_bounds_of_rows_and_columns():
    few = BatchedCSR.from_matrices([star(policy.LONG_ROW // 2)])
    assert longest(few) == (few.nnz, few.nnz) and few.nnz == policy.LONG_ROW  # not looked through
    one_way, both = (
        BatchedCSR.from_matrices([star(5), star(200, both_ways)]) for both_ways in (False, True)
    )
    assert longest(one_way) == (200, 5) and longest(one_way.T) == (5, 200)
    assert longest(both) == (200, 200) and both.T is both
    relations = BatchedCSR.from_matrices([[star(200), star(200)]])
    assert longest(relations) == longest(relations.T) == (400, 400)
    assert longest(relation_rows(relations))[1] == 400


@pytest.mark.parametrize('both_ways', [False, True])
def test_bounds_in_data_sets_and_captured_batches(both_ways):
    examples = [
        (numpy.zeros(n + 1, 'i'), star(n, both_ways).toarray(), numpy.zeros(1, 'f'))
        for n in (3, 150, 20)
    ]
    molecules = to_sparse(examples).molecules
    assert molecules.longest == ((150, 150) if both_ways else (150, 1))
    atoms, adj, labels = molecules.batch(numpy.array([0, 1]), 'packed')
    batch = HostBatch(atoms, adj, labels)
    # Rounded up: batches whose longest rows are about as long take the same buffers.
    assert batch.form.longest == ((256, 256) if both_ways else (256, policy.LONG_ROW))
    arrays = {
        name: numpy.zeros(*array) for name, array in batch_arrays(batch.form, batch.need).items()
    }
    _, placed, _ = batch_over(buffers_of(arrays), batch.form, batch.need)
    assert longest(placed) == batch.form.longest
    smaller = molecules.batch(numpy.array([0, 2]), 'packed')
    assert HostBatch(*smaller).form.longest == (policy.LONG_ROW, policy.LONG_ROW)


def test_rows_of_molecules_stay_whole():
    """However many atoms they have: no atom has many bonds."""
    chain = scipy.sparse.diags([1.0, 1.0], [-1, 1], shape=(500, 500)).toarray()
    relations = numpy.stack([chain, chain])
    adj = BatchedCSR.from_matrices([relations] * 3)
    assert longest(adj) == (4, 4)
    molecules = to_sparse([(numpy.zeros(500, 'i'), relations)] * 3).molecules
    batch = HostBatch(*molecules.batch(numpy.arange(3), 'packed'))
    for bounds in (longest(adj), longest(adj.T), molecules.longest, batch.form.longest):
        assert not any(policy.piece_length(10**9, bound, 32, H200) for bound in bounds)
