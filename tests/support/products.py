"""Checks of products of any container and kernel."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.bspmm import bsddmm_forward, bspmm_forward
from tests.emulation.kernel_cases import batch, FACTOR, integers
from tests.support import assert_close, assert_exact, reference


def check_product(
    place,
    adj,
    dtype,
    n_channels,
    values='own',
    with_residual=False,
    trans=False,
    largest=FACTOR,
    multiply=bspmm_forward,
):
    """Check that a product equals the reference exactly, and leaves its arguments unchanged.

    values: 'own': values of the matrix; 'ones': all entries are 1; 'given': values are an argument.
    largest: dtype -> largest value of x. multiply: the product, which may be another container's.
    """
    n_in, n_out = (adj.n_rows, adj.n_cols) if trans else (adj.n_cols, adj.n_rows)
    x = integers((n_in, n_channels), dtype, largest, seed=2)
    residual = integers((n_out, n_channels), dtype, seed=3) if with_residual else None
    data = integers(adj.nnz, dtype, seed=4) if values == 'given' else None
    if values == 'ones':
        adj = adj.replace(data=None)
    expected = reference.bspmm(adj, x, data, residual, trans)
    arrays = [None if array is None else place.put(array) for array in (x, data, residual)]
    assert_exact(multiply(place.put(adj), *arrays, trans=trans), expected, dtype)
    for array, before in zip(arrays, (x, data, residual)):
        assert before is None or (cuda.to_cpu(array) == before).all()


def check_sampled(place, adj, dtype, n_channels, multiply=bsddmm_forward):
    """Check that a sampled product equals the reference, and without entries launches nothing."""
    u = integers((adj.n_rows, n_channels), dtype, seed=0)
    v = integers((adj.n_cols, n_channels), dtype, seed=1)
    w = multiply(place.put(adj), place.put(u), place.put(v))
    assert_exact(w, reference.bsddmm(adj, u, v), dtype)
    assert len(place.launched) in (0, adj.nnz > 0)


def check_three_dimensions(place, adj, multiply=bspmm_forward, has_data=True):
    """Compare the product of a padded batch with the reference, for arrays with strides."""
    x = integers((4, adj.max_rows, adj.n_graphs), 'f')
    data = integers(2 * adj.nnz, 'f', seed=1)
    residual = integers((adj.n_graphs, adj.max_rows, 8), 'f', seed=2)

    def apart(put):
        return put(x).T, put(data)[::2] if has_data else None, put(residual)[:, :, ::2]

    y = multiply(place.put(adj), *apart(place.put))
    assert_exact(y, reference.bspmm(adj, *apart(numpy.asarray)), 'f')


def check_nan(place, dtype, multiply, container=lambda adj: adj):
    """Check that NaN and infinity reach exactly the rows that have entries for them."""
    adj = batch('mixed', dtype)
    x = integers((adj.n_cols, 3), dtype)
    x[10, 1] = adj.data[2] = numpy.nan
    x[0, 0] = x[7, 2] = numpy.inf  # padding of a BatchedSELL might read row 0
    adj = container(adj)
    expected = reference.bspmm(adj, x)
    assert 3 < (~numpy.isfinite(expected)).sum() < expected.size // 2
    assert_exact(multiply(place.put(adj), place.put(x)), expected, dtype)


def check_duplicates(place, multiply=bspmm_forward, container=lambda adj: adj, has_data=True):
    """Compare products of two entries in one place, whose sum would overflow."""
    values = numpy.array([3e38, 3e38], 'f')  # the sum is infinite
    adj = BatchedCSR(numpy.array([0, 2]), numpy.array([0, 0]), numpy.array([0, 1]), values)
    adj = container(adj)
    x = numpy.array([[1e-3, 1e-8, 0]], 'f')
    for trans in (False, True):
        y = multiply(place.put(adj), place.put(x), trans=trans)
        assert_close(y, reference.bspmm(adj, x, trans=trans), 'float32')
        if has_data:
            y = multiply(place.put(adj), place.put(x), place.put(values), trans=trans)
            assert_close(y, reference.bspmm(adj, x, values, trans=trans), 'float32')


def diagonal(n_nodes):
    """Return a batch of graphs of these sizes in which each node has an edge to itself."""
    n_rows = sum(n_nodes)
    return BatchedCSR(numpy.arange(n_rows + 1), numpy.arange(n_rows), numpy.array((0, *n_nodes)))


empty_results = pytest.mark.parametrize('n_nodes, n_channels', [((), 5), ((0,), 3), ((3,), 0)])
