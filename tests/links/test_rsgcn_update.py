"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

from chainer.backends import cuda
from chainer_chemistry.links import RSGCNUpdate as DenseRSGCNUpdate

from chainer_bspmm.links import RSGCNUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.molecules import adjacency
from tests.support.parity import sparse_link


@pytest.mark.parametrize('in_channels', [None, 6])
def test_update_link(device, in_channels):
    rng = numpy.random.RandomState(0)
    h = rng.uniform(size=(2, 5, 6)).astype('f')
    adj = numpy.stack([adjacency(rng, 5, 'normalised') for _ in range(2)])
    dense = DenseRSGCNUpdate(in_channels, 4)
    expected = dense(h, adj).array
    link = sparse_link(RSGCNUpdate, dense)
    link.to_device(device)
    for layout, features in (('padded', h), ('packed', h.reshape(10, 6))):
        batch = BatchedCSR.from_matrices(list(adj), layout).to_device(device)
        y = cuda.to_cpu(link(device.send(features), batch).array)
        assert relative_error(y.reshape(2, 5, 4), expected) < 1e-5
    fresh = RSGCNUpdate(in_channels, 4)
    assert fresh(h.reshape(10, 6), BatchedCSR.from_matrices(list(adj))).shape == (10, 4)


def test_several_relations_are_refused():
    adj = BatchedCSR.from_matrices([numpy.ones((4, 5, 5), 'f')])
    with pytest.raises(ValueError, match='^adj: expected a matrix of one relation'):
        RSGCNUpdate(6, 4)(numpy.ones((5, 6), 'f'), adj)
