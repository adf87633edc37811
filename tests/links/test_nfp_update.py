"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

import chainer
from chainer.link_hooks import TimerHook
from chainer_chemistry.links import NFPUpdate as DenseNFPUpdate

from chainer_bspmm import sparsify
from chainer_bspmm.links import NFPUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support.molecules import adjacency
from tests.support.parity import randomised
from tests.support.links import check_update_link


def inputs(kind='counted'):
    rng = numpy.random.RandomState(0)
    return (
        rng.uniform(-1, 1, (2, 5, 6)).astype('f'),
        numpy.stack([adjacency(rng, 5, kind) for _ in range(2)]),
    )


def conditions(h, adj, n_types):
    """Return the argument that upstream's model gives its link; ours reads the batch instead."""
    return [
        numpy.broadcast_to((adj.sum(axis=1) == degree)[:, :, None], h.shape)
        for degree in range(1, n_types + 1)
    ]


@pytest.mark.parametrize('in_channels', [None, 6])
@pytest.mark.parametrize('max_degree', [6, 2])
@pytest.mark.parametrize('kind', ['counted', 'counted bonds'])
def test_update_link(device, in_channels, max_degree, kind):
    h, adj = inputs(kind)
    dense = DenseNFPUpdate(in_channels, 4, max_degree)
    conds = conditions(h, adj, max_degree + 1)
    dense(h, adj, conds)
    arguments = in_channels, 4, max_degree
    fresh = check_update_link(device, NFPUpdate, randomised(dense), arguments, h, adj, conds)
    assert fresh.max_degree == dense.max_degree


def test_swap():
    model = sparsify(chainer.ChainList(DenseNFPUpdate(6, 4)))
    assert type(model[0]) is NFPUpdate


def test_hooks_that_would_not_run_are_refused():
    h, adj = inputs()
    link = NFPUpdate(6, 4)
    link.graph_linears[3].add_hook(TimerHook())
    with pytest.raises(ValueError, match=r'3: expected no link hooks, .* TimerHook'):
        link(h, BatchedCSR.from_matrices(list(adj), 'padded'))
