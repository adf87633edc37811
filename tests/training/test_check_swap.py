"""`check_swap` is silent if nothing differs, names a difference, and leaves no trace."""

import random
import time
import types
import warnings

import numpy
import pytest

from chainer_bspmm.dataset import from_smiles, to_sparse  # repairs Chainer first
import chainer
from chainer import functions as F, links as L
from chainer_chemistry.links import EmbedAtomID, GeneralReadout, GGNNUpdate
from chainer_chemistry.models import RSGCN
from chainer_chemistry.models.prediction import GraphConvPredictor, Regressor, set_up_predictor

from chainer_bspmm import BatchedCSR, CSRConverter, functions, sparsify
from chainer_bspmm.training import check_swap
from chainer_bspmm.training.check_swap import _not_too_large
from tests.support import parity
from tests.support.devices import slow_unless
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
    """A user's Chain around a predictor; `loss` is a function of self, y, and the batch."""

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
    is_quick = case is parity.DEFAULTS[case.model] and case.model in parity.QUICK_MODELS
    return slow_unless(is_quick, case, id='%s %s' % (case.model, case.options))


@pytest.mark.parametrize('case', list(map(param, parity.CASES)))
def test_every_model_is_equal(case):
    actual = parity.examples_of(case)
    model = parity.initialised(case.make, actual)
    sparsify(model)

    def loss(*batch):
        y = model(*batch)
        return F.sum(y * y) / y.shape[0]

    # With features of atoms, a user's loss has the dense model's value only in padded batches.
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
    'random': lambda self, y, x, adj, t: F.mean(y) * numpy.random.rand() * random.random(),
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
    for seed in range(20):  # on some machines every fourth one jumps to another row
        numpy.random.seed(seed)
        model = RSGCN(8, hidden_channels=8, n_update_layers=2, readout=GeneralReadout(mode='max'))
        own = Own(lambda self, y, x, adj, t: F.mean((y - t) ** 2))
        own.predictor = GraphConvPredictor(sparsify(model), L.Linear(8, 1))
        assert check_swap(own, actual).equal is not False


def test_no_model():
    with pytest.raises(TypeError, match='model: expected a chainer.Link, got NoneType'):
        check_swap(None, examples())


class Layers(chainer.Chain):
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
    """The converter takes labels of atoms for a column of atoms, so rows are added to them."""
    actual = [(*example[:2], numpy.arange(len(example[0]), dtype='f')) for example in examples()]
    model = sparsify(Own(lambda self, y, x, adj, t: F.mean(y) * numpy.float32(t.mean())))
    assert check_swap(model, actual).equal is False


def test_sparse_and_padded_data_sets():
    model = sparsify(Own(ROWS['len(atoms)']))
    actual = to_sparse(examples())
    assert check_swap(model, actual).equal is False
    assert check_swap(model, actual[:7], CSRConverter(padded_to=20)).equal is False
    right = sparsify(Own(EQUAL['its molecules']))
    assert check_swap(right, actual, CSRConverter(padded_to=20)).equal
    assert check_swap(right, examples(), CSRConverter('padded')).equal


CANNOT_BE_TOLD = {
    'packed': (
        {'converter': CSRConverter('packed')},
        "packed batches have no phantom atoms, unlike upstream's",
    ),
    'padded to few': (
        {'converter': CSRConverter(padded_to=2)},
        'molecules have more atoms than padded_to',
    ),
    'a converter of a user': (
        {'converter': lambda batch, device=None: batch},
        'the converter is not a CSRConverter',
    ),
    'random': (
        {'loss': lambda _, y, x, *batch: F.mean(y) * numpy.random.normal(size=x.shape).mean()},
        'the loss is random',
    ),
    'NaN': (
        {'loss': lambda _, y, *batch: F.mean(y) * numpy.float32('nan')},
        'the loss is nan with both',
    ),
    'of sparse batches': (
        {'loss': lambda self, y, x, adj, t: F.mean(y) * adj.n_graphs},
        'the swapped or the dense model does not run on this batch: '
        """AttributeError("'numpy.ndarray' object has no attribute 'n_graphs'")""",
    ),
}
# Refusing wrong examples is left to the converter.
for i, batch in enumerate(([], [1], [(numpy.int32(1), 2)], [(None,)])):
    CANNOT_BE_TOLD['wrong examples %d' % i] = {'data': batch}, None


@pytest.mark.parametrize('name', CANNOT_BE_TOLD)
def test_what_cannot_be_told(name):
    given, reason = CANNOT_BE_TOLD[name]
    given = {'loss': ROWS['len(atoms)'], 'data': examples(), 'converter': CSRConverter(), **given}
    actual = check_swap(sparsify(Own(given['loss'])), given['data'], given['converter'])
    assert actual.equal is None and reason in (None, actual.text)


def test_a_model_that_cannot_be_copied():
    model = sparsify(Own(EQUAL['its molecules']))
    model.numbers = (i for i in range(3))
    found = check_swap(model, examples())
    assert found.equal is None
    assert found.text.startswith('the model cannot be copied to the host: TypeError(')


class Counting(Own):
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
    """A model that a loss reads from a closure, a default or an attribute is left as it was."""
    model = sparsify(set_up_predictor('rsgcn', 8, 2, 1))
    holder = types.SimpleNamespace(model=model)

    def loss(atoms, adj, t, m=model):
        return squares(m(atoms, adj), t) / len(t) + F.mean(holder.model(atoms, adj))

    for param in model.params(include_uninit=False):
        param.grad = numpy.full_like(param.array, 7)
    attributes = dict(vars(model))
    kinds = [type(link) for link in model.links()]
    assert check_swap(model, one_relation(examples()), loss_func=loss).equal
    assert vars(model) == attributes and [type(link) for link in model.links()] == kinds
    weighted = Regressor(
        model,
        lossfun=lambda y, t: (
            F.mean_squared_error(y, t) + sum(F.sum(param**2) for param in model.params())
        ),
    )
    assert check_swap(weighted, one_relation(examples())).equal
    assert all((param.grad == 7).all() for param in model.params(include_uninit=False))


def test_a_loss_that_is_right_and_a_reported_number_that_is_wrong():
    def loss(self, y, x, adj, t):
        chainer.report({'mae': F.sum(abs(y - t)) / len(x)}, self)
        return F.mean_squared_error(y, t)

    actual = check_swap(sparsify(Own(loss)), examples())
    assert actual.equal is False and actual.loss == pytest.approx(actual.dense_loss)
    assert '; main/mae is off by' in actual.text and 'use len(t)' in actual.text


@pytest.mark.parametrize('is_after', [False, True])
def test_a_gradient_that_only_one_of_both_has(is_after):
    """The loss is the same, but a parameter has a gradient only before or only after the swap."""

    def loss(self, y, x, adj, t):
        error = F.mean_squared_error(y, t)
        is_swapped = isinstance(adj, BatchedCSR)
        return error + F.sum(self.weight - 2) if is_swapped == is_after else error

    actual = check_swap(sparsify(Own(loss)), examples())
    assert actual.equal is False and actual.loss == pytest.approx(actual.dense_loss)
    assert '; the gradient of /weight is off by ' in actual.text


def test_padded_to_and_len_of_atoms():
    actual = check_swap(sparsify(Own(ROWS['len(atoms)'])), examples(), CSRConverter(padded_to=20))
    assert actual.equal is False and 'use len(t) or adj.n_graphs' in actual.text
    model = sparsify(Layers(GGNNUpdate(8, 8), F.mean))
    actual = check_swap(model, examples(), CSRConverter(padded_to=20))
    assert 'chainer_bspmm.functions.segment_sum. See docs' in actual.text


def test_the_largest_molecules_are_left_out():
    sizes = 600, 30, 500, 64, 60
    left = _not_too_large([(numpy.ones(n), None, numpy.ones(1)) for n in sizes])
    assert [len(atoms) for atoms, *_ in left] == [30, 60, 64]


def test_a_few_of_large_molecules():
    sizes = 600, 64, 60, 500, 30
    actual = [(*e[:2], numpy.ones(1, 'f')) for e in molecules(sizes, 'relations', 4)]
    model = sparsify(Own(EQUAL['a mean of y']))
    start = time.perf_counter()
    assert check_swap(model, actual).equal
    assert time.perf_counter() - start < 5  # a batch of all takes much longer


def test_models_that_were_dense_or_hold_what_cannot_be_copied():
    dense = Regressor(set_up_predictor('ggnn', 8, 2, 1), lossfun=F.mean_squared_error)
    assert check_swap(dense, examples()).equal is None
    model = sparsify(Own(EQUAL['a mean of y']))
    model.file = (i for i in range(3))
    actual = check_swap(model, examples())
    assert actual.equal is None and 'copied' in actual.text


def test_a_readout_of_our_own_functions_cannot_be_told():
    model = Layers(GGNNUpdate(8, 8), F.mean)
    sparsify(model)
    model.reduce = lambda h: F.mean(functions.segment_sum(h, numpy.array([0, len(h)], 'i')))
    assert check_swap(model, examples()).equal is None
