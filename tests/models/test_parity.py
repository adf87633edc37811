"""Outputs and gradients of every model with every option, compared with Chainer Chemistry's."""

import functools

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry import models as dense
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout

from chainer_bspmm import CSRConverter
from chainer_bspmm.links import relgcn_update
from tests.support import parity, relative_error
from tests.support.molecules import SIZES

EQUAL = (7,) * 3


def name_of(case):
    return '%s, %s' % (case.model, case.options)


# Cases that are not in docs/parity.md.
MORE = tuple(
    parity.new_case(
        kind.__name__, str(given), kind, 'relations', n_relations, out_dim=3, masked=masked, **given
    )
    for kind, n_relations, masked, options in (
        (
            dense.RelGAT,
            4,
            False,
            (
                {'weight_tying': True, 'concat_heads': True, 'n_heads': 1},
                {'concat_hidden': True, 'concat_heads': True},
                {'n_update_layers': 1},
                {'hidden_channels': 33, 'n_update_layers': 2},
                {'n_edge_types': 1},
                {'dropout_ratio': 0.0},
            ),
        ),
        (
            dense.GNNFiLM,
            5,
            True,
            ({'hidden_channels': 33, 'n_update_layers': 2}, {'n_edge_types': 1}),
        ),
        (dense.GGNN, 4, True, ({'concat_hidden': True, 'n_update_layers': 3},)),
    )
    for given in options
)
# Symmetric matrices of ones: their batches store no values.
BONDS = tuple(
    case._replace(options=case.options + ', bonds', adjacency='bonds')
    for case in parity.CASES
    if name_of(case)
    in (
        'RelGCN, defaults',
        'RelGCN, scaled',
        'RelGAT, defaults',
        'RelGAT, within',
        'GNNFiLM, defaults',
        'GGNN, defaults',
    )
)


# The gradient of the attention's bias is a sum that nearly cancels. With NumPy 1.22 its rounding
# error in float32 is 4.6 times upstream's; there only float64 decides.
CANCELLING = 'RelGAT, within', 'RelGAT, within, bonds'


# These options have a quick case in another model, have a case each if there are two, or are in
# tests/links/test_update_links.py.
SLOW_OPTIONS = (
    *('within', 'one head', 'heads concatenated', 'heads concatenated, within'),
    *('features, node embedding', 'nine relations'),
    *('wide', 'number of layers', 'two relations', 'tied, concatenated', 'untied, concatenated'),
    *('set2set, two relations', 'ggnn, two relations', 'ggnn, concatenated'),
)
# Quick cases of models that wrap others are the defaults of two bases, because test_common.py has
# the outputs of all. Quick cases of `MORE` have one relation.
WRAPPERS_OF = 'GGNN', 'RSGCN'
QUICK = (
    *(
        case
        for case in parity.ALL_CASES
        if '_' not in case.model
        and case.options not in SLOW_OPTIONS
        and (case.options != 'atom types' or case.model in ('GGNN', 'GINSparse'))
    ),
    *(case for case in parity.DEFAULTS.values() if case.model.split('_')[0] in WRAPPERS_OF),
    *(case for case in MORE if 'n_edge_types' in case.options),
    *BONDS,
)


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, id=name_of(case), marks=() if case in QUICK else pytest.mark.slow)
        for case in parity.ALL_CASES + MORE + BONDS
    ],
)
def test_parity(device, case):
    beyond = parity.check(case, device)
    if name_of(case) in CANCELLING and numpy.lib.NumpyVersion(numpy.__version__) < '1.24.0':
        beyond = [line for line in beyond if line.endswith(' in float64')]
    assert not beyond


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('readout', ['sum', 'max'])
@pytest.mark.parametrize('layout, sizes', [('packed', EQUAL), ('folded', SIZES), ('padded', SIZES)])
def test_batch_norm(device, layout, sizes, readout, train):
    """Running statistics are compared, too. Packed batches have the dense rows: sizes are equal."""
    case = parity.DEFAULTS['RSGCN']._replace(sizes=sizes)
    make = functools.partial(
        dense.RSGCN, 3, use_batch_norm=True, dropout_ratio=0.0, readout=GeneralReadout(readout)
    )
    examples = parity.examples_of(case)
    model = parity.initialised(make, examples)
    converter = CSRConverter(layout)
    with chainer.using_config('train', train):
        truth = parity.upstream(model, [dense_concat_mols(examples)])
        found = parity.measure(model, truth, converter(examples, device), device)
        assert not parity.failures({layout: found})
        ours = parity.swapped(model, device)
        theirs = model
        for seed in range(3):
            examples = parity.examples_of(case, seed)
            ours(*converter(examples, device))
            theirs(*dense_concat_mols(examples))
    for a, b in zip(ours.bnorms, theirs.bnorms):
        for statistic in ('avg_mean', 'avg_var', 'N'):
            pair = (numpy.asarray(cuda.to_cpu(getattr(link, statistic))) for link in (a, b))
            assert relative_error(*pair) < 1e-5


QUICK_SIZES = ('GGNN', 1), ('GGNN', 12), ('GGNN', 40), ('RSGCN', 12), ('GIN_CWLE', 12)


@pytest.mark.parametrize(
    'name, n',
    [
        pytest.param(name, n, marks=() if (name, n) in QUICK_SIZES else pytest.mark.slow)
        for name in (
            'RSGCN',
            'NFP',
            'GGNN',
            'MPNN',
            'RelGCN',
            'GGNN_GWM',
            'GIN_CWLE',
            'NFP_GWLE',
            'RelGAT',
        )
        for n in (1, 12, 40)
    ],
)
def test_padded_to(device, name, n):
    """Molecules equal upstream's, padded to n atoms, or unpadded if they have more."""
    case = parity.DEFAULTS[name]
    examples = parity.examples_of(case)
    model = parity.initialised(case.make, examples)
    batches = [dense_concat_mols([parity.padded_example(case, example, n)]) for example in examples]
    n_columns = int(case.column == 'labels')
    converter = CSRConverter('folded', n_node_columns=n_columns, padded_to=n)
    truth = parity.upstream(model, batches)
    found = parity.measure(model, truth, converter(examples, device), device)
    assert not parity.failures({'folded': found})


@pytest.mark.parametrize('case', parity.CRASHES, ids=name_of)
def test_upstream_fails(case):
    assert parity.crash(case) in ('InvalidType', 'IndexError')


@pytest.mark.parametrize('model', ['RSGCN', 'NFP', 'GIN', 'GGNN', 'RelGCN', 'RelGAT', 'GNNFiLM'])
def test_every_model_is_compared(model):
    assert sum(case.model == model for case in parity.CASES) >= 6


def test_cases_have_names_of_their_own():
    cases = parity.ALL_CASES + MORE + BONDS
    assert len({name_of(case) for case in cases}) == len(cases)


def test_a_mistake_is_found(monkeypatch):
    """If a relation layer loses part of its bias, output and gradients show it."""
    graph_linear = relgcn_update.graph_linear

    def wrong(adj, h, W, b, *own, **options):
        return graph_linear(adj, h, W, b * 0.9999, *own, **options)

    monkeypatch.setattr(relgcn_update, 'graph_linear', wrong)
    beyond = parity.check(parity.DEFAULTS['RelGCN'], chainer.get_device('@numpy'))
    assert any(line.startswith('packed output: ') for line in beyond)
    assert any(line.startswith('folded /rgcn_convs/') for line in beyond)
    assert any(line.startswith('padded /rgcn_convs/') for line in beyond)
    assert any(line.endswith(' in float64') for line in beyond)


def test_errors():
    truth, actual = (
        {name: numpy.array(values) for name, values in zip(('output', '/a', '/b'), arrays)}
        for arrays in (([3.0, 4.0], [1e-12], [2.0]), ([3.0, 4.5], [2e-12], [1.0]))
    )
    found = parity.errors(actual, truth)
    assert found['output'] == pytest.approx(0.1) and found['/b'] == pytest.approx(0.5)
    assert found['/a'] == pytest.approx(5e-13)  # is rounding, so it is measured by all gradients
    with pytest.raises(AssertionError, match='gradients of other parameters: /b'):
        parity.errors({name: truth[name] for name in ('output', '/a')}, truth)


def test_nan_is_a_failure():
    e = {'upstream': 1e-7, 'ours': float('nan'), 'ours float64': float('nan')}
    assert len(parity.failures({'packed': {'output': e}})) == 2
