"""Models of Chainer Chemistry refuse sparse batches, but not dense ones."""

import inspect
import pickle

import numpy
import pytest

import chainer
from chainer_chemistry import models as dense
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.update.gnn_film_update import GNNFiLMUpdate
from chainer_chemistry.links.update.rsgcn_update import RSGCNUpdate
from chainer_chemistry.models import prediction
from chainer_chemistry.models.prediction.node_classifier import NodeClassifier

from chainer_bspmm import BatchedCOO, concat_mols, densify, links, models, sparsify
from chainer_bspmm.models.dense_calls import PARTS
from chainer_bspmm.models.refusals import REFUSALS
from chainer_bspmm.models.set_up_predictor import EDGE_LIST_METHODS, REFUSED
from chainer_bspmm.models.sparsify import SWAPS
from tests.support import parity
from tests.support.molecules import molecules

EXAMPLES = molecules((5, 9, 3), 'normalised')
ATOMS, ADJ = concat_mols(EXAMPLES)[:2]
ADVICE = (
    '%s of Chainer Chemistry takes dense adjacency matrices, got a %s: call '
    'chainer_bspmm.sparsify(model) first, or use '
    'chainer_chemistry.dataset.converters.concat_mols as the converter. '
    'sparsify does not find links outside of init_scope: swap those separately'
)


class Mine(dense.RSGCN):
    def __call__(self, atom_array, adj):
        return super().__call__(atom_array, adj) * 2


def message_of(call):
    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


def set_up(method):
    return prediction.set_up_predictor(method, 6, 2, 3)


@pytest.mark.parametrize('name', parity.DEFAULTS)
def test_a_model_that_can_be_swapped(name):
    model = parity.DEFAULTS[name].make()
    assert message_of(lambda: model(ATOMS, ADJ)) == ADVICE % (name, 'BatchedCSR')
    assert message_of(lambda: model(ATOMS, adj=ADJ)) == ADVICE % (name, 'BatchedCSR')


@pytest.mark.parametrize('retain_inputs', [False, True])
def test_predict(retain_inputs):
    model = prediction.Regressor(set_up('nfp'))
    message = message_of(
        lambda: model.predict(
            [example[:2] for example in EXAMPLES],
            converter=concat_mols,
            retain_inputs=retain_inputs,
        )
    )
    assert message == ADVICE % ('NFP', 'BatchedCSR')


def test_another_container():
    adj = BatchedCOO.from_csr(ADJ)
    assert message_of(lambda: dense.GIN(3)(ATOMS, adj)) == ADVICE % ('GIN', 'BatchedCOO')


@pytest.mark.parametrize('make', [lambda: RSGCNUpdate(6, 4), lambda: GNNFiLMUpdate(6, 4)])
def test_an_update_link(make):
    link = make()
    h = numpy.zeros((len(ATOMS), 6), 'f')
    assert message_of(lambda: link(h, ADJ)) == ADVICE % (type(link).__name__, 'BatchedCSR')


@pytest.mark.parametrize('kind', sorted(PARTS, key=str))
def test_a_part_that_was_put_into_a_swapped_model(kind):
    """The error advises to swap, which would swap the part together with its owner.

    A part in a link of the user's own is not swapped; there is a sparse class to be used.
    """
    takes_no_widths = kind.__name__ in ('GWM', 'GeneralReadout')
    part = kind() if takes_no_widths else kind(out_dim=3, in_channels=6)
    assert issubclass(getattr(links, kind.__name__), kind)
    assert message_of(lambda: part(numpy.zeros((len(ATOMS), 6), 'f'), ADJ)) == (
        '{0} of Chainer Chemistry takes no sparse batch, got a BatchedCSR: in a link of your own, '
        'use chainer_bspmm.links.{0}; in a model of Chainer Chemistry, call '
        'chainer_bspmm.sparsify(model) first'
    ).format(kind.__name__)


def test_a_model_outside_of_init_scope():
    """sparsify does not find such a model, and the error says so."""

    class WithTeacher(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.student = dense.RSGCN(3)
            self.teacher = dense.RSGCN(3)

        def forward(self, atoms, adj):
            return self.student(atoms, adj) - self.teacher(atoms, adj)

    model = sparsify(WithTeacher())
    assert message_of(lambda: model(ATOMS, ADJ)) == ADVICE % ('RSGCN', 'BatchedCSR')
    sparsify(model.teacher)
    assert model(ATOMS, ADJ).shape == (3, 3)


@pytest.mark.parametrize('method', EDGE_LIST_METHODS)
def test_a_model_of_graph_data(method):
    model = set_up(method).graph_conv
    for call in (lambda: model(ATOMS, ADJ), lambda: NodeClassifier(model)(ATOMS, ADJ, ())):
        assert message_of(call).endswith(
            " of Chainer Chemistry takes Chainer Chemistry's graph data, got a BatchedCSR: call "
            'chainer_bspmm.sparsify(model) first. sparsify does not find links outside of '
            'init_scope: swap those separately'
        )


@pytest.mark.parametrize('method', [method for method in REFUSED if method != 'cgcnn'])
def test_a_model_that_cannot_be_swapped(method):
    message = message_of(lambda: set_up(method)(ATOMS, ADJ))
    assert message.startswith('got a BatchedCSR, but chainer_chemistry.models.')
    assert REFUSALS[REFUSED[method]] + '.\nIt runs unswapped, with upstream' in message
    assert 'sparsify(model)' not in message


def test_a_subclass():
    """sparsify would refuse a subclass, so the error advises to derive it from our class."""
    message = message_of(lambda: Mine(3)(ATOMS, ADJ))
    assert (
        'Mine is a subclass of chainer_chemistry.models.rsgcn.RSGCN, and a swap would lose'
        in message
    )
    assert 'derive it from chainer_bspmm.models.RSGCN, or run it unswapped' in message

    class Ours(models.RSGCN):
        def __call__(self, atom_array, adj):
            return super().__call__(atom_array, adj) * 2

    model = Ours(3, dropout_ratio=0.0)
    numpy.testing.assert_array_equal(model(ATOMS, ADJ).array, model.forward(ATOMS, ADJ).array * 2)


def test_dense_batches_are_taken():
    """Subclasses, and models that were swapped and are dense again, take dense batches."""
    batch = dense_concat_mols(EXAMPLES)[:2]
    model = dense.RSGCN(3, dropout_ratio=0.0)
    mine = pickle.loads(pickle.dumps(model))
    mine.__class__ = Mine
    expected = model(*batch).array
    numpy.testing.assert_array_equal(mine(*batch).array, expected * 2)
    densify(sparsify(model))
    numpy.testing.assert_array_equal(model(*batch).array, expected)
    assert message_of(lambda: model(ATOMS, ADJ)) == ADVICE % ('RSGCN', 'BatchedCSR')


@pytest.mark.parametrize('kind', [*SWAPS, *REFUSALS])
def test_what_is_wrapped_looks_as_before(kind):
    name = 'forward' if hasattr(kind, 'forward') else '__call__'
    method = getattr(kind, name)
    assert method.__name__ == name and method.__module__.startswith('chainer_chemistry.')
    assert list(inspect.signature(method).parameters)[:2] != ['self', 'args']
    assert pickle.loads(pickle.dumps(method)) is method
