"""RSGCN against Chainer Chemistry's: packed, padded, one training step, whole trainings."""

import copy

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout as DenseReadout
from chainer_chemistry.models import RSGCN as DenseRSGCN

from benchmarks.parity import double
from benchmarks.parity import to_double
from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm.models import RSGCN
from chainer_bspmm.models import sparsify
from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error


def molecule(rng, n, n_labels=3):
    """Return a chain of n distinct atoms with random extra bonds, normalised as RSGCN's input.

    Random values break ties: no two atoms are equivalent, so a maximum has one winner.
    """
    bonds = numpy.eye(n) + numpy.diag(numpy.ones(max(n - 1, 0)), 1)[:n, :n]
    bonds += rng.uniform(size=(n, n)) < 0.1
    adj = numpy.minimum(bonds + bonds.T, 1) * rng.uniform(0.5, 1.5, (n, n))
    adj = (adj + adj.T) / numpy.sqrt(adj.sum(0) * adj.sum(1)[:, None])
    return (
        rng.randint(1, 20, n).astype('i'),
        adj.astype('f'),
        rng.uniform(-1, 1, n_labels).astype('f'),
    )


def molecules(sizes, seed=0):
    rng = numpy.random.RandomState(seed)
    return [molecule(rng, n) for n in sizes]


SIZES = [9, 1, 17, 4, 12, 2, 30, 8]

# Every option of Chainer Chemistry's constructor, dropout apart: its random numbers depend on the
# shape of the batch.
OPTIONS = {
    'defaults': {},
    'one layer': {'n_update_layers': 1},
    'wide': {'hidden_channels': 33, 'out_dim': 7, 'n_update_layers': 3},
    'max': {'readout': 'max'},
    'summax': {'readout': 'summax'},
    'activated readout': {'readout': 'sum', 'activation': chainer.functions.tanh},
    'batch norm': {'use_batch_norm': True},
    'batch norm, max': {'use_batch_norm': True, 'readout': 'max'},
    'atom types': {'n_atom_types': 25},
}


def dense_model(readout='sum', activation=None, out_dim=3, dropout_ratio=0.0, seed=0, **options):
    numpy.random.seed(seed)
    model = DenseRSGCN(
        out_dim, readout=DenseReadout(readout, activation), dropout_ratio=dropout_ratio, **options
    )
    with chainer.using_config('train', False):  # gives lazy parameters their shape
        model(numpy.ones((1, 1), 'i'), numpy.ones((1, 1, 1), 'f'))
    model.cleargrads()
    return model


def outcome(model, batches):
    """Return output and parameter gradients over batches, host arrays by name."""
    model.cleargrads()
    outputs = []
    for *inputs, _ in batches:
        y = model(*inputs)
        weight = numpy.linspace(0.5, 1.5, y.shape[1]).astype(y.dtype)
        chainer.functions.sum(y * y * model.xp.asarray(weight)).backward()
        outputs.append(cuda.to_cpu(y.array))
    result = {name: cuda.to_cpu(parameter.grad) for name, parameter in model.namedparams()}
    result['output'] = numpy.concatenate(outputs)
    return result


def alone(examples):
    return [dense_concat_mols([example]) for example in examples]


def assert_parity(actual, dense, truth):
    """Each result within max(1e-5, 3 x the dense model's own error) of the float64 truth."""
    assert actual.keys() == dense.keys() == truth.keys()
    for name in truth:
        bound = max(1e-5, 3 * relative_error(dense[name], truth[name]))
        assert relative_error(actual[name], truth[name]) <= bound, name


@pytest.mark.parametrize('name', [name for name in OPTIONS if 'batch norm' not in name])
def test_packed_is_every_molecule_alone(device, name):
    examples = molecules(SIZES)
    dense = dense_model(**OPTIONS[name])
    truth = outcome(to_double(dense), map(double, alone(examples)))
    expected = outcome(dense, alone(examples))
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    assert_parity(outcome(model, [concat_mols(examples, device)]), expected, truth)


@pytest.mark.parametrize('name', OPTIONS)
@pytest.mark.parametrize('train', [False, True])
def test_padded_is_the_dense_batch(device, name, train):
    examples = molecules(SIZES)
    dense = dense_model(**OPTIONS[name])
    # A maximum over padded rows that are all alike has many winners: there only values compare.
    converter = CSRConverter(layout='padded')
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    with chainer.using_config('train', train):
        truth = outcome(to_double(dense), [double(dense_concat_mols(examples))])
        expected = outcome(dense, [dense_concat_mols(examples)])
        actual = outcome(model, [converter(examples, device)])
    assert_parity(actual, expected, truth)
    if train and 'batch norm' in name:
        for ours, theirs in zip(model.bnorms, dense.bnorms):
            for statistic in ('avg_mean', 'avg_var', 'N'):
                assert (
                    relative_error(
                        numpy.asarray(cuda.to_cpu(getattr(ours, statistic))),
                        numpy.asarray(getattr(theirs, statistic)),
                    )
                    < 1e-5
                )


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', ['batch norm', 'batch norm, max'])
def test_packed_batch_norm_where_nothing_is_padded(device, name, train):
    # With molecules of one size packed and dense batches hold the same rows.
    examples = molecules([11] * 6)
    dense = dense_model(**OPTIONS[name])
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    with chainer.using_config('train', train):
        truth = outcome(to_double(dense), [double(dense_concat_mols(examples))])
        expected = outcome(dense, [dense_concat_mols(examples)])
        assert_parity(outcome(model, [concat_mols(examples, device)]), expected, truth)


def test_packed_batch_norm_counts_real_atoms_only():
    examples = molecules(SIZES)
    model = sparsify(dense_model(use_batch_norm=True))
    seen = []
    forward = chainer.links.BatchNormalization.forward

    class Spy(chainer.LinkHook):
        name = 'Spy'

        def forward_preprocess(self, args):
            if isinstance(args.link, chainer.links.BatchNormalization):
                seen.append(args.args[0].shape[0])

    with Spy():
        model(*concat_mols(examples)[:2])
        assert seen == [sum(SIZES)] * 4
        model(*CSRConverter('padded')(examples)[:2])
        assert seen[4:] == [30 * len(SIZES)] * 4
    assert chainer.links.BatchNormalization.forward is forward


def test_prediction_does_not_depend_on_the_rest_of_the_batch(device):
    examples = molecules(SIZES)
    model = sparsify(dense_model())
    model.to_device(device)
    together = cuda.to_cpu(model(*concat_mols(examples, device)[:2]).array)
    for example, row in zip(examples, together):
        single = cuda.to_cpu(model(*concat_mols([example], device)[:2]).array)
        assert relative_error(row, single[0]) < 1e-5


@pytest.mark.parametrize('optimizer', [chainer.optimizers.Adam, chainer.optimizers.MomentumSGD])
def test_one_training_step_from_equal_state(device, optimizer, tmp_path):
    """Equal parameters, optimizer state and batch before; equal parameters after one more step."""
    examples = molecules([10] * 12)

    def step(model, batch, state=None):
        *inputs, t = batch
        own = optimizer().setup(model)
        if state is not None:
            chainer.serializers.load_npz(state, own)
        own.update(lambda: chainer.functions.mean_squared_error(model(*inputs), t))
        return own

    def after(model):
        return {name: cuda.to_cpu(p.array) for name, p in model.namedparams()}

    dense = dense_model(use_batch_norm=True)
    state = tmp_path / 'state.npz'
    chainer.serializers.save_npz(state, step(dense, dense_concat_mols(examples)))
    truth, sparse = to_double(dense), sparsify(copy.deepcopy(dense))
    sparse.to_device(device)
    step(truth, double(dense_concat_mols(examples)), state)
    step(dense, dense_concat_mols(examples), state)
    assert step(sparse, concat_mols(examples, device), state).t == 2
    assert_parity(after(sparse), after(dense), after(truth))


def train(model, converter, examples, n_epochs, seed):
    rng = numpy.random.RandomState(seed)
    opt = chainer.optimizers.Adam(alpha=0.02).setup(model)
    for _ in range(n_epochs):
        order = rng.permutation(len(examples))
        for start in range(0, len(order), 16):
            *inputs, t = converter([examples[i] for i in order[start : start + 16]], -1)
            opt.update(lambda *a, t=t: chainer.functions.mean_squared_error(model(*a), t), *inputs)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        *inputs, t = converter(examples, -1)
        return float(chainer.functions.mean_squared_error(model(*inputs), t).array)


def test_short_trainings_end_within_the_spread_of_seeds():
    # A learnable target: the number of atoms of an element, and of all atoms.
    examples = [
        (a, m, numpy.array([len(a) / 10.0, (a < 10).sum() / 5.0], 'f'))
        for a, m, _ in molecules(list(range(2, 26)) * 4, seed=3)
    ]
    dense, sparse = [], []
    for seed in range(4):
        model = dense_model(out_dim=2, n_update_layers=2, dropout_ratio=0.02, seed=seed)
        sparse.append(train(sparsify(copy.deepcopy(model)), concat_mols, examples, 60, seed))
        dense.append(train(model, dense_concat_mols, examples, 60, seed))
    baseline = numpy.concatenate([e[2][None] for e in examples]).var(axis=0).mean()
    assert max(dense + sparse) < 0.2 * baseline  # both have learnt
    spread = max(dense) - min(dense) + max(sparse) - min(sparse)
    assert abs(numpy.mean(dense) - numpy.mean(sparse)) <= spread


@pytest.mark.parametrize('seed', range(3))
def test_constructor_makes_upstreams_parameters(seed):
    options = dict(out_dim=5, hidden_channels=7, n_update_layers=3, use_batch_norm=True)
    numpy.random.seed(seed)
    ours = RSGCN(**options)
    numpy.random.seed(seed)
    dense = DenseRSGCN(**options)
    theirs = dict(dense.namedparams())
    assert [name for name, _ in ours.namedparams()] == [name for name, _ in dense.namedparams()]
    for name, parameter in ours.namedparams():
        numpy.testing.assert_array_equal(parameter.array, theirs[name].array)
    for attribute in ('out_dim', 'hidden_channels', 'n_update_layers', 'dropout_ratio'):
        assert getattr(ours, attribute) == getattr(dense, attribute)


def test_dropout_is_applied_in_training_only():
    examples = molecules(SIZES)
    model = sparsify(dense_model(dropout_ratio=0.5))
    batch = concat_mols(examples)[:2]
    first, second = model(*batch).array, model(*batch).array
    assert (first != second).any()
    with chainer.using_config('train', False):
        assert (model(*batch).array == model(*batch).array).all()


def test_node_features_in_place_of_ids():
    examples = molecules(SIZES)
    model = sparsify(dense_model())
    for converter in (concat_mols, CSRConverter('padded')):
        atoms, adj, _ = converter(examples)
        expected = model(atoms, adj).array
        numpy.testing.assert_array_equal(model(model.embed(atoms), adj).array, expected)


def test_readout_of_ones_own():
    model = RSGCN(4, readout=lambda h, adj: h[adj.row_offsets[:-1]])
    assert model(*concat_mols(molecules(SIZES))[:2]).shape == (len(SIZES), 4)


def test_double_precision(device):
    examples = molecules(SIZES)
    dense = dense_model()
    truth = outcome(to_double(dense), map(double, alone(examples)))
    model = sparsify(to_double(dense))
    model.to_device(device)
    actual = outcome(model, [concat_mols(examples, device)])  # float32 adjacency is converted
    for name in truth:
        assert relative_error(actual[name], truth[name]) < 1e-10, name


@pytest.mark.parametrize('dtype', ['float16', 'mixed16'])
def test_half_precision(device, dtype):
    """The whole model in Chainer's float16 modes, against the float32 model's answer."""
    examples = molecules(SIZES)
    reference = sparsify(dense_model(hidden_channels=16))
    with chainer.using_config('dtype', chainer.mixed16 if dtype == 'mixed16' else numpy.float16):
        model = sparsify(dense_model(hidden_channels=16))
        model.to_device(device)
        atoms, adj, _ = concat_mols(examples, device)
        y = model(atoms, adj)
        chainer.functions.sum(y).backward()
    expected = reference(*concat_mols(examples)[:2]).array
    assert y.dtype == numpy.float16
    assert relative_error(y.array, expected) < 2e-2  # about 20 roundings of 2**-11 in a row
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.params())


# --- what is refused ---


def test_atom_id_outside_of_the_embedding(monkeypatch):
    model = RSGCN(3, n_atom_types=10)
    atoms, adj, _ = concat_mols([(numpy.array([9, 10], 'i'), numpy.eye(2, dtype='f'), 0.0)])
    message = r'atom_array: expected ids in \[0, 10\), the size of the embedding, got 10'
    with pytest.raises(ValueError, match=message):
        model(atoms, adj)
    # The batch's stored maximum is believed: nothing is read from the array.
    with pytest.raises(ValueError, match=message):
        model(atoms * 0, adj)
    unknown = BatchedCSR.from_matrices([numpy.eye(2)])
    with pytest.raises(ValueError, match=message):
        model(atoms, unknown)
    with pytest.raises(ValueError, match='got -1'):
        model(numpy.array([0, -1], 'i'), unknown)


def test_atoms_that_are_no_array():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))])
    with pytest.raises(TypeError, match='atom_array: expected an array, got list'):
        RSGCN(3)([6, 6], adj)


@pytest.mark.parametrize(
    'atoms, layout, message',
    [
        (numpy.zeros((4, 5), 'f'), 'packed', r'atom_array: expected features of 32 channels, .* 5'),
        (numpy.zeros(3, 'i'), 'packed', r'atom_array: expected shape \(4,\) .* got \(3,\)'),
        (numpy.zeros((2, 2), 'i'), 'packed', r'atom_array: expected shape \(4,\) .* got \(2, 2\)'),
        (numpy.zeros(4, 'i'), 'padded', r'atom_array: expected shape \(2, 2\) .* got \(4,\)'),
        (numpy.zeros(4, 'f'), 'packed', r'atom_array: expected shape \(4,\) .* got \(4,\)'),
    ],
)
def test_atoms_that_do_not_fit(atoms, layout, message):
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))] * 2, layout)
    with pytest.raises(ValueError, match=message):
        RSGCN(3)(atoms, adj)


def test_dense_adjacency_is_refused_with_advice():
    message = r'adj: expected a BatchedCSR or BatchedCOO, got ndarray of shape .*concat_mols'
    with pytest.raises(TypeError, match=message):
        RSGCN(3)(*dense_concat_mols(molecules(SIZES))[:2])


def test_number_of_layers():
    with pytest.raises(ValueError, match='n_update_layers: expected at least 1, got 0'):
        RSGCN(3, n_update_layers=0)
