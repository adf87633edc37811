"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

from chainer_chemistry.links import RSGCNUpdate as DenseRSGCNUpdate

from chainer_bspmm.links import RSGCNUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support.molecules import adjacency
from tests.support.links import check_update_link


@pytest.mark.parametrize('in_channels', [None, 6])
def test_update_link(device, in_channels):
    rng = numpy.random.RandomState(0)
    h = rng.uniform(size=(2, 5, 6)).astype('f')
    adj = numpy.stack([adjacency(rng, 5, 'normalised') for _ in range(2)])
    dense = DenseRSGCNUpdate(in_channels, 4)
    check_update_link(device, RSGCNUpdate, dense, (in_channels, 4), h, adj)


def test_several_relations_are_refused():
    adj = BatchedCSR.from_matrices([numpy.ones((4, 5, 5), 'f')])
    with pytest.raises(ValueError, match='^adj: expected a matrix of one relation'):
        RSGCNUpdate(6, 4)(numpy.ones((5, 6), 'f'), adj)
