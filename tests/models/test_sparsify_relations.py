"""sparsify over models of several relations; tests/models/test_sparsify.py has the rest."""

import pickle

import numpy
import pytest

import chainer
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.update.ggnn_update import GGNNUpdate as DenseGGNNUpdate
from chainer_chemistry.links.update.relgcn_update import RelGCNUpdate as DenseRelGCNUpdate
from chainer_chemistry.models import GGNN as DenseGGNN
from chainer_chemistry.models import MLP
from chainer_chemistry.models import RelGAT as DenseRelGAT
from chainer_chemistry.models import RelGCN as DenseRelGCN
from chainer_chemistry.models.ggnn import SparseGGNN
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
from chainer_chemistry.models.relgcn import RelGCNSparse

from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm import sparsify
from chainer_bspmm.links import GGNNUpdate
from chainer_bspmm.links import RelGCNUpdate
from chainer_bspmm.models import GGNN
from chainer_bspmm.models import RelGAT
from chainer_bspmm.models import RelGCN
from tests.models.relation_models import initialised
from tests.models.relation_models import molecules
from tests.support import relative_error

EXAMPLES = molecules([5, 9, 3])


class OwnChain(chainer.Chain):
    def __init__(self, conv):
        super().__init__()
        with self.init_scope():
            self.parts = chainer.ChainList(chainer.links.Linear(4, 2), conv)
            self.head = chainer.links.Linear(4, 3)

    def forward(self, atoms, adj):
        return self.head(self.parts[1](atoms, adj))


MODELS = {
    'relgcn': (lambda: DenseRelGCN(4, scale_adj=True), RelGCN),
    'ggnn': (lambda: DenseGGNN(4, hidden_channels=6), GGNN),
    'relgat': (lambda: DenseRelGAT(4, hidden_channels=6), RelGAT),
}
WRAPPERS = {
    'predictor': lambda name: GraphConvPredictor(MODELS[name][0](), MLP(3, 8)),
    'set_up_predictor': lambda name: set_up_predictor(name, 6, 2, 3),
    'own chain': lambda name: OwnChain(MODELS[name][0]()),
}


@pytest.mark.parametrize('wrapper', WRAPPERS)
@pytest.mark.parametrize('name', MODELS)
def test_swap_in_place(wrapper, name):
    model = initialised(WRAPPERS[wrapper](name))
    before = dict(model.namedparams())
    expected = numpy.concatenate([model(*dense_concat_mols([e])[:2]).array for e in EXAMPLES])
    assert sparsify(model) is model
    after = dict(model.namedparams())
    assert before.keys() == after.keys()
    assert all(after[path] is before[path] for path in before)
    assert any(type(link) is MODELS[name][1] for link in model.links())
    assert relative_error(model(*concat_mols(EXAMPLES)[:2]).array, expected) < 1e-5
    links = list(model.links())
    assert sparsify(model) is model
    assert all(a is b for a, b in zip(links, model.links()))


@pytest.mark.parametrize('name', MODELS)
def test_bare_model_is_new_and_shares_its_links(name):
    make, kind = MODELS[name]
    dense = initialised(make())
    model = sparsify(dense)
    assert type(model) is kind and type(dense) is not kind
    ours, theirs = dict(model.namedparams()), dict(dense.namedparams())
    assert ours.keys() == theirs.keys() and all(ours[path] is theirs[path] for path in ours)
    expected = dense(*dense_concat_mols(EXAMPLES)[:2]).array
    actual = model(*CSRConverter('padded')(EXAMPLES)[:2]).array
    assert relative_error(actual, expected) < 1e-5
    assert (dense(*dense_concat_mols(EXAMPLES)[:2]).array == expected).all()


@pytest.mark.parametrize('kind', [Regressor, Classifier])
@pytest.mark.parametrize('name', MODELS)
def test_optimizer_that_was_set_up_before_goes_on(name, kind):
    labels = [label if kind is Regressor else (label > 0).astype('i') for _, _, label in EXAMPLES]
    examples = [(atoms, adj, label) for (atoms, adj, _), label in zip(EXAMPLES, labels)]
    loss = (
        chainer.functions.mean_squared_error
        if kind is Regressor
        else chainer.functions.sigmoid_cross_entropy
    )  # three tasks of two classes
    predictor = GraphConvPredictor(initialised(MODELS[name][0]()), MLP(3, 8))
    model = kind(predictor, loss, metrics_fun=None)
    optimizer = chainer.optimizers.Adam(alpha=0.01).setup(model)
    for _ in range(3):
        optimizer.update(model, *dense_concat_mols(examples, -1))
    sparsify(model)
    losses = []
    for _ in range(20):
        optimizer.update(model, *concat_mols(examples, -1))
        losses.append(float(model.loss.array))
    assert optimizer.t == 23 and losses[-1] < losses[0]
    assert all(p.update_rule.t == 23 for p in model.params())


@pytest.mark.parametrize(
    'dense, kind',
    [
        (lambda: DenseRelGCNUpdate(6, 4), RelGCNUpdate),
        (lambda: DenseGGNNUpdate(6, hidden_channels=5, out_channels=4), GGNNUpdate),
    ],
)
def test_update_link_in_a_chain_of_ones_own(dense, kind):
    class Own(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.update = dense()

        def forward(self, h, adj):
            if hasattr(self.update, 'reset_state'):
                self.update.reset_state()
            return chainer.functions.sum(self.update(h, adj), axis=1)

    model = Own()
    h = numpy.random.RandomState(0).uniform(size=(3, 9, 6)).astype('f')
    expected = model(h, dense_concat_mols(EXAMPLES)[1]).array
    sparsify(model)
    assert type(model.update) is kind
    assert relative_error(model(h, CSRConverter('padded')(EXAMPLES)[1]).array, expected) < 1e-5


def test_shared_update_link_stays_shared():
    update = DenseGGNNUpdate(6)
    model = sparsify(chainer.ChainList(chainer.Sequential(update), chainer.Sequential(update)))
    assert type(model[0][0]) is GGNNUpdate and model[0][0] is model[1][0]


@pytest.mark.parametrize('name', MODELS)
def test_pickle(tmp_path, name):
    model = sparsify(Regressor(set_up_predictor(name, 6, 2, 3)))
    inputs = [example[:2] for example in EXAMPLES]
    expected = model.predict(inputs, converter=concat_mols)
    again = pickle.loads(pickle.dumps(model))
    numpy.testing.assert_array_equal(again.predict(inputs, converter=concat_mols), expected)
    model.save_pickle(tmp_path / 'model.pkl')
    again = Regressor.load_pickle(tmp_path / 'model.pkl')
    numpy.testing.assert_array_equal(again.predict(inputs, converter=concat_mols), expected)


@pytest.mark.parametrize('name', MODELS)
def test_parameters_of_ones_own_are_not_lost_in_silence(name):
    dense = MODELS[name][0]()
    dense.add_param('temperature', (1,), initializer=1)
    with pytest.raises(ValueError, match='expected the parameters of .* alone, .*temperature'):
        sparsify(GraphConvPredictor(dense))


@pytest.mark.parametrize(
    'model',
    [lambda: SparseGGNN(4), lambda: RelGCNSparse(4), lambda: type('M', (DenseRelGCN,), {})(4)],
)
def test_what_cannot_be_swapped(model):
    with pytest.raises(ValueError, match=r'model: expected one of the supported .* got'):
        sparsify(model())
