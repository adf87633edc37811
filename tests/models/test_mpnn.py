"""MPNN with GGNN's messages: swap, snapshots, what is refused.

tests/benchmarks/test_parity.py compares its numbers with Chainer Chemistry's.
"""

import numpy
import pytest

import chainer
from chainer_chemistry.models import MPNN as DenseMPNN
from chainer_chemistry.models.prediction import GraphConvPredictor

from chainer_bspmm import concat_mols
from chainer_bspmm import sparsify
from chainer_bspmm.links.mpnn_readout import MPNNReadout
from chainer_bspmm.models import MPNN
from tests.models.relation_models import assert_same_constructor
from tests.models.relation_models import assert_snapshots_load_both_ways
from tests.models.relation_models import molecules
from tests.models.relation_models import SIZES

READOUTS = [
    {'readout_func': 'set2set'},
    {'readout_func': 'ggnn', 'weight_tying': False},
    {'readout_func': 'set2set', 'concat_hidden': True},
]


@pytest.mark.parametrize('options', READOUTS)
def test_constructor_makes_upstreams_parameters(options):
    assert_same_constructor(
        MPNN,
        DenseMPNN,
        dict(options, out_dim=4, message_func='ggnn', n_edge_types=3),
        [
            'out_dim',
            'hidden_channels',
            'n_update_layers',
            'n_edge_types',
            'concat_hidden',
            'weight_tying',
            'message_func',
            'readout_func',
        ],
    )


@pytest.mark.parametrize('options', READOUTS)
def test_snapshots_load_both_ways(tmp_path, options):
    assert_snapshots_load_both_ways(
        lambda: DenseMPNN(3, message_func='ggnn', **options), tmp_path, molecules(SIZES)
    )


def test_swap_in_place_and_no_state_is_left_behind(device):
    model = GraphConvPredictor(DenseMPNN(3, message_func='ggnn'))
    before = dict(model.namedparams())
    assert sparsify(model) is model and type(model.graph_conv) is MPNN
    assert all(before[name] is parameter for name, parameter in model.namedparams())
    model.to_device(device)
    first = concat_mols(molecules(SIZES), device)[:2]
    expected = model(*first).array
    model(*concat_mols(molecules([3, 5]), device)[:2])
    assert (model(*first).array == expected).all()


def test_graph_without_nodes():
    readout = MPNNReadout(3, 4)
    _, adj, _ = concat_mols(molecules([2, 0, 3]))
    y = readout(numpy.ones((5, 4), 'f'), adj)
    assert y.shape == (3, 3) and numpy.isfinite(y.array).all()


@pytest.mark.parametrize(
    'make',
    [
        lambda: sparsify(DenseMPNN(3)),
        lambda: sparsify(GraphConvPredictor(DenseMPNN(3))),
        lambda: MPNN(3),
    ],
)
def test_edge_network(make):
    with pytest.raises(
        ValueError,
        match="message_func: expected 'ggnn', got 'edgenet', which gives every pair of atoms",
    ):
        make()


def test_processing_steps():
    with pytest.raises(ValueError, match='processing_steps: expected at least 1, got 0'):
        MPNNReadout(3, 4, processing_steps=0)


def test_parameters_of_ones_own_are_not_lost_in_silence():
    dense = DenseMPNN(3, message_func='ggnn')
    dense.readout_layers[0].set2set.add_link('own', chainer.links.Linear(2, 2))
    dense.add_param('temperature', (1,), initializer=1)
    with pytest.raises(ValueError, match='expected the parameters of MPNN alone, .*temperature'):
        sparsify(dense)
