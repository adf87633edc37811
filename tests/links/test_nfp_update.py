"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer.link_hooks import TimerHook
from chainer_chemistry.links import NFPUpdate as DenseNFPUpdate

from chainer_bspmm import sparsify
from chainer_bspmm.links import NFPUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.molecules import adjacency
from tests.support.parity import randomised
from tests.support.parity import sparse_link


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
    expected = randomised(dense)(h, adj, conds).array
    link = sparse_link(NFPUpdate, dense)
    link.to_device(device)
    for layout, features in (
        ('padded', h),
        ('padded', h.reshape(10, 6)),
        ('packed', h.reshape(10, 6)),
    ):
        batch = BatchedCSR.from_matrices(list(adj), layout).to_device(device)
        y = cuda.to_cpu(link(device.send(features), batch).array)
        assert y.shape == features.shape[:-1] + (4,)
        assert relative_error(y.reshape(2, 5, 4), expected) < 1e-5
    fresh = NFPUpdate(in_channels, 4, max_degree)
    assert fresh(h.reshape(10, 6), BatchedCSR.from_matrices(list(adj))).shape == (10, 4)
    assert [name for name, _ in fresh.namedparams()] == [name for name, _ in dense.namedparams()]
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
