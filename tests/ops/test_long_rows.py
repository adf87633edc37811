"""Matrices with rows far longer than the mean: products, and what a batch knows of its rows."""

import numpy
import pytest
import scipy.sparse

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.cuda.plans import LONG_ROW
from chainer_bspmm.dataset import device_dataset
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.functions import bsddmm
from chainer_bspmm.functions import bspmm
from chainer_bspmm.ops.attention_pattern import AttentionPattern
from chainer_bspmm.ops.bspmm import piece_length
from chainer_bspmm.ops.graph_linear import graph_linear
from chainer_bspmm.ops.graph_linear.launches import layer_of
from chainer_bspmm.sparse.edges import edges_of
from chainer_bspmm.sparse.relations import relation_rows
from chainer_bspmm.sparse.relations import transposed_rows
from chainer_bspmm.training.batches import DeviceBatch
from chainer_bspmm.training.batches import HostBatch
from chainer_bspmm.dataset.batch_form import batch_over, buffers_of, batch_arrays
from tests.support import assert_close
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import reference
from tests.support.gradients import check_gradients

H200 = Device(132, 60 << 20)


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
    assert piece_length(*adj.shape, adj.nnz, adj.longest, 1, H200)
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
    given = []

    def noted(*args, **options):
        given.append((layer_of(*args, **options), args[6:] or tuple(options.values())))
        return given[-1][0]

    monkeypatch.setattr('chainer_bspmm.ops.graph_linear.node.layer_of', noted)
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([star(150, both_ways)])
    adj = adj if xp is numpy else adj.to_device(0)
    x, W = features(rng, xp, 151, 6, 'float64'), features(rng, xp, 3, 6, 'float64')
    y = graph_linear(adj, x, W, activation=functions.relu).array
    assert given == [(None, (150,))]
    assert_close(y, numpy.maximum(reference.bspmm(adj, x @ W.T), 0), 'float64')


def test_no_layer_of_long_rows():
    """Whatever its widths are; the device is not even asked about."""
    for longest in (LONG_ROW + 1, 10**6):
        assert layer_of(None, {}, 1, False, 'relu', False, longest) is None


def test_bounds():
    few = BatchedCSR.from_matrices([star(LONG_ROW // 2)])
    assert few.longest == few.nnz == LONG_ROW  # not looked through
    one_way, both = (
        BatchedCSR.from_matrices([star(5), star(200, both_ways)]) for both_ways in (False, True)
    )
    for adj in (one_way, one_way.T, both, both.astype('float32'), both.replace(data=None)):
        assert adj.longest == 200
    assert both.T is both
    many = BatchedCSR.from_matrices([[star(200), star(200)]])
    assert many.longest == many.T.longest == relation_rows(many).longest == 400


def counted(adj):
    """Return the most entries that a row or a column has."""
    n_true = adj._n_true_entries()
    columns = numpy.bincount(adj.indices[:n_true], minlength=1)
    return max(numpy.diff(adj.indptr).max(initial=0), columns.max())


@pytest.mark.parametrize('n_relations', [1, 3])
@pytest.mark.parametrize('both_ways', [False, True])
def test_bounds_of_matrices_that_are_made_of_it(both_ways, n_relations):
    """At least as many as there are: what is launched for long rows is then launched for them."""
    graph = star(500, both_ways)
    graph = graph if both_ways else graph + scipy.sparse.eye(501)
    adj = BatchedCSR.from_matrices([[graph] * n_relations, [star(3)] * n_relations])
    edges = edges_of(adj)
    made = [adj, adj.T, relation_rows(adj), transposed_rows(adj)]
    made += [edges.from_source, edges.from_receiver, edges.to_node]
    for within in (False, True):
        for side_by_side in (False, True):
            pattern = AttentionPattern(adj, 4, within, side_by_side, 'f')
            made += [pattern.product, pattern.gathers(adj, 4)]
            made += [] if pattern.isolated is None else [pattern.isolated]
    for matrix in made:
        assert matrix.longest >= counted(matrix) and matrix.T.longest >= counted(matrix.T)


def test_matrices_that_are_made_of_molecules_have_no_long_rows():
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n, 4, True, 0.02) for n in (9, 30)] * 5)
    assert adj.longest <= LONG_ROW // 8 < LONG_ROW < adj.nnz
    adj = adj.replace(longest=LONG_ROW)  # as in captured steps
    edges, pattern = edges_of(adj), AttentionPattern(adj, 8, True, False, 'f')
    for matrix in (
        relation_rows(adj),
        relation_rows(adj.replace(is_symmetric=False)),
        edges.from_source,
        edges.from_receiver,
        edges.to_node,
        pattern.product,
        pattern.gathers(adj, 8),
    ):
        assert matrix.longest <= LONG_ROW


def test_bounds_in_data_sets_and_captured_batches(monkeypatch):
    monkeypatch.setattr(cuda, 'cupy', numpy, raising=False)
    monkeypatch.setattr(device_dataset, 'gather_batch', lambda *_: None)
    examples = [
        (numpy.ones(n + 1, 'i'), star(n, both_ways).toarray(), numpy.zeros(1, 'f'))
        for n, both_ways in ((3, True), (150, True), (20, True), (300, False))
    ]
    molecules = DeviceMolecules(to_sparse(examples).molecules, chainer.get_device('@numpy'))
    assert molecules.longest.tolist() == [3, 150, 20, 300]
    for index, bound, in_buffers in (
        ([0, 2], 20, LONG_ROW),
        ([0, 1], 150, 256),
        ([3, 0], 300, 512),
        ([1, 1], 150, 256),
    ):
        index = numpy.array(index)
        on_host, there = (of.batch(index, 'packed') for of in (molecules.host, molecules))
        # A batch of few entries is not looked through on the host.
        assert on_host[1].longest == (bound if bound > 20 else on_host[1].max_nnz)
        assert there[1].longest == bound
        batches = HostBatch(*on_host), DeviceBatch(molecules, index, 'packed', None)
        # Rounded up: batches whose longest rows are about as long take the same buffers.
        assert [batch.form.longest for batch in batches] == [in_buffers] * 2
        arrays = batch_arrays(batches[0].form, batches[0].need)
        arrays = {name: numpy.zeros(*array) for name, array in arrays.items()}
        _, adj, _ = batch_over(buffers_of(arrays), batches[0].form, batches[0].need)
        assert adj.longest == in_buffers
    only = DeviceMolecules(molecules.host.take(numpy.array([3])), chainer.get_device('@numpy'))
    assert only.batch(numpy.array([0]), 'packed')[1].longest == 300


def test_rows_of_molecules_stay_whole():
    """However many atoms they have: no atom has many bonds."""
    chain = scipy.sparse.diags([1.0, 1.0], [-1, 1], shape=(500, 500)).toarray()
    relations = numpy.stack([chain, chain])
    adj = BatchedCSR.from_matrices([relations] * 3)
    assert adj.longest == adj.T.longest == 4
    molecules = to_sparse([(numpy.ones(500, 'i'), relations)] * 3).molecules
    assert molecules.longest.tolist() == [4, 4, 4]
    batch = HostBatch(*molecules.batch(numpy.arange(3), 'packed'))
    assert batch.form.longest == LONG_ROW
    assert not piece_length(10**6, 10**6, 10**9, LONG_ROW, 32, H200)


def test_a_long_column_of_short_rows():
    matrix = numpy.zeros((2 * LONG_ROW,) * 2, 'f')
    matrix[:, 3] = 1
    assert BatchedCSR.from_matrices([matrix]).longest == len(matrix)
