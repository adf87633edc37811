"""The head: the same numbers and gradients as upstream's, in fewer nodes."""

import numpy
import pytest

import chainer
from chainer import functions
from chainer_chemistry.models.mlp import MLP as Dense
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.rsgcn import RSGCN

from chainer_bspmm import densify
from chainer_bspmm import sparsify
from chainer_bspmm.links import MLP
from tests.support import relative_error


def outcome(link, x):
    x = chainer.Variable(x.copy())
    y = link(x)
    link.cleargrads()
    functions.sum((y + 1) ** 2).backward()
    return [y.array, x.grad, *(param.grad for _, param in sorted(link.namedparams()))]


@pytest.mark.parametrize('activation', [functions.relu, functions.tanh, functions.sigmoid])
@pytest.mark.parametrize('shape', [(7, 5), (1, 3), (6, 2, 4)])
@pytest.mark.parametrize('n_layers', [1, 2, 3])
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


def test_head_is_swapped_with_the_model_and_back():
    predictor = GraphConvPredictor(RSGCN(4), Dense(2))
    kinds = [type(link) for link in predictor.links()]
    sparsify(predictor)
    assert type(predictor.mlp) is MLP and predictor.mlp.activation is functions.relu
    densify(predictor)
    assert [type(link) for link in predictor.links()] == kinds


def test_a_head_alone_is_nothing_to_swap():
    for head in (Dense(2), MLP(2)):
        with pytest.raises(ValueError, match='model: expected a graph convolution'):
            sparsify(chainer.ChainList(head))
        assert type(head) in (Dense, MLP)
