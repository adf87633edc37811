"""What the GPU backend launches; the kernels themselves are tested in tests/emulation."""

import numpy
import pytest

from chainer_bspmm import backend
from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedSELL
from chainer_bspmm import papers
from tests.support import BATCHES
from tests.support.launches import DeviceArray
from tests.support.launches import Launches
from tests.support.spare import with_spare

ADJ = BATCHES['many'].astype('f')
COUNTER = numpy.array([3], numpy.uint64).view(DeviceArray)


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


# operation -> (call on its float32 arrays of four channels, how many it takes, how many it makes)
OPERATIONS = {
    'bspmm': (lambda x, residual: backend.bspmm(ADJ, x, residual=residual), 2, 1),
    'bspmm, SELL': (
        lambda x, residual: backend.bspmm(BatchedSELL(ADJ), x, residual=residual),
        2,
        1,
    ),
    'bsddmm': (lambda u, v: backend.bsddmm(ADJ, u, v), 2, 0),
    'bsddmm, COO': (lambda u, v: backend.bsddmm(BatchedCOO.from_csr(ADJ), u, v), 2, 0),
    'segment_sum': (lambda x: backend.segment_sum(x, ADJ.row_offsets), 1, 1),
    'segment_max': (lambda x: backend.segment_max(x, ADJ.row_offsets), 1, 1),
    'row_sum': (backend.row_sum, 1, 1),
    'segment_broadcast': (
        lambda y: backend.segment_broadcast(y[: ADJ.n_graphs], ADJ.row_offsets, ADJ.n_rows),
        1,
        1,
    ),
    'segment_softmax': (lambda x: backend.segment_softmax(x, ADJ.row_offsets), 1, 1),
    'segment_softmax_grad': (
        lambda y, gy: backend.segment_softmax_grad(y, gy, ADJ.row_offsets),
        2,
        1,
    ),
    'dropout': (lambda x: backend.dropout(x, 0.5, 1, 2, COUNTER), 1, 2),
    'relu_dropout': (lambda x: backend.relu_dropout(x, 0.5, 1, 2, COUNTER), 1, 0),
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
    call(*(launches.put(numpy.zeros((ADJ.n_rows, 4), 'f'), shift) for shift in shifts[:n_given]))
    widths = {launched.defines['VECTOR'] for launched in launches}
    assert widths == {4 if place is None else 1}


@pytest.mark.parametrize('is_weighted', [False, True])
def test_segments_read_weights_only_where_there_are_some(launches, is_weighted):
    rows, top = (launches.put(numpy.zeros((n, 4), 'f')) for n in (ADJ.n_rows, ADJ.n_graphs))
    weights = launches.put(numpy.ones(ADJ.n_rows, 'f')) if is_weighted else None
    backend.segment_sum(rows, ADJ.row_offsets, None, weights)
    backend.segment_max(rows, ADJ.row_offsets, None, weights)
    backend.segment_broadcast(top, ADJ.row_offsets, ADJ.n_rows, None, weights)
    backend.segment_softmax(rows, ADJ.row_offsets, weights)
    backend.segment_softmax_grad(rows, rows, ADJ.row_offsets, weights)
    assert len(launches) == 7  # two for a sum or maximum of which the sizes are not known
    for launched in launches:
        assert launched.defines['WEIGHTED'] == is_weighted
        assert any(each is weights for each in launched.arguments) == is_weighted


@pytest.mark.parametrize('algorithm', backend.gpu.ALGORITHMS)
def test_spare_entries_do_without_the_kernels_that_write_rows_of_graphs_only(launches, algorithm):
    spare = with_spare(ADJ, 3, 3)
    x = launches.put(numpy.zeros((spare.n_cols, 4), 'f'))
    if algorithm in ('vector', 'pipelined'):
        backend.bspmm(spare, x, algorithm=algorithm)
        assert [launched.name for launched in launches] == ['bspmm_csr']
    else:
        with pytest.raises(ValueError, match="expected one of 'auto', 'vector', 'pipelined', got"):
            backend.bspmm(spare, x, algorithm=algorithm)
        assert not launches


def test_algorithms():
    assert backend.algorithms(ADJ) == ['vector', 'pipelined', 'swa', 'swa_rows', 'swa_blocked']
    assert backend.algorithms(with_spare(ADJ, 0, 1)) == ['vector', 'pipelined']
    assert backend.algorithms(BatchedCOO.from_csr(ADJ)) == list(papers.gpu.ST_ALGORITHMS)
    assert backend.algorithms(BatchedSELL(ADJ)) == ['sell']
