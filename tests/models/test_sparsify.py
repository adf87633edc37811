"""`sparsify` and `densify`: places of models, preserved state, refusals."""

import copy
import warnings
import weakref

import numpy
import pytest

import chainer
from chainer.link_hooks import SpectralNormalization, TimerHook
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.link_hooks import VariableMonitorLinkHook
from chainer_chemistry.links import GeneralReadout as DenseReadout
from chainer_chemistry.links import RSGCNUpdate as DenseRSGCNUpdate
from chainer_chemistry import models as dense
from chainer_chemistry.links import update
from chainer_chemistry.models import MLP, SchNet
from chainer_chemistry.models.gwm.gwm import GWM
from chainer_chemistry.models.gwm.gwm_net import GGNN_GWM
from chainer_chemistry.models.prediction import GraphConvPredictor, Regressor, set_up_predictor

from chainer_bspmm import concat_mols, CSRConverter, densify, links, models, sparsify
from chainer_bspmm.ops import link_hooks
from tests.support import parity, relative_error
from tests.support.devices import slow_unless
from tests.support.molecules import molecules
from tests.support import assert_close_arrays

METHODS = ('rsgcn', 'nfp', 'gin', 'ggnn', 'relgcn', 'relgat', 'gnnfilm')
QUICK = 'rsgcn', 'ggnn'  # one without and one with a state that is kept between calls
CASES = {name.lower(): case for name, case in parity.DEFAULTS.items()}
SIZES = (5, 9, 3)


def examples_of(method, sizes=SIZES):
    case = CASES[method]
    return molecules(sizes, case.adjacency, case.n_relations)


EXAMPLES = examples_of('rsgcn')


def rsgcn(**options):
    return dense.RSGCN(4, hidden_channels=6, dropout_ratio=0.0, **options)


class OwnChain(chainer.Chain):
    """A user's Chain, in which the model is below other links and lists."""

    def __init__(self, conv):
        super().__init__()
        with self.init_scope():
            self.parts = chainer.ChainList(chainer.links.Linear(4, 2), conv)
            self.head = chainer.Sequential(
                chainer.links.Linear(None, 5), chainer.functions.relu, chainer.links.Linear(5, 3)
            )

    def forward(self, atoms, adj):
        return self.head(self.parts[1](atoms, adj))


WRAPPERS = {
    'predictor': lambda: GraphConvPredictor(CASES['ggnn'].make(), MLP(3, 8)),
    'set_up_predictor': lambda: set_up_predictor('ggnn', 6, 2, 3),
    'own chain': lambda: OwnChain(CASES['ggnn'].make()),
    'bare': lambda: CASES['ggnn'].make(),
}


@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_swap_in_place(wrapper):
    """Objects and results stay the same; every model is tested in tests/models/test_common.py."""
    model = WRAPPERS[wrapper]()
    examples = examples_of('ggnn')
    with chainer.using_config('train', False):
        expected = model(*dense_concat_mols(examples)[:2]).array
        before = [(path, id(link)) for path, link in model.namedlinks()]
        params = [(path, id(param)) for path, param in model.namedparams()]
        assert sparsify(model) is model
        assert relative_error(model(*concat_mols(examples)[:2]).array, expected) < 1e-5
    assert before == [(path, id(link)) for path, link in model.namedlinks()]
    assert params == [(path, id(param)) for path, param in model.namedparams()]
    assert sum(type(link) is models.GGNN for link in model.links()) == 1
    kinds = [type(link) for link in model.links()]
    assert sparsify(model) is model
    assert kinds == [type(link) for link in model.links()]


@pytest.mark.parametrize('method', [slow_unless(name in QUICK, name) for name in METHODS])
def test_optimizer_that_was_set_up_before_goes_on(device, method):
    """Two runs that begin alike make the same steps, although one model is swapped halfway.

    Molecules have one size, so that dense and packed batches have the same rows. Everything is
    float64, because Adam divides by the size of a gradient, which magnifies rounding near 0.
    """
    case = CASES[method]._replace(sizes=(7,))
    examples = examples_of(method, [7] * 6)
    start = parity.initialised(lambda: case.make(out_dim=3), parity.examples_of(case))
    results = []
    for swap in (False, True):
        model = parity.to_double(start)
        optimizer = chainer.optimizers.Adam(0.01).setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        batch = dense_concat_mols(examples)
        for step in range(6):
            if step == 3 and swap:
                sparsify(model).to_device(device)
                batch = concat_mols(examples, device)
            *inputs, t = parity.double(batch)
            with parity.dense_models_in_float64():
                optimizer.update(
                    lambda: chainer.functions.mean_squared_error(model(*inputs), t)  # NOQA: B023
                )
        assert optimizer.target is model and optimizer.t == 6
        results.append({name: param.array for name, param in model.namedparams()})
    assert_close_arrays(results[1], results[0], 1e-9)


def test_what_a_user_set_stays():
    """Attributes, names, hooks, parameters and persistent values survive both swaps."""
    predictor = GraphConvPredictor(rsgcn())
    model = predictor.graph_conv
    hook = TimerHook()
    model.my_note = {'trained on': 'tox21'}
    model.gconvs[0].my_note = 'first'
    model.add_hook(hook)
    model.gconvs[1].add_hook(hook)
    model.add_param('temperature', (1,), initializer=1)
    model.add_persistent('n_seen', 7)
    alone = DenseRSGCNUpdate(6, 4)
    alone.name = 'mine'
    for change in (sparsify, densify):
        change(predictor)
        change(alone)
        assert predictor.graph_conv is model and model.my_note == {'trained on': 'tox21'}
        assert model.gconvs[0].my_note == 'first' and model.n_seen == 7
        assert (model.name, alone.name) == ('graph_conv', 'mine')
        assert '/graph_conv/temperature' in dict(predictor.namedparams())
        assert all('TimerHook' in link.local_link_hooks for link in (model, model.gconvs[1]))
        if change is sparsify:  # upstream's links run no hooks
            predictor(*concat_mols(EXAMPLES)[:2])
            assert len(hook.call_history) == 2


def test_a_link_that_is_registered_twice():
    model = rsgcn()
    own = chainer.Chain()
    with own.init_scope():
        own.first = own.second = model
    own.alias = model
    shared = chainer.ChainList(GraphConvPredictor(model), GraphConvPredictor(model), own)
    sparsify(shared)
    assert type(model) is models.RSGCN
    assert own.first is own.second is own.alias is shared[0].graph_conv is model
    densify(shared)
    assert type(model) is dense.RSGCN and type(model.gconvs[0]) is DenseRSGCNUpdate


def test_links_of_a_list_keep_their_order():
    sequence = chainer.Sequential(
        lambda *inputs: inputs[:2], rsgcn(), chainer.functions.relu, chainer.links.Linear(4, 2)
    )
    before = [(name, id(param)) for name, param in sequence.namedparams()]
    sparsify(sequence)
    assert [(name, id(param)) for name, param in sequence.namedparams()] == before
    assert type(sequence[1]) is models.RSGCN and sequence[2] is chainer.functions.relu
    assert sequence(*concat_mols(EXAMPLES)).shape == (3, 2)


def test_a_copy_stays_dense():
    model = rsgcn()
    kept = copy.deepcopy(model)
    sparsify(model)
    assert type(kept) is dense.RSGCN and type(copy.deepcopy(model)) is models.RSGCN
    again = model.copy()
    assert type(again) is models.RSGCN and again.embed.W is not model.embed.W


def test_pickle_of_a_predictor(tmp_path):
    model = sparsify(Regressor(set_up_predictor('rsgcn', 6, 2, 3)))
    inputs = [example[:2] for example in EXAMPLES]
    expected = model.predict(inputs, converter=concat_mols)
    model.save_pickle(tmp_path / 'model.pkl')
    again = Regressor.load_pickle(tmp_path / 'model.pkl')
    numpy.testing.assert_array_equal(again.predict(inputs, converter=concat_mols), expected)


@pytest.mark.parametrize(
    'kind, layer',
    [
        (dense.RelGCN, lambda model: model.rgcn_convs[0].graph_linear_edge),
        (dense.GGNN, lambda model: model.update_layers[0].graph_linear),
        (dense.GGNN, lambda model: model.update_layers[0].update_layer.U_z),
        (dense.RelGAT, lambda model: model.update_layers[0].attention_layer),
        (dense.GNNFiLM, lambda model: model.update_layers[0].W_g),
        (dense.NFP, lambda model: model.layers[0].graph_linears[2]),
    ],
)
def test_hooks_of_links_that_are_not_called_are_refused(kind, layer):
    """If spectral normalisation were skipped silently, results would differ."""
    model = sparsify(kind(4))
    bonds = numpy.ones({dense.NFP: (3, 3), dense.GNNFiLM: (5, 3, 3)}.get(kind, (4, 3, 3)), 'f')
    batch = concat_mols([(numpy.array([6, 7, 8], 'i'), bonds)])
    model(*batch)
    layer(model).add_hook(SpectralNormalization())
    with pytest.raises(ValueError, match=r'^\w+: expected no link hooks, .* SpectralNormalization'):
        model(*batch)


class Halve(chainer.LinkHook):
    """Hook that changes the result of linear layers, GRUs and norms."""

    name = 'halve'

    def forward_postprocess(self, args):
        for y in args.out if isinstance(args.out, (list, tuple)) else [args.out]:
            if isinstance(y, chainer.Variable):
                y.array[...] /= 2


def rsgcn_with_norms(out_dim):
    return dense.RSGCN(out_dim, use_batch_norm=True)


def set2set(out_dim):
    return dense.MPNN(out_dim, message_func='ggnn')


def warped(out_dim):
    return GGNN_GWM(16, out_dim, n_update_layers=1)


@pytest.mark.parametrize(
    'kind, layer',
    [
        (dense.GGNN, lambda model: model.update_layers[0].update_layer),
        (dense.GNNFiLM, lambda model: model.update_layers[0].norm_layer),
        (rsgcn_with_norms, lambda model: model.bnorms[0]),
        (set2set, lambda model: model.update_layers[0].update_layer),
        (set2set, lambda model: model.readout_layers[0].set2set.lstm_layer),
        (warped, lambda model: model.gwm.GRU_local),
        (warped, lambda model: model.gwm.GRU_super),
    ],
)
def test_hooks_of_grus_and_norms_are_refused(kind, layer):
    model = sparsify(kind(16))
    bonds = numpy.ones({rsgcn_with_norms: (3, 3), dense.GNNFiLM: (5, 3, 3)}.get(kind, (4, 3, 3)))
    super_node = (numpy.ones(4, 'f'),) * (kind is warped)
    batch = concat_mols([(numpy.array([6, 7, 8], 'i'), bonds.astype('f'), *super_node)] * 2)
    model(*batch)
    layer(model).add_hook(Halve())
    with pytest.raises(ValueError, match=r'^\w+: expected no link hooks, .* got halve$'):
        model(*batch)


def ggnn_and_batch():
    model = sparsify(dense.GGNN(4))
    return model, concat_mols([(numpy.array([6, 7, 8], 'i'), numpy.ones((4, 3, 3), 'f'))])


@pytest.fixture
def told(monkeypatch):
    """Hooks are told of as in a new process."""
    monkeypatch.setattr(link_hooks, '_told', weakref.WeakSet())


def test_a_hook_of_all_links_is_told_of_once(told):
    """It runs for the links that are called, of which there are more then: sums round otherwise."""
    model, batch = ggnn_and_batch()
    expected = model(*batch).array
    timer = TimerHook()
    with timer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(2):
            assert relative_error(model(*batch).array, expected) < 1e-5
    assert timer.call_history
    assert [str(warning.message) for warning in caught] == [
        'the link hook TimerHook is active for all links, but on sparse batches it misses layers '
        'whose parameters a larger operation reads, such as graph_linear. If it has to see them, '
        "or changes results, leave sparsify out and keep upstream's converter"
    ]


def test_a_hook_of_all_links_where_all_are_called(told):
    model = sparsify(rsgcn())
    batch = concat_mols(EXAMPLES)[:2]
    expected = model(*batch).array
    with Halve(), warnings.catch_warnings():
        warnings.simplefilter('error')
        assert relative_error(model(*batch).array, expected) > 0.1


def test_a_monitor_of_another_link(told):
    model, batch = ggnn_and_batch()
    with VariableMonitorLinkHook(model.embed) as monitor, warnings.catch_warnings():
        warnings.simplefilter('error')
        model(*batch)
    assert monitor.get_variable().shape[-1] == 16
    with VariableMonitorLinkHook(model.update_layers[0].update_layer):
        with pytest.warns(UserWarning, match='VariableMonitor.* such as update_layer'):
            model(*batch)


@pytest.mark.parametrize('layout, train, is_called', [
    ('packed', True, True), ('folded', True, False), ('folded', False, True)
])  # fmt: skip
def test_a_hook_of_a_batch_normalisation(layout, train, is_called):
    """It is called, unless rows have weights and their statistics are needed."""
    model = sparsify(rsgcn_with_norms(4))
    batch = CSRConverter(layout)([example[:2] for example in EXAMPLES])
    model(*batch)
    hook = TimerHook()
    model.bnorms[0].add_hook(hook)
    with chainer.using_config('train', train):
        if is_called:
            model(*batch)
        else:
            with pytest.raises(ValueError, match='expected no link hooks, .* got TimerHook$'):
                model(*batch)
    assert len(hook.call_history) == is_called


@pytest.mark.parametrize(
    'method, arguments, options',
    [
        ('RSGCN', (6, 4), {}),
        ('GIN', (6,), {'dropout_ratio': 0.0}),
        ('RelGCN', (6, 4), {}),
        ('GGNN', (6, 5, 4), {}),
        *(('RelGAT', (6, 4), {'softmax_mode': mode}) for mode in ('across', 'within')),
    ],
)
def test_update_link_in_a_chain_of_ones_own(method, arguments, options):
    """A readout beside the update link is not swapped, because the chain passes it no adjacency."""
    kind = getattr(links, method + 'Update')

    class Own(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.update = kind.upstream(*arguments, **options)
                self.readout = DenseReadout()

        def forward(self, h, adj):
            getattr(self.update, 'reset_state', int)()
            return self.readout(self.update(h, adj))

    model = Own()
    examples = examples_of(method.lower())
    h = numpy.random.RandomState(0).uniform(size=(3, 9, 6)).astype('f')
    expected = model(h, dense_concat_mols(examples)[1]).array
    sparsify(model)
    assert type(model.update) is kind and type(model.readout) is DenseReadout
    assert relative_error(model(h, CSRConverter('padded')(examples)[1]).array, expected) < 1e-5


def test_a_subclass_of_ours_is_sparse_already():
    class Mine(models.RSGCN):
        def __init__(self, out_dim):
            super().__init__(out_dim, hidden_channels=6)

    model = GraphConvPredictor(Mine(4))
    assert sparsify(model) is model and type(model.graph_conv) is Mine
    assert type(model.graph_conv.gconvs[0]) is links.RSGCNUpdate
    assert model(*concat_mols(EXAMPLES)[:2]).shape == (3, 4)
    with pytest.raises(
        ValueError, match=r'model\.graph_conv: got .*Mine, a subclass .* no dense form'
    ):
        densify(model)
    assert type(model.graph_conv.gconvs[0]) is links.RSGCNUpdate


def test_device_is_kept(device):
    model = GraphConvPredictor(rsgcn())
    model.to_device(device)
    assert sparsify(model).graph_conv.device == device
    assert model(*concat_mols(EXAMPLES, device)[:2]).xp is device.xp


# --- refusals, which give the reason first and then the remedy ---

PAIRS = 'every pair of atoms'
LISTS = 'it gathers and adds features by index, along a list of %s'


@pytest.mark.parametrize(
    'model, reason',
    [
        (lambda: SchNet(4), 'chainer_chemistry.models.schnet.SchNet has no adjacency matrix: its'),
        (lambda: update.schnet_update.SchNetUpdate(4), '.*functions of the distances'),
        (lambda: dense.WeaveNet(), '.* it keeps features for ' + PAIRS),
        (lambda: dense.weavenet.WeaveModule(5, 4, 1), '.* it keeps features for ' + PAIRS),
        (lambda: update.mpnn_update.MPNNUpdate(4), '.* gives %s, bonded or not' % PAIRS),
        (lambda: dense.megnet.MEGNet(4), '.*' + LISTS % 'pairs'),
        (lambda: dense.cgcnn.CGCNN(4), '.*' + LISTS % 'neighbours'),
        (lambda: dense.ggnn.SparseGGNN(4), '.*CooMatrix already; GGNN, .* same parameters'),
        (lambda: type('Mine', (SchNet,), {})(4), r'\S*\.Mine has no adjacency matrix: its'),
        (
            lambda: type('Mine', (dense.RSGCN,), {})(4),
            r'\S*Mine is a subclass of \S*rsgcn.RSGCN, .* from chainer_bspmm.models.RSGCN, or run',
        ),
        (lambda: GWM(hidden_dim=4), 'chainer_chemistry.models.gwm.gwm.GWM has no sparse form'),
        (lambda: MLP(3, 8), 'expected a graph .*, got chainer_chemistry.models.mlp.MLP'),
        (lambda: chainer.links.Linear(3), 'expected a graph .*, got chainer.links.*Linear'),
    ],
)
def test_what_cannot_be_swapped(model, reason):
    message = '(?s)^model: %s.* docs/methods.md lists what .*$' % reason
    with pytest.raises(ValueError, match=message):
        sparsify(model())


def test_no_link():
    for change in (sparsify, densify):
        with pytest.raises(TypeError, match='model: expected a chainer.Link, got ndarray'):
            change(numpy.ones(3))


def gin_with_an_update_of_ones_own():
    model = dense.GIN(4, n_update_layers=2)
    model.update_layers[1].__class__ = type('Mine', (type(model.update_layers[1]),), {})
    return model


@pytest.mark.parametrize(
    'bad, path',
    [
        (
            lambda: GraphConvPredictor(SchNet(4)),
            r'graph_conv: .*SchNet has no adjacency matrix: .*\. A graph network .* alone: .*',
        ),
        (
            lambda: chainer.ChainList(dense.MPNN(4)),
            r"0\.message_func: expected 'ggnn', got 'edgenet', which gives every .* SCRIPT\.py",
        ),
        (
            lambda: dense.RSGCN(4, readout=DenseReadout('mean')),
            r"readout\.mode: expected one of 'sum', 'max', 'summax', got 'mean'",
        ),
        (
            lambda: dense.RSGCN(4, readout=lambda h: h),
            'readout: expected .*GeneralReadout, got <function .*>; a readout of your own .* '
            'pass it to chainer_bspmm.models.RSGCN',
        ),
        (
            gin_with_an_update_of_ones_own,
            r"update_layers\.1: expected Chainer Chemistry's GINUpdate, got <.*Mine object at .*>",
        ),
    ],
)
def test_nothing_is_changed_if_a_part_cannot_be_swapped(bad, path):
    model = chainer.ChainList(GraphConvPredictor(rsgcn()), bad())
    kinds = [type(link) for link in model.links()]
    with pytest.raises(ValueError, match=r'(?s)^model\.1\.' + path + '$'):
        sparsify(model)
    assert kinds == [type(link) for link in model.links()]


def test_dense_parts_of_a_sparse_model_are_swapped():
    model = sparsify(rsgcn())
    densify(model.gconvs[1])
    assert type(model.gconvs[1]) is DenseRSGCNUpdate
    assert sparsify(model) is model
    assert all(type(gconv) is links.RSGCNUpdate for gconv in model.gconvs)
    model(*concat_mols(EXAMPLES)[:2])


def test_a_part_of_a_sparse_model_that_cannot_be_swapped():
    model = GraphConvPredictor(models.GIN(4, n_update_layers=2))
    model.graph_conv.update_layers[1] = gin_with_an_update_of_ones_own().update_layers[1]
    with pytest.raises(ValueError, match=r'^model\.graph_conv\.update_layers\.1: expected .*GINUp'):
        sparsify(model)


def test_densify_refuses_a_readout_of_your_own():
    model = models.RSGCN(4, 6, readout=lambda h, adj: h)
    with pytest.raises(
        ValueError,
        match=r'model\.readout: expected a GeneralReadout to go back, got <function .* called '
        'with a sparse batch',
    ):
        densify(model)
    assert type(model) is models.RSGCN and type(model.gconvs[0]) is links.RSGCNUpdate
