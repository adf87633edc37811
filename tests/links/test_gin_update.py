"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

import chainer
from chainer_chemistry.links import GINUpdate as DenseGINUpdate
from chainer_chemistry.links import GraphMLP

from chainer_bspmm.links import GINUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.molecules import adjacency
from tests.support.parity import randomised
from tests.support.links import check_update_link
from tests.support.parity import sparse_link


def inputs():
    rng = numpy.random.RandomState(0)
    return (
        rng.uniform(-1, 1, (2, 5, 6)).astype('f'),
        numpy.stack([adjacency(rng, 5, 'counted') for _ in range(2)]),
    )


@pytest.mark.parametrize('in_channels', [None, 6])
@pytest.mark.parametrize(
    'options',
    [{}, {'out_channels': 3}, {'n_layers': 1}, {'n_layers': 4, 'hidden_channels': 5}],
    ids=str,
)
def test_update_link(device, in_channels, options):
    h, adj = inputs()
    dense = DenseGINUpdate(in_channels, dropout_ratio=0.0, **options)
    dense(h, adj)
    options = {'dropout_ratio': 0.0, **options}
    check_update_link(device, GINUpdate, randomised(dense), (in_channels,), h, adj, options=options)


def test_another_activation_and_link_hooks_of_the_layers():
    class Count(chainer.LinkHook):
        name = 'Count'
        calls = 0

        def forward_postprocess(self, args):
            self.calls += 1

    h, adj = inputs()
    batch = BatchedCSR.from_matrices(list(adj), 'padded')
    for activation in (chainer.functions.relu, chainer.functions.tanh):
        dense = DenseGINUpdate(6, dropout_ratio=0.0, n_layers=3)
        dense.graph_mlp = None
        del dense.graph_mlp
        with dense.init_scope():
            dense.graph_mlp = GraphMLP([5, 5, 4], 6, activation)
        randomised(dense)
        expected = dense(h, adj).array
        link, hook = sparse_link(GINUpdate, dense), Count()
        for layer in link.graph_mlp.layers:
            layer.add_hook(hook)
        assert relative_error(link(h, batch).array, expected) < 1e-5
        assert hook.calls == 3
