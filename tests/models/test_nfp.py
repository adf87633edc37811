"""NFP: quirks, concatenated layers, degrees, hooks, refusals."""

import numpy
import pytest

import chainer
from chainer.link_hooks import TimerHook
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models import NFP as DenseNFP

from chainer_bspmm import concat_mols, CSRConverter, sparsify
from chainer_bspmm.models import NFP
from chainer_bspmm.ops.bspmm import bspmm_forward
from tests.support import parity, relative_error
from tests.support.molecules import molecules

EXAMPLES = [example[:2] for example in molecules(kind='counted')]


def dense_model(**options):
    """Return upstream's model with nonzero biases; its call fails if layers are concatenated."""
    concat_hidden = options.pop('concat_hidden', False)
    model = parity.initialised(lambda: DenseNFP(3, **options), EXAMPLES)
    model.concat_hidden = concat_hidden
    return model


def loop(model, atoms, adj):
    """Compute each layer's fingerprint of one molecule, node by node in float64."""

    def array(parameter):
        return parameter.array.astype('d')

    h, adj, fingerprints = array(model.embed.W)[atoms], adj.astype('d'), []
    for update, readout in zip(model.layers, model.readout_layers):
        weights = [array(linear.W) for linear in update.graph_linears]
        bias = sum(array(linear.b) for linear in update.graph_linears)
        new = []
        for i in range(len(h)):
            degree = adj[:, i].sum()
            message = sum(adj[i, j] * h[j] for j in range(len(h)))
            known = degree in range(1, len(weights) + 1)
            new.append(bias + (weights[int(degree) - 1] @ message if known else 0))
        h = 1 / (1 + numpy.exp(-numpy.array(new)))
        scores = numpy.exp(h @ array(readout.output_weight.W).T + array(readout.output_weight.b))
        fingerprints.append((scores / scores.sum(axis=1, keepdims=True)).sum(axis=0))
    return fingerprints


def test_quirks_by_a_loop():
    """Degrees are sums of columns and choose the weights, but every node gets all biases."""
    dense = dense_model()
    expected = numpy.array([sum(loop(dense, *example)) for example in EXAMPLES])
    theirs = numpy.concatenate([dense(*dense_concat_mols([e])).array for e in EXAMPLES])
    assert relative_error(theirs, expected) < 1e-5
    assert relative_error(sparsify(dense)(*CSRConverter('packed')(EXAMPLES)).array, expected) < 1e-5
    degrees = numpy.concatenate([adj.sum(axis=0) for _, adj in EXAMPLES])
    assert {0, 1, 2, 3, 4, 5, 6, 7} < set(degrees) and degrees.max() > 7


@pytest.mark.parametrize('n_update_layers', [1, 3])
def test_concatenated_layers(device, n_update_layers):
    """Upstream fails here, because it concatenates along an axis that does not exist."""
    dense = dense_model(concat_hidden=True, n_update_layers=n_update_layers)
    with pytest.raises(chainer.utils.type_check.InvalidType):
        dense(*dense_concat_mols(EXAMPLES))
    expected = [numpy.concatenate(loop(dense, *example)) for example in EXAMPLES]
    y = parity.swapped(dense, device)(*CSRConverter('packed')(EXAMPLES, device))
    assert y.shape == (len(EXAMPLES), 3 * n_update_layers)
    assert relative_error(y.array, numpy.array(expected)) < 1e-5


def test_degrees_are_found_once_a_batch(monkeypatch):
    products = []
    bspmm = bspmm_forward

    def counted(adj, x, *args, **kwargs):
        products.append(x.shape[-1])
        return bspmm(adj, x, *args, **kwargs)

    monkeypatch.setattr('chainer_bspmm.ops.degree_linear.bspmm_forward', counted)
    NFP(3, n_update_layers=5)(*concat_mols(EXAMPLES))
    assert products.count(1) == 1 and products.count(16) == 5


@pytest.mark.parametrize(
    'options, message',
    [
        ({'n_update_layers': 0}, 'n_update_layers: expected at least 1, got 0'),
        ({'max_degree': -1}, r'layers\.0\.max_degree: expected at least 0, got -1'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NFP(3, **options)


@pytest.mark.parametrize('n_update_layers', [1, 3])
def test_hooks_of_readouts_run(n_update_layers):
    """If a readout has a hook, the model calls readouts one by one, with the same results."""
    model = NFP(3, n_update_layers=n_update_layers)
    batch = concat_mols(EXAMPLES)
    expected = model(*batch).array
    hook = TimerHook()
    model.readout_layers[-1].output_weight.add_hook(hook)
    assert relative_error(model(*batch).array, expected) < 1e-6
    assert len(hook.call_history) == 1
