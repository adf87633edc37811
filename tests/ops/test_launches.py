"""Vectors and weights of launches; results of kernels are in the tests of each operation."""

import numpy
import pytest

from chainer_bspmm import BatchedCOO, BatchedSELL
from chainer_bspmm.ops.bspmm import bsddmm_forward, bspmm_forward
from chainer_bspmm.ops.dropout import dropout_forward
from chainer_bspmm.ops.layer_norm import layer_norm_forward
from chainer_bspmm.ops.linear_softmax import row_softmax_backward, row_softmax_forward
from chainer_bspmm.ops.segment_softmax import segment_softmax_backward, segment_softmax_forward
from chainer_bspmm.ops.segments import row_sum, segment_broadcast_forward, segment_max_forward
from chainer_bspmm.ops.segments import segment_sum_forward
from chainer_bspmm.papers import products
from tests.support import BATCHES
from tests.support.launches import DeviceArray, Launches, placed

ADJ = BATCHES['many'].astype('f')
OFFSETS = ADJ.row_offsets
COUNTER = numpy.array([3], numpy.uint64).view(DeviceArray)


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


# operation -> (call on float32 arrays of four channels, number of arguments, number of results)
OPERATIONS = {
    'bspmm': (lambda x, residual: bspmm_forward(ADJ, x, residual=residual), 2, 1),
    'bspmm, SELL': (lambda x, y: products.bspmm_forward(BatchedSELL(ADJ), x, residual=y), 2, 1),
    'bsddmm': (lambda u, v: bsddmm_forward(ADJ, u, v), 2, 0),
    'bsddmm, COO': (lambda u, v: products.bsddmm_forward(BatchedCOO.from_csr(ADJ), u, v), 2, 0),
    'segment_sum': (lambda x: segment_sum_forward(x, ADJ.row_offsets), 1, 1),
    'segment_max': (lambda x: segment_max_forward(x, ADJ.row_offsets), 1, 1),
    'row_sum': (row_sum, 1, 1),
    'segment_broadcast': (lambda y: segment_broadcast_forward(y[:30], OFFSETS, ADJ.n_rows), 1, 1),
    'segment_softmax': (lambda x: segment_softmax_forward(x, ADJ.row_offsets), 1, 1),
    'segment_softmax_grad': (lambda y, gy: segment_softmax_backward(y, gy, ADJ.row_offsets), 2, 1),
    'layer_norm': (lambda x, gamma, beta: layer_norm_forward(x, gamma, beta, 1e-3), 3, 0),
    'row_softmax': (lambda a: row_softmax_forward(a[None]), 1, 0),
    'row_softmax_grad': (lambda a, g: row_softmax_backward(a[None], g), 2, 1),
    'dropout': (lambda x: dropout_forward(x, 0.5, 1, 2, COUNTER), 1, 2),
}


@pytest.mark.parametrize(
    'name, place',
    [
        (name, place)
        for name, (_, n_given, n_made) in OPERATIONS.items()
        for place in (None, *range(n_given + n_made))
    ],
)
def test_vectors_are_as_wide_as_every_array_allows(launches, name, place):
    call, n_given, n_made = OPERATIONS[name]
    shifts = [4 if i == place else 0 for i in range(n_given + n_made)]
    launches.shifts = shifts[n_given:]
    call(*(placed(numpy.zeros((ADJ.n_rows, 4), 'f'), shift) for shift in shifts[:n_given]))
    assert {defines['VECTOR'] for defines, _ in launches} == {4 if place is None else 1}


@pytest.mark.parametrize('is_weighted', [False, True])
def test_segments_read_weights_only_where_there_are_some(launches, is_weighted):
    rows, top = (placed(numpy.zeros((n, 4), 'f')) for n in (ADJ.n_rows, ADJ.n_graphs))
    weights = placed(numpy.ones(ADJ.n_rows, 'f')) if is_weighted else None
    segment_sum_forward(rows, ADJ.row_offsets, None, weights)
    segment_max_forward(rows, ADJ.row_offsets, None, weights)
    segment_broadcast_forward(top, ADJ.row_offsets, ADJ.n_rows, None, weights)
    segment_softmax_forward(rows, ADJ.row_offsets, weights)
    segment_softmax_backward(rows, rows, ADJ.row_offsets, weights)
    assert len(launches) == 7  # a sum or maximum of unknown sizes needs two
    for defines, arguments in launches:
        assert defines['WEIGHTED'] == is_weighted
        assert any(each is weights for each in arguments) == is_weighted
