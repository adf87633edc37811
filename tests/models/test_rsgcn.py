"""RSGCN: dropout, readouts, numbers of layers, ids of atoms."""

import functools

import numpy
import pytest

import chainer
from chainer.link_hooks import TimerHook
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models import RSGCN as DenseRSGCN

from chainer_bspmm import concat_mols, CSRConverter, links, sparsify
from chainer_bspmm.models import RSGCN
from chainer_bspmm.sparse import BatchedCSR
from tests.support import parity, relative_error
from tests.support.molecules import molecules

SIZES = (9, 1, 17, 4)
EXAMPLES = molecules(SIZES, 'normalised')


use_batch_norm = pytest.mark.parametrize('use_batch_norm', [False, True])


@use_batch_norm
def test_dropout_is_upstreams(monkeypatch, use_batch_norm):
    """Dropout comes after the rectifier, with and without batch norm."""
    make = functools.partial(
        DenseRSGCN, 3, hidden_channels=8, dropout_ratio=0.3, use_batch_norm=use_batch_norm
    )
    examples = [example[:2] for example in molecules([7] * 5, 'normalised')]
    parity.assert_same_in_training(monkeypatch, make, examples)


def test_dropout_behind_a_hook_is_upstreams(monkeypatch):
    """A hook has to see every call of the layers."""
    make = functools.partial(DenseRSGCN, 3, hidden_channels=8, dropout_ratio=0.3)
    examples = [example[:2] for example in molecules([7] * 5, 'normalised')]
    with TimerHook():
        parity.assert_same_in_training(monkeypatch, make, examples)


@use_batch_norm
def test_dropout_is_applied_in_training_only(use_batch_norm):
    model = RSGCN(3, use_batch_norm=use_batch_norm)
    batch = concat_mols(EXAMPLES)[:2]
    assert (model(*batch).array != model(*batch).array).any()
    with chainer.using_config('train', False):
        assert (model(*batch).array == model(*batch).array).all()


def test_readouts():
    """A readout of upstream's is swapped, and a user's readout is called with the batch."""
    batch = concat_mols(EXAMPLES)[:2]
    model = RSGCN(4, readout=links.GeneralReadout.upstream('summax'))
    assert type(model.readout) is links.GeneralReadout and model(*batch).shape == (4, 8)
    model = RSGCN(4, readout=lambda h, adj: h[adj.row_offsets[:-1]])
    assert model(*batch).shape == (4, 4)
    dense = DenseRSGCN(4, readout=links.GeneralReadout())
    assert sparsify(dense)(*batch).shape == (4, 4)


@pytest.mark.parametrize('n_update_layers', [1, 2, 3, 5])
@use_batch_norm
def test_other_numbers_of_layers_than_n_update_layers(n_update_layers, use_batch_norm):
    """Upstream rectifies after the first n_update_layers - 1 layers of the model."""
    dense = DenseRSGCN(
        4, hidden_channels=4, n_update_layers=3, dropout_ratio=0.0, use_batch_norm=use_batch_norm
    )
    dense.n_update_layers = n_update_layers
    with chainer.using_config('train', False):
        expected = dense(*dense_concat_mols(EXAMPLES)[:2]).array
        actual = sparsify(dense)(*concat_mols(EXAMPLES)[:2]).array
    assert relative_error(actual, expected) < 1e-5


TOO_LARGE = r'atom_array: expected ids in \[0, 10\), the size of the embedding, got 10'


@pytest.mark.parametrize('number', [-2, -1, 10, 11])
def test_atom_id_outside_of_the_embedding(number):
    model = RSGCN(3, n_atom_types=10)
    unknown = BatchedCSR.from_matrices([numpy.eye(3)])
    message = r'atom_array: expected ids in \[0, 10\), the size of the embedding, got %d' % number
    with pytest.raises(ValueError, match=message):
        model(numpy.array([9, number, 0], 'i'), unknown)


def test_largest_atom_id_of_a_batch_is_believed():
    """A batch knows its largest id, so no id is read from the array."""
    model = RSGCN(3, n_atom_types=10)
    example = numpy.array([9, 10], 'i'), numpy.eye(2, dtype='f'), 0.0
    atoms, adj, _ = CSRConverter('packed')([example])
    for ids in (atoms, atoms * 0):
        with pytest.raises(ValueError, match=TOO_LARGE):
            model(ids, adj)


def test_atoms_that_are_no_array():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))])
    with pytest.raises(TypeError, match='atom_array: expected an array, got list'):
        RSGCN(3)([6, 6], adj)


@pytest.mark.parametrize(
    'atoms, layout, message',
    [
        (numpy.zeros((4, 5), 'f'), 'packed', r'features of 32 channels, .* 5\)'),
        (numpy.zeros(3, 'i'), 'packed', r'ids of shape \(4,\), .* got shape \(3,\)'),
        (numpy.zeros((2, 2), 'i'), 'packed', r'ids of shape \(4,\), .* got shape \(2, 2\)'),
        (numpy.zeros(4, 'i'), 'padded', r'ids of shape \(2, 2\), .* got shape \(4,\)'),
        (numpy.zeros(4, 'f'), 'packed', r'ids of shape \(4,\), .* got shape \(4,\)'),
    ],
)
def test_atoms_that_do_not_fit(atoms, layout, message):
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))] * 2, layout)
    with pytest.raises(ValueError, match='atom_array: expected ' + message):
        RSGCN(3)(atoms, adj)
