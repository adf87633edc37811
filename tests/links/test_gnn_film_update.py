"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

import chainer
from chainer_chemistry.links.update.gnn_film_update import GNNFiLMUpdate as DenseGNNFiLMUpdate

from chainer_bspmm.links import GNNFiLMUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support.folded import check_against_padded
from tests.support.molecules import adjacency
from tests.support.links import check_update_link
from tests.support.parity import sparse_link


@pytest.mark.parametrize(
    'activation', [chainer.functions.relu, chainer.functions.tanh, chainer.functions.softplus]
)
@pytest.mark.parametrize('n_relations', [1, 5])
def test_update_link(device, n_relations, activation):
    rng = numpy.random.RandomState(0)
    h = rng.uniform(-1, 1, (2, 5, 6)).astype('f')
    adj = numpy.stack([adjacency(rng, 5, 'relations', n_relations) for _ in range(2)])
    dense = DenseGNNFiLMUpdate(6, n_relations, activation)
    dense(h, adj)
    dense.norm_layer.gamma.array[...] = rng.uniform(0.5, 2, 6)
    dense.norm_layer.beta.array[...] = rng.uniform(-1, 1, 6)
    arguments = 6, n_relations, activation
    fresh = check_update_link(device, GNNFiLMUpdate, dense, arguments, h, adj)
    ours, theirs = (dict(link.namedparams()) for link in (fresh, dense))
    assert {k: p.shape for k, p in ours.items()} == {k: p.shape for k, p in theirs.items()}
    for name in ('n_edge_types', 'activation'):
        assert getattr(fresh, name) == getattr(dense, name)


def test_a_node_without_neighbours_gets_the_bias_of_the_norm():
    link = GNNFiLMUpdate(3, 2)
    adj = BatchedCSR.from_matrices([numpy.zeros((2, 2, 2), 'f')])
    h = numpy.ones((2, 3), 'f')
    link(h, adj)
    link.norm_layer.beta.array[...] = [1, 2, 3]
    numpy.testing.assert_array_equal(link(h, adj).array, [[1, 2, 3]] * 2)


@pytest.mark.parametrize('activation', [chainer.functions.relu, chainer.functions.tanh])
def test_folded(xp, activation):
    with chainer.using_config('dtype', numpy.float64):
        link = GNNFiLMUpdate(3, 2, activation)
        link(numpy.ones((2, 3)), BatchedCSR.from_matrices([numpy.ones((2, 2, 2))]))
    link.norm_layer.beta.array[...] = [1, 2, 3]
    link.to_device('@numpy' if xp is numpy else '@cupy:0')
    check_against_padded(lambda adj, h: link(h, adj), xp, 2, 3)


def test_norm_of_ones_own():
    dense = DenseGNNFiLMUpdate(3)
    del dense.norm_layer
    with dense.init_scope():
        dense.norm_layer = chainer.links.BatchNormalization(3)
    with pytest.raises(ValueError, match='norm_layer: expected .*Layer.* got .*BatchNorm'):
        sparse_link(GNNFiLMUpdate, dense)


def test_bad_input():
    link = GNNFiLMUpdate(5)
    adj = BatchedCSR.from_matrices([numpy.ones((3, 2, 2), 'f')])
    with pytest.raises(ValueError, match='adj: expected 5 relations, .* got .* 3 relations'):
        link(numpy.ones((2, 5), 'f'), adj)
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR, got ndarray .*concat_mols'):
        link(numpy.ones((1, 2, 5), 'f'), numpy.ones((1, 5, 2, 2), 'f'))
