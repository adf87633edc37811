"""The update link alone, against Chainer Chemistry's: its state from call to call."""

import numpy
import pytest

from chainer.backends import cuda
from chainer_chemistry.links.update.ggnn_update import GGNNUpdate as DenseGGNNUpdate

from chainer_bspmm.links import GGNNUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.molecules import adjacency
from tests.support.parity import sparse_link


@pytest.mark.parametrize(
    'in_channels, options',
    [(None, {}), (6, {'hidden_channels': 6}), (6, {'hidden_channels': 4, 'out_channels': 6})],
)
def test_update_link(device, in_channels, options):
    rng = numpy.random.RandomState(0)
    h = rng.uniform(size=(2, 5, 6)).astype('f')
    adj = numpy.stack([adjacency(rng, 5) for _ in range(2)])
    dense = DenseGGNNUpdate(in_channels, **options)
    dense.graph_linear.b.array[...] = rng.uniform(size=dense.graph_linear.b.shape)
    expected = [dense(h, adj).array for _ in range(3)]
    assert (expected[0] != expected[1]).all()  # the state counts
    link = sparse_link(GGNNUpdate, dense)
    link.to_device(device)
    for layout, shape in (('padded', (2, 5)), ('packed', (10,)), ('padded', (10,))):
        batch = BatchedCSR.from_matrices(list(adj), layout).to_device(device)
        link.reset_state()
        for step in expected:
            y = link(device.send(h.reshape(shape + (6,))), batch).array
            assert y.shape == shape + (dense.out_channels,)
            assert relative_error(cuda.to_cpu(y).reshape(step.shape), step) < 1e-5
    fresh = GGNNUpdate(in_channels, **options)
    fresh.to_device(device)
    assert fresh(device.send(h.reshape(10, 6)), batch).shape == (10, fresh.out_channels)
    assert [name for name, _ in fresh.namedparams()] == [name for name, _ in dense.namedparams()]


def test_state_of_another_batch():
    link = GGNNUpdate()
    adj, smaller = (BatchedCSR.from_matrices([numpy.ones((4, n, n), 'f')]) for n in (3, 2))
    link(numpy.ones((3, 16), 'f'), adj)
    with pytest.raises(ValueError, match=r'state: expected shape \(2, 16\), got \(3, 16\)'):
        link(numpy.ones((2, 16), 'f'), smaller)
    link.reset_state()
    assert link(numpy.ones((2, 16), 'f'), smaller).shape == (2, 16)
