"""GIN against Chainer Chemistry's: packed, padded, options, what is refused."""

import copy

import numpy
import pytest

import chainer
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models import GIN as DenseGIN
from chainer_chemistry.models import MLP
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import set_up_predictor

from benchmarks.parity import double
from benchmarks.parity import to_double
from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm import sparsify
from chainer_bspmm.models import GIN
from tests.models.swapping import check_one_training_step
from tests.models.swapping import check_swap_in_place_and_snapshots
from tests.models.test_rsgcn import alone
from tests.models.test_rsgcn import assert_parity
from tests.models.test_rsgcn import outcome
from tests.models.test_rsgcn import SIZES
from tests.support import relative_error


def molecule(rng, n):
    """Return a chain of n atoms, self-loops included, with more bonds that lead one way only.

    Its columns sum to whole numbers from 0 to beyond 7, others than its rows do.
    """
    adj = numpy.eye(n) + numpy.diag(numpy.ones(max(n - 1, 0)), 1)[:n, :n]
    adj = numpy.minimum(adj + adj.T + (rng.uniform(size=(n, n)) < 0.1), 1)
    if n > 3:
        adj[:, 1] = 0
        adj[:, 3] = 1
        adj[0, 2] = 2
    return (rng.randint(1, 20, n).astype('i'), adj.astype('f'), rng.uniform(-1, 1, 3).astype('f'))


def molecules(sizes, seed=0):
    rng = numpy.random.RandomState(seed)
    return [molecule(rng, n) for n in sizes]


EXAMPLES = molecules(SIZES)
PADDED = CSRConverter(layout='padded')

# Every option that upstream can run, dropout apart: its random numbers depend on the batch's shape.
OPTIONS = {
    'defaults': {},
    'no layer': {'n_update_layers': 0},
    'one layer': {'n_update_layers': 1},
    'wide': {'hidden_channels': 33, 'out_dim': 7, 'n_update_layers': 3},
    'concatenated': {'concat_hidden': True},
    'tied': {'weight_tying': True},
    'tied, concatenated': {'weight_tying': True, 'concat_hidden': True, 'n_update_layers': 3},
    'activation': {'activation': chainer.functions.tanh},
    'atom types': {'n_atom_types': 25},
}


def randomise(model, seed=0):
    """Give every parameter random values: biases start at 0, where mistakes hide."""
    rng = numpy.random.RandomState(seed)
    for _, parameter in sorted(model.namedparams()):
        parameter.array[...] = rng.normal(
            scale=1 / parameter.shape[-1] ** 0.5, size=parameter.shape
        )
    return model


def dense_model(out_dim=3, dropout_ratio=0.0, **options):
    model = DenseGIN(out_dim, dropout_ratio=dropout_ratio, **options)
    model(numpy.ones((1, 1), 'i'), numpy.ones((1, 1, 1), 'f'))  # gives lazy parameters their shape
    model.cleargrads()
    return randomise(model)


def used(results):
    """Return the results without the gradients of parameters that had none: None."""
    return {name: array for name, array in results.items() if array is not None}


@pytest.mark.parametrize('name', OPTIONS)
def test_packed_is_every_molecule_alone(device, name):
    dense = dense_model(**OPTIONS[name])
    truth = used(outcome(to_double(dense), map(double, alone(EXAMPLES))))
    expected = used(outcome(dense, alone(EXAMPLES)))
    model = sparsify(copy.deepcopy(dense))
    assert type(model) is GIN
    model.to_device(device)
    assert_parity(used(outcome(model, [concat_mols(EXAMPLES, device)])), expected, truth)
    assert not any('first_mlp' in key for key in truth) and len(truth) > 4


@pytest.mark.parametrize('with_mask', [False, True])
@pytest.mark.parametrize('name', OPTIONS)
def test_padded_is_the_dense_batch(device, name, with_mask):
    dense = dense_model(**OPTIONS[name])
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    mask = (numpy.arange(max(SIZES)) < numpy.array(SIZES)[:, None]).astype('f')
    mask = [mask] if with_mask else []
    atoms, adj, t = dense_concat_mols(EXAMPLES)
    truth = used(outcome(to_double(dense), [double((atoms, adj, *mask, t))]))
    expected = used(outcome(dense, [(atoms, adj, *mask, t)]))
    *batch, t = PADDED(EXAMPLES, device)
    batch = (*batch, *[device.send(m) for m in mask], t)
    assert_parity(used(outcome(model, [batch])), expected, truth)


def test_double_precision(device):
    dense = dense_model()
    model = sparsify(to_double(dense))
    model.to_device(device)
    for batches, ours in (
        (alone(EXAMPLES), concat_mols(EXAMPLES, device)),
        ([dense_concat_mols(EXAMPLES)], PADDED(EXAMPLES, device)),
    ):
        truth = used(outcome(to_double(dense), map(double, batches)))
        actual = used(outcome(model, [ours]))
        assert actual.keys() == truth.keys()
        for name in truth:
            assert relative_error(actual[name], truth[name]) < 1e-10, name


def test_masked_padding_is_packed():
    model = sparsify(dense_model())
    expected = model(*concat_mols(EXAMPLES)[:2]).array
    atoms, adj = PADDED(EXAMPLES)[:2]
    for dtype in ('f', 'i', '?', 'd'):
        mask = (numpy.arange(max(SIZES)) < numpy.array(SIZES)[:, None]).astype(dtype)
        for given in (mask, mask.ravel()):
            assert relative_error(model(atoms, adj, given).array, expected) < 1e-5


def test_node_embedding(device):
    dense = dense_model(node_embedding=True, out_channels=5)
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    expected = dense(*dense_concat_mols(EXAMPLES)[:2]).array
    actual = model(*PADDED(EXAMPLES, device)[:2]).array
    assert expected.shape == (8, 30, 5)
    assert relative_error(actual, expected) < 1e-5
    expected = numpy.concatenate([dense(*b[:2]).array[0] for b in alone(EXAMPLES)])
    assert relative_error(model(*concat_mols(EXAMPLES, device)[:2]).array, expected) < 1e-5


@pytest.mark.parametrize('ratio', [0.5, 0.1])
def test_dropout_is_upstreams(ratio):
    """Same random numbers, same result: with equal sizes both draw for the same rows."""
    examples = molecules([7] * 5)
    dense = dense_model(dropout_ratio=ratio, hidden_channels=8)
    model = sparsify(copy.deepcopy(dense))
    results = []
    for one, batch in ((dense, dense_concat_mols(examples)), (model, concat_mols(examples))):
        numpy.random.seed(0)
        results.append(used(outcome(one, [batch])))
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        assert relative_error(results[1][name], results[0][name]) < 2e-5, name
    batch = concat_mols(examples)[:2]
    assert (model(*batch).array != model(*batch).array).any()
    with chainer.using_config('train', False):
        assert (model(*batch).array == model(*batch).array).all()


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'weight_tying': True, 'concat_hidden': True},
        {'n_update_layers': 0},
        {'node_embedding': True, 'out_channels': 3, 'n_edge_types': 2},
    ],
    ids=str,
)
def test_constructor_makes_upstreams_parameters(options):
    models = []
    for kind in (GIN, DenseGIN):
        numpy.random.seed(1)
        model = kind(5, hidden_channels=7, **options)
        paths = [name for name, _ in model.namedparams()]
        batch = (concat_mols if kind is GIN else dense_concat_mols)(molecules([4] * 2))[:2]
        model(*batch)
        models.append((model, paths, dict(model.namedparams())))
    (ours, paths, arrays), (dense, expected_paths, expected) = models
    assert paths == expected_paths and arrays.keys() == expected.keys()
    assert '/first_mlp/layers/0/W' in paths
    for name in arrays:
        numpy.testing.assert_array_equal(arrays[name].array, expected[name].array, name)
    for attribute in (
        'node_embedding',
        'out_dim',
        'hidden_channels',
        'n_update_layers',
        'n_message_layers',
        'n_readout_layer',
        'dropout_ratio',
        'concat_hidden',
        'weight_tying',
        'n_edge_types',
    ):
        assert getattr(ours, attribute) == getattr(dense, attribute), attribute
        assert getattr(sparsify(dense), attribute) == getattr(dense, attribute), attribute


@pytest.mark.parametrize(
    'wrapper',
    [
        lambda: GraphConvPredictor(DenseGIN(4, hidden_channels=6), MLP(3, 8)),
        lambda: set_up_predictor('gin', 6, 2, 3),
    ],
)
def test_swap_in_place_and_snapshots_both_ways(tmp_path, wrapper):
    check_swap_in_place_and_snapshots(tmp_path, wrapper, GIN, EXAMPLES, randomise)


def test_one_training_step_from_equal_state(device):
    check_one_training_step(device, dense_model(), molecules([10] * 12), rate=0.01)


def test_half_precision(device):
    reference = sparsify(dense_model())
    with chainer.using_config('dtype', numpy.float16):
        model = DenseGIN(3, dropout_ratio=0.0)
        model(numpy.ones((1, 1), 'i'), numpy.ones((1, 1, 1), numpy.float16))
        model.cleargrads()
        model = sparsify(randomise(model))
        model.to_device(device)
        y = model(*concat_mols(EXAMPLES, device)[:2])
        chainer.functions.sum(y).backward()
    assert y.dtype == numpy.float16
    expected = reference(*concat_mols(EXAMPLES)[:2]).array
    assert relative_error(y.array, expected) < 2e-2


# --- what is refused ---


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
    # with one update nothing feeds the tied one again
    GIN(3, out_channels=5, node_embedding=True, weight_tying=True, n_update_layers=1)


@pytest.mark.parametrize(
    'mask, error, message',
    [
        ([1, 1, 1], TypeError, 'is_real_node: expected an array, got list'),
        (numpy.ones(4, 'f'), ValueError, r'is_real_node: expected shape \(3,\) .* got \(4,\)'),
        (numpy.ones((2, 2), 'f'), ValueError, r'is_real_node: expected shape \(3,\) '),
    ],
)
def test_mask_that_does_not_fit(mask, error, message):
    batch = concat_mols(molecules([1, 2]))[:2]
    with pytest.raises(error, match=message):
        GIN(3)(*batch, mask)
    padded = PADDED(molecules([1, 2]))[:2]
    with pytest.raises(ValueError, match=r'expected shape \(4,\) or \(2, 2\) .* got \(2, 3\)'):
        GIN(3)(*padded, numpy.ones((2, 3)))
