"""The CPU's products: a layer, where they are computed in a wider dtype, random numbers."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops.bspmm import bsddmm_forward
from chainer_bspmm.ops.dropout import _random_words
from chainer_bspmm.ops.dropout import dropout_mask_forward
from chainer_bspmm.ops.graph_linear.host import graph_linear_grad_on_host
from chainer_bspmm.ops.graph_linear.host import graph_linear_on_host
from tests.support import reference


def test_sampled_product_of_halves_is_summed_in_float32():
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([numpy.ones((5, 5))])
    # Exact in float32; partial sums are not in float16.
    u, v = (rng.randint(-9, 10, (5, 3000)).astype('e') for _ in range(2))
    for layout in (numpy.ascontiguousarray, numpy.asfortranarray):
        w = bsddmm_forward(adj, layout(u), layout(v))
        numpy.testing.assert_array_equal(w, reference.bsddmm(adj, u, v).astype('e'))


# --- a layer: as dense matrices, one for each relation ---

PARAMETERS = 'W', 'b', 'W_self', 'b_self'


def dense_layer(A, x, loop, W, b=None, W_self=None, b_self=None):
    """A: (R, n, n)."""
    n_relations = len(A)
    A = A + loop * numpy.eye(len(x))
    y = 0
    for r in range(n_relations):
        mapped = x @ W[r::n_relations].T
        y = y + A[r] @ (mapped if b is None else mapped + b[r::n_relations])
    if W_self is not None:
        y = y + x @ W_self.T
    return y if b_self is None else y + b_self


@pytest.mark.parametrize('n_left_out', range(8))
@pytest.mark.parametrize(
    'n_relations, loop, widths',
    [(1, False, (5, 3)), (1, True, (3, 5)), (4, False, (3, 5)), (4, False, (5, 3))],
)
def test_layer_and_its_gradients(n_relations, loop, widths, n_left_out):
    """A third relation without entries, nodes without any, entries that name one place twice."""
    rng = numpy.random.RandomState(0)
    n, (n_in, n_out) = 9, widths
    A = rng.rand(n_relations, n, n) * (rng.rand(n_relations, n, n) < 0.3)
    A[2:3] = 0
    A[:, 4] = A[:, :, 5] = 0
    i, j, r = A.transpose(1, 2, 0).nonzero()
    order = numpy.lexsort((rng.rand(i.size), i))  # columns in any order
    i, j, r = (numpy.concatenate([part[order][:1], part[order]]) for part in (i, j, r))
    A[r[0], i[0], j[0]] *= 2
    values = A[r, i, j]
    values[:2] /= 2
    indptr = numpy.searchsorted(i, numpy.arange(n + 1))
    adj = BatchedCSR(
        indptr, j * n_relations + r, numpy.array([0, n]), values, n_relations=n_relations
    )
    given = {
        'W': rng.rand(n_out * n_relations, n_in),
        'b': rng.rand(n_out * n_relations),
        'W_self': rng.rand(n_out, n_in),
        'b_self': rng.rand(n_out),
    }
    for bit, name in enumerate(PARAMETERS[1:]):
        if n_left_out >> bit & 1:
            del given[name]
    x, gy = rng.rand(n, n_in), rng.rand(n, n_out)
    y = graph_linear_on_host(adj, x, **given, loop=loop)
    numpy.testing.assert_allclose(y, dense_layer(A, x, loop, **given), rtol=1e-13)
    wanted = {'x', *given}
    gradients = graph_linear_grad_on_host(adj, x, gy, given['W'], given.get('W_self'), wanted, loop)
    for name in wanted:
        # The layer is linear in each argument: differences are exact up to rounding.
        varied = dict(given, x=x)
        change = rng.rand(*varied[name].shape)
        varied[name] = varied[name] + change
        rise = (gy * (dense_layer(A, loop=loop, **varied) - y)).sum()
        assert (gradients[name] * change).sum() == pytest.approx(rise, rel=1e-11), name


@pytest.mark.parametrize('size', [1, 4, 6, 4099])
@pytest.mark.parametrize(
    'seed, stream, step', [(0, 0, 0), (2**64 - 3, 2**32 - 1, 2**64 - 1), (5 << 32, 7, 11 << 32)]
)
def test_random_words(size, seed, stream, step):
    words = _random_words(size, seed, stream, step)
    numpy.testing.assert_array_equal(words, reference.random_words(size, seed, stream, step))


@pytest.mark.parametrize('ratio', [0.0, 2.0**-32, 0.3, 0.5, 1 - 2.0**-40])
def test_what_dropout_keeps(ratio):
    mask = dropout_mask_forward(999, numpy.dtype('d'), ratio, 5, 6, numpy.array([7], numpy.uint64))
    kept = reference.kept(999, ratio, 5, 6, 7)
    numpy.testing.assert_array_equal(mask, numpy.where(kept, 1 / (1 - ratio), 0))
