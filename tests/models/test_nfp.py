"""NFP against Chainer Chemistry's: packed, padded, options, quirks, what is refused."""

import copy

import numpy
import pytest

import chainer
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.update import nfp_update as dense_nfp_update
from chainer_chemistry.models import MLP
from chainer_chemistry.models import NFP as DenseNFP
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import set_up_predictor

from benchmarks.parity import double
from benchmarks.parity import to_double
from chainer_bspmm import backend
from chainer_bspmm import concat_mols
from chainer_bspmm import sparsify
from chainer_bspmm.models import NFP
from tests.models.test_gin import EXAMPLES
from tests.models.test_gin import molecules
from tests.models.test_gin import PADDED
from tests.models.test_gin import randomise
from tests.models.swapping import check_one_training_step
from tests.models.swapping import check_swap_in_place_and_snapshots
from tests.models.test_rsgcn import alone
from tests.models.test_rsgcn import assert_parity
from tests.models.test_rsgcn import outcome
from tests.models.test_rsgcn import SIZES
from tests.support import relative_error

# Every option that upstream can run; concat_hidden fails there.
OPTIONS = {
    'defaults': {},
    'one layer': {'n_update_layers': 1},
    'two layers': {'n_update_layers': 2},
    'wide': {'hidden_channels': 33, 'out_dim': 7, 'n_update_layers': 3},
    'few degrees': {'max_degree': 2},
    'one degree': {'max_degree': 0},
    'atom types': {'n_atom_types': 25},
}


@pytest.fixture(autouse=True)
def upstream_in_float64(monkeypatch):
    """Upstream's link mixes float32 zeros into any dtype, which `where` refuses on the CPU."""
    where = dense_nfp_update.functions.where
    monkeypatch.setattr(
        dense_nfp_update.functions,
        'where',
        lambda condition, x, y: where(condition, x, y.astype(x.dtype)),
    )


def dense_model(out_dim=3, **options):
    return randomise(DenseNFP(out_dim, **options))


def mask_of(examples):
    sizes = numpy.array([len(atoms) for atoms, *_ in examples])
    return (numpy.arange(sizes.max()) < sizes[:, None]).astype('f')


@pytest.mark.parametrize('name', OPTIONS)
def test_packed_is_every_molecule_alone(device, name):
    dense = dense_model(**OPTIONS[name])
    truth = outcome(to_double(dense), map(double, alone(EXAMPLES)))
    expected = outcome(dense, alone(EXAMPLES))
    model = sparsify(copy.deepcopy(dense))
    assert type(model) is NFP
    model.to_device(device)
    assert_parity(outcome(model, [concat_mols(EXAMPLES, device)]), expected, truth)


@pytest.mark.parametrize('with_mask', [False, True])
@pytest.mark.parametrize('name', OPTIONS)
def test_padded_is_the_dense_batch(device, name, with_mask):
    dense = dense_model(**OPTIONS[name])
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    mask = [mask_of(EXAMPLES)] if with_mask else []
    atoms, adj, t = dense_concat_mols(EXAMPLES)
    truth = outcome(to_double(dense), [double((atoms, adj, *mask, t))])
    expected = outcome(dense, [(atoms, adj, *mask, t)])
    *batch, t = PADDED(EXAMPLES, device)
    batch = (*batch, *[device.send(m) for m in mask], t)
    assert_parity(outcome(model, [batch]), expected, truth)


def test_double_precision(device):
    dense = dense_model()
    model = sparsify(to_double(dense))
    model.to_device(device)
    for batches, ours in (
        (alone(EXAMPLES), concat_mols(EXAMPLES, device)),
        ([dense_concat_mols(EXAMPLES)], PADDED(EXAMPLES, device)),
    ):
        truth = outcome(to_double(dense), map(double, batches))
        actual = outcome(model, [ours])
        assert actual.keys() == truth.keys()
        for name in truth:
            assert relative_error(actual[name], truth[name]) < 1e-10, name


def loop(model, atoms, adj):
    """Return each layer's fingerprint of one molecule, a node at a time in float64."""

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
    """Column degrees, weights by degree, all biases for every node; upstream agrees."""
    dense = dense_model()
    expected = numpy.array([sum(loop(dense, *example[:2])) for example in EXAMPLES])
    theirs = numpy.concatenate([dense(*batch[:2]).array for batch in alone(EXAMPLES)])
    assert relative_error(theirs, expected) < 1e-5
    assert relative_error(sparsify(dense)(*concat_mols(EXAMPLES)[:2]).array, expected) < 1e-5
    degrees = numpy.concatenate([adj.sum(axis=0) for _, adj, _ in EXAMPLES])
    assert {0, 1, 2, 3, 4, 5, 6, 7} < set(degrees) and degrees.max() > 7


@pytest.mark.parametrize('n_update_layers', [1, 3])
def test_concatenated_layers(device, n_update_layers):
    """Upstream concatenates along an axis that is not there; the meaning is plain."""
    dense = dense_model(concat_hidden=True, n_update_layers=n_update_layers)
    with pytest.raises(chainer.utils.type_check.InvalidType):
        dense(*dense_concat_mols(EXAMPLES)[:2])
    expected = [numpy.concatenate(loop(dense, *example[:2])) for example in EXAMPLES]
    model = sparsify(dense)
    model.to_device(device)
    y = model(*concat_mols(EXAMPLES, device)[:2])
    assert y.shape == (len(SIZES), 3 * n_update_layers)
    assert relative_error(y.array, numpy.array(expected)) < 1e-5


def test_masked_padding_is_packed():
    # A virtual node sends nothing, and the readout leaves it out.
    model = sparsify(dense_model())
    expected = model(*concat_mols(EXAMPLES)[:2]).array
    atoms, adj = PADDED(EXAMPLES)[:2]
    assert relative_error(model(atoms, adj, mask_of(EXAMPLES)).array, expected) < 1e-5
    assert relative_error(model(atoms, adj).array, expected) > 0.1


def test_degrees_are_found_once_a_batch(monkeypatch):
    products = []
    bspmm = backend.bspmm

    def counted(adj, x, *args, **kwargs):
        products.append(x.shape[-1])
        return bspmm(adj, x, *args, **kwargs)

    monkeypatch.setattr(backend, 'bspmm', counted)
    sparsify(dense_model(n_update_layers=5))(*concat_mols(EXAMPLES)[:2])
    assert products.count(1) == 1 and products.count(16) == 5


def test_node_features_in_place_of_ids():
    model = sparsify(dense_model())
    for converter in (concat_mols, PADDED):
        atoms, adj, _ = converter(EXAMPLES)
        expected = model(atoms, adj).array
        numpy.testing.assert_array_equal(model(model.embed(atoms), adj).array, expected)


@pytest.mark.parametrize('options', [{}, {'max_degree': 3, 'n_update_layers': 2}], ids=str)
def test_constructor_makes_upstreams_parameters(options):
    models = []
    for kind in (NFP, DenseNFP):
        numpy.random.seed(1)
        models.append(kind(5, hidden_channels=7, n_atom_types=30, **options))
    ours, dense = models
    theirs = dict(dense.namedparams())
    assert [name for name, _ in ours.namedparams()] == [name for name, _ in dense.namedparams()]
    for name, parameter in ours.namedparams():
        numpy.testing.assert_array_equal(parameter.array, theirs[name].array)
    for attribute in (
        'out_dim',
        'hidden_channels',
        'max_degree',
        'n_degree_types',
        'n_update_layers',
        'concat_hidden',
    ):
        assert getattr(ours, attribute) == getattr(dense, attribute), attribute
        assert getattr(sparsify(dense), attribute) == getattr(dense, attribute), attribute


@pytest.mark.parametrize(
    'wrapper',
    [
        lambda: GraphConvPredictor(DenseNFP(4, hidden_channels=6), MLP(3, 8)),
        lambda: set_up_predictor('nfp', 6, 2, 3),
    ],
)
def test_swap_in_place_and_snapshots_both_ways(tmp_path, wrapper):
    check_swap_in_place_and_snapshots(tmp_path, wrapper, NFP, EXAMPLES, randomise)


def test_one_training_step_from_equal_state(device):
    check_one_training_step(device, dense_model(), molecules([10] * 12), rate=0.1)


@pytest.mark.parametrize('dtype', ['float16', 'mixed16'])
def test_half_precision(device, dtype):
    reference = sparsify(dense_model())
    with chainer.using_config('dtype', chainer.mixed16 if dtype == 'mixed16' else numpy.float16):
        model = sparsify(randomise(DenseNFP(3)))
        model.to_device(device)
        y = model(*concat_mols(EXAMPLES, device)[:2])
        chainer.functions.sum(y).backward()
    assert y.dtype == numpy.float16
    expected = reference(*concat_mols(EXAMPLES)[:2]).array
    assert relative_error(y.array, expected) < 2e-2
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.params())


# --- what is refused ---


@pytest.mark.parametrize(
    'options, message',
    [
        ({'n_update_layers': 0}, 'n_update_layers: expected at least 1, got 0'),
        ({'max_degree': -1}, 'max_degree: expected at least 0, got -1'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NFP(3, **options)


def test_several_relations_are_refused():
    examples = [(numpy.array([6, 6], 'i'), numpy.ones((2, 2, 2), 'f'))]
    with pytest.raises(ValueError, match=r'x: expected shape \(4, n_B\) .* 2 relations'):
        NFP(3)(*concat_mols(examples))
