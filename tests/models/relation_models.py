"""What the tests of the models with several relations share: molecules, parity in both layouts."""

import copy

import numpy

import chainer
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols

from benchmarks.parity import double
from benchmarks.parity import to_double
from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm import sparsify
from tests.models.test_rsgcn import assert_parity
from tests.support import relative_error

SIZES = [9, 1, 17, 4, 12, 2, 30, 8]

# Of the models whose updates have no options of their own.
OPTIONS = {
    'defaults': {},
    'untied': {'weight_tying': False},
    'concatenated': {'concat_hidden': True, 'n_update_layers': 3},
    'untied, concatenated': {'weight_tying': False, 'concat_hidden': True},
    'one update': {'n_update_layers': 1},
    'activated': {'activation': chainer.functions.tanh},
    'wide': {'hidden_channels': 33, 'n_update_layers': 2},
    'two relations': {'n_edge_types': 2},
    'one relation': {'n_edge_types': 1},
    'atom types': {'n_atom_types': 25},
}


def molecule(rng, n, n_relations=4, n_labels=3):
    """Return random atoms and bonds of several kinds; not symmetric, so that a swap of sender and
    receiver shows. Some atoms have no bond."""
    kind = rng.randint(0, n_relations, (n, n))
    bonds = (rng.uniform(size=(n, n)) < 2.5 / max(n, 3)) * rng.uniform(0.5, 1.5, (n, n))
    adj = numpy.stack([bonds * (kind == r) for r in range(n_relations)])
    return (
        rng.randint(1, 20, n).astype('i'),
        adj.astype('f'),
        rng.uniform(-1, 1, n_labels).astype('f'),
    )


def molecules(sizes, seed=0, n_relations=4):
    rng = numpy.random.RandomState(seed)
    return [molecule(rng, n, n_relations) for n in sizes]


def initialised(model, n_relations=4):
    """Give lazy parameters their shape, and biases values: they start at 0, where none shows."""
    with chainer.no_backprop_mode():
        model(*dense_concat_mols(molecules([2], n_relations=n_relations))[:2])
    rng = numpy.random.RandomState(5)
    for name, parameter in sorted(model.namedparams()):
        if name.endswith('/b'):
            parameter.array[...] = rng.uniform(-0.5, 0.5, parameter.shape)
    model.cleargrads()
    return model


def randomised(model):
    """Give every parameter random values: norms start at 1 and 0, where mistakes hide."""
    rng = numpy.random.RandomState(0)
    for name, parameter in sorted(model.namedparams()):
        scale = 0.3 if name.endswith('/gamma') else 1 / parameter.shape[-1] ** 0.5
        parameter.array[...] = rng.normal(scale=scale, size=parameter.shape) + (
            name.endswith('/gamma')
        )
    return model


def outcome(model, batches):
    """Return output and parameter gradients over batches, host arrays by name; None for none.

    A bias of one number (RelGAT's attention) comes together with its W: its gradient is a sum that
    nearly cancels, in which float32 errs by up to 7e-5, upstream's no less than ours. In float64,
    compared to 1e-10, it still shows.
    """
    model.cleargrads()
    outputs = []
    for inputs in batches:
        y = model(*inputs)
        weight = numpy.linspace(0.5, 1.5, y.shape[1]).astype(y.dtype)
        chainer.functions.sum(y * y * model.xp.asarray(weight)).backward()
        outputs.append(cuda.to_cpu(y.array))
    result = {name: cuda.to_cpu(p.grad) for name, p in model.namedparams() if p.grad is not None}
    for name in [name for name, gradient in result.items() if gradient.size == 1]:
        W = name[:-1] + 'W'
        if name.endswith('/b') and W in result:
            result[W] = numpy.append(result[W], result.pop(name))
    result['output'] = numpy.concatenate(outputs)
    return result


def assert_layouts_agree(dense, device, examples, prepare=lambda model, batches: (model, batches)):
    """Compare the sparse twin with a dense model, packed and padded, in float32 and float64.

    `prepare` turns model and batches into what gives the float64 truth, where the dense model
    cannot run in float64 as it is.
    """
    dense = copy.deepcopy(dense)
    for link in dense.links():
        if isinstance(link, chainer.links.GRU) and link.W_r.W.array is None:
            link.W_r.W.initialize(link.W.W.shape)  # never used, as it never had a state
    layouts = [
        (concat_mols, [dense_concat_mols([example])[:2] for example in examples]),
        (CSRConverter(layout='padded'), [dense_concat_mols(examples)[:2]]),
    ]
    for converter, batches in layouts:
        truth = outcome(*prepare(to_double(dense), list(map(double, batches))))
        expected = outcome(copy.deepcopy(dense), batches)
        model = sparsify(copy.deepcopy(dense))
        model.to_device(device)
        batch = converter(examples, device)[:2]
        assert_parity(outcome(model, [batch]), expected, truth)
        model = sparsify(to_double(dense))
        model.to_device(device)
        actual = outcome(model, [batch])  # float32 adjacency is converted
        assert actual.keys() == truth.keys()
        for name in truth:
            assert relative_error(actual[name], truth[name]) < 1e-10, name


def assert_same_constructor(ours_class, theirs_class, options, attributes):
    """The same seed gives the same parameters in the same order, and the same attributes."""
    models = []
    for kind in (ours_class, theirs_class):
        numpy.random.seed(3)
        models.append(kind(**options))
    ours, theirs = models
    assert [n for n, _ in ours.namedparams()] == [n for n, _ in theirs.namedparams()]
    for (name, a), (_, b) in zip(ours.namedparams(), theirs.namedparams()):
        assert (a.array is None) == (b.array is None), name
        if a.array is not None:
            numpy.testing.assert_array_equal(a.array, b.array)
    for attribute in attributes:
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute


def assert_masks_agree(dense, device, examples):
    """Padded with the mask, Chainer Chemistry gives what the packed batch gives without one."""
    sizes = numpy.array([len(atoms) for atoms, _, _ in examples])
    atoms, adj, _ = dense_concat_mols(examples)
    mask = (numpy.arange(atoms.shape[1]) < sizes[:, None]).astype('f')
    expected = dense(atoms, adj, mask).array
    model = sparsify(copy.deepcopy(dense))
    model.to_device(device)
    padded = CSRConverter('padded')(examples, device)[:2]
    for given in (mask, mask.ravel(), mask.astype('i'), mask != 0):
        assert relative_error(model(*padded, device.send(given)).array, expected) < 1e-5
    packed = concat_mols(examples, device)[:2]
    assert relative_error(model(*packed).array, expected) < 1e-5
    # In packed layout it can leave out nodes as well: the last of every molecule.
    keep = numpy.concatenate([numpy.arange(n) < n - 1 for n in sizes]).astype('f')
    mask[numpy.arange(len(sizes)), sizes - 1] = 0
    expected = dense(atoms, adj, mask).array
    assert relative_error(model(*packed, device.send(keep)).array, expected) < 1e-5


def assert_features_stand_for_ids(model, examples):
    """The embedded ids, given in place of the ids, give the same."""
    for converter in (concat_mols, CSRConverter('padded')):
        atoms, adj, _ = converter(examples)
        expected = model(atoms, adj).array
        numpy.testing.assert_array_equal(model(model.embed(atoms).array, adj).array, expected)


def labels_of_nodes(model, *inputs):
    """Return the labels of the nodes that a model makes of its inputs, in order."""
    labels = []

    class Labels(chainer.FunctionHook):
        name = 'Labels'

        def forward_preprocess(self, function, _):
            labels.append(function.label)

    with Labels():
        model(*inputs)
    return labels


def assert_snapshots_load_both_ways(make, tmp_path, examples, initialise=initialised):
    def predictions(model, converter):
        with chainer.using_config('train', False):
            return numpy.concatenate([model(*converter([e])[:2]).array for e in examples])

    dense, sparse, again = initialise(make()), sparsify(make()), make()
    chainer.serializers.save_npz(tmp_path / 'dense.npz', dense)
    chainer.serializers.load_npz(tmp_path / 'dense.npz', sparse)
    expected = predictions(dense, dense_concat_mols)
    assert relative_error(predictions(sparse, concat_mols), expected) < 1e-5
    chainer.serializers.save_npz(tmp_path / 'sparse.npz', sparse)
    chainer.serializers.load_npz(tmp_path / 'sparse.npz', again)
    numpy.testing.assert_array_equal(predictions(again, dense_concat_mols), expected)


def assert_half_precision(make, device, dtype):
    """Compare the whole model in one of Chainer's float16 modes with the float32 model's answer."""
    examples = molecules(SIZES)
    numpy.random.seed(0)
    reference = make()
    with chainer.using_config('dtype', chainer.mixed16 if dtype == 'mixed16' else numpy.float16):
        model = make()
        model.to_device(device)
        y = model(*concat_mols(examples, device)[:2])
        chainer.functions.sum(y).backward()
    reference(*concat_mols(examples)[:2])  # gives lazy parameters their shape
    for name, parameter in reference.namedparams():
        if parameter.array is not None:
            parameter.array[...] = cuda.to_cpu(dict(model.namedparams())[name].array)
    expected = reference(*concat_mols(examples)[:2])
    assert y.dtype == numpy.float16
    assert relative_error(y.array, expected.array) < 2e-2  # some twenty roundings of 2**-11
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.params())
