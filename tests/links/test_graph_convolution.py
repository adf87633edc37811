"""`GraphConvolution`, compared with the loops of the papers."""

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm.links import GraphConvolution
from tests.support import relative_error
from tests.support.cases import pairs

SIZES = (5, 1, 0, 9, 3)


def graphs(sizes=SIZES, n_channels=3):
    """Return A[graph][channel] with a_uu = 1 in every channel, and X[graph]; float64."""
    rng = numpy.random.RandomState(0)
    shapes = [(n_channels, n, n) for n in sizes]
    bonds = [(rng.uniform(size=shape) < 0.3) * rng.uniform(-1, 1, shape) for shape in shapes]
    adj = [numpy.eye(n) + matrices for n, matrices in zip(sizes, bonds)]
    return adj, [rng.uniform(-1, 1, (n, 4)) for n in sizes]


def triple_loop(A, X, W, bias):
    """Compute Y like the papers: three steps for each graph and channel."""
    Y = []
    for b in range(len(A)):
        C = []
        for ch in range(len(A[b])):
            U = X[b] @ W[ch]
            V = U + bias[ch]
            C.append(A[b][ch] @ V)
        Y.append(sum(C))
    return Y


def link_of(W, bias, dtype):
    """Return a link with the parameters W (channels, in, out) and bias (channels, out)."""
    n_channels, n_in, n_out = W.shape
    with chainer.using_config('dtype', numpy.dtype(dtype)):
        link = GraphConvolution(n_in, n_out, n_channels)
    for ch in range(n_channels):
        link.W.array[ch::n_channels] = W[ch].T
        link.b.array[ch::n_channels] = bias[ch]
    return link


BOUNDS = {'float16': 4e-3, 'float32': 1e-6, 'float64': 1e-14}


@pytest.mark.parametrize(
    'dtype, layout, n_out, n_channels', pairs(list(BOUNDS), ['packed', 'padded'], [3, 4, 6], [1, 3])
)
def test_values(device, dtype, layout, n_out, n_channels):
    bound = BOUNDS[dtype]
    adj, X = graphs(n_channels=n_channels)
    rng = numpy.random.RandomState(1)
    W = rng.uniform(-1, 1, (n_channels, 4, n_out))
    bias = rng.uniform(-1, 1, (n_channels, n_out))
    link = link_of(W, bias, dtype)
    link.to_device(device)
    batch = BatchedCSR.from_matrices(adj, layout).astype(dtype).to_device(device)
    # The link gets values that are rounded to its dtype.
    W, bias, *rest = (numpy.asarray(a).astype(dtype).astype('d') for a in (W, bias, *X))
    expected = triple_loop([a.astype(dtype).astype('d') for a in adj], rest, W, bias)
    if layout == 'packed':
        y = link(device.send(numpy.concatenate(X).astype(dtype)), batch)
        assert y.dtype == dtype
        assert relative_error(y.array, numpy.concatenate(expected)) < bound
        return
    padded, total = (
        numpy.stack([numpy.pad(a, ((0, max(SIZES) - len(a)), (0, 0))) for a in arrays])
        for arrays in (X, expected)
    )
    for shape in ((len(SIZES), max(SIZES)), (len(SIZES) * max(SIZES),)):
        y = link(device.send(padded.astype(dtype).reshape(shape + (4,))), batch)
        assert y.shape == shape + (n_out,)
        # Rows of phantom atoms have no entries, so they get neither neighbours nor bias.
        assert relative_error(cuda.to_cpu(y.array).reshape(total.shape), total) < bound


def test_number_of_inputs_from_the_first_call(tmp_path):
    adj, X = graphs()
    link = GraphConvolution(None, 2, 3)
    assert link.W.array is None and link.b.shape == (6,)
    batch = BatchedCSR.from_matrices([a.astype('f') for a in adj])
    expected = link(numpy.concatenate(X).astype('f'), batch).array
    assert link.W.shape == (6, 4) and abs(link.W.array).max() > 0
    chainer.serializers.save_npz(tmp_path / 'link.npz', link)
    again = GraphConvolution(None, 2, 3)
    chainer.serializers.load_npz(tmp_path / 'link.npz', again)
    assert (again(numpy.concatenate(X).astype('f'), batch).array == expected).all()


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        ((4, 0, 2), ValueError, 'out_channels: expected at least 1, got 0'),
        ((4, 3, 0), ValueError, 'n_relations: expected at least 1, got 0'),
        ((0, 3, 1), ValueError, 'in_channels: expected at least 1, got 0'),
        ((4, None, 1), TypeError, 'out_channels: expected an int, got None'),
    ],
)
def test_bad_sizes(arguments, error, message):
    with pytest.raises(error, match=message):
        GraphConvolution(*arguments)


@pytest.mark.parametrize(
    'x, error, message',
    [
        ([[1.0, 2.0]], TypeError, 'x: expected a NumPy or CuPy array, got list'),
        (numpy.ones(3, 'f'), ValueError, r'x: expected 2 or 3 dimensions, got shape \(3,\)'),
    ],
)
def test_bad_features(x, error, message):
    """The link, which has yet to see the width of its input, is left as it was."""
    link = GraphConvolution(None, 3, 1)
    adj = BatchedCSR.from_matrices([numpy.eye(3, dtype='f')])
    with pytest.raises(error, match='^%s$' % message):
        link(x, adj)
    assert link(numpy.ones((3, 2), 'f'), adj).shape == (3, 3)


def test_bad_adjacency():
    link = GraphConvolution(4, 3, 2)
    adj = BatchedCSR.from_matrices([numpy.ones((3, 2, 2), 'f')])
    with pytest.raises(
        ValueError,
        match='adj: expected 2 relations, .* got .* 3 relations, 12 entries, symmetric, ones '
        'on @numpy>',
    ):
        link(numpy.ones((2, 4), 'f'), adj)


def test_dense_adjacency():
    link = GraphConvolution(4, 3, 2)
    with pytest.raises(
        TypeError,
        match=r'adj: expected a BatchedCSR, got ndarray of shape \(2, 2, 2\); .* with '
        'BatchedCSR.from_dense',
    ):
        link(numpy.ones((2, 4), 'f'), numpy.ones((2, 2, 2), 'f'))
