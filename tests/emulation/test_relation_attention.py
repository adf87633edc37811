"""The launches of relation_attention and its pattern, against NumPy."""

import functools

import numpy
import pytest
import scipy.sparse

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops import attention_pattern
from chainer_bspmm.ops import relation_attention
from tests.emulation.emulator.elementwise_on_cpu import elementwise
from tests.support import random_matrix
from tests.support.relations import UNSORTED
from tests.support.spare import with_spare

BATCHES = ['packed', 'folded', 'unsorted', 'no edges']
BOUND = {'f': 1e-6, 'd': 1e-14}


@pytest.fixture
def device(device, monkeypatch):
    monkeypatch.setattr(cuda, 'elementwise', functools.partial(elementwise, device.put))
    return device


def batch(name, spare):
    if name == 'unsorted':
        adj = UNSORTED['unsorted relations']
    else:
        rng = numpy.random.RandomState(0)
        density = 0 if name == 'no edges' else 0.3
        matrices = [random_matrix(rng, n, 3, density=density) for n in (4, 0, 1, 6, 0)]
        matrices[3][:, 2] = 0
        folded = name == 'folded'
        adj = BatchedCSR.from_matrices(
            matrices, 'folded' if folded else 'packed', padded_to=5 if folded else None
        )
    return with_spare(adj, *spare) if any(spare) else adj


@pytest.mark.parametrize('spare', [(0, 0), (3, 0), (2, 5)], ids=str)
@pytest.mark.parametrize('n_heads', [1, 3])
@pytest.mark.parametrize('name', BATCHES)
def test_entries(device, name, n_heads, spare):
    adj = batch(name, spare)
    results = []
    for put, fill in (
        (lambda array: array, attention_pattern._fill_on_host),
        (device.put, attention_pattern._fill_on_device),
    ):
        arrays = [put(numpy.zeros(adj.nnz * n_heads, 'i')) for _ in range(2)]
        arrays.append(put(numpy.zeros(adj.n_cols * n_heads + 1, 'i')))
        fill(adj, n_heads, *arrays)
        results.append(arrays)
    for expected, actual in zip(*results):
        numpy.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('spare', [(0, 0), (3, 0), (2, 5)], ids=str)
@pytest.mark.parametrize('rows_per_node', [1, 3])
@pytest.mark.parametrize('within', [False, True])
@pytest.mark.parametrize('name', BATCHES)
def test_rows_without_edges(device, name, within, rows_per_node, spare):
    adj, n_heads = batch(name, spare), 3
    width = adj.n_relations * n_heads
    arrays = [numpy.zeros(size, 'i') for size in (2 * [adj.nnz * n_heads])]
    by_receiver = numpy.zeros(adj.n_cols * n_heads + 1, 'i')
    attention_pattern._fill_on_host(adj, n_heads, *arrays, by_receiver=by_receiver)
    given = adj, n_heads, within, rows_per_node, by_receiver, numpy.dtype('d')
    shape = adj.n_rows * rows_per_node, adj.n_graphs * width
    expected = attention_pattern._isolated_on_host(*given)
    assert (expected is None) == (name == 'unsorted' and not within)
    expected = scipy.sparse.csr_matrix(shape if expected is None else expected, shape)
    data, indices, indptr = attention_pattern._isolated_on_device(*given)
    n_true = int(adj.row_offsets[-1]) * width
    assert indptr[-1] == n_true and not data[n_true:].any() and not indices[n_true:].any()
    actual = scipy.sparse.csr_matrix((data, indices, indptr), shape)
    numpy.testing.assert_array_equal(actual.toarray(), expected.toarray())


@pytest.mark.parametrize('spare', [(0, 0), (2, 5)], ids=str)
@pytest.mark.parametrize('dtype', BOUND)
@pytest.mark.parametrize('name', ['packed', 'unsorted', 'no edges'])
def test_scores(device, name, dtype, spare):
    """Logits made of them, and their gradients made of the logits'."""
    adj, n_heads = batch(name, spare), 3
    pattern = attention_pattern.AttentionPattern(adj, n_heads, False, False, numpy.dtype(dtype))
    rng = numpy.random.RandomState(0)
    scores = rng.uniform(-1, 1, (adj.n_cols * n_heads, 2)).astype(dtype)
    glogits = rng.uniform(-1, 1, adj.nnz * n_heads).astype(dtype)
    glogits[adj._n_true_entries() * n_heads :] = 0
    b, slope = numpy.array([0.25], dtype), numpy.dtype(dtype).type(0.2)
    results = []
    for put, logits, gradients in (
        (
            lambda array: array,
            relation_attention._logits_on_host,
            relation_attention._score_gradients_on_host,
        ),
        (
            device.put,
            relation_attention._logits_on_device,
            relation_attention._score_gradients_on_device,
        ),
    ):
        gscores = put(numpy.full(scores.shape, numpy.nan, dtype))
        z, slopes = logits(put(scores), put(pattern.sources), put(pattern.receivers), put(b), slope)
        gradients(put(glogits), slopes, pattern, adj.n_relations, n_heads, gscores)
        results.append((z, slopes, gscores))
    for expected, actual in zip(*results):
        assert actual.dtype == dtype
        numpy.testing.assert_allclose(actual, expected, BOUND[dtype], BOUND[dtype])
