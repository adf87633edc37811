"""Readout links by themselves: values by hand, upstream's values, masks, graphs without nodes.

MPNN's readout is compared with upstream's in tests/models/test_parity.py.
"""

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.links import NFPReadout as DenseNFPReadout
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout as DenseReadout

from chainer_bspmm.links import GeneralReadout, GGNNReadout, MPNNReadout, NFPReadout
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.parity import randomised, sparse_link


OF_TWO = BatchedCSR.from_matrices([numpy.eye(2), numpy.eye(1)])
H = numpy.array([[1.0, -4.0], [2.0, -3.0], [-5.0, 6.0]], 'f')


@pytest.mark.parametrize(
    'mode, expected',
    [
        ('sum', [[3, -7], [-5, 6]]),
        ('max', [[2, -3], [-5, 6]]),
        ('summax', [[3, -7, 2, -3], [-5, 6, -5, 6]]),
    ],
)
def test_modes(mode, expected):
    numpy.testing.assert_array_equal(GeneralReadout(mode)(H, OF_TWO).array, expected)


def test_activation_comes_first():
    y = GeneralReadout('sum', activation=chainer.functions.relu)(H, OF_TWO)
    numpy.testing.assert_array_equal(y.array, [[3, 0], [0, 6]])


def test_unknown_mode():
    message = "mode: expected one of 'sum', 'max', 'summax', got 'mean'"
    with pytest.raises(ValueError, match=message):
        GeneralReadout('mean')


N_GRAPHS, N = 3, 4
ADJ = [
    BatchedCSR.from_matrices([numpy.eye(N, dtype='f')] * N_GRAPHS, layout)
    for layout in ('packed', 'padded')
]


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'nobias': True},
        {'in_channels': 8},
        {'activation': chainer.functions.tanh, 'activation_agg': chainer.functions.relu},
    ],
)
@pytest.mark.parametrize('with_h0', [False, True])
def test_ggnn(device, options, with_h0):
    rng = numpy.random.RandomState(0)
    h = rng.uniform(-1, 1, (N_GRAPHS, N, 5 if with_h0 else 8)).astype('f')
    h0 = rng.uniform(-1, 1, (N_GRAPHS, N, 3)).astype('f') if with_h0 else None
    mask = numpy.array([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]], 'f')
    dense = DenseReadout(6, **options)
    dense(h, h0)
    for layer in (dense.i_layer, dense.j_layer):
        if layer.b is not None:
            layer.b.array[...] = rng.uniform(-1, 1, 6)
    link = sparse_link(GGNNReadout, dense)
    expected = [dense(h, h0, real).array for real in (None, mask)]
    link.to_device(device)
    h = device.send(h.reshape(N_GRAPHS * N, -1))
    if with_h0:
        h0 = device.send(h0.reshape(N_GRAPHS * N, -1))
    for adj in ADJ:
        adj = adj.to_device(device)
        for real, y in zip((None, mask.ravel()), expected):
            actual = link(h, adj, h0, None if real is None else device.send(real))
            assert relative_error(cuda.to_cpu(actual.array), y) < 1e-5
    assert relative_error(link(h, adj, h0, device.send(mask)).array, expected[1]) < 1e-5
    fresh = GGNNReadout(6, **options)
    fresh.to_device(device)
    assert fresh(h, adj, h0).shape == (N_GRAPHS, 6)
    assert [name for name, _ in fresh.namedparams()] == [name for name, _ in dense.namedparams()]


@pytest.mark.parametrize('h', [H[:1], H[0], H[None], [[1.0, 2.0]] * 3], ids=str)
@pytest.mark.parametrize('link', [GGNNReadout, MPNNReadout, NFPReadout])
def test_features_of_another_batch(link, h):
    """The link, which has yet to see the width of its input, is left as it was."""
    readout = link(out_dim=3, in_channels=2 if link is MPNNReadout else None)
    with pytest.raises((TypeError, ValueError), match='^h: expected '):
        readout(h, OF_TWO, is_real_node=numpy.ones(3, 'i'))
    assert readout(H, OF_TWO).shape == (2, 3)


def test_h0_of_another_batch():
    """A kernel would read past the end of h0, or leave a part of its gradient unwritten."""
    link = GGNNReadout(6, in_channels=8)
    for n_rows in (N_GRAPHS * N - 1, N_GRAPHS * N + 1):
        h = numpy.ones((N_GRAPHS * N, 5), 'f')
        h0 = numpy.ones((n_rows, 3), 'f')
        message = r'^h0: expected shape \(12, channels0\), a row for each node .* got \(%d, 3\)$'
        with pytest.raises(ValueError, match=message % n_rows):
            link(h, ADJ[0], h0)


@pytest.mark.parametrize('adj, shapes', list(zip(ADJ, [r'\(12,\)', r'\(12,\) or \(3, 4\)'])))
def test_mask_of_another_shape(adj, shapes):
    with pytest.raises(
        ValueError,
        match=r'is_real_node: expected shape %s to go .*, got \(4, 3\); .* inputs of a predictor'
        % shapes,
    ):
        GGNNReadout(3)(numpy.ones((12, 4), 'f'), adj, None, numpy.ones((4, 3), 'f'))


@pytest.mark.parametrize('in_channels', [None, 6])
@pytest.mark.parametrize('with_mask', [False, True])
def test_nfp(device, in_channels, with_mask):
    h = numpy.random.RandomState(0).uniform(-1, 1, (3, 5, 6)).astype('f')
    mask = numpy.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], 'f')
    dense = DenseNFPReadout(4, in_channels)
    dense(h)
    expected = randomised(dense)(h, mask if with_mask else None).array
    link = sparse_link(NFPReadout, dense)
    link.to_device(device)
    adj = BatchedCSR.from_matrices([numpy.eye(5)] * 3, 'padded').to_device(device)
    y = link(device.send(h.reshape(15, 6)), adj, device.send(mask) if with_mask else None)
    assert relative_error(cuda.to_cpu(y.array), expected) < 1e-5
    fresh = NFPReadout(4, in_channels)
    assert fresh(h.reshape(15, 6), adj.to_device(-1)).shape == (3, 4)
    assert [name for name, _ in fresh.namedparams()] == [name for name, _ in dense.namedparams()]


def test_nfp_of_graphs_of_different_sizes():
    # The scores of a node sum to 1, so the fingerprint of a graph sums to its number of nodes.
    adj = BatchedCSR.from_matrices([numpy.eye(2), numpy.zeros((0, 0)), numpy.eye(3)])
    y = NFPReadout(4, 6)(numpy.random.RandomState(0).uniform(size=(5, 6)).astype('f'), adj).array
    numpy.testing.assert_allclose(y.sum(axis=1), [2, 0, 3], rtol=1e-6)


def test_ggnn_of_a_graph_without_nodes():
    adj = BatchedCSR.from_matrices([numpy.zeros((0, 0)), numpy.eye(2)])
    ggnn = GGNNReadout(3, activation_agg=chainer.functions.sigmoid)
    y = ggnn(numpy.ones((2, 4), 'f'), adj).array
    assert (y[0] == 0.5).all() and (y[1] != 0.5).all()


def test_mpnn_of_a_graph_without_nodes():
    adj = BatchedCSR.from_matrices([numpy.zeros((0, 0)), numpy.eye(2)])
    y = MPNNReadout(3, 4)(numpy.ones((2, 4), 'f'), adj)
    assert y.shape == (2, 3) and numpy.isfinite(y.array).all()
