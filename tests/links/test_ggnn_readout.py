"""The gated readout alone, against Chainer Chemistry's."""

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout as DenseReadout

from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.parity import sparse_link

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
def test_readout(device, options, with_h0):
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
    h, h0 = (
        None if array is None else device.send(array.reshape(N_GRAPHS * N, -1)) for array in (h, h0)
    )
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


def test_graph_without_nodes():
    adj = BatchedCSR.from_matrices([numpy.zeros((0, 0)), numpy.eye(2)])
    y = GGNNReadout(3, activation_agg=chainer.functions.sigmoid)(numpy.ones((2, 4), 'f'), adj)
    assert (y.array[0] == 0.5).all() and (y.array[1] != 0.5).all()


@pytest.mark.parametrize('adj, shapes', list(zip(ADJ, [r'\(12,\)', r'\(12,\) or \(3, 4\)'])))
def test_mask_of_another_shape(adj, shapes):
    with pytest.raises(ValueError, match='is_real_node: expected shape %s to go .*, got' % shapes):
        GGNNReadout(3)(numpy.ones((12, 4), 'f'), adj, None, numpy.ones((4, 3), 'f'))
