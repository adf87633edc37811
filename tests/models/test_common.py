"""Rules that every model follows: upstream's constructor, inputs, float16, refusals."""

import gc
import inspect
import pickle
import weakref

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols

from chainer_bspmm import concat_mols, CSRConverter, densify, models, sparsify
from chainer_bspmm.links.sparse import Sparse
from tests.support import parity, relative_error
from tests.support.cases import pairs
from tests.support.devices import slow_unless
from tests.support.gradients import Calls
from tests.support.molecules import mask_of, molecules

CASES = parity.DEFAULTS
BASE = ('RSGCN', 'NFP', 'GIN', 'GGNN', 'RelGCN', 'RelGAT', 'GNNFiLM', 'MPNN')
MASKED = ('NFP', 'GIN', 'GGNN', 'GNNFiLM')
PADDED = CSRConverter('padded')

every_model = pytest.mark.parametrize('name', CASES)
# For tests of our base classes, whose code does not depend on the model.
quick_models = pytest.mark.parametrize(
    'name', [slow_unless(name in parity.QUICK_MODELS, name) for name in CASES]
)


def examples_of(name, sizes=(5, 1, 9)):
    return parity.examples_of(CASES[name]._replace(sizes=sizes))


def dense_model(name):
    return parity.initialised(CASES[name].make, examples_of(name))


def ours(name, **options):
    """Return a new model of ours with the options of its case."""
    return getattr(models, name)(**{**CASES[name].make.keywords, **options})


def packed(name, examples, device=-1):
    return parity.converters_of(CASES[name])['packed'](examples, device)


def alone(model, examples):
    """Return the results of upstream's model for each molecule by itself."""
    return numpy.concatenate([model(*dense_concat_mols([e])).array for e in examples])


def test_every_model_is_here():
    names = {kind.__name__ for kind in models.sparsify.__globals__['MODELS']}
    assert names == {*CASES, 'GWLEGraphConvModel'}


@every_model
def test_the_class_is_a_subclass_of_upstreams(name):
    kind = getattr(models, name)
    theirs = CASES[name].make.func
    assert issubclass(kind, theirs) and kind.upstream is theirs
    assert inspect.signature(kind) == inspect.signature(theirs)
    assert kind.__module__.startswith('chainer_bspmm.models.') and kind.__name__ == name


@every_model
def test_the_constructor_is_upstreams(name):
    """The same seed gives our model and upstream's equal parameters; sparsify makes them alike."""
    made = []
    for make in (lambda: ours(name), CASES[name].make):
        numpy.random.seed(3)
        made.append(make())
    model, dense = made
    kinds = [type(link) for link in model.links()]
    assert not set(kinds) & {kind.upstream for kind in kinds if issubclass(kind, Sparse)}
    sparsify(dense)
    assert kinds == [type(link) for link in dense.links()]
    assert [n for n, _ in model.namedparams()] == [n for n, _ in dense.namedparams()]
    for (path, a), (_, b) in zip(model.namedparams(), dense.namedparams()):
        assert (a.array is None) == (b.array is None), path
        if a.array is not None:
            numpy.testing.assert_array_equal(a.array, b.array, path)
    attributes = [vars(m).keys() - {'_within_init_scope'} for m in made]
    assert attributes[0] == attributes[1]
    for attribute in ('n_update_layers', 'concat_hidden', 'dropout_ratio', 'weight_tying'):
        assert getattr(model, attribute, None) == getattr(dense, attribute, None)


@quick_models
def test_densify_undoes_sparsify(name):
    """densify returns upstream's model, whose results have the same bits as before."""
    examples = examples_of(name)
    dense = dense_model(name)
    kinds = [type(link) for link in dense.links()]
    params = {path: id(param) for path, param in dense.namedparams()}
    batch = dense_concat_mols(examples)
    with chainer.using_config('train', False):
        expected = dense(*batch).array
        assert sparsify(dense) is dense and type(dense) is getattr(models, name)
        assert not kinds == [type(link) for link in dense.links()]
        dense(*packed(name, examples))
        again = pickle.loads(pickle.dumps(dense))
        assert densify(dense) is dense
        assert kinds == [type(link) for link in dense.links()]
        assert params == {path: id(param) for path, param in dense.namedparams()}
        for model in (dense, densify(again)):
            numpy.testing.assert_array_equal(model(*batch).array, expected)


@every_model
def test_snapshots_load_both_ways(tmp_path, name):
    examples = examples_of(name)
    dense = dense_model(name)
    fresh = ours(name)
    again = CASES[name].make()
    with chainer.using_config('train', False):
        expected = alone(dense, examples)
        chainer.serializers.save_npz(tmp_path / 'dense.npz', dense)
        chainer.serializers.load_npz(tmp_path / 'dense.npz', fresh)
        if hasattr(dense, 'first_mlp'):  # ours has zeros there
            assert not fresh.first_mlp.layers[0].W.array.any()
        assert relative_error(fresh(*packed(name, examples)).array, expected) < 1e-5
        chainer.serializers.save_npz(tmp_path / 'sparse.npz', fresh)
        chainer.serializers.load_npz(tmp_path / 'sparse.npz', again)
        numpy.testing.assert_array_equal(alone(again, examples), expected)
    with numpy.load(tmp_path / 'sparse.npz') as snapshot:
        assert all(snapshot[key].dtype != object for key in snapshot.files)


@every_model
def test_a_model_that_was_never_called(name):
    """The first call makes the same parameters as upstream's first call."""
    examples = examples_of(name)
    made = []
    for make, batch in (
        (CASES[name].make, dense_concat_mols(examples)),
        (lambda: ours(name), packed(name, examples)),
    ):
        numpy.random.seed(1)
        made.append(make())
        made[-1](*batch)
    for (path, a), (_, b) in zip(*[model.namedparams() for model in made]):
        if b.array is not None and a.array is not None:
            numpy.testing.assert_array_equal(a.array, b.array, path)


@pytest.mark.parametrize('name', ['GGNN', 'MPNN', 'GGNN_GWM', 'RSGCN_GWM'])
def test_calls_do_not_depend_on_the_calls_before(device, name):
    model = parity.swapped(dense_model(name), device)
    first = packed(name, examples_of(name), device)
    expected = model(*first).array
    model(*packed(name, examples_of(name, (3, 4)), device))  # has another number of nodes
    assert (model(*first).array == expected).all()


@quick_models
def test_nothing_that_is_kept_with_a_batch_refers_back_to_it(device, name):
    """A cycle would keep device memory until the garbage collector finds it."""
    model = parity.swapped(dense_model(name), device)
    batch = parity.converters_of(CASES[name])['folded'](examples_of(name), device)
    adj = weakref.ref(batch[1])
    gc.disable()
    try:
        y = model(*batch)
        y.grad = y.array
        y.backward()
        del batch, y
        getattr(model, 'reset_state', int)()  # the state holds the graph of the last call
        assert adj() is None
    finally:
        gc.enable()


@pytest.mark.parametrize('name', [name for name in BASE if name != 'RelGCN'] + ['GGNN_GWM'])
def test_features_instead_of_ids(name):
    model = sparsify(dense_model(name))
    with chainer.using_config('train', False):
        for converter in (concat_mols, PADDED):
            atoms, *rest = converter(examples_of(name))
            expected = model(atoms, *rest).array
            features = model.embed(atoms).array
            numpy.testing.assert_array_equal(model(features, *rest).array, expected)


@pytest.mark.parametrize('name', MASKED)
def test_is_real_node(device, name):
    """A mask may have any dtype; a padded batch with masked phantom atoms equals a packed one."""
    dense, examples = dense_model(name), examples_of(name)
    sizes = [len(example[0]) for example in examples]
    model = parity.swapped(dense, device)
    batch = PADDED(examples, device)
    inputs = dense_concat_mols(examples)
    expected = dense(*inputs, mask_of(sizes)).array
    for dtype in 'fi?d':
        for mask in (mask_of(sizes, dtype), mask_of(sizes, dtype).ravel()):
            assert relative_error(model(*batch, device.send(mask)).array, expected) < 1e-5
    assert relative_error(model(*packed(name, examples, device)).array, expected) < 1e-5
    assert relative_error(model(*batch).array, expected) > 1e-3


@pytest.mark.parametrize('name', MASKED + ('GGNN_GWM', 'NFP_GWM', 'GIN_CWLE'))
def test_is_real_node_in_packed_batches(device, name):
    """The readout leaves out masked nodes, here the last node of every molecule."""
    dense, examples = dense_model(name), examples_of(name)
    keep = [(numpy.arange(len(e[0])) < max(len(e[0]) - 1, 1)).astype('f') for e in examples]
    expected = numpy.concatenate(
        [
            dense(*dense_concat_mols([example]), is_real_node=mask[None]).array
            for example, mask in zip(examples, keep)
        ]
    )
    model = parity.swapped(dense, device)
    mask = device.send(numpy.concatenate(keep))
    actual = model(*packed(name, examples, device), is_real_node=mask)
    assert relative_error(actual.array, expected) < 1e-5


@pytest.mark.parametrize(
    'name, dtype, layout',
    pairs(
        BASE[:-1] + ('GGNN_GWM', 'RSGCN_GWM', 'GIN_CWLE'),
        ['float16', 'mixed16'],
        ['packed', 'folded'],
    ),
)
def test_half_precision(device, name, dtype, layout):
    """A whole model in one of Chainer's float16 modes is compared with the float32 model."""
    examples = examples_of(name)
    converter = parity.converters_of(CASES[name])[layout]
    with chainer.using_config('dtype', chainer.mixed16 if dtype == 'mixed16' else numpy.float16):
        numpy.random.seed(0)
        model = ours(name)
        model.to_device(device)
        batch = tuple(
            x.astype('e') if getattr(x, 'dtype', None) == numpy.float32 else x
            for x in converter(examples, device)
        )
        y = model(*batch)
        chainer.functions.sum(y).backward()
    reference = ours(name)
    reference(*converter(examples, -1))
    halves = dict(model.namedparams())
    for path, parameter in reference.namedparams():
        parameter.array[...] = cuda.to_cpu(halves[path].array)
    expected = reference(*converter(examples, -1)).array
    assert y.dtype == numpy.float16
    assert relative_error(y.array, expected) < 2e-2  # about twenty roundings of 2**-11
    with_gradient = [p for p in model.params() if p.grad is not None]
    assert with_gradient and all(p.grad.dtype == p.dtype for p in with_gradient)


NODES = {
    'GGNN': (['GraphLinear', 'GRUStep'], ['GatedLinear', 'SegmentSum']),
    'GNNFiLM': (['EdgeFiLM', 'LayerNorm'], ['GatedLinear', 'SegmentSum']),
    'RelGAT': (['LinearFunction', 'RelationAttention'], ['GatedLinear', 'SegmentSum']),
    'RelGCN': (['GraphLinear'], ['GatedLinear', 'SegmentSum']),  # with activations
}


def labels_of_nodes(model, *inputs):
    with Calls() as calls:
        model(*inputs)
    return calls.labels


@pytest.mark.parametrize('name', NODES)
def test_nodes_are_few(name):
    update, readout = NODES[name]
    of_relgcn = {'hidden_channels': [4] * 6, 'scale_adj': True}
    options = of_relgcn if name == 'RelGCN' else {'n_update_layers': 5}
    labels = labels_of_nodes(ours(name, **options), *concat_mols(examples_of(name)))
    assert labels[1:] == update * 5 + readout


@pytest.mark.parametrize('name', [name for name in CASES if '_' in name])
def test_a_third_of_the_nodes_is_saved(name):
    dense, examples = dense_model(name), examples_of(name)
    theirs = labels_of_nodes(dense, *dense_concat_mols(examples))
    assert len(labels_of_nodes(sparsify(dense), *packed(name, examples))) < 2 / 3 * len(theirs)


@pytest.mark.parametrize('name', BASE + ('GGNN_GWM', 'GGNN_CWLE', 'GGNN_GWLE'))
def test_dense_adjacency_is_refused_with_advice(name):
    message = (
        'adj: expected a BatchedCSR, got ndarray of shape .*concat_mols, arrays with '
        'BatchedCSR.from_dense'
    )
    with pytest.raises(TypeError, match=message):
        ours(name)(*dense_concat_mols(examples_of(name)))


@pytest.mark.parametrize('name', [name for name in BASE if CASES[name].n_relations > 1])
def test_other_number_of_relations(name):
    n = CASES[name].n_relations
    batch = concat_mols(molecules((3,), n_relations=n - 1))[:2]
    message = 'adj: expected %d relations, .* got <BatchedCSR.* %d relations?.*>' % (n, n - 1)
    with pytest.raises(ValueError, match=message):
        ours(name)(*batch)


@pytest.mark.parametrize('name', [name for name in BASE if CASES[name].n_relations == 1])
def test_several_relations_for_one(name):
    batch = concat_mols(molecules((2,), n_relations=2))[:2]
    with pytest.raises(
        ValueError, match='adj: expected .* 2 relations, 4 entries, float32 on @numpy>'
    ):
        ours(name)(*batch)


@pytest.mark.parametrize('name', MASKED)
@pytest.mark.parametrize(
    'mask, error, message',
    [
        ([1, 1, 1], TypeError, 'is_real_node: expected an array, got list'),
        (
            numpy.ones(4, 'f'),
            ValueError,
            r'is_real_node: expected shape \(3,\) .* got \(4,\); labels are not inputs of a '
            'predictor',
        ),
        (
            numpy.ones((2, 2), 'f'),
            ValueError,
            r'is_real_node: expected shape \(3,\) to go with .* not inputs of a predictor',
        ),
    ],
)
def test_mask_that_does_not_fit(name, mask, error, message):
    examples = examples_of(name, (1, 2))
    with pytest.raises(error, match=message):
        ours(name)(*packed(name, examples), mask)


@pytest.mark.parametrize('name', MASKED)
def test_mask_that_does_not_fit_a_padded_batch(name):
    examples = examples_of(name, (1, 2))
    with pytest.raises(
        ValueError,
        match=r'is_real_node: expected shape \(4,\) or \(2, 2\) .* got \(2, 3\); labels are '
        'not inputs of a predictor',
    ):
        ours(name)(*PADDED(examples), numpy.ones((2, 3)))


@pytest.mark.parametrize(
    'name, part',
    [
        ('GGNN', 'readout_layers.0'),
        ('GIN', 'update_layers.0'),
        ('GNNFiLM', 'readout_layers.0'),
        ('RelGAT', 'readout_layers.0'),
        ('RelGCN', 'rgcn_readout'),
        ('NFP', 'layers.1'),
        ('GGNN_GWM', 'gwm'),
    ],
)
def test_a_part_of_ones_own(name, part):
    """If a part has a user's class, nothing is swapped, and the message names the part."""
    dense = CASES[name].make()
    parent, _, index = part.partition('.')
    own = chainer.links.Linear(3)
    if index:
        getattr(dense, parent)[int(index)] = own
    else:
        delattr(dense, part)
        with dense.init_scope():
            setattr(dense, part, own)
    kinds = [type(link) for link in dense.links()]
    with pytest.raises(
        ValueError, match=r'model\.1\.%s: expected .*, got <.*Linear object at .*>' % part
    ):
        sparsify(chainer.ChainList(CASES[name].make(), dense))
    assert kinds == [type(link) for link in dense.links()]
