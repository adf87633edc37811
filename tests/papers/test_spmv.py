"""spmv: values for both containers, what beta = 0 leaves unread, and what is refused."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import papers
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import DTYPES
from tests.support import features
from tests.support import random_matrix
from tests.support import reference

FORMS = [None] + [
    (size, sort_rows) for size in (1, 2, 7, 32, 64, 1000) for sort_rows in (False, True)
]
FACTORS = [(1, 0), (1, 1), (-2.5, 0), (0.3, -1.7), (0, 0.5), (0, 0)]


def form_of(adj, form):
    return adj if form is None else BatchedSELL(adj, *form)


@pytest.mark.parametrize(
    'form, dtype',
    [
        pytest.param(
            *(form, dtype),
            id='%s-%s' % (form, dtype),
            marks=() if dtype == 'float32' or form in (None, (7, True)) else pytest.mark.slow,
        )
        for form in FORMS
        for dtype in DTYPES
    ],
)
@pytest.mark.parametrize('name', BATCHES)
def test_values(xp, name, form, dtype):
    rng = numpy.random.RandomState(0)
    adj = batch_on(name, xp, dtype)
    matrix = form_of(adj, form)
    x = features(rng, xp, adj.n_cols, 1, dtype)[:, 0]
    start = features(rng, xp, adj.n_rows, 1, dtype)[:, 0]
    assert_close(papers.spmv(matrix, x), reference.spmv(adj, x), dtype)
    for alpha, beta in FACTORS:
        expected = reference.spmv(adj, x, alpha, beta, start)
        y = start.copy()
        if beta == 0:
            y.fill(numpy.nan)
        assert papers.spmv(matrix, x, alpha, beta, y) is y
        assert_close(y, expected, dtype)


@pytest.mark.parametrize('form', [None, (7, True), (32, False)], ids=str)
def test_long_rows(xp, form):
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices(
        [xp.asarray(random_matrix(rng, n, density=1.0)) for n in (3, 200, 1)]
    )
    x, y = (features(rng, xp, n, 1, 'float64')[:, 0] for n in adj.shape)
    expected = reference.spmv(adj, x, 2.0, 3.0, y)
    assert_close(papers.spmv(form_of(adj, form), x, 2.0, 3.0, y), expected, 'float64')


@pytest.mark.parametrize('form', [None, (1, False), (7, True), (32, False)], ids=str)
def test_nan_and_infinity(xp, form):
    dense = numpy.array([[1.0, numpy.nan, 0.0], [0.0, 1.0, 0.0], [0.0, 2.0, numpy.inf]], 'f')
    matrix = form_of(BatchedCSR.from_matrices([xp.asarray(dense)]), form)
    x = xp.asarray(numpy.array([1.0, 3.0, 5.0], 'f'))
    numpy.testing.assert_array_equal(cuda.to_cpu(papers.spmv(matrix, x)), [numpy.nan, 3, numpy.inf])
    # Only column 0 is not finite: that no other row takes part in.
    x = xp.asarray(numpy.array([numpy.inf, 3.0, 5.0], 'f'))
    y = xp.asarray(numpy.array([0.0, numpy.nan, 1.0], 'f'))
    numpy.testing.assert_array_equal(
        cuda.to_cpu(papers.spmv(matrix, x, beta=1, y=y)), [numpy.nan, numpy.nan, numpy.inf]
    )
    # alpha = 0 still multiplies.
    assert numpy.isnan(cuda.to_cpu(papers.spmv(matrix, x, alpha=0))[[0, 2]]).all()


@pytest.mark.parametrize('form', [None, (7, False)], ids=str)
def test_factor_that_is_zero_once_rounded(xp, form):
    adj = batch_on('many', xp, 'float32')
    x = xp.ones(adj.n_cols, 'f')
    y = xp.full(adj.n_rows, numpy.nan, 'f')
    papers.spmv(form_of(adj, form), x, 1, 1e-60, y)
    assert_close(y, reference.spmv(adj, x), 'float32')


@pytest.mark.parametrize('form', [None, (7, False)], ids=str)
def test_x_that_is_not_contiguous(xp, form):
    rng = numpy.random.RandomState(0)
    adj = batch_on('many', xp, 'float32')
    x = features(rng, xp, adj.n_cols, 2, 'float32')[::-1, 1]
    before = x.copy()
    assert_close(papers.spmv(form_of(adj, form), x), reference.spmv(adj, x), 'float32')
    assert (x == before).all()


@pytest.mark.parametrize('form', [None, (7, False)], ids=str)
def test_no_graphs(xp, form):
    adj = BatchedCSR(xp.array([0]), xp.array([], 'i'), xp.array([0]))
    assert papers.spmv(form_of(adj, form), xp.zeros(0, 'f')).shape == (0,)


# --- what is refused, before anything is launched ---


def ones(*shape, dtype='f'):
    return numpy.ones(shape, dtype)


SMALL = BatchedCSR.from_matrices([numpy.array([[2.0, 1.0], [0.0, 1.0]], 'f'), ones(1, 1)])


@pytest.mark.parametrize('matrix', [SMALL, BatchedSELL(SMALL)], ids=['csr', 'sell'])
@pytest.mark.parametrize(
    'arguments, error, message',
    [
        (
            (ones(3, 1),),
            ValueError,
            r'x: expected shape \(3,\) to go with <Batched.*, got \(3, 1\)',
        ),
        ((ones(4),), ValueError, r'x: expected shape \(3,\) .* got \(4,\)'),
        (([1.0, 1.0, 1.0],), TypeError, 'x: expected a NumPy or CuPy array, got list'),
        ((ones(3, dtype='i'),), TypeError, 'x: expected float16, .* got int32'),
        ((ones(3, dtype='d'),), TypeError, 'x: expected float32 as the values of adj, got float64'),
        ((ones(3), 1, 2), ValueError, 'y: expected an array to go with beta = 2, got None'),
        ((ones(3), '1'), TypeError, "alpha: expected a real number, got '1'"),
        ((ones(3), 1, 1j), TypeError, 'beta: expected a real number, got 1j'),
        ((ones(3), 1, 0, ones(4)), ValueError, r'y: expected shape \(3,\) .* got \(4,\)'),
        ((ones(3), 1, 0, ones(3, dtype='d')), TypeError, 'y: expected float32, got float64'),
        (
            (ones(3), 1, 0, ones(6)[::2]),
            ValueError,
            r'y: expected a C-contiguous .* strides \(8,\)',
        ),
    ],
)
def test_bad_input(monkeypatch, matrix, arguments, error, message):
    monkeypatch.setattr(papers.cpu, 'spmv', lambda *_: pytest.fail('launched'))
    with pytest.raises(error, match=message):
        papers.spmv(matrix, *arguments)


def test_result_that_is_read_only():
    y = ones(3)
    y.flags.writeable = False
    with pytest.raises(ValueError, match='y: expected a writable array, got a read-only one'):
        papers.spmv(SMALL, ones(3), y=y)


def test_bad_matrix():
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR or BatchedSELL, got ndarray'):
        papers.spmv(ones(3, 3), ones(3))


def test_result_over_input(xp):
    adj = BatchedCSR.from_matrices([xp.ones((3, 3))])
    both = xp.ones(5)
    with pytest.raises(ValueError, match='y: expected memory apart from that of x'):
        papers.spmv(adj, both[:3], y=both[2:])
    with pytest.raises(ValueError, match='y: expected memory apart from that of x'):
        papers.spmv(BatchedSELL(adj), both[:3], y=both[:3])


@pytest.mark.gpu
def test_argument_on_another_device():
    for matrix in (SMALL.to_device('@cupy:0'), BatchedSELL(SMALL).to_device('@cupy:0')):
        with pytest.raises(ValueError, match='x: expected on .*cupy:0.* got on .*numpy'):
            papers.spmv(matrix, ones(3))
        with pytest.raises(ValueError, match='y: expected on .*cupy:0.* got on .*numpy'):
            papers.spmv(matrix, cuda.to_gpu(ones(3)), y=ones(3))


def test_sampled_products_refuse_the_default_container():
    adj, x = BatchedCSR.from_matrices([numpy.eye(2)]), numpy.ones((2, 1))
    with pytest.raises(TypeError, match='adj: expected a BatchedCOO, got BatchedCSR'):
        papers.bsddmm(adj, x, x)
