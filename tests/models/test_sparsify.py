"""sparsify: where a model may sit, what stays the same, what is refused."""

import copy
import pickle

import numpy
import pytest

import chainer
from chainer.link_hooks import SpectralNormalization
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import RSGCNUpdate as DenseRSGCNUpdate
from chainer_chemistry import models
from chainer_chemistry.links import update
from chainer_chemistry.models import MLP
from chainer_chemistry.models import RSGCN as DenseRSGCN
from chainer_chemistry.models import SchNet
from chainer_chemistry.models.gwm.gwm import GWM
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor

from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm import sparsify
from chainer_bspmm.links import RSGCNUpdate
from chainer_bspmm.models import RSGCN
from tests.models.test_rsgcn import molecules
from tests.support import relative_error

EXAMPLES = molecules([5, 9, 3])


def rsgcn(**options):
    return DenseRSGCN(4, hidden_channels=6, dropout_ratio=0.0, **options)


class OwnChain(chainer.Chain):
    """What a user might write: the model below other links and lists."""

    def __init__(self, conv):
        super().__init__()
        with self.init_scope():
            self.parts = chainer.ChainList(chainer.links.Linear(4, 2), conv)
            self.head = chainer.Sequential(
                chainer.links.Linear(4, 5), chainer.functions.relu, chainer.links.Linear(5, 3)
            )

    def forward(self, atoms, adj):
        return self.head(self.parts[1](atoms, adj))


WRAPPERS = {
    'predictor': lambda: GraphConvPredictor(rsgcn(), MLP(3, 8)),
    'set_up_predictor': lambda: set_up_predictor(
        'rsgcn', 6, 2, 3, conv_kwargs={'dropout_ratio': 0.0}
    ),
    'own chain': lambda: OwnChain(rsgcn(use_batch_norm=True)),
}


def initialised(model):
    with chainer.using_config('train', False):
        model(*dense_concat_mols(EXAMPLES)[:2])
    return model


@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_swap_in_place(wrapper):
    model = initialised(WRAPPERS[wrapper]())
    before = dict(model.namedparams())
    with chainer.using_config('train', False):
        expected = numpy.concatenate([model(*dense_concat_mols([e])[:2]).array for e in EXAMPLES])
        assert sparsify(model) is model
        actual = model(*concat_mols(EXAMPLES)[:2]).array
    after = dict(model.namedparams())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert relative_error(actual, expected) < 1e-5
    assert not any(type(link) is DenseRSGCN for link in model.links())
    # Twice changes nothing.
    links = list(model.links())
    assert sparsify(model) is model
    assert all(a is b for a, b in zip(links, model.links()))


@pytest.mark.parametrize('kind', [Regressor, Classifier])
def test_optimizer_that_was_set_up_before_goes_on(kind):
    """Two runs from equal state, one swapped in the middle, make the same steps."""
    examples = molecules([7] * 6)
    if kind is Classifier:
        examples = [(a, m, numpy.array(len(a) % 2, 'i')) for a, m, _ in examples]
    numpy.random.seed(0)
    twins = []
    first = None
    for swap in (False, True):
        model = kind(GraphConvPredictor(rsgcn(), MLP(3, 8)))
        if first is None:
            model(*dense_concat_mols(examples))
            first = copy.deepcopy(model)
        else:
            model = first
        optimizer = chainer.optimizers.Adam(alpha=0.01).setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        for step in range(6):
            if step == 3 and swap:
                sparsify(model)
            converter = concat_mols if swap and step >= 3 else dense_concat_mols
            optimizer.update(model, *converter(examples, -1))
        assert optimizer.t == 6 and all(p.update_rule.t == 6 for p in model.params())
        twins.append({name: p.array for name, p in model.namedparams()})
    for name in twins[0]:
        # Not the bound of a single step: Adam divides by the gradient's own size, so that three
        # steps carry the rounding of a gradient near 0 at full length.
        assert relative_error(twins[1][name], twins[0][name]) < 1e-4, name


def test_bare_model_is_new_and_shares_its_links():
    dense = initialised(rsgcn(use_batch_norm=True))
    model = sparsify(dense)
    assert type(model) is RSGCN and type(dense) is DenseRSGCN
    ours, theirs = dict(model.namedparams()), dict(dense.namedparams())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    assert sparsify(model) is model
    # As the docstring says: an optimizer of the old model updates what the new one uses.
    optimizer = chainer.optimizers.SGD().setup(dense)
    before = model.embed.W.array.copy()
    optimizer.update(lambda: chainer.functions.sum(model(*concat_mols(EXAMPLES)[:2])))
    assert (model.embed.W.array != before).any()


def test_hooks_of_the_replaced_links_go_on():
    class Count(chainer.LinkHook):
        name = 'Count'
        calls = 0

        def forward_postprocess(self, args):
            self.calls += 1

    hook = Count()
    predictor = GraphConvPredictor(rsgcn())
    predictor.graph_conv.add_hook(hook)
    predictor.graph_conv.gconvs[1].add_hook(hook)
    sparsify(predictor)(*concat_mols(EXAMPLES)[:2])
    assert hook.calls == 2


def test_parameters_of_ones_own_are_not_lost_in_silence():
    dense = rsgcn()
    dense.add_param('temperature', (1,), initializer=1)
    with pytest.raises(ValueError, match='expected the parameters of RSGCN alone, .*temperature'):
        sparsify(GraphConvPredictor(dense))


def test_model_that_was_never_called():
    model = Regressor(set_up_predictor('rsgcn', 6, 2, 3))
    sparsify(model)(*concat_mols(EXAMPLES))


def test_shared_model_stays_shared():
    conv = rsgcn()
    model = chainer.ChainList(GraphConvPredictor(conv), GraphConvPredictor(conv))
    sparsify(model)
    assert type(model[0].graph_conv) is RSGCN and model[0].graph_conv is model[1].graph_conv


def test_every_reference_to_the_model_is_swapped():
    class Own(chainer.Chain):
        def __init__(self):
            super().__init__()
            model = rsgcn()
            with self.init_scope():
                self.first = model
                self.second = model
            self.alias = model

    own = sparsify(Own())
    assert type(own.first) is RSGCN and own.first is own.second is own.alias
    assert {name.split('/')[1] for name, _ in own.namedparams()} <= {'first', 'second'}
    layers = sparsify(
        chainer.Sequential(lambda *inputs: inputs[:2], rsgcn(), chainer.functions.relu)
    )
    assert type(layers[1]) is RSGCN
    assert layers(*concat_mols(EXAMPLES)).shape == (3, 4)


def test_links_of_a_list_keep_their_order():
    class Own(chainer.ChainList):
        def __init__(self):
            super().__init__(chainer.links.Linear(4, 2), rsgcn())
            self.conv = self[1]

    sequence = chainer.Sequential(
        lambda *inputs: inputs[:2], rsgcn(), chainer.functions.relu, chainer.links.Linear(4, 2)
    )
    for model in (sequence, Own()):
        before = [(name, id(param)) for name, param in model.namedparams()]
        sparsify(model)
        assert [(name, id(param)) for name, param in model.namedparams()] == before
        assert [child.name for child in model.children()] == ['0', '1']
        assert sum(type(child) is RSGCN for child in model.children()) == 1
        assert type(model.conv if model is not sequence else model[1]) is RSGCN
    assert sequence[2] is chainer.functions.relu and type(sequence[3]) is chainer.links.Linear


@pytest.mark.parametrize(
    'kind, layer',
    [
        (models.RelGCN, lambda model: model.rgcn_convs[0].graph_linear_edge),
        (models.GGNN, lambda model: model.update_layers[0].graph_linear),
        (models.GGNN, lambda model: model.update_layers[0].update_layer.U_z),
        (models.RelGAT, lambda model: model.update_layers[0].attention_layer),
        (models.GNNFiLM, lambda model: model.update_layers[0].W_g),
        (models.NFP, lambda model: model.layers[0].graph_linears[2]),
    ],
)
def test_hooks_of_links_that_are_not_called_are_refused(kind, layer):
    """Spectral normalisation, left out in silence, would give other numbers."""
    model = sparsify(kind(4))
    bonds = numpy.ones({models.NFP: (3, 3), models.GNNFiLM: (5, 3, 3)}.get(kind, (4, 3, 3)), 'f')
    batch = concat_mols([(numpy.array([6, 7, 8], 'i'), bonds)])
    model(*batch)
    layer(model).add_hook(SpectralNormalization())
    with pytest.raises(ValueError, match='expected no link hooks, .* SpectralNormalization'):
        model(*batch)


def test_update_link_in_a_chain_of_ones_own():
    class Own(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.update = DenseRSGCNUpdate(6, 4)

        def forward(self, h, adj):
            return chainer.functions.sum(self.update(h, adj), axis=1)

    model = Own()
    h = numpy.random.RandomState(0).uniform(size=(3, 9, 6)).astype('f')
    expected = model(h, dense_concat_mols(EXAMPLES)[1]).array
    sparsify(model)
    assert type(model.update) is RSGCNUpdate
    assert relative_error(model(h, CSRConverter('padded')(EXAMPLES)[1]).array, expected) < 1e-5


@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_snapshots_load_both_ways(tmp_path, wrapper):
    def predictions(model, converter):
        with chainer.using_config('train', False):
            return numpy.concatenate([model(*converter([e])[:2]).array for e in EXAMPLES])

    dense = initialised(WRAPPERS[wrapper]())
    sparse = sparsify(WRAPPERS[wrapper]())
    chainer.serializers.save_npz(tmp_path / 'dense.npz', dense)
    chainer.serializers.load_npz(tmp_path / 'dense.npz', sparse)
    expected = predictions(dense, dense_concat_mols)
    assert relative_error(predictions(sparse, concat_mols), expected) < 1e-5
    again = WRAPPERS[wrapper]()
    chainer.serializers.save_npz(tmp_path / 'sparse.npz', sparse)
    chainer.serializers.load_npz(tmp_path / 'sparse.npz', again)
    numpy.testing.assert_array_equal(predictions(again, dense_concat_mols), expected)


def test_pickle(tmp_path):
    model = sparsify(Regressor(set_up_predictor('rsgcn', 6, 2, 3)))
    inputs = [example[:2] for example in EXAMPLES]
    expected = model.predict(inputs, converter=concat_mols)
    again = pickle.loads(pickle.dumps(model))
    numpy.testing.assert_array_equal(again.predict(inputs, converter=concat_mols), expected)
    model.save_pickle(tmp_path / 'model.pkl')
    again = Regressor.load_pickle(tmp_path / 'model.pkl')
    numpy.testing.assert_array_equal(again.predict(inputs, converter=concat_mols), expected)


def test_device_is_kept():
    dense = rsgcn()
    assert sparsify(dense).device == dense.device


@pytest.mark.gpu
def test_device_is_kept_on_a_gpu():
    model = GraphConvPredictor(rsgcn())
    model.to_device('@cupy:0')
    sparsify(model)
    assert model.graph_conv.device == chainer.get_device('@cupy:0')
    assert model(*concat_mols(EXAMPLES, '@cupy:0')[:2]).xp is chainer.backends.cuda.cupy


SUPPORTED = 'expected one of the supported RSGCN, RSGCNUpdate.*'


@pytest.mark.parametrize(
    'model, message',
    [
        (lambda: SchNet(4), 'model: %s, got chainer_chemistry.models.schnet.SchNet' % SUPPORTED),
        (
            lambda: GraphConvPredictor(SchNet(4)),
            r'model\.graph_conv: %s, got chainer_chemistry.models.schnet.SchNet' % SUPPORTED,
        ),
        (
            lambda: GWM(hidden_dim=4),
            'model: %s, got chainer_chemistry.models.gwm.gwm.GWM' % SUPPORTED,
        ),
        (lambda: MLP(3, 8), 'model: %s, .* got chainer_chemistry.models.mlp.MLP' % SUPPORTED),
        (lambda: chainer.links.Linear(3), 'model: %s, .* got chainer.links.*Linear' % SUPPORTED),
        (lambda: type('Mine', (DenseRSGCN,), {})(4), 'model: %s, got .*Mine' % SUPPORTED),
        (
            lambda: DenseRSGCN(4, readout=lambda h: h),
            r'model.readout: expected .*GeneralReadout, got',
        ),
    ],
)
def test_what_cannot_be_swapped(model, message):
    with pytest.raises(ValueError, match=message):
        sparsify(model())


PAIRS = 'every pair of atoms'
LISTS = 'it gathers and adds features by index, along a list of %s'


@pytest.mark.parametrize(
    'model, reason',
    [
        (lambda: SchNet(4), 'filters are functions of the distances between atoms, and ' + PAIRS),
        (lambda: update.schnet_update.SchNetUpdate(4), 'functions of the distances'),
        (lambda: models.WeaveNet(), 'it keeps features for ' + PAIRS),
        (lambda: models.weavenet.WeaveModule(5, 4, 1), 'it keeps features for ' + PAIRS),
        (lambda: models.MPNN(4), "model.message_func: .* got 'edgenet', which gives " + PAIRS),
        (lambda: update.mpnn_update.MPNNUpdate(4), 'which gives %s, bonded or not' % PAIRS),
        (lambda: models.megnet.MEGNet(4), LISTS % 'pairs'),
        (lambda: models.cgcnn.CGCNN(4), LISTS % 'neighbours'),
        (lambda: models.relgcn.RelGCNSparse(4), LISTS % 'edges' + '.* RelGCN can be swapped'),
        (lambda: models.gin.GINSparse(4), LISTS % 'edges' + '.* GIN can be swapped'),
        (lambda: update.gin_update.GINSparseUpdate(), LISTS % 'edges'),
        (lambda: models.ggnn.SparseGGNN(4), 'CooMatrix already; GGNN, .* same parameters'),
        (lambda: type('Mine', (SchNet,), {})(4), 'got .*Mine, which has no adjacency matrix: its'),
    ],
)
def test_why_it_cannot_be_swapped(model, reason):
    with pytest.raises(ValueError, match=reason):
        sparsify(model())


def test_no_link():
    with pytest.raises(TypeError, match='model: expected a chainer.Link, got ndarray'):
        sparsify(numpy.ones(3))


def test_nothing_is_changed_where_a_part_cannot_be_swapped():
    good, bad = GraphConvPredictor(rsgcn()), GraphConvPredictor(SchNet(4))
    with pytest.raises(ValueError, match=r'model\.1\.graph_conv: .*SchNet'):
        sparsify(chainer.ChainList(good, bad))
    assert type(good.graph_conv) is DenseRSGCN
