"""`set_up_predictor`: every method of Chainer Chemistry works, or is refused with a reason."""

import inspect

import numpy
import pytest

import chainer
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.prediction import set_up_predictor as set_up_dense_predictor

from chainer_bspmm import concat_mols
from chainer_bspmm.models import METHODS, set_up_predictor
from chainer_bspmm.models.set_up_predictor import EDGE_LIST_METHODS, REFUSED
from chainer_bspmm.models.sparsify import SWAPS
from tests.support.molecules import molecules


def upstreams_methods():
    """Read the methods from the source of Chainer Chemistry, which has no list of them."""
    source = inspect.getsource(set_up_dense_predictor)
    return set(piece.split("'")[1] for piece in source.split('method == ')[1:])


def test_every_method_of_upstream():
    known = [*METHODS, *EDGE_LIST_METHODS, *REFUSED]
    assert sorted(known) == sorted(upstreams_methods())


@pytest.mark.parametrize('method', METHODS + EDGE_LIST_METHODS)
def test_parameters_are_those_of_upstream(method):
    predictors = []
    for make in (set_up_predictor, set_up_dense_predictor):
        numpy.random.seed(1)
        predictors.append(make(method, 6, 2, 3, n_atom_types=25))
    ours, theirs = predictors
    assert type(ours) is type(theirs)
    assert type(ours.graph_conv) is SWAPS[type(theirs.graph_conv)]
    mine, upstreams = dict(ours.namedparams()), dict(theirs.namedparams())
    assert mine.keys() == upstreams.keys()
    for name, parameter in upstreams.items():
        if parameter.array is not None:
            numpy.testing.assert_array_equal(mine[name].array, parameter.array)


def test_arguments_reach_the_parts():
    scaler = chainer.Link()
    predictor = set_up_predictor(
        'gin_cwle',
        n_unit=6,
        conv_layers=3,
        class_num=2,
        label_scaler=scaler,
        postprocess_fn=chainer.functions.sigmoid,
        n_atom_types=30,
        conv_kwargs={'dropout_ratio': 0.25},
        n_wle_types=77,
    )
    conv = predictor.graph_conv
    assert predictor.label_scaler is scaler
    assert predictor.postprocess_fn is chainer.functions.sigmoid
    assert conv.embed.W.shape == (30, 6) and conv.embed_wle.W.shape == (77, 6)
    assert conv.n_update_layers == 3 and conv.update_layers[0].dropout_ratio == 0.25


def test_names_of_arguments_are_those_of_upstream():
    ours = inspect.signature(set_up_predictor)
    theirs = inspect.signature(set_up_dense_predictor)
    assert list(ours.parameters) == list(theirs.parameters)


@pytest.mark.parametrize(
    'method, reason',
    [
        ('schnet', 'its filters are functions of the distances'),
        ('weavenet', 'it keeps features for every pair of atoms'),
        ('megnet', 'along a list of pairs'),
        ('cgcnn', 'along a list of neighbours'),
    ],
)
def test_methods_without_a_sparse_form(method, reason):
    assert method in REFUSED
    message = (
        "^method: '%s' .*%s.*\nIt runs unswapped, with upstream's converter: python -m .*"
        'docs/methods.md lists what can be swapped$'
    )
    with pytest.raises(ValueError, match=message % (method, reason)):
        set_up_predictor(method, 6, 2, 3)


def test_mpnn():
    """Chainer Chemistry's examples/own_dataset offers MPNN."""
    examples = molecules([5, 3], n_relations=4)
    predictors = []
    for make, convert in (
        (set_up_predictor, concat_mols),
        (set_up_dense_predictor, dense_concat_mols),
    ):
        numpy.random.seed(1)
        predictors.append(
            make('mpnn', 6, 2, 3, conv_kwargs={'message_func': 'ggnn'}, n_atom_types=120)
        )
        y = predictors[-1](*convert(examples)[:2])
        assert y.shape == (2, 3)
        assert (120, 6) in {p.shape for p in predictors[-1].params()}  # the embedding's
    for (name, ours), (_, theirs) in zip(*[p.namedparams() for p in predictors]):
        numpy.testing.assert_array_equal(ours.array, theirs.array, name)


def test_mpnn_with_an_edge_network():
    """Edge networks are upstream's default, but have no sparse form."""
    examples = molecules([5, 3], n_relations=4)
    edge_network = set_up_dense_predictor('mpnn', n_unit=6, conv_layers=2, class_num=3)
    assert edge_network(*dense_concat_mols(examples)[:2]).shape == (2, 3)
    with pytest.raises(
        ValueError,
        match="model.graph_conv.message_func: expected 'ggnn', got 'edgenet', which gives "
        'every pair of atoms, bonded or not, a separate matrix, made by a network with '
        'biases: its messages come from all atoms, and no entry is zero.\nIt runs '
        "unswapped, with upstream's converter: python -m chainer_bspmm run SCRIPT.py",
    ):
        set_up_predictor('mpnn', 6, 2, 3)


def test_unknown_method():
    with pytest.raises(ValueError, match="method: expected one of .*'rsgcn_gwm'.*, got 'gnc'$"):
        set_up_predictor('gnc', 6, 2, 3)
