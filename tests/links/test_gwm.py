"""The graph warp module by itself: two layouts, several steps, its state, few nodes."""

import copy
import inspect

import numpy
import pytest

import chainer
from chainer_chemistry.models.gwm.gwm import GWM as DenseGWM

from chainer_bspmm import BatchedCSR
from chainer_bspmm.links import GWM
from tests.support import relative_error
from tests.support.parity import sparse_link

SIZES = [4, 1, 7, 2]
OPTIONS = {'hidden_dim': 6, 'hidden_dim_super': 5, 'n_layers': 2, 'n_heads': 3}


def batch(layout):
    return BatchedCSR.from_matrices([numpy.eye(n, dtype='f') for n in SIZES], layout)


def features(rng, n_rows):
    """Return random features of nodes, before an update and after it."""
    return rng.uniform(-1, 1, (n_rows, 6)).astype('f'), rng.uniform(-1, 1, (n_rows, 6)).astype('f')


def super_nodes(rng):
    return rng.uniform(-1, 1, (len(SIZES), 5)).astype('f')


def dense_steps(link, h, h_new, g):
    """Return nodes and super nodes after two steps of Chainer Chemistry's link."""
    link.reset_state()
    for step in range(2):
        h, g = link(h, h_new, g, step)
    return h.array, g.array


def steps(link, h, h_new, g, adj):
    """Return nodes and super nodes after two steps of our link."""
    link.reset_state()
    for step in range(2):
        h, g = link(h, h_new, g, adj, step)
    return h.array, g.array


@pytest.fixture(
    params=[
        {},
        {'activation': chainer.functions.tanh},
        {'gtu_activation': chainer.functions.sigmoid, 'wgu_activation': chainer.functions.tanh},
    ],
    ids=['defaults', 'activated nodes', 'activated gates'],
)
def pair(request, device):
    """Chainer Chemistry's link, and ours on the device with the same parameters."""
    numpy.random.seed(0)
    dense = DenseGWM(**OPTIONS, **request.param)
    link = sparse_link(GWM, copy.deepcopy(dense))
    link.to_device(device)
    return dense, link


def test_padded(device, pair):
    dense, link = pair
    rng = numpy.random.RandomState(0)
    h, h_new = features(rng, len(SIZES) * max(SIZES))
    g = super_nodes(rng)
    shape = len(SIZES), max(SIZES), 6
    expected_h, expected_g = dense_steps(dense, h.reshape(shape), h_new.reshape(shape), g)
    adj = batch('padded').to_device(device)
    actual_h, actual_g = steps(link, device.send(h), device.send(h_new), device.send(g), adj)
    assert relative_error(actual_h, expected_h.reshape(-1, 6)) < 1e-5
    assert relative_error(actual_g, expected_g) < 1e-5


def test_packed(device, pair):
    """Molecules of a packed batch have the results of single molecules."""
    dense, link = pair
    rng = numpy.random.RandomState(0)
    h, h_new = features(rng, sum(SIZES))
    g = super_nodes(rng)
    alone = [
        dense_steps(dense, h[None, end - n : end], h_new[None, end - n : end], g[i : i + 1])
        for i, (n, end) in enumerate(zip(SIZES, numpy.cumsum(SIZES)))
    ]
    adj = batch('packed').to_device(device)
    actual_h, actual_g = steps(link, device.send(h), device.send(h_new), device.send(g), adj)
    assert relative_error(actual_h, numpy.concatenate([h[0] for h, _ in alone])) < 1e-5
    assert relative_error(actual_g, numpy.concatenate([g for _, g in alone])) < 1e-5


def test_constructor_makes_upstreams_parameters():
    links = []
    for kind in (GWM, DenseGWM):
        numpy.random.seed(1)
        links.append(kind(**OPTIONS, tying_flag=True, dropout_ratio=0.25))
    ours, theirs = links
    for (name, a), (other, b) in zip(ours.namedparams(), theirs.namedparams()):
        assert name == other
        numpy.testing.assert_array_equal(a.array, b.array)
    assert ours.tying_flag and ours.dropout_ratio == 0.25 and ours.n_heads == 3
    assert inspect.signature(GWM) == inspect.signature(DenseGWM)


@pytest.mark.parametrize('part', ['graph_transmitter', 'wgu_local', 'wgu_super'])
def test_dropout(part):
    """Dropout changes the attention and each of the gates, only in training."""
    numpy.random.seed(0)
    link = GWM(**OPTIONS)
    for unit in getattr(link, part):
        unit.dropout_ratio = 0.5
    h, h_new = features(numpy.random.RandomState(0), sum(SIZES))
    g = numpy.ones((len(SIZES), 5), 'f')
    first, second = (steps(link, h, h_new, g, batch('packed')) for _ in range(2))
    assert (first[0] != second[0]).any() and (first[1] != second[1]).any()
    with chainer.using_config('train', False):
        first, second = (steps(link, h, h_new, g, batch('packed')) for _ in range(2))
    assert (first[0] == second[0]).all() and (first[1] == second[1]).all()


@pytest.mark.parametrize('name', ['h', 'h_new'])
def test_features_of_another_batch(name):
    rng = numpy.random.RandomState(0)
    given = dict(zip(('h', 'h_new'), features(rng, sum(SIZES))))
    given[name] = given[name][:1]
    message = r'^%s: expected shape \(%d, hidden_dim\), ' % (name, sum(SIZES))
    with pytest.raises(ValueError, match=message):
        GWM(**OPTIONS)(**given, g=super_nodes(rng), adj=batch('packed'))


def test_graph_without_nodes():
    adj = BatchedCSR.from_matrices([numpy.eye(n, dtype='f') for n in (2, 0, 3)])
    link = GWM(**OPTIONS)
    h, h_new = features(numpy.random.RandomState(0), 5)
    h, g = link(h, h_new, numpy.ones((3, 5), 'f'), adj)
    assert numpy.isfinite(h.array).all() and numpy.isfinite(g.array).all()
