"""`spmv` of both containers: values, launches, refusals, and y, which beta = 0 leaves unread."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR, BatchedSELL, papers
from chainer_bspmm.papers import policy
from tests.emulation.kernel_cases import batch, BATCHES, integers
from tests.support import assert_exact, reference


# Powers of two and small integers are exact in every dtype.
FACTORS = [(1, 0), (1, 1), (2, 0), (-0.5, 2), (0, 1), (0, 0), (1, -1)]
FORMS = {
    'csr': lambda adj: adj,
    'sell 1': lambda adj: BatchedSELL(adj, 1),
    'sell 7 sorted': lambda adj: BatchedSELL(adj, 7, True),
    'sell 32': lambda adj: BatchedSELL(adj, 32),
}


def check(place, adj, dtype, form='csr', alpha=2, beta=-3):
    x, y = integers(adj.n_cols, dtype, seed=2), integers(adj.n_rows, dtype, seed=3)
    expected = reference.spmv(adj, x, alpha, beta, y)
    if beta == 0:
        y.fill(numpy.nan)  # must not be read
    x, y = place.put(x), place.put(y)
    assert papers.spmv(place.put(FORMS[form](adj)), x, alpha, beta, y) is y
    assert_exact(y, expected, dtype)


# All factors in float32; in other dtypes one beta that adds y, and one that leaves it unread.
@pytest.mark.parametrize(
    'dtype, alpha, beta',
    [
        *(('f', *factors) for factors in FACTORS),
        *((dtype, *factors) for dtype in 'ed' for factors in ((2, 0), (-0.5, 2))),
    ],
)
@pytest.mark.parametrize('form', FORMS)
def test_factors(place, form, dtype, alpha, beta):
    check(place, batch('mixed', dtype), dtype, form, alpha, beta)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name', BATCHES)
def test_batches(place, name, form):
    check(place, batch(name, 'f'), 'f', form)


@pytest.mark.parametrize('lanes', [1, 2, 4, 8, 16, 32])
def test_lanes(gpu, monkeypatch, lanes):
    plan = policy.spmv_launch
    monkeypatch.setattr(policy, 'spmv_launch', lambda n_rows, nnz: plan(n_rows, 4 * n_rows * lanes))
    check(gpu, batch('mixed', 'f'), 'f')
    assert gpu.launched[-1]['LANES'] == lanes


def test_rows_as_long_as_the_policy_asks_for(gpu):
    check(gpu, BatchedCSR.from_matrices([integers((40, 40), 'd', seed=1)]), 'd')
    assert gpu.launched[-1]['LANES'] == 16


@pytest.mark.parametrize('form', FORMS)
def test_implicit_ones(place, form):
    check(place, batch('mixed', 'f').replace(data=None), 'f', form)
    assert {defines['WEIGHTS'] for defines in place.launched} <= {0}


@pytest.mark.parametrize('form', FORMS)
def test_new_result_of_x_that_is_not_contiguous(place, form):
    adj = batch('mixed', 'f')
    x = integers((adj.n_cols, 2), 'f')
    given = place.put(x)
    y = papers.spmv(place.put(FORMS[form](adj)), given[::-1, 0])
    assert_exact(y, reference.spmv(adj, x[::-1, 0]), 'f')
    assert (cuda.to_cpu(given) == x).all()


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('alpha, beta', [(1, numpy.nan), (1, numpy.inf), (1, 1e-60), (0, 0)])
def test_what_factors_do_to_values_that_are_not_finite(place, form, alpha, beta):
    """A beta that is rounded to 0 leaves y unread, but an alpha of 0 multiplies."""
    adj = batch('small', 'f')
    x, y = integers(adj.n_cols, 'f'), numpy.ones(adj.n_rows, 'f')
    if beta < 1:
        y.fill(numpy.nan)
        x[0] = numpy.inf
    with numpy.errstate(invalid='ignore'):
        expected = alpha * reference.spmv(adj, x)
    expected = expected if beta < 1 else numpy.full(adj.n_rows, beta)
    y = papers.spmv(place.put(FORMS[form](adj)), place.put(x), alpha, beta, place.put(y))
    numpy.testing.assert_array_equal(cuda.to_cpu(y), expected)


@pytest.mark.parametrize('form', FORMS)
def test_what_is_not_finite_reaches_its_rows_only(place, form):
    adj = batch('mixed', 'f')
    x, y = (integers(adj.n_cols, 'f', seed=seed) for seed in (2, 3))
    x[0], x[10], y[1] = numpy.inf, numpy.nan, numpy.nan
    expected = reference.spmv(adj, x, 2, -3, y)
    assert 3 < (~numpy.isfinite(expected)).sum() < expected.size // 2
    y = papers.spmv(place.put(FORMS[form](adj)), place.put(x), 2, -3, place.put(y))
    assert_exact(y, expected, 'f')


@pytest.mark.parametrize('form', FORMS)
def test_no_rows_launch_nothing(place, form):
    adj = BatchedCSR(numpy.array([0]), numpy.array([], 'i'), numpy.array([0]))
    y = papers.spmv(place.put(FORMS[form](adj)), place.put(numpy.zeros(0, 'f')))
    assert y.shape == (0,) and not place.launched


def ones(*shape, dtype='f'):
    return numpy.ones(shape, dtype)


READ_ONLY = numpy.frombuffer(bytes(12), 'f')
SMALL = BatchedCSR.from_matrices([numpy.array([[2.0, 1.0], [0.0, 1.0]], 'f'), ones(1, 1)])


@pytest.mark.parametrize('matrix', [SMALL, BatchedSELL(SMALL)], ids=['csr', 'sell'])
@pytest.mark.parametrize(
    'arguments, error, message',
    [
        ((ones(3, 1),), ValueError, r'x: .* \(3,\) to go with <Batched.*, got \(3, 1\)'),
        ((ones(4),), ValueError, r'x: expected shape \(3,\) .* got \(4,\)'),
        (([1.0, 1.0, 1.0],), TypeError, 'x: expected a NumPy or CuPy array, got list'),
        ((ones(3, dtype='i'),), TypeError, 'x: expected float16, .* got int32'),
        (
            (ones(3, dtype='d'),),
            TypeError,
            r'x: expected float32, like the values of adj, got float64; adj.astype\(x.dtype\) '
            'converts',
        ),
        ((ones(3), 1, 2), ValueError, 'y: expected an array to go with beta = 2, got None'),
        ((ones(3), '1'), TypeError, "alpha: expected a real number, got '1'"),
        ((ones(3), 1, 1j), TypeError, 'beta: expected a real number, got 1j'),
        ((ones(3), 1, 0, ones(4)), ValueError, r'y: expected shape \(3,\) .* got \(4,\)'),
        ((ones(3), 1, 0, ones(3, dtype='d')), TypeError, 'y: expected float32, got float64'),
        ((ones(3), 1, 0, ones(6)[::2]), ValueError, r'y: .* C-contiguous .* strides \(8,\)'),
        ((ones(3), 1, 0, READ_ONLY), ValueError, 'y: .* a writable array, got a read-only one'),
    ],
)
def test_bad_input(monkeypatch, matrix, arguments, error, message):
    monkeypatch.setattr(papers.cpu, 'spmv', lambda *_: pytest.fail('launched'))
    with pytest.raises(error, match=message):
        papers.spmv(matrix, *arguments)


def test_bad_matrix():
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR or BatchedSELL, got ndarray'):
        papers.spmv(ones(3, 3), ones(3))


def test_result_over_input(xp):
    adj = BatchedCSR.from_matrices([xp.ones((3, 3))])
    both = xp.ones(5)
    message = '^y: expected memory that x does not overlap, got an overlap$'
    with pytest.raises(ValueError, match=message):
        papers.spmv(adj, both[:3], y=both[2:])
    with pytest.raises(ValueError, match=message):
        papers.spmv(BatchedSELL(adj), both[:3], y=both[:3])


@pytest.mark.gpu
def test_argument_on_another_device():
    for matrix in (SMALL.to_device('@cupy:0'), BatchedSELL(SMALL).to_device('@cupy:0')):
        with pytest.raises(
            ValueError, match='x: expected an array on .*cupy:0.* got one on .*numpy'
        ):
            papers.spmv(matrix, ones(3))
        with pytest.raises(
            ValueError, match='y: expected an array on .*cupy:0.* got one on .*numpy'
        ):
            papers.spmv(matrix, cuda.to_gpu(ones(3)), y=ones(3))
