"""`check_swap`: silent where nothing differs, a text where something does, no trace of itself."""

import random
import time
import types
import warnings

import numpy
import pytest

from chainer_bspmm.dataset import from_smiles, to_sparse  # first: it repairs Chainer
import chainer
from chainer import functions as F, links as L
from chainer_chemistry.links import EmbedAtomID, GeneralReadout, GGNNUpdate
from chainer_chemistry.models import RSGCN
from chainer_chemistry.models.prediction import GraphConvPredictor, Regressor, set_up_predictor

from chainer_bspmm import CSRConverter, functions, sparsify
from chainer_bspmm.training import check_swap
from tests.support import parity
from tests.support.molecules import molecules


def examples(n=12, n_labels=1):
    rng = numpy.random.RandomState(0)
    actual = []
    for size in rng.randint(1, 12, n):
        adj = (rng.uniform(size=(4, size, size)) < 0.2).astype('f')
        label = rng.uniform(1, 2, n_labels).astype('f')
        actual.append((rng.randint(1, 9, size).astype('i'), adj + adj.transpose(0, 2, 1), label))
    return actual


def one_relation(actual):
    return [(atoms, adj[0], *labels) for atoms, adj, *labels in actual]


class Own(chainer.Chain):
    """A Chain of a user around a predictor; `loss` is a function of self, y, and the batch."""

    def __init__(self, loss, method='ggnn', n_out=1):
        super().__init__()
        self.loss = loss
        with self.init_scope():
            self.predictor = set_up_predictor(method, 8, 2, n_out)
            self.weight = chainer.Parameter(2.0, (1,))
            self.late = L.Linear(None, 1)

    def __call__(self, atoms, adj, t):
        loss = self.loss(self, self.predictor(atoms, adj), atoms, adj, t)
        chainer.report({'loss': loss}, self)
        return loss


def squares(y, t):
    return F.sum((y - t) ** 2)


def param(case):
    marks = () if case in parity.DEFAULTS.values() else pytest.mark.slow
    return pytest.param(case, id='%s %s' % (case.model, case.options), marks=marks)


@pytest.mark.parametrize('case', map(param, parity.CASES))
def test_every_model_is_equal(case):
    actual = parity.examples_of(case)
    model = parity.initialised(case.make, actual)
    sparsify(model)

    def loss(*batch):
        y = model(*batch)
        return F.sum(y * y) / y.shape[0]

    # Features of atoms have no form in which a loss of the user would be equal but the padded one.
    layout = 'padded' if 'node embedding' in case.options else 'folded'
    converter = CSRConverter(layout, n_node_columns=int(case.column == 'labels'))
    actual = check_swap(model, actual, converter, loss)
    assert actual.equal, actual.text


EQUAL = {
    'a mean over labels': lambda self, y, x, adj, t: squares(y, t) / len(t),
    'a mean of y': lambda self, y, x, adj, t: F.mean(y - t),
    'its molecules': lambda self, y, x, adj, t: squares(y, t) / y.shape[0],
    'a lazy layer': lambda self, y, x, adj, t: F.mean(self.late(y) - t),
    'a parameter': lambda self, y, x, adj, t: F.mean(F.broadcast_to(self.weight, y.shape) * y),
    'dropout': lambda self, y, x, adj, t: F.sum(F.dropout(y - t)),
    'a sum that cancels': lambda self, y, x, adj, t: (
        1e3 * F.sum(y - F.broadcast_to(F.mean(y, axis=0), y.shape))
    ),
    'NaN': lambda self, y, x, adj, t: F.mean(y) * numpy.float32('nan'),
}


@pytest.mark.parametrize('name', EQUAL)
def test_losses_of_ones_own_are_equal(name):
    actual = check_swap(sparsify(Own(EQUAL[name])), examples())
    assert actual.equal, actual.text


ROWS = {
    'len(atoms)': lambda self, y, x, adj, t: squares(y, t) / len(x),
    'atoms.shape': lambda self, y, x, adj, t: squares(y, t) / x.shape[0],
    'a penalty by len(atoms)': lambda self, y, x, adj, t: F.mean(y) + numpy.float32(0.01 * len(x)),
    'a weight that learns': lambda self, y, x, adj, t: F.sum(self.weight * len(x)) + F.mean(y),
    'the deviation of ids': lambda self, y, x, adj, t: F.mean(y) / numpy.float32(x.std()),
    'atoms.ndim': lambda self, y, x, adj, t: F.mean(y - t) * numpy.float32(x.ndim),
    'copies of y': lambda self, y, x, adj, t: F.mean(F.tile(y, (len(x), 1))) * len(x) ** 0.5,
    'a gradient that is NaN': lambda self, y, x, adj, t: (
        F.mean(y) + 0 * F.sum(F.sqrt(self.weight * numpy.float32(x.ndim == 2)))
    ),
    'only the gradient': lambda self, y, x, adj, t: (
        F.mean(y) + 0 * len(x) * F.sum(y) if x.ndim == 2 else F.mean(y) + F.sum(y - y.array)
    ),
}


@pytest.mark.parametrize('name', ROWS)
def test_rows_taken_for_molecules(name):
    actual = check_swap(sparsify(Own(ROWS[name])), examples())
    assert actual.equal is False
    assert 'docs/migration.md' in actual.text
    if name in ('len(atoms)', 'atoms.shape'):
        assert 'use len(t)' in actual.text and actual.loss < actual.dense_loss


def test_rounding_decides_which_rows_are_the_maximum():
    smiles = 'COC', 'CCC', 'CC(C)(C)C', 'CCOCC', 'O=C=O', 'CC(=O)C', 'c1ccccc1'  # equivalent atoms
    actual = from_smiles(smiles, 'rsgcn', labels=numpy.ones((len(smiles), 1), 'f')).dataset
    for seed in range(20):  # on some machines a quarter of them jumps
        numpy.random.seed(seed)
        model = RSGCN(8, hidden_channels=8, n_update_layers=2, readout=GeneralReadout(mode='max'))
        own = Own(lambda self, y, x, adj, t: F.mean((y - t) ** 2))
        own.predictor = GraphConvPredictor(sparsify(model), L.Linear(8, 1))
        assert check_swap(own, actual).equal is not False


def test_no_model():
    with pytest.raises(TypeError, match='model: expected a chainer.Link, got NoneType'):
        check_swap(None, examples())


class Layers(chainer.Chain):
    """Layers of Chainer Chemistry and a reduction of a user."""

    def __init__(self, update, reduce):
        super().__init__()
        self.reduce = reduce
        with self.init_scope():
            self.embed = EmbedAtomID(8)
            self.update = update

    def __call__(self, x, adj, t):
        return self.reduce(self.update(self.embed(x), adj))


REDUCTIONS = {'mean': F.mean, 'maximum': lambda h: F.sum(F.max(h, axis=0))}
REDUCTIONS['norm'] = lambda h: F.mean(F.normalize(h, axis=1))


@pytest.mark.parametrize('name', REDUCTIONS)
def test_reductions_over_rows(name):
    model = sparsify(Layers(GGNNUpdate(8, 8), REDUCTIONS[name]))
    actual = check_swap(model, examples())
    assert actual.equal is False and 'In padded batches it is equal' in actual.text
    assert check_swap(model, examples(), CSRConverter('padded')).equal


def test_labels_of_atoms():
    """Labels taken for columns of atoms have other rows."""
    actual = [(*example[:2], numpy.arange(len(example[0]), dtype='f')) for example in examples()]
    model = sparsify(Own(lambda self, y, x, adj, t: F.mean(y) * numpy.float32(t.mean())))
    assert check_swap(model, actual).equal is False


@pytest.mark.parametrize('name, is_equal', [('len(atoms)', False), ('its molecules', True)])
@pytest.mark.parametrize('padded_to', [None, 20])
def test_sparse_data_sets(name, is_equal, padded_to):
    model = sparsify(Own((EQUAL if is_equal else ROWS)[name]))
    actual = to_sparse(examples())[:7]
    assert check_swap(model, actual, CSRConverter(padded_to=padded_to)).equal is is_equal


def test_padded_batches():
    right = sparsify(Own(EQUAL['its molecules']))
    assert check_swap(right, examples(), CSRConverter('padded')).equal


LARGE = [(numpy.ones(200, 'i'), numpy.zeros((4, 200, 200), 'f'), numpy.ones(1, 'f'))]
CANNOT_BE_TOLD = {
    'packed': ({'converter': CSRConverter('packed')}, 'packed'),
    'padded to few': ({'converter': CSRConverter(padded_to=2)}, 'more atoms'),
    'a converter of a user': ({'converter': lambda batch, device=None: batch}, 'CSRConverter'),
    'large molecules': ({'data': LARGE}, '64'),
    'random': ({'loss': lambda _, y, *batch: F.mean(y) * numpy.random.rand()}, 'random'),
    'of sparse batches': ({'loss': lambda self, y, x, adj, t: F.mean(y) * adj.n_graphs}, 'n_gr'),
}
# Wrong examples are for the converter to refuse.
for i, batch in enumerate(([], [1], [(numpy.int32(1), 2)], [(None,)])):
    CANNOT_BE_TOLD['wrong examples %d' % i] = {'data': batch}, ''


@pytest.mark.parametrize('name', CANNOT_BE_TOLD)
def test_what_cannot_be_told(name):
    given, reason = CANNOT_BE_TOLD[name]
    given = {'loss': ROWS['len(atoms)'], 'data': examples(), 'converter': CSRConverter(), **given}
    actual = check_swap(sparsify(Own(given['loss'])), given['data'], given['converter'])
    assert actual.equal is None and reason in actual.text


class Counting(Own):
    """A loss that leaves traces of every call."""

    def __init__(self):
        super().__init__(EQUAL['a lazy layer'])
        self.n_calls = 0
        self.losses = []
        self.array = numpy.zeros(3)

    def __call__(self, *batch):
        self.n_calls += 1
        self.array += 1
        random.random()
        numpy.random.uniform()
        warnings.warn('a call', stacklevel=2)
        loss = super().__call__(*batch)
        self.losses.append(loss)
        return loss


def test_it_leaves_no_trace():
    model = sparsify(Counting())
    classes = [type(link) for link in model.links()]
    for param in model.params():
        param.grad = numpy.full_like(param.array, 7) if param.is_initialized else None
    before = numpy.random.get_state()[1].tolist(), random.getstate(), dict(vars(model))
    reporter = chainer.Reporter()
    with warnings.catch_warnings(), reporter:
        warnings.simplefilter('error')
        assert check_swap(model, examples()).equal
    assert before == (numpy.random.get_state()[1].tolist(), random.getstate(), dict(vars(model)))
    assert model.n_calls == 0 and not model.losses and not model.array.any()
    assert not reporter.observation
    assert [type(link) for link in model.links()] == classes
    assert model.late.W.array is None
    assert all((param.grad == 7).all() for param in model.params(include_uninit=False))


def test_what_a_loss_refers_to_stays():
    """Counters, generators, and models in closures, default arguments and attributes."""
    model = sparsify(set_up_predictor('rsgcn', 8, 2, 1))
    count: dict = {'n': 0, 'list': []}
    noise = numpy.random.default_rng(0)
    holder = types.SimpleNamespace(model=model)
    before = noise.bit_generator.state

    def loss(atoms, adj, t, m=model):
        count['n'] += 1
        count['list'].append(1)
        noise.normal()
        return squares(m(atoms, adj), t) / len(t) + F.mean(holder.model(atoms, adj))

    for param in model.params(include_uninit=False):
        param.grad = numpy.full_like(param.array, 7)
    attributes = dict(vars(model))
    assert check_swap(model, one_relation(examples()), loss_func=loss).equal
    assert count == {'n': 0, 'list': []} and vars(model) == attributes
    assert noise.bit_generator.state == before
    weighted = Regressor(
        model,
        lossfun=lambda y, t: (
            F.mean_squared_error(y, t) + sum(F.sum(param**2) for param in model.params())
        ),
        metrics_fun={'n': lambda y, t: count.update(n=9) or F.mean(y)},
    )
    assert check_swap(weighted, one_relation(examples())).equal
    assert count['n'] == 0
    assert all((param.grad == 7).all() for param in model.params(include_uninit=False))


COUNT = {'n': 0}


class ReadsGlobal(Own):
    def __call__(self, *batch):
        COUNT['n'] += 1
        return super().__call__(*batch)


def test_what_is_not_copied():
    model = sparsify(ReadsGlobal(EQUAL['a mean of y']))
    actual = check_swap(model, examples())
    assert actual.equal is None and 'reads the global COUNT, a dict' in actual.text
    assert not COUNT['n']
    model = sparsify(Own(EQUAL['a mean of y']))
    model.data = [examples() for _ in range(1000)]
    actual = check_swap(model, examples())
    assert actual.equal is None and 'much data' in actual.text


def test_large_molecules_take_no_time():
    sizes = 100, 64, 60, 40, 30
    actual = [(*e[:2], numpy.ones(1, 'f')) for e in molecules(sizes, 'relations', 4)]
    model = sparsify(Own(EQUAL['a mean of y'], 'relgat'))
    start = time.perf_counter()
    assert check_swap(model, actual).equal
    assert time.perf_counter() - start < 2  # a batch of all takes much longer
    actual += [(*e[:2], numpy.ones(1, 'f')) for e in molecules((3, 7, 9, 11), 'relations', 4)]
    assert check_swap(model, actual).equal


def test_models_that_were_dense_or_hold_what_cannot_be_copied():
    dense = Regressor(set_up_predictor('ggnn', 8, 2, 1), lossfun=F.mean_squared_error)
    assert check_swap(dense, examples()).equal is None
    model = sparsify(Own(EQUAL['NaN']))
    model.file = (i for i in range(3))
    actual = check_swap(model, examples())
    assert actual.equal is None and 'copied' in actual.text


def test_a_readout_of_our_own_functions_cannot_be_told():
    model = Layers(GGNNUpdate(8, 8), F.mean)
    sparsify(model)
    model.reduce = lambda h: F.mean(functions.segment_sum(h, numpy.array([0, len(h)], 'i')))
    assert check_swap(model, examples()).equal is None
