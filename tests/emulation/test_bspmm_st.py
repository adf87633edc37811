"""The ST kernels and the sampled product over a BatchedCOO, on the CPU."""

import warnings

import numpy
import pytest

import chainer

from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedCSR
from chainer_bspmm import papers
from chainer_bspmm.papers import gpu
from chainer_bspmm.papers import policy
from tests.emulation.kernel_cases import assert_exact, batch, integers
from tests.emulation.kernel_cases import BATCHES, CHANNELS
from tests.support import reference
from tests.support import shuffled

CASES = ('st_shared', 'st_blocked', 'st_global')


def coo(name, dtype):
    """Return one of the kernel tests' batches with the entries of every graph shuffled."""
    return shuffled(BatchedCOO.from_csr(batch(name, dtype)))


def check(
    device, adj, dtype, n_channels, algorithm='st', values='own', with_residual=False, trans=False
):
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    x = device.put(integers((n_in, n_channels), dtype, seed=2))
    residual = data = None
    if with_residual:
        residual = device.put(integers((n_out, n_channels), dtype, seed=3))
    if values == 'given':
        data = integers(adj.nnz, dtype, seed=4)
    elif values == 'ones':
        adj = adj.replace()
        adj.data = None
    before = None if residual is None else residual.copy()
    y = gpu.bspmm(adj, x, data, residual, trans, algorithm)
    assert_exact(y, reference.bspmm(adj, x, data, residual, trans), dtype)
    assert residual is None or (residual == before).all()


@pytest.fixture
def small_blocks(monkeypatch):
    """Use small blocks, which take more rounds over the entries: on a CPU threads are expensive."""
    monkeypatch.setattr(policy, 'ST_BLOCK', 128)
    monkeypatch.setattr(policy, 'st_shared_launch', policy.st_shared_launch.__wrapped__)


@pytest.mark.usefixtures('small_blocks')
@pytest.mark.parametrize('n_channels', CHANNELS)
@pytest.mark.parametrize('dtype', 'fd')
def test_channels(device, dtype, n_channels):
    check(device, coo('small' if n_channels > 64 else 'mixed', dtype), dtype, n_channels)
    assert device.launched[-1]['SUBWARP'] == policy.subwarp(n_channels)


@pytest.mark.usefixtures('small_blocks')
@pytest.mark.parametrize('n_channels', [1, 2, 3, 5, 7, 16, 17, 33])
@pytest.mark.parametrize('algorithm', CASES)
def test_every_case_by_name(device, algorithm, n_channels):
    check(device, coo('mixed', 'f'), 'f', n_channels, algorithm)


@pytest.mark.parametrize('with_residual', [False, True])
@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('values', ['ones', 'own', 'given'])
@pytest.mark.parametrize('algorithm', CASES)
def test_values(device, algorithm, values, trans, with_residual):
    check(device, coo('relations', 'f'), 'f', 3, algorithm, values, with_residual, trans)
    assert device.launched[-1]['WEIGHTS'] == (values != 'ones')
    assert device.launched[-1]['TRANS'] == trans


@pytest.mark.parametrize('trans', [False, True])
@pytest.mark.parametrize('name', BATCHES)
@pytest.mark.parametrize('algorithm', CASES)
def test_batches(device, algorithm, name, trans):
    check(device, coo(name, 'd'), 'd', 3, algorithm, 'given', True, trans)


@pytest.mark.usefixtures('small_blocks')
def test_partitions_of_a_wide_output(device):
    # 24 rows of 1024 floats are three times the budget: four partitions.
    check(device, coo('mixed', 'f'), 'f', 1024, with_residual=True)


def tall(n_rows):
    """Return a batch of a tall graph, with entries in its corners, and a small one."""
    ids = [[n_rows - 1, 0], [0, n_rows - 1], [n_rows - 1, 0], [n_rows + 1, n_rows]]
    return BatchedCOO(
        numpy.array(ids),
        numpy.array([0, n_rows, n_rows + 2]),
        numpy.array([0, 3, 4]),
        numpy.array([1, 2, 3, 4], 'f'),
    )


@pytest.mark.parametrize(
    'n_rows, n_channels, expected',
    [(8192, 1, 'st_shared'), (8192, 2, 'st_blocked'), (8193, 1, 'st_global')],
)
def test_rule_at_the_limit_of_shared_memory(device, monkeypatch, n_rows, n_channels, expected):
    taken = []
    for name in CASES:

        def note(*arguments, name=name, function=gpu.ST_ALGORITHMS[name]):
            taken.append(name)
            return function(*arguments)

        monkeypatch.setitem(gpu.ST_ALGORITHMS, name, note)
    for trans in (False, True):
        check(device, tall(n_rows), 'f', n_channels, with_residual=True, trans=trans)
    assert taken == [expected] * 2


def test_capacity_beyond_the_batch(device):
    adj = coo('small', 'f')
    larger = adj.replace()
    # Places that do not exist, so that using them would be an error.
    larger.ids = numpy.pad(adj.ids, ((0, 5), (0, 0)), constant_values=2**30)
    larger.data = numpy.pad(adj.data, (0, 5), constant_values=numpy.nan)
    larger.nnz += 5
    x = device.put(integers((adj.n_cols, 4), 'f'))
    for algorithm in CASES:
        y = gpu.bspmm(larger, x, None, None, False, algorithm)
        assert_exact(y, reference.bspmm(adj, x), 'f')
    w = gpu.bsddmm(larger, x, x)
    assert_exact(w[: adj.nnz], reference.bsddmm(adj, x, x), 'f')
    assert numpy.isnan(w[adj.nnz :]).all()  # as they were


def test_input_that_is_not_contiguous(device):
    adj = coo('padded', 'f')
    x = device.put(integers((4, adj.max_rows, adj.n_graphs), 'f')).T
    data = device.put(integers(2 * adj.nnz, 'f', seed=1))[::2]
    residual = device.put(integers((adj.n_graphs, adj.max_rows, 8), 'f', seed=2))[:, :, ::2]
    for algorithm in CASES:
        assert_exact(
            gpu.bspmm(adj, x, data, residual, False, algorithm),
            reference.bspmm(adj, x, data, residual),
            'f',
        )


@pytest.mark.parametrize('algorithm', CASES)
def test_nan_reaches_its_rows_only(device, algorithm):
    adj = coo('mixed', 'f')
    x = device.put(integers((adj.n_cols, 3), 'f'))
    x[10, 1] = numpy.nan
    data = adj.data.copy()
    data[2] = numpy.nan
    y = gpu.bspmm(adj, x, data, None, False, algorithm)
    assert 3 < numpy.isnan(y).sum() < y.size // 2
    assert_exact(y, reference.bspmm(adj, x, data), 'f')


@pytest.mark.parametrize('n_rows, n_channels', [(0, 3), (3, 0)])
@pytest.mark.parametrize('algorithm', ('st',) + CASES)
def test_empty_result_launches_nothing(device, algorithm, n_rows, n_channels):
    adj = BatchedCOO.from_csr(BatchedCSR.from_matrices([numpy.ones((n_rows, n_rows), 'f')]))
    x = device.put(numpy.zeros((n_rows, n_channels), 'f'))
    assert gpu.bspmm(adj, x, None, None, False, algorithm).shape == (n_rows, n_channels)
    assert not device.launched


# --- what is refused ---


@pytest.mark.parametrize('algorithm', ('st',) + CASES)
def test_float16(device, algorithm):
    adj = coo('small', 'e')
    x = device.put(numpy.ones((adj.n_cols, 2), 'e'))
    with pytest.raises(TypeError, match='x: expected float32 or float64 .* got float16; .*to_csr'):
        gpu.bspmm(adj, x, None, None, False, algorithm)


@pytest.mark.parametrize(
    'algorithm, n_rows, n_channels, message',
    [
        ('st_shared', 8192, 2, "'st_shared' expects the output .* 32768 bytes .* got 65536 bytes"),
        (
            'st_blocked',
            8193,
            1,
            "'st_blocked' expects one column .* 32768 bytes .* got 32772 bytes",
        ),
    ],
)
def test_forced_kernel_that_does_not_fit(device, algorithm, n_rows, n_channels, message):
    x = device.put(numpy.zeros((n_rows + 2, n_channels), 'f'))
    with pytest.raises(ValueError, match='algorithm: %s' % message):
        gpu.bspmm(tall(n_rows), x, None, None, False, algorithm)
    assert not device.launched


def test_algorithm_of_another_container(device):
    adj = batch('small', 'f')
    x = device.put(numpy.zeros((adj.n_cols, 2), 'f'))
    with pytest.raises(ValueError, match="algorithm: expected one of 'auto', 'swa'.* got 'st'"):
        papers.bspmm(adj, x, algorithm='st')
    with pytest.raises(ValueError, match="algorithm: .* 'auto', 'st', .* got 'vector'"):
        papers.bspmm(coo('small', 'f'), x, algorithm='vector')


# --- the sampled product, gradients ---


@pytest.mark.parametrize('n_channels', CHANNELS[:-1] + (4, 8, 12, 36, 132))
@pytest.mark.parametrize('dtype', 'efd')
def test_sampled_product(device, dtype, n_channels):
    adj = coo('relations', dtype)
    u = device.put(integers((adj.n_rows, n_channels), dtype, seed=2))
    v = device.put(integers((adj.n_cols, n_channels), dtype, seed=3))
    assert_exact(gpu.bsddmm(adj, u, v), reference.bsddmm(adj, u, v), dtype)


@pytest.mark.parametrize('name', BATCHES)
def test_sampled_product_of_batches(device, name):
    adj = coo(name, 'f')
    u = device.put(integers((adj.n_rows, 7), 'f', seed=2))
    v = device.put(integers((adj.n_cols, 7), 'f', seed=3))
    assert_exact(gpu.bsddmm(adj, u, v), reference.bsddmm(adj, u, v), 'f')
    assert len(device.launched) == (adj.nnz > 0)


@pytest.mark.parametrize('algorithm', ('auto', 'st') + CASES)
def test_gradients(device, algorithm):
    adj = coo('relations', 'd')
    x, data, residual = (
        chainer.Variable(device.put(integers(shape, 'd', seed=seed)))
        for seed, shape in enumerate([(adj.n_cols, 3), adj.nnz, (adj.n_rows, 3)])
    )
    gy = device.put(integers((adj.n_rows, 3), 'd', seed=5))
    y = papers.bspmm(adj, x, data, residual, algorithm)
    y.grad = gy
    y.backward()
    assert_exact(y.array, reference.bspmm(adj, x.array, data.array, residual.array), 'd')
    assert_exact(x.grad, reference.bspmm(adj, gy, data.array, trans=True), 'd')
    assert_exact(data.grad, reference.bsddmm(adj, gy, x.array), 'd')
    assert_exact(residual.grad, gy, 'd')
    assert [defines.get('TRANS') for defines in device.launched] == [0, 1, None]


@pytest.mark.parametrize('algorithm', ('st',) + CASES)
def test_second_derivatives(device, algorithm):
    adj = coo('relations', 'd')
    arrays = [
        integers(shape, 'd', {'d': 9}, seed)
        for seed, shape in enumerate([(adj.n_cols, 3), adj.nnz, (adj.n_rows, 3)])
    ]

    def derivatives(arrays, algorithm):
        inputs = [chainer.Variable(array) for array in arrays]
        y = papers.bspmm(adj, *inputs, algorithm=algorithm)
        first = chainer.grad([chainer.functions.sum(y**2)], inputs, enable_double_backprop=True)
        total = sum(chainer.functions.sum(g**2) for g in first)
        return [g.array for g in first + chainer.grad([total], inputs)]

    expected = derivatives(arrays, 'auto')  # SciPy
    result = derivatives([device.put(array) for array in arrays], algorithm)
    assert len(device.launched) > 5
    for actual, exact in zip(result, expected):
        assert_exact(actual, exact, 'd')


def test_atomics_are_declared(device):
    adj = coo('small', 'f')
    x = device.put(integers((adj.n_cols, 3), 'f'))
    with chainer.using_config('warn_nondeterministic', True):
        with pytest.warns(UserWarning, match='non-deterministic .*atomicAdd in bspmm'):
            papers.bspmm(adj, x)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            papers.bsddmm(adj, x, x)
            papers.bspmm(adj, numpy.array(x))  # SciPy
            papers.bspmm(batch('small', 'f'), x)


def test_blocks_without_a_column_leave(device, monkeypatch):
    plan = policy.st_shared_launch
    monkeypatch.setattr(
        policy,
        'st_shared_launch',
        lambda *sizes: plan(*sizes)._replace(grid=(plan(*sizes).grid[0], 1, 3)),
    )
    check(device, coo('mixed', 'f'), 'f', 5, 'st_blocked')
