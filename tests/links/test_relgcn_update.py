"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

from chainer_chemistry.links.update.relgcn_update import RelGCNUpdate as DenseRelGCNUpdate

from chainer_bspmm.links import RelGCNUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support.molecules import adjacency
from tests.support.links import check_update_link


@pytest.mark.parametrize('in_channels', [None, 6])
@pytest.mark.parametrize('out_channels', [4, 9])
def test_update_link(device, in_channels, out_channels):
    rng = numpy.random.RandomState(0)
    h = rng.uniform(size=(2, 5, 6)).astype('f')
    adj = numpy.stack([adjacency(rng, 5) for _ in range(2)])
    dense = DenseRelGCNUpdate(in_channels, out_channels)
    dense.graph_linear_self.b.array[...] = 0.5
    dense.graph_linear_edge.b.array[...] = rng.uniform(size=4 * out_channels)
    check_update_link(device, RelGCNUpdate, dense, (in_channels, out_channels), h, adj)


def test_first_call_draws_parameters_as_upstream_does():
    rng = numpy.random.RandomState(0)
    h, adj = rng.uniform(size=(1, 5, 6)).astype('f'), adjacency(rng, 5)[None]
    links = DenseRelGCNUpdate(None, 4), RelGCNUpdate(None, 4)
    for link, given in zip(links, (adj, BatchedCSR.from_dense(adj))):
        numpy.random.seed(3)
        link(h, given)
    for dense, sparse in zip(*(link.params() for link in links)):
        numpy.testing.assert_array_equal(sparse.array, dense.array)


def test_other_number_of_relations():
    adj = BatchedCSR.from_matrices([numpy.ones((3, 2, 2), 'f')])
    with pytest.raises(ValueError, match='adj: expected 4 relations, .* got .* 3 relations'):
        RelGCNUpdate(5, 4)(numpy.ones((2, 5), 'f'), adj)
