"""The head has the results and gradients of upstream's, with fewer nodes."""

import numpy
import pytest

import chainer
from chainer import functions, links
from chainer_chemistry.models.mlp import MLP as Dense
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.rsgcn import RSGCN

from chainer_bspmm import densify, sparsify
from chainer_bspmm.links import MLP
from tests.support import relative_error
from tests.support.cases import pairs


def outcome(link, x):
    x = chainer.Variable(x.copy())
    y = link(x)
    link.cleargrads()
    functions.sum((y + 1) ** 2).backward()
    return [y.array, x.grad, *(param.grad for _, param in sorted(link.namedparams()))]


@pytest.mark.parametrize(
    'activation, shape, n_layers',
    pairs(
        [functions.relu, functions.tanh, functions.sigmoid], [(7, 5), (1, 3), (6, 2, 4)], [1, 2, 3]
    ),
)
def test_same_as_upstreams(xp, activation, shape, n_layers):
    dense = Dense(3, 8, n_layers, activation)
    x = xp.asarray(numpy.random.RandomState(0).uniform(-1, 1, shape).astype('f'))
    if xp is not numpy:
        dense.to_device('@cupy:0')
    dense(x)
    swapped = dense.copy(mode='copy')
    swapped.__class__ = MLP
    for actual, expected in zip(outcome(swapped, x), outcome(dense, x)):
        assert relative_error(actual, expected) < 1e-5


def test_head_is_swapped_with_the_model():
    predictor = GraphConvPredictor(RSGCN(4), Dense(2))
    kinds = [type(link) for link in predictor.links()]
    sparsify(predictor)
    assert type(predictor.mlp) is MLP and predictor.mlp.activation is functions.relu
    densify(predictor)
    assert [type(link) for link in predictor.links()] == kinds


@pytest.mark.parametrize('kind', [Dense, MLP])
def test_a_head_alone_is_nothing_to_swap(kind):
    head = kind(2)
    with pytest.raises(
        ValueError,
        match='model: expected a graph convolution of Chainer Chemistry, .* lists what can '
        'be swapped',
    ):
        sparsify(chainer.ChainList(head))
    assert type(head) is kind


class Doubled(links.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    'link',
    [Doubled(3, 3), chainer.Sequential(links.Linear(3, 3)), links.LayerNormalization(3)],
    ids=lambda link: type(link).__name__,
)
def test_links_that_users_put_there_are_called(link):
    x = numpy.random.RandomState(0).uniform(-1, 1, (4, 3)).astype('f')
    for place in ('layers', 'l_out'):
        head = Dense(3, 3)
        own = link.copy()
        with head.init_scope():
            delattr(head, place)
            setattr(head, place, own if place == 'l_out' else chainer.ChainList(own))
        expected = head(x).array
        head.__class__ = MLP
        assert relative_error(head(x).array, expected) < 1e-5


def test_integers_are_refused():
    with pytest.raises(chainer.utils.type_check.InvalidType):
        MLP(2, 3)(numpy.ones((4, 3), 'i'))
