"""GIN: features of the nodes, dropout, the widths that are refused."""

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models import GIN as DenseGIN

from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm import sparsify
from chainer_bspmm.models import GIN
from tests.support import draw_as_chainer
from tests.support import parity
from tests.support import relative_error
from tests.support.molecules import molecules


PACKED = CSRConverter('packed')


def test_node_embedding(device):
    """Its width may be another; parity of widths that agree is in test_parity.py."""
    examples = [example[:2] for example in molecules((5, 1, 9), 'counted')]
    dense = parity.initialised(lambda: DenseGIN(3, True, out_channels=5), examples)
    model = parity.swapped(dense, device)
    with chainer.using_config('train', False):
        expected = dense(*dense_concat_mols(examples)).array
        actual = model(*CSRConverter('padded')(examples, device)).array
        assert expected.shape == (3, 9, 5)
        assert relative_error(actual, expected) < 1e-5
        expected = numpy.concatenate([dense(*dense_concat_mols([e])).array[0] for e in examples])
        assert relative_error(model(*PACKED(examples, device)).array, expected) < 1e-5


@pytest.mark.parametrize('ratio', [0.5, 0.1])
def test_dropout_is_upstreams(monkeypatch, ratio):
    """Same elements kept, same result: with equal sizes both draw for the same rows."""
    draw_as_chainer(monkeypatch)
    examples = [example[:2] for example in molecules([7] * 5, 'counted')]
    make = lambda: DenseGIN(3, dropout_ratio=ratio, hidden_channels=8)  # NOQA: E731
    dense = parity.initialised(make, examples)
    model = parity.swapped(dense, chainer.get_device('@numpy'))
    results = []
    for one, batch in ((dense, dense_concat_mols(examples)), (model, PACKED(examples))):
        numpy.random.seed(0)
        results.append(parity.outcome(chainer.Sequential(one), [batch]))
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        assert relative_error(results[1][name], results[0][name]) < 2e-5, name
    batch = concat_mols(examples)
    assert (model(*batch).array != model(*batch).array).any()
    with chainer.using_config('train', False):
        assert (model(*batch).array == model(*batch).array).all()


def test_first_mlp_gets_zeros_in_the_first_call(device):
    """Weights that stay None break optimizers; random numbers would shift all later ones."""
    model = GIN(3)
    assert model.first_mlp.layers[0].W.array is None
    model.to_device(device)
    model.cleargrads()
    chainer.functions.sum(model(*concat_mols(molecules((3, 2), 'counted'), device)[:2])).backward()
    W = model.first_mlp.layers[0].W
    assert W.shape == (16, 16) and not cuda.to_cpu(W.array).any() and W.grad is None


@pytest.mark.parametrize(
    'options, message',
    [
        ({}, "expected hidden_channels = 16, the width that the readout's parameters have, got 5"),
        (
            {'node_embedding': True, 'weight_tying': True},
            'expected hidden_channels = 16, the width that the tied update takes, got 5',
        ),
    ],
)
def test_out_channels_that_do_not_fit(options, message):
    for make in (GIN, lambda *a, **k: sparsify(DenseGIN(*a, **k))):
        with pytest.raises(ValueError, match='out_channels: ' + message):
            make(3, out_channels=5, **options)
    # With one update the tied one does not take its own result.
    GIN(3, out_channels=5, node_embedding=True, weight_tying=True, n_update_layers=1)
