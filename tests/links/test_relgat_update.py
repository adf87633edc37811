"""The update link alone, against Chainer Chemistry's."""

import numpy
import pytest

import chainer
from chainer_chemistry.links.update.relgat_update import RelGATUpdate as DenseRelGATUpdate

from chainer_bspmm.links import RelGATUpdate
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.folded import check_against_padded
from tests.support.molecules import adjacency
from tests.support.links import check_update_link
from tests.support.parity import sparse_link


def batch_of(n_graphs=2, n_relations=4):
    rng = numpy.random.RandomState(0)
    return (
        rng.uniform(-1, 1, (n_graphs, 5, 6)).astype('f'),
        numpy.stack([adjacency(rng, 5, 'relations', n_relations) for _ in range(n_graphs)]),
    )


@pytest.mark.parametrize('concat_heads', [False, True])
@pytest.mark.parametrize('softmax_mode', ['across', 'within'])
@pytest.mark.parametrize('in_channels, n_heads', [(None, 3), (6, 1), (6, 2)])
def test_update_link(device, in_channels, n_heads, softmax_mode, concat_heads):
    h, adj = batch_of()
    options = dict(n_heads=n_heads, softmax_mode=softmax_mode, concat_heads=concat_heads)
    dense = DenseRelGATUpdate(in_channels, 4, **options)
    dense.message_layer.b.array[...] = numpy.random.RandomState(1).uniform(
        -1, 1, dense.message_layer.b.shape
    )
    dense.attention_layer.b.array[...] = 0.5
    dense(h, adj)
    arguments = in_channels, 4
    fresh = check_update_link(device, RelGATUpdate, dense, arguments, h, adj, options=options)
    for name in (
        'in_channels',
        'out_channels',
        'n_heads',
        'n_edge_types',
        'dropout_ratio',
        'softmax_mode',
        'concat_heads',
        'negative_slope',
    ):
        assert getattr(fresh, name) == getattr(dense, name), name


@pytest.mark.parametrize('values', [1.0, 1e-3, -2.0, 1e9])
def test_values_of_the_adjacency_play_no_part(values):
    h, adj = batch_of()
    dense = DenseRelGATUpdate(6, 4)
    expected = dense(h, adj).array
    batch = BatchedCSR.from_matrices(list(adj * numpy.float32(values)))
    y = sparse_link(RelGATUpdate, dense)(h.reshape(10, 6), batch).array
    assert relative_error(y.reshape(expected.shape), expected) < 1e-5


@pytest.mark.parametrize('mode', ['across', 'within'])
def test_large_logits(mode):
    """Where one edge has all the weight, and as far down as absent edges allow there."""
    h, adj = batch_of()
    dense = DenseRelGATUpdate(6, 4, softmax_mode=mode)
    for scale in (1e3, 3e3):
        dense.attention_layer.W.array[...] = scale * numpy.linspace(-1, 1, 8)
        expected = dense(h, adj).array
        y = sparse_link(RelGATUpdate, dense)(h.reshape(10, 6), BatchedCSR.from_matrices(list(adj)))
        assert relative_error(y.array.reshape(expected.shape), expected) < 1e-4


def test_a_node_without_neighbours_gets_the_mean_of_its_graph():
    """The mean is over its atoms in packed layout, over all slots in padded layout."""
    rng = numpy.random.RandomState(0)
    h = rng.uniform(-1, 1, (1, 4, 6)).astype('f')
    link = RelGATUpdate(6, 5, n_heads=1, n_edge_types=1)
    m = chainer.functions.linear(h[0], link.message_layer.W).array
    packed = BatchedCSR.from_matrices([numpy.zeros((3, 3), 'f'), numpy.zeros((1, 1), 'f')])
    y = link(h[0], packed).array
    numpy.testing.assert_allclose(y[:3], numpy.tile(m[:3].mean(axis=0), (3, 1)), rtol=1e-5)
    numpy.testing.assert_allclose(y[3], m[3], rtol=1e-5)
    padded = BatchedCSR.from_matrices([numpy.zeros((4, 4), 'f')], 'padded')
    numpy.testing.assert_allclose(
        link(h, padded).array[0], numpy.tile(m.mean(axis=0), (4, 1)), rtol=1e-5
    )


@pytest.mark.parametrize('concat_heads', [False, True])
@pytest.mark.parametrize('softmax_mode', ['across', 'within'])
def test_folded(xp, softmax_mode, concat_heads):
    options = dict(softmax_mode=softmax_mode, concat_heads=concat_heads)
    with chainer.using_config('dtype', numpy.float64):
        link = RelGATUpdate(3, 4, 2, 2, **options)
    link.to_device('@numpy' if xp is numpy else '@cupy:0')
    check_against_padded(lambda adj, h: link(h, adj), xp, 2, 3)


def test_dropout_in_training_alone():
    h, adj = batch_of()
    link = RelGATUpdate(6, 4, dropout_ratio=0.5)
    batch = BatchedCSR.from_matrices(list(adj))
    assert not numpy.array_equal(*(link(h.reshape(10, 6), batch).array for _ in range(2)))
    with chainer.using_config('train', False):
        assert numpy.array_equal(*(link(h.reshape(10, 6), batch).array for _ in range(2)))


# --- what is refused ---


def test_unknown_mode():
    with pytest.raises(ValueError, match="softmax_mode: expected .*'across', 'within'.*'over'"):
        RelGATUpdate(5, 4, softmax_mode='over')


def test_bad_input():
    link = RelGATUpdate(5, 4)
    adj = BatchedCSR.from_matrices([numpy.ones((3, 2, 2), 'f')])
    with pytest.raises(ValueError, match='adj: expected 4 relations, .* got .* 3 relations'):
        link(numpy.ones((2, 5), 'f'), adj)
    adj = BatchedCSR.from_matrices([numpy.ones((4, 2, 2), 'f')])
    with pytest.raises(ValueError, match=r'h: expected a row for each node of .*got shape \(3, 5'):
        link(numpy.ones((3, 5), 'f'), adj)
    with pytest.raises(ValueError, match=r'h: expected a row .*got shape \(1, 2, 5\)'):
        link(numpy.ones((1, 2, 5), 'f'), adj)
    with pytest.raises(TypeError, match='adj: expected a BatchedCSR, got ndarray .*concat_mols'):
        link(numpy.ones((1, 2, 5), 'f'), numpy.ones((1, 4, 2, 2), 'f'))
