"""The graph warp module alone: both layouts, several steps, its state, few nodes."""

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
    return rng.uniform(-1, 1, (n_rows, 6)).astype('f'), rng.uniform(-1, 1, (n_rows, 6)).astype('f')


def steps(link, h, h_new, g, *adj):
    """Return nodes and super nodes after two steps; Chainer Chemistry's link takes no batch."""
    link.reset_state()
    for step in range(2):
        h, g = link(h, h_new, g, *adj, step)
    return h.array, g.array


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'activation': chainer.functions.tanh},
        {'gtu_activation': chainer.functions.sigmoid, 'wgu_activation': chainer.functions.tanh},
    ],
)
def test_both_layouts(device, options):
    numpy.random.seed(0)
    dense = DenseGWM(**OPTIONS, **options)
    link = sparse_link(GWM, copy.deepcopy(dense))
    link.to_device(device)
    rng = numpy.random.RandomState(0)
    h, h_new = features(rng, len(SIZES) * max(SIZES))
    g = rng.uniform(-1, 1, (len(SIZES), 5)).astype('f')
    expected = steps(dense, *(x.reshape(len(SIZES), -1, 6) for x in (h, h_new)), g)
    actual = steps(link, *map(device.send, (h, h_new, g)), batch('padded').to_device(device))
    assert relative_error(actual[0], expected[0].reshape(-1, 6)) < 1e-5
    assert relative_error(actual[1], expected[1]) < 1e-5
    h, h_new = features(rng, sum(SIZES))
    parts = [numpy.split(rows[None], numpy.cumsum(SIZES)[:-1], axis=1) for rows in (h, h_new)]
    alone = [steps(dense, *given) for given in zip(*parts, g[:, None])]
    actual = steps(link, *map(device.send, (h, h_new, g)), batch('packed').to_device(device))
    assert relative_error(actual[0], numpy.concatenate([x[0] for x, _ in alone])) < 1e-5
    assert relative_error(actual[1], numpy.concatenate([x for _, x in alone])) < 1e-5


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
    """It changes attention and each gate, in training only."""
    numpy.random.seed(0)
    link = GWM(**OPTIONS)
    for unit in getattr(link, part):
        unit.dropout_ratio = 0.5
    given = *features(numpy.random.RandomState(0), sum(SIZES)), numpy.ones((len(SIZES), 5), 'f')
    first, second = (steps(link, *given, batch('packed')) for _ in range(2))
    assert (first[0] != second[0]).any() and (first[1] != second[1]).any()
    with chainer.using_config('train', False):
        first, second = (steps(link, *given, batch('packed')) for _ in range(2))
    assert (first[0] == second[0]).all() and (first[1] == second[1]).all()


def test_graph_without_nodes():
    adj = BatchedCSR.from_matrices([numpy.eye(n, dtype='f') for n in (2, 0, 3)])
    link = GWM(**OPTIONS)
    h, h_new = features(numpy.random.RandomState(0), 5)
    h, g = link(h, h_new, numpy.ones((3, 5), 'f'), adj)
    assert numpy.isfinite(h.array).all() and numpy.isfinite(g.array).all()
