"""The readout link alone, against Chainer Chemistry's."""

import numpy
import pytest

from chainer.backends import cuda
from chainer_chemistry.links import NFPReadout as DenseNFPReadout

from chainer_bspmm.links import NFPReadout
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.parity import randomised, sparse_link


@pytest.mark.parametrize('in_channels', [None, 6])
@pytest.mark.parametrize('with_mask', [False, True])
def test_readout_link(device, in_channels, with_mask):
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


def test_graphs_of_different_sizes_and_none_at_all():
    # In every node the scores sum to 1: a graph's fingerprint sums to its number of nodes.
    adj = BatchedCSR.from_matrices([numpy.eye(2), numpy.zeros((0, 0)), numpy.eye(3)])
    y = NFPReadout(4, 6)(numpy.random.RandomState(0).uniform(size=(5, 6)).astype('f'), adj).array
    numpy.testing.assert_allclose(y.sum(axis=1), [2, 0, 3], rtol=1e-6)
